/* What kvrail.hpp adds to the C ABI: owners that move, exceptions with a status and a text. */
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <type_traits>

#include "kvrail.hpp"

namespace {

void require(bool condition, const char *what, int line) {
    if (!condition) {
        std::fprintf(stderr, "wrapper.cpp:%d: %s is false\n", line, what);
        std::exit(1);
    }
}
#define TRUE(condition) require(condition, #condition, __LINE__)

template <class T>
constexpr bool move_only = std::is_nothrow_move_constructible_v<T> &&
                           std::is_nothrow_move_assignable_v<T> &&
                           !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;
static_assert(move_only<kvrail::Config> && move_only<kvrail::Engine> && move_only<kvrail::Peer>);
static_assert(move_only<kvrail::Region> && move_only<kvrail::RemoteRegion>);
static_assert(move_only<kvrail::Table> && move_only<kvrail::Transfer>);

template <class Call>
kvr_status thrown(Call call, const char *part) {
    try {
        call();
    } catch (const kvrail::Error &error) {
        TRUE(std::string(error.what()).find(part) != std::string::npos);
        return error.status();
    }
    return KVR_OK;
}

void errors() {
    kvrail::Config config;
    TRUE(thrown([&] { config.set("no_such", "1"); }, "no_such") == KVR_ERR_CONFIG);
    config.raw().rails = 99;
    TRUE(thrown([&] { kvrail::Engine engine(config); }, "99") == KVR_ERR_CONFIG);
    TRUE(thrown([&] { kvrail::Engine::size(config); }, "99") == KVR_ERR_CONFIG);
}

void owners(kvrail::Engine &engine) {
    std::vector<unsigned char> memory(4096, 1);
    kvrail::Region a = engine.add_memory(memory.data(), 1024);
    kvrail::Region b = engine.add_memory(memory.data() + 1024, 1024);
    kvr_region first = a.raw(), second = b.raw();
    kvrail::Region c = std::move(a);
    TRUE(a.raw() == 0 && c.raw() == first);
    c = std::move(b); /* the first is given back now */
    std::size_t len = 0;
    TRUE(kvr_region_metadata(engine.raw(), first, nullptr, &len) == KVR_ERR_STALE);
    TRUE(c.raw() == second && c.metadata().size() > 0);
    {
        kvrail::Region ends = std::move(c);
    }
    TRUE(kvr_region_metadata(engine.raw(), second, nullptr, &len) == KVR_ERR_STALE);

    kvrail::Region d = engine.add_memory(memory.data(), 1024);
    d.release();
    TRUE(d.raw() == 0);
    d.release(); /* nothing left to release */

    kvr_peer raw = engine.self().raw(); /* lent: its end removes nothing */
    TRUE(kvr_peer_state(engine.raw(), raw) == KVR_OK);
}

void loopback(kvrail::Engine &engine) {
    std::vector<unsigned char> memory(4096);
    for (std::size_t i = 0; i < memory.size(); i++) memory[i] = static_cast<unsigned char>(i % 251);
    auto base = reinterpret_cast<std::uintptr_t>(memory.data());
    kvrail::Region region = engine.add_memory(memory.data(), memory.size());
    kvrail::RemoteRegion view = engine.import_self(region);
    kvrail::Peer self = engine.self();
    TRUE(self.connected());
    kvrail::Transfer transfer = engine.prepare(KVR_READ, self, {region.desc(base + 2048, 1000)},
                                               {view.desc(base + 1, 1000)});
    TRUE(thrown([&] { transfer.check(); }, "kvr_transfer_check") == KVR_ERR_NOT_POSTED);
    if (!transfer.post("")) transfer.wait();
    for (std::size_t i = 0; i < 1000; i++) TRUE(memory[2048 + i] == (i + 1) % 251);
    TRUE(transfer.info().bytes_done == 1000);

    /* What a callback throws passes the C frames and arrives here. */
    bool arrived = false;
    for (int tries = 0; tries < 100000 && !arrived; tries++) {
        try {
            engine.notifs([](std::string_view name, std::string_view message) {
                throw std::runtime_error(std::string(name) + "/" + std::string(message));
            });
            std::this_thread::yield();
        } catch (const std::runtime_error &error) {
            arrived = std::string(error.what()) == "wrapper/";
            TRUE(arrived);
        }
    }
    TRUE(arrived);
}

void links_and_events(kvrail::Engine &engine) {
    static std::atomic<int> told{0};
    TRUE(engine.links_down() == 0);
    kvrail::Config config;
    config.set("name", "neighbour");
    {
        kvrail::Engine other(config);
        kvrail::Peer peer = engine.add(other.metadata());
        engine.on_event([](void *ctx, const kvr_event *) { ++*static_cast<decltype(told) *>(ctx); },
                        &told);
        peer.connect(30000);
    }
    for (int i = 0; i < 30000 && told == 0; i++)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    TRUE(told > 0);
    engine.on_event(nullptr, nullptr);
}

void in_a_block(const kvrail::Config &config) {
    std::vector<unsigned char> block(kvrail::Engine::size(config));
    kvrail::Engine engine(config, block.data(), block.size());
    TRUE(engine.info().rails == 1 && engine.rail(0).index == 0);
    kvrail::Engine moved = std::move(engine);
    TRUE(engine.raw() == nullptr && !moved.metadata().empty());
}

}  // namespace

int main() {
    try {
        kvrail::Config config;
        config.set("name", "wrapper");
        errors();
        kvrail::Engine engine(config);
        owners(engine);
        loopback(engine);
        links_and_events(engine);
        in_a_block(config);
        std::printf("wrapper.cpp: OK\n");
        return 0;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "wrapper.cpp: %s\n", error.what());
        return 1;
    }
}
