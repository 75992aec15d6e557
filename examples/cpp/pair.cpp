/* Two engines in one process: decode reads the even blocks of prefill and writes the odd ones.
 * Every byte is compared.
 *
 *     c++ -std=c++17 examples/cpp/pair.cpp -Iinclude -Ltarget/release -lkvrail -o pair && ./pair
 */
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iterator>

#include "kvrail.hpp"

namespace {

constexpr std::uint32_t BLOCKS = 64;
constexpr std::size_t BLOCK = 4097;

using Memory = std::vector<unsigned char>;

/* Every byte of every block of either side is its own. */
unsigned char pattern(int side, std::size_t block, std::size_t byte) {
    return static_cast<unsigned char>(side * 101 + block * 31 + byte * 7 + (byte >> 8));
}

Memory filled(int side) {
    Memory out(BLOCKS * BLOCK);
    for (std::size_t i = 0; i < out.size(); i++) out[i] = pattern(side, i / BLOCK, i % BLOCK);
    return out;
}

void expect(const Memory &memory, std::size_t place, int side, std::size_t block) {
    for (std::size_t i = 0; i < BLOCK; i++) {
        if (memory[place * BLOCK + i] != pattern(side, block, i)) {
            throw std::runtime_error("block " + std::to_string(place) + " differs at byte " +
                                     std::to_string(i));
        }
    }
}

kvrail::Engine make(const char *name) {
    return kvrail::Engine(kvrail::Config().set("name", name).env());
}

std::uint64_t address(Memory &memory) { return reinterpret_cast<std::uintptr_t>(memory.data()); }

void wait_for(kvrail::Engine &engine, const std::string &name, const std::string &message) {
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    for (bool seen = false; !seen;) {
        engine.notifs([&](std::string_view from, std::string_view text) {
            if (from != name || text != message) {
                throw std::runtime_error("unexpected notification: " + std::string(text));
            }
            seen = true;
        });
        if (!seen && std::chrono::steady_clock::now() > end) {
            throw std::runtime_error("no notification within 10 s");
        }
    }
}

void pair() {
    Memory prefill_memory = filled(1), decode_memory = filled(2);
    kvrail::Engine prefill = make("prefill"), decode = make("decode");
    kvrail::Region there = prefill.add_memory(prefill_memory.data(), prefill_memory.size());
    kvrail::Region here = decode.add_memory(decode_memory.data(), decode_memory.size());

    kvrail::Peer peer = decode.add(prefill.metadata(), "prefill");
    peer.connect(10000);
    kvrail::RemoteRegion imported = peer.import_region(there.metadata());

    kvrail::Table local = decode.table({kvr_stride{address(decode_memory), BLOCK, BLOCK, BLOCKS,
                                                   here.raw()}});
    std::vector<kvr_desc> list;
    std::vector<std::uint32_t> even, reversed, odd;
    for (std::uint32_t i = 0; i < BLOCKS; i++) {
        list.push_back(imported.desc(address(prefill_memory) + i * BLOCK, BLOCK));
        (i % 2 == 0 ? even : odd).push_back(i);
    }
    std::copy(even.rbegin(), even.rend(), std::back_inserter(reversed));
    kvrail::Table remote = decode.table(list);

    kvrail::Transfer pull = decode.prepare(KVR_READ, peer, local, reversed, remote, even);
    if (!pull.post()) pull.wait();
    kvrail::Transfer push = decode.prepare(KVR_WRITE, peer, local, odd, remote, odd);
    if (!push.post("all blocks moved")) push.wait();
    wait_for(prefill, "decode", "all blocks moved");

    for (std::size_t i = 0; i < even.size(); i++) expect(decode_memory, reversed[i], 1, even[i]);
    for (std::uint32_t i = 0; i < BLOCKS; i++) expect(prefill_memory, i, i % 2 ? 2 : 1, i);

    try { /* an error says what was wrong */
        decode.prepare(KVR_READ, peer, local, {BLOCKS}, remote, {0});
        throw std::runtime_error("an index out of range was let through");
    } catch (const kvrail::Error &error) {
        if (error.status() != KVR_ERR_RANGE) throw;
    }
    std::printf("pair.cpp: OK, %zu blocks of %zu bytes read and %zu written between two engines, 1 "
                "notification\n",
                even.size(), BLOCK, odd.size());
}

}  // namespace

int main() {
    try {
        pair();
        return 0;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "pair.cpp: %s\n", error.what());
        return 1;
    }
}
