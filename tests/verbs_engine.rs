//! Whole engines with transport `verbs` over the fake libibverbs (`tests/fakeverbs`): data and
//! messages, pairing of rails, strangers, limits of devices, registrations, faults.
//!
//! The fake has one state for a process, and engines read `KVRAIL_IBVERBS` and `KVRAIL_SYSROOT`
//! when they are made. So every test runs in a process of its own: this binary again, with that
//! test only (`fake::alone`). Skipped loudly where gcc or the headers of libibverbs are missing;
//! `STRICT=1` makes that a failure.
#![cfg(all(feature = "std", target_os = "linux"))]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

/// The fake for the test that this stands in; returns from the test where there is none, and in
/// the process that only starts another one for it.
macro_rules! alone {
    ($devices:expr, $knobs:expr) => {{
        fn here() {}
        match crate::fake::alone(core::any::type_name_of_val(&here), $devices, $knobs) {
            Some(fake) => fake,
            None => return,
        }
    }};
}

mod heap;

#[path = "verbs_engine/fake.rs"]
mod fake;
#[path = "verbs_engine/rig.rs"]
mod rig;

#[path = "verbs_engine/byhand.rs"]
mod byhand;
#[path = "verbs_engine/cost.rs"]
mod cost;
#[path = "verbs_engine/cycles.rs"]
mod cycles;
#[path = "verbs_engine/devmem.rs"]
mod devmem;
#[path = "verbs_engine/events.rs"]
mod events;
#[path = "verbs_engine/faults.rs"]
mod faults;
#[path = "verbs_engine/flush.rs"]
mod flush;
#[path = "verbs_engine/graves.rs"]
mod graves;
#[path = "verbs_engine/limits.rs"]
mod limits;
#[path = "verbs_engine/moves.rs"]
mod moves;
#[path = "verbs_engine/pairing.rs"]
mod pairing;
#[path = "verbs_engine/processes.rs"]
mod processes;
#[path = "verbs_engine/rebirth.rs"]
mod rebirth;
#[path = "verbs_engine/regions.rs"]
mod regions;
#[path = "verbs_engine/rejoin.rs"]
mod rejoin;
#[path = "verbs_engine/strangers.rs"]
mod strangers;
#[path = "verbs_engine/watch.rs"]
mod watch;
