/* The sending half of a QP: one packet is out at a time, and each is answered. */
#include "fake.h"

static uint8_t payload[FV_CHUNK], returned[FV_CHUNK];

uint64_t fv_scaled_us(double us) { return (uint64_t)(us * 1000.0 * fv.time_scale); }

static struct fv_send *current(struct fv_qp *qp) { return &qp->sq[qp->sq_exec & qp->sq_mask]; }

static bool is_write(const struct fv_send *s) {
    return s->opcode == IBV_WR_RDMA_WRITE || s->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static uint64_t total_of(const struct fv_send *s) {
    uint64_t len = (s->flags & IBV_SEND_INLINE) != 0 ? s->inline_len : 0;
    for (uint32_t i = 0; i < s->n_sge; i++) len += s->sge[i].length;
    return len;
}

/* Local bytes [off, off + len) of the work request, to or from `at`. */
static bool move_local(struct fv_qp *qp, const struct fv_send *s, uint64_t off, uint64_t len,
                       uint8_t *at, bool in) {
    if ((s->flags & IBV_SEND_INLINE) != 0) {
        memcpy(at, s->inline_data + off, len);
        return true;
    }
    for (uint32_t i = 0; i < s->n_sge && len > 0; i++) {
        const struct ibv_sge *g = &s->sge[i];
        if (off >= g->length) {
            off -= g->length;
            continue;
        }
        uint64_t n = g->length - off < len ? g->length - off : len;
        unsigned access = in ? IBV_ACCESS_LOCAL_WRITE : 0;
        uint8_t *local = fv_reach(qp->pd, g->lkey, g->addr + off, n, access);
        if (local == NULL) return false;
        if (!in || !fv_wet(qp->dev, qp->pd, g->lkey, g->addr + off, at, n))
            memcpy(in ? local : at, in ? at : local, n);
        at += n;
        len -= n;
        off = 0;
    }
    return true;
}

/* What the NIC finds wrong before anything leaves it. */
static enum ibv_wc_status check(struct fv_qp *qp, const struct fv_send *s) {
    enum ibv_wc_status forced;
    unsigned access = s->opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_LOCAL_WRITE : 0;
    if (fv_forced(qp->dev, s, &forced)) return forced;
    if (qp->total > qp->dev->port[qp->attr.port_num - 1].max_msg_sz) return IBV_WC_LOC_LEN_ERR;
    if (s->opcode == IBV_WR_RDMA_READ && qp->attr.max_rd_atomic == 0)
        return IBV_WC_LOC_QP_OP_ERR;
    for (uint32_t i = 0; i < s->n_sge; i++) {
        const struct ibv_sge *g = &s->sge[i];
        if (g->length > 0 && fv_reach(qp->pd, g->lkey, g->addr, g->length, access) == NULL)
            return IBV_WC_LOC_PROT_ERR;
    }
    return IBV_WC_SUCCESS;
}

/* READs that would be outstanding at once on a wire: those queued in a row, up to the depth. */
static uint32_t reads_in_flight(const struct fv_qp *qp) {
    uint32_t n = 0;
    for (uint64_t i = qp->sq_exec; i != qp->sq_head && n < qp->attr.max_rd_atomic; i++) {
        if (qp->sq[i & qp->sq_mask].opcode != IBV_WR_RDMA_READ) break;
        n++;
    }
    return n;
}

static void make_packet(struct fv_qp *qp, struct fv_packet *p) {
    const struct fv_send *s = current(qp);
    uint64_t left = qp->total - qp->off, len = left < FV_CHUNK ? left : FV_CHUNK;
    memset(p, 0, sizeof *p);
    p->magic = FV_MAGIC;
    p->kind = FV_REQUEST;
    p->op = (uint8_t)s->opcode;
    p->flags = (uint8_t)((qp->off == 0 ? FV_FIRST : 0) | (len == left ? FV_LAST : 0));
    if (s->opcode == IBV_WR_SEND_WITH_IMM || s->opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
        p->flags |= FV_IMM;
    if ((s->flags & IBV_SEND_SOLICITED) != 0) p->flags |= FV_SOLICITED;
    p->src_qpn = qp->qp.qp_num;
    p->dst_qpn = qp->attr.dest_qp_num;
    p->epoch = qp->epoch;
    p->psn = qp->attr.sq_psn;
    p->seq = qp->seq;
    p->sgid = qp->sgid;
    p->dgid = qp->dgid;
    p->rkey = s->rkey;
    p->raddr = s->raddr;
    p->imm = s->imm;
    p->mtu = qp->attr.path_mtu;
    p->reads = reads_in_flight(qp);
    p->hop = qp->attr.ah_attr.grh.hop_limit;
    p->off = qp->off;
    p->total = qp->total;
    p->len = (uint32_t)len;
    p->payload = s->opcode == IBV_WR_RDMA_READ ? 0 : p->len;
}

/* No path to the peer from here: the packet goes nowhere. */
static bool unreachable(const struct fv_qp *qp) {
    const struct fv_dev *d = qp->dev;
    if (d->port[qp->attr.port_num - 1].state != IBV_PORT_ACTIVE || d->drop != 0 || d->fatal)
        return true;
    for (uint32_t i = 0; i < d->n_blocked; i++)
        if (memcmp(&d->blocked[i], &qp->dgid, sizeof qp->dgid) == 0) return true;
    return d->routed != 0 && qp->attr.ah_attr.grh.hop_limit < 2;
}

static void use_link(struct fv_qp *qp, uint64_t bytes, uint64_t now) {
    struct fv_dev *d = qp->dev;
    if (d->bandwidth == 0) return;
    if (d->busy_until < now) d->busy_until = now;
    d->last = qp;
    d->busy_until += bytes * 1000000000u / d->bandwidth;
}

static void send_packet(struct fv_qp *qp, uint64_t now) {
    struct fv_packet p, reply;
    struct fv_send *s = current(qp);
    make_packet(qp, &p);
    if (p.payload > 0 && !move_local(qp, s, qp->off, p.len, payload, false)) {
        fv_complete_send(qp, IBV_WC_LOC_PROT_ERR);
        return;
    }
    FV_COUNT(packets);
    use_link(qp, p.len, now);
    qp->waiting = true;
    qp->answer = 0;
    uint64_t own = fv_scaled_us(4.096 * (double)(UINT64_C(1) << qp->attr.timeout));
    uint64_t slow = fv.slow_peer_ms * 1000000u;
    qp->deadline = qp->attr.timeout == 0 ? FV_NEVER : now + (own > slow ? own : slow);
    uint32_t slot = p.dst_qpn >> 16;
    reply = p;
    reply.kind = FV_DROP;
    reply.dst_qpn = p.src_qpn;
    reply.payload = 0;
    if (unreachable(qp)) {
        fv_answer(&reply, NULL);
    } else if ((int)slot == fv.slot) {
        fv_respond(&p, payload, &reply, returned);
        fv_answer(&reply, returned);
    } else if (!fv_bus_send(slot, &p, payload)) {
        fv_answer(&reply, NULL);
    }
}

/* Delays of the receiver-not-ready timer's codes, in 10 us. */
static double rnr_delay_us(uint32_t code) {
    static const uint16_t TENS[] = {65535, 1,    2,    3,    4,    6,    8,     12,
                                    16,    24,   32,   48,   64,   96,   128,   192,
                                    256,   384,  512,  768,  1024, 1536, 2048,  3072,
                                    4096,  6144, 8192, 12288, 16384, 24576, 32768, 49152};
    return 10.0 * TENS[code & 31];
}

static void acknowledged(struct fv_qp *qp, const struct fv_packet *p, const uint8_t *bytes) {
    struct fv_send *s = current(qp);
    if (s->opcode == IBV_WR_RDMA_READ) {
        if (p->payload > 0 && !move_local(qp, s, qp->off, p->payload, (uint8_t *)bytes, true)) {
            fv_complete_send(qp, IBV_WC_LOC_PROT_ERR);
            return;
        }
        FV_COUNT_BY(bytes_read, p->len);
    } else if (is_write(s)) {
        FV_COUNT_BY(bytes_written, p->len);
    } else {
        FV_COUNT_BY(bytes_sent, p->len);
    }
    qp->waiting = false;
    qp->tries = qp->rnr_tries = 0;
    qp->seq++;
    qp->off += p->len;
    if ((p->flags & FV_LAST) != 0) fv_complete_send(qp, IBV_WC_SUCCESS);
}

/* An answer from the peer, or from here when nothing came of the packet. */
void fv_answer(const struct fv_packet *p, const uint8_t *bytes) {
    struct fv_qp *qp = fv_find_qp(p->dst_qpn);
    if (qp == NULL || !qp->waiting || qp->answer != 0 || p->epoch != qp->epoch ||
        p->seq != qp->seq || qp->state != IBV_QPS_RTS)
        return;
    uint64_t now = fv_now();
    switch (p->kind) {
    case FV_ACK: acknowledged(qp, p, bytes); break;
    case FV_NAK: fv_complete_send(qp, (enum ibv_wc_status)p->status); break;
    case FV_RNR:
        FV_COUNT(rnr);
        if (qp->attr.rnr_retry != 7 && qp->rnr_tries++ >= qp->attr.rnr_retry) {
            fv_complete_send(qp, IBV_WC_RNR_RETRY_EXC_ERR);
            break;
        }
        qp->answer = FV_RNR;
        qp->deadline = now + fv_scaled_us(rnr_delay_us(p->status));
        break;
    default:
        FV_COUNT(dropped);
        qp->answer = FV_DROP;
        qp->deadline = FV_NEVER;
        if (qp->attr.timeout != 0)
            qp->deadline =
                now + fv_scaled_us(4.096 * (double)(UINT64_C(1) << qp->attr.timeout));
    }
}

/* The answer did not come, or said to try again: RETRY_EXC after retry_cnt more packets. */
static void try_again(struct fv_qp *qp, uint64_t now) {
    if (qp->answer != FV_RNR) {
        FV_COUNT(retries);
        if (qp->tries++ >= qp->attr.retry_cnt) {
            fv_complete_send(qp, IBV_WC_RETRY_EXC_ERR);
            return;
        }
    }
    qp->waiting = false;
    send_packet(qp, now);
}

static void start(struct fv_qp *qp) {
    struct fv_send *s = current(qp);
    qp->off = 0;
    qp->total = total_of(s);
    qp->tries = qp->rnr_tries = 0;
    qp->started = true;
    enum ibv_wc_status status = check(qp, s);
    if (status != IBV_WC_SUCCESS) {
        fv_complete_send(qp, status);
    } else if (qp->null_mode && (is_write(s) || s->opcode == IBV_WR_RDMA_READ) &&
               s->opcode != IBV_WR_RDMA_WRITE_WITH_IMM) {
        fv_complete_send(qp, IBV_WC_SUCCESS);
    }
}

static bool has_work(struct fv_qp *qp) {
    pthread_spin_lock(&qp->sq_lock);
    bool work = qp->sq_exec != qp->sq_head;
    pthread_spin_unlock(&qp->sq_lock);
    return work;
}

/* Does what can be done now for a QP, and says when to come again. */
uint64_t fv_step(struct fv_qp *qp, uint64_t now) {
    if (qp->force_err != 0) {
        qp->force_err = 0;
        fv_qp_error(qp);
    }
    uint64_t hole = qp->dev->blackhole > qp->blackhole ? qp->dev->blackhole : qp->blackhole;
    if (hole == 0 && qp->dev->hole_loop != 0 && fv_loops(qp)) hole = 1;
    if (qp->state == IBV_QPS_ERR && hole < 2) fv_flush(qp);
    for (int i = 0; i < 16; i++) {
        if (qp->state == IBV_QPS_ERR && hole < 2 && qp->sq_exec != qp->sq_head) return now;
        if (qp->state != IBV_QPS_RTS || hole != 0) return FV_NEVER;
        if (qp->waiting) {
            if (now < qp->deadline) return qp->deadline;
            try_again(qp, now);
            continue;
        }
        if (!has_work(qp)) return FV_NEVER;
        if (!qp->started) {
            start(qp);
            continue;
        }
        if (qp->dev->bandwidth != 0 && now < qp->dev->busy_until)
            return qp->dev->busy_until;
        if (qp->dev->bandwidth != 0 && qp->dev->last == qp) {
            qp->dev->last = NULL; /* the others first: no queue pair has the link for itself */
            return now;
        }
        send_packet(qp, now);
    }
    return now;
}
