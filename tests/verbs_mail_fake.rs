//! Message streams over the fake libibverbs (`tests/fakeverbs`): a provider with threads, delays,
//! packet loss and the states of real queue pairs. Skipped where it cannot be built: it needs gcc
//! and the headers of libibverbs.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "tests")]

use core::ptr::NonNull;
use core::time::Duration;
use kvrail::engine::arena::{Arena, BLOCK_ALIGN};
use kvrail::nic::verbs::mail::{MailLink, MailSetup, Post, MAIL_BYTES, MAIL_RECEIVES, MAIL_SENDS};
use kvrail::nic::verbs::{Device, Mr, Open, Path as Way, Qp, QpKind};
use kvrail::nic::{Closed, Link};
use rdma_core_sys::*;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Instant;

type Set = unsafe extern "C" fn(*const i8) -> i32;
type Get = unsafe extern "C" fn(*const i8, *mut u64) -> i32;

struct Fake {
    verbs: &'static Verbs,
    set: Set,
    get: Get,
}

impl Fake {
    fn set(&self, text: &str) {
        let text = CString::new(text).unwrap();
        // SAFETY: the objects are alive, the pointers valid for the call; one poller.
        assert_eq!(unsafe { (self.set)(text.as_ptr().cast()) }, 0, "{text:?}");
    }

    fn get(&self, name: &str) -> u64 {
        let (name, mut value) = (CString::new(name).unwrap(), 0);
        // SAFETY: the objects are alive, the pointers valid for the call; one poller.
        assert_eq!(unsafe { (self.get)(name.as_ptr().cast(), &raw mut value) }, 0, "{name:?}");
        value
    }
}

/// Whether a C program can include the header.
fn can_build() -> bool {
    let mut cc = Command::new("gcc");
    cc.args(["-fsyntax-only", "-include", "infiniband/verbs.h", "-xc", "/dev/null"]);
    cc.stderr(Stdio::null()).status().is_ok_and(|s| s.success())
}

/// Whether a source of the fake is younger than what was built.
fn is_stale(built: &Path) -> bool {
    let time = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fakeverbs");
    let newest = std::fs::read_dir(sources).unwrap().filter_map(|e| time(&e.unwrap().path())).max();
    time(built) < newest
}

fn load() -> Option<Fake> {
    if !can_build() {
        eprintln!("skipped: no gcc, or no infiniband/verbs.h (Debian: libibverbs-dev)");
        return None;
    }
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("fakeverbs-mail");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fakeverbs/build.sh");
    if is_stale(&out.join("libfakeverbs.so")) {
        let built = Command::new("bash").arg(script).arg(&out).status().unwrap();
        assert!(built.success(), "{script}: {built}");
    }
    let path = CString::new(out.join("libfakeverbs.so").to_str().unwrap()).unwrap();
    let verbs = Verbs::load(Some(&path)).unwrap();
    let find = |name: &core::ffi::CStr| {
        // SAFETY: the objects are alive, the pointers valid for the call; one poller.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        // SAFETY: the objects are alive, the pointers valid for the call; one poller.
        let at = unsafe { libc::dlsym(library, name.as_ptr()) };
        assert!(!at.is_null(), "{name:?}");
        at
    };
    Some(Fake {
        verbs: Box::leak(Box::new(verbs)),
        // SAFETY: the objects are alive, the pointers valid for the call; one poller.
        set: unsafe { core::mem::transmute::<*mut libc::c_void, Set>(find(c"fakeverbs_set")) },
        // SAFETY: the objects are alive, the pointers valid for the call; one poller.
        get: unsafe { core::mem::transmute::<*mut libc::c_void, Get>(find(c"fakeverbs_get")) },
    })
}

static FAKE: OnceLock<Option<Fake>> = OnceLock::new();

/// The fake has one state for the process, so its tests go one by one.
fn fake() -> Option<(&'static Fake, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let fake = FAKE.get_or_init(load).as_ref()?;
    fake.set("*.delay_us=0;*.drop=off;time_scale=0.01");
    Some((fake, turn))
}

/// One engine's side: a device, its mailboxes, and the queue pair of the only one.
struct Side {
    post: Post<'static>,
    mr: Option<Mr>,
    memory: usize,
    qp: Option<Qp>,
    device: Device,
}

fn block(len: usize) -> &'static mut [u8] {
    let all = vec![0u8; len + BLOCK_ALIGN].leak();
    let skip = all.as_ptr().align_offset(BLOCK_ALIGN);
    &mut all[skip..skip + len]
}

fn side(fake: &Fake, index: u8) -> Side {
    let name = format!("fake{index}");
    let want = Open {
        name: &name,
        port: 1,
        ipv4: [10, 1, index, 1],
        ifindex: 0,
        cq_entries: 64,
        mail_entries: MAIL_RECEIVES + MAIL_SENDS,
    };
    let device = Device::open(fake.verbs, &want).unwrap();
    let room = block(4096);
    // SAFETY: the objects are alive, the pointers valid for the call; one poller.
    let mut arena = unsafe { Arena::over(NonNull::from(&mut room[0]), room.len()) };
    let mut post = Post::new(&mut arena, 1, 1).unwrap();
    // SAFETY: the objects are alive, the pointers valid for the call; one poller.
    unsafe { post.open_lane(0, device.mail_cq(), MAIL_RECEIVES + MAIL_SENDS) };
    let memory = block(MAIL_BYTES).as_mut_ptr() as usize;
    let mr = device.register(memory as u64, MAIL_BYTES as u64, memory as u64, false).unwrap();
    Side { post, mr: Some(mr), memory, qp: None, device }
}

const COOKIES: [[u8; 16]; 2] = [*b"the first cookie", *b"the other cookie"];

struct Pair {
    fake: &'static Fake,
    sides: [Side; 2],
}

impl Pair {
    fn new(fake: &'static Fake) -> Pair {
        Pair { fake, sides: [side(fake, 0), side(fake, 1)] }
    }

    /// Fresh queue pairs, raised; side 1 connects, then side 0, which leads.
    fn connect(&mut self) -> [MailLink<'static>; 2] {
        let kind = QpKind::Mail { send: MAIL_SENDS, recv: MAIL_RECEIVES, inline: 64 };
        for s in &mut self.sides {
            s.qp = Some(s.device.create_qp(kind).unwrap());
        }
        let ends = [0, 1].map(|i| {
            let s = &self.sides[i];
            (s.device.gid().unwrap(), s.qp.as_ref().unwrap().number())
        });
        for i in [1, 0] {
            let way = Way {
                gid_index: ends[i].0.index,
                remote_gid: ends[1 - i].0.raw,
                remote_qpn: ends[1 - i].1,
                own_psn: 5 + i as u32,
                remote_psn: 6 - i as u32,
                mtu: 4096,
                rd_initiator: 1,
                rd_responder: 1,
                timeout: 14,
                retry: 3,
                rnr_retry: 3,
                traffic_class: 0,
                service_level: 0,
            };
            let s = &mut self.sides[i];
            let qp = s.qp.as_ref().unwrap();
            qp.raise(&s.device, &way).unwrap();
            let setup = MailSetup {
                qp: qp.pointer().as_ptr(),
                memory: s.memory as *mut u8,
                len: MAIL_BYTES,
                lkey: s.mr.as_ref().unwrap().lkey,
                inline: qp.granted().inline,
                receives: MAIL_RECEIVES,
                sends: MAIL_SENDS,
                window: MAIL_RECEIVES,
                cookie: COOKIES[i],
                expected: COOKIES[1 - i],
                lead: i == 0,
            };
            // SAFETY: the objects are alive, the pointers valid for the call; one poller.
            unsafe { s.post.connect(0, 0, &setup) }.unwrap();
        }
        self.until("proofs", |p| p.sides.iter().all(|s| s.post.proof(0, 0) == Some(true)));
        [0, 1].map(|i| self.sides[i].post.link(0, 0))
    }

    fn poll(&mut self) -> [bool; 2] {
        // Wakes the fake's thread, which may sleep past a delayed completion.
        self.fake.set("");
        [0, 1].map(|i| self.sides[i].post.poll(&mut [0]) == 1)
    }

    /// Why a side's stream ended, if it did.
    fn end_of(&self, side: usize) -> Option<Closed> {
        self.sides[side].post.link(0, 0).receive(&mut []).err()
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&Pair) -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !done(self) {
            let proofs = [0, 1].map(|i| (self.sides[i].post.proof(0, 0), self.end_of(i)));
            assert!(Instant::now() < end, "{what}: {proofs:?}");
            self.poll();
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    fn close(&mut self) {
        for s in &mut self.sides {
            s.post.close(0, 0);
            // SAFETY: the objects are alive, the pointers valid for the call; one poller.
            unsafe { s.qp.take().unwrap().destroy() }.unwrap();
        }
    }

    fn end(mut self) {
        self.close();
        for s in &mut self.sides {
            // SAFETY: the objects are alive, the pointers valid for the call; one poller.
            unsafe { s.device.deregister(s.mr.take().unwrap()) }.unwrap();
        }
    }
}

fn pattern(side: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 253 + side * 99) as u8).collect()
}

/// Both sides send all of their streams, in calls of odd sizes. Stops at an error of `link`s.
fn exchange(
    pair: &mut Pair,
    links: &mut [MailLink<'static>; 2],
    len: usize,
) -> [Option<Closed>; 2] {
    let streams = [pattern(0, len), pattern(1, len)];
    let (mut sent, mut got, mut ends) = ([0; 2], [0; 2], [None; 2]);
    let mut into = vec![0; 9000];
    let end = Instant::now() + Duration::from_secs(30);
    for round in 0.. {
        let ready = pair.poll();
        for i in 0..2 {
            let n = (round * 37 % 11_000).min(len - sent[i]);
            let part = &streams[i][sent[i]..sent[i] + n];
            sent[i] += links[i].send(&[&part[..n / 3], &part[n / 3..]]).unwrap_or(0);
            if ready[i] {
                match links[i].receive(&mut into) {
                    Ok(n) => {
                        let expected = &streams[1 - i][got[i]..];
                        assert!(expected.starts_with(&into[..n]), "side {i} at {}", got[i]);
                        got[i] += n;
                    }
                    Err(why) => ends[i] = Some(why),
                }
            }
        }
        if got == [len, len] || ends.iter().all(Option::is_some) {
            break;
        }
        assert!(Instant::now() < end, "sent {sent:?}, got {got:?}, {ends:?}");
    }
    ends
}

#[test]
fn streams_pass_both_ways_and_no_frame_misses_its_receive() {
    let Some((fake, _turn)) = fake() else { return };
    let before = fake.get("rnr");
    let mut pair = Pair::new(fake);
    let mut links = pair.connect();
    fake.set("*.delay_us=0-200");
    assert_eq!(exchange(&mut pair, &mut links, 300_000), [None; 2]);
    assert_eq!(fake.get("rnr"), before);
    pair.end();
}

#[test]
fn a_broken_queue_pair_ends_both_streams_and_another_takes_its_place() {
    let Some((fake, _turn)) = fake() else { return };
    let mut pair = Pair::new(fake);
    for _ in 0..2 {
        let mut links = pair.connect();
        fake.set("*.delay_us=0-200");
        assert_eq!(exchange(&mut pair, &mut links, 50_000), [None; 2]);
        fake.set("*.drop=on;*.delay_us=0");
        assert_eq!(links[0].send(&[b"lost"]), Ok(4));
        pair.until("the break", |p| p.sides[0].post.proof(0, 0) == Some(false));
        let gone = Err(Closed { vendor: IBV_WC_RETRY_EXC_ERR });
        assert_eq!(links[0].receive(&mut [0]), gone);
        assert_eq!(links[0].send(&[b"x"]), gone);
        // The other side learns by its own means: an idle queue pair tells nothing. Unless its last
        // frame, of credits, was on its way when the link broke.
        match links[1].receive(&mut [0]) {
            Ok(0) => {
                pair.sides[1].qp.as_ref().unwrap().fail();
                pair.until("the flush", |p| p.sides[1].post.proof(0, 0) == Some(false));
                let flushed = Err(Closed { vendor: IBV_WC_WR_FLUSH_ERR });
                assert!([flushed, gone].contains(&links[1].receive(&mut [0])));
            }
            early => assert_eq!(early, gone),
        }
        fake.set("*.drop=off");
        pair.close();
    }
    pair.connect();
    pair.end();
}

#[test]
fn a_break_in_the_middle_leaves_a_prefix() {
    let Some((fake, _turn)) = fake() else { return };
    for delay in [0, 50, 400] {
        let mut pair = Pair::new(fake);
        let mut links = pair.connect();
        fake.set(&format!("*.delay_us={delay}"));
        let qps = [0, 1].map(|i| pair.sides[i].qp.as_ref().unwrap().pointer());
        let ends = std::thread::scope(|scope| {
            let breaker = scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(5));
                let mut attr = ibv_qp_attr { qp_state: IBV_QPS_ERR, ..ibv_qp_attr::zeroed() };
                for qp in qps {
                    let mask = IBV_QP_STATE.cast_signed();
                    // SAFETY: the objects are alive, the pointers valid for the call; one poller.
                    unsafe { fake.verbs.modify_qp(qp.as_ptr(), &raw mut attr, mask) };
                }
            });
            let ends = exchange(&mut pair, &mut links, 4_000_000);
            breaker.join().unwrap();
            ends
        });
        assert!(ends.iter().all(Option::is_some));
        pair.end();
    }
}

#[test]
fn an_arrival_wakes_who_armed_the_queue() {
    let Some((fake, _turn)) = fake() else { return };
    let mut pair = Pair::new(fake);
    let mut links = pair.connect();
    let s = &mut pair.sides[1];
    s.device.clear_channel();
    s.post.arm();
    assert_eq!(s.post.poll(&mut [0]), 0);
    s.device.clear_channel();
    s.post.arm();
    let mut file = libc::pollfd { fd: s.device.channel_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the objects are alive, the pointers valid for the call; one poller.
    assert_eq!(unsafe { libc::poll(&raw mut file, 1, 20) }, 0);
    assert_eq!(links[0].send(&[b"wake up"]), Ok(7));
    // SAFETY: the objects are alive, the pointers valid for the call; one poller.
    assert_eq!(unsafe { libc::poll(&raw mut file, 1, 5000) }, 1);
    s.device.clear_channel();
    assert_eq!(s.post.poll(&mut [0]), 1);
    assert_eq!(links[1].receive(&mut [0; 9]), Ok(7));
    pair.end();
}
