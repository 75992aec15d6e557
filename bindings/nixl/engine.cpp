#include "engine.hpp"

#include "log.hpp"
#include "status.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <exception>
#include <memory>
#include <new>
#include <thread>

namespace kvrail {
namespace {

// A NIXL list of 32-byte descriptors is handed over in place.
static_assert(sizeof(kvr_desc) == sizeof(nixlMetaDesc), "lists are passed in place");
static_assert(offsetof(kvr_desc, addr) == 0 && offsetof(kvr_desc, len) == 8 &&
                  offsetof(kvr_desc, dev) == 16 && offsetof(kvr_desc, region) == 24,
              "kvr_desc and nixlMetaDesc must agree");
static_assert(sizeof(kvr_region) == sizeof(void *) && sizeof(kvr_transfer) == sizeof(void *),
              "handles travel as pointers");

std::uint64_t handleOf(const void *opaque) noexcept {
    return reinterpret_cast<std::uintptr_t>(opaque);
}

template <class Opaque> Opaque *opaqueOf(std::uint64_t handle) noexcept {
    return reinterpret_cast<Opaque *>(static_cast<std::uintptr_t>(handle));
}

const kvr_desc *descsOf(const nixl_meta_dlist_t &list) noexcept {
    return reinterpret_cast<const kvr_desc *>(list.descs.data());
}

void complain(const std::string &what, kvr_status status) {
    say(what + ": " + lastError(status));
}

// Whether this process has loaded the CUDA driver already, under the name by which
// kvr_devmem_cuda() loads it.
bool cudaLoaded() noexcept {
    const char *name = std::getenv("KVRAIL_LIBCUDA");
    void *lib = dlopen(name && *name ? name : "libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (lib) dlclose(lib);
    return lib != nullptr;
}

enum class Rate { Every, Some }; // of the refusals that are logged

// Every method runs in here: no exception may reach the agent, and every refusal is explained.
template <class Body>
nixl_status_t guarded(const char *what, Body body, Rate rate = Rate::Every) noexcept {
    try {
        const kvr_status status = body();
        if (status < 0 && (rate == Rate::Every || mayLog())) complain(what, status);
        return toNixl(status);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "kvrail: %s: %s\n", what, error.what());
    } catch (...) {
        std::fprintf(stderr, "kvrail: %s: unknown exception\n", what);
    }
    return NIXL_ERR_BACKEND;
}

// For the calls that fill a buffer: asks again with the length it was told.
template <class Call> kvr_status readBlob(std::string &out, Call call) {
    std::size_t len = 1024;
    kvr_status status = KVR_ERR_CAPACITY;
    for (int tries = 0; tries < 3 && status == KVR_ERR_CAPACITY; ++tries) {
        out.resize(len);
        status = call(&out[0], &len);
    }
    out.resize(status == KVR_OK ? len : 0);
    return status;
}

// Environment first, then what the caller of createBackend asked for. An empty value means "as
// listed by get_backend_options", so that a list that was read can be handed back unchanged.
kvr_status makeConfig(const nixlBackendInitParams &init, kvr_config &config) {
    kvr_status status = kvr_config_init(&config, sizeof config);
    if (status != KVR_OK) return status;
    if (init.enableProgTh)
        config.flags |= KVR_CFG_PROGRESS_THREAD;
    else
        config.flags &= ~KVR_CFG_PROGRESS_THREAD;
    status = kvr_config_env(&config);
    if (status != KVR_OK) return status;
    if (init.customParams)
        for (const auto &[key, value] : *init.customParams) {
            if (!value.empty()) status = kvr_config_set(&config, key.c_str(), value.c_str());
            if (status != KVR_OK) return status;
        }
    // Last: messages carry the sender's name, which is the agent's and nothing else.
    std::memset(config.name, 0, sizeof config.name);
    std::memcpy(config.name, init.localAgent.data(),
                std::min(init.localAgent.size(), sizeof config.name - 1));
    return KVR_OK;
}

} // namespace

Engine *Engine::create(const nixlBackendInitParams &init) {
    kvr_config config{};
    if (init.localAgent.size() >= sizeof config.name) {
        say("backend not created: the agent's name has " +
            std::to_string(init.localAgent.size()) + " bytes; at most " +
            std::to_string(sizeof config.name - 1) + " are allowed");
        return nullptr;
    }
    if (init.customParams && init.customParams->count("name")) {
        say("backend not created: parameter name is not taken here; it is always the agent's (" +
            init.localAgent + ")");
        return nullptr;
    }
    kvr_engine *made = nullptr;
    kvr_status status = makeConfig(init, config);
    if (status == KVR_OK) status = kvr_engine_create(&config, &made);
    if (status != KVR_OK) {
        say("backend not created: " + lastError(status));
        return nullptr;
    }
    std::unique_ptr<kvr_engine, kvr_status (*)(kvr_engine *)> owner(made, kvr_engine_destroy);
    Engine *engine = new Engine(init, config, made);
    owner.release();
    return engine;
}

Engine::Engine(const nixlBackendInitParams &init, const kvr_config &config, kvr_engine *engine)
    : nixlBackendEngine(init),
      engine_(engine),
      connectMs_(config.connect_timeout_ms),
      releaseMs_(config.release_timeout_ms),
      vram_(!std::strcmp(config.devmem, "cuda")   ? Vram::Cuda
            : !std::strcmp(config.devmem, "none") ? Vram::Device
                                                  : Vram::Auto) {}

Engine::~Engine() {
    guarded("destroying the engine", [&] { return kvr_engine_destroy(engine_); });
}

kvr_status Engine::findPeer(const std::string &agent, kvr_peer &out) const {
    if (agent == localAgent) return kvr_peer_self(engine_, &out);
    return kvr_peer_find(engine_, agent.data(), agent.size(), &out);
}

// CUDA memory is exported as a dma-buf. Where nobody said that it is CUDA's, its driver is asked if
// the process has it anyway; an address that it does not know, or that driver, kernel or NIC cannot
// have as a dma-buf, goes to the peer-memory modules as it is. Not where the caller is at fault.
kvr_status Engine::registerOne(const Behind &behind, kvr_segment &one) const {
    if (behind.kind == KVR_MEM_DMABUF || behind.coherent)
        return kvr_region_register_segments(engine_, &one, 1);
    const bool perhaps = behind.cuda == Behind::Cuda::Perhaps;
    const bool must = behind.cuda == Behind::Cuda::Yes || (perhaps && vram_ == Vram::Cuda);
    const bool may = perhaps && vram_ == Vram::Auto && cudaLoaded();
    std::string cudas;
    bool broke = false;
    if (must || may) {
        const kvr_devmem_ops *ops = nullptr;
        std::size_t n = 1;
        kvr_segment lent{};
        kvr_status made = kvr_devmem_cuda(&ops);
        if (made == KVR_OK)
            made = kvr_region_register_device(engine_, ops, one.addr, one.len, &lent, &n);
        one.region = lent.region;
        broke = made == KVR_ERR_OS;
        if (must || (!broke && made != KVR_ERR_NOT_FOUND && made != KVR_ERR_UNSUPPORTED))
            return made;
        cudas = lastError(made);
    }
    const kvr_status made =
        kvr_region_register(engine_, one.addr, one.len, behind.kind, &one.region);
    // What ought to have worked is told also where the other way does.
    if (may && (made != KVR_OK || (broke && mayLog())))
        say("registerMem, as CUDA memory: " + cudas);
    return made;
}

nixl_status_t
Engine::registerMem(const nixlBlobDesc &mem, const nixl_mem_t &type, nixlBackendMD *&out) {
    if (type != DRAM_SEG && type != VRAM_SEG) return NIXL_ERR_NOT_SUPPORTED;
    nixl_status_t refused = NIXL_SUCCESS;
    const nixl_status_t status = guarded("registerMem", [&]() -> kvr_status {
        Behind behind;
        const std::string why = readMeta(mem.metaInfo, type, behind);
        if (!why.empty()) {
            say("registerMem: " + why);
            refused = NIXL_ERR_INVALID_PARAM;
            return KVR_OK;
        }
        kvr_segment one{};
        one.addr = mem.addr;
        one.len = mem.len;
        one.offset = behind.offset;
        one.fd = behind.fd;
        one.flags = behind.coherent ? KVR_SEGMENT_COHERENT : 0;
        const kvr_status made = registerOne(behind, one);
        if (made == KVR_OK) out = opaqueOf<nixlBackendMD>(one.region);
        return made;
    });
    return refused == NIXL_SUCCESS ? status : refused;
}

// The agent ignores the result and its user frees the memory, so a busy region is not left
// registered: whoever uses it is named in the log, then transfers of ours are cancelled, and peers
// that were still inside are waited for once more.
nixl_status_t Engine::deregisterMem(nixlBackendMD *meta) {
    return guarded("deregisterMem", [&] {
        kvr_status status = kvr_region_deregister(engine_, handleOf(meta), 0);
        if (status == KVR_ERR_BUSY) {
            complain("deregisterMem waits again, cancelling transfers", status);
            status = kvr_region_deregister(engine_, handleOf(meta), KVR_DEREGISTER_CANCEL);
        }
        return status;
    });
}

nixl_status_t Engine::connect(const std::string &agent) {
    if (agent == localAgent) return NIXL_SUCCESS;
    return guarded("connect", [&] {
        kvr_peer peer = 0;
        const kvr_status status = findPeer(agent, peer);
        return status == KVR_OK ? kvr_peer_connect(engine_, peer, connectMs_) : status;
    });
}

nixl_status_t Engine::disconnect(const std::string &agent) {
    if (agent == localAgent) return NIXL_SUCCESS;
    return guarded("disconnect", [&] {
        kvr_peer peer = 0;
        const kvr_status status = findPeer(agent, peer);
        return status == KVR_OK ? kvr_peer_remove(engine_, peer) : status;
    });
}

// Remote regions and self views both. When an agent is destroyed its regions go first, so a view
// that went with its region is no news.
nixl_status_t Engine::unloadMD(nixlBackendMD *input) {
    const kvr_status status = kvr_region_forget(engine_, handleOf(input));
    if (status == KVR_ERR_STALE) return toNixl(status);
    return guarded("unloadMD", [&] { return status; });
}

nixl_status_t Engine::prepXfer(const nixl_xfer_op_t &op, const nixl_meta_dlist_t &local,
                               const nixl_meta_dlist_t &remote, const std::string &agent,
                               nixlBackendReqH *&handle, const nixl_opt_b_args_t *) const {
    return guarded("prepXfer", [&] {
        kvr_peer peer = 0;
        kvr_status status = findPeer(agent, peer);
        if (status != KVR_OK) return status;
        kvr_transfer transfer = 0;
        status = kvr_transfer_prepare_descs(engine_, op == NIXL_WRITE ? KVR_WRITE : KVR_READ, peer,
                                            descsOf(local), local.descs.size(), descsOf(remote),
                                            remote.descs.size(), &transfer);
        // Set on success only: after a failure the agent would release what it finds here.
        if (status == KVR_OK) handle = opaqueOf<nixlBackendReqH>(transfer);
        return status;
    });
}

nixl_status_t Engine::postXfer(const nixl_xfer_op_t &, const nixl_meta_dlist_t &,
                               const nixl_meta_dlist_t &, const std::string &,
                               nixlBackendReqH *&handle, const nixl_opt_b_args_t *args) const {
    const bool notify = args && args->hasNotif;
    const auto post = [&] {
        return kvr_transfer_post(engine_, handleOf(handle),
                                 notify ? args->notifMsg.data() : nullptr,
                                 notify ? args->notifMsg.size() : 0);
    };
    return guarded("postXfer", post, Rate::Some);
}

nixl_status_t Engine::checkXfer(nixlBackendReqH *handle) const {
    const auto check = [&] { return kvr_transfer_check(engine_, handleOf(handle)); };
    return guarded("checkXfer", check, Rate::Some);
}

// Success means that nothing touches the memory any more. The agent lets its user ask twice: the
// first refusal is reported, the result of the second call is thrown away and the user told that
// all is well. So the second call waits, and what will not end even then is leaked, never freed.
nixl_status_t Engine::releaseReqH(nixlBackendReqH *handle) const {
    return guarded("releaseReqH", [&] {
        const kvr_transfer transfer = handleOf(handle);
        kvr_status status = kvr_transfer_release(engine_, transfer);
        if (status == KVR_ERR_BUSY) {
            {
                std::lock_guard<std::mutex> hold(refusedLock_);
                const bool first = refused_.insert(transfer).second;
                refusedCount_.store(refused_.size(), std::memory_order_relaxed);
                if (first) return status;
            }
            using Clock = std::chrono::steady_clock;
            const auto end = Clock::now() + std::chrono::milliseconds(4ull * releaseMs_);
            while (status == KVR_ERR_BUSY && Clock::now() < end) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
                status = kvr_transfer_release(engine_, transfer);
            }
            if (status == KVR_ERR_BUSY)
                say("releaseReqH: transfer still in flight after the second release; its handle is "
                    "kept for good and its memory must not be reused: " +
                    lastError(status));
        }
        // No thread waits for another one where nothing was refused. The refusal of this very
        // handle is seen: whoever releases it again heard of that first.
        if (status == KVR_ERR_BUSY || refusedCount_.load(std::memory_order_relaxed) == 0)
            return status;
        std::lock_guard<std::mutex> hold(refusedLock_);
        refused_.erase(transfer);
        refusedCount_.store(refused_.size(), std::memory_order_relaxed);
        return status;
    });
}

nixl_status_t Engine::getPublicData(const nixlBackendMD *meta, std::string &out) const {
    return guarded("getPublicData", [&] {
        return readBlob(out, [&](void *buf, std::size_t *len) {
            return kvr_region_metadata(engine_, handleOf(meta), buf, len);
        });
    });
}

nixl_status_t Engine::getConnInfo(std::string &out) const {
    return guarded("getConnInfo", [&] {
        return readBlob(out, [&](void *buf, std::size_t *len) {
            return kvr_engine_metadata(engine_, buf, len);
        });
    });
}

// A repeat with the same blob is the same peer (the agent repeats after a failed load); another
// blob under a known name is a peer that restarted. kvr_peer_add tells them apart.
nixl_status_t Engine::loadRemoteConnInfo(const std::string &agent, const std::string &info) {
    return guarded("loadRemoteConnInfo", [&] {
        kvr_peer peer = 0;
        return kvr_peer_add(engine_, info.data(), info.size(), agent.data(), agent.size(), &peer);
    });
}

nixl_status_t Engine::loadRemoteMD(const nixlBlobDesc &blob, const nixl_mem_t &,
                                   const std::string &agent, nixlBackendMD *&out) {
    return guarded("loadRemoteMD", [&] {
        kvr_peer peer = 0;
        kvr_status status = findPeer(agent, peer);
        if (status != KVR_OK) return status;
        kvr_region region = 0;
        status = kvr_region_import(engine_, peer, blob.metaInfo.data(), blob.metaInfo.size(),
                                   &region);
        if (status == KVR_OK) out = opaqueOf<nixlBackendMD>(region);
        return status;
    });
}

// A handle of its own: agents unload the view before or after the region, as they please.
nixl_status_t Engine::loadLocalMD(nixlBackendMD *input, nixlBackendMD *&out) {
    return guarded("loadLocalMD", [&] {
        kvr_region view = 0;
        const kvr_status status = kvr_region_import_self(engine_, handleOf(input), &view);
        if (status == KVR_OK) out = opaqueOf<nixlBackendMD>(view);
        return status;
    });
}

nixl_status_t Engine::getNotifs(notif_list_t &out) {
    struct Sink {
        notif_list_t &list;
        bool full;
    } sink{out, false};
    // The caller is C: nothing may be thrown through it.
    const auto take = [](void *ctx, const char *name, std::size_t nameLen, const void *msg,
                         std::size_t len) {
        Sink &to = *static_cast<Sink *>(ctx);
        try {
            to.list.emplace_back(std::string(name, nameLen),
                                 std::string(static_cast<const char *>(msg), len));
        } catch (...) {
            to.full = true;
        }
    };
    return guarded("getNotifs", [&] {
        std::size_t count = 0;
        const kvr_status status = kvr_notifs(engine_, take, &sink, &count);
        if (sink.full) throw std::bad_alloc();
        return status;
    });
}

nixl_status_t Engine::genNotif(const std::string &agent, const std::string &message) const {
    const auto send = [&] {
        kvr_peer peer = 0;
        const kvr_status status = findPeer(agent, peer);
        if (status != KVR_OK) return status;
        return kvr_notify(engine_, peer, message.data(), message.size());
    };
    return guarded("genNotif", send, Rate::Some);
}

} // namespace kvrail
