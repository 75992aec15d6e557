/* Asynchronous events: a list per context; its async_fd is readable while the list is not empty.
 */
#include "fake.h"

#include <fcntl.h>
#include <poll.h>
#include <strings.h>
#include <unistd.h>

#define LEN(a) (sizeof(a) / sizeof(a)[0])

static const struct {
    const char *name;
    enum ibv_event_type type;
    char element; /* p port, q QP, c CQ, d device */
} EVENTS[] = {
    {"CQ_ERR", IBV_EVENT_CQ_ERR, 'c'},
    {"QP_FATAL", IBV_EVENT_QP_FATAL, 'q'},
    {"QP_REQ_ERR", IBV_EVENT_QP_REQ_ERR, 'q'},
    {"QP_ACCESS_ERR", IBV_EVENT_QP_ACCESS_ERR, 'q'},
    {"COMM_EST", IBV_EVENT_COMM_EST, 'q'},
    {"DEVICE_FATAL", IBV_EVENT_DEVICE_FATAL, 'd'},
    {"PORT_ACTIVE", IBV_EVENT_PORT_ACTIVE, 'p'},
    {"PORT_ERR", IBV_EVENT_PORT_ERR, 'p'},
    {"LID_CHANGE", IBV_EVENT_LID_CHANGE, 'p'},
    {"PKEY_CHANGE", IBV_EVENT_PKEY_CHANGE, 'p'},
    {"SM_CHANGE", IBV_EVENT_SM_CHANGE, 'p'},
    {"CLIENT_REREGISTER", IBV_EVENT_CLIENT_REREGISTER, 'p'},
    {"GID_CHANGE", IBV_EVENT_GID_CHANGE, 'p'},
};

FV_EXPORT const char *ibv_event_type_str(enum ibv_event_type type) {
    for (size_t i = 0; i < LEN(EVENTS); i++)
        if (EVENTS[i].type == type) return EVENTS[i].name;
    return "unknown event";
}

static void append(struct fv_ctx *c, const struct ibv_async_event *ev) {
    struct fv_async *a = calloc(1, sizeof *a);
    uint64_t one = 1;
    if (a == NULL) abort();
    a->ev = *ev;
    if (c->async_last != NULL)
        c->async_last->next = a;
    else
        c->async_first = a;
    c->async_last = a;
    if (c->async_first == a && write(c->v.context.async_fd, &one, sizeof one) < 0) abort();
    FV_COUNT(events_queued);
}

/* To the element's context, or to every context of the device. */
void fv_event(struct fv_dev *d, enum ibv_event_type type, int port, struct fv_qp *qp,
              struct fv_cq *cq) {
    struct ibv_async_event ev;
    memset(&ev, 0, sizeof ev);
    ev.event_type = type;
    ev.element.port_num = port;
    struct ibv_context *only = NULL;
    if (d->quiet_events != 0) {
        FV_COUNT(events_quiet);
        return;
    }
    if (qp != NULL) {
        ev.element.qp = &qp->qp;
        only = qp->qp.context;
    } else if (cq != NULL) {
        ev.element.cq = &cq->cq;
        only = cq->cq.context;
    }
    for (struct fv_ctx *c = fv.ctxs; c != NULL; c = c->next)
        if (c->dev == d && (only == NULL || only == &c->v.context)) append(c, &ev);
}

/* Empties the descriptor when the last event went. */
static void settle(struct fv_ctx *c) {
    uint64_t n;
    if (c->async_first != NULL) return;
    c->async_last = NULL;
    if (read(c->v.context.async_fd, &n, sizeof n) < 0) abort();
}

/* Events of an object that goes away are never seen, as with the kernel. */
void fv_event_forget(struct fv_ctx *c, const void *element) {
    struct fv_async **at = &c->async_first, *last = NULL;
    if (c->async_first == NULL) return;
    while (*at != NULL) {
        struct fv_async *a = *at;
        enum ibv_event_type t = a->ev.event_type;
        bool ours = (t <= IBV_EVENT_PATH_MIG_ERR) && (const void *)a->ev.element.qp == element;
        if (ours) {
            *at = a->next;
            free(a);
        } else {
            last = a;
            at = &a->next;
        }
    }
    c->async_last = last;
    settle(c);
}

void fv_port_changed(struct fv_dev *d, uint32_t port, uint64_t before) {
    uint64_t now = d->port[port - 1].state;
    if (before == now || fv.ctxs == NULL) return;
    if (now == IBV_PORT_ACTIVE)
        fv_event(d, IBV_EVENT_PORT_ACTIVE, (int)port, NULL, NULL);
    else if (before == IBV_PORT_ACTIVE)
        fv_event(d, IBV_EVENT_PORT_ERR, (int)port, NULL, NULL);
}

void fv_device_fatal(struct fv_dev *d) {
    fv_event(d, IBV_EVENT_DEVICE_FATAL, 0, NULL, NULL);
    d->fatal = true;
    for (struct fv_qp *qp = fv.qps; qp != NULL; qp = qp->next)
        if (qp->dev == d) fv_qp_error(qp);
}

static struct fv_cq *cq_of(struct fv_dev *d, uint64_t qpn) {
    struct fv_qp *qp = fv_find_qp((uint32_t)qpn);
    return qp == NULL || qp->dev != d ? NULL : (struct fv_cq *)qp->init.send_cq;
}

/* `NAME[:N]`: N is the port, or a QP's number (for CQ_ERR: the QP whose send CQ it is). */
int fv_event_assign(struct fv_dev *d, const char *text) {
    size_t len = strcspn(text, ":");
    char *end;
    uint64_t n = text[len] == ':' ? strtoull(text + len + 1, &end, 0) : 1;
    for (size_t i = 0; i < LEN(EVENTS); i++) {
        if (strlen(EVENTS[i].name) != len || strncmp(EVENTS[i].name, text, len) != 0) continue;
        struct fv_qp *qp = fv_find_qp((uint32_t)n);
        struct fv_cq *cq = cq_of(d, n);
        switch (EVENTS[i].element) {
        case 'p': fv_event(d, EVENTS[i].type, (int)n, NULL, NULL); return 0;
        case 'd': fv_device_fatal(d); return 0;
        case 'c':
            if (cq != NULL) fv_event(d, EVENTS[i].type, 0, NULL, cq);
            return cq == NULL ? EINVAL : 0;
        default:
            if (qp == NULL || qp->dev != d) return EINVAL;
            fv_event(d, EVENTS[i].type, 0, qp, NULL);
            if (EVENTS[i].type != IBV_EVENT_COMM_EST) fv_qp_error(qp);
            return 0;
        }
    }
    return EINVAL;
}

/* Waits when async_fd is blocking and nothing is there. */
FV_EXPORT int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
    struct fv_ctx *c = fv_ctx_of(context);
    for (;;) {
        fv_lock();
        struct fv_async *a = c->async_first;
        if (a != NULL) {
            *event = a->ev;
            c->async_first = a->next;
            settle(c);
            enum ibv_event_type t = a->ev.event_type;
            if (t == IBV_EVENT_CQ_ERR)
                ((struct fv_cq *)a->ev.element.cq)->async_taken++;
            else if (t <= IBV_EVENT_PATH_MIG_ERR)
                ((struct fv_qp *)a->ev.element.qp)->async_taken++;
            fv_unlock();
            free(a);
            return 0;
        }
        fv_unlock();
        if ((fcntl(context->async_fd, F_GETFL) & O_NONBLOCK) != 0) {
            errno = EAGAIN;
            return -1;
        }
        struct pollfd p = {.fd = context->async_fd, .events = POLLIN};
        if (poll(&p, 1, -1) < 0) return -1;
    }
}

FV_EXPORT void ibv_ack_async_event(struct ibv_async_event *event) {
    fv_lock();
    if (event->event_type == IBV_EVENT_CQ_ERR)
        ((struct fv_cq *)event->element.cq)->async_acked++;
    else if (event->event_type <= IBV_EVENT_PATH_MIG_ERR)
        ((struct fv_qp *)event->element.qp)->async_acked++;
    fv_unlock();
}
