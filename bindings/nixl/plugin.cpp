// Entry points of libplugin_RBLN.so. NIXL may run init and fini several times in one process and
// never unmaps the plugin, so neither holds state; threads end with their engine.
#include "engine.hpp"
#include "log.hpp"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <exception>
#include <link.h>

namespace {

// Calls of an agent before 1.0 would land in other methods, and the API version number does not
// tell: it is 1 in both. This function of the agent came with the vtable declared in nixl_abi.hpp.
constexpr const char *kSince10 = "_ZNK9nixlAgent14releaseMemViewEPv";

int collectAgents(dl_phdr_info *info, std::size_t, void *paths) {
    const std::string path = info->dlpi_name ? info->dlpi_name : "";
    const std::string name = "/libnixl.so";
    if (path.size() >= name.size() &&
        path.compare(path.size() - name.size(), name.size(), name) == 0)
        static_cast<std::vector<std::string> *>(paths)->push_back(path);
    return 0;
}

// The path of an agent library that is too old, or an empty string.
std::string oldAgent() {
    std::vector<std::string> paths;
    dl_iterate_phdr(collectAgents, &paths);
    // Only now: dlopen inside the callback could deadlock with another thread's dlopen.
    for (const std::string &path : paths) {
        void *lib = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
        if (!lib) continue;
        const bool known = dlsym(lib, kSince10) != nullptr;
        dlclose(lib);
        if (!known) return path;
    }
    return {};
}

// What a user may pass to createBackend, with the values that hold if they pass none.
nixl_b_params_t options() {
    std::string text(kvr_config_keys(nullptr, 0) + 1, '\0');
    kvr_config_keys(text.data(), text.size());
    nixl_b_params_t out;
    for (std::size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
        const std::size_t eq = text.find('=', at);
        if (eq >= end) continue;
        const std::string key = text.substr(at, eq - at);
        std::string env = "KVRAIL_";
        for (char c : key) env += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
        const char *set = std::getenv(env.c_str());
        if (set && *set)
            out[key] = set;
        else if (key == "progress_thread")
            out[key] = ""; // the agent's enableProgTh, not known here
        else if (key != "name") // always the agent's
            out[key] = text.substr(eq + 1, end - eq - 1);
    }
    return out;
}

nixlBackendEngine *createEngine(const nixlBackendInitParams *init) {
    try {
        return init ? kvrail::Engine::create(*init) : nullptr;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "kvrail: backend not created: %s\n", error.what());
    } catch (...) {
        std::fprintf(stderr, "kvrail: backend not created: unknown exception\n");
    }
    return nullptr;
}

nixl_b_params_t getOptions() {
    try {
        return options();
    } catch (...) {
        return {};
    }
}

nixlBackendPlugin plugin = {
    kNixlPluginApiVersion,
    createEngine,
    [](nixlBackendEngine *engine) { delete engine; },
    [] { return "RBLN"; },
    [] { return kvr_version(); },
    getOptions,
    [] { return kvrail::Engine::memTypes(); },
};

} // namespace

extern "C" __attribute__((visibility("default"))) nixlBackendPlugin *nixl_plugin_init() {
    try {
        const std::string old = oldAgent();
        if (old.empty()) return &plugin;
        kvrail::say("NIXL before 1.0 calls plugins by another layout: found " + old +
                    "; needs 1.0.1 to 1.5.x (pip install --no-deps nixl-cu12==1.5.1)");
    } catch (...) {
    }
    return nullptr;
}

extern "C" __attribute__((visibility("default"))) void nixl_plugin_fini() {}
