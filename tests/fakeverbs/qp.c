/* Queue pairs: making, destroying, asking. The state machine is in modify.c. */
#include "fake.h"

#include <time.h>

struct fv_qp *fv_find_qp(uint32_t qpn) {
    struct fv_qp *qp = fv.qps;
    while (qp != NULL && qp->qp.qp_num != qpn) qp = qp->next;
    return qp;
}

static uint32_t pow2(uint32_t n) {
    uint32_t size = 1;
    while (size < n) size *= 2;
    return size;
}

/* The number names the process (its slot on the bus) and the QP in it; not used again soon. */
static uint32_t new_qpn(void) {
    uint32_t qpn;
    do {
        fv.next_qpn = (fv.next_qpn + 1) & 0xffff;
        qpn = (uint32_t)fv.slot << 16 | fv.next_qpn;
    } while (fv_find_qp(qpn) != NULL);
    return qpn;
}

static int may_create(struct fv_dev *d, const struct ibv_pd *pd,
                      const struct ibv_qp_init_attr *a) {
    const struct ibv_qp_cap *c = &a->cap;
    if (d->fatal) return EIO;
    if (a->qp_type != IBV_QPT_RC || a->srq != NULL) return EOPNOTSUPP;
    if (a->send_cq == NULL || a->recv_cq == NULL) return EINVAL;
    if (a->send_cq->context != pd->context || a->recv_cq->context != pd->context) return EINVAL;
    if (c->max_send_wr > d->max_qp_wr || c->max_recv_wr > d->max_qp_wr) return EINVAL;
    if (c->max_send_sge > d->max_sge || c->max_recv_sge > d->max_sge) return EINVAL;
    if (c->max_send_sge > FV_MAX_SGE || c->max_recv_sge > FV_MAX_SGE) return EINVAL;
    if (c->max_inline_data > d->max_inline || c->max_inline_data > FV_MAX_INLINE) return EINVAL;
    return (uint64_t)d->live[FV_KIND_qp] >= d->max_qp ? ENOMEM : 0;
}

static void free_qp(struct fv_qp *qp) {
    free(qp->sq);
    free(qp->sq_sge);
    free(qp->sq_inline);
    free(qp->rq);
    free(qp->rq_sge);
    free(qp->cur.sge);
    free(qp);
}

static bool make_rings(struct fv_qp *qp, const struct ibv_qp_cap *c) {
    uint32_t sends = pow2(c->max_send_wr), recvs = pow2(c->max_recv_wr);
    uint32_t send_sge = c->max_send_sge + 1, recv_sge = c->max_recv_sge + 1;
    qp->sq_mask = sends - 1;
    qp->rq_mask = recvs - 1;
    qp->sq = calloc(sends, sizeof *qp->sq);
    qp->rq = calloc(recvs, sizeof *qp->rq);
    qp->sq_sge = calloc((size_t)sends * send_sge, sizeof *qp->sq_sge);
    qp->rq_sge = calloc((size_t)recvs * recv_sge, sizeof *qp->rq_sge);
    qp->sq_inline = calloc(sends, c->max_inline_data + 1);
    qp->cur.sge = calloc(recv_sge, sizeof *qp->cur.sge);
    if (qp->sq == NULL || qp->rq == NULL || qp->sq_sge == NULL || qp->rq_sge == NULL ||
        qp->sq_inline == NULL || qp->cur.sge == NULL)
        return false;
    for (uint32_t i = 0; i < sends; i++) {
        qp->sq[i].sge = qp->sq_sge + (size_t)i * send_sge;
        qp->sq[i].inline_data = qp->sq_inline + (size_t)i * (c->max_inline_data + 1);
    }
    for (uint32_t i = 0; i < recvs; i++) qp->rq[i].sge = qp->rq_sge + (size_t)i * recv_sge;
    return true;
}

static struct fv_qp *new_qp(struct ibv_pd *pd, const struct ibv_qp_init_attr *a) {
    struct fv_pd *p = (struct fv_pd *)pd;
    struct fv_qp *qp = calloc(1, sizeof *qp);
    if (qp == NULL) return NULL;
    if (!make_rings(qp, &a->cap)) {
        free_qp(qp);
        return NULL;
    }
    FV_UNTRACKED(&qp->state, sizeof qp->state);
    FV_UNTRACKED(&qp->sq_head, sizeof qp->sq_head);
    FV_UNTRACKED(&qp->sq_exec, sizeof qp->sq_exec);
    FV_UNTRACKED(&qp->sq_tail, sizeof qp->sq_tail);
    qp->dev = (struct fv_dev *)pd->context->device;
    qp->given = p;
    qp->pd = p->parent != NULL ? p->parent : p;
    qp->init = *a;
    qp->null_mode = fv.null_mode;
    qp->state = IBV_QPS_RESET;
    qp->deadline = FV_NEVER;
    pthread_spin_init(&qp->sq_lock, PTHREAD_PROCESS_PRIVATE);
    struct ibv_qp *q = &qp->qp;
    q->context = pd->context;
    q->qp_context = a->qp_context;
    q->pd = pd;
    q->send_cq = a->send_cq;
    q->recv_cq = a->recv_cq;
    q->handle = q->qp_num = new_qpn();
    q->state = IBV_QPS_RESET;
    q->qp_type = a->qp_type;
    pthread_mutex_init(&q->mutex, NULL);
    pthread_cond_init(&q->cond, NULL);
    return qp;
}

FV_EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a) {
    struct fv_dev *d = (struct fv_dev *)pd->context->device;
    struct fv_qp *qp = NULL;
    fv_lock();
    if (!fv_fails(d, FV_CALL_create_qp)) {
        int err = may_create(d, pd, a);
        if (err == 0 && (qp = new_qp(pd, a)) == NULL) err = ENOMEM;
        if (err != 0) errno = err;
    }
    if (qp != NULL) {
        qp->next = fv.qps;
        fv.qps = qp;
        d->live[FV_KIND_qp]++;
        qp->given->users++;
        ((struct fv_cq *)a->send_cq)->users++;
        ((struct fv_cq *)a->recv_cq)->users++;
    }
    fv_unlock();
    return qp == NULL ? NULL : &qp->qp;
}

/* Everything posted is forgotten, and no completion of it will ever be seen. */
void fv_qp_clear(struct fv_qp *qp) {
    fv_place_late(qp);
    fv_drop_pending(qp);
    fv_cq_forget((struct fv_cq *)qp->init.send_cq, qp);
    fv_cq_forget((struct fv_cq *)qp->init.recv_cq, qp);
    pthread_spin_lock(&qp->sq_lock);
    qp->sq_exec = qp->sq_tail = (uint64_t)qp->sq_head;
    pthread_spin_unlock(&qp->sq_lock);
    qp->rq_tail = qp->rq_head;
    qp->started = qp->waiting = qp->in_message = qp->recv_taken = false;
    qp->off = qp->total = 0;
    qp->seq = qp->rseq = qp->tries = qp->rnr_tries = 0;
    qp->epoch++;
}

/* rdma-core waits for ever when an async event was not acknowledged; here that is EBUSY. */
FV_EXPORT int ibv_destroy_qp(struct ibv_qp *q) {
    struct fv_qp *qp = (struct fv_qp *)q;
    struct fv_dev *d = qp->dev;
    int err = 0;
    fv_lock();
    while (d->hold_destroy != 0) {
        const struct timespec t = {.tv_nsec = 1000000};
        fv_unlock();
        nanosleep(&t, NULL);
        fv_lock();
    }
    if (!fv_fails_quietly(d, FV_CALL_destroy_qp, &err) && qp->async_taken != qp->async_acked) {
        FV_COUNT(busy_events);
        err = EBUSY;
    }
    if (err == 0) {
        struct fv_qp **at = &fv.qps;
        while (*at != qp) at = &(*at)->next;
        *at = qp->next;
        fv_qp_clear(qp);
        fv_event_forget(fv_ctx_of(q->context), q);
        d->live[FV_KIND_qp]--;
        qp->given->users--;
        ((struct fv_cq *)q->send_cq)->users--;
        ((struct fv_cq *)q->recv_cq)->users--;
        fv_log_destroy("qp");
        pthread_spin_destroy(&qp->sq_lock);
        pthread_mutex_destroy(&q->mutex);
        pthread_cond_destroy(&q->cond);
        free_qp(qp);
    }
    fv_unlock();
    return err;
}

FV_EXPORT int ibv_query_qp(struct ibv_qp *q, struct ibv_qp_attr *a, int mask,
                           struct ibv_qp_init_attr *init) {
    struct fv_qp *qp = (struct fv_qp *)q;
    int err = 0;
    (void)mask;
    fv_lock();
    if (!fv_fails_quietly(qp->dev, FV_CALL_query_qp, &err)) {
        *a = qp->attr;
        a->qp_state = a->cur_qp_state = (enum ibv_qp_state)qp->state;
        a->cap = qp->init.cap;
        if (init != NULL) *init = qp->init;
        q->state = a->qp_state;
    }
    fv_unlock();
    return err;
}
