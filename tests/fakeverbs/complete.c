/* Completions: filled in, perhaps spoilt, lost, held or delayed, and put into their queue. */
#include "fake.h"

static enum ibv_wc_opcode opcode_of(enum ibv_wr_opcode op) {
    switch (op) {
    case IBV_WR_RDMA_READ: return IBV_WC_RDMA_READ;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM: return IBV_WC_RDMA_WRITE;
    default: return IBV_WC_SEND;
    }
}

/* Of an error only four fields are defined: the rest is filled so that a reader is caught. */
static void fill(struct fv_cqe *e, struct fv_qp *qp, uint64_t wr_id, enum ibv_wc_status status) {
    memset(e, 0, sizeof *e);
    if (status != IBV_WC_SUCCESS) memset(&e->wc, 0xa5, sizeof e->wc);
    e->wc.wr_id = wr_id;
    e->wc.status = status;
    e->wc.qp_num = qp->qp.qp_num;
    e->wc.vendor_err = status == IBV_WC_SUCCESS ? 0 : 0x80u + (uint32_t)status;
    e->qp = qp;
    FV_COUNT(wc_total);
    if (status != IBV_WC_SUCCESS) FV_COUNT(wc_error);
}

static void push(struct fv_cq *cq, const struct fv_cqe *e, bool solicited) {
    unsigned what = fv_cq_push(cq, e, solicited);
    if (what != 0) fv_cq_after(cq, what);
}

static bool held(const struct fv_qp *qp) {
    if (qp->dev->hold != 0) return true;
    return (qp->dev->blackhole != 0 || qp->blackhole != 0) && qp->state != IBV_QPS_ERR;
}

static void deliver(struct fv_qp *qp, struct ibv_cq *cq, struct fv_cqe *e, bool solicited) {
    struct fv_dev *d = qp->dev;
    if (d->wc_lose != 0 && --d->wc_lose == 0) {
        FV_COUNT(wc_lost);
        return;
    }
    if (d->wc_garbage != 0 && e->wc.status == IBV_WC_SUCCESS) {
        d->wc_garbage--;
        e->wc.opcode = (enum ibv_wc_opcode)0x7f7f7f7f;
    }
    if (qp->pend_first == NULL && d->delay_max_us == 0 && !held(qp)) {
        push((struct fv_cq *)cq, e, solicited);
        return;
    }
    struct fv_pend *p = calloc(1, sizeof *p);
    if (p == NULL) abort();
    uint64_t span = d->delay_max_us - d->delay_us + 1, us = d->delay_us;
    if (span > 1) us += fv_random() % span;
    p->e = *e;
    p->cq = (struct fv_cq *)cq;
    p->due = fv_now() + us * 1000;
    p->solicited = solicited;
    if (qp->pend_last != NULL)
        qp->pend_last->next = p;
    else
        qp->pend_first = p;
    qp->pend_last = p;
}

/* Completions whose time has come, in the QP's order; when the next is due. */
uint64_t fv_release_pending(struct fv_qp *qp, uint64_t now) {
    while (qp->pend_first != NULL && !held(qp)) {
        struct fv_pend *p = qp->pend_first;
        if (p->due > now) return p->due;
        qp->pend_first = p->next;
        if (p->next == NULL) qp->pend_last = NULL;
        push(p->cq, &p->e, p->solicited);
        free(p);
    }
    return FV_NEVER;
}

void fv_drop_pending(struct fv_qp *qp) {
    while (qp->pend_first != NULL) {
        struct fv_pend *p = qp->pend_first;
        qp->pend_first = p->next;
        free(p);
    }
    qp->pend_last = NULL;
}

/* Ends the work request that is being carried out. An error takes the QP with it. */
void fv_complete_send(struct fv_qp *qp, enum ibv_wc_status status) {
    uint64_t index = qp->sq_exec;
    const struct fv_send *s = &qp->sq[index & qp->sq_mask];
    if (status != IBV_WC_SUCCESS || (s->flags & IBV_SEND_SIGNALED) != 0) {
        struct fv_cqe e;
        fill(&e, qp, s->wr_id, status);
        e.retires = index + 1;
        if (status == IBV_WC_SUCCESS) {
            e.wc.opcode = opcode_of(s->opcode);
            e.wc.byte_len = (uint32_t)qp->total;
        }
        deliver(qp, qp->init.send_cq, &e, status != IBV_WC_SUCCESS);
    }
    pthread_spin_lock(&qp->sq_lock);
    qp->sq_exec = index + 1;
    pthread_spin_unlock(&qp->sq_lock);
    qp->started = qp->waiting = false;
    if (status != IBV_WC_SUCCESS) fv_qp_error(qp);
}

void fv_complete_recv(struct fv_qp *qp, uint64_t wr_id, enum ibv_wc_status status,
                      const struct fv_packet *p) {
    struct fv_cqe e;
    bool solicited = status != IBV_WC_SUCCESS;
    fill(&e, qp, wr_id, status);
    if (status == IBV_WC_SUCCESS) {
        bool write = p->op == IBV_WR_RDMA_WRITE_WITH_IMM;
        e.wc.opcode = write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
        e.wc.byte_len = (uint32_t)p->total;
        e.wc.src_qp = p->src_qpn;
        if ((p->flags & FV_IMM) != 0) {
            e.wc.wc_flags = IBV_WC_WITH_IMM;
            e.wc.imm_data = p->imm;
        }
        solicited = (p->flags & FV_SOLICITED) != 0;
    }
    deliver(qp, qp->init.recv_cq, &e, solicited);
}

/* A QP in ERR: each posted work request completes as flushed, signalled or not, in order. */
void fv_flush(struct fv_qp *qp) {
    while (qp->sq_exec != qp->sq_head) fv_complete_send(qp, IBV_WC_WR_FLUSH_ERR);
    if (qp->recv_taken) fv_complete_recv(qp, qp->cur.wr_id, IBV_WC_WR_FLUSH_ERR, NULL);
    qp->recv_taken = qp->in_message = false;
    while (qp->rq_tail != qp->rq_head) {
        uint64_t wr_id = qp->rq[qp->rq_tail++ & qp->rq_mask].wr_id;
        fv_complete_recv(qp, wr_id, IBV_WC_WR_FLUSH_ERR, NULL);
    }
}
