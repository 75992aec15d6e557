//! Device memory: segments behind dma-bufs (memfds, for the fake) and at addresses that a
//! peer-memory module would resolve; all or nothing; what a provider lent goes back once.

use core::mem::take;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

use kvrail::host::blob::RegionBlob;
use kvrail::host::engine::Engine;
use kvrail::host::error::Error;
use kvrail::host::memory::{Lease, Segment, DEVICE, DMABUF};
use kvrail::status::Status;
use kvrail::table::{Desc, Direction};

use crate::cycles::Heap;
use crate::fake::{Fake, HANG, MEASURED};
use crate::rejoin::{cycles, files, resident};
use crate::rig::{
    apply, config, finish, nics, pattern, same, scatter, twins, Memory, Pair, Piece, Side, BOTH,
    MIB,
};

/// A buffer that the fake takes for a dma-buf, seen through a mapping of the test's own.
pub(crate) struct Buffer {
    fd: Option<OwnedFd>,
    at: *mut u8,
    len: usize,
}

impl Buffer {
    pub(crate) fn new(len: usize) -> Buffer {
        // SAFETY: a name that ends in NUL.
        let fd = unsafe { libc::memfd_create(c"kvrail-test".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: made just now.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: an open descriptor.
        assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), len as i64) }, 0);
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let (to, fd_) = (core::ptr::null_mut(), fd.as_raw_fd());
        // SAFETY: a new mapping of the file's bytes.
        let at = unsafe { libc::mmap(to, len, rw, libc::MAP_SHARED, fd_, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Buffer { fd: Some(fd), at: at.cast(), len }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn fd(&self) -> i32 {
        self.fd.as_ref().unwrap().as_raw_fd()
    }

    pub(crate) fn fill(&self, seed: u64) -> Vec<u8> {
        let bytes = pattern(seed, self.len);
        // SAFETY: inside the mapping; no work is in flight when a test writes.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at, self.len) };
        bytes
    }

    pub(crate) fn copy(&self) -> Vec<u8> {
        let mut out = vec![0u8; self.len];
        // SAFETY: inside the mapping; all transfers that a test looks at have ended.
        unsafe { core::ptr::copy_nonoverlapping(self.at, out.as_mut_ptr(), self.len) };
        out
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

pub(crate) fn part(buffer: &Buffer, addr: u64, offset: u64, len: u64) -> Segment {
    Segment { addr, len, offset, fd: buffer.fd(), coherent: false }
}

pub(crate) fn register(e: &Engine, segments: &[Segment]) -> Vec<u64> {
    let made = e.register_segments(segments, None).unwrap_or_else(|e| panic!("{e}"));
    made.iter().map(|h| h.raw()).collect()
}

fn refused(e: &Engine, segments: &[Segment]) -> Error {
    e.register_segments(segments, None).unwrap_err()
}

/// Counts what it was asked to take back, and what was registered then.
fn lease(fake: Fake, seen: &Arc<Mutex<Vec<u64>>>) -> Lease {
    let seen = seen.clone();
    Lease::new(move || seen.lock().unwrap().push(fake.get("live.mr")))
}

fn puts(seen: &Mutex<Vec<u64>>) -> Vec<u64> {
    seen.lock().unwrap().clone()
}

/// One range of a dma-buf on each side, at an address that is no address of this process, with the
/// descriptors closed before anything moves; over the seams of its pieces.
#[test]
fn bytes_move_between_dmabufs_whose_addresses_are_not_their_offsets() {
    const LEN: u64 = 5 << 19;
    let fake = alone!(4, &(twins(2) + ";*.max_mr_size=1M"));
    let mut pair = Pair::twins(2, 4096, |_| {});
    let (mut here, mut there) = (Buffer::new(4 * MIB), Buffer::new(4 * MIB));
    // The far one begins at 0, as a device's addresses may.
    let at = [(0x7_0000_0000_1000, 0x9000), (0, 0x3000)];
    let local = register(&pair.a.e, &[part(&here, at[0].0, at[0].1, LEN)])[0];
    let region = register(&pair.b.e, &[part(&there, at[1].0, at[1].1, LEN)])[0];
    (here.fd, there.fd) = (None, None);
    let blob = pair.b.e.region_metadata(region).unwrap();
    let far = pair.a.e.region_import(pair.peer, &blob).unwrap().raw();
    for direction in BOTH {
        let mut pieces = scatter(&mut pair.rng, 100, LEN as usize, LEN as usize);
        // Over a seam, up to the last byte and from the first one.
        let (seam, len) = (MIB - 700, LEN as usize);
        pieces
            .retain(|p| p.here + p.len < seam && p.there + p.len < seam && p.here.min(p.there) > 9);
        pieces.push(Piece { here: seam, there: seam, len: len - seam });
        pieces.push(Piece { here: 0, there: 0, len: 9 });
        let (mut h, mut t) = (here.fill(pair.rng.next()), there.fill(pair.rng.next()));
        let inside = |whole: &mut Vec<u8>, at: (u64, u64)| whole.split_off(at.1 as usize);
        let (mut hs, mut ts) = (inside(&mut h, at[0]), inside(&mut t, at[1]));
        apply(direction, &pieces, &mut hs, &mut ts);
        h.extend(hs);
        t.extend(ts);
        let list = |base: u64, region: u64, place: fn(&Piece) -> usize| {
            let one = |p: &Piece| Desc {
                addr: base + place(p) as u64,
                len: p.len as u64,
                dev: 0,
                region,
            };
            pieces.iter().map(one).collect::<Vec<_>>()
        };
        let (near, away) = (list(at[0].0, local, |p| p.here), list(at[1].0, far, |p| p.there));
        let post = pair.a.e.prepare_descs(direction, pair.peer, &near, &away).unwrap().raw();
        pair.a.e.post(post, None).unwrap();
        assert_eq!(finish(&pair.a.e, post), Ok(Status::Ok), "{direction:?}");
        pair.a.e.release(post).unwrap();
        same(&there.copy(), &t, direction, "there");
        same(&here.copy(), &h, direction, "here");
        // Not a byte more, though the buffer has it.
        let past = [Desc { addr: at[1].0 + LEN - 1, len: 2, dev: 0, region: far }];
        let two = [Desc { addr: at[0].0, len: 2, dev: 0, region: local }];
        let err = pair.a.e.prepare_descs(direction, pair.peer, &two, &past).unwrap_err();
        assert_eq!(err.status, Status::NotRegistered, "{err}");
    }
    pair.a.e.deregister(local, false).unwrap();
    pair.b.e.deregister(region, false).unwrap();
    drop(pair);
    fake.is_empty();
}

/// Wherever a NIC says no, nothing stays: no registration, no region, no descriptor, and what a
/// provider lent is back before the call returns, when all registrations have ended.
#[test]
fn a_failure_at_any_registration_leaves_nothing() {
    let fake = alone!(2, "*.max_mr_size=1M");
    let e = Engine::new(config("a", &nics(0..2))).unwrap();
    let (buffer, host) = (Buffer::new(4 * MIB), Memory::new(MIB));
    let peer = Segment { addr: host.base(), len: 3 << 18, offset: 0, fd: -1, coherent: false };
    // 3 + 1 + 3 pieces of dma-bufs and one of the other kind, on each NIC.
    let all = [
        part(&buffer, 0x5000_0000, 0, 3 << 20),
        part(&buffer, 0x1000, 0x2000, 4096),
        peer,
        part(&buffer, 0x9000_1000, 0x1000, 5 << 19),
    ];
    let (before, open, pool) = (fake.live(), files(), e.info().pool_bytes);
    for nic in 0..2 {
        for (call, most) in [("reg_dmabuf_mr", 7), ("reg_mr", 1)] {
            for nth in 1..=most {
                let seen = Arc::default();
                fake.set(&format!("fake{nic}.fail.{call}={nth}:EIO"));
                let err = e.register_segments(&all, Some(lease(fake, &seen))).unwrap_err();
                assert_eq!(err.status, Status::Os, "{err}");
                for want in [&format!("on fake{nic}:1: ibv_{call}"), "taken back on all 2 NICs"] {
                    assert!(err.message.contains(want), "{want}: {err}");
                }
                let now = (fake.live(), files(), e.info().regions, e.info().pool_bytes);
                assert_eq!(now, (before.clone(), open, 0, pool), "fake{nic} {call} {nth}");
                assert_eq!(puts(&seen), [before[1].1], "fake{nic} {call} {nth}");
            }
        }
    }
    // The text has the piece that was refused: the last one of the third dma-buf.
    fake.set("fake1.fail.reg_dmabuf_mr=7:EIO");
    let err = refused(&e, &all);
    let want = format!(
        "524288 bytes at 0x90201000 (dma-buf fd {}, offset 0x201000) on fake1:1",
        buffer.fd()
    );
    assert!(err.message.contains(&want), "{want}: {err}");
    // And all of it works.
    let made = register(&e, &all);
    assert_eq!((fake.get("live.mr") - before[1].1, e.info().regions), (16, 4));
    made.iter().for_each(|r| e.deregister(*r, false).unwrap());
    assert_eq!((fake.live(), files()), (before, open));
    drop(e);
    fake.is_empty();
}

/// A NIC that does not take back what it had registered, while another refuses: that is said.
#[test]
fn what_a_nic_keeps_after_a_failure_is_told() {
    let fake = alone!(2, "");
    let e = Engine::new(config("a", &nics(0..2))).unwrap();
    let (buffer, seen) = (Buffer::new(MIB), Arc::default());
    fake.set("fake1.fail.reg_dmabuf_mr=1:EIO;fake0.fail.dereg_mr=1:EBUSY");
    let one = [part(&buffer, 0x1000, 0x2000, 4096)];
    let err = e.register_segments(&one, Some(lease(fake, &seen))).unwrap_err();
    for want in ["on fake1:1: ibv_reg_dmabuf_mr", "fake0:1: ibv_dereg_mr", "before this process"] {
        assert!(err.message.contains(want), "{want}: {err}");
    }
    assert!(!err.message.contains("taken back on all"), "{err}");
    assert_eq!((err.status, puts(&seen)), (Status::Os, vec![]), "{err}");
}

#[test]
fn more_segments_than_regions_leave_nothing() {
    let fake = alone!(2, "");
    let mut c = config("a", &nics(0..2));
    c.max_regions = 3;
    let e = Engine::new(c).unwrap();
    let (buffer, seen) = (Buffer::new(MIB), Arc::default());
    let all: Vec<_> = (0..4).map(|i| part(&buffer, i << 30, i << 12, 4096)).collect();
    let (before, open) = (fake.live(), files());
    fake.set("fake0.fail.reg_dmabuf_mr=1:EIO");
    let err = e.register_segments(&all, Some(lease(fake, &seen))).unwrap_err();
    assert!(err.status == Status::Capacity && err.message.contains("max_regions"), "{err}");
    let now = (fake.live(), files(), e.info().regions, puts(&seen));
    assert_eq!(now, (before.clone(), open, 0, vec![before[1].1]));
    // No NIC was asked before it was known that there is no room.
    assert_eq!(refused(&e, &all[..1]).status, Status::Os);
    let three = register(&e, &all[..3]);
    three.iter().for_each(|r| e.deregister(*r, false).unwrap());
    drop(e);
    fake.is_empty();
}

/// Each refusal is a sentence: what, the value seen, what is allowed and what to do.
#[test]
fn what_cannot_be_registered_is_refused_in_words() {
    let fake = alone!(2, "");
    let e = Engine::new(config("a", &nics(0..2))).unwrap();
    let buffer = Buffer::new(MIB);
    let (fd, mib) = (buffer.fd(), MIB as u64);
    let good = part(&buffer, 0x1000, 0, 4096);
    let closed = Segment { fd: 1_000_000, ..good };
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    let before = (fake.live(), files());
    let at_fd = format!("fd {fd}, offset ");
    let cases: [(Segment, Status, &[&str]); 14] = [
        (closed, Status::Invalid, &["fd 1000000 is not open", "fake0:1", "errno 9", "4096 bytes"]),
        (Segment { fd: ends[0], ..good }, Status::Invalid, &["is pipe:", "no dma-buf", "errno 22"]),
        (
            part(&buffer, 0x1000, mib - 4096, 4097),
            Status::Invalid,
            &[
                "4097 bytes at 0x1000 (dma-buf",
                &format!("{at_fd}0xff000) on fake"),
                "it has 1048576 bytes",
                "end at 1048577: register at most 4096 bytes from there",
            ],
        ),
        (part(&buffer, 0x1000, mib, 4096), Status::Invalid, &["at most 0 bytes"]),
        (Segment { len: 0, ..good }, Status::Invalid, &["segment 1", "at least 1 byte"]),
        (Segment { addr: !0xfff, ..good }, Status::Invalid, &["0xfffffffffffff000", "64 bits"]),
        (Segment { offset: !0xfff, ..good }, Status::Invalid, &[&at_fd, "inside 64 bits"]),
        (Segment { fd: -2, ..good }, Status::Invalid, &["fd -2", "or -1 where"]),
        (Segment { fd: i32::MIN, ..good }, Status::Invalid, &["fd -2147483648"]),
        (Segment { fd: -1, offset: 8, ..good }, Status::Invalid, &["counted in a dma-buf"]),
        (Segment { fd: -1, addr: 0, ..good }, Status::Invalid, &["no address 0"]),
        (
            Segment { addr: 0x1234, ..good },
            Status::Invalid,
            &["modulo the page size, 4096 bytes", "0x234 and 0x0 into a page"],
        ),
        (Segment { addr: 0x1000, offset: 4095, ..good }, Status::Invalid, &["0x0 and 0xfff"]),
        (
            Segment { addr: 0x1000, fd: -1, ..good },
            Status::Os,
            &["device memory", "errno 14", "peer-memory module", "kv_buffer_device=cpu"],
        ),
    ];
    for (bad, status, words) in cases {
        // Behind a good one, which must not stay.
        let err = refused(&e, &[good, bad]);
        assert_eq!(err.status, status, "{err}");
        for want in words {
            assert!(err.message.contains(want), "{want} is missing: {err}");
        }
        assert_eq!((fake.live(), files(), e.info().regions), (before.0.clone(), before.1, 0));
    }
    for (errno, n) in [("EOPNOTSUPP", 95), ("EPROTONOSUPPORT", 93), ("ENOSYS", 38)] {
        fake.set(&format!("fake1.fail.reg_dmabuf_mr=1:{errno}"));
        let err = refused(&e, &[good]);
        assert_eq!(err.status, Status::Unsupported, "{err}");
        for want in ["fake1:1", "peer-memory module and pass fd -1", "kv_buffer_device=cpu"] {
            assert!(err.message.contains(want), "{n} {want}: {err}");
        }
    }
    fake.set("*.dmabuf=0");
    assert_eq!(refused(&e, &[good]).status, Status::Unsupported);
    let err = e.register(0x1000, 4096, DMABUF).unwrap_err();
    assert!(err.status == Status::Invalid && err.message.contains("register_segments"), "{err}");
    let err = e.register(0x1000, 4096, 3).unwrap_err();
    assert!(err.status == Status::Unsupported && err.message.contains("kind 3"), "{err}");
    let err = e.register(0x1000, 4096, DEVICE).unwrap_err();
    assert!(err.status == Status::Os && err.message.contains("peer-memory"), "{err}");
    assert_eq!((fake.live(), files(), e.info().regions), (before.0, before.1, 0));
    assert_eq!(e.register_segments(&[], None), Ok(vec![]));
    // SAFETY: opened above.
    ends.iter().for_each(|end| assert_eq!(unsafe { libc::close(*end) }, 0));
    drop(e);
    fake.is_empty();
}

/// Where the processor would copy, at an address that is not its own, nothing is begun.
#[test]
fn device_memory_is_for_nics_only() {
    let fake = alone!(2, &twins(1));
    let pair = Pair::twins(1, MIB, |_| {});
    let buffer = Buffer::new(MIB);
    // The host's own memory lies at that address: a copy would find it.
    let addr = pair.a.mem.base();
    let region = register(&pair.a.e, &[part(&buffer, addr, 0, MIB as u64)])[0];
    let was = (pair.a.mem.fill(1), buffer.fill(2));
    let own = pair.a.e.peer_self().raw();
    let view = |r: u64| pair.a.e.region_import_self(r).unwrap().raw();
    let at = |region: u64| [Desc { addr, len: 4096, dev: 0, region }];
    let host = pair.a.region;
    for (local, remote, which) in
        [(host, view(region), "remote"), (region, view(host), "local"), (region, view(region), "")]
    {
        for direction in BOTH {
            let err = pair.a.e.prepare_descs(direction, own, &at(local), &at(remote)).unwrap_err();
            assert_eq!(err.status, Status::Unsupported, "{err}");
            assert!(err.message.contains(&format!("{which} region in slot")), "{err}");
        }
    }
    // Nor where a blob lies about the kind: such a region is not open to the processor.
    let mut lie = RegionBlob::decode(&pair.a.e.region_metadata(region).unwrap()).unwrap();
    assert_eq!(lie.mem, DMABUF);
    lie.mem = 0;
    let far = pair.a.e.region_import(own, &lie.encode().unwrap()).unwrap().raw();
    let t = pair.a.e.prepare_descs(Direction::Write, own, &at(host), &at(far)).unwrap().raw();
    let end = pair.a.e.post(t, None).and_then(|_| finish(&pair.a.e, t));
    assert_eq!(end.unwrap_err().status, Status::RemoteAccess);
    pair.a.e.release(t).unwrap();
    assert_eq!((pair.a.mem.copy(), buffer.copy()), was);
    // As ever with a slot that a device's region had before.
    pair.a.e.deregister(region, false).unwrap();
    let again = pair.a.e.register(addr, 8192, 0).unwrap().raw();
    let t = pair.a.e.prepare_descs(Direction::Read, own, &at(host), &at(view(again))).unwrap();
    pair.a.e.post(t.raw(), None).unwrap();
    assert_eq!(finish(&pair.a.e, t.raw()), Ok(Status::Ok));
    pair.a.e.release(t.raw()).unwrap();

    drop(pair);
    fake.is_empty();
}

/// Nor with a process of this host that has no rails, where `auto` falls back to copies.
#[test]
fn device_memory_is_not_copied_to_a_process_without_rails() {
    let fake = alone!(1, "");
    let buffer = Buffer::new(MIB);
    // The host's own memory lies at that address: a copy would find it.
    let host = Memory::new(MIB);
    let addr = host.base();
    let at = |region: u64| [Desc { addr, len: 4096, dev: 0, region }];
    let mut c = config("auto", "fake0");
    c.transport = "auto".into();
    let auto = Side::new(c, 4096);
    let mut c = config("plain", "");
    c.transport = "local".into();
    let plain = Side::new(c, 2 * MIB);
    let peer = auto.e.peer_add(plain.e.metadata(), None).unwrap().raw();
    let far = auto.e.region_import(peer, &plain.blob()).unwrap().raw();
    let region = register(&auto.e, &[part(&buffer, addr, 0, MIB as u64)])[0];
    let there = [Desc { addr: plain.mem.base(), len: 4096, dev: 0, region: far }];
    let was = (host.fill(1), plain.mem.fill(7), buffer.fill(2));
    auto.e.peer_connect(peer, HANG).unwrap();
    for direction in BOTH {
        let err = auto.e.prepare_descs(direction, peer, &at(region), &there).unwrap_err();
        assert_eq!(err.status, Status::Unsupported, "{err}");
        for want in ["local region in slot", "without RDMA rails", "kv_buffer_device=cpu"] {
            assert!(err.message.contains(want), "{want}: {err}");
        }
    }
    assert_eq!((host.copy(), plain.mem.copy(), buffer.copy()), was);
    // Host memory goes on.
    let own = [Desc { addr: auto.mem.base(), len: 4096, dev: 0, region: auto.region }];
    let t = auto.e.prepare_descs(Direction::Read, peer, &own, &there).unwrap().raw();
    auto.e.post(t, None).unwrap();
    assert_eq!(finish(&auto.e, t), Ok(Status::Ok));
    auto.e.release(t).unwrap();
    drop((auto, plain));
    fake.is_empty();
}

/// Without rails there is nobody who could move it, here or there.
#[test]
fn device_memory_needs_rails_on_both_sides() {
    let fake = alone!(2, &twins(1));
    let pair = Pair::twins(1, MIB, |_| {});
    let (buffer, addr) = (Buffer::new(MIB), pair.a.mem.base());
    let mut c = config("c", "");
    c.transport = "local".into();
    let local = Side::new(c, 4096);
    let one = part(&buffer, 0x1000, 0, 4096);
    for err in [refused(&local.e, &[one]), local.e.register(addr, 4096, DEVICE).unwrap_err()] {
        assert_eq!(err.status, Status::Unsupported, "{err}");
        assert!(err.message.contains("transport local") && err.message.contains("=verbs"), "{err}");
    }
    let peer = local.e.peer_add(pair.b.e.metadata(), None).unwrap().raw();
    let far = register(&pair.b.e, &[one])[0];
    let blob = pair.b.e.region_metadata(far).unwrap();
    let err = local.e.region_import(peer, &blob).unwrap_err();
    assert!(err.status == Status::Unsupported && err.message.contains("memory kind 2"), "{err}");
    let mut strange = RegionBlob::decode(&blob).unwrap();
    for mem in [3, 256, u32::MAX] {
        strange.mem = mem;
        let err = pair.a.e.region_import(pair.peer, &strange.encode().unwrap()).unwrap_err();
        assert!(err.status == Status::Unsupported && err.message.contains("kinds 0 to 2"), "{err}");
    }
    drop((pair, local));
    fake.is_empty();
}

/// Memory at an address that a peer-memory module resolves: for the fake, the process's own.
#[test]
fn bytes_move_at_addresses_of_a_peer_memory_module() {
    let fake = alone!(4, &twins(2));
    let mut pair = Pair::twins(2, MIB, |_| {});
    let (addr, len) = (pair.b.mem.base(), MIB as u64);
    let one = register(&pair.b.e, &[Segment { addr, len, offset: 0, fd: -1, coherent: false }])[0];
    let two = pair.b.e.register(addr, len, DEVICE).unwrap().raw();
    for region in [one, two] {
        pair.b.region = region;
        pair.far = pair.a.e.region_import(pair.peer, &pair.b.blob()).unwrap().raw();
        pair.moves_some(50);
    }
    drop(pair);
    fake.is_empty();
}

/// What a provider lent goes back with the last of its regions, when no NIC has any of it, and
/// never while somebody is inside.
#[test]
fn a_lease_ends_with_its_last_region() {
    let fake = alone!(4, &twins(2));
    let pair = Pair::twins(2, MIB, |_| {});
    let (buffer, seen) = (Buffer::new(MIB), Arc::default());
    let all: Vec<_> = (0..3).map(|i| part(&buffer, i << 30, i << 12, 4096)).collect();
    let before = fake.get("live.mr");
    let lent = lease(fake, &seen);
    let made = pair.a.e.register_segments(&all, Some(lent)).unwrap();
    let [one, two, three] = [0, 1, 2].map(|i| made[i].raw());
    pair.a.e.deregister(two, false).unwrap();
    pair.a.e.deregister(one, true).unwrap();
    assert_eq!(pair.a.e.deregister(one, true).unwrap_err().status, Status::Stale);
    assert_eq!(puts(&seen), [0; 0]);
    // A transfer is inside.
    fake.set("*.hold=1");
    let near = [Desc { addr: 2 << 30, len: 4096, dev: 0, region: three }];
    let far = [Desc { addr: pair.b.mem.base(), len: 4096, dev: 0, region: pair.far }];
    let t = pair.a.e.prepare_descs(Direction::Read, pair.peer, &near, &far).unwrap().raw();
    pair.a.e.post(t, None).unwrap();
    assert_eq!(pair.a.e.deregister(three, false).unwrap_err().status, Status::Busy);
    assert_eq!(puts(&seen), [0; 0]);
    fake.set("*.hold=0");
    assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
    pair.a.e.deregister(three, false).unwrap();
    assert_eq!(puts(&seen), [before]);
    pair.a.e.release(t).unwrap();
    drop(pair);
    fake.is_empty();
    assert_eq!(puts(&seen).len(), 1);
}

/// Once a NIC does not end a registration peers may reach the memory for good: its provider must
/// not hand it to anybody else.
#[test]
fn a_lease_is_kept_when_a_nic_does_not_let_go() {
    let fake = alone!(2, "");
    let (buffer, seen) = (Buffer::new(MIB), Arc::default());
    let e = Engine::new(config("a", &nics(0..2))).unwrap();
    let all: Vec<_> = (0..2).map(|i| part(&buffer, i << 30, i << 12, 4096)).collect();
    let made = e.register_segments(&all, Some(lease(fake, &seen))).unwrap();
    fake.set("fake1.fail.dereg_mr=1:EBUSY");
    for _ in 0..2 {
        let err = e.deregister(made[0].raw(), false).unwrap_err();
        assert_eq!(err.status, Status::Busy, "{err}");
        assert!(err.message.contains("before this process ends"), "{err}");
    }
    e.deregister(made[1].raw(), false).unwrap();
    drop(e);
    assert_eq!((puts(&seen), fake.get("live.mr")), (vec![], 1));
}

/// At the end of the engine too; and it may call the engine, as no lock is held.
#[test]
fn a_provider_may_call_the_engine_when_it_takes_memory_back() {
    let fake = alone!(2, "");
    let buffer = Buffer::new(MIB);
    let e = Arc::new(Engine::new(config("a", &nics(0..2))).unwrap());
    let weak: Weak<Engine> = Arc::downgrade(&e);
    let calls = Arc::new(Mutex::new(0));
    let count = calls.clone();
    let one = [part(&buffer, 1 << 30, 0, 4096)];
    let other = one[0];
    let lent = Lease::new(move || {
        *count.lock().unwrap() += 1;
        let e = weak.upgrade().unwrap();
        let r = register(&e, &[other])[0];
        e.region_metadata(r).unwrap();
        e.deregister(r, true).unwrap();
    });
    let made = e.register_segments(&one, Some(lent)).unwrap()[0].raw();
    e.deregister(made, false).unwrap();
    assert_eq!(*calls.lock().unwrap(), 1);
    let seen = Arc::default();
    let none = fake.get("live.mr");
    e.register_segments(&one, Some(lease(fake, &seen))).unwrap();
    drop(e);
    assert_eq!(puts(&seen), [none]);
    fake.is_empty();
}

/// Registered and taken back over and over: flat in descriptors, registrations, the engine's tables
/// and memory. `KVRAIL_TEST_CYCLES` says how often.
#[test]
fn registrations_leave_nothing() {
    let fake = alone!(2, "");
    let e = Engine::new(config("a", &nics(0..2))).unwrap();
    let buffer = Buffer::new(MIB);
    let all: Vec<_> = (0..4).map(|i| part(&buffer, i << 30, i << 14, 16384)).collect();
    let held = || (fake.live(), files(), e.info(), fake.get("calls.reg_dmabuf_mr") % 8);
    let before = held();
    let seen = Arc::default();
    let n = cycles(2000);
    let (mut heap, mut pages) = (Heap::new(n), 0);
    for i in 0..n {
        let made = e.register_segments(&all, Some(lease(fake, &seen))).unwrap();
        if i % 500 == 0 {
            assert_eq!(fake.get("live.mr") - before.0[1].1, 8);
        }
        made.iter().for_each(|r| e.deregister(r.raw(), false).unwrap());
        assert_eq!(held(), before, "cycle {i}");
        assert_eq!(take(&mut *seen.lock().unwrap()).len(), 1, "cycle {i}");
        heap.look();
        if i == n / 4 {
            pages = resident();
        }
    }
    heap.is_flat();
    let (now, slack) = (resident(), MIB as u64);
    eprintln!("{MEASURED}{n} cycles; in memory {pages} bytes after a quarter, {now} at the end");
    assert!(now <= pages + slack, "{now} bytes are in memory, {pages} after a quarter");
    drop(e);
    fake.is_empty();
}
