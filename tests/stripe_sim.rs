//! How a striped transfer is shared out over rails, on the simulated fabric, where each rail has a
//! speed of its own and time is virtual. `KVRAIL_SEED` replays a failing seed.
#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "tests")]
#![allow(dead_code, unreachable_pub, unused_imports, reason = "shared support")]

mod sim_support;

use core::sync::atomic::Ordering::Relaxed as RELAXED;
use kvrail::nic::sim::{PortConfig, Rng};
use kvrail::status::Status;
use kvrail::table::Direction;
use sim_support::*;

const RAILS: usize = 4;
/// Bytes in a tick on a rail of full speed.
const RATE: u64 = 4096;
/// Ticks from the last byte to the completion: as many as 8 KiB take.
const DELAY: u64 = 2;
const KIB: usize = 1024;

/// A lane with the sizes of an RDMA rail.
const RAIL: PortConfig = PortConfig {
    depth: 256,
    credits: 256,
    batch_ops: 64,
    batch_bytes: 1 << 20,
    window: 4 << 20,
    rate: RATE,
    delay: DELAY,
    signal: 32,
    ..PORT
};

/// A striped transfer of blocks on its way.
struct Load {
    world: World,
    transfer: Transfer,
    lens: Vec<usize>,
    rates: Vec<u64>,
    /// When it was posted.
    start: u64,
    _memory: [Memory; 2],
}

impl Load {
    /// Posts blocks of these lengths over rails of these speeds. A transfer of at most `inline`
    /// bytes is carried in post.
    fn new(rates: &[u64], lens: Vec<usize>, inline: u64, rng: &mut Rng) -> Load {
        let limits = kvrail::limits::Limits { lanes: rates.len() as u32, ..LIMITS };
        let setup = Setup { limits, auto_tick: 0, ..with_port(striped(SETUP, true), RAIL) };
        let tuning = kvrail::engine::core::Tuning { inline_bytes: inline, ..setup.tuning };
        let world = World::new(Setup { tuning, ..setup });
        world.connect(0, 1);
        // The blocks lie over each other: only the time that they take is of interest here.
        let room = 2 * lens.iter().max().unwrap();
        let local = Memory::new(&world, 0, room, |_| 1);
        let remote = Memory::new(&world, 1, room, |_| 2);
        let key = remote.import(&world, 0);
        let mut place = || rng.below(room as u64 / 2) as usize;
        let pairs: Vec<Pair> = lens.iter().map(|&len| (place(), place(), len)).collect();
        let both = ((0, &local), (&remote, key));
        let transfer = prepare(&world, Direction::Write, both.0, both.1, &pairs).unwrap();
        let start = world.fabric.now();
        let rates = rates.to_vec();
        let load = Load { world, transfer, lens, rates, start, _memory: [local, remote] };
        (0..load.rates.len()).for_each(|lane| load.set_rate(lane, load.rates[lane]));
        load.engine().post(load.transfer.raw(), None).unwrap();
        load
    }

    fn engine(&self) -> &Engine {
        &self.world.engines[0]
    }

    fn set_rate(&self, lane: usize, rate: u64) {
        self.engine().with_port(lane as u32, |p| p.set_speed(1, rate, DELAY));
    }

    fn size(&self) -> u64 {
        self.lens.iter().map(|&len| len as u64).sum()
    }

    /// Lets time pass until `enough` bytes arrived, or all. `pace`: whoever polls comes by so often
    /// in a tick, or once in so many ticks.
    fn run(&self, pace: Pace, enough: u64) {
        let e = self.engine();
        for tick in 0.. {
            let rounds = match pace {
                Pace::Often(n) => n,
                Pace::Seldom(n) => u64::from(tick % n == 0),
            };
            (0..rounds).for_each(|_| _ = e.poll());
            let info = e.info(self.transfer.raw()).unwrap();
            if info.status != Status::InProgress {
                assert_eq!((info.status, info.bytes_done), (Status::Ok, self.size()));
                return;
            }
            if info.bytes_done >= enough {
                return;
            }
            self.world.fabric.tick(1);
            assert!(tick < 1_000_000, "it hangs: {info:?}");
        }
    }

    /// Ticks since it was posted.
    fn ticks(&self) -> f64 {
        (self.world.fabric.now() - self.start) as f64
    }

    /// Ticks that the rails need if none is ever idle and all end at once.
    fn fluid(&self) -> f64 {
        self.size() as f64 / self.rates.iter().sum::<u64>() as f64 + DELAY as f64
    }

    /// Bytes that each rail carried.
    fn carried(&self) -> Vec<u64> {
        (0..self.rates.len() as u32).map(|lane| carried(&self.world, 0, 1, lane)).collect()
    }

    /// Claims so far, each of which is one doorbell.
    fn claims(&self) -> u64 {
        let of = |l: &kvrail::engine::lane::Lane<'_, _>| l.stats.claims.load(RELAXED);
        self.engine().lanes().iter().map(of).sum()
    }
}

/// How often somebody polls all lanes.
#[derive(Clone, Copy, Debug)]
enum Pace {
    Often(u64),
    Seldom(u64),
}

/// Posting is far faster than the rails, about as fast, and slower.
const PACES: [Pace; 3] = [Pace::Often(10), Pace::Often(1), Pace::Seldom(8)];

/// The reference work: 10,000 blocks of 1 KiB.
fn reference() -> Vec<usize> {
    vec![KIB; 10_000]
}

#[test]
fn equal_rails_carry_equal_bytes() {
    let mut rng = Rng::new(seed(31));
    for pace in PACES {
        let load = Load::new(&[RATE; RAILS], reference(), 0, &mut rng);
        load.run(pace, u64::MAX);
        let (carried, part) = (load.carried(), load.size() / RAILS as u64);
        for bytes in &carried {
            assert!(bytes.abs_diff(part) * 100 <= part, "{pace:?}: {carried:?}, {part} each");
        }
    }
}

/// Posts blocks with one rail at a quarter of the speed, and compares the time that they take with
/// what is possible.
fn with_a_slow_rail(lens: &[usize], pace: Pace, within: f64, rng: &mut Rng) {
    for slow in 0..RAILS {
        let mut rates = [RATE; RAILS];
        rates[slow] = RATE / 4;
        let load = Load::new(&rates, lens.to_vec(), 0, rng);
        load.run(pace, u64::MAX);
        let ratio = load.ticks() / load.fluid();
        let what = (lens.len(), lens[0], slow, pace, load.carried());
        println!("{ratio:.3} {what:?}");
        assert!(ratio <= within, "{ratio:.3} of the fluid optimum: {what:?}");
    }
}

#[test]
fn a_rail_at_a_quarter_of_the_speed_does_not_hold_up_the_end() {
    let seed = seed(32);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    for pace in [Pace::Often(1), Pace::Seldom(4)] {
        with_a_slow_rail(&reference(), pace, 1.05, &mut rng);
        for (n, kib) in [(5_000, 1), (20_000, 1), (2_500, 4), (1_000, 64), (100, 1024)] {
            with_a_slow_rail(&vec![kib * KIB; n], pace, 1.05, &mut rng);
        }
        let mixed: Vec<usize> = (0..2_000).map(|_| 1 + rng.below(32 << 10) as usize).collect();
        with_a_slow_rail(&mixed, pace, 1.05, &mut rng);
    }
}

#[test]
fn a_rail_that_becomes_slow_or_fast_again_is_noticed() {
    let mut rng = Rng::new(seed(33));
    let lens = vec![16 * KIB; 10_000];
    for (before, after) in [(RATE, RATE / 4), (RATE / 4, RATE)] {
        let load = Load::new(&[RATE, RATE, RATE, before], lens.clone(), 0, &mut rng);
        load.run(Pace::Often(1), load.size() / 2);
        load.set_rate(3, after);
        load.run(Pace::Often(1), u64::MAX);
        let half = load.size() as f64 / 2.0;
        let ideal = half / (3 * RATE + before) as f64 + half / (3 * RATE + after) as f64;
        let ratio = load.ticks() / (ideal + DELAY as f64);
        // More than without the change: a part follows a speed some claims later.
        assert!(ratio <= 1.08, "{before} to {after}: {ratio:.3} of the fluid optimum");
    }
}

#[test]
fn a_rail_that_comes_back_carries_its_part_again() {
    let mut rng = Rng::new(seed(34));
    let load = Load::new(&[RATE; RAILS], vec![4 * KIB; 10_000], 0, &mut rng);
    load.run(Pace::Often(1), load.size() / 4);
    load.engine().with_port(3, |p| p.fail_nth(1, 1, kvrail::nic::WrStatus::RailError));
    load.run(Pace::Often(1), load.size() / 2);
    load.world.connect_rail(0, 1, 3);
    load.set_rate(3, RATE);
    let before = load.carried()[3];
    load.run(Pace::Often(1), u64::MAX);
    let after = load.carried()[3] - before;
    assert!(after > load.size() / 2 / 5, "{after} bytes of the second half, of {}", load.size());
}

#[test]
fn a_rail_that_brought_little_and_comes_back_late_carries_its_part_again() {
    let mut rng = Rng::new(seed(38));
    let load = Load::new(&[RATE; RAILS], vec![64 * KIB; 60_000], 0, &mut rng);
    // It brings its first claim, of 1 MiB, and breaks.
    load.engine().with_port(3, |p| p.fail_nth(1, 17, kvrail::nic::WrStatus::RailError));
    load.run(Pace::Often(1), 2 << 30);
    load.world.connect_rail(0, 1, 3);
    load.set_rate(3, RATE);
    let before = load.carried()[3];
    load.run(Pace::Often(1), u64::MAX);
    let after = load.carried()[3] - before;
    let rest = load.size() - (2 << 30);
    println!("{before} before, {after} of the last {rest}");
    assert!(after > rest / 5, "{after} bytes of the last {rest}; {before} before");
}

#[test]
fn a_rail_that_comes_up_under_a_transfer_carries_its_part_of_it() {
    let mut rng = Rng::new(seed(39));
    let load = Load::new(&[RATE; RAILS], vec![4 * KIB; 10_000], 0, &mut rng);
    load.run(Pace::Often(1), u64::MAX);
    load.engine().fail_rail(3, 1);
    load.engine().fence(3, 1);
    load.engine().post(load.transfer.raw(), None).unwrap();
    load.run(Pace::Often(1), load.size() / 4);
    load.world.connect_rail(0, 1, 3);
    load.set_rate(3, RATE);
    load.engine().kick(1);
    let before = load.carried()[3];
    load.run(Pace::Often(1), u64::MAX);
    let after = load.carried()[3] - before;
    assert!(after > load.size() / 8, "{after} bytes of three quarters of {}", load.size());
}

#[test]
fn a_transfer_is_not_left_to_a_lane_that_does_not_know_of_it() {
    let mut rng = Rng::new(seed(40));
    let load = Load::new(&[RATE; RAILS], vec![4 * KIB; 2_000], 0, &mut rng);
    load.run(Pace::Often(1), u64::MAX);
    for lane in 1..4 {
        load.engine().fail_rail(lane, 1);
        load.engine().fence(lane, 1);
    }
    load.engine().post(load.transfer.raw(), None).unwrap();
    for lane in 1..4 {
        load.world.connect_rail(0, 1, lane);
    }
    load.engine().kick(1);
    // Bytes of others, whose only rail it is: 1 MiB is below the window, 4 MiB.
    load.engine().lanes()[0].outstanding.fetch_add(1 << 20, RELAXED);
    let end = load.world.fabric.now() + 20 * load.size() / RATE;
    while load.world.fabric.now() < end {
        load.engine().poll();
        load.world.fabric.tick(1);
    }
    let info = load.engine().info(load.transfer.raw()).unwrap();
    load.engine().lanes()[0].outstanding.fetch_sub(1 << 20, RELAXED);
    load.run(Pace::Often(1), u64::MAX);
    assert_eq!(info.status, Status::Ok, "20 times as long as one rail needs: {info:?}");
}

#[test]
fn a_lane_that_is_busy_with_others_gets_less() {
    let mut rng = Rng::new(seed(35));
    let load = Load::new(&[RATE; RAILS], reference(), 0, &mut rng);
    // Bytes of others, as far as anybody can see.
    load.engine().lanes()[1].outstanding.fetch_add(1 << 30, RELAXED);
    load.run(Pace::Often(1), u64::MAX);
    load.engine().lanes()[1].outstanding.fetch_sub(1 << 30, RELAXED);
    let carried = load.carried();
    assert_eq!(carried[1], 0, "{carried:?}");
}

#[test]
fn long_lists_of_small_blocks_need_a_doorbell_for_32_of_them_at_most() {
    let mut rng = Rng::new(seed(36));
    for n in [256, 1_000, 10_000, 100_000] {
        for pace in PACES {
            let load = Load::new(&[RATE; RAILS], vec![KIB; n], 0, &mut rng);
            load.run(pace, u64::MAX);
            let claims = load.claims();
            assert!(claims * 32 <= n as u64, "{n} blocks, {pace:?}: {claims} claims");
        }
    }
}

#[test]
fn a_short_list_is_on_its_way_when_post_returns_and_has_one_doorbell() {
    let mut rng = Rng::new(seed(37));
    for n in [1, 2, 33, 64] {
        let load = Load::new(&[RATE; RAILS], vec![KIB; n], 64 << 10, &mut rng);
        assert_eq!((queued(&load.world, 0, 1), load.claims()), (n as u32, 1));
        let waits = |lane: &kvrail::engine::lane::Lane<'_, _>| lane.next_active(0).is_some();
        assert!(!load.engine().lanes().iter().any(waits), "nothing is left for others to do");
        load.run(Pace::Often(1), u64::MAX);
        assert_eq!(load.ticks() as u64, (n * KIB) as u64 / RATE + DELAY + u64::from(n % 4 != 0));
    }
}

/// Four transfers of one engine, over four rails, one rail each.
fn four(background: bool) -> (World, [Transfer; 4], (Memory, Memory)) {
    // What was posted is complete at the next poll, so that each poll moves something.
    let mut setup = with_port(striped(lanes(4), false), PortConfig { rate: 0, delay: 0, ..PORT });
    setup.tuning.background = background;
    let world = World::new(setup);
    world.connect(0, 1);
    let far = Memory::new(&world, 1, 4_000, |i| i as u8);
    let (key, near) = (far.import(&world, 0), Memory::new(&world, 0, 4_000, |_| 0));
    let pairs: Vec<Pair> = (0..40).map(|i| (i * 100, i * 100, 90)).collect();
    let one = || prepare(&world, Direction::Read, (0, &near), (&far, key), &pairs).unwrap();
    let transfers = [one(), one(), one(), one()];
    (world, transfers, (near, far))
}

/// Bytes that each lane of the posting engine was given.
fn posted(world: &World) -> Vec<u64> {
    world.engines[0].lanes().iter().map(|l| l.stats.posted()).collect()
}

#[test]
fn transfers_that_find_all_rails_idle_go_to_different_ones() {
    let (world, transfers, _memory) = four(true);
    for t in &transfers {
        world.engines[0].post(t.raw(), None).unwrap();
        assert_eq!(world.finish(0, t, 10_000), Status::Ok);
    }
    assert_eq!(posted(&world), [3_600; 4]);
}

#[test]
fn who_waits_for_a_transfer_moves_its_rail_and_sometimes_all() {
    let (world, [a, b, ..], _memory) = four(false);
    let e = &world.engines[0];
    e.post(a.raw(), None).unwrap();
    assert_eq!(world.finish(0, &a, 10_000), Status::Ok);
    // Its first look, which is at all lanes, is over.
    let before = posted(&world);
    e.post(a.raw(), None).unwrap();
    e.post(b.raw(), None).unwrap();
    assert_eq!(posted(&world), before, "published, and nobody polled");
    assert_eq!(e.check(a.raw()), Ok(Status::InProgress));
    let after = posted(&world);
    let grown: Vec<usize> = (0..4).filter(|&i| after[i] > before[i]).collect();
    assert_eq!(grown.len(), 1, "its own: {before:?}, {after:?}");
    // Nobody asks about the other one, and it ends all the same.
    for _ in 0..10_000 {
        if e.info(b.raw()).unwrap().status == Status::Ok {
            return;
        }
        if e.check(a.raw()) == Ok(Status::Ok) {
            e.post(a.raw(), None).unwrap();
        }
        world.tend(0);
    }
    panic!("left alone: {:?}", e.info(b.raw()));
}
