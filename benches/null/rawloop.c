/* What verbs cost without an engine: random WRs of LEN bytes, built, posted in lists and polled.
 * usage: FAKEVERBS_NULL=1 rawloop N CHAIN SIGNAL_ALL ROUNDS write|read   prints the median
 * nanoseconds a descriptor. The WRs lead to the queue pair itself: the null mode moves nothing.
 */
#define _POSIX_C_SOURCE 199309L
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LEN = 1024, POLL = 64, MAX_CHAIN = 4096 };

struct loop {
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    struct ibv_mr *mr;
    uint64_t base;
    int n, chain, signal_all;
    enum ibv_wr_opcode opcode;
    const uint32_t *order;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int to_rts(struct ibv_qp *qp, const union ibv_gid *gid) {
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    int err = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                                        IBV_QP_ACCESS_FLAGS);
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = qp->qp_num;
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = 1;
    a.ah_attr.grh.dgid = *gid;
    a.ah_attr.grh.sgid_index = 1;
    err |= ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                     IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                     IBV_QP_MIN_RNR_TIMER);
    a.qp_state = IBV_QPS_RTS;
    return err | ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
                                           IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                           IBV_QP_MAX_QP_RD_ATOMIC);
}

static struct ibv_send_wr wr[MAX_CHAIN];
static struct ibv_sge sge[MAX_CHAIN];

static void round_of(const struct loop *l) {
    struct ibv_wc wc[POLL];
    struct ibv_send_wr *bad;
    int done = 0, want = 0;
    for (int i = 0; i < l->n;) {
        int k = l->n - i < l->chain ? l->n - i : l->chain;
        for (int j = 0; j < k; j++, i++) {
            int signal = l->signal_all || j == k - 1;
            uint64_t at = l->base + (uint64_t)l->order[i] * LEN;
            sge[j] = (struct ibv_sge){at, LEN, l->mr->lkey};
            wr[j].wr_id = (uint64_t)i;
            wr[j].sg_list = &sge[j];
            wr[j].num_sge = 1;
            wr[j].opcode = l->opcode;
            wr[j].send_flags = signal ? IBV_SEND_SIGNALED : 0;
            wr[j].next = j == k - 1 ? NULL : &wr[j + 1];
            wr[j].wr.rdma.remote_addr = at;
            wr[j].wr.rdma.rkey = l->mr->rkey;
            want += signal;
        }
        if (ibv_post_send(l->qp, wr, &bad) != 0) abort();
        int got;
        while ((got = ibv_poll_cq(l->cq, POLL, wc)) > 0) done += got;
    }
    while (done < want) done += ibv_poll_cq(l->cq, POLL, wc);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    struct loop l = {.n = atoi(argv[1]), .chain = atoi(argv[2]), .signal_all = atoi(argv[3])};
    int rounds = atoi(argv[4]);
    l.opcode = strcmp(argv[5], "read") == 0 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
    if (l.n < 1 || l.chain < 1 || l.chain > MAX_CHAIN || rounds < 1) return 2;
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *c = list != NULL ? ibv_open_device(list[0]) : NULL;
    if (c == NULL) return 1;
    struct ibv_pd *pd = ibv_alloc_pd(c);
    size_t bytes = (size_t)l.n * LEN;
    char *buf = calloc(1, bytes);
    l.base = (uint64_t)(uintptr_t)buf;
    l.mr = ibv_reg_mr(pd, buf, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    l.cq = ibv_create_cq(c, MAX_CHAIN, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {.send_cq = l.cq,
                                    .recv_cq = l.cq,
                                    .qp_type = IBV_QPT_RC,
                                    .cap = {MAX_CHAIN, 1, 1, 1, 0}};
    l.qp = ibv_create_qp(pd, &init);
    union ibv_gid gid;
    if (l.qp == NULL || ibv_query_gid(c, 1, 1, &gid) != 0 || to_rts(l.qp, &gid) != 0) return 1;
    uint32_t *order = calloc((size_t)l.n, sizeof *order);
    double *took = calloc((size_t)rounds, sizeof *took);
    if (order == NULL || took == NULL) return 1;
    for (int i = 0; i < l.n; i++) order[i] = (uint32_t)i;
    uint64_t x = 88172645463325252ull;
    for (int i = l.n - 1; i > 0; i--) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        uint32_t j = (uint32_t)(x % (uint64_t)(i + 1)), t = order[i];
        order[i] = order[j], order[j] = t;
    }
    l.order = order;
    for (int r = 0; r < rounds; r++) {
        double begin = now();
        round_of(&l);
        took[r] = (now() - begin) / l.n;
    }
    qsort(took, (size_t)rounds, sizeof *took, by_value);
    printf("{\"ns\": %.3f}\n", took[rounds / 2]);
    return ibv_destroy_qp(l.qp) | ibv_dereg_mr(l.mr) | ibv_destroy_cq(l.cq) |
           ibv_dealloc_pd(pd) | ibv_close_device(c);
}
