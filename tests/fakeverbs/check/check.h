/* What the checks of the fake libibverbs share: a small harness, and pairs of connected QPs. */
#ifndef FAKEVERBS_CHECK_H
#define FAKEVERBS_CHECK_H

#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int fakeverbs_set(const char *assignments);
int fakeverbs_get(const char *counter, uint64_t *value);
size_t fakeverbs_log(char *buf, size_t size);

/* Says what was false and goes on; the check has failed. */
void complain(const char *file, int line, const char *what, long long got, long long want);
#define EQ(got, want) \
    do { \
        long long got_ = (long long)(got), want_ = (long long)(want); \
        if (got_ != want_) complain(__FILE__, __LINE__, #got, got_, want_); \
    } while (0)
#define TRUE(x) EQ(!!(x), 1)
/* For what the rest of a check cannot do without. */
#define MUST(x) \
    do { \
        if (!(x)) { \
            complain(__FILE__, __LINE__, #x, 0, 1); \
            exit(1); \
        } \
    } while (0)
#define SET(text) MUST(fakeverbs_set(text) == 0)
#define FAILS(call, error) (errno = 0, (call) == NULL && errno == (error))

struct check {
    const char *name;
    void (*run)(void);
    const char *env; /* NAME=VALUE parted by blanks, or NULL */
};
extern const struct check STATE_CHECKS[], DATA_CHECKS[], FAULT_CHECKS[], EVENT_CHECKS[],
    PROCESS_CHECKS[], CALL_CHECKS[], NULL_CHECKS[];

struct side {
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_comp_channel *ch;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    uint8_t *buf;
};

/* How sides are made; a check changes it before it makes them. */
struct params {
    uint32_t send_wr, recv_wr, sge, inline_data, cqe, access, qp_access, sig_all;
    uint8_t rd, dest_rd, timeout, retry, rnr_retry, rnr_timer, hop;
    enum ibv_mtu mtu;
    size_t bytes;
};
extern struct params P;

/* What one side tells the other. */
struct hello {
    uint32_t qpn, psn, rkey;
    union ibv_gid gid;
    uint64_t addr;
};

struct ibv_context *open_dev(int index);
void make_side(struct side *s, int dev);
struct ibv_qp *make_qp(struct side *s, struct ibv_cq *cq);
void end_side(struct side *s);
struct hello hello_of(struct side *s);
int to_init(struct ibv_qp *qp);
int to_rtr(struct ibv_qp *qp, const struct hello *peer);
int to_rts(struct ibv_qp *qp, uint32_t psn);
int to_state(struct ibv_qp *qp, enum ibv_qp_state state);
void join(struct side *s, struct ibv_qp *qp, const struct hello *peer);
void connect_sides(struct side *a, struct side *b);
void make_pair(struct side *a, struct side *b);

/* Offsets are into the sides' buffers. */
struct op {
    enum ibv_wr_opcode op;
    uint64_t id, from, len, to;
    unsigned flags;
    uint32_t lkey, rkey, imm; /* 0: the sides' own */
};
int post(struct side *a, struct ibv_qp *qp, const struct hello *peer, struct op op);
int post_recv(struct side *s, uint64_t id, uint64_t at, uint32_t len);
/* The next completion; a status of -1 when none came within `ms`. */
struct ibv_wc next_wc(struct ibv_cq *cq, int ms);
enum ibv_wc_status status_of(struct ibv_cq *cq, uint64_t *id);
/* Posts one and returns how it ended. */
enum ibv_wc_status one(struct side *a, struct side *b, struct op op);
uint64_t counter(const char *name);
void fill_bytes(uint8_t *at, size_t n, unsigned seed);
bool same_bytes(const uint8_t *at, size_t n, unsigned seed);
bool readable(int fd, int ms);
int worker(int fd);

#endif
