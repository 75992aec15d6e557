//! kvrail moves a KV cache between machines over several RDMA NICs at once.
//!
//! The crate is a set of layers, and an arrow goes down only (`docs/architecture.md`):
//! [`host`] (std: bootstrap, threads, pools) → [`nic`] (the NIC seam and its drivers) → [`engine`]
//! (rails, transfers, claims, completions, notifications) → [`table`] (regions, descriptors, ops) →
//! [`sync`] (the only place that names an atomic). Everything but [`host`] is `no_std` and
//! allocates nothing.
#![cfg_attr(not(any(feature = "std", test)), no_std)]
#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        reason = "tests fail by panicking"
    )
)]

pub mod engine;
pub mod handle;
#[cfg(feature = "std")]
pub mod host;
pub mod limits;
mod mutant;
pub mod nic;
pub mod status;
pub mod sync;
pub mod table;
