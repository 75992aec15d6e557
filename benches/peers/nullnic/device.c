/* Devices, ports and their addresses. */
#include "nullnic.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#undef ibv_query_port

struct nn_counters *nn_counters;
static struct ibv_device devices[NN_DEVICES];
static int device_count;
static bool roce;

__attribute__((constructor)) static void begin(void) {
    const char *root = getenv("NULLNIC_ROOT"), *name = getenv("NULLNIC_NAME");
    const char *count = getenv("NULLNIC_DEVICES"), *layer = getenv("NULLNIC_ROCE");
    nn_counters = nn_counters_map("NULLNIC_COUNTERS");
    roce = layer != NULL && strcmp(layer, "1") == 0;
    device_count = count != NULL ? atoi(count) : 2;
    if (device_count < 0 || device_count > NN_DEVICES) {
        fprintf(stderr, "nullnic: NULLNIC_DEVICES is %s, allowed 0 to %d\n", count, NN_DEVICES);
        _exit(1);
    }
    for (int i = 0; i < device_count; i++) {
        struct ibv_device *d = &devices[i];
        d->node_type = IBV_NODE_CA;
        d->transport_type = IBV_TRANSPORT_IB;
        snprintf(d->name, sizeof d->name, "%.32s%d", name != NULL ? name : "null", i);
        snprintf(d->dev_name, sizeof d->dev_name, "uverbs%d", i);
        snprintf(d->dev_path, sizeof d->dev_path, "%.150s/sys/class/infiniband/%.48s",
                 root != NULL ? root : ".", d->name);
        memcpy(d->ibdev_path, d->dev_path, sizeof d->ibdev_path);
    }
}

static int index_of(const struct ibv_device *d) { return (int)(d - devices); }

NN_EXPORT struct ibv_device **ibv_get_device_list(int *count) {
    struct ibv_device **list = calloc((size_t)device_count + 1, sizeof *list);
    for (int i = 0; list != NULL && i < device_count; i++) list[i] = &devices[i];
    if (count != NULL) *count = device_count;
    return list;
}

NN_EXPORT void ibv_free_device_list(struct ibv_device **list) { free(list); }
NN_EXPORT const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }
NN_EXPORT int ibv_get_device_index(struct ibv_device *d) { return index_of(d) + 1; }

NN_EXPORT __be64 ibv_get_device_guid(struct ibv_device *d) {
    return __builtin_bswap64(0x0200000000000100ull + (uint64_t)index_of(d));
}

NN_EXPORT struct ibv_context *ibv_open_device(struct ibv_device *d) {
    /* An application may look for an extended context in front: there is none (abi_compat). */
    char *memory = calloc(1, 8192);
    if (memory == NULL) return NULL;
    struct ibv_context *c = (struct ibv_context *)(memory + 4096);
    c->device = d;
    c->cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    c->async_fd = eventfd(0, EFD_CLOEXEC);
    c->num_comp_vectors = 1;
    pthread_mutex_init(&c->mutex, NULL);
    c->ops.poll_cq = nn_poll_cq;
    c->ops.req_notify_cq = nn_req_notify_cq;
    c->ops.post_send = nn_post_send;
    c->ops.post_recv = nn_post_recv;
    c->ops.post_srq_recv = nn_post_srq_recv;
    return c;
}

NN_EXPORT int ibv_close_device(struct ibv_context *c) {
    close(c->cmd_fd);
    close(c->async_fd);
    free((char *)c - 4096);
    return 0;
}

NN_EXPORT int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a) {
    *a = (struct ibv_device_attr){
        .fw_ver = "0.0",
        .node_guid = ibv_get_device_guid(c->device),
        .sys_image_guid = ibv_get_device_guid(c->device),
        .max_mr_size = UINT64_MAX,
        .page_size_cap = 0xfffff000,
        .vendor_id = 0xfa4e,
        .vendor_part_id = 1,
        .max_qp = 60000,
        .max_qp_wr = 32768,
        .max_sge = 30,
        .max_sge_rd = 30,
        .max_cq = 65000,
        .max_cqe = 4194303,
        .max_mr = 1 << 24,
        .max_pd = 1 << 20,
        .max_qp_rd_atom = 16,
        .max_qp_init_rd_atom = 16,
        .max_res_rd_atom = 1 << 20,
        .atomic_cap = IBV_ATOMIC_HCA,
        .max_srq = 60000,
        .max_srq_wr = 32767,
        .max_srq_sge = NN_SGES,
        .max_pkeys = 1,
        .phys_port_cnt = 1,
        .max_ah = 1 << 20,
    };
    return 0;
}

NN_EXPORT int ibv_query_port(struct ibv_context *c, uint8_t port,
                             struct _compat_ibv_port_attr *out) {
    if (port != 1) return EINVAL;
    struct ibv_port_attr a = {
        .state = IBV_PORT_ACTIVE,
        .max_mtu = IBV_MTU_4096,
        .active_mtu = IBV_MTU_4096,
        .gid_tbl_len = NN_GIDS,
        .max_msg_sz = 1u << 30,
        .pkey_tbl_len = 1,
        .lid = roce ? 0 : (uint16_t)(index_of(c->device) + 1),
        .active_width = 2,
        .active_speed = 64,
        .phys_state = 5,
        .link_layer = roce ? IBV_LINK_LAYER_ETHERNET : IBV_LINK_LAYER_INFINIBAND,
    };
    /* The callers of this old name know the structure up to here only. */
    memcpy(out, &a, offsetof(struct ibv_port_attr, port_cap_flags2));
    return 0;
}

/* Entry 0 is the link-local address, entry 1 that of the netdev: 10.1.RAIL.HOST, four rails a
 * host. False: the entry is empty. */
static bool gid_of(const struct ibv_device *d, uint32_t entry, union ibv_gid *gid) {
    int i = index_of(d);
    memset(gid, 0, sizeof *gid);
    if (entry == 0) {
        gid->global.subnet_prefix = __builtin_bswap64(0xfe80000000000000ull);
        gid->global.interface_id = ibv_get_device_guid((struct ibv_device *)(uintptr_t)d);
    } else if (entry == 1) {
        const uint8_t end[] = {255, 255, 10, 1, (uint8_t)(i % 4), (uint8_t)(i / 4 + 1)};
        memcpy(gid->raw + 10, end, sizeof end);
    }
    return entry < 2;
}

NN_EXPORT int ibv_query_gid(struct ibv_context *c, uint8_t port, int entry, union ibv_gid *gid) {
    if (port != 1 || entry < 0 || entry >= NN_GIDS) {
        errno = EINVAL;
        return -1;
    }
    gid_of(c->device, (uint32_t)entry, gid);
    return 0;
}

NN_EXPORT int _ibv_query_gid_ex(struct ibv_context *c, uint32_t port, uint32_t entry,
                                struct ibv_gid_entry *out, uint32_t flags, size_t size) {
    union ibv_gid gid;
    if (port != 1 || entry >= NN_GIDS || flags != 0 || size < sizeof *out) return EINVAL;
    if (!gid_of(c->device, entry, &gid)) return ENODATA;
    memset(out, 0, size);
    out->gid = gid;
    out->gid_index = entry;
    out->port_num = port;
    out->gid_type = roce ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_IB;
    out->ndev_ifindex = roce ? 10 + 2 * (uint32_t)index_of(c->device) : 0;
    return 0;
}

NN_EXPORT int ibv_query_pkey(struct ibv_context *c, uint8_t port, int entry, __be16 *key) {
    (void)c, (void)port;
    *key = 0xffff;
    return entry == 0 ? 0 : -1;
}

NN_EXPORT int ibv_get_pkey_index(struct ibv_context *c, uint8_t port, __be16 key) {
    (void)c, (void)port;
    return key == 0xffff ? 0 : -1;
}

/* There are no such events: who may wait does, for ever. */
NN_EXPORT int ibv_get_async_event(struct ibv_context *c, struct ibv_async_event *event) {
    (void)event;
    uint64_t none;
    if (read(c->async_fd, &none, sizeof none) >= 0) errno = EAGAIN;
    return -1;
}

NN_EXPORT void ibv_ack_async_event(struct ibv_async_event *event) { (void)event; }
