//! The hot path: a lane's token holder claims ops, turns them into work requests, and retires
//! completions.

use crate::engine::core::Core;
use crate::engine::cursor::Seen;
use crate::engine::lane::{Inner, Lane, LANE_CLAIMS};
use crate::engine::ledger::Claim;
use crate::engine::region::BothRegions;
use crate::engine::slot::{Body, Settled, Slot};
use crate::engine::state::{Phase, State};
use crate::mutant::mutant;
use crate::nic::{Batch, Completion, Net, Port, PostError, WrStatus};
use crate::status::Status;
use crate::sync::Ordering;
use crate::table::{Direction, Op};

/// What serving one transfer on one lane came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Served {
    /// A claim was posted.
    Claimed,
    /// Nothing to claim for this lane now.
    Nothing,
}

impl<'m, P: Port, N: Net> Core<'m, P, N> {
    /// One round over one lane: completions, then one claim for each published transfer, until
    /// about one batch of bytes was posted, so that nobody waits long for the token. False when
    /// another thread holds the token or nothing moved.
    pub fn poll_lane(&self, index: u32) -> bool {
        let lane = &self.lanes[index as usize];
        if !lane.token.try_take() {
            return false;
        }
        // SAFETY: I2: token taken above, given back below, asked once.
        let inner = unsafe { lane.inner() };
        lane.token.look();
        let mut moved = self.reap(lane, inner);
        let mut claimed = false;
        // The round begins behind the one that was served last, so that nobody is always last.
        let start = inner.next;
        let budget = lane.stats.posted() + inner.port.batch_bytes();
        'round: for (mut from, end) in [(start, u32::MAX), (0, start)] {
            while let Some(slot) = lane.next_active(from).filter(|&s| s < end) {
                if claimed {
                    // Credits for the next one. Behind the last the next round looks.
                    self.reap(lane, inner);
                }
                if self.serve(lane, inner, slot) == Served::Claimed {
                    claimed = true;
                    inner.next = slot + 1;
                    if lane.stats.posted() >= budget {
                        break 'round;
                    }
                }
                from = slot + 1;
            }
        }
        moved |= claimed;
        if moved {
            // There may be more, and whoever polls in the background may have looked away
            // meanwhile.
            lane.token.publish();
        }
        let again = lane.token.give_back();
        if again {
            self.worker.wake();
        }
        moved | again
    }

    /// Carries one small transfer of `ops` ops on the calling thread, which need not be published.
    /// False when the lane is busy.
    pub(super) fn carry_now(&self, index: u32, slot: u32, ops: u32) -> bool {
        let lane = &self.lanes[index as usize];
        if !lane.token.try_take() {
            return false;
        }
        // SAFETY: I2: token taken above, given back below, asked once.
        let inner = unsafe { lane.inner() };
        while self.serve(lane, inner, slot) == Served::Claimed {
            self.reap(lane, inner);
            if !self.slots[slot as usize].has_unclaimed(ops) {
                break;
            }
        }
        if lane.token.give_back() {
            self.worker.wake();
        }
        true
    }

    /// Lowers a hold and does what the last one out must do.
    pub(super) fn leave(&self, index: u32) {
        let slot = &self.slots[index as usize];
        match slot.leave() {
            Settled::Nothing => {}
            Settled::Landed(state) => self.landed(index, state),
            Settled::Ended(state) => self.ended(slot, state),
        }
    }

    /// Takes the next claim of one transfer and posts it.
    fn serve(&self, lane: &Lane<'m, P>, inner: &mut Inner<'m, P>, index: u32) -> Served {
        let slot = &self.slots[index as usize];
        slot.enter();
        if let Some(seen) = slot.look() {
            // SAFETY: I3: we hold the slot and saw the cursor open after that.
            let body = unsafe { slot.body() };
            if let Some(claim) = self.claim(lane, inner, (index, slot, &body), seen) {
                return self.post_claim(lane, inner, &body, claim);
            }
        } else {
            self.retract(lane, index);
        }
        self.leave(index);
        Served::Nothing
    }

    /// A claim for this lane, or `None`. The caller holds the slot, saw its cursor open, and keeps
    /// the hold for the claim.
    fn claim(
        &self,
        lane: &Lane<'m, P>,
        inner: &mut Inner<'m, P>,
        (index, slot, body): (u32, &Slot, &Body),
        mut seen: Seen,
    ) -> Option<Claim> {
        let rail = &inner.rails[body.peer as usize];
        if rail.generation != body.peer_generation {
            self.share(lane, index, body.peer);
            return None;
        }
        if !self.has_turn(lane, inner, body.peer, index) {
            return None;
        }
        let begins = seen.next() == 0 && slot.returns.is_empty();
        if begins && self.awaits_fence(inner, body) {
            return None;
        }
        let depth = inner.port.depth();
        let rail = &mut inner.rails[body.peer as usize];
        let credits = rail.ledger.credits(depth);
        if credits == 0 {
            rail.turn.get_or_insert((index, slot.state.load()));
        }
        let full = lane.outstanding.load(Ordering::Relaxed) >= inner.port.window_bytes();
        if credits == 0 || full || inner.claims >= LANE_CLAIMS {
            return None;
        }
        // SAFETY: I3: as above; the pool keeps the ops until release.
        let ops = unsafe { core::slice::from_raw_parts(body.ops, body.n_ops as usize) };
        let limit = credits.min(inner.port.batch_ops()).min(inner.port.room());
        if limit == 0 {
            return None;
        }
        if let Some(share) = inner.shares.get_mut(index as usize) {
            share.begin(seen.post(), slot.counters.bytes_done.load(Ordering::Relaxed));
        }
        if let Some((first, count)) = self.take_return(slot) {
            let (take, bytes) = sized(ops, first, count.min(limit), inner.port.batch_bytes());
            if take < count {
                self.give_return(slot, first + take, count - take);
            }
            return Some(Claim { slot: index, first, count: take, bytes });
        }
        loop {
            let first = seen.next();
            let remaining = body.n_ops - first.min(body.n_ops);
            if remaining == 0 {
                self.retract(lane, index);
                return None;
            }
            let part = self.part(lane, inner, (index, slot, body), remaining, limit)?;
            let most = limit.min(part);
            let (count, bytes) = sized(ops, first, most, inner.port.batch_bytes());
            match slot.cursor.claim(seen, count) {
                Ok(()) => return Some(Claim { slot: index, first, count, bytes }),
                Err(Some(now)) => seen = now,
                Err(None) => {
                    self.retract(lane, index);
                    return None;
                }
            }
        }
    }

    /// Whether a transfer that has not begun must wait: an earlier one may have had WRITEs to the
    /// same place on a rail that is not fenced, and have ended in an error without waiting for
    /// that. What is under way already has its own debts.
    fn awaits_fence(&self, inner: &Inner<'m, P>, body: &Body) -> bool {
        body.direction == Direction::Write
            && inner.port.may_land_late()
            && self.peers[body.peer as usize].book.unsafe_lanes() != 0
    }

    /// Whether a transfer may take credits of the rail to its peer: none waits for them longer.
    fn has_turn(
        &self,
        lane: &Lane<'m, P>,
        inner: &mut Inner<'m, P>,
        peer: u32,
        index: u32,
    ) -> bool {
        let rail = &mut inner.rails[peer as usize];
        let Some((first, seen)) = rail.turn else { return true };
        // The same post of the same transfer, and it will come by here.
        let waits = self.slots[first as usize].state.load() == seen && lane.has(first);
        if first != index && waits {
            return false;
        }
        rail.turn = None;
        true
    }

    /// A lane has no rail for a transfer: those that have one may carry it. Without any it waits
    /// here until a rail is up. A striped transfer stays published here too, for when the rail
    /// comes back. Publishes once, so that what waits for a reconnect keeps nobody awake.
    fn share(&self, lane: &Lane<'m, P>, index: u32, peer: u32) {
        let rails = self.rails(peer) & !(1 << lane.index);
        let Some(idlest) = self.idlest(rails, index) else { return };
        let chosen = if self.tuning.stripe_all { rails } else { 1 << idlest };
        for other in self.lanes_of(chosen) {
            if other.set(index) {
                other.token.publish();
                self.worker.wake();
            }
        }
        if !self.tuning.stripe_all {
            // The caller holds the slot, so nobody posts it again between.
            lane.clear(index);
        }
    }

    /// Takes a transfer off the lane, unless it was posted again (or got claims back) meanwhile.
    fn retract(&self, lane: &Lane<'m, P>, index: u32) {
        let slot = &self.slots[index as usize];
        lane.clear(index);
        if slot.cursor.look().is_none() {
            return;
        }
        // SAFETY: I3: the caller holds the slot, and the cursor was open just now.
        let n_ops = unsafe { slot.body() }.n_ops;
        if slot.has_unclaimed(n_ops) {
            lane.set(index);
        }
    }

    /// Where ops become work requests: the driver builds one for each, in the rail's own ring.
    fn post_claim(
        &self,
        lane: &Lane<'m, P>,
        inner: &mut Inner<'m, P>,
        body: &Body,
        claim: Claim,
    ) -> Served {
        let slot = &self.slots[claim.slot as usize];
        // SAFETY: I3: the claim is a hold.
        let ops = unsafe { core::slice::from_raw_parts(body.ops, body.n_ops as usize) };
        let ops = &ops[claim.first as usize..(claim.first + claim.count) as usize];
        let rail = &mut inner.rails[body.peer as usize];
        let Some(first_wr) = rail.ledger.record(claim) else {
            // Cannot happen: credits were there, and the token is ours.
            self.give_return(slot, claim.first, claim.count);
            self.leave(claim.slot);
            return Served::Nothing;
        };
        inner.claims += 1;
        if let Some(share) = inner.shares.get_mut(claim.slot as usize) {
            share.holds(claim.bytes);
        }
        lane.outstanding.fetch_add(claim.bytes, Ordering::Relaxed);
        lane.stats.claims.fetch_add(1, Ordering::Relaxed);
        lane.stats.bytes_posted.fetch_add(claim.bytes, Ordering::Relaxed);
        let keys = BothRegions::new(&self.local, &self.remote);
        let batch =
            Batch { peer: body.peer, direction: body.direction, ops, first_wr, keys: &keys };
        let Err((posted, why)) = inner.port.post(&batch) else { return Served::Claimed };
        if why == PostError::Rail {
            // Perhaps more is in flight than the port knows of, so the claim stays whole: it goes
            // back when the rail is closed, and counts as begun.
            self.blame(lane, inner, body.peer, 0);
            self.rail_failed(lane, inner, body.peer);
            return Served::Nothing;
        }
        let rail = &mut inner.rails[body.peer as usize];
        if posted == 0 && rail.ledger.outstanding() > claim.count {
            // Others fill the queue though there are credits: the same as where there are none.
            rail.turn.get_or_insert((claim.slot, slot.state.load()));
        }
        let unposted = claim.count - posted.min(claim.count);
        let bytes = ops[posted as usize..].iter().map(|o| u64::from(o.len)).sum();
        lane.outstanding.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(share) = inner.shares.get_mut(claim.slot as usize) {
            share.drops(bytes);
        }
        self.give_return(slot, claim.first + posted, unposted);
        if inner.rails[body.peer as usize].ledger.unrecord(unposted, bytes) {
            inner.claims -= 1;
            self.leave(claim.slot);
        }
        // Something is in flight: who polls comes back, at once where the driver works in `post`.
        if posted > 0 {
            Served::Claimed
        } else {
            Served::Nothing
        }
    }

    /// Where completions retire claims, and the last one makes a transfer "done" (`Slot::arrived`,
    /// `Slot::leave`).
    pub(super) fn reap(&self, lane: &Lane<'m, P>, inner: &mut Inner<'m, P>) -> bool {
        let mut moved = false;
        while let Some(c) = inner.port.poll() {
            moved = true;
            match c.status {
                WrStatus::Success => self.retire(lane, inner, c.peer, c.wr.wrapping_add(1)),
                WrStatus::RailError => {
                    lane.stats.errors.fetch_add(1, Ordering::Relaxed);
                    self.blame(lane, inner, c.peer, c.vendor);
                    self.rail_failed(lane, inner, c.peer);
                }
                WrStatus::RemoteAccess => self.culprit(lane, inner, c, Status::RemoteAccess),
                WrStatus::LocalAccess => self.culprit(lane, inner, c, Status::LocalAccess),
                WrStatus::Permission => self.culprit(lane, inner, c, Status::Permission),
            }
        }
        moved
    }

    /// Work requests before `end` on the rail to `peer` succeeded.
    fn retire(&self, lane: &Lane<'m, P>, inner: &mut Inner<'m, P>, peer: u32, end: u32) {
        while let Some(r) = inner.rails[peer as usize].ledger.retire_before(end) {
            let slot = &self.slots[r.ops.slot as usize];
            if r.last {
                // SAFETY: I3: the claim that is being retired is a hold.
                carried(lane, unsafe { slot.direction() }, r.ops.bytes);
            }
            lane.stats.work_requests.fetch_add(u64::from(r.ops.count), Ordering::Relaxed);
            lane.outstanding.fetch_sub(r.ops.bytes, Ordering::Relaxed);
            slot.arrived(r.ops.count, r.ops.bytes);
            if r.last {
                inner.claims -= 1;
                if let Some(share) = inner.shares.get_mut(r.ops.slot as usize) {
                    share.brings(r.ops.bytes, slot.counters.bytes_done.load(Ordering::Relaxed));
                }
                self.leave(r.ops.slot);
            }
        }
    }

    /// A claim is out of flight unfinished. Of its bytes, which are counted whole at its end, those
    /// arrived whose ops are not in it any more. The caller keeps the claim's hold.
    fn abandoned(&self, lane: &Lane<'m, P>, inner: &mut Inner<'m, P>, claim: &Claim) {
        inner.claims -= 1;
        if let Some(share) = inner.shares.get_mut(claim.slot as usize) {
            share.drops(claim.bytes);
        }
        lane.outstanding.fetch_sub(claim.bytes, Ordering::Relaxed);
        let slot = &self.slots[claim.slot as usize];
        // SAFETY: I3: the claim is a hold.
        let body = unsafe { slot.body() };
        // SAFETY: I3: as above; the pool keeps the ops until release.
        let ops = unsafe { core::slice::from_raw_parts(body.ops, body.n_ops as usize) };
        let rest = ops.iter().skip(claim.first as usize).take(claim.count as usize);
        let missing = rest.map(|o| u64::from(o.len)).sum();
        let arrived = claim.bytes.saturating_sub(missing);
        slot.counters.bytes_done.fetch_add(arrived, Ordering::Relaxed);
        carried(lane, body.direction, arrived);
    }

    /// One work request was refused for its own sake: its transfer ends, the first bad pair is
    /// kept.
    fn culprit(&self, lane: &Lane<'m, P>, inner: &mut Inner<'m, P>, c: Completion, status: Status) {
        lane.stats.errors.fetch_add(1, Ordering::Relaxed);
        self.retire(lane, inner, c.peer, c.wr);
        let Some(op) = inner.rails[c.peer as usize].ledger.find(c.wr) else { return };
        let slot = &self.slots[op.slot as usize];
        // SAFETY: I3: the claim that failed is a hold.
        let body = unsafe { slot.body() };
        if op.first < body.n_ops {
            // SAFETY: I3: inside the ops of a held transfer.
            let pair = unsafe { (*body.ops.add(op.first as usize)).first_pair() };
            slot.counters.failed_pair.fetch_min(u64::from(pair), Ordering::Relaxed);
        }
        slot.counters.blame(lane.index, c.vendor);
        slot.end(status);
        if inner.port.access_error_breaks_rail() {
            self.rail_failed(lane, inner, c.peer);
            return;
        }
        // The rail lives: the rest of the failed claim was flushed with it.
        if let Some(claim) = inner.rails[c.peer as usize].ledger.drop_front(c.wr) {
            self.abandoned(lane, inner, &claim);
            self.give_return(slot, claim.first, claim.count);
            self.leave(claim.slot);
        }
    }

    /// Every transfer with something in flight on a rail that breaks keeps why, unless it had
    /// another reason before.
    fn blame(&self, lane: &Lane<'m, P>, inner: &Inner<'m, P>, peer: u32, vendor: u32) {
        for slot in inner.rails[peer as usize].ledger.slots() {
            self.slots[slot as usize].counters.blame(lane.index, vendor);
        }
    }

    /// A rail broke: it is closed, and what it had not finished goes to the other lanes of each
    /// transfer. One with WRITEs among that keeps a hold until the peer has fenced the rail.
    pub(super) fn rail_failed(&self, lane: &Lane<'m, P>, inner: &mut Inner<'m, P>, peer: u32) {
        let ended = self.close_port(lane, inner, peer);
        // Neighbours go back as one entry: a lane takes a transfer's ops in order, so without
        // striping one transfer leaves one.
        let mut run: Option<(Claim, u32)> = None;
        loop {
            let next = inner.rails[peer as usize].ledger.drain();
            if let Some(claim) = &next {
                self.slots[claim.slot as usize].keep(!ended);
                self.abandoned(lane, inner, claim);
                self.owe(lane, inner, peer, claim);
            }
            match (&mut run, next) {
                (Some((r, holds)), Some(c)) if c.slot == r.slot && c.first == r.first + r.count => {
                    r.count += c.count;
                    *holds += 1;
                }
                (_, next) => {
                    if let Some((r, holds)) = run {
                        self.hand_back(lane, r, holds);
                    }
                    let Some(claim) = next else { break };
                    run = Some((claim, 1));
                }
            }
        }
        // What waits here without a claim in flight is looked at once more, and shared out then.
        lane.token.publish();
        self.worker.wake();
        self.lose(peer, lane.index);
    }

    /// A transfer whose WRITEs may still land keeps a hold of its own until the fence. The caller
    /// keeps the claim's hold.
    fn owe(&self, lane: &Lane<'m, P>, inner: &mut Inner<'m, P>, peer: u32, claim: &Claim) {
        let slot = &self.slots[claim.slot as usize];
        // SAFETY: I3: the claim is a hold.
        let body = unsafe { slot.body() };
        let late = body.direction == Direction::Write && inner.port.may_land_late();
        let debts = &mut inner.rails[peer as usize].debts;
        if !late || debts.contains(&claim.slot) || mutant("no_debt") {
            return;
        }
        slot.enter();
        if debts.push(claim.slot).is_err() {
            // Cannot happen: the rail's claims fit, and those of the rail before it are settled
            // when a rail is connected.
            slot.end(Status::NoRail);
            self.leave(claim.slot);
            return;
        }
        lane.owing.fetch_add(1, Ordering::AcqRel);
    }

    /// As [`Port::close`]: true where nothing that the rail carried touches memory after this.
    fn close_port(&self, lane: &Lane<'m, P>, inner: &mut Inner<'m, P>, peer: u32) -> bool {
        let ended = inner.port.close(peer);
        inner.rails[peer as usize].generation = 0;
        self.peers[peer as usize].rails.fetch_and(!(1 << lane.index), Ordering::AcqRel);
        ended
    }

    /// Unfinished ops of a transfer become anybody's, and the claims' holds are lowered.
    fn hand_back(&self, lane: &Lane<'m, P>, ops: Claim, holds: u32) {
        let slot = &self.slots[ops.slot as usize];
        self.give_return(slot, ops.first, ops.count);
        // This lane looks at it once more, and shares it out.
        lane.set(ops.slot);
        (0..holds).for_each(|_| self.leave(ops.slot));
    }

    /// Control side: breaks a rail whose work requests do not complete, as if the port had said so.
    pub fn fail_rail(&self, index: u32, peer: u32) {
        let lane = &self.lanes[index as usize];
        self.with_lane(index, |inner| {
            if inner.rails[peer as usize].generation != 0 {
                lane.stats.errors.fetch_add(1, Ordering::Relaxed);
                self.blame(lane, inner, peer, 0);
                self.rail_failed(lane, inner, peer);
            }
        });
    }

    /// Control side: the number of the oldest op in flight on a rail; `None`: nothing is. The same
    /// number twice means no progress between.
    pub fn oldest(&self, index: u32, peer: u32) -> Option<u32> {
        self.with_lane(index, |inner| {
            let ledger = &inner.rails[peer as usize].ledger;
            let n = ledger.outstanding();
            (n > 0).then(|| ledger.next_wr().wrapping_sub(n))
        })
    }

    /// Asks every port and the message streams for an event at the next completion. Whoever is
    /// about to sleep polls once more after it. True: it should not sleep for long, as something
    /// waits that no event will tell.
    pub fn arm(&self) -> bool {
        for lane in 0..self.lanes.len() as u32 {
            self.with_port(lane, Port::arm);
        }
        self.with_net(Net::arm)
    }

    /// Control side: closes the rail to a peer on one lane and ends what it carried. What it owed
    /// has ended already.
    pub(super) fn close_rail(&self, index: u32, peer: u32, status: Status) {
        let lane = &self.lanes[index as usize];
        self.with_lane(index, |inner| {
            self.reap(lane, inner);
            let ended = self.close_port(lane, inner, peer);
            while let Some(claim) = inner.rails[peer as usize].ledger.drain() {
                self.slots[claim.slot as usize].keep(!ended);
                self.abandoned(lane, inner, &claim);
                self.slots[claim.slot as usize].end(status);
                self.give_return(&self.slots[claim.slot as usize], claim.first, claim.count);
                self.leave(claim.slot);
            }
            for slot in lane.take_debts(&mut inner.rails[peer as usize]) {
                self.slots[slot as usize].end(status);
                self.leave(slot);
            }
        });
    }

    fn take_return(&self, slot: &Slot) -> Option<(u32, u32)> {
        if slot.returns.is_empty() {
            return None;
        }
        let i = slot.returns.pop(self.return_links)?;
        let ops = self.returns[i as usize].ops.load(Ordering::Acquire);
        self.return_free.push(self.return_links, i);
        Some(((ops >> 32) as u32, ops as u32))
    }

    fn give_return(&self, slot: &Slot, first: u32, count: u32) {
        if count == 0 {
            return;
        }
        // See `Limits::returns` for when they can run out.
        let Some(i) = self.return_free.pop(self.return_links) else {
            slot.counters.unsure.store(true, Ordering::Relaxed);
            slot.end(Status::NoRail);
            return;
        };
        let ops = (u64::from(first) << 32) | u64::from(count);
        self.returns[i as usize].ops.store(ops, Ordering::Release);
        slot.returns.push(self.return_links, i);
    }

    /// Nothing of a failed transfer is in flight: what did not arrive is marked, its message goes
    /// back, then the error is told.
    fn ended(&self, slot: &Slot, state: State) {
        // SAFETY: I3: the last one out owns the slot alone until it publishes the end.
        let body = unsafe { slot.body() };
        while let Some((first, count)) = self.take_return(slot) {
            // SAFETY: I3: as above, and with it the ops, which claims are runs of.
            unsafe { body.mark(first, count, true) };
        }
        self.drop_message(slot);
        slot.state.change(state, state.to(Phase::Ended, state.status));
    }
}

/// Counts bytes that a lane has carried.
fn carried<P>(lane: &Lane<'_, P>, direction: Direction, bytes: u64) {
    let total = match direction {
        Direction::Read => &lane.stats.bytes_read,
        Direction::Write => &lane.stats.bytes_written,
    };
    total.fetch_add(bytes, Ordering::Relaxed);
}

/// How many of `ops[first..first + most]` fit `bytes` (at least one), and how many bytes they have.
fn sized(ops: &[Op], first: u32, most: u32, bytes: u64) -> (u32, u64) {
    let run = &ops[first as usize..(first + most) as usize];
    // A walk that stops where it is too much costs four times as much as the sum.
    let all = run.iter().map(|op| u64::from(op.len)).sum();
    if all <= bytes {
        return (most, all);
    }
    let (mut n, mut sum) = (0, 0);
    for op in run {
        let next = sum + u64::from(op.len);
        if n > 0 && next > bytes {
            break;
        }
        n += 1;
        sum = next;
    }
    (n, sum)
}
