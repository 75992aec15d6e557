//! The C ABI: calls in any order, over two engines of this process and transport `local`.
#![no_main]

#[path = "../cabi_args.rs"]
mod cabi_args;
#[path = "../cabi_body.rs"]
mod cabi_body;
#[path = "../cabi_model.rs"]
mod cabi_model;
#[path = "../cabi_moves.rs"]
mod cabi_moves;
#[path = "../draw.rs"]
#[allow(dead_code, reason = "each target uses a part")]
mod draw;

libfuzzer_sys::fuzz_target!(init: cabi_args::quiet(), |data: &[u8]| cabi_body::run(data));
