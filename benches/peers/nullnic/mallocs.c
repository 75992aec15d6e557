/* Preloaded to count allocations into the file that NULLNIC_MALLOCS names. */
#include "counters.h"

#include <errno.h>
#include <stddef.h>

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *at, size_t size);
extern void *__libc_memalign(size_t align, size_t size);

static struct nn_counters *counters;

__attribute__((constructor)) static void begin(void) {
    counters = nn_counters_map("NULLNIC_MALLOCS");
}

static void one(void) {
    if (counters != NULL) nn_add(&counters->mallocs, 1);
}

void *malloc(size_t size) {
    one();
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    one();
    return __libc_calloc(count, size);
}

void *realloc(void *at, size_t size) {
    one();
    return __libc_realloc(at, size);
}

void *aligned_alloc(size_t align, size_t size) {
    one();
    return __libc_memalign(align, size);
}

int posix_memalign(void **out, size_t align, size_t size) {
    one();
    *out = __libc_memalign(align, size);
    return *out != NULL ? 0 : ENOMEM;
}
