//! The reference work over the null NIC: one engine writes to or reads from another one in this
//! process. Each phase is a function of its own, so that callgrind counts it apart.
//!
//! `bench.py` starts it, with the environment that it needs: `KVRAIL_IBVERBS`, `KVRAIL_SYSROOT`,
//! and eight devices, of which `fake4` to `fake7` are the peer's.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench fails so")]

use core::hint::black_box;
use core::time::Duration;
use std::time::Instant;

use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::status::Status;
use kvrail::table::{Desc, Direction};

const RAILS: usize = 4;
/// Only against hangs.
const HANG: Duration = Duration::from_secs(120);

/// What is carried, and how often.
struct Work {
    direction: Direction,
    /// Prepared once, posted each time.
    again: bool,
    descs: usize,
    len: u64,
    regions: usize,
    /// Blocks in order without gaps: everything merges.
    contiguous: bool,
    rounds: u32,
}

/// The transfer's parties, and the index lists into their tables.
struct Sides {
    engine: Engine,
    peer: u64,
    tables: [u64; 2],
    lists: [Vec<u32>; 2],
}

#[inline(never)]
fn phase_prepare(s: &Sides, direction: Direction) -> u64 {
    let [local, remote] = s.tables;
    let [here, there] = [&s.lists[0], &s.lists[1]];
    s.engine.prepare(direction, s.peer, local, here, remote, there).unwrap().raw()
}

#[inline(never)]
fn phase_post(s: &Sides, transfer: u64) -> Status {
    s.engine.post(transfer, None).unwrap()
}

#[inline(never)]
fn phase_poll(s: &Sides, transfer: u64) -> u32 {
    let mut polls = 1;
    while s.engine.check(transfer).unwrap() != Status::Ok {
        polls += 1;
    }
    polls
}

#[inline(never)]
fn phase_release(s: &Sides, transfer: u64) {
    s.engine.release(transfer).unwrap();
}

fn parsed() -> Work {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [op, kind, descs, len, regions, order, rounds] = &args[..] else {
        panic!("usage: null-work write|read fresh|again DESCS LEN REGIONS random|contiguous ROUNDS")
    };
    let one_of = |value: &str, no: &str, yes: &str| {
        assert!(value == no || value == yes, "`{value}` is neither `{no}` nor `{yes}`");
        value == yes
    };
    let read = one_of(op, "write", "read");
    Work {
        direction: if read { Direction::Read } else { Direction::Write },
        again: one_of(kind, "fresh", "again"),
        descs: descs.parse().expect("DESCS is a number"),
        len: len.parse().expect("LEN is a number"),
        regions: regions.parse().expect("REGIONS is a number"),
        contiguous: one_of(order, "random", "contiguous"),
        rounds: rounds.parse().expect("ROUNDS is a number"),
    }
}

fn engine(name: &str, from: usize, background: bool) -> Engine {
    let nics: Vec<_> = (from..from + RAILS).map(|i| format!("fake{i}")).collect();
    let config = Config {
        name: name.into(),
        nics: nics.join(","),
        transport: "verbs".into(),
        listen_ip: "127.0.0.1".into(),
        stripe_width: 0,
        progress_thread: background,
        max_peers: 8,
        connect_timeout_ms: 60_000,
        // Under valgrind time runs for the clock and not for us.
        rail_timeout_ms: 20_000,
        peer_timeout_ms: 120_000,
        keepalive_ms: 0,
        ..Config::default()
    };
    let mut set = config;
    set.apply_env().unwrap();
    Engine::new(set).unwrap()
}

/// Memory of one side, its regions, and its cells as descriptors (regions still to be filled in).
fn memory(w: &Work) -> (Vec<u8>, Vec<Desc>, u64) {
    let stride = if w.contiguous { w.len } else { 2 * w.len };
    let cells = w.descs.div_ceil(w.regions);
    let part = cells as u64 * stride;
    // Zeroed, and the null NIC touches none of it: pages are never made.
    let bytes = vec![0u8; part as usize * w.regions];
    let base = bytes.as_ptr() as u64;
    let desc = |i: usize| {
        let (region, cell) = ((i / cells) as u64, (i % cells) as u64);
        Desc { addr: base + region * part + cell * stride, len: w.len, dev: 0, region }
    };
    (bytes, (0..w.descs).map(desc).collect(), part)
}

fn order(w: &Work, seed: u64) -> Vec<u32> {
    let mut list: Vec<u32> = (0..w.descs as u32).collect();
    if w.contiguous {
        return list;
    }
    let mut x = seed;
    for i in (1..list.len()).rev() {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        list.swap(i, (x % (i as u64 + 1)) as usize);
    }
    list
}

fn register(e: &Engine, w: &Work, bytes: &[u8], part: u64) -> Vec<u64> {
    let base = bytes.as_ptr() as u64;
    let one = |i: usize| e.register(base + i as u64 * part, part, 0).unwrap().raw();
    (0..w.regions).map(one).collect()
}

fn main() {
    let w = parsed();
    let (a, b) = (engine("a", 0, false), engine("b", RAILS, true));
    let (here, mut local, part) = memory(&w);
    let (there, mut remote, _) = memory(&w);
    let mine = register(&a, &w, &here, part);
    let theirs = register(&b, &w, &there, part);
    let peer = a.peer_add(b.metadata(), None).unwrap().raw();
    a.peer_connect(peer, HANG).unwrap();
    let import = |r: &u64| a.region_import(peer, &b.region_metadata(*r).unwrap()).unwrap().raw();
    let theirs: Vec<u64> = theirs.iter().map(import).collect();
    local.iter_mut().for_each(|d| d.region = mine[d.region as usize]);
    remote.iter_mut().for_each(|d| d.region = theirs[d.region as usize]);
    let tables = [&local, &remote].map(|t| a.table_create(t).unwrap().raw());
    let lists = [order(&w, 0x9e37_79b9_7f4a_7c15), order(&w, 0xd1b5_4a32_d192_ed03)];
    let s = Sides { engine: a, peer, tables, lists };
    let mut ns: [Vec<u64>; 4] = Default::default();
    let mut kept = w.again.then(|| phase_prepare(&s, w.direction));
    let mut polls = 0;
    for _ in 0..w.rounds {
        let t0 = Instant::now();
        let t = kept.unwrap_or_else(|| phase_prepare(&s, w.direction));
        let t1 = Instant::now();
        black_box(phase_post(&s, t));
        let t2 = Instant::now();
        polls += phase_poll(&s, t);
        let t3 = Instant::now();
        if !w.again {
            phase_release(&s, t);
        }
        let t4 = Instant::now();
        for (list, (from, to)) in ns.iter_mut().zip([(t0, t1), (t1, t2), (t2, t3), (t3, t4)]) {
            list.push((to - from).as_nanos() as u64);
        }
    }
    if let Some(t) = kept.take() {
        s.engine.release(t).unwrap();
    }
    let medians = ns.map(|mut list| {
        list.sort_unstable();
        list.get(list.len() / 2).copied().unwrap_or(0)
    });
    let rails: Vec<u64> = (0..RAILS as u32)
        .map(|i| s.engine.rail_info(i).unwrap())
        .map(|r| r.bytes_read + r.bytes_written)
        .collect();
    let moved = w.descs as u64 * w.len * u64::from(w.rounds);
    assert_eq!(rails.iter().sum::<u64>(), moved, "{rails:?}: all over the rails");
    println!("{{\"ns\": {medians:?}, \"rail_bytes\": {rails:?}, \"polls\": {polls}}}");
}
