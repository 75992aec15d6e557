//! Whole fleets on the simulated fabric, with every fault at random.
#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "tests")]
#![allow(dead_code, unreachable_pub, unused_imports, reason = "shared support")]

mod fleet;
mod heap;
mod sim_support;

use fleet::*;

/// The run that a failing one printed: `KVRAIL_SEED` and `KVRAIL_FLEET`.
#[test]
#[ignore = "runs one plan, from the environment"]
fn replay() {
    let mut plan = Plan::new(seed(1));
    if let Ok(line) = std::env::var("KVRAIL_FLEET") {
        plan.read(&line).unwrap();
    }
    let start = std::time::Instant::now();
    println!("{}", plan.command());
    println!("{:?} in {:?}", run_or_shrink(&plan).unwrap(), start.elapsed());
}

/// Runs plans from a seed on until so many descriptors were simulated.
fn fleets(base: u64, descriptors: u64) -> Counts {
    let mut all = Counts::default();
    for i in 0.. {
        all.add(&run_or_shrink(&Plan::new(base + i)).unwrap_or_else(|e| panic!("{e}")));
        if all.descriptors >= descriptors {
            println!("seeds {base} to {}: {all:?}", base + i);
            break;
        }
    }
    all
}

#[test]
fn a_million_descriptors() {
    let most = if cfg!(debug_assertions) { 100_000 } else { 1_000_000 };
    fleets(seed(1), most);
}

/// Plans that failed once: the engine, or what this test knew of it, was wrong.
#[test]
fn plans_that_failed_once() {
    let one = "prefill=1,decode=1,lanes=1,stripe=0";
    let mut plans = vec![
        // Transfers starved where queues were full before the credits were gone.
        (777_000_007_022, "decode=2,transfers=31,ops=300,len=100,faults=0"),
        // A queue of two entries and a long delay needs its time.
        (777_000_007_572, "transfers=11,ops=1200,len=25,faults=0"),
        // Messages that wait for others, on streams that are cut again and again.
        (777_000_002_540, "transfers=125,ops=1200,len=2,faults=dereg"),
        (777_000_000_453, "transfers=125,ops=600,len=100,faults=slow+full+access+break"),
    ];
    if !cfg!(debug_assertions) {
        plans.push((777_000_002_946, "transfers=200,ops=1200,len=1,faults=0"));
    }
    for (seed, line) in plans {
        let mut plan = Plan::new(seed);
        plan.read(one).and_then(|()| plan.read(line)).unwrap();
        run(&plan).unwrap_or_else(|e| panic!("{}: {e}", plan.command()));
    }
}

/// The naive engine: a WRITE that a dead rail may still bring is sent again, and done when that has
/// arrived. The fleet must see what lands afterwards.
#[test]
fn without_a_fence_late_packets_are_seen() {
    let runs = if cfg!(debug_assertions) { 20 } else { 60 };
    let wrong = |naive| {
        let fails = (0..runs).filter_map(|i| {
            let mut plan = Plan::new(40 + i);
            plan.read("prefill=2,decode=2,lanes=3,transfers=200,faults=cut+late+pause").unwrap();
            plan.naive = naive;
            run(&plan).err()
        });
        fails.collect::<Vec<_>>()
    };
    assert_eq!(wrong(0), [""; 0]);
    let seen = wrong(1);
    println!("{} of {runs} runs without a fence were seen to go wrong", seen.len());
    assert!(seen.len() >= 2, "{seen:?}");
    let of_bytes =
        |why: &String| ["but byte", "touched", "is wrong"].iter().any(|w| why.contains(w));
    assert!(seen.iter().any(of_bytes), "{seen:?}");
}

/// Two engines with four rails, without faults of their own.
fn four_rails(seed: u64) -> Fleet {
    let mut plan = Plan::new(seed);
    plan.read("prefill=1,decode=1,lanes=4,stripe=0,ops=1200,len=100,faults=late").unwrap();
    let mut fleet = Fleet::with(&plan, |setup| {
        setup.port = PortConfig { rate: 40, window: 4_000, batch_bytes: 1_000, late: true, ..PORT };
        setup.tuning.inline_bytes = 0;
        setup.chop = 0;
    });
    fleet.calm = true;
    // A sender is not held up by a reader that looks rarely.
    fleet.sites.iter_mut().for_each(|site| site.looks_every = 1);
    while !fleet.pairs[0].is_up() {
        fleet.step().unwrap();
    }
    fleet
}

/// Steps with transfers always there to carry; bytes that each lane of one side carried.
fn carry(fleet: &mut Fleet, side: usize, ticks: u64) -> Vec<u64> {
    let posted = |fleet: &Fleet| -> Vec<u64> {
        let lanes = fleet.core(0, side).lanes();
        let of = |s: &kvrail::engine::lane::LaneStats| {
            s.bytes_read.load(RELAXED) + s.bytes_written.load(RELAXED)
        };
        lanes.iter().map(|l| of(&l.stats)).collect()
    };
    let before = posted(fleet);
    for _ in 0..ticks {
        while fleet.flights.len() < 10 {
            let Some(flight) = fleet.prepare(0, side) else { break };
            assert!(fleet.post(flight).is_ok());
        }
        fleet.step().unwrap();
    }
    posted(fleet).iter().zip(before).map(|(now, then)| now - then).collect()
}

/// How a rail breaks.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// What is sent ends with an error.
    Cut,
    /// Nothing is heard of what is sent, on neither side.
    Silence,
    /// It is cut, and so is what comes after it as soon as that is there, several times.
    Flaps,
}

/// Breaks a rail while transfers go on, and waits for its return.
fn lose(fleet: &mut Fleet, side: usize, lane: usize, loss: Loss) {
    let times = if matches!(loss, Loss::Flaps) { 5 } else { 1 };
    for i in 0..times {
        let (joins, wire) = (fleet.counts.joins, fleet.pairs[0].rails[lane].wires[side]);
        match loss {
            Loss::Silence => fleet.world.fabric.mute(wire, true),
            _ => fleet.world.fabric.cut(wire),
        }
        carry(fleet, side, 10);
        assert_eq!(carry(fleet, side, 9)[lane], 0, "{loss:?}: the rail is down");
        while fleet.counts.joins == joins {
            carry(fleet, side, 1);
        }
        // It may have begun anew, or not.
        carry(fleet, side, 40 * (i % 3));
    }
}

/// Bytes in a tick that each lane's rail carries.
const EQUAL: [u64; 4] = [40; 4];
const UNEQUAL: [u64; 4] = [40, 80, 20, 60];

#[test]
fn a_rail_that_came_back_carries_its_full_share() {
    let first = seed(7);
    let _tell = Tell(first);
    let ticks = 40_000;
    let cases = (0..2).flat_map(|side| [(side, EQUAL), (side, UNEQUAL)]);
    let seeds = first..first + if cfg!(debug_assertions) { 1 } else { 2 };
    for (seed, (side, rates)) in seeds.flat_map(|s| cases.clone().map(move |c| (s, c))) {
        let mut fleet = four_rails(seed);
        for (e, lane) in (0..2).flat_map(|e| (0..4).map(move |l| (e, l))) {
            let (slot, rate) = (fleet.slot(0, e), rates[lane as usize]);
            fleet.core(0, e).with_port(lane, |port| port.set_speed(slot, rate, PORT.delay));
        }
        carry(&mut fleet, side, 1_000);
        let sum = |v: &[u64]| v.iter().sum::<u64>() as f64;
        let before = carry(&mut fleet, side, ticks);
        let most = rates.iter().sum::<u64>() * ticks;
        assert!(sum(&before) > 0.95 * most as f64, "the rails were meant to be busy: {before:?}");
        let turn = seed as usize + side;
        for (i, loss) in [Loss::Cut, Loss::Silence, Loss::Flaps].into_iter().enumerate() {
            let lane = (turn + i) % 4;
            lose(&mut fleet, side, lane, loss);
            carry(&mut fleet, side, 1_000);
            let after = carry(&mut fleet, side, ticks);
            let ratio = sum(&after) / sum(&before);
            let text = format!("side {side}, rail {lane}, {loss:?}: {before:?} before, {after:?}");
            println!("seed {seed}, {text} after: {ratio:.4}");
            assert!((ratio - 1.0).abs() <= 0.01, "{text} after: {ratio} of the bandwidth");
            for (now, then) in after.iter().zip(&before) {
                let share = *now as f64 / sum(&after) * sum(&before) / *then as f64;
                assert!((share - 1.0).abs() <= 0.02, "{text} after: {share} of a rail's share");
            }
        }
        assert_eq!(fleet.counts.joins, 7);
    }
}

#[test]
fn a_dead_rail_costs_at_most_what_it_had_in_flight() {
    let seed = seed(8);
    let _tell = Tell(seed);
    let mut repeated = 0;
    for (round, side) in (0..60).flat_map(|r| [(r, 0), (r, 1)]) {
        let mut fleet = four_rails(seed + round);
        let flight = (0..).find_map(|_| {
            let flight = fleet.prepare(0, side)?;
            if flight.bytes() < 8_000 {
                fleet.scrap(flight);
                return None;
            }
            Some(flight)
        });
        let flight = flight.unwrap();
        let bytes = flight.bytes();
        assert!(fleet.post(flight).is_ok());
        (0..round).for_each(|_| fleet.step().unwrap());
        let wire = fleet.pairs[0].rails[(round % 4) as usize].wires[side];
        fleet.world.fabric.cut(wire);
        while fleet.counts.done == 0 {
            fleet.step().unwrap();
        }
        let lanes = fleet.core(0, side).lanes();
        let again = lanes.iter().map(|l| l.stats.posted()).sum::<u64>() - bytes;
        // A lane takes no more when its window is full; the batch before that may exceed it.
        assert!(again <= 4_000 + 1_000, "{again} bytes of {bytes} were sent again");
        repeated += u64::from(again > 0);
    }
    assert!(repeated > 40, "{repeated} only had anything in flight");
}

/// A day of the fleet's time, a tick being a millisecond: episodes with every fault, after which
/// everybody parts, then nothing for a while. Each hour everything is given back, and what is held
/// then is the same as after the first.
#[test]
fn nothing_grows_over_a_day() {
    assert_eq!(counted(|| drop(core::hint::black_box(vec![1u8; 99]))), 0);
    assert_eq!(counted(|| core::mem::forget(core::hint::black_box(vec![1u8; 99]))), 99);
    const HOUR: u64 = 3_600_000;
    let seed = seed(9);
    let _tell = Tell(seed);
    let each = if cfg!(debug_assertions) { 3 } else { 30 };
    let mut plan = Plan::new(seed);
    plan.read("prefill=2,decode=2,lanes=2,transfers=0,ops=60,len=60,faults=8191").unwrap();
    let mut fleet = Fleet::new(&plan);
    let (mut episodes, mut first) = (0, None);
    for hour in 1..=24 {
        let start = fleet.now();
        for _ in 0..each {
            (fleet.calm, fleet.plan.transfers) = (false, fleet.posted + 40);
            while fleet.posted < fleet.plan.transfers {
                fleet.step().unwrap();
            }
            fleet.settle().and_then(|()| fleet.check_back()).unwrap();
            fleet.part_all().unwrap();
            fleet.notes.clear();
            episodes += 1;
            fleet.world.fabric.tick(HOUR / (2 * each));
        }
        fleet.world.fabric.tick((start + HOUR).saturating_sub(fleet.now()));
        let rest = fleet.lie_down().unwrap();
        assert_eq!(rest, *first.get_or_insert(rest.clone()), "held after hour {hour}, and hour 1");
        fleet.rise();
    }
    let (counts, hours) = (&fleet.counts, fleet.now() / HOUR);
    println!("{hours} hours, {episodes} episodes: {counts:?}\n{first:?}");
    assert!(hours >= 24);
    assert!(counts.kills > 0 || cfg!(debug_assertions), "nobody was killed");
    assert!(counts.joins > 0 && counts.failed > 0 && counts.withdrawals > 0);
}

fn number(name: &str, own: u64) -> u64 {
    std::env::var(name).ok().and_then(|s| s.parse().ok()).unwrap_or(own)
}

/// `make nightly`: many seeds on all cores.
#[test]
#[ignore = "runs for minutes: make nightly"]
fn nightly() {
    let base = number("SEED", 1_000_000);
    let total = number("DESCRIPTORS", 100_000_000);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let next = core::sync::atomic::AtomicU64::new(0);
    let sum = std::sync::Mutex::new((Counts::default(), Vec::new()));
    println!("base seed {base}, at least {total} descriptors, {cores} threads");
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| loop {
                let (counts, failures) = {
                    let s = sum.lock().unwrap();
                    (s.0.descriptors, s.1.len())
                };
                if counts >= total || failures >= 5 {
                    break;
                }
                let seed = base + next.fetch_add(1, RELAXED);
                let result = run_or_shrink(&Plan::new(seed));
                let mut s = sum.lock().unwrap();
                match result {
                    Ok(counts) => {
                        s.0.add(&counts);
                        let (n, all) = (counts.descriptors, s.0.descriptors);
                        println!("seed {seed}: {n} descriptors, {all} in all");
                    }
                    Err(why) => s.1.push(format!("seed {seed}: {why}")),
                }
            });
        }
    });
    let (counts, failures) = sum.into_inner().unwrap();
    println!("base seed {base}, {} runs: {counts:#?}", next.into_inner());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
