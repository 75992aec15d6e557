//! How lanes share a striped transfer out among themselves.
//!
//! Nobody knows how fast a rail is, and nobody plans. Each lane takes claims as long as it has no
//! more of the transfer in flight than its *part* of what has not arrived. Its part is what it
//! brought of all that arrived since it began: a rail at a quarter of the speed brings a quarter
//! as much, so it holds a quarter as much, and what the lanes hold ends at one time. A lane that
//! brought nothing yet may be slow: it holds an eighth of an equal part, or `FREE`.
//!
//! Where posting is slower than the rails, nothing is in flight when a lane comes by: then there
//! is nothing to wait for, and it takes as long a claim as it can.

use crate::engine::core::Core;
use crate::engine::lane::{Inner, Lane};
use crate::engine::slot::{Body, Slot};
use crate::nic::{Net, Port};
use crate::sync::Ordering;

/// Bytes of a transfer that any lane may hold before it has brought some. Shared out finer, the
/// work requests would cost more than the faster end saves: 64 KiB take 1.3 us at 400 Gbit/s.
const FREE: u64 = 64 << 10;
/// Bytes below which a lane with something to wait for takes no claim, unless that is the rest.
const LEAST: u64 = 32 << 10;
/// Bytes of a transfer after which what arrived before counts half, so that parts follow speeds.
const MEMORY: u64 = 32 << 20;

/// What one lane has to do with one transfer. Touched under the lane's token only.
#[derive(Clone, Copy, Debug, Default)]
pub struct Share {
    /// Which post of the slot this is about.
    post: u32,
    /// Bytes in flight.
    held: u64,
    /// Bytes that this lane brought, of those that arrived since `since`.
    brought: u64,
    /// Bytes that had arrived when this lane began.
    since: u64,
}

impl Share {
    /// The lane is about to look for a claim of a post, of which so many bytes arrived.
    pub(super) fn begin(&mut self, post: u32, arrived: u64) {
        if self.post != post {
            *self = Share { post, since: arrived, ..Share::default() };
        }
        self.fade(arrived);
    }

    /// A claim is in flight.
    pub(super) fn holds(&mut self, bytes: u64) {
        self.held += bytes;
    }

    /// It is not, unfinished.
    pub(super) fn drops(&mut self, bytes: u64) {
        self.held = self.held.saturating_sub(bytes);
    }

    /// It is finished. `arrived`: bytes of the transfer so far.
    pub(super) fn brings(&mut self, bytes: u64, arrived: u64) {
        self.drops(bytes);
        self.brought += bytes;
        self.fade(arrived);
    }

    /// What was long ago counts less, also for a lane that was away meanwhile: it may have become
    /// as fast as any.
    fn fade(&mut self, arrived: u64) {
        let mut all = arrived.saturating_sub(self.since);
        while all > MEMORY {
            self.brought /= 2;
            self.since += all / 2;
            all -= all / 2;
        }
    }

    /// Most bytes that the lane may hold: its part, and while it has something in flight half of
    /// that, so that it can be wrong about its speed. Of the transfer `missing` have not arrived
    /// and `arrived` have; it goes over `rails` rails.
    fn most(&self, missing: u64, arrived: u64, rails: u64) -> u64 {
        if self.brought == 0 {
            return (missing / (8 * rails)).max(FREE);
        }
        // As if each lane had brought something before, or the first to come by would think that
        // it is the only one.
        let all = arrived.saturating_sub(self.since).max(self.brought) + rails * FREE;
        let part = ((self.brought + FREE) << 10) / all;
        let part = missing.saturating_mul(part) >> 10;
        if self.held > 0 {
            (part / 2).max(part.min(FREE))
        } else {
            part
        }
    }
}

impl<'m, P: Port, N: Net> Core<'m, P, N> {
    /// Most ops that a lane may claim of the `remaining` ones of a transfer, if it could take up to
    /// `limit`. `None`: none now. Whoever it is left to has some of it in flight, or less of
    /// others, so somebody comes by when that is done.
    pub(super) fn part(
        &self,
        lane: &Lane<'m, P>,
        inner: &Inner<'m, P>,
        (index, slot, body): (u32, &Slot, &Body),
        remaining: u32,
        limit: u32,
    ) -> Option<u32> {
        let Some(share) = inner.shares.get(index as usize) else { return Some(remaining) };
        let mask = self.rails(body.peer);
        let rails = mask.count_ones();
        if rails < 2 {
            return Some(remaining);
        }
        let each = (body.bytes / u64::from(body.n_ops)).max(1);
        // A lane with much of other transfers in flight leaves the end of this one to a lane with
        // less.
        let load = |l: &Lane<'m, P>| l.outstanding.load(Ordering::Relaxed);
        let all = load(lane);
        let others = all.saturating_sub(share.held);
        if others > each * u64::from(remaining / (2 * rails))
            && self.lanes_of(mask).any(|l| l.has(index) && load(l) < all)
        {
            return None;
        }
        let arrived = slot.counters.bytes_done.load(Ordering::Relaxed);
        let missing = body.bytes.saturating_sub(arrived);
        let most = share.most(missing, arrived, rails.into());
        let ops = |bytes: u64| u32::try_from(bytes / each).unwrap_or(u32::MAX);
        let spare = most.saturating_sub(share.held);
        let room = ops(spare);
        // Nothing is in flight, so nobody would come by when it is done.
        if share.held == 0 && (share.brought == 0 || slot.left() <= remaining) {
            return Some(room.max(ops(FREE)).clamp(1, remaining));
        }
        let least = ops(LEAST).clamp(1, remaining.min(limit));
        // Nearly is enough, because what was brought comes in whole claims.
        if ops(spare + spare / 8) < least {
            return None;
        }
        // Not all of its part at once, so that it learns how fast it is while there is some left.
        let longest = ops(FREE).max(remaining / (4 * rails));
        Some(room.min(longest).clamp(least, remaining))
    }
}
