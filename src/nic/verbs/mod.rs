//! NICs through libibverbs.

pub mod mail;
