/* Devices: the list, opening and closing, and the queries. Also the one lock and the clock. */
#include "fake.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#undef ibv_query_port

/* The engine gives way to callers that wait, so a long copy does not starve them. */
void fv_lock(void) {
    atomic_fetch_add(&fv.waiters, 1);
    pthread_mutex_lock(&fv.lock);
    atomic_fetch_sub(&fv.waiters, 1);
}

void fv_unlock(void) { pthread_mutex_unlock(&fv.lock); }

uint64_t fv_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

struct fv_ctx *fv_ctx_of(struct ibv_context *c) {
    return (struct fv_ctx *)((char *)c - offsetof(struct fv_ctx, v.context));
}

FV_EXPORT struct ibv_device **ibv_get_device_list(int *n) {
    fv_lock();
    int err = fv_load();
    fv_unlock();
    struct ibv_device **list = err == 0 ? calloc((size_t)fv.n_dev + 1, sizeof *list) : NULL;
    if (n != NULL) *n = 0;
    if (list == NULL) {
        errno = err != 0 ? err : ENOMEM;
        return NULL;
    }
    for (int i = 0; i < fv.n_dev; i++) list[i] = &fv.dev[i].ibdev;
    if (n != NULL) *n = fv.n_dev;
    return list;
}

FV_EXPORT void ibv_free_device_list(struct ibv_device **list) { free(list); }

FV_EXPORT const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }

FV_EXPORT int ibv_get_device_index(struct ibv_device *d) {
    return ((struct fv_dev *)d)->index + 1;
}

FV_EXPORT __be64 ibv_get_device_guid(struct ibv_device *d) {
    uint64_t guid = UINT64_C(0x0200000000000000) | fv.host << 16;
    return __builtin_bswap64(guid + (uint64_t)((struct fv_dev *)d)->index);
}

static int query_port(struct ibv_context *c, uint8_t n, struct ibv_port_attr *out, size_t len) {
    struct fv_dev *d = (struct fv_dev *)c->device;
    struct ibv_port_attr a;
    int err = EINVAL;
    memset(&a, 0, sizeof a);
    fv_lock();
    if (fv_fails_quietly(d, FV_CALL_query_port, &err) || n < 1 || n > d->ports) {
        fv_unlock();
        return err;
    }
    const struct fv_port *p = &d->port[n - 1];
    a.state = (enum ibv_port_state)p->state;
    a.max_mtu = fv_mtu(p->max_mtu);
    a.active_mtu = fv_mtu(p->active_mtu);
    a.gid_tbl_len = (int)p->gid_tbl_len;
    a.max_msg_sz = (uint32_t)p->max_msg_sz;
    a.pkey_tbl_len = 1;
    a.link_layer = (uint8_t)p->link_layer;
    a.lid = (uint16_t)(a.link_layer == IBV_LINK_LAYER_INFINIBAND ? d->index + 1 : 0);
    a.active_width = 2;
    a.active_speed = 32;
    a.phys_state = p->state == IBV_PORT_ACTIVE ? 5 : 3;
    fv_unlock();
    memcpy(out, &a, len < sizeof a ? len : sizeof a);
    return 0;
}

/* The old entry: fields that came later stay as they were. */
FV_EXPORT int ibv_query_port(struct ibv_context *c, uint8_t n, struct _compat_ibv_port_attr *a) {
    return query_port(c, n, (struct ibv_port_attr *)a, offsetof(struct ibv_port_attr, flags));
}

FV_EXPORT int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a) {
    struct fv_dev *d = (struct fv_dev *)c->device;
    int err = 0;
    fv_lock();
    bool fails = fv_fails_quietly(d, FV_CALL_query_device, &err);
    fv_unlock();
    if (fails) return err;
    memset(a, 0, sizeof *a);
    strcpy(a->fw_ver, "0.0");
    a->node_guid = a->sys_image_guid = ibv_get_device_guid(c->device);
    a->max_mr_size = d->max_mr_size;
    a->page_size_cap = ~(d->page_size - 1) & UINT32_MAX;
    a->vendor_id = 0xfa4e;
    a->max_qp = (int)d->max_qp;
    a->max_qp_wr = (int)d->max_qp_wr;
    a->max_sge = (int)d->max_sge;
    a->max_sge_rd = (int)d->max_sge_rd;
    a->max_cq = (int)d->max_cq;
    a->max_cqe = (int)d->max_cqe;
    a->max_mr = (int)d->max_mr;
    a->max_pd = (int)d->max_pd;
    a->max_qp_rd_atom = (int)d->max_qp_rd_atom;
    a->max_qp_init_rd_atom = (int)d->max_qp_init_rd_atom;
    a->max_res_rd_atom = a->max_qp_rd_atom * a->max_qp;
    a->max_pkeys = 1;
    a->phys_port_cnt = (uint8_t)d->ports;
    return 0;
}

static int query_device_ex(struct ibv_context *c, const struct ibv_query_device_ex_input *in,
                           struct ibv_device_attr_ex *a, size_t size) {
    if (in != NULL && in->comp_mask != 0) return EINVAL;
    if (size < sizeof a->orig_attr) return EINVAL;
    memset(a, 0, size);
    return ibv_query_device(c, &a->orig_attr);
}

static const struct fv_gid *gid_at(struct fv_dev *d, uint32_t port, uint32_t index) {
    if (port < 1 || port > d->ports || index >= d->port[port - 1].gid_tbl_len) return NULL;
    return &d->port[port - 1].gids[index];
}

/* An empty entry is all zero here; the extended query calls it ENODATA, as rdma-core does. */
FV_EXPORT int ibv_query_gid(struct ibv_context *c, uint8_t port, int index, union ibv_gid *gid) {
    struct fv_dev *d = (struct fv_dev *)c->device;
    fv_lock();
    bool fails = fv_fails(d, FV_CALL_query_gid);
    const struct fv_gid *g = index < 0 ? NULL : gid_at(d, port, (uint32_t)index);
    if (!fails && g != NULL) *gid = g->gid;
    fv_unlock();
    if (!fails && g == NULL) errno = EINVAL;
    return fails || g == NULL ? -1 : 0;
}

static void fill_entry(struct fv_dev *d, uint32_t port, uint32_t index, const struct fv_gid *g,
                       struct ibv_gid_entry *e) {
    memset(e, 0, sizeof *e);
    e->gid = g->gid;
    e->gid_index = index;
    e->port_num = port;
    e->gid_type = g->type;
    bool ethernet = d->port[port - 1].link_layer == IBV_LINK_LAYER_ETHERNET;
    e->ndev_ifindex = ethernet ? (uint32_t)d->port[port - 1].ifindex : 0;
}

FV_EXPORT int _ibv_query_gid_ex(struct ibv_context *c, uint32_t port, uint32_t index,
                                struct ibv_gid_entry *e, uint32_t flags, size_t size) {
    struct fv_dev *d = (struct fv_dev *)c->device;
    int err = EINVAL;
    if (flags != 0 || size < sizeof *e) return EOPNOTSUPP;
    fv_lock();
    if (!fv_fails_quietly(d, FV_CALL_query_gid, &err)) {
        const struct fv_gid *g = gid_at(d, port, index);
        err = g == NULL ? EINVAL : g->used ? 0 : ENODATA;
        if (err == 0) fill_entry(d, port, index, g, e);
    }
    fv_unlock();
    return err;
}

FV_EXPORT ssize_t _ibv_query_gid_table(struct ibv_context *c, struct ibv_gid_entry *e, size_t max,
                                       uint32_t flags, size_t size) {
    struct fv_dev *d = (struct fv_dev *)c->device;
    size_t n = 0;
    if (flags != 0 || size != sizeof *e) return -EOPNOTSUPP;
    fv_lock();
    for (uint32_t p = 1; p <= d->ports; p++) {
        for (uint32_t i = 0; i < d->port[p - 1].gid_tbl_len; i++) {
            if (!d->port[p - 1].gids[i].used) continue;
            if (n < max) fill_entry(d, p, i, &d->port[p - 1].gids[i], &e[n]);
            n++;
        }
    }
    fv_unlock();
    return n > max ? -EINVAL : (ssize_t)n;
}

FV_EXPORT int ibv_query_pkey(struct ibv_context *c, uint8_t port, int index, __be16 *key) {
    (void)c, (void)port;
    *key = 0xffff;
    return index == 0 ? 0 : -1;
}

FV_EXPORT int ibv_get_pkey_index(struct ibv_context *c, uint8_t port, __be16 key) {
    (void)c, (void)port;
    return key == 0xffff ? 0 : -1;
}

static void fill_context(struct fv_ctx *c) {
    struct ibv_context *ctx = &c->v.context;
    c->v.sz = sizeof c->v;
    c->v.query_port = query_port;
    c->v.query_device_ex = query_device_ex;
    if (c->dev->thread_domain != 0) {
        c->v.alloc_td = fv_alloc_td;
        c->v.dealloc_td = fv_dealloc_td;
        c->v.alloc_parent_domain = fv_alloc_parent_domain;
    }
    ctx->abi_compat = __VERBS_ABI_IS_EXTENDED;
    ctx->device = &c->dev->ibdev;
    ctx->num_comp_vectors = (int)c->dev->num_comp_vectors;
    pthread_mutex_init(&ctx->mutex, NULL);
    ctx->ops.poll_cq = fv_poll_cq;
    ctx->ops.req_notify_cq = fv_req_notify_cq;
    ctx->ops.post_send = fv_post_send;
    ctx->ops.post_recv = fv_post_recv;
}

FV_EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device) {
    struct fv_dev *d = (struct fv_dev *)device;
    fv_lock();
    bool fails = fv_fails(d, FV_CALL_open_device);
    fv_unlock();
    int err = fails ? 0 : fv_start();
    if (err != 0) errno = err;
    if (fails || err != 0) return NULL;
    struct fv_ctx *c = calloc(1, sizeof *c);
    int fd = eventfd(0, EFD_CLOEXEC), cmd = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (c == NULL || fd < 0 || cmd < 0) {
        free(c);
        if (fd >= 0) close(fd);
        if (cmd >= 0) close(cmd);
        fv_stop();
        errno = EMFILE;
        return NULL;
    }
    c->dev = d;
    fill_context(c);
    c->v.context.async_fd = fd;
    c->v.context.cmd_fd = cmd;
    fv_lock();
    c->next = fv.ctxs;
    fv.ctxs = c;
    d->live[FV_KIND_ctx]++;
    fv_unlock();
    return &c->v.context;
}

/* EBUSY while a PD, CQ, channel or thread domain of it lives. */
FV_EXPORT int ibv_close_device(struct ibv_context *context) {
    struct fv_ctx *c = fv_ctx_of(context);
    fv_lock();
    bool fails = fv_fails(c->dev, FV_CALL_close_device);
    if (!fails && c->objects != 0) {
        FV_COUNT(order_violations);
        errno = EBUSY;
        fails = true;
    }
    if (!fails) {
        struct fv_ctx **at = &fv.ctxs;
        while (*at != c) at = &(*at)->next;
        *at = c->next;
        c->dev->live[FV_KIND_ctx]--;
        fv_log_destroy("ctx");
    }
    fv_unlock();
    if (fails) return -1;
    while (c->async_first != NULL) {
        struct fv_async *a = c->async_first;
        c->async_first = a->next;
        free(a);
    }
    close(context->async_fd);
    close(context->cmd_fd);
    pthread_mutex_destroy(&context->mutex);
    free(c);
    fv_stop();
    return 0;
}
