//! A lane over a NIC port: READ and WRITE work requests on one queue pair for each peer.
//!
//! * A batch is built in the port's own arrays and posted as one list. Of READs every so many are
//!   signalled, and the last. A batch of WRITEs ends with a small READ of what was written last,
//!   the only one signalled: an acknowledged WRITE is received, a READ behind it on the same queue
//!   pair proves that it is placed. So no WRITE is reported done before its batch was read back.
//! * `wr_id` is `epoch:16 | peer:16 | number:32`. The number is that of the first op it carries; of
//!   a flush READ or a marker, that of the last op before it.
//! * Every signalled work request has a [`Span`] in its rail's ring. A success settles all up to
//!   it. A failure names its own first op, whether it was signalled or not.
//! * What the provider posted of a list that it refused stays in flight. If no signalled one is
//!   behind it, a *marker* is owed, and posted as soon as the provider takes it: a flush READ, or a
//!   WRITE of nothing.

use core::fmt;
use core::ptr::null_mut;

use rdma_core_sys::*;

use super::build::{build, link, Built, Limits, Stop};
use super::codes::{classify, nothing, split, tag, vendor, written};
use super::device::Handle;
use super::grave::Graves;
use super::qp::Qp;
use super::rail::{Owed, Proof, Rail, Span, Written};
use super::shape::Shape;
use crate::engine::arena::Arena;
use crate::engine::ledger::CLAIMS;
use crate::nic::{Batch, Completion, Keys, Port, PostError, WrStatus};
use crate::table::Direction;

/// Completions taken from the queue at once.
const TAKE: usize = 32;
/// Claims that keep the wire busy: with four of 1 MiB, 400 Gbit/s have 84 us of work.
const WINDOW_CLAIMS: u64 = 4;

/// One lane of the verbs driver.
///
/// It owns the queue pairs that it was given until [`Port::close`] ends them; then they are to be
/// destroyed ([`VerbsPort::take_grave`]). Close all peers before the port goes.
pub struct VerbsPort<'m> {
    lane: u32,
    shape: Shape,
    device: Option<Handle>,
    wrs: &'m mut [ibv_send_wr],
    sges: &'m mut [ibv_sge],
    taken: &'m mut [ibv_wc],
    rails: &'m mut [Rail],
    /// A ring for each rail.
    spans: &'m mut [Span],
    ring: usize,
    /// Completions in `taken` that were not looked at: from `at` to `end`.
    at: usize,
    end: usize,
    /// Work requests in flight over all rails.
    in_flight: u32,
    /// Completions of closed rails that may still be in the queue.
    ghosts: u32,
    /// Rails' chores, all together.
    chores: u32,
    graves: Graves<'m>,
    strays: u64,
}

impl fmt::Debug for VerbsPort<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsPort")
            .field("lane", &self.lane)
            .field("shape", &self.shape)
            .field("in_flight", &self.in_flight)
            .field("ghosts", &self.ghosts)
            .field("chores", &self.chores)
            .field("graves", &self.graves)
            .field("strays", &self.strays)
            .finish_non_exhaustive()
    }
}

// SAFETY: V21: the pointers in the arrays are used within one call; queue pairs may be used from
// any thread, one at a time, which the token sees to.
unsafe impl Send for VerbsPort<'_> {}

/// How a post of a list ended.
struct Posted {
    /// Work requests that are in flight now, from the first on.
    wrs: usize,
    /// Why not all.
    failed: Option<PostError>,
    /// The provider did not say which: any of them may be in flight.
    unknown: bool,
}

impl<'m> VerbsPort<'m> {
    /// Lane `lane` for `peers` peers. Without a device it can only be measured. `None`: the arena
    /// is too small.
    pub fn new(
        arena: &mut Arena<'m>,
        lane: u32,
        peers: u32,
        shape: Shape,
        device: Option<Handle>,
    ) -> Option<VerbsPort<'m>> {
        let shape = Shape {
            depth: shape.depth.max(1),
            sges: shape.sges.max(1),
            signal_every: shape.signal_every.max(1),
            batch_ops: shape.batch_ops.max(1),
            ..shape
        };
        // A signalled one ends each claim; then one every so many, a proof and a marker.
        let ring = CLAIMS + (shape.depth / shape.signal_every) as usize + 4;
        // One more for the flush READ.
        let wrs = shape.batch_ops as usize + 1;
        Some(VerbsPort {
            lane,
            shape,
            device,
            wrs: arena.array(wrs, |_| ibv_send_wr::zeroed())?,
            sges: arena.array(wrs, |_| ibv_sge::zeroed())?,
            taken: arena.array(TAKE, |_| ibv_wc::zeroed())?,
            rails: arena.array(peers as usize, |_| Rail::new())?,
            spans: arena.array((peers as usize).checked_mul(ring)?, |_| Span::NONE)?,
            ring,
            at: 0,
            end: 0,
            in_flight: 0,
            ghosts: 0,
            chores: 0,
            graves: Graves::new(arena, peers)?,
            strays: 0,
        })
    }

    /// Connects the rail to `peer`: a queue pair that is ready to send and leads to rail `rail` of
    /// the peer. `max_msg`: most bytes of a work request, of both ends. The port owns the queue
    /// pair until [`Port::close`]; one that it had for the peer is closed.
    pub fn connect(&mut self, peer: u32, qp: Qp, rail: u32, max_msg: u32) {
        self.close(peer);
        let Some(r) = self.rails.get_mut(peer as usize) else {
            self.graves.end(qp);
            return;
        };
        r.sges = qp.granted().sges.min(self.shape.sges).max(1);
        (r.qp, r.rail, r.max_msg) = (Some(qp), rail, max_msg);
    }

    /// Sends a WRITE of nothing to `peer`, whose NIC acknowledges it. The first proves the rail;
    /// later ones keep it alive: if one fails, the rail is reported broken. False: the rail cannot
    /// take it now.
    pub fn prove(&mut self, peer: u32) -> bool {
        let free = self.free();
        let Some(rail) = self.rails.get_mut(peer as usize) else { return false };
        if rail.proving {
            return true;
        }
        let ring = ring_of(self.spans, self.ring, peer);
        let room = rail.free() > 0 && free > 0 && rail.span_room(ring) > 0;
        let (number, tag) = (rail.next, tag(rail.epoch, peer));
        let Some(qp) = rail.usable().filter(|_| room).map(Qp::pointer) else { return false };
        nothing(&mut self.wrs[0], tag | u64::from(number));
        let posted = self.post_list(qp.as_ptr(), 1);
        let rail = &mut self.rails[peer as usize];
        if let Some(why) = posted.failed {
            if why == PostError::Rail {
                (rail.broken, rail.proof) = (true, Proof::Bad);
            }
            return false;
        }
        rail.proving = true;
        let ring = ring_of(self.spans, self.ring, peer);
        rail.push(ring, Span { number, last: 0, wrs: 1, proof: true });
        rail.in_flight += 1;
        self.in_flight += 1;
        true
    }

    /// Whether the rail to `peer` works: `None` as long as its first proof is on the way.
    pub fn proof(&self, peer: u32) -> Option<bool> {
        match self.rails.get(peer as usize)?.proof {
            Proof::Unknown => None,
            Proof::Good => Some(true),
            Proof::Bad => Some(false),
        }
    }

    /// True while a proof is on its way to `peer`.
    pub fn is_proving(&self, peer: u32) -> bool {
        self.rails.get(peer as usize).is_some_and(|r| r.proving)
    }

    /// Work requests in flight on the rail to `peer`.
    pub fn in_flight(&self, peer: u32) -> u32 {
        self.rails.get(peer as usize).map_or(0, |r| r.in_flight)
    }

    /// A queue pair of a rail that was closed, for [`Qp::destroy`] where that may take its time. It
    /// is reset and touches no memory, so whether it can be destroyed matters to no transfer.
    pub fn take_grave(&mut self) -> Option<Qp> {
        self.graves.take()
    }

    /// Completions that belong to nothing that was posted.
    pub const fn strays(&self) -> u64 {
        self.strays
    }

    /// Work requests that the completion queue has room for: each may complete, also one that is
    /// not signalled, if it fails.
    fn free(&self) -> u32 {
        let entries = self.device.map_or(0, |d| d.entries);
        entries.saturating_sub(self.in_flight).saturating_sub(self.ghosts)
    }

    /// Posts the first `n` work requests as one list.
    fn post_list(&mut self, qp: *mut ibv_qp, n: usize) -> Posted {
        let first = link(self.wrs, self.sges, n);
        let mut bad = null_mut();
        // SAFETY: V22 and V24: the rail's own queue pair, and a list in the port's own arrays,
        // which the provider has copied when it returns. The memory that it names is registered
        // and held by the claim.
        let e = unsafe { post_send(qp, first, &raw mut bad) };
        if e == 0 {
            return Posted { wrs: n, failed: None, unknown: false };
        }
        // -1 and `errno`, of older providers.
        let e = if e < 0 { errno() } else { e };
        let offset = (bad as usize).wrapping_sub(first as usize);
        let wrs = offset / size_of::<ibv_send_wr>();
        if bad.is_null() || wrs >= n || !offset.is_multiple_of(size_of::<ibv_send_wr>()) {
            return Posted { wrs: 0, failed: Some(PostError::Rail), unknown: true };
        }
        let why = if e == libc::ENOMEM { PostError::Full } else { PostError::Rail };
        Posted { wrs, failed: Some(why), unknown: false }
    }

    /// Signals READs, or appends the flush to WRITEs. How many there are to post, and what a WRITE
    /// wrote last.
    fn finish<K: Keys>(&mut self, batch: &Batch<'_, K>, built: &Built, room: usize) -> usize {
        let n = built.wrs;
        match batch.direction {
            Direction::Read => {
                // The last one's span is kept free.
                let mut left = room - 1;
                let every = self.shape.signal_every as usize;
                for (i, wr) in self.wrs.iter_mut().take(n).enumerate() {
                    let due = (i + 1).is_multiple_of(every) && left > 0;
                    if due || i + 1 == n {
                        wr.send_flags = IBV_SEND_SIGNALED;
                        left -= usize::from(due && i + 1 < n);
                    }
                }
                n
            }
            Direction::Write => {
                let last = batch.first_wr.wrapping_add(built.ops as u32).wrapping_sub(1);
                let rail = &self.rails[batch.peer as usize];
                let (id, rkey) = (tag(rail.epoch, batch.peer) | u64::from(last), self.rkey(n - 1));
                let written = written(&batch.ops[built.ops - 1], rkey);
                self.flush(n, built.sges, id, written);
                n + 1
            }
        }
    }

    /// The remote key of a work request that was built.
    fn rkey(&self, wr: usize) -> u32 {
        // SAFETY: V24: `build` wrote this field of the union.
        unsafe { self.wrs[wr].wr.rdma.rkey }
    }

    /// Makes work request `at` a signalled READ of the end of what was written.
    fn flush(&mut self, at: usize, sge: usize, id: u64, from: Written) {
        let Some(device) = self.device else { return };
        let (addr, lkey) = (device.scratch, device.scratch_lkey);
        self.sges[sge] = ibv_sge { addr, length: from.len, lkey };
        let wr = &mut self.wrs[at];
        (wr.wr_id, wr.num_sge) = (id, 1);
        (wr.opcode, wr.send_flags) = (IBV_WR_RDMA_READ, IBV_SEND_SIGNALED);
        let rdma = ibv_send_wr_rdma { remote_addr: from.at, rkey: from.rkey };
        wr.wr = ibv_send_wr_wr { rdma };
    }

    /// Records what a post left in flight, and says what it took.
    fn account<K: Keys>(
        &mut self,
        batch: &Batch<'_, K>,
        built: &Built,
        posted: &Posted,
    ) -> Result<(), (u32, PostError)> {
        let peer = batch.peer;
        // Ops before work request `i`.
        let first_wr = batch.first_wr;
        let all = built.ops as u32;
        let before = |wrs: &[ibv_send_wr], i: usize| {
            if i < built.wrs {
                (wrs[i].wr_id as u32).wrapping_sub(first_wr)
            } else {
                all
            }
        };
        let rail = &mut self.rails[peer as usize];
        let ring = ring_of(self.spans, self.ring, peer);
        let mut silent = 0;
        for i in 0..posted.wrs {
            silent += 1;
            let wr = &self.wrs[i];
            if wr.send_flags & IBV_SEND_SIGNALED != 0 {
                let number = wr.wr_id as u32;
                let last = first_wr.wrapping_add(before(self.wrs, i + 1)).wrapping_sub(1);
                rail.push(ring, Span { number, last, wrs: silent, proof: false });
                silent = 0;
            }
        }
        let taken = before(self.wrs, posted.wrs);
        rail.next = first_wr.wrapping_add(taken);
        let mut count = posted.wrs as u32;
        if posted.unknown {
            // Nobody knows: room is kept for all of them until the rail is closed.
            count = built.wrs as u32 + 1;
        }
        if posted.failed == Some(PostError::Rail) {
            rail.broken = true;
        } else if silent > 0 {
            let written = match batch.direction {
                Direction::Read => None,
                Direction::Write => Some({
                    // SAFETY: V24: `build` wrote this field of the union.
                    let rkey = unsafe { self.wrs[posted.wrs - 1].wr.rdma.rkey };
                    written(&batch.ops[taken as usize - 1], rkey)
                }),
            };
            rail.owed = Some(Owed { silent, last: rail.next.wrapping_sub(1), written });
            self.chores += 1;
            count += 1;
        }
        rail.in_flight += count;
        self.in_flight += count;
        match (posted.failed, built.stop) {
            (Some(PostError::Rail), _) => Err((taken, PostError::Rail)),
            // Of everything that was built only the flush was refused: it is owed.
            (_, stop) if taken == all => match stop {
                Stop::Done => Ok(()),
                Stop::Full => Err((taken, PostError::Full)),
                Stop::Refused(status) => {
                    self.refuse(peer, first_wr.wrapping_add(all), status);
                    Ok(())
                }
            },
            _ => Err((taken, PostError::Full)),
        }
    }

    /// An op that cannot be posted is reported when all before it are done: whoever hears of it
    /// takes those for done.
    fn refuse(&mut self, peer: u32, number: u32, status: WrStatus) {
        self.rails[peer as usize].refused = Some((number, status));
        self.chores += 1;
    }

    /// Posts the marker that a rail owes. `Err`: the provider will not take it.
    fn pay(&mut self, peer: u32) -> Result<(), Completion> {
        let rail = &self.rails[peer as usize];
        let Some(owed) = rail.owed else { return Ok(()) };
        let room = rail.span_room(ring_of(self.spans, self.ring, peer)) > 0;
        let id = tag(rail.epoch, peer) | u64::from(owed.last);
        let Some(qp) = rail.usable().filter(|_| room).map(Qp::pointer) else { return Ok(()) };
        match owed.written {
            Some(written) => self.flush(0, 0, id, written),
            None => nothing(&mut self.wrs[0], id),
        }
        let posted = self.post_list(qp.as_ptr(), 1);
        let rail = &mut self.rails[peer as usize];
        match posted.failed {
            None => {
                let ring = ring_of(self.spans, self.ring, peer);
                let wrs = owed.silent + 1;
                rail.push(ring, Span { number: owed.last, last: owed.last, wrs, proof: false });
            }
            Some(PostError::Full) => return Ok(()),
            Some(PostError::Rail) => rail.broken = true,
        }
        rail.owed = None;
        self.chores -= 1;
        match posted.failed {
            None => Ok(()),
            Some(_) => {
                Err(Completion { peer, wr: owed.last, status: WrStatus::RailError, vendor: 0 })
            }
        }
    }

    /// Looks after the rails that owe a marker or have an op to refuse.
    fn look_after(&mut self) -> Option<Completion> {
        for peer in 0..self.rails.len() as u32 {
            if self.rails[peer as usize].chores() == 0 {
                continue;
            }
            if let Err(broken) = self.pay(peer) {
                return Some(broken);
            }
            let rail = &mut self.rails[peer as usize];
            if rail.in_flight > 0 || rail.broken {
                continue;
            }
            if let Some((wr, status)) = rail.refused.take() {
                self.chores -= 1;
                return Some(Completion { peer, wr, status, vendor: 0 });
            }
        }
        None
    }

    /// Takes completions out of the queue. False: there are none.
    fn take(&mut self) -> bool {
        let Some(device) = self.device else { return false };
        let most = self.taken.len();
        // SAFETY: V20 and V24: the device's own queue, whose lane this is; the array has `most`
        // places.
        let n = unsafe { poll_cq(device.cq, most as i32, self.taken.as_mut_ptr()) };
        let n = usize::try_from(n).unwrap_or(0).min(most);
        if n < most {
            // The queue was empty, and queue pairs that are gone or reset put nothing into it.
            self.ghosts = 0;
        }
        (self.at, self.end) = (0, n);
        n > 0
    }

    /// What a completion means, if it means anything to the engine.
    fn settle(&mut self, wc: &ibv_wc) -> Option<Completion> {
        let (epoch, peer, number) = split(wc.wr_id);
        let Some(rail) = self.rails.get_mut(peer as usize) else {
            self.strays += 1;
            return None;
        };
        if rail.epoch != epoch {
            self.ghosts = self.ghosts.saturating_sub(1);
            return None;
        }
        if rail.qp.as_ref().is_none_or(|qp| qp.number() != wc.qp_num) {
            self.strays += 1;
            return None;
        }
        if rail.broken {
            // Flushed: the first error named the culprit.
            return None;
        }
        let ring = ring_of(self.spans, self.ring, peer);
        let found = rail.find(ring, number);
        if wc.status != IBV_WC_SUCCESS {
            rail.broken = true;
            let proof = found.is_some_and(|(_, span)| span.proof);
            let first = proof && rail.proof == Proof::Unknown;
            if proof {
                (rail.proof, rail.proving) = (Proof::Bad, false);
            }
            // In an error only `wr_id`, status, queue pair and the vendor's code are written.
            let (status, vendor) = (classify(wc.status), vendor(wc));
            return (!first).then_some(Completion { peer, wr: number, status, vendor });
        }
        let Some((before, _)) = found else {
            self.strays += 1;
            return None;
        };
        let mut done = None;
        for _ in 0..=before {
            let Some(span) = rail.pop(ring) else { break };
            rail.in_flight = rail.in_flight.saturating_sub(span.wrs);
            self.in_flight = self.in_flight.saturating_sub(span.wrs);
            if span.proof {
                (rail.proof, rail.proving) = (Proof::Good, false);
            } else {
                done = Some(span.last);
            }
        }
        let wr = done?;
        Some(Completion { peer, wr, status: WrStatus::Success, vendor: 0 })
    }
}

impl Port for VerbsPort<'_> {
    fn access_error_breaks_rail(&self) -> bool {
        true
    }

    fn depth(&self) -> u32 {
        self.shape.depth
    }

    fn room(&self) -> u32 {
        // One for the flush.
        self.free().saturating_sub(1)
    }

    fn window_bytes(&self) -> u64 {
        WINDOW_CLAIMS * self.shape.batch_bytes
    }

    fn may_land_late(&self) -> bool {
        true
    }

    fn batch_bytes(&self) -> u64 {
        self.shape.batch_bytes
    }

    fn batch_ops(&self) -> u32 {
        self.shape.batch_ops
    }

    fn post<K: Keys>(&mut self, batch: &Batch<'_, K>) -> Result<(), (u32, PostError)> {
        let peer = batch.peer;
        if self.rails.get(peer as usize).is_none_or(|r| r.usable().is_none()) {
            return Err((0, PostError::Rail));
        }
        self.pay(peer).map_err(|_| (0, PostError::Rail))?;
        let rail = &self.rails[peer as usize];
        let room = rail.span_room(ring_of(self.spans, self.ring, peer));
        let flush = u32::from(batch.direction == Direction::Write);
        let wrs = rail.free().min(self.free()).saturating_sub(flush) as usize;
        if rail.chores() > 0 || room == 0 || wrs == 0 {
            return Err((0, PostError::Full));
        }
        let Some(qp) = rail.usable().map(Qp::pointer) else { return Err((0, PostError::Rail)) };
        let most = self.shape.batch_ops as usize;
        let limits = Limits {
            wrs,
            sges: rail.sges,
            bytes: rail.max_msg,
            lane: self.lane,
            rail: rail.rail,
            tag: tag(rail.epoch, peer),
        };
        let (to, pieces) = (&mut self.wrs[..most], &mut self.sges[..most]);
        let built = build(to, pieces, batch, &limits);
        if built.wrs == 0 {
            if let Stop::Refused(status) = built.stop {
                self.refuse(peer, batch.first_wr, status);
            }
            return Ok(());
        }
        let n = self.finish(batch, &built, room);
        let posted = self.post_list(qp.as_ptr(), n);
        self.account(batch, &built, &posted)
    }

    fn poll(&mut self) -> Option<Completion> {
        loop {
            if self.at == self.end {
                if self.chores > 0 {
                    if let Some(c) = self.look_after() {
                        return Some(c);
                    }
                }
                if !self.take() {
                    return None;
                }
            }
            let wc = self.taken[self.at];
            self.at += 1;
            if let Some(c) = self.settle(&wc) {
                return Some(c);
            }
        }
    }

    fn arm(&mut self) {
        let Some(device) = self.device else { return };
        // SAFETY: V20: the device's own queue, which has a channel. A failure means that the device
        // is gone, which it tells by an event.
        let _ = unsafe { req_notify_cq(device.cq, false) };
    }

    fn close(&mut self, peer: u32) -> bool {
        let Some(rail) = self.rails.get_mut(peer as usize) else { return true };
        let Some(qp) = rail.qp.take() else { return true };
        self.in_flight = self.in_flight.saturating_sub(rail.in_flight);
        self.ghosts += rail.in_flight;
        self.chores -= rail.chores();
        rail.reset();
        self.graves.end(qp)
    }
}

/// The ring of one rail.
fn ring_of(spans: &mut [Span], ring: usize, peer: u32) -> &mut [Span] {
    let from = peer as usize * ring;
    spans.get_mut(from..from + ring).unwrap_or_default()
}
