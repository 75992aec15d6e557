#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""Lets Soft-RoCE (rxe of Linux 6.12) register dma-bufs. For tests only, and not part of kvrail: it
edits the kernel's source, hence its licence. A dma-buf is mapped into the kernel and its pages are
entered as those of the region; there is no revocation and no peer-to-peer memory.

usage: rxe-dmabuf-6.12.py SOURCE/drivers/infiniband/sw/rxe    (build-kernel.sh runs it)
"""

import sys
from pathlib import Path

# File, the text that is there, and the text that takes its place.
EDITS = [
    (
        "rxe_verbs.h",
        '''\
struct rxe_mr {
	struct rxe_pool_elem	elem;
	struct ib_mr		ibmr;
''',
        '''\
struct rxe_mr {
	struct rxe_pool_elem	elem;
	struct ib_mr		ibmr;
	struct dma_buf		*dmabuf;
	struct iosys_map	dmap;
''',
    ),
    (
        "rxe_verbs.h",
        '''\
#include <linux/interrupt.h>
''',
        '''\
#include <linux/interrupt.h>
#include <linux/dma-buf.h>
#include <linux/iosys-map.h>
''',
    ),
    (
        "rxe_mr.c",
        '''\
int rxe_mr_init_fast(int max_pages, struct rxe_mr *mr)
{
''',
        '''\
int rxe_mr_init_dmabuf(struct rxe_dev *rxe, u64 offset, u64 length, u64 iova,
		       int fd, int access, struct rxe_mr *mr)
{
	unsigned long first = offset >> PAGE_SHIFT, n, i;
	struct dma_buf *db = dma_buf_get(fd);
	int err;

	if (IS_ERR(db))
		return PTR_ERR(db);
	rxe_mr_init(access, mr);
	err = -EINVAL;
	if (!length || offset + length < offset || offset + length > db->size)
		goto put;
	err = dma_buf_vmap_unlocked(db, &mr->dmap);
	if (err)
		goto put;
	err = -EINVAL;
	if (mr->dmap.is_iomem)
		goto unmap;
	n = ((offset + length - 1) >> PAGE_SHIFT) - first + 1;
	err = alloc_mr_page_info(mr, n);
	if (err)
		goto unmap;
	for (i = 0; i < n; i++) {
		void *va = mr->dmap.vaddr + ((first + i) << PAGE_SHIFT);

		mr->page_info[i].page = is_vmalloc_addr(va) ?
			vmalloc_to_page(va) : virt_to_page(va);
		mr->page_info[i].offset = 0;
	}
	mr->nbuf = n;
	mr->dmabuf = db;
	mr->ibmr.iova = iova;
	mr->ibmr.length = length;
	mr->ibmr.type = IB_MR_TYPE_USER;
	mr->state = RXE_MR_STATE_VALID;
	return 0;
unmap:
	dma_buf_vunmap_unlocked(db, &mr->dmap);
put:
	dma_buf_put(db);
	return err;
}

int rxe_mr_init_fast(int max_pages, struct rxe_mr *mr)
{
''',
    ),
    (
        "rxe_mr.c",
        '''\
	ib_umem_release(mr->umem);

	if (mr->ibmr.type
''',
        '''\
	ib_umem_release(mr->umem);
	if (mr->dmabuf) {
		dma_buf_vunmap_unlocked(mr->dmabuf, &mr->dmap);
		dma_buf_put(mr->dmabuf);
	}

	if (mr->ibmr.type
''',
    ),
    (
        "rxe_loc.h",
        '''\
int rxe_mr_init_fast(int max_pages, struct rxe_mr *mr);
''',
        '''\
int rxe_mr_init_fast(int max_pages, struct rxe_mr *mr);
int rxe_mr_init_dmabuf(struct rxe_dev *rxe, u64 offset, u64 length, u64 iova,
		       int fd, int access, struct rxe_mr *mr);
''',
    ),
    (
        "rxe_verbs.c",
        '''\
static struct ib_mr *rxe_rereg_user_mr(
''',
        '''\
static struct ib_mr *rxe_reg_user_mr_dmabuf(struct ib_pd *ibpd, u64 offset,
					    u64 length, u64 iova, int fd,
					    int access,
					    struct uverbs_attr_bundle *attrs)
{
	struct rxe_dev *rxe = to_rdev(ibpd->device);
	struct rxe_pd *pd = to_rpd(ibpd);
	struct rxe_mr *mr;
	int err;

	if ((access & ~RXE_ACCESS_SUPPORTED_MR))
		return ERR_PTR(-EOPNOTSUPP);
	mr = kzalloc(sizeof(*mr), GFP_KERNEL);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	err = rxe_add_to_pool(&rxe->mr_pool, mr);
	if (err)
		goto err_free;
	rxe_get(pd);
	mr->ibmr.pd = ibpd;
	mr->ibmr.device = ibpd->device;
	err = rxe_mr_init_dmabuf(rxe, offset, length, iova, fd, access, mr);
	if (err) {
		rxe_cleanup(mr);
		goto err_free;
	}
	rxe_finalize(mr);
	return &mr->ibmr;
err_free:
	kfree(mr);
	return ERR_PTR(err);
}

static struct ib_mr *rxe_rereg_user_mr(
''',
    ),
    (
        "rxe_verbs.c",
        '''\
	.rereg_user_mr = rxe_rereg_user_mr,
''',
        '''\
	.reg_user_mr_dmabuf = rxe_reg_user_mr_dmabuf,
	.rereg_user_mr = rxe_rereg_user_mr,
''',
    ),
]


def main(folder):
    for name, before, after in EDITS:
        path = Path(folder) / name
        text = path.read_text()
        before, after = before.rstrip("\n"), after.rstrip("\n")
        if after in text:
            continue
        if text.count(before) != 1:
            sys.exit(f"{path}: {text.count(before)} places look like\n{before}\nwanted 1; this "
                     "patch is for Linux 6.12")
        path.write_text(text.replace(before, after))
    path = Path(folder) / "rxe_mr.c"
    import_line = "MODULE_IMPORT_NS(DMA_BUF);\n"
    text = path.read_text()
    if import_line not in text:
        path.write_text(f"{text}\n#include <linux/module.h>\n{import_line}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
