/* The path that is measured: posts and polls. */
#include "nullnic.h"

#include <unistd.h>

static void wake(struct nn_cq *q) {
    if (q->cq.channel == NULL || atomic_exchange(&q->armed, 0) == 0) return;
    struct nn_channel *channel = (struct nn_channel *)q->cq.channel;
    struct ibv_cq *cq = &q->cq;
    if (write(channel->write_fd, &cq, sizeof cq) != sizeof cq) perror("nullnic: event");
}

static void complete(struct nn_cq *q, const struct ibv_wc *wc) {
    nn_lock(&q->lock);
    uint32_t tail = atomic_load_explicit(&q->tail, memory_order_relaxed);
    if (tail - q->head > q->mask) {
        fprintf(stderr, "nullnic: a completion queue of %d entries overran\n", q->cq.cqe);
        abort();
    }
    q->ring[tail & q->mask] = *wc;
    atomic_store_explicit(&q->tail, tail + 1, memory_order_release);
    nn_unlock(&q->lock);
    if (atomic_load_explicit(&q->armed, memory_order_relaxed) != 0) wake(q);
}

int nn_poll_cq(struct ibv_cq *cq, int entries, struct ibv_wc *wc) {
    struct nn_cq *q = (struct nn_cq *)cq;
    if (nn_counters != NULL) nn_add(&nn_counters->polls, 1);
    if (q->head == atomic_load_explicit(&q->tail, memory_order_acquire)) return 0;
    int got = 0;
    nn_lock(&q->lock);
    uint32_t tail = atomic_load_explicit(&q->tail, memory_order_relaxed);
    while (got < entries && q->head != tail) wc[got++] = q->ring[q->head++ & q->mask];
    nn_unlock(&q->lock);
    if (nn_counters != NULL && got > 0) nn_add(&nn_counters->useful, 1);
    return got;
}

int nn_req_notify_cq(struct ibv_cq *cq, int solicited_only) {
    (void)solicited_only;
    struct nn_cq *q = (struct nn_cq *)cq;
    /* A completion that is there already makes no event: who arms polls once more. */
    atomic_store(&q->armed, 1);
    return 0;
}

static int put(struct nn_rq *rq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    int err = 0;
    nn_lock(&rq->lock);
    for (; wr != NULL; wr = wr->next) {
        if (rq->tail - rq->head > rq->mask || wr->num_sge > NN_SGES) {
            err = wr->num_sge > NN_SGES ? EINVAL : ENOMEM;
            *bad = wr;
            break;
        }
        struct nn_recv *r = &rq->ring[rq->tail++ & rq->mask];
        r->wr_id = wr->wr_id;
        r->sges = wr->num_sge;
        for (int i = 0; i < r->sges; i++) r->sge[i] = wr->sg_list[i];
    }
    nn_unlock(&rq->lock);
    return err;
}

static bool take(struct nn_rq *rq, struct nn_recv *out) {
    nn_lock(&rq->lock);
    bool some = rq->head != rq->tail;
    if (some) *out = rq->ring[rq->head++ & rq->mask];
    nn_unlock(&rq->lock);
    return some;
}

static void receive_flushed(struct nn_qp *q, uint64_t wr_id) {
    complete(q->recv_cq, &(struct ibv_wc){.wr_id = wr_id, .status = IBV_WC_WR_FLUSH_ERR,
                                          .qp_num = q->qp.qp_num});
}

/* The queue pair is in ERR: its receives come back, and so will all that is posted from now on. */
void nn_flush(struct nn_qp *q) {
    struct nn_recv r;
    q->broken = true;
    while (q->rq == &q->own && take(q->rq, &r)) receive_flushed(q, r.wr_id);
}

int nn_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct nn_qp *q = (struct nn_qp *)qp;
    if (!q->broken) return put(&q->own, wr, bad);
    for (; wr != NULL; wr = wr->next) receive_flushed(q, wr->wr_id);
    return 0;
}

int nn_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    return put(&((struct nn_srq *)srq)->rq, wr, bad);
}

/* Copies a message into the memory of a receive, `skip` bytes behind its beginning. */
static uint32_t scatter(const struct nn_recv *r, const struct ibv_send_wr *wr, uint32_t skip) {
    uint32_t all = skip, at = skip;
    int to = 0;
    for (int i = 0; i < wr->num_sge; i++) {
        const char *from = (const char *)(uintptr_t)wr->sg_list[i].addr;
        uint32_t left = wr->sg_list[i].length;
        while (left > 0 && to < r->sges) {
            uint32_t room = r->sge[to].length - at, n = left < room ? left : room;
            memcpy((char *)(uintptr_t)r->sge[to].addr + at, from, n);
            from += n, left -= n, at += n, all += n;
            if (at == r->sge[to].length) to++, at = 0;
        }
    }
    return all;
}

/* A SEND, or the immediate of a WRITE. A datagram without a receive is lost, as on a real NIC; a
 * message of a connection ends in an error. */
static enum ibv_wc_status deliver(struct nn_qp *q, const struct ibv_send_wr *wr, uint32_t len) {
    bool datagram = q->qp.qp_type == IBV_QPT_UD;
    bool immediate =
        wr->opcode == IBV_WR_SEND_WITH_IMM || wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    struct nn_qp *to = nn_qp_find(datagram ? wr->wr.ud.remote_qpn : q->peer);
    struct nn_recv r;
    if (to == NULL || !take(to->rq, &r))
        return datagram ? IBV_WC_SUCCESS : IBV_WC_RNR_RETRY_EXC_ERR;
    struct ibv_wc wc = {.wr_id = r.wr_id, .qp_num = to->qp.qp_num, .src_qp = q->qp.qp_num,
                        .byte_len = len, .opcode = IBV_WC_RECV_RDMA_WITH_IMM};
    if (wr->opcode != IBV_WR_RDMA_WRITE_WITH_IMM) {
        wc.opcode = IBV_WC_RECV;
        wc.byte_len = scatter(&r, wr, datagram ? 40 : 0);
    }
    if (immediate) wc.imm_data = wr->imm_data;
    wc.wc_flags = (immediate ? IBV_WC_WITH_IMM : 0u) | (datagram ? IBV_WC_GRH : 0u);
    complete(to->recv_cq, &wc);
    return IBV_WC_SUCCESS;
}

/* What is not a READ or a WRITE: (status << 8 | opcode) of its completion. */
static __attribute__((noinline)) unsigned other(struct nn_qp *q, const struct ibv_send_wr *wr,
                                                uint32_t len) {
    if (q->broken) return IBV_WC_WR_FLUSH_ERR << 8;
    switch (wr->opcode) {
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return (unsigned)deliver(q, wr, len) << 8 | IBV_WC_RDMA_WRITE;
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
        return (unsigned)deliver(q, wr, len) << 8 | IBV_WC_SEND;
    default:
        fprintf(stderr, "nullnic: no operation %d: only READ, WRITE and SEND\n", wr->opcode);
        abort();
    }
}

int nn_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    (void)bad;
    struct nn_qp *q = (struct nn_qp *)qp;
    unsigned long wrs = 0, signalled = 0;
    for (; wr != NULL; wr = wr->next) {
        uint32_t len = 0;
        unsigned end = wr->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
        /* A real NIC's driver reads them all too. */
        for (int i = 0; i < wr->num_sge; i++) len += wr->sg_list[i].length;
        if (q->broken || (wr->opcode != IBV_WR_RDMA_WRITE && wr->opcode != IBV_WR_RDMA_READ))
            end = other(q, wr, len);
        wrs++;
        if ((wr->send_flags & IBV_SEND_SIGNALED) == 0 && !q->all_signalled && end >> 8 == 0)
            continue;
        signalled++;
        complete(q->send_cq, &(struct ibv_wc){.wr_id = wr->wr_id, .status = end >> 8,
                                              .opcode = end & 255, .byte_len = len,
                                              .qp_num = qp->qp_num});
    }
    if (nn_counters != NULL) {
        nn_add(&nn_counters->posts, 1);
        nn_add(&nn_counters->wrs, wrs);
        nn_add(&nn_counters->signalled, signalled);
    }
    return 0;
}
