//! NIC selection: no tree of sysfs and procfs makes it panic, or choose what the rule forbids.
//!
//! `cargo test --test nics` runs the same body on seeded random inputs.
#![no_main]

#[path = "../nics_body.rs"]
mod nics_body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nics_body::run(data);
});
