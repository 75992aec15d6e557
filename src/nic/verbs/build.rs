//! Turns ops into work requests: neighbours that are contiguous on the remote side become one.

use core::ptr::null_mut;

use rdma_core_sys::*;

use crate::nic::{Batch, Keys, WrStatus};
use crate::table::{Direction, Op};

/// What a batch may use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Work requests.
    pub(super) wrs: usize,
    /// Pieces of local memory in one.
    pub(super) sges: u32,
    /// Bytes of one.
    pub(super) bytes: u32,
    /// The lane, for local keys.
    pub(super) lane: u32,
    /// The peer's rail, for remote keys.
    pub(super) rail: u32,
    /// What every `wr_id` has above the number of its first op.
    pub(super) tag: u64,
}

/// Why building ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stop {
    /// No op is left.
    Done,
    /// No work request is left.
    Full,
    /// The next op cannot be posted: it is reported with this status.
    Refused(WrStatus),
}

/// What was built.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Built {
    /// Work requests.
    pub(super) wrs: usize,
    /// Ops that they carry: the first so many of the batch.
    pub(super) ops: usize,
    /// Pieces of local memory.
    pub(super) sges: usize,
    /// Why not more.
    pub(super) stop: Stop,
}

/// The work request that is being built.
struct Open {
    /// Where the next op must begin to be carried too.
    remote_end: u64,
    rkey: u32,
    local_end: u64,
    lkey: u32,
    bytes: u64,
    pieces: u32,
}

impl Open {
    /// True when `op` goes on where this one ends, in the same memory of the peer: one key is one
    /// registration, so a piece of a region.
    fn continues(&self, op: &Op, rkey: u32, limits: &Limits) -> bool {
        self.remote_end == op.remote
            && self.rkey == rkey
            && self.bytes + u64::from(op.len) <= u64::from(limits.bytes)
    }

    /// True when `op` goes on in the same piece of local memory.
    const fn same_piece(&self, op: &Op, lkey: u32) -> bool {
        self.local_end == op.local && self.lkey == lkey
    }
}

/// The keys of an op, or why it cannot be posted.
fn keys_of<K: Keys>(keys: &K, op: &Op, limits: &Limits) -> Result<(u32, u32), WrStatus> {
    // Preparing a transfer makes no such op; some devices take length 0 for 2 GiB.
    if op.len == 0 || op.len > limits.bytes {
        return Err(WrStatus::LocalAccess);
    }
    let lkey = keys.lkey(op.local_region, limits.lane, op.local).ok_or(WrStatus::LocalAccess)?;
    let rkey = keys.rkey(op.remote_region, limits.rail, op.remote).ok_or(WrStatus::RemoteAccess)?;
    Ok((lkey, rkey))
}

/// Fills `wrs` and `sges` from the front; [`link`] makes a list of them. `wr_id` names the first op
/// of each. As many ops as there are places in `sges` are looked at.
pub(super) fn build<K: Keys>(
    wrs: &mut [ibv_send_wr],
    sges: &mut [ibv_sge],
    batch: &Batch<'_, K>,
    limits: &Limits,
) -> Built {
    let opcode = match batch.direction {
        Direction::Read => IBV_WR_RDMA_READ,
        Direction::Write => IBV_WR_RDMA_WRITE,
    };
    let mut built = Built { wrs: 0, ops: 0, sges: 0, stop: Stop::Done };
    let mut open: Option<Open> = None;
    for op in batch.ops {
        let (lkey, rkey) = match keys_of(batch.keys, op, limits) {
            Ok(keys) => keys,
            Err(status) => {
                built.stop = Stop::Refused(status);
                break;
            }
        };
        let mut grows = open.as_ref().is_some_and(|o| o.continues(op, rkey, limits));
        let same_piece = grows && open.as_ref().is_some_and(|o| o.same_piece(op, lkey));
        grows &= same_piece || open.as_ref().is_some_and(|o| o.pieces < limits.sges);
        let room = (grows || built.wrs < limits.wrs.min(wrs.len()))
            && (same_piece || built.sges < sges.len());
        if !room {
            built.stop = Stop::Full;
            break;
        }
        if same_piece {
            sges[built.sges - 1].length += op.len;
        } else {
            sges[built.sges] = ibv_sge { addr: op.local, length: op.len, lkey };
            built.sges += 1;
        }
        match open.as_mut().filter(|_| grows) {
            Some(o) => {
                o.remote_end += u64::from(op.len);
                o.bytes += u64::from(op.len);
                o.pieces += u32::from(!same_piece);
                (o.local_end, o.lkey) = (op.local + u64::from(op.len), lkey);
            }
            None => {
                let number = batch.first_wr.wrapping_add(built.ops as u32);
                let wr = &mut wrs[built.wrs];
                wr.wr_id = limits.tag | u64::from(number);
                (wr.opcode, wr.send_flags) = (opcode, 0);
                wr.wr = ibv_send_wr_wr { rdma: ibv_send_wr_rdma { remote_addr: op.remote, rkey } };
                built.wrs += 1;
                open = Some(Open {
                    remote_end: op.remote + u64::from(op.len),
                    rkey,
                    local_end: op.local + u64::from(op.len),
                    lkey,
                    bytes: op.len.into(),
                    pieces: 1,
                });
            }
        }
        wrs[built.wrs - 1].num_sge = open.as_ref().map_or(0, |o| o.pieces as i32);
        built.ops += 1;
    }
    built
}

/// Makes one list of the first `n` work requests and gives each its pieces, in order. Nothing may
/// touch the arrays through their slices between this and the post.
pub(super) fn link(wrs: &mut [ibv_send_wr], sges: &mut [ibv_sge], n: usize) -> *mut ibv_send_wr {
    let n = n.min(wrs.len());
    let (first, mut pieces) = (wrs.as_mut_ptr(), sges.as_mut_ptr());
    for i in 0..n {
        let wr = first.wrapping_add(i);
        let next = if i + 1 < n { wr.wrapping_add(1) } else { null_mut() };
        // SAFETY: V24: `i` is inside the port's own array.
        unsafe { (*wr).next = next };
        // SAFETY: V24: as above.
        unsafe { (*wr).sg_list = pieces };
        // SAFETY: V24: as above.
        let used = unsafe { (*wr).num_sge };
        pieces = pieces.wrapping_add(usize::try_from(used).unwrap_or(0));
    }
    first
}
