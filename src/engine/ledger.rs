//! One rail's send queue as the engine sees it: what is in flight, in order, and how many more fit.
//!
//! Owned by the lane's token holder. A completion names a work request; RC completes in order, so
//! it retires every entry up to it (selective completion).

use heapless::Deque;

/// Most claims in flight on one rail.
pub const CLAIMS: usize = 64;

/// A run of ops of one transfer that one rail took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    /// Transfer slot.
    pub slot: u32,
    /// First op.
    pub first: u32,
    /// How many ops.
    pub count: u32,
    /// Their bytes. Reported whole when the claim's last op is retired.
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    claim: Claim,
    /// Work request number of the claim's first op that has not been retired.
    wr: u32,
}

/// A part of a claim that was retired.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retired {
    /// The ops that are settled now.
    pub ops: Claim,
    /// True when nothing of the claim is in flight any more.
    pub last: bool,
}

/// The ledger of one rail.
#[derive(Debug)]
pub struct Ledger {
    entries: Deque<Entry, CLAIMS>,
    next_wr: u32,
    outstanding: u32,
}

impl Ledger {
    /// Nothing in flight.
    pub const fn new() -> Ledger {
        Ledger { entries: Deque::new(), next_wr: 0, outstanding: 0 }
    }

    /// Work requests in flight.
    pub const fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Number that the next work request gets.
    pub const fn next_wr(&self) -> u32 {
        self.next_wr
    }

    /// Work requests that may be posted now, on a queue of `depth`.
    pub fn credits(&self, depth: u32) -> u32 {
        if self.entries.is_full() {
            return 0;
        }
        depth.saturating_sub(self.outstanding)
    }

    /// Records a claim *before* it is posted. `None` when full; the caller asked for credits first.
    pub fn record(&mut self, claim: Claim) -> Option<u32> {
        let wr = self.next_wr;
        self.entries.push_back(Entry { claim, wr }).ok()?;
        self.next_wr = wr.wrapping_add(claim.count);
        self.outstanding += claim.count;
        Some(wr)
    }

    /// Takes back the last `count` ops, of `bytes` bytes, of the newest claim, which were never
    /// posted. True: nothing of it remains.
    pub fn unrecord(&mut self, count: u32, bytes: u64) -> bool {
        let Some(entry) = self.entries.back_mut() else { return false };
        let count = count.min(entry.claim.count);
        entry.claim.count -= count;
        entry.claim.bytes -= bytes.min(entry.claim.bytes);
        self.next_wr = self.next_wr.wrapping_sub(count);
        self.outstanding -= count;
        let gone = entry.claim.count == 0;
        if gone {
            self.entries.pop_back();
        }
        gone
    }

    /// Retires, from the oldest entry, what lies before work request `end` (exclusive). Call until
    /// `None`.
    pub fn retire_before(&mut self, end: u32) -> Option<Retired> {
        let entry = self.entries.front_mut()?;
        // Numbers wrap; a distance of at most the queue depth is "before".
        let n = end.wrapping_sub(entry.wr);
        if n == 0 || n > u32::MAX / 2 {
            return None;
        }
        let n = n.min(entry.claim.count);
        let last = n == entry.claim.count;
        let bytes = if last { entry.claim.bytes } else { 0 };
        let ops = Claim { count: n, bytes, ..entry.claim };
        entry.claim.first += n;
        entry.claim.count -= n;
        entry.wr = entry.wr.wrapping_add(n);
        self.outstanding -= n;
        if last {
            self.entries.pop_front();
        }
        Some(Retired { ops, last })
    }

    /// Takes the oldest claim out, whatever became of it (the rail failed and is closed). Call
    /// until `None`.
    pub fn drain(&mut self) -> Option<Claim> {
        let entry = self.entries.pop_front()?;
        self.outstanding -= entry.claim.count;
        Some(entry.claim)
    }

    /// Takes the oldest claim out if work request `wr` is of it.
    pub fn drop_front(&mut self, wr: u32) -> Option<Claim> {
        let front = self.entries.front()?;
        if wr.wrapping_sub(front.wr) < front.claim.count {
            return self.drain();
        }
        None
    }

    /// The transfers of the claims in flight, oldest first.
    pub fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.entries.iter().map(|e| e.claim.slot)
    }

    /// The claim and the op that work request `wr` carries.
    pub fn find(&self, wr: u32) -> Option<Claim> {
        self.entries.iter().find_map(|e| {
            let i = wr.wrapping_sub(e.wr);
            (i < e.claim.count).then(|| Claim {
                slot: e.claim.slot,
                first: e.claim.first + i,
                count: 1,
                bytes: 0,
            })
        })
    }
}

impl Default for Ledger {
    fn default() -> Self {
        Ledger::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn claim(slot: u32, first: u32, count: u32) -> Claim {
        Claim { slot, first, count, bytes: u64::from(count) }
    }

    #[test]
    fn one_completion_retires_every_claim_up_to_it_and_part_of_the_next() {
        let mut l = Ledger::new();
        l.next_wr = u32::MAX - 2; // wraps inside the first claim
        let first = l.record(claim(1, 0, 5)).unwrap();
        l.record(claim(2, 10, 4)).unwrap();
        assert_eq!(l.outstanding(), 9);
        let end = first.wrapping_add(7);
        assert_eq!(l.retire_before(end), Some(Retired { ops: claim(1, 0, 5), last: true }));
        assert_eq!(
            l.retire_before(end),
            Some(Retired { ops: Claim { bytes: 0, ..claim(2, 10, 2) }, last: false })
        );
        assert_eq!(l.retire_before(end), None);
        assert_eq!(l.find(end), Some(Claim { bytes: 0, ..claim(2, 12, 1) }));
        assert_eq!(l.outstanding(), 2);
        assert_eq!(l.drain(), Some(Claim { bytes: 4, ..claim(2, 12, 2) }));
        assert_eq!((l.drain(), l.outstanding()), (None, 0));
    }

    #[test]
    fn credits_end_at_the_depth_and_at_the_claim_limit() {
        let mut l = Ledger::new();
        assert_eq!(l.credits(10), 10);
        l.record(claim(0, 0, 7)).unwrap();
        assert_eq!(l.credits(10), 3);
        assert_eq!(l.credits(5), 0);
        for i in 1..CLAIMS as u32 {
            l.record(claim(i, 0, 1)).unwrap();
        }
        assert_eq!(l.credits(1000), 0, "claims are full though work requests are not");
        assert!(l.record(claim(0, 0, 1)).is_none());
    }

    #[test]
    fn ops_that_were_never_posted_come_out_again() {
        let mut l = Ledger::new();
        l.record(claim(3, 100, 8)).unwrap();
        assert!(!l.unrecord(3, 3));
        assert_eq!((l.outstanding(), l.next_wr()), (5, 5));
        assert!(l.unrecord(5, 5));
        assert_eq!((l.outstanding(), l.next_wr(), l.retire_before(8)), (0, 0, None));
    }
}
