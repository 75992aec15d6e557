/* The CUDA provider on a real GPU, by hand: every kind of memory, what its dma-buf is, and that fds
 * stay as many. No NIC is needed, and no byte moves.
 *
 *     cc -std=c11 -Iinclude -Itests/fakecuda tests/fakecuda/gpu.c -Ltarget/release -lkvrail -ldl \
 *         -Wl,-rpath,$PWD/target/release -o gpu && ./gpu
 */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define PIECE (2 * MIB)

static const kvr_devmem_ops *ops;
static void *driver;

typedef unsigned long long u64;

static int cu(const char *call, int code) {
    if (code != 0) {
        fprintf(stderr, "gpu.c: %s gave %d\n", call, code);
        exit(1);
    }
    return code;
}

static void *call(const char *name) { return symbol(driver, name); }

/* CUmemAllocationProp: pinned memory of device 0. */
struct prop {
    int type, handles, where, device;
    void *none;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
struct access {
    int where, device, flags;
};

static u64 mapped(int pieces, int rdma) {
    int (*reserve)(u64 *, size_t, size_t, u64, u64);
    int (*create)(u64 *, size_t, const struct prop *, u64);
    int (*map)(u64, size_t, size_t, u64, u64);
    int (*allow)(u64, size_t, const struct access *, size_t);
    *(void **)&reserve = call("cuMemAddressReserve");
    *(void **)&create = call("cuMemCreate");
    *(void **)&map = call("cuMemMap");
    *(void **)&allow = call("cuMemSetAccess");
    u64 at = 0;
    cu("cuMemAddressReserve", reserve(&at, 8 * PIECE, 0, 0, 0));
    for (int i = 0; i < pieces; i++) {
        struct prop prop = {.type = 1, .where = 1, .rdma = (unsigned char)rdma};
        u64 handle = 0;
        cu("cuMemCreate", create(&handle, PIECE, &prop, 0));
        cu("cuMemMap", map(at + (u64)i * PIECE, PIECE, 0, handle, 0));
    }
    struct access access = {1, 0, 3};
    cu("cuMemSetAccess", allow(at, (size_t)pieces * PIECE, &access, 1));
    return at;
}

static int open_fds(void) {
    int n = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder) != NULL) n++;
    closedir(folder);
    return n;
}

static kvr_status get(u64 at, u64 len, kvr_segment *s) {
    size_t n = 1;
    text[0] = '\0';
    return ops->get(ops->context, at, len, s, &n, text, sizeof text);
}

static void gives(const char *what, u64 at, u64 len) {
    kvr_segment s;
    int before = open_fds();
    kvr_status status = get(at, len, &s);
    if (status != KVR_OK) {
        report("gpu.c", __LINE__, what, status);
        return;
    }
    char path[64], info[1024] = "", exporter[64] = "none";
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", s.fd);
    FILE *file = fopen(path, "r");
    info[fread(info, 1, sizeof info - 1, file)] = '\0';
    fclose(file);
    const char *line = strstr(info, "exp_name:");
    if (line != NULL) sscanf(line, "exp_name: %63s", exporter);
    u64 size = (u64)lseek(s.fd, 0, SEEK_END);
    printf("%-34s %#llx + %llu: fd of %s, %llu bytes, offset %llu\n", what, at, len, exporter, size,
           (u64)s.offset);
    IS(strcmp(exporter, "none") != 0, 1);
    IS(s.offset, at % 4096);
    IS(size, (s.offset + len + 4095) / 4096 * 4096);
    ops->put(ops->context, &s, 1);
    IS(fcntl(s.fd, F_GETFD), -1);
    IS(open_fds(), before);
}

static void refuses(const char *what, u64 at, u64 len, kvr_status want) {
    kvr_segment s;
    int before = open_fds();
    kvr_status status = get(at, len, &s);
    printf("%-34s %#llx + %llu: %d: %s\n", what, at, len, status, text);
    if (status != want) report("gpu.c", __LINE__, what, status);
    IS(open_fds(), before);
}

static void *elsewhere(void *at) {
    gives("thread without a context", (u64)(uintptr_t)at, MIB);
    return NULL;
}

static void all(void) {
    int (*alloc)(u64 *, size_t), (*managed)(u64 *, size_t, unsigned), (*give_back)(u64);
    int (*pool)(u64 *, size_t, void *), (*pinned)(void **, size_t, unsigned);
    *(void **)&alloc = call("cuMemAlloc_v2");
    *(void **)&managed = call("cuMemAllocManaged");
    *(void **)&give_back = call("cuMemFree_v2");
    *(void **)&pool = call("cuMemAllocAsync");
    *(void **)&pinned = call("cuMemHostAlloc");
    u64 big = 0, small[2] = {0, 0}, moving = 0, pooled = 0, huge = 0;
    void *host = NULL;
    cu("cuMemAlloc", alloc(&big, 64 * MIB));
    gives("cuMemAlloc, whole", big, 64 * MIB);
    gives("cuMemAlloc, bytes inside", big + 5000, 100000);
    gives("cuMemAlloc, the last byte", big + 64 * MIB - 1, 1);
    refuses("cuMemAlloc, past its end", big + 64 * MIB - 4096, 4097, KVR_ERR_INVALID);
    pthread_t thread;
    pthread_create(&thread, NULL, elsewhere, (void *)(uintptr_t)big);
    pthread_join(thread, NULL);
    cu("cuMemAlloc", alloc(&small[0], 5000));
    cu("cuMemAlloc", alloc(&small[1], 5000));
    gives("cuMemAlloc, 5000 bytes", small[0], 5000);
    gives("cuMemAlloc, 5000 more", small[1], 5000);
    cu("cuMemAlloc", alloc(&huge, 9ull << 30));
    gives("cuMemAlloc, 9 GiB", huge, 9ull << 30);
    u64 at = mapped(2, 1);
    gives("cuMemMap, two pieces", at, 2 * PIECE);
    gives("cuMemMap, over the seam", at + PIECE - 100, 200);
    refuses("cuMemMap, with a hole", at, 3 * PIECE, KVR_ERR_INVALID);
    refuses("cuMemMap without the flag", mapped(1, 0), PIECE, KVR_ERR_UNSUPPORTED);
    cu("cuMemAllocAsync", pool(&pooled, 4 * MIB, NULL));
    refuses("cuMemAllocAsync", pooled, 4 * MIB, KVR_ERR_UNSUPPORTED);
    cu("cuMemAllocManaged", managed(&moving, 4 * MIB, 1));
    refuses("cuMemAllocManaged", moving, 4 * MIB, KVR_ERR_INVALID);
    cu("cuMemHostAlloc", pinned(&host, 4 * MIB, 3));
    refuses("cuMemHostAlloc", (u64)(uintptr_t)host, 4 * MIB, KVR_ERR_INVALID);
    host = malloc(8192);
    refuses("malloc", (u64)(uintptr_t)host, 8192, KVR_ERR_NOT_FOUND);

    int before = open_fds();
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < 10000; i++) {
        kvr_segment s;
        IS(get(big + (u64)i % 100 * 4097, MIB, &s), KVR_OK);
        ops->put(ops->context, &s, 1);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    double ns = ((double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec));
    printf("10000 cycles: fds %d before, %d after, %.1f us each\n", before, open_fds(),
           ns / 1e3 / 1e4);
    IS(open_fds(), before);
    cu("cuMemFree", give_back(big));
    refuses("cuMemFree was called", big, MIB, KVR_ERR_NOT_FOUND);
}

int main(void) {
    kvr_status status = kvr_devmem_cuda(&ops);
    if (status != KVR_OK) {
        kvr_last_error(text, sizeof text);
        printf("no GPU here: %s\n", text);
        return 77;
    }
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*version)(int *), (*retain)(void **, int), (*current)(void *), number = 0;
    void *context = NULL;
    *(void **)&version = call("cuDriverGetVersion");
    *(void **)&retain = call("cuDevicePrimaryCtxRetain");
    *(void **)&current = call("cuCtxSetCurrent");
    cu("cuDriverGetVersion", version(&number));
    cu("cuDevicePrimaryCtxRetain", retain(&context, 0));
    cu("cuCtxSetCurrent", current(context));
    printf("driver's CUDA version %d\n", number);
    all();
    printf("gpu: %d failures\n", failures);
    return failures != 0;
}
