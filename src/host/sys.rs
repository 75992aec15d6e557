//! The little that the host side asks of the operating system: identity, randomness, events, forks.

use core::ptr::NonNull;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Once};

use super::blob::HostOffer;
use super::error::{Error, Result};
use crate::status::Status;
use crate::sync::shared::{AtomicU32, Ordering};

/// An error of a system call that just failed.
pub(super) fn os_error(call: &str) -> Error {
    Error::new(Status::Os, format!("{call}: {}", std::io::Error::last_os_error()))
}

/// Fresh random bytes.
pub(super) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::new(Status::Os, format!("random bytes: {e}")))?;
    Ok(bytes)
}

/// Where this process runs.
pub(super) fn host_offer() -> HostOffer {
    let mut boot_id = [0; 16];
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: Vec<u8> =
        text.bytes().filter_map(|c| (c as char).to_digit(16)).map(|d| d as u8).collect();
    for (byte, pair) in boot_id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    let link = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let link = link.to_string_lossy();
    let digits = link.bytes().filter(u8::is_ascii_digit);
    let pid_ns = digits.fold(0u64, |n, d| n.wrapping_mul(10).wrapping_add(u64::from(d - b'0')));
    HostOffer {
        boot_id,
        pid_ns,
        // SAFETY: I8: no arguments.
        uid: unsafe { libc::getuid() },
        pid: std::process::id(),
    }
}

/// Yama's `ptrace_scope`, where the kernel has it.
pub(super) fn ptrace_scope() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?.trim().parse().ok()
}

/// Under Yama's scope 1 a process may be copied from and to only by its ancestors and by whom it
/// names. Peers have proved our secret before they try, so any process of this user is named, once.
pub(super) fn allow_copies() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if ptrace_scope() == Some(1) {
            // SAFETY: I8: plain numbers; failure shows when the peer proves the rail.
            unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY) };
        }
    });
}

/// An eventfd.
#[derive(Clone, Debug)]
pub(super) struct Event(Arc<OwnedFd>);

impl Event {
    pub(super) fn new() -> Result<Event> {
        let flags = libc::EFD_NONBLOCK | libc::EFD_CLOEXEC;
        // SAFETY: I8: plain numbers.
        let fd = unsafe { libc::eventfd(0, flags) };
        owned(fd, "eventfd").map(|fd| Event(Arc::new(fd)))
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Takes what was rung.
    pub(super) fn clear(&self) {
        let mut count = 0u64;
        // SAFETY: I8: reads 8 bytes into a local.
        unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) };
    }
}

/// The most memory that this process may pin, in bytes; `None`: as much as it likes.
pub(super) fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: I8: a local structure.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0;
    (!failed && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Bytes of a page of the host, a power of two.
pub fn page_bytes() -> u64 {
    // SAFETY: I8: no pointers.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).ok().filter(|b| b.is_power_of_two()).unwrap_or(4096)
}

/// Zeroed pages of our own, which children do not inherit: they are registered with NICs.
pub(super) fn map(bytes: usize) -> Result<NonNull<u8>> {
    let (rw, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: I8: a fresh mapping at an address that the kernel chooses.
    let at = unsafe { libc::mmap(core::ptr::null_mut(), bytes, rw, kind, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(os_error("mmap"));
    }
    // SAFETY: I8: the mapping made above. Failure means that a forked child copies it.
    unsafe { libc::madvise(at, bytes, libc::MADV_DONTFORK) };
    NonNull::new(at.cast()).ok_or_else(|| os_error("mmap"))
}

/// Gives back what [`map`] gave, with the same size.
pub(super) fn unmap(at: NonNull<u8>, bytes: usize) {
    // SAFETY: I8: mapped by `map`, and its owner is being dropped.
    unsafe { libc::munmap(at.as_ptr().cast(), bytes) };
}

/// Rings an eventfd: the `ring` of a [`crate::engine::bell::Bell`].
pub(super) fn ring(fd: RawFd) {
    let one = 1u64;
    // SAFETY: I8: writes 8 bytes of a local; the engine keeps the file open while a bell refers to
    // it.
    unsafe { libc::write(fd, (&raw const one).cast(), 8) };
}

/// An epoll file.
pub(super) fn epoll() -> Result<OwnedFd> {
    // SAFETY: I8: plain number.
    let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    owned(fd, "epoll_create1")
}

/// A file that becomes readable when the process has ended, all threads of it.
pub(super) fn pidfd(pid: u32) -> Result<OwnedFd> {
    // SAFETY: I8: plain numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    owned(fd as RawFd, "pidfd_open")
}

fn owned(fd: RawFd, call: &str) -> Result<OwnedFd> {
    if fd < 0 {
        return Err(os_error(call));
    }
    // SAFETY: I8: a fresh file that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Waits until one of `files` has one of its events, at most `ms` milliseconds (-1: for ever).
pub(super) fn wait(files: &mut [libc::pollfd], ms: i32) {
    // SAFETY: I8: the slice's own pointer and length.
    unsafe { libc::poll(files.as_mut_ptr(), files.len() as libc::nfds_t, ms) };
}

/// A file to wait for.
pub(super) fn interest(fd: RawFd, events: i16) -> libc::pollfd {
    libc::pollfd { fd, events, revents: 0 }
}

/// True when the file has an event now.
pub(super) fn is_ready(fd: RawFd) -> bool {
    let mut files = [interest(fd, libc::POLLIN)];
    wait(&mut files, 0);
    files[0].revents != 0
}

/// Our threads take no signals: those are the application's.
pub(super) fn block_signals() {
    // SAFETY: I8: a local set; filling and blocking cannot fail with these arguments.
    unsafe {
        let mut all = core::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, core::ptr::null_mut());
    }
}

static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// How many forks lie between this process and the one that first asked. An engine of another
/// number belongs to a parent.
pub(super) fn forks() -> u32 {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: I8: registers a function that only counts.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    FORKS.load(Ordering::Relaxed)
}

/// A non-blocking socket that is being connected: it becomes writable when it is, or has failed.
pub(super) fn connect(to: core::net::SocketAddrV4) -> std::io::Result<std::net::TcpStream> {
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: I8: plain numbers.
    let fd = unsafe { libc::socket(libc::AF_INET, kind, 0) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: I8: a fresh file that nobody else owns.
    let socket = unsafe { std::net::TcpStream::from_raw_fd(fd) };
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: to.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(to.ip().octets()) },
        sin_zero: [0; 8],
    };
    let len = core::mem::size_of_val(&address) as libc::socklen_t;
    // SAFETY: I8: a local address of the size given.
    let done = unsafe { libc::connect(fd, (&raw const address).cast(), len) };
    let error = std::io::Error::last_os_error();
    if done == 0 || error.raw_os_error() == Some(libc::EINPROGRESS) {
        return Ok(socket);
    }
    Err(error)
}
