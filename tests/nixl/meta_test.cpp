// How the metaInfo of a NIXL descriptor is read: to the letter where it is ours, and not at all
// where it is somebody else's.
#include "check.hpp"
#include "memory.hpp"

#include <utility>

namespace {

using Cuda = kvrail::Behind::Cuda;

void known() {
    const struct {
        const char *meta;
        std::uint32_t kind;
        int fd;
        std::uint64_t offset;
    } all[] = {
        {"", KVR_MEM_DEVICE, -1, 0},
        {"somebody's own words", KVR_MEM_DEVICE, -1, 0},
        {"mem=host", KVR_MEM_DEVICE, -1, 0},
        {"kvrail:mem=device", KVR_MEM_DEVICE, -1, 0},
        {"kvrail:mem=host", KVR_MEM_HOST, -1, 0},
        {"kvrail:mem=cuda", KVR_MEM_DEVICE, -1, 0},
        {"kvrail:mem=dmabuf;fd=3", KVR_MEM_DMABUF, 3, 0},
        {"kvrail:mem=dmabuf;fd=0;offset=8192", KVR_MEM_DMABUF, 0, 8192},
        {"kvrail:offset=0xfF000;fd=2147483647;mem=dmabuf", KVR_MEM_DMABUF, 2147483647, 0xff000},
        {"kvrail:mem=dmabuf;fd=7;offset=18446744073709551615", KVR_MEM_DMABUF, 7, UINT64_MAX},
        {"kvrail:mem=device;coherent", KVR_MEM_DEVICE, -1, 0},
        {"kvrail:coherent;mem=dmabuf;fd=3;offset=4096", KVR_MEM_DMABUF, 3, 4096},
    };
    kvrail::Behind seen;
    for (const auto &good : all) {
        CHECK(kvrail::readMeta(good.meta, VRAM_SEG, seen).empty());
        CHECK(seen.kind == good.kind && seen.fd == good.fd && seen.offset == good.offset);
        const std::string meta = good.meta;
        CHECK(seen.coherent == (meta.find("coherent") != std::string::npos));
        const Cuda cuda = meta == "kvrail:mem=cuda"           ? Cuda::Yes
                          : meta.compare(0, 7, "kvrail:") == 0 ? Cuda::No
                                                               : Cuda::Perhaps;
        CHECK(seen.cuda == cuda);
        CHECK(kvrail::readMeta(good.meta, DRAM_SEG, seen).empty() && seen.kind == KVR_MEM_HOST);
        CHECK(seen.cuda == Cuda::No);
    }
}

void malformed() {
    const std::string field =
        "` is no field; known: mem=, fd=, offset=, each with a value, and coherent";
    const std::string open = "`; allowed is an open descriptor, 0 to 2147483647";
    const std::string bytes = "`; allowed is a number of bytes below 2^64";
    const std::string belong = "fd and offset belong to mem=dmabuf only";
    const std::pair<const char *, std::string> bad[] = {
        {"", "`" + field},
        {"mem=hosts", "mem is `hosts`; known: host, device, dmabuf, cuda"},
        {"fd=3", "mem is ``; known: host, device, dmabuf, cuda"},
        {"mem=dmabuf", "fd is `" + open},
        {"mem=dmabuf;fd=", "`fd=" + field},
        {"mem=dmabuf;fd", "`fd" + field},
        {"mem=dmabuf;fd=3;", "`" + field},
        {"mem=dmabuf;fd=3;area=1", "`area=1" + field},
        {"mem=dmabuf;fd=3;fd=3", "`fd` stands there twice"},
        {"mem=dmabuf;fd=-1", "fd is `-1" + open},
        {"mem=dmabuf;fd= 3", "fd is ` 3" + open},
        {"mem=dmabuf;fd=3x", "fd is `3x" + open},
        {"mem=dmabuf;fd=2147483648", "fd is `2147483648" + open},
        {"mem=dmabuf;fd=3;offset=-1", "offset is `-1" + bytes},
        {"mem=dmabuf;fd=3;offset=0x", "offset is `0x" + bytes},
        {"mem=dmabuf;fd=3;offset=18446744073709551616", "offset is `18446744073709551616" + bytes},
        {"mem=host;fd=3", belong},
        {"mem=device;offset=0", belong},
        {"mem=cuda;fd=3", belong},
        {"mem=device;coherent;coherent", "`coherent` stands there twice"},
        {"mem=device;coherent=1", "`coherent=1" + field},
        {"mem=host;coherent", "coherent belongs to mem=device and mem=dmabuf only"},
        {"mem=cuda;coherent", "coherent belongs to mem=device and mem=dmabuf only"},
        {"coherent", "mem is ``; known: host, device, dmabuf, cuda"},
    };
    for (const auto &[meta, why] : bad) {
        const std::string text = std::string("kvrail:") + meta, want = "metaInfo `" + text + "`: ";
        kvrail::Behind seen;
        const std::string said = kvrail::readMeta(text, VRAM_SEG, seen);
        CHECK(said == want + why || (std::printf("%s\n", said.c_str()), false));
    }
}

} // namespace

int main() {
    known();
    malformed();
    return verdict();
}
