//! NIC selection over trees that the tests build: every layout that went wrong for somebody, every
//! decision where the rule is silent, and every text form of addresses and routes.
#![cfg(feature = "std")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

#[path = "../fuzz/nics_body.rs"]
mod body;
#[path = "nics/layouts.rs"]
mod layouts;
#[path = "nics/rules.rs"]
mod rules;
#[path = "nics/texts.rs"]
mod texts;
#[path = "nics/tree.rs"]
mod tree;

use kvrail::host::nics::{select, Request, Selection};
use tree::Tree;

/// Selects below `tree`; `names` as `KVRAIL_NICS` has them.
fn pick(tree: &Tree, numa: i32, names: &str) -> Selection {
    let names = names.split(',').filter(|n| !n.is_empty()).map(String::from).collect();
    select(&Request { sysroot: tree.root.clone(), numa: Some(numa), names })
}

/// Rails as `mlx5_0:1#3`: device, port, GID.
fn rails(found: &Selection) -> String {
    let rail = |n: &kvrail::host::nics::Nic| format!("{}:{}#{}", n.device, n.port, n.gid_index);
    found.nics.iter().map(rail).collect::<Vec<_>>().join(" ")
}

/// The reason against `mlx5_0:1`; empty when it is a rail.
fn reason<'s>(found: &'s Selection, label: &str) -> &'s str {
    let verdict = found.verdicts.iter().find(|v| v.label() == label);
    &verdict.unwrap_or_else(|| panic!("no {label} in {found:#?}")).reason
}

/// The fuzz target's body on random inputs; the seed of a failing one is printed.
#[test]
fn random_trees_break_no_rule() {
    let mut rails = 0;
    for seed in 1..=300u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut next = || {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        };
        let data: Vec<u8> = (0..16 + seed % 240).map(|_| next()).collect();
        let run = std::panic::catch_unwind(|| body::run(&data));
        assert!(run.is_ok(), "seed {seed}");
        rails += run.unwrap_or(0);
    }
    assert!(rails > 100, "only {rails} rails: the trees are all broken, and test nothing");
}
