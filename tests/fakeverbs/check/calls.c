/* Devices, limits, registration, and the order in which things go. */
#include "check.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

extern const char *program;
static uint8_t page[8192] __attribute__((aligned(4096)));

static void devices(void) {
    int n;
    struct ibv_device **list = ibv_get_device_list(&n);
    EQ(n, 3);
    TRUE(list[3] == NULL);
    EQ(strcmp(ibv_get_device_name(list[2]), "fake2"), 0);
    EQ(ibv_get_device_index(list[2]), 3);
    TRUE(ibv_get_device_guid(list[0]) != ibv_get_device_guid(list[1]));
    EQ(strcmp(list[1]->ibdev_path, "/r/sys/class/infiniband/fake1"), 0);
    EQ(list[0]->node_type, IBV_NODE_CA);
    ibv_free_device_list(list);
}

/* Versions as rdma-core names them: those that a loader asks for. */
static void versions(void) {
    static const char *const WANTED[][2] = {
        {"ibv_get_device_list", "IBVERBS_1.1"},     {"ibv_open_device", "IBVERBS_1.1"},
        {"ibv_create_comp_channel", "IBVERBS_1.0"}, {"ibv_query_port", "IBVERBS_1.1"},
        {"ibv_get_device_guid", "IBVERBS_1.1"},     {"ibv_reg_mr_iova", "IBVERBS_1.7"},
        {"ibv_reg_mr_iova2", "IBVERBS_1.8"},        {"ibv_get_device_index", "IBVERBS_1.9"},
        {"_ibv_query_gid_ex", "IBVERBS_1.11"},      {"ibv_reg_dmabuf_mr", "IBVERBS_1.12"},
        {"ibv_get_pkey_index", "IBVERBS_1.5"},      {"ibv_get_cq_event", "IBVERBS_1.1"}};
    void *lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);
    MUST(lib != NULL);
    for (size_t i = 0; i < sizeof WANTED / sizeof WANTED[0]; i++)
        if (dlvsym(lib, WANTED[i][0], WANTED[i][1]) == NULL)
            complain(WANTED[i][0], 0, WANTED[i][1], 0, 1);
    TRUE(dlvsym(lib, "ibv_open_device", "IBVERBS_1.0") == NULL);
    TRUE(dlsym(lib, "fakeverbs_set") != NULL);
    TRUE(dlsym(lib, "fv_lock") == NULL);
}

static void limits(void) {
    struct ibv_context *c = open_dev(0);
    struct ibv_device_attr a;
    struct ibv_device_attr_ex ex;
    EQ(ibv_query_device(c, &a), 0);
    EQ(a.max_qp_wr, 33);
    EQ(a.max_sge, 3);
    EQ(a.max_mr_size, 1 << 21);
    EQ(a.max_cqe, 77);
    EQ(a.phys_port_cnt, 2);
    EQ(a.max_qp_rd_atom, 5);
    EQ(ibv_query_device_ex(c, NULL, &ex), 0);
    EQ(ex.orig_attr.max_qp, 2);
    EQ(c->num_comp_vectors, 2);
    struct ibv_port_attr p;
    EQ(ibv_query_port(c, 2, &p), 0);
    EQ(p.active_mtu, IBV_MTU_1024);
    EQ(p.max_msg_sz, 4096);
    EQ(p.link_layer, IBV_LINK_LAYER_INFINIBAND);
    EQ(p.gid_tbl_len, 4);
    EQ(ibv_query_port(c, 3, &p), EINVAL);
    EQ(ibv_query_port(c, 0, &p), EINVAL);
    /* The old entry, by name: what came later is not written. */
    int (*old)(struct ibv_context *, uint8_t, struct ibv_port_attr *) =
        (int (*)(struct ibv_context *, uint8_t, struct ibv_port_attr *))dlsym(RTLD_DEFAULT,
                                                                              "ibv_query_port");
    memset(&p, 0x5a, sizeof p);
    EQ(old(c, 1, &p), 0);
    EQ(p.link_layer, IBV_LINK_LAYER_ETHERNET);
    EQ(p.flags, 0x5a);
    union ibv_gid gid;
    EQ(ibv_query_gid(c, 1, 16, &gid), -1);
    EQ(ibv_query_gid(c, 1, 1, &gid), 0);
    EQ(gid.raw[12] == 10 && gid.raw[13] == 1 && gid.raw[14] == 0 && gid.raw[15] == 1, 1);
    struct ibv_gid_entry e, all[8];
    EQ(ibv_query_gid_ex(c, 1, 1, &e, 0), 0);
    EQ(e.gid_type, IBV_GID_TYPE_ROCE_V2);
    EQ(e.ndev_ifindex, 10);
    EQ(e.port_num, 1);
    EQ(ibv_query_gid_ex(c, 1, 2, &e, 0), ENODATA);
    EQ(ibv_query_gid_ex(c, 1, 16, &e, 0), EINVAL);
    EQ(ibv_query_gid_table(c, all, 8, 0), 4);
    EQ(all[3].port_num, 2);
    EQ(ibv_close_device(c), 0);
}

static void queue_limits(void) {
    struct side s;
    P.send_wr = 33;
    P.sge = 3;
    P.cqe = 77;
    make_side(&s, 0);
    struct params good = P;
    P.send_wr = 34;
    TRUE(FAILS(make_qp(&s, s.cq), EINVAL));
    P = good;
    P.recv_wr = 34;
    TRUE(FAILS(make_qp(&s, s.cq), EINVAL));
    P = good;
    P.sge = 4;
    TRUE(FAILS(make_qp(&s, s.cq), EINVAL));
    P = good;
    P.inline_data = 65;
    TRUE(FAILS(make_qp(&s, s.cq), EINVAL));
    P = good;
    struct ibv_qp *qp = make_qp(&s, s.cq);
    TRUE(qp != NULL);
    TRUE(FAILS(make_qp(&s, s.cq), ENOMEM));
    EQ(ibv_destroy_qp(qp), 0);
    TRUE(FAILS(ibv_create_cq(s.ctx, 78, NULL, NULL, 0), EINVAL));
    TRUE(FAILS(ibv_create_cq(s.ctx, 0, NULL, NULL, 0), EINVAL));
    TRUE(FAILS(ibv_create_cq(s.ctx, 1, NULL, NULL, 2), EINVAL));
    struct ibv_qp_init_attr ud = {
        .send_cq = s.cq, .recv_cq = s.cq, .qp_type = IBV_QPT_UD, .cap = {1, 1, 1, 1, 0}};
    TRUE(FAILS(ibv_create_qp(s.pd, &ud), EOPNOTSUPP));
    ud.qp_type = IBV_QPT_RC;
    ud.recv_cq = NULL;
    TRUE(FAILS(ibv_create_qp(s.pd, &ud), EINVAL));
    end_side(&s);
}

static void registration(void) {
    struct ibv_context *c = open_dev(0);
    struct ibv_pd *pd = ibv_alloc_pd(c);
    static uint8_t big[(2 << 20) + 1];
    TRUE(FAILS(ibv_reg_mr(pd, page, 0, 1), EINVAL));
    TRUE(FAILS(ibv_reg_mr(pd, big, sizeof big, 1), EINVAL));
    TRUE(FAILS(ibv_reg_mr(pd, page, 64, IBV_ACCESS_REMOTE_WRITE), EINVAL));
    TRUE(FAILS(ibv_reg_mr(pd, page, 64, 1 | IBV_ACCESS_REMOTE_ATOMIC), EINVAL));
    void *hole = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap((char *)hole + 4096, 4096);
    TRUE(FAILS(ibv_reg_mr(pd, hole, 8192, 1), EFAULT));
    struct ibv_mr *m1 = ibv_reg_mr(pd, big, sizeof big - 1, 7);
    struct ibv_mr *m2 = ibv_reg_mr(pd, big, 4096, 7), *m3 = ibv_reg_mr(pd, big, 4096, 7);
    MUST(m1 != NULL && m2 != NULL && m3 != NULL);
    TRUE(m1->lkey != m2->lkey && m2->rkey != m3->rkey);
    EQ(m1->length, 2 << 20);
    TRUE(FAILS(ibv_reg_mr(pd, big, 4096, 7), ENOMEM));
    EQ(counter("live.mr"), 3);
    EQ(counter("mr_access_or") & IBV_ACCESS_RELAXED_ORDERING, 0);
    EQ(ibv_dereg_mr(m1) | ibv_dereg_mr(m2), 0);
    m1 = ibv_reg_mr_iova2(pd, big, 4096, 0, 7);
    TRUE(m1 != NULL);
    EQ(ibv_dereg_mr(m1) | ibv_dereg_mr(m3), 0);
    EQ(ibv_dealloc_pd(pd), 0);
    EQ(ibv_close_device(c), 0);
}

/* The limit is the process's: region x devices. */
static void locked_memory(void) {
    struct rlimit limit = {8192, 8192};
    EQ(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    struct ibv_context *c0 = open_dev(0), *c1 = open_dev(1);
    struct ibv_pd *p0 = ibv_alloc_pd(c0), *p1 = ibv_alloc_pd(c1);
    struct ibv_mr *m = ibv_reg_mr(p0, page, 8192, 1);
    TRUE(m != NULL);
    TRUE(FAILS(ibv_reg_mr(p1, page, 1, 1), ENOMEM));
    EQ(ibv_dereg_mr(m), 0);
    m = ibv_reg_mr(p1, page, 1, 1);
    TRUE(m != NULL);
    EQ(ibv_dereg_mr(m) | ibv_dealloc_pd(p0) | ibv_dealloc_pd(p1), 0);
    EQ(ibv_close_device(c0) | ibv_close_device(c1), 0);
}

/* A memfd as a dma-buf, reached by its iova. */
static void dmabuf(void) {
    struct side a, b;
    make_pair(&a, &b);
    int fd = memfd_create("dmabuf", 0);
    EQ(ftruncate(fd, 65536), 0);
    uint64_t iova = 0x7000001000;
    TRUE(FAILS(ibv_reg_dmabuf_mr(b.pd, 4096, 65536, iova, fd, 7), EINVAL));
    TRUE(FAILS(ibv_reg_dmabuf_mr(b.pd, 4096, 4096, iova + 1, fd, 7), EINVAL));
    TRUE(FAILS(ibv_reg_dmabuf_mr(b.pd, 4096, 4096, iova, -1, 7), EBADF));
    struct ibv_mr *mr = ibv_reg_dmabuf_mr(b.pd, 4096, 8192, iova, fd, 7);
    MUST(mr != NULL);
    struct hello h = hello_of(&b);
    h.addr = iova;
    h.rkey = mr->rkey;
    fill_bytes(a.buf, 8192, 3);
    EQ(post(&a, a.qp, &h, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 8192, .flags = 2}), 0);
    EQ(status_of(a.cq, NULL), 0);
    uint8_t got[8192];
    EQ(pread(fd, got, sizeof got, 4096), sizeof got);
    TRUE(same_bytes(got, sizeof got, 3));
    SET("fake1.dmabuf_align=64K");
    TRUE(FAILS(ibv_reg_dmabuf_mr(b.pd, 4096, 4096, iova, fd, 7), EINVAL));
    SET("fake1.dmabuf=0");
    TRUE(FAILS(ibv_reg_dmabuf_mr(b.pd, 0, 65536, iova - 4096, fd, 7), EOPNOTSUPP));
    EQ(ibv_dereg_mr(mr), 0);
    close(fd);
    end_side(&a);
    end_side(&b);
}

static void thread_domains(void) {
    struct ibv_context *c = open_dev(0), *old = open_dev(1);
    struct ibv_td_init_attr none = {0};
    struct ibv_td *td = ibv_alloc_td(c, &none);
    struct ibv_pd *pd = ibv_alloc_pd(c);
    struct ibv_parent_domain_init_attr attr = {.pd = pd, .td = td};
    MUST(td != NULL && pd != NULL);
    struct ibv_pd *parent = ibv_alloc_parent_domain(c, &attr);
    MUST(parent != NULL);
    EQ(ibv_dealloc_pd(pd), EBUSY);
    EQ(ibv_dealloc_td(td), EBUSY);
    struct ibv_mr *mr = ibv_reg_mr(pd, page, 64, 7);
    EQ(ibv_dealloc_pd(parent), 0);
    EQ(ibv_dealloc_td(td), 0);
    EQ(ibv_dereg_mr(mr), 0);
    EQ(ibv_dealloc_pd(pd), 0);
    TRUE(FAILS(ibv_alloc_td(old, &none), EOPNOTSUPP));
    SET("fake0.fail.alloc_td=1:EIO");
    TRUE(FAILS(ibv_alloc_td(c, &none), EIO));
    EQ(ibv_close_device(c) | ibv_close_device(old), 0);
}

/* What hangs on an object keeps it alive; the log has the order. */
static void destroy_order(void) {
    struct side s;
    char log[256];
    make_side(&s, 0);
    EQ(ibv_dealloc_pd(s.pd), EBUSY);
    EQ(ibv_destroy_cq(s.cq), EBUSY);
    EQ(ibv_destroy_comp_channel(s.ch), EBUSY);
    EQ(ibv_close_device(s.ctx), -1);
    EQ(errno, EBUSY);
    EQ(counter("order_violations"), 4);
    EQ(counter("live.qp") + counter("live.mr") + counter("live.cq"), 3);
    end_side(&s);
    TRUE(fakeverbs_log(log, sizeof log) > 0);
    EQ(strcmp(log, "qp cq channel mr pd ctx "), 0);
    EQ(fakeverbs_log(log, sizeof log), 0);
}

static int count_dir(const char *path) {
    int n = 0;
    DIR *d = opendir(path);
    MUST(d != NULL);
    while (readdir(d) != NULL) n++;
    closedir(d);
    return n;
}

/* Loaded and closed again it holds no thread and no descriptor. */
static void leaves_nothing(void) {
    struct side s;
    int fds = count_dir("/proc/self/fd"), threads = 0;
    for (int i = 0; i < 3; i++) {
        make_side(&s, 0);
        /* The first thread may bring one of a sanitizer's own. */
        if (i == 0) threads = count_dir("/proc/self/task") - 1;
        EQ(count_dir("/proc/self/task"), threads + 1);
        end_side(&s);
        EQ(count_dir("/proc/self/fd"), fds);
        for (int t = 0; t < 100 && count_dir("/proc/self/task") != threads; t++) usleep(10000);
        EQ(count_dir("/proc/self/task"), threads);
    }
}

static void knobs(void) {
    static const char *const WRONG[] = {
        "nonsense", "fake9.max_qp=1", "fake0.max_qpp=1", "fake0.max_qp=x", "fake0.max_qp=-1",
        "fake0.port3.state=down", "fake0.port1.gid1=10.0.0", "fake0.port1.gid1=10.0.0.1,v3",
        "fake0.fail.fly=1", "fake0.fail.reg_mr=0", "fake0.fail.reg_mr=1:EWHAT",
        "fake0.event=RAIN", "fake0.wc_force=id:1:FINE", "fake0.ports=3", "time_scale=-1",
        "fake0.delay_us=5-1", "fake0.event=QP_FATAL:1", "qp5.blackhole=1",
        "fake0.port1.gid_tbl_len=300"};
    uint64_t value;
    EQ(counter("fake0.max_qp_wr"), 12);
    EQ(counter("fake1.max_qp_wr"), 4096);
    EQ(counter("fake1.port1.active_mtu"), 512);
    EQ(counter("fake0.port1.active_mtu"), 4096);
    EQ(counter("fake0.max_mr_size"), 3 << 20);
    for (size_t i = 0; i < sizeof WRONG / sizeof WRONG[0]; i++)
        if (fakeverbs_set(WRONG[i]) == 0) complain(WRONG[i], 0, "was taken", 0, 1);
    EQ(fakeverbs_get("fake0.nothing", &value), ENOENT);
    EQ(fakeverbs_set(" fake0.max_qp = 1"), ENOENT);
    SET(" fake0.max_qp=7 ;; # a comment\n fake1.max_qp=8");
    EQ(counter("fake0.max_qp"), 7);
    EQ(counter("fake1.max_qp"), 8);
}

static void config_file(void) {
    char path[256];
    const char *bus = getenv("FAKEVERBS_BUS");
    snprintf(path, sizeof path, "%s-check.conf", bus != NULL ? bus : "fakeverbs");
    setenv("FAKEVERBS_CONFIG", path, 1);
    FILE *f = fopen(path, "w");
    MUST(f != NULL);
    fputs("# one\nfake0.max_qp_wr=10\n*.max_mr_size=3M\nfake1.port1.active_mtu=512\n", f);
    fclose(f);
    knobs();
    unlink(path);
}

static void is_line(const char *dir, const char *name, const char *want) {
    char path[512], line[256] = "";
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "r");
    if (f == NULL || fgets(line, sizeof line, f) == NULL) line[0] = '\0';
    if (f != NULL) fclose(f);
    line[strcspn(line, "\n")] = '\0';
    if (strcmp(line, want) != 0) {
        fprintf(stderr, "%s: `%s`, not `%s`\n", name, line, want);
        complain(name, 0, "differs", 0, 1);
    }
}

/* The files that fakeverbs-tree writes say what the library says. */
static void tree(void) {
    static const char *const LINES[][2] = {
        {"sys/class/infiniband/fake0/ports/1/state", "4: ACTIVE"},
        {"sys/class/infiniband/fake1/ports/2/state", "1: DOWN"},
        {"sys/class/infiniband/fake1/ports/2/phys_state", "3: Disabled"},
        {"sys/class/infiniband/fake1/ports/1/link_layer", "Ethernet"},
        {"sys/class/infiniband/fake1/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a01:0101"},
        {"sys/class/infiniband/fake1/ports/1/gids/2", "0000:0000:0000:0000:0000:0000:0000:0000"},
        {"sys/class/infiniband/fake1/ports/1/gid_attrs/types/1", "RoCE v2"},
        {"sys/class/infiniband/fake1/ports/1/gid_attrs/types/2", ""},
        {"sys/class/infiniband/fake1/ports/1/gid_attrs/ndevs/1", "fk1"},
        {"sys/class/infiniband/fake1/node_type", "1: CA"},
        {"sys/class/infiniband/fake1/device/numa_node", "0"},
        {"sys/class/net/fk1/ifindex", "12"},
        {"sys/class/net/fk1/device/numa_node", "0"},
        {"sys/class/net/fk1p2/operstate", "down"},
        {"proc/net/kvrail_ipv4", "mgmt0 192.168.0.1/24"},
    };
    char dir[128], command[512], tool[256];
    snprintf(tool, sizeof tool, "%s", program);
    *strrchr(tool, '/') = '\0';
    snprintf(dir, sizeof dir, "%s-tree", getenv("FAKEVERBS_BUS"));
    snprintf(command, sizeof command, "'%s/fakeverbs-tree' '%s'", tool, dir);
    EQ(system(command), 0);
    for (size_t i = 0; i < sizeof LINES / sizeof LINES[0]; i++)
        is_line(dir, LINES[i][0], LINES[i][1]);
    snprintf(command, sizeof command, "grep -qx 'fk1 10.1.1.1/24' '%s/proc/net/kvrail_ipv4' &&"
             " grep -q '^mgmt0.00000000.FE00A8C0' '%s/proc/net/route'", dir, dir);
    EQ(system(command), 0);
    snprintf(command, sizeof command, "rm -r '%s'", dir);
    EQ(system(command), 0);
}

/* A wrong knob at the start: no list of devices, rather than a run without the fault. */
static void bad_start(void) {
    int n = 5;
    TRUE(FAILS(ibv_get_device_list(&n), ENOENT));
    EQ(n, 0);
}

const struct check CALL_CHECKS[] = {
    {"devices", devices, "FAKEVERBS_DEVICES=3 KVRAIL_SYSROOT=/r"},
    {"versions", versions, NULL},
    {"limits", limits,
     "FAKEVERBS_SET=*.max_qp_wr=33;*.max_sge=3;*.max_mr_size=2M;*.max_cqe=77;*.ports=2;"
     "*.max_qp_rd_atom=5;*.max_qp=2;*.num_comp_vectors=2;*.port2.active_mtu=1024;"
     "*.port2.max_msg_sz=4K;*.port2.link_layer=infiniband;*.port2.gid_tbl_len=4"},
    {"queue limits", queue_limits,
     "FAKEVERBS_SET=*.max_qp_wr=33;*.max_sge=3;*.max_cqe=77;*.max_qp=2;*.num_comp_vectors=2"},
    {"registration", registration,
     "FAKEVERBS_SET=fake0.max_mr_size=2M;fake0.max_mr=3;fake0.mr_access_mask=7"},
    {"locked memory", locked_memory, "FAKEVERBS_SET=*.memlock=1"},
    {"dmabuf", dmabuf, NULL},
    {"thread domains", thread_domains, "FAKEVERBS_SET=fake1.thread_domain=0"},
    {"destroy order", destroy_order, NULL},
    {"leaves nothing", leaves_nothing, NULL},
    {"config file", config_file, "FAKEVERBS_SET=fake0.max_qp_wr=12"},
    {"tree", tree, "FAKEVERBS_SET=fake1.ports=2;fake1.port2.state=down;*.port1.gid_tbl_len=3"},
    {"bad start", bad_start, "FAKEVERBS_SET=fake0.max_qpp=1"},
    {NULL, NULL, NULL},
};
