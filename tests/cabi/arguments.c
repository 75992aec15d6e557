/* What the C ABI does with wrong arguments: the right status, a text that names the value, no
 * crash. Also old and new struct sizes, memory of the caller's, and a forked child.
 */
#define _POSIX_C_SOURCE 200809L

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvrail.h"

static int failures;
static char text[4096];

static void report(int line, const char *call, const char *what, long got) {
    fprintf(stderr, "arguments.c:%d: %s: %s, got %ld, text: %s\n", line, call, what, got, text);
    failures++;
}

/* The call returns `want`; a failure's text starts with the function's name. */
static void is(int line, const char *call, kvr_status got, kvr_status want) {
    kvr_last_error(text, sizeof text);
    if (got != want) report(line, call, kvr_strerror(want), got);
    size_t name = strcspn(call, "(");
    if (want < 0 && (strncmp(text, call, name) != 0 || strncmp(text + name, ": ", 2) != 0))
        report(line, call, "the text is another call's", got);
}

/* A handle that names nothing: which of these it is depends on its bits. */
static void refused(int line, const char *call, kvr_status got) {
    int ok = got == KVR_ERR_INVALID || got == KVR_ERR_STALE || got == KVR_ERR_NOT_FOUND;
    is(line, call, got, ok ? got : KVR_ERR_INVALID);
}

static void says(int line, const char *part) {
    if (strstr(text, part) == NULL) report(line, part, "not in the text", 0);
}

#define IS(call, want) is(__LINE__, #call, call, want)
#define REFUSED(call) refused(__LINE__, #call, call)
#define SAYS(part) says(__LINE__, part)
#define TRUE(condition) \
    do { \
        if (!(condition)) report(__LINE__, #condition, "is false", 0); \
    } while (0)

static void notif(void *ctx, const char *name, size_t name_len, const void *msg, size_t len) {
    (void)name, (void)name_len, (void)msg, (void)len;
    ++*(int *)ctx;
}

static void event(void *ctx, const kvr_event *told) {
    (void)told;
    ++*(int *)ctx;
}

static void versions_and_texts(void) {
    char small[8];
    memset(small, 'x', sizeof small);
    TRUE(kvr_abi_version() == (KVR_ABI_MAJOR << 16 | KVR_ABI_MINOR));
    TRUE(strlen(kvr_version()) >= 5);
    TRUE(strcmp(kvr_strerror(KVR_OK), "ok") == 0);
    TRUE(strcmp(kvr_strerror(-9999), "unknown status") == 0);
    TRUE(kvr_last_error(NULL, 0) == 0); /* nothing failed yet */

    IS(kvr_progress(NULL), KVR_ERR_INVALID);
    size_t full = kvr_last_error(NULL, 0);
    TRUE(full == strlen(text) && full > sizeof small);
    TRUE(kvr_last_error(small, 4) == full && memcmp(small, "kvr\0xxxx", 8) == 0);
    TRUE(kvr_last_error(small, 0) == full && small[0] == 'k');
    TRUE(kvr_last_error(NULL, 100) == full);

    char *keys = malloc(kvr_config_keys(NULL, 0) + 1);
    TRUE(keys != NULL);
    if (keys == NULL) return;
    size_t len = kvr_config_keys(keys, kvr_config_keys(NULL, 0) + 1);
    TRUE(len == strlen(keys) && strstr(keys, "stripe_width=1\n") != NULL);
    free(keys);
}

static void configuration(void) {
    kvr_config cfg, before;
    /* A struct of the future: one more field. */
    struct {
        kvr_config known;
        uint64_t added;
    } newer;

    IS(kvr_config_init(NULL, sizeof cfg), KVR_ERR_INVALID);
    IS(kvr_config_init(&cfg, 0), KVR_ERR_INVALID);
    IS(kvr_config_init(&cfg, 3), KVR_ERR_INVALID);
    SAYS("struct_size is 3");
    IS(kvr_config_init(&cfg, 4097), KVR_ERR_INVALID);
    IS(kvr_config_init(&cfg, SIZE_MAX), KVR_ERR_INVALID);
    IS(kvr_config_init((kvr_config *)((char *)&newer + 1), 64), KVR_ERR_INVALID);
    SAYS("aligned");
    IS(kvr_config_init(&cfg, sizeof cfg), KVR_OK);
    TRUE(cfg.struct_size == sizeof cfg && cfg.max_peers == 256 && cfg.inline_bytes == 65536);
    TRUE(cfg.flags == KVR_CFG_PROGRESS_THREAD && cfg.numa_node == -1);

    IS(kvr_config_set(NULL, "rails", "1"), KVR_ERR_INVALID);
    IS(kvr_config_set(&cfg, NULL, "1"), KVR_ERR_INVALID);
    IS(kvr_config_set(&cfg, "rails", NULL), KVR_ERR_INVALID);
    IS(kvr_config_set(&cfg, "name", "\xff"), KVR_ERR_INVALID);
    SAYS("UTF-8");
    before = cfg;
    IS(kvr_config_set(&cfg, "no_such", "1"), KVR_ERR_CONFIG);
    SAYS("no_such");
    SAYS("stripe_width"); /* the list of known ones */
    IS(kvr_config_set(&cfg, "rails", "many"), KVR_ERR_CONFIG);
    SAYS("many");
    TRUE(memcmp(&cfg, &before, sizeof cfg) == 0);
    IS(kvr_config_set(&cfg, "rails", "2"), KVR_OK);
    IS(kvr_config_set(&cfg, "name", "agent"), KVR_OK);
    TRUE(cfg.rails == 2 && strcmp(cfg.name, "agent") == 0);

    setenv("KVRAIL_RAILS", "3", 1);
    IS(kvr_config_env(&cfg), KVR_OK);
    TRUE(cfg.rails == 3);
    setenv("KVRAIL_RAILS", "many", 1);
    IS(kvr_config_env(&cfg), KVR_ERR_CONFIG);
    TRUE(cfg.rails == 3);
    unsetenv("KVRAIL_RAILS");
    IS(kvr_config_env(NULL), KVR_ERR_INVALID);

    /* An old caller: the struct ended before `name`, and what follows is not ours to write. */
    memset(&cfg, 0x5a, sizeof cfg);
    IS(kvr_config_init(&cfg, offsetof(kvr_config, name)), KVR_OK);
    TRUE(cfg.struct_size == offsetof(kvr_config, name) && cfg.name[0] == 0x5a);
    IS(kvr_config_set(&cfg, "rails", "2"), KVR_OK);
    TRUE(cfg.rails == 2 && cfg.name[0] == 0x5a);
    IS(kvr_config_set(&cfg, "name", "agent"), KVR_ERR_CONFIG);
    TRUE(cfg.name[0] == 0x5a && kvr_engine_size(&cfg) > 0);

    /* A new caller: fields that this version does not know may only be 0. */
    memset(&newer, 0x5a, sizeof newer);
    IS(kvr_config_init(&newer.known, sizeof newer), KVR_OK);
    TRUE(newer.known.struct_size == sizeof newer && newer.added == 0);
    IS(kvr_config_set(&newer.known, "rails", "2"), KVR_OK);
    newer.added = 1;
    IS(kvr_config_set(&newer.known, "rails", "4"), KVR_ERR_INVALID);
    SAYS("newer");
    TRUE(newer.known.rails == 2 && kvr_engine_size(&newer.known) == 0);
}

static void making(void) {
    kvr_config cfg;
    kvr_engine *e = (kvr_engine *)&cfg;
    kvr_config_init(&cfg, sizeof cfg);

    IS(kvr_engine_create(&cfg, NULL), KVR_ERR_INVALID);
    cfg.flags = 0x80;
    IS(kvr_engine_create(&cfg, &e), KVR_ERR_CONFIG);
    SAYS("0x80");
    TRUE(e == NULL);
    cfg.flags = KVR_CFG_PROGRESS_THREAD;
    memset(cfg.transport, 'x', sizeof cfg.transport);
    IS(kvr_engine_create(&cfg, &e), KVR_ERR_CONFIG);
    SAYS("transport");
    TRUE(kvr_engine_size(&cfg) == 0);
    kvr_config_init(&cfg, sizeof cfg);
    cfg.rails = 17;
    IS(kvr_engine_create(&cfg, &e), KVR_ERR_CONFIG);
    SAYS("17");
    cfg.struct_size = 2;
    IS(kvr_engine_create(&cfg, &e), KVR_ERR_INVALID);

    /* In our own memory, at an odd address, with a guard behind it. */
    kvr_config_init(&cfg, sizeof cfg);
    cfg.max_bytes = 1 << 20;
    size_t need = kvr_engine_size(&cfg);
    TRUE(need > 0 && kvr_engine_size(NULL) > 0);
    unsigned char *block = malloc(need + 2);
    TRUE(block != NULL);
    if (block == NULL) return;
    memset(block, 0x5a, need + 2);
    IS(kvr_engine_init(NULL, need, &cfg, &e), KVR_ERR_INVALID);
    IS(kvr_engine_init(block, need, &cfg, NULL), KVR_ERR_INVALID);
    IS(kvr_engine_init(block + 1, need - 1, &cfg, &e), KVR_ERR_CAPACITY);
    SAYS("kvr_engine_size()");
    TRUE(e == NULL && block[1] == 0x5a);
    IS(kvr_engine_init(block + 1, need, &cfg, &e), KVR_OK);
    TRUE((unsigned char *)e > block && (unsigned char *)e < block + need);
    kvr_peer self = 0;
    IS(kvr_peer_self(e, &self), KVR_OK);
    IS(kvr_peer_state(e, self), KVR_OK);
    IS(kvr_engine_destroy(e), KVR_OK);
    TRUE(block[0] == 0x5a && block[need + 1] == 0x5a);
    IS(kvr_engine_destroy(e), KVR_ERR_INVALID); /* twice */
    SAYS("destroyed");
    IS(kvr_progress(e), KVR_ERR_INVALID); /* the block is still ours, so this may be asked */
    free(block);

    IS(kvr_engine_create(NULL, &e), KVR_OK);
    IS(kvr_engine_destroy(e), KVR_OK);
    IS(kvr_engine_destroy(e), KVR_ERR_INVALID);
    IS(kvr_engine_destroy(NULL), KVR_ERR_INVALID);
    IS(kvr_engine_destroy((kvr_engine *)&cfg), KVR_ERR_INVALID);
}

/* Every function that takes an engine, with `e`: all of them must say `want`. */
static void all_say(kvr_engine *e, kvr_status want) {
    kvr_desc desc = {1, 1, 0, 1};
    kvr_stride stride = {1, 1, 1, 1, 1};
    uint32_t index = 0;
    uint64_t out = 1, down = 0;
    size_t len = 0;
    int ctx = 0;
    kvr_transfer_info transfer = {.struct_size = sizeof transfer};
    kvr_rail_info rail = {.struct_size = sizeof rail};
    kvr_engine_info engine = {.struct_size = sizeof engine};
    kvr_segment segment = {0};

    IS(kvr_engine_destroy(e), want);
    IS(kvr_engine_metadata(e, NULL, &len), want);
    IS(kvr_progress(e), want);
    IS(kvr_peer_add(e, "x", 1, NULL, 0, &out), want);
    IS(kvr_peer_self(e, &out), want);
    IS(kvr_peer_find(e, "x", 1, &out), want);
    IS(kvr_peer_connect(e, 1, 1), want);
    IS(kvr_peer_state(e, 1), want);
    IS(kvr_peer_remove(e, 1), want);
    IS(kvr_region_register(e, (uintptr_t)&desc, sizeof desc, KVR_MEM_HOST, &out), want);
    IS(kvr_region_register_segments(e, &segment, 1), want);
    IS(kvr_region_register_device(e, NULL, 1, 1, NULL, &len), want);
    IS(kvr_region_deregister(e, 1, 0), want);
    IS(kvr_region_metadata(e, 1, NULL, &len), want);
    IS(kvr_region_import(e, 1, "x", 1, &out), want);
    IS(kvr_region_import_self(e, 1, &out), want);
    IS(kvr_region_forget(e, 1), want);
    IS(kvr_table_create(e, &desc, 1, &out), want);
    IS(kvr_table_create_strided(e, &stride, 1, &out), want);
    IS(kvr_table_destroy(e, 1), want);
    IS(kvr_transfer_prepare(e, KVR_READ, 1, 1, &index, 1, 1, &index, 1, &out), want);
    IS(kvr_transfer_prepare_descs(e, KVR_READ, 1, &desc, 1, &desc, 1, &out), want);
    IS(kvr_transfer_post(e, 1, NULL, 0), want);
    IS(kvr_transfer_check(e, 1), want);
    IS(kvr_transfer_cancel(e, 1), want);
    IS(kvr_transfer_release(e, 1), want);
    IS(kvr_transfer_info_get(e, 1, &transfer), want);
    IS(kvr_notify(e, 1, "x", 1), want);
    IS(kvr_notifs(e, notif, &ctx, &len), want);
    IS(kvr_rail_info_get(e, 0, &rail), want);
    IS(kvr_engine_info_get(e, &engine), want);
    IS(kvr_links_down(e, &down), want);
    IS(kvr_set_event_fn(e, event, &ctx), want);
    TRUE(ctx == 0);
}

/* Numbers that were never handles, for every function that takes one. */
static void bad_handles(kvr_engine *e, uint64_t bad) {
    static char memory[64];
    char blob[1024];
    kvr_peer self = 0;
    kvr_region region = 0;
    kvr_table table = 0, strided = 0;
    kvr_desc desc = {1, 1, 0, bad};
    kvr_stride stride = {1, 1, 1, 1, bad};
    uint32_t index = 0;
    uint64_t out = 1;
    size_t len = 0, blob_len = sizeof blob;
    kvr_transfer_info info = {.struct_size = sizeof info};

    IS(kvr_peer_self(e, &self), KVR_OK);
    IS(kvr_region_register(e, (uintptr_t)memory, sizeof memory, KVR_MEM_HOST, &region), KVR_OK);
    IS(kvr_region_metadata(e, region, blob, &blob_len), KVR_OK);
    REFUSED(kvr_peer_connect(e, bad, 1));
    REFUSED(kvr_peer_state(e, bad));
    REFUSED(kvr_peer_remove(e, bad));
    REFUSED(kvr_region_deregister(e, bad, 0));
    REFUSED(kvr_region_metadata(e, bad, NULL, &len));
    REFUSED(kvr_region_import(e, bad, blob, blob_len, &out));
    REFUSED(kvr_region_import_self(e, bad, &out));
    TRUE(out == 0);
    REFUSED(kvr_region_forget(e, bad));
    /* A table's regions are looked at when it is used. */
    IS(kvr_table_create(e, &desc, 1, &table), KVR_OK);
    IS(kvr_table_create_strided(e, &stride, 1, &strided), KVR_OK);
    REFUSED(kvr_transfer_prepare(e, KVR_READ, self, table, &index, 1, strided, &index, 1, &out));
    IS(kvr_table_destroy(e, table), KVR_OK);
    IS(kvr_table_destroy(e, strided), KVR_OK);
    REFUSED(kvr_table_destroy(e, bad));
    REFUSED(kvr_transfer_prepare(e, KVR_READ, bad, bad, &index, 1, bad, &index, 1, &out));
    REFUSED(kvr_transfer_prepare(e, KVR_READ, self, bad, &index, 1, bad, &index, 1, &out));
    REFUSED(kvr_transfer_prepare_descs(e, KVR_READ, self, &desc, 1, &desc, 1, &out));
    REFUSED(kvr_transfer_post(e, bad, NULL, 0));
    REFUSED(kvr_transfer_check(e, bad));
    REFUSED(kvr_transfer_cancel(e, bad));
    REFUSED(kvr_transfer_release(e, bad));
    REFUSED(kvr_transfer_info_get(e, bad, &info));
    REFUSED(kvr_notify(e, bad, "x", 1));
    IS(kvr_region_deregister(e, region, 0), KVR_OK);
}

/* Lists and tables of a transfer. */
static void bad_pairs(kvr_engine *e, kvr_peer self, uint64_t at, kvr_region region,
                      kvr_region remote) {
    uint32_t index[2] = {0, 0};
    uint32_t *odd_index = (uint32_t *)((char *)index + 1);
    uint64_t out = 1;
    size_t huge = SIZE_MAX / 2;
    kvr_desc here = {at, 8, 0, region}, there = {at + 64, 8, 0, remote};
    kvr_table local = 0, far = 0;
    IS(kvr_table_create(e, &here, 1, &local), KVR_OK);
    IS(kvr_table_create(e, &there, 1, &far), KVR_OK);
    IS(kvr_transfer_prepare(e, 7, self, local, index, 1, far, index, 1, &out), KVR_ERR_INVALID);
    SAYS("direction is 7");
    IS(kvr_transfer_prepare(e, 0, self, local, NULL, 1, far, index, 1, &out), KVR_ERR_INVALID);
    SAYS("local_idx");
    IS(kvr_transfer_prepare(e, 0, self, local, index, 1, far, NULL, 1, &out), KVR_ERR_INVALID);
    SAYS("remote_idx");
    IS(kvr_transfer_prepare(e, 0, self, local, odd_index, 1, far, index, 1, &out), KVR_ERR_INVALID);
    IS(kvr_transfer_prepare(e, 0, self, local, index, huge, far, index, 1, &out), KVR_ERR_INVALID);
    IS(kvr_transfer_prepare(e, 0, self, local, index, 1, far, index, 1, NULL), KVR_ERR_INVALID);
    IS(kvr_transfer_prepare(e, 0, self, local, index, 2, far, index, 1, &out), KVR_ERR_MISMATCH);
    index[0] = 9;
    IS(kvr_transfer_prepare(e, 0, self, local, index, 1, far, index + 1, 1, &out), KVR_ERR_RANGE);
    SAYS("9");
    IS(kvr_transfer_prepare_descs(e, 9, self, &here, 1, &there, 1, &out), KVR_ERR_INVALID);
    IS(kvr_transfer_prepare_descs(e, 0, self, NULL, 1, &there, 1, &out), KVR_ERR_INVALID);
    IS(kvr_transfer_prepare_descs(e, 0, self, &here, 1, NULL, 1, &out), KVR_ERR_INVALID);
    IS(kvr_transfer_prepare_descs(e, 0, self, &here, huge, &there, 1, &out), KVR_ERR_INVALID);
    IS(kvr_transfer_prepare_descs(e, 0, self, &here, 1, &there, 1, NULL), KVR_ERR_INVALID);
    here.addr = UINT64_MAX;
    IS(kvr_transfer_prepare_descs(e, 0, self, &here, 1, &there, 1, &out), KVR_ERR_NOT_REGISTERED);
}

/* A transfer that is posted, looked at and released. */
static void bad_posts(kvr_engine *e, kvr_peer self, uint64_t at, kvr_region region,
                      kvr_region remote) {
    kvr_desc here = {at, 8, 0, region}, there = {at + 64, 8, 0, remote};
    kvr_transfer t = 0;
    kvr_transfer_info info;
    memset(&info, 0x5a, sizeof info);
    IS(kvr_transfer_prepare_descs(e, KVR_WRITE, self, &here, 1, &there, 1, &t), KVR_OK);
    IS(kvr_transfer_check(e, t), KVR_ERR_NOT_POSTED);
    IS(kvr_transfer_post(e, t, NULL, 5), KVR_ERR_INVALID);
    IS(kvr_transfer_info_get(e, t, NULL), KVR_ERR_INVALID);
    info.struct_size = 3;
    IS(kvr_transfer_info_get(e, t, &info), KVR_ERR_INVALID);
    info.struct_size = 5000;
    IS(kvr_transfer_info_get(e, t, &info), KVR_ERR_INVALID);
    info.struct_size = offsetof(kvr_transfer_info, work_requests);
    IS(kvr_transfer_info_get(e, t, &info), KVR_OK);
    TRUE(info.descriptors == 1 && info.work_requests == UINT64_C(0x5a5a5a5a5a5a5a5a));
    TRUE(info.struct_size == offsetof(kvr_transfer_info, work_requests));

    kvr_status status = kvr_transfer_post(e, t, "", 0);
    while (status == KVR_IN_PROGRESS) status = kvr_transfer_check(e, t);
    is(__LINE__, "kvr_transfer_check(e, t)", status, KVR_OK);
    info.struct_size = sizeof info;
    IS(kvr_transfer_info_get(e, t, &info), KVR_OK);
    TRUE(info.status == KVR_OK && info.bytes == 8 && info.bytes_done == 8);
    TRUE(info.failed_pair == UINT64_MAX && info.descriptors_done == 1);
    TRUE(info.failed_rail == UINT32_MAX && info.may_have_written == 1);
    uint64_t arrived[2] = {~UINT64_C(0), ~UINT64_C(0)};
    IS(kvr_transfer_arrived(e, t, arrived, 0), KVR_ERR_INVALID);
    IS(kvr_transfer_arrived(e, t, NULL, 1), KVR_ERR_INVALID);
    IS(kvr_transfer_arrived(e, t, arrived, 2), KVR_OK);
    TRUE(arrived[0] == 1 && arrived[1] == 0);
    IS(kvr_transfer_release(e, t), KVR_OK);
    IS(kvr_transfer_release(e, t), KVR_ERR_STALE);
    IS(kvr_transfer_check(e, t), KVR_ERR_STALE);
    IS(kvr_transfer_arrived(e, t, arrived, 2), KVR_ERR_STALE);
}

/* Several ranges in one call. */
static void register_list(kvr_engine *e, void *memory) {
    kvr_desc ranges[3] = {{(uintptr_t)memory, 8, 0, 7}, {(uintptr_t)memory + 9, 3, 0, 7},
                          {(uintptr_t)memory + 4, 5, 0, 7}};
    IS(kvr_region_register_list(e, NULL, 3, KVR_MEM_HOST), KVR_ERR_INVALID);
    SAYS("descs is NULL");
    IS(kvr_region_register_list(e, ranges, 3, 99), KVR_ERR_UNSUPPORTED);
    TRUE(ranges[0].region == 0 && ranges[2].region == 0);
    IS(kvr_region_register_list(e, NULL, 0, KVR_MEM_HOST), KVR_OK);
    IS(kvr_region_register_list(e, ranges, 2, KVR_MEM_HOST), KVR_OK);
    TRUE(ranges[0].region != 0 && ranges[1].region != 0 && ranges[0].region != ranges[1].region);
    for (int i = 0; i < 2; i++) IS(kvr_region_deregister(e, ranges[i].region, 0), KVR_OK);
    IS(kvr_region_register_list(e, ranges, 3, KVR_MEM_HOST), KVR_OK);
    TRUE(ranges[0].region == ranges[1].region && ranges[1].region == ranges[2].region);
    IS(kvr_region_deregister(e, ranges[0].region, 0), KVR_OK);
    IS(kvr_region_deregister(e, ranges[1].region, 0), KVR_ERR_STALE);
}

/* Pointers and lengths. */
static void bad_pointers(kvr_engine *e) {
    char blob[8192];
    kvr_peer self = 0, peer = 1;
    kvr_region region = 0, remote = 0;
    kvr_desc desc = {1, 1, 0, 1};
    kvr_stride stride = {1, 1, 1, 1, 1};
    uint64_t out = 1;
    int ctx = 0;
    size_t len = 0, full = 0, huge = SIZE_MAX / 2;
    uint64_t *odd_out = (uint64_t *)(blob + 1);

    IS(kvr_devmem_cuda(NULL), KVR_ERR_INVALID);
    IS(kvr_peer_self(e, NULL), KVR_ERR_INVALID);
    IS(kvr_peer_self(e, odd_out + ((uintptr_t)odd_out % 8 == 0)), KVR_ERR_INVALID);
    IS(kvr_peer_self(e, &self), KVR_OK);

    IS(kvr_engine_metadata(e, blob, NULL), KVR_ERR_INVALID);
    IS(kvr_engine_metadata(e, NULL, &full), KVR_ERR_CAPACITY);
    TRUE(full > 0 && full <= sizeof blob);
    len = full - 1, blob[0] = 0x5a;
    IS(kvr_engine_metadata(e, blob, &len), KVR_ERR_CAPACITY);
    TRUE(len == full && blob[0] == 0x5a);
    len = full;
    IS(kvr_engine_metadata(e, NULL, &len), KVR_ERR_INVALID);
    len = sizeof blob;
    IS(kvr_engine_metadata(e, blob, &len), KVR_OK);
    TRUE(len == full);

    IS(kvr_peer_add(e, NULL, 4, NULL, 0, &peer), KVR_ERR_INVALID);
    SAYS("blob is NULL");
    TRUE(peer == 0);
    IS(kvr_peer_add(e, blob, len, NULL, 3, &peer), KVR_ERR_INVALID);
    IS(kvr_peer_add(e, blob, SIZE_MAX, NULL, 0, &peer), KVR_ERR_INVALID);
    IS(kvr_peer_add(e, blob, len, NULL, 0, NULL), KVR_ERR_INVALID);
    TRUE(kvr_peer_add(e, NULL, 0, NULL, 0, &peer) < 0);
    TRUE(kvr_peer_add(e, "not a blob", 10, NULL, 0, &peer) < 0);
    IS(kvr_peer_find(e, NULL, 1, &peer), KVR_ERR_INVALID);
    IS(kvr_peer_find(e, "nobody", 6, &peer), KVR_ERR_NOT_FOUND);
    SAYS("nobody");

    IS(kvr_region_register(e, (uintptr_t)blob, sizeof blob, KVR_MEM_HOST, NULL), KVR_ERR_INVALID);
    IS(kvr_region_register(e, (uintptr_t)blob, 0, KVR_MEM_HOST, &region), KVR_ERR_INVALID);
    IS(kvr_region_register(e, UINT64_MAX, 2, KVR_MEM_HOST, &region), KVR_ERR_INVALID);
    IS(kvr_region_register(e, (uintptr_t)blob, 8, 99, &region), KVR_ERR_UNSUPPORTED);
    IS(kvr_region_register(e, (uintptr_t)blob, 8, KVR_MEM_DEVICE, &region), KVR_ERR_UNSUPPORTED);
    IS(kvr_region_register(e, (uintptr_t)blob, sizeof blob, KVR_MEM_HOST, &region), KVR_OK);
    register_list(e, blob);
    IS(kvr_region_deregister(e, region, 0x10), KVR_ERR_INVALID);
    SAYS("0x10");
    IS(kvr_region_metadata(e, region, blob, NULL), KVR_ERR_INVALID);
    IS(kvr_region_import(e, self, NULL, 5, &remote), KVR_ERR_INVALID);
    IS(kvr_region_import(e, self, "x", 1, NULL), KVR_ERR_INVALID);
    IS(kvr_region_import_self(e, region, NULL), KVR_ERR_INVALID);
    IS(kvr_region_import_self(e, region, &remote), KVR_OK);

    IS(kvr_table_create(e, NULL, 1, &out), KVR_ERR_INVALID);
    TRUE(out == 0);
    IS(kvr_table_create(e, &desc, huge, &out), KVR_ERR_INVALID);
    SAYS("items");
    IS(kvr_table_create(e, (kvr_desc *)((char *)&desc + 1), 1, &out), KVR_ERR_INVALID);
    IS(kvr_table_create(e, &desc, 1, NULL), KVR_ERR_INVALID);
    IS(kvr_table_create_strided(e, NULL, 1, &out), KVR_ERR_INVALID);
    IS(kvr_table_create_strided(e, &stride, huge, &out), KVR_ERR_INVALID);
    IS(kvr_table_create_strided(e, &stride, 1, NULL), KVR_ERR_INVALID);

    bad_pairs(e, self, (uintptr_t)blob, region, remote);
    bad_posts(e, self, (uintptr_t)blob, region, remote);

    IS(kvr_notify(e, self, NULL, 1), KVR_ERR_INVALID);
    IS(kvr_notifs(e, NULL, NULL, &len), KVR_ERR_INVALID);
    TRUE(len == 0);
    for (int ms = 0; ms < 5000 && ctx == 0; ms++) {
        IS(kvr_notifs(e, notif, &ctx, ms % 2 ? &len : NULL), KVR_OK);
        poll(NULL, 0, 1);
    }
    TRUE(ctx == 1);
}

static void infos(kvr_engine *e) {
    kvr_rail_info rail = {.struct_size = sizeof rail};
    struct {
        kvr_engine_info known;
        uint64_t added;
    } newer;
    memset(&newer, 0x5a, sizeof newer);
    IS(kvr_rail_info_get(e, 0, &rail), KVR_OK);
    TRUE(rail.index == 0 && strlen(rail.name) > 0 && strlen(rail.name) < sizeof rail.name);
    IS(kvr_rail_info_get(e, 99, &rail), KVR_ERR_RANGE);
    SAYS("99");
    IS(kvr_rail_info_get(e, 0, NULL), KVR_ERR_INVALID);
    rail.struct_size = 1;
    IS(kvr_rail_info_get(e, 0, &rail), KVR_ERR_INVALID);
    IS(kvr_engine_info_get(e, NULL), KVR_ERR_INVALID);
    newer.known.struct_size = sizeof newer;
    IS(kvr_engine_info_get(e, &newer.known), KVR_OK);
    TRUE(newer.known.rails == 1 && newer.added == 0 && newer.known.pool_limit > 0);
    TRUE(strcmp(newer.known.transport, "local") == 0);
}

/* What the callback saw of each kind; it runs on the engine's thread. */
struct seen {
    _Atomic int of[KVR_EVENT_PEER_UP + 1];
    _Atomic int wrong;
    kvr_peer peer;
    kvr_engine *e;
};

static void seen(void *ctx, const kvr_event *told) {
    struct seen *s = ctx;
    uint64_t ms = 1;
    int fine = told->struct_size == sizeof *told && told->kind > 0 && told->text[0] != 0;
    fine = fine && told->kind <= KVR_EVENT_PEER_UP && told->lane == KVR_NO_LANE;
    fine = fine && told->peer == s->peer && told->since_ms == 0;
    fine = fine && (told->status == KVR_OK) == (told->kind == KVR_EVENT_PEER_UP);
    /* Calls that do not wait are allowed here. */
    fine = fine && kvr_links_down(s->e, &ms) == KVR_OK && ms == 0;
    if (!fine)
        s->wrong++;
    else
        s->of[told->kind]++;
}

/* Waits for an event, not for ever. */
static int comes(_Atomic int *count, int want) {
    for (int i = 0; i < 30000 && *count < want; i++) poll(NULL, 0, 1);
    return *count == want;
}

static void events(kvr_engine *e) {
    static struct seen s;
    char blob[1024];
    size_t len = sizeof blob;
    kvr_config cfg;
    kvr_engine *other = NULL;
    uint64_t ms = 7;
    kvr_config_init(&cfg, sizeof cfg);
    kvr_config_set(&cfg, "name", "other");
    IS(kvr_links_down(e, NULL), KVR_ERR_INVALID);
    IS(kvr_links_down(e, &ms), KVR_OK);
    TRUE(ms == 0); /* transport local has no links */
    IS(kvr_engine_create(&cfg, &other), KVR_OK);
    IS(kvr_engine_metadata(other, blob, &len), KVR_OK);
    s.e = e;
    IS(kvr_peer_add(e, blob, len, NULL, 0, &s.peer), KVR_OK);
    IS(kvr_peer_connect(e, s.peer, 30000), KVR_OK);
    IS(kvr_set_event_fn(e, seen, &s), KVR_OK);
    IS(kvr_engine_destroy(other), KVR_OK);
    TRUE(comes(&s.of[KVR_EVENT_PEER_GONE], 1) && s.of[KVR_EVENT_PEER_UP] == 0);
    IS(kvr_peer_remove(e, s.peer), KVR_OK);
    other = NULL, len = sizeof blob;
    IS(kvr_engine_create(&cfg, &other), KVR_OK);
    IS(kvr_engine_metadata(other, blob, &len), KVR_OK);
    IS(kvr_set_event_fn(e, NULL, NULL), KVR_OK);
    IS(kvr_peer_add(e, blob, len, NULL, 0, &s.peer), KVR_OK);
    IS(kvr_set_event_fn(e, seen, &s), KVR_OK);
    IS(kvr_peer_connect(e, s.peer, 30000), KVR_OK);
    IS(kvr_peer_remove(e, s.peer), KVR_OK);
    TRUE(comes(&s.of[KVR_EVENT_PEER_GONE], 2));
    IS(kvr_engine_destroy(other), KVR_OK);
    TRUE(s.of[KVR_EVENT_PEER_UP] <= 1 && s.wrong == 0);
}

static void forked(kvr_engine *e) {
    fflush(NULL);
    pid_t child = fork();
    TRUE(child >= 0);
    if (child == 0) {
        failures = 0;
        all_say(e, KVR_ERR_FORKED);
        IS(kvr_engine_destroy(e), KVR_ERR_FORKED); /* and again: it still lives, elsewhere */
        _exit(failures != 0);
    }
    int status = 0;
    TRUE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void logged(void *ctx, int level, const char *line, size_t len) {
    if (line != NULL && len > 0 && level >= 1 && level <= 5) *(int *)ctx = level;
}

int main(void) {
    static int level; /* other threads may log until the end */
    uint64_t zeros[64] = {0};
    kvr_config cfg;
    kvr_engine *e = NULL;
    versions_and_texts();
    IS(kvr_log_set(logged, &level), KVR_OK);
    configuration();
    making();
    kvr_config_init(&cfg, sizeof cfg);
    kvr_config_set(&cfg, "name", "arguments");
    IS(kvr_engine_create(&cfg, &e), KVR_OK);
    if (e == NULL) return 1;
    all_say(NULL, KVR_ERR_INVALID);
    all_say((kvr_engine *)zeros, KVR_ERR_INVALID);
    all_say((kvr_engine *)((char *)zeros + 1), KVR_ERR_INVALID);
    uint64_t bad[] = {0, 1, UINT64_MAX, UINT64_C(0x0100000000ffffff), UINT64_C(0x0200000000ffffff),
                      UINT64_C(0x0300000000ffffff), UINT64_C(0x0400000000ffffff),
                      UINT64_C(0x0500000000ffffff)};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) bad_handles(e, bad[i]);
    bad_pointers(e);
    infos(e);
    events(e);
    forked(e);
    IS(kvr_engine_destroy(e), KVR_OK);
    IS(kvr_log_set(NULL, NULL), KVR_OK);
    if (failures == 0) printf("arguments.c: OK\n");
    return failures != 0;
}
