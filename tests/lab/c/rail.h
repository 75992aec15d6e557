/* One RC queue pair over the real libibverbs, with a buffer that the other side may read and write.
 * Shared by the lab's checks; whatever should not fail ends the program with its name and errno. */
#ifndef KVRAIL_LAB_RAIL_H
#define KVRAIL_LAB_RAIL_H

#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MUST(what)                                                                           \
    do {                                                                                     \
        if (!(what)) {                                                                       \
            printf("lab: FAIL - %s:%d: %s (errno %d, %s)\n", __FILE__, __LINE__, #what,      \
                   errno, strerror(errno));                                                  \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

enum { CQ_DEPTH = 4096, WR_DEPTH = 1024, INLINE = 64 };
enum { ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE };

struct side {
    struct ibv_context *context;
    struct ibv_device_attr limits;
    struct ibv_port_attr port;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    unsigned char *memory;
    union ibv_gid gid;
    int gid_index;
};

static inline double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* The RoCE v2 GID of the port's IPv4 address. */
static inline void find_gid(struct side *s) {
    s->gid_index = -1;
    for (int i = 0; i < s->port.gid_tbl_len && s->gid_index < 0; i++) {
        static const unsigned char ipv4[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
        struct ibv_gid_entry entry;
        if (ibv_query_gid_ex(s->context, 1, (uint32_t)i, &entry, 0) != 0) continue;
        if (entry.gid_type != IBV_GID_TYPE_ROCE_V2) continue;
        if (memcmp(entry.gid.raw, ipv4, sizeof ipv4) != 0) continue;
        s->gid_index = i;
        s->gid = entry.gid;
    }
    MUST(s->gid_index >= 0);
}

static inline void side_open(struct side *s, const char *device, size_t bytes) {
    int count = 0;
    struct ibv_device **list = ibv_get_device_list(&count);
    MUST(list);
    memset(s, 0, sizeof *s);
    for (int i = 0; i < count; i++)
        if (strcmp(ibv_get_device_name(list[i]), device) == 0)
            s->context = ibv_open_device(list[i]);
    ibv_free_device_list(list);
    if (!s->context) {
        printf("lab: FAIL - there is no device %s among %d\n", device, count);
        exit(1);
    }
    MUST(ibv_query_device(s->context, &s->limits) == 0);
    MUST(ibv_query_port(s->context, 1, &s->port) == 0);
    find_gid(s);
    MUST(s->pd = ibv_alloc_pd(s->context));
    MUST(s->cq = ibv_create_cq(s->context, CQ_DEPTH, NULL, NULL, 0));
    MUST(posix_memalign((void **)&s->memory, 4096, bytes) == 0);
    memset(s->memory, 0, bytes);
    MUST(s->mr = ibv_reg_mr(s->pd, s->memory, bytes, ACCESS));
}

static inline void make_qp(struct side *s) {
    struct ibv_qp_init_attr how = {
        .send_cq = s->cq,
        .recv_cq = s->cq,
        .cap = {WR_DEPTH, 16, 1, 1, INLINE},
        .qp_type = IBV_QPT_RC,
    };
    if (s->qp) MUST(ibv_destroy_qp(s->qp) == 0);
    MUST(s->qp = ibv_create_qp(s->pd, &how));
}

static inline void connect_to(struct side *s, const struct side *other, int reads) {
    enum ibv_mtu mtu = s->port.active_mtu;
    if (other->port.active_mtu < mtu) mtu = other->port.active_mtu;
    struct ibv_qp_attr init = {
        .qp_state = IBV_QPS_INIT,
        .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
    };
    struct ibv_qp_attr ready = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = mtu,
        .dest_qp_num = other->qp->qp_num,
        .rq_psn = 7,
        .max_dest_rd_atomic = (uint8_t)reads,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1,
                    .port_num = 1,
                    .grh = {.dgid = other->gid,
                            .sgid_index = (uint8_t)s->gid_index,
                            .hop_limit = 64}},
    };
    /* A retry count of 7 would mean for ever on Soft-RoCE. */
    struct ibv_qp_attr send = {
        .qp_state = IBV_QPS_RTS,
        .timeout = 14,
        .retry_cnt = 6,
        .rnr_retry = 6,
        .sq_psn = 7,
        .max_rd_atomic = (uint8_t)reads,
    };
    MUST(ibv_modify_qp(s->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                                         IBV_QP_ACCESS_FLAGS) == 0);
    MUST(ibv_modify_qp(s->qp, &ready, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
                                          IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
    MUST(ibv_modify_qp(s->qp, &send, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                         IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                         IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

/* New queue pairs on both sides, connected; `reads` in flight at a time. */
static inline void connect_pair(struct side *a, struct side *b, int reads) {
    make_qp(a);
    make_qp(b);
    connect_to(a, b, reads);
    connect_to(b, a, reads);
}

static inline int most_reads(const struct side *a, const struct side *b) {
    int most = a->limits.max_qp_init_rd_atom;
    if (b->limits.max_qp_rd_atom < most) most = b->limits.max_qp_rd_atom;
    return most > 255 ? 255 : most;
}

/* One work request: `length` bytes at `from` of s, at `to` of the other side. */
struct op {
    enum ibv_wr_opcode code;
    uint64_t id;
    size_t from, to;
    uint32_t length, rkey, imm;
    unsigned flags;
};

static inline int post(struct side *s, const struct side *other, struct op op) {
    struct ibv_sge sge = {(uintptr_t)s->memory + op.from, op.length, s->mr->lkey};
    struct ibv_send_wr wr = {
        .wr_id = op.id,
        .sg_list = &sge,
        .num_sge = 1,
        .opcode = op.code,
        .send_flags = IBV_SEND_SIGNALED | op.flags,
        .imm_data = htonl(op.imm),
        .wr.rdma = {(uintptr_t)other->memory + op.to, op.rkey ? op.rkey : other->mr->rkey},
    };
    struct ibv_send_wr *bad = NULL;
    return ibv_post_send(s->qp, &wr, &bad);
}

/* Waits for one completion; Soft-RoCE works in the kernel, so an empty poll gives way to it. */
static inline int next_completion(struct side *s, struct ibv_wc *wc, double limit) {
    for (double end = seconds() + limit; seconds() < end; sched_yield()) {
        int n = ibv_poll_cq(s->cq, 1, wc);
        MUST(n >= 0);
        if (n == 1) return 1;
    }
    return 0;
}

#endif
