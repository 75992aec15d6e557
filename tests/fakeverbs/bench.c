/* What a work request costs in the null mode: nanoseconds per READ, posted in lists of 16 with one
 * signal, and polled. usage: FAKEVERBS_NULL=1 bench [LISTS]
 */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { LIST = 16 };

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

int main(int argc, char **argv) {
    long lists = argc > 1 ? atol(argv[1]) : 100000;
    static char buf[4096];
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *c = list != NULL ? ibv_open_device(list[0]) : NULL;
    if (c == NULL) return 1;
    struct ibv_pd *pd = ibv_alloc_pd(c);
    struct ibv_cq *cq = ibv_create_cq(c, 64, NULL, NULL, 0);
    struct ibv_mr *mr = ibv_reg_mr(pd, buf, sizeof buf, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_qp_init_attr init = {
        .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {64, 1, 1, 1, 0}};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    union ibv_gid gid;
    if (qp == NULL || ibv_query_gid(c, 1, 1, &gid) != 0 || to_rts(qp, &gid) != 0) return 1;
    struct ibv_sge g = {(uint64_t)(uintptr_t)buf, 64, mr->lkey};
    struct ibv_send_wr wr[LIST] = {0}, *bad;
    struct ibv_wc wc[4];
    for (int i = 0; i < LIST; i++) {
        wr[i].next = i + 1 < LIST ? &wr[i + 1] : NULL;
        wr[i].sg_list = &g;
        wr[i].num_sge = 1;
        wr[i].opcode = IBV_WR_RDMA_READ;
    }
    wr[LIST - 1].send_flags = IBV_SEND_SIGNALED;
    double begin = now();
    for (long i = 0; i < lists; i++) {
        if (ibv_post_send(qp, wr, &bad) != 0) return 1;
        while (ibv_poll_cq(cq, 4, wc) == 0) continue;
    }
    printf("%.2f ns per work request\n", (now() - begin) / (double)(lists * LIST));
    return ibv_destroy_qp(qp) | ibv_dereg_mr(mr) | ibv_destroy_cq(cq) | ibv_dealloc_pd(pd) |
           ibv_close_device(c);
}
