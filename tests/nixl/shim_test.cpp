// The shim alone: the vtable slots of its ABI declaration, the status map, and what each method
// makes of the answers of the C ABI. The C ABI is played by the functions below, which record the
// call and answer from a script, because a real engine does not refuse a release on demand.
#include "engine.hpp"
#include "status.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <unistd.h>

template <class T> nixlDescList<T>::~nixlDescList() = default;
extern "C" nixlBackendPlugin *nixl_plugin_init();
extern "C" void nixl_plugin_fini();

namespace {

int failures = 0;
#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #what);                       \
            ++failures;                                                                            \
        }                                                                                          \
    } while (0)

std::map<std::string, std::deque<kvr_status>> script; // answers, then KVR_OK
std::map<std::string, int> calls;
std::vector<std::string> trail;
kvr_config made;           // what kvr_engine_create saw
const void *seenPtr[3];    // arguments of the last call that keeps them
std::uint64_t seen[4];
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
    cfg->release_timeout_ms = 5;
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

namespace {

// A pointer to a virtual member function holds 1 + 8 * slot (Itanium C++ ABI).
template <class Method> int slot(Method method) {
    std::intptr_t word[2];
    static_assert(sizeof word == sizeof method, "pointer to member function");
    std::memcpy(word, &method, sizeof word);
    return static_cast<int>((word[0] - 1) / 8);
}

void vtable() {
    using B = nixlBackendEngine;
    using Status = nixl_status_t;
    using RemoteView = Status (B::*)(const nixl_remote_meta_dlist_t &, nixlMemViewH &,
                                     const nixl_opt_b_args_t *) const;
    using LocalView = Status (B::*)(const nixl_meta_dlist_t &, nixlMemViewH &,
                                    const nixl_opt_b_args_t *) const;
    CHECK(slot(&B::supportsRemote) == 2);
    CHECK(slot(&B::supportsLocal) == 3);
    CHECK(slot(&B::supportsNotif) == 4);
    CHECK(slot(&B::getSupportedMems) == 5);
    CHECK(slot(&B::registerMem) == 6);
    CHECK(slot(&B::deregisterMem) == 7);
    CHECK(slot(&B::connect) == 8);
    CHECK(slot(&B::disconnect) == 9);
    CHECK(slot(&B::unloadMD) == 10);
    CHECK(slot(&B::prepXfer) == 11);
    CHECK(slot(&B::postXfer) == 12);
    CHECK(slot(&B::checkXfer) == 13);
    CHECK(slot(&B::releaseReqH) == 14);
    CHECK(slot(static_cast<RemoteView>(&B::prepMemView)) == 15);
    CHECK(slot(static_cast<LocalView>(&B::prepMemView)) == 16);
    CHECK(slot(&B::releaseMemView) == 17);
    CHECK(slot(&B::getPublicData) == 18);
    CHECK(slot(&B::getConnInfo) == 19);
    CHECK(slot(&B::loadRemoteConnInfo) == 20);
    CHECK(slot(&B::loadRemoteMD) == 21);
    CHECK(slot(&B::loadLocalMD) == 22);
    CHECK(slot(&B::getNotifs) == 23);
    CHECK(slot(&B::genNotif) == 24);
    CHECK(slot(&B::queryMem) == 25);
    CHECK(slot(&B::estimateXferCost) == 26);
}

void statusMap() {
    const std::map<kvr_status, nixl_status_t> want = {
        {KVR_OK, NIXL_SUCCESS},
        {KVR_IN_PROGRESS, NIXL_IN_PROG},
        {KVR_ERR_INVALID, NIXL_ERR_INVALID_PARAM},
        {KVR_ERR_STALE, NIXL_ERR_NOT_FOUND},
        {KVR_ERR_NOT_FOUND, NIXL_ERR_NOT_FOUND},
        {KVR_ERR_RANGE, NIXL_ERR_INVALID_PARAM},
        {KVR_ERR_MISMATCH, NIXL_ERR_INVALID_PARAM},
        {KVR_ERR_NOT_REGISTERED, NIXL_ERR_INVALID_PARAM},
        {KVR_ERR_CAPACITY, NIXL_ERR_BACKEND},
        {KVR_ERR_BUSY, NIXL_ERR_REPOST_ACTIVE},
        {KVR_ERR_UNSUPPORTED, NIXL_ERR_NOT_SUPPORTED},
        {KVR_ERR_NO_MEMORY, NIXL_ERR_BACKEND},
        {KVR_ERR_BLOB_TRUNCATED, NIXL_ERR_INVALID_PARAM},
        {KVR_ERR_BLOB_FOREIGN, NIXL_ERR_INVALID_PARAM},
        {KVR_ERR_BLOB_VERSION, NIXL_ERR_MISMATCH},
        {KVR_ERR_CONFIG, NIXL_ERR_INVALID_PARAM},
        {KVR_ERR_FORKED, NIXL_ERR_NOT_ALLOWED},
        {KVR_ERR_PERMISSION, NIXL_ERR_NOT_ALLOWED},
        {KVR_ERR_NOT_POSTED, NIXL_ERR_NOT_POSTED},
        {KVR_ERR_CANCELLED, NIXL_ERR_CANCELED},
        {KVR_ERR_REMOTE_ACCESS, NIXL_ERR_BACKEND},
        {KVR_ERR_LOCAL_ACCESS, NIXL_ERR_BACKEND},
        {KVR_ERR_STALLED, NIXL_ERR_BACKEND},
        {KVR_ERR_NO_RAIL, NIXL_ERR_BACKEND},
        {KVR_ERR_DISCONNECTED, NIXL_ERR_REMOTE_DISCONNECT},
        {KVR_ERR_UNREACHABLE, NIXL_ERR_REMOTE_DISCONNECT},
        {KVR_ERR_REFUSED, NIXL_ERR_REMOTE_DISCONNECT},
        {KVR_ERR_INTERNAL, NIXL_ERR_BACKEND},
        {KVR_ERR_OS, NIXL_ERR_BACKEND},
        {-9999, NIXL_ERR_BACKEND},
    };
    for (const auto &[status, nixl] : want) {
        if (toNixl(status) != nixl) std::printf("status %d\n", status);
        CHECK(toNixl(status) == nixl);
    }
}

nixlBackendEngine *make(nixl_b_params_t params = {}, bool thread = true,
                        const std::string &name = "me") {
    nixlBackendInitParams init{};
    init.localAgent = name;
    init.type = "RBLN";
    init.customParams = &params;
    init.enableProgTh = thread;
    return nixl_plugin_init()->create_engine(&init);
}

void destroy(nixlBackendEngine *engine) { nixl_plugin_init()->destroy_engine(engine); }

void creation() {
    for (int round = 0; round < 2; ++round) { // init and fini repeat
        const nixlBackendPlugin *plugin = nixl_plugin_init();
        CHECK(plugin && plugin->api_version == 1);
        CHECK(std::string(plugin->get_plugin_name()) == "RBLN");
        CHECK(std::string(plugin->get_plugin_version()) == "1.2.3");
        CHECK(plugin->get_backend_mems() == (nixl_mem_list_t{DRAM_SEG, VRAM_SEG}));
        const nixl_b_params_t want = {{"rails", "1"}, {"progress_thread", ""}, {"nics", ""}};
        CHECK(plugin->get_backend_options() == want);
        nixl_plugin_fini();
    }
    setenv("KVRAIL_RAILS", "4", 1);
    CHECK(nixl_plugin_init()->get_backend_options()["rails"] == "4");
    unsetenv("KVRAIL_RAILS");

    reset();
    nixlBackendEngine *engine = make({{"rails", "3"}, {"nics", ""}});
    CHECK(engine && engine->backendType == "RBLN" && engine->localAgent == "me");
    CHECK(engine->customParams.at("rails") == "3" && !engine->initErr);
    CHECK(made.rails == 3 && calls["config_set"] == 1); // the empty one is left alone
    CHECK(std::string(made.name) == "me");
    CHECK(made.flags & KVR_CFG_PROGRESS_THREAD);
    destroy(engine);
    CHECK(calls["engine_destroy"] == 1);

    destroy(make({}, false));
    CHECK(!(made.flags & KVR_CFG_PROGRESS_THREAD));
    destroy(make({{"progress_thread", "1"}}, false));
    CHECK(made.flags & KVR_CFG_PROGRESS_THREAD);
    setenv("KVRAIL_PROGRESS_THREAD", "0", 1);
    destroy(make({}, true));
    CHECK(!(made.flags & KVR_CFG_PROGRESS_THREAD));
    unsetenv("KVRAIL_PROGRESS_THREAD");

    for (const char *step : {"config_init", "config_env", "config_set", "engine_create"}) {
        reset();
        script[step] = {KVR_ERR_CONFIG};
        CHECK(make({{"rails", "3"}}) == nullptr);
        CHECK(calls["engine_create"] == (std::string(step) == "engine_create"));
    }
    reset();
    CHECK(make({{"name", "other"}}) == nullptr && calls["engine_create"] == 0);
    CHECK(make({}, true, std::string(256, 'x')) == nullptr && calls["engine_create"] == 0);
    engine = make({}, true, std::string(255, 'x'));
    CHECK(engine && std::string(made.name).size() == 255);
    destroy(engine);
}

// What the shim prints while `body` runs.
template <class Body> std::string standardError(Body body) {
    char path[] = "/tmp/kvrail-shim-XXXXXX";
    const int file = mkstemp(path), old = dup(2);
    dup2(file, 2);
    body();
    std::fflush(stderr);
    dup2(old, 2);
    close(old);
    std::string text(4096, '\0');
    text.resize(static_cast<size_t>(std::max<ssize_t>(0, pread(file, &text[0], 4096, 0))));
    close(file);
    unlink(path);
    return text;
}

auto *const kReq = reinterpret_cast<nixlBackendReqH *>(0x77);
auto *const kMd = reinterpret_cast<nixlBackendMD *>(0xabc);

void memory(nixlBackendEngine &e) {
    nixlBlobDesc desc{};
    nixlBackendMD *md = nullptr;
    reset();
    CHECK(e.registerMem(desc, DRAM_SEG, md) == NIXL_SUCCESS && md == kMd);
    CHECK(seen[0] == KVR_MEM_HOST);
    md = nullptr;
    script["region_register"] = {KVR_ERR_UNSUPPORTED};
    const std::string said = standardError([&] {
        CHECK(e.registerMem(desc, VRAM_SEG, md) == NIXL_ERR_NOT_SUPPORTED && !md);
    });
    CHECK(said == "kvrail: registerMem: the reason,\nkvrail: in two lines\n");
    CHECK(seen[0] == KVR_MEM_DEVICE);
    CHECK(e.registerMem(desc, OBJ_SEG, md) == NIXL_ERR_NOT_SUPPORTED);
    CHECK(calls["region_register"] == 2);

    script["region_deregister"] = {KVR_ERR_BUSY};
    CHECK(e.deregisterMem(kMd) == NIXL_SUCCESS);
    CHECK(calls["region_deregister"] == 2 && seen[1] == KVR_DEREGISTER_CANCEL);
    CHECK(seen[0] == 0xabc);
    CHECK(e.deregisterMem(kMd) == NIXL_SUCCESS && seen[1] == 0);

    CHECK(e.loadLocalMD(kMd, md) == NIXL_SUCCESS && md && md != kMd); // neither owns the other
    script["region_forget"] = {KVR_ERR_STALE};
    CHECK(standardError([&] { CHECK(e.unloadMD(md) == NIXL_ERR_NOT_FOUND); }).empty());
    script["region_forget"] = {KVR_ERR_INVALID};
    CHECK(!standardError([&] { CHECK(e.unloadMD(md) == NIXL_ERR_INVALID_PARAM); }).empty());

    std::string out;
    blob.assign(5000, 'b'); // more than the first guess
    CHECK(e.getConnInfo(out) == NIXL_SUCCESS && out == blob);
    CHECK(e.getPublicData(kMd, out) == NIXL_SUCCESS && out == blob);
    script["region_metadata"] = {KVR_ERR_STALE};
    CHECK(e.getPublicData(kMd, out) == NIXL_ERR_NOT_FOUND && out.empty());
}

void peers(nixlBackendEngine &e) {
    reset();
    CHECK(e.connect("me") == NIXL_SUCCESS && e.disconnect("me") == NIXL_SUCCESS);
    CHECK(trail.empty());
    CHECK(e.connect("you") == NIXL_SUCCESS && seen[0] == 2 && seen[1] == 77);
    CHECK(e.disconnect("you") == NIXL_SUCCESS && calls["peer_remove"] == 1);
    CHECK(e.loadRemoteConnInfo("you", "x") == NIXL_SUCCESS);
    CHECK(e.loadRemoteConnInfo("you", "x") == NIXL_SUCCESS); // a repeat is for kvr_peer_add
    nixlBlobDesc desc{};
    nixlBackendMD *md = nullptr;
    CHECK(e.loadRemoteMD(desc, DRAM_SEG, "you", md) == NIXL_SUCCESS && seen[0] == 2 && md);
    md = nullptr;
    script["peer_find"] = {KVR_ERR_NOT_FOUND, KVR_ERR_NOT_FOUND, KVR_ERR_NOT_FOUND};
    CHECK(e.loadRemoteMD(desc, DRAM_SEG, "who", md) == NIXL_ERR_NOT_FOUND && !md);
    CHECK(e.genNotif("who", "x") == NIXL_ERR_NOT_FOUND && calls["notify"] == 0);
    CHECK(e.connect("who") == NIXL_ERR_NOT_FOUND);
    CHECK(e.genNotif("me", "xyz") == NIXL_SUCCESS && seen[0] == 1 && seen[1] == 3);

    notif_list_t got;
    inbox = {{"you", ""}, {"you", std::string("a\0b", 3)}};
    CHECK(e.getNotifs(got) == NIXL_SUCCESS && got.size() == 2);
    CHECK(got[0].second.empty() && got[1].second == std::string("a\0b", 3));
}

void transfers(nixlBackendEngine &e) {
    reset();
    nixl_meta_dlist_t local, remote;
    local.descs.resize(3);
    remote.descs.resize(3);
    nixlBackendReqH *req = nullptr;
    CHECK(e.prepXfer(NIXL_WRITE, local, remote, "you", req) == NIXL_SUCCESS && req == kReq);
    CHECK(seenPtr[0] == local.descs.data() && seenPtr[1] == remote.descs.data());
    CHECK(seen[0] == KVR_WRITE && seen[1] == 2 && seen[2] == 3 && seen[3] == 3);
    CHECK(e.prepXfer(NIXL_READ, local, remote, "me", req) == NIXL_SUCCESS);
    CHECK(seen[0] == KVR_READ && seen[1] == 1);
    req = nullptr; // after a failure the agent would release what it finds here
    script["prepare"] = {KVR_ERR_NOT_REGISTERED};
    CHECK(e.prepXfer(NIXL_READ, local, remote, "me", req) == NIXL_ERR_INVALID_PARAM && !req);
    script["peer_find"] = {KVR_ERR_NOT_FOUND};
    CHECK(e.prepXfer(NIXL_READ, local, remote, "who", req) == NIXL_ERR_NOT_FOUND && !req);

    req = kReq;
    nixl_opt_b_args_t args{};
    args.notifMsg = "left over"; // not to be sent without hasNotif
    CHECK(e.postXfer(NIXL_READ, local, remote, "you", req, &args) == NIXL_SUCCESS);
    CHECK(seenPtr[0] == nullptr && seen[0] == 0);
    CHECK(e.postXfer(NIXL_READ, local, remote, "you", req, nullptr) == NIXL_SUCCESS);
    CHECK(seenPtr[0] == nullptr);
    args.hasNotif = true;
    script["post"] = {KVR_IN_PROGRESS};
    CHECK(e.postXfer(NIXL_READ, local, remote, "you", req, &args) == NIXL_IN_PROG);
    CHECK(seenPtr[0] == args.notifMsg.data() && seen[0] == 9);
    args.notifMsg.clear(); // an empty message is one
    CHECK(e.postXfer(NIXL_READ, local, remote, "you", req, &args) == NIXL_SUCCESS);
    CHECK(seenPtr[0] != nullptr && seen[0] == 0);
    script["check"] = {KVR_ERR_DISCONNECTED, KVR_IN_PROGRESS};
    CHECK(e.checkXfer(req) == NIXL_ERR_REMOTE_DISCONNECT);
    CHECK(e.checkXfer(req) == NIXL_IN_PROG && e.checkXfer(req) == NIXL_SUCCESS);
}

void release(nixlBackendEngine &e) {
    reset();
    CHECK(e.releaseReqH(kReq) == NIXL_SUCCESS && calls["release"] == 1);
    // Refused once; the second call waits for it.
    script["release"] = {KVR_ERR_BUSY};
    CHECK(e.releaseReqH(kReq) == NIXL_ERR_REPOST_ACTIVE && calls["release"] == 2);
    script["release"] = {KVR_ERR_BUSY, KVR_ERR_BUSY, KVR_OK};
    CHECK(e.releaseReqH(kReq) == NIXL_SUCCESS && calls["release"] == 5);
    // Never drains: bounded, said, and the handle is neither released nor forgotten.
    script["release"] = {99};
    int before = calls["release"]; // forgotten after the success: refused anew, at once
    CHECK(e.releaseReqH(kReq) == NIXL_ERR_REPOST_ACTIVE && calls["release"] == before + 1);
    before = calls["release"];
    const auto start = std::chrono::steady_clock::now();
    const std::string said = standardError([&] {
        CHECK(e.releaseReqH(kReq) == NIXL_ERR_REPOST_ACTIVE);
    });
    const auto took = std::chrono::steady_clock::now() - start;
    CHECK(took >= std::chrono::milliseconds(20) && took < std::chrono::seconds(30));
    CHECK(calls["release"] > before + 1);
    CHECK(said.find("kept for good") != std::string::npos);
}

// A dead peer fails thousands of transfers: the log stays readable.
void quiet(nixlBackendEngine &e) {
    const std::string said = standardError([&] {
        for (int i = 0; i < 1000; ++i) {
            script["check"] = {KVR_ERR_DISCONNECTED};
            e.checkXfer(kReq);
        }
    });
    CHECK(said.size() < 3000);
    nixlBackendMD *md = nullptr; // but what was asked for once is always answered
    const std::string one = standardError([&] {
        script["region_import_self"] = {KVR_ERR_STALE};
        e.loadLocalMD(kMd, md);
    });
    CHECK(!one.empty());
}

} // namespace

int main() {
    vtable();
    statusMap();
    creation();
    reset();
    nixlBackendEngine *engine = make();
    CHECK(engine->supportsLocal() && engine->supportsRemote() && engine->supportsNotif());
    memory(*engine);
    peers(*engine);
    transfers(*engine);
    release(*engine);
    quiet(*engine);
    // Destroyed through the base class, like the agent does (slot 1).
    reset();
    destroy(engine);
    CHECK(calls["engine_destroy"] == 1);
    std::printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
    return failures ? 1 : 0;
}
