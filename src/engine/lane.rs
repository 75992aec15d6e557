//! A lane: one local NIC port, the rails on it, and the transfers that are published to it.

use crate::engine::arena::Arena;
use crate::engine::bits::Bits;
use crate::engine::ledger::Ledger;
use crate::engine::state::State;
use crate::engine::stripe::Share;
use crate::engine::token::PollToken;
use crate::sync::{AtomicU32, AtomicU64, Ordering, UnsafeCell};

/// Most claims in flight on one lane, over all its rails.
pub const LANE_CLAIMS: u32 = 256;

/// One rail as its lane sees it.
#[derive(Debug)]
pub struct Rail {
    /// What is in flight.
    pub ledger: Ledger,
    /// Connected and proven, for peers of this generation (0: not connected).
    pub generation: u32,
    /// The transfer that found no credits, or a full queue, first, as it was then: it has the next
    /// ones. Else whoever comes by when they are there would, round after round.
    pub turn: Option<(u32, State)>,
    /// Transfers whose WRITEs the rail before it may still bring to the peer, each with a hold,
    /// until the peer has fenced it.
    pub debts: Debts,
}

/// Transfer slots with a hold each.
pub type Debts = heapless::Vec<u32, { crate::engine::ledger::CLAIMS }>;

/// What only the token holder touches.
#[derive(Debug)]
pub struct Inner<'m, P> {
    /// The driver's port.
    pub port: P,
    /// Rail per peer slot.
    pub rails: &'m mut [Rail],
    /// Claims in flight over all rails.
    pub claims: u32,
    /// Where the round over published transfers goes on.
    pub next: u32,
    /// Of each transfer slot, when transfers are striped; else none.
    pub shares: &'m mut [Share],
}

/// Counters that anybody may read.
#[derive(Debug, Default)]
pub struct LaneStats {
    /// Bytes that READs brought.
    pub bytes_read: AtomicU64,
    /// Bytes that WRITEs took out.
    pub bytes_written: AtomicU64,
    /// Work requests completed.
    pub work_requests: AtomicU64,
    /// Claims taken.
    pub claims: AtomicU64,
    /// Bytes of all claims, those that failed included.
    pub bytes_posted: AtomicU64,
    /// Error completions.
    pub errors: AtomicU64,
}

impl LaneStats {
    /// Bytes of all claims so far.
    pub fn posted(&self) -> u64 {
        self.bytes_posted.load(Ordering::Relaxed)
    }
}

/// One lane. Threads that post at the same time hold different ones, so none shares a cache line
/// with another, nor with the line beside it, which is fetched too.
#[derive(Debug)]
#[repr(align(128))]
pub struct Lane<'m, P> {
    /// Which one.
    pub index: u32,
    /// Who may touch `inner`.
    pub token: PollToken,
    /// Bytes posted and not retired: where stripe width 1 looks for the idlest lane.
    pub outstanding: AtomicU64,
    /// Debts of all its rails: who looks for some need not wait for the token where there are none.
    pub owing: AtomicU32,
    /// For `rail_info`.
    pub stats: LaneStats,
    active: Bits<'m>,
    inner: UnsafeCell<Inner<'m, P>>,
}

// SAFETY: I2: `inner` is touched only by the token holder; the rest is atomic.
unsafe impl<P: Send> Sync for Lane<'_, P> {}

impl<'m, P> Lane<'m, P> {
    /// Lane `index` over `port` for `peers` peers and `transfers` transfer slots, striped ones if
    /// `stripes`.
    pub fn new(
        arena: &mut Arena<'m>,
        index: u32,
        port: P,
        (peers, transfers): (u32, u32),
        stripes: bool,
    ) -> Option<Lane<'m, P>> {
        let rails = arena.array(peers as usize, |_| Rail {
            ledger: Ledger::new(),
            generation: 0,
            turn: None,
            debts: Debts::new(),
        })?;
        let shares = if stripes { transfers as usize } else { 0 };
        let shares = arena.array(shares, |_| Share::default())?;
        Some(Lane {
            index,
            token: PollToken::new(),
            outstanding: AtomicU64::new(0),
            owing: AtomicU32::new(0),
            stats: LaneStats::default(),
            active: Bits::new(arena, transfers)?,
            inner: UnsafeCell::new(Inner { port, rails, claims: 0, next: 0, shares }),
        })
    }

    /// What the token guards.
    ///
    /// # Safety
    /// The caller holds the token until it stops using the reference, and asks once only (I2).
    #[allow(clippy::mut_from_ref, reason = "the token is the lock")]
    pub unsafe fn inner(&self) -> &mut Inner<'m, P> {
        // SAFETY: I2: exclusive by the token.
        unsafe { &mut *self.inner.get() }
    }

    /// Takes a rail's debts. The caller holds the token.
    pub fn take_debts(&self, rail: &mut Rail) -> Debts {
        let debts = core::mem::take(&mut rail.debts);
        self.owing.fetch_sub(debts.len() as u32, Ordering::AcqRel);
        debts
    }

    /// True when any rail of it owes.
    pub fn owes(&self) -> bool {
        self.owing.load(Ordering::Acquire) != 0
    }

    /// Publishes a transfer to this lane. True when it was not published to it already.
    pub fn set(&self, slot: u32) -> bool {
        self.active.set(slot)
    }

    /// Takes a transfer off this lane. The caller looks at its cursor again afterwards: a post may
    /// have come between.
    pub fn clear(&self, slot: u32) {
        self.active.clear(slot);
    }

    /// True while a transfer is published to this lane.
    pub fn has(&self, slot: u32) -> bool {
        self.next_active(slot) == Some(slot)
    }

    /// The next published slot at or after `from`, without wrapping.
    pub fn next_active(&self, from: u32) -> Option<u32> {
        self.active.next(from)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::Lane;

    #[test]
    fn lanes_share_no_cache_line() {
        assert_eq!((align_of::<Lane<'_, u8>>(), size_of::<Lane<'_, u8>>() % 128), (128, 0));
    }
}
