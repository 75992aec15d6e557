/* Does the real libibverbs with Soft-RoCE do what kvrail builds on? Two devices, one process.
 * usage: verbs-check DEVICE-A DEVICE-B */
#include "rail.h"

enum { MIB = 1 << 20, BYTES = 8 * MIB, READS = 32, EACH = 32768, WAIT_S = 20 };
static int failures;

static void verdict(int good, const char *what) {
    printf("lab: %s - %s\n", good ? "ok" : "FAIL", what);
    fflush(stdout);
    failures += !good;
}

static void fill(unsigned char *at, size_t n, unsigned salt) {
    for (size_t i = 0; i < n; i++) at[i] = (unsigned char)(i * 7 + (i >> 8) * 13 + salt);
}

static int all_are(const unsigned char *at, size_t n, unsigned char value) {
    for (size_t i = 0; i < n; i++)
        if (at[i] != value) return 0;
    return 1;
}

/* The next completion is this one, in this state. */
static int completes(struct side *s, uint64_t id, enum ibv_wc_status want, struct ibv_wc *wc) {
    if (!next_completion(s, wc, WAIT_S)) {
        printf("    no completion of %lu in %d s\n", (unsigned long)id, WAIT_S);
        return 0;
    }
    if (wc->wr_id == id && wc->status == want) return 1;
    printf("    completion %lu is %s, wanted %lu to be %s\n", (unsigned long)wc->wr_id,
           ibv_wc_status_str(wc->status), (unsigned long)id, ibv_wc_status_str(want));
    return 0;
}

static int done(struct side *s, uint64_t id) {
    struct ibv_wc wc;
    return completes(s, id, IBV_WC_SUCCESS, &wc);
}

static void receive(struct side *s, uint64_t id, size_t at, uint32_t length) {
    struct ibv_sge sge = {(uintptr_t)s->memory + at, length, s->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1}, *bad = NULL;
    MUST(ibv_post_recv(s->qp, &wr, &bad) == 0);
}

static int in_state(struct side *s, enum ibv_qp_state want) {
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    MUST(ibv_query_qp(s->qp, &attr, IBV_QP_STATE, &init) == 0);
    if (attr.qp_state != want) printf("    a queue pair is in state %d\n", attr.qp_state);
    return attr.qp_state == want;
}

static void print_limits(const struct side *s) {
    const struct ibv_device_attr *l = &s->limits;
    printf("limits: max_qp_wr=%d max_sge=%d max_sge_rd=%d max_cqe=%d max_qp=%d max_mr=%d\n",
           l->max_qp_wr, l->max_sge, l->max_sge_rd, l->max_cqe, l->max_qp, l->max_mr);
    printf("limits: max_qp_rd_atom=%d max_qp_init_rd_atom=%d max_mr_size=%#llx max_msg_sz=%#x\n",
           l->max_qp_rd_atom, l->max_qp_init_rd_atom, (unsigned long long)l->max_mr_size,
           s->port.max_msg_sz);
    printf("limits: active_mtu=%d (enum) gid index %d\n", s->port.active_mtu, s->gid_index);
    verdict(l->max_qp_rd_atom >= 1 && l->max_qp_wr >= WR_DEPTH && l->max_cqe >= CQ_DEPTH &&
                s->port.max_msg_sz >= MIB,
            "limits are those that the checks below need");
}

static void two_sided(struct side *a, struct side *b) {
    struct ibv_wc wc;
    fill(a->memory, MIB, 1);
    memset(b->memory, 0, BYTES);
    receive(b, 100, 4 * MIB, MIB);
    MUST(post(a, b, (struct op){.code = IBV_WR_SEND, .id = 1, .length = 65536}) == 0);
    int good = done(a, 1) && completes(b, 100, IBV_WC_SUCCESS, &wc) && wc.byte_len == 65536;
    good = good && memcmp(a->memory, b->memory + 4 * MIB, 65536) == 0;
    verdict(good && all_are(b->memory + 4 * MIB + 65536, MIB, 0), "SEND of 64 KiB");

    static const uint32_t sizes[] = {100000, 0};
    for (int i = 0; i < 2; i++) {
        uint32_t n = sizes[i];
        memset(b->memory, 0, BYTES);
        receive(b, 101, 4 * MIB, 4096);
        MUST(post(a, b, (struct op){.code = IBV_WR_RDMA_WRITE_WITH_IMM, .id = 2, .to = MIB,
                                    .length = n, .imm = 0xabcd1234}) == 0);
        good = done(a, 2) && completes(b, 101, IBV_WC_SUCCESS, &wc);
        good = good && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && ntohl(wc.imm_data) == 0xabcd1234;
        good = good && wc.byte_len == n && memcmp(a->memory, b->memory + MIB, n) == 0;
        verdict(good && all_are(b->memory + MIB + n, BYTES - MIB - n, 0),
                n ? "WRITE_WITH_IMM of 100000 bytes" : "WRITE_WITH_IMM of nothing");
    }
}

static void one_sided(struct side *a, struct side *b) {
    fill(a->memory, MIB, 2);
    memset(b->memory, 0x5a, BYTES);
    MUST(post(a, b, (struct op){.code = IBV_WR_RDMA_WRITE, .id = 3, .to = MIB, .length = MIB}) ==
         0);
    int good = done(a, 3) && memcmp(a->memory, b->memory + MIB, MIB) == 0;
    good = good && all_are(b->memory, MIB, 0x5a) && all_are(b->memory + 2 * MIB, MIB, 0x5a);
    verdict(good, "WRITE of 1 MiB, nothing beside it touched");

    fill(b->memory + 3 * MIB, MIB, 3);
    memset(a->memory + MIB, 0x5a, 3 * MIB);
    MUST(post(a, b, (struct op){.code = IBV_WR_RDMA_READ, .id = 4, .from = 2 * MIB, .to = 3 * MIB,
                                .length = MIB}) == 0);
    good = done(a, 4) && memcmp(a->memory + 2 * MIB, b->memory + 3 * MIB, MIB) == 0;
    good = good && all_are(a->memory + MIB, MIB, 0x5a) && all_are(a->memory + 3 * MIB, MIB, 0x5a);
    verdict(good, "READ of 1 MiB, nothing beside it touched");

    /* Inline: the bytes are taken inside post, so they may change at once. */
    fill(a->memory, INLINE, 4);
    memset(b->memory, 0, 4096);
    MUST(post(a, b, (struct op){.code = IBV_WR_RDMA_WRITE, .id = 5, .length = INLINE,
                                .flags = IBV_SEND_INLINE}) == 0);
    memset(a->memory, 0xee, INLINE);
    good = done(a, 5);
    fill(a->memory, INLINE, 4);
    verdict(good && memcmp(a->memory, b->memory, INLINE) == 0, "inline WRITE of 64 bytes");
}

static void many_reads(struct side *a, struct side *b) {
    int good = 1;
    fill(b->memory, (size_t)READS * EACH, 5);
    memset(a->memory, 0, (size_t)READS * EACH);
    for (size_t i = 0; i < READS; i++) /* to the places in reverse order */
        MUST(post(a, b, (struct op){.code = IBV_WR_RDMA_READ, .id = 1000 + i, .from = i * EACH,
                                    .to = (READS - 1 - i) * EACH, .length = EACH}) == 0);
    for (uint64_t i = 0; i < READS; i++) good = good && done(a, 1000 + i);
    for (size_t i = 0; i < READS; i++)
        good = good && memcmp(a->memory + i * EACH, b->memory + (READS - 1 - i) * EACH, EACH) == 0;
    verdict(good, "32 READs in flight, completed in order");
}

/* A remote access error ends both queue pairs, so each of these has a new pair. */
static void refused(struct side *a, struct side *b, struct op op, const char *what) {
    struct ibv_wc wc;
    connect_pair(a, b, 16);
    fill(a->memory, 4096, 6);
    memset(b->memory, 0x5a, BYTES);
    op.id = 9;
    op.length = 64;
    MUST(post(a, b, op) == 0);
    int good = completes(a, 9, IBV_WC_REM_ACCESS_ERR, &wc);
    fill(b->memory + 4096, 4096, 6);
    good = good && memcmp(a->memory, b->memory + 4096, 4096) == 0;
    good = good && all_are(b->memory, 4096, 0x5a) && all_are(b->memory + 8192, BYTES - 8192, 0x5a);
    verdict(good && in_state(a, IBV_QPS_ERR) && in_state(b, IBV_QPS_ERR), what);
}

int main(int argc, char **argv) {
    struct side a, b;
    if (argc != 3) {
        fprintf(stderr, "usage: verbs-check DEVICE-A DEVICE-B\n");
        return 2;
    }
    side_open(&a, argv[1], BYTES);
    side_open(&b, argv[2], BYTES);
    print_limits(&a);
    connect_pair(&a, &b, 16);
    two_sided(&a, &b);
    one_sided(&a, &b);
    many_reads(&a, &b);
    uint32_t wrong = b.mr->rkey ^ 0x55;
    refused(&a, &b, (struct op){.code = IBV_WR_RDMA_WRITE, .rkey = wrong},
            "WRITE with a wrong rkey: remote access error, nothing written");
    refused(&a, &b, (struct op){.code = IBV_WR_RDMA_READ, .rkey = wrong},
            "READ with a wrong rkey: remote access error, nothing read");
    refused(&a, &b, (struct op){.code = IBV_WR_RDMA_WRITE, .to = BYTES - 32},
            "WRITE past the end of the region: remote access error, nothing written");
    return failures ? 1 : 0;
}
