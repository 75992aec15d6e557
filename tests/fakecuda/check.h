/* What the programs of this folder share: checks, and the fake driver found by name. */
#pragma once

#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fakecuda.h"
#include "kvrail.h"

static int failures;
static char text[4096]; /* of the last refusal */

static void report(const char *file, int line, const char *what, long long got) {
    fprintf(stderr, "%s:%d: %s, got %lld, text: %s\n", file, line, what, got, text);
    failures++;
}

#define IS(got, want) \
    do { \
        long long is_got = (long long)(got), is_want = (long long)(want); \
        if (is_got != is_want) report(__FILE__, __LINE__, #got " is not " #want, is_got); \
    } while (0)
#define SAYS(part) \
    do { \
        const char *says_part = (part); \
        if (strstr(text, says_part) == NULL) report(__FILE__, __LINE__, says_part, 0); \
    } while (0)

static uint64_t (*cuda_alloc)(int kind, uint64_t size);
static void *(*cuda_host)(uint64_t addr);
static void (*cuda_reset)(void);
static int (*cuda_set)(const char *knob);
static int64_t (*cuda_get)(const char *name);

static void *symbol(void *library, const char *name) {
    void *at = dlsym(library, name);
    if (at == NULL) {
        fprintf(stderr, "no %s\n", name);
        exit(2);
    }
    return at;
}

/* Opens the library of KVRAIL_LIBCUDA, which kvrail will find to be the same. */
static inline void open_fake(void) {
    const char *path = getenv("KVRAIL_LIBCUDA");
    void *library = path ? dlopen(path, RTLD_NOW) : NULL;
    if (library == NULL) {
        fprintf(stderr, "KVRAIL_LIBCUDA does not name the fake: %s\n", path ? dlerror() : "unset");
        exit(2);
    }
    /* ISO C has no cast from an object to a function. */
    *(void **)&cuda_alloc = symbol(library, "fakecuda_alloc");
    *(void **)&cuda_host = symbol(library, "fakecuda_host");
    *(void **)&cuda_reset = symbol(library, "fakecuda_reset");
    *(void **)&cuda_set = symbol(library, "fakecuda_set");
    *(void **)&cuda_get = symbol(library, "fakecuda_get");
}

/* Open ones that are not the fake's own. */
static inline int fds(void) {
    int n = -(int)cuda_get("files");
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder) != NULL) n++;
    closedir(folder);
    return n;
}
