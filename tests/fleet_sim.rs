//! Whole fleets on the simulated fabric, with every fault at random.
#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "tests")]
#![allow(dead_code, unreachable_pub, unused_imports, reason = "shared support")]

mod fleet;
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
    });
    fleet.calm = true;
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
        while fleet.flights.len() < 6 {
            let Some(flight) = fleet.prepare(0, side) else { break };
            assert!(fleet.post(flight).is_ok());
        }
        fleet.step().unwrap();
    }
    posted(fleet).iter().zip(before).map(|(now, then)| now - then).collect()
}

#[test]
fn a_rail_that_came_back_carries_its_full_share() {
    let seed = seed(7);
    let _tell = Tell(seed);
    for side in 0..2 {
        let mut fleet = four_rails(seed);
        carry(&mut fleet, side, 1_000);
        let before = carry(&mut fleet, side, 20_000);
        let wire = fleet.pairs[0].rails[2].wires[side];
        fleet.world.fabric.cut(wire);
        carry(&mut fleet, side, 10);
        let without = carry(&mut fleet, side, 15);
        assert_eq!(without[2], 0, "the rail is down");
        carry(&mut fleet, side, 1_000);
        assert_eq!(fleet.counts.joins, 1);
        let after = carry(&mut fleet, side, 20_000);
        let sum = |v: &[u64]| v.iter().sum::<u64>() as f64;
        let ratio = sum(&after) / sum(&before);
        println!("side {side}: {before:?} before, {after:?} after: {ratio:.4}");
        assert!((ratio - 1.0).abs() <= 0.01, "bandwidth after the return is {ratio} of before");
        let share = after[2] as f64 / sum(&after);
        assert!((share - 0.25).abs() <= 0.01, "the share of the rail is {share}");
        assert!(sum(&before) > 0.97 * 4.0 * 40.0 * 20_000.0, "the rails were meant to be busy");
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

/// A day of the fleet's time, a tick being a millisecond: episodes with every fault, then everybody
/// parts, then nothing for a while. What is in use is the same every time.
#[test]
fn nothing_grows_over_a_day() {
    const DAY: u64 = 24 * 3_600_000;
    let seed = seed(9);
    let _tell = Tell(seed);
    let every = if cfg!(debug_assertions) { 3_600_000 } else { 120_000 };
    let mut plan = Plan::new(seed);
    plan.read("prefill=2,decode=2,lanes=2,transfers=0,ops=60,len=60,faults=8191").unwrap();
    let mut fleet = Fleet::new(&plan);
    let mut episodes = 0;
    while fleet.now() < DAY {
        (fleet.calm, fleet.plan.transfers) = (false, fleet.posted + 40);
        while fleet.posted < fleet.plan.transfers {
            fleet.step().unwrap();
        }
        fleet.settle().and_then(|()| fleet.check_back()).and_then(|()| fleet.part_all()).unwrap();
        fleet.notes.clear();
        episodes += 1;
        fleet.world.fabric.tick(every);
    }
    let counts = &fleet.counts;
    println!("{episodes} episodes: {counts:?}");
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
