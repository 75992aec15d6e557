// A text on standard error, each of its lines with our name in front. NIXL's Python layer turns a
// status into an exception without a text, so this is where the reason of a refusal is found.
#pragma once

#include "kvrail.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace kvrail {

inline void say(const std::string &text) noexcept {
    for (std::size_t at = 0, end; at <= text.size(); at = end + 1) {
        end = text.find('\n', at);
        if (end == std::string::npos) end = text.size();
        std::fprintf(stderr, "kvrail: %.*s\n", static_cast<int>(end - at), text.data() + at);
    }
}

// A dead peer fails thousands of transfers at once: ten such lines a second are enough.
inline bool mayLog() noexcept {
    static std::atomic<std::uint64_t> window{0}; // second << 32 | lines in it
    using namespace std::chrono;
    const auto now = duration_cast<seconds>(steady_clock::now().time_since_epoch()).count();
    const std::uint64_t fresh = static_cast<std::uint64_t>(now) << 32;
    std::uint64_t seen = window.load(), next;
    do {
        next = (seen >> 32) == (fresh >> 32) ? seen + 1 : fresh + 1;
    } while (!window.compare_exchange_weak(seen, next));
    return (next & 0xffffffffu) <= 10;
}

// The calling thread's last error of the C ABI, or the plain name of `status`.
inline std::string lastError(kvr_status status) {
    std::string text(512, '\0');
    std::size_t full = kvr_last_error(text.data(), text.size());
    if (full >= text.size()) {
        text.resize(full + 1);
        full = kvr_last_error(text.data(), text.size());
    }
    text.resize(full < text.size() ? full : text.size());
    while (!text.empty() && text.back() == '\0') text.pop_back();
    return text.empty() ? kvr_strerror(status) : text;
}

} // namespace kvrail
