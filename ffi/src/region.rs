//! Regions: memory registered here, and peers' memory imported.

use core::ffi::c_void;

use kvrail_core::status::Status;

use crate::barrier::{guard, invalid};
use crate::engine::{engine, kvr_engine};
use crate::pointer::{bytes, fill, slice_mut, Out};
use crate::types::{kvr_desc, kvr_peer, kvr_region, kvr_status, KVR_DEREGISTER_CANCEL};

/// Registers `len` bytes at `addr` with every rail. `mem` is KVR_MEM_HOST or KVR_MEM_DEVICE. For a
/// dma-buf, and for a device's memory that needs no flush: kvr_region_register_segments().
///
/// Ownership: the memory stays the caller's and must stay mapped until kvr_region_deregister()
/// returned KVR_OK.
/// Errors: KVR_ERR_INVALID for an empty or wrapping range; KVR_ERR_UNSUPPORTED for the kind of
/// memory (a device's without RDMA rails); KVR_ERR_CAPACITY at `max_regions`; KVR_ERR_OS when a NIC
/// refused it (the text says which and why), KVR_ERR_NO_RAIL when every NIC has failed. After an
/// error nothing stays registered.
///
/// # Safety
/// `e` lives; `out` is writable; the range is the caller's memory, and peers may read and write it.
#[no_mangle]
pub unsafe extern "C" fn kvr_region_register(
    e: *mut kvr_engine,
    addr: u64,
    len: u64,
    mem: u32,
    out: *mut kvr_region,
) -> kvr_status {
    guard("kvr_region_register", || {
        // SAFETY: F1 and F3, this function's own promises.
        let (engine, out) = unsafe { (engine(e)?, Out::new(out, 0, "out")?) };
        out.set(engine.register(addr, len, mem)?.raw())
    })
}

/// Registers `n` ranges with every rail, all or none: `addr` and `len` of each are read, and its
/// `region` is written. Ranges of host memory that touch or overlap become one region, with one key
/// a rail: they get the same handle, which is deregistered once. No byte that is in none of them is
/// registered.
/// One call is quicker than many: the rails register at the same time.
///
/// Ownership and errors: as kvr_region_register(). After an error every `region` is 0.
///
/// # Safety
/// `e` lives; `descs` is writable for `n` items; each range is the caller's memory, and peers may
/// read and write it.
#[no_mangle]
pub unsafe extern "C" fn kvr_region_register_list(
    e: *mut kvr_engine,
    descs: *mut kvr_desc,
    n: usize,
    mem: u32,
) -> kvr_status {
    guard("kvr_region_register_list", || {
        // SAFETY: F1 and F3, this function's own promises.
        let descs = unsafe { slice_mut(descs, n, "descs")? };
        descs.iter_mut().for_each(|d| d.region = 0);
        // SAFETY: F1, as above.
        let engine = unsafe { engine(e)? };
        let ranges: Vec<(u64, u64)> = descs.iter().map(|d| (d.addr, d.len)).collect();
        for (desc, region) in descs.iter_mut().zip(engine.register_list(&ranges, mem)?) {
            desc.region = region.raw();
        }
        Ok(Status::Ok)
    })
}

/// Withdraws a local region and waits until nobody is inside. KVR_OK: no rail and no peer touches
/// the memory any more. Blocks for at most `deregister_timeout_ms`.
///
/// `flags`: 0, or KVR_DEREGISTER_CANCEL to cancel the transfers of this engine that use it.
/// Errors: KVR_ERR_BUSY, and the memory must not be reused. Without KVR_DEREGISTER_CANCEL: a
/// transfer of this engine uses it (the text names it), and the region stays as it was. Or somebody
/// was still inside when the time was over (the text says who): the region is withdrawn, and its
/// handle is KVR_ERR_STALE to every call but this one, which waits again. Where the text says
/// "before this process ends", a NIC did not end the registration, and this is final.
///
/// # Safety
/// `e` lives.
#[no_mangle]
pub unsafe extern "C" fn kvr_region_deregister(
    e: *mut kvr_engine,
    r: kvr_region,
    flags: u32,
) -> kvr_status {
    guard("kvr_region_deregister", || {
        // SAFETY: F1, this function's own promise.
        let engine = unsafe { engine(e)? };
        if flags & !KVR_DEREGISTER_CANCEL != 0 {
            return invalid(format!("flags is {flags:#x}; pass 0 or KVR_DEREGISTER_CANCEL (0x1)"));
        }
        engine.deregister(r, flags & KVR_DEREGISTER_CANCEL != 0)?;
        Ok(Status::Ok)
    })
}

/// Copies the blob that a peer passes to kvr_region_import(). In: `*len` is the capacity of `buf`
/// in bytes; out: the blob's full length.
///
/// Errors: KVR_ERR_CAPACITY when `buf` is too small (NULL and 0 ask for the length), with nothing
/// copied.
///
/// # Safety
/// `e` lives; `len` is readable and writable; `buf` is writable for `*len` bytes.
#[no_mangle]
pub unsafe extern "C" fn kvr_region_metadata(
    e: *mut kvr_engine,
    r: kvr_region,
    buf: *mut c_void,
    len: *mut usize,
) -> kvr_status {
    guard("kvr_region_metadata", || {
        // SAFETY: F1 and F3, this function's own promises.
        unsafe { fill(&engine(e)?.region_metadata(r)?, buf, len) }
    })
}

/// Makes a remote region from a blob of kvr_region_metadata() of peer `p`. The blob is copied.
///
/// Errors: KVR_ERR_BLOB_TRUNCATED, KVR_ERR_BLOB_FOREIGN, KVR_ERR_BLOB_VERSION; KVR_ERR_STALE for
/// another peer's blob; KVR_ERR_UNSUPPORTED for device memory where this engine has no RDMA rails;
/// KVR_ERR_CAPACITY at `max_remote_regions`.
///
/// # Safety
/// `e` lives; `blob` is readable for `len` bytes; `out` is writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_region_import(
    e: *mut kvr_engine,
    p: kvr_peer,
    blob: *const c_void,
    len: usize,
    out: *mut kvr_region,
) -> kvr_status {
    guard("kvr_region_import", || {
        // SAFETY: F1, F2 and F3, this function's own promises.
        let (engine, out, blob) =
            unsafe { (engine(e)?, Out::new(out, 0, "out")?, bytes(blob, len, "blob")?) };
        out.set(engine.region_import(p, blob)?.raw())
    })
}

/// A remote view of an own region, for transfers with kvr_peer_self(). They move host memory only:
/// with device memory on either side they are KVR_ERR_UNSUPPORTED.
///
/// # Safety
/// `e` lives; `out` is writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_region_import_self(
    e: *mut kvr_engine,
    local: kvr_region,
    out: *mut kvr_region,
) -> kvr_status {
    guard("kvr_region_import_self", || {
        // SAFETY: F1 and F3, this function's own promises.
        let (engine, out) = unsafe { (engine(e)?, Out::new(out, 0, "out")?) };
        out.set(engine.region_import_self(local)?.raw())
    })
}

/// Forgets a remote region: transfers that use it are cancelled. Waits for what is in flight, one
/// batch of each rail as a rule, for at most `release_timeout_ms`.
///
/// Errors: KVR_ERR_BUSY when something was in flight for longer; the handle is KVR_ERR_STALE to
/// every call but this one, which waits again.
///
/// # Safety
/// `e` lives.
#[no_mangle]
pub unsafe extern "C" fn kvr_region_forget(e: *mut kvr_engine, remote: kvr_region) -> kvr_status {
    guard("kvr_region_forget", || {
        // SAFETY: F1, this function's own promise.
        unsafe { engine(e)? }.region_forget(remote)?;
        Ok(Status::Ok)
    })
}
