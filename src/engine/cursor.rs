//! The claim cursor: which ops of a transfer nobody has taken yet.
//!
//! One word, `epoch:31 | closed:1 | next:32`. A claim is one CAS, so a claim of a closed or older
//! post cannot succeed.

use crate::mutant::mutant;
use crate::sync::{AtomicU64, Ordering};

const CLOSED: u64 = 1 << 32;

/// The cursor of one transfer slot.
#[derive(Debug)]
pub struct Cursor(AtomicU64);

/// What a look at an open cursor showed; the token for [`Cursor::claim`].
#[derive(Clone, Copy, Debug)]
pub struct Seen(u64);

impl Seen {
    /// First op that nobody has claimed.
    pub const fn next(self) -> u32 {
        self.0 as u32
    }

    /// Which post of the slot it was: no two in a row are the same.
    pub const fn post(self) -> u32 {
        (self.0 >> 33) as u32
    }
}

impl Cursor {
    /// A closed cursor.
    pub fn new() -> Cursor {
        Cursor(AtomicU64::new(CLOSED))
    }

    /// Opens it for a new post, from op 0. Only the posting thread calls this. Release: the ops are
    /// visible to claimers.
    pub fn open(&self) {
        let epoch = (self.0.load(Ordering::Relaxed) >> 33) + 1;
        let order = if mutant("cursor_open") { Ordering::Relaxed } else { Ordering::Release };
        self.0.store(epoch << 33, order);
    }

    /// Closes it: no claim succeeds from here on. Idempotent.
    pub fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// First op that nobody claimed in the last post, open or closed.
    pub fn claimed(&self) -> u32 {
        self.0.load(Ordering::Acquire) as u32
    }

    /// A look at it; `None` when closed. Acquire: the ops of this post are visible.
    pub fn look(&self) -> Option<Seen> {
        let word = self.0.load(Ordering::Acquire);
        (word & CLOSED == 0).then_some(Seen(word))
    }

    /// Claims `count` ops from what was seen. On failure: what is there now, or `None` when it was
    /// closed.
    pub fn claim(&self, seen: Seen, count: u32) -> Result<(), Option<Seen>> {
        if mutant("cursor_store") {
            // Load and store instead of CAS: two rails take the same ops.
            self.0.store(seen.0 + u64::from(count), Ordering::Release);
            return Ok(());
        }
        let new = seen.0 + u64::from(count);
        match self.0.compare_exchange(seen.0, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(now) => Err((now & CLOSED == 0).then_some(Seen(now))),
        }
    }
}

impl Default for Cursor {
    fn default() -> Self {
        Cursor::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_claim_of_an_older_post_or_a_closed_cursor_fails() {
        let c = Cursor::new();
        assert!(c.look().is_none());
        c.open();
        let old = c.look().unwrap();
        assert!(c.claim(old, 3).is_ok());
        assert_eq!(c.claim(old, 3).unwrap_err().unwrap().next(), 3);
        c.close();
        assert!(c.claim(old, 1).unwrap_err().is_none());
        c.open();
        assert_eq!(c.look().unwrap().next(), 0);
        assert!(c.claim(old, 1).is_err(), "epoch must differ");
    }
}
