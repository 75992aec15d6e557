// The C ABI as shim_test.cpp needs it: functions that record the call and answer from a script,
// because a real engine does not refuse a release on demand. For one file, as it defines them.
#pragma once

#include "check.hpp"
#include "kvrail.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace {

std::map<std::string, std::deque<kvr_status>> script; // answers, then KVR_OK
std::map<std::string, int> calls;
std::vector<std::string> trail;
kvr_config made;           // what kvr_engine_create saw
const void *seenPtr[3];    // arguments of the last call that keeps them
std::uint64_t seen[4];
kvr_segment segment;       // the last one that was registered
std::string blob = "blob"; // what the metadata calls return
std::deque<std::pair<std::string, std::string>> inbox;

kvr_status answer(const char *name) {
    ++calls[name];
    trail.push_back(name);
    auto &queue = script[name];
    if (queue.empty()) return KVR_OK;
    const kvr_status status = queue.front();
    queue.pop_front();
    return status;
}

void reset() {
    script.clear();
    calls.clear();
    trail.clear();
}

kvr_status giveBlob(const char *name, void *buf, size_t *len) {
    const size_t room = *len;
    *len = blob.size();
    const kvr_status status = answer(name);
    if (status != KVR_OK) return status;
    if (room < blob.size()) return KVR_ERR_CAPACITY;
    std::memcpy(buf, blob.data(), blob.size());
    return KVR_OK;
}

} // namespace

extern "C" {
const char *kvr_version(void) { return "1.2.3"; }
const char *kvr_strerror(kvr_status) { return "plain name"; }
size_t kvr_last_error(char *buf, size_t len) {
    static const char text[] = "the reason,\nin two lines";
    std::snprintf(buf, len, "%s", text);
    return sizeof text - 1;
}
kvr_status kvr_config_init(kvr_config *cfg, size_t size) {
    *cfg = kvr_config{};
    cfg->struct_size = static_cast<uint32_t>(size);
    cfg->flags = KVR_CFG_PROGRESS_THREAD;
    cfg->release_timeout_ms = 50; // four times that must be enough for three short naps
    cfg->connect_timeout_ms = 77;
    return answer("config_init");
}
kvr_status kvr_config_env(kvr_config *cfg) {
    if (const char *value = std::getenv("KVRAIL_PROGRESS_THREAD")) {
        cfg->flags = std::atoi(value) ? KVR_CFG_PROGRESS_THREAD : 0;
    }
    std::strcpy(cfg->name, "from the environment");
    return answer("config_env");
}
kvr_status kvr_config_set(kvr_config *cfg, const char *key, const char *value) {
    if (!std::strcmp(key, "devmem")) std::strcpy(cfg->devmem, value);
    if (!std::strcmp(key, "rails")) cfg->rails = static_cast<uint32_t>(std::atoi(value));
    if (!std::strcmp(key, "progress_thread"))
        cfg->flags = std::atoi(value) ? KVR_CFG_PROGRESS_THREAD : 0;
    return answer("config_set");
}
size_t kvr_config_keys(char *buf, size_t len) {
    static const char text[] = "rails=1\nprogress_thread=1\nname=\nnics=\n";
    if (len) std::snprintf(buf, len, "%s", text);
    return sizeof text - 1;
}
kvr_status kvr_engine_create(const kvr_config *cfg, kvr_engine **out) {
    made = *cfg;
    *out = reinterpret_cast<kvr_engine *>(&made);
    return answer("engine_create");
}
kvr_status kvr_engine_destroy(kvr_engine *) { return answer("engine_destroy"); }
kvr_status kvr_engine_metadata(kvr_engine *, void *buf, size_t *len) {
    return giveBlob("engine_metadata", buf, len);
}
kvr_status kvr_peer_add(kvr_engine *, const void *, size_t, const char *, size_t, kvr_peer *) {
    return answer("peer_add");
}
kvr_status kvr_peer_self(kvr_engine *, kvr_peer *out) {
    *out = 1;
    return answer("peer_self");
}
kvr_status kvr_peer_find(kvr_engine *, const char *, size_t, kvr_peer *out) {
    *out = 2;
    return answer("peer_find");
}
kvr_status kvr_peer_connect(kvr_engine *, kvr_peer peer, uint32_t ms) {
    seen[0] = peer;
    seen[1] = ms;
    return answer("peer_connect");
}
kvr_status kvr_peer_remove(kvr_engine *, kvr_peer peer) {
    seen[0] = peer;
    return answer("peer_remove");
}
kvr_status kvr_region_register_segments(kvr_engine *, kvr_segment *segments, size_t n) {
    CHECK(n == 1);
    segment = segments[0];
    segments[0].region = 0xabc;
    return answer("region_register_segments");
}
const kvr_devmem_ops cudaOps{};
kvr_status kvr_devmem_cuda(const kvr_devmem_ops **out) {
    *out = &cudaOps;
    return answer("devmem_cuda");
}
kvr_status kvr_region_register_device(kvr_engine *, const kvr_devmem_ops *ops, uint64_t addr,
                                      uint64_t len, kvr_segment *segments, size_t *n) {
    CHECK(ops == &cudaOps && *n == 1 && addr == 0x7000 && len == 0x2000);
    const kvr_status status = answer("region_register_device");
    if (status == KVR_OK) segments[0].region = 0xcafe;
    *n = status == KVR_OK;
    return status;
}
kvr_status kvr_region_register(kvr_engine *, uint64_t, uint64_t, uint32_t mem, kvr_region *out) {
    seen[0] = mem;
    *out = 0xabc;
    return answer("region_register");
}
kvr_status kvr_region_deregister(kvr_engine *, kvr_region region, uint32_t flags) {
    seen[0] = region;
    seen[1] = flags;
    return answer("region_deregister");
}
kvr_status kvr_region_metadata(kvr_engine *, kvr_region, void *buf, size_t *len) {
    return giveBlob("region_metadata", buf, len);
}
kvr_status kvr_region_import(kvr_engine *, kvr_peer peer, const void *, size_t, kvr_region *out) {
    seen[0] = peer;
    *out = 0xdef;
    return answer("region_import");
}
kvr_status kvr_region_import_self(kvr_engine *, kvr_region, kvr_region *out) {
    *out = 0x123;
    return answer("region_import_self");
}
kvr_status kvr_region_forget(kvr_engine *, kvr_region) { return answer("region_forget"); }
kvr_status kvr_transfer_prepare_descs(kvr_engine *, uint32_t direction, kvr_peer peer,
                                      const kvr_desc *local, size_t local_n, const kvr_desc *remote,
                                      size_t remote_n, kvr_transfer *out) {
    seenPtr[0] = local;
    seenPtr[1] = remote;
    seen[0] = direction;
    seen[1] = peer;
    seen[2] = local_n;
    seen[3] = remote_n;
    *out = 0x77;
    return answer("prepare");
}
kvr_status kvr_transfer_post(kvr_engine *, kvr_transfer, const void *notif, size_t len) {
    seenPtr[0] = notif;
    seen[0] = len;
    return answer("post");
}
kvr_status kvr_transfer_check(kvr_engine *, kvr_transfer) { return answer("check"); }
kvr_status kvr_transfer_release(kvr_engine *, kvr_transfer) {
    // Always busy when the script says so with a lone 99.
    auto &queue = script["release"];
    if (queue.size() == 1 && queue.front() == 99) {
        ++calls["release"];
        return KVR_ERR_BUSY;
    }
    return answer("release");
}
kvr_status kvr_notify(kvr_engine *, kvr_peer peer, const void *, size_t len) {
    seen[0] = peer;
    seen[1] = len;
    return answer("notify");
}
kvr_status kvr_notifs(kvr_engine *, kvr_notif_cb cb, void *ctx, size_t *count) {
    *count = inbox.size();
    for (auto &[name, msg] : inbox) cb(ctx, name.data(), name.size(), msg.data(), msg.size());
    inbox.clear();
    return answer("notifs");
}
}
