//! An allocator that counts the bytes that are out, for tests that see whether something grows.
#![allow(dead_code, unreachable_pub, reason = "shared support")]

use core::alloc::{GlobalAlloc, Layout};
use core::cell::Cell;
use core::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::alloc::System;

static ALL: AtomicI64 = AtomicI64::new(0);

thread_local! {
    static OWN: Cell<i64> = const { Cell::new(0) };
}

/// Bytes that the Rust code of this process holds.
pub fn of_process() -> i64 {
    ALL.load(Relaxed)
}

/// Bytes that this thread took and did not give back: what it holds, where no other thread frees
/// any of that.
pub fn of_thread() -> i64 {
    OWN.with(Cell::get)
}

/// The system's allocator, with a count.
struct Counting;

fn count(bytes: i64) {
    ALL.fetch_add(bytes, Relaxed);
    let _ = OWN.try_with(|own| own.set(own.get() + bytes));
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's own promises, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's own promises, handed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        // SAFETY: the caller's own promises, handed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;
