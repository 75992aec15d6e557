/* Faults that are asked for. */
#include "check.h"

#include <pthread.h>
#include <time.h>

#define READ IBV_WR_RDMA_READ
#define WRITE IBV_WR_RDMA_WRITE
#define SEND IBV_WR_SEND

static struct side a, b;

static void end(void) {
    end_side(&a);
    end_side(&b);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The second call fails with the error that was asked for, the first and third do not. */
static void nth_call(void) {
    struct ibv_context *c;
    SET("fake0.fail.open_device=2:EACCES");
    TRUE((c = open_dev(0)) != NULL);
    TRUE(FAILS(open_dev(0), EACCES));
    SET("fake0.fail.open_device=1:ENONE");
    TRUE(FAILS(open_dev(0), 0));
    SET("fake0.fail.alloc_pd=1:EPERM");
    TRUE(FAILS(ibv_alloc_pd(c), EPERM));
    struct ibv_pd *pd = ibv_alloc_pd(c);
    static uint8_t page[4096];
    struct ibv_mr *mr;
    SET("fake0.fail.reg_mr=2+:EIO");
    TRUE((mr = ibv_reg_mr(pd, page, 64, 1)) != NULL);
    TRUE(FAILS(ibv_reg_mr(pd, page, 64, 1), EIO));
    TRUE(FAILS(ibv_reg_mr(pd, page, 64, 1), EIO));
    SET("fake0.fail.reg_mr=off;fake0.fail.reg_dmabuf_mr=1:EPROTONOSUPPORT");
    TRUE(FAILS(ibv_reg_dmabuf_mr(pd, 0, 4096, 0, -1, 1), EPROTONOSUPPORT));
    EQ(ibv_dereg_mr(mr), 0);
    SET("fake0.fail.create_comp_channel=1:EMFILE;fake0.fail.create_cq=1;fake0.fail.dereg_mr=1");
    TRUE(FAILS(ibv_create_comp_channel(c), EMFILE));
    TRUE(FAILS(ibv_create_cq(c, 1, NULL, NULL, 0), ENOMEM));
    mr = ibv_reg_mr(pd, page, 64, 1);
    EQ(ibv_dereg_mr(mr), ENOMEM);
    EQ(ibv_dereg_mr(mr), 0);
    SET("fake0.fail.query_port=1:EIO;fake0.fail.query_gid=1:EIO;fake0.fail.query_device=1:EIO");
    struct ibv_port_attr port;
    struct ibv_device_attr dev;
    union ibv_gid gid;
    EQ(ibv_query_port(c, 1, &port), EIO);
    EQ(ibv_query_device(c, &dev), EIO);
    EQ(ibv_query_gid(c, 1, 0, &gid), -1);
    EQ(ibv_query_port(c, 1, &port) | ibv_query_device(c, &dev) | ibv_query_gid(c, 1, 0, &gid), 0);
    EQ(counter("fake0.calls.reg_mr"), 4);
    EQ(counter("calls.open_device"), 3);
    EQ(ibv_dealloc_pd(pd), 0);
    EQ(ibv_close_device(c), 0);
}

static void nth_errno(void) {
    static uint8_t page[4096];
    struct ibv_context *c = open_dev(1);
    struct ibv_pd *pd = ibv_alloc_pd(c);
    for (int err = 1; err <= 133; err++) {
        char text[64];
        snprintf(text, sizeof text, "fake1.fail.reg_mr=1:%d", err);
        SET(text);
        TRUE(FAILS(ibv_reg_mr(pd, page, 64, 1), err));
    }
    EQ(counter("live.mr"), 0);
    EQ(ibv_dealloc_pd(pd), 0);
    EQ(ibv_close_device(c), 0);
}

/* Each step of the way to RTS can be refused, and taken again. */
static void failing_steps(void) {
    make_side(&a, 0);
    make_side(&b, 1);
    struct hello h = hello_of(&b);
    SET("fake0.fail.modify_init=1:EIO;fake0.fail.modify_rtr=1:ENETUNREACH;"
        "fake0.fail.modify_rts=1:EBUSY;fake0.fail.modify_err=1:EIO;fake0.fail.modify_reset=1");
    EQ(to_init(a.qp), EIO);
    EQ(to_init(a.qp), 0);
    EQ(to_rtr(a.qp, &h), ENETUNREACH);
    EQ(to_rtr(a.qp, &h), 0);
    EQ(to_rts(a.qp, 0), EBUSY);
    EQ(to_rts(a.qp, 0), 0);
    EQ(to_state(a.qp, IBV_QPS_ERR), EIO);
    EQ(to_state(a.qp, IBV_QPS_ERR), 0);
    EQ(to_state(a.qp, IBV_QPS_RESET), ENOMEM);
    SET("fake0.fail.modify_qp=1:EIO;fake0.fail.create_qp=1:ENOSPC;fake0.fail.destroy_qp=1:EBUSY");
    EQ(to_state(a.qp, IBV_QPS_RESET), EIO);
    EQ(to_state(a.qp, IBV_QPS_RESET), 0);
    TRUE(FAILS(make_qp(&a, a.cq), ENOSPC));
    EQ(ibv_destroy_qp(a.qp), EBUSY);
    end();
}

/* Refused at item k: those before it are in flight, those from it on never were. */
static void post_at_item(void) {
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    for (int k = 0; k < 4; k++) {
        struct ibv_send_wr wr[4], *bad = NULL;
        struct ibv_sge g = {(uintptr_t)a.buf, 8, a.mr->lkey};
        char text[64];
        for (int i = 0; i < 4; i++) {
            wr[i] = (struct ibv_send_wr){.wr_id = (uint64_t)i,
                                         .next = i < 3 ? &wr[i + 1] : NULL,
                                         .sg_list = &g,
                                         .num_sge = 1,
                                         .opcode = WRITE,
                                         .send_flags = IBV_SEND_SIGNALED};
            wr[i].wr.rdma.remote_addr = h.addr;
            wr[i].wr.rdma.rkey = h.rkey;
        }
        snprintf(text, sizeof text, "fake0.fail.post_send=2@%d:EAGAIN", k);
        SET(text);
        EQ(ibv_post_send(a.qp, &wr[3], &bad), 0);
        EQ(status_of(a.cq, NULL), 0);
        EQ(ibv_post_send(a.qp, wr, &bad), EAGAIN);
        TRUE(bad == &wr[k]);
        for (int i = 0; i < k; i++) {
            uint64_t id;
            EQ(status_of(a.cq, &id), 0);
            EQ(id, i);
        }
        EQ((int)next_wc(a.cq, 20).status, -1);
    }
    SET("fake0.fail.post_recv=1");
    EQ(post_recv(&a, 1, 0, 8), ENOMEM);
    EQ(post_recv(&a, 1, 0, 8), 0);
    end();
}

static void delays(void) {
    make_pair(&a, &b);
    SET("fake0.delay_us=100000");
    double begin = seconds();
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), 0);
    TRUE(seconds() - begin >= 0.1);
    SET("fake0.delay_us=1000-20000");
    struct hello h = hello_of(&b);
    for (uint64_t i = 0; i < 20; i++)
        EQ(post(&a, a.qp, &h, (struct op){.op = READ, .len = 8, .id = i, .flags = 2}), 0);
    for (uint64_t i = 0; i < 20; i++) EQ(next_wc(a.cq, 5000).wr_id, i);
    EQ(counter("seed"), 99);
    end();
}

/* QPs overtake one another, each keeps its own order. */
static void reordering(void) {
    make_pair(&a, &b);
    struct ibv_qp *qp2 = make_qp(&a, a.cq);
    struct side c = b;
    c.qp = make_qp(&b, b.cq);
    struct hello h1 = hello_of(&b), h2 = hello_of(&c);
    struct hello own = hello_of(&a);
    join(&a, qp2, &h2);
    own.qpn = qp2->qp_num;
    own.psn = own.qpn * 7 & 0xffffff;
    join(&c, c.qp, &own);
    for (int reorder = 0; reorder < 2; reorder++) {
        static const uint64_t WANT[2][8] = {{0, 1, 2, 3, 10, 11, 12, 13},
                                            {10, 11, 12, 13, 0, 1, 2, 3}};
        SET(reorder == 0 ? "fake0.reorder=0" : "fake0.reorder=1");
        uint64_t before = counter("wc_total");
        for (uint64_t i = 0; i < 8; i++) {
            bool first = i < 4;
            EQ(post(&a, first ? a.qp : qp2, first ? &h1 : &h2,
                    (struct op){.op = WRITE, .len = 8, .id = i + (first ? 0 : 6), .flags = 2}),
               0);
            while (counter("wc_total") != before + i + 1) usleep(100);
        }
        for (int i = 0; i < 8; i++) EQ(next_wc(a.cq, 5000).wr_id, WANT[reorder][i]);
    }
    EQ(ibv_destroy_qp(qp2) | ibv_destroy_qp(c.qp), 0);
    end();
}

static void holding(void) {
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    SET("fake0.hold=1");
    fill_bytes(a.buf, 8, 6);
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .id = 1, .flags = 2}), 0);
    EQ((int)next_wc(a.cq, 50).status, -1);
    EQ(counter("bytes_written"), 8);
    TRUE(same_bytes(b.buf, 8, 6));
    SET("fake0.hold=0");
    EQ(status_of(a.cq, NULL), 0);
    end();
}

static void *destroyer(void *qp) { return (void *)(intptr_t)ibv_destroy_qp(qp); }

static void holding_destroys(void) {
    make_pair(&a, &b);
    struct ibv_qp *held = make_qp(&a, a.cq), *free = make_qp(&b, b.cq);
    pthread_t t;
    void *result;
    SET("fake0.hold_destroy=1");
    pthread_create(&t, NULL, destroyer, held);
    usleep(20000);
    EQ(ibv_destroy_qp(free), 0);
    EQ(counter("calls.destroy_qp"), 1);
    SET("fake0.hold_destroy=0");
    pthread_join(t, &result);
    EQ((intptr_t)result, 0);
    EQ(counter("calls.destroy_qp"), 2);
    end();
}

static void forced_status(void) {
    make_pair(&a, &b);
    SET("fake0.wc_force=id:0x1234:REM_OP_ERR");
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8, .id = 0x1233}), 0);
    fill_bytes(a.buf, 8, 3);
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8, .id = 0x1234, .to = 64}),
       IBV_WC_REM_OP_ERR);
    EQ(b.buf[64], 0);
    end();
    make_pair(&a, &b);
    SET("fake0.wc_force=n:3:LOC_LEN_ERR");
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), 0);
    EQ(one(&a, &b, (struct op){.op = READ, .len = 8}), 0);
    EQ(one(&a, &b, (struct op){.op = READ, .len = 8}), IBV_WC_LOC_LEN_ERR);
    EQ(one(&a, &b, (struct op){.op = READ, .len = 8}), IBV_WC_WR_FLUSH_ERR);
    end();
}

static void spoilt_and_lost(void) {
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    SET("fake0.wc_garbage=2");
    for (uint64_t i = 0; i < 3; i++) {
        EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .id = i, .flags = 2}), 0);
        struct ibv_wc wc = next_wc(a.cq, 5000);
        EQ(wc.status, 0);
        EQ(wc.opcode == IBV_WC_RDMA_WRITE, i == 2);
    }
    SET("fake0.wc_lose=2");
    for (uint64_t i = 10; i < 13; i++)
        EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .id = i, .flags = 2}), 0);
    EQ(next_wc(a.cq, 5000).wr_id, 10);
    EQ(next_wc(a.cq, 5000).wr_id, 12);
    EQ(counter("wc_lost"), 1);
    end();
}

/* Nothing comes, no error either, until the QP is put into ERR; with 2 not even then. */
static void black_holes(void) {
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    SET("fake0.blackhole=1");
    for (uint64_t i = 0; i < 4; i++)
        EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .id = i}), 0);
    EQ((int)next_wc(a.cq, 200).status, -1);
    EQ(b.buf[0], 0);
    EQ(to_state(a.qp, IBV_QPS_ERR), 0);
    for (uint64_t i = 0; i < 4; i++) {
        uint64_t id;
        EQ(status_of(a.cq, &id), IBV_WC_WR_FLUSH_ERR);
        EQ(id, i);
    }
    end();
    SET("fake0.blackhole=0");
    make_pair(&a, &b);
    char text[64];
    snprintf(text, sizeof text, "qp%u.blackhole=2", a.qp->qp_num);
    SET(text);
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8}), 0);
    EQ(to_state(a.qp, IBV_QPS_ERR), 0);
    EQ((int)next_wc(a.cq, 200).status, -1);
    end();
    make_pair(&a, &b);
    SET("fake1.blackhole=1");
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), IBV_WC_RETRY_EXC_ERR);
    end();
}

/* Acknowledged is not placed: a READ on the same QP, or a receive, proves it. */
static void late_writes(void) {
    static const struct op FLUSH[] = {{.op = READ, .len = 1}, {.op = SEND, .len = 1}};
    SET("fake1.late_writes=1");
    for (int i = 0; i < 4; i++) {
        make_pair(&a, &b);
        EQ(post_recv(&b, 1, 512, 8), 0);
        fill_bytes(a.buf, 100000, 5);
        EQ(one(&a, &b, (struct op){.op = WRITE, .len = 100000, .to = 4096}), 0);
        usleep(20000);
        EQ(b.buf[4096 + 1], 0);
        struct op flush = FLUSH[i % 2];
        flush.from = 500000;
        EQ(one(&a, &b, flush), 0);
        TRUE(same_bytes(b.buf + 4096, 100000, 5));
        EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8, .to = 64}), 0);
        EQ(b.buf[65], 0);
        if (i < 2)
            EQ(to_state(b.qp, IBV_QPS_ERR), 0);
        else if (i == 2)
            EQ(to_state(b.qp, IBV_QPS_RESET), 0);
        else
            EQ(ibv_dereg_mr(b.mr), 0);
        TRUE(same_bytes(b.buf + 64, 8, 5));
        if (i == 3) b.mr = NULL;
        end();
    }
    EQ(counter("late_staged"), counter("late_placed"));
}

static void bandwidth(void) {
    make_pair(&a, &b);
    SET("fake0.bandwidth=4M");
    double begin = seconds();
    EQ(one(&a, &b, (struct op){.op = READ, .len = 1 << 20}), 0);
    double took = seconds() - begin;
    TRUE(took > 0.2 && took < 5);
    end();
}

/* Down, dropped, blocked, and routed with a hop limit of one: nobody answers. */
static void unreachable(void) {
    static const char *const HOW[] = {"fake0.port1.state=down", "fake1.port1.state=down",
                                      "fake0.drop=1",           "fake1.drop=1",
                                      "fake0.block=10.1.1.1",   "fake0.routed=1"};
    static const char *const BACK = "*.port1.state=active;*.drop=0;*.block=none;*.routed=0";
    for (size_t i = 0; i < sizeof HOW / sizeof HOW[0]; i++) {
        P.hop = 1;
        make_pair(&a, &b);
        EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), 0);
        SET(HOW[i]);
        EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), IBV_WC_RETRY_EXC_ERR);
        SET(BACK);
        end();
    }
    P.hop = 2;
    make_pair(&a, &b);
    SET("fake0.routed=1;fake0.block=10.1.1.2");
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), 0);
    end();
}

/* A short outage is bridged by the retries; the time follows timeout, retry_cnt and the scale. */
static void outage(void) {
    P.timeout = 14;
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    SET("fake1.drop=1");
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .flags = 2}), 0);
    usleep(100000);
    SET("fake1.drop=0");
    EQ(status_of(a.cq, NULL), 0);
    SET("fake1.drop=1");
    double begin = seconds();
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), IBV_WC_RETRY_EXC_ERR);
    TRUE(seconds() - begin >= 4 * 0.067);
    end();
    make_pair(&a, &b);
    SET("time_scale=0.01");
    begin = seconds();
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), IBV_WC_RETRY_EXC_ERR);
    TRUE(seconds() - begin < 0.25);
    end();
    P.timeout = 0;
    make_pair(&a, &b);
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .flags = 2}), 0);
    EQ((int)next_wc(a.cq, 300).status, -1);
    end();
}

const struct check FAULT_CHECKS[] = {
    {"n-th call", nth_call, NULL},
    {"every errno", nth_errno, NULL},
    {"failing steps", failing_steps, NULL},
    {"post at item", post_at_item, NULL},
    {"delays", delays, "FAKEVERBS_SEED=99"},
    {"reordering", reordering, NULL},
    {"holding", holding, NULL},
    {"holding_destroys", holding_destroys, NULL},
    {"forced status", forced_status, NULL},
    {"spoilt and lost", spoilt_and_lost, NULL},
    {"black holes", black_holes, NULL},
    {"late writes", late_writes, NULL},
    {"bandwidth", bandwidth, NULL},
    {"unreachable", unreachable, NULL},
    {"outage", outage, NULL},
    {NULL, NULL, NULL},
};
