//! Message streams over TCP sockets: non-blocking, and one epoll for all of them.

use crate::nic::local::errno;
use crate::nic::{Closed, Link, Net};

/// Parts sent in one call.
const PARTS: usize = 17;

/// One connected, non-blocking socket. The host owns the file and closes it.
#[derive(Debug)]
pub struct Stream {
    fd: i32,
}

impl Stream {
    /// A stream over a connected, non-blocking socket.
    pub const fn new(fd: i32) -> Stream {
        Stream { fd }
    }

    /// The socket.
    pub const fn fd(&self) -> i32 {
        self.fd
    }
}

fn outcome(n: isize) -> Result<usize, Closed> {
    if n >= 0 {
        return Ok(n as usize);
    }
    match errno() {
        libc::EAGAIN | libc::EINTR => Ok(0),
        e => Err(Closed { vendor: e as u32 }),
    }
}

impl Link for Stream {
    fn send(&mut self, parts: &[&[u8]]) -> Result<usize, Closed> {
        let mut iov = [libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 }; PARTS];
        let n = parts.len().min(PARTS);
        for (to, part) in iov.iter_mut().zip(parts) {
            *to = libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
        }
        // SAFETY: I8: all zeroes is a valid empty header.
        let mut header: libc::msghdr = unsafe { core::mem::zeroed() };
        header.msg_iov = iov.as_mut_ptr();
        header.msg_iovlen = n as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: I7: the vector's elements are the caller's slices, live during the call; sendmsg
        // only reads them.
        outcome(unsafe { libc::sendmsg(self.fd, &raw const header, flags) })
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, Closed> {
        // SAFETY: I8: writes at most `into.len()` bytes into `into`.
        let n = unsafe {
            libc::recv(self.fd, into.as_mut_ptr().cast(), into.len(), libc::MSG_DONTWAIT)
        };
        if n == 0 {
            return Err(Closed { vendor: 0 });
        }
        outcome(n)
    }
}

/// All message streams of an engine, behind one epoll.
#[derive(Debug)]
pub struct Streams {
    epoll: i32,
}

impl Streams {
    /// Over an epoll file that the host owns.
    pub const fn new(epoll: i32) -> Streams {
        Streams { epoll }
    }

    /// Adds or removes the stream of a peer. False: the kernel refused.
    pub fn watch(&mut self, stream: &Stream, peer: Option<u32>) -> bool {
        let mut event =
            libc::epoll_event { events: libc::EPOLLIN as u32, u64: u64::from(peer.unwrap_or(0)) };
        let op = if peer.is_some() { libc::EPOLL_CTL_ADD } else { libc::EPOLL_CTL_DEL };
        // SAFETY: I8: own files and a local structure.
        unsafe { libc::epoll_ctl(self.epoll, op, stream.fd, &raw mut event) == 0 }
    }
}

impl Net for Streams {
    type Link = Stream;

    fn ready(&mut self, into: &mut [u32]) -> usize {
        const AT_ONCE: usize = 64;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; AT_ONCE];
        let n = into.len().min(AT_ONCE) as i32;
        // SAFETY: I8: `events` holds at least `n`; timeout 0 never waits.
        let got = unsafe { libc::epoll_wait(self.epoll, events.as_mut_ptr(), n, 0) };
        let got = got.max(0) as usize;
        for (to, event) in into.iter_mut().zip(&events[..got]) {
            *to = event.u64 as u32;
        }
        got
    }
}
