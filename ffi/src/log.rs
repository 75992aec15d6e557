//! Where log lines go.

use core::ffi::{c_int, c_void};

use kvrail_core::host::log::{set_callback, Level};
use kvrail_core::status::Status;

use crate::barrier::guard;
use crate::pointer::Context;
use crate::types::{kvr_log_cb, kvr_status};

/// Sends the library's log lines to `cb`, for the whole process. NULL: back to standard error. The
/// level comes from KVRAIL_LOG (error, warn, info, debug, trace; default warn).
///
/// Ownership: `ctx` is handed to `cb` as it is. A thread that is inside the old callback may still
/// be there when this returns, so keep the old `ctx` until the engines are destroyed.
///
/// # Safety
/// `cb` is NULL or a function that any thread may call with `ctx`, several at a time.
#[no_mangle]
pub unsafe extern "C" fn kvr_log_set(cb: kvr_log_cb, ctx: *mut c_void) -> kvr_status {
    guard("kvr_log_set", || {
        let ctx = Context(ctx);
        set_callback(cb.map(|cb| {
            let call = move |level: Level, text: &str| {
                // SAFETY: F8, this function's own promise; `text` lives through the call.
                unsafe { cb(ctx.get(), level as c_int, text.as_ptr().cast(), text.len()) }
            };
            Box::new(call) as Box<dyn Fn(Level, &str) + Send + Sync>
        }));
        Ok(Status::Ok)
    })
}
