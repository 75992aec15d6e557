//! The poll token: who may touch a lane, and the promise that nothing published is overlooked.
//!
//! A publisher raises `pending` *before* it tries the token. A holder lowers `pending` before it
//! looks for work, gives the token back, and reads `pending` again. Both touch `held` by
//! read-modify-write, so either the publisher gets the token or the holder sees its `pending`.

use crate::mutant::mutant;
use crate::sync::{spin_loop, AtomicBool, Ordering};

/// Token of one lane (or of the message channels).
#[derive(Debug)]
pub struct PollToken {
    held: AtomicBool,
    pending: AtomicBool,
}

impl PollToken {
    /// A free token.
    pub fn new() -> PollToken {
        PollToken { held: AtomicBool::new(false), pending: AtomicBool::new(false) }
    }

    /// Says that there is new work.
    pub fn publish(&self) {
        if mutant("token_publish") {
            self.pending.store(true, Ordering::Release);
            return;
        }
        // A swap, because a store would hide what another publisher said before: whoever looks
        // would see the later one's work only, and find nothing pending when it gives the token
        // back.
        self.pending.swap(true, Ordering::Release);
    }

    /// True when work was published that no holder has looked at yet.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Takes the token if it is free. Never waits.
    pub fn try_take(&self) -> bool {
        let order = if mutant("token_take") { Ordering::Relaxed } else { Ordering::AcqRel };
        !self.held.swap(true, order)
    }

    /// Takes the token, and waits for it while somebody has it. For the control side: holders on
    /// the data path keep it for one look at their work.
    #[inline(never)] // So that a profile tells waiting from work.
    pub fn wait_and_take(&self) {
        while !self.try_take() {
            spin_loop();
        }
    }

    /// The holder is about to look for work.
    pub fn look(&self) {
        // A swap, because reading the publisher's `true` is what makes its work visible to the look
        // that follows.
        let order = if mutant("token_look") { Ordering::Relaxed } else { Ordering::Acquire };
        self.pending.swap(false, order);
    }

    /// Gives the token back. True: work was published meanwhile, so take it again or see that
    /// somebody does.
    pub fn give_back(&self) -> bool {
        if mutant("token_order") {
            // Reads the flag before the token is free: a publisher in between is overlooked.
            let pending = self.is_pending();
            self.held.swap(false, Ordering::AcqRel);
            return pending;
        }
        self.held.swap(false, Ordering::AcqRel);
        self.is_pending()
    }
}

impl Default for PollToken {
    fn default() -> Self {
        PollToken::new()
    }
}
