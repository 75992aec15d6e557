//! Free lists and return lists: stacks of indices, `tag:32 | index:32` in one word.
//!
//! The tag grows with every change, so a head that looks the same *is* the same (no ABA), and
//! several entries can be popped with one CAS.

use crate::mutant::mutant;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// No index.
pub const NONE: u32 = u32::MAX;

/// Head of a stack whose links live in an array that several stacks may share.
#[derive(Debug)]
pub struct IndexStack(AtomicU64);

fn pack(tag: u32, index: u32) -> u64 {
    ((tag as u64) << 32) | index as u64
}

fn next_tag(head: u64) -> u32 {
    let tag = (head >> 32) as u32;
    if mutant("stack_tag") {
        return tag;
    }
    tag.wrapping_add(1)
}

impl IndexStack {
    /// An empty stack.
    pub fn new() -> IndexStack {
        IndexStack(AtomicU64::new(pack(0, NONE)))
    }

    /// True when it was empty at the time of the look.
    pub fn is_empty(&self) -> bool {
        self.0.load(Ordering::Acquire) as u32 == NONE
    }

    /// How many entries it has, while nobody changes it.
    pub fn count(&self, links: &[AtomicU32]) -> u32 {
        let mut at = self.0.load(Ordering::Acquire) as u32;
        let mut n = 0;
        while let Some(link) = links.get(at as usize).filter(|_| n < links.len() as u32) {
            at = link.load(Ordering::Relaxed);
            n += 1;
        }
        n
    }

    /// Pushes `index`, which is in no stack that uses `links`.
    pub fn push(&self, links: &[AtomicU32], index: u32) {
        self.push_chain(links, index, index);
    }

    /// Pushes a chain that the caller linked from `first` to `last`.
    pub fn push_chain(&self, links: &[AtomicU32], first: u32, last: u32) {
        let mut head = self.0.load(Ordering::Relaxed);
        loop {
            links[last as usize].store(head as u32, Ordering::Relaxed);
            let new = pack(next_tag(head), first);
            let order = if mutant("stack_push") { Ordering::Relaxed } else { Ordering::AcqRel };
            match self.0.compare_exchange_weak(head, new, order, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Pops one index.
    pub fn pop(&self, links: &[AtomicU32]) -> Option<u32> {
        self.pop_chain(links, 1)
    }

    /// Pops exactly `n` indices, still linked, the last one's link being meaningless. `None`: fewer
    /// are there.
    pub fn pop_chain(&self, links: &[AtomicU32], n: u32) -> Option<u32> {
        let mut head = self.0.load(Ordering::Acquire);
        'again: loop {
            let first = head as u32;
            let mut rest = first;
            for _ in 0..n {
                // A stale walk may read links that were changed meanwhile; the CAS below then fails
                // on the tag.
                let Some(link) = links.get(rest as usize) else {
                    let now = self.0.load(Ordering::Acquire);
                    if now == head {
                        return None;
                    }
                    head = now;
                    continue 'again;
                };
                rest = link.load(Ordering::Relaxed);
            }
            let new = pack(next_tag(head), rest);
            match self.0.compare_exchange_weak(head, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(first),
                Err(now) => head = now,
            }
        }
    }
}

impl Default for IndexStack {
    fn default() -> Self {
        IndexStack::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn pops_what_was_pushed_and_never_more_than_there_is() {
        let links: Vec<AtomicU32> = (0..8).map(|_| AtomicU32::new(NONE)).collect();
        let s = IndexStack::new();
        assert!(s.pop(&links).is_none());
        for i in 0..5 {
            s.push(&links, i);
        }
        assert!(s.pop_chain(&links, 6).is_none());
        assert_eq!(s.pop_chain(&links, 3), Some(4));
        assert_eq!(s.pop(&links), Some(1));
        assert_eq!(s.pop(&links), Some(0));
        assert!(s.is_empty());
    }
}
