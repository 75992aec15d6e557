//! The message protocol: two honest ends over links of any temper that break and come back, and one
//! end alone with foreign bytes.
#![no_main]

#[path = "../channel_body.rs"]
mod channel_body;
#[path = "../channel_end.rs"]
mod channel_end;
#[path = "../channel_pipe.rs"]
mod channel_pipe;
#[path = "../draw.rs"]
#[allow(dead_code, reason = "each target uses a part")]
mod draw;
#[path = "../input.rs"]
#[allow(dead_code, reason = "each target uses a part")]
mod input;

libfuzzer_sys::fuzz_target!(|data: &[u8]| channel_body::run(data));
