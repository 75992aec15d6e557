// The RBLN backend as NIXL sees it: every method is a call of the C ABI. No transfer logic lives
// here; what two bindings need belongs behind kvrail.h.
//
// NIXL's opaque pointers are kvr_region and kvr_transfer handles, not addresses: they carry a
// generation, so a pointer that an agent kept too long (agents before 1.5 do) is an error, never
// another region's memory.
#pragma once

#include "kvrail.h"
#include "memory.hpp"
#include "nixl_abi.hpp"

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_set>

namespace kvrail {

class Engine final : public nixlBackendEngine {
public:
    // Null, with the reason on standard error, when a parameter or the machine forbids it.
    static Engine *create(const nixlBackendInitParams &init);
    ~Engine() override; // stops every thread of the engine

    bool supportsRemote() const override { return true; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return true; }
    nixl_mem_list_t getSupportedMems() const override { return memTypes(); }
    static nixl_mem_list_t memTypes() { return {DRAM_SEG, VRAM_SEG}; }

    nixl_status_t registerMem(const nixlBlobDesc &mem, const nixl_mem_t &type,
                              nixlBackendMD *&out) override;
    nixl_status_t deregisterMem(nixlBackendMD *meta) override;
    nixl_status_t connect(const std::string &agent) override;
    nixl_status_t disconnect(const std::string &agent) override;
    nixl_status_t unloadMD(nixlBackendMD *input) override;
    nixl_status_t prepXfer(const nixl_xfer_op_t &op, const nixl_meta_dlist_t &local,
                           const nixl_meta_dlist_t &remote, const std::string &agent,
                           nixlBackendReqH *&handle, const nixl_opt_b_args_t *args) const override;
    nixl_status_t postXfer(const nixl_xfer_op_t &op, const nixl_meta_dlist_t &local,
                           const nixl_meta_dlist_t &remote, const std::string &agent,
                           nixlBackendReqH *&handle, const nixl_opt_b_args_t *args) const override;
    nixl_status_t checkXfer(nixlBackendReqH *handle) const override;
    nixl_status_t releaseReqH(nixlBackendReqH *handle) const override;
    nixl_status_t getPublicData(const nixlBackendMD *meta, std::string &out) const override;
    nixl_status_t getConnInfo(std::string &out) const override;
    nixl_status_t loadRemoteConnInfo(const std::string &agent, const std::string &info) override;
    nixl_status_t loadRemoteMD(const nixlBlobDesc &blob, const nixl_mem_t &type,
                               const std::string &agent, nixlBackendMD *&out) override;
    nixl_status_t loadLocalMD(nixlBackendMD *input, nixlBackendMD *&out) override;
    nixl_status_t getNotifs(notif_list_t &out) override;
    nixl_status_t genNotif(const std::string &agent, const std::string &message) const override;
    // queryMem (for storage), estimateXferCost and prepMemView stay NOT_SUPPORTED.

private:
    Engine(const nixlBackendInitParams &init, const kvr_config &config, kvr_engine *engine);
    kvr_status findPeer(const std::string &agent, kvr_peer &out) const;
    kvr_status registerOne(const Behind &behind, kvr_segment &one) const;

    kvr_engine *const engine_;
    const std::uint32_t connectMs_;
    const std::uint32_t releaseMs_;
    const enum class Vram { Auto, Device, Cuda } vram_; // about which nothing is said
    mutable std::mutex refusedLock_;
    mutable std::unordered_set<kvr_transfer> refused_; // releaseReqH said no once: not again
    mutable std::atomic<std::size_t> refusedCount_{0}; // its size, to be read without the lock
};

} // namespace kvrail
