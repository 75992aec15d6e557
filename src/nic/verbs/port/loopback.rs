//! READs into memory of devices. That a READ is complete says that its bytes have left the NIC;
//! they may still be on their way to the device, where no reader has an order with them. A NIC that
//! *reads* the device's memory pushes its earlier writes before it (on PCIe a read does not pass a
//! posted write), so such a READ is told done when a READ of a few bytes of the same memory, by the
//! same NIC and begun after its completion, is done too.
//!
//! * Each rail has a queue pair of its own for that, which leads back to itself: it fails, is reset
//!   and is made anew with its rail, and harms no other one. Only engines with such memory have it.
//! * [`Landing`]s say which registrations READs were posted to that no flush has followed yet, and
//!   which ops these were. A registration is the unit: one may be of another device than the next.
//!   More of them than [`LANDINGS`] wait until some are flushed.
//! * A rail has one round of flushes in flight: one READ for each landing with a READ that is
//!   complete. What completes meanwhile, host memory too, waits for it and then for the next round.

use rdma_core_sys::*;

use super::{tag, vendor, VerbsPort};
use crate::nic::verbs::codes::{FLUSH, OF_FLUSH};
use crate::nic::verbs::qp::Qp;
use crate::nic::{Batch, Completion, Keys, PostError, WrStatus};

/// Most registrations of late memory that a rail reads into at a time, and so flush READs that it
/// has in flight: most claims of a KV cache are of one or two.
pub const LANDINGS: usize = 16;

/// A registration that READs of a rail go to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Landing {
    /// Its key for the NIC's own READ.
    rkey: u32,
    /// The end of what an op wrote there, and bytes.
    at: u64,
    len: u32,
    /// Oldest op that goes there and was not flushed, and the newest.
    first: u32,
    last: u32,
    /// A flush READ of it is in flight.
    asked: bool,
}

impl Landing {
    pub(super) const NONE: Landing =
        Landing { rkey: 0, at: 0, len: 0, first: 0, last: 0, asked: false };

    /// True when an op up to number `upto` went there. Numbers wrap.
    fn is_due(&self, upto: u32) -> bool {
        upto.wrapping_sub(self.first) <= u32::MAX / 2
    }

    /// Says that all up to number `upto` is in place. False: nothing is left.
    fn settle(&mut self, upto: u32) -> bool {
        self.asked = false;
        self.first = upto.wrapping_add(1);
        self.is_due(self.last)
    }
}

const _: () = assert!(LANDINGS < u8::MAX as usize);

/// How a round of flush READs could be posted.
enum Asked {
    /// Nothing is to be flushed.
    Nothing,
    /// They are on their way.
    Posted,
    /// There is no room now.
    Full,
    /// The rail is broken.
    Rail,
}

impl VerbsPort<'_> {
    /// From now on memory where READs land late may be registered. A rail without a loopback queue
    /// pair takes no READ into it: the first peer with such a rail.
    pub fn expect_device_memory(&mut self) -> Option<u32> {
        self.device_memory = true;
        let lacks = |r: &super::Rail| r.qp.is_some() && r.echo.qp.is_none();
        self.rails.iter().position(lacks).map(|peer| peer as u32)
    }

    /// True when the rail to `peer` is connected and has no loopback queue pair.
    pub fn lacks_loopback(&self, peer: u32) -> bool {
        self.rails.get(peer as usize).is_some_and(|r| r.qp.is_some() && r.echo.qp.is_none())
    }

    /// Gives the rail to `peer` the queue pair that leads back to itself, on the lane's own device.
    /// It is given back where there is no rail or it has one; else the port owns it, as it does the
    /// rail's.
    pub fn loop_back(&mut self, peer: u32, qp: Qp) -> Option<Qp> {
        match self.rails.get_mut(peer as usize) {
            Some(rail) if rail.qp.is_some() && rail.echo.qp.is_none() => {
                rail.echo.qp = Some(qp);
                None
            }
            _ => Some(qp),
        }
    }

    fn landings(&mut self, peer: u32) -> &mut [Landing] {
        let from = peer as usize * LANDINGS;
        let n = self.rails.get(peer as usize).map_or(0, |r| r.landings);
        self.landings.get_mut(from..from + n).unwrap_or_default()
    }

    /// Posts READs, some of which may go to late memory, as far as that can be flushed. The engines
    /// without such memory, and WRITEs, do not come here.
    #[inline(never)]
    pub(super) fn post_landings<K: Keys>(
        &mut self,
        batch: &Batch<'_, K>,
    ) -> Result<(), (u32, PostError)> {
        let fit = self.fit(batch);
        let part = Batch { ops: &batch.ops[..fit], keys: batch.keys, ..*batch };
        let result = if fit == 0 { Ok(()) } else { self.post_all(&part) };
        let (taken, result) = match result {
            Ok(()) if fit < batch.ops.len() => (fit, Err((fit as u32, PostError::Full))),
            Ok(()) => (fit, Ok(())),
            Err((n, why)) => (n as usize, Err((n, why))),
        };
        // What is refused is told behind all others, and those after it are not posted.
        let refused = self.rails.get(batch.peer as usize).and_then(|r| r.refused);
        let end = refused.map_or(taken, |(wr, _)| wr.wrapping_sub(batch.first_wr) as usize);
        let taken = taken.min(end);
        self.note(&Batch { ops: &batch.ops[..taken], ..part });
        result
    }

    /// How many of the ops, from the first on, go to memory of which a flush can be noted.
    fn fit<K: Keys>(&mut self, batch: &Batch<'_, K>) -> usize {
        let lane = self.lane;
        let loops = self.rails.get(batch.peer as usize).is_some_and(|r| r.echo.qp.is_some());
        let (mut known, mut n) = ([0; LANDINGS], 0);
        for landing in self.landings(batch.peer) {
            (known[n], n) = (landing.rkey, n + 1);
        }
        for (i, op) in batch.ops.iter().enumerate() {
            let Some(rkey) = key(batch.keys, op, lane) else { continue };
            if known[..n].contains(&rkey) {
                continue;
            }
            if n == LANDINGS || !loops {
                return i;
            }
            (known[n], n) = (rkey, n + 1);
        }
        batch.ops.len()
    }

    /// Notes where the ops go, all of which were posted or refused.
    fn note<K: Keys>(&mut self, batch: &Batch<'_, K>) {
        let (lane, peer) = (self.lane, batch.peer);
        for (i, op) in batch.ops.iter().enumerate() {
            let Some(rkey) = key(batch.keys, op, lane) else { continue };
            let number = batch.first_wr.wrapping_add(i as u32);
            let len = op.len.min(FLUSH);
            let at = op.local + u64::from(op.len - len);
            let landings = self.landings(peer);
            if let Some(known) = landings.iter_mut().find(|l| l.rkey == rkey) {
                (known.last, known.at, known.len) = (number, at, len);
                continue;
            }
            // There is room: `fit` saw that.
            let place = peer as usize * LANDINGS + landings.len();
            if let Some(new) = self.landings.get_mut(place) {
                *new = Landing { rkey, at, len, first: number, last: number, asked: false };
                self.rails[peer as usize].landings += 1;
            }
        }
    }

    /// Ops up to number `wr` came in, on a rail with landings.
    #[inline(never)]
    pub(super) fn landed(&mut self, peer: u32, wr: u32) -> Option<Completion> {
        let echo = &mut self.rails[peer as usize].echo;
        echo.arrived = Some(wr);
        if echo.asked == 0 && self.at < self.end {
            // More may have come in: one round for all of it.
            self.set_due(peer, true);
            return None;
        }
        self.flush_landings(peer)
    }

    fn set_due(&mut self, peer: u32, due: bool) {
        let was = core::mem::replace(&mut self.rails[peer as usize].echo.due, due);
        self.chores = self.chores + u32::from(due) - u32::from(was);
    }

    /// A work request failed. What is before it came in, so whose fault it is can be told when that
    /// is flushed; a rail that failed is told at once, as nothing before it is taken for done.
    pub(super) fn failed(&mut self, c: Completion) -> Option<Completion> {
        let rail = &mut self.rails[c.peer as usize];
        if c.status == WrStatus::RailError || rail.landings == 0 {
            return Some(c);
        }
        rail.echo.arrived = Some(c.wr.wrapping_sub(1));
        rail.echo.culprit = Some(c);
        self.flush_landings(c.peer)
    }

    /// Flushes what came in, or tells it if nothing is to be flushed. What is in flight goes first.
    pub(super) fn flush_landings(&mut self, peer: u32) -> Option<Completion> {
        let echo = &self.rails[peer as usize].echo;
        let upto = echo.arrived.filter(|_| echo.asked == 0)?;
        let asked = self.ask(peer, upto);
        self.set_due(peer, matches!(asked, Asked::Full));
        let rail = &mut self.rails[peer as usize];
        match asked {
            Asked::Posted | Asked::Full => None,
            Asked::Rail => {
                rail.broken = true;
                Some(Completion { peer, wr: upto, status: WrStatus::RailError, vendor: 0 })
            }
            Asked::Nothing => {
                rail.echo.arrived = None;
                let done = Completion { peer, wr: upto, status: WrStatus::Success, vendor: 0 };
                Some(rail.echo.culprit.take().unwrap_or(done))
            }
        }
    }

    /// Posts a READ of each landing with an op up to number `upto`.
    fn ask(&mut self, peer: u32, upto: u32) -> Asked {
        let due = self.landings(peer).iter().filter(|l| l.is_due(upto)).count();
        if due == 0 {
            return Asked::Nothing;
        }
        let (rail, Some(device)) = (&self.rails[peer as usize], self.device) else {
            return Asked::Rail;
        };
        let Some(qp) = &rail.echo.qp else { return Asked::Rail };
        let (qp, depth) = (qp.pointer(), qp.granted().depth);
        let n = due.min(self.free().min(depth) as usize).min(self.list.parts().0.len());
        if n == 0 {
            return Asked::Full;
        }
        let id = tag(rail.epoch, peer) | u64::from(upto);
        // Also puts each work request's piece back into its place.
        self.list.aim(IBV_WR_RDMA_READ);
        let from = peer as usize * LANDINGS;
        let noted = &self.landings[from..from + rail.landings];
        for (i, landing) in noted.iter().filter(|l| l.is_due(upto)).take(n).enumerate() {
            let (addr, lkey) = (device.scratch, device.scratch_lkey);
            *self.list.sge(i) = ibv_sge { addr, length: landing.len, lkey };
            let wr = self.list.wr(i);
            (wr.wr_id, wr.send_flags) = (id, IBV_SEND_SIGNALED);
            let rdma = ibv_send_wr_rdma { remote_addr: landing.at, rkey: landing.rkey };
            wr.wr = ibv_send_wr_wr { rdma };
        }
        let posted = self.list.post(qp.as_ptr(), n, n);
        (0..n).for_each(|i| self.list.plain(i));
        let in_flight = if posted.unknown { n } else { posted.wrs } as u32;
        let asked = self.landings(peer).iter_mut().filter(|l| l.is_due(upto)).take(posted.wrs);
        asked.for_each(|l| l.asked = true);
        let rail = &mut self.rails[peer as usize];
        (rail.echo.asked, rail.echo.upto) = (posted.wrs as u32, upto);
        rail.in_flight += in_flight;
        self.in_flight += in_flight;
        match posted.failed {
            Some(PostError::Rail) => Asked::Rail,
            // The others go with the next round.
            _ if posted.wrs > 0 => Asked::Posted,
            _ => Asked::Full,
        }
    }

    /// A completion that is not of the rail's queue pair for data.
    #[inline(never)]
    pub(super) fn echoed(&mut self, wc: &ibv_wc, peer: u32) -> Option<Completion> {
        let rail = &mut self.rails[peer as usize];
        if rail.echo.qp.as_ref().is_none_or(|qp| qp.number() != wc.qp_num) || rail.echo.asked == 0 {
            self.strays += 1;
            return None;
        }
        if rail.broken && rail.echo.culprit.is_none() {
            // The failure was told.
            return None;
        }
        let upto = rail.echo.upto;
        if wc.status != IBV_WC_SUCCESS {
            // Nobody's memory is to blame: the same READ was done with the same registration.
            (rail.broken, rail.echo.culprit) = (true, None);
            let (status, vendor) = (WrStatus::RailError, vendor(wc) | OF_FLUSH);
            return Some(Completion { peer, wr: upto, status, vendor });
        }
        rail.echo.asked -= 1;
        rail.in_flight = rail.in_flight.saturating_sub(1);
        let asked = rail.echo.asked;
        self.in_flight = self.in_flight.saturating_sub(1);
        if asked > 0 {
            return None;
        }
        self.settle_landings(peer, upto);
        // What could not be asked with these is not done yet.
        let whole = !self.landings(peer).iter().any(|l| l.is_due(upto));
        let done = Completion { peer, wr: upto, status: WrStatus::Success, vendor: 0 };
        self.flush_landings(peer).or_else(|| whole.then_some(done))
    }

    /// The landings that were asked have all up to number `upto`.
    fn settle_landings(&mut self, peer: u32, upto: u32) {
        let landings = self.landings(peer);
        let mut left = 0;
        for i in 0..landings.len() {
            let mut landing = landings[i];
            if !landing.asked || landing.settle(upto) {
                (landings[left], left) = (landing, left + 1);
            }
        }
        self.rails[peer as usize].landings = left;
    }
}

/// The key for the flush of an op's memory; `None` where none is needed.
fn key<K: Keys>(keys: &K, op: &crate::table::Op, lane: u32) -> Option<u32> {
    if !keys.lands_late(op.local_region) {
        return None;
    }
    keys.own_rkey(op.local_region, lane, op.local)
}
