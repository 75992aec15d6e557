//! The engine over the `local` driver, within one process: what is promised about post, tables,
//! capacities and limits.
#![cfg(feature = "std")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use core::time::Duration;
use std::time::Instant;

use kvrail::handle::Handle;
use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::host::error::{Error, Result};
use kvrail::status::Status;
use kvrail::table::{Desc, Direction, Stride};

/// Only against hangs.
const HANG: Duration = Duration::from_secs(60);
const LEN: usize = 1 << 20;

fn config(name: &str) -> Config {
    Config { name: name.into(), ..Config::default() }
}

fn finish(e: &Engine, t: Handle) -> Result<Status> {
    let until = Instant::now() + HANG;
    loop {
        match e.check(t.raw())? {
            Status::InProgress => assert!(Instant::now() < until, "hang"),
            s => return Ok(s),
        }
    }
}

/// Two engines, the second connected to the first, with a buffer each.
struct Pair {
    near: Engine,
    far: Engine,
    peer: Handle,
    local: (Vec<u8>, Handle),
    remote: (Vec<u8>, Handle),
}

impl Pair {
    fn new(near: Config, far: Config) -> Pair {
        let (near, far) = (Engine::new(near).unwrap(), Engine::new(far).unwrap());
        let peer = near.peer_add(far.metadata(), None).unwrap();
        near.peer_connect(peer.raw(), HANG).unwrap();
        let (local, remote) = (vec![0u8; LEN], (0..LEN).map(|i| (i % 251) as u8).collect());
        let mut pair = Pair { near, far, peer, local: (local, peer), remote: (remote, peer) };
        let register = |e: &Engine, b: &[u8]| e.register(b.as_ptr() as u64, LEN as u64, 0).unwrap();
        pair.local.1 = register(&pair.near, &pair.local.0);
        let theirs = register(&pair.far, &pair.remote.0);
        let blob = pair.far.region_metadata(theirs.raw()).unwrap();
        pair.remote.1 = pair.near.region_import(peer.raw(), &blob).unwrap();
        pair
    }

    fn desc(side: &(Vec<u8>, Handle), at: usize, len: usize) -> Desc {
        let addr = side.0.as_ptr() as u64 + at as u64;
        Desc { addr, len: len as u64, dev: 0, region: side.1.raw() }
    }

    /// A READ of pieces (offset, length), each to its own place.
    fn read(&self, pieces: &[(usize, usize)]) -> Result<Handle> {
        let of = |side| pieces.iter().map(|&(at, n)| Pair::desc(side, at, n)).collect::<Vec<_>>();
        let (l, r) = (of(&self.local), of(&self.remote));
        self.near.prepare_descs(Direction::Read, self.peer.raw(), &l, &r)
    }
}

fn refused<T: core::fmt::Debug>(result: Result<T>, status: Status, words: &[&str]) -> Error {
    let e = result.unwrap_err();
    assert_eq!(e.status, status, "{e}");
    for word in words {
        assert!(e.message.contains(word), "{word:?} is not in: {e}");
    }
    e
}

#[test]
fn up_to_64_kib_are_there_when_post_returns_and_more_are_not_copied_by_it() {
    for background in [true, false] {
        let near = Config { progress_thread: background, ..config("near") };
        let p = Pair::new(near, config("far"));
        let small: Vec<_> = (0..64).map(|i| (i * 4096, 1024)).collect();
        let t = p.read(&small).unwrap();
        assert_eq!(p.near.post(t.raw(), None).unwrap(), Status::Ok);
        assert_eq!(p.local.0[4096..5120], p.remote.0[4096..5120]);
        assert_eq!(p.local.0[1024..4096], [0; 3072]);
        let large = p.read(&[(0, 65_537)]).unwrap();
        if background {
            p.near.post(large.raw(), None).unwrap();
        } else {
            assert_eq!(p.near.post(large.raw(), None).unwrap(), Status::InProgress);
            assert_eq!(p.local.0[1024..4096], [0; 3072], "nobody polled");
            // Taking notifications is as good as checking.
            p.near.notifs(&mut |_, _| {}).unwrap();
        }
        assert_eq!(finish(&p.near, large).unwrap(), Status::Ok);
        assert_eq!(p.local.0[..65_537], p.remote.0[..65_537]);
    }
}

#[test]
fn a_table_of_six_million_blocks_is_never_expanded() {
    let p = Pair::new(config("near"), config("far"));
    // Overlapping blocks of 64 bytes, one at each byte, six million times over.
    let part = |side: &(Vec<u8>, Handle), count: u64| Stride {
        base: side.0.as_ptr() as u64,
        len: 64,
        stride: 1,
        count,
        region: side.1.raw(),
    };
    let each = (LEN - 64) as u64;
    let parts: Vec<Stride> = (0..6).map(|_| part(&p.remote, each)).collect();
    let before = p.near.info().pool_bytes;
    let remote = p.near.table_create_strided(&parts).unwrap();
    let local = p.near.table_create_strided(&[part(&p.local, each)]).unwrap();
    assert!(6 * each > 6_000_000);
    assert!(p.near.info().pool_bytes - before < 1_000);
    let far_index = (5 * each + 1000) as u32;
    let prepare = |l: &[u32], r: &[u32]| {
        let (l, r) = ((local.raw(), l), (remote.raw(), r));
        p.near.prepare(Direction::Read, p.peer.raw(), l.0, l.1, r.0, r.1)
    };
    let t = prepare(&[0, 64], &[far_index, far_index + 64]).unwrap();
    assert_eq!(p.near.transfer_info(t.raw()).unwrap().work_requests, 1, "neighbours merge");
    p.near.post(t.raw(), None).unwrap();
    assert_eq!(finish(&p.near, t).unwrap(), Status::Ok);
    assert_eq!(p.local.0[..128], p.remote.0[1000..1128]);
    let bad = (6 * each) as u32;
    refused(prepare(&[0, 1], &[0, bad]), Status::Range, &["1", &bad.to_string()]);
    refused(prepare(&[0], &[0, 1]), Status::Mismatch, &["1", "2"]);
}

#[test]
fn bad_pairs_are_named_and_nothing_is_lost() {
    let p = Pair::new(config("near"), config("far"));
    let before = p.near.info();
    refused(p.read(&[(0, 4096), (8192, 0), (0, 64)]), Status::Invalid, &["pair 1"]);
    refused(p.read(&[(0, 64), (LEN - 63, 64)]), Status::NotRegistered, &["pair 1"]);
    let (l, r) = (Pair::desc(&p.local, 0, 64), Pair::desc(&p.remote, 0, 65));
    let unequal = p.near.prepare_descs(Direction::Read, p.peer.raw(), &[l], &[r]);
    refused(unequal, Status::Mismatch, &["pair 0", "64", "65"]);
    let swapped = Desc { region: p.remote.1.raw(), ..l };
    let r = Desc { len: 64, ..r };
    let wrong = p.near.prepare_descs(Direction::Read, p.peer.raw(), &[swapped], &[r]);
    refused(wrong, Status::Stale, &["pair 0", "local"]);
    assert_eq!(p.near.info(), before, "a refusal keeps nothing");
}

#[test]
fn memory_in_use_is_not_deregistered_unless_asked_and_then_the_transfer_ends() {
    let near = Config { progress_thread: false, ..config("near") };
    let p = Pair::new(near, config("far"));
    let t = p.read(&[(0, LEN)]).unwrap();
    assert_eq!(p.near.post(t.raw(), None).unwrap(), Status::InProgress);
    let name = format!("{:#x}", t.raw());
    refused(p.near.deregister(p.local.1.raw(), false), Status::Busy, &[&name]);
    refused(p.near.post(t.raw(), None), Status::Busy, &[&name]);
    p.near.deregister(p.local.1.raw(), true).unwrap();
    refused(p.near.check(t.raw()), Status::Cancelled, &[]);
    refused(p.near.post(t.raw(), None), Status::Stale, &["region"]);
    p.near.release(t.raw()).unwrap();
    refused(p.near.release(t.raw()), Status::Stale, &[&name]);
    refused(p.near.deregister(p.local.1.raw(), true), Status::Stale, &[]);
}

#[test]
fn a_transfer_whose_message_nobody_can_take_ends_at_the_stall_limit() {
    let near = Config { stall_ms: 300, ..config("near") };
    let far = Config { progress_thread: false, ..config("far") };
    let p = Pair::new(near, far);
    // The far side never polls: its window and the socket fill up.
    let note = vec![1u8; 65_536];
    let mut last = Ok(Status::Ok);
    for _ in 0..500 {
        let t = p.read(&[(0, 64)]).unwrap();
        last = p.near.post(t.raw(), Some(&note)).and_then(|_| finish(&p.near, t));
        if last.is_err() {
            break;
        }
    }
    refused(last, Status::Stalled, &["64 of 64 bytes done"]);
    // Once it polls, everything that was queued arrives, and new transfers work.
    let t = p.read(&[(0, 64)]).unwrap();
    let mut got = 0;
    let until = Instant::now() + HANG;
    p.near.post(t.raw(), Some(b"last")).unwrap();
    while got == 0 {
        assert!(Instant::now() < until, "hang");
        p.far.notifs(&mut |_, m| got += usize::from(m == b"last")).unwrap();
    }
    assert_eq!(finish(&p.near, t).unwrap(), Status::Ok);
}

#[test]
fn an_engine_in_a_block_of_the_callers_never_takes_more() {
    let small = Config {
        max_peers: 2,
        max_transfers: 64,
        max_regions: 16,
        max_remote_regions: 16,
        message_bytes: 2 << 20,
        ..config("boxed")
    };
    let size = Engine::size(&small).unwrap();
    let mut block = vec![0u8; size];
    // SAFETY: the vector outlives the engine.
    let short = unsafe { Engine::new_in(block.as_mut_ptr(), size / 2, small.clone()) };
    refused(short, Status::Capacity, &["block"]);
    // SAFETY: as above; the first engine was never made.
    let e = unsafe { Engine::new_in(block.as_mut_ptr(), size, small) }.unwrap();
    let memory = vec![0u8; LEN];
    let own = e.register(memory.as_ptr() as u64, LEN as u64, 0).unwrap();
    let far = e.region_import_self(own.raw()).unwrap();
    let pieces = |r: Handle| -> Vec<Desc> {
        let addr = |i: u64| memory.as_ptr() as u64 + 128 * i;
        (0..4000).map(|i| Desc { addr: addr(i), len: 64, dev: 0, region: r.raw() }).collect()
    };
    let (l, r) = (pieces(own), pieces(far));
    let me = e.peer_self().raw();
    let mut kept = Vec::new();
    let full = loop {
        match e.prepare_descs(Direction::Write, me, &l, &r) {
            Ok(t) => kept.push(t),
            Err(e) => break e,
        }
    };
    assert!(!kept.is_empty() && kept.len() < 64, "{}", kept.len());
    assert_eq!(full.status, Status::NoMemory, "{full}");
    assert!(full.message.contains("max_bytes"), "{full}");
    for t in &kept {
        e.post(t.raw(), None).unwrap();
        assert_eq!(finish(&e, *t).unwrap(), Status::Ok);
        e.release(t.raw()).unwrap();
    }
    e.prepare_descs(Direction::Write, me, &l, &r).unwrap();
}

/// The far side of a transfer to oneself is a region of this engine, too.
#[test]
fn memory_that_a_transfer_to_oneself_writes_is_free_when_it_was_deregistered() {
    const BYTES: usize = 16 << 20;
    let e = Engine::new(config("self")).unwrap();
    let (from, mut to) = (vec![1u8; BYTES], vec![0u8; BYTES]);
    let near = e.register(from.as_ptr() as u64, BYTES as u64, 0).unwrap();
    for _ in 0..30 {
        let at = to.as_mut_ptr() as u64;
        let own = e.register(at, BYTES as u64, 0).unwrap();
        let far = e.region_import_self(own.raw()).unwrap();
        let all =
            |addr, region: Handle| [Desc { addr, len: BYTES as u64, dev: 0, region: region.raw() }];
        let (l, r) = (all(from.as_ptr() as u64, near), all(at, far));
        let t = e.prepare_descs(Direction::Write, e.peer_self().raw(), &l, &r).unwrap();
        e.post(t.raw(), None).unwrap();
        let until = Instant::now() + HANG;
        while e.transfer_info(t.raw()).unwrap().bytes_done == 0 {
            assert!(Instant::now() < until, "hang");
        }
        e.deregister(own.raw(), true).unwrap();
        to.fill(2);
        let _ = finish(&e, t);
        assert!(to.iter().all(|&b| b == 2), "written after that");
        e.release(t.raw()).unwrap();
        e.region_forget(far.raw()).unwrap();
    }
}

#[test]
fn a_release_does_not_wait_for_a_message_which_still_goes_out() {
    let p = Pair::new(config("near"), Config { progress_thread: false, ..config("far") });
    let note = vec![1u8; 65_536];
    let mut sent = 0;
    let stuck = (0..500).find_map(|_| {
        sent += 1;
        let t = p.read(&[(0, 64)]).unwrap();
        p.near.post(t.raw(), Some(&note)).unwrap();
        let until = Instant::now() + Duration::from_millis(100);
        while p.near.check(t.raw()).unwrap() == Status::InProgress {
            // The far side never polls, so a full window stays full.
            if Instant::now() > until {
                return Some(t);
            }
        }
        None
    });
    let t = stuck.expect("the window must fill up");
    // All data is in place, so nothing needs its memory any more.
    p.near.release(t.raw()).unwrap();
    refused(p.near.check(t.raw()), Status::Stale, &[]);
    let (mut came, until) = (0, Instant::now() + HANG);
    while came < sent {
        p.far.notifs(&mut |_, m| came += usize::from(m == note)).unwrap();
        assert!(Instant::now() < until, "{came} of {sent} messages came");
    }
    p.far.notifs(&mut |_, _| panic!("a message came twice")).unwrap();
}

#[test]
fn a_peer_that_removed_us_is_gone_at_once() {
    let p = Pair::new(config("near"), config("far"));
    let us = p.far.peer_find(b"near").unwrap();
    p.far.peer_remove(us.raw()).unwrap();
    let until = Instant::now() + HANG;
    while p.near.peer_state(p.peer.raw()).is_ok() {
        // Before it was mended this lasted until something else woke the far side.
        assert!(Instant::now() < until, "hang");
        std::thread::yield_now();
    }
    refused(p.near.notify(p.peer.raw(), b"x"), Status::Disconnected, &["far"]);
}

#[test]
fn a_new_connection_is_not_ended_by_the_end_of_the_one_before() {
    let (near, far) = (Engine::new(config("near")).unwrap(), Engine::new(config("far")).unwrap());
    for round in 0..1500 {
        let peer = near.peer_add(far.metadata(), None).unwrap();
        near.peer_connect(peer.raw(), HANG).unwrap();
        if let Err(e) = near.notify(peer.raw(), b"x") {
            panic!("round {round}: {e}");
        }
        near.peer_remove(peer.raw()).unwrap();
    }
}

#[test]
fn regions_may_overlap_and_be_registered_twice() {
    let p = Pair::new(config("near"), config("far"));
    let at = p.local.0.as_ptr() as u64;
    let again = p.near.register(at, LEN as u64, 0).unwrap();
    let inner = p.near.register(at + 4096, 8192, 0).unwrap();
    p.near.deregister(p.local.1.raw(), false).unwrap();
    for region in [again, inner] {
        let l = Desc { addr: at + 4096, len: 4096, dev: 0, region: region.raw() };
        let r = Pair::desc(&p.remote, 0, 4096);
        let t = p.near.prepare_descs(Direction::Read, p.peer.raw(), &[l], &[r]).unwrap();
        p.near.post(t.raw(), None).unwrap();
        assert_eq!(finish(&p.near, t).unwrap(), Status::Ok);
        p.near.deregister(region.raw(), false).unwrap();
    }
    refused(p.near.register(at, 0, 0), Status::Invalid, &["0 bytes"]);
    refused(p.near.register(at, u64::MAX, 0), Status::Invalid, &["largest address"]);
    refused(p.near.register(at, 8, 1), Status::Unsupported, &["host memory"]);
}
