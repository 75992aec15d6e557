/* Posting. With FAKEVERBS_NULL=1 a READ or WRITE is complete when it was posted. */
#include "fake.h"

static uint64_t length_of(const struct ibv_sge *sge, int n) {
    uint64_t len = 0;
    for (int i = 0; i < n; i++) len += sge[i].length;
    return len;
}

static bool has_room(const struct fv_qp *qp) {
    return qp->sq_head - qp->sq_tail < qp->init.cap.max_send_wr;
}

static bool known(enum ibv_wr_opcode op) {
    return op == IBV_WR_RDMA_WRITE || op == IBV_WR_RDMA_WRITE_WITH_IMM || op == IBV_WR_SEND ||
           op == IBV_WR_SEND_WITH_IMM || op == IBV_WR_RDMA_READ;
}

/* What a provider refuses at once, without a completion. */
static int refuse(const struct fv_qp *qp, const struct ibv_send_wr *wr) {
    uint32_t state = qp->state;
    if (state != IBV_QPS_RTS && state != IBV_QPS_ERR) return EINVAL;
    if (!known(wr->opcode) || wr->num_sge < 0) return EINVAL;
    if ((uint32_t)wr->num_sge > qp->init.cap.max_send_sge) return EINVAL;
    if (wr->opcode == IBV_WR_RDMA_READ && (uint64_t)wr->num_sge > qp->dev->max_sge_rd)
        return EINVAL;
    if ((wr->send_flags & IBV_SEND_INLINE) != 0 &&
        (wr->opcode == IBV_WR_RDMA_READ ||
         length_of(wr->sg_list, wr->num_sge) > qp->init.cap.max_inline_data))
        return EINVAL;
    if (has_room(qp)) return 0;
    FV_COUNT(sq_full);
    return ENOMEM;
}

static void copy_inline(struct fv_send *s, const struct ibv_send_wr *wr) {
    s->inline_len = 0;
    for (int i = 0; i < wr->num_sge; i++) {
        if (wr->sg_list[i].length == 0) continue;
        memcpy(s->inline_data + s->inline_len, (const void *)(uintptr_t)wr->sg_list[i].addr,
               wr->sg_list[i].length);
        s->inline_len += wr->sg_list[i].length;
    }
    FV_COUNT(inline_wr);
}

static void take(struct fv_qp *qp, const struct ibv_send_wr *wr) {
    struct fv_send *s = &qp->sq[qp->sq_head & qp->sq_mask];
    bool signaled = qp->init.sq_sig_all != 0;
    s->wr_id = wr->wr_id;
    s->opcode = wr->opcode;
    s->flags = wr->send_flags | (signaled ? IBV_SEND_SIGNALED : 0);
    s->imm = wr->imm_data;
    s->raddr = wr->wr.rdma.remote_addr;
    s->rkey = wr->wr.rdma.rkey;
    s->n_sge = 0;
    if ((wr->send_flags & IBV_SEND_INLINE) != 0) {
        copy_inline(s, wr);
    } else {
        s->n_sge = (uint32_t)wr->num_sge;
        for (uint32_t i = 0; i < s->n_sge; i++) s->sge[i] = wr->sg_list[i];
    }
    if (s->opcode == IBV_WR_RDMA_READ)
        FV_COUNT(wr_read);
    else if (s->opcode == IBV_WR_RDMA_WRITE || s->opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
        FV_COUNT(wr_write);
    else
        FV_COUNT(wr_send);
    if (fv_loops(qp)) {
        FV_COUNT(wr_loop);
        atomic_store(&fv.count[FV_COUNT_loop_qpn], qp->qp.qp_num);
    }
    pthread_spin_lock(&qp->sq_lock);
    qp->sq_head++;
    pthread_spin_unlock(&qp->sq_lock);
}

/* One completion of the null mode. */
static unsigned null_cqe(struct fv_qp *qp, const struct ibv_send_wr *wr, uint64_t index) {
    struct fv_cqe e;
    e.wc.wr_id = wr->wr_id;
    e.wc.status = IBV_WC_SUCCESS;
    e.wc.opcode = wr->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
    e.wc.vendor_err = 0;
    e.wc.byte_len = 0;
    for (int i = 0; i < wr->num_sge; i++) e.wc.byte_len += wr->sg_list[i].length;
    e.wc.imm_data = 0;
    e.wc.qp_num = qp->qp.qp_num;
    e.wc.src_qp = 0;
    e.wc.wc_flags = 0;
    e.wc.pkey_index = e.wc.slid = 0;
    e.wc.sl = e.wc.dlid_path_bits = 0;
    e.qp = qp;
    e.retires = index;
    return fv_cq_put((struct fv_cq *)qp->init.send_cq, &e, false);
}

/* Takes what it can of the list, and says where it stopped; the rest goes the long way. */
static struct ibv_send_wr *post_null(struct fv_qp *qp, struct ibv_send_wr *wr) {
    struct fv_cq *cq = (struct fv_cq *)qp->init.send_cq;
    unsigned what = 0, all = qp->init.sq_sig_all != 0 ? IBV_SEND_SIGNALED : 0;
    pthread_spin_lock(&qp->sq_lock);
    uint64_t head = atomic_load_explicit(&qp->sq_head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&qp->sq_tail, memory_order_relaxed);
    bool idle = atomic_load_explicit(&qp->sq_exec, memory_order_acquire) == head &&
                atomic_load_explicit(&qp->state, memory_order_relaxed) == IBV_QPS_RTS;
    if (idle) {
        uint64_t before = head;
        pthread_spin_lock(&cq->lock);
        for (; wr != NULL; wr = wr->next) {
            if (wr->opcode != IBV_WR_RDMA_READ && wr->opcode != IBV_WR_RDMA_WRITE) break;
            if (head - tail >= qp->init.cap.max_send_wr) break;
            if ((uint32_t)wr->num_sge > qp->init.cap.max_send_sge) break;
            head++;
            if (((wr->send_flags | all) & IBV_SEND_SIGNALED) != 0)
                what |= null_cqe(qp, wr, head);
        }
        pthread_spin_unlock(&cq->lock);
        /* Of the device, so that threads on different ones share nothing. */
        atomic_fetch_add_explicit(&qp->dev->wr_null, head - before, memory_order_relaxed);
        atomic_store_explicit(&qp->sq_exec, head, memory_order_relaxed);
        atomic_store_explicit(&qp->sq_head, head, memory_order_relaxed);
    }
    pthread_spin_unlock(&qp->sq_lock);
    if (what != 0) {
        fv_lock();
        fv_cq_after(cq, what);
        fv_unlock();
    }
    return wr;
}

int fv_post_send(struct ibv_qp *q, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    struct fv_qp *qp = (struct fv_qp *)q;
    int err = 0, refusal = 0;
    if (qp->null_mode && (wr = post_null(qp, wr)) == NULL) return 0;
    fv_lock();
    int64_t refused = fv_item_refused(qp->dev, FV_CALL_post_send, &refusal);
    for (int64_t item = 0; wr != NULL; wr = wr->next, item++) {
        err = item == refused ? refusal : refuse(qp, wr);
        if (err != 0) {
            *bad = wr;
            break;
        }
        take(qp, wr);
    }
    fv_unlock();
    fv_kick();
    return err;
}

int fv_post_recv(struct ibv_qp *q, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct fv_qp *qp = (struct fv_qp *)q;
    int err = 0, refusal = 0;
    fv_lock();
    int64_t refused = fv_item_refused(qp->dev, FV_CALL_post_recv, &refusal);
    for (int64_t item = 0; wr != NULL && err == 0; wr = wr->next, item++) {
        if (item == refused)
            err = refusal;
        else if (qp->state == IBV_QPS_RESET || wr->num_sge < 0 ||
                 (uint32_t)wr->num_sge > qp->init.cap.max_recv_sge)
            err = EINVAL;
        else if (qp->rq_head - qp->rq_tail >= qp->init.cap.max_recv_wr)
            err = ENOMEM;
        if (err != 0) {
            *bad = wr;
            break;
        }
        struct fv_recv *r = &qp->rq[qp->rq_head++ & qp->rq_mask];
        r->wr_id = wr->wr_id;
        r->n_sge = (uint32_t)wr->num_sge;
        for (uint32_t i = 0; i < r->n_sge; i++) r->sge[i] = wr->sg_list[i];
    }
    bool flush = qp->state == IBV_QPS_ERR;
    fv_unlock();
    if (flush) fv_kick();
    return err;
}
