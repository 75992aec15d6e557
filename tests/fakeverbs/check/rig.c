/* Pairs of connected QPs, and one-line posts and polls. */
#include "check.h"

#include <time.h>

struct params P = {.send_wr = 64,
                   .recv_wr = 16,
                   .sge = 4,
                   .inline_data = 64,
                   .cqe = 256,
                   .access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
                             IBV_ACCESS_REMOTE_WRITE,
                   .qp_access = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
                   .rd = 16,
                   .dest_rd = 16,
                   .timeout = 8,
                   .retry = 3,
                   .rnr_retry = 3,
                   .rnr_timer = 1,
                   .hop = 64,
                   .mtu = IBV_MTU_4096,
                   .bytes = 1 << 20};

struct ibv_context *open_dev(int index) {
    int n;
    struct ibv_device **list = ibv_get_device_list(&n);
    struct ibv_context *c = list != NULL && index < n ? ibv_open_device(list[index]) : NULL;
    ibv_free_device_list(list);
    return c;
}

struct ibv_qp *make_qp(struct side *s, struct ibv_cq *cq) {
    struct ibv_qp_init_attr a = {.send_cq = cq,
                                 .recv_cq = cq,
                                 .cap = {P.send_wr, P.recv_wr, P.sge, P.sge, P.inline_data},
                                 .qp_type = IBV_QPT_RC,
                                 .sq_sig_all = (int)P.sig_all};
    return ibv_create_qp(s->pd, &a);
}

void make_side(struct side *s, int dev) {
    memset(s, 0, sizeof *s);
    MUST((s->ctx = open_dev(dev)) != NULL);
    MUST((s->pd = ibv_alloc_pd(s->ctx)) != NULL);
    MUST((s->ch = ibv_create_comp_channel(s->ctx)) != NULL);
    MUST((s->cq = ibv_create_cq(s->ctx, (int)P.cqe, s, s->ch, 0)) != NULL);
    MUST((s->qp = make_qp(s, s->cq)) != NULL);
    MUST((s->buf = calloc(1, P.bytes)) != NULL);
    MUST((s->mr = ibv_reg_mr(s->pd, s->buf, P.bytes, (int)P.access)) != NULL);
}

void end_side(struct side *s) {
    EQ(ibv_destroy_qp(s->qp), 0);
    EQ(ibv_destroy_cq(s->cq), 0);
    EQ(ibv_destroy_comp_channel(s->ch), 0);
    if (s->mr != NULL) EQ(ibv_dereg_mr(s->mr), 0);
    EQ(ibv_dealloc_pd(s->pd), 0);
    EQ(ibv_close_device(s->ctx), 0);
    free(s->buf);
}

struct hello hello_of(struct side *s) {
    struct hello h = {.qpn = s->qp->qp_num, .addr = (uintptr_t)s->buf, .rkey = s->mr->rkey};
    h.psn = h.qpn * 7 & 0xffffff;
    EQ(ibv_query_gid(s->ctx, 1, 1, &h.gid), 0);
    return h;
}

int to_init(struct ibv_qp *qp) {
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = P.qp_access};
    return ibv_modify_qp(qp, &a,
                         IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

int to_rtr(struct ibv_qp *qp, const struct hello *peer) {
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTR,
                            .path_mtu = P.mtu,
                            .dest_qp_num = peer->qpn,
                            .rq_psn = peer->psn,
                            .max_dest_rd_atomic = P.dest_rd,
                            .min_rnr_timer = P.rnr_timer,
                            .ah_attr = {.is_global = 1, .port_num = 1}};
    a.ah_attr.grh.dgid = peer->gid;
    a.ah_attr.grh.sgid_index = 1;
    a.ah_attr.grh.hop_limit = P.hop;
    return ibv_modify_qp(qp, &a,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                             IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

int to_rts(struct ibv_qp *qp, uint32_t psn) {
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTS,
                            .sq_psn = psn,
                            .timeout = P.timeout,
                            .retry_cnt = P.retry,
                            .rnr_retry = P.rnr_retry,
                            .max_rd_atomic = P.rd};
    return ibv_modify_qp(qp, &a,
                         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                             IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
}

int to_state(struct ibv_qp *qp, enum ibv_qp_state state) {
    struct ibv_qp_attr a = {.qp_state = state};
    return ibv_modify_qp(qp, &a, IBV_QP_STATE);
}

void join(struct side *s, struct ibv_qp *qp, const struct hello *peer) {
    (void)s;
    EQ(to_init(qp), 0);
    EQ(to_rtr(qp, peer), 0);
    EQ(to_rts(qp, qp->qp_num * 7 & 0xffffff), 0);
}

void connect_sides(struct side *a, struct side *b) {
    struct hello ha = hello_of(a), hb = hello_of(b);
    join(a, a->qp, &hb);
    join(b, b->qp, &ha);
}

void make_pair(struct side *a, struct side *b) {
    make_side(a, 0);
    make_side(b, 1);
    connect_sides(a, b);
}

int post(struct side *a, struct ibv_qp *qp, const struct hello *peer, struct op op) {
    struct ibv_sge g = {.addr = (uintptr_t)a->buf + op.from,
                        .length = (uint32_t)op.len,
                        .lkey = op.lkey != 0 ? op.lkey : a->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = op.id,
                             .sg_list = &g,
                             .num_sge = op.len > 0,
                             .opcode = op.op,
                             .send_flags = op.flags,
                             .imm_data = op.imm};
    struct ibv_send_wr *bad = NULL;
    wr.wr.rdma.remote_addr = peer->addr + op.to;
    wr.wr.rdma.rkey = op.rkey != 0 ? op.rkey : peer->rkey;
    return ibv_post_send(qp, &wr, &bad);
}

int post_recv(struct side *s, uint64_t id, uint64_t at, uint32_t len) {
    struct ibv_sge g = {.addr = (uintptr_t)s->buf + at, .length = len, .lkey = s->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &g, .num_sge = len > 0}, *bad = NULL;
    return ibv_post_recv(s->qp, &wr, &bad);
}

static uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

struct ibv_wc next_wc(struct ibv_cq *cq, int ms) {
    struct ibv_wc wc;
    uint64_t end = now_ms() + (uint64_t)ms;
    do {
        if (ibv_poll_cq(cq, 1, &wc) == 1) return wc;
        usleep(50);
    } while (now_ms() < end);
    memset(&wc, 0, sizeof wc);
    wc.status = (enum ibv_wc_status)-1;
    return wc;
}

enum ibv_wc_status status_of(struct ibv_cq *cq, uint64_t *id) {
    struct ibv_wc wc = next_wc(cq, 20000);
    if (id != NULL) *id = wc.wr_id;
    return wc.status;
}

enum ibv_wc_status one(struct side *a, struct side *b, struct op op) {
    struct hello h = hello_of(b);
    op.flags |= IBV_SEND_SIGNALED;
    op.id = op.id != 0 ? op.id : 77;
    EQ(post(a, a->qp, &h, op), 0);
    uint64_t id;
    enum ibv_wc_status status = status_of(a->cq, &id);
    EQ(id, op.id);
    return status;
}

uint64_t counter(const char *name) {
    uint64_t value = 0;
    int err = fakeverbs_get(name, &value);
    if (err != 0) complain(name, 0, "no such counter", err, 0);
    return value;
}

void fill_bytes(uint8_t *at, size_t n, unsigned seed) {
    for (size_t i = 0; i < n; i++) at[i] = (uint8_t)(seed + i * 31 + (i >> 8) * 7 + (i >> 16));
}

bool same_bytes(const uint8_t *at, size_t n, unsigned seed) {
    for (size_t i = 0; i < n; i++)
        if (at[i] != (uint8_t)(seed + i * 31 + (i >> 8) * 7 + (i >> 16))) return false;
    return true;
}

bool readable(int fd, int ms) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, ms) == 1;
}
