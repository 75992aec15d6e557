/* Two processes: the other is this program again, run with --worker, and told what to do. */
#include "check.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

extern const char *program;

/* A question of one letter and two numbers; the answer is a hello or a number. */
struct ask {
    char what;
    uint64_t n, m;
    struct hello peer;
};

struct other {
    pid_t pid;
    int fd;
    struct hello hello;
};

/* The letters: h hello, c connect, r post a receive, w wait for a completion, f fill, s same?,
 * d deregister, e QP to ERR, R QP to RESET, W write to the peer, p the port's
 * state, q quit. */
static uint64_t obey(struct side *s, const struct ask *q, struct hello *peer) {
    struct ibv_wc wc;
    switch (q->what) {
    case 'c':
        *peer = q->peer;
        join(s, s->qp, peer);
        return 0;
    case 'r': return (uint64_t)post_recv(s, q->n, 0, (uint32_t)q->m);
    case 'w':
        wc = next_wc(s->cq, 5000);
        return (uint64_t)wc.status << 32 | (uint32_t)wc.wr_id;
    case 'f': fill_bytes(s->buf, q->n, (unsigned)q->m); return 0;
    case 's': return same_bytes(s->buf, q->n, (unsigned)q->m);
    case 'd': {
        struct ibv_mr *mr = s->mr;
        s->mr = NULL;
        return (uint64_t)ibv_dereg_mr(mr);
    }
    case 'e': return (uint64_t)to_state(s->qp, IBV_QPS_ERR);
    case 'R': return (uint64_t)to_state(s->qp, IBV_QPS_RESET);
    case 'W':
        return (uint64_t)post(s, s->qp, peer,
                              (struct op){.op = IBV_WR_RDMA_WRITE, .len = q->n, .flags = 2});
    case 'p': {
        struct ibv_port_attr a;
        ibv_query_port(s->ctx, 1, &a);
        return a.state;
    }
    default: return 0;
    }
}

int worker(int fd) {
    struct side s;
    struct ask q;
    struct hello peer;
    make_side(&s, 1);
    struct hello h = hello_of(&s);
    if (write(fd, &h, sizeof h) != sizeof h) return 1;
    while (read(fd, &q, sizeof q) == sizeof q && q.what != 'q') {
        uint64_t answer = obey(&s, &q, &peer);
        if (write(fd, &answer, sizeof answer) != sizeof answer) return 1;
    }
    end_side(&s);
    return 0;
}

static struct other start_other(void) {
    struct other o;
    int fds[2];
    char text[16];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    o.pid = fork();
    if (o.pid == 0) {
        snprintf(text, sizeof text, "%d", fds[1]);
        close(fds[0]);
        execl(program, program, "--worker", text, (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    o.fd = fds[0];
    MUST(read(o.fd, &o.hello, sizeof o.hello) == sizeof o.hello);
    return o;
}

static uint64_t ask(struct other *o, char what, uint64_t n, uint64_t m) {
    struct ask q = {.what = what, .n = n, .m = m};
    uint64_t answer = ~0ull;
    MUST(write(o->fd, &q, sizeof q) == sizeof q);
    MUST(read(o->fd, &answer, sizeof answer) == sizeof answer);
    return answer;
}

static void connect_other(struct side *a, struct other *o) {
    struct ask q = {.what = 'c', .peer = hello_of(a)};
    uint64_t answer;
    join(a, a->qp, &o->hello);
    MUST(write(o->fd, &q, sizeof q) == sizeof q);
    MUST(read(o->fd, &answer, sizeof answer) == sizeof answer);
}

static void stop_other(struct other *o, int sig) {
    struct ask q = {.what = 'q'};
    int status;
    if (sig != 0)
        kill(o->pid, sig);
    else
        MUST(write(o->fd, &q, sizeof q) == sizeof q);
    waitpid(o->pid, &status, 0);
    close(o->fd);
    if (sig == 0) EQ(status, 0);
}

static enum ibv_wc_status run(struct side *a, struct other *o, struct op op) {
    op.flags |= IBV_SEND_SIGNALED;
    EQ(post(a, a->qp, &o->hello, op), 0);
    return status_of(a->cq, NULL);
}

static struct side a;

static void across(void) {
    make_side(&a, 0);
    struct other o = start_other();
    TRUE(o.hello.qpn >> 16 != a.qp->qp_num >> 16);
    connect_other(&a, &o);
    ask(&o, 'f', 1 << 20, 5);
    EQ(run(&a, &o, (struct op){.op = IBV_WR_RDMA_READ, .len = 1 << 20}), 0);
    TRUE(same_bytes(a.buf, 1 << 20, 5));
    fill_bytes(a.buf, 500000, 11);
    EQ(run(&a, &o, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 500000}), 0);
    EQ(ask(&o, 's', 500000, 11), 1);
    EQ(ask(&o, 'r', 42, 300000), 0);
    fill_bytes(a.buf, 200000, 17);
    EQ(run(&a, &o, (struct op){.op = IBV_WR_SEND, .len = 200000}), 0);
    EQ(ask(&o, 'w', 0, 0), 42);
    EQ(ask(&o, 's', 200000, 17), 1);
    EQ(ask(&o, 'r', 43, 0), 0);
    EQ(run(&a, &o, (struct op){.op = IBV_WR_RDMA_WRITE_WITH_IMM, .len = 9, .imm = 3}), 0);
    EQ(ask(&o, 'w', 0, 0), 43);
    EQ(ask(&o, 'f', 70000, 23), 0);
    EQ(ask(&o, 'W', 70000, 0), 0);
    EQ(ask(&o, 'w', 0, 0), 0);
    TRUE(same_bytes(a.buf, 70000, 23));
    stop_other(&o, 0);
    end_side(&a);
}

/* Many packets in both directions at once fill the sockets; none is lost. */
static void both_ways(void) {
    enum { N = 24 };
    make_side(&a, 0);
    struct other o = start_other();
    connect_other(&a, &o);
    ask(&o, 'f', 1 << 20, 1);
    for (uint64_t i = 0; i < N; i++) {
        EQ(ask(&o, 'W', 1 << 20, 0), 0);
        EQ(post(&a, a.qp, &o.hello,
                (struct op){.op = IBV_WR_RDMA_READ, .len = 1 << 20, .flags = 2, .id = i}), 0);
    }
    for (uint64_t i = 0; i < N; i++) {
        uint64_t id;
        EQ(status_of(a.cq, &id), 0);
        EQ(id, i);
        EQ(ask(&o, 'w', 0, 0), 0);
    }
    TRUE(same_bytes(a.buf, 1 << 20, 1));
    stop_other(&o, 0);
    end_side(&a);
}

static void keys_across(void) {
    make_side(&a, 0);
    struct other o = start_other();
    connect_other(&a, &o);
    EQ(ask(&o, 'd', 0, 0), 0);
    EQ(run(&a, &o, (struct op){.op = IBV_WR_RDMA_READ, .len = 8}), IBV_WC_REM_ACCESS_ERR);
    stop_other(&o, 0);
    end_side(&a);
}

/* Killed before the post, and in the middle of a long message. */
static void dead_peer(void) {
    for (int i = 0; i < 2; i++) {
        make_side(&a, 0);
        struct other o = start_other();
        connect_other(&a, &o);
        if (i == 1) {
            SET("fake0.bandwidth=1M");
            EQ(post(&a, a.qp, &o.hello,
                    (struct op){.op = IBV_WR_RDMA_READ, .len = 1 << 20, .flags = 2}), 0);
            usleep(100000);
        }
        stop_other(&o, SIGKILL);
        if (i == 0)
            EQ(run(&a, &o, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 8}),
               IBV_WC_RETRY_EXC_ERR);
        else
            EQ(status_of(a.cq, NULL), IBV_WC_RETRY_EXC_ERR);
        end_side(&a);
        SET("fake0.bandwidth=0");
    }
}

static void fenced_across(void) {
    make_side(&a, 0);
    struct other o = start_other();
    connect_other(&a, &o);
    EQ(ask(&o, 'R', 0, 0), 0);
    fill_bytes(a.buf, 100, 9);
    EQ(run(&a, &o, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 100}), IBV_WC_RETRY_EXC_ERR);
    EQ(ask(&o, 's', 100, 9), 0);
    stop_other(&o, 0);
    end_side(&a);
}

static void stop_still(const struct other *o) {
    int status;
    kill(o->pid, SIGSTOP);
    MUST(waitpid(o->pid, &status, WUNTRACED) == o->pid && WIFSTOPPED(status));
}

/* The peer's socket is full: what does not fit waits, and is not taken for a dead peer. */
static void full_socket(void) {
    enum { N = 40 };
    struct ibv_qp *qp[N];
    P.cqe = 64;
    make_side(&a, 0);
    struct other o = start_other();
    connect_other(&a, &o);
    stop_still(&o);
    for (int i = 0; i < N; i++) {
        qp[i] = make_qp(&a, a.cq);
        join(&a, qp[i], &o.hello);
        EQ(post(&a, qp[i], &o.hello,
                (struct op){.op = IBV_WR_RDMA_WRITE, .len = 60000, .flags = 2}), 0);
    }
    usleep(200000);
    EQ(counter("dropped"), 0);
    kill(o.pid, SIGCONT);
    for (int i = 0; i < N; i++) EQ(status_of(a.cq, NULL), IBV_WC_RETRY_EXC_ERR);
    for (int i = 0; i < N; i++) EQ(ibv_destroy_qp(qp[i]), 0);
    stop_other(&o, 0);
    end_side(&a);
}

/* A peer that is slow gets the packet again, and carries it out once. */
static void once_only(void) {
    P.retry = 7;
    P.timeout = 8;
    make_side(&a, 0);
    struct other o = start_other();
    connect_other(&a, &o);
    EQ(ask(&o, 'r', 1, 8), 0);
    EQ(ask(&o, 'r', 2, 8), 0);
    SET("slow_peer_ms=50");
    stop_still(&o);
    EQ(post(&a, a.qp, &o.hello, (struct op){.op = IBV_WR_SEND, .len = 8, .flags = 2}), 0);
    usleep(180000);
    TRUE(counter("retries") >= 2);
    SET("slow_peer_ms=5000");
    kill(o.pid, SIGCONT);
    EQ(status_of(a.cq, NULL), 0);
    EQ(ask(&o, 'w', 0, 0), 1);
    EQ(ask(&o, 'e', 0, 0), 0);
    EQ(ask(&o, 'w', 0, 0), (uint64_t)IBV_WC_WR_FLUSH_ERR << 32 | 2);
    stop_other(&o, 0);
    end_side(&a);
}

static void put_file(const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", getenv("FAKEVERBS_BUS"), name);
    FILE *f = fopen(path, "w");
    MUST(f != NULL);
    fputs(text, f);
    fclose(f);
}

/* The control files of the bus reach one process or all. */
static void control_file(void) {
    struct ibv_port_attr attr;
    char name[32];
    make_side(&a, 0);
    struct other o = start_other();
    connect_other(&a, &o);
    snprintf(name, sizeof name, "control.%d", (int)o.pid);
    put_file(name, "*.port1.state=down # for one\n");
    for (int i = 0; i < 200 && ask(&o, 'p', 0, 0) != IBV_PORT_DOWN; i++) usleep(10000);
    EQ(ask(&o, 'p', 0, 0), IBV_PORT_DOWN);
    EQ(ibv_query_port(a.ctx, 1, &attr), 0);
    EQ(attr.state, IBV_PORT_ACTIVE);
    EQ(run(&a, &o, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 8}), IBV_WC_RETRY_EXC_ERR);
    put_file("control", "*.port1.state=armed\n");
    for (int i = 0; i < 200 && counter("fake0.port1.state") != 3; i++) usleep(10000);
    EQ(counter("fake0.port1.state"), 3);
    unlink(name);
    stop_other(&o, 0);
    end_side(&a);
}

/* Two "hosts" on one bus have other addresses. */
static void two_hosts(void) {
    make_side(&a, 0);
    setenv("FAKEVERBS_HOST", "2", 1);
    struct other o = start_other();
    EQ(hello_of(&a).gid.raw[15], 1);
    EQ(o.hello.gid.raw[15], 2);
    connect_other(&a, &o);
    EQ(run(&a, &o, (struct op){.op = IBV_WR_RDMA_WRITE, .len = 8}), 0);
    stop_other(&o, 0);
    end_side(&a);
}

const struct check PROCESS_CHECKS[] = {
    {"across processes", across, NULL},
    {"both ways", both_ways, NULL},
    {"keys across", keys_across, NULL},
    {"dead peer", dead_peer, NULL},
    {"fenced across", fenced_across, NULL},
    {"full socket", full_socket, NULL},
    {"once only", once_only, NULL},
    {"control file", control_file, NULL},
    {"two hosts", two_hosts, NULL},
    {NULL, NULL, NULL},
};
