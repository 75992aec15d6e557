//! Threads that post at the same time over the null NIC, one for each rail: all on one engine, or
//! each on its own. Started by `threads.py`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench fails so")]
#![allow(dead_code, reason = "shared support")]

#[path = "sides.rs"]
mod sides;

use core::time::Duration;
use std::sync::Barrier;
use std::time::Instant;

use kvrail::host::engine::Engine;
use kvrail::status::Status;
use kvrail::table::Direction;
use sides::{engine, imported, meet, side, Args, Group, Random, Side};

/// One engine as a thread uses it.
struct Poster<'a> {
    engine: &'a Engine,
    peer: u64,
    tables: [u64; 2],
    lists: [Vec<u32>; 2],
}

#[inline(never)]
fn phase_post(p: &Poster<'_>) {
    let [local, remote] = p.tables;
    let [here, there] = &p.lists;
    let t = p.engine.prepare(Direction::Write, p.peer, local, here, remote, there).unwrap().raw();
    p.engine.post(t, None).unwrap();
    while p.engine.check(t).unwrap() != Status::Ok {
        core::hint::spin_loop();
    }
    p.engine.release(t).unwrap();
}

/// An engine, its peer's, and what one transfers to the other.
struct Two {
    a: Engine,
    b: Engine,
    near: Side,
    far: Side,
    peer: u64,
    tables: [u64; 2],
}

impl Two {
    fn new(first: usize, far: usize, rails: usize, width: u64, descs: usize) -> Two {
        let tune = |c: &mut kvrail::host::config::Config, threads| {
            c.progress_thread = threads;
            c.stripe_width = width as u32;
        };
        let a = engine(&format!("a{first}"), first, rails, |c| tune(c, false));
        let b = engine(&format!("b{first}"), far + first, rails, |c| tune(c, true));
        let group = [Group { regions: 1, len: 1024, blocks: descs }];
        let (near, there) = (side(&a, &group, 1, true), side(&b, &group, 1, true));
        let (peer, handles) = meet(&a, &b, &there.regions);
        let tables =
            [&near.descs, &imported(&there, &handles)].map(|t| a.table_create(t).unwrap().raw());
        Two { a, b, near, far: there, peer, tables }
    }
}

fn main() {
    let mut args = Args::new();
    let threads = args.number("threads", 1) as usize;
    let rails = args.number("rails", threads as u64) as usize;
    let own = args.word("engines", &["one", "own"]) == "own";
    let width = args.number("width", 1);
    let descs = args.number("descs", 1_000) as usize;
    let rounds = args.number("rounds", 0);
    let length = Duration::from_millis(args.number("ms", 1_000));
    args.end();
    let all: Vec<Two> = if own {
        (0..threads).map(|i| Two::new(i, rails, 1, width, descs)).collect()
    } else {
        vec![Two::new(0, rails, rails, width, descs)]
    };
    let barrier = Barrier::new(threads);
    let done: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let spawn = |i: usize| {
            let (two, barrier) = (&all[i % all.len()], &barrier);
            scope.spawn(move || {
                let mut lists = [(); 2].map(|()| (0..descs as u32).collect::<Vec<_>>());
                let mut random = Random(0x9e37_79b9_7f4a_7c15 + i as u64);
                lists.iter_mut().for_each(|l| random.shuffle(l));
                let p = Poster { engine: &two.a, peer: two.peer, tables: two.tables, lists };
                barrier.wait();
                let (start, mut n) = (Instant::now(), 0);
                while if rounds > 0 { n < rounds } else { start.elapsed() < length } {
                    phase_post(&p);
                    n += 1;
                }
                (n, start.elapsed().as_nanos() as u64)
            })
        };
        let handles: Vec<_> = (0..threads).map(spawn).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    });
    let transfers: u64 = done.iter().map(|d| d.0).sum();
    let ns = done.iter().map(|d| d.1).max().unwrap_or(1);
    let lanes: Vec<u64> = all
        .iter()
        .flat_map(|t| (0..t.a.info().rails).map(|i| t.a.rail_info(i).unwrap().work_requests))
        .collect();
    println!(
        "{{\"transfers\": {transfers}, \"descriptors\": {}, \"ns\": {ns}, \"rails\": {lanes:?}}}",
        transfers * descs as u64
    );
    let mut memories = Vec::new();
    for two in all {
        drop((two.a, two.b));
        memories.extend([two.near.memory, two.far.memory]);
    }
}
