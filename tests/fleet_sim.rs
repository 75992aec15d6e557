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
    let runs = if cfg!(debug_assertions) { 12 } else { 40 };
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
    assert!(seen.len() > runs as usize / 10, "{seen:?}");
    let of_bytes =
        |why: &String| ["but byte", "touched", "is wrong"].iter().any(|w| why.contains(w));
    assert!(seen.iter().any(of_bytes), "{seen:?}");
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
