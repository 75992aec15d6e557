//! A transfer's life: a slot at prepare, posts, checks, cancel, release.

use crate::engine::core::Core;
use crate::engine::peer::Link;
use crate::engine::slot::{Body, RegionRef};
use crate::engine::stack::NONE;
use crate::engine::state::{Phase, State};
use crate::handle::{Handle, Kind};
use crate::mutant::mutant;
use crate::nic::{Net, Port};
use crate::status::Status;
use crate::sync::{fence, Ordering};

/// A transfer's counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Info {
    /// What check answers.
    pub status: Status,
    /// Descriptor pairs.
    pub descriptors: u64,
    /// Work requests after coalescing and slicing.
    pub work_requests: u64,
    /// Bytes in all.
    pub bytes: u64,
    /// Bytes that arrived, of the last post.
    pub bytes_done: u64,
    /// Work requests that completed, of the last post.
    pub work_requests_done: u64,
    /// First pair that failed, `u64::MAX` if none.
    pub failed_pair: u64,
    /// Nanoseconds inside the last post call.
    pub post_ns: u64,
    /// Pairs that arrived whole, of the last post. While it is in progress an estimate from the
    /// work requests.
    pub descriptors_done: u64,
    /// The first rail that failed under the last post: its lane and the provider's code, which is
    /// 0 when the rail was given up for its silence. A transfer may be done in spite of it.
    pub cause: Option<(u32, u32)>,
    /// Something of the last post was given to a NIC, so its destination may have been written.
    pub touched: bool,
}

impl<'m, P: Port, N: Net> Core<'m, P, N> {
    /// Gives a prepared body a slot. `Err` hands it back: all `max_transfers` slots are taken.
    pub fn adopt(&self, body: Body) -> Result<Handle, Body> {
        let Some(index) = self.slot_free.pop(self.slot_links) else { return Err(body) };
        let slot = &self.slots[index as usize];
        let free = slot.state.load();
        // SAFETY: I3: popped just now; no handle of this life exists.
        unsafe { slot.set_body(body) };
        slot.arm(body.n_ops);
        slot.state.change(free, free.to(Phase::Idle, Status::NotPosted));
        if self.slots_used.fetch_add(1, Ordering::Relaxed) == 0 {
            // The host watches for stalls as long as there are transfers.
            self.host.wake();
        }
        Ok(Handle::new(Kind::Transfer, index, free.generation))
    }

    /// The slot index and state of a raw transfer handle.
    pub(super) fn transfer(&self, raw: u64) -> Result<(u32, State), Status> {
        let handle = Handle::parse(raw, Kind::Transfer).ok_or(Status::Invalid)?;
        let slot = self.slots.get(handle.index() as usize).ok_or(Status::Invalid)?;
        let state = slot.state.load();
        if state.generation != handle.generation() || state.phase == Phase::Free {
            return Err(Status::Stale);
        }
        Ok((handle.index(), state))
    }

    /// Posts a transfer that is at rest, with a message for the peer if there is one. Never waits.
    ///
    /// `Err` is a refusal: the transfer stays as it was. A failure of the transfer itself shows in
    /// the status.
    pub fn post(&self, raw: u64, message: Option<&[u8]>) -> Result<Status, Status> {
        let (index, state) = self.transfer(raw)?;
        let slot = &self.slots[index as usize];
        if !state.phase.at_rest() || !slot.state.change(state, state.next_post()) {
            return Err(Status::Busy);
        }
        let posting = state.next_post();
        // SAFETY: I3: we made it `Posting`, so nobody releases it.
        let body = unsafe { slot.body() };
        // What is refused leaves the transfer at rest, in a state with the new epoch.
        let refuse = |status| {
            slot.state.change(posting, posting.to(state.phase, state.status));
            Err(status)
        };
        // Whoever closes a region closes it first and then looks for transfers that are posting or
        // active (`quiesce`); we say first that we are posting and then look whether all is
        // open.
        if !mutant("post_fence") {
            fence(Ordering::SeqCst);
        }
        if !self.regions_open(&body) {
            return refuse(Status::Stale);
        }
        let peer = self.peer_state(body.peer);
        if peer.generation != body.peer_generation {
            return refuse(Status::Stale);
        }
        if peer.link == Link::Dead {
            return refuse(peer.status);
        }
        let note = match message.map(|m| self.compose(body.peer, body.peer_generation, m)) {
            None => NONE,
            Some(Ok(m)) => m.raw(),
            Some(Err(status)) => return refuse(status),
        };
        slot.enter();
        if state.phase == Phase::Ended {
            // SAFETY: I3: we made it `Posting` and its cursor is closed, so nobody looks at them.
            unsafe { body.mark(0, body.n_ops, false) };
        }
        slot.arm(body.n_ops);
        slot.message.store(note, Ordering::Release);
        slot.cursor.open();
        slot.state.change(posting, posting.to(Phase::Active, Status::InProgress));
        // Whoever closes a peer closes it first, then looks for active transfers, then closes its
        // rails, which ends every claim; we are active first and then look whether it is
        // there.
        if !mutant("peer_fence") {
            fence(Ordering::SeqCst);
        }
        let peer = self.peer_state(body.peer);
        if peer.link == Link::Dead || peer.generation != body.peer_generation {
            slot.end(if peer.status.is_err() { peer.status } else { Status::Disconnected });
        } else if body.n_ops == 0 {
            slot.arrived(0, 0);
        } else {
            self.publish(index, &body);
        }
        self.leave(index);
        Ok(slot.state.load().answer())
    }

    fn regions_open(&self, body: &Body) -> bool {
        // SAFETY: I3: the caller holds the slot; the pool keeps the list until release.
        let regions = unsafe { core::slice::from_raw_parts(body.regions, body.n_regions as usize) };
        regions.iter().all(|r| {
            let table = if r.remote { &self.remote } else { &self.local };
            table.is_open(r.slot, r.generation)
        })
    }

    /// Shows a transfer to the lanes it may use; a small one is carried at once, if its lane is
    /// free.
    fn publish(&self, index: u32, body: &Body) {
        let rails = self.rails(body.peer);
        let Some(first) = self.idlest(rails, index) else {
            // Not connected: it waits at any lane, which moves it on when a rail is up (`share`).
            // The lane looks after this, or a rail that came up just now had looked too early.
            let Some(lane) = self.lanes.first() else { return };
            lane.set(index);
            if !mutant("park_quiet") {
                lane.token.publish();
            }
            self.worker.wake();
            return;
        };
        let slot = &self.slots[index as usize];
        slot.home.store(first, Ordering::Relaxed);
        if body.bytes <= self.tuning.inline_bytes && self.carry_now(first, index, body.n_ops) {
            if slot.state.phase() != Phase::Active {
                return;
            }
            if !slot.has_unclaimed(body.n_ops) {
                // In flight as a whole: nobody needs to look at it, only at what completes.
                self.lanes[first as usize].token.publish();
                self.worker.wake();
                return;
            }
        }
        let chosen = if self.tuning.stripe_all { rails } else { 1 << first };
        for lane in self.lanes_of(chosen) {
            lane.set(index);
        }
        for lane in self.lanes_of(chosen) {
            lane.token.publish();
        }
        self.worker.wake();
    }

    /// The lane with the least outstanding bytes, of those with a rail. Of equal ones it depends on
    /// the transfer's slot, so that threads whose transfers are under way at one time do not all
    /// come to the same.
    pub(super) fn idlest(&self, rails: u32, index: u32) -> Option<u32> {
        let lanes = (self.lanes.len() as u32).max(1);
        let start = index % lanes;
        let key = |l: &&crate::engine::lane::Lane<'_, P>| {
            let behind = if l.index < start { l.index + lanes } else { l.index };
            (l.outstanding.load(Ordering::Relaxed), behind)
        };
        self.lanes_of(rails).min_by_key(key).map(|l| l.index)
    }

    /// Where a transfer stands: one atomic load. Without a background thread it polls first: the
    /// lane that the transfer was posted to, and the others only if nothing moved there, so that
    /// threads which wait for transfers on different rails write to different memory. Every 16th
    /// time it looks at all of them all the same, for what nobody waits for.
    pub fn check(&self, raw: u64) -> Result<Status, Status> {
        let (index, state) = self.transfer(raw)?;
        if state.answer() != Status::InProgress || self.tuning.background {
            return Ok(state.answer());
        }
        let slot = &self.slots[index as usize];
        let looks = slot.looks.load(Ordering::Relaxed);
        // Threads that ask about one transfer may lose counts, which only count time.
        slot.looks.store(looks.wrapping_add(1), Ordering::Relaxed);
        let home = slot.home.load(Ordering::Relaxed);
        let near = !self.tuning.stripe_all && !looks.is_multiple_of(16);
        if !(near && self.poll_lane(home)) {
            self.poll();
        }
        self.transfer(raw).map(|(_, s)| s.answer())
    }

    /// Stops claiming; the transfer ends with `Cancelled` as soon as nothing of it is in flight. A
    /// transfer at rest, and one whose message is on its way, is left alone.
    pub fn cancel(&self, raw: u64) -> Result<(), Status> {
        let (index, state) = self.transfer(raw)?;
        let slot = &self.slots[index as usize];
        slot.enter();
        slot.end_seen(state, Status::Cancelled);
        self.leave(index);
        Ok(())
    }

    /// Ends a transfer's life. `Ok`: nothing touches its memory any more, and the body is the
    /// caller's to free. A message that only has to be handed over goes out without it. `Busy`: it
    /// is not at rest; cancel it and poll.
    pub fn release(&self, raw: u64) -> Result<Body, Status> {
        let (index, state) = self.transfer(raw)?;
        let slot = &self.slots[index as usize];
        // All data is in place and nobody is inside: whoever hands the message over took it off the
        // slot, and changes this very state or none.
        let taken = slot.message.load(Ordering::Acquire) == NONE;
        let leaving = state.phase == Phase::Notifying && taken;
        if (!state.phase.at_rest() && !leaving) || slot.counters.kept.load(Ordering::Relaxed) {
            return Err(Status::Busy);
        }
        let closing = state.to(Phase::Closing, state.status);
        if !slot.state.change(state, closing) {
            return Err(Status::Busy);
        }
        // SAFETY: I3: we made it `Closing`, so nobody else releases or posts it.
        let body = unsafe { slot.body() };
        slot.state.change(closing, closing.next_life());
        self.slots_used.fetch_sub(1, Ordering::Relaxed);
        self.slot_free.push(self.slot_links, index);
        Ok(body)
    }

    /// Whether a device did not let go of a queue pair that carried a transfer, which is `Busy` for
    /// good then.
    pub fn is_kept(&self, raw: u64) -> bool {
        let slot = self.transfer(raw).map(|(index, _)| &self.slots[index as usize]);
        slot.is_ok_and(|slot| slot.counters.kept.load(Ordering::Relaxed))
    }

    /// Counts of a transfer.
    pub fn info(&self, raw: u64) -> Result<Info, Status> {
        let (index, state) = self.transfer(raw)?;
        let slot = &self.slots[index as usize];
        // SAFETY: I3: the handle's owner does not release it during its own call.
        let body = unsafe { slot.body() };
        let c = &slot.counters;
        let work_requests_done = match state.phase {
            Phase::Idle => 0,
            _ => u64::from(body.n_ops.saturating_sub(slot.left())),
        };
        let (pairs, all) = (body.descriptors, u64::from(body.n_ops));
        let descriptors_done = match state.phase {
            Phase::Done => pairs,
            Phase::Ended => {
                let mut missing = 0;
                self.missing(raw, |first, last| missing += last - first + 1)?;
                pairs - missing
            }
            _ => pairs.saturating_mul(work_requests_done).checked_div(all).unwrap_or(0),
        };
        Ok(Info {
            descriptors_done,
            cause: c.cause(),
            touched: state.phase != Phase::Idle && slot.cursor.claimed() > 0,
            status: state.answer(),
            descriptors: body.descriptors,
            work_requests: u64::from(body.n_ops),
            bytes: body.bytes,
            bytes_done: c.bytes_done.load(Ordering::Relaxed),
            work_requests_done,
            failed_pair: c.failed_pair.load(Ordering::Relaxed),
            post_ns: c.post_ns.load(Ordering::Relaxed),
        })
    }

    /// Calls `f` with the first and the last of each run of pairs that did not arrive whole in the
    /// last post of a transfer at rest, in order and apart. `Busy`: it is in progress.
    pub fn missing(&self, raw: u64, mut f: impl FnMut(u64, u64)) -> Result<(), Status> {
        let (index, state) = self.transfer(raw)?;
        let slot = &self.slots[index as usize];
        // SAFETY: I3: the handle's owner does not release it during its own call.
        let body = unsafe { slot.body() };
        let none = match state.phase {
            Phase::Done => return Ok(()),
            Phase::Idle => true,
            Phase::Ended => slot.counters.unsure.load(Ordering::Relaxed),
            _ => return Err(Status::Busy),
        };
        if none {
            if body.descriptors > 0 {
                f(0, body.descriptors - 1);
            }
            return Ok(());
        }
        // SAFETY: I3: at rest nobody changes them, and the owner does not post it during this call.
        let ops = unsafe { core::slice::from_raw_parts(body.ops, body.n_ops as usize) };
        let claimed = slot.cursor.claimed() as usize;
        let mut run: Option<(u64, u64)> = None;
        for (i, op) in ops.iter().enumerate().filter(|(i, op)| *i >= claimed || op.is_missing()) {
            let first = u64::from(op.first_pair());
            let last = ops.get(i + 1).map_or(body.descriptors.saturating_sub(1), |next| {
                let next_pair = u64::from(next.first_pair());
                if next.is_inside() {
                    next_pair
                } else {
                    next_pair.saturating_sub(1)
                }
            });
            match &mut run {
                Some((_, end)) if first <= *end + 1 => *end = last.max(*end),
                _ => {
                    if let Some((a, b)) = run.replace((first, last)) {
                        f(a, b);
                    }
                }
            }
        }
        if let Some((a, b)) = run {
            f(a, b);
        }
        Ok(())
    }

    /// Keeps what the host measured around a post. Descriptor pairs, work requests and bytes of
    /// the transfer.
    pub fn posted(&self, raw: u64, ns: u64) -> Result<(u64, u64, u64), Status> {
        let (index, _) = self.transfer(raw)?;
        let slot = &self.slots[index as usize];
        slot.counters.post_ns.store(ns, Ordering::Relaxed);
        // SAFETY: I3: the handle's owner does not release it during its own call.
        let body = unsafe { slot.body() };
        Ok((body.descriptors, u64::from(body.n_ops), body.bytes))
    }

    /// Ends the transfers that use a region which was closed just now. `Busy` while something may
    /// still be in flight: poll and ask again.
    pub fn quiesce(&self, region: RegionRef) -> Result<(), Status> {
        fence(Ordering::SeqCst);
        // One that is being posted may have found the region open, and rails may claim of it before
        // it could be ended. Asked before the walk, which finds whoever is active by then;
        // asked after it, one that became active meanwhile would pass both.
        let late = mutant("quiesce_late");
        let posting = !late && self.any(Phase::Posting);
        self.end_where(Status::Cancelled, |body| body.uses(region));
        let posting = posting || (late && self.any(Phase::Posting));
        // Those that were ended (by us or anybody) may still have claims in flight.
        if posting || self.is_carried(region) {
            return Err(Status::Busy);
        }
        Ok(())
    }

    fn any(&self, phase: Phase) -> bool {
        self.slots.iter().any(|s| s.state.load().phase == phase)
    }

    /// An active transfer that uses a region.
    pub fn first_user(&self, region: RegionRef) -> Option<Handle> {
        let mut user = None;
        let mut uses = |slot, body: &Body| {
            // While it is held: later the slot may be another transfer's.
            user = body.uses(region).then(|| self.transfer_handle(slot));
            user.is_some()
        };
        self.under_way(&[Phase::Active], &mut uses).or_else(|| self.debtor(&mut uses));
        user
    }

    fn transfer_handle(&self, index: u32) -> Handle {
        let generation = self.slots[index as usize].state.load().generation;
        Handle::new(Kind::Transfer, index, generation)
    }
}

/// How far a transfer was at one look: equal marks mean no progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    state: State,
    left: u32,
}

impl<'m, P: Port, N: Net> Core<'m, P, N> {
    /// How far the transfer in a slot is, while it is in progress.
    pub fn mark(&self, index: u32) -> Option<Mark> {
        let slot = self.slots.get(index as usize)?;
        let state = slot.state.load();
        matches!(state.phase, Phase::Active | Phase::Landed | Phase::Notifying)
            .then(|| Mark { state, left: slot.left() })
    }

    /// Ends a transfer that is still where the mark says.
    pub fn expire(&self, index: u32, mark: Mark) -> bool {
        let slot = &self.slots[index as usize];
        if mark.state.phase == Phase::Notifying {
            // All data is there; the message stays queued and may still arrive.
            let ended = mark.state.to(Phase::Ended, Status::Stalled);
            return slot.state.change(mark.state, ended);
        }
        slot.enter();
        let same = slot.state.load() == mark.state && slot.left() == mark.left;
        let ended = same && slot.end_seen(mark.state, Status::Stalled);
        self.leave(index);
        ended
    }

    /// Slot of the peer that a transfer goes to.
    pub fn peer_of(&self, raw: u64) -> Option<u32> {
        let (index, _) = self.transfer(raw).ok()?;
        // SAFETY: I3: the handle's owner does not release it during its own call.
        Some(unsafe { self.slots[index as usize].body() }.peer)
    }
}
