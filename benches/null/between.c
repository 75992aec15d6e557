/* Preloaded: counts what any thread of the process calls between post and done, and says where that
 * is, for whoever looks at the system calls. The program calls between_mark(1) before it posts and
 * between_mark(0) when all is done; at its end the counts are written to the file BETWEEN_OUT. The
 * first BETWEEN_WARM times are not looked at: they wake threads that sleep. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum what { ALLOCATIONS, LOCKS, NIC_LOCKS, CONTROL, KINDS };

static atomic_int inside;
static atomic_ulong spans, count[KINDS];
static unsigned long warm;
static _Atomic(char *) nic_from, nic_to;
/* This thread has a name that is no data path's: it looks around from time to time. */
static __thread int control __attribute__((tls_model("initial-exec")));

/* The null NIC has locks of its own, in the place of a device: those are told apart. */
static void note(enum what what, const void *caller) {
    if (!atomic_load_explicit(&inside, memory_order_relaxed)) return;
    const char *at = caller;
    if (what == LOCKS && at >= nic_from && at < nic_to) what = NIC_LOCKS;
    if (control) what = CONTROL;
    atomic_fetch_add_explicit(&count[what], 1, memory_order_relaxed);
}

static void find_nic(void) {
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        unsigned long from, to;
        char x;
        if (sscanf(line, "%lx-%lx %*c%*c%c", &from, &to, &x) != 3 || x != 'x') continue;
        for (const char *at = line; *at != '\0'; at++) {
            static const char NAME[] = "libfakeverbs.so";
            size_t i = 0;
            while (NAME[i] != '\0' && at[i] == NAME[i]) i++;
            if (NAME[i] != '\0') continue;
            nic_from = (char *)from;
            nic_to = (char *)to;
        }
    }
    if (maps != NULL) fclose(maps);
}

__attribute__((visibility("default"))) void between_mark(int begins) {
    if (nic_from == NULL) {
        const char *text = getenv("BETWEEN_WARM");
        warm = text == NULL ? 0 : strtoul(text, NULL, 10);
        find_nic();
    }
    if (warm > 0) {
        warm -= !begins;
    } else if (begins) {
        atomic_fetch_add(&spans, 1);
        /* Shows in a trace of system calls; it fails, which is all that it is for. */
        (void)!write(-1, "between post", 12);
        atomic_store(&inside, 1);
    } else {
        atomic_store(&inside, 0);
        (void)!write(-1, "between done", 12);
    }
}

__attribute__((destructor)) static void report(void) {
    const char *path = getenv("BETWEEN_OUT");
    FILE *out = path == NULL || spans == 0 ? NULL : fopen(path, "we");
    if (out == NULL) return;
    fprintf(out, "{\"spans\": %lu, \"allocations\": %lu, \"locks\": %lu, \"nic_locks\": %lu, "
                 "\"control\": %lu}\n",
            spans, count[ALLOCATIONS], count[LOCKS], count[NIC_LOCKS], count[CONTROL]);
    fclose(out);
}

static void *next(const char *name) {
    void *at = dlsym(RTLD_NEXT, name);
    if (at == NULL) abort();
    return at;
}

int pthread_setname_np(pthread_t thread, const char *name) {
    static _Atomic(int (*)(pthread_t, const char *)) real;
    int (*f)(pthread_t, const char *) = real;
    if (f == NULL) f = real = (int (*)(pthread_t, const char *))next("pthread_setname_np");
    /* As Rust does it: each names itself, before it does anything else. */
    static const char CONTROL_NAME[] = "kvrail-ctl";
    int i = 0;
    while (CONTROL_NAME[i] != '\0' && name[i] == CONTROL_NAME[i]) i++;
    if (pthread_equal(thread, pthread_self()) && CONTROL_NAME[i] == '\0') control = 1;
    return f(thread, name);
}

/* The allocator's inner names need no lookup, which would allocate. */
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

#define CALLER __builtin_return_address(0)

void *malloc(size_t n) {
    note(ALLOCATIONS, CALLER);
    return __libc_malloc(n);
}
void *calloc(size_t n, size_t size) {
    note(ALLOCATIONS, CALLER);
    return __libc_calloc(n, size);
}
void *realloc(void *p, size_t n) {
    note(ALLOCATIONS, CALLER);
    return __libc_realloc(p, n);
}
void free(void *p) {
    if (p != NULL) note(ALLOCATIONS, CALLER);
    __libc_free(p);
}
int posix_memalign(void **p, size_t align, size_t n) {
    note(ALLOCATIONS, CALLER);
    *p = __libc_memalign(align, n);
    return *p == NULL ? 12 : 0;
}
void *aligned_alloc(size_t align, size_t n) {
    note(ALLOCATIONS, CALLER);
    return __libc_memalign(align, n);
}

#define COUNTED(name, type)                              \
    int name(type *x) {                                  \
        static _Atomic(int (*)(type *)) real;            \
        int (*f)(type *) = real;                         \
        if (f == NULL) f = real = (int (*)(type *))next(#name); \
        note(LOCKS, CALLER);                             \
        return f(x);                                     \
    }
COUNTED(pthread_mutex_lock, pthread_mutex_t)
COUNTED(pthread_mutex_trylock, pthread_mutex_t)
COUNTED(pthread_rwlock_rdlock, pthread_rwlock_t)
COUNTED(pthread_rwlock_wrlock, pthread_rwlock_t)
COUNTED(sem_wait, sem_t)

int pthread_spin_lock(pthread_spinlock_t *x) {
    static _Atomic(int (*)(pthread_spinlock_t *)) real;
    int (*f)(pthread_spinlock_t *) = real;
    if (f == NULL) f = real = (int (*)(pthread_spinlock_t *))next("pthread_spin_lock");
    note(LOCKS, CALLER);
    return f(x);
}
