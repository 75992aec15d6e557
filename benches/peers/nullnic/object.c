/* Protection domains, regions, queues: made, changed, destroyed. */
#include "nullnic.h"

#include <fcntl.h>
#include <unistd.h>

#undef ibv_reg_mr
#undef ibv_reg_mr_iova

static _Atomic(struct nn_qp *) queue_pairs[NN_QPS];
static atomic_uint next_qp = 1000, next_key = 1;

struct nn_qp *nn_qp_find(uint32_t number) {
    return number < NN_QPS ? atomic_load(&queue_pairs[number]) : NULL;
}

NN_EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *c) {
    struct ibv_pd *pd = calloc(1, sizeof *pd);
    if (pd != NULL) pd->context = c;
    return pd;
}

NN_EXPORT int ibv_dealloc_pd(struct ibv_pd *pd) {
    free(pd);
    return 0;
}

NN_EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t len,
                                          uint64_t iova, unsigned access) {
    (void)iova, (void)access;
    struct ibv_mr *mr = calloc(1, sizeof *mr);
    if (mr == NULL) return NULL;
    mr->context = pd->context;
    mr->pd = pd;
    mr->addr = addr;
    mr->length = len;
    mr->lkey = mr->rkey = atomic_fetch_add(&next_key, 1) << 8;
    return mr;
}

NN_EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access) {
    return ibv_reg_mr_iova2(pd, addr, len, (uintptr_t)addr, (unsigned)access);
}

NN_EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova,
                                         int access) {
    return ibv_reg_mr_iova2(pd, addr, len, iova, (unsigned)access);
}

NN_EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t len,
                                           uint64_t iova, int fd, int access) {
    (void)pd, (void)offset, (void)len, (void)iova, (void)fd, (void)access;
    errno = EOPNOTSUPP;
    return NULL;
}

NN_EXPORT int ibv_dereg_mr(struct ibv_mr *mr) {
    free(mr);
    return 0;
}

NN_EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c) {
    int fds[2];
    struct nn_channel *channel = calloc(1, sizeof *channel);
    if (channel == NULL || pipe2(fds, O_CLOEXEC) != 0) {
        free(channel);
        return NULL;
    }
    channel->channel.context = c;
    channel->channel.fd = fds[0];
    channel->write_fd = fds[1];
    return &channel->channel;
}

NN_EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) {
    close(channel->fd);
    close(((struct nn_channel *)channel)->write_fd);
    free(channel);
    return 0;
}

NN_EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq,
                               void **context) {
    if (read(channel->fd, cq, sizeof *cq) != (ssize_t)sizeof *cq) return -1;
    *context = (*cq)->cq_context;
    return 0;
}

NN_EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned count) { (void)cq, (void)count; }

NN_EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *c, int entries, void *context,
                                       struct ibv_comp_channel *channel, int vector) {
    (void)vector;
    struct nn_cq *q = aligned_alloc(64, (sizeof *q + 63) / 64 * 64);
    if (q == NULL) return NULL;
    memset(q, 0, sizeof *q);
    uint32_t room = nn_room((uint32_t)entries);
    q->mask = room - 1;
    q->ring = calloc(room, sizeof *q->ring);
    q->cq.context = c;
    q->cq.channel = channel;
    q->cq.cq_context = context;
    q->cq.cqe = entries;
    pthread_mutex_init(&q->cq.mutex, NULL);
    pthread_cond_init(&q->cq.cond, NULL);
    return &q->cq;
}

NN_EXPORT int ibv_resize_cq(struct ibv_cq *cq, int entries) {
    (void)cq, (void)entries;
    return EOPNOTSUPP;
}

NN_EXPORT int ibv_destroy_cq(struct ibv_cq *cq) {
    free(((struct nn_cq *)cq)->ring);
    free(cq);
    return 0;
}

void nn_rq_make(struct nn_rq *rq, uint32_t entries) {
    uint32_t room = nn_room(entries);
    rq->mask = room - 1;
    rq->ring = calloc(room, sizeof *rq->ring);
}

NN_EXPORT struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init) {
    struct nn_srq *s = calloc(1, sizeof *s);
    if (s == NULL) return NULL;
    s->srq.context = pd->context;
    s->srq.pd = pd;
    s->srq.srq_context = init->srq_context;
    nn_rq_make(&s->rq, init->attr.max_wr);
    return &s->srq;
}

NN_EXPORT int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *a, int mask) {
    (void)srq, (void)a, (void)mask;
    return 0;
}

NN_EXPORT int ibv_destroy_srq(struct ibv_srq *srq) {
    free(((struct nn_srq *)srq)->rq.ring);
    free(srq);
    return 0;
}

NN_EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init) {
    uint32_t number = atomic_fetch_add(&next_qp, 1);
    struct nn_qp *q = calloc(1, sizeof *q);
    if (q == NULL || number >= NN_QPS) {
        free(q);
        errno = ENOMEM;
        return NULL;
    }
    if (init->cap.max_inline_data < 64) init->cap.max_inline_data = 64;
    q->init = *init;
    q->qp.context = pd->context;
    q->qp.pd = pd;
    q->qp.send_cq = init->send_cq;
    q->qp.recv_cq = init->recv_cq;
    q->qp.srq = init->srq;
    q->qp.qp_context = init->qp_context;
    q->qp.qp_num = number;
    q->qp.qp_type = init->qp_type;
    q->qp.state = IBV_QPS_RESET;
    q->send_cq = (struct nn_cq *)init->send_cq;
    q->recv_cq = (struct nn_cq *)init->recv_cq;
    q->all_signalled = init->sq_sig_all != 0;
    nn_rq_make(&q->own, init->cap.max_recv_wr);
    q->rq = init->srq != NULL ? &((struct nn_srq *)init->srq)->rq : &q->own;
    atomic_store(&queue_pairs[number], q);
    return &q->qp;
}

NN_EXPORT int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask) {
    struct nn_qp *q = (struct nn_qp *)qp;
    if ((mask & IBV_QP_DEST_QPN) != 0) q->peer = a->dest_qp_num;
    if ((mask & IBV_QP_STATE) == 0) return 0;
    qp->state = a->qp_state;
    q->broken = false;
    if (a->qp_state == IBV_QPS_ERR && qp->qp_type == IBV_QPT_RC) nn_flush(q);
    if (a->qp_state == IBV_QPS_RESET) q->own.head = q->own.tail;
    return 0;
}

NN_EXPORT int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask,
                           struct ibv_qp_init_attr *init) {
    (void)mask;
    struct nn_qp *q = (struct nn_qp *)qp;
    *a = (struct ibv_qp_attr){.qp_state = qp->state, .cap = q->init.cap};
    if (init != NULL) *init = q->init;
    return 0;
}

NN_EXPORT int ibv_destroy_qp(struct ibv_qp *qp) {
    /* Not freed: another thread of the bench may be about to send to it. */
    atomic_store(&queue_pairs[qp->qp_num], NULL);
    return 0;
}

NN_EXPORT int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece) {
    (void)qp;
    memset(ece, 0, sizeof *ece);
    return EOPNOTSUPP;
}

NN_EXPORT int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece) {
    (void)qp, (void)ece;
    return EOPNOTSUPP;
}

NN_EXPORT struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *a) {
    (void)a;
    struct ibv_ah *ah = calloc(1, sizeof *ah);
    if (ah == NULL) return NULL;
    ah->context = pd->context;
    ah->pd = pd;
    return ah;
}

NN_EXPORT int ibv_destroy_ah(struct ibv_ah *ah) {
    free(ah);
    return 0;
}

NN_EXPORT int ibv_fork_init(void) { return 0; }
NN_EXPORT enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }

NN_EXPORT const char *ibv_node_type_str(enum ibv_node_type type) {
    (void)type;
    return "CA";
}

NN_EXPORT const char *ibv_port_state_str(enum ibv_port_state state) {
    (void)state;
    return "ACTIVE";
}

NN_EXPORT const char *ibv_event_type_str(enum ibv_event_type type) {
    (void)type;
    return "event";
}

NN_EXPORT const char *ibv_wc_status_str(enum ibv_wc_status status) {
    return status == IBV_WC_SUCCESS ? "success" : "error";
}
