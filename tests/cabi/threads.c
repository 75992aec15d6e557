/* Several threads share one engine: each registers memory, moves it to itself in both directions
 * with a message, compares every byte and gives all back, while another takes the messages.
 *
 *     threads [ROUNDS]
 */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvrail.h"

enum { THREADS = 4, BLOCKS = 8, BLOCK = 1031 };

static kvr_engine *engine;
static kvr_peer self;
static long rounds = 200;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long heard, wrong, running = THREADS;

static void fail(const char *what, long got) {
    char text[512];
    kvr_last_error(text, sizeof text);
    fprintf(stderr, "threads: %s: %ld (%s)\n", what, got, text);
    exit(1);
}

static void must(kvr_status status, const char *what) {
    if (status != KVR_OK) fail(what, status);
}

static void count(long *what, long by) {
    pthread_mutex_lock(&lock);
    *what += by;
    pthread_mutex_unlock(&lock);
}

static long read_count(const long *what) {
    pthread_mutex_lock(&lock);
    long now = *what;
    pthread_mutex_unlock(&lock);
    return now;
}

static void hear(void *ctx, const char *name, size_t name_len, const void *msg, size_t len) {
    (void)ctx;
    int ok = name_len == 7 && memcmp(name, "threads", 7) == 0 && len == 5;
    count(ok && memcmp(msg, "moved", 5) == 0 ? &heard : &wrong, 1);
}

/* One transfer of every second block from `from` to `to`, the last first. */
static void move(uint32_t direction, kvr_region near, kvr_region far, unsigned char *near_at,
    unsigned char *far_at) {
    kvr_desc local[BLOCKS / 2], remote[BLOCKS / 2];
    for (int i = 0; i < BLOCKS / 2; i++) {
        uint64_t offset = (uint64_t)(BLOCKS - 2 - 2 * i) * BLOCK;
        local[i] = (kvr_desc){(uint64_t)(uintptr_t)near_at + offset, BLOCK, 0, near};
        remote[i] = (kvr_desc){(uint64_t)(uintptr_t)far_at + offset, BLOCK, 0, far};
    }
    kvr_transfer t;
    must(kvr_transfer_prepare_descs(engine, direction, self, local, BLOCKS / 2, remote, BLOCKS / 2,
             &t),
        "prepare");
    kvr_status status;
    while ((status = kvr_transfer_post(engine, t, "moved", 5)) == KVR_ERR_CAPACITY) sched_yield();
    while (status == KVR_IN_PROGRESS) {
        sched_yield();
        status = kvr_transfer_check(engine, t);
    }
    must(status, "transfer");
    must(kvr_transfer_release(engine, t), "release");
    if (kvr_transfer_check(engine, t) != KVR_ERR_STALE) fail("a released transfer", 0);
}

static void *work(void *number) {
    int me = *(int *)number;
    unsigned char *memory = malloc((size_t)2 * BLOCKS * BLOCK);
    if (memory == NULL) fail("malloc", 0);
    unsigned char *near = memory, *far = memory + BLOCKS * BLOCK;
    for (long round = 0; round < rounds; round++) {
        kvr_region regions[2], view;
        for (int i = 0; i < BLOCKS * BLOCK; i++) {
            near[i] = (unsigned char)(i * 7 + me + round);
            far[i] = (unsigned char)(i * 5 + me - round);
        }
        uint64_t len = BLOCKS * BLOCK;
        must(kvr_region_register(engine, (uint64_t)(uintptr_t)near, len, 0, &regions[0]), "near");
        must(kvr_region_register(engine, (uint64_t)(uintptr_t)far, len, 0, &regions[1]), "far");
        must(kvr_region_import_self(engine, regions[1], &view), "import");
        uint32_t direction = round % 2 == 0 ? KVR_READ : KVR_WRITE;
        move(direction, regions[0], view, near, far);
        must(kvr_region_forget(engine, view), "forget");
        must(kvr_region_deregister(engine, regions[0], 0), "deregister");
        must(kvr_region_deregister(engine, regions[1], KVR_DEREGISTER_CANCEL), "deregister");
        for (int i = 0; i < BLOCKS * BLOCK; i++) {
            unsigned char a = (unsigned char)(i * 7 + me + round);
            unsigned char b = (unsigned char)(i * 5 + me - round);
            int moved = i / BLOCK % 2 == 0;
            if (near[i] != (moved && direction == KVR_READ ? b : a)) fail("near byte", i);
            if (far[i] != (moved && direction == KVR_WRITE ? a : b)) fail("far byte", i);
        }
    }
    free(memory);
    count(&running, -1);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc > 1) rounds = strtol(argv[1], NULL, 10);
    kvr_config cfg;
    must(kvr_config_init(&cfg, sizeof cfg), "config");
    must(kvr_config_set(&cfg, "name", "threads"), "name");
    must(kvr_config_set(&cfg, "transport", "local"), "transport");
    must(kvr_config_set(&cfg, "inline_bytes", "0"), "inline_bytes");
    must(kvr_engine_create(&cfg, &engine), "create");
    must(kvr_peer_self(engine, &self), "self");
    pthread_t threads[THREADS];
    int numbers[THREADS];
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        if (pthread_create(&threads[i], NULL, work, &numbers[i]) != 0) fail("pthread_create", i);
    }
    while (read_count(&running) > 0) {
        must(kvr_notifs(engine, hear, NULL, NULL), "notifs");
        sched_yield();
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    must(kvr_notifs(engine, hear, NULL, NULL), "notifs");
    must(kvr_engine_destroy(engine), "destroy");
    if (wrong != 0 || heard != THREADS * rounds) fail("messages that came", heard);
    printf("threads: %ld transfers, every byte and message compared\n", heard);
    return 0;
}
