/* The null NIC: a libibverbs that the peers accept, without hardware and without a kernel module.
 * A READ or WRITE is complete when it was posted and no byte moves; a SEND is delivered to the
 * queue pair that it names, inside this process. What it is for: the parent folder's README.md.
 *
 * Environment, read once:
 *   NULLNIC_ROOT      folder with the sysfs tree that fits (made by rig.py); default: .
 *   NULLNIC_DEVICES   number of devices, at most 16; default 2
 *   NULLNIC_NAME      what their names begin with; default null, so null0, null1, ...
 *   NULLNIC_ROCE      1: RoCE ports; else InfiniBand ports
 *   NULLNIC_COUNTERS  file that gets the counters below while the process runs
 */
#ifndef NULLNIC_H
#define NULLNIC_H

#define _GNU_SOURCE
#include "counters.h"

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NN_EXPORT __attribute__((visibility("default")))
#define NN_DEVICES 16
#define NN_QPS 65536u
#define NN_GIDS 4
#define NN_SGES 4

struct nn_cq {
    struct ibv_cq cq; /* first: a pointer to it is a pointer to this */
    atomic_flag lock;
    _Atomic uint32_t tail;
    uint32_t head, mask;
    struct ibv_wc *ring;
    atomic_int armed;
};

struct nn_recv {
    uint64_t wr_id;
    int sges;
    struct ibv_sge sge[NN_SGES];
};

/* Receives of one queue pair, or shared by several. */
struct nn_rq {
    atomic_flag lock;
    uint32_t head, tail, mask;
    struct nn_recv *ring;
};

struct nn_srq {
    struct ibv_srq srq; /* first */
    struct nn_rq rq;
};

struct nn_qp {
    struct ibv_qp qp; /* first */
    struct nn_cq *send_cq, *recv_cq;
    struct nn_rq *rq, own;
    uint32_t peer;
    bool all_signalled, broken;
    struct ibv_qp_init_attr init;
};

struct nn_channel {
    struct ibv_comp_channel channel; /* first; its fd is the end to read from */
    int write_fd;
};

extern struct nn_counters *nn_counters; /* NULL: nobody asked for them */

static inline void nn_lock(atomic_flag *flag) {
    while (atomic_flag_test_and_set_explicit(flag, memory_order_acquire)) {
    }
}

static inline void nn_unlock(atomic_flag *flag) {
    atomic_flag_clear_explicit(flag, memory_order_release);
}

/* The smallest power of two that is not below n, and not below 16. */
static inline uint32_t nn_room(uint32_t n) {
    uint32_t room = 16;
    while (room < n) room <<= 1;
    return room;
}

void nn_rq_make(struct nn_rq *rq, uint32_t entries);
struct nn_qp *nn_qp_find(uint32_t number);
void nn_flush(struct nn_qp *q);

int nn_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int nn_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int nn_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int nn_poll_cq(struct ibv_cq *cq, int entries, struct ibv_wc *wc);
int nn_req_notify_cq(struct ibv_cq *cq, int solicited_only);

#endif
