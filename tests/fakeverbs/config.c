/* Knobs: where they come from, their names, and what is set while the process runs. */
#include "fake.h"

#include <strings.h>
#include <time.h>
#include <unistd.h>

struct fv_global fv = {.lock = PTHREAD_MUTEX_INITIALIZER, .slot = -1, .sock = -1};

struct name {
    const char *name;
    size_t at;
    uint64_t start;
};

#define X(knob, value) {#knob, offsetof(struct fv_dev, knob), value},
static const struct name DEV[] = {FV_DEV_KNOBS(X)};
#undef X
#define X(knob, value) {#knob, offsetof(struct fv_port, knob), value},
static const struct name PORT[] = {FV_PORT_KNOBS(X)};
#undef X
#define X(call) #call,
static const char *const CALL[] = {FV_CALLS(X)};
#undef X
#define X(kind) #kind,
static const char *const KIND[] = {FV_KINDS(X)};
#undef X
#define X(count) #count,
static const char *const COUNT[] = {FV_COUNTS(X)};
#undef X
#define LEN(a) (sizeof(a) / sizeof(a)[0])
_Static_assert(FV_COUNT_COUNT <= LEN(fv.count), "fv.count is too small");

static fv_knob *knob(const struct name *table, size_t n, void *base, const char *key) {
    for (size_t i = 0; i < n; i++)
        if (strcmp(table[i].name, key) == 0) return (fv_knob *)((char *)base + table[i].at);
    return NULL;
}

static bool number(const char *text, uint64_t *value) {
    static const struct {
        const char *word;
        uint64_t value;
    } WORDS[] = {{"off", 0},        {"on", 1},       {"down", IBV_PORT_DOWN},
                 {"init", 2},       {"armed", 3},    {"active", IBV_PORT_ACTIVE},
                 {"infiniband", 1}, {"ethernet", 2}, {"unspecified", 0}};
    for (size_t i = 0; i < LEN(WORDS); i++) {
        if (strcasecmp(WORDS[i].word, text) == 0) {
            *value = WORDS[i].value;
            return true;
        }
    }
    char *end;
    errno = 0;
    *value = strtoull(text, &end, 0);
    if (end == text || errno != 0 || *text == '-') return false;
    int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    *value <<= shift;
    return end[shift != 0] == '\0';
}

/* A number behind a fixed word: `port2`, `gid13`, `qp4711`. */
static bool numbered(const char *text, const char *word, uint64_t *n) {
    size_t len = strlen(word);
    char *end;
    if (strncmp(text, word, len) != 0 || text[len] < '0' || text[len] > '9') return false;
    *n = strtoull(text + len, &end, 10);
    return *end == '\0';
}

static int set_port(struct fv_dev *d, uint32_t port, const char *key, const char *value) {
    struct fv_port *p = &d->port[port - 1];
    uint64_t n;
    fv_knob *k = knob(PORT, LEN(PORT), p, key);
    if (k != NULL) {
        uint64_t before = *k;
        if (!number(value, &n)) return EINVAL;
        if (strcmp(key, "gid_tbl_len") == 0 && n > FV_MAX_GID) return ERANGE;
        *k = n;
        if (k == &p->state) fv_port_changed(d, port, before);
        return 0;
    }
    if (strcmp(key, "netdev") == 0) {
        if (strlen(value) >= sizeof p->netdev) return ERANGE;
        strcpy(p->netdev, value);
        return 0;
    }
    if (strcmp(key, "ip") == 0)
        n = 1;
    else if (!numbered(key, "gid", &n) || n >= FV_MAX_GID)
        return ENOENT;
    int err = fv_gid_assign(p, (uint32_t)n, value);
    if (err == 0) fv_event(d, IBV_EVENT_GID_CHANGE, (int)port, NULL, NULL);
    return err;
}

static int set_block(struct fv_dev *d, const char *value) {
    union ibv_gid gid;
    if (strcmp(value, "none") == 0) {
        d->n_blocked = 0;
        return 0;
    }
    if (!fv_gid_parse(value, &gid)) return EINVAL;
    if (d->n_blocked == LEN(d->blocked)) return ERANGE;
    d->blocked[d->n_blocked++] = gid;
    return 0;
}

static int set_dev(struct fv_dev *d, const char *key, const char *value) {
    char head[32];
    const char *dot = strchr(key, '.');
    uint64_t n;
    fv_knob *k = knob(DEV, LEN(DEV), d, key);
    if (dot != NULL && (size_t)(dot - key) < sizeof head) {
        memcpy(head, key, (size_t)(dot - key));
        head[dot - key] = '\0';
        if (numbered(head, "port", &n) && n >= 1 && n <= FV_MAX_PORT)
            return set_port(d, (uint32_t)n, dot + 1, value);
        if (strcmp(head, "fail") != 0) return ENOENT;
        for (size_t i = 0; i < LEN(CALL); i++)
            if (strcmp(CALL[i], dot + 1) == 0) return fv_rule_assign(&d->rule[i], value);
        return ENOENT;
    }
    if (strcmp(key, "delay_us") == 0) {
        char *end;
        d->delay_us = strtoull(value, &end, 10);
        d->delay_max_us = *end == '-' ? strtoull(end + 1, &end, 10) : d->delay_us;
        return *end == '\0' && end != value && d->delay_max_us >= d->delay_us ? 0 : EINVAL;
    }
    if (k != NULL) {
        if (!number(value, &n)) return EINVAL;
        if (strcmp(key, "ports") == 0 && (n < 1 || n > FV_MAX_PORT)) return ERANGE;
        *k = n;
        return 0;
    }
    if (strcmp(key, "wc_force") == 0) return fv_force_assign(&d->force, value);
    if (strcmp(key, "event") == 0) return fv_event_assign(d, value);
    if (strcmp(key, "block") == 0) return set_block(d, value);
    return ENOENT;
}

static int set_qp(uint64_t qpn, const char *key, const char *value) {
    struct fv_qp *qp = fv_find_qp((uint32_t)qpn);
    uint64_t n;
    if (qp == NULL || !number(value, &n)) return EINVAL;
    if (strcmp(key, "blackhole") == 0)
        qp->blackhole = n;
    else if (strcmp(key, "error") == 0)
        qp->force_err = n;
    else
        return ENOENT;
    return 0;
}

static int set_global(const char *key, const char *value) {
    char *end;
    if (strcmp(key, "time_scale") == 0) {
        double scale = strtod(value, &end);
        if (end == value || *end != '\0' || scale < 0 || scale > 1000) return EINVAL;
        fv.time_scale = scale;
        return 0;
    }
    uint64_t n;
    if (!number(value, &n)) return EINVAL;
    if (strcmp(key, "slow_peer_ms") == 0) {
        fv.slow_peer_ms = n;
    } else if (strcmp(key, "seed") == 0) {
        fv.seed = n;
        fv.rng = n | 1;
    } else {
        return ENOENT;
    }
    return 0;
}

static int set_one(const char *key, const char *value) {
    const char *dot = strchr(key, '.');
    char head[32];
    uint64_t n;
    int err = ENOENT;
    if (dot == NULL) return set_global(key, value);
    if ((size_t)(dot - key) >= sizeof head) return ENOENT;
    memcpy(head, key, (size_t)(dot - key));
    head[dot - key] = '\0';
    if (numbered(head, "qp", &n)) return set_qp(n, dot + 1, value);
    for (int i = 0; i < fv.n_dev; i++) {
        if (strcmp(head, "*") != 0 && strcmp(head, fv.dev[i].ibdev.name) != 0) continue;
        if ((err = set_dev(&fv.dev[i], dot + 1, value)) != 0) return err;
    }
    return err;
}

static int complain(const char *part, int err) {
    fprintf(stderr, "fakeverbs: `%s`: %s\n", part,
            err == ENOENT   ? "no such device or knob; README.md has the list"
            : err == ERANGE ? "over what the fake can hold; README.md has the limits"
                            : "not a value of this knob; README.md has the list");
    return err;
}

/* `a.b=c` parted by `;` or new lines, `#` begins a comment. Stops at the first that is wrong. */
int fv_assign(const char *text) {
    char line[256];
    while (*text != '\0') {
        size_t len = strcspn(text, ";\n"), begin = strspn(text, " \t\r");
        size_t end = strcspn(text, "#;\n");
        const char *from = text + begin;
        text += len + (text[len] != '\0');
        if (begin >= end) continue;
        while (end > begin && strchr(" \t\r", from[end - begin - 1]) != NULL) end--;
        if (end - begin >= sizeof line) return complain(from, EINVAL);
        memcpy(line, from, end - begin);
        line[end - begin] = '\0';
        char *eq = strchr(line, '=');
        if (eq == NULL) return complain(line, EINVAL);
        *eq = '\0';
        int err = set_one(line, eq + 1);
        *eq = '=';
        if (err != 0) return complain(line, err);
    }
    return 0;
}

static int load_file(const char *path) {
    static char text[65536];
    FILE *f = fopen(path, "re");
    if (f == NULL) {
        int err = errno;
        fprintf(stderr, "fakeverbs: FAKEVERBS_CONFIG=%s: %s\n", path, strerror(err));
        return err;
    }
    size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = '\0';
    fclose(f);
    return fv_assign(text);
}

static void start_values(void) {
    for (int i = 0; i < fv.n_dev; i++) {
        struct fv_dev *d = &fv.dev[i];
        d->index = i;
        d->ibdev.node_type = IBV_NODE_CA;
        d->ibdev.transport_type = IBV_TRANSPORT_IB;
        snprintf(d->ibdev.name, sizeof d->ibdev.name, "fake%d", i);
        snprintf(d->ibdev.dev_name, sizeof d->ibdev.dev_name, "uverbs%d", i);
        const char *root = getenv("KVRAIL_SYSROOT");
        if (root == NULL) root = "";
        snprintf(d->ibdev.dev_path, sizeof d->ibdev.dev_path,
                 "%.200s/sys/class/infiniband_verbs/uverbs%d", root, i);
        snprintf(d->ibdev.ibdev_path, sizeof d->ibdev.ibdev_path,
                 "%.200s/sys/class/infiniband/fake%d", root, i);
        for (size_t k = 0; k < LEN(DEV); k++)
            *(fv_knob *)((char *)d + DEV[k].at) = DEV[k].start;
        for (uint32_t p = 1; p <= FV_MAX_PORT; p++) {
            struct fv_port *port = &d->port[p - 1];
            for (size_t k = 0; k < LEN(PORT); k++)
                *(fv_knob *)((char *)port + PORT[k].at) = PORT[k].start;
            port->ifindex = 10 + (uint64_t)i * FV_MAX_PORT + p - 1;
            snprintf(port->netdev, sizeof port->netdev, p == 1 ? "fk%d" : "fk%dp2", i);
            fv_default_gids(d, p);
        }
    }
}

static uint64_t from_env(const char *name, uint64_t start) {
    uint64_t n;
    const char *text = getenv(name);
    return text != NULL && number(text, &n) ? n : start;
}

/* Reads the environment; under fv.lock, once. */
int fv_load(void) {
    static int state = -1;
    if (state >= 0) return state;
    FV_UNTRACKED(fv.dev, sizeof fv.dev);
    FV_UNTRACKED(fv.count, sizeof fv.count);
    FV_UNTRACKED(&fv.waiters, sizeof fv.waiters);
    FV_UNTRACKED(&fv.kicked, sizeof fv.kicked);
    FV_UNTRACKED(&fv.wake, sizeof fv.wake);
    uint64_t n = from_env("FAKEVERBS_DEVICES", 2);
    fv.n_dev = n > FV_MAX_DEV ? FV_MAX_DEV : (int)n;
    fv.host = from_env("FAKEVERBS_HOST", 1);
    fv.null_mode = from_env("FAKEVERBS_NULL", 0) != 0;
    fv.time_scale = 1.0;
    fv.slow_peer_ms = 2000;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    fv.seed = from_env("FAKEVERBS_SEED", (uint64_t)t.tv_nsec ^ (uint64_t)getpid() << 32);
    fv.rng = fv.seed | 1;
    start_values();
    const char *file = getenv("FAKEVERBS_CONFIG"), *set = getenv("FAKEVERBS_SET");
    state = file != NULL ? load_file(file) : 0;
    if (state == 0 && set != NULL) state = fv_assign(set);
    return state;
}

FV_EXPORT int fakeverbs_set(const char *assignments) {
    fv_lock();
    int err = fv_load();
    if (err == 0) err = fv_assign(assignments);
    fv_unlock();
    fv_kick();
    return err;
}

static int get_of(struct fv_dev *d, const char *key, uint64_t *value) {
    uint64_t n;
    fv_knob *k = knob(DEV, LEN(DEV), d, key);
    if (k == NULL && strncmp(key, "port", 4) == 0 && key[4] >= '1' && key[5] == '.' &&
        (n = (uint64_t)(key[4] - '1')) < FV_MAX_PORT)
        k = knob(PORT, LEN(PORT), &d->port[n], key + 6);
    if (k != NULL) {
        *value = *k;
        return 0;
    }
    for (size_t i = 0; strncmp(key, "calls.", 6) == 0 && i < LEN(CALL); i++) {
        if (strcmp(CALL[i], key + 6) == 0) {
            *value += d->calls[i];
            return 0;
        }
    }
    for (size_t i = 0; strncmp(key, "live.", 5) == 0 && i < LEN(KIND); i++) {
        if (strcmp(KIND[i], key + 5) == 0) {
            *value += (uint64_t)d->live[i];
            return 0;
        }
    }
    return ENOENT;
}

int fv_get(const char *name, uint64_t *value) {
    *value = 0;
    for (size_t i = 0; i < LEN(COUNT); i++) {
        if (strcmp(COUNT[i], name) == 0) {
            *value = fv.count[i];
            return 0;
        }
    }
    if (strcmp(name, "seed") == 0) {
        *value = fv.seed;
        return 0;
    }
    if (strcmp(name, "slot") == 0) {
        *value = (uint64_t)fv.slot;
        return 0;
    }
    bool sum = strncmp(name, "calls.", 6) == 0 || strncmp(name, "live.", 5) == 0;
    int err = ENOENT;
    for (int i = 0; i < fv.n_dev; i++) {
        size_t len = strlen(fv.dev[i].ibdev.name);
        if (sum)
            err = get_of(&fv.dev[i], name, value);
        else if (strncmp(name, fv.dev[i].ibdev.name, len) == 0 && name[len] == '.')
            return get_of(&fv.dev[i], name + len + 1, value);
    }
    return err;
}

FV_EXPORT int fakeverbs_get(const char *counter, uint64_t *value) {
    fv_lock();
    int err = fv_load();
    if (err == 0) err = fv_get(counter, value);
    fv_unlock();
    return err;
}
