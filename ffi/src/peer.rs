//! Peers.

use core::ffi::{c_char, c_void};
use core::time::Duration;

use kvrail_core::status::Status;

use crate::barrier::guard;
use crate::engine::{engine, engine_here, kvr_engine};
use crate::pointer::{bytes, Out};
use crate::types::{kvr_peer, kvr_status};

/// Adds the peer whose kvr_engine_metadata() is `blob` and starts a dial in the background. The
/// same blob again gives the same peer. `expected_name` (not NUL terminated) must be the blob's
/// name; NULL: any. Both are copied.
///
/// Does not block: see kvr_peer_state() and kvr_peer_connect().
/// Errors: KVR_ERR_BLOB_TRUNCATED, KVR_ERR_BLOB_FOREIGN, KVR_ERR_BLOB_VERSION; KVR_ERR_MISMATCH for
/// another name; KVR_ERR_CAPACITY at `max_peers`.
///
/// # Safety
/// `e` lives; `blob` and `expected_name` are readable for `len` and `name_len` bytes; `out` is
/// writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_peer_add(
    e: *mut kvr_engine,
    blob: *const c_void,
    len: usize,
    expected_name: *const c_char,
    name_len: usize,
    out: *mut kvr_peer,
) -> kvr_status {
    guard("kvr_peer_add", || {
        // SAFETY: F1, F2 and F3, this function's own promises.
        let (engine, out, blob, name) = unsafe {
            (
                engine(e)?,
                Out::new(out, 0, "out")?,
                bytes(blob, len, "blob")?,
                bytes(expected_name.cast(), name_len, "expected_name")?,
            )
        };
        let name = if expected_name.is_null() { None } else { Some(name) };
        out.set(engine.peer_add(blob, name)?.raw())
    })
}

/// The engine as its own peer, for loopback. Always connected.
///
/// # Safety
/// `e` lives; `out` is writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_peer_self(e: *mut kvr_engine, out: *mut kvr_peer) -> kvr_status {
    guard("kvr_peer_self", || {
        // SAFETY: F1 and F3, this function's own promises.
        let (engine, out) = unsafe { (engine_here(e)?, Out::new(out, 0, "out")?) };
        out.set(engine.peer_self().raw())
    })
}

/// The peer of that name (not NUL terminated): added by kvr_peer_add(), or one that dialled this
/// engine.
///
/// Errors: KVR_ERR_NOT_FOUND.
///
/// # Safety
/// `e` lives; `name` is readable for `name_len` bytes; `out` is writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_peer_find(
    e: *mut kvr_engine,
    name: *const c_char,
    name_len: usize,
    out: *mut kvr_peer,
) -> kvr_status {
    guard("kvr_peer_find", || {
        // SAFETY: F1, F2 and F3, this function's own promises.
        let (engine, out, name) = unsafe {
            (engine(e)?, Out::new(out, 0, "out")?, bytes(name.cast(), name_len, "name")?)
        };
        out.set(engine.peer_find(name)?.raw())
    })
}

/// Waits until the peer is connected. Blocks for at most `timeout_ms` milliseconds.
///
/// Errors: KVR_ERR_UNREACHABLE when the time is over, KVR_ERR_REFUSED, KVR_ERR_DISCONNECTED,
/// KVR_ERR_NO_RAIL, KVR_ERR_PERMISSION; KVR_ERR_INVALID and KVR_ERR_STALE for the handle.
///
/// # Safety
/// `e` lives.
#[no_mangle]
pub unsafe extern "C" fn kvr_peer_connect(
    e: *mut kvr_engine,
    p: kvr_peer,
    timeout_ms: u32,
) -> kvr_status {
    guard("kvr_peer_connect", || {
        // SAFETY: F1, this function's own promise.
        unsafe { engine(e)? }.peer_connect(p, Duration::from_millis(timeout_ms.into()))?;
        Ok(Status::Ok)
    })
}

/// KVR_OK connected, KVR_IN_PROGRESS dialling or without a rail for now (transfers wait), else the
/// reason why not, as kvr_peer_connect().
///
/// # Safety
/// `e` lives.
#[no_mangle]
pub unsafe extern "C" fn kvr_peer_state(e: *mut kvr_engine, p: kvr_peer) -> kvr_status {
    // SAFETY: F1, this function's own promise.
    guard("kvr_peer_state", || unsafe { engine(e)? }.peer_state(p))
}

/// Forgets a peer: its transfers end in KVR_ERR_DISCONNECTED and its remote regions become
/// stale. Once this returns KVR_OK nothing of this engine touches that peer's memory. Blocks
/// for at most one batch. With transport local it does not wait for what the peer does in
/// memory of this engine: deregister that.
///
/// # Safety
/// `e` lives.
#[no_mangle]
pub unsafe extern "C" fn kvr_peer_remove(e: *mut kvr_engine, p: kvr_peer) -> kvr_status {
    guard("kvr_peer_remove", || {
        // SAFETY: F1, this function's own promise.
        unsafe { engine(e)? }.peer_remove(p)?;
        Ok(Status::Ok)
    })
}
