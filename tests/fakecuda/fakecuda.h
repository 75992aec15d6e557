/* A libcuda for tests: what kvrail's CUDA provider calls, over memfds, without a GPU. Where a call
 * can be seen to fail on the real driver it fails here too, with the same code.
 *
 * Load it through KVRAIL_LIBCUDA. A program that wants to steer it opens the same file by dlopen
 * and finds the calls below by name.
 */
#pragma once

#include <stdint.h>

enum fakecuda_kind {
    FAKECUDA_DEVICE,  /* cuMemAlloc: blocks of 2 MiB of its own */
    FAKECUDA_SMALL,   /* cuMemAlloc of little: the next 512 bytes free in a block that is shared */
    FAKECUDA_MANAGED, /* cuMemAllocManaged */
    FAKECUDA_PINNED,  /* cuMemHostAlloc */
    FAKECUDA_POOL,    /* cuMemAllocAsync */
    FAKECUDA_VMM,     /* cuMemMap of 2 MiB pieces into a reservation: all but the last is mapped */
    FAKECUDA_PLAIN,   /* the same of pieces without gpuDirectRDMACapable */
    FAKECUDA_BOTH,    /* the same, the second piece on device 1 */
};

/* An address of the device: no memory of this process is there. 0: no room. */
uint64_t fakecuda_alloc(int kind, uint64_t size);
/* Where the host sees what lies at an address. NULL: nothing does. */
void *fakecuda_host(uint64_t addr);
/* Frees all. Exported buffers live on, as a dma-buf does. */
void fakecuda_reset(void);

/* "NAME=VALUE": fail.CALL and fail.ATTRIBUTE (its number) are a CUresult that it gives instead, 0:
 * none; attr.NUMBER replaces what an attribute says, -1: nothing; dmabuf 0: the device cannot
 * export; fd: what an export gives instead of an fd, 0: nothing; version. Returns 0, or -1: no such
 * name. */
int fakecuda_set(const char *knob);
/* contexts that are pushed on this thread, primaries retained, exports, files (fds that it keeps
 * itself), ordered (allocations whose copies were made synchronous). -1: no such name. */
int64_t fakecuda_get(const char *name);
