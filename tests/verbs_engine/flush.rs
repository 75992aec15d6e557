//! READs into a device's memory are done when their bytes are there: the fake places them when
//! their NIC reads the memory (`late_reads`), and counts the work requests that do so (`wr_loop`).

use core::time::Duration;

use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::host::memory::{Segment, DEVICE};
use kvrail::status::Status;
use kvrail::table::{Desc, Direction};

use crate::devmem::{part, register, Buffer};
use crate::fake::{wait, Fake};
use crate::rig::{apply, config, finish, nics, same, scatter, twins, Pair, Piece, Rng, Side, MIB};

/// Where the device's memory lies for descriptors: no address of this process.
const AT: u64 = 0x7_0000_0000_0000;
const READ: Direction = Direction::Read;

/// One op of one claim.
const ONE: [Piece; 1] = [Piece { here: 4096, there: 8192, len: 5000 }];

/// A transfer between a region, registered at an address, and the peer's host memory.
fn prepare(pair: &Pair, d: Direction, near: (u64, u64), pieces: &[Piece]) -> u64 {
    pair.prepare_at(d, near, pieces).unwrap()
}

/// Reads into the buffer that `region` is of, and looks at every byte at once.
fn reads(pair: &mut Pair, buffer: &Buffer, region: u64, pieces: &[Piece]) {
    let (mut here, mut there) = (buffer.fill(pair.rng.next()), pair.b.mem.fill(pair.rng.next()));
    let t = prepare(pair, READ, (region, AT), pieces);
    pair.a.e.post(t, None).unwrap();
    assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
    apply(READ, pieces, &mut here, &mut there);
    same(&buffer.copy(), &here, READ, "in the device");
    pair.a.e.release(t).unwrap();
}

fn whole(buffer: &Buffer) -> Segment {
    part(buffer, AT, 0, buffer.len() as u64)
}

fn loops(fake: Fake) -> u64 {
    fake.get("wr_loop")
}

#[test]
fn reads_into_device_memory_are_done_when_their_bytes_are_there() {
    let fake = alone!(4, &(twins(2) + ";*.late_reads=1"));
    let mut pair = Pair::twins(2, MIB, |_| {});
    let qps = fake.get("live.qp");
    pair.moves_some(20);
    assert_eq!(loops(fake), 0, "host memory has no flush");
    // The rails are up: each of this side gets its queue pair now.
    let buffer = Buffer::new(MIB);
    let region = register(&pair.a.e, &[whole(&buffer)])[0];
    assert_eq!(fake.get("live.qp"), qps + 2);
    reads(&mut pair, &buffer, region, &ONE);
    assert_eq!(loops(fake), 1, "one READ, one flush");
    assert_eq!((fake.get("wet_staged"), fake.get("wet_placed")), (1, 1));
    for n in [3, 40, 400] {
        let pieces = scatter(&mut pair.rng, n, MIB, MIB);
        reads(&mut pair, &buffer, region, &pieces);
    }
    assert_eq!(fake.get("wet_staged"), fake.get("wet_placed"));
    // Neither what goes out of it, nor host memory beside it.
    let before = loops(fake);
    let pieces = scatter(&mut pair.rng, 40, MIB, MIB);
    let (mut here, mut there) = (buffer.fill(5), pair.b.mem.fill(6));
    let t = prepare(&pair, Direction::Write, (region, AT), &pieces);
    pair.a.e.post(t, None).unwrap();
    assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
    pair.a.e.release(t).unwrap();
    apply(Direction::Write, &pieces, &mut here, &mut there);
    same(&pair.b.mem.copy(), &there, Direction::Write, "there");
    pair.moves_some(40);
    assert_eq!(loops(fake), before);
    // Nor a second queue pair for a second region, nor one that outlives its rail.
    let more = register(&pair.a.e, &[part(&buffer, 0, 0, 4096)])[0];
    assert_eq!(fake.get("live.qp"), qps + 2);
    pair.a.e.deregister(more, false).unwrap();
    pair.a.e.deregister(region, false).unwrap();
    drop(pair);
    fake.is_empty();
}

/// Memory of whose provider, or whose caller, it is known that no flush is needed.
#[test]
fn coherent_memory_has_no_flush_and_no_queue_pair_for_it() {
    let fake = alone!(4, &twins(2));
    let mut pair = Pair::twins(2, MIB, |_| {});
    let (qps, buffer) = (fake.get("live.qp"), Buffer::new(MIB));
    let coherent = Segment { coherent: true, ..whole(&buffer) };
    let region = register(&pair.a.e, &[coherent])[0];
    let pieces = scatter(&mut pair.rng, 40, MIB, MIB);
    reads(&mut pair, &buffer, region, &pieces);
    assert_eq!((loops(fake), fake.get("live.qp")), (0, qps));
    // Also beside one that needs it, of the same bytes.
    fake.set("*.late_reads=1");
    let late = register(&pair.a.e, &[part(&buffer, AT, 0, MIB as u64)])[0];
    reads(&mut pair, &buffer, late, &pieces);
    let before = loops(fake);
    assert!(before > 0);
    fake.set("*.late_reads=0");
    reads(&mut pair, &buffer, region, &pieces);
    assert_eq!(loops(fake), before);
    drop(pair);
    fake.is_empty();
}

/// Addresses that a peer-memory module resolves, of several pieces; registered before there is a
/// rail.
#[test]
fn memory_behind_a_peer_memory_module_is_flushed_too() {
    let fake = alone!(4, &(twins(2) + ";*.late_reads=2;*.max_mr_size=256K"));
    let mut a = Side::new(config("a", &nics(0..2)), MIB);
    let host = a.region;
    a.region = a.e.register(a.mem.base(), MIB as u64, DEVICE).unwrap().raw();
    let b = Side::new(config("b", &nics(2..4)), MIB);
    let (peer, far) = a.meet(&b);
    // For data and messages two rails of two sides, and the loopbacks of one.
    assert_eq!(fake.get("live.qp"), 2 * 2 * 2 + 2);
    let mut pair = Pair { a, b, peer, far, rng: Rng::new() };
    for n in [1, 30, 300] {
        pair.moves_some_reads(n);
    }
    let flushes = loops(fake);
    assert!(flushes > 3);
    assert_eq!(fake.get("wet_staged"), fake.get("wet_placed"));
    // The same bytes as host memory are none of a device.
    fake.set("*.late_reads=0");
    pair.a.region = host;
    pair.moves_some_reads(30);
    assert_eq!(loops(fake), flushes);
    drop(pair);
    fake.is_empty();
}

/// More registrations in one transfer than a rail notes at a time, in any order, host memory among
/// them; with a send queue that now and then takes nothing.
#[test]
fn reads_into_many_regions_are_flushed_region_by_region() {
    const N: usize = 60;
    let fake = alone!(2, &(twins(1) + ";*.late_reads=1"));
    let mut pair = Pair::twins(1, MIB, |_| {});
    let buffer = Buffer::new(N * 4096);
    let all: Vec<_> = (0..N as u64).map(|i| part(&buffer, AT + i * 4096, i * 4096, 4096)).collect();
    let regions = register(&pair.a.e, &all);
    for refuse in [false, true] {
        for each in [16, 1024] {
            let mut list: Vec<(Desc, Piece)> = Vec::new();
            for (i, region) in regions.iter().enumerate() {
                for k in 0..4096 / 1024 {
                    let here = i * 4096 + k * 1024;
                    let len = each as u64;
                    let near = Desc { addr: AT + here as u64, len, dev: 0, region: *region };
                    list.push((near, Piece { here, there: 4 * here % 1_000_000, len: each }));
                }
            }
            let host = Desc { addr: pair.a.mem.base(), len: 16, dev: 0, region: pair.a.region };
            list.push((host, Piece { here: 0, there: 1_040_000, len: 16 }));
            pair.rng.shuffle(&mut list);
            let (mut here, there) = (buffer.fill(pair.rng.next()), pair.b.mem.fill(3));
            let near: Vec<_> = list.iter().map(|l| l.0).collect();
            let far: Vec<_> = list
                .iter()
                .map(|(_, p)| Desc {
                    addr: pair.b.mem.base() + p.there as u64,
                    len: p.len as u64,
                    dev: 0,
                    region: pair.far,
                })
                .collect();
            if refuse {
                fake.set("fake0.fail.post_send=3@1:ENOMEM");
            }
            let t = pair.a.e.prepare_descs(READ, pair.peer, &near, &far).unwrap().raw();
            pair.a.e.post(t, None).unwrap();
            assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
            pair.a.e.release(t).unwrap();
            fake.set("*.fail.post_send=off");
            for (_, p) in list.iter().filter(|(d, _)| d.region != pair.a.region) {
                here[p.here..p.here + p.len].copy_from_slice(&there[p.there..p.there + p.len]);
            }
            same(&buffer.copy(), &here, READ, "in the device");
        }
    }
    assert!(loops(fake) >= N as u64, "each registration at least once");
    assert_eq!((fake.get("wet_staged"), fake.get("wc_error")), (fake.get("wet_placed"), 0));
    drop(pair);
    fake.is_empty();
}

/// A rail whose flush fails is a rail that failed: another one repeats the READ, and flushes it.
#[test]
fn a_flush_that_fails_breaks_its_rail_only() {
    let fake = alone!(4, &(twins(2) + ";*.late_reads=1"));
    for rails in [1, 2] {
        let mut pair = Pair::twins(rails, MIB, |c| c.keepalive_ms = 60_000);
        let buffer = Buffer::new(MIB);
        let region = register(&pair.a.e, &[whole(&buffer)])[0];
        let qps = fake.get("live.qp");
        let (mut here, mut there) = (buffer.fill(1), pair.b.mem.fill(2));
        let before = loops(fake);
        fake.set("*.hole_loop=1");
        let t = prepare(&pair, READ, (region, AT), &ONE);
        pair.a.e.post(t, None).unwrap();
        wait(|| loops(fake) == before + 1, || "no flush".into());
        assert_eq!(pair.a.e.check(t), Ok(Status::InProgress));
        let (qp, errors) = (fake.get("loop_qpn"), fake.get("wc_error"));
        fake.set(&format!("qp{qp}.error=1"));
        wait(|| fake.get("wc_error") > errors, || "the flush did not fail".into());
        assert_eq!(pair.a.e.check(t), Ok(Status::InProgress));
        fake.set("*.hole_loop=0");
        assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
        pair.a.e.release(t).unwrap();
        apply(READ, &ONE, &mut here, &mut there);
        same(&buffer.copy(), &here, READ, "in the device");
        let reaches = |pair: &mut Pair| reads(pair, &buffer, region, &ONE);
        reaches(&mut pair);
        wait(|| fake.get("live.qp") == qps, || "the rail did not come back".into());
        reaches(&mut pair);
        drop(pair);
    }
    fake.is_empty();
}

fn patient(c: &mut Config) {
    (c.rail_timeout_ms, c.keepalive_ms, c.stall_ms) = (60_000, 120_000, 100_000);
}

/// A device pair with a READ whose bytes came in and whose flush does not end.
struct Stuck {
    fake: Fake,
    pair: Pair,
    buffer: Buffer,
    region: u64,
    t: u64,
}

impl Stuck {
    fn new(fake: Fake, rails: usize, tune: impl Fn(&mut Config)) -> Stuck {
        let pair = Pair::twins(rails, MIB, tune);
        let buffer = Buffer::new(MIB);
        let region = register(&pair.a.e, &[whole(&buffer)])[0];
        buffer.fill(1);
        pair.b.mem.fill(2);
        let before = loops(fake);
        fake.set("*.hole_loop=1");
        let t = prepare(&pair, READ, (region, AT), &ONE);
        pair.a.e.post(t, None).unwrap();
        wait(|| loops(fake) == before + 1, || "no flush".into());
        assert_eq!(pair.a.e.check(t), Ok(Status::InProgress));
        Stuck { fake, pair, buffer, region, t }
    }

    /// Everything works as before, and nothing stays.
    fn end(mut self) {
        self.fake.set("*.hole_loop=0");
        self.pair.back();
        reads(&mut self.pair, &self.buffer, self.region, &ONE);
        self.pair.a.e.deregister(self.region, false).unwrap();
        drop(self.pair);
    }
}

/// Cancel, release and deregistration wait for a flush as they do for data; what does not end is
/// ended with its rail.
#[test]
fn nobody_lets_go_while_a_flush_is_under_way() {
    let fake = alone!(2, &(twins(1) + ";*.late_reads=1"));
    let stuck = Stuck::new(fake, 1, patient);
    let e = &stuck.pair.a.e;
    assert_eq!(e.deregister(stuck.region, false).unwrap_err().status, Status::Busy);
    e.cancel(stuck.t).unwrap();
    assert_eq!(e.check(stuck.t), Ok(Status::InProgress), "the flush is in flight");
    fake.set("*.hole_loop=0");
    assert_eq!(finish(e, stuck.t).unwrap_err().status, Status::Cancelled);
    e.release(stuck.t).unwrap();
    stuck.end();

    let stuck = Stuck::new(fake, 1, patient);
    let (e, flushes) = (&stuck.pair.a.e, loops(fake));
    e.release(stuck.t).unwrap();
    assert_eq!(loops(fake), flushes, "it was not asked again");
    stuck.end();

    let stuck = Stuck::new(fake, 1, patient);
    let e = &stuck.pair.a.e;
    e.deregister(stuck.region, true).unwrap();
    let pieces = register(e, &[whole(&stuck.buffer)])[0];
    e.release(stuck.t).unwrap();
    Stuck { region: pieces, ..stuck }.end();
    fake.is_empty();
}

/// Whose fault it was is not lost while what came before is flushed, whoever posts meanwhile: the
/// transfer ends, and is repeated on no rail.
#[test]
fn a_culprit_is_told_though_others_post_while_it_waits_for_a_flush() {
    let fake = alone!(2, &(twins(1) + ";*.late_reads=1"));
    let stuck = Stuck::new(fake, 1, patient);
    let e = &stuck.pair.a.e;
    let errors = fake.get("wc_error");
    fake.set("fake0.wc_force=n:1:REM_ACCESS_ERR");
    let post = || {
        let t = prepare(&stuck.pair, READ, (stuck.region, AT), &ONE);
        e.post(t, None).map(|_| t)
    };
    let culprit = post().unwrap();
    wait(|| fake.get("wc_error") > errors, || "nothing failed".into());
    let claims = || e.rail_info(0).unwrap().claims;
    let before = claims();
    let other = post().unwrap();
    wait(|| claims() > before, || "the other transfer was not posted".into());
    assert_eq!(e.check(culprit), Ok(Status::InProgress), "it waits for the flush");
    fake.set("*.hole_loop=0");
    assert_eq!(finish(e, stuck.t), Ok(Status::Ok));
    assert_eq!(finish(e, culprit).unwrap_err().status, Status::RemoteAccess);
    assert_eq!(finish(e, other), Ok(Status::Ok));
    for t in [stuck.t, culprit, other] {
        e.release(t).unwrap();
    }
    stuck.end();
    fake.is_empty();
}

/// As on a NIC that carries nothing to itself: the words do not send anybody to look at the peer.
#[test]
fn a_transfer_that_failed_for_its_flush_says_so() {
    let fake = alone!(4, &(twins(2) + ";*.late_reads=1"));
    // Time enough for the error to come before the silence; the flush after it ends with that.
    let stuck = Stuck::new(fake, 1, |c| {
        (c.rail_timeout_ms, c.keepalive_ms, c.stall_ms) = (5000, 60_000, 1000);
    });
    fake.set(&format!("qp{}.error=1", fake.get("loop_qpn")));
    let why = finish(&stuck.pair.a.e, stuck.t).unwrap_err();
    assert_eq!(why.status, Status::Stalled, "{why}");
    let parts = ["first trouble on rail 0", "of the flush that this NIC sends to itself"];
    assert!(parts.iter().all(|p| why.message.contains(p)), "{why}");
    stuck.pair.a.e.release(stuck.t).unwrap();
    stuck.end();
    fake.is_empty();
}

/// A flush that never ends: the rail's watchdog takes the READ to another rail.
#[test]
fn a_flush_that_hangs_is_the_watchdogs() {
    let fake = alone!(4, &(twins(2) + ";*.late_reads=1"));
    let stuck = Stuck::new(fake, 2, |c| c.keepalive_ms = 60_000);
    let e = &stuck.pair.a.e;
    // The other rail's works.
    let flushes = loops(fake);
    wait(|| loops(fake) > flushes, || "no other rail was asked".into());
    fake.set("*.hole_loop=0");
    assert_eq!(finish(e, stuck.t), Ok(Status::Ok));
    e.release(stuck.t).unwrap();
    stuck.end();
    fake.is_empty();
}

/// The whole connection goes while a flush is under way.
#[test]
fn a_peer_that_goes_takes_the_flush_with_it() {
    let fake = alone!(4, &(twins(2) + ";*.late_reads=1"));
    let Stuck { pair, region, t, .. } = Stuck::new(fake, 2, patient);
    let Pair { a, b, .. } = pair;
    drop(b);
    let end = finish(&a.e, t);
    assert!(end.is_err(), "{end:?}");
    a.e.release(t).unwrap();
    a.e.deregister(region, false).unwrap();
    drop(a);
    fake.is_empty();
}

/// A NIC that gives no loopback queue pair: the registration says so, or the dial.
#[test]
fn without_a_loopback_nothing_is_registered_and_no_rail_comes_up() {
    let fake = alone!(2, &twins(1));
    let mut pair = Pair::twins(1, MIB, |_| {});
    let buffer = Buffer::new(MIB);
    let before = (fake.live(), pair.a.e.info().regions);
    for fault in ["create_qp=1:ENOMEM", "modify_init=1:EIO", "modify_rtr=1:EINVAL", "modify_rts=1"]
    {
        fake.set(&format!("fake0.fail.{fault}"));
        let err = pair.a.e.register_segments(&[whole(&buffer)], None).unwrap_err();
        assert_eq!(err.status, Status::NoRail, "{err}");
        for want in ["fake0:1: ibv_", "leads back", "KVR_SEGMENT_COHERENT", "kv_buffer_device"] {
            assert!(err.message.contains(want), "{want}: {err}");
        }
        assert_eq!((fake.live(), pair.a.e.info().regions), before, "{fault}");
        pair.moves_some(4);
    }
    // What was refused leaves nothing to need: a rail that comes up has no such queue pair.
    fake.set("fake0.port1.state=down");
    wait(|| fake.live() != before.0, || "the rail is there".into());
    fake.set("fake0.port1.state=active");
    pair.back();
    wait(|| fake.live() == before.0, || format!("{:?}, not {:?}", fake.live(), before.0));
    let region = register(&pair.a.e, &[whole(&buffer)])[0];
    reads(&mut pair, &buffer, region, &ONE);
    drop(pair);
    fake.is_empty();

    let dialler = |e: &Engine, there: &Side| {
        let peer = e.peer_add(there.e.metadata(), None).unwrap().raw();
        (peer, e.peer_connect(peer, Duration::from_millis(1500)))
    };
    let mut c = config("a", "fake0");
    c.connect_timeout_ms = 1000;
    let (a, b) = (Side::new(c, 4096), Side::new(config("b", "fake1"), 4096));
    let region = register(&a.e, &[whole(&buffer)])[0];
    // The loopback is brought up before the others.
    fake.set("fake0.fail.modify_rts=1+:EINVAL");
    let (_, end) = dialler(&a.e, &b);
    let err = end.unwrap_err();
    assert!(err.message.contains("leads back"), "{err}");
    fake.set("*.fail.modify_rts=off");
    a.e.deregister(region, false).unwrap();
    drop((a, b));
    fake.is_empty();
}

/// Many pieces in both directions, with device and host memory in turn and two threads that poll.
#[test]
fn device_and_host_memory_move_side_by_side() {
    let fake = alone!(4, &(twins(2) + ";*.late_reads=1;*.delay_us=0-60"));
    let mut pair = Pair::twins(2, MIB, |_| {});
    let buffer = Buffer::new(MIB);
    let region = register(&pair.a.e, &[whole(&buffer)])[0];
    for _ in 0..6 {
        let pieces = scatter(&mut pair.rng, 200, MIB, MIB);
        let (mut device, mut host) = (buffer.fill(pair.rng.next()), pair.a.mem.fill(4));
        let there = pair.b.mem.fill(pair.rng.next());
        let one = prepare(&pair, READ, (region, AT), &pieces);
        let two = pair.prepare(READ, &pieces).unwrap();
        for t in [one, two] {
            pair.a.e.post(t, None).unwrap();
        }
        for (t, to) in [(two, &mut host), (one, &mut device)] {
            assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
            apply(READ, &pieces, to, &mut there.clone());
        }
        same(&buffer.copy(), &device, READ, "in the device");
        same(&pair.a.mem.copy(), &host, READ, "here");
        [one, two].iter().for_each(|t| pair.a.e.release(*t).unwrap());
    }
    drop(pair);
    fake.is_empty();
}
