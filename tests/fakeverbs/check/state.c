/* The state machine of queue pairs. */
#include "check.h"

static struct side a, b;

static void end(void) {
    end_side(&a);
    end_side(&b);
}

/* A QP in that state, on the way that a driver takes. */
static struct ibv_qp *qp_in(enum ibv_qp_state state) {
    struct ibv_qp *qp = make_qp(&a, a.cq);
    struct hello h = hello_of(&b);
    MUST(qp != NULL);
    if (state == IBV_QPS_ERR) EQ(to_state(qp, IBV_QPS_ERR), 0);
    if (state >= IBV_QPS_INIT && state <= IBV_QPS_RTS) EQ(to_init(qp), 0);
    if (state >= IBV_QPS_RTR && state <= IBV_QPS_RTS) EQ(to_rtr(qp, &h), 0);
    if (state == IBV_QPS_RTS) EQ(to_rts(qp, 1), 0);
    return qp;
}

static const int NEEDS[] = {
    [IBV_QPS_INIT] = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
    [IBV_QPS_RTR] = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
    [IBV_QPS_RTS] = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                    IBV_QP_MAX_QP_RD_ATOMIC,
    [IBV_QPS_SQD] = 0,
    [IBV_QPS_ERR] = 0,
};

static struct ibv_qp_attr good(enum ibv_qp_state to) {
    struct hello h = hello_of(&b);
    struct ibv_qp_attr t = {.qp_state = to,
                            .port_num = 1,
                            .path_mtu = IBV_MTU_1024,
                            .dest_qp_num = h.qpn,
                            .ah_attr = {.is_global = 1, .port_num = 1},
                            .timeout = 14,
                            .max_rd_atomic = 1,
                            .max_dest_rd_atomic = 1};
    t.ah_attr.grh.dgid = h.gid;
    t.ah_attr.grh.sgid_index = 1;
    return t;
}

/* Every pair of states: the steps of the specification, RESET and ERR from anywhere. */
static void transitions(void) {
    static const enum ibv_qp_state STATES[] = {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR,
                                               IBV_QPS_RTS, IBV_QPS_ERR};
    make_side(&a, 0);
    make_side(&b, 1);
    for (int f = 0; f < 5; f++) {
        for (int t = 0; t < 5; t++) {
            enum ibv_qp_state from = STATES[f], to = STATES[t];
            struct ibv_qp *qp = qp_in(from);
            struct ibv_qp_attr attr = good(to), now;
            struct ibv_qp_init_attr init;
            bool step = (to == IBV_QPS_INIT && from == IBV_QPS_RESET) ||
                        (to == IBV_QPS_RTR && from == IBV_QPS_INIT) ||
                        (to == IBV_QPS_RTS && from == IBV_QPS_RTR);
            bool stay = from == to && (to == IBV_QPS_INIT || to == IBV_QPS_RTS);
            bool any = to == IBV_QPS_RESET || to == IBV_QPS_ERR;
            int err = ibv_modify_qp(qp, &attr, IBV_QP_STATE | (step ? NEEDS[to] : 0));
            EQ(err, step || stay || any ? 0 : EINVAL);
            EQ(ibv_query_qp(qp, &now, IBV_QP_STATE, &init), 0);
            EQ(now.qp_state, err == 0 ? to : from);
            if (!step && !stay && !any)
                EQ(ibv_modify_qp(qp, &attr, IBV_QP_STATE | NEEDS[to]), EINVAL);
            EQ(ibv_destroy_qp(qp), 0);
        }
    }
    end();
}

/* Each attribute that is needed, left out; each that is not allowed, added. */
static void masks(void) {
    make_side(&a, 0);
    make_side(&b, 1);
    for (enum ibv_qp_state to = IBV_QPS_INIT; to <= IBV_QPS_RTS; to++) {
        int optional = 0;
        if (to == IBV_QPS_RTR)
            optional = IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX;
        if (to == IBV_QPS_RTS)
            optional = IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH |
                       IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE;
        for (int bit = 2; bit <= IBV_QP_DEST_QPN; bit *= 2) {
            struct ibv_qp *qp = qp_in(to - 1);
            struct ibv_qp_attr attr = good(to);
            attr.cur_qp_state = to - 1;
            bool ok = (NEEDS[to] & bit) == 0 && (optional & bit) != 0;
            if (bit == IBV_QP_CUR_STATE && to == IBV_QPS_RTS) ok = true;
            EQ(ibv_modify_qp(qp, &attr, (IBV_QP_STATE | NEEDS[to]) ^ bit), ok ? 0 : EINVAL);
            EQ(ibv_destroy_qp(qp), 0);
        }
    }
    end();
}

static void bad_rtr(void (*spoil)(struct ibv_qp_attr *)) {
    struct ibv_qp *qp = qp_in(IBV_QPS_INIT);
    struct ibv_qp_attr attr = good(IBV_QPS_RTR);
    spoil(&attr);
    EQ(ibv_modify_qp(qp, &attr, IBV_QP_STATE | NEEDS[IBV_QPS_RTR]), EINVAL);
    attr = good(IBV_QPS_RTR);
    EQ(ibv_modify_qp(qp, &attr, IBV_QP_STATE | NEEDS[IBV_QPS_RTR]), 0);
    EQ(ibv_destroy_qp(qp), 0);
}

static void no_grh(struct ibv_qp_attr *t) { t->ah_attr.is_global = 0; }
static void empty_gid(struct ibv_qp_attr *t) { t->ah_attr.grh.sgid_index = 2; }
static void far_gid(struct ibv_qp_attr *t) { t->ah_attr.grh.sgid_index = 16; }
static void zero_dgid(struct ibv_qp_attr *t) { memset(&t->ah_attr.grh.dgid, 0, 16); }
static void other_port(struct ibv_qp_attr *t) { t->ah_attr.port_num = 2; }
static void big_mtu(struct ibv_qp_attr *t) { t->path_mtu = IBV_MTU_4096; }
static void no_mtu(struct ibv_qp_attr *t) { t->path_mtu = 0; }
static void big_qpn(struct ibv_qp_attr *t) { t->dest_qp_num = 1 << 24; }
static void big_psn(struct ibv_qp_attr *t) { t->rq_psn = 1 << 24; }
static void deep(struct ibv_qp_attr *t) { t->max_dest_rd_atomic = 5; }
static void rnr_code(struct ibv_qp_attr *t) { t->min_rnr_timer = 32; }

static void values(void) {
    static void (*const SPOIL[])(struct ibv_qp_attr *) = {
        no_grh, empty_gid, far_gid, zero_dgid, other_port, big_mtu,
        no_mtu, big_qpn,   big_psn, deep,      rnr_code};
    P.mtu = IBV_MTU_2048;
    P.rd = 1;
    P.dest_rd = 1;
    make_side(&a, 0);
    make_side(&b, 1);
    for (size_t i = 0; i < sizeof SPOIL / sizeof SPOIL[0]; i++) bad_rtr(SPOIL[i]);
    struct ibv_qp *qp = qp_in(IBV_QPS_RTR);
    P.rd = 4;
    EQ(to_rts(qp, 1), EINVAL);
    P.rd = 3;
    P.timeout = 32;
    EQ(to_rts(qp, 1), EINVAL);
    P.timeout = 14;
    P.retry = 8;
    EQ(to_rts(qp, 1), EINVAL);
    P.retry = 7;
    EQ(to_rts(qp, 1 << 24), EINVAL);
    EQ(to_rts(qp, 1), 0);
    EQ(ibv_destroy_qp(qp), 0);
    qp = qp_in(IBV_QPS_RESET);
    struct ibv_qp_attr t = good(IBV_QPS_INIT);
    t.port_num = 2;
    EQ(ibv_modify_qp(qp, &t, IBV_QP_STATE | NEEDS[IBV_QPS_INIT]), EINVAL);
    t.port_num = 1;
    t.pkey_index = 1;
    EQ(ibv_modify_qp(qp, &t, IBV_QP_STATE | NEEDS[IBV_QPS_INIT]), EINVAL);
    EQ(ibv_destroy_qp(qp), 0);
    end();
}

/* What a QP takes in each state. */
static void posting(void) {
    static const enum ibv_qp_state STATES[] = {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR,
                                               IBV_QPS_RTS, IBV_QPS_ERR};
    make_side(&a, 0);
    make_side(&b, 1);
    struct hello h = hello_of(&b);
    for (int i = 0; i < 5; i++) {
        struct ibv_qp *qp = qp_in(STATES[i]), *own = a.qp;
        bool sends = STATES[i] >= IBV_QPS_RTS;
        SET("fake0.blackhole=2");
        EQ(post(&a, qp, &h, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 8, .id = 5}),
           sends ? 0 : EINVAL);
        a.qp = qp;
        EQ(post_recv(&a, 6, 0, 8), STATES[i] == IBV_QPS_RESET ? EINVAL : 0);
        a.qp = own;
        SET("fake0.blackhole=0");
        if (STATES[i] == IBV_QPS_ERR) {
            uint64_t id;
            EQ(status_of(a.cq, &id), IBV_WC_WR_FLUSH_ERR);
            EQ(id, 5);
            EQ(status_of(a.cq, &id), IBV_WC_WR_FLUSH_ERR);
            EQ(id, 6);
            a.qp = qp;
            EQ(post_recv(&a, 7, 0, 8), 0);
            a.qp = own;
            EQ(status_of(a.cq, &id), IBV_WC_WR_FLUSH_ERR);
            EQ(id, 7);
        }
        EQ(ibv_destroy_qp(qp), 0);
    }
    end();
}

/* Counts and opcodes that a provider refuses at once; the list is taken up to there. */
static void refused_posts(void) {
    make_pair(&a, &b);
    struct hello h = hello_of(&b);
    struct ibv_sge g[5] = {{(uintptr_t)a.buf, 8, a.mr->lkey}};
    struct ibv_send_wr wr[3], *bad = NULL;
    for (int i = 0; i < 3; i++) {
        wr[i] = (struct ibv_send_wr){.wr_id = (uint64_t)i,
                                     .next = i < 2 ? &wr[i + 1] : NULL,
                                     .sg_list = g,
                                     .num_sge = 1,
                                     .opcode = IBV_WR_RDMA_WRITE,
                                     .send_flags = IBV_SEND_SIGNALED};
        wr[i].wr.rdma.remote_addr = h.addr;
        wr[i].wr.rdma.rkey = h.rkey;
    }
    wr[1].num_sge = 5;
    EQ(ibv_post_send(a.qp, wr, &bad), EINVAL);
    TRUE(bad == &wr[1]);
    EQ(status_of(a.cq, NULL), 0);
    wr[1].num_sge = 1;
    wr[1].opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    EQ(ibv_post_send(a.qp, wr, &bad), EINVAL);
    TRUE(bad == &wr[1]);
    EQ((int)next_wc(a.cq, 1000).wr_id, 0);
    EQ((int)next_wc(a.cq, 20).status, -1);
    struct ibv_recv_wr r = {.sg_list = g, .num_sge = 5}, *bad_recv = NULL;
    EQ(ibv_post_recv(a.qp, &r, &bad_recv), EINVAL);
    TRUE(bad_recv == &r);
    for (int i = 0; i < 16; i++) EQ(post_recv(&a, 1, 0, 8), 0);
    EQ(post_recv(&a, 1, 0, 8), ENOMEM);
    SET("fake0.max_sge_rd=1");
    wr[0].num_sge = 2;
    wr[0].opcode = IBV_WR_RDMA_READ;
    EQ(ibv_post_send(a.qp, wr, &bad), EINVAL);
    TRUE(bad == &wr[0]);
    end();
}

const struct check STATE_CHECKS[] = {
    {"transitions", transitions, NULL},
    {"masks", masks, NULL},
    {"values", values,
     "FAKEVERBS_SET=*.port1.active_mtu=2048;*.max_qp_rd_atom=4;*.max_qp_init_rd_atom=3"},
    {"posting", posting, NULL},
    {"refused posts", refused_posts, NULL},
    {NULL, NULL, NULL},
};
