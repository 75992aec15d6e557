//! Over the `local` driver, with all its threads: nothing is allocated between post and done.
#![cfg(feature = "std")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use core::alloc::{GlobalAlloc, Layout};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::alloc::System;

use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::status::Status;
use kvrail::table::{Desc, Direction};

/// Calls of the allocator, by any thread of the process.
struct Counting;

static CALLS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's own promises, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The only test of this program, so that no other thread of the harness allocates meanwhile.
#[test]
fn nothing_is_allocated_from_post_to_done_by_any_thread() {
    let engine = |name: &str| {
        Engine::new(Config { name: name.into(), rails: 2, ..Config::default() }).unwrap()
    };
    let (a, b) = (engine("a"), engine("b"));
    let peer = a.peer_add(b.metadata(), None).unwrap().raw();
    a.peer_connect(peer, Duration::from_secs(60)).unwrap();
    let (near, far) = (vec![0u8; 8 << 20], vec![5u8; 8 << 20]);
    let (at, len) = (near.as_ptr() as u64, near.len() as u64);
    let local = a.register(at, len, 0).unwrap().raw();
    let theirs = b.register(far.as_ptr() as u64, len, 0).unwrap().raw();
    let remote = a.region_import(peer, &b.region_metadata(theirs).unwrap()).unwrap().raw();
    let piece =
        |base: u64, region: u64, i: u64| Desc { addr: base + i * 8192, len: 4096, dev: 0, region };
    let of = |base: u64, region, n: u64| (0..n).map(|i| piece(base, region, i)).collect::<Vec<_>>();
    let transfers: Vec<u64> =
        [(Direction::Read, 1000), (Direction::Write, 1000), (Direction::Read, 2)]
            .into_iter()
            .map(|(direction, n)| {
                let (l, r) = (of(at, local, n), of(far.as_ptr() as u64, remote, n));
                a.prepare_descs(direction, peer, &l, &r).unwrap().raw()
            })
            .collect();
    let note = vec![9u8; 3000];
    let mut got = 0;
    let mut round = |spoil: bool| {
        for &t in &transfers {
            a.post(t, Some(&note)).unwrap();
            a.notify(peer, b"beside").unwrap();
            let mut seen = 0;
            while a.check(t).unwrap() == Status::InProgress || seen < 2 {
                b.notifs(&mut |_, m| seen += usize::from(m == note || m == b"beside")).unwrap();
            }
            got += seen;
        }
        if spoil {
            drop(core::hint::black_box(vec![0u8; 9]));
        }
    };
    // The first round makes room for a message on this thread, and the stall watch its list.
    round(false);
    std::thread::sleep(Duration::from_millis(1500));
    let before = CALLS.load(Ordering::SeqCst);
    for _ in 0..50 {
        round(false);
    }
    assert_eq!(CALLS.load(Ordering::SeqCst) - before, 0);
    round(true);
    assert!(CALLS.load(Ordering::SeqCst) > before, "this test can fail");
    assert_eq!(got, 52 * 3 * 2);
}
