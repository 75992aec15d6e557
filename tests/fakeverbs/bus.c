/* The bus between processes: a folder with one datagram socket per process. The slot number of a
 * process is in the QP numbers that it gives out. A file lock says who holds a slot.
 */
#include "fake.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define SLOTS 255

static void address(uint32_t slot, struct sockaddr_un *a) {
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    snprintf(a->sun_path, sizeof a->sun_path, "%.80s/%u.sock", fv.bus, slot);
}

static int take_slot(void) {
    char path[128];
    for (uint32_t i = 0; i < SLOTS; i++) {
        uint32_t slot = ((uint32_t)getpid() + i) % SLOTS + 1;
        snprintf(path, sizeof path, "%.80s/%u.lock", fv.bus, slot);
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0) return errno;
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
            fv.slot = (int)slot;
            fv.slot_fd = fd;
            return 0;
        }
        close(fd);
    }
    fprintf(stderr, "fakeverbs: all %d slots of %s are held; remove the folder\n", SLOTS, fv.bus);
    return ENOSPC;
}

static int open_folder(void) {
    const char *bus = getenv("FAKEVERBS_BUS");
    if (bus != NULL && strlen(bus) >= sizeof fv.bus) {
        fprintf(stderr, "fakeverbs: FAKEVERBS_BUS is longer than %zu\n", sizeof fv.bus - 1);
        return ENAMETOOLONG;
    }
    if (bus != NULL)
        strcpy(fv.bus, bus);
    else
        snprintf(fv.bus, sizeof fv.bus, "/dev/shm/fakeverbs-%u", (unsigned)getuid());
    if (mkdir(fv.bus, 0700) != 0 && errno != EEXIST) {
        int err = errno;
        fprintf(stderr, "fakeverbs: mkdir %s: %s\n", fv.bus, strerror(err));
        return err;
    }
    return 0;
}

int fv_bus_open(void) {
    struct sockaddr_un a;
    int size = 4 << 20, err = open_folder();
    fv.inotify = -1;
    if (err == 0) err = take_slot();
    if (err != 0) return err;
    address((uint32_t)fv.slot, &a);
    unlink(a.sun_path);
    fv.sock = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fv.sock < 0 || bind(fv.sock, (struct sockaddr *)&a, sizeof a) != 0) {
        err = errno;
        fprintf(stderr, "fakeverbs: bind %s: %s\n", a.sun_path, strerror(err));
        return err;
    }
    setsockopt(fv.sock, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    fv.inotify = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (fv.inotify >= 0) inotify_add_watch(fv.inotify, fv.bus, IN_CLOSE_WRITE | IN_MOVED_TO);
    return 0;
}

void fv_bus_close(void) {
    struct sockaddr_un a;
    if (fv.slot > 0) {
        address((uint32_t)fv.slot, &a);
        unlink(a.sun_path);
        close(fv.slot_fd);
    }
    if (fv.sock >= 0) close(fv.sock);
    if (fv.inotify >= 0) close(fv.inotify);
    fv.sock = fv.inotify = -1;
    fv.slot = -1;
    while (fv.out_first != NULL) {
        struct fv_out *o = fv.out_first;
        fv.out_first = o->next;
        free(o);
    }
    fv.out_last = NULL;
}

/* 0, or EAGAIN when the peer's socket is full, or what says that nobody is there. */
static int transmit(uint32_t slot, const struct fv_packet *p, const void *payload) {
    struct sockaddr_un a;
    address(slot, &a);
    struct iovec v[2] = {{(void *)(uintptr_t)p, sizeof *p},
                         {(void *)(uintptr_t)payload, p->payload}};
    struct msghdr m = {
        .msg_name = &a, .msg_namelen = sizeof a, .msg_iov = v, .msg_iovlen = 2};
    if (sendmsg(fv.sock, &m, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return 0;
    return errno == ENOBUFS || errno == EWOULDBLOCK || errno == EINTR ? EAGAIN : errno;
}

/* False when no process has that slot. */
bool fv_bus_send(uint32_t slot, const struct fv_packet *p, const uint8_t *payload) {
    int err = transmit(slot, p, payload);
    if (err != EAGAIN) return err == 0;
    struct fv_out *o = malloc(sizeof *o + p->payload);
    if (o == NULL) abort();
    o->next = NULL;
    o->slot = slot;
    o->head = *p;
    memcpy(o + 1, payload, p->payload);
    if (fv.out_last != NULL)
        fv.out_last->next = o;
    else
        fv.out_first = o;
    fv.out_last = o;
    return true;
}

/* Sends what waited; false when some still waits. */
bool fv_bus_flush(void) {
    struct fv_out **at = &fv.out_first, *last = NULL;
    while (*at != NULL) {
        struct fv_out *o = *at;
        int err = transmit(o->slot, &o->head, o + 1);
        if (err == EAGAIN) {
            last = o;
            at = &o->next;
            continue;
        }
        *at = o->next;
        if (err != 0 && o->head.kind == FV_REQUEST) {
            o->head.kind = FV_DROP;
            o->head.dst_qpn = o->head.src_qpn;
            fv_answer(&o->head, NULL);
        }
        free(o);
    }
    fv.out_last = last;
    return fv.out_first == NULL;
}

void fv_bus_receive(void) {
    static uint8_t in[FV_CHUNK], out[FV_CHUNK];
    struct fv_packet p, reply;
    for (int i = 0; i < 32; i++) {
        struct iovec v[2] = {{&p, sizeof p}, {in, sizeof in}};
        struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};
        ssize_t n = recvmsg(fv.sock, &m, MSG_DONTWAIT);
        if (n < 0) return;
        if ((size_t)n < sizeof p || p.magic != FV_MAGIC || (size_t)n != sizeof p + p.payload)
            continue;
        if (p.kind != FV_REQUEST) {
            fv_answer(&p, in);
            continue;
        }
        fv_respond(&p, in, &reply, out);
        fv_bus_send(p.src_qpn >> 16, &reply, out);
    }
}

static void apply(const char *name) {
    static char text[16384];
    char path[128];
    snprintf(path, sizeof path, "%.80s/%.32s", fv.bus, name);
    FILE *f = fopen(path, "re");
    if (f == NULL) return;
    size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = '\0';
    fclose(f);
    fv_assign(text);
}

/* `control` is for every process on the bus, `control.PID` for one: applied when written. */
void fv_bus_control(void) {
    _Alignas(struct inotify_event) char buf[4096];
    char own[32];
    snprintf(own, sizeof own, "control.%d", (int)getpid());
    ssize_t n = read(fv.inotify, buf, sizeof buf);
    for (char *at = buf; n > 0 && at < buf + n;) {
        const struct inotify_event *e = (const struct inotify_event *)(void *)at;
        if (e->len > 0 && (strcmp(e->name, "control") == 0 || strcmp(e->name, own) == 0))
            apply(e->name);
        at += sizeof *e + e->len;
    }
}
