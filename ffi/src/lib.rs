//! C ABI of kvrail: `libkvrail.so`, `libkvrail.a`, `include/kvrail.h`.
//!
//! A thin skin over `kvrail_core::host::Engine`: it checks what crosses (NULL, alignment, lengths,
//! struct sizes), turns errors into codes and texts, and lets no panic out. No transfer logic lives
//! here. The doc comments of the `kvr_` items become the header's comments (`cargo xtask header`);
//! names of invariants in `SAFETY` comments (F1..F9) are explained in `SAFETY.md`.
#![allow(non_camel_case_types, reason = "these are C names")]

mod barrier;
mod pointer;

pub mod config;
pub mod cuda;
pub mod devmem;
pub mod engine;
pub mod error;
pub mod event;
pub mod log;
pub mod notify;
pub mod peer;
pub mod region;
pub mod table;
pub mod transfer;
pub mod types;
