//! Scenarios of the whole engine on the simulated fabric. `KVRAIL_SEED` replays a failing seed.
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
#[test]
fn random_transfers_are_byte_exact() {
    let seed = seed(1);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    let big = if cfg!(debug_assertions) { 2_000 } else { 70_000 };
    for n in [1, 2, 7, 1_000, big] {
        for direction in BOTH {
            for all in [false, true] {
                let mut setup = striped(lanes(1 + rng.below(8) as u32), all);
                setup.tuning.inline_bytes = [0, 65_536][rng.below(2) as usize];
                setup.tuning.background = rng.below(2) == 0;
                setup.port.signal = 1 + rng.below(20) as u32;
                let most = [1, 17, 400, 5_000][rng.below(if n > 1_000 { 3 } else { 4 }) as usize];
                let case = Case::new(setup, direction, &mut rng, n, most);
                case.untouched();
                case.post(None);
                assert_eq!(case.finish(), Status::Ok);
                case.verify();
                let info = case.world.engines[0].info(case.transfer.raw()).unwrap();
                assert_eq!(info.bytes_done, info.bytes);
                assert_eq!((info.work_requests_done, info.failed_pair), (n as u64, u64::MAX));
            }
        }
    }
}

#[test]
fn a_rail_that_fails_costs_its_claims_and_not_the_transfer() {
    let seed = seed(2);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    for round in 0..60 {
        let direction = BOTH[round % 2];
        let setup = striped(lanes(2 + rng.below(3) as u32), round % 4 < 2);
        let case = Case::new(setup, direction, &mut rng, 500, 900);
        let lost = rng.below(u64::from(setup.limits.lanes)) as u32;
        let at = rng.below(40);
        let slot = World::slot(0, 1);
        match round % 3 {
            0 => case.port(lost, |p| p.die_at(slot, at)),
            1 => case.port(lost, |p| p.fail_nth(slot, 1 + at as u32, WrStatus::RailError)),
            _ => case.port(lost, |p| p.modify(slot, kvrail::nic::sim::QpState::Err).unwrap()),
        }
        case.post(None);
        assert_eq!(case.finish(), Status::Ok, "round {round}");
        case.verify();
    }
}

#[test]
fn a_transfer_posted_while_a_rail_is_down_takes_another_one() {
    let mut rng = Rng::new(seed(3));
    for all in [false, true] {
        let case = Case::new(striped(lanes(3), all), Direction::Read, &mut rng, 64, 100);
        // Lanes 0 and 1 fail one after the other, each when it is first used.
        for lane in 0..2 {
            case.port(lane, |p| p.modify(1, kvrail::nic::sim::QpState::Err).unwrap());
        }
        for _ in 0..3 {
            case.post(None);
            assert_eq!(case.world.finish(0, &case.transfer, 2_000), Status::Ok);
            case.verify();
        }
        assert_eq!(case.world.rails_up(0, 1), 1);
        // A lane that comes back carries again.
        case.world.connect_rail(0, 1, 0);
        let before = carried(&case.world, 0, 1, 0);
        case.post(None);
        assert_eq!(case.finish(), Status::Ok);
        assert!(carried(&case.world, 0, 1, 0) > before);
    }
}

#[test]
fn no_rail_left_is_an_error_and_after_a_reconnect_transfers_work() {
    let mut rng = Rng::new(seed(4));
    for round in 0..20 {
        let direction = BOTH[round % 2];
        let case = Case::new(striped(lanes(3), round % 4 < 2), direction, &mut rng, 400, 900);
        for lane in 0..3 {
            case.port(lane, |p| p.die_at(1, rng.below(30)));
        }
        case.post(Some(b"never"));
        assert_eq!(case.world.finish(0, &case.transfer, 3_000), Status::NoRail);
        let refused = case.world.engines[0].post(case.transfer.raw(), None);
        assert_eq!(refused, Err(Status::NoRail));
        assert_eq!(case.world.messages(1), []);
        case.world.close(1, 0, Status::Disconnected);
        case.world.connect(0, 1);
        case.post(Some(b"once"));
        assert_eq!(case.finish(), Status::Ok);
        case.verify();
        while case.world.engines[1].message_blocks_used().1 == 0 {
            case.world.step();
        }
        assert_eq!(case.world.messages(1), [("engine-0".into(), b"once".to_vec())]);
    }
}

#[test]
fn a_transfer_goes_where_its_peer_has_a_rail() {
    let mut rng = Rng::new(seed(22));
    for only in 0..3 {
        for all in [false, true] {
            let direction = BOTH[only as usize % 2];
            let case = Case::new(striped(lanes(3), all), direction, &mut rng, 300, 500);
            for lane in (0..3).filter(|l| *l != only) {
                case.world.engines[0].fail_rail(lane, 1);
            }
            while case.world.engines[0].next_limping().is_some() {}
            case.post(None);
            assert_eq!(case.finish(), Status::Ok);
            case.verify();
            for (lane, l) in (0..).zip(case.world.engines[0].lanes()) {
                assert_eq!(l.stats.posted() > 0, lane == only, "lane {lane} of {only}");
            }
        }
    }
}

#[test]
fn without_striping_a_transfer_stays_on_one_rail() {
    let mut rng = Rng::new(seed(23));
    let case = Case::new(striped(lanes(3), false), Direction::Read, &mut rng, 300, 500);
    case.post(None);
    assert_eq!(case.finish(), Status::Ok);
    let used = case.world.engines[0].lanes().iter().filter(|l| l.stats.posted() > 0).count();
    assert_eq!(used, 1);
}

#[test]
fn the_end_of_a_transfer_does_not_wait_for_others_to_end() {
    let mut rng = Rng::new(seed(25));
    let port =
        PortConfig { window: 4_000, batch_bytes: 1_000, rate: 5, delay: 0, signal: 1, ..PORT };
    let setup = with_port(striped(lanes(3), true), port);
    let case = Case::new(setup, Direction::Read, &mut rng, 2_000, 900);
    let other = Memory::new(&case.world, 1, 4_000, |i| i as u8);
    let (key, mine) = (other.import(&case.world, 0), Memory::new(&case.world, 0, 4_000, |_| 0));
    let pairs: Vec<Pair> = (0..7).map(|i| (i * 500, i * 500, 300)).collect();
    let small = prepare(&case.world, Direction::Read, (0, &mine), (&other, key), &pairs).unwrap();
    case.post(None);
    (0..50).for_each(|_| case.world.step());
    case.world.engines[0].post(small.raw(), None).unwrap();
    assert_eq!(case.world.finish(0, &small, 100_000), Status::Ok);
    let big = case.world.engines[0].info(case.transfer.raw()).unwrap();
    assert!(big.bytes_done < big.bytes / 2, "the small one was held up: {big:?}");
    assert_eq!(case.finish(), Status::Ok);
    case.verify();
}

#[test]
fn a_lane_holds_no_more_than_its_window() {
    let mut rng = Rng::new(seed(24));
    let port = PortConfig { window: 4_000, batch_bytes: 1_000, rate: 50, delay: 3, ..PORT };
    let case = Case::new(with_port(lanes(1), port), Direction::Read, &mut rng, 300, 900);
    case.post(None);
    let lane = &case.world.engines[0].lanes()[0];
    let mut most = 0;
    while case.world.engines[0].check(case.transfer.raw()) == Ok(Status::InProgress) {
        case.world.step();
        most = most.max(lane.outstanding.load(core::sync::atomic::Ordering::Relaxed));
    }
    case.verify();
    assert!((4_000..5_000).contains(&most), "{most}");
}

#[test]
fn an_access_error_names_the_pair_touches_nothing_and_spares_the_others() {
    let mut rng = Rng::new(seed(5));
    for (round, kind) in ["range", "generation", "closed", "local"].into_iter().enumerate() {
        let direction = BOTH[round % 2];
        let mut case = Case::new(lanes(2), direction, &mut rng, 200, 300);
        let far = case.remote.base() + case.remote.len as u64;
        // The pool owns ops; a test may bend one before it is posted.
        match kind {
            "range" => case.transfer.ops[77].remote = far - 1,
            "local" => case.transfer.ops[77].local = case.local.base() - 1,
            "closed" => case.world.fabric.deregister(1, case.remote.handle.index()),
            _ => {
                let (base, len) = (case.remote.base(), case.remote.len as u64);
                // SAFETY: the case keeps its memory until the end.
                let ok = unsafe { case.world.fabric.register(1, 0, 9, base, len) };
                assert!(ok);
            }
        }
        case.transfer.ops[77].len = 2;
        // A second transfer, of memory that is fine, in flight at the same time.
        let other = Memory::new(&case.world, 1, 4_000, |i| i as u8);
        let (key, mine) = (other.import(&case.world, 0), Memory::new(&case.world, 0, 4_000, |_| 0));
        let pairs: Vec<Pair> = (0..40).map(|i| (i * 100, i * 100, 100)).collect();
        let good =
            prepare(&case.world, Direction::Read, (0, &mine), (&other, key), &pairs).unwrap();
        case.post(Some(b"not sent"));
        case.world.engines[0].post(good.raw(), None).unwrap();
        let mut reconnects = 0;
        let (mut bad, mut fine) = (Status::InProgress, Status::InProgress);
        for _ in 0..20_000 {
            case.world.engines.iter().for_each(|e| {
                e.poll();
            });
            while case.world.engines[0].next_limping().is_some() {}
            for lane in 0..2 {
                let down = case.world.engines[0].rails(1) & (1 << lane) == 0;
                if down {
                    case.world.connect_rail(0, 1, lane);
                    reconnects += 1;
                }
            }
            bad = case.world.engines[0].check(case.transfer.raw()).unwrap();
            fine = case.world.engines[0].check(good.raw()).unwrap();
            if bad != Status::InProgress && fine != Status::InProgress {
                break;
            }
        }
        let info = case.world.engines[0].info(case.transfer.raw()).unwrap();
        let want = if kind == "local" { Status::LocalAccess } else { Status::RemoteAccess };
        assert_eq!((bad, fine), (want, Status::Ok), "{kind}");
        assert!(reconnects > 0);
        assert_eq!(mine.bytes(), other.bytes());
        match kind {
            "range" | "local" => assert_eq!(info.failed_pair, 77),
            _ => {
                assert_eq!(info.failed_pair, 0, "{kind}");
                case.untouched();
            }
        }
        case.world.messages(1).is_empty().then_some(()).expect("an error sends no message");
        // Other pairs may have been carried, the bad one touched neither side.
        let _ = (case.local.bytes(), case.remote.bytes());
    }
}

#[test]
fn after_cancel_and_release_no_byte_changes() {
    let seed = seed(6);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    let steps = if cfg!(debug_assertions) { 30 } else { 90 };
    for k in 0..steps {
        let mut case = Case::new(lanes(2), Direction::Read, &mut rng, 300, 900);
        case.post(Some(b"maybe"));
        (0..k).for_each(|_| case.world.step());
        let e = &case.world.engines[0];
        e.cancel(case.transfer.raw()).unwrap();
        let s = case.world.finish(0, &case.transfer, 10_000);
        assert!(matches!(s, Status::Ok | Status::Cancelled), "{s:?}");
        assert_eq!(case.world.engines[0].release(case.transfer.raw()).err(), None);
        case.local.fill(0xAA);
        (0..300).for_each(|_| case.world.step());
        assert!(case.local.bytes().iter().all(|&b| b == 0xAA), "touched after release, k {k}");
        let sent = usize::from(s == Status::Ok);
        assert_eq!(case.world.messages(1).len(), sent, "a message goes with success only");
        let raw = case.transfer.raw();
        assert_eq!(case.world.engines[0].check(raw), Err(Status::Stale));
    }
}

#[test]
fn closing_a_peer_stops_everything_at_once() {
    let mut rng = Rng::new(seed(7));
    for k in 0..40 {
        let mut case = Case::new(lanes(2), Direction::Read, &mut rng, 300, 900);
        case.post(None);
        (0..k).for_each(|_| case.world.step());
        case.world.close(0, 1, Status::Disconnected);
        // No step between: close itself must have ended everything that was in flight.
        let s = case.world.engines[0].check(case.transfer.raw()).unwrap();
        assert!(matches!(s, Status::Ok | Status::Disconnected), "{s:?} at {k}");
        case.world.engines[0].release(case.transfer.raw()).unwrap();
        case.local.fill(0xAA);
        (0..100).for_each(|_| case.world.step());
        assert!(case.local.bytes().iter().all(|&b| b == 0xAA));
    }
}

#[test]
fn repost_after_success_and_after_errors() {
    let mut rng = Rng::new(seed(8));
    let mut case = Case::new(lanes(2), Direction::Read, &mut rng, 300, 300);
    for round in 0..30 {
        case.local.fill(round as u8);
        case.before.0 = case.local.bytes();
        case.post(None);
        match round % 3 {
            1 => {
                case.world.step();
                case.world.engines[0].cancel(case.transfer.raw()).unwrap();
                assert_eq!(case.finish(), Status::Cancelled);
            }
            2 => {
                case.world.step();
                case.world.close(0, 1, Status::Disconnected);
                assert_eq!(case.finish(), Status::Disconnected);
                case.world.close(1, 0, Status::Disconnected);
                case.world.connect(0, 1);
            }
            _ => {
                assert_eq!(case.finish(), Status::Ok);
                case.verify();
            }
        }
    }
}

#[test]
fn a_fast_rail_carries_more_in_proportion() {
    let mut rng = Rng::new(seed(9));
    let port = PortConfig { depth: 16, credits: 16, batch_ops: 4, ..PORT };
    let case = Case::new(with_port(lanes(2), port), Direction::Read, &mut rng, 4_000, 2_000);
    case.port(0, |p| p.set_speed(1, 4 * 64, 1));
    case.port(1, |p| p.set_speed(1, 64, 1));
    case.post(None);
    assert_eq!(case.finish(), Status::Ok);
    case.verify();
    let (fast, slow) = (carried(&case.world, 0, 1, 0), carried(&case.world, 0, 1, 1));
    let share = fast as f64 / (fast + slow) as f64;
    assert!((0.72..0.88).contains(&share), "fast rail carried {share:.3}, not about 0.8");
}

#[test]
fn the_first_rail_to_poll_does_not_take_everything() {
    let mut rng = Rng::new(seed(20));
    let port = PortConfig { depth: 2_000, credits: 2_000, batch_ops: 2_000, ..PORT };
    let case = Case::new(with_port(lanes(2), port), Direction::Read, &mut rng, 1_000, 2_000);
    case.post(None);
    assert_eq!(case.finish(), Status::Ok);
    let (a, b) = (carried(&case.world, 0, 1, 0), carried(&case.world, 0, 1, 1));
    assert!(a.min(b) * 4 > a + b, "{a} and {b} bytes on rails of the same speed");
}

#[test]
fn a_poll_that_leaves_work_behind_says_so_to_whoever_wants_to_sleep() {
    let mut rng = Rng::new(seed(20));
    let case = Case::new(lanes(1), Direction::Read, &mut rng, 500, 900);
    case.post(None);
    let e = &case.world.engines[0];
    // An application thread polls; the background thread came by while it held the token.
    for _ in 0..2 {
        assert!(e.poll());
        e.worker().doze();
        assert!(e.has_work(), "nobody would go on with the transfer");
        e.worker().rise();
    }
    assert_eq!(case.finish(), Status::Ok);
    for _ in 0..10 {
        e.poll();
    }
    assert!(!e.has_work(), "an idle engine must be able to sleep");
}

#[test]
fn progress_counts_every_byte_once_when_rails_fail() {
    let mut rng = Rng::new(seed(21));
    for round in 0..20 {
        let case = Case::new(lanes(2), Direction::Read, &mut rng, 500, 900);
        case.port(round % 2, |p| p.fail_nth(1, 30 + round, WrStatus::RailError));
        case.post(None);
        assert_eq!(case.finish(), Status::Ok);
        let info = case.world.engines[0].info(case.transfer.raw()).unwrap();
        assert_eq!(info.bytes_done, info.bytes);
        let lanes = case.world.engines[0].lanes();
        let read: u64 = lanes.iter().map(|l| l.stats.bytes_read.load(RELAXED)).sum();
        assert_eq!(read, info.bytes);
        assert!(lanes.iter().all(|l| l.outstanding.load(RELAXED) == 0));
    }
}

#[test]
fn few_credits_and_rare_completions() {
    let mut rng = Rng::new(seed(10));
    for depth in [1, 2, 7, 64] {
        for credits in [depth, depth + 3] {
            for signal in [1, 3, 1_000] {
                let port = PortConfig { depth, credits, signal, rate: 500, delay: 20, ..PORT };
                let case = Case::new(
                    with_port(striped(lanes(2), false), port),
                    Direction::Write,
                    &mut rng,
                    300,
                    90,
                );
                case.post(None);
                for _ in 0..5 {
                    case.world.engines[0].poll();
                    assert!(queued(&case.world, 0, 1) <= depth);
                }
                assert_eq!(case.finish(), Status::Ok, "{depth} {credits} {signal}");
                case.verify();
                // The engine counts credits: it meets a full queue only where the port promised too
                // many.
                case.port(0, |p| assert_eq!(p.fulls() > 0, credits > depth));
            }
        }
    }
}

#[test]
fn stale_handles_and_wrong_calls_get_the_right_code() {
    let mut rng = Rng::new(seed(11));
    let case = Case::new(lanes(2), Direction::Read, &mut rng, 300, 300);
    let (e, raw) = (&case.world.engines[0], case.transfer.raw());
    assert_eq!(e.check(raw), Ok(Status::NotPosted));
    case.post(None);
    assert_eq!(e.post(raw, None), Err(Status::Busy));
    assert_eq!(e.release(raw).err(), Some(Status::Busy));
    assert_eq!(e.post(raw, Some(b"double")), Err(Status::Busy));
    // A region that a transfer uses is found, and quiesce waits for it.
    let region = |h: kvrail::handle::Handle, remote| RegionRef {
        slot: h.index(),
        generation: h.generation(),
        remote,
    };
    let used = region(case.local.handle, false);
    case.world.step();
    assert_eq!(e.first_user(used), Some(case.transfer.handle));
    let view = e.local.close(case.local.handle).unwrap();
    assert_eq!(e.quiesce(used), Err(Status::Busy), "work requests are in flight");
    assert_eq!(case.finish(), Status::Cancelled);
    assert_eq!(e.quiesce(used), Ok(()));
    e.local.free(view);
    assert_eq!(e.post(raw, None), Err(Status::Stale), "its region is closed");
    assert_eq!(e.check(raw), Ok(Status::Cancelled), "a refusal leaves it as it was");
    e.release(raw).unwrap();
    for stale in [e.check(raw).err(), e.post(raw, None).err(), e.cancel(raw).err()] {
        assert_eq!(stale, Some(Status::Stale));
    }
    assert_eq!(e.release(raw).err(), Some(Status::Stale));
    assert_eq!(e.info(raw).err(), Some(Status::Stale));
    assert_eq!(e.check(case.local.handle.raw()), Err(Status::Invalid), "another kind");
    assert_eq!(e.check(0), Err(Status::Invalid));
}

#[test]
fn a_peer_that_was_removed_is_another_peer() {
    let mut rng = Rng::new(seed(12));
    let case = Case::new(lanes(2), Direction::Read, &mut rng, 10, 300);
    let (e, peer) = (&case.world.engines[0], case.world.peer(0, 1));
    e.notify(peer.raw(), b"hello").unwrap();
    case.world.close(0, 1, Status::Disconnected);
    assert_eq!(e.notify(peer.raw(), b"x"), Err(Status::Disconnected));
    let old = e.peer_state(1);
    let next = kvrail::engine::peer::PeerState {
        generation: old.generation + 1,
        link: kvrail::engine::peer::Link::Free,
        ..old
    };
    e.set_peer(1, next);
    assert_eq!(e.notify(peer.raw(), b"x"), Err(Status::Stale));
    assert_eq!(e.post(case.transfer.raw(), None), Err(Status::Stale));
    case.world.close(1, 0, Status::Disconnected);
    case.world.connect(0, 1);
    assert_eq!(e.notify(peer.raw(), b"x"), Err(Status::Stale), "the old handle stays stale");
    assert_eq!(e.post(case.transfer.raw(), None), Err(Status::Stale));
    case.untouched();
}

#[test]
fn full_capacities_say_so_and_lose_nothing() {
    let mut rng = Rng::new(seed(13));
    let case = Case::new(lanes(2), Direction::Read, &mut rng, 10, 300);
    let key = case.remote.import(&case.world, 0);
    let more = || {
        let (l, r) = ((0, &case.local), (&case.remote, key));
        prepare(&case.world, Direction::Read, l, r, &case.pairs)
    };
    let all: Vec<Transfer> = (1..LIMITS.transfers).map(|_| more().unwrap()).collect();
    assert_eq!(more().err(), Some(Status::Capacity));
    let e = &case.world.engines[0];
    for t in &all {
        e.post(t.raw(), None).unwrap();
    }
    for t in &all {
        assert_eq!(case.world.finish(0, t, 10_000), Status::Ok);
        e.release(t.raw()).unwrap();
    }
    case.verify();
    assert_eq!(e.transfers_used(), 1);
    assert!(more().is_ok());
    // Outgoing message blocks: nobody polls, so they fill up.
    let peer = case.world.peer(0, 1).raw();
    let mut sent = 0;
    let refused = loop {
        match e.notify(peer, &[7; 65_536]) {
            Ok(()) => sent += 1,
            Err(s) => break s,
        }
    };
    assert_eq!(refused, Status::Capacity);
    assert_eq!(e.notify(peer, &[0; 65_537]), Err(Status::Invalid));
    let with_note = e.post(case.transfer.raw(), Some(&[1; 65_536]));
    assert_eq!(with_note, Err(Status::Capacity), "refused, and it stays as it was");
    assert_eq!(e.check(case.transfer.raw()), Ok(Status::NotPosted));
    let mut got = 0;
    for _ in 0..100_000 {
        case.world.step();
        got += case.world.messages(1).len();
        if e.message_blocks_used() == (0, 0) && got == sent {
            break;
        }
    }
    assert_eq!(got, sent);
    assert_eq!(e.message_blocks_used(), (0, 0));
    case.post(Some(&[1; 65_536]));
    assert_eq!(case.finish(), Status::Ok);
}
