/* The answering half of a QP: what a packet may do to the memory and queues here. */
#include "fake.h"

static bool owns(struct fv_dev *d, uint32_t port, const union ibv_gid *gid) {
    for (uint32_t i = 0; i < d->port[port - 1].gid_tbl_len; i++) {
        const struct fv_gid *g = &d->port[port - 1].gids[i];
        if (g->used && memcmp(&g->gid, gid, sizeof *gid) == 0) return true;
    }
    return false;
}

/* A packet that no QP here takes is dropped without a word: its sender tries again. */
static struct fv_qp *target_of(const struct fv_packet *p) {
    struct fv_qp *qp = fv_find_qp(p->dst_qpn);
    if (qp == NULL || (qp->state != IBV_QPS_RTR && qp->state != IBV_QPS_RTS)) return NULL;
    struct fv_dev *d = qp->dev;
    if (d->port[qp->attr.port_num - 1].state != IBV_PORT_ACTIVE || d->drop != 0 || d->fatal)
        return NULL;
    if (d->blackhole != 0 || qp->blackhole != 0) return NULL;
    if (!owns(d, qp->attr.port_num, &p->dgid)) return NULL;
    if (memcmp(&qp->dgid, &p->sgid, sizeof p->sgid) != 0) return NULL;
    if (qp->attr.dest_qp_num != p->src_qpn || qp->attr.rq_psn != p->psn) return NULL;
    return (int32_t)(p->seq - qp->rseq) <= 0 ? qp : NULL;
}

/* From another process. */
static bool foreign(const struct fv_packet *p) { return (int)(p->src_qpn >> 16) != fv.slot; }

static void nak(struct fv_qp *qp, struct fv_packet *reply, enum ibv_wc_status status) {
    reply->kind = FV_NAK;
    reply->status = (uint8_t)status;
    if (status == IBV_WC_REM_ACCESS_ERR)
        fv_event(qp->dev, IBV_EVENT_QP_ACCESS_ERR, 0, qp, NULL);
    else if (status == IBV_WC_REM_INV_REQ_ERR)
        fv_event(qp->dev, IBV_EVENT_QP_REQ_ERR, 0, qp, NULL);
    fv_qp_error(qp);
}

/* Writes that were acknowledged become visible. */
void fv_place_late(struct fv_qp *qp) {
    while (qp->late_first != NULL) {
        struct fv_late *l = qp->late_first;
        uint8_t *at = fv_reach(qp->pd, l->rkey, l->addr, l->len, IBV_ACCESS_REMOTE_WRITE);
        if (at != NULL) fv_copy(at, l->bytes, l->len, l->foreign);
        FV_COUNT(late_placed);
        qp->late_first = l->next;
        free(l);
    }
    qp->late_last = NULL;
}

static void stage(struct fv_qp *qp, const struct fv_packet *p, const uint8_t *bytes) {
    struct fv_late *l = malloc(sizeof *l + p->len);
    if (l == NULL) abort();
    l->next = NULL;
    l->rkey = p->rkey;
    l->len = p->len;
    l->addr = p->raddr + p->off;
    l->foreign = foreign(p);
    memcpy(l->bytes, bytes, p->len);
    if (qp->late_last != NULL)
        qp->late_last->next = l;
    else
        qp->late_first = l;
    qp->late_last = l;
    FV_COUNT(late_staged);
}

/* The whole message's range is checked with each packet: the region may have gone meanwhile. */
static uint8_t *remote(struct fv_qp *qp, const struct fv_packet *p, unsigned access) {
    uint8_t *at = fv_reach(qp->pd, p->rkey, p->raddr, p->total, access);
    return at == NULL ? NULL : at + p->off;
}

static void do_write(struct fv_qp *qp, const struct fv_packet *p, const uint8_t *bytes,
                     struct fv_packet *reply) {
    if ((qp->attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE) == 0) {
        nak(qp, reply, IBV_WC_REM_INV_REQ_ERR);
        return;
    }
    if (p->total == 0) return;
    uint8_t *at = remote(qp, p, IBV_ACCESS_REMOTE_WRITE);
    if (at == NULL)
        nak(qp, reply, IBV_WC_REM_ACCESS_ERR);
    else if (qp->dev->late_writes != 0)
        stage(qp, p, bytes);
    else
        fv_copy(at, bytes, p->len, foreign(p));
}

static void do_read(struct fv_qp *qp, const struct fv_packet *p, struct fv_packet *reply,
                    uint8_t *out) {
    fv_place_late(qp);
    if ((qp->attr.qp_access_flags & IBV_ACCESS_REMOTE_READ) == 0 ||
        p->reads > qp->attr.max_dest_rd_atomic) {
        nak(qp, reply, IBV_WC_REM_INV_REQ_ERR);
        return;
    }
    if (p->total == 0) return;
    const uint8_t *at = remote(qp, p, IBV_ACCESS_REMOTE_READ);
    if (at == NULL) {
        nak(qp, reply, IBV_WC_REM_ACCESS_ERR);
        return;
    }
    /* A NIC's reads push its own writes before them. */
    fv_dry(qp->dev, fv_find_mr(qp->pd, p->rkey));
    fv_copy(out, at, p->len, foreign(p));
    reply->payload = p->len;
}

/* Takes a receive from the queue; without one the sender is told to come again. */
static bool take_recv(struct fv_qp *qp, struct fv_packet *reply) {
    if (qp->recv_taken) return true;
    if (qp->rq_head == qp->rq_tail) {
        reply->kind = FV_RNR;
        reply->status = qp->attr.min_rnr_timer;
        return false;
    }
    const struct fv_recv *r = &qp->rq[qp->rq_tail++ & qp->rq_mask];
    qp->cur.wr_id = r->wr_id;
    qp->cur.n_sge = r->n_sge;
    memcpy(qp->cur.sge, r->sge, r->n_sge * sizeof *r->sge);
    qp->recv_taken = true;
    return true;
}

static void end_recv(struct fv_qp *qp, enum ibv_wc_status status, const struct fv_packet *p) {
    qp->recv_taken = false;
    fv_complete_recv(qp, qp->cur.wr_id, status, p);
}

static bool scatter(struct fv_qp *qp, uint64_t off, const uint8_t *bytes, uint64_t len) {
    for (uint32_t i = 0; i < qp->cur.n_sge && len > 0; i++) {
        const struct ibv_sge *g = &qp->cur.sge[i];
        if (off >= g->length) {
            off -= g->length;
            continue;
        }
        uint64_t n = g->length - off < len ? g->length - off : len;
        uint8_t *at = fv_reach(qp->pd, g->lkey, g->addr + off, n, IBV_ACCESS_LOCAL_WRITE);
        if (at == NULL) return false;
        memcpy(at, bytes, n);
        bytes += n;
        len -= n;
        off = 0;
    }
    return true;
}

static void do_send(struct fv_qp *qp, const struct fv_packet *p, const uint8_t *bytes,
                    struct fv_packet *reply) {
    if (!take_recv(qp, reply)) return;
    fv_place_late(qp);
    uint64_t room = 0;
    for (uint32_t i = 0; i < qp->cur.n_sge; i++) room += qp->cur.sge[i].length;
    if (p->total > room) {
        end_recv(qp, IBV_WC_LOC_LEN_ERR, p);
        nak(qp, reply, IBV_WC_REM_INV_REQ_ERR);
    } else if (!scatter(qp, p->off, bytes, p->len)) {
        end_recv(qp, IBV_WC_LOC_PROT_ERR, p);
        nak(qp, reply, IBV_WC_REM_OP_ERR);
    } else if ((p->flags & FV_LAST) != 0) {
        end_recv(qp, IBV_WC_SUCCESS, p);
    }
}

static void execute(struct fv_qp *qp, const struct fv_packet *p, const uint8_t *bytes,
                    struct fv_packet *reply, uint8_t *out) {
    uint64_t mtu = UINT64_C(128) << qp->attr.path_mtu;
    if (p->mtu > (uint32_t)qp->attr.path_mtu && p->total > mtu) {
        nak(qp, reply, IBV_WC_REM_INV_REQ_ERR);
        return;
    }
    switch (p->op) {
    case IBV_WR_RDMA_READ: do_read(qp, p, reply, out); break;
    case IBV_WR_RDMA_WRITE: do_write(qp, p, bytes, reply); break;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        if ((p->flags & FV_LAST) != 0 && !take_recv(qp, reply)) break;
        do_write(qp, p, bytes, reply);
        if (reply->kind == FV_ACK && (p->flags & FV_LAST) != 0) {
            fv_place_late(qp);
            end_recv(qp, IBV_WC_SUCCESS, p);
        }
        break;
    default: do_send(qp, p, bytes, reply); break;
    }
}

/* Carries out a request and fills in the answer; a READ's bytes go to `out`. */
void fv_respond(struct fv_packet *p, const uint8_t *bytes, struct fv_packet *reply,
                uint8_t *out) {
    struct fv_qp *qp = target_of(p);
    *reply = *p;
    reply->src_qpn = p->dst_qpn;
    reply->dst_qpn = p->src_qpn;
    reply->payload = 0;
    reply->kind = qp == NULL ? FV_DROP : FV_ACK;
    if (qp == NULL || p->len > FV_CHUNK || p->off + p->len > p->total) return;
    bool again = p->seq != qp->rseq;
    if (again && p->op != IBV_WR_RDMA_READ) return;
    execute(qp, p, bytes, reply, out);
    if (!again && reply->kind == FV_ACK) qp->rseq++;
}
