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

mod loopback;
mod proof;

use core::fmt;

use rdma_core_sys::*;

use super::build::{build, Built, Limits, Stop};
use super::codes::{classify, nothing, split, tag, vendor, written};
use super::device::Handle;
use super::grave::Graves;
use super::list::{List, Posted};
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

use loopback::Landing;
pub use loopback::LANDINGS;

/// One lane of the verbs driver.
///
/// It owns the queue pairs that it was given until [`Port::close`] ends them; then they are to be
/// destroyed ([`VerbsPort::take_grave`]). Close all peers before the port goes.
pub struct VerbsPort<'m> {
    lane: u32,
    shape: Shape,
    device: Option<Handle>,
    list: List<'m>,
    taken: &'m mut [ibv_wc],
    rails: &'m mut [Rail],
    /// A ring for each rail.
    spans: &'m mut [Span],
    ring: usize,
    /// [`LANDINGS`] for each rail.
    landings: &'m mut [Landing],
    /// Memory may be registered here where READs land late.
    device_memory: bool,
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
            list: List::new(arena, wrs)?,
            taken: arena.array(TAKE, |_| ibv_wc::zeroed())?,
            rails: arena.array(peers as usize, |_| Rail::new())?,
            spans: arena.array((peers as usize).checked_mul(ring)?, |_| Span::NONE)?,
            ring,
            landings: arena.array((peers as usize).checked_mul(LANDINGS)?, |_| Landing::NONE)?,
            device_memory: false,
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

    /// Signals READs, or appends the flush to WRITEs.
    fn finish<K: Keys>(
        &mut self,
        batch: &Batch<'_, K>,
        built: &Built,
        signals: impl Iterator<Item = usize>,
    ) {
        match batch.direction {
            Direction::Read => {
                for i in signals {
                    self.list.wr(i).send_flags = IBV_SEND_SIGNALED;
                }
            }
            Direction::Write => {
                let n = built.wrs;
                let last = batch.first_wr.wrapping_add(built.ops as u32).wrapping_sub(1);
                let rail = &self.rails[batch.peer as usize];
                let id = tag(rail.epoch, batch.peer) | u64::from(last);
                let rkey = self.rkey(n - 1);
                let written = written(&batch.ops[built.ops - 1], rkey);
                self.flush(n, built.sges, id, written);
            }
        }
    }

    /// Which of `n` work requests are signalled, with room for `room` spans: of READs one in each
    /// `signal_every`, and the last; of WRITEs the flush behind them.
    fn signals(
        &self,
        direction: Direction,
        n: usize,
        room: usize,
    ) -> impl Iterator<Item = usize> + Clone + use<> {
        let every = match direction {
            Direction::Read => self.shape.signal_every as usize,
            Direction::Write => n,
        };
        // The last one's span is kept free; it has as many before it as the others at least.
        let between = (every - 1..n.saturating_sub(every)).step_by(every).take(room - 1);
        between.chain(core::iter::once(n - 1))
    }

    /// The remote key of a work request that was built.
    fn rkey(&mut self, wr: usize) -> u32 {
        // SAFETY: V24: `build` wrote this field of the union.
        unsafe { self.list.wr(wr).wr.rdma.rkey }
    }

    /// Makes work request `at` a signalled READ of the end of what was written.
    fn flush(&mut self, at: usize, sge: usize, id: u64, from: Written) {
        let Some(device) = self.device else { return };
        let (addr, lkey) = (device.scratch, device.scratch_lkey);
        *self.list.sge(sge) = ibv_sge { addr, length: from.len, lkey };
        let wr = self.list.wr(at);
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
        signals: impl Iterator<Item = usize>,
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
        let wrs = self.list.parts().0;
        let rail = &mut self.rails[peer as usize];
        let ring = ring_of(self.spans, self.ring, peer);
        let mut settled = 0;
        for i in signals {
            // Only the post needed it.
            wrs[i].send_flags = 0;
            if i < posted.wrs {
                let number = wrs[i].wr_id as u32;
                let last = first_wr.wrapping_add(before(wrs, i + 1)).wrapping_sub(1);
                rail.push(ring, Span { number, last, wrs: (i + 1 - settled) as u32, proof: false });
                settled = i + 1;
            }
        }
        let silent = (posted.wrs - settled) as u32;
        let taken = before(wrs, posted.wrs);
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
                    let rkey = unsafe { wrs[posted.wrs - 1].wr.rdma.rkey };
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
            None => nothing(self.list.wr(0), id),
        }
        let posted = self.list.post(qp.as_ptr(), 1, 1);
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

    fn post_all<K: Keys>(&mut self, batch: &Batch<'_, K>) -> Result<(), (u32, PostError)> {
        let peer = batch.peer;
        if self.rails.get(peer as usize).is_none_or(|r| r.usable().is_none()) {
            // Broken by a culprit that waits for a flush: it is told first, or it would go on.
            let waits = self.rails.get(peer as usize).is_some_and(|r| r.echo.culprit.is_some());
            return Err((0, if waits { PostError::Full } else { PostError::Rail }));
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
        self.list.aim(match batch.direction {
            Direction::Read => IBV_WR_RDMA_READ,
            Direction::Write => IBV_WR_RDMA_WRITE,
        });
        let (to, pieces) = self.list.parts();
        let built = build(&mut to[..most], &mut pieces[..most], batch, &limits);
        if built.wrs == 0 {
            if let Stop::Refused(status) = built.stop {
                self.refuse(peer, batch.first_wr, status);
            }
            return Ok(());
        }
        let n = built.wrs + flush as usize;
        let signals = self.signals(batch.direction, n, room);
        self.finish(batch, &built, signals.clone());
        let posted = self.list.post(qp.as_ptr(), n, built.sges + flush as usize);
        self.account(batch, &built, &posted, signals)
    }

    /// Looks after the rails that owe a marker or a flush, or have an op to refuse.
    fn look_after(&mut self) -> Option<Completion> {
        for peer in 0..self.rails.len() as u32 {
            if self.rails[peer as usize].chores() == 0 {
                continue;
            }
            if let Err(broken) = self.pay(peer) {
                return Some(broken);
            }
            if self.rails[peer as usize].echo.due {
                if let Some(c) = self.flush_landings(peer) {
                    return Some(c);
                }
            }
            let rail = &mut self.rails[peer as usize];
            if rail.in_flight > 0 || rail.landings > 0 || rail.broken {
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
            return self.echoed(wc, peer);
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
            let failed = Completion { peer, wr: number, status, vendor };
            return if first { None } else { self.failed(failed) };
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
        if rail.landings > 0 {
            return self.landed(peer, wr);
        }
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
        if self.device_memory && batch.direction == Direction::Read {
            return self.post_landings(batch);
        }
        self.post_all(batch)
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
        let echo = rail.echo.qp.take();
        self.in_flight = self.in_flight.saturating_sub(rail.in_flight);
        self.ghosts += rail.in_flight;
        self.chores -= rail.chores();
        rail.reset();
        // Both, whatever becomes of the first.
        let ended = self.graves.end(qp);
        echo.is_none_or(|qp| self.graves.end(qp)) && ended
    }
}

/// The ring of one rail.
fn ring_of(spans: &mut [Span], ring: usize, peer: u32) -> &mut [Span] {
    let from = peer as usize * ring;
    spans.get_mut(from..from + ring).unwrap_or_default()
}
