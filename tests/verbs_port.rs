//! The verbs lane over a double of libibverbs: what it posts, and what it makes of completions.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

#[path = "verbs_port/graves.rs"]
mod graves;
#[path = "verbs_port/loopback.rs"]
mod loopback;
#[path = "verbs_port/refused.rs"]
mod refused;
#[path = "verbs_port/rig.rs"]
mod rig;
mod verbs_double;

use kvrail::nic::verbs::{Open, Shape};
use kvrail::nic::{Completion, Port, PostError, WrStatus};
use kvrail::table::{Direction, Op};
use proptest::prelude::*;
use rdma_core_sys::*;

use rig::{apart, op, success, Rig, LANE, OPEN, SHAPE};
use verbs_double::{self as double, with, Bad, Refuse};

const LKEY: u32 = 100_100 + LANE;
const RKEY: u32 = 205_010;

fn error(wr: u32, status: WrStatus, code: u32) -> Completion {
    Completion { peer: 0, wr, status, vendor: code << 16 | 0x77 }
}

// ---- what is posted ----

#[test]
fn a_batch_of_reads_is_one_list_and_is_signalled_last_and_not_more_than_every_fourth() {
    let mut rig = Rig::new(1, SHAPE);
    let ops = apart(10);
    assert_eq!(rig.read(7, &ops), Ok(()));
    assert_eq!(with(|s| s.lists), 1);
    let wrs = rig.posted(0);
    assert_eq!(wrs.len(), 10);
    for (i, (wr, o)) in wrs.iter().zip(&ops).enumerate() {
        assert_eq!((wr.opcode, wr.remote, wr.rkey), (IBV_WR_RDMA_READ, o.remote, RKEY));
        assert_eq!(wr.sges, [(o.local, o.len, LKEY)]);
        assert_eq!(wr.id, 7 + i as u64, "epoch 0, peer 0, number of the op");
        assert_eq!(wr.signalled(), [3, 9].contains(&i), "{i}");
    }
    assert_eq!(rig.poll(), []);
    rig.done(5);
    assert_eq!(rig.poll(), [success(0, 10)]);
    rig.done(5);
    assert_eq!(rig.poll(), [success(0, 16)]);
    assert_eq!(rig.port.in_flight(0), 0);
    rig.end();
}

#[test]
fn writes_are_done_when_a_read_of_what_was_written_last_is_done() {
    let mut rig = Rig::new(1, SHAPE);
    let ops = apart(9);
    assert_eq!(rig.write(0, &ops), Ok(()));
    let wrs = rig.posted(0);
    assert_eq!(wrs.len(), 10);
    assert!(wrs[..9].iter().all(|w| w.opcode == IBV_WR_RDMA_WRITE && !w.signalled()));
    let flush = &wrs[9];
    assert_eq!((flush.opcode, flush.signalled()), (IBV_WR_RDMA_READ, true));
    assert_eq!((flush.remote, flush.rkey), (ops[8].remote + 0x40 - 8, RKEY));
    assert_eq!(flush.bytes(), 8, "the last bytes of the last op, into the lane's scratch");
    let scratch = with(|s| s.registered[0]);
    assert_eq!(scratch.3, IBV_ACCESS_LOCAL_WRITE);
    assert_eq!(flush.sges[0].0, scratch.0);
    rig.done(9);
    assert_eq!(rig.poll(), [], "acknowledged is not placed");
    rig.done(1);
    assert_eq!(rig.poll(), [success(0, 8)]);
    // A short one is read back whole.
    rig.write(9, &[op(0x10, 0x20, 3)]).unwrap();
    let wrs = rig.posted(0);
    assert_eq!((wrs[1].remote, wrs[1].bytes()), (0x20, 3));
    rig.end();
}

#[test]
fn neighbours_at_the_peer_become_one_work_request_with_a_piece_for_each_place_here() {
    for direction in [Direction::Read, Direction::Write] {
        let mut rig = Rig::new(1, SHAPE);
        // Six neighbours there; here the second goes on where the first ends.
        let here = [0x1000, 0x1010, 0x5000, 0x3000, 0x7000, 0x9000];
        let ops: Vec<Op> =
            here.iter().enumerate().map(|(i, &l)| op(l, 0x8000 + i as u64 * 16, 16)).collect();
        rig.post(0, direction, 0, &ops).unwrap();
        let wrs = rig.posted(0);
        let pieces: Vec<_> = wrs[0].sges.iter().map(|s| (s.0, s.1)).collect();
        assert_eq!(pieces, [(0x1000, 32), (0x5000, 16), (0x3000, 16), (0x7000, 16)]);
        assert_eq!((wrs[0].remote, wrs[0].number()), (0x8000, 0));
        assert_eq!((wrs[1].remote, wrs[1].number()), (0x8050, 5), "four pieces are the most");
        rig.done(8);
        assert_eq!(rig.poll(), [success(0, 5)]);
        rig.end();
    }
}

#[test]
fn nothing_merges_over_a_key_a_region_or_the_longest_message() {
    let mut rig = Rig::new(1, SHAPE);
    rig.keys.seam = Some(0x8010);
    rig.read(0, &[op(0x1000, 0x8000, 16), op(0x2000, 0x8010, 16)]).unwrap();
    let wrs = rig.posted(0);
    assert_eq!(wrs.iter().map(|w| w.rkey).collect::<Vec<_>>(), [RKEY, RKEY + 1]);
    rig.done(2);
    rig.poll();
    // Another region that has the next address.
    let other = Op { remote_region: 6, ..op(0x2000, 0x9010, 16) };
    rig.read(2, &[op(0x1000, 0x9000, 16), other]).unwrap();
    assert_eq!(rig.posted(0).len(), 2);
    rig.done(2);
    rig.poll();
    // Here, another region makes another piece, also when its address follows.
    let other = Op { local_region: 3, ..op(0x1010, 0x9010, 16) };
    rig.read(4, &[op(0x1000, 0x9000, 16), other]).unwrap();
    assert_eq!(rig.posted(0)[0].sges, [(0x1000, 16, LKEY), (0x1010, 16, LKEY + 200)]);
    rig.done(2);
    rig.poll();
    rig.connect(0, 32);
    rig.read(6, &[op(0x1000, 0x9000, 16), op(0x1010, 0x9010, 16), op(0x1020, 0x9020, 1)]).unwrap();
    let wrs = rig.posted(0);
    assert_eq!(wrs.iter().map(|w| w.bytes()).collect::<Vec<_>>(), [32, 1]);
    rig.end();
}

// ---- a post that is cut short ----

/// Posts eight ops of which the list is refused at `at`; what was in flight must all be told done.
fn cut(direction: Direction, at: usize, again: usize) {
    let mut rig = Rig::new(1, SHAPE);
    let ops = apart(8);
    with(|s| {
        s.refuse.push_back(Refuse { at, code: libc::ENOMEM, bad: Bad::Right });
        // And so often the marker.
        let more = Refuse { at: 0, code: libc::ENOMEM, bad: Bad::Right };
        s.refuse.extend(core::iter::repeat_n(more, again));
    });
    let wanted = if at == 8 { Ok(()) } else { Err((at as u32, PostError::Full)) };
    assert_eq!(rig.post(0, direction, 100, &ops), wanted);
    assert_eq!(rig.posted(0).len(), at);
    for _ in 0..again {
        assert_eq!(rig.poll(), []);
    }
    rig.done(at);
    let mut told = rig.poll();
    rig.done(1);
    told.extend(rig.poll());
    if direction == Direction::Write {
        let wanted: Vec<_> = (at > 0).then(|| success(0, 99 + at as u32)).into_iter().collect();
        assert_eq!(told, wanted, "only the flush says that WRITEs are done");
    }
    match at {
        0 => assert_eq!(told, []),
        _ => assert_eq!(told.last(), Some(&success(0, 99 + at as u32))),
    }
    assert_eq!(rig.port.in_flight(0), 0);
    // The rest follows, with the numbers that were not used.
    if at < 8 {
        with(|s| s.refuse.clear());
        rig.post(0, direction, 100 + at as u32, &ops[at..]).unwrap();
        rig.done(9);
        assert_eq!(rig.poll().last(), Some(&success(0, 107)));
    }
    assert_eq!((rig.port.in_flight(0), rig.port.strays()), (0, 0));
    rig.end();
}

#[test]
fn what_was_posted_of_a_refused_list_is_in_flight_and_told_done() {
    for again in [0, 1, 3] {
        (0..8).for_each(|at| cut(Direction::Read, at, again));
        (0..=8).for_each(|at| cut(Direction::Write, at, again));
    }
}

#[test]
fn a_marker_behind_writes_reads_back_what_was_posted_last() {
    let mut rig = Rig::new(1, SHAPE);
    let ops = apart(8);
    with(|s| s.refuse.push_back(Refuse { at: 3, code: libc::ENOMEM, bad: Bad::Right }));
    assert_eq!(rig.write(0, &ops), Err((3, PostError::Full)));
    assert_eq!(rig.poll(), []);
    let marker = &rig.posted(0)[3];
    assert_eq!((marker.opcode, marker.remote), (IBV_WR_RDMA_READ, ops[2].remote + 0x38));
    rig.end();
}

#[test]
fn a_rail_error_of_a_post_says_how_many_ops_were_taken() {
    for at in 0..8 {
        let mut rig = Rig::new(1, SHAPE);
        with(|s| s.refuse.push_back(Refuse { at, code: libc::EINVAL, bad: Bad::Right }));
        // Pairs of ops become one work request each.
        let ops: Vec<Op> =
            (0..16).map(|i| op(0x1000 + i * 64, 0x8000 + i / 2 * 4096 + i % 2 * 16, 16)).collect();
        assert_eq!(rig.read(0, &ops), Err((2 * at as u32, PostError::Rail)));
        assert_eq!(rig.read(0, &ops), Err((0, PostError::Rail)), "until it is connected again");
        rig.connect(0, 1 << 20);
        assert_eq!(rig.read(0, &ops), Ok(()));
        rig.end();
    }
    // Refused at the flush: all ops were taken.
    let mut rig = Rig::new(1, SHAPE);
    with(|s| s.refuse.push_back(Refuse { at: 4, code: libc::EIO, bad: Bad::Right }));
    assert_eq!(rig.write(0, &apart(4)), Err((4, PostError::Rail)));
    rig.end();
    // Nobody says where: nothing counts as taken, and there is room for all to complete.
    for bad in [Bad::Null, Bad::Elsewhere] {
        let mut rig = Rig::new(1, SHAPE);
        with(|s| s.refuse.push_back(Refuse { at: 2, code: libc::ENOMEM, bad }));
        let room = rig.port.room();
        assert_eq!(rig.read(0, &apart(4)), Err((0, PostError::Rail)));
        assert!(rig.port.room() <= room - 4);
        rig.end();
    }
}

#[test]
fn a_marker_that_the_provider_refuses_for_good_breaks_the_rail() {
    let mut rig = Rig::new(1, SHAPE);
    with(|s| {
        s.refuse.push_back(Refuse { at: 2, code: libc::ENOMEM, bad: Bad::Right });
        s.refuse.push_back(Refuse { at: 0, code: libc::EIO, bad: Bad::Right });
    });
    assert_eq!(rig.read(0, &apart(8)), Err((2, PostError::Full)));
    let wanted = Completion { peer: 0, wr: 1, status: WrStatus::RailError, vendor: 0 };
    assert_eq!(rig.poll(), [wanted]);
    rig.end();
}

// ---- errors ----

#[test]
fn each_error_is_the_memorys_or_the_rails_and_names_its_first_op() {
    use WrStatus::{LocalAccess, RailError, RemoteAccess};
    for status in 1..=23 {
        let class = match status {
            IBV_WC_LOC_LEN_ERR | IBV_WC_LOC_PROT_ERR => LocalAccess,
            IBV_WC_REM_INV_REQ_ERR | IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_OP_ERR => RemoteAccess,
            _ => RailError,
        };
        for direction in [Direction::Read, Direction::Write] {
            let mut rig = Rig::new(1, SHAPE);
            // Work requests of two ops each; the second, which is not signalled, fails.
            let ops: Vec<Op> = (0..6)
                .map(|i| op(0x1000 + i * 64, 0x8000 + i / 2 * 4096 + i % 2 * 16, 16))
                .collect();
            rig.post(0, direction, 50, &ops).unwrap();
            rig.done(1);
            rig.fails(status);
            assert_eq!(rig.poll(), [error(52, class, status)], "flushed ones are innocent");
            assert_eq!(rig.post(0, direction, 56, &ops), Err((0, PostError::Rail)));
            assert_eq!(rig.poll(), []);
            rig.end();
        }
    }
}

// ---- rails that come and go ----

#[test]
fn completions_of_a_rail_that_was_closed_are_dropped() {
    let mut rig = Rig::new(2, SHAPE);
    rig.read(0, &apart(8)).unwrap();
    rig.post(1, Direction::Read, 0, &apart(4)).unwrap();
    let old = rig.qp[0];
    rig.done(4);
    rig.fails(IBV_WC_RETRY_EXC_ERR);
    rig.port.close(0);
    assert_eq!(rig.bury(), [old], "handed out when close returns");
    assert_eq!(rig.poll(), []);
    rig.connect(0, 1 << 20);
    rig.read(0, &apart(4)).unwrap();
    assert_eq!(rig.posted(0)[0].id >> 48, 1, "a new epoch");
    // Late ones of the old queue pair, with numbers that are in use again; some even under the new
    // one's number.
    with(|s| {
        s.puts(rig.qp[0], 3, IBV_WC_SUCCESS);
        s.puts(rig.qp[0], 0, IBV_WC_WR_FLUSH_ERR);
    });
    assert_eq!(rig.poll(), []);
    rig.done(4);
    with(|s| s.done(rig.qp[1], 4));
    assert_eq!(rig.poll(), [success(0, 3), success(1, 3)]);
    rig.end();
}

#[test]
fn completions_of_nothing_that_was_posted_are_counted_and_dropped() {
    let mut rig = Rig::new(2, SHAPE);
    rig.read(0, &apart(4)).unwrap();
    let (qp, other) = (rig.qp[0], rig.qp[1]);
    with(|s| {
        s.puts(qp, 7 << 32, IBV_WC_SUCCESS); // no such peer
        s.puts(other, 3, IBV_WC_SUCCESS); // another's queue pair
        s.puts(qp, 2, IBV_WC_SUCCESS); // not signalled
        s.puts(qp, 1000, IBV_WC_SUCCESS); // never posted
    });
    assert_eq!((rig.poll(), rig.port.strays()), (vec![], 4));
    rig.done(4);
    assert_eq!(rig.poll(), [success(0, 3)]);
    rig.end();
}

#[test]
fn a_success_settles_signalled_ones_before_it_whose_completions_were_lost() {
    let mut rig = Rig::new(1, SHAPE);
    rig.read(0, &apart(12)).unwrap();
    with(|s| {
        let number = rig.qp[0];
        s.qps.get_mut(&number).unwrap().queue.drain(..8);
        s.done(number, 4);
    });
    assert_eq!(rig.poll(), [success(0, 11)]);
    assert_eq!(rig.port.in_flight(0), 0);
    rig.end();
}

#[test]
fn the_first_proof_is_kept_from_the_engine_and_later_failures_are_not() {
    let mut rig = Rig::new(1, SHAPE);
    assert_eq!(rig.port.proof(0), None);
    assert!(rig.port.prove(0) && rig.port.prove(0));
    let wrs = rig.posted(0);
    assert_eq!(wrs.len(), 1, "one at a time");
    assert_eq!((wrs[0].opcode, wrs[0].sges.len()), (IBV_WR_RDMA_WRITE, 0));
    assert_eq!((rig.poll(), rig.port.proof(0)), (vec![], None));
    rig.done(1);
    assert_eq!((rig.poll(), rig.port.proof(0)), (vec![], Some(true)));
    // Behind data, and the data's own number is next to it.
    rig.read(0, &apart(2)).unwrap();
    assert!(rig.port.prove(0));
    rig.read(2, &apart(1)).unwrap();
    rig.done(4);
    assert_eq!(rig.poll(), [success(0, 1), success(0, 2)]);
    assert_eq!((rig.port.proof(0), rig.port.in_flight(0)), (Some(true), 0));
    // Later it keeps the rail alive: if it fails, the rail is broken.
    assert!(rig.port.prove(0));
    rig.read(3, &apart(1)).unwrap();
    rig.fails(IBV_WC_RETRY_EXC_ERR);
    let status = IBV_WC_RETRY_EXC_ERR;
    assert_eq!(rig.poll(), [error(3, WrStatus::RailError, status)]);
    assert_eq!((rig.port.proof(0), rig.port.prove(0)), (Some(false), false));
    // A first one that fails is the caller's alone.
    rig.connect(0, 1 << 20);
    assert!(rig.port.prove(0));
    rig.fails(IBV_WC_REM_ACCESS_ERR);
    assert_eq!((rig.poll(), rig.port.proof(0)), (vec![], Some(false)));
    rig.connect(0, 1 << 20);
    with(|s| s.refuse.push_back(Refuse { at: 0, code: libc::EINVAL, bad: Bad::Right }));
    assert_eq!((rig.port.prove(0), rig.port.proof(0)), (false, Some(false)));
    rig.end();
}

// ---- room ----

#[test]
fn the_completion_queue_never_overruns_whatever_fails() {
    let open = Open { cq_entries: 24, ..OPEN };
    let mut rig = Rig::with(3, SHAPE, open);
    assert_eq!(rig.port.room(), 23, "one is kept for a flush");
    assert_eq!(rig.write(0, &apart(8)), Ok(()));
    assert_eq!(rig.port.room(), 14);
    assert_eq!(rig.post(1, Direction::Read, 0, &apart(32)), Err((15, PostError::Full)));
    assert_eq!(rig.port.room(), 0);
    assert_eq!(rig.post(2, Direction::Read, 0, &apart(1)), Err((0, PostError::Full)));
    assert!(!rig.port.prove(2));
    // All fail: each completes, signalled or not.
    with(|s| (0..2).for_each(|p| s.fails(rig.qp[p], IBV_WC_RETRY_EXC_ERR)));
    rig.port.close(0);
    assert_eq!(rig.port.room(), 0, "what a closed rail left may still be in the queue");
    rig.poll();
    rig.port.close(1);
    rig.poll();
    assert_eq!(rig.port.room(), 23);
    rig.connect(0, 1 << 20);
    assert_eq!(rig.write(0, &apart(32)), Err((23, PostError::Full)));
    rig.end();
}

#[test]
fn a_rail_takes_what_its_queue_has_room_for_and_no_more() {
    with(|s| s.device.max_qp_wr = 8);
    let mut rig = Rig::new(1, SHAPE);
    assert_eq!(rig.write(0, &apart(20)), Err((7, PostError::Full)));
    assert_eq!(rig.posted(0).len(), 8, "and the flush");
    assert_eq!(rig.write(7, &apart(1)), Err((0, PostError::Full)));
    rig.done(8);
    assert_eq!(rig.poll(), [success(0, 6)]);
    assert_eq!(rig.read(7, &apart(20)), Err((8, PostError::Full)));
    with(|s| assert_eq!(s.lists, 2, "what does not fit is not even offered"));
    rig.end();
}

#[test]
fn a_shape_fits_what_the_device_has() {
    for (max_qp_wr, depth) in [(4096, 64), (100, 50), (8, 4), (2, 1)] {
        with(|s| s.device.max_qp_wr = max_qp_wr);
        let rig = Rig::new(0, SHAPE);
        assert_eq!(SHAPE.fit(rig.device.facts()).depth, depth, "{max_qp_wr}");
    }
    double::reset();
    with(|s| (s.device.max_sge, s.device.max_sge_rd) = (8, 3));
    let rig = Rig::with(0, SHAPE, Open { cq_entries: 16, ..OPEN });
    let shape = SHAPE.fit(rig.device.facts());
    assert_eq!((shape.sges, shape.depth), (3, 15));
}

#[test]
fn arming_asks_for_an_event_at_the_next_completion() {
    let mut rig = Rig::new(1, SHAPE);
    rig.port.arm();
    rig.read(0, &apart(1)).unwrap();
    rig.done(1);
    assert_eq!(with(|s| s.cq_events), 1);
    rig.device.clear_channel();
    assert_eq!(with(|s| (s.cq_events, s.acknowledged)), (0, 1));
    rig.end();
}

#[test]
fn a_port_that_was_only_measured_takes_nothing() {
    let mut measure = kvrail::engine::arena::Arena::measure();
    let mut port = kvrail::nic::verbs::VerbsPort::new(&mut measure, 0, 4, SHAPE, None).unwrap();
    assert!(measure.used() > 33 * 128);
    assert_eq!((port.room(), port.poll(), port.prove(0)), (0, None, false));
    port.arm();
    port.close(0);
    port.close(99);
}

// ---- any ops ----

/// Runs of ops that are now and then contiguous here, there, or on both sides.
fn any_ops() -> impl Strategy<Value = Vec<Op>> {
    let one = (1u32..6, 0u8..4, 0u8..4, 0u32..8, 0u32..8);
    proptest::collection::vec(one, 1..60).prop_map(|list| {
        let (mut local, mut remote) = (0x1000u64, 0x8000u64);
        let ops = list.into_iter().map(|(len, here, there, r1, r2)| {
            local += u64::from(here == 0) * 0x100;
            remote += u64::from(there == 0) * 0x100;
            let (local_region, remote_region) = (u32::from(r1 == 0), u32::from(r2 == 0));
            let op = Op { local, remote, len, local_region, remote_region, tag: 0 };
            local += u64::from(len);
            remote += u64::from(len);
            op
        });
        ops.collect()
    })
}

/// Every byte that moves: here, there, and the keys.
fn bytes_of_ops(ops: &[Op]) -> Vec<(u64, u64, u32, u32)> {
    let keys = |o: &Op| (100_000 + o.local_region * 100 + LANE, 200_010 + o.remote_region * 1000);
    let each = |o: &Op| {
        let (o, (lkey, rkey)) = (*o, keys(o));
        (0..u64::from(o.len)).map(move |i| (o.local + i, o.remote + i, lkey, rkey))
    };
    ops.iter().flat_map(each).collect()
}

fn bytes_of_wrs(wrs: &[double::Wr]) -> Vec<(u64, u64, u32, u32)> {
    let mut all = Vec::new();
    for wr in wrs {
        let mut at = wr.remote;
        for &(addr, len, lkey) in &wr.sges {
            for i in 0..u64::from(len) {
                all.push((addr + i, at, lkey, wr.rkey));
                at += 1;
            }
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn merged_or_not_the_same_bytes_move_and_all_ops_are_told_done(
        ops in any_ops(),
        write in any::<bool>(),
        sges in 1u32..6,
        max_msg in 6u32..40,
        every in 1u32..6,
        refuse in proptest::collection::vec(0usize..12, 0..6),
    ) {
        let shape = Shape { sges, signal_every: every, batch_ops: 16, ..SHAPE };
        double::reset();
        let mut rig = Rig::new(1, shape);
        rig.connect(0, max_msg);
        let direction = if write { Direction::Write } else { Direction::Read };
        with(|s| s.refuse.extend(
            refuse.iter().map(|&at| Refuse { at, code: libc::ENOMEM, bad: Bad::Right })
        ));
        let (mut next, mut told, mut moved) = (0u32, 0u32, Vec::new());
        for _ in 0..500 {
            let rest = &ops[next as usize..];
            if !rest.is_empty() {
                match rig.post(0, direction, next, &rest[..rest.len().min(20)]) {
                    Ok(()) => next += rest.len().min(20) as u32,
                    Err((n, PostError::Full)) => next += n,
                    Err(e) => panic!("{e:?}"),
                }
            }
            let wrs = rig.done(3);
            moved.extend(wrs.iter().filter(|w| {
                // Neither flush nor marker.
                !(w.sges.is_empty() || write && w.opcode == IBV_WR_RDMA_READ)
            }).cloned());
            for c in rig.poll() {
                prop_assert_eq!(c.status, WrStatus::Success);
                prop_assert!(c.wr + 1 > told && c.wr < next);
                told = c.wr + 1;
                if write {
                    let flushed =
                        |w: &double::Wr| w.opcode == IBV_WR_RDMA_READ && w.number() == c.wr;
                    prop_assert!(wrs.iter().any(flushed), "told done without its flush");
                }
                // Nothing is told done before it was.
                let done: u64 = moved.iter().map(|w| w.bytes()).sum();
                let claimed: u64 = ops[..told as usize].iter().map(|o| u64::from(o.len)).sum();
                prop_assert!(claimed <= done);
            }
            if told as usize == ops.len() {
                break;
            }
        }
        prop_assert_eq!(told as usize, ops.len(), "some were never told");
        prop_assert_eq!(bytes_of_wrs(&moved), bytes_of_ops(&ops));
        let most = sges.min(4) as usize;
        prop_assert!(moved.iter().all(|w| w.sges.len() <= most && w.bytes() <= max_msg.into()));
        prop_assert_eq!((rig.port.in_flight(0), rig.port.strays()), (0, 0));
        rig.end();
    }
}
