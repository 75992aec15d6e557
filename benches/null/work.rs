//! The reference work over the null NIC: one engine writes to or reads from another one in this
//! process. Each phase is a function of its own, so that callgrind counts it apart.
//!
//! `bench.py` starts it, with the environment that it needs: `KVRAIL_IBVERBS`, `KVRAIL_SYSROOT`,
//! and eight devices, of which `fake4` to `fake7` are the peer's.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench fails so")]

#[path = "sides.rs"]
mod sides;

use core::hint::black_box;
use std::time::Instant;

use kvrail::host::engine::Engine;
use kvrail::status::Status;
use kvrail::table::Direction;
use sides::{engine, groups, imported, meet, side, Args, Group, Random};

const RAILS: usize = 4;

/// What is carried, and how often.
struct Work {
    direction: Direction,
    /// Prepared once, posted each time.
    again: bool,
    groups: Vec<Group>,
    /// Descriptors of one transfer at most: groups may have a few more blocks.
    descs: usize,
    /// `random`, `layers`, `contiguous` or `gather`: see [`order`].
    order: String,
    /// Transfers at a time.
    requests: usize,
    rounds: u32,
    /// With progress threads on both sides, which spin and never sleep.
    threads: bool,
}

/// The transfers' parties, and the index lists into their tables, one of each side a transfer.
struct Sides {
    engine: Engine,
    peer: u64,
    tables: [u64; 2],
    lists: Vec<[Vec<u32>; 2]>,
}

#[inline(never)]
fn phase_prepare(s: &Sides, direction: Direction, request: usize) -> u64 {
    let [local, remote] = s.tables;
    let [here, there] = &s.lists[request];
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
    let mut args = Args::new();
    let w = Work {
        direction: match args.word("op", &["write", "read"]).as_str() {
            "read" => Direction::Read,
            _ => Direction::Write,
        },
        again: args.word("kind", &["fresh", "again"]) == "again",
        groups: groups(&args.text("groups", "1:1024:10000")),
        descs: args.number("descs", u64::MAX) as usize,
        order: args.word("order", &["random", "layers", "contiguous", "gather"]),
        requests: args.number("requests", 1) as usize,
        rounds: args.number("rounds", 1) as u32,
        threads: args.number("threads", 0) != 0,
    };
    args.end();
    w
}

/// The blocks of each transfer on one side, in its order. `random`: all shuffled, none beside its
/// neighbour; `layers`: region by region, the same pages of each, which are shuffled, as in a KV
/// cache; `contiguous`: all in order without gaps; `gather`: in order without gaps at the peer and
/// shuffled here.
fn order(w: &Work, far: bool) -> Vec<Vec<u32>> {
    let mut random = Random(if far { 0xd1b5_4a32_d192_ed03 } else { 0x9e37_79b9_7f4a_7c15 });
    let in_order = w.order == "contiguous" || (far && w.order == "gather");
    if w.order != "layers" {
        assert_eq!(w.requests, 1, "only layers have requests");
        let all: usize = w.groups.iter().map(|g| g.regions * g.blocks).sum();
        let mut list: Vec<u32> = (0..all.min(w.descs) as u32).collect();
        if !in_order {
            random.shuffle(&mut list);
        }
        return vec![list];
    }
    let mut lists = vec![Vec::new(); w.requests];
    let mut first = 0;
    for g in &w.groups {
        let cells = g.blocks * w.requests;
        let mut pages: Vec<u32> = (0..cells as u32).collect();
        random.shuffle(&mut pages);
        for _ in 0..g.regions {
            for (list, own) in lists.iter_mut().zip(pages.chunks(g.blocks)) {
                list.extend(own.iter().map(|p| first + p));
            }
            first += cells as u32;
        }
    }
    lists
}

/// What `between.c` offers, where it is loaded: told when a transfer is posted (1) and done (0).
fn marker() -> Option<extern "C" fn(i32)> {
    // SAFETY: a name that ends in NUL.
    let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"between_mark".as_ptr()) };
    if at.is_null() {
        return None;
    }
    // SAFETY: `void between_mark(int)`.
    Some(unsafe { core::mem::transmute::<*mut libc::c_void, extern "C" fn(i32)>(at) })
}

fn run(w: &Work, s: &Sides) -> [Vec<u64>; 4] {
    let mut ns: [Vec<u64>; 4] = Default::default();
    let mark = marker();
    if mark.is_some() {
        // What connecting began beside this thread has ended then; a progress thread still spins.
        std::thread::sleep(core::time::Duration::from_millis(500));
    }
    let prepare = |i| phase_prepare(s, w.direction, i);
    let mut transfers: Vec<u64> = Vec::new();
    for round in 0..w.rounds {
        let t0 = Instant::now();
        if !w.again || round == 0 {
            transfers.clear();
            transfers.extend((0..w.requests).map(prepare));
        }
        let t1 = Instant::now();
        mark.inspect(|m| m(1));
        for &t in &transfers {
            black_box(phase_post(s, t));
        }
        let t2 = Instant::now();
        for &t in &transfers {
            black_box(phase_poll(s, t));
        }
        mark.inspect(|m| m(0));
        let t3 = Instant::now();
        if !w.again || round + 1 == w.rounds {
            transfers.iter().for_each(|&t| phase_release(s, t));
        }
        let t4 = Instant::now();
        for (list, (from, to)) in ns.iter_mut().zip([(t0, t1), (t1, t2), (t2, t3), (t3, t4)]) {
            list.push((to - from).as_nanos() as u64);
        }
    }
    ns
}

fn main() {
    let w = parsed();
    let a = engine("a", 0, RAILS, |c| {
        c.progress_thread = w.threads;
        c.spin_us = if w.threads { 1_000_000 } else { 50 };
    });
    // Nobody asks anything of it: its threads sleep.
    let b = engine("b", RAILS, RAILS, |_| ());
    let near = side(&a, &w.groups, w.requests, matches!(w.order.as_str(), "random" | "gather"));
    let far = side(&b, &w.groups, w.requests, w.order == "random");
    let (peer, handles) = meet(&a, &b, &far.regions);
    let tables = [&near.descs, &imported(&far, &handles)].map(|t| a.table_create(t).unwrap().raw());
    let [here, there] = [order(&w, false), order(&w, true)];
    let lists: Vec<_> = here.into_iter().zip(there).map(|(h, t)| [h, t]).collect();
    let descs: usize = lists.iter().map(|l| l[0].len()).sum();
    let bytes: u64 = lists.iter().flat_map(|l| &l[0]).map(|&i| near.descs[i as usize].len).sum();
    let s = Sides { engine: a, peer, tables, lists };
    let medians = run(&w, &s).map(|mut list| {
        list.sort_unstable();
        list.get(list.len() / 2).copied().unwrap_or(0)
    });
    let infos: Vec<_> = (0..RAILS as u32).map(|i| s.engine.rail_info(i).unwrap()).collect();
    let rails: Vec<u64> = infos.iter().map(|r| r.bytes_read + r.bytes_written).collect();
    let taken = (0..RAILS).map(|i| sides::counter(&format!("fake{i}.wr_null"))).sum::<u64>();
    let wrs = taken / u64::from(w.rounds.max(1));
    let moved = bytes * u64::from(w.rounds);
    assert_eq!(rails.iter().sum::<u64>(), moved, "{rails:?}: all over the rails");
    println!(
        "{{\"ns\": {medians:?}, \"rail_bytes\": {rails:?}, \"descriptors\": {descs}, \
         \"bytes\": {bytes}, \"work_requests\": {wrs}}}"
    );
    // Before the memory that they have registered.
    drop((s, b));
    drop((near.memory, far.memory));
}
