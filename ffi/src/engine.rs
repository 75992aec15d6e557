//! The engine's life: made in memory of its own or in the caller's block, used, destroyed once.

use core::ffi::c_void;
use core::mem::size_of;
use core::ptr::{null_mut, NonNull};

use kvrail_core::host::engine::Engine;
use kvrail_core::host::error::{Error, Result};
use kvrail_core::status::Status;
use kvrail_core::sync::{AtomicUsize, Ordering};

use crate::barrier::{guard, guard_len, invalid};
use crate::config::{self, cut};
use crate::pointer::{fill, read_size, write_versioned, Out};
use crate::types::{kvr_config, kvr_engine_info, kvr_rail_info, kvr_status};

/// An engine. Opaque: made by kvr_engine_create() or kvr_engine_init(), ended by
/// kvr_engine_destroy().
#[allow(missing_debug_implementations, reason = "opaque to its users")]
pub struct kvr_engine {
    /// [`MAGIC`] while it lives: finds pointers to something else. Not a promise, as a freed one
    /// may be anything.
    magic: u64,
    /// The process that made it.
    pid: u32,
    /// True when it lies in the caller's block.
    borrowed: bool,
    engine: Engine,
}

const MAGIC: u64 = u64::from_le_bytes(*b"kvrail-e");

/// Alignment of the engine in a caller's block, so that the block itself needs none.
const BLOCK_ALIGN: usize = 64;
const HEAD: usize = size_of::<kvr_engine>().next_multiple_of(BLOCK_ALIGN);
const _: () = assert!(core::mem::align_of::<kvr_engine>() <= BLOCK_ALIGN);

/// Most engines of one process at a time.
const ENGINES_MAX: usize = 1024;

/// Addresses of the engines that live, 0 for a free place: an engine is destroyed once, whoever
/// asks how often. Without a lock, so that a forked child cannot find it locked.
static LIVE: [AtomicUsize; ENGINES_MAX] = [const { AtomicUsize::new(0) }; ENGINES_MAX];

fn replace(old: usize, new: usize) -> bool {
    LIVE.iter()
        .any(|place| place.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok())
}

fn enter(e: *mut kvr_engine) -> Result<()> {
    if replace(0, e as usize) {
        return Ok(());
    }
    let text = format!("{ENGINES_MAX} engines live in this process already; destroy one first");
    Err(Error::new(Status::Capacity, text))
}

/// # Safety
/// F1: `e` is NULL or an engine that lives as long as the result.
unsafe fn whole<'a>(e: *mut kvr_engine) -> Result<&'a kvr_engine> {
    if e.is_null() {
        return invalid("the engine is NULL; pass one from kvr_engine_create()");
    }
    // SAFETY: F1, with NULL and alignment checked; a live engine is only ever shared, until it is
    // destroyed (F9).
    if !e.is_aligned() || unsafe { (*e).magic } != MAGIC {
        return invalid(format!("{e:p} is not an engine, or one that was destroyed"));
    }
    // SAFETY: F1, as above.
    Ok(unsafe { &*e })
}

/// The engine behind a pointer.
///
/// # Safety
/// F1: `e` is NULL or an engine that lives as long as the result.
pub(crate) unsafe fn engine<'a>(e: *mut kvr_engine) -> Result<&'a Engine> {
    // SAFETY: F1, the caller's promise handed on.
    Ok(&unsafe { whole(e)? }.engine)
}

/// The same for calls in which the engine itself cannot say that this is a forked child.
///
/// # Safety
/// F1: `e` is NULL or an engine that lives as long as the result.
pub(crate) unsafe fn engine_here<'a>(e: *mut kvr_engine) -> Result<&'a Engine> {
    // SAFETY: F1, the caller's promise handed on.
    let whole = unsafe { whole(e)? };
    not_forked(whole)?;
    Ok(&whole.engine)
}

fn not_forked(e: &kvr_engine) -> Result<()> {
    let here = std::process::id();
    if e.pid == here {
        return Ok(());
    }
    let text = format!(
        "process {} made the engine and this is process {here}, a forked child; make an engine \
         here",
        e.pid
    );
    Err(Error::new(Status::Forked, text))
}

/// Bytes that kvr_engine_init() needs for `cfg` (NULL: the defaults). 0 on a bad configuration,
/// with the last error.
///
/// # Safety
/// `cfg` is NULL or was filled by kvr_config_init().
#[no_mangle]
pub unsafe extern "C" fn kvr_engine_size(cfg: *const kvr_config) -> usize {
    // SAFETY: F4, this function's own promise.
    guard_len("kvr_engine_size", || Ok(block(Engine::size(&unsafe { config::read(cfg)? })?)))
}

/// Bytes of a block for an engine of `fixed` bytes: room to align, the head, the fixed memory.
fn block(fixed: usize) -> usize {
    fixed.saturating_add(BLOCK_ALIGN + HEAD)
}

/// Makes an engine in memory of its own, with its threads, and stores it in `*out` (NULL after an
/// error). `cfg` NULL: the defaults. `cfg` is copied. Tables and prepared transfers come from the
/// heap, up to `max_bytes`.
///
/// Ownership: the caller's, until kvr_engine_destroy().
/// Errors: KVR_ERR_CONFIG, KVR_ERR_INVALID, KVR_ERR_UNSUPPORTED (a transport that this build
/// lacks), KVR_ERR_CAPACITY (1024 engines of this process), KVR_ERR_OS, KVR_ERR_PERMISSION.
///
/// # Safety
/// `cfg` is NULL or was filled by kvr_config_init(); `out` is writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_engine_create(
    cfg: *const kvr_config,
    out: *mut *mut kvr_engine,
) -> kvr_status {
    guard("kvr_engine_create", || {
        // SAFETY: F3 and F4, this function's own promises.
        let (out, cfg) = unsafe { (Out::new(out, null_mut(), "out")?, config::read(cfg)?) };
        let engine = Engine::new(cfg)?;
        let mut boxed =
            Box::new(kvr_engine { magic: MAGIC, pid: std::process::id(), borrowed: false, engine });
        enter(&raw mut *boxed)?;
        out.set(Box::into_raw(boxed))
    })
}

/// Makes an engine in the caller's block: `mem`, `len` bytes, of any alignment, at least
/// kvr_engine_size(cfg). Tables and prepared transfers come from the block too: they have 1 MiB and
/// what the block is longer than that, at most `max_bytes`, and it never grows. Threads, sockets,
/// names, table handles, handshakes and error texts come from the heap.
///
/// Ownership: the block is the engine's until kvr_engine_destroy() returned KVR_OK, and must not be
/// read, written, moved or freed until then.
/// Errors: KVR_ERR_CAPACITY when `len` is too small (the text has both sizes); else as
/// kvr_engine_create().
///
/// # Safety
/// `mem` is writable for `len` bytes; `cfg` is NULL or was filled by kvr_config_init(); `out` is
/// writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_engine_init(
    mem: *mut c_void,
    len: usize,
    cfg: *const kvr_config,
    out: *mut *mut kvr_engine,
) -> kvr_status {
    guard("kvr_engine_init", || {
        // SAFETY: F3 and F4, this function's own promises.
        let (out, cfg) = unsafe { (Out::new(out, null_mut(), "out")?, config::read(cfg)?) };
        let Some(mem) = NonNull::new(mem.cast::<u8>()) else {
            return invalid("mem is NULL; pass a block of kvr_engine_size() bytes");
        };
        let fixed = Engine::size(&cfg)?;
        if len < block(fixed) {
            let need = block(fixed);
            let text = format!("the block has {len} bytes; kvr_engine_size() asks for {need}");
            return Err(Error::new(Status::Capacity, text));
        }
        let skip = mem.as_ptr().align_offset(BLOCK_ALIGN);
        // SAFETY: F7: `len` is at least BLOCK_ALIGN + HEAD + fixed, and `skip` less than
        // BLOCK_ALIGN.
        let (head, rest) = unsafe {
            let head = mem.as_ptr().add(skip);
            (head.cast::<kvr_engine>(), head.add(HEAD))
        };
        // SAFETY: F7: the block is ours until the engine is destroyed, and the rest of it holds
        // `fixed` bytes.
        let engine = unsafe { Engine::new_in(rest, len - skip - HEAD, cfg)? };
        enter(head)?;
        let pid = std::process::id();
        // SAFETY: F7: aligned to BLOCK_ALIGN, HEAD bytes long, and nobody has it yet.
        unsafe { head.write(kvr_engine { magic: MAGIC, pid, borrowed: true, engine }) };
        out.set(head)
    })
}

/// Ends an engine: stops its threads, ends its transfers and lets go of its memory. Blocks
/// until the kernel has destroyed its queue pairs, which no timeout bounds (Soft-RoCE took up to
/// 3 s). Handles of the engine are void afterwards.
///
/// Threads: no other call with this engine may be running or start. Not from a callback of this
/// engine.
/// Errors: KVR_ERR_INVALID for NULL and for an engine that was destroyed already; KVR_ERR_FORKED in
/// a forked child, where the engine belongs to the parent and nothing happens.
///
/// # Safety
/// `e` comes from kvr_engine_create() or kvr_engine_init(), and no other call uses it.
#[no_mangle]
pub unsafe extern "C" fn kvr_engine_destroy(e: *mut kvr_engine) -> kvr_status {
    guard("kvr_engine_destroy", || {
        // Taking it out of the table makes this call the only one that goes on.
        if e.is_null() || !replace(e as usize, 0) {
            return invalid(format!("{e:p} is not an engine, or one that was destroyed already"));
        }
        // SAFETY: F1: it was in the table of those that live, and only this call may end it.
        if let Err(forked) = not_forked(unsafe { &*e }) {
            enter(e)?;
            return Err(forked);
        }
        // SAFETY: F9: the table gave it to this call alone, and the caller says that no other call
        // uses it.
        unsafe {
            (*e).magic = 0;
            if (*e).borrowed {
                e.drop_in_place();
            } else {
                drop(Box::from_raw(e));
            }
        }
        Ok(Status::Ok)
    })
}

/// Copies the blob that a peer passes to kvr_peer_add(). In: `*len` is the capacity of `buf` in
/// bytes; out: the blob's full length. The blob holds the secret that lets a peer in: hand it to
/// peers only.
///
/// Errors: KVR_ERR_CAPACITY when `buf` is too small (NULL and 0 ask for the length), with nothing
/// copied.
///
/// # Safety
/// `e` lives; `len` is readable and writable; `buf` is writable for `*len` bytes.
#[no_mangle]
pub unsafe extern "C" fn kvr_engine_metadata(
    e: *mut kvr_engine,
    buf: *mut c_void,
    len: *mut usize,
) -> kvr_status {
    guard("kvr_engine_metadata", || {
        // SAFETY: F1 and F3, this function's own promises.
        unsafe { fill(engine_here(e)?.metadata(), buf, len) }
    })
}

/// Polls every rail and the messages once, on this thread. Does not block. KVR_IN_PROGRESS: work
/// was done, more may follow; KVR_OK: nothing to do. Not needed when the engine has a progress
/// thread.
///
/// # Safety
/// `e` lives.
#[no_mangle]
pub unsafe extern "C" fn kvr_progress(e: *mut kvr_engine) -> kvr_status {
    guard("kvr_progress", || {
        // SAFETY: F1, this function's own promise.
        let worked = unsafe { engine(e)? }.progress()?;
        Ok(if worked { Status::InProgress } else { Status::Ok })
    })
}

/// Fills `*info` with the counters of rail number `rail`, from 0. Set `info->struct_size` before.
///
/// Errors: KVR_ERR_RANGE past the last rail.
///
/// # Safety
/// `e` lives; `info` is readable and writable for its `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn kvr_rail_info_get(
    e: *mut kvr_engine,
    rail: u32,
    info: *mut kvr_rail_info,
) -> kvr_status {
    guard("kvr_rail_info_get", || {
        // SAFETY: F1 and F4, this function's own promises.
        let (engine, size) = unsafe { (engine(e)?, read_size(info, "info")?) };
        let got = engine.rail_info(rail)?;
        let value = kvr_rail_info {
            struct_size: 0,
            index: got.index,
            name: cut(got.name.as_ref()),
            bytes_read: got.bytes_read,
            bytes_written: got.bytes_written,
            work_requests: got.work_requests,
            claims: got.claims,
            errors: got.errors,
        };
        // SAFETY: F4, this function's own promise.
        unsafe { write_versioned(&value, info, size, "info") }
    })
}

/// Fills `*info` with what the engine holds now. Set `info->struct_size` before.
///
/// # Safety
/// `e` lives; `info` is readable and writable for its `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn kvr_engine_info_get(
    e: *mut kvr_engine,
    info: *mut kvr_engine_info,
) -> kvr_status {
    guard("kvr_engine_info_get", || {
        // SAFETY: F1 and F4, this function's own promises.
        let (engine, size) = unsafe { (engine_here(e)?, read_size(info, "info")?) };
        let got = engine.info();
        let value = kvr_engine_info {
            struct_size: 0,
            rails: got.rails,
            fixed_bytes: got.fixed_bytes,
            pool_bytes: got.pool_bytes,
            pool_limit: got.pool_limit,
            peers: got.peers,
            regions: got.regions,
            remote_regions: got.remote_regions,
            tables: got.tables,
            transfers: got.transfers,
            transport: cut(got.transport.as_ref()),
            listen: cut(got.listen.as_ref()),
            reserved: 0,
        };
        // SAFETY: F4, this function's own promise.
        unsafe { write_versioned(&value, info, size, "info") }
    })
}
