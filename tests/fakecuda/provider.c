/* The CUDA provider by itself: what it gives, what it refuses and how, and that nothing is left.
 * usage: provider      with KVRAIL_LIBCUDA=libfakecuda.so
 *        provider old  with KVRAIL_LIBCUDA=libfakecuda-old.so, a driver before CUDA 11.7
 *        provider none with KVRAIL_LIBCUDA of a file that is not there
 */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#define BLOCK (2ull << 20)
#define MIB (1ull << 20)

static const kvr_devmem_ops *ops;

static kvr_status get(uint64_t addr, uint64_t len, kvr_segment *out) {
    size_t n = 1;
    text[0] = '\0';
    kvr_status status = ops->get(ops->context, addr, len, out, &n, text, sizeof text);
    if (status == KVR_OK) IS(n, 1);
    return status;
}

/* Refused with this status, and then nothing is left behind: no fd, no context. */
#define REFUSED(addr, len, want) \
    do { \
        int before = fds(); \
        kvr_segment none; \
        IS(get(addr, len, &none), want); \
        IS(fds(), before); \
        IS(cuda_get("contexts"), 0); \
        IS(cuda_get("primaries"), 0); \
    } while (0)

/* The dma-buf of `len` bytes at `addr` holds at the segment's offset what the device holds, is
 * whole pages, and is gone after put. */
static void gives(int line, uint64_t addr, uint64_t len) {
    kvr_segment s;
    memset(&s, 0xff, sizeof s);
    int before = fds();
    kvr_status status = get(addr, len, &s);
    if (status != KVR_OK) {
        report("provider.c", line, "refused", status);
        return;
    }
    IS(fds(), before + 1);
    IS(s.addr, addr);
    IS(s.len, len);
    IS(s.offset, addr % 4096);
    IS(s.area, 0);
    IS(s.slice_id, 0);
    IS(s.flags, 0);
    IS(s.region, 0);
    IS(lseek(s.fd, 0, SEEK_END), (s.offset + len + 4095) / 4096 * 4096);
    char *device = cuda_host(addr), *seen = malloc(len);
    for (uint64_t i = 0; i < len; i++) device[i] = (char)(i * 7 + line);
    IS(pread(s.fd, seen, len, (off_t)s.offset), (long long)len);
    IS(memcmp(seen, device, len), 0);
    free(seen);
    int kept = fcntl(s.fd, F_DUPFD_CLOEXEC, 0);
    ops->put(ops->context, &s, 1);
    IS(fcntl(s.fd, F_GETFD), -1);
    IS(fds(), before + 1);
    close(kept);
    IS(cuda_get("contexts"), 0);
    IS(cuda_get("primaries"), 0);
}
#define GIVES(addr, len) gives(__LINE__, addr, len)

static void ranges(void) {
    uint64_t at = cuda_alloc(FAKECUDA_DEVICE, 4 * MIB);
    GIVES(at, 4 * MIB);
    IS(cuda_get("ordered"), 1);
    cuda_reset();
    at = cuda_alloc(FAKECUDA_DEVICE, 4 * MIB);
    GIVES(at + 4096, 8192);          /* whole pages */
    GIVES(at + MIB + 5, 1);          /* a byte */
    GIVES(at + 2 * MIB + 4000, 200); /* over a page's end */
    GIVES(at + 4 * MIB - 1, 1);      /* the last byte */
    GIVES(at + 2 * MIB + 64 * 1024 + 7, 100000);
    /* Past the end; before the start; behind it. */
    REFUSED(at, 4 * MIB + 1, KVR_ERR_INVALID);
    SAYS("not inside its allocation of 4194304 bytes at 0x71");
    SAYS("ends 1 bytes behind");
    REFUSED(at + 4 * MIB - 4096, 8192, KVR_ERR_INVALID);
    SAYS("ends 4096 bytes behind");
    REFUSED(at - 1, 2, KVR_ERR_NOT_FOUND);
    REFUSED(at + 4 * MIB, 1, KVR_ERR_NOT_FOUND);
    REFUSED(at, 0, KVR_ERR_INVALID);
    SAYS("0 bytes from 0x71");
    REFUSED(at, UINT64_MAX, KVR_ERR_INVALID);
    SAYS("18446744073709551615 bytes from 0x71");
    cuda_reset();

    /* Small allocations share pages, as with the real driver: the pages are the block's. */
    uint64_t first = cuda_alloc(FAKECUDA_SMALL, 5000);
    uint64_t second = cuda_alloc(FAKECUDA_SMALL, 5000);
    IS(second - first, 5120);
    GIVES(second, 5000);
    REFUSED(second, 5001, KVR_ERR_INVALID);
    SAYS("not inside its allocation of 5000 bytes");
    cuda_reset();
}

static void kinds(void) {
    char *plain = malloc(8192);
    REFUSED((uint64_t)(uintptr_t)plain, 4096, KVR_ERR_NOT_FOUND);
    SAYS("no CUDA memory of this process");
    SAYS("DRAM");
    free(plain);
    REFUSED(cuda_alloc(FAKECUDA_MANAGED, MIB), MIB, KVR_ERR_INVALID);
    SAYS("managed memory");
    SAYS("cudaMalloc");
    REFUSED(cuda_alloc(FAKECUDA_PINNED, MIB), MIB, KVR_ERR_INVALID);
    SAYS("pinned memory of the host");
    SAYS("KVR_MEM_HOST");
    REFUSED(cuda_alloc(FAKECUDA_POOL, MIB), MIB, KVR_ERR_UNSUPPORTED);
    SAYS("memory pool (cudaMallocAsync)");
    uint64_t at = cuda_alloc(FAKECUDA_DEVICE, MIB);
    cuda_set("attr.2=3");
    REFUSED(at, MIB, KVR_ERR_INVALID);
    SAYS("memory of CUDA's type 3");
    cuda_set("attr.2=-1");
    cuda_set("attr.9=0xfffffffe"); /* cudaInvalidDeviceId */
    REFUSED(at, MIB, KVR_ERR_INVALID);
    SAYS("0xfffffffe");
    cuda_set("attr.9=-1");
    GIVES(at, MIB);
    cuda_reset();
}

/* Memory that was mapped piece by piece. */
static void pieces(void) {
    uint64_t at = cuda_alloc(FAKECUDA_VMM, 4 * BLOCK);
    GIVES(at, 3 * BLOCK);
    cuda_reset();
    at = cuda_alloc(FAKECUDA_VMM, 4 * BLOCK);
    GIVES(at + BLOCK - 100, 200); /* over a seam */
    REFUSED(at + BLOCK, 3 * BLOCK, KVR_ERR_INVALID);
    SAYS("nothing is mapped at 0x71");
    SAYS("4194304 bytes behind its start");
    REFUSED(at, 4 * BLOCK + 1, KVR_ERR_INVALID);
    SAYS("not inside its allocation of 8388608 bytes");
    cuda_reset();
    REFUSED(cuda_alloc(FAKECUDA_PLAIN, 2 * BLOCK), BLOCK, KVR_ERR_UNSUPPORTED);
    SAYS("gpuDirectRDMACapable");
    at = cuda_alloc(FAKECUDA_BOTH, 4 * BLOCK);
    REFUSED(at, 2 * BLOCK, KVR_ERR_INVALID);
    SAYS("begins on device 0");
    SAYS("is mapped on device 1");
    cuda_reset();
    at = cuda_alloc(FAKECUDA_BOTH, 4 * BLOCK);
    GIVES(at + BLOCK, BLOCK); /* device 1 alone */
    cuda_reset();
    /* Pages that reach out of what is mapped. */
    at = cuda_alloc(FAKECUDA_SMALL, 5000);
    cuda_set("attr.18=6000");
    REFUSED(at, 5000, KVR_ERR_INVALID);
    SAYS("pages of 4096 bytes");
    cuda_set("attr.18=-1");
    for (int i = 0; i < 2; i++) { /* below it, above it */
        cuda_set(i ? "attr.19=0x7f0000000000" : "attr.19=0x1000");
        REFUSED(at, 5000, KVR_ERR_INVALID);
        SAYS("does not hold it");
    }
    cuda_set("attr.19=-1");
    cuda_reset();
}

/* Each call of the driver fails once. */
static void failing(void) {
    static const char *const calls[] = {
        "2", "8", "9", "11", "12", "1", "15", "18", "19", "cuDeviceGet", "cuDeviceGetAttribute",
        "cuCtxPushCurrent_v2", "cuDevicePrimaryCtxRetain", "cuPointerSetAttribute",
        "cuMemGetHandleForAddressRange",
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        char knob[64];
        uint64_t at = cuda_alloc(FAKECUDA_VMM, 2 * BLOCK);
        snprintf(knob, sizeof knob, "fail.%s=999", calls[i]);
        IS(cuda_set(knob), 0);
        REFUSED(at, BLOCK, KVR_ERR_OS);
        SAYS("CUresult 999");
        snprintf(knob, sizeof knob, "fail.%s=0", calls[i]);
        cuda_set(knob);
        GIVES(at, BLOCK);
        cuda_reset();
    }
    uint64_t pool = cuda_alloc(FAKECUDA_POOL, BLOCK);
    cuda_set("fail.17=999");
    REFUSED(pool, BLOCK, KVR_ERR_OS);
    cuda_set("fail.17=0");
    uint64_t at = cuda_alloc(FAKECUDA_DEVICE, BLOCK);
    cuda_set("fail.cuMemGetHandleForAddressRange=1");
    REFUSED(at, BLOCK, KVR_ERR_OS);
    SAYS("cuMemGetHandleForAddressRange(0x71");
    SAYS("2097152) gave CUDA_ERROR_INVALID_VALUE (1)");
    cuda_set("fail.cuMemGetHandleForAddressRange=801");
    REFUSED(at, BLOCK, KVR_ERR_UNSUPPORTED);
    SAYS("CUDA_ERROR_NOT_SUPPORTED (801) on device 0 (CUDA 13.0)");
    SAYS("nvidia-peermem");
    IS(cuda_get("ordered"), 0); /* what is refused stays as it was */
    cuda_set("fail.cuMemGetHandleForAddressRange=0");
    cuda_set("fail.cuPointerSetAttribute=999"); /* after the export, whose fd is closed then */
    REFUSED(at, BLOCK, KVR_ERR_OS);
    SAYS("SYNC_MEMOPS");
    cuda_set("fail.cuPointerSetAttribute=0");
    cuda_set("dmabuf=0");
    REFUSED(at, BLOCK, KVR_ERR_UNSUPPORTED);
    SAYS("device 0 (CUDA 13.0) cannot export its memory");
    SAYS("open kernel modules");
    SAYS("nvidia-peermem");
    SAYS("devmem=none");
    cuda_set("dmabuf=1");
    cuda_set("fd=-7");
    REFUSED(at, BLOCK, KVR_ERR_UNSUPPORTED);
    SAYS("gave -7");
    cuda_set("fd=0");
    IS(cuda_get("ordered"), 0);
    GIVES(at, BLOCK);
    IS(cuda_get("ordered"), 1);
    cuda_reset();
}

static void arguments(void) {
    uint64_t at = cuda_alloc(FAKECUDA_DEVICE, BLOCK);
    kvr_segment s;
    size_t n = 0;
    int before = fds();
    IS(ops->get(ops->context, at, BLOCK, &s, &n, text, sizeof text), KVR_ERR_CAPACITY);
    IS(n, 1);
    SAYS("room for 0 segments");
    IS(ops->get(ops->context, at, BLOCK, &s, NULL, text, sizeof text), KVR_ERR_INVALID);
    SAYS("n is NULL");
    IS(ops->get(ops->context, at, BLOCK, NULL, &n, text, sizeof text), KVR_ERR_INVALID);
    SAYS("segments is NULL");
    /* A short place for the reason is filled up to its NUL, and none is allowed. */
    memset(text, 'x', sizeof text);
    IS(ops->get(ops->context, at, 0, &s, &n, text, 8), KVR_ERR_INVALID);
    IS(strlen(text), 7);
    IS(ops->get(ops->context, at, 0, &s, &n, NULL, 0), KVR_ERR_INVALID);
    IS(fds(), before);
    /* A segment without fd is nobody's, and an empty list is taken back. */
    s.fd = -1;
    ops->put(ops->context, &s, 1);
    ops->put(ops->context, NULL, 0);
    IS(ops->struct_size, sizeof *ops);
    IS(strcmp(ops->name, "cuda"), 0);
    IS(kvr_devmem_cuda(NULL), KVR_ERR_INVALID);
    cuda_reset();
}

static void *worker(void *at) {
    kvr_segment s;
    for (int i = 0; i < 500; i++) {
        char why[256] = "";
        size_t n = 1;
        if (ops->get(ops->context, (uint64_t)(uintptr_t)at, BLOCK, &s, &n, why, sizeof why) != 0)
            return "refused";
        ops->put(ops->context, &s, 1);
    }
    return NULL;
}

/* Many cycles on several threads leave nothing behind. */
static void cycles(void) {
    uint64_t at = cuda_alloc(FAKECUDA_VMM, 2 * BLOCK);
    pthread_t threads[4];
    GIVES(at, BLOCK);
    int before = fds();
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, worker, (void *)(uintptr_t)at);
    for (int i = 0; i < 4; i++) {
        void *said = NULL;
        pthread_join(threads[i], &said);
        IS(said != NULL, 0);
    }
    IS(fds(), before);
    IS(cuda_get("primaries"), 0);
    IS(cuda_get("exports"), 2001);
    cuda_reset();
}

/* Not loaded: why, what is needed, and NULL. */
static void not_loaded(const char *part) {
    ops = (const kvr_devmem_ops *)&failures;
    IS(kvr_devmem_cuda(&ops), KVR_ERR_UNSUPPORTED);
    IS(ops == NULL, 1);
    kvr_last_error(text, sizeof text);
    IS(strncmp(text, "kvr_devmem_cuda: ", 17), 0);
    SAYS(part);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "none") == 0) {
        not_loaded("the CUDA driver cannot be loaded: ");
        SAYS(getenv("KVRAIL_LIBCUDA"));
        return failures != 0;
    }
    open_fake();
    if (strcmp(what, "old") == 0) {
        cuda_set("version=11040");
        not_loaded("(CUDA 11.4) has no cuMemGetHandleForAddressRange");
        SAYS("515");
        return failures != 0;
    }
    cuda_set("fail.cuInit=100");
    not_loaded("cuInit gave CUDA_ERROR_NO_DEVICE (100)");
    SAYS("nvidia-smi");
    cuda_set("fail.cuInit=0");
    IS(kvr_devmem_cuda(&ops), KVR_OK); /* after a failure too */
    if (ops != NULL) {
        cycles();
        ranges();
        kinds();
        pieces();
        failing();
        arguments();
    }
    printf("provider: %d failures\n", failures);
    return failures != 0;
}
