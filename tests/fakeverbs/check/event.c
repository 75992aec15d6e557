/* Asynchronous events and completion channels. */
#include "check.h"

#include <fcntl.h>

static struct side a, b;

static void end(void) {
    end_side(&a);
    end_side(&b);
}

/* The next event, acknowledged; its type is -1 when none came. */
static struct ibv_async_event next_event(struct ibv_context *c) {
    struct ibv_async_event e = {.event_type = (enum ibv_event_type)-1};
    if (!readable(c->async_fd, 5000)) return e;
    EQ(ibv_get_async_event(c, &e), 0);
    ibv_ack_async_event(&e);
    return e;
}

static void port_events(void) {
    struct ibv_context *c = open_dev(0), *other = open_dev(1);
    struct ibv_port_attr attr;
    SET("fake0.port2.state=down");
    struct ibv_async_event e = next_event(c);
    EQ(e.event_type, IBV_EVENT_PORT_ERR);
    EQ(e.element.port_num, 2);
    EQ(ibv_query_port(c, 2, &attr), 0);
    EQ(attr.state, IBV_PORT_DOWN);
    EQ(attr.phys_state, 3);
    EQ(ibv_query_port(c, 1, &attr), 0);
    EQ(attr.state, IBV_PORT_ACTIVE);
    SET("fake0.port2.state=down;fake0.port2.state=active");
    e = next_event(c);
    EQ(e.event_type, IBV_EVENT_PORT_ACTIVE);
    EQ(e.element.port_num, 2);
    SET("fake0.event=CLIENT_REREGISTER:1");
    EQ(next_event(c).event_type, IBV_EVENT_CLIENT_REREGISTER);
    TRUE(!readable(c->async_fd, 0));
    TRUE(!readable(other->async_fd, 0));
    /* The state changes, the event is lost. */
    SET("fake0.quiet_events=1;fake0.port1.state=down");
    TRUE(!readable(c->async_fd, 50));
    EQ(counter("events_quiet"), 1);
    EQ(ibv_query_port(c, 1, &attr), 0);
    EQ(attr.state, IBV_PORT_DOWN);
    EQ(ibv_close_device(c), 0);
    EQ(ibv_close_device(other), 0);
}

static void gid_change(void) {
    struct ibv_context *c = open_dev(0);
    struct ibv_gid_entry e;
    union ibv_gid gid;
    SET("fake0.port2.gid5=10.9.9.9,v1");
    struct ibv_async_event ev = next_event(c);
    EQ(ev.event_type, IBV_EVENT_GID_CHANGE);
    EQ(ev.element.port_num, 2);
    EQ(ibv_query_gid_ex(c, 2, 5, &e, 0), 0);
    EQ(e.gid_type, IBV_GID_TYPE_ROCE_V1);
    EQ(e.gid.raw[13], 9);
    EQ(ibv_query_gid_ex(c, 1, 5, &e, 0), ENODATA);
    SET("fake0.port2.gid5=none");
    EQ(next_event(c).event_type, IBV_EVENT_GID_CHANGE);
    EQ(ibv_query_gid_ex(c, 2, 5, &e, 0), ENODATA);
    EQ(ibv_query_gid(c, 2, 5, &gid), 0);
    EQ(gid.raw[13], 0);
    EQ(ibv_close_device(c), 0);
}

/* An address that moved: its old owner is no longer reached. */
static void gid_moved(void) {
    make_pair(&a, &b);
    EQ(one(&a, &b, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 8}), 0);
    SET("fake1.port1.gid1=none;fake1.port1.gid3=10.1.1.9");
    EQ(one(&a, &b, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 8}), IBV_WC_RETRY_EXC_ERR);
    end();
}

static void qp_fatal(void) {
    char text[64];
    make_pair(&a, &b);
    snprintf(text, sizeof text, "fake0.event=QP_FATAL:%u", a.qp->qp_num);
    SET(text);
    struct ibv_async_event e;
    EQ(ibv_get_async_event(a.ctx, &e), 0);
    EQ(e.event_type, IBV_EVENT_QP_FATAL);
    TRUE(e.element.qp == a.qp);
    EQ(one(&a, &b, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 8}), IBV_WC_WR_FLUSH_ERR);
    EQ(ibv_destroy_qp(a.qp), EBUSY);
    EQ(counter("busy_events"), 1);
    ibv_ack_async_event(&e);
    end();
}

/* An event of a QP that is gone is never seen. */
static void forgotten_event(void) {
    char text[64];
    make_pair(&a, &b);
    struct ibv_qp *qp = make_qp(&a, a.cq);
    snprintf(text, sizeof text, "fake0.event=QP_FATAL:%u;fake0.event=LID_CHANGE:1", qp->qp_num);
    SET(text);
    EQ(ibv_destroy_qp(qp), 0);
    EQ(next_event(a.ctx).event_type, IBV_EVENT_LID_CHANGE);
    TRUE(!readable(a.ctx->async_fd, 0));
    fcntl(a.ctx->async_fd, F_SETFL, O_NONBLOCK);
    struct ibv_async_event e;
    EQ(ibv_get_async_event(a.ctx, &e), -1);
    EQ(errno, EAGAIN);
    end();
}

/* A bad access tells the responder's side too. */
static void access_event(void) {
    make_pair(&a, &b);
    EQ(one(&a, &b, (struct op){.op = IBV_WR_RDMA_READ, .len = 8, .rkey = 9}),
       IBV_WC_REM_ACCESS_ERR);
    struct ibv_async_event e = next_event(b.ctx);
    EQ(e.event_type, IBV_EVENT_QP_ACCESS_ERR);
    TRUE(e.element.qp == b.qp);
    end();
}

static void device_fatal(void) {
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    SET("fake0.blackhole=1");
    EQ(post(&a, a.qp, &h, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 8}), 0);
    SET("fake0.event=DEVICE_FATAL;fake0.blackhole=0");
    EQ(next_event(a.ctx).event_type, IBV_EVENT_DEVICE_FATAL);
    EQ(status_of(a.cq, NULL), IBV_WC_WR_FLUSH_ERR);
    EQ(counter("after_fatal"), 0);
    TRUE(FAILS(ibv_alloc_pd(a.ctx), EIO));
    TRUE(FAILS(make_qp(&a, a.cq), EIO));
    EQ(counter("after_fatal"), 2);
    end();
    EQ(counter("after_fatal"), 2);
}

/* One completion more than fits: the CQ and the QPs on it are lost. */
static void overrun(void) {
    char text[64];
    P.cqe = 4;
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    for (uint64_t i = 0; i < 5; i++)
        EQ(post(&a, a.qp, &h,
                (struct op){.op = IBV_WR_RDMA_WRITE, .len = 8, .id = i, .flags = 2}), 0);
    struct ibv_async_event e = next_event(a.ctx);
    EQ(e.event_type, IBV_EVENT_CQ_ERR);
    TRUE(e.element.cq == a.cq);
    for (uint64_t i = 0; i < 4; i++) EQ(next_wc(a.cq, 1000).wr_id, i);
    EQ((int)next_wc(a.cq, 50).status, -1);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    EQ(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init), 0);
    EQ(attr.qp_state, IBV_QPS_ERR);
    EQ(counter("cq_overruns"), 1);
    snprintf(text, sizeof text, "fake1.event=CQ_ERR:%u", b.qp->qp_num);
    SET(text);
    EQ(ibv_get_async_event(b.ctx, &e), 0);
    EQ(e.event_type, IBV_EVENT_CQ_ERR);
    TRUE(e.element.cq == b.cq);
    EQ(ibv_destroy_qp(b.qp), 0);
    EQ(ibv_destroy_cq(b.cq), EBUSY);
    ibv_ack_async_event(&e);
    b.qp = make_qp(&b, b.cq);
    end();
}

static bool write_one(void) {
    return one(&a, &b, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 8}) == IBV_WC_SUCCESS;
}

/* Armed once, one event; what was there before arming makes none. */
static void arming(void) {
    struct ibv_cq *cq;
    void *user;
    make_pair(&a, &b);
    TRUE(write_one());
    TRUE(!readable(a.ch->fd, 20));
    struct hello h = hello_of(&b);
    EQ(post(&a, a.qp, &h, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 8, .flags = 2}), 0);
    usleep(50000);
    EQ(ibv_req_notify_cq(a.cq, 0), 0);
    TRUE(!readable(a.ch->fd, 20));
    EQ(status_of(a.cq, NULL), 0);
    TRUE(write_one());
    TRUE(readable(a.ch->fd, 5000));
    TRUE(write_one());
    EQ(ibv_get_cq_event(a.ch, &cq, &user), 0);
    TRUE(cq == a.cq);
    TRUE(user == &a);
    TRUE(!readable(a.ch->fd, 20));
    fcntl(a.ch->fd, F_SETFL, O_NONBLOCK);
    EQ(ibv_get_cq_event(a.ch, &cq, &user), -1);
    EQ(errno, EAGAIN);
    EQ(ibv_destroy_qp(a.qp), 0);
    EQ(ibv_destroy_cq(a.cq), EBUSY);
    EQ(counter("busy_events"), 1);
    ibv_ack_cq_events(a.cq, 1);
    a.qp = make_qp(&a, a.cq);
    end();
}

/* 1,000 events taken and acknowledged at once; one more, never taken, does not hold anything. */
static void many_events(void) {
    struct ibv_cq *cq;
    void *user;
    make_pair(&a, &b);
    for (int i = 0; i < 1000; i++) {
        EQ(ibv_req_notify_cq(a.cq, 0), 0);
        TRUE(write_one());
    }
    for (int i = 0; i < 999; i++) EQ(ibv_get_cq_event(a.ch, &cq, &user), 0);
    TRUE(readable(a.ch->fd, 0));
    ibv_ack_cq_events(a.cq, 999);
    end();
}

/* Solicited only: a plain SEND is silent, a solicited one and an error are not. */
static void solicited(void) {
    struct ibv_cq *cq;
    void *user;
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    for (uint64_t i = 0; i < 3; i++) EQ(post_recv(&b, i, 0, 8), 0);
    EQ(ibv_req_notify_cq(b.cq, 1), 0);
    EQ(post(&a, a.qp, &h, (struct op){.op = IBV_WR_SEND, .len = 8}), 0);
    EQ(status_of(b.cq, NULL), 0);
    TRUE(!readable(b.ch->fd, 20));
    EQ(post(&a, a.qp, &h,
            (struct op){.op = IBV_WR_SEND, .len = 8, .flags = IBV_SEND_SOLICITED}), 0);
    TRUE(readable(b.ch->fd, 5000));
    EQ(ibv_get_cq_event(b.ch, &cq, &user), 0);
    EQ(ibv_req_notify_cq(b.cq, 1), 0);
    EQ(to_state(b.qp, IBV_QPS_ERR), 0);
    TRUE(readable(b.ch->fd, 5000));
    ibv_ack_cq_events(b.cq, 1);
    end();
}

const struct check EVENT_CHECKS[] = {
    {"port events", port_events, "FAKEVERBS_SET=fake0.ports=2"},
    {"gid change", gid_change, "FAKEVERBS_SET=fake0.ports=2"},
    {"gid moved", gid_moved, NULL},
    {"qp fatal", qp_fatal, NULL},
    {"forgotten event", forgotten_event, NULL},
    {"access event", access_event, NULL},
    {"device fatal", device_fatal, NULL},
    {"overrun", overrun, NULL},
    {"arming", arming, NULL},
    {"many events", many_events, NULL},
    {"solicited", solicited, NULL},
    {NULL, NULL, NULL},
};
