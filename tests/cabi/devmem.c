/* kvr_region_register_device() and kvr_region_register_segments(): a provider that behaves and one
 * that does everything it must not. Whatever it does, each `get` that succeeded is followed by one
 * `put` of just what it gave, when no NIC has any of it; nothing is left open or registered.
 *
 * Runs over the fake libibverbs (tests/fakeverbs), where a memfd serves as a dma-buf.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvrail.h"

static _Atomic int failures;
static _Thread_local char text[2048];

static void failed(int line, const char *what) {
    failures++;
    kvr_last_error(text, sizeof text);
    printf("devmem.c:%d: %s; the last error is \"%s\"\n", line, what, text);
}

#define FAILED(what) failed(__LINE__, what)
#define TRUE(what) \
    do { \
        if (!(what)) FAILED("not true: " #what); \
    } while (0)
#define IS(call, want) \
    do { \
        kvr_status got_ = (call); \
        if (got_ != (want)) FAILED(#call " is not " #want); \
    } while (0)
#define SAYS(what) \
    do { \
        kvr_last_error(text, sizeof text); \
        if (strstr(text, (what)) == NULL) FAILED("the last error lacks " what); \
    } while (0)

#define PAGE 4096u
#define ROOM 4

static int (*fake_set)(const char *);
static int (*fake_get)(const char *, uint64_t *);

static void set(const char *knobs) { TRUE(fake_set(knobs) == 0); }

static uint64_t live(void) {
    uint64_t n = UINT64_MAX;
    TRUE(fake_get("live.mr", &n) == 0);
    return n;
}

static int open_files(void) {
    int n = 0;
    DIR *dir = opendir("/proc/self/fd");
    TRUE(dir != NULL);
    while (dir != NULL && readdir(dir) != NULL) n++;
    closedir(dir);
    return n;
}

enum mode {
    GOOD, FAIL, QUIET, NOISE, POSITIVE, UNKNOWN, SMALL, NONE, MORE, OVERLAP, EMPTY, WRAPS, FLAGS,
    CLOSED, PAST_END
};

struct provider {
    enum mode mode;
    int buffer, gets, puts;
    kvr_engine *engine; /* to be called from put */
    int ends;           /* that engine is being destroyed */
    size_t n;
    kvr_segment gave[ROOM];
    uint64_t live_at_put;
};

/* Three segments, the first and the last of which are replicas. */
static kvr_status get(void *context, uint64_t addr, uint64_t len, kvr_segment *segments, size_t *n,
                      char *why, size_t why_len) {
    struct provider *p = context;
    p->gets++;
    if (addr != 0x1234 || len != 3 * PAGE || why_len < 64) return KVR_ERR_RANGE;
    switch (p->mode) {
    case FAIL:
        snprintf(why, why_len, "no such\nallocation");
        return KVR_ERR_NOT_FOUND;
    case QUIET:
        return KVR_ERR_OS;
    case NOISE:
        memset(why, 'x', why_len);
        return KVR_ERR_PERMISSION;
    case POSITIVE:
        return KVR_IN_PROGRESS;
    case UNKNOWN:
        return -999;
    case SMALL:
        *n = 9;
        return KVR_ERR_CAPACITY;
    default:
        break;
    }
    size_t room = *n;
    p->n = p->mode == NONE ? 0 : p->mode == MORE ? room : 3;
    for (size_t i = 0; i < p->n; i++) {
        segments[i] = (kvr_segment){.addr = (i + 1) << 32 | PAGE, .len = PAGE, .offset = i * PAGE,
                                    .fd = dup(p->buffer), .area = (uint32_t)i + 10,
                                    .slice_id = i % 2, .region = 0x5a};
    }
    if (p->mode == OVERLAP) segments[2].addr = segments[0].addr, segments[0].len = PAGE + 1;
    if (p->mode == EMPTY) segments[1].len = 0;
    if (p->mode == WRAPS) segments[1].addr = UINT64_MAX - PAGE + 1;
    if (p->mode == FLAGS) segments[1].flags = 0x80;
    if (p->mode == PAST_END) segments[1].len = 1 << 30;
    if (p->mode == CLOSED) {
        close(segments[1].fd);
        segments[1].fd = 999999;
    }
    *n = p->mode == MORE ? room + 5 : p->n;
    memcpy(p->gave, segments, p->n * sizeof *segments);
    return KVR_OK;
}

static void put(void *context, const kvr_segment *segments, size_t n) {
    struct provider *p = context;
    p->puts++;
    p->live_at_put = live();
    TRUE(n == p->n && memcmp(segments, p->gave, n * sizeof *segments) == 0);
    for (size_t i = 0; i < n; i++)
        if (segments[i].fd != 999999) TRUE(close(segments[i].fd) == 0);
    if (p->engine != NULL) { /* no lock is held */
        kvr_segment own = {.addr = PAGE, .len = PAGE, .fd = p->buffer};
        IS(kvr_region_register_segments(p->engine, &own, 1), p->ends ? KVR_ERR_INVALID : KVR_OK);
        if (!p->ends) IS(kvr_region_deregister(p->engine, own.region, 0), KVR_OK);
    }
}

static kvr_devmem_ops ops_of(struct provider *p) {
    return (kvr_devmem_ops){.struct_size = sizeof(kvr_devmem_ops), .name = "test", .context = p,
                            .get = get, .put = put};
}

static kvr_engine *make(const char *transport) {
    kvr_config cfg;
    kvr_engine *e = NULL;
    IS(kvr_config_init(&cfg, sizeof cfg), KVR_OK);
    IS(kvr_config_set(&cfg, "name", transport), KVR_OK);
    IS(kvr_config_set(&cfg, "transport", transport), KVR_OK);
    IS(kvr_config_set(&cfg, "listen_ip", "127.0.0.1"), KVR_OK);
    IS(kvr_engine_create(&cfg, &e), KVR_OK);
    if (e == NULL) exit(1);
    return e;
}

/* Registers with a provider of this mode: `want`, and nothing is left where that is an error. */
static void one(kvr_engine *e, int buffer, enum mode mode, kvr_status want, int puts) {
    struct provider p = {.mode = mode, .buffer = buffer};
    kvr_devmem_ops ops = ops_of(&p);
    kvr_segment segments[ROOM];
    size_t n = ROOM;
    uint64_t before = live();
    int files = open_files();
    memset(segments, 0x5a, sizeof segments);
    IS(kvr_region_register_device(e, &ops, 0x1234, 3 * PAGE, segments, &n), want);
    TRUE(p.gets == 1 && p.puts == puts && live() == before && open_files() == files);
    TRUE(puts == 0 || p.live_at_put == before);
    TRUE(n == (mode == SMALL ? 9 : 0));
    for (int i = 0; i < ROOM; i++) TRUE(segments[i].region == 0 && segments[i].fd == -1);
    SAYS("provider \"test\": ");
}

static void misbehaving(kvr_engine *e, int buffer) {
    one(e, buffer, FAIL, KVR_ERR_NOT_FOUND, 0);
    SAYS("12288 bytes at 0x1234: no such\\u{a}allocation");
    one(e, buffer, QUIET, KVR_ERR_OS, 0);
    SAYS("get failed without a reason");
    one(e, buffer, NOISE, KVR_ERR_PERMISSION, 0);
    SAYS("xxxxxxxx");
    one(e, buffer, POSITIVE, KVR_ERR_INVALID, 0);
    SAYS("get returned 1, which is no error");
    one(e, buffer, UNKNOWN, KVR_ERR_INVALID, 0);
    SAYS("get returned -999");
    one(e, buffer, SMALL, KVR_ERR_CAPACITY, 0);
    SAYS("there is room for 4 segments and it asks for 9");
    one(e, buffer, NONE, KVR_ERR_INVALID, 1);
    SAYS("get gave no segment");
    one(e, buffer, MORE, KVR_ERR_INVALID, 1);
    SAYS("gave 9 segments, where there is room for 4");
    one(e, buffer, OVERLAP, KVR_ERR_INVALID, 1);
    SAYS("overlap");
    one(e, buffer, EMPTY, KVR_ERR_INVALID, 1);
    SAYS("segment 1 ");
    one(e, buffer, WRAPS, KVR_ERR_INVALID, 1);
    SAYS("end inside 64 bits");
    one(e, buffer, FLAGS, KVR_ERR_INVALID, 1);
    SAYS("segment 1: flags is 0x80");
    one(e, buffer, CLOSED, KVR_ERR_INVALID, 1);
    SAYS("fd 999999 is not open");
    one(e, buffer, PAST_END, KVR_ERR_INVALID, 1);
    SAYS("it has 65536 bytes");
    for (int nic = 0; nic < 2; nic++) {
        for (int nth = 1; nth <= 3; nth++) {
            char knob[64];
            snprintf(knob, sizeof knob, "fake%d.fail.reg_dmabuf_mr=%d:EIO", nic, nth);
            set(knob);
            one(e, buffer, GOOD, KVR_ERR_OS, 1);
        }
    }
    set("*.dmabuf=0");
    one(e, buffer, GOOD, KVR_ERR_UNSUPPORTED, 1);
    SAYS("pass fd -1");
    set("*.dmabuf=1");
}

static void behaving(kvr_engine *e, int buffer) {
    struct provider p = {.mode = GOOD, .buffer = buffer, .engine = e};
    kvr_devmem_ops ops = ops_of(&p);
    kvr_segment s[3];
    size_t n = 3;
    uint64_t before = live();
    int files = open_files();
    IS(kvr_region_register_device(e, &ops, 0x1234, 3 * PAGE, s, &n), KVR_OK);
    memset(&ops, 0x5a, sizeof ops); /* it was copied */
    TRUE(n == 3 && live() == before + 6 && p.gets == 1);
    for (uint32_t i = 0; i < 3; i++) {
        TRUE(s[i].region != 0 && s[i].area == i + 10 && s[i].slice_id == i % 2);
        TRUE(s[i].addr == p.gave[i].addr && s[i].fd == p.gave[i].fd);
        TRUE(i == 0 || s[i].region != s[i - 1].region);
    }
    IS(kvr_region_deregister(e, s[1].region, 0), KVR_OK);
    IS(kvr_region_deregister(e, s[0].region, KVR_DEREGISTER_CANCEL), KVR_OK);
    IS(kvr_region_deregister(e, s[0].region, 0), KVR_ERR_STALE);
    TRUE(p.puts == 0);
    IS(kvr_region_deregister(e, s[2].region, 0), KVR_OK);
    TRUE(p.puts == 1 && p.live_at_put == before && open_files() == files);
}

static void arguments(kvr_engine *e, int buffer) {
    struct provider p = {.mode = GOOD, .buffer = buffer};
    kvr_devmem_ops good = ops_of(&p), bad = good;
    struct {
        kvr_devmem_ops known;
        uint64_t added;
    } newer = {good, 0};
    kvr_segment s[ROOM];
    size_t n = ROOM, huge = SIZE_MAX / 8;
    kvr_devmem_ops *odd = (kvr_devmem_ops *)((char *)&newer + 1);

    IS(kvr_region_register_device(e, NULL, 0x1234, 1, s, &n), KVR_ERR_INVALID);
    SAYS("ops is NULL");
    n = ROOM;
    IS(kvr_region_register_device(e, &good, 0x1234, 1, NULL, &n), KVR_ERR_INVALID);
    IS(kvr_region_register_device(e, &good, 0x1234, 1, s, NULL), KVR_ERR_INVALID);
    IS(kvr_region_register_device(e, &good, 0x1234, 1, s, &huge), KVR_ERR_INVALID);
    n = ROOM;
    IS(kvr_region_register_device(e, odd, 0x1234, 1, s, &n), KVR_ERR_INVALID);
    n = ROOM;
    IS(kvr_region_register_device(e, &good, 0x1234, 0, s, &n), KVR_ERR_INVALID);
    TRUE(n == 0);
    n = ROOM;
    IS(kvr_region_register_device(e, &good, UINT64_MAX, 2, s, &n), KVR_ERR_INVALID);
    size_t sizes[] = {0, 4, sizeof bad - 1, 4097, SIZE_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        bad.struct_size = sizes[i], n = ROOM;
        IS(kvr_region_register_device(e, &bad, 0x1234, 1, s, &n), KVR_ERR_INVALID);
        SAYS("struct_size is ");
    }
    newer.known.struct_size = sizeof newer, newer.added = 1, n = ROOM;
    IS(kvr_region_register_device(e, &newer.known, 0x1234, 1, s, &n), KVR_ERR_INVALID);
    SAYS("newer fields 0");
    bad = good, bad.name = NULL, n = ROOM;
    IS(kvr_region_register_device(e, &bad, 0x1234, 1, s, &n), KVR_ERR_INVALID);
    bad = good, bad.get = NULL, n = ROOM;
    IS(kvr_region_register_device(e, &bad, 0x1234, 1, s, &n), KVR_ERR_INVALID);
    SAYS("get is NULL");
    bad = good, bad.put = NULL, n = ROOM;
    IS(kvr_region_register_device(e, &bad, 0x1234, 1, s, &n), KVR_ERR_INVALID);
    SAYS("put is NULL");
    TRUE(p.gets == 0 && p.puts == 0);
    newer.added = 0, n = ROOM;
    IS(kvr_region_register_device(e, &newer.known, 0x1234, 3 * PAGE, s, &n), KVR_OK);
    for (size_t i = 0; i < n; i++) IS(kvr_region_deregister(e, s[i].region, 0), KVR_OK);
    TRUE(p.gets == 1 && p.puts == 1);

    kvr_segment own[2] = {{.addr = PAGE, .len = PAGE, .fd = buffer, .region = 0x5a},
                          {.addr = 0, .len = PAGE, .fd = buffer, .flags = 3, .region = 0x5a}};
    IS(kvr_region_register_segments(e, own, 2), KVR_ERR_INVALID);
    SAYS("segment 1: flags is 0x3; pass 0 or KVR_SEGMENT_COHERENT (0x1)");
    TRUE(own[0].region == 0 && own[1].region == 0);
    IS(kvr_region_register_segments(e, NULL, 1), KVR_ERR_INVALID);
    IS(kvr_region_register_segments(e, NULL, 0), KVR_OK);
    IS(kvr_region_register_segments(e, own, SIZE_MAX / 8), KVR_ERR_INVALID);
    own[1].flags = KVR_SEGMENT_COHERENT;
    IS(kvr_region_register_segments(e, own, 2), KVR_OK);
    for (int i = 0; i < 2; i++) IS(kvr_region_deregister(e, own[i].region, 0), KVR_OK);
}

/* A provider is not even asked where nothing could come of it. */
static void not_asked(kvr_engine *verbs, int buffer) {
    struct provider p = {.mode = GOOD, .buffer = buffer};
    kvr_devmem_ops ops = ops_of(&p);
    kvr_segment s[3];
    size_t n = 3;
    kvr_engine *e = make("local");
    IS(kvr_region_register_device(e, &ops, 0x1234, 3 * PAGE, s, &n), KVR_ERR_UNSUPPORTED);
    SAYS("transport local");
    IS(kvr_region_register_segments(e, s, 0), KVR_ERR_UNSUPPORTED);
    IS(kvr_engine_destroy(e), KVR_OK);
    pid_t child = fork();
    if (child == 0) {
        n = 3;
        IS(kvr_region_register_device(verbs, &ops, 0x1234, 3 * PAGE, s, &n), KVR_ERR_FORKED);
        IS(kvr_region_register_segments(verbs, s, 0), KVR_ERR_FORKED);
        TRUE(p.gets == 0);
        _exit(failures != 0);
    }
    int status = 0;
    TRUE(waitpid(child, &status, 0) == child && status == 0);
    TRUE(p.gets == 0 && p.puts == 0);
}

struct shared {
    kvr_engine *e;
    int buffer;
};

static void *often(void *arg) {
    struct shared *shared = arg;
    struct provider p = {.mode = GOOD, .buffer = shared->buffer};
    kvr_devmem_ops ops = ops_of(&p);
    for (int i = 1; i <= 100; i++) {
        kvr_segment s[3];
        size_t n = 3;
        IS(kvr_region_register_device(shared->e, &ops, 0x1234, 3 * PAGE, s, &n), KVR_OK);
        for (size_t k = n; k-- > 0;) IS(kvr_region_deregister(shared->e, s[k].region, 0), KVR_OK);
        TRUE(p.gets == i && p.puts == i);
    }
    return NULL;
}

int main(void) {
    void *fake = dlopen(getenv("KVRAIL_IBVERBS"), RTLD_NOW);
    if (fake == NULL) return printf("%s\n", dlerror()), 1;
    void *found[2] = {dlsym(fake, "fakeverbs_set"), dlsym(fake, "fakeverbs_get")};
    memcpy(&fake_set, &found[0], sizeof fake_set);
    memcpy(&fake_get, &found[1], sizeof fake_get);
    int buffer = memfd_create("kvrail-cabi", MFD_CLOEXEC);
    TRUE(buffer >= 0 && ftruncate(buffer, 16 * PAGE) == 0);
    kvr_engine *e = make("verbs");
    uint64_t before = live();

    arguments(e, buffer);
    behaving(e, buffer);
    misbehaving(e, buffer);
    not_asked(e, buffer);

    int files = open_files();
    pthread_t threads[4];
    struct shared shared = {e, buffer};
    for (int i = 0; i < 4; i++) TRUE(pthread_create(&threads[i], NULL, often, &shared) == 0);
    for (int i = 0; i < 4; i++) TRUE(pthread_join(threads[i], NULL) == 0);
    TRUE(live() == before && open_files() == files);

    /* What is registered when the engine ends goes back then, once for each get. */
    struct provider left[2] = {{.buffer = buffer}, {.buffer = buffer, .engine = e, .ends = 1}};
    for (int i = 0; i < 2; i++) {
        kvr_devmem_ops ops = ops_of(&left[i]);
        kvr_segment s[3];
        size_t n = 3;
        IS(kvr_region_register_device(e, &ops, 0x1234, 3 * PAGE, s, &n), KVR_OK);
        if (i == 0) IS(kvr_region_deregister(e, s[1].region, 0), KVR_OK);
    }
    IS(kvr_engine_destroy(e), KVR_OK);
    TRUE(left[0].gets == 1 && left[0].puts == 1 && left[1].gets == 1 && left[1].puts == 1);
    TRUE(live() == 0);
    if (failures == 0) printf("devmem.c: OK\n");
    return failures != 0;
}
