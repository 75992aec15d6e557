//! Notifications.

use core::ffi::c_void;

use kvrail_core::status::Status;

use crate::barrier::{guard, invalid};
use crate::engine::{engine, kvr_engine};
use crate::pointer::{bytes, Out};
use crate::types::{kvr_notif_cb, kvr_peer, kvr_status};

/// Sends a message of 0 to KVR_MESSAGE_MAX bytes to a peer. Copied; KVR_OK: queued. Does not block.
///
/// Errors: KVR_ERR_INVALID for a longer one; KVR_ERR_CAPACITY when message blocks are out; the
/// peer's errors. After KVR_EVENT_PEER_GONE it answers that error and dials again: repeat it after
/// KVR_EVENT_PEER_UP.
///
/// # Safety
/// `e` lives; `msg` is readable for `len` bytes.
#[no_mangle]
pub unsafe extern "C" fn kvr_notify(
    e: *mut kvr_engine,
    p: kvr_peer,
    msg: *const c_void,
    len: usize,
) -> kvr_status {
    guard("kvr_notify", || {
        // SAFETY: F1 and F2, this function's own promises.
        let (engine, msg) = unsafe { (engine(e)?, bytes(msg, len, "msg")?) };
        engine.notify(p, msg)?;
        Ok(Status::Ok)
    })
}

/// Takes every pending notification: calls `cb` once for each, on this thread, and stores how many
/// in `*count` (NULL: not wanted). Polls first when there is no progress thread. Does not block.
///
/// # Safety
/// `e` lives; `cb` may be called with `ctx` and keeps the rules of kvr_notif_cb; `count` is NULL or
/// writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_notifs(
    e: *mut kvr_engine,
    cb: kvr_notif_cb,
    ctx: *mut c_void,
    count: *mut usize,
) -> kvr_status {
    guard("kvr_notifs", || {
        // SAFETY: F1 and F3, this function's own promises.
        let (engine, count) = unsafe {
            let count = if count.is_null() { None } else { Some(Out::new(count, 0, "count")?) };
            (engine(e)?, count)
        };
        let Some(cb) = cb else {
            return invalid("cb is NULL; pass a function that takes the notifications");
        };
        let taken = engine.notifs(&mut |name, msg| {
            // SAFETY: F8, this function's own promise; `name` and `msg` live through the call.
            unsafe {
                cb(ctx, name.as_ptr().cast(), name.len(), msg.as_ptr().cast(), msg.len());
            }
        })?;
        count.map_or(Ok(Status::Ok), |count| count.set(taken))
    })
}
