/* Protection domains, thread domains and memory regions. */
#include "fake.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#undef ibv_reg_mr
#undef ibv_reg_mr_iova

static struct fv_dev *dev_of(struct ibv_context *c) { return (struct fv_dev *)c->device; }

static struct fv_pd *root(struct ibv_pd *pd) {
    struct fv_pd *p = (struct fv_pd *)pd;
    return p->parent != NULL ? p->parent : p;
}

static struct fv_pd *new_pd(struct ibv_context *c, enum fv_call call) {
    struct fv_dev *d = dev_of(c);
    struct fv_pd *p = NULL;
    if (fv_fails(d, call)) return NULL;
    if (d->fatal)
        errno = EIO;
    else if ((uint64_t)d->live[FV_KIND_pd] >= d->max_pd || (p = calloc(1, sizeof *p)) == NULL)
        errno = ENOMEM;
    if (p == NULL) return NULL;
    p->pd.context = c;
    d->live[FV_KIND_pd]++;
    fv_ctx_of(c)->objects++;
    return p;
}

FV_EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *c) {
    fv_lock();
    struct fv_pd *p = new_pd(c, FV_CALL_alloc_pd);
    fv_unlock();
    return p == NULL ? NULL : &p->pd;
}

struct ibv_pd *fv_alloc_parent_domain(struct ibv_context *c,
                                      struct ibv_parent_domain_init_attr *a) {
    if (a->pd == NULL || a->pd->context != c || (a->comp_mask & ~3u) != 0) {
        errno = EINVAL;
        return NULL;
    }
    fv_lock();
    struct fv_pd *p = new_pd(c, FV_CALL_alloc_parent_domain);
    if (p != NULL) {
        p->parent = root(a->pd);
        p->parent->users++;
        p->td = (struct fv_td *)a->td;
        if (p->td != NULL) p->td->users++;
    }
    fv_unlock();
    return p == NULL ? NULL : &p->pd;
}

static int busy(void) {
    FV_COUNT(order_violations);
    return EBUSY;
}

FV_EXPORT int ibv_dealloc_pd(struct ibv_pd *pd) {
    struct fv_pd *p = (struct fv_pd *)pd;
    struct fv_dev *d = dev_of(pd->context);
    int err = 0;
    fv_lock();
    if (!fv_fails_quietly(d, FV_CALL_dealloc_pd, &err) && p->users != 0) err = busy();
    if (err == 0) {
        if (p->parent != NULL) p->parent->users--;
        if (p->td != NULL) p->td->users--;
        d->live[FV_KIND_pd]--;
        fv_ctx_of(pd->context)->objects--;
        fv_log_destroy("pd");
        free(p);
    }
    fv_unlock();
    return err;
}

struct ibv_td *fv_alloc_td(struct ibv_context *c, struct ibv_td_init_attr *a) {
    struct fv_td *t = NULL;
    (void)a;
    fv_lock();
    if (!fv_fails(dev_of(c), FV_CALL_alloc_td)) {
        t = calloc(1, sizeof *t);
        if (t == NULL) errno = ENOMEM;
    }
    if (t != NULL) {
        t->td.context = c;
        dev_of(c)->live[FV_KIND_td]++;
        fv_ctx_of(c)->objects++;
    }
    fv_unlock();
    return t == NULL ? NULL : &t->td;
}

int fv_dealloc_td(struct ibv_td *td) {
    struct fv_td *t = (struct fv_td *)td;
    fv_lock();
    int err = t->users != 0 ? busy() : 0;
    if (err == 0) {
        dev_of(td->context)->live[FV_KIND_td]--;
        fv_ctx_of(td->context)->objects--;
        fv_log_destroy("td");
        free(t);
    }
    fv_unlock();
    return err;
}

/* Pages that are not mapped cannot be pinned. */
static bool mapped(uintptr_t addr, size_t len) {
    static unsigned char in_core[4096];
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = addr & ~(page - 1);
    uintptr_t end = addr + len, step = page * sizeof in_core;
    if (end < addr) return false;
    for (; at < end; at += step)
        if (mincore((void *)at, end - at < step ? end - at : step, in_core) != 0) return false;
    return true;
}

static int may_register(struct fv_dev *d, size_t len, unsigned access) {
    struct rlimit limit;
    unsigned remote_write = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    atomic_fetch_or(&fv.count[FV_COUNT_mr_access_or], access);
    if ((access & IBV_ACCESS_RELAXED_ORDERING) != 0) FV_COUNT(mr_relaxed);
    if (d->fatal) return EIO;
    if (len == 0 || len > d->max_mr_size || (access & ~d->mr_access_mask) != 0) return EINVAL;
    if ((access & remote_write) != 0 && (access & IBV_ACCESS_LOCAL_WRITE) == 0) return EINVAL;
    if ((uint64_t)d->live[FV_KIND_mr] >= d->max_mr) return ENOMEM;
    if (d->memlock == 0 || getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 0;
    uint64_t pinned = 0;
    for (int i = 0; i < fv.n_dev; i++) pinned += fv.dev[i].pinned;
    return limit.rlim_cur != RLIM_INFINITY && pinned + len > limit.rlim_cur ? ENOMEM : 0;
}

static struct fv_mr *new_mr(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova,
                            unsigned access) {
    struct fv_mr *m = calloc(1, sizeof *m);
    struct fv_dev *d = dev_of(pd->context);
    if (m == NULL) return NULL;
    m->pd = root(pd);
    m->iova = iova;
    m->base = addr;
    m->access = access;
    m->mr.context = pd->context;
    m->mr.pd = pd;
    m->mr.addr = addr;
    m->mr.length = len;
    if (fv.next_key == 0) fv.next_key = (uint32_t)getpid() * 977u;
    /* Never twice within a run of 2^24, so that a stale key is caught. */
    m->mr.handle = ++fv.next_key;
    m->mr.lkey = m->mr.rkey = fv.next_key << 8 | (fv.next_key & 0x7f);
    struct fv_mr **bucket = &fv.mrs[(m->mr.lkey >> 8) % FV_MR_BUCKETS];
    m->next = *bucket;
    *bucket = m;
    m->pd->users++;
    d->live[FV_KIND_mr]++;
    d->pinned += len;
    return m;
}

static void count_most(enum fv_count which, uint64_t value) {
    uint64_t seen = atomic_load_explicit(&fv.count[which], memory_order_relaxed);
    while (seen < value && !atomic_compare_exchange_weak_explicit(&fv.count[which], &seen, value,
                                                                  memory_order_relaxed,
                                                                  memory_order_relaxed))
        continue;
}

static struct ibv_mr *reg(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova,
                          unsigned access) {
    struct fv_mr *m = NULL;
    /* Pages are pinned device by device, so this is waited for outside of the one lock. */
    uint64_t us = atomic_load_explicit(&dev_of(pd->context)->reg_us, memory_order_relaxed);
    count_most(FV_COUNT_reg_most, FV_COUNT(reg_inside) + 1);
    if (us != 0) usleep((useconds_t)us);
    FV_COUNT_BY(reg_inside, -UINT64_C(1));
    count_most(FV_COUNT_mr_longest, len);
    fv_lock();
    if (!fv_fails(dev_of(pd->context), FV_CALL_reg_mr)) {
        int err = may_register(dev_of(pd->context), len, access);
        if (err == 0 && !mapped((uintptr_t)addr, len)) err = EFAULT;
        if (err == 0 && (m = new_mr(pd, addr, len, iova, access)) == NULL) err = ENOMEM;
        if (err != 0) errno = err;
    }
    fv_unlock();
    return m == NULL ? NULL : &m->mr;
}

/* The old entries take the flags as they are; iova2 is told that some are optional. */
FV_EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access) {
    return reg(pd, addr, len, (uintptr_t)addr, (unsigned)access);
}

FV_EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova,
                                         int access) {
    return reg(pd, addr, len, iova, (unsigned)access);
}

FV_EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t len,
                                          uint64_t iova, unsigned access) {
    return reg(pd, addr, len, iova, access);
}

static int map_dmabuf(struct fv_dev *d, uint64_t offset, size_t len, uint64_t iova, int fd,
                      void **map, size_t *map_len, uint8_t **base) {
    struct stat st;
    uint64_t page = d->page_size, system = (uint64_t)sysconf(_SC_PAGESIZE);
    if (d->dmabuf == 0) return EOPNOTSUPP;
    if (offset % d->dmabuf_align != 0 || len % d->dmabuf_align != 0) return EINVAL;
    if ((offset & (page - 1)) != (iova & (page - 1))) return EINVAL;
    if (fstat(fd, &st) != 0) return EBADF;
    if (offset + len < offset || offset + len > (uint64_t)st.st_size) return EINVAL;
    uint64_t skip = offset & (system - 1);
    *map_len = len + skip;
    *map = mmap(NULL, *map_len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(offset - skip));
    if (*map == MAP_FAILED) return errno;
    *base = (uint8_t *)*map + skip;
    return 0;
}

/* Any descriptor that can be mapped serves as a dma-buf, a memfd for one. */
FV_EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t len,
                                           uint64_t iova, int fd, int access) {
    struct fv_dev *d = dev_of(pd->context);
    struct fv_mr *m = NULL;
    void *map = NULL;
    size_t map_len = 0;
    uint8_t *base = NULL;
    fv_lock();
    if (!fv_fails(d, FV_CALL_reg_dmabuf_mr)) {
        int err = may_register(d, len, (unsigned)access);
        if (err == 0) err = map_dmabuf(d, offset, len, iova, fd, &map, &map_len, &base);
        if (err == 0 && (m = new_mr(pd, base, len, iova, (unsigned)access)) == NULL) {
            munmap(map, map_len);
            err = ENOMEM;
        }
        if (err != 0) errno = err;
    }
    if (m != NULL) {
        m->mr.addr = (void *)(uintptr_t)iova;
        m->map = map;
        m->map_len = map_len;
    }
    fv_unlock();
    return m == NULL ? NULL : &m->mr;
}

FV_EXPORT int ibv_dereg_mr(struct ibv_mr *mr) {
    struct fv_mr *m = (struct fv_mr *)mr;
    struct fv_dev *d = dev_of(mr->context);
    int err = 0;
    fv_lock();
    if (!fv_fails_quietly(d, FV_CALL_dereg_mr, &err)) {
        /* What was acknowledged lands before the memory is the owner's again. */
        for (struct fv_qp *qp = fv.qps; qp != NULL; qp = qp->next)
            if (qp->pd == m->pd) fv_place_late(qp);
        fv_dry(d, m);
        struct fv_mr **at = &fv.mrs[(mr->lkey >> 8) % FV_MR_BUCKETS];
        while (*at != m) at = &(*at)->next;
        *at = m->next;
        m->pd->users--;
        d->live[FV_KIND_mr]--;
        d->pinned -= mr->length;
        fv_log_destroy("mr");
        if (m->map != NULL) munmap(m->map, m->map_len);
        free(m);
    }
    fv_unlock();
    return err;
}

struct fv_mr *fv_find_mr(struct fv_pd *pd, uint32_t key) {
    struct fv_mr *m = fv.mrs[(key >> 8) % FV_MR_BUCKETS];
    while (m != NULL && (m->mr.lkey != key || m->pd != pd)) m = m->next;
    return m;
}

/* Where the bytes lie, or NULL when the key, the range or the rights are wrong. */
uint8_t *fv_reach(struct fv_pd *pd, uint32_t key, uint64_t addr, uint64_t len, unsigned access) {
    struct fv_mr *m = fv_find_mr(pd, key);
    if (m == NULL || (m->access & access) != access) return NULL;
    if (addr < m->iova || len > m->mr.length || addr - m->iova > m->mr.length - len) return NULL;
    return m->base + (addr - m->iova);
}
