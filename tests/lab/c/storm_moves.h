/* The transfers of storm.c: one after the other in each stream, every byte compared. */
#ifndef KVRAIL_LAB_STORM_MOVES_H
#define KVRAIL_LAB_STORM_MOVES_H

#include "storm.h"

enum phase { RESTING, FLYING, UNHEARD, WAITING };

struct flow;

struct stream {
    struct flow *flow;
    enum phase phase;
    int id;
    bool write, quarantined;
    uint64_t seq;
    size_t here, there, slot; /* places in the two regions */
    unsigned char *old_here, *must_here, *old_there, *must_there, *past_here, *past_there;
    kvr_transfer transfer;
    double posted, until;
    uint64_t done, failed;
    double first_failed; /* since mark; 0: none */
};

/* A peer, and the transfers with it. */
struct flow {
    char name[NAME_LEN];
    kvr_peer peer;
    kvr_region region;
    struct card card;
    unsigned char *memory;
    kvr_transfer kept; /* prepared and never posted: stale when the peer was restarted */
    kvr_region kept_region;
    struct card kept_card;
    uint64_t op, notif;
    bool held; /* nothing more is posted */
    uint64_t done, failed, unheard, others[64];
    int first;
    double longest, latest; /* transfer; notification after its transfer */
};

static struct {
    kvr_engine *engine;
    kvr_region region;
    const char *name, *dir;
    uint64_t id, bytes, random, seq;
    unsigned char *memory;
    struct board *board;
    struct card card;
    struct flow flow[MAX_FLOWS];
    int flows;
    struct stream stream[MAX_STREAMS];
    int streams;
    struct {
        char name[NAME_LEN];
        kvr_peer peer;
    } watched[MAX_IDS];
    int watches;
    double mark, gap, stalled, looked;
} me;

/* ---- notifications ---- */

static void hear(void *ctx, const char *name, size_t name_len, const void *msg, size_t len) {
    struct note note;
    const unsigned char *byte = msg;
    (void)ctx;
    if (len < sizeof note) die("a notification of %zu bytes from %.*s", len, (int)name_len, name);
    memcpy(&note, msg, sizeof note);
    if (note.magic != NOTE || note.from >= MAX_IDS || note.stream >= MAX_STREAMS ||
        note.size != len || note.at + note.len > me.bytes)
        die("a notification from %.*s is no note", (int)name_len, name);
    for (size_t i = sizeof note; i < len; i++)
        if (byte[i] != letter(note.seq, 0, i)) die("byte %zu of a notification is wrong", i);
    uint64_t last = atomic_load(&me.board->heard[note.from][note.stream]);
    if (note.seq <= last)
        die("notification %lu of stream %u came after %lu: twice, or out of order", note.seq,
            note.stream, last);
    if (note.seq <= atomic_load(&me.board->given_up[note.from][note.stream]))
        die("a notification of a transfer that failed (%.*s, stream %u)", (int)name_len, name,
            note.stream);
    if (hash_of(me.memory + note.at, note.len) != note.hash)
        die("a notification from %.*s came before its data", (int)name_len, name);
    atomic_store(&me.board->heard[note.from][note.stream], note.seq);
}

static size_t write_note(const struct stream *s, unsigned char *message) {
    struct note note = {.magic = NOTE, .from = (uint32_t)me.id, .stream = (uint32_t)s->id,
                        .size = (uint32_t)s->flow->notif, .seq = s->seq, .at = s->there,
                        .len = s->slot, .hash = hash_of(s->must_there, s->slot)};
    for (size_t i = sizeof note; i < s->flow->notif; i++) message[i] = letter(s->seq, 0, i);
    memcpy(message, &note, sizeof note);
    return s->flow->notif;
}

/* ---- one transfer ---- */

static void fill(unsigned char *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = next_random(&me.random);
        memcpy(at + i, &word, 8);
    }
}

/* Cuts a slot into blocks with gaps; they lie in opposite order on the two sides. */
static size_t cut(const struct stream *s, kvr_desc *here, kvr_desc *there) {
    size_t n = 1 + below(&me.random, MAX_BLOCKS), share = s->slot / n, len[MAX_BLOCKS];
    for (size_t i = 0; i < n; i++) len[i] = 1 + below(&me.random, share);
    for (size_t i = 0; i < n; i++) {
        size_t from = i * share + below(&me.random, share - len[i] + 1);
        size_t to = (n - 1 - i) * share + (share - len[i]) / 2;
        kvr_desc h = {(uintptr_t)me.memory + s->here + from, len[i], 0, me.region};
        kvr_desc t = {s->flow->card.invitation.base + s->there + to, len[i], 0, s->flow->region};
        here[i] = h;
        there[i] = t;
        if (s->write) memcpy(s->must_there + to, s->old_here + from, len[i]);
        else memcpy(s->must_here + from, s->old_there + to, len[i]);
    }
    return n;
}

/* Every other stream sends no notifications: it does not wait for anybody to hear them. */
static bool tells(const struct stream *s) { return s->flow->notif > 0 && s->id % 2 == 0; }

static void ended(struct stream *s, kvr_status status);

static void post(struct stream *s) {
    kvr_desc here[MAX_BLOCKS], there[MAX_BLOCKS];
    static unsigned char message[KVR_MESSAGE_MAX];
    struct flow *f = s->flow;
    unsigned char *own = me.memory + s->here, *other = f->memory + s->there;
    s->write = f->op == 2 ? below(&me.random, 2) : f->op;
    memcpy(s->past_here, own, s->slot);
    memcpy(s->past_there, other, s->slot);
    fill(own, s->slot);
    fill(other, s->slot);
    memcpy(s->old_here, own, s->slot);
    memcpy(s->must_here, own, s->slot);
    memcpy(s->old_there, other, s->slot);
    memcpy(s->must_there, other, s->slot);
    size_t n = cut(s, here, there);
    s->seq = ++me.seq;
    s->posted = now();
    s->transfer = 0;
    s->phase = FLYING;
    kvr_status status = kvr_transfer_prepare_descs(me.engine, s->write ? KVR_WRITE : KVR_READ,
                                                   f->peer, here, n, there, n, &s->transfer);
    if (status == KVR_OK) {
        size_t len = tells(s) ? write_note(s, message) : 0;
        status = kvr_transfer_post(me.engine, s->transfer, len ? message : NULL, len);
    }
    if (status != KVR_IN_PROGRESS) ended(s, status);
}

/* Ends the program unless the bytes of a side are right; says what the wrong ones are. `old`: as
 * they were before the transfer; `past`: after the one before it, which may be what came late. */
static void must_be(const struct stream *s, const unsigned char *is, const unsigned char *must,
                    const unsigned char *old, const unsigned char *past, const char *what) {
    size_t first = s->slot, last = 0, bad = 0, unchanged = 0, late = 0;
    if (memcmp(is, must, s->slot) == 0) return;
    for (size_t i = 0; i < s->slot; i++) {
        if (is[i] == must[i]) continue;
        if (bad++ == 0) first = i;
        last = i;
        unchanged += is[i] == old[i];
        late += is[i] == past[i];
    }
    die("%s of %s, stream %d, number %lu, %s: %zu bytes from %zu to %zu of %zu are wrong; %zu are "
        "as before it, %zu as after the one before",
        s->write ? "write" : "read", s->flow->name, s->id, s->seq, what, bad, first, last,
        s->slot, unchanged, late);
}

/* A byte of a failed transfer is as it was or as it was to become. */
static void half_done(const struct stream *s, const unsigned char *is, const unsigned char *old,
                      const unsigned char *must, const char *what) {
    for (size_t i = 0; i < s->slot; i++)
        if (is[i] != old[i] && is[i] != must[i])
            die("failed %s of %s, stream %d, %s: byte %zu is strange",
                s->write ? "write" : "read", s->flow->name, s->id, what, i);
}

static void ended(struct stream *s, kvr_status status) {
    struct flow *f = s->flow;
    double at = now();
    unsigned char *own = me.memory + s->here, *other = f->memory + s->there;
    if (status < 0)
        /* Before the release: a note that comes after it would be one of a failed transfer. */
        atomic_store(&board_of(f->memory, f->card.bytes)->given_up[me.id][s->id], s->seq);
    if (s->transfer) {
        kvr_status r = kvr_transfer_release(me.engine, s->transfer);
        if (r != KVR_OK) die("release of a transfer that ended: %s", reason());
    }
    if (at - s->posted > f->longest) f->longest = at - s->posted;
    if (status == KVR_OK) {
        must_be(s, own, s->must_here, s->old_here, s->past_here, "here");
        must_be(s, other, s->must_there, s->old_there, s->past_there, "there");
        f->done++;
        s->done++;
        s->phase = tells(s) ? UNHEARD : RESTING;
        s->until = at + 20;
        return;
    }
    half_done(s, own, s->old_here, s->must_here, "here");
    half_done(s, other, s->old_there, s->must_there, "there");
    if (f->failed == 0) f->first = status;
    if (status > -64) f->others[-status]++;
    f->failed++;
    if (s->failed++ == 0) s->first_failed = at - me.mark;
    /* Released means that nothing changes its memory any more: it is looked at once more. */
    memcpy(s->must_here, own, s->slot);
    s->quarantined = true;
    s->phase = WAITING;
    s->until = at + 0.3;
}

static void step(struct stream *s) {
    double at = now();
    kvr_status status;
    switch (s->phase) {
    case FLYING:
        status = kvr_transfer_check(me.engine, s->transfer);
        if (status != KVR_IN_PROGRESS) ended(s, status);
        else if (at > s->posted + 45) die("a transfer of %s never ended", s->flow->name);
        return;
    case UNHEARD:
        if (atomic_load(&board_of(s->flow->memory, s->flow->card.bytes)->heard[me.id][s->id]) >=
            s->seq) {
            if (at + 20 - s->until > s->flow->latest) s->flow->latest = at + 20 - s->until;
            s->phase = RESTING;
        } else if (events_since(KVR_EVENT_PEER_GONE, s->flow->peer, s->posted, &at) > 0 ||
                   kvr_peer_state(me.engine, s->flow->peer) < 0) {
            /* Done means handed over: what was on its way to a peer that is gone may be lost. */
            atomic_store(
                &board_of(s->flow->memory, s->flow->card.bytes)->given_up[me.id][s->id], s->seq);
            s->flow->unheard++;
            s->phase = WAITING;
            s->until = now() + 0.1;
        } else if (at > s->until) {
            die("a notification to %s was not heard in 20 s", s->flow->name);
        }
        return;
    case WAITING:
        if (at < s->until) return;
        if (s->quarantined)
            must_be(s, me.memory + s->here, s->must_here, s->old_here, s->past_here,
                    "after its release");
        s->quarantined = false;
        s->phase = RESTING;
        return;
    default:
        if (!s->flow->held) post(s);
    }
}

#endif
