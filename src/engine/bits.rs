//! A set of slots that any thread may change: one bit each, in words out of the arena.
//!
//! Every change is a read-modify-write, so whoever takes a bit sees what the one who set it wrote.
//! Slots are given out from the lowest on, so few of the words are ever used, and looks stop behind
//! those: whoever sees a bit set also sees `used` raised, which was before.

use crate::engine::arena::Arena;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// The set.
#[derive(Debug)]
pub struct Bits<'m> {
    words: &'m [AtomicU64],
    /// Words that had a slot at any time.
    used: AtomicU32,
}

const fn bit(index: u32) -> u64 {
    1 << (index % 64)
}

impl<'m> Bits<'m> {
    /// An empty set of slots 0 to `n - 1`. `None`: the arena is too small.
    pub fn new(arena: &mut Arena<'m>, n: u32) -> Option<Bits<'m>> {
        let words = arena.array(n.div_ceil(64) as usize, |_| AtomicU64::new(0))?;
        Some(Bits { words, used: AtomicU32::new(0) })
    }

    /// Puts a slot in. True when it was not in.
    pub fn set(&self, index: u32) -> bool {
        let word = index / 64;
        if self.used.load(Ordering::Relaxed) <= word {
            self.used.fetch_max(word + 1, Ordering::Relaxed);
        }
        self.words[word as usize].fetch_or(bit(index), Ordering::AcqRel) & bit(index) == 0
    }

    /// The words that may have slots.
    fn in_use(&self) -> &[AtomicU64] {
        let used = self.used.load(Ordering::Relaxed) as usize;
        self.words.get(..used).unwrap_or_default()
    }

    /// Takes a slot out.
    pub fn clear(&self, index: u32) {
        self.words[index as usize / 64].fetch_and(!bit(index), Ordering::AcqRel);
    }

    /// True when there was none at the time of the look.
    pub fn is_empty(&self) -> bool {
        self.in_use().iter().all(|w| w.load(Ordering::Acquire) == 0)
    }

    /// The next slot at or after `from`, left in.
    pub fn next(&self, from: u32) -> Option<u32> {
        let mut word = from as usize / 64;
        let mut mask = u64::MAX << (from % 64);
        let words = self.in_use();
        while let Some(w) = words.get(word) {
            let bits = w.load(Ordering::Acquire) & mask;
            if bits != 0 {
                return Some(word as u32 * 64 + bits.trailing_zeros());
            }
            word += 1;
            mask = u64::MAX;
        }
        None
    }

    /// Takes every slot out and gives it to `f`. What is put in meanwhile may stay for the next
    /// time.
    pub fn take_each(&self, mut f: impl FnMut(u32)) {
        for (i, word) in self.in_use().iter().enumerate() {
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                f(i as u32 * 64 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }
}
