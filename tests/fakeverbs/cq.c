/* Completion queues and channels. */
#include "fake.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

FV_EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c) {
    struct fv_dev *d = (struct fv_dev *)c->device;
    struct fv_channel *ch = NULL;
    fv_lock();
    if (!fv_fails(d, FV_CALL_create_comp_channel)) {
        ch = calloc(1, sizeof *ch);
        int fd = eventfd(0, EFD_CLOEXEC);
        if (ch == NULL || fd < 0) {
            free(ch);
            ch = NULL;
        } else {
            ch->ch.context = c;
            ch->ch.fd = fd;
            d->live[FV_KIND_channel]++;
            fv_ctx_of(c)->objects++;
        }
    }
    fv_unlock();
    return ch == NULL ? NULL : &ch->ch;
}

FV_EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) {
    struct fv_dev *d = (struct fv_dev *)channel->context->device;
    int err = 0;
    fv_lock();
    if (!fv_fails_quietly(d, FV_CALL_destroy_comp_channel, &err) && channel->refcnt != 0) {
        FV_COUNT(order_violations);
        err = EBUSY;
    }
    if (err == 0) {
        d->live[FV_KIND_channel]--;
        fv_ctx_of(channel->context)->objects--;
        fv_log_destroy("channel");
        close(channel->fd);
        free(channel);
    }
    fv_unlock();
    return err;
}

static struct fv_cq *new_cq(struct ibv_context *c, int n) {
    struct fv_cq *q = calloc(1, sizeof *q);
    uint32_t size = 1;
    while (size < (uint32_t)n) size *= 2;
    if (q != NULL) q->ring = calloc(size, sizeof *q->ring);
    if (q == NULL || q->ring == NULL) {
        free(q);
        return NULL;
    }
    FV_UNTRACKED(&q->head, sizeof q->head);
    FV_UNTRACKED(&q->tail, sizeof q->tail);
    q->dev = (struct fv_dev *)c->device;
    q->cap = (uint32_t)n;
    q->mask = size - 1;
    q->cq.context = c;
    q->cq.cqe = n;
    pthread_spin_init(&q->lock, PTHREAD_PROCESS_PRIVATE);
    pthread_mutex_init(&q->cq.mutex, NULL);
    pthread_cond_init(&q->cq.cond, NULL);
    return q;
}

/* Exactly as many entries as asked for: no rounding up that hides a wrong sum. */
FV_EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *c, int n, void *user,
                                       struct ibv_comp_channel *channel, int vector) {
    struct fv_dev *d = (struct fv_dev *)c->device;
    struct fv_cq *q = NULL;
    fv_lock();
    if (!fv_fails(d, FV_CALL_create_cq)) {
        if (d->fatal)
            errno = EIO;
        else if (n < 1 || (uint64_t)n > d->max_cqe || vector < 0 ||
                 vector >= c->num_comp_vectors || (channel != NULL && channel->context != c))
            errno = EINVAL;
        else if ((uint64_t)d->live[FV_KIND_cq] >= d->max_cq || (q = new_cq(c, n)) == NULL)
            errno = ENOMEM;
    }
    if (q != NULL) {
        q->cq.cq_context = user;
        q->cq.channel = channel;
        if (channel != NULL) channel->refcnt++;
        d->live[FV_KIND_cq]++;
        fv_ctx_of(c)->objects++;
    }
    fv_unlock();
    return q == NULL ? NULL : &q->cq;
}

/* Takes the CQ out of its channel's list; the descriptor follows the list. */
static void leave_channel(struct fv_cq *q) {
    struct fv_channel *ch = (struct fv_channel *)q->cq.channel;
    struct fv_cq *before = NULL;
    uint64_t n;
    if (!q->in_channel) return;
    for (struct fv_cq *at = ch->first; at != q; at = at->ev_next) before = at;
    if (before == NULL)
        ch->first = q->ev_next;
    else
        before->ev_next = q->ev_next;
    if (ch->last == q) ch->last = before;
    q->in_channel = false;
    q->ev_next = NULL;
    if (ch->first == NULL && read(ch->ch.fd, &n, sizeof n) < 0) abort();
}

/* rdma-core waits for ever when an event was not acknowledged; here that is EBUSY. */
FV_EXPORT int ibv_destroy_cq(struct ibv_cq *cq) {
    struct fv_cq *q = (struct fv_cq *)cq;
    int err = 0;
    fv_lock();
    if (!fv_fails_quietly(q->dev, FV_CALL_destroy_cq, &err)) {
        if (q->users != 0) {
            FV_COUNT(order_violations);
            err = EBUSY;
        } else if (q->ev_taken != q->ev_acked || q->async_taken != q->async_acked) {
            FV_COUNT(busy_events);
            err = EBUSY;
        }
    }
    if (err == 0) {
        leave_channel(q);
        fv_event_forget(fv_ctx_of(cq->context), cq);
        if (cq->channel != NULL) cq->channel->refcnt--;
        q->dev->live[FV_KIND_cq]--;
        fv_ctx_of(cq->context)->objects--;
        fv_log_destroy("cq");
        pthread_spin_destroy(&q->lock);
        pthread_mutex_destroy(&cq->mutex);
        pthread_cond_destroy(&cq->cond);
        free(q->ring);
        free(q);
    }
    fv_unlock();
    return err;
}

/* Puts an entry into the ring; the CQ's lock is held. */
unsigned fv_cq_put(struct fv_cq *q, const struct fv_cqe *e, bool solicited) {
    uint64_t tail = atomic_load_explicit(&q->tail, memory_order_relaxed);
    if (q->overrun) return 0;
    if (tail - atomic_load_explicit(&q->head, memory_order_relaxed) >= q->cap) {
        q->overrun = true;
        return FV_CQ_OVERRUN;
    }
    q->ring[tail & q->mask] = *e;
    atomic_store_explicit(&q->tail, tail + 1, memory_order_release);
    if (q->armed == 0 || (q->armed == 2 && !solicited)) return 0;
    q->armed = 0;
    return FV_CQ_FIRE;
}

unsigned fv_cq_push(struct fv_cq *q, const struct fv_cqe *e, bool solicited) {
    pthread_spin_lock(&q->lock);
    unsigned what = fv_cq_put(q, e, solicited);
    pthread_spin_unlock(&q->lock);
    return what;
}

/* What a push asks for: fv.lock is held, the CQ's is not. */
void fv_cq_after(struct fv_cq *q, unsigned what) {
    struct fv_channel *ch = (struct fv_channel *)q->cq.channel;
    uint64_t one = 1;
    if ((what & FV_CQ_FIRE) != 0 && ch != NULL) {
        q->ev_queued++;
        if (!q->in_channel) {
            q->in_channel = true;
            if (ch->last != NULL)
                ch->last->ev_next = q;
            else
                ch->first = q;
            ch->last = q;
            if (ch->first == q && write(ch->ch.fd, &one, sizeof one) < 0) abort();
        }
    }
    if ((what & FV_CQ_OVERRUN) != 0) {
        FV_COUNT(cq_overruns);
        fv_event(q->dev, IBV_EVENT_CQ_ERR, 0, NULL, q);
        for (struct fv_qp *qp = fv.qps; qp != NULL; qp = qp->next)
            if (qp->init.send_cq == &q->cq || qp->init.recv_cq == &q->cq) fv_qp_error(qp);
    }
}

/* With `reorder`: the oldest entry of the QP that came last, so QPs overtake one another. */
static void bring_forward(struct fv_cq *q, uint64_t head, uint64_t tail) {
    const struct fv_qp *last = q->ring[(tail - 1) & q->mask].qp;
    uint64_t at = head;
    while (q->ring[at & q->mask].qp != last) at++;
    struct fv_cqe e = q->ring[at & q->mask];
    for (; at != head; at--) q->ring[at & q->mask] = q->ring[(at - 1) & q->mask];
    q->ring[head & q->mask] = e;
}

int fv_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc) {
    struct fv_cq *q = (struct fv_cq *)cq;
    int got = 0;
    uint64_t head = atomic_load_explicit(&q->head, memory_order_relaxed);
    if (head == atomic_load_explicit(&q->tail, memory_order_acquire)) return 0;
    bool reorder = atomic_load_explicit(&q->dev->reorder, memory_order_relaxed) != 0;
    pthread_spin_lock(&q->lock);
    head = atomic_load_explicit(&q->head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&q->tail, memory_order_relaxed);
    for (; got < n && head != tail; head++) {
        if (reorder) bring_forward(q, head, tail);
        const struct fv_cqe *e = &q->ring[head & q->mask];
        if (e->retires != 0)
            atomic_store_explicit(&e->qp->sq_tail, e->retires, memory_order_relaxed);
        wc[got++] = e->wc;
    }
    atomic_store_explicit(&q->head, head, memory_order_relaxed);
    pthread_spin_unlock(&q->lock);
    return got;
}

/* Completions that are there already make no event: poll again after arming. */
int fv_req_notify_cq(struct ibv_cq *cq, int solicited) {
    struct fv_cq *q = (struct fv_cq *)cq;
    int err = 0;
    fv_lock();
    if (!fv_fails_quietly(q->dev, FV_CALL_req_notify_cq, &err)) {
        pthread_spin_lock(&q->lock);
        if (q->armed != 1) q->armed = solicited != 0 ? 2 : 1;
        pthread_spin_unlock(&q->lock);
    }
    fv_unlock();
    return err;
}

/* Entries of a QP that goes away or is reset vanish. */
void fv_cq_forget(struct fv_cq *q, const struct fv_qp *qp) {
    pthread_spin_lock(&q->lock);
    uint64_t head = q->head, tail = q->tail, to = head;
    for (uint64_t at = head; at != tail; at++) {
        if (q->ring[at & q->mask].qp == qp) continue;
        if (to != at) q->ring[to & q->mask] = q->ring[at & q->mask];
        to++;
    }
    q->tail = to;
    pthread_spin_unlock(&q->lock);
}

FV_EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq,
                               void **user) {
    struct fv_channel *ch = (struct fv_channel *)channel;
    for (;;) {
        fv_lock();
        struct fv_cq *q = ch->first;
        if (q != NULL) {
            q->ev_taken++;
            if (--q->ev_queued == 0) leave_channel(q);
            *cq = &q->cq;
            *user = q->cq.cq_context;
            fv_unlock();
            return 0;
        }
        fv_unlock();
        if ((fcntl(channel->fd, F_GETFL) & O_NONBLOCK) != 0) {
            errno = EAGAIN;
            return -1;
        }
        struct pollfd p = {.fd = channel->fd, .events = POLLIN};
        if (poll(&p, 1, -1) < 0) return -1;
    }
}

FV_EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n) {
    fv_lock();
    ((struct fv_cq *)cq)->ev_acked += n;
    cq->comp_events_completed += n;
    fv_unlock();
}
