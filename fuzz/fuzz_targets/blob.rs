//! Metadata blobs and the bootstrap handshake: outside bytes never panic, and never pass for a
//! peer.
//!
//! `cargo test --test blob` runs the same body on seeded random inputs.
#![no_main]

#[path = "../blob_body.rs"]
mod blob_body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| blob_body::run(data));
