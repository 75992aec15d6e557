//! The `local` driver between real processes: recycled process numbers, dead peers, forbidden
//! copies, and memory that is handed back while a peer writes.
//!
//! A child is this very test binary, started again with `KVRAIL_TEST_ROLE`; `child()` is then its
//! only test.
#![cfg(feature = "std")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

use core::ptr::NonNull;
use core::time::Duration;
use std::io::{BufReader, Write};
use std::process::Child;
use std::time::Instant;

use kvrail::engine::arena::{Arena, BLOCK_ALIGN};
use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::nic::local::{LocalPort, Offer, PeerMemory, Share};
use kvrail::nic::{Batch, Keys, Port, RemoteKey, WrStatus};
use kvrail::status::Status;
use kvrail::table::{Desc, Direction, Op};

#[path = "local_driver/children.rs"]
mod children;
use children::{engine, finish, hex, line, start, stop, unhex, Lines, BYTES, HANG};

// ---- children ----

/// Runs a role when this binary is a child, and is an empty test otherwise.
#[test]
fn child() {
    if let Ok(role) = std::env::var("KVRAIL_TEST_ROLE") {
        children::run(&role);
    }
}

// ---- helpers ----

/// Slot of a local region that is memory of a device.
const DEVICE: u32 = 3;

#[derive(Clone, Copy)]
struct OneKey(RemoteKey);

impl Keys for OneKey {
    fn remote(&self, _: u32) -> RemoteKey {
        self.0
    }

    fn on_host(&self, index: u32) -> bool {
        index != DEVICE
    }

    fn whole_lkey(&self, _: u32, _: u32) -> Option<u32> {
        None
    }

    fn whole_rkey(&self, _: u32, _: u32) -> Option<u32> {
        None
    }

    fn lkey(&self, _: u32, _: u32, _: u64) -> Option<u32> {
        None
    }

    fn rkey(&self, _: u32, _: u32, _: u64) -> Option<u32> {
        None
    }
}

/// One lane connected to one peer's memory.
struct Rig {
    port: LocalPort<'static>,
    memory: PeerMemory,
    key: OneKey,
    remote: u64,
    buffer: Vec<u8>,
}

impl Rig {
    fn new(offer: &Offer, remote: u64) -> Rig {
        let bytes = vec![0u128; 16 << 10].leak();
        let at = bytes.as_mut_ptr().cast::<u8>();
        let at = NonNull::new(at.wrapping_add(at.align_offset(BLOCK_ALIGN))).unwrap();
        // SAFETY: leaked above, and larger than this.
        let mut arena = unsafe { Arena::over(at, 200 << 10) };
        let mut port = LocalPort::new(&mut arena, 2).unwrap();
        let memory = PeerMemory::attach(offer).unwrap();
        port.connect(1, memory);
        let key = OneKey(RemoteKey { slot: 0, generation: 1, base: remote, len: BYTES as u64 });
        Rig { port, memory, key, remote, buffer: vec![0xEE; BYTES] }
    }

    fn go(&mut self, direction: Direction) -> WrStatus {
        self.go_with(direction, 0)
    }

    fn go_with(&mut self, direction: Direction, local_region: u32) -> WrStatus {
        let op = Op {
            local: self.buffer.as_ptr() as u64,
            remote: self.remote,
            len: BYTES as u32,
            local_region,
            remote_region: 0,
            tag: 0,
        };
        let batch = Batch { peer: 1, direction, ops: &[op], first_wr: 0, keys: &self.key };
        self.port.post(&batch).unwrap();
        self.port.poll().unwrap().status
    }
}

/// A process with exactly this number, which maps `BYTES` bytes of 0x5A at `at` and waits. `None`:
/// the kernel does not let us choose the number.
fn stranger(pid: i32, at: u64) -> Option<i32> {
    #[repr(C)]
    struct CloneArgs([u64; 11]);
    let set_tid = [pid];
    let mut args = CloneArgs([0; 11]);
    args.0[4] = libc::SIGCHLD as u64;
    args.0[8] = set_tid.as_ptr() as u64;
    args.0[9] = 1;
    // SAFETY: like fork: the child below makes system calls only.
    let got = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, 88usize) };
    if got == 0 {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the child's own memory, which nothing else of it uses; it does nothing but wait.
        unsafe {
            let page = at & !4095;
            let p = libc::mmap(page as *mut _, BYTES + 8192, rw, kind, -1, 0);
            libc::memset(p, 0x5A, BYTES + 8192);
            libc::raise(libc::SIGSTOP);
            libc::_exit(0);
        }
    }
    (got == i64::from(pid)).then_some(pid)
}

fn peek(pid: i32, at: u64) -> Vec<u8> {
    let mut bytes = vec![0u8; BYTES];
    let l = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: BYTES };
    let r = libc::iovec { iov_base: at as *mut _, iov_len: BYTES };
    // SAFETY: one element each, of the buffer's size.
    let n = unsafe { libc::process_vm_readv(pid, &raw const l, 1, &raw const r, 1, 0) };
    assert_eq!(n, BYTES as isize);
    bytes
}

/// A child that writes into `len` bytes at `at`, which are the region `region` of `home`.
fn start_writer(home: &Engine, region: u64, at: u64, len: usize) -> (Child, Lines) {
    let region = home.region_metadata(region).unwrap();
    let mut writer = start("writer", None);
    let mut out = BufReader::new(writer.stdout.take().unwrap());
    let words = [hex(home.metadata()), hex(&region), at.to_string(), len.to_string()];
    writeln!(writer.stdin.as_mut().unwrap(), "{}", words.join(" ")).unwrap();
    assert_eq!(line(&mut out), ["writing"]);
    (writer, out)
}

// ---- tests ----

#[test]
fn a_recycled_process_number_is_never_written_and_its_data_never_believed() {
    let mut target = start("share", None);
    let mut out = BufReader::new(target.stdout.take().unwrap());
    let words: Vec<u64> = line(&mut out).iter().map(|w| w.parse().unwrap()).collect();
    let offer = Offer {
        pid: words[0] as u32,
        fd: words[1] as u32,
        guard: words[2],
        cookie: *b"cookiecookiecook",
        peers: 2,
        regions: 4,
        row: 1,
    };
    let mut rig = Rig::new(&offer, words[3]);
    assert_eq!(rig.go(Direction::Write), WrStatus::Success);
    assert_eq!(peek(offer.pid as i32, words[3]), rig.buffer, "the write must have arrived");
    assert!(rig.memory.is_alive());
    stop(target);
    assert!(!rig.memory.is_alive(), "the kernel marks the life word");
    let pid = offer.pid as i32;
    let Some(_) = stranger(pid, words[3]) else {
        println!("SKIPPED: clone3 with a chosen process number is not allowed here");
        return;
    };
    let mut status = 0;
    // SAFETY: our own child; returns when it has filled its memory and stopped itself.
    unsafe { libc::waitpid(pid, &raw mut status, libc::WUNTRACED) };
    let written = rig.go(Direction::Write);
    let read = rig.go(Direction::Read);
    let canary = peek(pid, words[3]);
    // SAFETY: our own child.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, &raw mut status, 0);
    }
    assert_eq!((written, read), (WrStatus::RailError, WrStatus::RailError));
    assert!(canary.iter().all(|&b| b == 0x5A), "a stranger's memory was written");
}

#[test]
fn a_withdrawn_region_is_not_entered() {
    let mut seed = 1;
    let share = Share::new(2, 4, [9; 16], move || {
        seed += 0x1357_9bdf_1234;
        seed
    })
    .unwrap();
    std::thread::scope(|s| {
        let (tell, told) = std::sync::mpsc::channel::<()>();
        let (ready, wait) = std::sync::mpsc::channel::<()>();
        let share = &share;
        s.spawn(move || {
            share.live_with_this_thread();
            ready.send(()).unwrap();
            told.recv().unwrap();
        });
        wait.recv().unwrap();
        share.open(0, 1);
        let theirs = vec![3u8; BYTES];
        let mut rig = Rig::new(&share.offer(1), theirs.as_ptr() as u64);
        assert_eq!(rig.go(Direction::Read), WrStatus::Success);
        assert!(rig.buffer.iter().all(|&b| b == 3));
        // Nor what is a device's here: something else lies at its address.
        rig.buffer.fill(0xEE);
        for direction in [Direction::Read, Direction::Write] {
            assert_eq!(rig.go_with(direction, DEVICE), WrStatus::LocalAccess);
        }
        assert!(rig.buffer.iter().all(|&b| b == 0xEE) && theirs.iter().all(|&b| b == 3));
        share.withdraw(0);
        rig.buffer.fill(0xEE);
        assert_eq!(rig.go(Direction::Read), WrStatus::RemoteAccess);
        share.open(0, 2);
        assert_eq!(rig.go(Direction::Read), WrStatus::RemoteAccess, "another generation");
        assert!(rig.buffer.iter().all(|&b| b == 0xEE));
        assert!(!share.is_inside(1, 0), "whoever does not enter must not be counted");
        tell.send(()).unwrap();
    });
}

#[test]
fn a_forbidden_copy_names_the_setting() {
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED: needs root, to become two processes of an ordinary user");
        return;
    }
    let nobody = Some(65_534);
    let mut target = start("undumpable", nobody);
    let mut out = BufReader::new(target.stdout.take().unwrap());
    let blob = line(&mut out)[0].clone();
    let mut reader = start("reader", nobody);
    writeln!(reader.stdin.as_mut().unwrap(), "{blob}").unwrap();
    let words = line(&mut BufReader::new(reader.stdout.take().unwrap()));
    stop(reader);
    stop(target);
    let text = String::from_utf8(unhex(&words[1])).unwrap();
    assert_eq!(words[0], "Permission", "{text}");
    for part in ["kernel.yama.ptrace_scope", "PR_SET_DUMPABLE", "CAP_SYS_PTRACE"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

#[test]
fn memory_that_was_deregistered_is_not_written_any_more() {
    const LEN: usize = 8 << 20;
    let home = engine("home");
    for round in 0..12u64 {
        let mut memory = vec![0u8; LEN];
        let at = memory.as_mut_ptr() as u64;
        let r = home.register(at, LEN as u64, 0).unwrap();
        let (writer, mut out) = start_writer(&home, r.raw(), at, LEN);
        let pid = writer.id() as i32;
        // Let it run for a varying while, then freeze it wherever it is on odd rounds.
        std::thread::sleep(Duration::from_micros(3_000 + 1_700 * round));
        let frozen = round % 2 == 1;
        if frozen {
            // SAFETY: our own child.
            unsafe { libc::kill(pid, libc::SIGSTOP) };
        }
        match home.deregister(r.raw(), true) {
            Ok(()) => {
                // What a batch writes last comes first: a writer that is still inside would
                // overwrite it.
                for end in [LEN, LEN / 2] {
                    memory[end - 4096..end].fill(0xAA);
                }
                // SAFETY: our own child.
                unsafe { libc::kill(pid, libc::SIGCONT) };
                assert_eq!(line(&mut out), ["stopped"], "the writer must be told");
                for end in [LEN, LEN / 2] {
                    let kept = memory[end - 4096..end].iter().all(|&b| b == 0xAA);
                    assert!(kept, "round {round}: written after deregister said Ok");
                }
            }
            Err(e) => {
                // Frozen inside a copy: an error that says so, never a success.
                assert!(frozen && e.status == Status::Busy, "round {round}: {e}");
                assert!(e.message.contains("writer"), "{e}");
            }
        }
        stop(writer);
    }
}

/// What became of a peer that only ever dialled us and was killed in the middle of a copy.
#[test]
fn a_killed_dialler_blocks_no_deregistration_and_its_row_is_used_again() {
    const LEN: usize = 8 << 20;
    let max_peers = 2;
    let home = Engine::new(Config { name: "home".into(), max_peers, ..Config::default() }).unwrap();
    // More rounds than rows: a row that stays blocked is missing in the end.
    for round in 0..4 * u64::from(max_peers) {
        let memory = vec![0u8; LEN];
        let at = memory.as_ptr() as u64;
        let r = home.register(at, LEN as u64, 0).unwrap();
        let (writer, _out) = start_writer(&home, r.raw(), at, LEN);
        std::thread::sleep(Duration::from_micros(2_000 + 1_300 * round));
        stop(writer);
        let start = Instant::now();
        while home.info().peers != 0 {
            assert!(start.elapsed() < HANG, "round {round}: the peer is never buried");
            std::thread::yield_now();
        }
        let start = Instant::now();
        home.deregister(r.raw(), true).unwrap_or_else(|e| panic!("round {round}: {e}"));
        assert!(start.elapsed() < Duration::from_secs(1), "round {round}: {:?}", start.elapsed());
    }
}

#[test]
fn a_killed_peer_ends_transfers_and_its_counts_do_not_block_anybody() {
    let mut target = start("target", None);
    let mut out = BufReader::new(target.stdout.take().unwrap());
    let words = line(&mut out);
    let e = engine("survivor");
    let peer = e.peer_add(&unhex(&words[0]), Some(b"target")).unwrap();
    e.peer_connect(peer.raw(), HANG).unwrap();
    let far = e.region_import(peer.raw(), &unhex(&words[1])).unwrap();
    let own = vec![0u8; BYTES];
    let near = e.register(own.as_ptr() as u64, BYTES as u64, 0).unwrap();
    let (len, dev) = (BYTES as u64, 0);
    let local = Desc { addr: own.as_ptr() as u64, len, dev, region: near.raw() };
    let remote = Desc { addr: words[2].parse().unwrap(), len, dev, region: far.raw() };
    let t = e.prepare_descs(Direction::Read, peer.raw(), &[local], &[remote]).unwrap().raw();
    e.post(t, None).unwrap();
    assert_eq!(finish(&e, t).unwrap(), Status::Ok);
    assert!(own.iter().all(|&b| b == 7));
    stop(target);
    let until = Instant::now() + HANG;
    let error = loop {
        match e.post(t, Some(b"x")).and_then(|_| finish(&e, t)) {
            Ok(_) => assert!(Instant::now() < until, "hang"),
            Err(e) => break e,
        }
    };
    assert!(matches!(error.status, Status::Disconnected | Status::Unreachable), "{error}");
    assert!(error.message.contains("target"), "{error}");
    e.release(t).unwrap();
    e.deregister(near.raw(), false).unwrap();
    e.peer_remove(peer.raw()).unwrap();
    assert_eq!(e.post(t, None).unwrap_err().status, Status::Stale);
    assert_eq!(e.region_forget(far.raw()).unwrap_err().status, Status::Stale);
}

#[test]
fn a_killed_peer_is_noticed_though_a_forked_child_of_it_lives() {
    let mut target = start("forker", None);
    let mut out = BufReader::new(target.stdout.take().unwrap());
    let blob = line(&mut out)[0].clone();
    let e = engine("survivor");
    let peer = e.peer_add(&unhex(&blob), None).unwrap();
    e.peer_connect(peer.raw(), HANG).unwrap();
    writeln!(target.stdin.as_mut().unwrap(), "fork").unwrap();
    let child: i32 = line(&mut out)[0].parse().unwrap();
    stop(target);
    let until = Instant::now() + HANG / 2;
    while e.peer_state(peer.raw()).is_ok() && Instant::now() < until {
        std::thread::yield_now();
    }
    let state = e.peer_state(peer.raw());
    // SAFETY: a child of our child, which only sleeps.
    unsafe { libc::kill(child, libc::SIGKILL) };
    assert_eq!(state.unwrap_err().status, Status::Disconnected);
}

#[test]
fn a_peer_that_restarts_under_its_name_is_a_new_peer() {
    let e = engine("survivor");
    let mut handles = Vec::new();
    for _ in 0..2 {
        let mut target = start("target", None);
        let words = line(&mut BufReader::new(target.stdout.take().unwrap()));
        let peer = e.peer_add(&unhex(&words[0]), Some(b"target")).unwrap();
        e.peer_connect(peer.raw(), HANG).unwrap();
        handles.push((peer, e.region_import(peer.raw(), &unhex(&words[1])).unwrap()));
        if handles.len() == 2 {
            let (old, new) = (handles[0], handles[1]);
            assert_eq!(e.peer_state(old.0.raw()).unwrap_err().status, Status::Stale);
            assert_eq!(e.region_forget(old.1.raw()).unwrap_err().status, Status::Stale);
            assert_eq!(e.peer_state(new.0.raw()).unwrap(), Status::Ok);
        }
        stop(target);
    }
}

#[test]
fn fixed_memory_that_nobody_touched_is_not_resident() {
    // A process of its own: other tests of this one make engines meanwhile.
    let mut fresh = start("resident", None);
    let words = line(&mut BufReader::new(fresh.stdout.take().unwrap()));
    stop(fresh);
    let (fixed, grown): (u64, u64) = (words[0].parse().unwrap(), words[1].parse().unwrap());
    assert!(fixed > 32 << 20, "{fixed} bytes: the message blocks alone are more");
    assert!(grown < fixed / 3, "{grown} of {fixed} bytes are resident");
}

#[test]
fn a_share_that_cannot_be_made_leaves_nothing_behind() {
    let mut fresh = start("leak", None);
    let words = line(&mut BufReader::new(fresh.stdout.take().unwrap()));
    stop(fresh);
    assert_eq!(words, ["0", "0"], "files and mappings");
}

#[test]
fn a_connection_that_cannot_be_taken_over_is_closed_on_both_sides() {
    let mut deaf = start("deaf", None);
    let mut out = BufReader::new(deaf.stdout.take().unwrap());
    let blob = unhex(&line(&mut out)[0]);
    let e = engine("home");
    let peer = e.peer_add(&blob, None).unwrap().raw();
    // It may look connected for a moment: the other side fails after both were ready.
    let until = Instant::now() + Duration::from_secs(5);
    let first = e.peer_connect(peer, HANG);
    let error = loop {
        match first.clone().and_then(|()| e.peer_state(peer)) {
            Ok(_) => assert!(Instant::now() < until, "connected to somebody who is not"),
            Err(e) => break e,
        }
    };
    assert!(error.message.contains("deaf"), "{error}");
    e.peer_remove(peer).unwrap();
    writeln!(deaf.stdin.as_mut().unwrap()).unwrap();
    assert_eq!(line(&mut out), ["0", "1"], "peers and shared memories, its own included");
    stop(deaf);
}

#[test]
fn transport_auto_warns_once_that_it_is_local() {
    let mut fresh = start("auto", None);
    let words = line(&mut BufReader::new(fresh.stdout.take().unwrap()));
    stop(fresh);
    assert_eq!(words, ["0", "1", "local"]);
}

#[test]
fn a_post_says_what_is_stale() {
    let e = engine("self");
    let memory = vec![0u8; BYTES];
    let at = memory.as_ptr() as u64;
    let near = e.register(at, BYTES as u64, 0).unwrap().raw();
    let far = e.region_import_self(near).unwrap().raw();
    let half = BYTES as u64 / 2;
    let local = Desc { addr: at, len: half, dev: 0, region: near };
    let remote = Desc { addr: at + half, len: half, dev: 0, region: far };
    let me = e.peer_self().raw();
    let t = e.prepare_descs(Direction::Write, me, &[local], &[remote]).unwrap().raw();
    e.region_forget(far).unwrap();
    let error = e.post(t, None).unwrap_err();
    assert_eq!(error.status, Status::Stale);
    assert!(error.message.contains("a region or the peer that it uses was released"), "{error}");
    e.release(t).unwrap();
    let error = e.post(t, None).unwrap_err();
    assert_eq!(error.status, Status::Stale);
    assert!(error.message.contains(&format!("transfer {t:#x} was released")), "{error}");
}

#[test]
fn a_region_that_was_busy_is_waited_for_again_by_its_own_handle() {
    const LEN: usize = 8 << 20;
    let deregister_timeout_ms = 100;
    let home = Config { name: "home".into(), deregister_timeout_ms, ..Config::default() };
    let home = Engine::new(home).unwrap();
    // Where the writer is when it is stopped is luck; one time in two it is inside a copy.
    for round in 0..40 {
        let memory = vec![0u8; LEN];
        let r = home.register(memory.as_ptr() as u64, LEN as u64, 0).unwrap().raw();
        let (writer, _out) = start_writer(&home, r, memory.as_ptr() as u64, LEN);
        let pid = writer.id() as i32;
        std::thread::sleep(Duration::from_micros(3_000 + 700 * round));
        // SAFETY: our own child.
        unsafe { libc::kill(pid, libc::SIGSTOP) };
        let first = home.deregister(r, true);
        let second = home.deregister(r, false);
        let regions = home.info().regions;
        let named = home.region_metadata(r);
        // SAFETY: our own child.
        unsafe { libc::kill(pid, libc::SIGCONT) };
        let last = (0..50).map(|_| home.deregister(r, true)).find(Result::is_ok);
        let again = home.deregister(r, true).unwrap_err();
        stop(writer);
        assert_eq!(named.unwrap_err().status, Status::Stale, "withdrawn for all but deregister");
        assert_eq!(again.status, Status::Stale, "{again}");
        let Err(first) = first else {
            assert_eq!(second.unwrap_err().status, Status::Stale);
            continue;
        };
        assert_eq!(first.status, Status::Busy, "{first}");
        let second = second.unwrap_err();
        assert_eq!(second.status, Status::Busy, "{second}");
        assert_eq!(regions, 1, "its slot must stay taken");
        assert!(last.is_some(), "round {round}: the writer went on, and the region stays busy");
        assert_eq!(home.info().regions, 0);
        return;
    }
    panic!("no writer was ever stopped inside a copy");
}

#[test]
fn an_imported_region_that_was_busy_is_waited_for_again_by_its_own_handle() {
    const LEN: usize = 64 << 20;
    // One work request longer than the wait: nobody can stop it on its way.
    let (release_timeout_ms, slice_bytes) = (1, 1 << 30);
    let c = Config { name: "self".into(), release_timeout_ms, slice_bytes, ..Config::default() };
    let e = Engine::new(c).unwrap();
    let (from, to) = (vec![1u8; LEN], vec![2u8; LEN]);
    let desc =
        |at: &[u8], region| Desc { addr: at.as_ptr() as u64, len: LEN as u64, dev: 0, region };
    let source = e.register(from.as_ptr() as u64, LEN as u64, 0).unwrap();
    let near = e.register(to.as_ptr() as u64, LEN as u64, 0).unwrap().raw();
    let me = e.peer_self().raw();
    for _ in 0..100 {
        let far = e.region_import_self(source.raw()).unwrap().raw();
        let (local, remote) = ([desc(&to, near)], [desc(&from, far)]);
        let t = e.prepare_descs(Direction::Read, me, &local, &remote).unwrap().raw();
        e.post(t, None).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        let first = e.region_forget(far);
        let other = e.deregister(far, true).unwrap_err();
        assert_eq!(other.status, Status::Invalid, "a handle of another kind: {other}");
        let last = (0..10_000)
            .map(|_| e.region_forget(far))
            .find(|r| !matches!(r, Err(e) if e.status == Status::Busy));
        assert_eq!(e.region_forget(far).unwrap_err().status, Status::Stale);
        while e.release(t).is_err() {}
        let Err(first) = first else { continue };
        assert_eq!(first.status, Status::Busy, "{first}");
        assert!(matches!(last, Some(Ok(()))), "{last:?}");
        assert_eq!(e.info().remote_regions, 0);
        return;
    }
    panic!("no transfer was ever caught in flight");
}
