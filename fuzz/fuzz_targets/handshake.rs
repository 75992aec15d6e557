//! The bootstrap: two machines with somebody between them, and each alone with noise.
#![no_main]

#[path = "../handshake_body.rs"]
mod handshake_body;
#[path = "../input.rs"]
#[allow(dead_code, reason = "each target uses a part")]
mod input;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
}

/// Counts what this thread holds of the heap.
struct Counting;

// SAFETY: every call goes on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = HELD.try_with(|h| h.set(h.get().wrapping_add(layout.size())));
        // SAFETY: the caller's promise handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let _ = HELD.try_with(|h| h.set(h.get().wrapping_sub(layout.size())));
        // SAFETY: the caller's promise handed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

/// Heap bytes of this thread.
pub(crate) fn held() -> usize {
    HELD.with(Cell::get)
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| handshake_body::run(data));
