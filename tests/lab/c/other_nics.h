/* Put in front of examples/c/pair.c (gcc -include): the process that it starts, which is to be the
 * other host, gets the devices named in KVRAIL_LAB_OTHER_NICS. */
#ifndef KVRAIL_LAB_OTHER_NICS_H
#define KVRAIL_LAB_OTHER_NICS_H
#include <stdlib.h>
#include <unistd.h>

static int exec_with_other_nics(const char *path, const char *name, const char *arg) {
    const char *nics = getenv("KVRAIL_LAB_OTHER_NICS");
    if (!nics || setenv("KVRAIL_NICS", nics, 1) != 0) return -1;
    return execl(path, name, arg, (char *)NULL);
}
#define execl(path, name, arg, end) exec_with_other_nics(path, name, arg)
#endif
