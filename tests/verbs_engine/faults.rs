//! Work requests that fail, hang or complete oddly.

use core::time::Duration;

use kvrail::status::Status;
use kvrail::table::Direction;

use crate::fake::{wait, HANG};
use crate::rig::{apply, finish, notifs, same, scatter, twins, Pair, Piece, BOTH, MIB};

/// Eight work requests: apart on both sides.
fn eight() -> Vec<Piece> {
    (0..8).map(|i| Piece { here: i * 16384, there: (7 - i) * 20000, len: 9000 }).collect()
}

/// What a transfer may come to when a rail breaks under it.
#[derive(Clone, Copy, PartialEq, Debug)]
enum End {
    Done,
    Failed(Status),
}

/// Carries pieces through a fault: as it must end, with right bytes if it ends well, and nothing
/// outside the pieces touched in any case. Afterwards all works again.
fn through(pair: &mut Pair, direction: Direction, pieces: &[Piece], end: End, what: &str) {
    let (here, there) = (pair.a.mem.fill(71), pair.b.mem.fill(72));
    let (mut done_here, mut done_there) = (here.clone(), there.clone());
    apply(direction, pieces, &mut done_here, &mut done_there);
    let got = pair.carry(direction, pieces);
    match (&got, end) {
        (Ok(Status::Ok), End::Done) => {
            same(&pair.a.mem.copy(), &done_here, direction, "here");
            same(&pair.b.mem.copy(), &done_there, direction, "there");
        }
        (Err(e), End::Failed(s)) => assert_eq!(e.status, s, "{what}, {direction:?}: {e}"),
        _ => panic!("{what}, {direction:?}: {got:?}, not {end:?}"),
    }
    for (seen, before, after) in
        [(pair.a.mem.copy(), &here, &done_here), (pair.b.mem.copy(), &there, &done_there)]
    {
        let stray = |i: &usize| seen[*i] != before[*i] && seen[*i] != after[*i];
        assert_eq!((0..seen.len()).find(stray), None, "{what}: a byte is neither old nor new");
    }
    pair.back();
    pair.moves_some(8);
}

#[test]
fn a_full_send_queue_only_delays() {
    let fake = alone!(4, &twins(2));
    for rails in [1, 2] {
        let mut pair = Pair::twins(rails, MIB, |_| {});
        for direction in BOTH {
            for k in 0..=8 {
                fake.set(&format!("fake0.fail.post_send=1@{k}:ENOMEM"));
                let what = format!("ENOMEM at item {k}, {rails} rails");
                through(&mut pair, direction, &eight(), End::Done, &what);
                fake.set("*.fail.post_send=off");
            }
        }
        assert_eq!(fake.get("wc_error"), 0, "no rail broke");
    }
    fake.is_empty();
}

#[test]
fn a_post_that_is_refused_breaks_its_rail_only() {
    let fake = alone!(4, &twins(2));
    for direction in BOTH {
        for k in 0..8 {
            let mut pair = Pair::twins(2, MIB, |_| {});
            fake.set(&format!("fake0.fail.post_send=1@{k}:EINVAL"));
            let what = format!("EINVAL at item {k}, 2 rails");
            through(&mut pair, direction, &eight(), End::Done, &what);
            drop(pair);
            let mut pair = Pair::twins(1, MIB, |_| {});
            fake.set(&format!("fake0.fail.post_send=1@{k}:EINVAL"));
            // The only rail: it is replaced, and the rest goes over its successor.
            through(&mut pair, direction, &eight(), End::Done, &format!("EINVAL at item {k}"));
        }
    }
    fake.is_empty();
}

/// Statuses that blame memory, and whom the engine blames.
const BLAMED: [(&str, Status); 5] = [
    ("LOC_LEN_ERR", Status::LocalAccess),
    ("LOC_PROT_ERR", Status::LocalAccess),
    ("REM_INV_REQ_ERR", Status::RemoteAccess),
    ("REM_ACCESS_ERR", Status::RemoteAccess),
    ("REM_OP_ERR", Status::RemoteAccess),
];
/// Statuses that blame nobody's memory: the rail is of no use.
const RAIL: [&str; 10] = [
    "LOC_QP_OP_ERR",
    "WR_FLUSH_ERR",
    "MW_BIND_ERR",
    "BAD_RESP_ERR",
    "LOC_ACCESS_ERR",
    "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR",
    "FATAL_ERR",
    "RESP_TIMEOUT_ERR",
    "GENERAL_ERR",
];

#[test]
fn a_memory_error_ends_the_transfer_with_its_own_status() {
    let fake = alone!(4, &twins(2));
    for (name, status) in BLAMED {
        for direction in BOTH {
            for rails in [1, 2] {
                let mut pair = Pair::twins(rails, MIB, |_| {});
                fake.set(&format!("fake0.wc_force=n:3:{name}"));
                let what = format!("{name}, {rails} rails");
                through(&mut pair, direction, &eight(), End::Failed(status), &what);
            }
        }
    }
    fake.is_empty();
}

#[test]
fn a_rail_error_moves_the_rest_to_the_other_rail() {
    let fake = alone!(4, &twins(2));
    for name in RAIL {
        for direction in BOTH {
            let mut pair = Pair::twins(2, MIB, |_| {});
            fake.set(&format!("fake0.wc_force=n:3:{name}"));
            through(&mut pair, direction, &eight(), End::Done, name);
            drop(pair);
            let mut pair = Pair::twins(1, MIB, |_| {});
            fake.set(&format!("fake0.wc_force=n:3:{name}"));
            through(&mut pair, direction, &eight(), End::Done, name);
        }
    }
    fake.is_empty();
}

#[test]
fn a_work_request_that_never_completes_closes_its_rail() {
    let fake = alone!(4, &twins(2));
    for width in [0, 1] {
        for direction in BOTH {
            let mut pair = Pair::twins(2, MIB, |c| {
                c.stripe_width = width;
                c.rail_timeout_ms = 300;
            });
            fake.set("fake0.blackhole=1");
            let pieces = scatter(&mut pair.rng, 64, MIB, MIB);
            through(&mut pair, direction, &pieces, End::Done, "blackhole");
            fake.set("*.blackhole=0");
            drop(pair);
        }
    }
    fake.is_empty();
}

#[test]
fn with_one_rail_a_hang_is_an_error_and_the_peer_is_dialled_again() {
    let fake = alone!(2, &twins(1));
    for direction in BOTH {
        let mut pair = Pair::twins(1, MIB, |c| {
            c.rail_timeout_ms = 300;
            c.connect_timeout_ms = 2000;
        });
        fake.set("fake0.blackhole=1");
        let e = pair.carry(direction, &eight()).unwrap_err();
        assert!(matches!(e.status, Status::Disconnected | Status::NoRail), "{e}");
        let dead = || pair.a.e.peer_state(pair.peer) != Ok(Status::Ok);
        wait(dead, || "a peer without a rail counts as connected".into());
        // As long as the hole is there no dial succeeds, and each says so in its time.
        let e = pair.a.e.peer_connect(pair.peer, HANG).unwrap_err();
        assert!(e.status.is_err() && !e.message.is_empty(), "{e}");
        fake.set("*.blackhole=0");
        // Posting is all that an application does.
        let t = pair.prepare(direction, &eight()).unwrap();
        wait(
            || pair.a.e.post(t, None).is_ok_and(|_| finish(&pair.a.e, t) == Ok(Status::Ok)),
            || "the peer never came back".into(),
        );
        pair.a.e.release(t).unwrap();
        pair.moves_some(8);
    }
    fake.is_empty();
}

/// The queue pair of messages hangs as well: the message goes over another rail, once.
#[test]
fn a_notification_does_not_hang_with_its_rail() {
    let fake = alone!(4, &twins(2));
    for direction in BOTH {
        let mut pair = Pair::twins(2, MIB, |c| c.rail_timeout_ms = 300);
        let pieces = eight();
        let t = pair.prepare(direction, &pieces).unwrap();
        // Messages go over the first rail.
        fake.set("fake0.blackhole=1");
        pair.a.e.post(t, Some(b"one")).unwrap();
        assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
        assert_eq!(notifs(&pair.b.e, 1)[0].1, b"one", "{direction:?}");
        pair.a.e.notify(pair.peer, b"two").unwrap();
        assert_eq!(notifs(&pair.b.e, 1)[0].1, b"two", "{direction:?}");
        pair.b.e.notifs(&mut |_, m| panic!("{m:?} arrived twice")).unwrap();
        fake.set("*.blackhole=0");
        pair.a.e.release(t).unwrap();
        pair.moves_some(8);
    }
    fake.is_empty();
}

/// The data is in place, the message cannot arrive: done would be a lie.
#[test]
fn a_transfer_is_not_done_while_its_message_cannot_arrive() {
    let fake = alone!(4, &twins(2));
    let pair = Pair::twins(2, MIB, |c| c.rail_timeout_ms = 300);
    let t = pair.prepare(Direction::Read, &eight()).unwrap();
    fake.set("*.blackhole=1");
    pair.a.e.post(t, Some(b"one")).unwrap();
    assert!(finish(&pair.a.e, t).is_err());
    pair.b.e.notifs(&mut |_, m| panic!("{m:?} arrived")).unwrap();
    fake.set("*.blackhole=0");
    pair.a.e.peer_connect(pair.peer, HANG).unwrap();
    pair.a.e.post(t, Some(b"two")).unwrap();
    assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
    assert_eq!(notifs(&pair.b.e, 1)[0].1, b"two");
    pair.a.e.release(t).unwrap();
    drop(pair);
    fake.is_empty();
}

#[test]
fn garbage_and_lost_completions_do_no_harm() {
    let fake = alone!(4, &twins(2));
    for knob in ["*.wc_garbage=40", "fake0.wc_lose=1", "fake0.wc_lose=2"] {
        let mut pair = Pair::twins(2, MIB, |c| {
            c.rail_timeout_ms = 300;
            c.stripe_width = 0;
        });
        fake.set(knob);
        let pieces = scatter(&mut pair.rng, 200, MIB, MIB);
        through(&mut pair, Direction::Read, &pieces, End::Done, knob);
        drop(pair);
        let mut pair = Pair::twins(2, MIB, |c| c.rail_timeout_ms = 300);
        fake.set(knob);
        through(&mut pair, Direction::Write, &eight(), End::Done, knob);
        let t = pair.prepare(Direction::Read, &eight()).unwrap();
        pair.a.e.post(t, Some(b"x")).unwrap();
        assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
        assert_eq!(notifs(&pair.b.e, 1)[0].1, b"x");
        drop(pair);
        fake.set("*.wc_garbage=0;*.wc_lose=0");
    }
    fake.is_empty();
}

/// Completions come late and rails overtake each other.
#[test]
fn late_and_reordered_completions_do_no_harm() {
    let fake = alone!(8, &(twins(4) + ";*.delay_us=0-900;*.reorder=1"));
    for width in [0, 1] {
        let mut pair = Pair::twins(4, MIB, |c| c.stripe_width = width);
        for n in [1, 30, 500] {
            pair.moves_some(n);
        }
    }
    fake.is_empty();
}

/// A message that hangs in a link that died silently: its sender must hear of it.
#[test]
fn a_message_that_hangs_is_noticed() {
    let fake = alone!(4, &twins(2));
    let pair = Pair::twins(2, MIB, |c| c.rail_timeout_ms = 300);
    // Queue pairs of messages are on the first rail.
    fake.set("fake0.blackhole=1");
    pair.a.e.notify(pair.peer, b"hello").unwrap();
    let mut heard = false;
    wait(
        || {
            pair.b.e.notifs(&mut |_, _| heard = true).unwrap();
            heard || pair.a.e.peer_state(pair.peer) != Ok(Status::Ok)
        },
        || "the message is neither there nor given up".into(),
    );
}

/// Most frames are not signalled, so nothing ever completes for the last of them by itself.
#[test]
fn an_idle_stream_is_not_taken_for_one_that_hangs() {
    let fake = alone!(4, &twins(2));
    let pair = Pair::twins(2, MIB, |c| c.rail_timeout_ms = 100);
    for round in 0..3u8 {
        // One frame, and many: all of a window and more.
        pair.a.e.notify(pair.peer, &[round]).unwrap();
        assert_eq!(notifs(&pair.b.e, 1)[0].1, [round]);
        pair.a.e.notify(pair.peer, &vec![round; 60_000]).unwrap();
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(notifs(&pair.b.e, 1)[0].1, vec![round; 60_000]);
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(pair.a.e.peer_state(pair.peer), Ok(Status::Ok));
    }
    drop(pair);
    fake.is_empty();
}

/// An error says which rail, which pair, what the provider said, what arrived, and what may have
/// been written.
#[test]
fn an_error_tells_its_cause_and_what_arrived() {
    let fake = alone!(4, &twins(2));
    for direction in BOTH {
        let pair = Pair::twins(1, MIB, |_| {});
        let t = pair.prepare(direction, &eight()).unwrap();
        fake.set("fake0.wc_force=n:3:REM_ACCESS_ERR");
        let e = pair.a.e.post(t, None).and_then(|_| finish(&pair.a.e, t)).unwrap_err();
        assert_eq!(e.status, Status::RemoteAccess);
        let info = pair.a.e.transfer_info(t).unwrap();
        // `enum ibv_wc_status`: 10 is IBV_WC_REM_ACCESS_ERR.
        let (lane, code) = info.cause.expect("a cause");
        assert_eq!((lane, code >> 16), (0, 10));
        assert!(info.touched && info.failed_pair < 8, "{info:?}");
        for word in ["rail 0", "fake0:1", "remote access error (10)", "may have been written"] {
            assert!(e.message.contains(word), "no {word:?} in: {e}");
        }
        let mut bits = [u64::MAX];
        pair.a.e.transfer_arrived(t, &mut bits).unwrap();
        assert_eq!(u64::from(bits[0].count_ones()), info.descriptors_done);
        assert_eq!(bits[0] >> info.failed_pair & 1, 0, "{:#b}: the pair that failed", bits[0]);
        assert_eq!(bits[0] >> 8, 0, "pairs that there are not");
        pair.a.e.release(t).unwrap();
    }
    fake.is_empty();
}
