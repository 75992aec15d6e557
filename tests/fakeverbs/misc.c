/* Names, and calls that this provider does not have. */
#include "fake.h"

FV_EXPORT const char *ibv_node_type_str(enum ibv_node_type t) {
    return t == IBV_NODE_CA ? "InfiniBand channel adapter" : t == IBV_NODE_RNIC ? "iWARP NIC"
                                                                                : "unknown";
}

FV_EXPORT const char *ibv_port_state_str(enum ibv_port_state s) {
    static const char *const NAME[] = {"PORT_NOP",   "PORT_DOWN",   "PORT_INIT",
                                       "PORT_ARMED", "PORT_ACTIVE", "PORT_ACTIVE_DEFER"};
    return (unsigned)s < sizeof NAME / sizeof NAME[0] ? NAME[s] : "unknown";
}

FV_EXPORT const char *ibv_wc_status_str(enum ibv_wc_status s) {
    static const char *const NAME[] = {
        "success",
        "local length error",
        "local QP operation error",
        "local EE context operation error",
        "local protection error",
        "Work Request Flushed Error",
        "memory management operation error",
        "bad response error",
        "local access error",
        "remote invalid request error",
        "remote access error",
        "remote operation error",
        "transport retry counter exceeded",
        "RNR retry counter exceeded",
    };
    return (unsigned)s < sizeof NAME / sizeof NAME[0] ? NAME[s] : "other error";
}

FV_EXPORT int ibv_fork_init(void) { return 0; }

FV_EXPORT enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }

FV_EXPORT struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *a) {
    (void)pd, (void)a;
    errno = EOPNOTSUPP;
    return NULL;
}

FV_EXPORT int ibv_modify_srq(struct ibv_srq *s, struct ibv_srq_attr *a, int mask) {
    (void)s, (void)a, (void)mask;
    return EOPNOTSUPP;
}

FV_EXPORT int ibv_destroy_srq(struct ibv_srq *s) {
    (void)s;
    return EOPNOTSUPP;
}

FV_EXPORT struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *a) {
    (void)pd, (void)a;
    errno = EOPNOTSUPP;
    return NULL;
}

FV_EXPORT int ibv_destroy_ah(struct ibv_ah *ah) {
    (void)ah;
    return EOPNOTSUPP;
}

FV_EXPORT int ibv_resize_cq(struct ibv_cq *cq, int n) {
    (void)cq, (void)n;
    return EOPNOTSUPP;
}

FV_EXPORT int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *e) {
    (void)qp;
    memset(e, 0, sizeof *e);
    return EOPNOTSUPP;
}

FV_EXPORT int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *e) {
    (void)qp, (void)e;
    return EOPNOTSUPP;
}
