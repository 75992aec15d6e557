// The shim alone: the vtable slots of its ABI declaration, the status map, and what each method
// makes of the answers of the C ABI, which shim_stub.hpp plays.
#include "engine.hpp"
#include "shim_stub.hpp"
#include "status.hpp"

#include <chrono>
#include <unistd.h>

template <class T> nixlDescList<T>::~nixlDescList() = default;
extern "C" nixlBackendPlugin *nixl_plugin_init();
extern "C" void nixl_plugin_fini();

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

// VRAM is the device's, unless its metaInfo says otherwise.
void whatIsBehind(nixlBackendEngine &e) {
    nixlBlobDesc desc{};
    desc.addr = 0x7000, desc.len = 0x2000;
    nixlBackendMD *md = nullptr;
    for (const char *own : {"", "somebody's own words", "mem=host", "kvrail:mem=device"}) {
        reset();
        desc.metaInfo = own;
        CHECK(e.registerMem(desc, VRAM_SEG, md) == NIXL_SUCCESS && seen[0] == KVR_MEM_DEVICE);
    }
    desc.metaInfo = "kvrail:mem=host";
    CHECK(e.registerMem(desc, VRAM_SEG, md) == NIXL_SUCCESS && seen[0] == KVR_MEM_HOST);
    reset();
    desc.metaInfo = "kvrail:mem=dmabuf;fd=3;offset=8192";
    CHECK(e.registerMem(desc, VRAM_SEG, md) == NIXL_SUCCESS && md == kMd);
    CHECK(calls["region_register_segments"] == 1 && calls["region_register"] == 0);
    CHECK(segment.addr == 0x7000 && segment.len == 0x2000 && segment.flags == 0);
    CHECK(segment.fd == 3 && segment.offset == 8192 && segment.region == 0);
    // DRAM is the host's, whatever it says.
    CHECK(e.registerMem(desc, DRAM_SEG, md) == NIXL_SUCCESS && seen[0] == KVR_MEM_HOST);
    md = nullptr;
    script["region_register_segments"] = {KVR_ERR_UNSUPPORTED};
    std::string said = standardError([&] {
        CHECK(e.registerMem(desc, VRAM_SEG, md) == NIXL_ERR_NOT_SUPPORTED && !md);
    });
    CHECK(said == "kvrail: registerMem: the reason,\nkvrail: in two lines\n");
    reset();
    desc.metaInfo = "kvrail:mem=dmabuf";
    said = standardError([&] {
        CHECK(e.registerMem(desc, VRAM_SEG, md) == NIXL_ERR_INVALID_PARAM && !md);
    });
    CHECK(said.find("kvrail: registerMem: metaInfo `kvrail:mem=dmabuf`: fd is ``;") == 0);
    CHECK(calls.empty());
}

// What VRAM without words of ours becomes, by the parameter devmem and by whether the process has
// the driver: any library that is loaded plays it.
void cuda() {
    const struct {
        const char *devmem, *driver, *meta;
        bool asked;               // of CUDA's driver
        kvr_status says;
        bool device;              // then registered as an address
        nixl_status_t result;
    } all[] = {
        {"auto", "libnone.so", "", false, KVR_OK, true, NIXL_SUCCESS},
        {"auto", "libc.so.6", "", true, KVR_OK, false, NIXL_SUCCESS},
        {"auto", "libc.so.6", "own words", true, KVR_ERR_NOT_FOUND, true, NIXL_SUCCESS},
        {"auto", "libc.so.6", "", true, KVR_ERR_UNSUPPORTED, true, NIXL_SUCCESS},
        {"auto", "libc.so.6", "", true, KVR_ERR_INVALID, false, NIXL_ERR_INVALID_PARAM},
        {"auto", "libc.so.6", "", true, KVR_ERR_CAPACITY, false, NIXL_ERR_BACKEND},
        {"auto", "libc.so.6", "", true, KVR_ERR_OS, true, NIXL_SUCCESS},
        {"none", "libc.so.6", "", false, KVR_OK, true, NIXL_SUCCESS},
        {"cuda", "libnone.so", "", true, KVR_OK, false, NIXL_SUCCESS},
        {"cuda", "libnone.so", "", true, KVR_ERR_NOT_FOUND, false, NIXL_ERR_NOT_FOUND},
        {"cuda", "libnone.so", "", true, KVR_ERR_OS, false, NIXL_ERR_BACKEND},
        {"cuda", "libnone.so", "", true, KVR_ERR_UNSUPPORTED, false, NIXL_ERR_NOT_SUPPORTED},
        {"none", "libnone.so", "kvrail:mem=cuda", true, KVR_OK, false, NIXL_SUCCESS},
        {"none", "libnone.so", "kvrail:mem=cuda", true, KVR_ERR_NOT_FOUND, false,
         NIXL_ERR_NOT_FOUND},
        {"cuda", "libc.so.6", "kvrail:mem=device", false, KVR_OK, true, NIXL_SUCCESS},
        {"cuda", "libc.so.6", "kvrail:mem=host", false, KVR_OK, true, NIXL_SUCCESS},
    };
    for (const auto &one : all) {
        reset();
        setenv("KVRAIL_LIBCUDA", one.driver, 1);
        nixlBackendEngine *e = make({{"devmem", one.devmem}});
        script["region_register_device"] = {one.says};
        nixlBlobDesc desc{};
        desc.addr = 0x7000, desc.len = 0x2000, desc.metaInfo = one.meta;
        nixlBackendMD *md = nullptr;
        const std::string said = standardError(
            [&] { CHECK(e->registerMem(desc, VRAM_SEG, md) == one.result); });
        CHECK(calls["region_register_device"] == one.asked);
        CHECK(calls["devmem_cuda"] == one.asked);
        CHECK(calls["region_register"] == one.device);
        // What broke is told, though the other way worked.
        CHECK(said.empty() == (one.result == NIXL_SUCCESS && one.says != KVR_ERR_OS));
        const bool exported = one.asked && one.says == KVR_OK;
        if (one.result == NIXL_SUCCESS)
            CHECK(md == (exported ? reinterpret_cast<nixlBackendMD *>(0xcafe) : kMd));
        else
            CHECK(!md);
        // DRAM is never asked about.
        CHECK(e->registerMem(desc, DRAM_SEG, md) == NIXL_SUCCESS && seen[0] == KVR_MEM_HOST);
        CHECK(calls["devmem_cuda"] == one.asked);
        destroy(e);
    }
    // Neither way: both reasons are told.
    setenv("KVRAIL_LIBCUDA", "libc.so.6", 1);
    nixlBackendEngine *e = make({});
    reset();
    script["region_register_device"] = {KVR_ERR_UNSUPPORTED};
    script["region_register"] = {KVR_ERR_OS};
    nixlBlobDesc desc{};
    desc.addr = 0x7000, desc.len = 0x2000;
    nixlBackendMD *md = nullptr;
    const std::string said = standardError(
        [&] { CHECK(e->registerMem(desc, VRAM_SEG, md) == NIXL_ERR_BACKEND && !md); });
    CHECK(said == "kvrail: registerMem, as CUDA memory: the reason,\nkvrail: in two lines\n"
                  "kvrail: registerMem: the reason,\nkvrail: in two lines\n");
    destroy(e);
    unsetenv("KVRAIL_LIBCUDA");
}

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
    whatIsBehind(e);

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
    CHECK(took >= std::chrono::milliseconds(200) && took < std::chrono::seconds(30));
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
    cuda();
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
    return verdict();
}
