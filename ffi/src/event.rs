//! Links and events: what an engine noticed by itself.

use core::ffi::{c_char, c_void};
use core::mem::size_of;
use std::sync::Arc;

use kvrail_core::host::tell::Event;
use kvrail_core::status::Status;

use crate::barrier::guard;
use crate::engine::{engine_here, kvr_engine};
use crate::pointer::{Context, Out};
use crate::types::{kvr_event, kvr_event_cb, kvr_status};

/// Bytes of an event's text, the NUL included; a longer one is cut.
const TEXT: usize = 512;

fn to_c(event: &Event, text: &[c_char; TEXT]) -> kvr_event {
    kvr_event {
        struct_size: size_of::<kvr_event>() as u32,
        kind: event.kind as u32,
        peer: event.peer,
        lane: event.lane,
        status: event.status.code(),
        since_ms: u64::try_from(event.since.as_millis()).unwrap_or(u64::MAX),
        text: text.as_ptr(),
    }
}

/// Stores in `*ms` for how many milliseconds every port of this engine's RDMA rails has been down;
/// 0: one is up. Of the rails' own ports, not of every NIC of the host; a port that lost its
/// address counts as down. Less than `link_debounce_ms` does not count: a short down is none, and a
/// short up does not end a down. With transport local there are no ports, so they are never down.
/// Any thread; does not block.
///
/// # Safety
/// `e` lives; `ms` is writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_links_down(e: *mut kvr_engine, ms: *mut u64) -> kvr_status {
    guard("kvr_links_down", || {
        // SAFETY: F1 and F3, this function's own promises.
        let (engine, ms) = unsafe { (engine_here(e)?, Out::new(ms, 0, "ms")?) };
        // 0 says that they are up.
        let down = engine.links_down().map_or(0, |d| d.as_millis().max(1));
        ms.set(u64::try_from(down).unwrap_or(u64::MAX))
    })
}

/// Sends the engine's events to `cb` from now on; NULL: nowhere. What happened before is not told:
/// ask kvr_links_down() and kvr_peer_state(). None is told once kvr_engine_destroy() returned.
///
/// Ownership: `ctx` is handed to `cb` as it is. The control thread may still be inside the old
/// callback when this returns, so keep the old `ctx` until the engine is destroyed.
///
/// # Safety
/// `e` lives; `cb` is NULL or a function that the engine's control thread may call with `ctx`, and
/// that keeps the rules of kvr_event_cb.
#[no_mangle]
pub unsafe extern "C" fn kvr_set_event_fn(
    e: *mut kvr_engine,
    cb: kvr_event_cb,
    ctx: *mut c_void,
) -> kvr_status {
    guard("kvr_set_event_fn", || {
        // SAFETY: F1, this function's own promise.
        let engine = unsafe { engine_here(e)? };
        let ctx = Context(ctx);
        engine.set_event_fn(cb.map(|cb| {
            let call = move |event: &Event| {
                let text = crate::config::cut(event.text.as_bytes());
                let event = to_c(event, &text);
                // SAFETY: F8, this function's own promise; the event lives through the call.
                unsafe { cb(ctx.get(), &raw const event) }
            };
            Arc::new(call) as Arc<dyn Fn(&Event) + Send + Sync>
        }))?;
        Ok(Status::Ok)
    })
}
