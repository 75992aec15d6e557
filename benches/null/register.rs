//! What registrations cost over the null NIC: many calls, one call for many ranges that lie apart,
//! and one call for ranges that touch. Started by `register.py`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench fails so")]
#![allow(dead_code, reason = "shared support")]

#[path = "sides.rs"]
mod sides;

use std::time::Instant;

use kvrail::handle::Handle;
use sides::{counter, engine, Args, Memory};

fn main() {
    let mut args = Args::new();
    let rails = args.number("rails", 4) as usize;
    let (count, len) = (args.number("count", 1265), args.number("len", 1 << 20));
    let how = args.word("how", &["separate", "apart", "touching"]);
    args.end();
    let e = engine("a", 0, rails, |_| ());
    let stride = if how == "touching" { len } else { 2 * len };
    let memory = Memory::new(count * stride);
    let ranges: Vec<_> = (0..count).map(|i| (memory.base() + i * stride, len)).collect();
    let before = counter("live.mr");
    let start = Instant::now();
    let regions: Vec<Handle> = match how.as_str() {
        "separate" => ranges.iter().map(|(at, len)| e.register(*at, *len, 0).unwrap()).collect(),
        _ => e.register_list(&ranges, 0).unwrap(),
    };
    let register = start.elapsed().as_nanos();
    let mrs = counter("live.mr") - before;
    let start = Instant::now();
    let mut last = None;
    for r in regions {
        // Ranges that became one region come one after the other here.
        if last.replace(r) != Some(r) {
            e.deregister(r.raw(), false).unwrap();
        }
    }
    let deregister = start.elapsed().as_nanos();
    println!(
        "{{\"register_ns\": {register}, \"deregister_ns\": {deregister}, \"mrs\": {mrs}, \
         \"at_once\": {}}}",
        counter("reg_most")
    );
    drop(e);
    drop(memory);
}
