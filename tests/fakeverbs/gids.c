/* GID tables: what a port starts with, and how an entry is written in a knob. */
#include "fake.h"

#include <arpa/inet.h>

/* `10.1.0.5` (the IPv4-mapped form) or an IPv6 address. */
bool fv_gid_parse(const char *text, union ibv_gid *gid) {
    memset(gid, 0, sizeof *gid);
    if (inet_pton(AF_INET, text, gid->raw + 12) == 1) {
        gid->raw[10] = gid->raw[11] = 0xff;
        return true;
    }
    return inet_pton(AF_INET6, text, gid->raw) == 1;
}

/* `ADDRESS[,v1|v2|ib]`, or `none`. */
int fv_gid_assign(struct fv_port *p, uint32_t index, const char *text) {
    char address[64];
    size_t len = strcspn(text, ",");
    struct fv_gid *g = &p->gids[index];
    struct fv_gid fresh = {.type = IBV_GID_TYPE_ROCE_V2, .used = true};
    if (len >= sizeof address) return EINVAL;
    memcpy(address, text, len);
    address[len] = '\0';
    if (strcmp(text, "none") == 0) {
        memset(g, 0, sizeof *g);
        return 0;
    }
    if (!fv_gid_parse(address, &fresh.gid)) return EINVAL;
    if (text[len] == ',') {
        const char *type = text + len + 1;
        if (strcmp(type, "v1") == 0)
            fresh.type = IBV_GID_TYPE_ROCE_V1;
        else if (strcmp(type, "ib") == 0)
            fresh.type = IBV_GID_TYPE_IB;
        else if (strcmp(type, "v2") != 0)
            return EINVAL;
    }
    *g = fresh;
    return 0;
}

/* Index 0: a link-local address, index 1: 10.<port>.<device>.<host>, both RoCE v2. */
void fv_default_gids(struct fv_dev *d, uint32_t port) {
    char text[64];
    struct fv_port *p = &d->port[port - 1];
    snprintf(text, sizeof text, "fe80::%x:%x:%x", (unsigned)(fv.host & 0xffff), port,
             (unsigned)d->index + 1);
    fv_gid_assign(p, 0, text);
    snprintf(text, sizeof text, "10.%u.%d.%u", port, d->index, (unsigned)(fv.host & 0xff));
    fv_gid_assign(p, 1, text);
}

enum ibv_mtu fv_mtu(uint64_t bytes) {
    enum ibv_mtu mtu = IBV_MTU_256;
    for (uint64_t size = 512; size <= 4096 && size <= bytes; size *= 2) mtu++;
    return mtu;
}
