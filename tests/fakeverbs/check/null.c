/* The null mode of the benches, and many threads at once in the full one. */
#include "check.h"

#include <pthread.h>

#define READ IBV_WR_RDMA_READ
#define WRITE IBV_WR_RDMA_WRITE

static struct side a, b;

static void end(void) {
    end_side(&a);
    end_side(&b);
}

/* Complete when posted, no byte moved; limits, order and messages as ever. */
static void null_mode(void) {
    P.send_wr = 8;
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    struct ibv_wc wc[8];
    memset(b.buf, 7, 16);
    for (uint64_t i = 0; i < 8; i++) {
        unsigned flags = i == 6 ? 0 : IBV_SEND_SIGNALED;
        EQ(post(&a, a.qp, &h, (struct op){.op = READ, .len = 8, .id = i, .flags = flags}), 0);
    }
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8}), ENOMEM);
    EQ(ibv_poll_cq(a.cq, 8, wc), 7);
    for (int i = 0; i < 7; i++) {
        EQ(wc[i].wr_id, i + (i == 6));
        EQ(wc[i].opcode, IBV_WC_RDMA_READ);
        EQ(wc[i].byte_len, 8);
        EQ(wc[i].qp_num, a.qp->qp_num);
    }
    EQ(a.buf[0], 0);
    EQ(post_recv(&b, 9, 64, 8), 0);
    memcpy(a.buf, "message", 8);
    EQ(post(&a, a.qp, &h, (struct op){.op = IBV_WR_SEND, .len = 8, .id = 1, .flags = 2}), 0);
    EQ(post(&a, a.qp, &h, (struct op){.op = READ, .len = 8, .id = 2, .flags = 2}), 0);
    EQ(next_wc(a.cq, 5000).wr_id, 1);
    EQ(next_wc(a.cq, 5000).wr_id, 2);
    EQ(status_of(b.cq, NULL), 0);
    TRUE(memcmp(b.buf + 64, "message", 8) == 0);
    EQ(ibv_req_notify_cq(a.cq, 0), 0);
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .flags = 2}), 0);
    TRUE(readable(a.ch->fd, 0));
    EQ(to_state(a.qp, IBV_QPS_ERR), 0);
    EQ(status_of(a.cq, NULL), 0);
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .id = 4}), 0);
    EQ(status_of(a.cq, NULL), IBV_WC_WR_FLUSH_ERR);
    end();
}

static void null_overrun(void) {
    P.cqe = 2;
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    for (uint64_t i = 0; i < 3; i++)
        EQ(post(&a, a.qp, &h, (struct op){.op = READ, .len = 8, .id = i, .flags = 2}), 0);
    struct ibv_async_event e;
    TRUE(readable(a.ctx->async_fd, 5000));
    EQ(ibv_get_async_event(a.ctx, &e), 0);
    EQ(e.event_type, IBV_EVENT_CQ_ERR);
    ibv_ack_async_event(&e);
    end();
}

enum { THREADS = 4, ROUNDS = 150 };

/* Each has QPs of its own; all share devices, engine and knobs. */
static void *transfers(void *arg) {
    struct side x, y;
    unsigned seed = (unsigned)(uintptr_t)arg;
    make_pair(&x, &y);
    struct hello h = hello_of(&y);
    for (uint64_t i = 0; i < ROUNDS; i++) {
        fill_bytes(x.buf, 3000, seed + (unsigned)i);
        EQ(post_recv(&y, i, 100000, 3000), 0);
        EQ(post(&x, x.qp, &h, (struct op){.op = WRITE, .len = 3000, .to = 5000}), 0);
        EQ(post(&x, x.qp, &h,
                (struct op){.op = READ, .len = 3000, .from = 20000, .to = 5000}), 0);
        EQ(post(&x, x.qp, &h, (struct op){.op = IBV_WR_SEND, .len = 3000, .flags = 2}), 0);
        EQ(status_of(x.cq, NULL), 0);
        EQ(status_of(y.cq, NULL), 0);
        TRUE(same_bytes(x.buf + 20000, 3000, seed + (unsigned)i));
        TRUE(same_bytes(y.buf + 100000, 3000, seed + (unsigned)i));
    }
    end_side(&x);
    end_side(&y);
    return NULL;
}

static void threads(void) {
    pthread_t t[THREADS];
    make_pair(&a, &b);
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&t[i], NULL, transfers, (void *)(i + 1));
    for (int i = 0; i < 50; i++) {
        struct ibv_async_event e;
        SET("*.event=LID_CHANGE:1;*.delay_us=0-200");
        EQ(ibv_get_async_event(a.ctx, &e), 0);
        ibv_ack_async_event(&e);
        usleep(1000);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(t[i], NULL);
    end();
    EQ(counter("wc_error"), 0);
    EQ(counter("live.qp"), 0);
}

/* One thread polls a CQ that others fill in the null mode. */
static void *poster(void *arg) {
    struct ibv_qp *qp = arg;
    struct hello h = hello_of(&b);
    for (uint64_t i = 0; i < 2000; i++)
        while (post(&a, qp, &h, (struct op){.op = WRITE, .len = 8, .flags = 2}) == ENOMEM)
            sched_yield();
    return NULL;
}

static void null_threads(void) {
    P.cqe = 128;
    make_pair(&a, &b);
    struct ibv_qp *other = make_qp(&a, a.cq);
    struct hello h = hello_of(&b);
    join(&a, other, &h);
    pthread_t t[2];
    pthread_create(&t[0], NULL, poster, a.qp);
    pthread_create(&t[1], NULL, poster, other);
    for (int i = 0; i < 4000; i++) EQ(status_of(a.cq, NULL), 0);
    pthread_join(t[0], NULL);
    pthread_join(t[1], NULL);
    EQ(ibv_destroy_qp(other), 0);
    end();
}

const struct check NULL_CHECKS[] = {
    {"null mode", null_mode, "FAKEVERBS_NULL=1"},
    {"null overrun", null_overrun, "FAKEVERBS_NULL=1"},
    {"null threads", null_threads, "FAKEVERBS_NULL=1"},
    {"threads", threads, NULL},
    {NULL, NULL, NULL},
};
