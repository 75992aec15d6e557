/* What both processes of mover.c use: errors, memory that both see, bytes, and how they talk. */
#ifndef KVRAIL_LAB_MOVER_H
#define KVRAIL_LAB_MOVER_H

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "dmabuf.h"
#include "kvrail.h"

enum { BLOB = 16384, TEXT = 1024, MAX_TARGETS = 4, MAX_RAILS = 16 };

#define PRINTF(at) __attribute__((format(printf, at, at + 1)))

/* Ends this process; the one that reads its answers sees the line. */
__attribute__((noreturn)) PRINTF(1) static inline void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("error mover: ");
    vprintf(format, args);
    printf("\n");
    fflush(stdout);
    va_end(args);
    exit(1);
}

#define NEED(what)                                                                           \
    do {                                                                                     \
        if (!(what))                                                                         \
            die("%s:%d: %s (errno %d, %s)", __FILE__, __LINE__, #what, errno,                \
                strerror(errno));                                                            \
    } while (0)

static inline const char *reason(void) {
    static char text[TEXT];
    kvr_last_error(text, sizeof text);
    for (char *c = text; *c; c++)
        if (*c == '\n') *c = ';';
    return text;
}

#define MUST(call)                                                                           \
    do {                                                                                     \
        kvr_status got = (call);                                                             \
        if (got < 0) die("%s: %s (%s)", #call, reason(), kvr_strerror(got));                 \
    } while (0)

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static inline void nap(long microseconds) {
    struct timespec t = {microseconds / 1000000, microseconds % 1000000 * 1000};
    nanosleep(&t, NULL);
}

/* ---- words ---- */

static inline uint64_t number(const char *text) {
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || end == text || *end) die("'%s' is no number", text);
    return value;
}

static inline bool word_is(const char *word, const char *key, const char **value) {
    size_t n = strlen(key);
    if (strncmp(word, key, n) != 0 || word[n] != '=') return false;
    *value = word + n + 1;
    return true;
}

/* ---- memory ---- */

/* A side's memory, as it was before a transfer and as it must be after it. The three of a target
 * lie in one file, which both processes map; `now` may be a part of a dma-buf instead. */
struct memory {
    size_t bytes;
    unsigned char *now, *old, *must;
    int dmabuf;    /* -1: none */
    uint64_t base; /* the address of the first byte in descriptors */
};

/* The part of a dma-buf that is registered begins here, in bytes, and behind it are as many as make
 * whole pages. The address is not that of the mapping, and no offset either. */
enum { BEFORE = 0x3040, AFTER = 0x5000 - BEFORE, EDGE = 0xA5 };
static const uint64_t DMABUF_BASE = 0x600000000000 + BEFORE % 0x1000;

static inline struct memory map_memory(int fd, int dmabuf, size_t bytes) {
    int how = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    unsigned char *at = mmap(NULL, 3 * bytes, PROT_READ | PROT_WRITE, how, fd, 0);
    NEED(at != MAP_FAILED);
    struct memory m = {bytes, at, at + bytes, at + 2 * bytes, dmabuf, (uintptr_t)at};
    if (dmabuf < 0) return m;
    at = mmap(NULL, BEFORE + bytes + AFTER, PROT_READ | PROT_WRITE, MAP_SHARED, dmabuf, 0);
    NEED(at != MAP_FAILED);
    memset(at, EDGE, BEFORE);
    memset(at + BEFORE + bytes, EDGE, AFTER);
    m.now = at + BEFORE;
    m.base = DMABUF_BASE;
    return m;
}

/* A dma-buf for map_memory; -1 for memory of the host. */
static inline int buffer_of(const char *kind, size_t bytes) {
    if (strcmp(kind, "host") == 0) return -1;
    int fd = make_dmabuf(kind, BEFORE + bytes + AFTER);
    if (fd < 0) die("mem=%s: %s", kind, strerror(errno));
    return fd;
}

static inline kvr_region register_memory(kvr_engine *e, const struct memory *m) {
    kvr_segment s = {.addr = m->base, .len = m->bytes, .offset = BEFORE, .fd = m->dmabuf};
    if (m->dmabuf >= 0) MUST(kvr_region_register_segments(e, &s, 1));
    else MUST(kvr_region_register(e, m->base, m->bytes, KVR_MEM_HOST, &s.region));
    return s.region;
}

/* Were bytes of the dma-buf touched that are not registered? */
static inline bool edges_touched(const struct memory *m) {
    if (m->dmabuf < 0) return false;
    for (size_t i = 1; i <= BEFORE; i++)
        if (m->now[-(ptrdiff_t)i] != EDGE) return true;
    for (size_t i = 0; i < AFTER; i++)
        if (m->now[m->bytes + i] != EDGE) return true;
    return false;
}

static inline uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static inline uint64_t below(uint64_t *state, uint64_t n) { return next_random(state) % n; }

static inline void refill(struct memory *m, uint64_t *state) {
    uint64_t *word = (uint64_t *)(void *)m->now;
    for (size_t i = 0; i < m->bytes / 8; i++) word[i] = next_random(state);
    memcpy(m->old, m->now, m->bytes);
    memcpy(m->must, m->now, m->bytes);
}

/* Bytes that are neither what they were nor what they must become. */
static inline size_t strange_bytes(const struct memory *m) {
    size_t bad = 0;
    for (size_t i = 0; i < m->bytes; i++)
        bad += m->now[i] != m->old[i] && m->now[i] != m->must[i];
    return bad;
}

/* Byte `i` of notification `number` of a series. */
static inline unsigned char letter(uint64_t series, size_t number, size_t i) {
    return (unsigned char)(series * 37 + number * 11 + i * 7 + (i >> 8));
}

/* ---- what the two processes tell each other ---- */

enum request_kind { INVITE = 1, DROP, RENEW, AWAIT, LEAVE };

struct request {
    uint32_t kind;
    uint32_t compare; /* AWAIT: are all bytes there when the first one comes? */
    uint64_t series, count, size;
};

struct invitation {
    uint64_t base;
    size_t engine_len, region_len;
    unsigned char engine[BLOB], region[BLOB];
};

struct answer {
    int32_t good;
    char text[TEXT];
    struct invitation invitation;
};

static inline void send_all(int fd, const void *data, size_t len) {
    for (const char *at = data; len > 0;) {
        ssize_t n = write(fd, at, len);
        if (n < 0 && errno == EINTR) continue;
        NEED(n > 0);
        at += n;
        len -= (size_t)n;
    }
}

/* False: the other end is closed. */
static inline bool receive_all(int fd, void *data, size_t len) {
    for (char *at = data; len > 0;) {
        ssize_t n = read(fd, at, len);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n;
        len -= (size_t)n;
    }
    return true;
}

/* ---- engines ---- */

/* The configuration: the environment's, then every word "<end>.KEY=VALUE". */
static inline kvr_engine *make_engine(const char *name, char end, const char *nics, int words,
                                      char **word) {
    kvr_config cfg;
    kvr_engine *engine = NULL;
    MUST(kvr_config_init(&cfg, sizeof cfg));
    MUST(kvr_config_set(&cfg, "transport", "verbs"));
    MUST(kvr_config_env(&cfg));
    MUST(kvr_config_set(&cfg, "name", name));
    if (nics) MUST(kvr_config_set(&cfg, "nics", nics));
    for (int i = 0; i < words; i++) {
        char key[64];
        const char *value = strchr(word[i], '=');
        if (word[i][0] != end || word[i][1] != '.' || !value) continue;
        snprintf(key, sizeof key, "%.*s", (int)(value - word[i] - 2), word[i] + 2);
        MUST(kvr_config_set(&cfg, key, value + 1));
    }
    MUST(kvr_engine_create(&cfg, &engine));
    return engine;
}

#endif
