/* Bytes that move, and what is refused on the way. */
#include "check.h"

#define READ IBV_WR_RDMA_READ
#define WRITE IBV_WR_RDMA_WRITE
#define SEND IBV_WR_SEND

static struct side a, b;

static void end(void) {
    end_side(&a);
    end_side(&b);
    EQ(counter("live.qp") + counter("live.cq") + counter("live.mr") + counter("live.pd"), 0);
    EQ(counter("live.ctx") + counter("live.channel"), 0);
}

/* Sizes around one packet and around nothing. */
static void read_and_write(void) {
    static const uint32_t SIZES[] = {0, 1, 4095, 65535, 65536, 65537, 300001};
    make_pair(&a, &b);
    for (size_t i = 0; i < sizeof SIZES / sizeof SIZES[0]; i++) {
        uint32_t n = SIZES[i];
        memset(a.buf, 0, P.bytes);
        memset(b.buf, 0, P.bytes);
        fill_bytes(b.buf + 100, n, 3);
        EQ(one(&a, &b, (struct op){.op = READ, .from = 7, .len = n, .to = 100}), 0);
        TRUE(same_bytes(a.buf + 7, n, 3));
        EQ(a.buf[6] | a.buf[7 + n], 0);
        fill_bytes(a.buf + 7, n, 9);
        EQ(one(&a, &b, (struct op){.op = WRITE, .from = 7, .len = n, .to = 5000}), 0);
        TRUE(same_bytes(b.buf + 5000, n, 9));
        EQ(b.buf[5000 + n], n < 1 ? b.buf[5000] : 0);
    }
    end();
}

static void gather_and_scatter(void) {
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    struct ibv_sge g[3] = {{(uintptr_t)a.buf + 1000, 70000, a.mr->lkey},
                           {(uintptr_t)a.buf + 200000, 1, a.mr->lkey},
                           {(uintptr_t)a.buf + 300000, 70000, a.mr->lkey}};
    struct ibv_send_wr wr = {.wr_id = 5,
                             .sg_list = g,
                             .num_sge = 3,
                             .opcode = READ,
                             .send_flags = IBV_SEND_SIGNALED};
    struct ibv_send_wr *bad;
    wr.wr.rdma.remote_addr = h.addr;
    wr.wr.rdma.rkey = h.rkey;
    fill_bytes(b.buf, 140001, 1);
    EQ(ibv_post_send(a.qp, &wr, &bad), 0);
    struct ibv_wc wc = next_wc(a.cq, 5000);
    EQ(wc.status, 0);
    EQ(wc.opcode, IBV_WC_RDMA_READ);
    EQ(wc.byte_len, 140001);
    TRUE(memcmp(a.buf + 1000, b.buf, 70000) == 0);
    EQ(a.buf[200000], b.buf[70000]);
    TRUE(memcmp(a.buf + 300000, b.buf + 70001, 70000) == 0);
    memset(b.buf, 0, P.bytes);
    wr.opcode = WRITE;
    EQ(ibv_post_send(a.qp, &wr, &bad), 0);
    EQ(status_of(a.cq, NULL), 0);
    TRUE(same_bytes(b.buf, 140001, 1));
    end();
}

static void send_and_receive(void) {
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    EQ(post_recv(&b, 21, 0, 100), 0);
    EQ(post_recv(&b, 22, 1000, 200000), 0);
    EQ(post_recv(&b, 23, 0, 0), 0);
    fill_bytes(a.buf, 150000, 4);
    EQ(post(&a, a.qp, &h, (struct op){.op = SEND, .len = 100}), 0);
    EQ(post(&a, a.qp, &h,
            (struct op){.op = IBV_WR_SEND_WITH_IMM, .len = 150000, .imm = 0x1234}), 0);
    EQ(post(&a, a.qp, &h, (struct op){.op = SEND, .id = 3, .flags = IBV_SEND_SIGNALED}), 0);
    struct ibv_wc wc = next_wc(b.cq, 5000);
    EQ(wc.status, 0);
    EQ(wc.wr_id, 21);
    EQ(wc.opcode, IBV_WC_RECV);
    EQ(wc.byte_len, 100);
    EQ(wc.qp_num, b.qp->qp_num);
    EQ(wc.src_qp, a.qp->qp_num);
    EQ(wc.wc_flags, 0);
    wc = next_wc(b.cq, 5000);
    EQ(wc.wr_id, 22);
    EQ(wc.wc_flags, IBV_WC_WITH_IMM);
    EQ(wc.imm_data, 0x1234);
    EQ(wc.byte_len, 150000);
    TRUE(same_bytes(b.buf + 1000, 150000, 4));
    wc = next_wc(b.cq, 5000);
    EQ(wc.wr_id, 23);
    EQ(wc.byte_len, 0);
    wc = next_wc(a.cq, 5000);
    EQ(wc.wr_id, 3);
    EQ(wc.opcode, IBV_WC_SEND);
    EQ(ibv_poll_cq(a.cq, 1, &wc), 0);
    end();
}

static void write_with_immediate(void) {
    make_pair(&a, &b);
    EQ(post_recv(&b, 31, 0, 0), 0);
    fill_bytes(a.buf, 100000, 8);
    EQ(one(&a, &b,
           (struct op){
               .op = IBV_WR_RDMA_WRITE_WITH_IMM, .len = 100000, .to = 40, .imm = 99}),
       0);
    struct ibv_wc wc = next_wc(b.cq, 5000);
    EQ(wc.wr_id, 31);
    EQ(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    EQ(wc.imm_data, 99);
    EQ(wc.byte_len, 100000);
    TRUE(same_bytes(b.buf + 40, 100000, 8));
    end();
}

/* Inline data is the caller's again when the post returns, and needs no key. */
static void inline_data(void) {
    make_pair(&a, &b);
    SET("*.hold=1");
    struct hello h = hello_of(&b);
    memcpy(a.buf, "inline", 7);
    EQ(post(&a, a.qp, &h,
            (struct op){.op = WRITE,
                        .len = 7,
                        .lkey = 1,
                        .flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED}), 0);
    memset(a.buf, 'x', 7);
    SET("*.hold=0");
    EQ(status_of(a.cq, NULL), 0);
    TRUE(memcmp(b.buf, "inline", 7) == 0);
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 65, .flags = IBV_SEND_INLINE}), EINVAL);
    EQ(post(&a, a.qp, &h, (struct op){.op = READ, .len = 8, .flags = IBV_SEND_INLINE}), EINVAL);
    EQ(counter("inline_wr"), 1);
    end();
}

/* A selective signal retires what came before it; without polls the ring fills up. */
static void send_ring(void) {
    P.send_wr = 8;
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    for (uint64_t i = 0; i < 8; i++) {
        unsigned flags = i == 3 || i == 7 ? IBV_SEND_SIGNALED : 0;
        EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .id = i, .flags = flags}), 0);
    }
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8}), ENOMEM);
    usleep(20000);
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8}), ENOMEM);
    EQ(counter("sq_full"), 2);
    uint64_t id;
    EQ(status_of(a.cq, &id), 0);
    EQ(id, 3);
    for (int i = 0; i < 4; i++) EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8}), 0);
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8}), ENOMEM);
    EQ(status_of(a.cq, &id), 0);
    EQ(id, 7);
    struct ibv_wc wc;
    EQ(ibv_poll_cq(a.cq, 1, &wc), 0);
    end();
}

static void signal_all(void) {
    P.sig_all = 1;
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    for (uint64_t i = 1; i <= 3; i++)
        EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .id = i}), 0);
    for (uint64_t i = 1; i <= 3; i++) {
        uint64_t id;
        EQ(status_of(a.cq, &id), 0);
        EQ(id, i);
    }
    end();
}

/* The first error names the culprit; the rest is flushed in order, signalled or not. */
static void culprit(struct op bad, enum ibv_wc_status want, bool peer_too) {
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    uint64_t id;
    EQ(post_recv(&a, 90, 0, 8), 0);
    EQ(post_recv(&b, 91, 0, 8), 0);
    SET("fake0.blackhole=1");
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .id = 1, .flags = 2}), 0);
    bad.id = 2;
    EQ(post(&a, a.qp, &h, bad), 0);
    for (uint64_t i = 3; i < 7; i++)
        EQ(post(&a, a.qp, &h, (struct op){.op = READ, .len = 8, .id = i}), 0);
    SET("fake0.blackhole=0");
    EQ(status_of(a.cq, &id), 0);
    EQ(id, 1);
    struct ibv_wc wc = next_wc(a.cq, 5000);
    EQ(wc.status, want);
    EQ(wc.wr_id, 2);
    EQ(wc.qp_num, a.qp->qp_num);
    TRUE(wc.vendor_err != 0);
    TRUE((unsigned)wc.opcode > 1000 && wc.byte_len > 1u << 30 && wc.src_qp != 0);
    for (uint64_t i = 3; i < 8; i++) {
        EQ(status_of(a.cq, &id), IBV_WC_WR_FLUSH_ERR);
        EQ(id, i == 7 ? 90 : i);
    }
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    EQ(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init), 0);
    EQ(attr.qp_state, IBV_QPS_ERR);
    EQ(ibv_query_qp(b.qp, &attr, IBV_QP_STATE, &init), 0);
    EQ(attr.qp_state, peer_too ? IBV_QPS_ERR : IBV_QPS_RTS);
    if (peer_too) {
        EQ(status_of(b.cq, &id), IBV_WC_WR_FLUSH_ERR);
        EQ(id, 91);
    }
    end();
}

static void bad_lkey(void) {
    culprit((struct op){.op = READ, .len = 8, .lkey = 0x77}, IBV_WC_LOC_PROT_ERR, false);
}
static void local_range(void) {
    culprit((struct op){.op = WRITE, .len = 8, .from = (1 << 20) - 7}, IBV_WC_LOC_PROT_ERR,
            false);
}
static void bad_rkey(void) {
    culprit((struct op){.op = READ, .len = 8, .rkey = 0x77}, IBV_WC_REM_ACCESS_ERR, true);
}
static void remote_range(void) {
    culprit((struct op){.op = WRITE, .len = 8, .to = (1 << 20) - 7}, IBV_WC_REM_ACCESS_ERR, true);
}
static void before_range(void) {
    culprit((struct op){.op = WRITE, .len = 8, .to = UINT64_MAX}, IBV_WC_REM_ACCESS_ERR, true);
}
static void message_too_long(void) {
    culprit((struct op){.op = WRITE, .len = 65537}, IBV_WC_LOC_LEN_ERR, false);
}
static void receive_too_short(void) {
    make_pair(&a, &b);
    EQ(post_recv(&b, 5, 0, 8), 0);
    EQ(one(&a, &b, (struct op){.op = SEND, .len = 9}), IBV_WC_REM_INV_REQ_ERR);
    EQ(status_of(b.cq, NULL), IBV_WC_LOC_LEN_ERR);
    end();
}

/* Rights of the region, then of the QP. */
static void access_rights(void) {
    P.access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
    make_pair(&a, &b);
    EQ(one(&a, &b, (struct op){.op = READ, .len = 8}), 0);
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), IBV_WC_REM_ACCESS_ERR);
    end();
    P.access |= IBV_ACCESS_REMOTE_WRITE;
    P.qp_access = IBV_ACCESS_REMOTE_WRITE;
    make_pair(&a, &b);
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), 0);
    EQ(one(&a, &b, (struct op){.op = READ, .len = 8}), IBV_WC_REM_INV_REQ_ERR);
    end();
    P.qp_access = IBV_ACCESS_REMOTE_READ;
    make_pair(&a, &b);
    EQ(one(&a, &b, (struct op){.op = READ, .len = 8}), 0);
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), IBV_WC_REM_INV_REQ_ERR);
    end();
    P.access = IBV_ACCESS_REMOTE_READ;
    make_pair(&a, &b);
    EQ(one(&a, &b, (struct op){.op = READ, .len = 8}), IBV_WC_LOC_PROT_ERR);
    end();
}

/* A region that was deregistered, and one of another protection domain. */
static void stale_keys(void) {
    make_pair(&a, &b);
    struct ibv_mr *mr = ibv_reg_mr(b.pd, b.buf, 4096, (int)P.access);
    uint32_t old = mr->rkey;
    EQ(one(&a, &b, (struct op){.op = READ, .len = 8, .rkey = old}), 0);
    EQ(ibv_dereg_mr(mr), 0);
    EQ(one(&a, &b, (struct op){.op = READ, .len = 8, .rkey = old}), IBV_WC_REM_ACCESS_ERR);
    end();
    make_pair(&a, &b);
    struct ibv_pd *other = ibv_alloc_pd(b.ctx);
    mr = ibv_reg_mr(other, b.buf, 4096, (int)P.access);
    TRUE(mr->rkey != old);
    EQ(one(&a, &b, (struct op){.op = READ, .len = 8, .rkey = mr->rkey}), IBV_WC_REM_ACCESS_ERR);
    EQ(ibv_dereg_mr(mr), 0);
    EQ(ibv_dealloc_pd(other), 0);
    end();
}

/* Nothing is touched, so nothing is checked: key and address may be anything. */
static void zero_length(void) {
    make_pair(&a, &b);
    EQ(one(&a, &b, (struct op){.op = WRITE, .rkey = 5}), 0);
    EQ(one(&a, &b, (struct op){.op = READ, .rkey = 5}), 0);
    end();
}

/* READs in a row beyond what the peer answers for; one alone is fine. */
static void read_depth(void) {
    P.rd = 16;
    P.dest_rd = 1;
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    EQ(one(&a, &b, (struct op){.op = READ, .len = 8}), 0);
    SET("*.bandwidth=1000");
    for (uint64_t i = 0; i < 3; i++)
        EQ(post(&a, a.qp, &h, (struct op){.op = READ, .len = 8, .id = i}), 0);
    EQ(status_of(a.cq, NULL), IBV_WC_REM_INV_REQ_ERR);
    end();
    P.rd = 0;
    make_pair(&a, &b);
    EQ(one(&a, &b, (struct op){.op = READ, .len = 8}), IBV_WC_LOC_QP_OP_ERR);
    end();
}

static void mtu_mismatch(void) {
    make_side(&a, 0);
    make_side(&b, 1);
    struct hello ha = hello_of(&a), hb = hello_of(&b);
    join(&a, a.qp, &hb);
    P.mtu = IBV_MTU_1024;
    join(&b, b.qp, &ha);
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 1024}), 0);
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 1025}), IBV_WC_REM_INV_REQ_ERR);
    end();
}

static void receiver_not_ready(void) {
    P.rnr_timer = 10;
    make_pair(&a, &b);
    EQ(one(&a, &b, (struct op){.op = SEND, .len = 8}), IBV_WC_RNR_RETRY_EXC_ERR);
    EQ(counter("rnr"), 4);
    end();
    P.rnr_retry = 7;
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    EQ(post(&a, a.qp, &h, (struct op){.op = SEND, .len = 8, .id = 4, .flags = 2}), 0);
    EQ((int)next_wc(a.cq, 30).status, -1);
    EQ(post_recv(&b, 9, 0, 8), 0);
    EQ(status_of(a.cq, NULL), 0);
    EQ(status_of(b.cq, NULL), 0);
    end();
}

/* The wrong number, the wrong address, the wrong sequence: nobody answers. */
static void wrong_peer(void) {
    for (int i = 0; i < 4; i++) {
        make_side(&a, 0);
        make_side(&b, 1);
        struct hello ha = hello_of(&a), hb = hello_of(&b), wrong = hb;
        if (i == 0) wrong.qpn += 1;
        if (i == 1) wrong.gid.raw[15] ^= 1;
        if (i == 2) ha.psn ^= 1;
        if (i == 3) ha.gid.raw[15] ^= 1;
        join(&a, a.qp, &wrong);
        join(&b, b.qp, &ha);
        uint64_t before = counter("retries");
        EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), IBV_WC_RETRY_EXC_ERR);
        EQ(counter("retries") - before, 4);
        end();
    }
}

/* A fence: once the peer left RTS, nothing reaches its memory. */
static void fenced(void) {
    make_pair(&a, &b);
    EQ(to_state(b.qp, IBV_QPS_RESET), 0);
    fill_bytes(a.buf, 8, 1);
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), IBV_WC_RETRY_EXC_ERR);
    EQ(b.buf[0] | b.buf[1], 0);
    end();
}

/* RESET forgets the posted work, also what was complete and not polled, and can be used again. */
static void reset_and_reuse(void) {
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    struct ibv_wc wc;
    EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .flags = 2}), 0);
    usleep(20000);
    SET("fake0.blackhole=1");
    for (int i = 0; i < 16; i++)
        EQ(post(&a, a.qp, &h, (struct op){.op = WRITE, .len = 8, .flags = 2}), 0);
    EQ(to_state(a.qp, IBV_QPS_RESET), 0);
    EQ(to_state(b.qp, IBV_QPS_RESET), 0);
    SET("fake0.blackhole=0");
    usleep(20000);
    EQ(ibv_poll_cq(a.cq, 1, &wc), 0);
    connect_sides(&a, &b);
    EQ(one(&a, &b, (struct op){.op = WRITE, .len = 8}), 0);
    end();
}

const struct check DATA_CHECKS[] = {
    {"read and write", read_and_write, NULL},
    {"gather and scatter", gather_and_scatter, NULL},
    {"send and receive", send_and_receive, NULL},
    {"write with immediate", write_with_immediate, NULL},
    {"inline data", inline_data, NULL},
    {"send ring", send_ring, NULL},
    {"signal all", signal_all, NULL},
    {"bad lkey", bad_lkey, NULL},
    {"local range", local_range, NULL},
    {"bad rkey", bad_rkey, NULL},
    {"remote range", remote_range, NULL},
    {"before the range", before_range, NULL},
    {"message too long", message_too_long, "FAKEVERBS_SET=*.port1.max_msg_sz=64K"},
    {"receive too short", receive_too_short, NULL},
    {"access rights", access_rights, NULL},
    {"stale keys", stale_keys, NULL},
    {"zero length", zero_length, NULL},
    {"read depth", read_depth, NULL},
    {"mtu mismatch", mtu_mismatch, NULL},
    {"receiver not ready", receiver_not_ready, NULL},
    {"wrong peer", wrong_peer, NULL},
    {"fenced", fenced, NULL},
    {"reset and reuse", reset_and_reuse, NULL},
    {NULL, NULL, NULL},
};
