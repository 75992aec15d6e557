//! What an engine costs that has nothing to do, and how long it takes to wake up. Started by
//! `idle.py`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench fails so")]
#![allow(dead_code, reason = "shared support")]

#[path = "sides.rs"]
mod sides;

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use kvrail::host::config::Config;
use kvrail::status::Status;
use kvrail::table::Direction;
use sides::{engine, imported, meet, side, Args, Group};

/// Nanoseconds of CPU and how often it was put on a core, of each thread so far, by its name.
fn usage() -> Vec<(String, [u64; 2])> {
    let read = |path: &std::path::Path| std::fs::read_to_string(path).unwrap_or_default();
    let one = |task: std::path::PathBuf| {
        let seen = read(&task.join("schedstat"));
        let mut numbers = seen.split_whitespace().map(|n| n.parse().unwrap());
        let (ns, _, runs) = (numbers.next(), numbers.next(), numbers.next());
        let name = read(&task.join("comm")).trim().to_owned();
        (name, [ns.unwrap_or(0), runs.unwrap_or(0)])
    };
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks.map(|t| one(t.unwrap().path())).collect()
}

fn wait_busily(length: Duration) {
    let start = Instant::now();
    while start.elapsed() < length {
        core::hint::spin_loop();
    }
}

/// The 10th percentile and the median: on a machine that others load, the first says more.
fn low_and_median(mut list: Vec<u64>) -> [u64; 2] {
    list.sort_unstable();
    [list[list.len() / 10], list[list.len() / 2]]
}

/// What the kernel takes to wake a thread that waits for an eventfd: nobody who sleeps is quicker.
fn floor(samples: usize) -> [u64; 2] {
    // SAFETY: a new descriptor.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    assert!(fd >= 0);
    let (start, woken) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let at = woken.clone();
    let sleeper = std::thread::spawn(move || {
        for _ in 0..samples {
            let mut file = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one entry.
            unsafe { libc::poll(&raw mut file, 1, -1) };
            at.store(start.elapsed().as_nanos() as u64, Ordering::Release);
            let mut n = 0u64;
            // SAFETY: 8 writable bytes.
            unsafe { libc::read(fd, (&raw mut n).cast(), 8) };
        }
    });
    let mut took = Vec::new();
    for _ in 0..samples {
        wait_busily(Duration::from_millis(1));
        woken.store(0, Ordering::Release);
        let (now, one) = (start.elapsed().as_nanos() as u64, 1u64);
        // SAFETY: 8 readable bytes.
        unsafe { libc::write(fd, (&raw const one).cast(), 8) };
        while woken.load(Ordering::Acquire) == 0 {
            core::hint::spin_loop();
        }
        took.push(woken.load(Ordering::Acquire) - now);
    }
    sleeper.join().unwrap();
    low_and_median(took)
}

fn main() {
    let mut args = Args::new();
    let (rails, spin_us) = (args.number("rails", 4) as usize, args.number("spin_us", 50) as u32);
    let (idle_s, samples) = (args.number("idle_s", 0), args.number("samples", 0) as usize);
    let keepalive = args.number("keepalive_ms", 1_000) as u32;
    // A transfer up to this is posted by the thread that asks for it, and ends by an event; a
    // longer one wakes the progress thread at once.
    let inline = args.number("inline_bytes", 0) as u32;
    let len = args.number("len", 4096);
    // 0: nobody sleeps, whoever checks polls.
    let background = args.number("threads", 1) != 0;
    args.end();
    let tune = |c: &mut Config| {
        (c.spin_us, c.keepalive_ms, c.inline_bytes) = (spin_us, keepalive, inline);
        c.progress_thread = background;
    };
    let a = engine("a", 0, rails, tune);
    let b = engine("b", rails, rails, |c| (c.spin_us, c.keepalive_ms) = (0, keepalive));
    let group = [Group { regions: 1, len, blocks: 1 }];
    let (near, far) = (side(&a, &group, 1, true), side(&b, &group, 1, true));
    let (peer, handles) = meet(&a, &b, &far.regions);
    let tables = [&near.descs, &imported(&far, &handles)].map(|t| a.table_create(t).unwrap().raw());
    let t = a.prepare(Direction::Read, peer, tables[0], &[0], tables[1], &[0]).unwrap().raw();
    // Connecting is over, and threads that spun sleep.
    std::thread::sleep(Duration::from_millis(300));
    let before = usage();
    std::thread::sleep(Duration::from_secs(idle_s));
    let after = usage();
    // The same threads in the same order: none came or went.
    assert_eq!(before.len(), after.len());
    let spent: Vec<String> = after
        .iter()
        .zip(&before)
        .map(|((name, a), (_, b))| format!("[\"{name}\", {}, {}]", a[0] - b[0], a[1] - b[1]))
        .collect();
    let mut took = Vec::new();
    for _ in 0..samples {
        wait_busily(Duration::from_millis(1));
        let start = Instant::now();
        a.post(t, None).unwrap();
        while a.check(t).unwrap() != Status::Ok {
            core::hint::spin_loop();
        }
        took.push(start.elapsed().as_nanos() as u64);
    }
    let (done, floor) =
        if samples > 0 { (low_and_median(took), floor(samples)) } else { ([0; 2], [0; 2]) };
    println!(
        "{{\"idle_s\": {idle_s}, \"threads\": [{}], \"done_ns\": {done:?}, \
         \"floor_ns\": {floor:?}}}",
        spent.join(", ")
    );
    a.release(t).unwrap();
    drop((a, b));
    drop((near.memory, far.memory));
}
