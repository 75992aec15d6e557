//! The whole engine on the simulated fabric under threads, dead rails and random faults.
//! `KVRAIL_SEED` replays a failing seed.
#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "tests")]
#![allow(dead_code, unreachable_pub, unused_imports, reason = "shared support")]

mod sim_support;

use kvrail::engine::slot::RegionRef;
use kvrail::nic::sim::{Faults, PortConfig, Rng};
use kvrail::nic::WrStatus;
use kvrail::status::Status;
use kvrail::table::Direction;
use sim_support::*;

const RELAXED: core::sync::atomic::Ordering = core::sync::atomic::Ordering::Relaxed;
/// Breaks a rail to the second engine now and then, and mends those that are down.
fn break_and_mend(world: &World, rng: &mut Rng) {
    let e = &world.engines[0];
    let lane = rng.below(3) as u32;
    if rng.below(4) == 0 {
        e.with_port(lane, |p| p.modify(1, kvrail::nic::sim::QpState::Err).unwrap());
    }
    while e.next_limping().is_some() {}
    for lane in 0..3 {
        if e.rails(1) & (1 << lane) == 0 {
            world.connect_rail(0, 1, lane);
        }
    }
}

/// Real threads: one posts, cancels and reposts, two poll, one sends messages, one breaks and mends
/// rails.
#[test]
fn threads_that_post_poll_cancel_and_mend_agree() {
    let seed = seed(19);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    let rounds = if cfg!(debug_assertions) { 200 } else { 4_000 };
    let port = PortConfig { depth: 8, credits: 8, batch_ops: 4, rate: 0, delay: 0, ..PORT };
    let mut setup = with_port(lanes(3), port);
    setup.tuning.inline_bytes = 1_000;
    let mut case = Case::new(setup, Direction::Read, &mut rng, 40, 60);
    let stop = core::sync::atomic::AtomicBool::new(false);
    let running = || !stop.load(core::sync::atomic::Ordering::Acquire);
    let (world, raw) = (&case.world, case.transfer.raw());
    let e = &world.engines[0];
    let (mut sent, mut done) = (0u32, 0);
    let got = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for engine in &world.engines {
            scope.spawn(|| {
                while running() {
                    engine.poll();
                    std::thread::yield_now();
                }
            });
        }
        scope.spawn(|| {
            while running() {
                got.lock().unwrap().append(&mut world.messages(1));
                std::thread::yield_now();
            }
        });
        scope.spawn(|| {
            let mut rng = Rng::new(seed);
            while running() {
                break_and_mend(world, &mut rng);
                std::thread::yield_now();
            }
        });
        for round in 0..rounds {
            let cancel = rng.below(3) == 0;
            match e.post(raw, Some(&sent.to_le_bytes())) {
                Ok(_) => {}
                Err(s) => panic!("round {round}: {s:?}"),
            }
            if cancel {
                e.cancel(raw).unwrap();
            }
            let start = std::time::Instant::now();
            let s = loop {
                match e.check(raw).unwrap() {
                    Status::InProgress => std::thread::yield_now(),
                    s => break s,
                }
                if start.elapsed().as_secs() > 20 {
                    stop.store(true, core::sync::atomic::Ordering::Release);
                    panic!("round {round} hangs: {:?}", e.info(raw));
                }
            };
            match s {
                Status::Ok => {
                    sent += 1;
                    done += 1;
                }
                s => assert!(s == Status::Cancelled && cancel, "{s:?}"),
            }
        }
        stop.store(true, core::sync::atomic::Ordering::Release);
    });
    (0..1_000).for_each(|_| world.step());
    let mut got = got.into_inner().unwrap();
    got.append(&mut world.messages(1));
    let numbers: Vec<u32> =
        got.iter().map(|(_, b)| u32::from_le_bytes(b[..].try_into().unwrap())).collect();
    assert!(done > 0 && numbers == (0..sent).collect::<Vec<_>>(), "each once, in order");
    case.verify();
    assert_eq!(e.release(raw).err(), None);
    case.local.fill(0xAA);
    (0..100).for_each(|_| case.world.step());
    assert!(case.local.bytes().iter().all(|&b| b == 0xAA));
}

/// Peers whose rails are down keep a return entry for each claim that was in flight.
#[test]
fn many_peers_whose_rails_are_down_do_not_use_up_the_return_entries() {
    let limits = kvrail::limits::Limits { peers: 8, transfers: 8, lanes: 1, ..LIMITS };
    let port = PortConfig { batch_ops: 1, rate: 1, ..PORT };
    let world = World::new(Setup { engines: 7, limits, port, ..SETUP });
    let local = Memory::new(&world, 0, 1_000, |_| 0);
    let mut all = Vec::new();
    for e in 1..7 {
        world.connect(0, e);
        let remote = Memory::new(&world, e, 1_000, |_| 0);
        let key = remote.import(&world, 0);
        let pairs: Vec<Pair> = (0..100).map(|i| (i * 10, i * 10, 10)).collect();
        let t = prepare(&world, Direction::Read, (0, &local), (&remote, key), &pairs).unwrap();
        world.engines[0].post(t.raw(), None).unwrap();
        (0..70).for_each(|_| {
            world.engines[0].poll();
        });
        let err = kvrail::nic::sim::QpState::Err;
        world.engines[0].with_port(0, |p| p.modify(World::slot(0, e), err).unwrap());
        world.engines[0].poll();
        all.push((t, remote));
    }
    for (t, _) in &all {
        assert_eq!(world.engines[0].check(t.raw()), Ok(Status::InProgress));
    }
}

/// All faults at random, both directions, several transfers at once: every byte is right.
#[test]
fn random_faults_on_a_million_descriptors() {
    let seed = seed(14);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    let total = if cfg!(debug_assertions) { 25_000 } else { 1_200_000 };
    let (mut done, mut rounds, mut broken) = (0, 0, 0);
    while done < total {
        rounds += 1;
        let port = PortConfig {
            window: u64::MAX,
            late: false,
            depth: 1 + rng.below(100) as u32,
            credits: 1 + rng.below(120) as u32,
            batch_ops: 1 + rng.below(64) as u32,
            batch_bytes: 1 + rng.below(20_000),
            rate: 200 + rng.below(8_000),
            delay: rng.below(20),
            signal: 1 + rng.below(30) as u32,
            seed: rng.bits(),
            faults: Faults { rail: 400, full: 50_000, post_rail: 500 },
        };
        let lanes_n = 1 + rng.below(8) as u32;
        let mut setup = with_port(striped(lanes(lanes_n), rng.below(2) == 0), port);
        setup.tuning.inline_bytes = rng.below(2) * 65_536;
        let world = World::new(setup);
        world.connect(0, 1);
        let mut cases = Vec::new();
        for i in 0..4 {
            let n = 1 + rng.below(8_000) as usize;
            let (pairs, room) = random_pairs(&mut rng, n, 40);
            let local = Memory::new(&world, 0, room, |_| rng.bits() as u8);
            let remote = Memory::new(&world, 1, room, |_| rng.bits() as u8);
            let key = remote.import(&world, 0);
            let (l, r) = ((0, &local), (&remote, key));
            let t = prepare(&world, BOTH[i % 2], l, r, &pairs).unwrap();
            let want = reference(BOTH[i % 2], &local.bytes(), &remote.bytes(), &pairs);
            world.engines[0].post(t.raw(), Some(&[i as u8; 3])).unwrap();
            done += n;
            cases.push((t, BOTH[i % 2], local, remote, want));
        }
        let mut messages = Vec::new();
        for step in 0.. {
            assert!(step < 2_000_000, "no end, {port:?}");
            world.engines.iter().for_each(|e| {
                e.poll();
            });
            while world.engines[0].next_limping().is_some() {}
            if step % 8 == 0 {
                for lane in 0..lanes_n {
                    let down = world.engines[0].rails(1) & (1 << lane) == 0;
                    if down && rng.below(3) == 0 {
                        world.connect_rail(0, 1, lane);
                        broken += 1;
                    }
                }
            }
            messages.append(&mut world.messages(1));
            // Whatever has told its end must be whole at the target already.
            let status = |t: &Transfer| world.engines[0].check(t.raw()).unwrap();
            if cases.iter().all(|c| status(&c.0) == Status::Ok) && messages.len() == 4 {
                break;
            }
        }
        for (_, direction, local, remote, want) in &cases {
            let to = if *direction == Direction::Read { local } else { remote };
            assert!(&to.bytes() == want, "round {rounds}: wrong bytes");
        }
    }
    assert!(broken > 10, "the faults were meant to hit");
}
