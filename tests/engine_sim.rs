//! Scenarios of the whole engine on the simulated fabric. `KVRAIL_SEED` replays a failing seed.
#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "tests")]
#![allow(dead_code, unreachable_pub, reason = "shared support")]

mod sim_support;

use kvrail::engine::slot::RegionRef;
use kvrail::nic::sim::{Faults, PortConfig, Rng};
use kvrail::nic::WrStatus;
use kvrail::status::Status;
use kvrail::table::Direction;
use sim_support::*;

const BOTH: [Direction; 2] = [Direction::Read, Direction::Write];

/// Two connected engines with a region each and a transfer of engine 0; both sides hold random bytes.
struct Case {
    world: World,
    local: Memory,
    remote: Memory,
    before: (Vec<u8>, Vec<u8>),
    direction: Direction,
    pairs: Vec<Pair>,
    transfer: Transfer,
}

impl Case {
    fn new(setup: Setup, direction: Direction, rng: &mut Rng, n: usize, most: usize) -> Case {
        let world = World::new(setup);
        world.connect(0, 1);
        let (pairs, room) = random_pairs(rng, n, most);
        let local = Memory::new(&world, 0, room, |_| rng.bits() as u8);
        let remote = Memory::new(&world, 1, room, |_| rng.bits() as u8);
        let key = remote.import(&world, 0);
        let transfer =
            prepare(&world, direction, (0, &local), (&remote, key), &pairs).expect("a slot");
        let before = (local.bytes(), remote.bytes());
        Case { world, local, remote, before, direction, pairs, transfer }
    }

    fn post(&self, message: Option<&[u8]>) -> Status {
        self.world.engines[0].post(self.transfer.raw(), message).unwrap()
    }

    fn finish(&self) -> Status {
        self.world.finish(0, &self.transfer, 1_000_000)
    }

    /// Every byte of the destination is right, and the source is as it was.
    fn verify(&self) {
        let want = reference(self.direction, &self.before.0, &self.before.1, &self.pairs);
        let (local, remote) = (self.local.bytes(), self.remote.bytes());
        let (to, from, source) = match self.direction {
            Direction::Read => (local, remote, &self.before.1),
            Direction::Write => (remote, local, &self.before.0),
        };
        assert!(to == want, "wrong bytes at the destination");
        assert!(&from == source, "the source was changed");
    }

    fn untouched(&self) {
        assert!(self.local.bytes() == self.before.0 && self.remote.bytes() == self.before.1);
    }

    fn port(&self, lane: u32, f: impl FnOnce(&mut kvrail::nic::sim::SimPort<'static>)) {
        self.world.engines[0].with_port(lane, |p, _| f(p));
    }
}

fn lanes(n: u32) -> Setup {
    Setup { limits: kvrail::limits::Limits { lanes: n, ..LIMITS }, ..SETUP }
}

fn striped(setup: Setup, all: bool) -> Setup {
    let tuning = kvrail::engine::core::Tuning { stripe_all: all, ..setup.tuning };
    Setup { tuning, ..setup }
}

fn with_port(setup: Setup, port: PortConfig) -> Setup {
    Setup { port, ..setup }
}

#[test]
fn random_transfers_are_byte_exact() {
    let seed = seed(1);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    let big = if cfg!(debug_assertions) { 7_000 } else { 70_000 };
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
                let ok = unsafe { case.world.fabric.register(1, 0, 9, base, len) };
                assert!(ok);
            }
        }
        case.transfer.ops[77].len = 2;
        // A second transfer, of memory that is fine, in flight at the same time.
        let other = Memory::new(&case.world, 1, 4_000, |i| i as u8);
        let (key, mine) = (other.import(&case.world, 0), Memory::new(&case.world, 0, 4_000, |_| 0));
        let pairs: Vec<Pair> = (0..40).map(|i| (i * 100, i * 100, 100)).collect();
        let good = prepare(&case.world, Direction::Read, (0, &mine), (&other, key), &pairs).unwrap();
        case.post(Some(b"not sent"));
        case.world.engines[0].post(good.raw(), None).unwrap();
        let mut reconnects = 0;
        let (mut bad, mut fine) = (Status::InProgress, Status::InProgress);
        for _ in 0..20_000 {
            case.world.engines.iter().for_each(|e| {
                e.poll();
            });
            while case.world.engines[0].next_broken().is_some() {}
            for lane in 0..2 {
                let down = case.world.engines[0].with_port(lane, |_, r| r[1].generation == 0);
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
fn few_credits_and_rare_completions() {
    let mut rng = Rng::new(seed(10));
    for depth in [1, 2, 7, 64] {
        for credits in [depth, depth + 3] {
            for signal in [1, 3, 1_000] {
                let port = PortConfig { depth, credits, signal, rate: 0, delay: 0, ..PORT };
                let case = Case::new(with_port(lanes(2), port), Direction::Write, &mut rng, 300, 90);
                case.post(None);
                for _ in 0..5 {
                    case.world.engines[0].poll();
                    assert!(queued(&case.world, 0, 1) <= depth);
                }
                assert_eq!(case.finish(), Status::Ok, "{depth} {credits} {signal}");
                case.verify();
                // The engine counts credits: it meets a full queue only where the port promised too many.
                case.port(0, |p| assert_eq!(p.fulls() > 0, credits > depth && depth < 64));
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
    }
    assert_eq!(got, sent);
    assert_eq!(e.message_blocks_used(), (0, 0));
    case.post(Some(&[1; 65_536]));
    assert_eq!(case.finish(), Status::Ok);
}

#[test]
fn a_notification_comes_once_and_after_all_data() {
    let seed = seed(15);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    for (i, len) in [0, 1, 7, 255, 256, 4_095, 65_535, 65_536].into_iter().enumerate() {
        for chop in [0, 3, 5_000] {
            let setup = Setup { chop, ..striped(lanes(3), i % 2 == 0) };
            let case = Case::new(setup, BOTH[i % 2], &mut rng, 300, 300);
            let text: Vec<u8> = (0..len).map(|_| rng.bits() as u8).collect();
            case.post(Some(&text));
            let mut got = Vec::new();
            while got.is_empty() {
                case.world.step();
                got.append(&mut case.world.messages(1));
            }
            case.verify();
            assert_eq!(case.finish(), Status::Ok);
            (0..500).for_each(|_| case.world.step());
            got.append(&mut case.world.messages(1));
            assert!(got == [("engine-0".to_string(), text)], "exactly one, whole: {len} {chop}");
        }
    }
}

#[test]
fn a_transfer_of_nothing_and_one_to_itself_send_their_message() {
    let mut rng = Rng::new(seed(16));
    let case = Case::new(lanes(2), Direction::Write, &mut rng, 3, 9);
    let key = case.remote.import(&case.world, 0);
    let (l, r) = ((0, &case.local), (&case.remote, key));
    let empty = prepare(&case.world, Direction::Write, l, r, &[]).unwrap();
    case.world.engines[0].post(empty.raw(), Some(b"")).unwrap();
    assert_eq!(case.world.finish(0, &empty, 100), Status::Ok);
    case.world.step();
    assert_eq!(case.world.messages(1), [("engine-0".into(), vec![])]);
    case.world.connect(0, 0);
    let twin = Memory::new(&case.world, 0, case.local.len, |_| 0);
    let key = twin.import(&case.world, 0);
    let own =
        prepare(&case.world, Direction::Write, (0, &case.local), (&twin, key), &case.pairs).unwrap();
    case.world.engines[0].post(own.raw(), Some(b"me")).unwrap();
    assert_eq!(case.world.finish(0, &own, 1_000), Status::Ok);
    let zeros = vec![0; case.local.len];
    assert_eq!(twin.bytes(), reference(Direction::Write, &case.before.0, &zeros, &case.pairs));
    assert_eq!(case.world.messages(0), [("engine-0".into(), b"me".to_vec())]);
}

#[test]
fn a_slow_reader_holds_the_sender_up_and_loses_nothing() {
    let seed = seed(17);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    for (chop, most) in [(0, 40), (700, 3_000), (0, 65_536)] {
        let world = World::new(Setup { chop, ..lanes(1) });
        world.connect(0, 1);
        let peer = world.peer(0, 1).raw();
        let total = if most > 10_000 || cfg!(debug_assertions) { 600 } else { 6_000 };
        let text = |i: u64, len: u64| {
            let mut t = i.to_le_bytes().to_vec();
            t.extend((0..len).map(|k| (i + k) as u8));
            t
        };
        let lens: Vec<u64> = (0..total).map(|_| rng.below(most - 8)).collect();
        let (mut sent, mut got, mut held, mut deepest) = (0, 0, 0, 0);
        let limit = u64::from(LIMITS.message_bytes) / 2;
        let (mut posted, mut taken) = (0, 0);
        for step in 0.. {
            assert!(step < 5_000_000, "sent {sent}, got {got} of {total}");
            if sent < total {
                let m = text(sent, lens[sent as usize]);
                match world.engines[0].notify(peer, &m) {
                    Ok(()) => {
                        sent += 1;
                        posted += m.len() as u64;
                    }
                    Err(s) => {
                        assert_eq!(s, Status::Capacity);
                        held += 1;
                    }
                }
            }
            // A message the other way now and then: acknowledgements and data share the stream.
            if step % 50 == 0 && world.engines[1].notify(world.peer(1, 0).raw(), b"back").is_ok() {
                world.messages(0);
            }
            world.step();
            let blocks = u64::from(world.engines[1].message_blocks_used().1);
            deepest = deepest.max(blocks * 256);
            // The reader sleeps until the sender cannot go on, and then for a while each time.
            if (held > 0 && step % 97 == 0) || sent == total {
                for (name, bytes) in world.messages(1) {
                    assert_eq!(name, "engine-0");
                    assert!(bytes == text(got, lens[got as usize]), "message {got} is wrong");
                    taken += bytes.len() as u64;
                    got += 1;
                }
            }
            if got == total {
                break;
            }
        }
        assert_eq!(posted, taken);
        assert!(deepest <= limit, "{deepest} bytes unread, more than the window of {limit}");
        (0..1_000).for_each(|_| world.step());
        world.messages(0);
        let used = |e: usize| world.engines[e].message_blocks_used();
        assert_eq!((world.messages(1).len(), used(0), used(1)), (0, (0, 0), (0, 0)));
    }
}

#[test]
fn every_peer_is_heard_and_order_is_kept_for_each() {
    let mut rng = Rng::new(seed(18));
    let world = World::new(Setup { engines: 4, chop: 900, ..lanes(1) });
    for e in 1..4 {
        world.connect(0, e);
    }
    let (mut sent, mut got) = ([0u32; 4], [0u32; 4]);
    for _ in 0..60_000 {
        let e = 1 + rng.below(3) as usize;
        let mut text = sent[e].to_le_bytes().to_vec();
        text.resize(4 + rng.below(2_000) as usize, e as u8);
        if sent[e] < 1_000 && world.engines[e].notify(world.peer(e, 0).raw(), &text).is_ok() {
            sent[e] += 1;
        }
        world.step();
        if rng.below(300) == 0 || sent[1..] == [1_000; 3] {
            for (name, bytes) in world.messages(0) {
                let from: usize = name.strip_prefix("engine-").unwrap().parse().unwrap();
                assert_eq!(bytes[..4], got[from].to_le_bytes());
                assert!(bytes[4..].iter().all(|&b| b == from as u8));
                got[from] += 1;
            }
        }
        if got[1..] == [1_000; 3] {
            return;
        }
    }
    panic!("sent {sent:?}, got {got:?}");
}

/// Real threads: one posts, cancels and reposts, two poll, one sends messages, one breaks and mends rails.
#[test]
fn threads_that_post_poll_cancel_and_mend_agree() {
    let seed = seed(19);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    let rounds = if cfg!(debug_assertions) { 600 } else { 4_000 };
    let port = PortConfig { depth: 8, credits: 8, batch_ops: 4, rate: 0, delay: 0, ..PORT };
    let mut setup = with_port(lanes(3), port);
    setup.tuning.inline_bytes = 1_000;
    let mut case = Case::new(setup, Direction::Read, &mut rng, 40, 60);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let running = || !stop.load(std::sync::atomic::Ordering::Acquire);
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
                let lane = rng.below(3) as u32;
                if rng.below(4) == 0 {
                    let err = kvrail::nic::sim::QpState::Err;
                    e.with_port(lane, |p, _| p.modify(1, err).unwrap());
                }
                while e.next_broken().is_some() {}
                for lane in 0..3 {
                    if e.with_port(lane, |_, r| r[1].generation == 0) {
                        world.connect_rail(0, 1, lane);
                    }
                }
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
                    stop.store(true, std::sync::atomic::Ordering::Release);
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
        stop.store(true, std::sync::atomic::Ordering::Release);
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

#[test]
fn random_faults_on_a_million_descriptors() {
    let seed = seed(14);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    let total = if cfg!(debug_assertions) { 60_000 } else { 1_200_000 };
    let (mut done, mut rounds, mut broken) = (0, 0, 0);
    while done < total {
        rounds += 1;
        let port = PortConfig {
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
            while world.engines[0].next_broken().is_some() {}
            if step % 8 == 0 {
                for lane in 0..lanes_n {
                    let down = world.engines[0].with_port(lane, |_, r| r[1].generation == 0);
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
