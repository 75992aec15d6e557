/* CUDA memory through the engine: two engines over the fake NICs, memory of the fake driver behind
 * both, every byte compared; what a refusal says, and that nothing is left behind.
 * usage: engine    with KVRAIL_LIBCUDA and KVRAIL_IBVERBS of the fakes, four NICs, the last two of
 *                  which play another host, and KVRAIL_SYSROOT of their tree
 */
#include "check.h"

#include <time.h>

enum { BLOCKS = 64, BLOCK = 6000, BYTES = BLOCKS * BLOCK, BLOB = 8192, CYCLES = 300 };

static const kvr_devmem_ops *ops;

static void must(kvr_status status, const char *what) {
    if (status >= 0) return;
    kvr_last_error(text, sizeof text);
    fprintf(stderr, "engine.c: %s: %s (%s)\n", what, text, kvr_strerror(status));
    exit(1);
}

static kvr_engine *make(const char *name, const char *nics) {
    kvr_config cfg;
    kvr_engine *e = NULL;
    must(kvr_config_init(&cfg, sizeof cfg), "defaults");
    must(kvr_config_set(&cfg, "name", name), "name");
    must(kvr_config_set(&cfg, "transport", nics ? "verbs" : "local"), "transport");
    if (nics) must(kvr_config_set(&cfg, "nics", nics), "nics");
    must(kvr_config_set(&cfg, "listen_ip", "127.0.0.1"), "listen_ip");
    must(kvr_config_set(&cfg, "stripe_width", "0"), "stripe_width");
    must(kvr_engine_create(&cfg, &e), "engine");
    return e;
}

static kvr_status add(kvr_engine *e, uint64_t at, uint64_t len, kvr_segment *s) {
    size_t n = 1;
    kvr_status status = kvr_region_register_device(e, ops, at, len, s, &n);
    if (status != KVR_OK) kvr_last_error(text, sizeof text);
    IS(n, status == KVR_OK);
    return status;
}

static void fill(uint64_t at, int side) {
    unsigned char *bytes = cuda_host(at);
    for (size_t i = 0; i < BYTES; i++) bytes[i] = (unsigned char)(side * 101 + i * 7 + (i >> 9));
}

/* Blocks of `at` that hold what `side` filled in. */
static int holds(uint64_t at, int side) {
    unsigned char *bytes = cuda_host(at);
    int whole = 0;
    for (size_t b = 0; b < BLOCKS; b++) {
        size_t i = b * BLOCK;
        while (i < (b + 1) * BLOCK &&
               bytes[i] == (unsigned char)(side * 101 + i * 7 + (i >> 9)))
            i++;
        whole += i == (b + 1) * BLOCK;
    }
    return whole;
}

/* Moves every second block. */
static void move(kvr_engine *e, kvr_peer peer, uint32_t direction, const kvr_segment *near,
                 uint64_t far, kvr_region region) {
    kvr_desc here[BLOCKS / 2], there[BLOCKS / 2];
    for (uint64_t i = 0; i < BLOCKS / 2; i++) {
        here[i] = (kvr_desc){near->addr + 2 * i * BLOCK, BLOCK, 0, near->region};
        there[i] = (kvr_desc){far + 2 * i * BLOCK, BLOCK, 0, region};
    }
    kvr_transfer t = 0;
    must(kvr_transfer_prepare_descs(e, direction, peer, here, BLOCKS / 2, there, BLOCKS / 2, &t),
         "prepare");
    kvr_status status = kvr_transfer_post(e, t, NULL, 0);
    while (status == KVR_IN_PROGRESS) status = kvr_transfer_check(e, t);
    must(status, "transfer");
    must(kvr_transfer_release(e, t), "release");
}

static void bytes_move(void) {
    static unsigned char blob[BLOB];
    kvr_engine *a = make("a", "fake0,fake1"), *b = make("b", "fake2,fake3");
    /* Neither begins at a page: a small allocation shares its pages with another one. */
    cuda_alloc(FAKECUDA_SMALL, 700);
    uint64_t near = cuda_alloc(FAKECUDA_SMALL, BYTES), far = cuda_alloc(FAKECUDA_VMM, 8 << 20);
    far += (2 << 20) - BYTES / 2 - 3; /* over the seam of two pieces */
    IS(near % 4096 != 0, 1);
    kvr_segment here, there;
    must(add(a, near, BYTES, &here), "registering near memory");
    must(add(b, far, BYTES, &there), "registering far memory");
    IS(here.addr, near);
    IS(here.region != 0, 1);

    size_t len = sizeof blob;
    kvr_peer peer = 0;
    kvr_region region = 0;
    must(kvr_engine_metadata(b, blob, &len), "metadata");
    must(kvr_peer_add(a, blob, len, "b", 1, &peer), "peer");
    must(kvr_peer_connect(a, peer, 10000), "connect");
    len = sizeof blob;
    must(kvr_region_metadata(b, there.region, blob, &len), "region metadata");
    must(kvr_region_import(a, peer, blob, len, &region), "import");
    fill(near, 1), fill(far, 2);
    move(a, peer, KVR_READ, &here, far, region);
    IS(holds(near, 2), BLOCKS / 2);
    IS(holds(near, 1), BLOCKS / 2);
    IS(holds(far, 2), BLOCKS);
    fill(near, 3);
    move(a, peer, KVR_WRITE, &here, far, region);
    IS(holds(far, 3), BLOCKS / 2);
    IS(holds(far, 2), BLOCKS / 2);

    /* Registered and ended often: fds stay as many as they are. */
    uint64_t other = cuda_alloc(FAKECUDA_DEVICE, 4 << 20);
    int before = fds();
    for (int i = 0; i < CYCLES; i++) {
        kvr_segment s;
        must(add(a, other + 8191, 1 << 20, &s), "registering again");
        IS(fds(), before + 1);
        must(kvr_region_deregister(a, s.region, 0), "deregister");
        IS(fds(), before);
    }
    IS(cuda_get("contexts"), 0);
    IS(cuda_get("primaries"), 0);
    /* One is ended, one is left to the engine. */
    must(kvr_region_deregister(a, here.region, 0), "deregister");
    IS(fds(), before - 1);
    must(kvr_engine_destroy(a), "destroy");
    must(kvr_engine_destroy(b), "destroy");
}

static void refusals(void) {
    kvr_engine *e = make("r", "fake0,fake1");
    int before = fds();
    kvr_segment s;
    char *plain = malloc(8192);
    IS(add(e, (uint64_t)(uintptr_t)plain, 8192, &s), KVR_ERR_NOT_FOUND);
    SAYS("provider \"cuda\": 8192 bytes at 0x");
    SAYS("no CUDA memory of this process");
    free(plain);
    uint64_t at = cuda_alloc(FAKECUDA_DEVICE, 8192);
    IS(add(e, at, 8193, &s), KVR_ERR_INVALID);
    SAYS("ends 1 bytes behind that; register each allocation by itself");
    /* The longest reason arrives whole. */
    cuda_set("fail.cuMemGetHandleForAddressRange=801");
    IS(add(e, at, 8192, &s), KVR_ERR_UNSUPPORTED);
    SAYS("CUDA_ERROR_NOT_SUPPORTED (801) on device 0 (CUDA 13.0)");
    SAYS("or keep the KV cache in host memory");
    cuda_set("fail.cuMemGetHandleForAddressRange=0");
    must(add(e, at, 8192, &s), "registering after a refusal");
    must(kvr_region_deregister(e, s.region, 0), "deregister");
    IS(fds(), before);
    must(kvr_engine_destroy(e), "destroy");

    /* A NIC that knows no dma-buf: what the driver gave goes back. */
    int (*verbs_set)(const char *knobs) = NULL;
    void *verbs = dlopen(getenv("KVRAIL_IBVERBS"), RTLD_NOW);
    if (verbs == NULL) exit(2);
    *(void **)&verbs_set = symbol(verbs, "fakeverbs_set");
    e = make("r", "fake0,fake1");
    before = fds();
    verbs_set("fake1.dmabuf=0");
    IS(add(e, at, 8192, &s), KVR_ERR_UNSUPPORTED);
    SAYS("fake1");
    verbs_set("fake1.dmabuf=1");
    IS(fds(), before);
    must(kvr_engine_destroy(e), "destroy");
    /* No NIC at all. */
    e = make("l", NULL);
    before = fds();
    IS(add(e, at, 8192, &s), KVR_ERR_UNSUPPORTED);
    IS(fds(), before);
    must(kvr_engine_destroy(e), "destroy");
}

int main(void) {
    open_fake();
    int before = fds();
    must(kvr_devmem_cuda(&ops), "kvr_devmem_cuda");
    bytes_move();
    refusals();
    /* The fake NICs keep one fd of theirs, once. */
    int after = fds();
    bytes_move();
    refusals();
    IS(fds(), after);
    IS(before <= after, 1);
    printf("engine: %d failures\n", failures);
    return failures != 0;
}
