/* Writes the sysfs and procfs files that fit the fake devices, for KVRAIL_SYSROOT.
 * usage: fakeverbs-tree DIR   (reads the same environment as the library)
 *
 * Beside the fake devices it has a management interface `mgmt0` with the default route, unless
 * FAKEVERBS_MGMT=0. FAKEVERBS_DEFAULT_ROUTE=NETDEV gives the default route to that one instead.
 */
#include "fake.h"

#include <arpa/inet.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *base;
static FILE *routes, *addresses;

static void die(const char *what, const char *path) {
    fprintf(stderr, "fakeverbs-tree: %s %s: %s\n", what, path, strerror(errno));
    exit(1);
}

/* Makes the folders above `path`. */
static void make_above(char *path) {
    for (char *at = strchr(path + 1, '/'); at != NULL; at = strchr(at + 1, '/')) {
        *at = '\0';
        if (mkdir(path, 0755) != 0 && errno != EEXIST) die("mkdir", path);
        *at = '/';
    }
}

static FILE *create(const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", base, name);
    make_above(path);
    FILE *f = fopen(path, "we");
    if (f == NULL) die("create", path);
    return f;
}

/* One line into DIR/NAME; NAME is made from the folder and the file. */
__attribute__((format(printf, 3, 4))) static void put(const char *dir, const char *name,
                                                      const char *format, ...) {
    char path[512];
    va_list args;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = create(path);
    va_start(args, format);
    vfprintf(f, format, args);
    va_end(args);
    fputc('\n', f);
    if (fclose(f) != 0) die("write", path);
}

static void link_to(const char *dir, const char *name, const char *target) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s/%s", base, dir, name);
    make_above(path);
    unlink(path);
    if (symlink(target, path) != 0) die("symlink", path);
}

static const char *link_layer(uint64_t n) {
    return n == IBV_LINK_LAYER_ETHERNET     ? "Ethernet"
           : n == IBV_LINK_LAYER_INFINIBAND ? "InfiniBand"
                                            : "Unknown";
}

/* Empty entries: the address is all zero, the other two files are missing, as on real hosts they
 * cannot be read. */
static void write_gids(const char *dir, const struct fv_port *p) {
    static const char *const TYPE[] = {"IB/RoCE v1", "IB/RoCE v1", "RoCE v2"};
    char name[64], text[64];
    for (uint32_t i = 0; i < p->gid_tbl_len; i++) {
        const struct fv_gid *g = &p->gids[i];
        for (int k = 0; k < 8; k++)
            snprintf(text + 5 * k, sizeof text - 5 * (size_t)k, "%02x%02x%s", g->gid.raw[2 * k],
                     g->gid.raw[2 * k + 1], k < 7 ? ":" : "");
        snprintf(name, sizeof name, "gids/%u", i);
        put(dir, name, "%s", text);
        if (!g->used) continue;
        snprintf(name, sizeof name, "gid_attrs/types/%u", i);
        put(dir, name, "%s", TYPE[g->type]);
        snprintf(name, sizeof name, "gid_attrs/ndevs/%u", i);
        put(dir, name, "%s", p->netdev);
    }
}

static void write_netdev(const char *name, const char *device, uint64_t ifindex, bool up,
                         uint64_t mtu, uint64_t speed) {
    char dir[128];
    snprintf(dir, sizeof dir, "sys/class/net/%s", name);
    put(dir, "ifindex", "%llu", (unsigned long long)ifindex);
    put(dir, "operstate", "%s", up ? "up" : "down");
    put(dir, "carrier", "%d", up);
    put(dir, "mtu", "%llu", (unsigned long long)mtu);
    put(dir, "speed", "%llu", (unsigned long long)speed);
    put(dir, "type", "1");
    put(dir, "flags", "%s", up ? "0x1003" : "0x1002");
    if (device != NULL) link_to(dir, "device", device);
}

/* The line of proc/net/route has addresses as the host's words, in hexadecimal. */
static void write_route(const char *netdev, uint32_t net, uint32_t gateway, uint32_t mask) {
    fprintf(routes, "%s\t%08X\t%08X\t%04X\t0\t0\t%u\t%08X\t0\t0\t0\n", netdev, htonl(net),
            htonl(gateway), gateway != 0 ? 3 : 1, gateway != 0 ? 100 : 0, htonl(mask));
}

static void write_address(const char *netdev, const uint8_t *ip, uint64_t prefix) {
    uint32_t host = (uint32_t)ip[0] << 24 | (uint32_t)ip[1] << 16 | (uint32_t)ip[2] << 8 | ip[3];
    uint32_t mask = prefix == 0 ? 0 : UINT32_MAX << (32 - prefix);
    fprintf(addresses, "%s %u.%u.%u.%u/%llu\n", netdev, ip[0], ip[1], ip[2], ip[3],
            (unsigned long long)prefix);
    write_route(netdev, host & mask, 0, mask);
}

static void write_port(const struct fv_dev *d, uint32_t n, const char *pci) {
    static const char *const STATE[] = {"NOP", "DOWN", "INIT", "ARMED", "ACTIVE"};
    const struct fv_port *p = &d->port[n - 1];
    char dir[160], device[96];
    bool up = p->operstate != 0 && p->state == IBV_PORT_ACTIVE;
    snprintf(dir, sizeof dir, "sys/class/infiniband/%s/ports/%u", d->ibdev.name, n);
    put(dir, "state", "%d: %s", (int)p->state, p->state < 5 ? STATE[p->state] : "UNKNOWN");
    put(dir, "phys_state", "%s", p->state == IBV_PORT_ACTIVE ? "5: LinkUp" : "3: Disabled");
    put(dir, "link_layer", "%s", link_layer(p->link_layer));
    put(dir, "rate", "%llu Gb/sec (4X EDR)", (unsigned long long)p->speed / 1000);
    put(dir, "lid", "0x%x", 0);
    write_gids(dir, p);
    snprintf(device, sizeof device, "../../../devices/%s", pci);
    write_netdev(p->netdev, device, p->ifindex, up, p->netdev_mtu, p->speed);
    for (uint32_t i = 0; i < p->gid_tbl_len; i++) {
        const uint8_t *raw = p->gids[i].gid.raw;
        if (p->gids[i].used && raw[10] == 0xff && raw[11] == 0xff && raw[0] == 0)
            write_address(p->netdev, raw + 12, p->prefix);
    }
}

static void write_device(const struct fv_dev *d) {
    char dir[128], pci[64], target[96];
    static const char *const TYPE[] = {"", "1: CA", "2: switch", "3: router", "4: RNIC"};
    snprintf(pci, sizeof pci, "pci0000:00/0000:%02x:00.0", d->index + 1);
    snprintf(dir, sizeof dir, "sys/devices/%s", pci);
    put(dir, "numa_node", "%d", (int)(int64_t)d->numa_node);
    put(dir, "vendor", "0xfa4e");
    snprintf(dir, sizeof dir, "sys/class/infiniband/%s", d->ibdev.name);
    put(dir, "node_type", "%s", d->node_type < 5 ? TYPE[d->node_type] : "7: unspecified");
    put(dir, "node_guid", "0200:0000:%04x:%04x", (unsigned)fv.host & 0xffff,
        (unsigned)d->index);
    snprintf(target, sizeof target, "../../../devices/%s", pci);
    link_to(dir, "device", target);
    snprintf(dir, sizeof dir, "sys/class/infiniband_verbs/uverbs%d", d->index);
    put(dir, "ibdev", "%s", d->ibdev.name);
    put(dir, "abi_version", "1");
    for (uint32_t p = 1; p <= d->ports; p++) write_port(d, p, pci);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: fakeverbs-tree DIR\n");
        return 2;
    }
    base = argv[1];
    if (fv_load() != 0) return 1;
    if (mkdir(base, 0755) != 0 && errno != EEXIST) die("mkdir", base);
    routes = create("proc/net/route");
    addresses = create("proc/net/kvrail_ipv4");
    fputs("Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n",
          routes);
    const char *mgmt = getenv("FAKEVERBS_MGMT"), *other = getenv("FAKEVERBS_DEFAULT_ROUTE");
    uint8_t ip[4] = {192, 168, 0, (uint8_t)fv.host};
    if (mgmt == NULL || strcmp(mgmt, "0") != 0) {
        write_netdev("mgmt0", NULL, 2, true, 1500, 1000);
        write_address("mgmt0", ip, 24);
        if (other == NULL) write_route("mgmt0", 0, 0xc0a800fe, 0);
    }
    if (other != NULL) write_route(other, 0, 0x0a0100fe, 0);
    put("sys/devices/system/node/node0", "cpulist", "0");
    for (int i = 0; i < fv.n_dev; i++) write_device(&fv.dev[i]);
    if (fclose(routes) != 0 || fclose(addresses) != 0) die("write", base);
    return 0;
}
