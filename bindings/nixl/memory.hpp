// What stands behind the address of a NIXL descriptor. nixl_rbln, and whoever else has memory that
// is no host's, says it with the descriptor's metaInfo:
//
//     kvrail:mem=host                     host memory, also where the type is VRAM
//     kvrail:mem=device                   a device's address; a peer-memory module resolves it
//     kvrail:mem=dmabuf;fd=N[;offset=B]   the bytes from B (0) on of the dma-buf N
//     kvrail:mem=cuda                     an address of CUDA's; its driver exports a dma-buf
//
// `;coherent` behind device or dmabuf: who reads the memory sees what a NIC has completed, so READs
// into it need no flush (KVR_SEGMENT_COHERENT).
//
// Anything that does not begin with `kvrail:` (NIXL's users have words of their own there) says
// nothing: DRAM is host memory, VRAM is a device's address or CUDA's, as the parameter devmem says.
#pragma once

#include "kvrail.h"
#include "nixl_abi.hpp"

#include <cstdint>
#include <limits>
#include <string>

namespace kvrail {

struct Behind {
    std::uint32_t kind = KVR_MEM_HOST; // KVR_MEM_
    std::int32_t fd = -1;              // stays the caller's; may be closed after registerMem
    std::uint64_t offset = 0;
    bool coherent = false;
    enum class Cuda { No, Perhaps, Yes } cuda = Cuda::No; // Perhaps: nothing is said of VRAM
};

namespace detail {

// Decimal, or hexadecimal after 0x; nothing around it.
inline bool number(const std::string &text, std::uint64_t most, std::uint64_t &out) {
    const bool hex = text.compare(0, 2, "0x") == 0;
    const std::string digits = hex ? text.substr(2) : text;
    const char *known = hex ? "0123456789abcdefABCDEF" : "0123456789";
    if (digits.empty() || digits.size() > 20) return false;
    if (digits.find_first_not_of(known) != std::string::npos) return false;
    std::uint64_t value = 0;
    for (const char c : digits) {
        const std::uint64_t digit =
            static_cast<std::uint64_t>(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
        const std::uint64_t base = hex ? 16 : 10;
        if (value > (std::numeric_limits<std::uint64_t>::max() - digit) / base) return false;
        value = value * base + digit;
    }
    out = value;
    return value <= most;
}

} // namespace detail

// Reads a metaInfo. Returns what is wrong with it, in words, or nothing.
inline std::string readMeta(const std::string &meta, nixl_mem_t type, Behind &out) {
    static const std::string prefix = "kvrail:";
    out = Behind{};
    if (type == DRAM_SEG) return "";
    if (meta.compare(0, prefix.size(), prefix) != 0) {
        out.kind = KVR_MEM_DEVICE;
        out.cuda = Behind::Cuda::Perhaps;
        return "";
    }
    const std::string what = "metaInfo `" + meta + "`: ";
    std::string mem, fd, offset;
    for (std::size_t at = prefix.size(), end; at <= meta.size(); at = end + 1) {
        end = meta.find(';', at);
        if (end == std::string::npos) end = meta.size();
        const std::string field = meta.substr(at, end - at);
        if (field == "coherent") {
            if (out.coherent) return what + "`coherent` stands there twice";
            out.coherent = true;
            continue;
        }
        const std::size_t sign = field.find('=');
        const std::string key = field.substr(0, sign);
        std::string *to = key == "mem" ? &mem : key == "fd" ? &fd : key == "offset" ? &offset
                                                                                    : nullptr;
        if (!to || sign == std::string::npos || sign + 1 == field.size())
            return what + "`" + field +
                   "` is no field; known: mem=, fd=, offset=, each with a value, and coherent";
        if (!to->empty()) return what + "`" + key + "` stands there twice";
        *to = field.substr(sign + 1);
    }
    const bool isBuffer = mem == "dmabuf";
    if (mem == "device")
        out.kind = KVR_MEM_DEVICE;
    else if (isBuffer)
        out.kind = KVR_MEM_DMABUF;
    else if (mem == "cuda")
        out.kind = KVR_MEM_DEVICE, out.cuda = Behind::Cuda::Yes;
    else if (mem != "host")
        return what + "mem is `" + mem + "`; known: host, device, dmabuf, cuda";
    if (out.coherent && !isBuffer && mem != "device")
        return what + "coherent belongs to mem=device and mem=dmabuf only";
    if (!isBuffer && (!fd.empty() || !offset.empty()))
        return what + "fd and offset belong to mem=dmabuf only";
    std::uint64_t value = 0;
    constexpr std::uint64_t most = std::numeric_limits<std::int32_t>::max();
    if (isBuffer && !detail::number(fd, most, value))
        return what + "fd is `" + fd + "`; allowed is an open descriptor, 0 to " +
               std::to_string(most);
    if (isBuffer) out.fd = static_cast<std::int32_t>(value);
    constexpr std::uint64_t any = std::numeric_limits<std::uint64_t>::max();
    if (!offset.empty() && !detail::number(offset, any, out.offset))
        return what + "offset is `" + offset + "`; allowed is a number of bytes below 2^64";
    return "";
}

} // namespace kvrail
