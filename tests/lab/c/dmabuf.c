/* What an engine over real rails does with dma-bufs that it must refuse, and what it leaves behind.
 *
 * usage: dmabuf DEVICES takes|refuses      the devices of the engine (KVRAIL_NICS); whether the
 *                                          kernel takes dma-bufs
 * Prints verdicts, one a check: "lab: ok - WHAT" or "lab: FAIL - WHAT: WHY".
 */
#define _GNU_SOURCE
#include "mover.h"

#include <dirent.h>

enum { PAGE = 4096, BYTES = 1 << 20, LARGE = 32 << 20, CYCLES = 200, LARGE_ONES = 20 };
static const uint64_t AT = 0x600000000000;

static kvr_engine *engine;

static void verdict(const char *kind, const char *what, const char *wrong) {
    if (wrong) printf("lab: FAIL - %s: %s: %s\n", kind, what, wrong);
    else printf("lab: ok - %s: %s\n", kind, what);
    fflush(stdout);
}

/* ---- what is there ---- */

static int descriptors(void) {
    DIR *folder = opendir("/proc/self/fd");
    int n = 0;
    NEED(folder);
    while (readdir(folder)) n++;
    closedir(folder);
    return n;
}

/* Memory regions of the kernel's RDMA devices, of all processes. */
static int kernel_regions(void) {
    FILE *list = popen("rdma resource show mr", "r");
    char line[1024];
    int n = 0;
    NEED(list);
    while (fgets(line, sizeof line, list)) n += strstr(line, "mrn ") != NULL;
    NEED(pclose(list) == 0);
    return n;
}

static uint32_t engine_regions(void) {
    kvr_engine_info info = {.struct_size = sizeof info};
    MUST(kvr_engine_info_get(engine, &info));
    return info.regions;
}

struct count {
    int descriptors, kernel;
    uint32_t engine;
};

static struct count count(void) {
    return (struct count){descriptors(), kernel_regions(), engine_regions()};
}

/* What is more, or less, than before; NULL: nothing. */
static const char *changed(struct count before) {
    static char text[TEXT];
    struct count now = count();
    if (memcmp(&now, &before, sizeof now) == 0) return NULL;
    snprintf(text, sizeof text,
             "before and now: %d and %d descriptors, %d and %d regions in the kernel, %u and %u in "
             "the engine",
             before.descriptors, now.descriptors, before.kernel, now.kernel, before.engine,
             now.engine);
    return text;
}

/* ---- checks ---- */

static kvr_segment segment(int fd, uint64_t addr, uint64_t offset, uint64_t len) {
    return (kvr_segment){.addr = addr, .len = len, .offset = offset, .fd = fd};
}

struct refusal {
    const char *what;
    kvr_segment bad;
    kvr_status status;
    const char *word; /* what the text must have */
};

/* Registers a good segment, the bad one and another good one: nothing may stay. NULL: right. */
static const char *refused(int good, const struct refusal *r) {
    static char text[2 * TEXT];
    struct count before = count();
    kvr_segment all[] = {segment(good, AT, 0, BYTES / 2), r->bad,
                         segment(good, 2 * AT, BYTES / 2, BYTES / 2)};
    for (int i = 0; i < 3; i++) all[i].region = 12345;
    kvr_status got = kvr_region_register_segments(engine, all, 3);
    const char *said = got < 0 ? reason() : "";
    printf("%s: %s (%s)\n", r->what, said, kvr_strerror(got));
    if (got != r->status)
        snprintf(text, sizeof text, "status %d (%s), wanted %d", got, said, r->status);
    else if (!strstr(said, r->word))
        snprintf(text, sizeof text, "no word '%s' in: %s", r->word, said);
    else if (all[0].region || all[1].region || all[2].region)
        snprintf(text, sizeof text, "a handle of a region was given");
    else return changed(before);
    return text;
}

static void refusals(const char *kind, int fd) {
    int ends[2];
    NEED(pipe(ends) == 0);
    int closed = make_dmabuf(kind, BYTES);
    NEED(closed >= 0);
    close(closed);
    const struct refusal list[] = {
        {"no byte", segment(fd, AT, 0, 0), KVR_ERR_INVALID, "at least 1 byte"},
        {"a negative descriptor", segment(-7, AT, 0, PAGE), KVR_ERR_INVALID, "fd -7"},
        {"a closed descriptor", segment(closed, AT, 0, PAGE), KVR_ERR_INVALID, "is not open"},
        {"a descriptor of a pipe", segment(ends[0], AT, 0, PAGE), KVR_ERR_INVALID, "no dma-buf"},
        {"a byte past the end", segment(fd, AT, 0, BYTES + 1), KVR_ERR_INVALID,
         "at most 1048576 bytes"},
        {"a part past the end", segment(fd, AT, PAGE, BYTES), KVR_ERR_INVALID,
         "at most 1044480 bytes"},
        {"a part behind the end", segment(fd, AT, BYTES, PAGE), KVR_ERR_INVALID,
         "at most 0 bytes"},
        {"another place in the page", segment(fd, AT + 8, 0, PAGE), KVR_ERR_INVALID,
         "page size, 4096 bytes"},
        {"offsets that wrap", segment(fd, AT, -(uint64_t)PAGE, 2 * PAGE), KVR_ERR_INVALID,
         "64 bits"},
        {"addresses that wrap", segment(fd, -(uint64_t)PAGE, 0, 2 * PAGE), KVR_ERR_INVALID,
         "64 bits"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        verdict(kind, list[i].what, refused(fd, &list[i]));
    close(ends[0]);
    close(ends[1]);
}

static void once(kvr_segment *segments, size_t n) {
    MUST(kvr_region_register_segments(engine, segments, n));
    for (size_t i = 0; i < n; i++) MUST(kvr_region_deregister(engine, segments[i].region, 0));
}

/* Pieces that touch each other, overlap and repeat, each under other addresses. */
static void cycles(const char *kind, int fd) {
    kvr_segment parts[] = {
        segment(fd, AT, 0, BYTES),
        segment(fd, 2 * AT + PAGE, PAGE, BYTES - 2 * PAGE),
        segment(fd, 0x1040, 0x3040, 100),
    };
    once(parts, 3);
    struct count before = count();
    double begin = now();
    for (int i = 0; i < CYCLES; i++) once(parts, 3);
    printf("%d cycles of 3 regions took %.2f s\n", CYCLES, now() - begin);
    verdict(kind, "200 registrations and back leave nothing", changed(before));
    /* The guest has no room for all of these. Each is closed while it is registered. */
    for (int i = 0; i < LARGE_ONES; i++) {
        kvr_segment s = segment(make_dmabuf(kind, LARGE), AT, 0, LARGE);
        if (s.fd < 0) {
            verdict(kind, "memory goes back", strerror(errno));
            return;
        }
        MUST(kvr_region_register_segments(engine, &s, 1));
        NEED(close(s.fd) == 0);
        MUST(kvr_region_deregister(engine, s.region, 0));
    }
    verdict(kind, "memory goes back", changed(before));
}

/* On a kernel that takes none. */
static void unsupported(const char *kind, int fd) {
    static char host[BYTES];
    kvr_region region = 0;
    const struct refusal r = {"a dma-buf", segment(fd, AT, 0, BYTES), KVR_ERR_UNSUPPORTED,
                              "peer-memory"};
    verdict(kind, "a dma-buf is refused, and nothing stays", refused(fd, &r));
    const struct refusal bounce = {"a dma-buf", segment(fd, AT, 0, BYTES), KVR_ERR_UNSUPPORTED,
                                   "kv_buffer_device=cpu"};
    verdict(kind, "the other way out is named too", refused(fd, &bounce));
    MUST(kvr_region_register(engine, (uintptr_t)host, sizeof host, KVR_MEM_HOST, &region));
    MUST(kvr_region_deregister(engine, region, 0));
    verdict(kind, "memory of the host is taken as before", NULL);
}

int main(int argc, char **argv) {
    static const char *const kinds[] = {"udmabuf", "heap"};
    if (argc != 3) die("usage: dmabuf DEVICES takes|refuses");
    setvbuf(stdout, NULL, _IOLBF, 0);
    engine = make_engine("dmabuf", 'a', argv[1], 0, NULL);
    for (int i = 0; i < 2; i++) {
        int fd = make_dmabuf(kinds[i], BYTES);
        if (fd < 0) {
            verdict(kinds[i], "a dma-buf is made", strerror(errno));
            continue;
        }
        if (strcmp(argv[2], "takes") == 0) {
            refusals(kinds[i], fd);
            cycles(kinds[i], fd);
        } else {
            unsupported(kinds[i], fd);
        }
        close(fd);
    }
    MUST(kvr_engine_destroy(engine));
    return 0;
}
