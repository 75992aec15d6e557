/* The reference work through NIXL, over the null NIC: one agent of the wheel writes to or reads
 * from another one in this process, both with backend RBLN. As vLLM does it: the lists are made
 * known once, and each transfer is a request of its own, made of index lists, posted once, asked
 * after until it is done, and released. Each phase is a function of its own, so that callgrind
 * counts it apart.
 *
 * usage: nixl-work write|read DESCS LEN REGIONS THREAD ROUNDS
 *   THREAD   1: the initiator has its progress thread; 0: its own calls make the progress
 * bench.py starts it, with the environment that it needs: NIXL_PLUGIN_DIR, KVRAIL_IBVERBS,
 * KVRAIL_SYSROOT and eight devices, of which fake4 to fake7 are the peer's. Prints the medians of
 * each phase in nanoseconds, and how many work requests there were.
 */
#define _DEFAULT_SOURCE
#include "capi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { PHASES = 4, RAILS = 4 };
static const double hang_s = 300; /* only against hangs */

struct work {
    int op;
    size_t descs, len, regions;
    const char *thread;
    long rounds;
};

/* One agent, its memory and its list of all blocks. */
struct side {
    agent_t agent;
    opts_t opts;
    char *mem;
    xfer_list_t blocks;
};

/* What the phases need. */
struct transfer {
    agent_t agent;
    int op;
    prepped_t local, remote;
    int *here, *there; /* the order of the blocks on both sides */
    size_t descs;
    request_t request;
};

static void must(int status, const char *what) {
    if (status == NIXL_OK || status == NIXL_IN_PROGRESS) return;
    fprintf(stderr, "nixl-work: %s: status %d\n", what, status);
    exit(1);
}

#define NIXL(call) must(nixl_capi_##call, #call)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

__attribute__((noinline)) void phase_prepare(struct transfer *t) {
    NIXL(make_xfer_req(t->agent, t->op, t->local, t->here, t->descs, t->remote, t->there, t->descs,
                       &t->request, NULL));
}

__attribute__((noinline)) int phase_post(struct transfer *t) {
    const int status = nixl_capi_post_xfer_req(t->agent, t->request, NULL);
    must(status, "post_xfer_req");
    return status;
}

__attribute__((noinline)) long phase_poll(struct transfer *t, double end) {
    for (long polls = 1;; polls++) {
        const int status = nixl_capi_get_xfer_status(t->agent, t->request);
        must(status, "get_xfer_status");
        if (status == NIXL_OK) return polls;
        if (polls % 65536 == 0 && now() > end) must(-1, "the transfer hangs");
    }
}

__attribute__((noinline)) void phase_release(struct transfer *t) {
    NIXL(release_xfer_req(t->agent, t->request));
    nixl_capi_destroy_xfer_req(t->request);
}

static void set(params_t params, const char *key, const char *value) {
    NIXL(params_add(params, key, value));
}

static void open_backend(struct side *s, const char *thread, const char *nics) {
    params_t params;
    backend_t backend;
    NIXL(create_params(&params));
    set(params, "transport", "verbs");
    set(params, "nics", nics);
    set(params, "listen_ip", "127.0.0.1");
    set(params, "stripe_width", "0");
    set(params, "progress_thread", thread);
    set(params, "max_peers", "8");
    /* Under valgrind time runs for the clock and not for us. */
    set(params, "connect_timeout_ms", "60000");
    set(params, "rail_timeout_ms", "20000");
    set(params, "peer_timeout_ms", "120000");
    set(params, "keepalive_ms", "0");
    NIXL(create_backend(s->agent, "RBLN", params, &backend));
    NIXL(destroy_params(params));
    NIXL(create_opt_args(&s->opts));
    NIXL(opt_args_add_backend(s->opts, backend));
}

/* Work requests that the null NIC took of the initiator so far. */
static uint64_t work_requests(void) {
    const char *path = getenv("KVRAIL_IBVERBS");
    void *nic = path ? dlopen(path, RTLD_NOW) : NULL;
    int (*get)(const char *, uint64_t *) = NULL;
    if (nic) *(void **)&get = dlsym(nic, "fakeverbs_get");
    uint64_t all = 0;
    for (int i = 0; i < RAILS; i++) {
        char name[32];
        uint64_t value = 0;
        snprintf(name, sizeof name, "fake%d.wr_null", i);
        if (!get || get(name, &value) != 0) must(-1, "KVRAIL_IBVERBS is no null NIC");
        all += value;
    }
    return all;
}

/* An agent with every second block of its memory in a list: no two of them ever merge. */
static struct side open_side(const char *name, const struct work *w, const char *thread,
                             const char *nics) {
    struct side s = {0};
    reg_list_t regions;
    const size_t cells = (w->descs + w->regions - 1) / w->regions, part = cells * 2 * w->len;
    NIXL(create_agent(name, &s.agent));
    open_backend(&s, thread, nics);
    /* The null NIC touches none of it: pages are never made. */
    s.mem = mmap(NULL, part * w->regions, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (s.mem == MAP_FAILED) must(-1, "mmap");
    NIXL(create_reg_dlist(NIXL_DRAM, &regions));
    for (size_t i = 0; i < w->regions; i++)
        NIXL(reg_dlist_add_desc(regions, (uintptr_t)s.mem + i * part, part, 0, "", 0));
    NIXL(register_mem(s.agent, regions, s.opts));
    NIXL(create_xfer_dlist(NIXL_DRAM, &s.blocks));
    for (size_t i = 0; i < w->descs; i++) {
        const size_t at = i / cells * part + i % cells * 2 * w->len;
        NIXL(xfer_dlist_add_desc(s.blocks, (uintptr_t)s.mem + at, w->len, 0));
    }
    return s;
}

static int *order(size_t n, uint64_t x) {
    int *list = malloc(n * sizeof *list);
    if (!list) must(-1, "malloc");
    for (size_t i = 0; i < n; i++) list[i] = (int)i;
    for (size_t i = n; i-- > 1;) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        const size_t j = x % (i + 1);
        const int kept = list[i];
        list[i] = list[j], list[j] = kept;
    }
    return list;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(struct transfer *t, long rounds) {
    double *ns = malloc((size_t)rounds * PHASES * sizeof *ns);
    long polls = 0;
    if (!ns) must(-1, "malloc");
    for (long i = 0; i < rounds; i++) {
        double at[PHASES + 1];
        at[0] = now();
        phase_prepare(t);
        at[1] = now();
        const int posted = phase_post(t);
        at[2] = now();
        if (posted != NIXL_OK) polls += phase_poll(t, at[2] + hang_s * 1e9);
        at[3] = now();
        phase_release(t);
        at[4] = now();
        for (int p = 0; p < PHASES; p++) ns[p * rounds + i] = at[p + 1] - at[p];
    }
    printf("{\"ns\": [");
    for (int p = 0; p < PHASES; p++) {
        qsort(ns + p * rounds, (size_t)rounds, sizeof *ns, by_value);
        printf("%s%.0f", p ? ", " : "", ns[p * rounds + rounds / 2]);
    }
    printf("], \"polls\": %ld, \"work_requests\": %llu}\n", polls,
           (unsigned long long)work_requests());
    free(ns);
}

static size_t number(const char *text, const char *what) {
    char *end;
    const unsigned long long value = strtoull(text, &end, 10);
    if (*end == 0 && value > 0) return (size_t)value;
    fprintf(stderr, "nixl-work: %s is `%s`; it must be a number above 0\n", what, text);
    exit(2);
}

static struct work parsed(int argc, char **argv) {
    if (argc != 7) {
        fprintf(stderr, "usage: nixl-work write|read DESCS LEN REGIONS THREAD ROUNDS\n");
        exit(2);
    }
    return (struct work){
        .op = strcmp(argv[1], "read") == 0 ? NIXL_READ : NIXL_WRITE,
        .descs = number(argv[2], "DESCS"),
        .len = number(argv[3], "LEN"),
        .regions = number(argv[4], "REGIONS"),
        .thread = argv[5],
        .rounds = (long)number(argv[6], "ROUNDS"),
    };
}

int main(int argc, char **argv) {
    const struct work w = parsed(argc, argv);
    struct side a = open_side("a", &w, w.thread, "fake0,fake1,fake2,fake3");
    struct side b = open_side("b", &w, "1", "fake4,fake5,fake6,fake7");
    void *metadata;
    size_t metadata_len;
    char *name;
    NIXL(get_local_md(b.agent, &metadata, &metadata_len));
    NIXL(load_remote_md(a.agent, metadata, metadata_len, &name));
    NIXL(agent_make_connection(a.agent, "b", NULL));
    struct transfer t = {.agent = a.agent, .op = w.op, .descs = w.descs};
    NIXL(prep_xfer_dlist(a.agent, "", a.blocks, &t.local, a.opts));
    NIXL(prep_xfer_dlist(a.agent, "b", b.blocks, &t.remote, a.opts));
    t.here = order(w.descs, 0x9e3779b97f4a7c15);
    t.there = order(w.descs, 0xd1b54a32d192ed03);
    measure(&t, w.rounds);
    NIXL(release_xfer_dlist_handle(a.agent, t.local));
    NIXL(release_xfer_dlist_handle(a.agent, t.remote));
    NIXL(invalidate_remote_md(a.agent, "b"));
    NIXL(destroy_agent(a.agent));
    NIXL(destroy_agent(b.agent));
    return 0;
}
