//! Nothing is allocated from post to done: counted by the allocator itself, on both sides, over the
//! simulated fabric.
#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "tests")]
#![allow(dead_code, unreachable_pub, unused_imports, reason = "shared support")]

mod sim_support;

use core::alloc::{GlobalAlloc, Layout};
use core::cell::Cell;
use kvrail::engine::notify::Piece;
use kvrail::nic::sim::Rng;
use kvrail::status::Status;
use kvrail::table::Direction;
use sim_support::*;
use std::alloc::System;

thread_local! {
    /// Allocations of this thread: the test harness has threads of its own.
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, which counts every call that takes, gives or resizes memory.
struct Counting;

fn count() {
    let _ = CALLS.try_with(|c| c.set(c.get() + 1));
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's own promises, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
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

fn calls(f: impl FnOnce()) -> u64 {
    let before = CALLS.with(Cell::get);
    f();
    CALLS.with(Cell::get) - before
}

#[test]
fn the_counter_counts() {
    assert_eq!(calls(|| drop(core::hint::black_box(vec![1u8; 100]))), 2);
    assert_eq!(calls(|| {}), 0);
}

#[test]
fn nothing_is_allocated_from_post_to_done() {
    let mut rng = Rng::new(1);
    let world = World::new(Setup { chop: 5_000, ..SETUP });
    world.connect(0, 1);
    let (pairs, room) = random_pairs(&mut rng, 2_000, 500);
    let local = Memory::new(&world, 0, room, |_| 0);
    let remote = Memory::new(&world, 1, room, |i| i as u8);
    let key = remote.import(&world, 0);
    let t = |d| prepare(&world, d, (0, &local), (&remote, key), &pairs).unwrap();
    let (read, write) = (t(Direction::Read), t(Direction::Write));
    let text = vec![7u8; 65_536];
    let (ours, theirs) = (world.peer(0, 1).raw(), world.peer(1, 0).raw());
    let (mut bytes, mut messages) = (0, 0);
    let mut round = |hidden: bool| {
        for t in [&read, &write] {
            assert!(world.engines[0].post(t.raw(), Some(&text)).is_ok());
            assert!(world.engines[0].notify(ours, b"beside").is_ok());
            assert!(world.engines[1].notify(theirs, b"back").is_ok());
            while world.engines[0].check(t.raw()) == Ok(Status::InProgress) {
                for e in &world.engines {
                    e.poll();
                    messages += e.take_messages(|p| {
                        if let Piece::Bytes(b) = p {
                            bytes += b.len();
                        }
                    });
                }
                if hidden {
                    drop(core::hint::black_box(vec![1u8; 100]));
                }
            }
            assert_eq!(world.engines[0].check(t.raw()), Ok(Status::Ok));
        }
        // A failure on the way is no reason to allocate either.
        world.engines[0].with_port(0, |p| p.die_at(1, 0));
        assert!(world.engines[0].post(read.raw(), None).is_ok());
        while world.engines[0].check(read.raw()) == Ok(Status::InProgress) {
            world.engines[0].poll();
        }
        assert_eq!(world.engines[0].next_limping(), Some(1));
        world.connect_rail(0, 1, 0);
        for _ in 0..100 {
            for e in &world.engines {
                e.poll();
                messages += e.take_messages(|_| {});
            }
        }
        assert!(world.engines[0].cancel(read.raw()).is_ok());
    };
    // Not even the first time.
    assert_eq!(calls(|| (0..3).for_each(|_| round(false))), 0);
    assert!(calls(|| round(true)) > 0, "this test can fail");
    assert_eq!(messages, 4 * 2 * 3);
    assert!(bytes > 4 * 65_536);
}
