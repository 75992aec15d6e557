//! CUDA memory as a provider: a device address becomes a dma-buf that NICs can register.
//!
//! The rules are those of the CUDA Driver API reference manual: `cuMemGetHandleForAddressRange`
//! takes whole pages of the host inside one allocation (or inside the mapped part of one address
//! reservation), needs a current context, and gives an fd that is the caller's to close. What an
//! address belongs to is asked by `cuPointerGetAttribute`, which needs no context.

mod driver;

use core::ffi::{c_char, c_int, c_void};
use core::mem::size_of;
use core::ptr::null;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use kvrail_core::host::error::{Error, Result};
use kvrail_core::host::memory::page_bytes;
use kvrail_core::status::Status;

use crate::barrier::{guard, invalid};
use crate::pointer::{fill_text, slice, Out};
use crate::types::{kvr_devmem_ops, kvr_segment, kvr_status};
use driver::{Code, Driver, PointerAttribute};

/// At the end of every message that a device or its kernel module cannot export memory.
const WAY_OUT: &str = "it takes a GPU since Turing, the open kernel modules of NVIDIA's driver \
                       (515 or newer) and Linux 5.12; without them load nvidia-peermem and \
                       register the address as KVR_MEM_DEVICE (NIXL plugin: devmem=none), or keep \
                       the KV cache in host memory";

/// Memory types of `CUmemorytype`.
const HOST: u64 = 1;
const DEVICE: u64 = 2;

/// The provider for memory of NVIDIA GPUs: kvr_region_register_device() with it registers what
/// cudaMalloc(), cuMemAlloc() or cuMemMap() gave. One segment: a dma-buf of the pages around the
/// range. The driver (libcuda.so.1) is loaded by the first call; nothing links it.
///
/// What is registered must not be freed or unmapped before kvr_region_deregister() returned KVR_OK.
/// Kernels and copies that write it must have ended before a transfer reads it, as with any NIC.
/// Once it is exported, copies within what cudaMalloc() gave become synchronous
/// (CU_POINTER_ATTRIBUTE_SYNC_MEMOPS), as the manual of GPUDirect RDMA asks, and stay so: nobody
/// can tell who else asked for that. The driver knows no such switch for cuMemMap().
///
/// Ownership: `*out` is static. NULL after an error.
/// Threads: any; no CUDA context need be current.
/// Errors: KVR_ERR_UNSUPPORTED without a driver, with one that is older than CUDA 11.7, or without
/// a GPU. Its `get` says KVR_ERR_NOT_FOUND for an address that CUDA does not know, KVR_ERR_INVALID
/// for host and managed memory and for a range that is not inside one allocation,
/// KVR_ERR_UNSUPPORTED where the memory, the device or the kernel module cannot be read by NICs,
/// KVR_ERR_OS for any other refusal of the driver.
///
/// # Safety
/// `out` is writable.
#[no_mangle]
pub unsafe extern "C" fn kvr_devmem_cuda(out: *mut *const kvr_devmem_ops) -> kvr_status {
    guard("kvr_devmem_cuda", || {
        // SAFETY: F3, this function's own promise.
        let out = unsafe { Out::new(out, null(), "out")? };
        Driver::get()?;
        out.set(&raw const PROVIDER.0)
    })
}

struct Provider(kvr_devmem_ops);

// SAFETY: F14: its pointers are a static text, NULL and functions that any thread may call.
unsafe impl Sync for Provider {}

static PROVIDER: Provider = Provider(kvr_devmem_ops {
    struct_size: size_of::<kvr_devmem_ops>(),
    name: c"cuda".as_ptr(),
    context: core::ptr::null_mut(),
    get: Some(get),
    put: Some(put),
});

/// # Safety
/// As `kvr_devmem_ops.get`: F3 for `segments`, `n` and `why`.
unsafe extern "C" fn get(
    _context: *mut c_void,
    addr: u64,
    len: u64,
    segments: *mut kvr_segment,
    n: *mut usize,
    why: *mut c_char,
    why_len: usize,
) -> kvr_status {
    let body = || {
        if n.is_null() {
            return invalid("n is NULL; pass the room of segments");
        }
        // SAFETY: F3, with NULL checked above.
        let room = unsafe { n.replace(1) };
        if room < 1 {
            let text = "there is room for 0 segments; 1 is needed, as *n says";
            return Err(Error::new(Status::Capacity, text));
        }
        // Before there is an fd that could be lost.
        if segments.is_null() {
            return invalid("segments is NULL; pass room for one");
        }
        let export = Export::make(Driver::get()?, addr, len)?;
        // SAFETY: F3, with NULL and room checked above.
        unsafe { segments.write(export.lent(addr, len)) };
        Ok(Status::Ok)
    };
    guard("the CUDA provider", || {
        body().inspect_err(|e| {
            // SAFETY: F3, this function's own promise.
            unsafe { fill_text(e.message.as_bytes(), why, why_len) };
        })
    })
}

/// # Safety
/// As `kvr_devmem_ops.put`: F2 for `segments`, which one `get` gave and nobody gave back.
unsafe extern "C" fn put(_context: *mut c_void, segments: *const kvr_segment, n: usize) {
    guard("the CUDA provider", || {
        // SAFETY: F2, this function's own promise.
        for segment in unsafe { slice(segments, n, "segments")? } {
            if segment.fd >= 0 {
                // SAFETY: F14: the fd is `get`'s, and it comes back once.
                drop(unsafe { OwnedFd::from_raw_fd(segment.fd) });
            }
        }
        Ok(Status::Ok)
    });
}

/// A dma-buf of whole pages.
struct Export {
    /// The address of its first byte.
    start: u64,
    fd: OwnedFd,
}

impl Export {
    /// What `put` gets back.
    fn lent(self, addr: u64, len: u64) -> kvr_segment {
        kvr_segment {
            addr,
            len,
            offset: addr - self.start,
            fd: self.fd.into_raw_fd(),
            area: 0,
            slice_id: 0,
            flags: 0,
            region: 0,
        }
    }

    fn make(driver: &Driver, addr: u64, len: u64) -> Result<Export> {
        let Some(end) = addr.checked_add(len).filter(|_| len > 0) else {
            return invalid(format!("{len} bytes from {addr:#x} on are none, or wrap around"));
        };
        let asked = Asked { driver, addr, end };
        let ordinal = asked.device()?;
        asked.inside()?;
        if !driver.exports(ordinal).map_err(|c| asked.failed("cuDeviceGetAttribute", c))? {
            let release = driver.release();
            return unsupported(format!(
                "device {ordinal} ({release}) cannot export its memory as a dma-buf: {WAY_OUT}"
            ));
        }
        let context = asked.know(driver::CONTEXT)? as usize as *mut c_void;
        let _current = driver
            .enter(context, ordinal)
            .map_err(|c| asked.failed("making its context current", c))?;
        let (pieces, mapped) = asked.pieces(ordinal)?;
        let (start, stop) = asked.pages(mapped)?;
        let bytes = usize::try_from(stop - start).unwrap_or(usize::MAX);
        match driver.export(start, bytes) {
            Ok(fd) if fd >= 0 => {
                // SAFETY: F14: the driver gave it to us just now.
                let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                // Last: what is refused stays as it was.
                pieces.iter().try_for_each(|at| asked.order(*at))?;
                Ok(Export { start, fd })
            }
            Ok(fd) => unsupported(format!("the driver gave {fd} for a dma-buf: {WAY_OUT}")),
            Err(driver::NOT_SUPPORTED) => unsupported(format!(
                "cuMemGetHandleForAddressRange gave {} on device {ordinal} ({}): {WAY_OUT}",
                driver.name(driver::NOT_SUPPORTED),
                driver.release()
            )),
            Err(code) => {
                let what = format!("cuMemGetHandleForAddressRange({start:#x}, {bytes})");
                Err(asked.failed(&what, code))
            }
        }
    }
}

fn unsupported<T>(text: impl Into<String>) -> Result<T> {
    Err(Error::new(Status::Unsupported, text))
}

/// The range that somebody wants to register. Who calls `get` says which one was refused.
struct Asked<'a> {
    driver: &'a Driver,
    addr: u64,
    /// First address behind it.
    end: u64,
}

impl Asked<'_> {
    fn failed(&self, call: &str, code: Code) -> Error {
        Error::new(Status::Os, format!("{call} gave {}", self.driver.name(code)))
    }

    fn know(&self, attribute: PointerAttribute) -> Result<u64> {
        self.know_at(attribute, self.addr)
    }

    fn know_at(&self, attribute: PointerAttribute, at: u64) -> Result<u64> {
        self.driver.of(attribute, at).map_err(|code| {
            self.failed(&format!("cuPointerGetAttribute({attribute:?}) at {at:#x}"), code)
        })
    }

    /// The device whose memory it is.
    fn device(&self) -> Result<c_int> {
        let kind = match self.driver.of(driver::MEMORY_TYPE, self.addr) {
            Err(driver::INVALID_VALUE) => {
                let text = "no CUDA memory of this process (never allocated, freed, or plain host \
                            memory, which is registered as KVR_MEM_HOST, NIXL: DRAM)";
                return Err(Error::new(Status::NotFound, text));
            }
            known => {
                known.map_err(|code| self.failed("cuPointerGetAttribute(memory type)", code))?
            }
        };
        // Managed memory says that it is the device's, and is wherever it was used last.
        if self.know(driver::IS_MANAGED)? != 0 {
            return invalid(
                "managed memory (cudaMallocManaged), which moves between host and device; \
                 allocate it with cudaMalloc",
            );
        }
        if kind == HOST {
            return invalid(
                "pinned memory of the host; register it as KVR_MEM_HOST (NIXL: DRAM, or metaInfo \
                 kvrail:mem=host)",
            );
        }
        if kind != DEVICE {
            return invalid(format!(
                "memory of CUDA's type {kind}; only device memory (2) is \
                                         taken: allocate it with cudaMalloc"
            ));
        }
        let ordinal = self.know(driver::DEVICE_ORDINAL)?;
        // An int of the driver's: what does not fit is none.
        c_int::try_from(ordinal)
            .or_else(|_| invalid(format!("the driver gave {ordinal:#x} as its device")))
    }

    /// The allocation, or the reservation of addresses, holds all of it.
    fn inside(&self) -> Result<()> {
        let base = self.know(driver::RANGE_START_ADDR)?;
        let size = self.know(driver::RANGE_SIZE)?;
        let top = base.saturating_add(size);
        if base <= self.addr && self.end <= top {
            return Ok(());
        }
        invalid(format!(
            "not inside its allocation of {size} bytes at {base:#x}: it ends {} bytes behind that; \
             register each allocation by itself",
            self.end.saturating_sub(top)
        ))
    }

    /// Looks at each mapping under it (an allocation of cudaMalloc has one), and gives an address
    /// in each, and the addresses from the first one's start to the last one's end.
    fn pieces(&self, ordinal: c_int) -> Result<(Vec<u64>, (u64, u64))> {
        let (mut pieces, mut first, mut at) = (Vec::new(), None, self.addr);
        while at < self.end {
            let base = match self.driver.of(driver::MAPPING_BASE_ADDR, at) {
                Err(driver::INVALID_VALUE) => {
                    return invalid(format!(
                        "nothing is mapped at {at:#x}, {} bytes behind its start; map it whole \
                         (cuMemMap) before it is registered",
                        at - self.addr
                    ))
                }
                known => {
                    known.map_err(|code| self.failed("cuPointerGetAttribute(mapping)", code))?
                }
            };
            let top = base.saturating_add(self.know_at(driver::MAPPING_SIZE, at)?);
            if base > at || top <= at {
                return invalid(format!(
                    "the driver says that {at:#x} is mapped by \
                                             {base:#x}..{top:#x}, which does not hold it"
                ));
            }
            self.usable(at, ordinal)?;
            pieces.push(at);
            first.get_or_insert(base);
            at = top;
        }
        Ok((pieces, (first.unwrap_or(self.addr), at)))
    }

    /// The mapping at `at` may be given to a NIC.
    fn usable(&self, at: u64, ordinal: c_int) -> Result<()> {
        let device = self.know_at(driver::DEVICE_ORDINAL, at)?;
        if u64::try_from(ordinal) != Ok(device) {
            return invalid(format!(
                "it begins on device {ordinal}, and {at:#x} is mapped on device {device}; \
                 register the memory of each device by itself"
            ));
        }
        if self.know_at(driver::IS_GPU_DIRECT_RDMA_CAPABLE, at)? == 0 {
            let pool = self.know_at(driver::MEMPOOL_HANDLE, at)? != 0;
            return unsupported(if pool {
                "it comes from a memory pool (cudaMallocAsync), which is not made for NICs; \
                 allocate it with cudaMalloc"
            } else {
                "it is not made for NICs: cuMemCreate needs allocFlags.gpuDirectRDMACapable = 1 \
                 in its CUmemAllocationProp, or allocate it with cudaMalloc"
            });
        }
        Ok(())
    }

    /// Makes copies synchronous where there is a switch for it.
    fn order(&self, at: u64) -> Result<()> {
        match self.driver.order_copies(at) {
            // Memory that was mapped piece by piece has no such switch (seen with driver 580).
            Ok(()) | Err(driver::NOT_SUPPORTED) => Ok(()),
            Err(code) => Err(self.failed("cuPointerSetAttribute(SYNC_MEMOPS)", code)),
        }
    }

    /// The pages of the host that hold it, which must be mapped as it is.
    fn pages(&self, (low, high): (u64, u64)) -> Result<(u64, u64)> {
        let page = page_bytes();
        let start = self.addr - self.addr % page;
        let stop = self.end.checked_next_multiple_of(page).unwrap_or(u64::MAX);
        if low <= start && stop <= high {
            return Ok((start, stop));
        }
        invalid(format!(
            "a dma-buf is made of the host's pages of {page} bytes, here {start:#x}..{stop:#x}, \
             and only {low:#x}..{high:#x} is mapped; register from and to a multiple of {page}"
        ))
    }
}
