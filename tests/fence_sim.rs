//! Rails that break, over the simulated NIC: a WRITE is done only when the peer has fenced the rail
//! that may still carry packets of it.
#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "tests")]
#![allow(dead_code, unreachable_pub, unused_imports, reason = "shared support")]

mod sim_support;

use kvrail::engine::slot::RegionRef;
use kvrail::nic::sim::{PortConfig, Rng};
use kvrail::nic::WrStatus;
use kvrail::status::Status;
use kvrail::table::Direction;
use sim_support::*;

/// Three lanes, of which the second breaks in the middle of the transfer.
fn broken(rng: &mut Rng, direction: Direction, all: bool) -> Case {
    let setup = with_port(striped(lanes(3), all), PortConfig { late: true, ..PORT });
    let case = Case::new(setup, direction, rng, 400, 900);
    let lane = u32::from(all);
    case.port(lane, |p| p.fail_nth(1, 2, WrStatus::RailError));
    case
}

/// Engine 0 works and sees to its rails; engine 1 polls, but nobody sees to its rails, as when its
/// process was stopped.
fn alone(case: &Case, steps: usize) {
    for _ in 0..steps {
        case.world.engines.iter().for_each(|e| {
            e.poll();
        });
        case.world.tend(0);
    }
}

fn status(case: &Case) -> Status {
    case.world.engines[0].check(case.transfer.raw()).unwrap()
}

#[test]
fn a_write_is_done_when_the_peer_has_fenced_the_rail_and_a_read_at_once() {
    let mut rng = Rng::new(seed(21));
    for round in 0..40 {
        let direction = BOTH[round % 2];
        let case = broken(&mut rng, direction, round % 4 < 2);
        case.post(Some(b"done"));
        alone(&case, 3_000);
        let info = case.world.engines[0].info(case.transfer.raw()).unwrap();
        assert_eq!(info.bytes_done, info.bytes, "the other rails did not carry the rest");
        case.verify();
        let quiet = case.world.messages(1).is_empty();
        match direction {
            Direction::Read => assert!(status(&case) == Status::Ok && !quiet),
            Direction::Write => assert!(
                status(&case) == Status::InProgress && quiet,
                "done before the fence: {:?}, message {}",
                status(&case),
                !quiet
            ),
        }
        let owes = case.world.engines[0].owes(1);
        assert_eq!(owes.count_ones(), 1);
        // The peer wakes up.
        assert_eq!(case.finish(), Status::Ok);
        (0..50).for_each(|_| case.world.step());
        assert_eq!(case.world.engines[0].owes(1), 0);
        let late = case.world.messages(1).len();
        assert_eq!(late, usize::from(direction == Direction::Write), "exactly once");
        // The rail is down on both sides; the others go on.
        assert_eq!((case.world.rails_up(0, 1), case.world.rails_up(1, 0)), (2, 2));
        case.post(None);
        assert_eq!(case.finish(), Status::Ok);
        case.verify();
    }
}

/// A handshake that makes a new rail in the place of the old one has closed that on both sides.
#[test]
fn a_rail_that_is_connected_anew_is_a_fence() {
    let mut rng = Rng::new(seed(22));
    let case = broken(&mut rng, Direction::Write, true);
    case.post(None);
    alone(&case, 3_000);
    assert_eq!(status(&case), Status::InProgress);
    case.world.connect_rail(0, 1, 1);
    alone(&case, 10);
    assert_eq!(status(&case), Status::Ok);
    assert_eq!(case.world.rails_up(0, 1), 3);
}

#[test]
fn a_transfer_that_waits_for_a_fence_can_be_released_stalled_and_disconnected() {
    let mut rng = Rng::new(seed(23));
    for round in 0..3 {
        let case = broken(&mut rng, Direction::Write, round % 2 == 0);
        case.post(Some(b"never"));
        alone(&case, 3_000);
        let (e, raw) = (&case.world.engines[0], case.transfer.raw());
        let want = match round {
            0 => {
                e.cancel(raw).unwrap();
                e.evict(raw).unwrap();
                Status::Cancelled
            }
            1 => {
                assert!(e.expire(case.transfer.handle.index(), e.mark(0).unwrap()));
                e.forgive();
                Status::Stalled
            }
            _ => {
                case.world.close(0, 1, Status::Disconnected);
                Status::Disconnected
            }
        };
        assert_eq!(status(&case), want, "round {round}: it must not wait for the peer");
        assert!(e.release(raw).is_ok());
        alone(&case, 100);
        assert!(case.world.messages(1).is_empty(), "an error sends no message");
        assert_eq!((e.transfers_used(), e.message_blocks_used().0), (0, 0));
    }
}

/// Nobody polls any more and nothing completes: a release closes the rails, and what others had in
/// flight there is carried by those that are left.
#[test]
fn an_eviction_stops_a_transfer_and_bystanders_go_on() {
    let mut rng = Rng::new(seed(24));
    for round in 0..20 {
        let direction = BOTH[round % 2];
        // Slow enough that nothing completes before the eviction.
        let port = PortConfig { late: true, rate: 1, ..PORT };
        let mut case =
            Case::new(with_port(striped(lanes(3), true), port), direction, &mut rng, 200, 300);
        let (pairs, room) = random_pairs(&mut rng, 100, 200);
        let mine = Memory::new(&case.world, 0, room, |i| i as u8);
        let theirs = Memory::new(&case.world, 1, room, |i| (i * 7) as u8);
        let key = theirs.import(&case.world, 0);
        let other = prepare(&case.world, Direction::Read, (0, &mine), (&theirs, key), &pairs);
        let other = other.unwrap();
        let want = reference(Direction::Read, &mine.bytes(), &theirs.bytes(), &pairs);
        case.post(None);
        let e = &case.world.engines[0];
        e.post(other.raw(), None).unwrap();
        // Both are in flight on lanes 0 and 1; lane 2 is kept out of it.
        for lane in 0..2 {
            e.poll_lane(lane);
        }
        assert!(queued(&case.world, 0, 1) > 0);
        e.cancel(case.transfer.raw()).unwrap();
        assert_eq!(status(&case), Status::InProgress, "something is in flight");
        e.evict(case.transfer.raw()).unwrap();
        assert_eq!(status(&case), Status::Cancelled);
        assert!(e.release(case.transfer.raw()).is_ok());
        case.local.fill(0xAA);
        for lane in 0..3 {
            e.with_port(lane, |p| p.set_speed(1, 4096, 2));
        }
        assert_eq!(case.world.finish(0, &other, 100_000), Status::Ok);
        assert!(mine.bytes() == want, "a bystander lost bytes");
        assert!(case.local.bytes().iter().all(|&b| b == 0xAA), "written after the release");
    }
}

/// Two transfers that were ended and are in flight, each on a rail of its own: a region is given
/// back when those that use it are at rest, and only their rails are closed for it.
#[test]
fn a_deregistration_waits_for_its_own_transfers_only() {
    for direction in BOTH {
        let mut rng = Rng::new(seed(25));
        let port = PortConfig { rate: 1, ..PORT };
        let mut setup = with_port(striped(lanes(2), true), port);
        setup.port.late = direction == Direction::Write;
        let case = Case::new(setup, direction, &mut rng, 200, 300);
        let (world, e) = (&case.world, &case.world.engines[0]);
        let (pairs, room) = random_pairs(&mut rng, 100, 200);
        let mut mine = Memory::new(world, 0, room, |i| i as u8);
        let idle = Memory::new(world, 0, room, |_| 0);
        let theirs = Memory::new(world, 1, room, |i| (i * 7) as u8);
        let key = theirs.import(world, 0);
        let other = prepare(world, direction, (0, &mine), (&theirs, key), &pairs).unwrap();
        let region = |m: &Memory| RegionRef {
            slot: m.handle.index(),
            generation: m.handle.generation(),
            remote: false,
        };
        case.post(None);
        e.poll_lane(0);
        e.cancel(case.transfer.raw()).unwrap();
        e.post(other.raw(), None).unwrap();
        e.poll_lane(1);
        let ends = [&case.transfer, &other].map(|t| move || e.check(t.raw()).unwrap());
        assert_eq!(ends[0](), Status::InProgress, "it is in flight");
        e.local.close(idle.handle).unwrap();
        assert_eq!(e.quiesce(region(&idle)), Ok(()), "nothing in flight uses it");
        e.local.close(mine.handle).unwrap();
        assert_eq!(e.quiesce(region(&mine)), Err(Status::Busy));
        assert!(e.evict_users(region(&mine)));
        assert_eq!(e.quiesce(region(&mine)), Ok(()));
        assert_eq!(ends.each_ref().map(|f| f()), [Status::InProgress, Status::Cancelled]);
        assert_eq!(e.rails(World::slot(0, 1)), 0b01, "the other transfer's rail stays");
        mine.fill(0xAA);
        assert_eq!(case.finish(), Status::Cancelled);
        assert!(mine.bytes().iter().all(|&b| b == 0xAA), "written after that");
    }
}

/// What is said to have arrived has, of every transfer that ended in the middle.
#[test]
fn what_arrived_of_a_failed_transfer_is_told_pair_by_pair() {
    let seed = seed(25);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    let (mut some, mut none) = (0, 0);
    for round in 0..60 {
        let direction = BOTH[round % 2];
        let port = PortConfig { late: true, ..PORT };
        let case =
            Case::new(with_port(striped(lanes(2), true), port), direction, &mut rng, 300, 300);
        let (e, raw) = (&case.world.engines[0], case.transfer.raw());
        let nth = 1 + rng.below(120) as u32;
        let lane = rng.below(2) as u32;
        case.port(lane, |p| p.fail_nth(1, nth, WrStatus::RemoteAccess));
        case.post(None);
        if round % 3 == 0 {
            let steps = rng.below(60);
            (0..steps).for_each(|_| case.world.step());
            e.cancel(raw).unwrap();
        }
        let end = case.finish();
        let mut missing = vec![false; 300];
        e.missing(raw, |first, last| {
            missing[first as usize..=last as usize].fill(true);
        })
        .unwrap();
        let info = e.info(raw).unwrap();
        let gone = missing.iter().filter(|m| **m).count();
        assert_eq!(info.descriptors_done as usize, 300 - gone, "round {round}");
        if end == Status::Ok {
            assert_eq!(gone, 0);
            continue;
        }
        assert!(gone > 0 && info.touched);
        some += 300 - gone;
        none += gone;
        if end == Status::RemoteAccess {
            assert_eq!(info.cause.map(|c| c.0), Some(lane));
            assert!(missing[info.failed_pair as usize], "the pair that failed has not arrived");
        }
        // Byte by byte, of those that are said to be there.
        let want = reference(direction, &case.before.0, &case.before.1, &case.pairs);
        let seen = match direction {
            Direction::Read => case.local.bytes(),
            Direction::Write => case.remote.bytes(),
        };
        for (i, &(l, r, n)) in case.pairs.iter().enumerate().filter(|(i, _)| !missing[*i]) {
            let at = if direction == Direction::Read { l } else { r };
            assert!(seen[at..at + n] == want[at..at + n], "pair {i} is said to have arrived");
        }
        // Posted again, all is asked for anew.
        (0..50).for_each(|_| case.world.step());
        for lane in 0..2 {
            case.world.connect_rail(0, 1, lane);
        }
        case.post(None);
        assert_eq!(case.finish(), Status::Ok);
        case.verify();
        e.missing(raw, |_, _| panic!("something is missing of a transfer that is done")).unwrap();
    }
    assert!(some > 1_000 && none > 1_000, "one sided: {some} arrived, {none} did not");
}

/// Two peers, few credits for each, little work a round: whoever comes by when credits are there
/// must not always be the same. Nor where a queue is full before the credits are gone.
#[test]
fn no_transfer_starves_for_credits() {
    let cases = [(2, 2, 40), (2, 3, 40), (1, 2, 1), (3, 5, 60), (4, 1, 100)];
    for (depth, delay, batch, more) in
        cases.iter().flat_map(|c| [0, 50].map(|m| (c.0, c.1, c.2, m)))
    {
        let credits = depth + more;
        let port = PortConfig { credits, depth, batch_bytes: batch, delay, ..PORT };
        let setup = Setup { engines: 3, ..with_port(lanes(1), port) };
        let world = World::new(setup);
        let (pairs, room) = random_pairs(&mut Rng::new(26), 400, 40);
        let here = Memory::new(&world, 0, room, |i| i as u8);
        let mut all = Vec::new();
        for to in [1, 2] {
            world.connect(0, to);
            let there = Memory::new(&world, to, room, |i| (i * 3) as u8);
            let key = there.import(&world, 0);
            for _ in 0..3 {
                let t = prepare(&world, Direction::Write, (0, &here), (&there, key), &pairs);
                all.push(t.unwrap());
            }
            core::mem::forget(there);
        }
        for t in &all {
            world.engines[0].post(t.raw(), None).unwrap();
        }
        let done = |t: &Transfer| world.engines[0].info(t.raw()).unwrap().bytes_done;
        let whole = world.engines[0].info(all[0].raw()).unwrap().bytes;
        for step in 0.. {
            assert!(step < 1_000_000);
            world.step();
            if all.iter().any(|t| done(t) == whole) {
                break;
            }
        }
        let shares: Vec<u64> = all.iter().map(|t| done(t) * 100 / whole).collect();
        let text = format!("{credits} credits, {depth} entries: percent done {shares:?}");
        assert!(shares.iter().all(|s| *s > 30), "{text}");
    }
}
