//! Rails that break and come back without a new connection, and what becomes of a peer whose rails
//! all break.

use core::time::Duration;
use std::time::Instant;

use kvrail::host::config::Config;
use kvrail::status::Status;
use kvrail::table::Direction;

use crate::fake::{wait, Fake, HANG};
use crate::rig::{
    apply, config, finish, listen, nics, notifs, said, same, scatter, twins, Pair, Piece, Side,
    BOTH, MIB,
};

/// Two rails over which everything is striped.
pub(crate) fn quick(c: &mut Config) {
    c.stripe_width = 0;
    c.rail_timeout_ms = 300;
    c.ack_timeout = 8;
    c.connect_timeout_ms = 2000;
    c.peer_timeout_ms = 60_000;
}

/// The same connection from the other side: `a` was dialled.
fn turned(pair: Pair) -> Pair {
    let (peer, far) = pair.b.meet(&pair.a);
    Pair { a: pair.b, b: pair.a, peer, far, rng: pair.rng }
}

/// Waits until every rail carries again.
pub(crate) fn whole(pair: &mut Pair) {
    let until = Instant::now() + HANG;
    loop {
        let before = pair.spread();
        pair.moves_some(100);
        let after = pair.spread();
        if after.iter().zip(&before).all(|(now, then)| now > then) {
            return;
        }
        assert!(Instant::now() < until, "a rail never came back: {before:?}, {after:?}");
    }
}

fn lines(rails: usize) -> u64 {
    // A data and a message queue pair on both sides.
    4 * rails as u64
}

pub(crate) fn qps(fake: Fake, n: u64) {
    wait(|| fake.get("live.qp") == n, || format!("{} queue pairs, not {n}", fake.get("live.qp")));
}

#[test]
fn a_rail_that_breaks_under_a_transfer_carries_again() {
    let fake = alone!(4, &twins(2));
    for swap in [false, true] {
        for direction in BOTH {
            for rail in [0, 1] {
                let mut pair = Pair::twins(2, MIB, quick);
                if swap {
                    pair = turned(pair);
                }
                let before = fake.live();
                let nic = rail + if swap { 2 } else { 0 };
                fake.set(&format!("fake{nic}.wc_force=n:2:RETRY_EXC_ERR"));
                let pieces = scatter(&mut pair.rng, 400, MIB, MIB);
                pair.moves(direction, &pieces);
                whole(&mut pair);
                fake.settles(&before, "the rail is back");
                // Messages go over what is there, in order.
                for i in 0..20u8 {
                    pair.a.e.notify(pair.peer, &[i]).unwrap();
                }
                let texts: Vec<_> = notifs(&pair.b.e, 20).into_iter().map(|(_, t)| t).collect();
                assert_eq!(texts, (0..20).map(|i| vec![i]).collect::<Vec<_>>());
                drop(pair);
                fake.is_empty();
            }
        }
    }
}

/// A link that dies without a word, of either side, with all that is on it.
#[test]
fn a_rail_that_hangs_is_replaced_when_its_link_works_again() {
    let fake = alone!(4, &twins(2));
    for nic in 0..4 {
        let mut pair = Pair::twins(2, MIB, quick);
        let before = fake.live();
        fake.set(&format!("fake{nic}.blackhole=1"));
        for direction in BOTH {
            let pieces = scatter(&mut pair.rng, 200, MIB, MIB);
            pair.moves(direction, &pieces);
        }
        pair.a.e.notify(pair.peer, b"over the other").unwrap();
        assert_eq!(notifs(&pair.b.e, 1)[0].1, b"over the other");
        fake.set("*.blackhole=0");
        whole(&mut pair);
        fake.settles(&before, "the rail is back");
        drop(pair);
        fake.is_empty();
    }
}

/// What a transfer through the loss of all rails must come to.
fn check_bytes(pair: &Pair, direction: Direction, pieces: &[Piece], seeds: (u64, u64)) {
    let mut here = crate::rig::pattern(seeds.0, pair.a.mem.len);
    let mut there = crate::rig::pattern(seeds.1, pair.b.mem.len);
    apply(direction, pieces, &mut here, &mut there);
    same(&pair.a.mem.copy(), &here, direction, "here");
    same(&pair.b.mem.copy(), &there, direction, "there");
}

#[test]
fn a_transfer_outlives_the_loss_of_all_rails() {
    let fake = alone!(4, &twins(2));
    for swap in [false, true] {
        for direction in BOTH {
            let mut pair = Pair::twins(2, MIB, |c| {
                quick(c);
                // Whoever has nothing in flight hears of it from the other side only.
                c.keepalive_ms = 0;
            });
            if swap {
                pair = turned(pair);
            }
            let before = fake.live();
            pair.a.mem.fill(5);
            pair.b.mem.fill(6);
            let pieces = scatter(&mut pair.rng, 300, MIB, MIB);
            let t = pair.prepare(direction, &pieces).unwrap();
            fake.set("*.drop=1");
            pair.a.e.post(t, Some(b"landed")).unwrap();
            let adrift = || pair.a.e.peer_state(pair.peer) == Ok(Status::InProgress);
            wait(adrift, || "a peer without a rail counts as connected".into());
            // Whoever asks for a connection waits for a rail.
            let e = pair.a.e.peer_connect(pair.peer, Duration::from_millis(20)).unwrap_err();
            assert_eq!(e.status, Status::Unreachable, "{e}");
            assert_eq!(pair.a.e.check(t), Ok(Status::InProgress));
            fake.set("*.drop=0");
            assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok), "{direction:?}, turned: {swap}");
            pair.a.e.peer_connect(pair.peer, HANG).unwrap();
            assert_eq!(notifs(&pair.b.e, 1)[0].1, b"landed");
            check_bytes(&pair, direction, &pieces, (5, 6));
            pair.a.e.release(t).unwrap();
            whole(&mut pair);
            fake.settles(&before, "all rails are back");
            assert_eq!(pair.b.e.info().peers, 1);
            drop(pair);
            fake.is_empty();
        }
    }
}

#[test]
fn a_peer_without_a_rail_for_too_long_is_dead_and_comes_back() {
    let fake = alone!(4, &twins(2));
    listen();
    for swap in [false, true] {
        for direction in BOTH {
            let mut pair = Pair::twins(2, MIB, |c| {
                quick(c);
                c.peer_timeout_ms = 700;
                c.connect_timeout_ms = 5000;
            });
            if swap {
                pair = turned(pair);
            }
            let pieces = scatter(&mut pair.rng, 300, MIB, MIB);
            let t = pair.prepare(direction, &pieces).unwrap();
            fake.set("*.drop=1");
            pair.a.e.post(t, None).unwrap();
            let e = finish(&pair.a.e, t).unwrap_err();
            assert_eq!(e.status, Status::Disconnected, "{e}");
            // It is taken all the same, and waits for the dial that is tried again and again.
            let taken = pair.a.e.post(t, None);
            assert!(taken.is_ok(), "{taken:?}");
            fake.set("*.drop=0");
            if finish(&pair.a.e, t).is_err() {
                // The dial that it waited for still met the broken links.
                let again = || {
                    let end = pair.a.e.post(t, None).and_then(|_| finish(&pair.a.e, t));
                    end == Ok(Status::Ok)
                };
                wait(again, || "no transfer ever works again".into());
            }
            pair.a.e.release(t).unwrap();
            whole(&mut pair);
            drop(pair);
            fake.is_empty();
        }
    }
    assert!(said(&["no rail to it for 700 ms (peer_timeout_ms)"]));
}

/// Nobody posts: the link alone being there again suffices.
#[test]
fn a_dead_peer_is_connected_again_before_anybody_asks() {
    let fake = alone!(4, &twins(2));
    let pair = Pair::twins(2, MIB, |c| {
        quick(c);
        c.peer_timeout_ms = 300;
        c.connect_timeout_ms = 5000;
    });
    let t = pair.prepare(Direction::Read, &[Piece { here: 0, there: 0, len: 9 }]).unwrap();
    fake.set("*.drop=1");
    pair.a.e.post(t, None).unwrap();
    assert!(finish(&pair.a.e, t).is_err());
    assert!(pair.a.e.peer_state(pair.peer).is_err());
    fake.set("*.drop=0");
    let up = || pair.a.e.peer_state(pair.peer) == Ok(Status::Ok);
    wait(up, || format!("{:?}", pair.a.e.peer_state(pair.peer)));
    pair.a.e.release(t).unwrap();
    drop(pair);
    fake.is_empty();
}

/// The sum of the pauses before `n` tries, the first of which may come at once.
fn pauses(n: u64) -> Duration {
    let pause = |i: u64| Duration::from_millis((50u64 << i.min(10)).min(5000));
    (0..n.saturating_sub(1)).map(pause).sum()
}

#[test]
fn a_rail_that_flaps_is_tried_as_often_as_the_back_off_allows() {
    let fake = alone!(4, &twins(2));
    let mut pair = Pair::twins(2, MIB, quick);
    let start = Instant::now();
    // Each try registers the buffers of one message queue pair.
    let made = fake.get("fake0.calls.reg_mr");
    let mut tries = 0;
    while tries < 7 {
        // Whatever is next on this NIC fails.
        fake.set("fake0.wc_force=n:1:RETRY_EXC_ERR");
        pair.moves_some_reads(20);
        tries = fake.get("fake0.calls.reg_mr") - made;
        assert!(start.elapsed() < HANG, "hang: {tries} tries");
    }
    let took = start.elapsed();
    assert!(pauses(tries) <= took, "{tries} tries in {took:?}");
    fake.set("fake0.wc_force=off");
    whole(&mut pair);
    drop(pair);
    fake.is_empty();
}

/// A rail whose port is down is not even tried; the port's return is enough.
#[test]
fn a_port_that_comes_back_brings_its_rail_back() {
    let fake = alone!(4, &twins(2));
    for (nic, quiet) in [(0, 0), (1, 1), (2, 0), (3, 1)] {
        let mut pair = Pair::twins(2, MIB, quick);
        let before = fake.live();
        fake.set(&format!("fake{nic}.quiet_events={quiet};fake{nic}.port1.state=down"));
        for direction in BOTH {
            let pieces = scatter(&mut pair.rng, 100, MIB, MIB);
            pair.moves(direction, &pieces);
        }
        qps(fake, lines(1));
        fake.set(&format!("fake{nic}.port1.state=active;fake{nic}.quiet_events=0"));
        whole(&mut pair);
        fake.settles(&before, "the port is back");
        drop(pair);
        fake.is_empty();
    }
}

/// The GID of a port moves to another index while its rail is broken.
#[test]
fn a_rail_that_comes_back_uses_the_gid_of_now() {
    let fake = alone!(4, &twins(2));
    let mut pair = Pair::twins(2, MIB, quick);
    fake.set("fake0.port1.state=down");
    pair.moves_some(100);
    fake.set("fake0.port1.gid1=none;fake0.port1.gid5=10.1.0.1;fake0.port1.state=active");
    whole(&mut pair);
    drop(pair);
    fake.is_empty();
}

#[test]
fn a_join_that_hangs_harms_nothing_and_the_next_one_works() {
    let fake = alone!(4, &twins(2));
    for end in ["comes", "removed by a", "removed by b", "destroyed"] {
        let mut pair = Pair::twins(2, MIB, |c| {
            quick(c);
            c.peer_timeout_ms = 2000;
        });
        let before = fake.live();
        let made = fake.get("fake2.calls.create_qp");
        fake.set("fake2.blackhole=1");
        pair.moves_some(100);
        // Both sides have the queue pairs of a join that never proves itself.
        let hangs = || fake.get("fake2.calls.create_qp") >= made + 2;
        wait(hangs, || "nobody dials for the lost rail".into());
        pair.moves_some(100);
        match end {
            "comes" => {
                // Several in a row; each takes the place of the one before.
                let more = || fake.get("fake2.calls.create_qp") >= made + 6;
                wait(more, || "the join was given up for good".into());
                pair.moves_some(100);
            }
            "removed by a" => pair.a.e.peer_remove(pair.peer).unwrap(),
            "removed by b" => {
                let a = pair.b.e.peer_find(b"a").unwrap().raw();
                pair.b.e.peer_remove(a).unwrap();
                wait(
                    || pair.a.e.peer_state(pair.peer) != Ok(Status::Ok),
                    || "a does not notice that it was removed".into(),
                );
                pair.a.e.peer_remove(pair.peer).unwrap();
            }
            _ => {
                drop(pair);
                fake.set("*.blackhole=0");
                fake.is_empty();
                continue;
            }
        }
        fake.set("*.blackhole=0");
        if end != "comes" {
            let none = || fake.get("live.qp") == 0;
            wait(none, || format!("{end}: {} queue pairs are left", fake.get("live.qp")));
            pair.meet_again();
        }
        whole(&mut pair);
        fake.settles(&before, end);
        drop(pair);
        fake.is_empty();
    }
}

/// WRITEs were under way on both rails, and one never comes back: what it still owes is fenced all
/// the same, or the transfer would never be done.
#[test]
fn a_rail_that_stays_away_is_fenced_by_the_return_of_another() {
    let fake = alone!(4, &twins(2));
    for swap in [false, true] {
        let mut pair = Pair::twins(2, MIB, quick);
        if swap {
            pair = turned(pair);
        }
        let pieces = scatter(&mut pair.rng, 300, MIB, MIB);
        let (here, mut there) = (pair.a.mem.fill(1), pair.b.mem.fill(2));
        let t = pair.prepare(Direction::Write, &pieces).unwrap();
        fake.set("*.drop=1");
        pair.a.e.post(t, Some(b"all")).unwrap();
        let adrift = |e: &kvrail::host::engine::Engine, name: &[u8]| {
            let peer = e.peer_find(name).unwrap().raw();
            wait(|| e.peer_state(peer) == Ok(Status::InProgress), || "it has a rail".into());
        };
        adrift(&pair.a.e, if swap { b"a" } else { b"b" });
        fake.set("fake1.port1.state=down;fake3.port1.state=down;*.drop=0");
        assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok), "turned: {swap}");
        assert_eq!(notifs(&pair.b.e, 1)[0].1, b"all");
        apply(Direction::Write, &pieces, &mut here.clone(), &mut there);
        same(&pair.b.mem.copy(), &there, Direction::Write, "there");
        pair.a.e.release(t).unwrap();
        fake.set("fake1.port1.state=active;fake3.port1.state=active");
        whole(&mut pair);
        drop(pair);
        fake.is_empty();
    }
}

/// Sides with unequal numbers of NICs have all rails that there can be.
#[test]
fn nobody_dials_for_rails_that_cannot_be() {
    let fake = alone!(8, &twins(4));
    for (a, b) in [(0..4, 4..6), (0..2, 4..8)] {
        let mut c = [config("a", &nics(a)), config("b", &nics(b))];
        c.iter_mut().for_each(quick);
        let [a, b] = c;
        let mut pair = Pair::new(a, b, MIB);
        pair.moves_some(50);
        let made = fake.get("calls.reg_mr");
        std::thread::sleep(Duration::from_millis(400));
        pair.moves_some(50);
        assert_eq!(fake.get("calls.reg_mr"), made);
        drop(pair);
        fake.is_empty();
    }
}

/// A build without joins, as either side: its rails do not come back, and the last one is the end.
#[test]
fn with_an_older_build_nothing_is_joined() {
    let fake = alone!(4, &twins(2));
    for (old_a, old_b) in [(true, false), (false, true)] {
        let side = |name: &str, old: bool, nics: &str| {
            if old {
                std::env::set_var("KVRAIL_TEST_NO_JOINS", "1");
            }
            let mut c = config(name, nics);
            quick(&mut c);
            let side = Side::new(c, MIB);
            std::env::remove_var("KVRAIL_TEST_NO_JOINS");
            side
        };
        let (a, b) = (side("a", old_a, &nics(0..2)), side("b", old_b, &nics(2..4)));
        let (peer, far) = a.meet(&b);
        let mut pair = Pair { a, b, peer, far, rng: crate::rig::Rng::new() };
        whole(&mut pair);
        let made = fake.get("calls.reg_mr");
        fake.set("fake0.wc_force=n:2:RETRY_EXC_ERR");
        pair.moves_some(100);
        qps(fake, lines(1));
        // Longer than the first pauses of a back-off.
        std::thread::sleep(Duration::from_millis(500));
        pair.moves_some(100);
        assert_eq!(fake.get("calls.reg_mr"), made, "a rail was dialled for");
        let t = pair.prepare(Direction::Read, &[Piece { here: 0, there: 0, len: 9 }]).unwrap();
        fake.set("*.drop=1");
        pair.a.e.post(t, None).unwrap();
        assert_eq!(finish(&pair.a.e, t).unwrap_err().status, Status::Disconnected);
        fake.set("*.drop=0");
        let again = || pair.a.e.post(t, None).and_then(|_| finish(&pair.a.e, t)) == Ok(Status::Ok);
        wait(again, || "the peer never came back".into());
        pair.a.e.release(t).unwrap();
        whole(&mut pair);
        drop(pair);
        fake.is_empty();
    }
}

/// `KVRAIL_TEST_CYCLES`, or `own`.
pub(crate) fn cycles(own: u64) -> u64 {
    let given = std::env::var("KVRAIL_TEST_CYCLES").ok().and_then(|n| n.parse().ok());
    given.unwrap_or(own)
}

/// Files that this process has open.
pub(crate) fn files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Bytes of this process in memory.
pub(crate) fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    1024 * line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
}

/// `KVRAIL_TEST_CYCLES` says how many.
#[test]
fn connects_transfers_and_joins_leave_nothing() {
    let fake = alone!(4, &twins(2));
    let mut pair = Pair::twins(2, MIB, quick);
    whole(&mut pair);
    let (before, open) = (fake.live(), files());
    for i in 0..cycles(12) {
        match i % 3 {
            // A connection's first loss waits a moment only.
            0 => {
                fake.set(&format!("fake{}.wc_force=n:2:RETRY_EXC_ERR", i / 3 % 4));
                pair.moves_some(100);
                whole(&mut pair);
                fake.set("*.wc_force=off");
            }
            // One join fails, the next does not.
            1 => {
                let bad = format!("fake{}.fail.modify_rtr", i / 3 % 4);
                fake.set(&format!("{bad}=1:EIO;fake{}.wc_force=n:2:FATAL_ERR", i / 3 % 2));
                pair.moves_some(100);
                whole(&mut pair);
                fake.set(&format!("{bad}=off;*.wc_force=off"));
            }
            _ => pair.moves_some(3),
        }
        fake.settles(&before, "a cycle");
        pair.a.e.peer_remove(pair.peer).unwrap();
        pair.meet_again();
    }
    whole(&mut pair);
    fake.settles(&before, "all cycles");
    wait(|| files() == open, || format!("{} files are open, not {open}", files()));
    drop(pair);
    fake.is_empty();
}

/// The acceptor restarts under its name and address; the dialler knows only its old metadata.
#[test]
fn another_life_of_the_peer_ends_the_connection_and_nothing_else() {
    let fake = alone!(8, &twins(4));
    let tune = |mut c: Config| {
        quick(&mut c);
        c
    };
    let a = Side::new(tune(config("a", &nics(0..2))), MIB);
    let b = Side::new(tune(config("b", &nics(4..6))), MIB);
    let other = Side::new(tune(config("c", &nics(6..8))), MIB);
    let (bystander, _) = a.meet(&other);
    let (peer, far) = a.meet(&b);
    let mut pair = Pair { a, b, peer, far, rng: crate::rig::Rng::new() };
    whole(&mut pair);
    let t = pair.prepare(Direction::Write, &[Piece { here: 0, there: 0, len: 99 }]).unwrap();
    let port: u16 = pair.b.e.info().listen.rsplit(':').next().unwrap().parse().unwrap();
    let again = Config { port_min: port, port_max: port, ..tune(config("b", &nics(4..6))) };
    let old = core::mem::replace(&mut pair.b, Side::new(config("none", &nics(2..3)), MIB));
    drop(old);
    pair.b = Side::new(again, MIB);
    // Old handles end in errors.
    wait(|| pair.a.e.peer_state(pair.peer).is_err(), || "the old life counts as connected".into());
    let end = pair.a.e.post(t, None).and_then(|_| finish(&pair.a.e, t));
    assert!(end.is_err(), "{end:?}");
    pair.a.e.release(t).unwrap();
    let old = pair.peer;
    (pair.peer, pair.far) = pair.a.meet(&pair.b);
    assert_eq!(pair.a.e.peer_state(old).unwrap_err().status, Status::Stale);
    whole(&mut pair);
    assert_eq!(pair.a.e.peer_state(bystander), Ok(Status::Ok));
    pair.a.e.notify(bystander, b"still here").unwrap();
    assert_eq!(notifs(&other.e, 1)[0].1, b"still here");
    drop((pair, other));
    fake.is_empty();
}
