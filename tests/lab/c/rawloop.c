/* The plainest loop there is over one queue pair: what a rail can carry, to compare others with.
 * usage: rawloop DEVICE-A DEVICE-B read|write SIZE DEPTH COUNT [READS]
 *   SIZE bytes an operation, DEPTH in flight, COUNT in all; READS: max_rd_atomic, default the
 *   device's most. Prints one line; seconds are by CLOCK_MONOTONIC, from the first post to the
 *   last completion. Compares the bytes of the last round at the end. */
#include "rail.h"

static size_t number(const char *text, const char *what, size_t most) {
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || end == text || *end || value < 1 || value > most) {
        fprintf(stderr, "rawloop: %s is '%s'; allowed: 1 to %zu\n", what, text, most);
        exit(2);
    }
    return (size_t)value;
}

static double loop(struct side *a, struct side *b, enum ibv_wr_opcode code, uint32_t size,
                   size_t depth, size_t count) {
    size_t posted = 0, completed = 0;
    struct ibv_wc wc[16];
    double begin = seconds();
    while (completed < count) {
        for (; posted < count && posted - completed < depth; posted++) {
            size_t slot = posted % depth * size;
            MUST(post(a, b, (struct op){.code = code, .id = posted, .from = slot, .to = slot,
                                        .length = size}) == 0);
        }
        int n = ibv_poll_cq(a->cq, 16, wc);
        MUST(n >= 0);
        for (int i = 0; i < n; i++) {
            if (wc[i].status != IBV_WC_SUCCESS) {
                printf("lab: FAIL - rawloop: operation %lu: %s\n", (unsigned long)wc[i].wr_id,
                       ibv_wc_status_str(wc[i].status));
                exit(1);
            }
        }
        completed += (size_t)n;
        if (n == 0) sched_yield(); /* Soft-RoCE works in the kernel and needs the processor */
    }
    return seconds() - begin;
}

int main(int argc, char **argv) {
    struct side a, b;
    if (argc < 7 || argc > 8 || (strcmp(argv[3], "read") && strcmp(argv[3], "write"))) {
        fprintf(stderr, "usage: rawloop DEVICE-A DEVICE-B read|write SIZE DEPTH COUNT [READS]\n");
        return 2;
    }
    int is_read = strcmp(argv[3], "read") == 0;
    size_t size = number(argv[4], "SIZE", 64 << 20), depth = number(argv[5], "DEPTH", WR_DEPTH);
    size_t count = number(argv[6], "COUNT", (size_t)1 << 40), bytes = size * depth;
    side_open(&a, argv[1], bytes);
    side_open(&b, argv[2], bytes);
    int reads = most_reads(&a, &b);
    if (argc == 8) reads = (int)number(argv[7], "READS", (size_t)reads);
    connect_pair(&a, &b, reads);
    struct side *source = is_read ? &b : &a, *target = is_read ? &a : &b;
    for (size_t i = 0; i < bytes; i++) source->memory[i] = (unsigned char)(i * 7 + (i >> 8) * 13);
    double took = loop(&a, &b, is_read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, (uint32_t)size,
                       depth, count);
    size_t moved = count < depth ? count * size : bytes;
    if (memcmp(source->memory, target->memory, moved) != 0) {
        printf("lab: FAIL - rawloop: the bytes differ\n");
        return 1;
    }
    printf("rawloop %s size=%zu depth=%zu count=%zu bytes=%zu seconds=%.6f MB/s=%.1f\n", argv[3],
           size, depth, count, size * count, took, (double)(size * count) / took / 1e6);
    return 0;
}
