/* Memory of devices: what a NIC has read for it arrives late, when the same NIC reads it. */
#include "fake.h"

/* True of a QP that leads to itself. */
bool fv_loops(const struct fv_qp *qp) { return qp->attr.dest_qp_num == qp->qp.qp_num; }

/* Of a dma-buf; with late_reads=2 also what else peers may write to. */
static bool is_late(const struct fv_dev *d, const struct fv_mr *m) {
    if (m->map != NULL) return d->late_reads != 0;
    return d->late_reads == 2 && (m->access & IBV_ACCESS_REMOTE_WRITE) != 0;
}

/* Keeps the bytes of a READ back, if they go to such memory. */
bool fv_wet(struct fv_dev *d, struct fv_pd *pd, uint32_t lkey, uint64_t addr,
            const uint8_t *bytes, uint64_t len) {
    struct fv_mr *m = d->late_reads != 0 ? fv_find_mr(pd, lkey) : NULL;
    if (m == NULL || !is_late(d, m)) return false;
    struct fv_wet *w = malloc(sizeof *w + len);
    if (w == NULL) abort();
    w->next = NULL;
    w->pd = pd;
    w->lkey = lkey;
    w->len = (uint32_t)len;
    w->addr = addr;
    memcpy(w->bytes, bytes, len);
    if (d->wet_last != NULL)
        d->wet_last->next = w;
    else
        d->wet_first = w;
    d->wet_last = w;
    FV_COUNT(wet_staged);
    return true;
}

/* Places what was kept back for one registration, in order. */
void fv_dry(struct fv_dev *d, const struct fv_mr *m) {
    struct fv_wet **at = &d->wet_first, *last = NULL;
    while (*at != NULL) {
        struct fv_wet *w = *at;
        if (w->lkey != m->mr.lkey || w->pd != m->pd) {
            last = w;
            at = &w->next;
            continue;
        }
        memcpy(m->base + (w->addr - m->iova), w->bytes, w->len);
        FV_COUNT(wet_placed);
        *at = w->next;
        free(w);
    }
    d->wet_last = last;
}
