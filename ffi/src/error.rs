//! Versions, status texts and the last error.

use core::ffi::{c_char, CStr};

use kvrail_core::status::Status;

use crate::barrier::last_error;
use crate::pointer::fill_text;
use crate::types::*;

/// Every code and its status, for the assertions below.
const CODES: &[(kvr_status, Status)] = &[
    (KVR_OK, Status::Ok),
    (KVR_IN_PROGRESS, Status::InProgress),
    (KVR_ERR_INVALID, Status::Invalid),
    (KVR_ERR_STALE, Status::Stale),
    (KVR_ERR_NOT_FOUND, Status::NotFound),
    (KVR_ERR_RANGE, Status::Range),
    (KVR_ERR_MISMATCH, Status::Mismatch),
    (KVR_ERR_NOT_REGISTERED, Status::NotRegistered),
    (KVR_ERR_CAPACITY, Status::Capacity),
    (KVR_ERR_BUSY, Status::Busy),
    (KVR_ERR_UNSUPPORTED, Status::Unsupported),
    (KVR_ERR_NO_MEMORY, Status::NoMemory),
    (KVR_ERR_BLOB_TRUNCATED, Status::BlobTruncated),
    (KVR_ERR_BLOB_FOREIGN, Status::BlobForeign),
    (KVR_ERR_BLOB_VERSION, Status::BlobVersion),
    (KVR_ERR_CONFIG, Status::Config),
    (KVR_ERR_FORKED, Status::Forked),
    (KVR_ERR_PERMISSION, Status::Permission),
    (KVR_ERR_NOT_POSTED, Status::NotPosted),
    (KVR_ERR_CANCELLED, Status::Cancelled),
    (KVR_ERR_REMOTE_ACCESS, Status::RemoteAccess),
    (KVR_ERR_LOCAL_ACCESS, Status::LocalAccess),
    (KVR_ERR_STALLED, Status::Stalled),
    (KVR_ERR_NO_RAIL, Status::NoRail),
    (KVR_ERR_DISCONNECTED, Status::Disconnected),
    (KVR_ERR_UNREACHABLE, Status::Unreachable),
    (KVR_ERR_REFUSED, Status::Refused),
    (KVR_ERR_INTERNAL, Status::Internal),
    (KVR_ERR_OS, Status::Os),
];

// A status without a code here, or with another number, does not compile.
const _: () = {
    assert!(CODES.len() == Status::ALL.len());
    let mut i = 0;
    while i < CODES.len() {
        assert!(CODES[i].0 == CODES[i].1.code());
        assert!(CODES[i].0 == Status::ALL[i].code());
        i += 1;
    }
};

/// KVR_ABI_MAJOR << 16 | KVR_ABI_MINOR of the library. A program built with another major number
/// must not go on.
#[no_mangle]
pub extern "C" fn kvr_abi_version() -> u32 {
    KVR_ABI_MAJOR << 16 | KVR_ABI_MINOR
}

/// The library's version, as "0.1.0". Static text: never freed.
#[no_mangle]
pub extern "C" fn kvr_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// One short line that says what a status means. Static text: never freed, never NULL, for any
/// number.
#[no_mangle]
pub extern "C" fn kvr_strerror(status: kvr_status) -> *const c_char {
    Status::from_code(status).map_or(c"unknown status", Status::text_c).as_ptr()
}

/// Writes the text of the calling thread's last failed call into `buf`: at most `len` bytes, always
/// with a NUL. Returns the full length without the NUL, 0 if nothing failed yet.
///
/// Every negative status sets the text, on its own thread only; it stays until that thread's next
/// failure. Calls that succeed leave it alone, so ask only after a failure.
///
/// # Safety
/// `buf` is NULL or writable for `len` bytes.
#[no_mangle]
pub unsafe extern "C" fn kvr_last_error(buf: *mut c_char, len: usize) -> usize {
    // SAFETY: F3, this function's own promise.
    let write = |text: &str| unsafe { fill_text(text.as_bytes(), buf, len) };
    last_error(write).unwrap_or_else(|| write(""))
}
