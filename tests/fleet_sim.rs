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
    println!("{:?} in {:?}", must_pass(&plan), start.elapsed());
}

/// Runs plans from a seed on until so many descriptors were simulated.
fn fleets(base: u64, descriptors: u64) -> Counts {
    let mut all = Counts::default();
    for i in 0.. {
        all.add(&must_pass(&Plan::new(base + i)));
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
