//! Descriptor tables.

use kvrail_core::status::Status;

use crate::barrier::guard;
use crate::engine::{engine, kvr_engine};
use crate::pointer::{list, Out};
use crate::types::{kvr_desc, kvr_status, kvr_stride, kvr_table};

/// Makes a table of `n` descriptors, addressed by their place in the list, all of one side: local
/// regions, or remote regions of one peer. The list is copied.
///
/// Regions and ranges are looked at when a transfer is prepared, not here.
/// Errors: KVR_ERR_CAPACITY at `max_tables`; KVR_ERR_NO_MEMORY at `max_bytes`.
///
/// # Safety
/// `e` lives; `descs` is readable for `n` items; `out` is writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_table_create(
    e: *mut kvr_engine,
    descs: *const kvr_desc,
    n: usize,
    out: *mut kvr_table,
) -> kvr_status {
    guard("kvr_table_create", || {
        // SAFETY: F1, F2 and F3, this function's own promises.
        let (engine, out, descs) =
            unsafe { (engine(e)?, Out::new(out, 0, "out")?, list(descs, n, "descs")?) };
        out.set(engine.table_create(descs)?.raw())
    })
}

/// The same from `n` strided runs, which are kept as they are and never expanded. Indexes count
/// through the runs.
///
/// Errors: as kvr_table_create().
///
/// # Safety
/// `e` lives; `parts` is readable for `n` items; `out` is writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_table_create_strided(
    e: *mut kvr_engine,
    parts: *const kvr_stride,
    n: usize,
    out: *mut kvr_table,
) -> kvr_status {
    guard("kvr_table_create_strided", || {
        // SAFETY: F1, F2 and F3, this function's own promises.
        let (engine, out, parts) =
            unsafe { (engine(e)?, Out::new(out, 0, "out")?, list(parts, n, "parts")?) };
        out.set(engine.table_create_strided(parts)?.raw())
    })
}

/// Destroys a table. Prepared transfers keep what they need of it.
///
/// # Safety
/// `e` lives.
#[no_mangle]
pub unsafe extern "C" fn kvr_table_destroy(e: *mut kvr_engine, t: kvr_table) -> kvr_status {
    guard("kvr_table_destroy", || {
        // SAFETY: F1, this function's own promise.
        unsafe { engine(e)? }.table_destroy(t)?;
        Ok(Status::Ok)
    })
}
