/* Moves random blocks between two processes through the C ABI and compares every byte.
 *
 * usage: mover here=DEVICES there=DEVICES [bytes=N] [targets=N] [mem=KIND] [seed=N] [a.KEY=VALUE]
 *              [b.KEY=VALUE]
 *   here, there  devices (KVRAIL_NICS) of the initiator and of the process that it starts
 *   bytes        registered on each side, default 16 MiB; targets: processes on the other side
 *   mem          host, or a part of a dma-buf on all sides: udmabuf, heap
 *   a., b.       parameters of the initiator's and of the targets' engines
 * Then it reads commands, one a line, and answers each with one line, "ok ..." or "error ...":
 *   read|write WORDS   one transfer. Words, with their defaults:
 *     count=64 min=1 max=65536  blocks and their bytes; here=packed, there=packed: without gaps
 *     slots=0     N: all blocks use the same N places of `max` bytes, from the last to the first
 *     parts=1     transfers that it is cut into, all posted before the first is awaited
 *     notif=0     bytes of a notification (1 to 65536), compared at the target, as is the data
 *     times=1     posted so often; expect=0: the status it ends in, or several as "0,-50"
 *     nap=100     microseconds between two looks at a transfer (a wake-up costs some)
 *     within=20   seconds; touch=all (an error: any) what may change: all, any, none; to=0 target
 *   notify count=1 size=1 to=0   messages alone, in order
 *   drop|renew [to=0]            the target withdraws its region; registers it again, imported here
 *   forge longer|keys [to=0]     a region twice as long; target 1's keys for target `to`'s region
 *   rails, quit
 * An answer to a transfer: ok status=S bytes=N seconds=F rails=NAME=BYTES,... post_us=F
 */
#define _GNU_SOURCE
#include "mover.h"

#include <sys/socket.h>
#include <sys/wait.h>

struct target {
    pid_t pid;
    int fd;
    struct memory memory;
    struct invitation invitation;
    kvr_peer peer;
    kvr_region region;
    uint64_t base;
};

struct job {
    uint64_t count, min, max, slots, parts, notif, times, to, size, nap;
    double within;
    bool here_packed, there_packed;
    const char *expect, *touch;
};

struct block {
    uint64_t here, there, len;
};

static struct {
    kvr_engine *engine;
    kvr_region region;
    struct memory memory;
    struct target target[MAX_TARGETS];
    int targets;
    uint64_t random, series;
} me;

/* ---- words ---- */

static struct job parse(char *words) {
    struct job job = {.count = 64, .min = 1, .max = 65536, .parts = 1, .times = 1, .size = 1,
                      .nap = 100, .within = 20, .expect = "0", .touch = NULL};
    const struct {
        const char *key;
        uint64_t *at;
    } numbers[] = {{"count", &job.count}, {"min", &job.min},     {"max", &job.max},
                   {"slots", &job.slots}, {"parts", &job.parts}, {"notif", &job.notif},
                   {"times", &job.times}, {"to", &job.to},       {"size", &job.size},
                   {"nap", &job.nap}};
    char *rest = NULL;
    for (char *word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        const char *value = NULL;
        bool known = false;
        for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
            if (!word_is(word, numbers[i].key, &value)) continue;
            *numbers[i].at = number(value);
            known = true;
        }
        if (known) continue;
        if (word_is(word, "within", &value)) job.within = atof(value);
        else if (word_is(word, "expect", &value)) job.expect = value;
        else if (word_is(word, "touch", &value)) job.touch = value;
        else if (strcmp(word, "here=packed") == 0) job.here_packed = true;
        else if (strcmp(word, "there=packed") == 0) job.there_packed = true;
        else die("unknown word '%s'", word);
    }
    if (job.to >= (uint64_t)me.targets) die("to=%lu; there are %d targets", job.to, me.targets);
    if (job.parts < 1 || job.parts > job.count) job.parts = job.count ? 1 : 0;
    return job;
}

/* ---- the other process ---- */

/* Words in front of those of main's, for a target: what start_target passes. */
enum { STARTS = 7 };

struct inbox {
    const struct request *request;
    uint64_t come;
    const char *wrong;
};

static void receive(void *ctx, const char *name, size_t name_len, const void *msg, size_t len) {
    struct inbox *in = ctx;
    const unsigned char *byte = msg;
    if (name_len != 4 || memcmp(name, "here", 4) != 0) in->wrong = "another sender's name";
    if (len != in->request->size) in->wrong = "another length";
    for (size_t i = 0; i < len && !in->wrong; i++)
        if (byte[i] != letter(in->request->series, in->come, i)) in->wrong = "other bytes";
    in->come++;
}

static void await_messages(kvr_engine *e, const struct request *request,
                           const struct memory *memory, struct answer *answer) {
    struct inbox in = {request, 0, NULL};
    double end = now() + 20;
    bool compared = !request->compare;
    while (in.come < request->count && now() < end && !in.wrong) {
        MUST(kvr_notifs(e, receive, &in, NULL));
        if (!compared && in.come > 0) {
            compared = true;
            if (memcmp(memory->now, memory->must, memory->bytes) != 0)
                in.wrong = "the notification came before its data";
        }
        nap(200);
    }
    answer->good = in.come == request->count && !in.wrong;
    snprintf(answer->text, TEXT, "%lu of %lu notifications, %s", in.come, request->count,
             in.wrong ? in.wrong : "as they must be");
}

static void export_region(kvr_engine *e, const struct memory *memory, kvr_region *region,
                          struct invitation *out) {
    *region = register_memory(e, memory);
    out->base = memory->base;
    out->region_len = BLOB;
    MUST(kvr_region_metadata(e, *region, out->region, &out->region_len));
}

static int target(int words, char **word, int fd, struct memory memory, const char *nics,
                  const char *name) {
    static struct answer answer;
    struct request request;
    kvr_region region = 0;
    kvr_engine *e = make_engine(name, 'b', nics, words, word);
    while (receive_all(fd, &request, sizeof request)) {
        memset(&answer, 0, sizeof answer);
        answer.good = 1;
        switch (request.kind) {
        case INVITE:
            answer.invitation.engine_len = BLOB;
            MUST(kvr_engine_metadata(e, answer.invitation.engine, &answer.invitation.engine_len));
            /* fall through */
        case RENEW:
            export_region(e, &memory, &region, &answer.invitation);
            break;
        case DROP:
            MUST(kvr_region_deregister(e, region, 0));
            region = 0;
            break;
        case AWAIT:
            await_messages(e, &request, &memory, &answer);
            break;
        default: /* LEAVE */
            if (region) MUST(kvr_region_deregister(e, region, 0));
            MUST(kvr_engine_destroy(e));
            send_all(fd, &answer, sizeof answer);
            return 0;
        }
        send_all(fd, &answer, sizeof answer);
    }
    return 1;
}

static void tell(struct target *t, struct request request) {
    send_all(t->fd, &request, sizeof request);
}

static struct answer *hear(struct target *t) {
    static struct answer answer;
    if (!receive_all(t->fd, &answer, sizeof answer)) die("the other process ended");
    return &answer;
}

/* Starts a target: this program once more. An engine does not survive fork(), so nothing but exec
 * comes after it. */
static void start_target(struct target *t, int index, int argc, char **argv, size_t bytes,
                         const char *kind) {
    int ends[2], dmabuf = buffer_of(kind, bytes);
    char fd[16], file[16], buffer[16], size[32], name[16];
    char **args = calloc((size_t)argc + STARTS, sizeof *args);
    NEED(args);
    int shared = memfd_create("mover", 0);
    NEED(shared >= 0 && ftruncate(shared, (off_t)(3 * bytes)) == 0);
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    snprintf(fd, sizeof fd, "%d", ends[1]);
    snprintf(file, sizeof file, "%d", shared);
    snprintf(buffer, sizeof buffer, "%d", dmabuf);
    snprintf(size, sizeof size, "%zu", bytes);
    snprintf(name, sizeof name, "there%d", index);
    char *first[STARTS] = {argv[0], "target", fd, file, buffer, size, name};
    memcpy(args, first, sizeof first);
    memcpy(args + STARTS, argv + 1, ((size_t)argc - 1) * sizeof *args);
    t->pid = fork();
    NEED(t->pid >= 0);
    if (t->pid == 0) {
        close(ends[0]);
        execv("/proc/self/exe", args);
        _exit(127);
    }
    free(args);
    close(ends[1]);
    t->fd = ends[0];
    t->memory = map_memory(shared, dmabuf, bytes);
    close(shared);
}

static void join(struct target *t, int index) {
    char name[16];
    snprintf(name, sizeof name, "there%d", index);
    tell(t, (struct request){.kind = INVITE});
    t->invitation = hear(t)->invitation;
    t->base = t->invitation.base;
    MUST(kvr_peer_add(me.engine, t->invitation.engine, t->invitation.engine_len, name,
                      strlen(name), &t->peer));
    MUST(kvr_peer_connect(me.engine, t->peer, 10000));
    MUST(kvr_region_import(me.engine, t->peer, t->invitation.region, t->invitation.region_len,
                           &t->region));
}

/* ---- transfers ---- */

static void shuffle(uint32_t *order, size_t n) {
    for (size_t i = n; i > 1; i--) {
        size_t j = below(&me.random, i);
        uint32_t swap = order[i - 1];
        order[i - 1] = order[j];
        order[j] = swap;
    }
}

/* Places for all blocks on one side: in random order with random gaps, or packed one behind the
 * other as they come. */
static void place(struct block *block, const struct job *job, bool there, uint64_t spare) {
    uint32_t *order = malloc(job->count * sizeof *order + 1);
    bool packed = there ? job->there_packed : job->here_packed;
    uint64_t at = 0;
    NEED(order);
    for (size_t i = 0; i < job->count; i++) order[i] = (uint32_t)i;
    if (!packed) shuffle(order, job->count);
    for (size_t i = 0; i < job->count; i++) {
        struct block *b = &block[order[i]];
        uint64_t gap = packed || i % 4 == 0 ? 0 : below(&me.random, 1 + spare / (job->count - i));
        at += gap;
        spare -= gap;
        *(there ? &b->there : &b->here) = at;
        at += b->len;
    }
    free(order);
}

static struct block *layout(const struct job *job, uint64_t *total) {
    struct block *block = calloc(job->count + 1, sizeof *block);
    NEED(block);
    *total = 0;
    for (size_t i = 0; i < job->count; i++) {
        block[i].len = job->min + below(&me.random, job->max - job->min + 1);
        block[i].here = block[i].there = (job->slots ? job->slots - 1 - i % job->slots : 0) *
                                         job->max;
        *total += block[i].len;
    }
    uint64_t need = job->slots ? job->slots * job->max : *total;
    if (need > me.memory.bytes) die("%lu bytes wanted, of %zu", need, me.memory.bytes);
    if (!job->slots) {
        place(block, job, false, me.memory.bytes - *total);
        place(block, job, true, me.memory.bytes - *total);
    }
    return block;
}

static void what_must_be(const struct job *job, bool write, const struct block *block) {
    struct memory *there = &me.target[job->to].memory;
    refill(&me.memory, &me.random);
    refill(there, &me.random);
    for (size_t i = 0; i < job->count; i++) {
        const struct block *b = &block[i];
        if (write) memcpy(there->must + b->there, me.memory.old + b->here, b->len);
        else memcpy(me.memory.must + b->here, there->old + b->there, b->len);
    }
}

static void prepare(const struct job *job, bool write, const struct block *block,
                    kvr_transfer *part) {
    const struct target *t = &me.target[job->to];
    kvr_desc *here = calloc(job->count + 1, sizeof *here);
    kvr_desc *there = calloc(job->count + 1, sizeof *there);
    NEED(here && there);
    for (size_t i = 0; i < job->count; i++) {
        kvr_desc h = {me.memory.base + block[i].here, block[i].len, 0, me.region};
        kvr_desc r = {t->base + block[i].there, block[i].len, 0, t->region};
        here[i] = h;
        there[i] = r;
    }
    for (size_t i = 0; i < job->parts; i++) {
        size_t from = i * job->count / job->parts, to = (i + 1) * job->count / job->parts;
        MUST(kvr_transfer_prepare_descs(me.engine, write ? KVR_WRITE : KVR_READ, t->peer,
                                        here + from, to - from, there + from, to - from,
                                        &part[i]));
    }
    free(here);
    free(there);
}

/* Posts all parts and awaits them: the worst status, or KVR_IN_PROGRESS when the time is over. */
static kvr_status carry(const struct job *job, kvr_transfer *part, const unsigned char *message,
                        double *post_seconds) {
    double begin = now();
    kvr_status worst = KVR_OK;
    for (size_t i = 0; i < job->parts; i++) {
        kvr_status s = kvr_transfer_post(me.engine, part[i], message,
                                         message ? job->notif : 0);
        if (s < 0) return s;
    }
    *post_seconds += now() - begin;
    for (size_t i = 0; i < job->parts; i++) {
        kvr_status s;
        while ((s = kvr_transfer_check(me.engine, part[i])) == KVR_IN_PROGRESS) {
            if (now() > begin + job->within) return KVR_IN_PROGRESS;
            nap((long)job->nap);
        }
        if (s < worst) worst = s;
    }
    return worst;
}

static bool listed(const char *list, kvr_status status) {
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (atoi(at) == status) return true;
    return false;
}

static const char *judge(const struct job *job, kvr_status status) {
    static char text[TEXT];
    const char *touch = job->touch ? job->touch : status == KVR_OK ? "all" : "any";
    const struct memory *sides[] = {&me.memory, &me.target[job->to].memory};
    if (!listed(job->expect, status)) {
        snprintf(text, sizeof text, "status %d (%s), allowed: %s", status, kvr_strerror(status),
                 job->expect);
        return text;
    }
    for (int i = 0; i < 2; i++) {
        const struct memory *m = sides[i];
        const char *side = i ? "the target's" : "the own";
        if (edges_touched(m)) {
            snprintf(text, sizeof text, "bytes around %s registered part changed", side);
            return text;
        }
        if (strcmp(touch, "any") == 0) {
            size_t bad = strange_bytes(m);
            if (!bad) continue;
            snprintf(text, sizeof text, "%zu bytes of %s memory are strange", bad, side);
            return text;
        }
        const unsigned char *right = strcmp(touch, "none") == 0 ? m->old : m->must;
        size_t at = 0;
        while (at < m->bytes && m->now[at] == right[at]) at++;
        if (at == m->bytes) continue;
        snprintf(text, sizeof text, "%s memory differs from byte %zu on", side, at);
        return text;
    }
    return NULL;
}

/* Writes NAME=BYTES of every rail: those since `before`, unless NULL; then stores the counters. */
static void rails(char *text, size_t room, uint64_t *before) {
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

static void transfer(bool write, char *words) {
    struct job job = parse(words);
    struct target *t = &me.target[job.to];
    uint64_t total = 0, before[MAX_RAILS] = {0};
    char counters[TEXT];
    static unsigned char message[KVR_MESSAGE_MAX];
    struct block *block = layout(&job, &total);
    kvr_transfer *part = calloc(job.parts + 1, sizeof *part);
    double took = 0, posts = 0;
    kvr_status status = KVR_OK;
    const char *wrong = NULL;
    NEED(part && job.notif <= sizeof message);
    /* After an error all rails may be gone, and the connection with them: it is dialled again. */
    MUST(kvr_peer_connect(me.engine, t->peer, 10000));
    what_must_be(&job, write, block);
    prepare(&job, write, block, part);
    rails(counters, sizeof counters, before);
    me.series++;
    for (size_t i = 0; i < job.notif; i++) message[i] = letter(me.series, 0, i);
    if (job.notif)
        tell(t, (struct request){AWAIT, job.parts == 1, me.series, 1, job.notif});
    for (size_t i = 0; i < job.times && status == KVR_OK; i++) {
        double begin = now();
        bool last = i + 1 == job.times;
        status = carry(&job, part, last && job.notif ? message : NULL, &posts);
        took += now() - begin;
    }
    if (job.notif) {
        struct answer *answer = hear(t);
        if (!answer->good) wrong = answer->text;
    }
    for (size_t i = 0; i < job.parts; i++) {
        kvr_status s = kvr_transfer_release(me.engine, part[i]);
        if (s != KVR_OK) wrong = reason();
    }
    if (!wrong) wrong = judge(&job, status);
    rails(counters, sizeof counters, before);
    if (wrong)
        printf("error %s (status %d, %s, after %.3f s; rails=%s)\n", wrong, status,
               kvr_strerror(status), took, counters);
    else
        printf("ok status=%d bytes=%lu seconds=%.6f rails=%s post_us=%.0f\n", status,
               total * job.times, took, counters, posts * 1e6);
    free(part);
    free(block);
}

/* ---- other commands ---- */

static void notify(char *words) {
    struct job job = parse(words);
    struct target *t = &me.target[job.to];
    static unsigned char message[KVR_MESSAGE_MAX];
    NEED(job.size <= sizeof message);
    me.series++;
    tell(t, (struct request){AWAIT, 0, me.series, job.count, job.size});
    double begin = now();
    for (size_t k = 0; k < job.count; k++) {
        kvr_status s;
        for (size_t i = 0; i < job.size; i++) message[i] = letter(me.series, k, i);
        while ((s = kvr_notify(me.engine, t->peer, message, job.size)) == KVR_ERR_CAPACITY &&
               now() < begin + job.within)
            nap(500);
        if (s < 0) die("notification %zu: %s", k, reason());
    }
    struct answer *answer = hear(t);
    printf("%s %s in %.3f s\n", answer->good ? "ok" : "error", answer->text, now() - begin);
}

/* The body of a record of a region blob: 12 bytes of header, then type u16, length u32, body. */
static unsigned char *record(struct invitation *in, uint16_t type) {
    for (size_t at = 12; at + 6 <= in->region_len;) {
        uint16_t kind;
        uint32_t len;
        memcpy(&kind, in->region + at, 2);
        memcpy(&len, in->region + at + 2, 4);
        if (kind == type) return in->region + at + 6;
        at += 6 + len;
    }
    die("a region blob has no record %u", type);
}

/* What no kvrail would hand out: a program that lies, or a blob that was broken on its way. */
static void forge(char *words) {
    enum { REGION_ID = 7, KEYS = 9, LEN_AT = 16, KEYS_AT = 4 };
    bool longer = strncmp(words, "longer", 6) == 0;
    struct job job = parse(words + strcspn(words, " "));
    struct target *t = &me.target[job.to];
    struct invitation false_one = t->invitation;
    if (longer) {
        uint64_t len = 2 * t->memory.bytes;
        memcpy(record(&false_one, REGION_ID) + LEN_AT, &len, sizeof len);
        t->base += t->memory.bytes; /* every block lies behind the end now */
    } else {
        if (me.targets < 2) die("forge keys needs 2 targets");
        struct invitation *other = &me.target[1].invitation;
        unsigned char *from = record(other, KEYS), *to = record(&false_one, KEYS);
        memcpy(to + KEYS_AT, from + KEYS_AT, from[1] * 4U);
    }
    MUST(kvr_region_forget(me.engine, t->region));
    MUST(kvr_region_import(me.engine, t->peer, false_one.region, false_one.region_len,
                           &t->region));
    printf("ok\n");
}

static void drop(char *words) {
    struct job job = parse(words);
    tell(&me.target[job.to], (struct request){.kind = DROP});
    hear(&me.target[job.to]);
    printf("ok\n");
}

static void renew(char *words) {
    struct job job = parse(words);
    struct target *t = &me.target[job.to];
    MUST(kvr_region_forget(me.engine, t->region));
    tell(t, (struct request){.kind = RENEW});
    struct invitation *fresh = &hear(t)->invitation;
    t->invitation.region_len = fresh->region_len;
    memcpy(t->invitation.region, fresh->region, fresh->region_len);
    t->base = fresh->base;
    MUST(kvr_region_import(me.engine, t->peer, fresh->region, fresh->region_len, &t->region));
    printf("ok\n");
}

static void leave(void) {
    for (int i = 0; i < me.targets; i++) MUST(kvr_region_forget(me.engine, me.target[i].region));
    for (int i = 0; i < me.targets; i++) MUST(kvr_peer_remove(me.engine, me.target[i].peer));
    MUST(kvr_region_deregister(me.engine, me.region, 0));
    MUST(kvr_engine_destroy(me.engine));
    for (int i = 0; i < me.targets; i++) {
        int status = 0;
        tell(&me.target[i], (struct request){.kind = LEAVE});
        hear(&me.target[i]);
        NEED(waitpid(me.target[i].pid, &status, 0) == me.target[i].pid);
        if (status != 0) die("target %d ended with wait status %d", i, status);
    }
    printf("ok\n");
}

/* False: it was the last one. */
static bool obey(char *line) {
    char *words = line + strcspn(line, " ");
    if (*words) *words++ = 0;
    if (strcmp(line, "read") == 0) transfer(false, words);
    else if (strcmp(line, "write") == 0) transfer(true, words);
    else if (strcmp(line, "notify") == 0) notify(words);
    else if (strcmp(line, "forge") == 0) forge(words);
    else if (strcmp(line, "drop") == 0) drop(words);
    else if (strcmp(line, "renew") == 0) renew(words);
    else if (strcmp(line, "rails") == 0) {
        char text[TEXT];
        uint64_t before[MAX_RAILS] = {0};
        rails(text, sizeof text, before);
        printf("ok rails=%s\n", text);
    } else if (strcmp(line, "quit") == 0) {
        leave();
        return false;
    } else die("unknown command '%s'", line);
    return true;
}

int main(int argc, char **argv) {
    static char line[4096];
    const char *here = NULL, *there = NULL, *kind = "host", *value = NULL;
    size_t bytes = 16 << 20;
    bool is_target = argc > STARTS && strcmp(argv[1], "target") == 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    me.targets = 1;
    me.random = 0x9e3779b97f4a7c15U ^ (uint64_t)time(NULL) << 16;
    for (int i = 1; i < argc; i++) {
        if (word_is(argv[i], "here", &value)) here = value;
        else if (word_is(argv[i], "there", &value)) there = value;
        else if (word_is(argv[i], "mem", &value)) kind = value;
        else if (word_is(argv[i], "bytes", &value)) bytes = number(value);
        else if (word_is(argv[i], "targets", &value)) me.targets = (int)number(value);
        else if (word_is(argv[i], "seed", &value)) me.random = number(value) | 1;
        else if (argv[i][1] != '.' && !(is_target && i < STARTS)) die("unknown word '%s'", argv[i]);
    }
    if (is_target)
        return target(argc - STARTS, argv + STARTS, atoi(argv[2]),
                      map_memory(atoi(argv[3]), atoi(argv[4]), number(argv[5])), there, argv[6]);
    if (me.targets < 1 || me.targets > MAX_TARGETS || bytes < 8 || bytes % 4096)
        die("allowed: targets 1 to %d, bytes a multiple of 4096", MAX_TARGETS);
    fprintf(stderr, "mover: seed=%lu\n", me.random);
    /* The targets first: nothing of an engine is to be forked. */
    for (int i = 0; i < me.targets; i++) start_target(&me.target[i], i, argc, argv, bytes, kind);
    me.memory = map_memory(-1, buffer_of(kind, bytes), bytes);
    me.engine = make_engine("here", 'a', here, argc - 1, argv + 1);
    me.region = register_memory(me.engine, &me.memory);
    for (int i = 0; i < me.targets; i++) join(&me.target[i], i);
    printf("ok seed=%lu\n", me.random);
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (!obey(line)) return 0;
    }
    die("standard input ended without quit");
}
