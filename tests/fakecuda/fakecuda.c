/* See fakecuda.h. What the real driver does was read in its manual, and seen with driver 580.159.04
 * on an H200: which calls need a context, what an address of each kind says of itself, which
 * exports are refused and how. */
#define _GNU_SOURCE
#include "fakecuda.h"

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define BLOCK (2ull << 20)
#define PAGE 4096ull
#define FIRST 0x710000000000ull

enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201, NOT_SUPPORTED = 801 };
enum { ALLOCS = 64, EXPORTS = 64, KNOBS = 64, DEEP = 8 };

struct alloc {
    int kind;
    uint64_t base, size; /* as it was asked for */
    uint64_t from, top;  /* what is mapped, in whole blocks */
    char *host;          /* of `from` */
    int ordered;
};

/* A buffer that was exported: its pages are in a file of their own from then on. */
struct export {
    uint64_t start, size;
    int fd;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct alloc allocs[ALLOCS];
static struct export exports[EXPORTS];
static int alloc_count, export_count, exported, initialised, retained[2];
static uint64_t next = FIRST, small = 0;
static char own_context, primary[2];
static __thread void *stack[DEEP];
static __thread int depth;

static struct {
    char name[48];
    int64_t value;
} knobs[KNOBS];
static int knob_count;

static int64_t knob(const char *name, int64_t otherwise) {
    for (int i = 0; i < knob_count; i++)
        if (strcmp(knobs[i].name, name) == 0) return knobs[i].value;
    return otherwise;
}

API int fakecuda_set(const char *text) {
    const char *eq = strchr(text, '=');
    if (!eq || (size_t)(eq - text) >= sizeof knobs[0].name) return -1;
    char name[sizeof knobs[0].name] = "";
    memcpy(name, text, (size_t)(eq - text));
    if (strncmp(name, "fail.", 5) != 0 && strncmp(name, "attr.", 5) != 0 &&
        strcmp(name, "dmabuf") != 0 && strcmp(name, "fd") != 0 && strcmp(name, "version") != 0)
        return -1;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < knob_count && strcmp(knobs[i].name, name) != 0) i++;
    if (i < KNOBS) {
        memcpy(knobs[i].name, name, sizeof name);
        knobs[i].value = strtoll(eq + 1, NULL, 0);
        if (i == knob_count) knob_count++;
    }
    pthread_mutex_unlock(&lock);
    return i < KNOBS ? 0 : -1;
}

API int64_t fakecuda_get(const char *name) {
    if (strcmp(name, "contexts") == 0) return depth;
    if (strcmp(name, "primaries") == 0) return retained[0] + retained[1];
    if (strcmp(name, "exports") == 0) return exported;
    if (strcmp(name, "files") == 0) return export_count;
    if (strcmp(name, "ordered") != 0) return -1;
    int n = 0;
    for (int i = 0; i < alloc_count; i++) n += allocs[i].ordered;
    return n;
}

static int fails(const char *call) {
    char name[48];
    snprintf(name, sizeof name, "fail.%s", call);
    return (int)knob(name, 0);
}

/* The address space of the device: nothing is mapped there, so that whoever follows an address of
 * it in this process is found at once. */
API uint64_t fakecuda_alloc(int kind, uint64_t size) {
    pthread_mutex_lock(&lock);
    uint64_t out = 0;
    if (alloc_count < ALLOCS && size > 0) {
        struct alloc *a = &allocs[alloc_count];
        *a = (struct alloc){.kind = kind, .size = size};
        struct alloc *last = alloc_count > 0 ? a - 1 : NULL;
        if (kind == FAKECUDA_SMALL && last && last->kind == kind && small + size <= last->top) {
            a->from = last->from, a->top = last->top, a->host = last->host;
            a->base = small;
        } else {
            uint64_t whole = (size + BLOCK - 1) / BLOCK * BLOCK;
            a->host = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            if (a->host == MAP_FAILED) abort();
            a->base = a->from = next;
            a->top = next + whole;
            if (kind >= FAKECUDA_VMM) a->top -= BLOCK;
            next += whole + BLOCK; /* a gap, as between allocations of the real driver */
        }
        small = a->base + (size + 511) / 512 * 512;
        alloc_count++;
        out = a->base;
    }
    pthread_mutex_unlock(&lock);
    return out;
}

API void fakecuda_reset(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < export_count; i++) close(exports[i].fd);
    alloc_count = export_count = 0;
    small = 0;
    pthread_mutex_unlock(&lock);
}

/* What holds an address that is mapped. */
static struct alloc *find(uint64_t addr) {
    for (int i = 0; i < alloc_count; i++) {
        struct alloc *a = &allocs[i];
        if (addr >= a->base && addr < a->base + a->size && addr < a->top) return a;
    }
    return NULL;
}

API void *fakecuda_host(uint64_t addr) {
    struct alloc *a = find(addr);
    return a ? a->host + (addr - a->from) : NULL;
}

API int cuInit(unsigned flags) {
    int code = fails("cuInit");
    if (code == OK) initialised = 1;
    return flags != 0 ? INVALID_VALUE : code;
}

API int cuDriverGetVersion(int *version) {
    *version = (int)knob("version", 13000);
    return fails("cuDriverGetVersion");
}

API int cuGetErrorName(int code, const char **name) {
    *name = code == INVALID_VALUE     ? "CUDA_ERROR_INVALID_VALUE"
            : code == NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED"
            : code == 100             ? "CUDA_ERROR_NO_DEVICE"
            : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
            : code == NOT_SUPPORTED   ? "CUDA_ERROR_NOT_SUPPORTED"
                                      : NULL;
    return *name ? OK : INVALID_VALUE;
}

API int cuDeviceGet(int *device, int ordinal) {
    if (fails("cuDeviceGet")) return fails("cuDeviceGet");
    if (ordinal < 0 || ordinal > 1) return 101;
    *device = ordinal;
    return OK;
}

API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (fails("cuDeviceGetAttribute")) return fails("cuDeviceGetAttribute");
    if (device < 0 || device > 1) return 101;
    if (attribute != 124) return INVALID_VALUE;
    *value = (int)knob("dmabuf", 1);
    return OK;
}

API int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (fails("cuDevicePrimaryCtxRetain")) return fails("cuDevicePrimaryCtxRetain");
    __atomic_add_fetch(&retained[device], 1, __ATOMIC_RELAXED);
    *context = &primary[device];
    return OK;
}

API int cuDevicePrimaryCtxRelease_v2(int device) {
    __atomic_sub_fetch(&retained[device], 1, __ATOMIC_RELAXED);
    return OK;
}

API int cuCtxPushCurrent_v2(void *context) {
    if (fails("cuCtxPushCurrent_v2")) return fails("cuCtxPushCurrent_v2");
    int known = context == &own_context || (context == &primary[0] && retained[0] > 0) ||
                (context == &primary[1] && retained[1] > 0);
    if (!known || depth == DEEP) return INVALID_CONTEXT;
    stack[depth++] = context;
    return OK;
}

API int cuCtxPopCurrent_v2(void **context) {
    if (depth == 0) return INVALID_CONTEXT;
    *context = stack[--depth];
    return OK;
}

/* Of the piece that holds the address. */
static int device_of(const struct alloc *a, uint64_t addr) {
    return a->kind == FAKECUDA_BOTH && (addr - a->from) / BLOCK == 1;
}

static uint64_t attribute(const struct alloc *a, unsigned which, uint64_t addr, size_t *size) {
    int pieces = a->kind >= FAKECUDA_VMM;
    *size = 8;
    switch (which) {
    case 1: return a->kind < FAKECUDA_POOL ? (uint64_t)(uintptr_t)&own_context : 0;
    case 11: return pieces ? a->from : a->base;
    case 12: return a->size;
    case 17: return a->kind == FAKECUDA_POOL ? 0x1234 : 0;
    case 18: return pieces ? BLOCK : a->top - a->from;
    case 19: return pieces ? addr / BLOCK * BLOCK : a->from;
    }
    *size = 4;
    switch (which) {
    case 2: return a->kind == FAKECUDA_PINNED ? 1 : 2;
    case 8: return a->kind == FAKECUDA_MANAGED;
    case 9: return (uint64_t)device_of(a, addr);
    case 15:
        return a->kind <= FAKECUDA_SMALL || a->kind == FAKECUDA_VMM || a->kind == FAKECUDA_BOTH;
    }
    *size = 0;
    return 0;
}

API int cuPointerGetAttribute(void *data, unsigned which, uint64_t addr) {
    char name[48];
    if (!initialised) return NOT_INITIALIZED;
    snprintf(name, sizeof name, "fail.%u", which);
    if (knob(name, 0)) return (int)knob(name, 0);
    pthread_mutex_lock(&lock);
    struct alloc *a = find(addr);
    size_t size = 0;
    uint64_t value = a ? attribute(a, which, addr, &size) : 0;
    pthread_mutex_unlock(&lock);
    if (size == 0) return INVALID_VALUE;
    snprintf(name, sizeof name, "attr.%u", which);
    int64_t instead = knob(name, -1);
    if (instead >= 0) value = (uint64_t)instead;
    memcpy(data, &value, size);
    return OK;
}

API int cuPointerSetAttribute(const void *data, unsigned which, uint64_t addr) {
    if (fails("cuPointerSetAttribute")) return fails("cuPointerSetAttribute");
    pthread_mutex_lock(&lock);
    struct alloc *a = find(addr);
    if (a && a->kind >= FAKECUDA_VMM) {
        pthread_mutex_unlock(&lock);
        return NOT_SUPPORTED;
    }
    if (a && which == 6) a->ordered = *(const unsigned *)data == 1;
    pthread_mutex_unlock(&lock);
    return a && which == 6 ? OK : INVALID_VALUE;
}

#ifndef FAKECUDA_OLD
/* A file that holds the pages of a range from now on, for the host's view too. Two exports that
 * overlap and begin at different pages would need two files with the same pages: not here. */
static int file_of(struct alloc *a, uint64_t start, uint64_t size) {
    for (int i = 0; i < export_count; i++) {
        struct export *e = &exports[i];
        if (e->start == start && size <= e->size) return dup(e->fd);
        if (start < e->start + e->size && e->start < start + size) return -1;
    }
    if (export_count == EXPORTS) return -1;
    int fd = memfd_create("fakecuda", MFD_CLOEXEC);
    char *at = a->host + (start - a->from);
    if (fd < 0 || pwrite(fd, at, size, 0) != (ssize_t)size) abort();
    void *view = mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (view == MAP_FAILED) abort();
    exports[export_count++] = (struct export){start, size, fd};
    return dup(fd);
}

API int cuMemGetHandleForAddressRange(void *handle, uint64_t start, size_t size, int type,
                                      unsigned long long flags) {
    if (depth == 0) return INVALID_CONTEXT;
    if (fails("cuMemGetHandleForAddressRange")) return fails("cuMemGetHandleForAddressRange");
    if (type != 1 || flags != 0 || size == 0 || start % PAGE || size % PAGE) return INVALID_VALUE;
    if (knob("dmabuf", 1) == 0) return NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    int fd = -1, code = INVALID_VALUE;
    for (int i = 0; i < alloc_count; i++) {
        struct alloc *a = &allocs[i];
        int ours = start >= a->from && start + size <= a->top && a->kind != FAKECUDA_MANAGED &&
                   a->kind != FAKECUDA_PINNED;
        if (!ours) continue;
        if (knob("fd", 0) != 0) {
            fd = (int)knob("fd", 0);
            code = OK;
        } else if ((fd = file_of(a, start, size)) >= 0) {
            code = OK;
        } else {
            code = 304; /* CUDA_ERROR_OPERATING_SYSTEM */
        }
        break;
    }
    if (code == OK) exported++;
    pthread_mutex_unlock(&lock);
    *(int *)handle = fd;
    return code;
}
#endif
