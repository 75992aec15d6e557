//! What lies behind a region: host memory, an address of a device, a dma-buf; and who lent it.

use core::fmt;
use std::fs;

use super::error::{Error, Result};
use super::log;
use super::rails::said;
pub use super::sys::page_bytes;
use crate::nic::verbs::Fault;
use crate::status::Status;
use crate::sync::{AtomicBool, Ordering};

/// Kind of memory: the host's.
pub const HOST: u32 = 0;
/// Kind of memory: a device's, at an address that a peer-memory module of the kernel resolves.
pub const DEVICE: u32 = 1;
/// Kind of memory: a device's, behind a dma-buf.
pub const DMABUF: u32 = 2;

/// A piece of device memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// First byte, in the addresses of descriptors and peers.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// Where the first byte lies in the dma-buf, in bytes; without one 0.
    pub offset: u64,
    /// The dma-buf, which stays the caller's; -1: none, a peer-memory module resolves `addr`.
    pub fd: i32,
    /// Whoever reads the memory sees what a NIC has completed, so READs into it need no flush.
    pub coherent: bool,
}

/// Where the bytes of a range are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Source {
    /// At its address in this process.
    Host,
    /// Where a peer-memory module of the kernel says.
    Device,
    /// In a dma-buf, from `offset` on.
    DmaBuf { fd: i32, offset: u64 },
}

/// Memory to be registered: its first byte as descriptors and peers name it, and its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Range {
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) source: Source,
    /// See [`Segment::coherent`]. The host's is.
    pub(super) coherent: bool,
}

impl Range {
    /// Host memory.
    pub(super) const fn host(addr: u64, len: u64) -> Range {
        Range { addr, len, source: Source::Host, coherent: true }
    }

    /// The kind of memory, as blobs have it.
    pub(super) const fn mem(&self) -> u8 {
        match self.source {
            Source::Host => HOST as u8,
            Source::Device => DEVICE as u8,
            Source::DmaBuf { .. } => DMABUF as u8,
        }
    }

    /// A kind of [`Engine::register`](super::engine::Engine::register): one that an address alone
    /// names.
    pub(super) fn plain(addr: u64, len: u64, mem: u32) -> Result<Range> {
        let source = match mem {
            HOST => Source::Host,
            DEVICE => Source::Device,
            DMABUF => {
                let text = "memory kind 2 (KVR_MEM_DMABUF) needs a file descriptor and an offset: \
                            call kvr_region_register_segments()";
                return Err(Error::new(Status::Invalid, text));
            }
            _ => {
                let text = format!(
                    "memory kind {mem}: known are 0 (KVR_MEM_HOST), 1 (KVR_MEM_DEVICE) and 2 \
                     (KVR_MEM_DMABUF)"
                );
                return Err(Error::new(Status::Unsupported, text));
            }
        };
        // Of a device's memory peers are told the length and count with the end.
        let past = if mem == HOST { len.saturating_sub(1) } else { len };
        if len == 0 || addr == 0 || addr.checked_add(past).is_none() {
            let text = format!(
                "region of {len} bytes at {addr:#x}: it must have at least 1 byte, not begin at 0 \
                 and not run past the largest address"
            );
            return Err(Error::new(Status::Invalid, text));
        }
        Ok(Range { addr, len, source, coherent: mem == HOST })
    }

    /// The `at`-th of some segments, checked for all that needs no NIC.
    pub(super) fn segment(at: usize, s: &Segment) -> Result<Range> {
        let Segment { addr, len, offset, fd, coherent } = *s;
        let bad = |why: String| {
            let text = format!(
                "segment {at} (addr {addr:#x}, len {len}, fd {fd}, offset {offset:#x}): {why}"
            );
            Err(Error::new(Status::Invalid, text))
        };
        // Peers are told the length and count with the end, so the last address itself is left out.
        if len == 0 || addr.checked_add(len).is_none() {
            return bad("it must have at least 1 byte and end inside 64 bits".into());
        }
        match fd {
            ..=-2 => {
                bad("fd must be a dma-buf, or -1 where a peer-memory module resolves addr".into())
            }
            -1 if offset != 0 => bad("an offset is counted in a dma-buf: pass its fd, or 0".into()),
            -1 if addr == 0 => bad("a peer-memory module resolves no address 0".into()),
            -1 => Ok(Range { addr, len, source: Source::Device, coherent }),
            _ if offset.checked_add(len).is_none() => bad("it must end inside 64 bits".into()),
            _ => {
                let page = page_bytes();
                if addr % page != offset % page {
                    return bad(format!(
                        "addr and offset must agree modulo the page size, {page} bytes, but are \
                         {:#x} and {:#x} into a page: move one of them",
                        addr % page,
                        offset % page
                    ));
                }
                Ok(Range { addr, len, source: Source::DmaBuf { fd, offset }, coherent })
            }
        }
    }

    /// The `n` bytes from `at` on: address and offset move together.
    pub(super) fn piece(&self, at: u64, n: u64) -> Range {
        let source = match self.source {
            Source::DmaBuf { fd, offset } => Source::DmaBuf { fd, offset: offset + at },
            other => other,
        };
        Range { addr: self.addr + at, len: n, source, ..*self }
    }

    /// Why a NIC refused this piece of device memory, and what to do.
    pub(super) fn refused(&self, nic: &str, fault: &Fault) -> (Status, String) {
        let (advice, status) = match (self.source, fault.errno) {
            (Source::DmaBuf { fd, offset }, libc::EINVAL | libc::EBADF) => {
                (what_is(fd, offset, self.len), Status::Invalid)
            }
            (Source::DmaBuf { .. }, errno) if is_unsupported(errno) => {
                (REFUSES.into(), Status::Unsupported)
            }
            (Source::Device, libc::EFAULT) => (UNRESOLVED.into(), Status::Os),
            _ => (String::new(), Status::Os),
        };
        (status, format!("registering {self} on {nic}: {}{advice}", said(fault)))
    }
}

/// The error numbers by which providers, libraries and kernels say that they have no dma-bufs.
const fn is_unsupported(errno: i32) -> bool {
    matches!(errno, libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS | libc::ENOTTY)
}

const REFUSES: &str = ". This NIC, its driver, the kernel or rdma-core refuses dma-bufs: load the \
                       device's peer-memory module and pass fd -1, or let the transfer bounce in \
                       host memory (kv_buffer_device=cpu)";
const UNRESOLVED: &str = ". No peer-memory module of the kernel knows this address: load the \
                          device's, or pass a dma-buf of it, or let the transfer bounce in host \
                          memory (kv_buffer_device=cpu)";

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.len, self.addr)?;
        match self.source {
            Source::Host => Ok(()),
            Source::Device => write!(f, " (device memory)"),
            Source::DmaBuf { fd, offset } => write!(f, " (dma-buf fd {fd}, offset {offset:#x})"),
        }
    }
}

/// What stands behind a descriptor that a NIC took for no dma-buf of this range.
fn what_is(fd: i32, offset: u64, len: u64) -> String {
    let Ok(name) = fs::read_link(format!("/proc/self/fd/{fd}")) else {
        return format!(
            ". fd {fd} is not open in this process: pass the dma-buf's and keep it open until \
             the call has returned"
        );
    };
    let name = name.to_string_lossy().into_owned();
    let exported = name.starts_with("/dmabuf") || name == "anon_inode:dmabuf";
    let end = offset.saturating_add(len);
    let mut text = format!(". fd {fd} is {name}");
    if !exported {
        text += ", by its name no dma-buf: pass one that the device's driver exported";
    }
    match bytes_of(fd) {
        Some(has) if end > has => {
            text += &format!(
                "; it has {has} bytes, and offset {offset:#x} and {len} bytes end at {end}: \
                 register at most {} bytes from there",
                has.saturating_sub(offset)
            );
        }
        Some(has) => text += &format!("; it has {has} bytes"),
        None => {}
    }
    text
}

/// Bytes of a dma-buf, or of a file.
fn bytes_of(fd: i32) -> Option<u64> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
    let told = info.lines().find_map(|line| line.strip_prefix("size:")?.trim().parse().ok());
    let file = || fs::metadata(format!("/proc/self/fd/{fd}")).ok().filter(fs::Metadata::is_file);
    told.or_else(|| Some(file()?.len()))
}

type Put = Box<dyn FnOnce() + Send + Sync>;

/// Device memory that a provider lent. Its `put` is called when the last region of it is gone, with
/// no lock of the engine held.
pub struct Lease {
    put: Option<Put>,
    lost: AtomicBool,
}

impl Lease {
    /// `put` takes the memory back.
    pub fn new(put: impl FnOnce() + Send + Sync + 'static) -> Lease {
        Lease { put: Some(Box::new(put)), lost: AtomicBool::new(false) }
    }

    /// A NIC did not end a registration of it: nobody may have the memory again.
    pub(super) fn lose(&self) {
        self.lost.store(true, Ordering::Release);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("lost", &self.lost).finish_non_exhaustive()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(put) = self.put.take() else { return };
        if self.lost.load(Ordering::Acquire) {
            log::warn(
                "device memory is not given back to its provider: a NIC did not end a \
                 registration, so peers may still reach it",
            );
        } else {
            put();
        }
    }
}
