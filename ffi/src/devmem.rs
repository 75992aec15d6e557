//! Device memory: regions behind dma-bufs or peer-memory modules, and the providers that know them.

use core::ffi::{c_char, CStr};
use core::mem::size_of;

use kvrail_core::host::error::{shown, Error, Result};
use kvrail_core::host::memory::{Lease, Segment};
use kvrail_core::status::Status;

use crate::barrier::{guard, invalid};
use crate::engine::{engine, engine_here, kvr_engine};
use crate::pointer::{check, slice, slice_mut, string, Context, Out, STRUCT_MAX};
use crate::types::{kvr_devmem_ops, kvr_segment, kvr_status, KVR_OK, KVR_SEGMENT_COHERENT};

/// Bytes of the reason that a provider may give.
const WHY: usize = 512;

/// Registers `n` pieces of device memory with every rail, all or none: `addr`, `len`, `offset` and
/// `fd` of each are read, and its `region` is written. Each becomes a region of its own, which is
/// deregistered by kvr_region_deregister().
///
/// A READ into a segment is done when the NIC that carried it has read a few bytes back out of it,
/// over a queue pair that leads to itself: what it wrote has arrived then. KVR_SEGMENT_COHERENT in
/// `flags` says that this is not needed. The first segment without it makes one such queue pair for
/// each rail that is up.
///
/// Ownership: the fds stay the caller's, who closes them; that may be as soon as this returned, as
/// the kernel holds the buffer of a registered dma-buf. The library keeps and closes none. What
/// lies behind a segment without fd must stay until kvr_region_deregister() returned KVR_OK.
/// Errors: KVR_ERR_INVALID for an empty or wrapping range, unknown `flags`, an `addr` and
/// `offset` that differ modulo the page size, an fd that is not open or no dma-buf, and a range
/// past the dma-buf's end; KVR_ERR_UNSUPPORTED without RDMA rails, and where a NIC or the kernel
/// refuses dma-bufs (the text says what to do instead); KVR_ERR_CAPACITY at `max_regions`;
/// KVR_ERR_NO_RAIL when a NIC gave no queue pair for flushes;
/// KVR_ERR_OS when a NIC refused for another reason. After an error nothing stays registered and
/// every `region` is 0.
///
/// # Safety
/// `e` lives; `segments` is readable and writable for `n` items; peers may read and write what lies
/// behind them.
#[no_mangle]
pub unsafe extern "C" fn kvr_region_register_segments(
    e: *mut kvr_engine,
    segments: *mut kvr_segment,
    n: usize,
) -> kvr_status {
    guard("kvr_region_register_segments", || {
        // SAFETY: F1 and F3, this function's own promises.
        let segments = unsafe { slice_mut(segments, n, "segments")? };
        segments.iter_mut().for_each(|s| s.region = 0);
        // SAFETY: F1, as above.
        let engine = unsafe { engine(e)? };
        let made = engine.register_segments(&checked(segments)?, None)?;
        segments.iter_mut().zip(made).for_each(|(s, region)| s.region = region.raw());
        Ok(Status::Ok)
    })
}

/// Asks a provider for the segments of `len` bytes at `addr`, in the addresses of its runtime, and
/// registers them all or none. In: `*n` is the room of `segments`; out: how many there are. Each is
/// a region, as after kvr_region_register_segments().
///
/// Ownership: what `ops->get` gave goes back through `ops->put` exactly once: when the last of the
/// regions was deregistered, before this returns if it fails, or in kvr_engine_destroy(). `ops` is
/// copied; what its `context` points to must live until then.
/// Errors: as kvr_region_register_segments(); what `ops->get` returned, with its reason;
/// KVR_ERR_INVALID when the provider gave no segment, more than there is room for, or segments that
/// overlap (the text has the provider's name). After an error `*n` is 0, but for KVR_ERR_CAPACITY
/// of `ops->get`: then it is the room that is needed.
///
/// # Safety
/// `e` lives; `ops` is readable for its `struct_size` bytes and its functions keep their contract;
/// `n` is readable and writable, and `segments` writable for `*n` items.
#[no_mangle]
pub unsafe extern "C" fn kvr_region_register_device(
    e: *mut kvr_engine,
    ops: *const kvr_devmem_ops,
    addr: u64,
    len: u64,
    segments: *mut kvr_segment,
    n: *mut usize,
) -> kvr_status {
    guard("kvr_region_register_device", || {
        check(n, "n")?;
        // SAFETY: F3, this function's own promise, with NULL and alignment checked.
        let (room, n) = unsafe { (n.replace(0), Out::new(n, 0, "n")?) };
        // SAFETY: F1 and F3, this function's own promises.
        let (engine, segments) =
            unsafe { (engine_here(e)?, slice_mut(segments, room, "segments")?) };
        // SAFETY: F4, this function's own promise.
        let provider = unsafe { Provider::read(ops)? };
        if len == 0 || addr.checked_add(len - 1).is_none() {
            return invalid(format!(
                "{len} bytes at {addr:#x}: there must be 1 at least, and none past the largest \
                 address"
            ));
        }
        engine.device_memory()?;
        segments.fill(EMPTY);
        let asked = provider.get(addr, len, segments);
        let given = asked.as_ref().map_or_else(|_| Vec::new(), |lent| lent.segments.clone());
        // An error ends the lease, which gives the segments back.
        let made = asked.and_then(|lent| {
            let (name, whole) = (lent.provider.name.clone(), lent.judge(room));
            let lease = Lease::new(move || lent.put());
            let made = whole
                .and_then(|()| checked(&given))
                .and_then(|all| engine.register_segments(&all, Some(lease)));
            made.map_err(|e| (named(&name, e.status, &e.message), 0))
        });
        match made {
            Ok(made) => {
                for ((to, from), region) in segments.iter_mut().zip(&given).zip(made) {
                    *to = kvr_segment { region: region.raw(), ..*from };
                }
                n.set(given.len())
            }
            Err((why, need)) => {
                segments.fill(EMPTY);
                n.set(need)?;
                Err(why)
            }
        }
    })
}

const EMPTY: kvr_segment =
    kvr_segment { addr: 0, len: 0, offset: 0, fd: -1, area: 0, slice_id: 0, flags: 0, region: 0 };

/// What the engine is told of segments, none of which may ask for something unknown.
fn checked(segments: &[kvr_segment]) -> Result<Vec<Segment>> {
    let unknown = |s: &kvr_segment| s.flags & !KVR_SEGMENT_COHERENT != 0;
    if let Some((at, s)) = segments.iter().enumerate().find(|(_, s)| unknown(s)) {
        return invalid(format!(
            "segment {at}: flags is {:#x}; pass 0 or KVR_SEGMENT_COHERENT (0x1), which are all \
             that this version knows",
            s.flags
        ));
    }
    let told = |s: &kvr_segment| {
        let &kvr_segment { addr, len, offset, fd, flags, .. } = s;
        Segment { addr, len, offset, fd, coherent: flags & KVR_SEGMENT_COHERENT != 0 }
    };
    Ok(segments.iter().map(told).collect())
}

fn named(provider: &str, status: Status, why: &str) -> Error {
    Error::new(status, format!("provider {provider:?}: {why}"))
}

/// A copy of the caller's provider.
struct Provider {
    name: String,
    context: Context,
    get: Get,
    put: Put,
}

type Get = unsafe extern "C" fn(
    *mut core::ffi::c_void,
    u64,
    u64,
    *mut kvr_segment,
    *mut usize,
    *mut c_char,
    usize,
) -> kvr_status;
type Put = unsafe extern "C" fn(*mut core::ffi::c_void, *const kvr_segment, usize);

/// What one `get` gave, as it was given.
struct Lent {
    provider: Provider,
    segments: Vec<kvr_segment>,
    /// How many it said to have given.
    said: usize,
}

impl Provider {
    /// # Safety
    /// F4, F5: `ops` is NULL or readable for its `struct_size` bytes, its name ends in NUL, and its
    /// functions have the types that stand there.
    unsafe fn read(ops: *const kvr_devmem_ops) -> Result<Provider> {
        const OWN: usize = size_of::<kvr_devmem_ops>();
        check(ops, "ops")?;
        // SAFETY: F4: the struct starts with its size.
        let size = unsafe { ops.cast::<usize>().read() };
        if !(OWN..=STRUCT_MAX).contains(&size) {
            return invalid(format!(
                "ops: struct_size is {size}; set it to sizeof(kvr_devmem_ops) ({OWN} to \
                 {STRUCT_MAX}, {OWN} in this version)"
            ));
        }
        // SAFETY: F2 from F4: `size` bytes are readable.
        let tail = unsafe { slice(ops.add(1).cast::<u8>(), size - OWN, "ops")? };
        if let Some(at) = tail.iter().position(|b| *b != 0) {
            return invalid(format!(
                "ops: byte {} is set, but this version of the library knows {OWN} bytes; leave \
                 newer fields 0 or update the library",
                OWN + at
            ));
        }
        // SAFETY: F4: any bytes are a value of all fields but the functions, whose types the caller
        // vouches for.
        let ops = unsafe { ops.read() };
        // SAFETY: F5, the caller's promise handed on.
        let name = unsafe { string(ops.name, "ops.name")? }.to_owned();
        match (ops.get, ops.put) {
            (Some(get), Some(put)) => {
                Ok(Provider { name, context: Context(ops.context), get, put })
            }
            (None, _) => invalid(format!("provider {name:?}: get is NULL; both are needed")),
            (_, None) => invalid(format!("provider {name:?}: put is NULL; both are needed")),
        }
    }

    /// Asks for segments, which are written to `room` first. An error comes with what `*n` is then.
    fn get(
        self,
        addr: u64,
        len: u64,
        room: &mut [kvr_segment],
    ) -> core::result::Result<Lent, (Error, usize)> {
        let (mut said, mut why) = (room.len(), [0u8; WHY]);
        // SAFETY: F10: the places are as long as is said, and nobody else has them.
        let status = unsafe {
            (self.get)(
                self.context.get(),
                addr,
                len,
                room.as_mut_ptr(),
                &raw mut said,
                why.as_mut_ptr().cast::<c_char>(),
                why.len(),
            )
        };
        if status == KVR_OK {
            // One that says more than there is room for gets back what there was room for.
            let segments = room.get(..said).unwrap_or(room).to_vec();
            return Ok(Lent { provider: self, segments, said });
        }
        why[WHY - 1] = 0;
        let why = CStr::from_bytes_until_nul(&why).map_or(&[][..], CStr::to_bytes);
        let mut text = format!("{len} bytes at {addr:#x}: {}", shown(why, WHY));
        if why.is_empty() {
            text += "get failed without a reason";
        }
        let known = Status::ALL.iter().find(|s| s.code() == status && s.is_err()).copied();
        let status = known.unwrap_or_else(|| {
            text += &format!("; get returned {status}, which is no error of kvrail.h");
            Status::Invalid
        });
        if status != Status::Capacity {
            return Err((named(&self.name, status, &text), 0));
        }
        text += &format!("; there is room for {} segments and it asks for {said}", room.len());
        Err((named(&self.name, status, &text), said))
    }
}

impl Lent {
    /// Refuses what no provider may give; the engine looks at the segments one by one.
    fn judge(&self, room: usize) -> Result<()> {
        if self.said == 0 {
            return invalid("get gave no segment; it must give one at least, or an error");
        }
        if self.said > room {
            return invalid(format!(
                "get says that it gave {} segments, where there is room for {room}",
                self.said
            ));
        }
        let mut order: Vec<usize> = (0..self.segments.len()).collect();
        order.sort_unstable_by_key(|&i| self.segments[i].addr);
        for pair in order.windows(2) {
            let (low, high) = (&self.segments[pair[0]], &self.segments[pair[1]]);
            if high.addr - low.addr < low.len {
                return invalid(format!(
                    "get gave segments {} ({} bytes at {:#x}) and {} ({} bytes at {:#x}), which \
                     overlap; each byte may be in one only",
                    pair[0], low.len, low.addr, pair[1], high.len, high.addr
                ));
            }
        }
        Ok(())
    }

    fn put(&self) {
        let (put, context) = (self.provider.put, self.provider.context.get());
        // SAFETY: F10: what its own `get` gave, once.
        unsafe { put(context, self.segments.as_ptr(), self.segments.len()) };
    }
}
