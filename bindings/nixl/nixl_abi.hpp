// NIXL's backend-plugin ABI, declared here because no NIXL header is used or needed.
//
// Covers releases 1.0.0 to 1.5.x (checked by running against nixl-cu12 1.0.1, 1.3.2, 1.4.1, 1.5.0
// and 1.5.1), x86-64, libstdc++ with C++11 strings. Sizes and offsets were measured from the
// wheels' binaries (disassembly, vtables read at run time). Releases 0.x have another vtable under
// the same API version number; plugin.cpp refuses those. A release that changes anything here must
// change NIXL's API version too, and then its loader refuses this plugin.
//
// Only what a plugin touches is declared. A layout that differs by a byte breaks silently, so every
// size and offset is asserted at the end, and tests/nixl/shim_test.cpp checks the vtable slots.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

constexpr int kNixlPluginApiVersion = 1;

enum nixl_mem_t : unsigned { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };
enum nixl_xfer_op_t : unsigned { NIXL_READ, NIXL_WRITE };
enum class nixl_thread_sync_t : int { NONE, STRICT, RW };
enum class nixl_cost_t : int { ANALYTICAL_BACKEND };

enum nixl_status_t : int {
    NIXL_IN_PROG = 1,
    NIXL_SUCCESS = 0,
    NIXL_ERR_NOT_POSTED = -1,
    NIXL_ERR_INVALID_PARAM = -2,
    NIXL_ERR_BACKEND = -3,
    NIXL_ERR_NOT_FOUND = -4,
    NIXL_ERR_MISMATCH = -5,
    NIXL_ERR_NOT_ALLOWED = -6,
    NIXL_ERR_REPOST_ACTIVE = -7,
    NIXL_ERR_UNKNOWN = -8,
    NIXL_ERR_NOT_SUPPORTED = -9,
    NIXL_ERR_REMOTE_DISCONNECT = -10,
    NIXL_ERR_CANCELED = -11,
    NIXL_ERR_NO_TELEMETRY = -12,
};

// The agent stores pointers to these and never looks inside, so they stay incomplete: ours are
// handles of the C ABI in disguise.
class nixlBackendMD;
class nixlBackendReqH;
struct nixlAgentOptionalArgs; // changed in 1.0; only ever passed on, never read

struct nixlBasicDesc {
    std::uint64_t addr;
    std::uint64_t len;
    std::uint64_t devId;
};
struct nixlMetaDesc : nixlBasicDesc {
    nixlBackendMD *metadataP;
};
struct nixlBlobDesc : nixlBasicDesc {
    std::string metaInfo;
};
struct nixlRemoteMetaDesc : nixlMetaDesc {
    std::string remoteAgent;
};

// The agent makes the lists; a plugin reads them.
template <class T> class nixlDescList {
public:
    virtual ~nixlDescList();
    nixl_mem_t type;
    std::vector<T> descs;
};

using nixl_b_params_t = std::unordered_map<std::string, std::string>;
using nixl_mem_list_t = std::vector<nixl_mem_t>;
using notif_list_t = std::vector<std::pair<std::string, std::string>>; // (agent, message)
using nixl_query_resp_t = std::optional<nixl_b_params_t>;
using nixl_meta_dlist_t = nixlDescList<nixlMetaDesc>;
using nixl_reg_dlist_t = nixlDescList<nixlBlobDesc>;
using nixl_remote_meta_dlist_t = nixlDescList<nixlRemoteMetaDesc>;
using nixlMemViewH = void *;

struct nixl_opt_b_args_t {
    std::string notifMsg;
    bool hasNotif;
    std::string customParam;
};

struct nixlBackendInitParams {
    std::string localAgent;
    std::string type;
    nixl_b_params_t *customParams;
    bool enableProgTh;
    std::uint64_t pthrDelay; // microseconds
    nixl_thread_sync_t syncMode;
    bool enableTelemetry_;
};

class nixlBackendEngine {
public:
    // The agent reads backendType, customParams and initErr directly. backendType must be the
    // string of InitParams: the agent finds the plugin by it again to destroy the engine.
    explicit nixlBackendEngine(const nixlBackendInitParams &init)
        : backendType(init.type),
          customParams(init.customParams ? *init.customParams : nixl_b_params_t{}),
          localAgent(init.localAgent),
          enableTelemetry_(init.enableTelemetry_) {}
    nixlBackendEngine(const nixlBackendEngine &) = delete;
    nixlBackendEngine &operator=(const nixlBackendEngine &) = delete;

    // Order is the ABI. The destructor takes slots 0 and 1; enums come by reference.
    virtual ~nixlBackendEngine() = default;
    virtual bool supportsRemote() const = 0;
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
    virtual nixl_mem_list_t getSupportedMems() const = 0;
    virtual nixl_status_t
    registerMem(const nixlBlobDesc &mem, const nixl_mem_t &type, nixlBackendMD *&out) = 0;
    virtual nixl_status_t deregisterMem(nixlBackendMD *meta) = 0;
    virtual nixl_status_t connect(const std::string &agent) = 0;
    virtual nixl_status_t disconnect(const std::string &agent) = 0;
    virtual nixl_status_t unloadMD(nixlBackendMD *input) = 0;
    virtual nixl_status_t prepXfer(const nixl_xfer_op_t &op, const nixl_meta_dlist_t &local,
                                   const nixl_meta_dlist_t &remote, const std::string &agent,
                                   nixlBackendReqH *&handle,
                                   const nixl_opt_b_args_t *args = nullptr) const = 0;
    virtual nixl_status_t postXfer(const nixl_xfer_op_t &op, const nixl_meta_dlist_t &local,
                                   const nixl_meta_dlist_t &remote, const std::string &agent,
                                   nixlBackendReqH *&handle,
                                   const nixl_opt_b_args_t *args = nullptr) const = 0;
    virtual nixl_status_t checkXfer(nixlBackendReqH *handle) const = 0;
    virtual nixl_status_t releaseReqH(nixlBackendReqH *handle) const = 0;
    virtual nixl_status_t prepMemView(const nixl_remote_meta_dlist_t &, nixlMemViewH &,
                                      const nixl_opt_b_args_t * = nullptr) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual nixl_status_t prepMemView(const nixl_meta_dlist_t &, nixlMemViewH &,
                                      const nixl_opt_b_args_t * = nullptr) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual void releaseMemView(nixlMemViewH) const {}
    virtual nixl_status_t getPublicData(const nixlBackendMD *, std::string &) const {
        return NIXL_ERR_BACKEND;
    }
    virtual nixl_status_t getConnInfo(std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadRemoteConnInfo(const std::string &, const std::string &) {
        return NIXL_ERR_BACKEND;
    }
    virtual nixl_status_t loadRemoteMD(const nixlBlobDesc &, const nixl_mem_t &,
                                       const std::string &, nixlBackendMD *&) {
        return NIXL_ERR_BACKEND;
    }
    virtual nixl_status_t loadLocalMD(nixlBackendMD *, nixlBackendMD *&) {
        return NIXL_ERR_BACKEND;
    }
    virtual nixl_status_t getNotifs(notif_list_t &) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t genNotif(const std::string &, const std::string &) const {
        return NIXL_ERR_BACKEND;
    }
    virtual nixl_status_t queryMem(const nixl_reg_dlist_t &,
                                   std::vector<nixl_query_resp_t> &) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual nixl_status_t
    estimateXferCost(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                     const std::string &, nixlBackendReqH *const &, std::chrono::microseconds &,
                     std::chrono::microseconds &, nixl_cost_t &,
                     const nixlAgentOptionalArgs * = nullptr) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }

    // Public for the asserts below; access does not change the layout.
    std::string backendType;
    nixl_b_params_t customParams;
    std::vector<char> telemetryEvents_; // element layout changes between releases: stays empty
    std::mutex telemetryEventsMutex_;
    bool initErr = false;
    const std::string localAgent;
    const bool enableTelemetry_;
};

struct nixlBackendPlugin {
    int api_version;
    nixlBackendEngine *(*create_engine)(const nixlBackendInitParams *);
    void (*destroy_engine)(nixlBackendEngine *);
    const char *(*get_plugin_name)();
    const char *(*get_plugin_version)();
    nixl_b_params_t (*get_backend_options)();
    nixl_mem_list_t (*get_backend_mems)();
};

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof" // gcc supports it for these types
#define NIXL_SIZE(T, n) static_assert(sizeof(T) == (n), "NIXL ABI: size of " #T)
#define NIXL_AT(T, m, n) static_assert(offsetof(T, m) == (n), "NIXL ABI: offset of " #T "::" #m)
NIXL_SIZE(void *, 8);
NIXL_SIZE(std::string, 32);
NIXL_SIZE(nixl_b_params_t, 56);
NIXL_SIZE(std::mutex, 40);
NIXL_SIZE(nixl_query_resp_t, 64);
NIXL_SIZE(nixl_mem_t, 4);
NIXL_SIZE(nixl_xfer_op_t, 4);
NIXL_SIZE(nixl_status_t, 4);
NIXL_SIZE(nixl_thread_sync_t, 4);
NIXL_SIZE(nixl_cost_t, 4);
NIXL_SIZE(nixlBasicDesc, 24);
NIXL_AT(nixlBasicDesc, addr, 0);
NIXL_AT(nixlBasicDesc, len, 8);
NIXL_AT(nixlBasicDesc, devId, 16);
NIXL_SIZE(nixlMetaDesc, 32);
NIXL_AT(nixlMetaDesc, metadataP, 24);
NIXL_SIZE(nixlBlobDesc, 56);
NIXL_AT(nixlBlobDesc, metaInfo, 24);
NIXL_SIZE(nixlRemoteMetaDesc, 64);
NIXL_AT(nixlRemoteMetaDesc, remoteAgent, 32);
NIXL_SIZE(nixl_meta_dlist_t, 40);
NIXL_AT(nixl_meta_dlist_t, type, 8);
NIXL_AT(nixl_meta_dlist_t, descs, 16);
NIXL_SIZE(nixl_opt_b_args_t, 72);
NIXL_AT(nixl_opt_b_args_t, notifMsg, 0);
NIXL_AT(nixl_opt_b_args_t, hasNotif, 32);
NIXL_AT(nixl_opt_b_args_t, customParam, 40);
NIXL_SIZE(nixlBackendInitParams, 96);
NIXL_AT(nixlBackendInitParams, localAgent, 0);
NIXL_AT(nixlBackendInitParams, type, 32);
NIXL_AT(nixlBackendInitParams, customParams, 64);
NIXL_AT(nixlBackendInitParams, enableProgTh, 72);
NIXL_AT(nixlBackendInitParams, pthrDelay, 80);
NIXL_AT(nixlBackendInitParams, syncMode, 88);
NIXL_AT(nixlBackendInitParams, enableTelemetry_, 92);
NIXL_SIZE(nixlBackendEngine, 208);
NIXL_AT(nixlBackendEngine, backendType, 8);
NIXL_AT(nixlBackendEngine, customParams, 40);
NIXL_AT(nixlBackendEngine, telemetryEvents_, 96);
NIXL_AT(nixlBackendEngine, telemetryEventsMutex_, 120);
NIXL_AT(nixlBackendEngine, initErr, 160);
NIXL_AT(nixlBackendEngine, localAgent, 168);
NIXL_AT(nixlBackendEngine, enableTelemetry_, 200);
NIXL_SIZE(nixlBackendPlugin, 56);
NIXL_AT(nixlBackendPlugin, api_version, 0);
NIXL_AT(nixlBackendPlugin, create_engine, 8);
NIXL_AT(nixlBackendPlugin, destroy_engine, 16);
NIXL_AT(nixlBackendPlugin, get_plugin_name, 24);
NIXL_AT(nixlBackendPlugin, get_plugin_version, 32);
NIXL_AT(nixlBackendPlugin, get_backend_options, 40);
NIXL_AT(nixlBackendPlugin, get_backend_mems, 48);
#undef NIXL_SIZE
#undef NIXL_AT
#pragma GCC diagnostic pop
