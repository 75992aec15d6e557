//! READs into a device's memory, and the flush that follows them over a queue pair of their NIC's
//! own.

use kvrail::nic::verbs::{parts, Open, QpKind, LANDINGS, OF_FLUSH};
use kvrail::nic::{Completion, Port, PostError, WrStatus};
use kvrail::table::{Direction, Op};
use proptest::prelude::*;
use rdma_core_sys::*;

use crate::rig::{apart, own_rkey, success, Rig, LANE, LATE, OPEN, SHAPE};
use crate::verbs_double::{self as double, with, Bad, Refuse, Wr};

/// A rig of one rail with its loopback.
fn looped() -> (Rig, u32) {
    let mut rig = Rig::new(1, SHAPE);
    assert_eq!(rig.port.expect_device_memory(), Some(0));
    let qp = rig.loop_back(0);
    assert_eq!(rig.port.expect_device_memory(), None);
    (rig, qp)
}

/// Ops that touch nowhere, of these regions in turn.
fn of(regions: &[u32]) -> Vec<Op> {
    let one = |(o, r): (Op, &u32)| Op { local_region: *r, ..o };
    apart(regions.len() as u64).into_iter().zip(regions).map(one).collect()
}

fn asked(qp: u32) -> Vec<Wr> {
    with(|s| s.posted(qp))
}

fn flush_error(wr: u32, code: u32) -> Completion {
    Completion { vendor: OF_FLUSH | code << 16 | 0x77, ..rail_error(wr, code) }
}

fn rail_error(wr: u32, code: u32) -> Completion {
    Completion { peer: 0, wr, status: WrStatus::RailError, vendor: code << 16 | 0x77 }
}

#[test]
fn a_read_into_a_device_is_done_when_its_nic_has_read_there() {
    let (mut rig, qp) = looped();
    rig.read(7, &of(&[LATE, LATE, LATE])).unwrap();
    assert_eq!((rig.poll(), asked(qp).len()), (vec![], 0), "nothing before the data");
    rig.done(3);
    assert_eq!(rig.poll(), [], "complete is not there yet");
    let flush = asked(qp);
    assert_eq!(flush.len(), 1, "one for all of a registration");
    let last = apart(3)[2];
    assert_eq!((flush[0].opcode, flush[0].signalled()), (IBV_WR_RDMA_READ, true));
    assert_eq!((flush[0].remote, flush[0].rkey), (last.local + 0x40 - 8, own_rkey(LATE, LANE)));
    let scratch = with(|s| s.registered[0]);
    assert_eq!((flush[0].sges[0].0, flush[0].bytes()), (scratch.0, 8), "into the scratch page");
    with(|s| s.done(qp, 1));
    assert_eq!(rig.poll(), [success(0, 9)]);
    assert_eq!((rig.port.in_flight(0), rig.port.strays()), (0, 0));
    // A WRITE out of it needs none; its own flush is at the peer.
    rig.write(10, &of(&[LATE])).unwrap();
    rig.done(2);
    assert_eq!((rig.poll(), asked(qp).len()), (vec![success(0, 10)], 0));
    // Nor a READ into host memory.
    rig.read(11, &of(&[1])).unwrap();
    rig.done(1);
    assert_eq!((rig.poll(), asked(qp).len()), (vec![success(0, 11)], 0));
    rig.end();
}

#[test]
fn what_completes_meanwhile_waits_for_the_round_and_has_the_next() {
    let (mut rig, qp) = looped();
    rig.read(u32::MAX, &of(&[LATE])).unwrap();
    rig.done(1);
    assert_eq!((rig.poll(), asked(qp).len()), (vec![], 1));
    for (first, regions) in [(0, &[1][..]), (1, &[LATE + 1, LATE, 2]), (4, &[2])] {
        rig.read(first, &of(regions)).unwrap();
    }
    rig.done(5);
    assert_eq!((rig.poll(), asked(qp).len()), (vec![], 1), "one round at a time");
    with(|s| s.done(qp, 1));
    assert_eq!(rig.poll(), [success(0, u32::MAX)], "only what it speaks for");
    let keys: Vec<_> = asked(qp).iter().map(|w| w.rkey).collect();
    assert_eq!(keys, [own_rkey(LATE, LANE), own_rkey(LATE + 1, LANE)]);
    with(|s| s.done(qp, 1));
    assert_eq!(rig.poll(), [], "both");
    with(|s| s.done(qp, 1));
    assert_eq!(rig.poll(), [success(0, 4)]);
    rig.end();
}

#[test]
fn the_culprit_is_told_when_what_came_before_it_is_flushed() {
    for (status, class) in [
        (IBV_WC_LOC_PROT_ERR, WrStatus::LocalAccess),
        (IBV_WC_REM_ACCESS_ERR, WrStatus::RemoteAccess),
    ] {
        double::reset();
        let (mut rig, qp) = looped();
        let ops = of(&[LATE; 6]);
        rig.read(0, &ops).unwrap();
        rig.done(2);
        rig.fails(status);
        assert_eq!((rig.poll(), asked(qp).len()), (vec![], 1));
        assert_eq!(rig.read(6, &ops), Err((0, PostError::Full)), "the culprit is told first");
        with(|s| s.done(qp, 1));
        let culprit = Completion { peer: 0, wr: 2, status: class, vendor: status << 16 | 0x77 };
        assert_eq!(rig.poll(), [culprit], "which speaks for those before it");
        rig.end();
        // The first one: nothing is before it.
        double::reset();
        let (mut rig, qp) = looped();
        rig.read(0, &ops).unwrap();
        rig.fails(status);
        assert_eq!(rig.poll(), [Completion { wr: 0, ..culprit }]);
        assert_eq!(asked(qp).len(), 0);
        rig.end();
        // The flush fails: the rail did, and the rest is not told.
        double::reset();
        let (mut rig, qp) = looped();
        rig.read(0, &ops).unwrap();
        rig.done(2);
        rig.fails(status);
        rig.poll();
        with(|s| s.fails(qp, IBV_WC_REM_ACCESS_ERR));
        assert_eq!(rig.poll(), [flush_error(1, IBV_WC_REM_ACCESS_ERR)]);
        rig.end();
    }
}

#[test]
fn a_rail_that_fails_is_told_at_once() {
    let (mut rig, qp) = looped();
    rig.read(0, &of(&[LATE; 10])).unwrap();
    rig.done(4);
    assert_eq!((rig.poll(), asked(qp).len()), (vec![], 1), "of the first that is signalled");
    rig.fails(IBV_WC_RETRY_EXC_ERR);
    assert_eq!(rig.poll(), [rail_error(4, IBV_WC_RETRY_EXC_ERR)]);
    with(|s| s.done(qp, 1));
    assert_eq!((rig.poll(), rig.port.strays()), (vec![], 0));
    assert!(rig.port.close(0));
    assert_eq!(rig.bury(), [qp, rig.qp[0]], "the loopback ends with its rail");
    rig.connect(0, 1 << 20);
    assert!(rig.port.lacks_loopback(0));
    rig.end();
}

#[test]
fn a_flush_that_fails_breaks_the_rail_and_a_late_answer_is_of_nobody() {
    let (mut rig, qp) = looped();
    rig.read(0, &of(&[LATE, LATE + 1])).unwrap();
    rig.done(2);
    rig.poll();
    with(|s| s.fails(qp, IBV_WC_RETRY_EXC_ERR));
    let told = flush_error(1, IBV_WC_RETRY_EXC_ERR);
    assert_eq!(rig.poll(), [told], "the second was flushed");
    assert_eq!(parts(told.vendor), (IBV_WC_RETRY_EXC_ERR, 0x77));
    assert_eq!(rig.read(2, &of(&[1])), Err((0, PostError::Rail)));
    assert!(rig.port.close(0));
    rig.connect(0, 1 << 20);
    let other = rig.loop_back(0);
    let id = rig.qp[0];
    with(|s| (s.puts(qp, 1, IBV_WC_SUCCESS), s.puts(id, 1, IBV_WC_SUCCESS)));
    assert_eq!((rig.poll(), rig.port.strays()), (vec![], 0), "of an older epoch");
    // Nothing is left of the landings: host memory is done at once, a device's is not.
    rig.read(0, &of(&[1])).unwrap();
    rig.done(1);
    assert_eq!(rig.poll(), [success(0, 0)]);
    rig.read(1, &of(&[LATE])).unwrap();
    rig.done(1);
    assert_eq!((rig.poll(), asked(other).len()), (vec![], 1));
    rig.end();
}

#[test]
fn an_op_that_is_refused_is_told_behind_the_flush_and_is_never_flushed() {
    for (local, status) in [(true, WrStatus::LocalAccess), (false, WrStatus::RemoteAccess)] {
        double::reset();
        let (mut rig, qp) = looped();
        let mut ops = of(&[LATE, LATE, LATE + 4, LATE + 5]);
        ops[2].remote_region = 4;
        (rig.keys.no_local, rig.keys.no_remote) =
            if local { (Some(LATE + 4), None) } else { (None, Some(4)) };
        rig.read(0, &ops).unwrap();
        rig.done(2);
        assert_eq!((rig.poll(), asked(qp).len()), (vec![], 1));
        with(|s| s.done(qp, 1));
        let refused = Completion { peer: 0, wr: 2, status, vendor: 0 };
        assert_eq!(rig.poll(), [success(0, 1), refused]);
        rig.end();
    }
}

#[test]
fn more_registrations_than_are_noted_wait_and_so_does_a_rail_without_a_loopback() {
    let (mut rig, qp) = looped();
    let n = LANDINGS as u32;
    let many: Vec<u32> = (0..n + 4).map(|i| LATE + i).collect();
    let ops = of(&many);
    assert_eq!(rig.read(0, &ops), Err((n, PostError::Full)));
    assert_eq!(rig.read(n, &ops[n as usize..]), Err((0, PostError::Full)));
    assert_eq!(rig.read(n, &of(&[1, LATE, LATE + 1, 2, LATE + n])), Err((4, PostError::Full)));
    rig.done(LANDINGS + 4);
    assert_eq!((rig.poll(), asked(qp).len()), (vec![], LANDINGS));
    with(|s| s.done(qp, LANDINGS));
    assert_eq!(rig.poll(), [success(0, n + 3)]);
    assert_eq!(rig.read(n + 4, &ops[n as usize..]), Ok(()));
    rig.end();

    double::reset();
    let mut rig = Rig::new(2, SHAPE);
    assert_eq!(rig.port.expect_device_memory(), Some(0));
    assert_eq!(rig.read(0, &of(&[1, 1, LATE, 1])), Err((2, PostError::Full)));
    assert_eq!(rig.read(2, &of(&[LATE, 1])), Err((0, PostError::Full)));
    assert_eq!(rig.write(2, &of(&[LATE, 1])), Ok(()));
    rig.loop_back(0);
    assert_eq!(rig.read(4, &of(&[LATE, 1])), Ok(()));
    assert_eq!(rig.port.expect_device_memory(), Some(1));
    let spare = rig.device.create_qp(QpKind::Loopback { depth: 1 }).unwrap();
    let back = rig.port.loop_back(0, spare).unwrap();
    // SAFETY: V22: made just now, and given back.
    unsafe { back.destroy() }.unwrap();
    rig.end();
}

#[test]
fn a_flush_waits_for_room_in_the_queues() {
    // In that of completions, which another rail fills.
    let mut rig = Rig::with(2, SHAPE, Open { cq_entries: 12, ..OPEN });
    rig.port.expect_device_memory();
    let qp = rig.loop_back(0);
    rig.read(0, &of(&[LATE, LATE + 1, LATE + 2])).unwrap();
    assert_eq!(rig.post(1, Direction::Read, 0, &apart(32)), Err((9, PostError::Full)));
    rig.done(3);
    assert_eq!(rig.poll(), []);
    assert_eq!(asked(qp).len(), 3);
    with(|s| s.done(qp, 3));
    assert_eq!(rig.poll(), [success(0, 2)]);
    rig.end();
    // In its own, which refuses all of it (twice), or what is behind the first or second.
    for took in 0..3 {
        double::reset();
        let (mut rig, qp) = looped();
        rig.read(0, &of(&[LATE, LATE + 1, LATE + 2])).unwrap();
        rig.done(3);
        let refuse = Refuse { at: took, code: libc::ENOMEM, bad: Bad::Right };
        with(|s| s.refuse.extend([refuse; 2].into_iter().take(if took == 0 { 2 } else { 1 })));
        assert_eq!((rig.poll(), asked(qp).len()), (vec![], took));
        if took == 0 {
            assert_eq!(rig.read(3, &of(&[1])), Err((0, PostError::Full)), "nothing overtakes it");
        }
        with(|s| s.done(qp, took));
        assert_eq!((rig.poll(), asked(qp).len()), (vec![], 3 - took), "the others");
        with(|s| s.done(qp, 3 - took));
        assert_eq!(rig.poll(), [success(0, 2)]);
        assert_eq!((rig.port.in_flight(0), rig.port.strays()), (0, 0));
        rig.end();
    }
    // A provider that does not say what it took, and one that refuses for good.
    for bad in [Bad::Null, Bad::Elsewhere, Bad::Right] {
        double::reset();
        let (mut rig, _) = looped();
        rig.read(0, &of(&[LATE])).unwrap();
        rig.done(1);
        with(|s| s.refuse.push_back(Refuse { at: 0, code: libc::EINVAL, bad }));
        assert_eq!(rig.poll(), [Completion { vendor: 0, ..rail_error(0, 0) }]);
        rig.end();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever completes when: nothing is told done before a flush of its registration that was
    /// posted after its data, and all is told.
    #[test]
    fn nothing_in_a_device_is_told_done_before_a_flush_that_follows_it(
        regions in proptest::collection::vec(prop_oneof![Just(1u32), LATE..LATE + 24], 1..120),
        first in prop_oneof![Just(0u32), u32::MAX - 60..u32::MAX],
        steps in proptest::collection::vec((0usize..5, 0usize..3), 1..40),
        refuse in proptest::collection::vec(0usize..6, 0..5),
    ) {
        double::reset();
        let (mut rig, qp) = looped();
        let ops = of(&regions);
        with(|s| s.refuse.extend(
            refuse.iter().map(|&at| Refuse { at, code: libc::ENOMEM, bad: Bad::Right })
        ));
        // Ops posted, done, flushed and told; of each flush in flight: key, and ops done then.
        let (mut posted, mut done, mut told) = (0usize, 0usize, 0usize);
        let mut flushed = vec![false; ops.len()];
        let mut flushes: Vec<(u32, usize)> = Vec::new();
        for round in 0..2000 {
            let (data, answers) = if round < 300 { steps[round % steps.len()] } else { (5, 3) };
            let rest = &ops[posted..ops.len().min(posted + 20)];
            if !rest.is_empty() {
                match rig.read(first.wrapping_add(posted as u32), rest) {
                    Ok(()) => posted += rest.len(),
                    Err((n, PostError::Full)) => posted += n as usize,
                    Err(e) => panic!("{e:?}"),
                }
            }
            // A marker of nothing carries no op.
            done += rig.done(data).iter().filter(|w| !w.sges.is_empty()).count();
            for _ in 0..answers.min(flushes.len()) {
                with(|s| s.done(qp, 1));
                let (key, upto) = flushes.remove(0);
                for i in (0..upto).filter(|i| own_rkey(regions[*i], LANE) == key) {
                    flushed[i] = true;
                }
            }
            for c in rig.poll() {
                prop_assert_eq!(c.status, WrStatus::Success);
                let now = c.wr.wrapping_sub(first) as usize + 1;
                prop_assert!(now > told && now <= done, "{} told, {} done", now, done);
                for i in told..now {
                    prop_assert!(regions[i] < LATE || flushed[i], "op {} of {}", i, regions[i]);
                }
                told = now;
            }
            let new = asked(qp).split_off(flushes.len());
            flushes.extend(new.iter().map(|w| (w.rkey, done)));
            prop_assert!(flushes.len() <= LANDINGS);
            if told == ops.len() {
                break;
            }
        }
        prop_assert_eq!(told, ops.len(), "some were never told");
        prop_assert_eq!((rig.port.in_flight(0), rig.port.strays()), (0, 0));
        rig.end();
    }
}
