// kvr_status to nixl_status_t. NIXL has fewer words: the text of kvr_last_error() goes to the log.
#pragma once

#include "kvrail.h"
#include "nixl_abi.hpp"

inline nixl_status_t toNixl(kvr_status status) noexcept {
    switch (status) {
    case KVR_OK:
        return NIXL_SUCCESS;
    case KVR_IN_PROGRESS:
        return NIXL_IN_PROG;

    case KVR_ERR_INVALID:
    case KVR_ERR_RANGE:
    case KVR_ERR_MISMATCH: // of lists: NIXL's agent calls that INVALID_PARAM too
    case KVR_ERR_NOT_REGISTERED:
    case KVR_ERR_CONFIG:
    case KVR_ERR_BLOB_TRUNCATED:
    case KVR_ERR_BLOB_FOREIGN:
        return NIXL_ERR_INVALID_PARAM;
    case KVR_ERR_BLOB_VERSION:
        return NIXL_ERR_MISMATCH;

    case KVR_ERR_NOT_FOUND:
    case KVR_ERR_STALE: // what agents since 1.5 say themselves about a handle of removed metadata
        return NIXL_ERR_NOT_FOUND;

    case KVR_ERR_BUSY:
        return NIXL_ERR_REPOST_ACTIVE;
    case KVR_ERR_NOT_POSTED:
        return NIXL_ERR_NOT_POSTED;
    case KVR_ERR_CANCELLED:
        return NIXL_ERR_CANCELED;
    case KVR_ERR_UNSUPPORTED:
        return NIXL_ERR_NOT_SUPPORTED;
    case KVR_ERR_PERMISSION:
    case KVR_ERR_FORKED:
        return NIXL_ERR_NOT_ALLOWED;

    case KVR_ERR_DISCONNECTED:
    case KVR_ERR_UNREACHABLE:
    case KVR_ERR_REFUSED:
        // Agents before 1.5 drop the peer on this one, so only a lost peer may map to it:
        // KVR_ERR_NO_RAIL heals when a link comes back.
        return NIXL_ERR_REMOTE_DISCONNECT;

    default:
        return NIXL_ERR_BACKEND;
    }
}
