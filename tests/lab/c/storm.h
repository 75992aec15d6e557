/* What the processes of storm.c share: how they find each other's memory, and what a notification
 * says. Every process maps the memory of those that it moves data with, so that it can fill it
 * before a transfer and compare it afterwards, also when its owner is stopped or dead. */
#ifndef KVRAIL_LAB_STORM_H
#define KVRAIL_LAB_STORM_H

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>

#include "mover.h"

enum {
    MAX_STREAMS = 16, /* transfers that a process has in flight at a time */
    MAX_FLOWS = 4,    /* peers that it moves data with */
    MAX_IDS = 8,      /* processes: a notification says whose it is */
    MAX_EVENTS = 256,
    MAX_BLOCKS = 48,
    NAME_LEN = 32,
};

/* Behind the region in each process's file: what it heard, by process and stream. */
struct board {
    _Atomic uint64_t heard[MAX_IDS][MAX_STREAMS];
    /* Ended in an error at its sender, so the memory that it speaks of may be others' again. */
    _Atomic uint64_t given_up[MAX_IDS][MAX_STREAMS];
};

/* How others reach a process: a file of its name has it. */
struct card {
    pid_t pid;
    int fd;
    size_t bytes;
    struct invitation invitation;
};

/* A notification: this, then letters up to its length. */
struct note {
    uint32_t magic, from, stream, size;
    uint64_t seq, at, len, hash;
};

static const uint32_t NOTE = 0x4b56524e;

static inline uint64_t hash_of(const unsigned char *at, size_t bytes) {
    uint64_t h = 0xcbf29ce484222325U, word;
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        memcpy(&word, at + i, 8);
        h = (h ^ word) * 0x100000001b3U;
        h ^= h >> 29;
    }
    return h;
}

static inline struct board *board_of(unsigned char *memory, size_t bytes) {
    return (struct board *)(void *)(memory + bytes);
}

static inline unsigned char *map_file(int fd, size_t bytes) {
    size_t all = bytes + sizeof(struct board);
    unsigned char *at = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEED(at != MAP_FAILED);
    return at;
}

static inline void write_card(const char *dir, const char *name, const struct card *card) {
    char path[256], temporary[300];
    snprintf(path, sizeof path, "%s/%s.card", dir, name);
    snprintf(temporary, sizeof temporary, "%s.%d", path, (int)getpid());
    int fd = open(temporary, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    NEED(fd >= 0);
    send_all(fd, card, sizeof *card);
    NEED(close(fd) == 0 && rename(temporary, path) == 0);
}

static inline void read_card(const char *dir, const char *name, struct card *card) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s.card", dir, name);
    int fd = open(path, O_RDONLY);
    NEED(fd >= 0 && receive_all(fd, card, sizeof *card) && close(fd) == 0);
}

/* ---- events ---- */

struct happened {
    uint32_t kind;
    kvr_peer peer;
    double at;
};

/* Written by the engine's control thread. */
static struct {
    pthread_mutex_t lock;
    struct happened list[MAX_EVENTS];
    size_t count; /* of all; the list has the last ones */
} events = {.lock = PTHREAD_MUTEX_INITIALIZER};

static inline void on_event(void *ctx, const kvr_event *event) {
    (void)ctx;
    pthread_mutex_lock(&events.lock);
    struct happened one = {event->kind, event->peer, now()};
    events.list[events.count++ % MAX_EVENTS] = one;
    pthread_mutex_unlock(&events.lock);
    fprintf(stderr, "[%.3f] event %u: %s\n", now(), event->kind, event->text);
}

static inline void on_log(void *ctx, int level, const char *text, size_t len) {
    (void)ctx;
    fprintf(stderr, "[%.3f] %s: %.*s\n", now(), level <= 2 ? "warn" : "info", (int)len, text);
}

/* How many of a kind since `since`, of that peer unless it is 0; when the first of them was. */
static inline size_t events_since(uint32_t kind, kvr_peer peer, double since, double *first) {
    size_t n = 0;
    pthread_mutex_lock(&events.lock);
    size_t begin = events.count > MAX_EVENTS ? events.count - MAX_EVENTS : 0;
    for (size_t i = begin; i < events.count; i++) {
        const struct happened *e = &events.list[i % MAX_EVENTS];
        if (e->kind != kind || e->at < since || (peer && e->peer != peer)) continue;
        if (n++ == 0) *first = e->at;
    }
    pthread_mutex_unlock(&events.lock);
    return n;
}

#endif
