/* Preloaded into a peer that reads /sys by fixed paths: what it looks for below
 * /sys/class/infiniband it finds below NULLNIC_ROOT. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *moved(const char *path, char *buffer) {
    static const char FROM[] = "/sys/class/infiniband";
    const char *root = getenv("NULLNIC_ROOT");
    if (path == NULL || root == NULL || strncmp(path, FROM, sizeof FROM - 1) != 0) return path;
    snprintf(buffer, PATH_MAX, "%s%s", root, path);
    return buffer;
}

/* `real` becomes the function that this one stands in front of. */
#define NEXT(name)                                                  \
    char buffer[PATH_MAX];                                          \
    static typeof(&name) real;                                      \
    if (real == NULL) real = (typeof(&name))dlsym(RTLD_NEXT, #name)

char *realpath(const char *path, char *out) {
    NEXT(realpath);
    return real(moved(path, buffer), out);
}

char *__realpath_chk(const char *path, char *out, size_t size) {
    (void)size;
    return realpath(path, out);
}

FILE *fopen(const char *path, const char *mode) {
    NEXT(fopen);
    return real(moved(path, buffer), mode);
}

FILE *fopen64(const char *path, const char *mode) {
    NEXT(fopen64);
    return real(moved(path, buffer), mode);
}

int access(const char *path, int mode);
int access(const char *path, int mode) {
    NEXT(access);
    return real(moved(path, buffer), mode);
}

DIR *opendir(const char *path) {
    NEXT(opendir);
    return real(moved(path, buffer));
}

ssize_t readlink(const char *path, char *out, size_t size);
ssize_t readlink(const char *path, char *out, size_t size) {
    NEXT(readlink);
    return real(moved(path, buffer), out, size);
}

int stat(const char *path, struct stat *out) {
    NEXT(stat);
    return real(moved(path, buffer), out);
}

#define WITH_MODE(flags, mode)                                                  \
    mode_t mode = 0;                                                            \
    if (((flags) & O_CREAT) != 0 || ((flags) & O_TMPFILE) == O_TMPFILE) {       \
        va_list args;                                                           \
        va_start(args, flags);                                                  \
        mode = va_arg(args, mode_t);                                            \
        va_end(args);                                                           \
    }

int open(const char *path, int flags, ...) {
    WITH_MODE(flags, mode)
    NEXT(open);
    return real(moved(path, buffer), flags, mode);
}

int open64(const char *path, int flags, ...) {
    WITH_MODE(flags, mode)
    NEXT(open64);
    return real(moved(path, buffer), flags, mode);
}
