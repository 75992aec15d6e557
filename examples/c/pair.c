/* Two processes: the parent owns memory, the child (this program once more) reads the even blocks
 * and writes the odd ones, then tells the parent. Both sides compare every byte.
 *
 *     cc -std=c11 examples/c/pair.c -Iinclude -Ltarget/release -lkvrail -o pair && ./pair
 */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvrail.h"

enum { BLOCKS = 64, BLOCK = 4097, HALF = BLOCKS / 2, BLOB = 8192, WAIT_MS = 10000 };
static const char DONE[] = "all blocks moved";

/* What the child needs to know, through a pipe. A real program has its own way for this. */
struct invitation {
    uint64_t base;
    size_t engine_len, region_len;
    unsigned char engine[BLOB], region[BLOB];
};

static void must(kvr_status status, const char *what) {
    if (status < 0) {
        char text[512];
        kvr_last_error(text, sizeof text);
        fprintf(stderr, "pair: %s: %s (%s)\n", what, text, kvr_strerror(status));
        exit(1);
    }
}

static void need(int ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "pair: %s\n", what);
        exit(1);
    }
}

/* Every byte of every block of either side is its own. */
static unsigned char pattern(int side, size_t block, size_t byte) {
    return (unsigned char)(side * 101 + block * 31 + byte * 7 + (byte >> 8));
}

static void fill(unsigned char *memory, int side) {
    for (size_t i = 0; i < BLOCKS; i++)
        for (size_t j = 0; j < BLOCK; j++) memory[i * BLOCK + j] = pattern(side, i, j);
}

static size_t differ(const unsigned char *block, int side, size_t number) {
    size_t bad = 0;
    for (size_t j = 0; j < BLOCK; j++) bad += block[j] != pattern(side, number, j);
    return bad;
}

static kvr_engine *make(const char *name) {
    kvr_config cfg;
    kvr_engine *engine = NULL;
    must(kvr_config_init(&cfg, sizeof cfg), "defaults");
    must(kvr_config_set(&cfg, "name", name), "name");
    must(kvr_config_env(&cfg), "environment");
    must(kvr_engine_create(&cfg, &engine), "engine");
    return engine;
}

/* ---- child ---- */

static void run(kvr_engine *e, uint32_t direction, kvr_peer peer, kvr_table local,
                const uint32_t *local_idx, kvr_table remote, const uint32_t *remote_idx,
                const char *message) {
    kvr_transfer t = 0;
    must(kvr_transfer_prepare(e, direction, peer, local, local_idx, HALF, remote, remote_idx, HALF,
                              &t),
         "prepare");
    kvr_status status = kvr_transfer_post(e, t, message, message ? strlen(message) : 0);
    while (status == KVR_IN_PROGRESS) status = kvr_transfer_check(e, t);
    must(status, "transfer");
    must(kvr_transfer_release(e, t), "release");
}

static int initiator(void) {
    static struct invitation in;
    static unsigned char memory[BLOCKS * BLOCK];
    need(fread(&in, sizeof in, 1, stdin) == 1, "no invitation on standard input");
    fill(memory, 2);

    kvr_engine *e = make("initiator");
    kvr_peer peer = 0;
    kvr_region own = 0, theirs = 0;
    must(kvr_peer_add(e, in.engine, in.engine_len, "target", strlen("target"), &peer), "peer");
    must(kvr_peer_connect(e, peer, WAIT_MS), "connect");
    must(kvr_region_register(e, (uintptr_t)memory, sizeof memory, KVR_MEM_HOST, &own), "register");
    must(kvr_region_import(e, peer, in.region, in.region_len, &theirs), "import");

    /* Tables: strided here, a list there. They say the same. */
    kvr_stride run_of_blocks = {(uintptr_t)memory, BLOCK, BLOCK, BLOCKS, own};
    kvr_desc list[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++) {
        kvr_desc one = {in.base + i * BLOCK, BLOCK, 0, theirs};
        list[i] = one;
    }
    kvr_table local = 0, remote = 0;
    must(kvr_table_create_strided(e, &run_of_blocks, 1, &local), "local table");
    must(kvr_table_create(e, list, BLOCKS, &remote), "remote table");

    /* Their even blocks come here in reverse order, our odd blocks go to the same places there. */
    uint32_t even[HALF], even_reversed[HALF], odd[HALF];
    for (uint32_t i = 0; i < HALF; i++) {
        even[i] = 2 * i;
        even_reversed[i] = 2 * (HALF - 1 - i);
        odd[i] = 2 * i + 1;
    }
    run(e, KVR_READ, peer, local, even_reversed, remote, even, NULL);
    run(e, KVR_WRITE, peer, local, odd, remote, odd, DONE);

    size_t bad = 0;
    for (size_t i = 0; i < HALF; i++) bad += differ(memory + even_reversed[i] * BLOCK, 1, even[i]);
    for (size_t i = 0; i < HALF; i++) bad += differ(memory + odd[i] * BLOCK, 2, odd[i]);
    need(bad == 0, "bytes that were read differ");

    /* Until the parent has seen the message, this engine must stay. */
    while (getchar() != EOF) continue;
    must(kvr_table_destroy(e, local), "destroy table");
    must(kvr_table_destroy(e, remote), "destroy table");
    must(kvr_region_forget(e, theirs), "forget");
    must(kvr_peer_remove(e, peer), "remove peer");
    must(kvr_region_deregister(e, own, 0), "deregister");
    must(kvr_engine_destroy(e), "destroy");
    return 0;
}

/* ---- parent ---- */

struct inbox {
    int right, wrong;
};

static void receive(void *ctx, const char *name, size_t name_len, const void *msg, size_t len) {
    struct inbox *inbox = ctx;
    int right = name_len == strlen("initiator") && memcmp(name, "initiator", name_len) == 0 &&
                len == strlen(DONE) && memcmp(msg, DONE, len) == 0;
    inbox->right += right;
    inbox->wrong += !right;
}

static pid_t start(const char *self, int *to_child) {
    int ends[2];
    need(pipe(ends) == 0, "pipe failed");
    pid_t child = fork();
    need(child >= 0, "fork failed");
    if (child == 0) { /* an engine does not survive fork(): nothing but exec here */
        if (dup2(ends[0], 0) == 0) {
            close(ends[0]);
            close(ends[1]);
            execl(self, self, "initiator", (char *)NULL);
        }
        _exit(127);
    }
    close(ends[0]);
    *to_child = ends[1];
    return child;
}

static void write_all(int fd, const void *data, size_t len) {
    const char *at = data;
    while (len > 0) {
        ssize_t n = write(fd, at, len);
        if (n < 0 && errno == EINTR) continue;
        need(n > 0, "the child does not listen");
        at += n;
        len -= (size_t)n;
    }
}

int main(int argc, char **argv) {
    static struct invitation out;
    static unsigned char memory[BLOCKS * BLOCK];
    if (argc > 1 && strcmp(argv[1], "initiator") == 0) return initiator();

    fill(memory, 1);
    kvr_engine *e = make("target");
    kvr_region region = 0;
    must(kvr_region_register(e, (uintptr_t)memory, sizeof memory, KVR_MEM_HOST, &region),
         "register");
    out.base = (uintptr_t)memory;
    out.engine_len = sizeof out.engine;
    must(kvr_engine_metadata(e, out.engine, &out.engine_len), "metadata");
    out.region_len = sizeof out.region;
    must(kvr_region_metadata(e, region, out.region, &out.region_len), "region metadata");

    int to_child = -1, status = 0;
    pid_t child = start("/proc/self/exe", &to_child);
    write_all(to_child, &out, sizeof out);

    struct inbox inbox = {0, 0};
    for (int ms = 0; ms < WAIT_MS && inbox.right + inbox.wrong == 0; ms++) {
        must(kvr_notifs(e, receive, &inbox, NULL), "notifications");
        need(waitpid(child, &status, WNOHANG) == 0, "the child ended early");
        poll(NULL, 0, 1);
    }
    need(inbox.right == 1 && inbox.wrong == 0, "not the one expected notification");

    /* The message comes after the data, so all of it is here. */
    size_t bad = 0;
    for (size_t i = 0; i < BLOCKS; i++) bad += differ(memory + i * BLOCK, i % 2 ? 2 : 1, i);
    need(bad == 0, "bytes that were written differ");

    close(to_child);
    need(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
         "the child failed");
    must(kvr_region_deregister(e, region, 0), "deregister");
    must(kvr_engine_destroy(e), "destroy");
    printf("pair.c: OK, %d blocks of %d bytes read and %d written between two processes, 1 "
           "notification\n",
           HALF, BLOCK, HALF);
    return 0;
}
