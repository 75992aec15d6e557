/* Makes dma-bufs without a device: of pages of a file in memory, or of the kernel's own. */
#ifndef KVRAIL_LAB_DMABUF_H
#define KVRAIL_LAB_DMABUF_H

#include <errno.h>
#include <fcntl.h>
#include <linux/dma-heap.h>
#include <linux/udmabuf.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

/* `bytes` is a multiple of the page size. -1 and errno on failure. */
static inline int make_udmabuf(size_t bytes) {
    int file = memfd_create("udmabuf", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    int device = open("/dev/udmabuf", O_RDWR | O_CLOEXEC), made = -1;
    if (file >= 0 && device >= 0 && ftruncate(file, (off_t)bytes) == 0 &&
        fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) == 0) {
        struct udmabuf_create ask = {.memfd = (unsigned)file, .size = bytes};
        made = ioctl(device, UDMABUF_CREATE, &ask);
    }
    int error = errno;
    if (file >= 0) close(file);
    if (device >= 0) close(device);
    errno = error;
    return made;
}

static inline int make_heap(size_t bytes) {
    int device = open("/dev/dma_heap/system", O_RDWR | O_CLOEXEC);
    if (device < 0) return -1;
    struct dma_heap_allocation_data ask = {.len = bytes, .fd_flags = O_RDWR};
    int failed = ioctl(device, DMA_HEAP_IOCTL_ALLOC, &ask), error = errno;
    close(device);
    errno = error;
    return failed ? -1 : (int)ask.fd;
}

/* `kind`: udmabuf or heap. The descriptor is one that a child inherits, also over exec. */
static inline int make_dmabuf(const char *kind, size_t bytes) {
    if (strcmp(kind, "udmabuf") == 0) return make_udmabuf(bytes);
    if (strcmp(kind, "heap") == 0) return make_heap(bytes);
    errno = EINVAL;
    return -1;
}

#endif
