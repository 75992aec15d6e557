/* The state machine of RC queue pairs: which steps there are, and what each wants. */
#include "fake.h"

struct step {
    enum ibv_qp_state from, to;
    enum fv_call call;
    int needs, allows;
};

#define ANY_TIME (IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER)
static const struct step STEPS[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, FV_CALL_modify_init,
     IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, FV_CALL_modify_init, 0,
     IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR, FV_CALL_modify_rtr,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
         IBV_QP_MIN_RNR_TIMER,
     IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPS_RTR, IBV_QPS_RTS, FV_CALL_modify_rts,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
         IBV_QP_MAX_QP_RD_ATOMIC,
     ANY_TIME | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
    {IBV_QPS_RTS, IBV_QPS_RTS, FV_CALL_modify_rts, 0,
     ANY_TIME | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
};

static const struct step *find_step(enum ibv_qp_state from, enum ibv_qp_state to) {
    static const struct step RESET = {.to = IBV_QPS_RESET, .call = FV_CALL_modify_reset};
    static const struct step ERR = {
        .to = IBV_QPS_ERR, .call = FV_CALL_modify_err, .allows = IBV_QP_CUR_STATE};
    if (to == IBV_QPS_RESET) return &RESET;
    if (to == IBV_QPS_ERR) return &ERR;
    for (size_t i = 0; i < sizeof STEPS / sizeof STEPS[0]; i++)
        if (STEPS[i].from == from && STEPS[i].to == to) return &STEPS[i];
    return NULL;
}

static bool good_path(struct fv_dev *d, const struct fv_qp *qp, const struct ibv_qp_attr *a) {
    static const union ibv_gid ZERO;
    const struct ibv_ah_attr *ah = &a->ah_attr;
    const struct fv_port *p = &d->port[qp->attr.port_num - 1];
    if (ah->port_num != qp->attr.port_num || !ah->is_global) return false;
    if (ah->grh.sgid_index >= p->gid_tbl_len || !p->gids[ah->grh.sgid_index].used) return false;
    if (memcmp(&ah->grh.dgid, &ZERO, sizeof ZERO) == 0) return false;
    return a->path_mtu >= IBV_MTU_256 && a->path_mtu <= fv_mtu(p->active_mtu);
}

static bool good_values(struct fv_qp *qp, const struct ibv_qp_attr *a, int mask) {
    struct fv_dev *d = qp->dev;
    if ((mask & IBV_QP_PORT) != 0 && (a->port_num < 1 || a->port_num > d->ports)) return false;
    if ((mask & IBV_QP_PKEY_INDEX) != 0 && a->pkey_index != 0) return false;
    if ((mask & IBV_QP_AV) != 0 && !good_path(d, qp, a)) return false;
    if ((mask & IBV_QP_DEST_QPN) != 0 && a->dest_qp_num > 0xffffff) return false;
    if ((mask & IBV_QP_RQ_PSN) != 0 && a->rq_psn > 0xffffff) return false;
    if ((mask & IBV_QP_SQ_PSN) != 0 && a->sq_psn > 0xffffff) return false;
    if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0 && a->max_rd_atomic > d->max_qp_init_rd_atom)
        return false;
    if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0 && a->max_dest_rd_atomic > d->max_qp_rd_atom)
        return false;
    if ((mask & IBV_QP_TIMEOUT) != 0 && a->timeout > 31) return false;
    if ((mask & IBV_QP_RETRY_CNT) != 0 && a->retry_cnt > 7) return false;
    if ((mask & IBV_QP_RNR_RETRY) != 0 && a->rnr_retry > 7) return false;
    return (mask & IBV_QP_MIN_RNR_TIMER) == 0 || a->min_rnr_timer <= 31;
}

static void take_values(struct fv_qp *qp, const struct ibv_qp_attr *a, int mask) {
    struct ibv_qp_attr *to = &qp->attr;
    if ((mask & IBV_QP_PORT) != 0) to->port_num = a->port_num;
    if ((mask & IBV_QP_PKEY_INDEX) != 0) to->pkey_index = a->pkey_index;
    if ((mask & IBV_QP_ACCESS_FLAGS) != 0) to->qp_access_flags = a->qp_access_flags;
    if ((mask & IBV_QP_AV) != 0) {
        to->ah_attr = a->ah_attr;
        qp->dgid = a->ah_attr.grh.dgid;
        qp->sgid = qp->dev->port[to->port_num - 1].gids[a->ah_attr.grh.sgid_index].gid;
    }
    if ((mask & IBV_QP_PATH_MTU) != 0) to->path_mtu = a->path_mtu;
    if ((mask & IBV_QP_DEST_QPN) != 0) to->dest_qp_num = a->dest_qp_num;
    if ((mask & IBV_QP_RQ_PSN) != 0) to->rq_psn = a->rq_psn;
    if ((mask & IBV_QP_SQ_PSN) != 0) to->sq_psn = a->sq_psn;
    if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0) to->max_rd_atomic = a->max_rd_atomic;
    if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0) to->max_dest_rd_atomic = a->max_dest_rd_atomic;
    if ((mask & IBV_QP_MIN_RNR_TIMER) != 0) to->min_rnr_timer = a->min_rnr_timer;
    if ((mask & IBV_QP_TIMEOUT) != 0) to->timeout = a->timeout;
    if ((mask & IBV_QP_RETRY_CNT) != 0) to->retry_cnt = a->retry_cnt;
    if ((mask & IBV_QP_RNR_RETRY) != 0) to->rnr_retry = a->rnr_retry;
}

static void set_state(struct fv_qp *qp, enum ibv_qp_state state) {
    pthread_spin_lock(&qp->sq_lock);
    qp->state = state;
    pthread_spin_unlock(&qp->sq_lock);
}

/* The engine completes what was posted; the packet that is out is not waited for. */
void fv_qp_error(struct fv_qp *qp) {
    if (qp->state == IBV_QPS_RESET || qp->state == IBV_QPS_ERR) return;
    set_state(qp, IBV_QPS_ERR);
    qp->started = qp->waiting = false;
    fv_place_late(qp);
    fv_kick();
}

/* The kernel's own order of checks: the step, the mask, the values. */
static int change(struct fv_qp *qp, struct ibv_qp_attr *a, int mask) {
    int err = 0;
    enum ibv_qp_state from = (enum ibv_qp_state)qp->state;
    enum ibv_qp_state to = (mask & IBV_QP_STATE) != 0 ? a->qp_state : from;
    const struct step *s = find_step(from, to);
    if ((mask & IBV_QP_CUR_STATE) != 0 && a->cur_qp_state != from) return EINVAL;
    if (s == NULL) return EINVAL;
    if (fv_fails_quietly(qp->dev, s->call, &err)) return err;
    mask &= ~IBV_QP_STATE;
    if ((mask & s->needs) != s->needs || (mask & ~(s->needs | s->allows)) != 0) return EINVAL;
    if (!good_values(qp, a, mask)) return EINVAL;
    if (qp->dev->fatal && to != IBV_QPS_RESET && to != IBV_QPS_ERR) return EIO;
    take_values(qp, a, mask);
    if (to == IBV_QPS_ERR) {
        if (from == IBV_QPS_RESET) set_state(qp, IBV_QPS_ERR);
        fv_qp_error(qp);
    } else if (to == IBV_QPS_RESET) {
        set_state(qp, to);
        fv_qp_clear(qp);
    } else {
        set_state(qp, to);
    }
    qp->qp.state = to;
    return 0;
}

FV_EXPORT int ibv_modify_qp(struct ibv_qp *q, struct ibv_qp_attr *a, int mask) {
    struct fv_qp *qp = (struct fv_qp *)q;
    int err = 0;
    fv_lock();
    if (!fv_fails_quietly(qp->dev, FV_CALL_modify_qp, &err)) {
        err = change(qp, a, mask);
        if (err != 0) FV_COUNT(refused_modify);
    }
    fv_unlock();
    fv_kick();
    return err;
}
