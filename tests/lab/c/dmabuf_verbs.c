/* Lets programs in the lab register dma-bufs with Soft-RoCE. On the kernel with the test-only patch
 * Soft-RoCE takes dma-bufs, but its part of rdma-core refuses them before it asks the kernel. This
 * library is what KVRAIL_IBVERBS names there: all functions are those of the real libibverbs, on
 * which it depends, but for one, which asks the kernel in the way in which providers do it.
 *
 * gcc -shared -fPIC ... -Wl,--version-script=dmabuf_verbs.map -Wl,--no-as-needed -libverbs
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>

/* Of libibverbs for its providers. Later releases take an eighth argument, which may be NULL; those
 * before them do not look at it. */
int ibv_cmd_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                          int access, void *mr, void *driver);

/* Room for the `struct verbs_mr` of any release; whoever deregisters it frees it. */
enum { MR_BYTES = 512 };

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
                                 int fd, int access) {
    void *mr = calloc(1, MR_BYTES);
    if (!mr) return NULL;
    int error = ibv_cmd_reg_dmabuf_mr(pd, offset, length, iova, fd, access, mr, NULL);
    if (error) {
        free(mr);
        errno = error;
        return NULL;
    }
    return mr;
}
