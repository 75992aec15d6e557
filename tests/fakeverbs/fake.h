/* The fake libibverbs: types and functions that its files share. README.md tells what it is.
 *
 * Locks, taken in this order: `fv.lock` (everything), a QP's `sq_lock` (its send ring), a CQ's
 * `lock` (its ring). A poll takes the CQ's only, the null mode's post the last two only.
 */
#ifndef FAKEVERBS_FAKE_H
#define FAKEVERBS_FAKE_H

#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* helgrind does not know C11's atomics: such fields, and DMA, are taken from its sight. */
#if defined(__has_include) && __has_include(<valgrind/helgrind.h>)
#include <valgrind/helgrind.h>
#define FV_UNTRACKED(at, len) VALGRIND_HG_DISABLE_CHECKING((void *)(uintptr_t)(at), (len))
#else
#define FV_UNTRACKED(at, len) ((void)(at), (void)(len))
#endif

#define FV_EXPORT __attribute__((visibility("default")))
#define FV_MAX_DEV 16
#define FV_MAX_PORT 2
#define FV_MAX_GID 256
#define FV_MAX_SGE 64
#define FV_MAX_INLINE 1024
/* Payload of one packet between QPs; a message of more bytes goes in several. */
#define FV_CHUNK 65536u
#define FV_NEVER UINT64_MAX
#define FV_MR_BUCKETS 1024
#define FV_MAGIC 0x6b766662u

typedef _Atomic uint64_t fv_knob;

/* Calls that are counted and can be made to fail. */
#define FV_CALLS(X) \
    X(open_device) X(close_device) X(query_device) X(query_port) X(query_gid) X(alloc_pd) \
    X(dealloc_pd) X(alloc_td) X(alloc_parent_domain) X(reg_mr) X(reg_dmabuf_mr) X(dereg_mr) \
    X(create_comp_channel) X(destroy_comp_channel) X(create_cq) X(destroy_cq) X(req_notify_cq) \
    X(create_qp) X(destroy_qp) X(query_qp) X(modify_qp) X(modify_reset) X(modify_init) \
    X(modify_rtr) X(modify_rts) X(modify_err) X(post_send) X(post_recv)
#define X(name) FV_CALL_##name,
enum fv_call { FV_CALLS(X) FV_CALL_COUNT };
#undef X

#define FV_KINDS(X) X(ctx) X(pd) X(td) X(mr) X(channel) X(cq) X(qp)
#define X(name) FV_KIND_##name,
enum fv_kind { FV_KINDS(X) FV_KIND_COUNT };
#undef X

/* Knobs of a device and of a port: name, value at start. Meanings: README.md. */
#define FV_DEV_KNOBS(X) \
    X(ports, 1) X(node_type, IBV_NODE_CA) X(numa_node, 0) X(page_size, 4096) \
    X(max_mr_size, UINT64_C(1) << 40) X(max_mr, 1 << 20) X(max_qp, 4096) X(max_qp_wr, 4096) \
    X(max_sge, 16) X(max_sge_rd, 16) X(max_inline, 64) X(max_cq, 65536) X(max_cqe, 1 << 20) \
    X(max_pd, 65536) X(max_qp_rd_atom, 16) X(max_qp_init_rd_atom, 16) X(num_comp_vectors, 4) \
    X(thread_domain, 1) X(dmabuf, 1) X(dmabuf_align, 1) X(mr_access_mask, UINT32_MAX) \
    X(memlock, 0) X(delay_us, 0) X(delay_max_us, 0) X(reorder, 0) X(hold, 0) X(blackhole, 0) \
    X(late_writes, 0) X(late_reads, 0) X(hole_loop, 0) X(bandwidth, 0) X(drop, 0) \
    X(quiet_events, 0) X(wc_garbage, 0) X(wc_lose, 0) X(routed, 0) X(hold_destroy, 0) \
    X(reg_us, 0) X(wr_null, 0)
#define FV_PORT_KNOBS(X) \
    X(state, IBV_PORT_ACTIVE) X(link_layer, IBV_LINK_LAYER_ETHERNET) X(active_mtu, 4096) \
    X(max_mtu, 4096) X(max_msg_sz, UINT64_C(1) << 30) X(gid_tbl_len, 16) X(speed, 100000) \
    X(prefix, 24) X(netdev_mtu, 4200) X(operstate, 1) X(ifindex, 0)

struct fv_gid {
    union ibv_gid gid;
    uint32_t type; /* enum ibv_gid_type */
    bool used;
};

#define X(name, value) fv_knob name;
struct fv_port {
    FV_PORT_KNOBS(X)
    char netdev[16];
    struct fv_gid gids[FV_MAX_GID];
};

/* The n-th call from when the rule was set fails. */
struct fv_rule {
    uint64_t nth; /* 0: none */
    uint64_t seen;
    uint64_t item; /* post_send, post_recv: the item of the list that is refused */
    int err;
    bool onward; /* and all later ones */
};

struct fv_force {
    enum ibv_wc_status status;
    uint64_t match;
    bool by_id, on;
};

struct fv_dev {
    struct ibv_device ibdev; /* first: the caller's pointer */
    int index;
    FV_DEV_KNOBS(X)
    struct fv_port port[FV_MAX_PORT];
    struct fv_rule rule[FV_CALL_COUNT];
    struct fv_force force;
    union ibv_gid blocked[8];
    uint32_t n_blocked;
    _Atomic uint64_t calls[FV_CALL_COUNT];
    _Atomic int64_t live[FV_KIND_COUNT];
    uint64_t busy_until; /* of the link, for the bandwidth */
    const struct fv_qp *last; /* who had the link last; only compared */
    uint64_t pinned;     /* bytes registered */
    struct fv_wet *wet_first, *wet_last;
    bool fatal;
};
#undef X

struct fv_ctx {
    struct fv_dev *dev;
    struct fv_ctx *next;
    struct fv_async *async_first, *async_last;
    uint32_t objects; /* that hang on it directly */
    struct verbs_context v; /* last: the caller has a pointer to its last member */
};

struct fv_pd {
    struct ibv_pd pd;
    struct fv_pd *parent; /* of a parent domain */
    struct fv_td *td;
    _Atomic uint32_t users;
};

struct fv_td {
    struct ibv_td td;
    uint32_t users;
};

struct fv_mr {
    struct ibv_mr mr;
    struct fv_pd *pd; /* never a parent domain */
    struct fv_mr *next;
    uint64_t iova;
    uint8_t *base; /* where iova lies in this process */
    unsigned access;
    void *map; /* of a dma-buf */
    size_t map_len;
};

struct fv_channel {
    struct ibv_comp_channel ch;
    struct fv_cq *first, *last; /* CQs with an event not taken */
};

/* A completion, and the work request whose ring entry it gives back when polled. */
struct fv_cqe {
    struct ibv_wc wc;
    struct fv_qp *qp;
    uint64_t retires; /* send ring index + 1; 0: a receive */
};

struct fv_cq {
    struct ibv_cq cq;
    struct fv_dev *dev;
    pthread_spinlock_t lock;
    struct fv_cqe *ring;
    _Atomic uint64_t head, tail;
    uint32_t cap, mask;
    int armed; /* 0 no, 1 any, 2 solicited or error */
    bool overrun;
    uint32_t users;
    /* Under fv.lock: */
    struct fv_cq *ev_next;
    uint32_t ev_queued, ev_taken, ev_acked, async_taken, async_acked;
    bool in_channel;
};

struct fv_send {
    uint64_t wr_id;
    enum ibv_wr_opcode opcode;
    unsigned flags;
    uint32_t imm, rkey, n_sge, inline_len;
    uint64_t raddr;
    struct ibv_sge *sge; /* max_send_sge of them */
    uint8_t *inline_data;
};

struct fv_recv {
    uint64_t wr_id;
    uint32_t n_sge;
    struct ibv_sge *sge;
};

/* A completion that waits for its time. */
struct fv_pend {
    struct fv_pend *next;
    struct fv_cqe e;
    struct fv_cq *cq;
    uint64_t due;
    bool solicited;
};

/* Bytes of a READ that was completed, on their way from the NIC to the memory of a device. */
struct fv_wet {
    struct fv_wet *next;
    struct fv_pd *pd;
    uint32_t lkey, len;
    uint64_t addr;
    uint8_t bytes[];
};

/* A write that was acknowledged and not placed. */
struct fv_late {
    struct fv_late *next;
    uint32_t rkey, len;
    uint64_t addr;
    bool foreign;
    uint8_t bytes[];
};

struct fv_qp {
    struct ibv_qp qp;
    struct fv_dev *dev;
    struct fv_pd *pd; /* never a parent domain */
    struct fv_qp *next;
    struct fv_pd *given; /* what the caller named: counted while the QP lives */
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;
    union ibv_gid sgid, dgid;
    _Atomic uint32_t state;
    uint32_t epoch; /* of this number: raised by RESET, so that late answers are known */
    bool null_mode;

    /* Send ring. head: posted; exec: being carried out; tail: polled. */
    pthread_spinlock_t sq_lock;
    struct fv_send *sq;
    struct ibv_sge *sq_sge;
    uint8_t *sq_inline;
    uint32_t sq_mask;
    _Atomic uint64_t sq_head, sq_exec, sq_tail;

    /* Initiator. */
    bool started, waiting; /* the first entry was checked; a packet is out */
    uint64_t off, total;
    uint32_t seq, tries, rnr_tries;
    uint64_t deadline;
    uint8_t answer; /* FV_DROP or FV_RNR came: the deadline is a retry's; 0: nothing yet */
    fv_knob blackhole, force_err;

    /* Responder. */
    struct fv_recv *rq;
    struct ibv_sge *rq_sge;
    uint32_t rq_mask;
    uint64_t rq_head, rq_tail;
    uint32_t rseq;
    bool in_message, recv_taken;
    struct fv_recv cur;
    uint64_t cur_off;
    struct fv_late *late_first, *late_last;

    struct fv_pend *pend_first, *pend_last;
    uint32_t async_taken, async_acked;
};

struct fv_async {
    struct fv_async *next;
    struct ibv_async_event ev;
};

enum fv_packet_kind { FV_REQUEST = 1, FV_ACK, FV_NAK, FV_RNR, FV_DROP };
#define FV_FIRST 1
#define FV_LAST 2
#define FV_IMM 4
#define FV_SOLICITED 8

struct fv_packet {
    uint32_t magic;
    uint8_t kind, op, flags, status;
    uint32_t src_qpn, dst_qpn, epoch, psn, seq;
    union ibv_gid sgid, dgid;
    uint32_t rkey, len, imm, mtu, reads, hop;
    uint64_t raddr, off, total;
    uint32_t payload; /* bytes that follow */
};

/* What goes to another process when its socket has room. */
struct fv_out {
    struct fv_out *next;
    uint32_t slot;
    size_t len;
    struct fv_packet head; /* the payload follows in memory */
};

struct fv_global {
    pthread_mutex_t lock;
    _Atomic int waiters;
    int n_dev;
    bool null_mode;
    struct fv_dev dev[FV_MAX_DEV];
    struct fv_ctx *ctxs;
    struct fv_qp *qps;
    struct fv_mr *mrs[FV_MR_BUCKETS];
    uint32_t next_key, next_qpn;
    uint64_t seed, rng;
    double time_scale;
    uint64_t slow_peer_ms, host;
    int slot, slot_fd, sock, inotify;
    _Atomic int wake;
    char bus[80];
    bool stop;
    _Atomic bool kicked;
    pthread_t thread;
    struct fv_out *out_first, *out_last;
    char log[4096];
    size_t log_len;
    _Atomic uint64_t count[40];
};
extern struct fv_global fv;

/* Counters that belong to no device. */
#define FV_COUNTS(X) \
    X(order_violations) X(busy_events) X(wc_total) X(wc_error) X(wc_lost) X(bytes_read) \
    X(bytes_written) X(bytes_sent) X(wr_read) X(wr_write) X(wr_send) X(packets) X(dropped) \
    X(retries) X(rnr) X(cq_overruns) X(events_queued) X(events_quiet) X(after_fatal) \
    X(mr_access_or) X(mr_relaxed) X(late_staged) X(late_placed) X(wet_staged) X(wet_placed) \
    X(wr_loop) X(loop_qpn) X(sq_full) X(inline_wr) X(refused_modify) X(mr_longest) \
    X(reg_inside) X(reg_most)
#define X(name) FV_COUNT_##name,
enum fv_count { FV_COUNTS(X) FV_COUNT_COUNT };
#undef X
#define FV_COUNT(name) atomic_fetch_add_explicit(&fv.count[FV_COUNT_##name], 1, \
                                                 memory_order_relaxed)
#define FV_COUNT_BY(name, n) atomic_fetch_add_explicit(&fv.count[FV_COUNT_##name], n, \
                                                       memory_order_relaxed)

/* config.c, gids.c */
int fv_load(void);
int fv_assign(const char *assignments);
int fv_get(const char *name, uint64_t *value);
int fv_errno_of(const char *text, int *err);
void fv_default_gids(struct fv_dev *d, uint32_t port);
int fv_gid_assign(struct fv_port *p, uint32_t index, const char *text);
bool fv_gid_parse(const char *text, union ibv_gid *gid);
enum ibv_mtu fv_mtu(uint64_t bytes);

/* fault.c */
int fv_rule_assign(struct fv_rule *r, const char *text);
int fv_force_assign(struct fv_force *f, const char *text);
int fv_event_assign(struct fv_dev *d, const char *text);
bool fv_fails(struct fv_dev *d, enum fv_call call);
bool fv_fails_quietly(struct fv_dev *d, enum fv_call call, int *err);
int64_t fv_item_refused(struct fv_dev *d, enum fv_call call, int *err);
bool fv_forced(struct fv_dev *d, const struct fv_send *s, enum ibv_wc_status *status);
uint64_t fv_random(void);
void fv_log_destroy(const char *what);

/* device.c */
struct fv_ctx *fv_ctx_of(struct ibv_context *c);
void fv_lock(void);
void fv_unlock(void);
uint64_t fv_now(void);

/* event.c */
void fv_event(struct fv_dev *d, enum ibv_event_type type, int port, struct fv_qp *qp,
              struct fv_cq *cq);
void fv_event_forget(struct fv_ctx *c, const void *element);
void fv_port_changed(struct fv_dev *d, uint32_t port, uint64_t before);
void fv_device_fatal(struct fv_dev *d);

/* cq.c */
int fv_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc);
int fv_req_notify_cq(struct ibv_cq *cq, int solicited);
#define FV_CQ_FIRE 1    /* its channel is to be told */
#define FV_CQ_OVERRUN 2 /* it overran just now */
unsigned fv_cq_push(struct fv_cq *cq, const struct fv_cqe *e, bool solicited);
unsigned fv_cq_put(struct fv_cq *cq, const struct fv_cqe *e, bool solicited);
void fv_cq_after(struct fv_cq *cq, unsigned what);
void fv_cq_forget(struct fv_cq *cq, const struct fv_qp *qp);

/* object.c */
struct fv_mr *fv_find_mr(struct fv_pd *pd, uint32_t key);
uint8_t *fv_reach(struct fv_pd *pd, uint32_t key, uint64_t addr, uint64_t len, unsigned access);
struct ibv_td *fv_alloc_td(struct ibv_context *c, struct ibv_td_init_attr *a);
int fv_dealloc_td(struct ibv_td *td);
struct ibv_pd *fv_alloc_parent_domain(struct ibv_context *c,
                                      struct ibv_parent_domain_init_attr *a);

/* qp.c */
struct fv_qp *fv_find_qp(uint32_t qpn);
void fv_qp_error(struct fv_qp *qp);
void fv_qp_clear(struct fv_qp *qp);

/* post.c */
int fv_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int fv_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

/* complete.c */
void fv_complete_send(struct fv_qp *qp, enum ibv_wc_status status);
void fv_complete_recv(struct fv_qp *qp, uint64_t wr_id, enum ibv_wc_status status,
                      const struct fv_packet *p);
void fv_flush(struct fv_qp *qp);
uint64_t fv_release_pending(struct fv_qp *qp, uint64_t now);
void fv_drop_pending(struct fv_qp *qp);

/* copy.c */
void fv_copy(void *to, const void *from, size_t n, bool foreign);

/* initiator.c, responder.c */
uint64_t fv_step(struct fv_qp *qp, uint64_t now);
void fv_answer(const struct fv_packet *p, const uint8_t *payload);
void fv_respond(struct fv_packet *p, const uint8_t *payload, struct fv_packet *reply,
                uint8_t *out);
void fv_place_late(struct fv_qp *qp);
bool fv_loops(const struct fv_qp *qp);
bool fv_wet(struct fv_dev *d, struct fv_pd *pd, uint32_t lkey, uint64_t addr,
            const uint8_t *bytes, uint64_t len);
void fv_dry(struct fv_dev *d, const struct fv_mr *m);
uint64_t fv_scaled_us(double us);

/* engine.c, bus.c */
int fv_start(void);
void fv_stop(void);
void fv_kick(void);
int fv_bus_open(void);
void fv_bus_close(void);
bool fv_bus_send(uint32_t slot, const struct fv_packet *p, const uint8_t *payload);
bool fv_bus_flush(void);
void fv_bus_receive(void);
void fv_bus_control(void);

#endif
