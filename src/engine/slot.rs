//! A transfer slot, and the rules by which several threads may work on it.
//!
//! *Holds.* `inflight` counts holds: one per claim in flight, one per thread that is changing the
//! transfer. Whoever wants to read the ops raises it first, and reads them only if the cursor is
//! open after that. Whoever ends a transfer changes the phase, closes the cursor, and only then
//! lowers its own hold. So when the last hold is lowered, the cursor of an ending transfer is
//! closed and nobody is inside; whoever raises later sees it closed. `inflight`
//! moves by read-modify-write only, which is what carries these orders from thread to thread.
//!
//! *Settling.* The last one out settles: `Landed` becomes `Notifying` (the winner hands the message
//! over), `Ending` becomes `Closing` (the winner tidies up and publishes the error). A terminal
//! phase is thus published only when nothing is in flight.

use crate::engine::cursor::{Cursor, Seen};
use crate::engine::stack::{IndexStack, NONE};
use crate::engine::state::{Phase, State, StateWord};
use crate::mutant::mutant;
use crate::status::Status;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Guarded, Ordering};
use crate::table::{Direction, Op};

/// A region that a prepared transfer names, with the generation that it had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct RegionRef {
    /// Slot in the local or remote region table.
    pub slot: u32,
    /// Generation when the transfer was prepared.
    pub generation: u32,
    /// True for the remote table.
    pub remote: bool,
}

/// What prepare decided. Constant from prepare to release.
#[derive(Clone, Copy, Debug)]
pub struct Body {
    /// The ops, in the pool.
    pub ops: *const Op,
    /// How many.
    pub n_ops: u32,
    /// Distinct regions, in the pool.
    pub regions: *const RegionRef,
    /// How many.
    pub n_regions: u32,
    /// READ or WRITE.
    pub direction: Direction,
    /// Peer slot.
    pub peer: u32,
    /// Generation of the peer when the transfer was prepared.
    pub peer_generation: u32,
    /// Bytes in all.
    pub bytes: u64,
    /// Descriptor pairs.
    pub descriptors: u64,
}

impl Body {
    /// The body of a slot that holds nothing.
    pub const EMPTY: Body = Body {
        ops: core::ptr::NonNull::dangling().as_ptr(),
        n_ops: 0,
        regions: core::ptr::NonNull::dangling().as_ptr(),
        n_regions: 0,
        direction: Direction::Read,
        peer: 0,
        peer_generation: 0,
        bytes: 0,
        descriptors: 0,
    };

    /// Says of a run of ops whether they are missing.
    ///
    /// # Safety
    /// The caller owns the slot alone: nobody else looks at the ops (I3).
    pub(super) unsafe fn mark(&self, first: u32, count: u32, missing: bool) {
        for i in first..first.saturating_add(count).min(self.n_ops) {
            // SAFETY: I3: inside the ops, which the pool has in plain writable memory.
            unsafe { (*self.ops.cast_mut().add(i as usize)).set_missing(missing) };
        }
    }

    /// Whether it names a region. Of a transfer that the caller holds.
    pub(super) fn uses(&self, region: RegionRef) -> bool {
        // SAFETY: I3: of a held transfer, whose lists the pool keeps.
        let list = unsafe { core::slice::from_raw_parts(self.regions, self.n_regions as usize) };
        list.contains(&region)
    }
}

/// What the last one out has to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Settled {
    /// Nothing.
    Nothing,
    /// Hand over the message of this post, then finish it.
    Landed(State),
    /// Tidy up after a transfer that ended with an error, then publish that.
    Ended(State),
}

/// Counts that `info` shows.
#[derive(Debug)]
pub struct Counters {
    /// Bytes that arrived, of the last post.
    pub bytes_done: AtomicU64,
    /// Index of the first pair that failed, `u64::MAX` if none.
    pub failed_pair: AtomicU64,
    /// Nanoseconds inside the last post call.
    pub post_ns: AtomicU64,
    /// Why it first met trouble: `1 << 63 | lane << 32 | provider's code`; 0: it did not.
    cause: AtomicU64,
    /// What did not arrive is not known in full.
    pub(super) unsure: AtomicBool,
    /// A device did not let go of a queue pair that carried some of it: never released.
    pub(super) kept: AtomicBool,
}

impl Counters {
    /// Keeps why a rail failed under the transfer; the first reason stays.
    pub(super) fn blame(&self, lane: u32, code: u32) {
        let word = 1 << 63 | u64::from(lane) << 32 | u64::from(code);
        let _ = self.cause.compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The lane that first failed under the transfer, and the provider's code.
    pub(super) fn cause(&self) -> Option<(u32, u32)> {
        let word = self.cause.load(Ordering::Relaxed);
        (word != 0).then_some(((word >> 32) as u32 & 0xff, word as u32))
    }
}

/// One transfer.
#[derive(Debug)]
#[repr(align(128))]
pub struct Slot {
    /// Where it stands.
    pub state: StateWord,
    /// Which ops are unclaimed.
    pub cursor: Cursor,
    inflight: AtomicU32,
    left: AtomicU32,
    /// Claims that came back unfinished; taken before the cursor.
    pub returns: IndexStack,
    /// Message to send when the data has landed, or [`NONE`].
    pub message: AtomicU32,
    /// The lane that it was posted to: where whoever waits for it looks first.
    pub home: AtomicU32,
    /// How often somebody waited for it.
    pub looks: AtomicU32,
    /// For `info`.
    pub counters: Counters,
    body: Guarded<Body>,
}

// SAFETY: I3: `body` is written only by the thread that holds the slot exclusively (prepare) and
// read only under a hold with an open cursor or by the thread that moved it to `Posting`; the
// pointers in it are plain addresses.
unsafe impl Sync for Slot {}
// SAFETY: I3: as above; nothing in a slot belongs to a thread.
unsafe impl Send for Slot {}

impl Slot {
    /// A free slot.
    pub fn new() -> Slot {
        Slot {
            state: StateWord::new(),
            cursor: Cursor::new(),
            inflight: AtomicU32::new(0),
            left: AtomicU32::new(0),
            returns: IndexStack::new(),
            message: AtomicU32::new(NONE),
            home: AtomicU32::new(0),
            looks: AtomicU32::new(0),
            counters: Counters {
                bytes_done: AtomicU64::new(0),
                failed_pair: AtomicU64::new(u64::MAX),
                post_ns: AtomicU64::new(0),
                cause: AtomicU64::new(0),
                unsure: AtomicBool::new(false),
                kept: AtomicBool::new(false),
            },
            body: Guarded::new(Body::EMPTY),
        }
    }

    /// Puts the body of a new life in.
    ///
    /// # Safety
    /// The caller popped this slot from the free list and nobody else has a handle of this life
    /// (I3).
    pub unsafe fn set_body(&self, body: Body) {
        // SAFETY: I3: exclusive by the caller's promise; claimers see a closed cursor and do not
        // look.
        self.body.with_mut(|b| unsafe { *b = body });
    }

    /// The body.
    ///
    /// # Safety
    /// The caller has a hold and saw the cursor open after raising it, or made the slot `Posting`,
    /// or is the only one that can release it (I3).
    pub unsafe fn body(&self) -> Body {
        // SAFETY: I3: by the caller's promise the body is not being written.
        self.body.with(|b| unsafe { *b })
    }

    /// Of the body: READ or WRITE.
    ///
    /// # Safety
    /// As for [`Slot::body`] (I3).
    pub unsafe fn direction(&self) -> Direction {
        // SAFETY: I3: by the caller's promise the body is not being written.
        self.body.with(|b| unsafe { (*b).direction })
    }

    /// Raises a hold.
    pub fn enter(&self) {
        self.inflight.fetch_add(1, Ordering::AcqRel);
    }

    /// Lowers a hold; the last one out settles.
    #[must_use]
    pub fn leave(&self) -> Settled {
        let order = if mutant("leave_order") { Ordering::Relaxed } else { Ordering::AcqRel };
        if self.inflight.fetch_sub(1, order) == 1 {
            return self.settle();
        }
        Settled::Nothing
    }

    fn settle(&self) -> Settled {
        let s = self.state.load();
        let to = match s.phase {
            Phase::Landed => s.to(Phase::Notifying, Status::InProgress),
            Phase::Ending => s.to(Phase::Closing, s.status),
            _ => return Settled::Nothing,
        };
        // The state was read before this: zero here means that nobody of *this* post is inside, for
        // its cursor was closed before the one who ended it went out. A thread that is
        // inside now settles when it leaves.
        let busy = self.inflight.load(Ordering::Acquire) != 0;
        if busy && !mutant("settle_early") {
            return Settled::Nothing;
        }
        if !self.state.change(s, to) {
            return Settled::Nothing;
        }
        if to.phase == Phase::Notifying {
            Settled::Landed(to)
        } else {
            Settled::Ended(to)
        }
    }

    /// The posting thread sets the counts of a new post; it has the slot in `Posting` and holds it.
    pub fn arm(&self, ops: u32) {
        self.left.store(ops, Ordering::Relaxed);
        self.counters.bytes_done.store(0, Ordering::Relaxed);
        self.counters.failed_pair.store(u64::MAX, Ordering::Relaxed);
        self.counters.cause.store(0, Ordering::Relaxed);
        self.counters.unsure.store(false, Ordering::Relaxed);
    }

    /// With `kept`: a device did not let go of a queue pair that carried some of it, so nobody gets
    /// its memory back. The caller holds the slot.
    pub(super) fn keep(&self, kept: bool) {
        if kept {
            self.counters.kept.store(true, Ordering::Relaxed);
        }
    }

    /// `n` ops arrived (`n` may be 0 for a post of nothing). The one who brings the last moves the
    /// transfer to `Landed` and closes the cursor. The caller holds the slot.
    pub fn arrived(&self, n: u32, bytes: u64) {
        self.counters.bytes_done.fetch_add(bytes, Ordering::Relaxed);
        if self.count_down(n) != n {
            return;
        }
        let s = self.state.load();
        if s.phase == Phase::Active && self.state.change(s, s.to(Phase::Landed, Status::InProgress))
        {
            self.cursor.close();
        }
    }

    fn count_down(&self, n: u32) -> u32 {
        if mutant("left_split") {
            // Load and store instead of one step: two rails both think the other brings the last.
            let left = self.left.load(Ordering::Acquire);
            self.left.store(left - n, Ordering::Release);
            return left;
        }
        self.left.fetch_sub(n, Ordering::AcqRel)
    }

    /// A look at the cursor by somebody who wants to claim; `None` unless the post is active. The
    /// cursor opens before the phase says `Active`, and a claim in that gap could complete or
    /// fail unseen. The caller holds the slot.
    pub fn look(&self) -> Option<Seen> {
        let seen = self.cursor.look()?;
        let early = self.state.phase() == Phase::Posting;
        (!early || mutant("claim_early")).then_some(seen)
    }

    /// True when a transfer of `ops` ops is open and has some that no rail has claimed.
    pub(super) fn has_unclaimed(&self, ops: u32) -> bool {
        self.cursor.look().is_some_and(|seen| seen.next() < ops || !self.returns.is_empty())
    }

    /// Ops that have not arrived yet.
    pub fn left(&self) -> u32 {
        self.left.load(Ordering::Acquire)
    }

    /// Ends an active transfer with an error, or one whose data has landed and which waits for a
    /// fence. The caller holds the slot. False when it was neither.
    pub fn end(&self, status: Status) -> bool {
        self.end_seen(self.state.load(), status)
    }

    /// The same, if the slot is still in the very state `seen`, that is, in this life and this
    /// post.
    pub fn end_seen(&self, seen: State, status: Status) -> bool {
        let seen = if mutant("end_blind") { self.state.load() } else { seen };
        let open = matches!(seen.phase, Phase::Active | Phase::Landed);
        if !open || !self.state.change(seen, seen.to(Phase::Ending, status)) {
            return false;
        }
        if !mutant("end_open") {
            self.cursor.close();
        }
        true
    }
}

impl Default for Slot {
    fn default() -> Self {
        Slot::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_claimed_between_the_opening_and_the_activation_of_a_post() {
        let s = Slot::new();
        let idle = s.state.load().to(Phase::Idle, Status::NotPosted);
        assert!(s.state.change(s.state.load(), idle));
        let posting = idle.next_post();
        assert!(s.state.change(idle, posting));
        s.enter();
        s.arm(1);
        s.cursor.open();
        // A lane that still has the slot published from an earlier post comes by.
        s.enter();
        assert!(s.look().is_none(), "its completion would find `Posting` and be lost");
        assert_eq!(s.leave(), Settled::Nothing);
        let active = posting.to(Phase::Active, Status::InProgress);
        assert!(s.state.change(posting, active));
        let seen = s.look().unwrap();
        assert!(s.cursor.claim(seen, 1).is_ok());
        s.arrived(1, 1);
        assert!(matches!(s.leave(), Settled::Landed(_)));
    }
}
