/* One process with one engine that moves data without a pause while links, peers and addresses
 * come and go. It compares every byte of every transfer, and every notification: exactly once,
 * after its data, none of a transfer that failed.
 *
 * usage: storm NAME id=N nics=DEVICES [dir=/tmp] [bytes=N] [seed=N] [e.KEY=VALUE]
 *   id     0 to 7, another for each process; bytes: the region. Its first quarter is for others'
 *          streams, the second for others' bulks, the third and fourth are for its own;
 *          dir: where the processes find each other
 * Commands, one a line; each is answered by one line, "ok ..." or "error ...":
 *   meet NAME            loads that process's card, connects; once more: it was restarted
 *   watch NAME           a peer that dialled us; its events can be awaited then
 *   go NAME WORDS        begins: streams=4 slot=262144 at=0 (place in the peer's region) notif=200
 *                        (every other stream, which waits until the peer heard it) op=both
 *   rest [NAME] [within=20]   posts nothing more (to it), waits until all ended, then as sum
 *   mark                 counters and clock start anew
 *   sum [NAME]           ok ms= done= failed= first=STATUS others=LIST longest_ms= unheard=
 *                        heard_ms= gap_ms= stalled_ms= (longest and sum of what it did not run)
 *   await WHAT [within=20]   since mark; ok ms=...: when it was so. WHAT, one of these:
 *                        done=N, failed=N: each stream so often; of peer=NAME, or all
 *                        gone=NAME, up=NAME, down=N, back=N, dark=1, light=1: events
 *                        carries=RAIL: 256 KiB from now on
 *   bulk NAME op=read count=1024 [posted=1]   blocks of 64 KiB in one transfer; rails=..
 *                        posted=1: an ok also once it is posted
 *   rails, state NAME, stale NAME, quit
 * The program ends with an error at the first byte or notification that is not as it must be.
 */
#define _GNU_SOURCE
#include "storm_moves.h"

/* ---- words ---- */

/* The value of KEY=... among the words, or `otherwise`. */
static const char *text_of(const char *words, const char *key, const char *otherwise) {
    static char copy[8][64];
    static unsigned turn;
    char *out = copy[turn++ % 8];
    size_t n = strlen(key);
    for (const char *at = words; at && *at; at = strchr(at, ' ') ? strchr(at, ' ') + 1 : NULL) {
        if (strncmp(at, key, n) != 0 || at[n] != '=') continue;
        snprintf(out, 64, "%.*s", (int)strcspn(at + n + 1, " "), at + n + 1);
        return out;
    }
    return otherwise;
}

static uint64_t number_of(const char *words, const char *key, uint64_t otherwise) {
    const char *text = text_of(words, key, NULL);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static struct flow *flow_of(const char *name) {
    size_t n = strcspn(name, " ");
    for (int i = 0; i < me.flows; i++)
        if (strlen(me.flow[i].name) == n && strncmp(me.flow[i].name, name, n) == 0)
            return &me.flow[i];
    return NULL;
}

/* ---- commands ---- */

static void meet(const char *name) {
    struct flow *f = flow_of(name);
    struct invitation *in;
    char path[64];
    bool again = f != NULL;
    if (!f) {
        NEED(me.flows < MAX_FLOWS);
        f = &me.flow[me.flows++];
        snprintf(f->name, NAME_LEN, "%.*s", (int)strcspn(name, " "), name);
    } else {
        for (int i = 0; i < me.streams; i++)
            if (me.stream[i].flow == f && me.stream[i].phase == FLYING)
                die("meet %s while transfers with it are in flight", f->name);
        f->kept_region = f->region;
        f->kept_card = f->card;
    }
    read_card(me.dir, f->name, &f->card);
    in = &f->card.invitation;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", f->card.pid, f->card.fd);
    int fd = open(path, O_RDWR);
    NEED(fd >= 0);
    f->memory = map_file(fd, f->card.bytes);
    close(fd);
    double begin = now();
    MUST(kvr_peer_add(me.engine, in->engine, in->engine_len, f->name, strlen(f->name), &f->peer));
    MUST(kvr_peer_connect(me.engine, f->peer, 10000));
    MUST(kvr_region_import(me.engine, f->peer, in->region, in->region_len, &f->region));
    kvr_desc h = {(uintptr_t)me.memory, 64, 0, me.region}, t = {in->base, 64, 0, f->region};
    if (!again)
        MUST(kvr_transfer_prepare_descs(me.engine, KVR_READ, f->peer, &h, 1, &t, 1, &f->kept));
    printf("ok ms=%.0f\n", (now() - begin) * 1e3);
}

/* What belongs to a peer's former life is of no use any more, each thing with an error. */
static void stale(const char *name) {
    struct flow *f = flow_of(name);
    NEED(f && f->kept_region);
    struct invitation *old = &f->kept_card.invitation;
    kvr_desc h = {(uintptr_t)me.memory, 64, 0, me.region}, t = {old->base, 64, 0, f->kept_region};
    kvr_transfer made = 0;
    kvr_region imported = 0;
    kvr_status posted = kvr_transfer_post(me.engine, f->kept, NULL, 0);
    kvr_status prepared =
        kvr_transfer_prepare_descs(me.engine, KVR_READ, f->peer, &h, 1, &t, 1, &made);
    kvr_status import =
        kvr_region_import(me.engine, f->peer, old->region, old->region_len, &imported);
    kvr_status released = kvr_transfer_release(me.engine, f->kept);
    bool good = posted < 0 && prepared < 0 && import < 0 && released == KVR_OK;
    printf("%s post=%d prepare=%d import=%d release=%d\n", good ? "ok" : "error", posted, prepared,
           import, released);
    f->kept = 0;
}

static void go(const char *words) {
    struct flow *f = flow_of(words);
    const char *op = text_of(words, "op", "both");
    uint64_t streams = number_of(words, "streams", 4), at = number_of(words, "at", 0);
    size_t slot = number_of(words, "slot", 262144), own = me.bytes / 2;
    NEED(f);
    /* Streams of an earlier go with this peer are used again. */
    int used = 0;
    for (int i = 0; i < me.streams; i++) {
        if (me.stream[i].flow == f) used++;
        else own += me.stream[i].slot;
    }
    f->op = strcmp(op, "both") == 0 ? 2 : strcmp(op, "write") == 0;
    f->notif = number_of(words, "notif", 200);
    NEED(f->notif == 0 || f->notif >= sizeof(struct note));
    for (uint64_t i = 0; i < streams && used == 0; i++) {
        NEED(me.streams < MAX_STREAMS);
        struct stream *s = &me.stream[me.streams];
        unsigned char *copies = calloc(6, slot);
        NEED(copies && own + slot <= me.bytes / 4 * 3 && at + slot <= f->card.bytes / 4);
        struct stream fresh = {.flow = f, .id = me.streams++, .here = own, .there = at,
                               .slot = slot, .old_here = copies, .must_here = copies + slot,
                               .old_there = copies + 2 * slot, .must_there = copies + 3 * slot,
                               .past_here = copies + 4 * slot, .past_there = copies + 5 * slot};
        *s = fresh;
        own += slot;
        at += slot;
    }
    f->held = false;
    printf("ok\n");
}

static void mark(void) {
    me.mark = now();
    me.gap = me.stalled = 0;
    for (int i = 0; i < me.flows; i++) {
        struct flow *f = &me.flow[i];
        f->done = f->failed = f->unheard = 0;
        f->first = 0;
        f->longest = f->latest = 0;
        memset(f->others, 0, sizeof f->others);
    }
    for (int i = 0; i < me.streams; i++) {
        struct stream *s = &me.stream[i];
        s->done = s->failed = 0;
        s->first_failed = 0;
    }
}

static void rail_words(char *text, size_t room, uint64_t *before) {
    size_t n = 0;
    text[0] = 0;
    for (uint32_t i = 0; i < MAX_RAILS && n < room; i++) {
        kvr_rail_info info = {.struct_size = sizeof info};
        if (kvr_rail_info_get(me.engine, i, &info) < 0) break;
        uint64_t bytes = info.bytes_read + info.bytes_written;
        n += (size_t)snprintf(text + n, room - n, "%s%s=%lu", i ? "," : "", info.name,
                              bytes - before[i]);
        before[i] = bytes;
    }
}

static void sum(const char *name) {
    uint64_t done = 0, failed = 0, unheard = 0, others[64] = {0};
    double longest = 0, latest = 0;
    int first = 0;
    char list[TEXT] = "";
    size_t n = 0;
    for (int i = 0; i < me.flows; i++) {
        const struct flow *f = &me.flow[i];
        if (*name && flow_of(name) != f) continue;
        done += f->done;
        failed += f->failed;
        unheard += f->unheard;
        if (f->first) first = f->first;
        if (f->longest > longest) longest = f->longest;
        if (f->latest > latest) latest = f->latest;
        for (int k = 0; k < 64; k++) others[k] += f->others[k];
    }
    for (int k = 0; k < 64; k++)
        if (others[k])
            n += (size_t)snprintf(list + n, TEXT - n, "%s-%d:%lu", n ? "," : "", k, others[k]);
    printf("ok ms=%.0f done=%lu failed=%lu first=%d others=%s longest_ms=%.0f unheard=%lu "
           "heard_ms=%.0f gap_ms=%.0f stalled_ms=%.0f\n",
           (now() - me.mark) * 1e3, done, failed, first, list, longest * 1e3, unheard,
           latest * 1e3, me.gap * 1e3, me.stalled * 1e3);
}

/* Seconds between two looks, above which something kept this process from running. */
static const double STALL = 0.02;

static void look_after(void) {
    double at = now(), gap = me.looked > 0 ? at - me.looked : 0;
    if (gap > me.gap) me.gap = gap;
    if (gap > STALL) me.stalled += gap;
    me.looked = at;
    MUST(kvr_notifs(me.engine, hear, NULL, NULL));
    for (int i = 0; i < me.streams; i++) step(&me.stream[i]);
}

static kvr_peer peer_of(const char *name) {
    const struct flow *f = flow_of(name);
    if (f) return f->peer;
    for (int i = me.watches - 1; i >= 0; i--)
        if (strcmp(me.watched[i].name, name) == 0) return me.watched[i].peer;
    die("peer %s is neither met nor watched", name);
}

static uint64_t rail_bytes(uint64_t rail) {
    kvr_rail_info info = {.struct_size = sizeof info};
    MUST(kvr_rail_info_get(me.engine, (uint32_t)rail, &info));
    return info.bytes_read + info.bytes_written;
}

/* Whether each stream (of that peer) did so often, and when the last of them failed first. */
static bool streams_did(const char *words, uint64_t done, uint64_t failed, double *at) {
    const char *name = text_of(words, "peer", NULL);
    const struct flow *f = name ? flow_of(name) : NULL;
    *at = 0;
    for (int i = 0; i < me.streams; i++) {
        const struct stream *s = &me.stream[i];
        if (name && s->flow != f) continue;
        if (s->done < done || s->failed < failed) return false;
        if (s->first_failed > *at) *at = s->first_failed;
    }
    if (!failed) *at = now() - me.mark;
    return true;
}

/* Whether what is awaited is so; `at`: when it came, in seconds since mark. */
static bool is_so(const char *words, uint64_t carried, double *at) {
    static const struct { const char *key; uint32_t kind; } kinds[] = {
        {"gone", KVR_EVENT_PEER_GONE}, {"up", KVR_EVENT_PEER_UP},
        {"down", KVR_EVENT_RAIL_DOWN}, {"back", KVR_EVENT_RAIL_UP},
        {"dark", KVR_EVENT_LINKS_DOWN}, {"light", KVR_EVENT_LINKS_UP}};
    const char *value = NULL;
    double first = now();
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (!(value = text_of(words, kinds[i].key, NULL))) continue;
        bool named = i < 2;
        size_t n = events_since(kinds[i].kind, named ? peer_of(value) : 0, me.mark, &first);
        *at = first - me.mark;
        return n >= (named ? 1 : strtoull(value, NULL, 10));
    }
    *at = now() - me.mark;
    if ((value = text_of(words, "carries", NULL)))
        return rail_bytes(strtoull(value, NULL, 10)) >= carried + 262144;
    return streams_did(words, number_of(words, "done", 0), number_of(words, "failed", 0), at);
}

static void await_what(const char *words) {
    const char *rail = text_of(words, "carries", NULL);
    uint64_t carried = rail ? rail_bytes(strtoull(rail, NULL, 10)) : 0;
    double at = 0, end = now() + (double)number_of(words, "within", 20);
    while (!is_so(words, carried, &at)) {
        if (now() > end) {
            printf("error not so after %.0f s: %s\n", now() - me.mark, words);
            return;
        }
        look_after();
        nap(500);
    }
    printf("ok ms=%.0f gap_ms=%.0f stalled_ms=%.0f\n", at * 1e3, me.gap * 1e3,
           me.stalled * 1e3);
}

static void rest(const char *words) {
    double end = now() + (double)number_of(words, "within", 20);
    const struct flow *only = flow_of(words);
    bool quiet = false;
    for (int i = 0; i < me.flows; i++) me.flow[i].held |= !only || only == &me.flow[i];
    while (!quiet) {
        look_after();
        quiet = true;
        for (int i = 0; i < me.streams; i++) 
            quiet &= (only && me.stream[i].flow != only) || me.stream[i].phase == RESTING;
        if (quiet) break;
        if (now() > end) {
            printf("error transfers in flight, or notifications not heard\n");
            return;
        }
        nap(500);
    }
    sum(only ? only->name : "");
}

/* One long transfer of 64 KiB blocks between the last quarter here and the second there, which no
 * stream uses. */
static void bulk(const char *words) {
    enum { BLOCK = 65536 };
    struct flow *f = flow_of(words);
    NEED(f);
    bool write = strcmp(text_of(words, "op", "read"), "write") == 0;
    uint64_t count = number_of(words, "count", 1024), before[MAX_RAILS] = {0};
    size_t room = me.bytes / 4, places = room / BLOCK;
    unsigned char *own = me.memory + 3 * room, *other = f->memory + room;
    kvr_desc *here = calloc(count, sizeof *here), *there = calloc(count, sizeof *there);
    kvr_transfer t = 0;
    char text[TEXT];
    NEED(here && there && f->card.bytes == me.bytes);
    fill(own, room);
    fill(other, room);
    for (uint64_t i = 0; i < count; i++) {
        size_t at = (places - 1 - i % places) * BLOCK;
        kvr_desc h = {(uintptr_t)own + at, BLOCK, 0, me.region};
        kvr_desc r = {f->card.invitation.base + room + at, BLOCK, 0, f->region};
        here[i] = h;
        there[i] = r;
    }
    MUST(kvr_transfer_prepare_descs(me.engine, write ? KVR_WRITE : KVR_READ, f->peer, here, count,
                                    there, count, &t));
    rail_words(text, sizeof text, before);
    double begin = now();
    kvr_status status = kvr_transfer_post(me.engine, t, NULL, 0);
    if (number_of(words, "posted", 0)) printf("ok\n");
    while (status == KVR_IN_PROGRESS && now() < begin + 30) {
        look_after();
        nap(500);
        status = kvr_transfer_check(me.engine, t);
    }
    MUST(kvr_transfer_release(me.engine, t));
    rail_words(text, sizeof text, before);
    size_t moved = (count < places ? count : places) * BLOCK;
    bool same = memcmp(own + room - moved, other + room - moved, moved) == 0;
    bool good = status == KVR_OK && same;
    printf("%s status=%d seconds=%.3f same=%d rails=%s\n", good ? "ok" : "error", status,
           now() - begin, same, text);
    free(here);
    free(there);
}

static void leave(void) {
    for (int i = 0; i < me.streams; i++)
        if (me.stream[i].phase == FLYING) die("quit while transfers are in flight: rest first");
    for (int i = 0; i < me.flows; i++) {
        if (me.flow[i].kept) MUST(kvr_transfer_release(me.engine, me.flow[i].kept));
        MUST(kvr_region_forget(me.engine, me.flow[i].region));
        MUST(kvr_peer_remove(me.engine, me.flow[i].peer));
    }
    MUST(kvr_region_deregister(me.engine, me.region, 0));
    MUST(kvr_engine_destroy(me.engine));
    printf("ok\n");
}

static void watch(const char *name) {
    NEED(me.watches < MAX_IDS);
    kvr_peer peer = 0;
    kvr_status s = kvr_peer_find(me.engine, name, strlen(name), &peer);
    if (s < 0) {
        printf("error %s\n", reason());
        return;
    }
    snprintf(me.watched[me.watches].name, NAME_LEN, "%s", name);
    me.watched[me.watches++].peer = peer;
    printf("ok\n");
}

/* False: it was the last one. */
static bool obey(char *line) {
    char *words = line + strcspn(line, " ");
    if (*words) *words++ = 0;
    if (strcmp(line, "meet") == 0) meet(words);
    else if (strcmp(line, "watch") == 0) watch(words);
    else if (strcmp(line, "go") == 0) go(words);
    else if (strcmp(line, "rest") == 0) rest(words);
    else if (strcmp(line, "sum") == 0) sum(words);
    else if (strcmp(line, "await") == 0) await_what(words);
    else if (strcmp(line, "bulk") == 0) bulk(words);
    else if (strcmp(line, "stale") == 0) stale(words);
    else if (strcmp(line, "state") == 0)
        printf("ok state=%d\n", kvr_peer_state(me.engine, peer_of(words)));
    else if (strcmp(line, "mark") == 0) {
        mark();
        printf("ok\n");
    } else if (strcmp(line, "rails") == 0) {
        char text[TEXT];
        uint64_t before[MAX_RAILS] = {0};
        rail_words(text, sizeof text, before);
        printf("ok rails=%s\n", text);
    } else if (strcmp(line, "quit") == 0) {
        leave();
        return false;
    } else die("unknown command '%s'", line);
    return true;
}

/* The next command, if there is one by now. */
static bool command(char *line, size_t room) {
    static char text[4096];
    static size_t have;
    struct pollfd in = {.fd = 0, .events = POLLIN};
    char *end = memchr(text, '\n', have);
    if (!end && poll(&in, 1, 1) == 1) {
        ssize_t n = read(0, text + have, sizeof text - have);
        if (n <= 0) die("standard input ended without quit");
        have += (size_t)n;
        end = memchr(text, '\n', have);
    }
    if (!end) return false;
    size_t len = (size_t)(end - text);
    NEED(len < room);
    memcpy(line, text, len);
    line[len] = 0;
    have -= len + 1;
    memmove(text, end + 1, have);
    return true;
}

int main(int argc, char **argv) {
    static char line[4096];
    const char *nics = NULL, *value = NULL;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc < 2) die("usage: storm NAME id=N nics=DEVICES [dir=] [bytes=] [seed=] [e.KEY=VALUE]");
    me.name = argv[1];
    me.dir = "/tmp";
    me.bytes = 16 << 20;
    me.random = 0x9e3779b97f4a7c15U ^ (uint64_t)time(NULL) << 16 ^ (uint64_t)getpid();
    for (int i = 2; i < argc; i++) {
        if (word_is(argv[i], "id", &value)) me.id = strtoull(value, NULL, 10);
        else if (word_is(argv[i], "nics", &value)) nics = value;
        else if (word_is(argv[i], "dir", &value)) me.dir = value;
        else if (word_is(argv[i], "bytes", &value)) me.bytes = strtoull(value, NULL, 10);
        else if (word_is(argv[i], "seed", &value)) me.random = strtoull(value, NULL, 10) | 1;
        else if (argv[i][1] != '.') die("unknown word '%s'", argv[i]);
    }
    if (me.id >= MAX_IDS || me.bytes % 131072) die("allowed: id 0 to 7, bytes in 128 KiB");
    fprintf(stderr, "[%.3f] storm %s: seed=%lu\n", now(), me.name, me.random);
    /* A process that was restarted goes on with higher numbers. */
    me.seq = (uint64_t)(now() * 1e6);
    me.card = (struct card){.pid = getpid(), .bytes = me.bytes};
    me.card.fd = memfd_create("storm", 0);
    NEED(me.card.fd >= 0);
    NEED(ftruncate(me.card.fd, (off_t)(me.bytes + sizeof(struct board))) == 0);
    me.memory = map_file(me.card.fd, me.bytes);
    me.board = board_of(me.memory, me.bytes);
    MUST(kvr_log_set(on_log, NULL));
    me.engine = make_engine(me.name, 'e', nics, argc - 2, argv + 2);
    MUST(kvr_set_event_fn(me.engine, on_event, NULL));
    struct invitation *in = &me.card.invitation;
    in->engine_len = BLOB;
    MUST(kvr_engine_metadata(me.engine, in->engine, &in->engine_len));
    MUST(kvr_region_register(me.engine, (uintptr_t)me.memory, me.bytes, KVR_MEM_HOST, &me.region));
    in->base = (uintptr_t)me.memory;
    in->region_len = BLOB;
    MUST(kvr_region_metadata(me.engine, me.region, in->region, &in->region_len));
    write_card(me.dir, me.name, &me.card);
    mark();
    printf("ok seed=%lu\n", me.random);
    for (;;) {
        look_after();
        if (command(line, sizeof line) && !obey(line)) return 0;
    }
}
