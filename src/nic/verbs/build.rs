//! Turns ops into work requests: neighbours that are contiguous on the remote side become one.

use rdma_core_sys::*;

use crate::nic::{Batch, Keys, WrStatus};
use crate::table::Op;

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

/// The keys of an op, or why it cannot be posted.
#[inline]
fn keys_of<K: Keys>(keys: &K, op: &Op, limits: &Limits) -> Result<(u32, u32), WrStatus> {
    // Preparing a transfer makes no such op; some devices take length 0 for 2 GiB.
    if op.len == 0 || op.len > limits.bytes {
        return Err(WrStatus::LocalAccess);
    }
    let lkey = keys.lkey(op.local_region, limits.lane, op.local).ok_or(WrStatus::LocalAccess)?;
    let rkey = keys.rkey(op.remote_region, limits.rail, op.remote).ok_or(WrStatus::RemoteAccess)?;
    Ok((lkey, rkey))
}

/// Ops that become one work request each.
struct Apart<'a> {
    ops: &'a [Op],
    /// `wr_id` of the first.
    id: u64,
}

impl Apart<'_> {
    /// Fills work requests until one of the arrays ends, `keys_of` has no keys for an op, or one
    /// begins at the peer where the one before it ends. How many.
    ///
    /// The arrays are walked together, so that nothing is checked twice; the tables are copied, so
    /// that they stay in registers while work requests are written; and this is a function of its
    /// own, or the registers would be those of its caller (130 instructions a work request became
    /// 50, `benches/null`).
    #[inline(never)]
    fn fill(
        &self,
        wrs: &mut [ibv_send_wr],
        sges: &mut [ibv_sge],
        mut keys_of: impl FnMut(&Op) -> Option<(u32, u32)>,
    ) -> usize {
        // Only the lower half of `wr_id` is counted on; whoever calls goes on behind its end.
        let before_end = (u32::MAX - self.id as u32) as usize;
        let n = self.ops.len().min(wrs.len()).min(sges.len()).min(before_end + 1);
        let mut end = self.ops.first().map_or(0, |op| !op.remote);
        let places = wrs[..n].iter_mut().zip(&mut sges[..n]);
        for (i, (op, (wr, sge))) in self.ops[..n].iter().zip(places).enumerate() {
            let keys = if op.remote == end { None } else { keys_of(op) };
            let Some((lkey, rkey)) = keys else { return i };
            *sge = ibv_sge { addr: op.local, length: op.len, lkey };
            wr.wr_id = self.id + i as u64;
            wr.wr = ibv_send_wr_wr { rdma: ibv_send_wr_rdma { remote_addr: op.remote, rkey } };
            end = op.remote.wrapping_add(u64::from(op.len));
        }
        n
    }
}

/// How keys are looked up: each way is right for the ops that it takes, and dearer than the one
/// before it (14 and 20 instructions an op).
#[derive(Clone, Copy)]
enum Look {
    /// Once, for ops of the same two regions.
    Once,
    /// For each op, of regions with one key.
    Whole,
    /// For each op, by its address.
    Piece,
}

/// A way that takes so many ops at a time is worth another try.
const FEW: usize = 8;

/// Carries op `i` of a list in the work request of the one before it, if it goes on where that
/// ends at the peer: as one piece more, or as the rest of its last one. One key is one
/// registration, so a piece of a region. Returns the pieces used, or `None` if it cannot be
/// carried.
fn carry(
    ops: &[Op],
    i: usize,
    wr: &mut ibv_send_wr,
    (used, free): (&mut [ibv_sge], &mut [ibv_sge]),
    (lkey, rkey): (u32, u32),
    limits: &Limits,
) -> Option<usize> {
    let (before, op) = (&ops[i.checked_sub(1)?], &ops[i]);
    // SAFETY: V24: `fill` wrote this field of the union.
    let to = unsafe { wr.wr.rdma };
    let bytes = op.remote.wrapping_sub(to.remote_addr).checked_add(u64::from(op.len))?;
    if before.remote.wrapping_add(u64::from(before.len)) != op.remote
        || to.rkey != rkey
        || bytes > u64::from(limits.bytes)
    {
        return None;
    }
    let last = used.last_mut()?;
    if last.lkey == lkey && last.addr.wrapping_add(u64::from(last.length)) == op.local {
        last.length += op.len;
        return Some(0);
    }
    if wr.num_sge >= limits.sges as i32 {
        return None;
    }
    *free.first_mut()? = ibv_sge { addr: op.local, length: op.len, lkey };
    wr.num_sge += 1;
    Some(1)
}

/// Fills `wrs` and `sges` from the front. The work requests are templates, see
/// [`super::list::List::aim`]; `wr_id` names the first op of each.
pub(super) fn build<K: Keys>(
    wrs: &mut [ibv_send_wr],
    sges: &mut [ibv_sge],
    batch: &Batch<'_, K>,
    limits: &Limits,
) -> Built {
    let most = limits.wrs.min(wrs.len());
    let (wrs, ops) = (&mut wrs[..most], batch.ops);
    let mut b = Built { wrs: 0, ops: 0, sges: 0, stop: Stop::Done };
    let (keys, &Limits { bytes, lane, rail, .. }) = (*batch.keys, limits);
    let whole = move |op: &Op| {
        let lkey = keys.whole_lkey(op.local_region, lane)?;
        let rkey = keys.whole_rkey(op.remote_region, rail)?;
        (op.len.wrapping_sub(1) < bytes).then_some((lkey, rkey))
    };
    let mut look = Look::Once;
    loop {
        let id = limits.tag | u64::from(batch.first_wr.wrapping_add(b.ops as u32));
        let apart = Apart { ops: &ops[b.ops..], id };
        let to = (&mut wrs[b.wrs..], &mut sges[b.sges..]);
        let n = match look {
            Look::Once => {
                let first = ops.get(b.ops).and_then(|op| Some((whole(op)?, op.regions())));
                first.map_or(0, |(found, of)| {
                    apart.fill(to.0, to.1, move |op| {
                        (op.regions() == of && op.len.wrapping_sub(1) < bytes).then_some(found)
                    })
                })
            }
            Look::Whole => apart.fill(to.0, to.1, whole),
            Look::Piece => apart.fill(to.0, to.1, |op| keys_of(&keys, op, limits).ok()),
        };
        look = match look {
            Look::Once if n >= FEW => Look::Once,
            Look::Once => Look::Whole,
            Look::Whole if n >= FEW => Look::Whole,
            _ => Look::Piece,
        };
        (b.wrs, b.sges, b.ops) = (b.wrs + n, b.sges + n, b.ops + n);
        while let (Some(op), Some(wr)) = (ops.get(b.ops), wrs[..b.wrs].last_mut()) {
            let Ok(keys) = keys_of(batch.keys, op, limits) else { break };
            let Some(n) = carry(ops, b.ops, wr, sges.split_at_mut(b.sges), keys, limits) else {
                break;
            };
            (b.ops, b.sges) = (b.ops + 1, b.sges + n);
        }
        let Some(op) = ops.get(b.ops) else { return b };
        if b.wrs == wrs.len() || b.sges == sges.len() {
            b.stop = Stop::Full;
            return b;
        }
        if let Err(status) = keys_of(batch.keys, op, limits) {
            b.stop = Stop::Refused(status);
            return b;
        }
    }
}
