/* kvrail for C++17 and later: the C ABI of kvrail.h with owners and exceptions, and nothing else.
 *
 * Ownership: every class is move-only and gives its object back in its destructor. An Engine must
 * outlive the Peers, Regions, RemoteRegions, Tables and Transfers made from it, and registered
 * memory its Region. raw() lends the C handle for calls that this header does not wrap.
 *
 * Destructors of Region, RemoteRegion and Transfer return only when nothing touches the memory any
 * more: they repeat a call that says KVR_ERR_BUSY. Each call is bounded, and a transfer that hangs
 * ends after stall_ms; but a peer that was stopped inside a copy holds ~Region until it goes on or
 * ends. Call release() to get that answer as an exception instead; it may be called again.
 *
 * Errors: a negative status is thrown as kvrail::Error. Threads: as in kvrail.h; moving or
 * destroying an object is not for two threads at once.
 */
#ifndef KVRAIL_HPP
#define KVRAIL_HPP

#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "kvrail.h"

namespace kvrail {

/* A negative status and the text that explains it. */
class Error : public std::runtime_error {
public:
    Error(kvr_status status, const std::string &text) : std::runtime_error(text), status_(status) {}

    kvr_status status() const noexcept { return status_; }

private:
    kvr_status status_;
};

namespace detail {

/* Throws what this thread's last call left behind; otherwise true for KVR_OK. */
inline bool check(kvr_status status) {
    if (status < 0) {
        std::string text(kvr_last_error(nullptr, 0) + 1, '\0');
        kvr_last_error(&text[0], text.size());
        text.pop_back();
        throw Error(status, text);
    }
    return status == KVR_OK;
}

/* Asks for the length, then for the bytes, until both fit: the length may change in between. */
template <class Get>
std::string bytes(Get get) {
    std::string out;
    for (;;) {
        std::size_t len = out.size();
        kvr_status status = get(out.empty() ? nullptr : &out[0], &len);
        if (status == KVR_ERR_CAPACITY && len > out.size()) {
            out.resize(len);
            continue;
        }
        check(status);
        out.resize(len);
        return out;
    }
}

/* A handle of an engine, given back by Release. */
template <kvr_status (*Release)(kvr_engine *, std::uint64_t)>
class Handle {
public:
    Handle(Handle &&other) noexcept
        : engine_(std::exchange(other.engine_, nullptr)), raw_(std::exchange(other.raw_, 0)) {}

    Handle &operator=(Handle &&other) noexcept {
        if (this != &other) {
            reset();
            engine_ = std::exchange(other.engine_, nullptr);
            raw_ = std::exchange(other.raw_, 0);
        }
        return *this;
    }

    ~Handle() { reset(); }

    /* Gives the object back now. After an exception it is still owned. */
    void release() {
        if (engine_ != nullptr) {
            check(Release(engine_, raw_));
            engine_ = nullptr;
            raw_ = 0;
        }
    }

    std::uint64_t raw() const noexcept { return raw_; }

protected:
    Handle(kvr_engine *engine, std::uint64_t raw) noexcept : engine_(engine), raw_(raw) {}

    kvr_engine *engine() const noexcept { return engine_; }

    /* Lets go of the object without giving it back. */
    void forget() noexcept {
        engine_ = nullptr;
        raw_ = 0;
    }

private:
    void reset() noexcept {
        while (engine_ != nullptr && Release(engine_, raw_) == KVR_ERR_BUSY) {
            std::this_thread::yield();
        }
        forget();
    }

    kvr_engine *engine_;
    std::uint64_t raw_;
};

inline kvr_status deregister(kvr_engine *engine, std::uint64_t region) {
    return kvr_region_deregister(engine, region, KVR_DEREGISTER_CANCEL);
}

}  // namespace detail

/* Parameters of an engine; the defaults until changed. */
class Config {
public:
    Config() { detail::check(kvr_config_init(&raw_, sizeof raw_)); }
    Config(Config &&) noexcept = default;
    Config &operator=(Config &&) noexcept = default;

    /* Applies KVRAIL_<PARAMETER> from the environment. */
    Config &env() {
        detail::check(kvr_config_env(&raw_));
        return *this;
    }

    Config &set(const std::string &key, const std::string &value) {
        detail::check(kvr_config_set(&raw_, key.c_str(), value.c_str()));
        return *this;
    }

    kvr_config &raw() noexcept { return raw_; }
    const kvr_config &raw() const noexcept { return raw_; }

private:
    kvr_config raw_;
};

/* Memory registered here; deregistered, and transfers that use it cancelled, at the end. */
class Region : public detail::Handle<detail::deregister> {
public:
    /* The blob that a peer imports. */
    std::string metadata() const {
        return detail::bytes(
            [this](void *buf, std::size_t *len) {
                return kvr_region_metadata(engine(), raw(), buf, len);
            });
    }

    kvr_desc desc(std::uint64_t addr, std::uint64_t len) const noexcept {
        return kvr_desc{addr, len, 0, raw()};
    }

private:
    friend class Engine;
    using Handle::Handle;
};

/* A peer's memory; forgotten at the end. */
class RemoteRegion : public detail::Handle<kvr_region_forget> {
public:
    /* `addr` is in the peer's addresses. */
    kvr_desc desc(std::uint64_t addr, std::uint64_t len) const noexcept {
        return kvr_desc{addr, len, 0, raw()};
    }

private:
    friend class Engine;
    friend class Peer;
    using Handle::Handle;
};

/* A peer. One from Engine::add() is removed at the end; self() and find() lend theirs. */
class Peer : public detail::Handle<kvr_peer_remove> {
public:
    Peer(Peer &&) noexcept = default;

    Peer &operator=(Peer &&other) noexcept {
        if (this != &other) {
            lend();
            Handle::operator=(std::move(other));
            owned_ = other.owned_;
        }
        return *this;
    }

    ~Peer() { lend(); }

    /* Blocks until connected, for at most `timeout_ms`. */
    void connect(std::uint32_t timeout_ms) {
        detail::check(kvr_peer_connect(engine(), raw(), timeout_ms));
    }

    /* True: connected. False: dialling. */
    bool connected() const { return detail::check(kvr_peer_state(engine(), raw())); }

    RemoteRegion import_region(std::string_view blob) const {
        kvr_region out = 0;
        detail::check(kvr_region_import(engine(), raw(), blob.data(), blob.size(), &out));
        return RemoteRegion(engine(), out);
    }

    void notify(std::string_view message) const {
        detail::check(kvr_notify(engine(), raw(), message.data(), message.size()));
    }

private:
    friend class Engine;
    Peer(kvr_engine *engine, kvr_peer raw, bool owned) noexcept
        : Handle(engine, raw), owned_(owned) {}

    void lend() noexcept {
        if (!owned_) {
            forget();
        }
    }

    bool owned_;
};

/* Descriptors addressed by index; destroyed at the end. */
class Table : public detail::Handle<kvr_table_destroy> {
private:
    friend class Engine;
    using Handle::Handle;
};

/* A prepared transfer; cancelled if it is in flight, and released, at the end. */
class Transfer : public detail::Handle<kvr_transfer_release> {
public:
    /* Starts it. True: done already. False: ask check(). */
    bool post() { return detail::check(kvr_transfer_post(engine(), raw(), nullptr, 0)); }

    /* The same, with a message for the peer once the data is in place. It may be empty. */
    bool post(std::string_view message) {
        const char *data = message.empty() ? "" : message.data();
        return detail::check(kvr_transfer_post(engine(), raw(), data, message.size()));
    }

    /* True: done. False: not yet. */
    bool check() const { return detail::check(kvr_transfer_check(engine(), raw())); }

    /* Blocks until it is done, polling. */
    void wait() const {
        while (!check()) {
            std::this_thread::yield();
        }
    }

    void cancel() { detail::check(kvr_transfer_cancel(engine(), raw())); }

    kvr_transfer_info info() const {
        kvr_transfer_info out{};
        out.struct_size = sizeof out;
        detail::check(kvr_transfer_info_get(engine(), raw(), &out));
        return out;
    }

private:
    friend class Engine;
    using Handle::Handle;
};

/* An engine; destroyed at the end. */
class Engine {
public:
    /* In memory of its own. */
    explicit Engine(const Config &config) {
        detail::check(kvr_engine_create(&config.raw(), &raw_));
    }

    /* In the caller's block, which must outlive it: at least size(config) bytes. */
    Engine(const Config &config, void *block, std::size_t len) {
        detail::check(kvr_engine_init(block, len, &config.raw(), &raw_));
    }

    Engine(Engine &&other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}

    Engine &operator=(Engine &&other) noexcept {
        if (this != &other) {
            reset();
            raw_ = std::exchange(other.raw_, nullptr);
        }
        return *this;
    }

    ~Engine() { reset(); }

    /* Bytes of a block for an engine. */
    static std::size_t size(const Config &config) {
        std::size_t out = kvr_engine_size(&config.raw());
        if (out == 0) {
            detail::check(KVR_ERR_CONFIG);
        }
        return out;
    }

    /* The blob that a peer adds. */
    std::string metadata() const {
        return detail::bytes(
            [this](void *buf, std::size_t *len) { return kvr_engine_metadata(raw_, buf, len); });
    }

    /* Polls once. True: work was done. */
    bool progress() { return !detail::check(kvr_progress(raw_)); }

    /* Adds a peer by its metadata, whatever its name is. */
    Peer add(std::string_view blob) { return add(blob, nullptr, 0); }

    /* Adds a peer by its metadata, which must have this name. */
    Peer add(std::string_view blob, std::string_view name) {
        return add(blob, name.empty() ? "" : name.data(), name.size());
    }

    /* This engine as its own peer. */
    Peer self() {
        kvr_peer out = 0;
        detail::check(kvr_peer_self(raw_, &out));
        return Peer(raw_, out, false);
    }

    Peer find(std::string_view name) {
        kvr_peer out = 0;
        detail::check(kvr_peer_find(raw_, name.data(), name.size(), &out));
        return Peer(raw_, out, false);
    }

    Region add_memory(void *addr, std::size_t len) {
        kvr_region out = 0;
        auto first = reinterpret_cast<std::uintptr_t>(addr);
        detail::check(kvr_region_register(raw_, first, len, KVR_MEM_HOST, &out));
        return Region(raw_, out);
    }

    /* A remote view of an own region, for transfers with self(). */
    RemoteRegion import_self(const Region &local) {
        kvr_region out = 0;
        detail::check(kvr_region_import_self(raw_, local.raw(), &out));
        return RemoteRegion(raw_, out);
    }

    Table table(const std::vector<kvr_desc> &descs) {
        kvr_table out = 0;
        detail::check(kvr_table_create(raw_, descs.data(), descs.size(), &out));
        return Table(raw_, out);
    }

    Table table(std::initializer_list<kvr_stride> parts) {
        kvr_table out = 0;
        detail::check(kvr_table_create_strided(raw_, parts.begin(), parts.size(), &out));
        return Table(raw_, out);
    }

    /* The i-th pair is local_idx[i] of `local` with remote_idx[i] of `remote`. */
    Transfer prepare(std::uint32_t direction, const Peer &peer, const Table &local,
                     const std::vector<std::uint32_t> &local_idx, const Table &remote,
                     const std::vector<std::uint32_t> &remote_idx) {
        kvr_transfer out = 0;
        detail::check(kvr_transfer_prepare(raw_, direction, peer.raw(), local.raw(),
                                           local_idx.data(), local_idx.size(), remote.raw(),
                                           remote_idx.data(), remote_idx.size(), &out));
        return Transfer(raw_, out);
    }

    Transfer prepare(std::uint32_t direction, const Peer &peer, const std::vector<kvr_desc> &local,
                     const std::vector<kvr_desc> &remote) {
        kvr_transfer out = 0;
        detail::check(kvr_transfer_prepare_descs(raw_, direction, peer.raw(), local.data(),
                                                 local.size(), remote.data(), remote.size(), &out));
        return Transfer(raw_, out);
    }

    /* Calls take(name, message), both std::string_view, for every pending notification, and says
     * how many there were. What `take` throws is thrown on afterwards; the notifications after
     * that one are lost.
     */
    template <class Take>
    std::size_t notifs(Take take) {
        struct Context {
            Take &take;
            std::exception_ptr thrown;

            static void call(void *ctx, const char *name, size_t name_len, const void *msg,
                             size_t len) {
                Context &self = *static_cast<Context *>(ctx);
                if (self.thrown) {
                    return;
                }
                try {
                    self.take(std::string_view(name, name_len),
                              std::string_view(static_cast<const char *>(msg), len));
                } catch (...) {
                    self.thrown = std::current_exception();
                }
            }
        };
        Context context{take, nullptr};
        std::size_t count = 0;
        kvr_status status = kvr_notifs(raw_, Context::call, &context, &count);
        if (context.thrown) {
            std::rethrow_exception(context.thrown);
        }
        detail::check(status);
        return count;
    }

    kvr_rail_info rail(std::uint32_t index) const {
        kvr_rail_info out{};
        out.struct_size = sizeof out;
        detail::check(kvr_rail_info_get(raw_, index, &out));
        return out;
    }

    kvr_engine_info info() const {
        kvr_engine_info out{};
        out.struct_size = sizeof out;
        detail::check(kvr_engine_info_get(raw_, &out));
        return out;
    }

    /* Milliseconds for which every link of the rails has been down; 0: one is up. */
    std::uint64_t links_down() const {
        std::uint64_t out = 0;
        detail::check(kvr_links_down(raw_, &out));
        return out;
    }

    /* Sends events to `take` from now on (nullptr: nowhere), with the rules of kvr_event_cb: on
     * the engine's own thread, and nothing may be thrown. `ctx` must outlive the engine.
     */
    void on_event(kvr_event_cb take, void *ctx) {
        detail::check(kvr_set_event_fn(raw_, take, ctx));
    }

    kvr_engine *raw() const noexcept { return raw_; }

private:
    Peer add(std::string_view blob, const char *name, std::size_t name_len) {
        kvr_peer out = 0;
        detail::check(kvr_peer_add(raw_, blob.data(), blob.size(), name, name_len, &out));
        return Peer(raw_, out, true);
    }

    void reset() noexcept {
        if (raw_ != nullptr) {
            kvr_engine_destroy(raw_);
            raw_ = nullptr;
        }
    }

    kvr_engine *raw_ = nullptr;
};

}  // namespace kvrail

#endif  // KVRAIL_HPP
