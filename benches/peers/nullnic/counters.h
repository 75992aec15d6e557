/* Counters in a file that the process maps: whoever started it reads them, whatever its end was. */
#ifndef NULLNIC_COUNTERS_H
#define NULLNIC_COUNTERS_H

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Eight bytes each, in this order, in the machine's byte order. rig.py has the same list. */
struct nn_counters {
    atomic_ulong posts;     /* calls of post_send */
    atomic_ulong wrs;       /* work requests in them */
    atomic_ulong signalled; /* completions of them, one per signalled work request */
    atomic_ulong polls;     /* calls of poll_cq */
    atomic_ulong useful;    /* of these, with at least one completion */
    atomic_ulong mallocs;   /* malloc, calloc, realloc, aligned_alloc, posix_memalign */
};

/* NULL when `variable` names no file; the process ends when it names one that cannot be used. */
static inline struct nn_counters *nn_counters_map(const char *variable) {
    const char *path = getenv(variable);
    if (path == NULL) return NULL;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    void *at = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, sizeof(struct nn_counters)) == 0)
        at = mmap(NULL, sizeof(struct nn_counters), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        perror(path);
        _exit(1);
    }
    close(fd);
    return at;
}

static inline void nn_add(atomic_ulong *counter, unsigned long n) {
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

#endif
