//! Two processes of one user on one host, no NIC: one-sided copies by `process_vm_readv` and
//! `process_vm_writev`.
//!
//! A process number alone names nobody: it may be recycled. What stands in for a NIC's protection:
//!
//! * *WRITE.* The first element of every call is a few bytes in the target's *guard page*, which
//!   lies at a random address that only this incarnation of the target has mapped (children do not
//!   inherit it, exec drops it). The kernel resolves the process once per call and copies in order,
//!   so a stranger's address space fails with `EFAULT` before anything of the caller's is written.
//! * *READ.* After the call the target's *life word* is read from shared memory. The kernel marks
//!   it when the thread that owns it dies (a robust futex), which is before the process number can
//!   be reused. A dead target's data is discarded.
//! * *Withdrawn regions.* Every batch raises its regions' in-use counters in shared memory before
//!   it looks whether they are open, and lowers them after the copy (`share.rs`). So a target knows
//!   when nobody touches a region any more.

mod share;

use heapless::Deque;

use crate::engine::arena::Arena;
use crate::nic::{Batch, Completion, Keys, Port, PostError, WrStatus};
use crate::table::{Direction, Op};
pub use share::{AttachError, Offer, PeerMemory, Share};

/// Vector elements of one call: the kernel's `UIO_MAXIOV`.
const IOV_MAX: usize = 1024;
/// Bytes of one batch, so that a cancel waits for about a millisecond.
const BATCH_BYTES: u64 = 4 << 20;
/// Bytes written to the guard page at the head of each WRITE.
const GUARD: usize = 8;

/// One lane of the local driver.
#[derive(Debug)]
pub struct LocalPort<'m> {
    peers: &'m mut [Option<PeerMemory>],
    local: &'m mut [libc::iovec],
    remote: &'m mut [libc::iovec],
    done: Deque<Completion, 4>,
}

// SAFETY: I7: the vectors are scratch that is filled and used within one `post`; no address in them
// outlives it.
unsafe impl Send for LocalPort<'_> {}

/// How far one system call got.
struct Copied {
    /// Ops that were copied whole.
    ops: u32,
    /// Why it stopped there, if it did.
    stopped: Option<(WrStatus, u32)>,
}

impl<'m> LocalPort<'m> {
    /// A lane for `peers` peers. `None`: the arena is too small.
    pub fn new(arena: &mut Arena<'m>, peers: u32) -> Option<LocalPort<'m>> {
        let empty = libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 };
        Some(LocalPort {
            peers: arena.array(peers as usize, |_| None)?,
            local: arena.array(IOV_MAX, |_| empty)?,
            remote: arena.array(IOV_MAX, |_| empty)?,
            done: Deque::new(),
        })
    }

    /// Connects the rail to a peer whose memory was attached. `memory` must stay attached until
    /// [`Port::close`].
    pub fn connect(&mut self, peer: u32, memory: PeerMemory) {
        self.peers[peer as usize] = Some(memory);
    }

    /// Copies `ops`, whose regions are all entered, in one call.
    fn copy(&mut self, to: PeerMemory, direction: Direction, ops: &[Op]) -> Copied {
        let mut guard = [0u8; GUARD];
        let lead = match direction {
            Direction::Read => 0,
            Direction::Write => {
                self.local[0] = libc::iovec { iov_base: guard.as_mut_ptr().cast(), iov_len: GUARD };
                self.remote[0] = libc::iovec {
                    iov_base: to.scratch_address() as *mut libc::c_void,
                    iov_len: GUARD,
                };
                1
            }
        };
        let mut bytes = lead * GUARD;
        for (i, op) in ops.iter().enumerate() {
            let iov_len = op.len as usize;
            self.local[lead + i] = libc::iovec { iov_base: op.local as *mut libc::c_void, iov_len };
            self.remote[lead + i] =
                libc::iovec { iov_base: op.remote as *mut libc::c_void, iov_len };
            bytes += iov_len;
        }
        let n = (lead + ops.len()) as libc::c_ulong;
        let (l, r) = (self.local.as_ptr(), self.remote.as_ptr());
        let got = match direction {
            // SAFETY: I7: both vectors hold `n` elements; local addresses lie in memory that the
            // application registered, and the kernel checks each (a bad one is EFAULT,
            // not a fault).
            Direction::Read => unsafe { libc::process_vm_readv(to.pid(), l, n, r, n, 0) },
            // SAFETY: I7: as above.
            Direction::Write => unsafe { libc::process_vm_writev(to.pid(), l, n, r, n, 0) },
        };
        let errno = if got < 0 { errno() } else { 0 };
        let alive = to.is_alive();
        if got == bytes as isize && (alive || direction == Direction::Write) {
            return Copied { ops: ops.len() as u32, stopped: None };
        }
        if !alive || errno == libc::ESRCH {
            return Copied { ops: 0, stopped: Some((WrStatus::RailError, libc::ESRCH as u32)) };
        }
        if errno == libc::EPERM {
            return Copied { ops: 0, stopped: Some((WrStatus::Permission, libc::EPERM as u32)) };
        }
        let reached = got.max(0) as usize;
        if reached < lead * GUARD {
            // The guard page is not there: not the process that was connected.
            return Copied { ops: 0, stopped: Some((WrStatus::RailError, errno as u32)) };
        }
        let mut rest = reached - lead * GUARD;
        let mut done = 0;
        while done < ops.len() && rest >= ops[done].len as usize {
            rest -= ops[done].len as usize;
            done += 1;
        }
        let status = ops.get(done).map_or(WrStatus::RailError, |op| blame(to, direction, op, rest));
        Copied { ops: done as u32, stopped: Some((status, libc::EFAULT as u32)) }
    }

    fn report(&mut self, peer: u32, wr: u32, status: WrStatus, vendor: u32) {
        // The engine polls before every post but a small transfer's own, so two at most are here;
        // a lost report would be a hang, so it is checked.
        let pushed = self.done.push_back(Completion { peer, wr, status, vendor });
        debug_assert!(pushed.is_ok());
    }
}

/// Whose memory stopped a copy `at` bytes into `op`.
fn blame(to: PeerMemory, direction: Direction, op: &Op, at: usize) -> WrStatus {
    let readable = |pid: libc::pid_t, address: u64| {
        let mut byte = 0u8;
        let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: 1 };
        // SAFETY: I7: one element each; the kernel checks the remote address.
        unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) == 1 }
    };
    let remote = readable(to.pid(), op.remote + at as u64);
    // SAFETY: I8: no arguments.
    let local = readable(unsafe { libc::getpid() }, op.local + at as u64);
    match direction {
        Direction::Read if remote => WrStatus::LocalAccess,
        Direction::Write if !local => WrStatus::LocalAccess,
        _ => WrStatus::RemoteAccess,
    }
}

impl Port for LocalPort<'_> {
    fn access_error_breaks_rail(&self) -> bool {
        false
    }

    fn depth(&self) -> u32 {
        IOV_MAX as u32
    }

    fn batch_bytes(&self) -> u64 {
        BATCH_BYTES
    }

    fn batch_ops(&self) -> u32 {
        IOV_MAX as u32 - 1
    }

    fn post<K: Keys>(&mut self, batch: &Batch<'_, K>) -> Result<(), (u32, PostError)> {
        let Some(to) = self.peers.get(batch.peer as usize).copied().flatten() else {
            return Err((0, PostError::Rail));
        };
        // Enter the regions first; the batch ends before the first that was withdrawn, and before
        // the first op whose local address is a device's: something else lies there in this
        // process.
        let (mut region, mut entered, mut device) = (None, 0, false);
        for op in batch.ops {
            device = !batch.keys.on_host(op.local_region);
            if device {
                break;
            }
            if region != Some(op.remote_region) {
                let key = batch.keys.remote(op.remote_region);
                if !to.enter(key.slot, key.generation) {
                    break;
                }
                region = Some(op.remote_region);
            }
            entered += 1;
        }
        let ops = &batch.ops[..entered];
        let copied = if ops.is_empty() {
            Copied { ops: 0, stopped: None }
        } else {
            self.copy(to, batch.direction, ops)
        };
        let mut region = None;
        for op in ops {
            if region != Some(op.remote_region) {
                to.leave(batch.keys.remote(op.remote_region).slot);
                region = Some(op.remote_region);
            }
        }
        let at = batch.first_wr.wrapping_add(copied.ops);
        match copied.stopped {
            Some((status, vendor)) => self.report(batch.peer, at, status, vendor),
            None if device => self.report(batch.peer, at, WrStatus::LocalAccess, 0),
            None if entered < batch.ops.len() => {
                let status =
                    if to.is_alive() { WrStatus::RemoteAccess } else { WrStatus::RailError };
                self.report(batch.peer, at, status, 0);
            }
            None => self.report(batch.peer, at.wrapping_sub(1), WrStatus::Success, 0),
        }
        Ok(())
    }

    fn poll(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    fn close(&mut self, peer: u32) -> bool {
        if let Some(p) = self.peers.get_mut(peer as usize) {
            *p = None;
        }
        true
    }
}

/// The calling thread's errno.
pub(crate) fn errno() -> i32 {
    // SAFETY: I8: always a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() }
}
