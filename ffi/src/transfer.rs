//! Transfers.

use core::ffi::c_void;

use kvrail_core::host::error::Result;
use kvrail_core::nic::verbs::parts;
use kvrail_core::status::Status;
use kvrail_core::table::Direction;

use crate::barrier::{guard, invalid};
use crate::engine::{engine, kvr_engine};
use crate::pointer::{bytes, list, read_size, slice, slice_mut, write_versioned, Out};
use crate::types::{
    kvr_desc, kvr_peer, kvr_status, kvr_table, kvr_transfer, kvr_transfer_info, KVR_READ, KVR_WRITE,
};

fn parse(direction: u32) -> Result<Direction> {
    match direction {
        KVR_READ => Ok(Direction::Read),
        KVR_WRITE => Ok(Direction::Write),
        _ => invalid(format!("direction is {direction}; pass KVR_READ (0) or KVR_WRITE (1)")),
    }
}

/// Prepares a transfer of pairs: the i-th of `local_idx` in table `local` with the i-th of
/// `remote_idx` in table `remote`. KVR_READ moves remote to local, KVR_WRITE local to remote. No
/// pairs: only the message is sent. The lists are copied. Contiguous pairs become one work request.
///
/// Ownership: the handle is the caller's, until kvr_transfer_release().
/// Errors: KVR_ERR_MISMATCH when the list lengths or the lengths of a pair differ; KVR_ERR_RANGE
/// for an index; KVR_ERR_NOT_REGISTERED for a descriptor outside its region (the texts name the
/// place in the list); KVR_ERR_INVALID and KVR_ERR_STALE for a handle or a descriptor's region;
/// KVR_ERR_CAPACITY at `max_transfers`; KVR_ERR_NO_MEMORY at `max_bytes`.
///
/// # Safety
/// `e` lives; `local_idx` and `remote_idx` are readable for `local_n` and `remote_n` items; `out`
/// is writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_transfer_prepare(
    e: *mut kvr_engine,
    direction: u32,
    p: kvr_peer,
    local: kvr_table,
    local_idx: *const u32,
    local_n: usize,
    remote: kvr_table,
    remote_idx: *const u32,
    remote_n: usize,
    out: *mut kvr_transfer,
) -> kvr_status {
    guard("kvr_transfer_prepare", || {
        // SAFETY: F1, F2 and F3, this function's own promises.
        let (engine, out, local_idx, remote_idx) = unsafe {
            (
                engine(e)?,
                Out::new(out, 0, "out")?,
                slice(local_idx, local_n, "local_idx")?,
                slice(remote_idx, remote_n, "remote_idx")?,
            )
        };
        let direction = parse(direction)?;
        out.set(engine.prepare(direction, p, local, local_idx, remote, remote_idx)?.raw())
    })
}

/// The same from two lists of descriptors, without tables. The lists are copied.
///
/// Errors: as kvr_transfer_prepare().
///
/// # Safety
/// `e` lives; `local` and `remote` are readable for `local_n` and `remote_n` items; `out` is
/// writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_transfer_prepare_descs(
    e: *mut kvr_engine,
    direction: u32,
    p: kvr_peer,
    local: *const kvr_desc,
    local_n: usize,
    remote: *const kvr_desc,
    remote_n: usize,
    out: *mut kvr_transfer,
) -> kvr_status {
    guard("kvr_transfer_prepare_descs", || {
        // SAFETY: F1, F2 and F3, this function's own promises.
        let (engine, out, local, remote) = unsafe {
            (
                engine(e)?,
                Out::new(out, 0, "out")?,
                list(local, local_n, "local")?,
                list(remote, remote_n, "remote")?,
            )
        };
        out.set(engine.prepare_descs(parse(direction)?, p, local, remote)?.raw())
    })
}

/// Starts a transfer. Never blocks, allocates nothing. KVR_OK: it is done already; KVR_IN_PROGRESS:
/// ask kvr_transfer_check(). A finished or failed one may be posted again.
///
/// `notif` (up to KVR_MESSAGE_MAX bytes, copied) reaches the peer after all the data is in place;
/// NULL: none; not NULL with length 0: an empty message. An error sends
/// none, but it may have arrived, once, when KVR_ERR_DISCONNECTED, KVR_ERR_STALLED or
/// KVR_ERR_CANCELLED came while it was on its way.
/// Errors: KVR_ERR_BUSY while it is in flight; KVR_ERR_STALE when it, or a region or the peer that
/// it uses, was released (the text says which); KVR_ERR_CAPACITY when message blocks are out; the
/// peer's and the rails' errors.
///
/// # Safety
/// `e` lives; `notif` is readable for `notif_len` bytes.
#[no_mangle]
pub unsafe extern "C" fn kvr_transfer_post(
    e: *mut kvr_engine,
    t: kvr_transfer,
    notif: *const c_void,
    notif_len: usize,
) -> kvr_status {
    guard("kvr_transfer_post", || {
        // SAFETY: F1 and F2, this function's own promises.
        let (engine, message) = unsafe { (engine(e)?, bytes(notif, notif_len, "notif")?) };
        engine.post(t, if notif.is_null() { None } else { Some(message) })
    })
}

/// How a transfer stands: KVR_OK done, KVR_IN_PROGRESS, or the error it ended in, again and again.
/// One atomic load; polls the rails too when there is no progress thread. Does not block.
///
/// Errors: KVR_ERR_NOT_POSTED before the first post; KVR_ERR_STALE once released; else why the
/// transfer ended, and then nothing of it touches local memory any more: KVR_ERR_REMOTE_ACCESS,
/// KVR_ERR_LOCAL_ACCESS, KVR_ERR_CANCELLED, KVR_ERR_STALLED, KVR_ERR_DISCONNECTED, KVR_ERR_NO_RAIL.
///
/// # Safety
/// `e` lives.
#[no_mangle]
pub unsafe extern "C" fn kvr_transfer_check(e: *mut kvr_engine, t: kvr_transfer) -> kvr_status {
    // SAFETY: F1, this function's own promise.
    guard("kvr_transfer_check", || unsafe { engine(e)? }.check(t))
}

/// Asks a transfer to stop. Does not block: it ends in KVR_ERR_CANCELLED once nothing is in flight
/// any more, or in KVR_OK when it was faster.
///
/// # Safety
/// `e` lives.
#[no_mangle]
pub unsafe extern "C" fn kvr_transfer_cancel(e: *mut kvr_engine, t: kvr_transfer) -> kvr_status {
    guard("kvr_transfer_cancel", || {
        // SAFETY: F1, this function's own promise.
        unsafe { engine(e)? }.cancel(t)?;
        Ok(Status::Ok)
    })
}

/// Gives a transfer back, cancelling it if it is in flight. KVR_OK: no NIC touches local memory of
/// it any more, and the handle is stale. What has not drained after 100 ms is stopped by closing
/// the rails that carry it; others on them go on elsewhere. A message that only has to go out still
/// goes out. Blocks for at most `release_timeout_ms`, and never for a peer.
///
/// Errors: KVR_ERR_BUSY when it could not be stopped in time (a NIC that does not let go, or a
/// copy of transport local that hangs): the handle stays valid, and so must the memory. Release
/// it again; but where the text says "before this process ends", a NIC kept a queue pair and
/// this is final.
///
/// # Safety
/// `e` lives.
#[no_mangle]
pub unsafe extern "C" fn kvr_transfer_release(e: *mut kvr_engine, t: kvr_transfer) -> kvr_status {
    guard("kvr_transfer_release", || {
        // SAFETY: F1, this function's own promise.
        unsafe { engine(e)? }.release(t)?;
        Ok(Status::Ok)
    })
}

/// Fills `*info` with a transfer's state and counters. Set `info->struct_size` before.
///
/// # Safety
/// `e` lives; `info` is readable and writable for its `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn kvr_transfer_info_get(
    e: *mut kvr_engine,
    t: kvr_transfer,
    info: *mut kvr_transfer_info,
) -> kvr_status {
    guard("kvr_transfer_info_get", || {
        // SAFETY: F1 and F4, this function's own promises.
        let (engine, size) = unsafe { (engine(e)?, read_size(info, "info")?) };
        let got = engine.transfer_info(t)?;
        let (provider_status, vendor_code) = parts(got.cause.map_or(0, |(_, code)| code));
        let value = kvr_transfer_info {
            struct_size: 0,
            status: got.status.code(),
            descriptors: got.descriptors,
            work_requests: got.work_requests,
            bytes: got.bytes,
            bytes_done: got.bytes_done,
            work_requests_done: got.work_requests_done,
            failed_pair: got.failed_pair,
            post_ns: got.post_ns,
            descriptors_done: got.descriptors_done,
            failed_rail: got.cause.map_or(u32::MAX, |(lane, _)| lane),
            provider_status,
            vendor_code,
            may_have_written: u32::from(got.touched),
        };
        // SAFETY: F4, this function's own promise.
        unsafe { write_versioned(&value, info, size, "info") }
    })
}

/// Says which descriptor pairs of a transfer at rest arrived whole in its last post: bit `i % 64`
/// of `bits[i / 64]` is pair `i`; bits behind the last pair are 0. Of a transfer that is done all
/// are set, of one that was never posted none. For what to ask for again after an error; costs a
/// pass over the transfer's work requests.
///
/// Errors: KVR_ERR_BUSY while it is in progress; KVR_ERR_INVALID when `words` are too few for all
/// pairs.
///
/// # Safety
/// `e` lives; `bits` is writable for `words` words.
#[no_mangle]
pub unsafe extern "C" fn kvr_transfer_arrived(
    e: *mut kvr_engine,
    t: kvr_transfer,
    bits: *mut u64,
    words: usize,
) -> kvr_status {
    guard("kvr_transfer_arrived", || {
        // SAFETY: F1, this function's own promise.
        let engine = unsafe { engine(e)? };
        // SAFETY: F3, this function's own promise.
        let bits = unsafe { slice_mut(bits, words, "bits")? };
        engine.transfer_arrived(t, bits)?;
        Ok(Status::Ok)
    })
}
