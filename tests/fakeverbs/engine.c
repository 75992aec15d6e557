/* The thread that plays the NICs of this process: it runs while a device is open. */
#include "fake.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER;
static int opened;

/* Wakes the engine; one write is enough for many callers. */
void fv_kick(void) {
    uint64_t one = 1;
    if (fv.wake == 0 || atomic_exchange(&fv.kicked, true)) return;
    if (write(fv.wake, &one, sizeof one) < 0) abort();
}

static uint64_t step_all(uint64_t now) {
    uint64_t next = FV_NEVER;
    for (struct fv_qp *qp = fv.qps; qp != NULL; qp = qp->next) {
        uint64_t at = fv_step(qp, now);
        if (at < next) next = at;
    }
    /* After the steps: each may have put a completion on its own QP's list or another's. */
    for (struct fv_qp *qp = fv.qps; qp != NULL; qp = qp->next) {
        uint64_t at = fv_release_pending(qp, now);
        if (at < next) next = at;
    }
    return next;
}

/* Callers that wait go first: a mutex would let the engine have it again at once. */
static void give_way(void) {
    for (int i = 0; i < 50 && atomic_load(&fv.waiters) != 0; i++) sched_yield();
}

static void *engine(void *arg) {
    struct pollfd p[3] = {{.events = POLLIN}, {.events = POLLIN}, {.events = POLLIN}};
    uint64_t n;
    (void)arg;
    for (;;) {
        pthread_mutex_lock(&fv.lock);
        if (fv.stop) break;
        p[0].fd = fv.wake;
        p[1].fd = fv.sock;
        p[2].fd = fv.inotify;
        atomic_store(&fv.kicked, false);
        if ((p[1].revents & POLLIN) != 0) fv_bus_receive();
        if ((p[2].revents & POLLIN) != 0) fv_bus_control();
        uint64_t now = fv_now(), next = step_all(now);
        if (!fv_bus_flush() && next > now + 100000) next = now + 100000;
        pthread_mutex_unlock(&fv.lock);
        give_way();
        uint64_t wait = next > now ? next - now : 0;
        struct timespec t = {.tv_sec = (time_t)(wait / 1000000000u),
                             .tv_nsec = (long)(wait % 1000000000u)};
        if (ppoll(p, 3, next == FV_NEVER ? NULL : &t, NULL) < 0) p[0].revents = 0;
        if ((p[0].revents & POLLIN) != 0 && read(fv.wake, &n, sizeof n) < 0) abort();
    }
    pthread_mutex_unlock(&fv.lock);
    return NULL;
}

/* The application's signals are not for this thread. */
static int start_thread(void) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int err = pthread_create(&fv.thread, NULL, engine, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (err == 0) pthread_setname_np(fv.thread, "fakeverbs");
    return err;
}

/* At the first open: joins the bus and starts the thread. */
int fv_start(void) {
    pthread_mutex_lock(&start_lock);
    int err = 0;
    if (opened == 0) {
        fv_lock();
        err = fv_bus_open();
        if (err == 0 && (fv.wake = eventfd(0, EFD_CLOEXEC)) < 0) err = errno;
        fv.stop = false;
        if (err == 0) err = start_thread();
        if (err != 0) fv_bus_close();
        fv_unlock();
    }
    if (err == 0) opened++;
    pthread_mutex_unlock(&start_lock);
    return err;
}

/* At the last close: no thread and no descriptor stays, so the library can be unloaded. */
void fv_stop(void) {
    pthread_mutex_lock(&start_lock);
    if (--opened == 0) {
        fv_lock();
        fv.stop = true;
        fv_unlock();
        atomic_store(&fv.kicked, false);
        fv_kick();
        pthread_join(fv.thread, NULL);
        fv_lock();
        fv_bus_close();
        close(fv.wake);
        fv.wake = 0;
        fv_unlock();
    }
    pthread_mutex_unlock(&start_lock);
}
