//! Registrations: all or nothing, limits, overlaps; and what peers get of memory that was taken
//! back.

use kvrail::host::engine::Engine;
use kvrail::status::Status;
use kvrail::table::{Desc, Direction};

use crate::rig::{
    config, finish, nics, same, scatter, twins, Memory, Pair, Piece, Rng, Side, BOTH, MIB,
};

#[test]
fn a_registration_that_fails_on_one_nic_leaves_none() {
    let fake = alone!(4, "");
    let e = Engine::new(config("a", &nics(0..4))).unwrap();
    let mem = Memory::new(MIB);
    let before = fake.live();
    let errors = [("ENOMEM", 12), ("EFAULT", 14), ("EINVAL", 22), ("EIO", 5), ("ENODEV", 19)];
    for (name, errno) in errors {
        for rail in [2, 0, 3] {
            fake.set(&format!("fake{rail}.fail.reg_mr=1:{name}"));
            let err = e.register(mem.base(), MIB as u64, 0).unwrap_err();
            assert_eq!(err.status, Status::Os, "{err}");
            for want in [format!("fake{rail}:1"), "ibv_reg_mr".into(), format!("{errno}")] {
                assert!(err.message.contains(&want), "{want} is missing: {err}");
            }
            assert_eq!(fake.live(), before, "{name} on rail {rail}");
            assert_eq!(e.info().regions, 0);
        }
    }
    let r = e.register(mem.base(), MIB as u64, 0).unwrap();
    e.deregister(r.raw(), false).unwrap();
    assert_eq!(fake.live(), before);
    drop(e);
    fake.is_empty();
}

/// In the middle of the pieces of one region, too.
#[test]
fn a_registration_that_fails_at_a_later_piece_leaves_none() {
    let fake = alone!(2, "*.max_mr_size=1M");
    let e = Engine::new(config("a", &nics(0..2))).unwrap();
    let mem = Memory::new(4 * MIB);
    let before = fake.live();
    for nth in 1..=4 {
        fake.set(&format!("fake1.fail.reg_mr={nth}:EIO"));
        e.register(mem.base(), 4 << 20, 0).unwrap_err();
        assert_eq!(fake.live(), before, "piece {nth}");
    }
    drop(e);
    fake.is_empty();
}

#[test]
fn a_low_limit_of_locked_memory_is_named_with_the_need() {
    let fake = alone!(4, "*.memlock=1");
    let limit = libc::rlimit { rlim_cur: 8 << 20, rlim_max: 8 << 20 };
    // SAFETY: a valid place; only this test's process is concerned.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
    let e = Engine::new(config("a", &nics(0..4))).unwrap();
    let mem = Memory::new(3 * MIB);
    let before = fake.live();
    let err = e.register(mem.base(), 3 << 20, 0).unwrap_err();
    for want in ["RLIMIT_MEMLOCK is 8388608 bytes", "4 NICs pin 12582912 bytes", "ulimit -l"] {
        assert!(err.message.contains(want), "{want}: {err}");
    }
    assert_eq!(fake.live(), before);
    // What fits is fine.
    let r = e.register(mem.base(), 1 << 20, 0).unwrap();
    e.deregister(r.raw(), false).unwrap();
    drop(e);
    fake.is_empty();
}

#[test]
fn one_region_too_many_is_refused_and_the_others_work() {
    // Scratch on each NIC, then messages once connected, then regions.
    let fake = alone!(2, &(twins(1) + ";fake0.max_mr=8"));
    let mut pair = Pair::new(config("a", "fake0"), config("b", "fake1"), MIB);
    let mem = Memory::new(16 << 12);
    let mut held = Vec::new();
    let err = loop {
        match pair.a.e.register(mem.base() + 4096 * held.len() as u64, 4096, 0) {
            Ok(r) => held.push(r.raw()),
            Err(e) => break e,
        }
        assert!(held.len() < 8, "there is no limit");
    };
    assert_eq!((held.len(), err.status), (5, Status::Os), "{err}");
    assert!(err.message.contains("fake0:1") && err.message.contains("12"), "{err}");
    pair.moves_some(50);
    pair.a.e.deregister(held.pop().unwrap(), false).unwrap();
    held.push(pair.a.e.register(mem.base(), 4096, 0).unwrap().raw());
    for r in held {
        pair.a.e.deregister(r, false).unwrap();
    }
    drop(pair);
    fake.is_empty();
}

/// The same memory several times over, whole and in overlapping parts, of both sides; each pair of
/// regions moves right bytes, whichever others are gone already.
#[test]
fn overlapping_regions_are_independent() {
    let fake = alone!(4, &twins(2));
    let mut rng = Rng::new();
    for _ in 0..3 {
        let mut pair = Pair::twins(2, MIB, |_| {});
        let base = [pair.a.mem.base(), pair.b.mem.base()];
        let parts: [(u64, u64); 4] =
            [(0, MIB as u64), (0, MIB as u64), (4096, 700_000), (300_001, 500_000)];
        let add = |side: &Side, at: u64| {
            let one = |&(from, len): &(u64, u64)| side.e.register(at + from, len, 0).unwrap().raw();
            parts.iter().map(one).collect::<Vec<u64>>()
        };
        let (here, there) = (add(&pair.a, base[0]), add(&pair.b, base[1]));
        let import = |r: &u64| {
            let blob = pair.b.e.region_metadata(*r).unwrap();
            pair.a.e.region_import(pair.peer, &blob).unwrap().raw()
        };
        let far: Vec<u64> = there.iter().map(import).collect();
        let mut order = [0, 1, 2, 3];
        rng.shuffle(&mut order);
        for (gone, which) in order.into_iter().enumerate() {
            for &at in &order[gone..] {
                pair.a.region = here[at];
                pair.far = far[at];
                let (from, len) = (parts[at].0 as usize, parts[at].1 as usize);
                for direction in BOTH {
                    let mut pieces = scatter(&mut rng, 20, len, len);
                    for p in &mut pieces {
                        (p.here, p.there) = (p.here + from, p.there + from);
                    }
                    pair.moves(direction, &pieces);
                }
            }
            pair.a.e.deregister(here[which], false).unwrap();
            pair.b.e.deregister(there[which], false).unwrap();
        }
        drop(pair);
        fake.is_empty();
    }
}

fn post(pair: &Pair, direction: Direction, far: u64) -> kvrail::host::error::Result<Status> {
    let desc = |addr, region| Desc { addr, len: 5000, dev: 0, region };
    let local = [desc(pair.a.mem.base() + 100, pair.a.region)];
    let remote = [desc(pair.b.mem.base() + 300, far)];
    let t = pair.a.e.prepare_descs(direction, pair.peer, &local, &remote)?.raw();
    let end = pair.a.e.post(t, None).and_then(|_| finish(&pair.a.e, t));
    pair.a.e.release(t).unwrap();
    end
}

#[test]
fn memory_that_the_peer_took_back_is_not_touched() {
    let fake = alone!(4, &twins(2));
    for width in [0, 1] {
        let mut pair = Pair::twins(2, MIB, |c| c.stripe_width = width);
        for direction in BOTH {
            pair.moves_some(20);
            let before = pair.b.mem.fill(9);
            let own = pair.a.mem.fill(10);
            pair.b.e.deregister(pair.b.region, false).unwrap();
            let err = post(&pair, direction, pair.far).unwrap_err();
            assert_eq!(err.status, Status::RemoteAccess, "{direction:?}: {err}");
            assert!(err.message.contains("descriptor pair 0"), "{err}");
            same(&pair.b.mem.copy(), &before, direction, "there");
            same(&pair.a.mem.copy(), &own, direction, "here");
            // Registered again, imported again: works, over however many rails there are now.
            pair.a.e.region_forget(pair.far).unwrap();
            let again = pair.b.e.register(pair.b.mem.base(), MIB as u64, 0).unwrap();
            pair.b.region = again.raw();
            reconnect(&pair);
            pair.far = pair.a.e.region_import(pair.peer, &pair.b.blob()).unwrap().raw();
            pair.moves_some(20);
        }
        drop(pair);
        fake.is_empty();
    }
}

/// A peer whose last rail broke is dialled again.
fn reconnect(pair: &Pair) {
    pair.a.e.peer_connect(pair.peer, crate::fake::HANG).unwrap();
}

/// A blob that promises more than was registered, and one with keys of another region.
#[test]
fn a_forged_region_ends_in_a_remote_access_error() {
    let fake = alone!(2, &twins(1));
    let pair = Pair::twins(1, MIB, |_| {});
    let other = Memory::new(MIB);
    let small = pair.b.e.register(other.base(), 8192, 0).unwrap().raw();
    let true_blob = pair.b.e.region_metadata(small).unwrap();
    let mut blob = kvrail::host::blob::RegionBlob::decode(&true_blob).unwrap();
    blob.len = MIB as u64;
    // Its own slot is not looked up by the NIC: what counts is the key.
    let far = pair.a.e.region_import(pair.peer, &blob.encode().unwrap()).unwrap().raw();
    let want = other.fill(5);
    for direction in BOTH {
        let desc = |addr, region| Desc { addr, len: 4096, dev: 0, region };
        let local = [desc(pair.a.mem.base(), pair.a.region)];
        // Half of it outside.
        let remote = [desc(other.base() + 6144, far)];
        reconnect(&pair);
        let t = pair.a.e.prepare_descs(direction, pair.peer, &local, &remote).unwrap().raw();
        let end = pair.a.e.post(t, None).and_then(|_| finish(&pair.a.e, t));
        assert_eq!(end.unwrap_err().status, Status::RemoteAccess, "{direction:?}");
        pair.a.e.release(t).unwrap();
        same(&other.copy(), &want, direction, "there");
    }
    reconnect(&pair);
    assert_eq!(
        pair.carry(Direction::Read, &[Piece { here: 0, there: 0, len: MIB }]),
        Ok(Status::Ok)
    );
    drop(pair);
    fake.is_empty();
}

/// Ranges of one call that touch or overlap: one registration on each NIC, and a peer reaches all
/// of it and not a byte beside it.
#[test]
fn ranges_given_together_are_registered_together_where_they_touch() {
    let fake = alone!(8, &twins(4));
    let mut pair = Pair::twins(4, MIB, |_| {});
    let (before, mem) = (fake.get("live.mr"), Memory::new(16 << 12));
    let at = |offset: u64| mem.base() + offset;
    // Two that touch, one over both; one far away, one inside of that, one a byte behind it.
    let ranges = [(8192, 4096), (100, 8092), (8000, 5000), (40_000, 77), (40_001, 5), (40_078, 9)]
        .map(|(from, len)| (at(from), len));
    let handles = pair.b.e.register_list(&ranges, 0).unwrap();
    assert_eq!([handles[0], handles[0], handles[3]], [handles[1], handles[2], handles[4]]);
    assert_ne!(handles[0], handles[3]);
    assert_ne!(handles[3], handles[5]);
    assert_eq!(fake.get("live.mr") - before, 3 * 4, "one registration a NIC for each");
    let parts = [
        (handles[0].raw(), 100u64, 13_000u64),
        (handles[3].raw(), 40_000, 40_077),
        (handles[5].raw(), 40_078, 40_087),
    ];
    for (region, from, to) in parts {
        pair.b.region = region;
        let blob = pair.b.blob();
        pair.far = pair.a.e.region_import(pair.peer, &blob).unwrap().raw();
        let move_ = |pair: &Pair, direction, from: u64, len: u64, far: u64| {
            let near = [Desc { addr: pair.a.mem.base(), len, dev: 0, region: pair.a.region }];
            let far = [Desc { addr: at(from), len, dev: 0, region: far }];
            let t = pair.a.e.prepare_descs(direction, pair.peer, &near, &far).unwrap().raw();
            let end = pair.a.e.post(t, None).and_then(|_| finish(&pair.a.e, t));
            pair.a.e.release(t).unwrap();
            end
        };
        for direction in BOTH {
            let (own, mut far) = (pair.a.mem.fill(11), mem.fill(12));
            assert_eq!(move_(&pair, direction, from, to - from, pair.far), Ok(Status::Ok));
            let n = (to - from) as usize;
            if direction == Direction::Write {
                far[from as usize..to as usize].copy_from_slice(&own[..n]);
            } else {
                same(&pair.a.mem.copy()[..n], &far[from as usize..to as usize], direction, "here");
            }
            same(&mem.copy(), &far, direction, "there");
        }
        // A blob that promises a byte more on either side is refused by the NIC.
        let mut wide = kvrail::host::blob::RegionBlob::decode(&blob).unwrap();
        (wide.base, wide.len) = (wide.base - 1, wide.len + 2);
        let wide = wide.encode().unwrap();
        for beside in [from - 1, to] {
            let far = pair.a.e.region_import(pair.peer, &wide).unwrap().raw();
            let was = mem.fill(13);
            let end = move_(&pair, Direction::Write, beside, 1, far);
            assert_eq!(end.unwrap_err().status, Status::RemoteAccess, "byte {beside}");
            same(&mem.copy(), &was, Direction::Write, "there");
            reconnect(&pair);
            pair.a.e.region_forget(far).unwrap();
        }
        pair.b.e.deregister(region, false).unwrap();
    }
    drop(pair);
    fake.is_empty();
}

#[test]
fn ranges_given_together_are_all_registered_or_none() {
    let fake = alone!(4, "");
    let e = Engine::new(config("a", &nics(0..4))).unwrap();
    let mem = Memory::new(MIB);
    let before = fake.live();
    let apart = |n: u64| (0..n).map(|i| (mem.base() + 8192 * i, 4096)).collect::<Vec<_>>();
    for (rail, nth) in [(0, 1), (2, 3), (3, 5)] {
        fake.set(&format!("fake{rail}.fail.reg_mr={nth}:EIO"));
        let err = e.register_list(&apart(5), 0).unwrap_err();
        assert_eq!(err.status, Status::Os, "{err}");
        assert!(err.message.contains("20480 bytes on fake"), "{err}");
        assert_eq!((fake.live(), e.info().regions), (before.clone(), 0), "{rail} {nth}");
    }
    // 64 fit.
    let held = e.register_list(&apart(60), 0).unwrap();
    let err = e.register_list(&apart(5), 0).unwrap_err();
    assert_eq!(err.status, Status::Capacity, "{err}");
    assert_eq!((fake.get("live.mr") - before[1].1, e.info().regions), (240, 60));
    let err = e.register_list(&[(mem.base(), 1), (0, 5)], 0).unwrap_err();
    assert_eq!((err.status, e.info().regions), (Status::Invalid, 60), "{err}");
    assert_eq!(e.register_list(&[], 0), Ok(vec![]));
    held.iter().for_each(|r| e.deregister(r.raw(), false).unwrap());
    assert_eq!(fake.live(), before);
    drop(e);
    fake.is_empty();
}

/// Four NICs take the time of one: each is asked while the others still pin.
#[test]
fn nics_register_at_the_same_time() {
    let fake = alone!(4, "*.reg_us=20000");
    let e = Engine::new(config("a", &nics(0..4))).unwrap();
    let mem = Memory::new(MIB);
    // Threads may begin late, on a machine that is busy, but not every time.
    crate::fake::wait(
        || {
            let r = e.register(mem.base(), MIB as u64, 0).unwrap();
            e.deregister(r.raw(), false).unwrap();
            fake.get("reg_most") == 4
        },
        || format!("at most {} NICs register at a time", fake.get("reg_most")),
    );
    drop(e);
    fake.is_empty();
}

/// Memory above 4 GiB: no registration is that long, and bytes cross the seams.
#[test]
fn large_regions_are_registered_in_pieces_below_4_gib() {
    let fake = alone!(4, &twins(2));
    let mut pair = Pair::twins(2, MIB, |_| {});
    let before = fake.get("live.mr");
    let len = (4u64 << 30) + 8192;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping; few of its pages are touched.
    let at = unsafe { libc::mmap(core::ptr::null_mut(), len as usize, rw, kind, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    let region = pair.b.e.register(at as u64, len, 0).unwrap().raw();
    assert_eq!(fake.get("live.mr") - before, 3 * 2, "pieces on two NICs");
    assert!(fake.get("mr_longest") < 4 << 30, "{}", fake.get("mr_longest"));
    (pair.b.region, pair.rng) = (region, Rng::new());
    let far = pair.a.e.region_import(pair.peer, &pair.b.blob()).unwrap().raw();
    for seam in [2u64 << 30, 4 << 30] {
        let own = pair.a.mem.fill(seam);
        let near = [Desc { addr: pair.a.mem.base(), len: 9000, dev: 0, region: pair.a.region }];
        let there = [Desc { addr: at as u64 + seam - 4500, len: 9000, dev: 0, region: far }];
        for direction in [Direction::Write, Direction::Read] {
            if direction == Direction::Read {
                pair.a.mem.fill(1);
            }
            let t = pair.a.e.prepare_descs(direction, pair.peer, &near, &there).unwrap().raw();
            assert_eq!(pair.a.e.transfer_info(t).unwrap().work_requests, 2, "cut at the seam");
            pair.a.e.post(t, None).unwrap();
            assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
            pair.a.e.release(t).unwrap();
        }
        same(&pair.a.mem.copy()[..9000], &own[..9000], Direction::Read, "here and back");
    }
    pair.b.e.deregister(region, false).unwrap();
    drop(pair);
    // SAFETY: mapped above; nothing has it registered any more.
    unsafe { libc::munmap(at, len as usize) };
    fake.is_empty();
}
