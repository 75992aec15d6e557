//! An allocator that counts, and the test that nothing is allocated.

use crate::rig::Rig;
use core::alloc::{GlobalAlloc, Layout};
use core::cell::Cell;
use kvrail::nic::Link;
use std::alloc::System;

thread_local! {
    /// Allocations of this thread while `ON`.
    static CALLS: Cell<u64> = const { Cell::new(0) };
    static ON: Cell<bool> = const { Cell::new(false) };
}

/// The system's allocator, which counts every call that takes or resizes memory.
struct Counting;

fn count() {
    if ON.try_with(Cell::get) == Ok(true) {
        let _ = CALLS.try_with(|c| c.set(c.get() + 1));
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's own promises, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's own promises, handed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's own promises, handed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// `f` runs for the model, whose own memory does not count.
pub fn uncounted<R>(f: impl FnOnce() -> R) -> R {
    let before = ON.with(|on| on.replace(false));
    let r = f();
    ON.with(|on| on.set(before));
    r
}

fn calls(f: impl FnOnce()) -> u64 {
    let before = CALLS.with(Cell::get);
    ON.with(|on| on.set(true));
    f();
    ON.with(|on| on.set(false));
    CALLS.with(Cell::get) - before
}

#[test]
fn nothing_is_allocated() {
    assert_eq!(calls(|| drop(vec![1, 2, 3])), 1, "the count itself works");
    let mut rig = Rig::new(2, 1);
    rig.up(1, 0);
    let mut links = [rig.post[0].link(1, 0), rig.post[1].link(1, 0)];
    let (message, mut into, mut ready) = ([7u8; 9000], [0u8; 16_384], [0u32; 4]);
    let mut moved = 0;
    let n = calls(|| {
        for _ in 0..100 {
            for side in 0..2 {
                moved += links[side].send(&[&message[..20], &message]).unwrap();
                uncounted(crate::wire::run);
                rig.post[1 - side].poll(&mut ready);
                moved += links[1 - side].receive(&mut into).unwrap();
            }
        }
    });
    assert_eq!((moved > 1_000_000, n), (true, 0));
}
