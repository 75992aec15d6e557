//! Random tables, regions and index lists: the ops against a byte-by-byte reference.
#![no_main]

#[path = "../../tests/table_oracle/mod.rs"]
mod table_oracle;

libfuzzer_sys::fuzz_target!(|data: &[u8]| table_oracle::fuzz_ops(data));
