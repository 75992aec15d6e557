/* Faults: calls that fail, completions that are wrong, random numbers, the log of destroys. */
#include "fake.h"

#include <strings.h>

#define LEN(a) (sizeof(a) / sizeof(a)[0])

static const struct {
    const char *name;
    int err;
} ERRORS[] = {
    {"EPERM", EPERM},       {"ENOENT", ENOENT}, {"EIO", EIO},         {"ENXIO", ENXIO},
    {"EBADF", EBADF},       {"EAGAIN", EAGAIN}, {"ENOMEM", ENOMEM},   {"EACCES", EACCES},
    {"EFAULT", EFAULT},     {"EBUSY", EBUSY},   {"ENODEV", ENODEV},   {"EINVAL", EINVAL},
    {"EMFILE", EMFILE},     {"ENOSPC", ENOSPC}, {"ERANGE", ERANGE},   {"ENOSYS", ENOSYS},
    {"EOVERFLOW", EOVERFLOW}, {"EPROTONOSUPPORT", EPROTONOSUPPORT},
    {"EOPNOTSUPP", EOPNOTSUPP}, {"EADDRNOTAVAIL", EADDRNOTAVAIL},
    {"ENETUNREACH", ENETUNREACH}, {"ETIMEDOUT", ETIMEDOUT}, {"ENONE", 0},
};

/* A name above or a number from 0 to 133. */
int fv_errno_of(const char *text, int *err) {
    for (size_t i = 0; i < LEN(ERRORS); i++) {
        if (strcmp(ERRORS[i].name, text) == 0) {
            *err = ERRORS[i].err;
            return 0;
        }
    }
    char *end;
    long n = strtol(text, &end, 10);
    *err = (int)n;
    return end != text && *end == '\0' && n >= 0 && n <= 133 ? 0 : EINVAL;
}

/* `N[+][@ITEM][:ERRNO]` or `off`. N and ITEM count from 1 and 0; ENOMEM unless said. */
int fv_rule_assign(struct fv_rule *r, const char *text) {
    struct fv_rule fresh = {.err = ENOMEM};
    char *end;
    if (strcmp(text, "off") == 0) {
        memset(r, 0, sizeof *r);
        return 0;
    }
    fresh.nth = strtoull(text, &end, 10);
    if (end == text || fresh.nth == 0) return EINVAL;
    if (*end == '+') {
        fresh.onward = true;
        end++;
    }
    if (*end == '@') fresh.item = strtoull(end + 1, &end, 10);
    if (*end == ':') {
        if (fv_errno_of(end + 1, &fresh.err) != 0) return EINVAL;
    } else if (*end != '\0') {
        return EINVAL;
    }
    *r = fresh;
    return 0;
}

static bool is_destroy(enum fv_call c) {
    return c == FV_CALL_close_device || c == FV_CALL_dealloc_pd || c == FV_CALL_dereg_mr ||
           c == FV_CALL_destroy_comp_channel || c == FV_CALL_destroy_cq || c == FV_CALL_destroy_qp;
}

static bool hits(struct fv_dev *d, enum fv_call call) {
    struct fv_rule *r = &d->rule[call];
    atomic_fetch_add_explicit(&d->calls[call], 1, memory_order_relaxed);
    if (d->fatal && !is_destroy(call)) FV_COUNT(after_fatal);
    if (r->nth == 0) return false;
    r->seen++;
    return r->seen == r->nth || (r->onward && r->seen > r->nth);
}

/* Counts the call; true when it is to fail, with the error for the caller. */
bool fv_fails_quietly(struct fv_dev *d, enum fv_call call, int *err) {
    if (!hits(d, call)) return false;
    *err = d->rule[call].err;
    return true;
}

/* The same for calls that say so in errno. An error of 0 leaves errno as it was. */
bool fv_fails(struct fv_dev *d, enum fv_call call) {
    int err;
    if (!fv_fails_quietly(d, call, &err)) return false;
    if (err != 0) errno = err;
    return true;
}

/* The item of a posted list that is to be refused, or -1. */
int64_t fv_item_refused(struct fv_dev *d, enum fv_call call, int *err) {
    if (!hits(d, call)) return -1;
    *err = d->rule[call].err;
    return (int64_t)d->rule[call].item;
}

static const struct {
    const char *name;
    enum ibv_wc_status status;
} STATUS[] = {
    {"LOC_LEN_ERR", IBV_WC_LOC_LEN_ERR},         {"LOC_QP_OP_ERR", IBV_WC_LOC_QP_OP_ERR},
    {"LOC_PROT_ERR", IBV_WC_LOC_PROT_ERR},       {"WR_FLUSH_ERR", IBV_WC_WR_FLUSH_ERR},
    {"MW_BIND_ERR", IBV_WC_MW_BIND_ERR},         {"BAD_RESP_ERR", IBV_WC_BAD_RESP_ERR},
    {"LOC_ACCESS_ERR", IBV_WC_LOC_ACCESS_ERR},   {"REM_INV_REQ_ERR", IBV_WC_REM_INV_REQ_ERR},
    {"REM_ACCESS_ERR", IBV_WC_REM_ACCESS_ERR},   {"REM_OP_ERR", IBV_WC_REM_OP_ERR},
    {"RETRY_EXC_ERR", IBV_WC_RETRY_EXC_ERR},     {"RNR_RETRY_EXC_ERR", IBV_WC_RNR_RETRY_EXC_ERR},
    {"FATAL_ERR", IBV_WC_FATAL_ERR},             {"RESP_TIMEOUT_ERR", IBV_WC_RESP_TIMEOUT_ERR},
    {"GENERAL_ERR", IBV_WC_GENERAL_ERR},
};

/* `id:WR_ID:STATUS`, `n:COUNT:STATUS` (the COUNT-th work request from now) or `off`. */
int fv_force_assign(struct fv_force *f, const char *text) {
    struct fv_force fresh = {.on = true, .by_id = strncmp(text, "id:", 3) == 0};
    char *end;
    if (strcmp(text, "off") == 0) {
        f->on = false;
        return 0;
    }
    if (!fresh.by_id && strncmp(text, "n:", 2) != 0) return EINVAL;
    text = strchr(text, ':') + 1;
    fresh.match = strtoull(text, &end, 0);
    if (end == text || *end != ':') return EINVAL;
    for (size_t i = 0; i < LEN(STATUS); i++)
        if (strcmp(STATUS[i].name, end + 1) == 0) fresh.status = STATUS[i].status;
    if (fresh.status == IBV_WC_SUCCESS) return EINVAL;
    *f = fresh;
    return 0;
}

/* Whether this work request ends with a status that was asked for. */
bool fv_forced(struct fv_dev *d, const struct fv_send *s, enum ibv_wc_status *status) {
    struct fv_force *f = &d->force;
    if (!f->on) return false;
    if (f->by_id ? s->wr_id != f->match : --f->match != 0) return false;
    f->on = false;
    *status = f->status;
    return true;
}

/* xorshift64*: the delays of a run can be had again from its seed. */
uint64_t fv_random(void) {
    static bool said;
    if (!said) {
        said = true;
        fprintf(stderr, "fakeverbs: FAKEVERBS_SEED=%llu\n", (unsigned long long)fv.seed);
    }
    fv.rng ^= fv.rng >> 12;
    fv.rng ^= fv.rng << 25;
    fv.rng ^= fv.rng >> 27;
    return fv.rng * UINT64_C(2685821657736338717);
}

void fv_log_destroy(const char *what) {
    size_t len = strlen(what);
    if (fv.log_len + len + 2 > sizeof fv.log) fv.log_len = 0;
    memcpy(fv.log + fv.log_len, what, len);
    fv.log_len += len;
    fv.log[fv.log_len++] = ' ';
    fv.log[fv.log_len] = '\0';
}

/* The kinds that were destroyed, in order, as words; empties the log. Returns its length. */
FV_EXPORT size_t fakeverbs_log(char *buf, size_t size) {
    fv_lock();
    size_t len = fv.log_len;
    if (size > 0) snprintf(buf, size, "%s", fv.log);
    fv.log_len = 0;
    fv.log[0] = '\0';
    fv_unlock();
    return len;
}
