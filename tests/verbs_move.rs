//! Two verbs lanes in one process move real bytes: over the fake libibverbs, or over a real one.
//!
//! * By itself the test builds the fake (`tests/fakeverbs`) and loads it.
//! * In the lab: `KVRAIL_TEST_RAIL=ra0@a0=10.1.0.1,rb0@b0=10.1.0.2` names device, netdev and
//!   address of both ends; `KVRAIL_IBVERBS` a library other than the system's;
//!   `KVRAIL_TEST_DMABUF` what its dma-bufs are: `udmabuf`, `heap`, both, or `refused`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

#[path = "verbs_move/dmabuf.rs"]
mod dmabuf;
#[path = "verbs_move/pair.rs"]
mod pair;

use kvrail::nic::{Completion, Port, WrStatus};
use kvrail::table::{Direction, Op};
use rdma_core_sys::IBV_WC_WR_FLUSH_ERR;

use pair::{rail, Pair, Want, BYTES};

/// A small generator, so that a failure can be repeated.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Ops that cover all of both memories but a few gaps, once each: `pieces` of them, shuffled here
/// unless `straight`, in order there, so that many go on where another ends.
fn ops(pair: &Pair, rng: &mut Rng, pieces: u64, straight: bool) -> Vec<Op> {
    let size = BYTES as u64 / pieces;
    let mut places: Vec<u64> = (0..pieces).collect();
    if !straight {
        for i in (1..pieces).rev() {
            places.swap(i as usize, rng.below(i + 1) as usize);
        }
    }
    let one = |(i, place): (u64, u64)| Op {
        local: pair.a.base() + place * size,
        remote: pair.b.base() + i * size,
        len: (size - rng.below(8) / 7 * rng.below(size)) as u32,
        local_region: 0,
        remote_region: 0,
        tag: i as u32,
    };
    (0..).zip(places).map(one).collect()
}

/// Moves `ops` from end a and compares every byte of both ends afterwards.
fn moves(pair: &mut Pair, rng: &mut Rng, direction: Direction, ops: &[Op]) {
    pair.a.fill(rng.below(u64::MAX) | 1);
    pair.b.fill(rng.below(u64::MAX) | 1);
    let (mut here, mut there) = (pair.a.copy(), pair.b.copy());
    for op in ops {
        let l = (op.local - pair.a.base()) as usize;
        let r = (op.remote - pair.b.base()) as usize;
        let len = op.len as usize;
        match direction {
            Direction::Read => here[l..l + len].copy_from_slice(&there[r..r + len]),
            Direction::Write => there[r..r + len].copy_from_slice(&here[l..l + len]),
        }
    }
    assert_eq!(pair.carry(direction, ops), None);
    assert!(pair.b.copy() == there, "{direction:?}: the peer's memory is not as it must be");
    assert!(pair.a.copy() == here, "{direction:?}: the own memory is not as it must be");
    assert_eq!((pair.a.port.in_flight(0), pair.a.port.strays()), (0, 0));
}

#[test]
fn every_byte_arrives_where_it_belongs_and_nowhere_else() {
    let Some(rail) = rail() else { return };
    let mut rng = Rng(0x1234_5678);
    for want in [Want::default(), Want { depth: 4, cq: 9, sges: 2, ..Want::default() }] {
        let mut pair = Pair::connect(&rail, want);
        for direction in [Direction::Read, Direction::Write] {
            for (pieces, straight) in [(3000, false), (100, false), (64, true), (1, true)] {
                let ops = ops(&pair, &mut rng, pieces, straight);
                moves(&mut pair, &mut rng, direction, &ops);
            }
        }
        pair.end();
    }
}

#[test]
fn writes_that_are_told_done_can_be_read_at_once() {
    let Some(rail) = rail() else { return };
    // Here an acknowledged WRITE lies in the peer's device until something reads behind it.
    if !rail.set("*.late_writes=1") {
        return;
    }
    let mut rng = Rng(99);
    let mut pair = Pair::connect(&rail, Want::default());
    for pieces in [1, 7, 500] {
        let ops = ops(&pair, &mut rng, pieces, false);
        moves(&mut pair, &mut rng, Direction::Write, &ops);
    }
    pair.end();
}

#[test]
fn a_bad_access_names_its_op_touches_nothing_and_the_rail_works_after_a_reconnect() {
    let Some(rail) = rail() else { return };
    let rxe = !rail.is_fake();
    let mut rng = Rng(5);
    let mut pair = Pair::connect(&rail, Want::default());
    for direction in [Direction::Read, Direction::Write] {
        let good = ops(&pair, &mut rng, 40, false);
        let mut bad = Vec::new();
        // Behind the end of the peer's memory, and in front of it.
        let outside = [pair.b.base() + BYTES as u64 - 8, pair.b.base() - 64];
        for remote in outside {
            bad.push((Op { remote, len: 64, ..good[17] }, WrStatus::RemoteAccess));
        }
        // A key of the peer that is none, and a key of our own.
        bad.push((Op { remote_region: 9, ..good[17] }, WrStatus::RemoteAccess));
        bad.push((Op { local_region: 9, ..good[17] }, WrStatus::LocalAccess));
        for (op, status) in bad {
            pair.b.fill(7);
            let before = pair.b.copy();
            let mut ops = good.clone();
            ops[17] = op;
            let told = pair.carry(direction, &ops);
            let Some(Completion { wr, status: got, vendor, .. }) = told else {
                panic!("{op:?}: done")
            };
            // The work request is named by its first op; nothing merges with the bad remote places.
            let before_it = if status == WrStatus::RemoteAccess { 0 } else { 15 };
            let named = pair.pair_of(wr);
            // Soft-RoCE 6.12 flushes a WRITE whose local key is wrong, and names no error of it.
            if rxe && direction == Direction::Write && status == WrStatus::LocalAccess {
                assert_eq!((got, vendor >> 16), (WrStatus::RailError, IBV_WC_WR_FLUSH_ERR));
                pair.reconnect();
                continue;
            }
            assert_eq!(got, status, "{direction:?} {op:?}");
            assert!(named <= 17 && named + before_it >= 17, "{named}: {direction:?} {op:?}");
            if direction == Direction::Read {
                assert!(pair.b.copy() == before, "a READ wrote to the peer");
            }
            pair.reconnect();
        }
        moves(&mut pair, &mut rng, direction, &good);
    }
    pair.end();
}

#[test]
fn a_peer_that_is_gone_is_a_rail_error_within_the_limits_of_the_path() {
    let Some(rail) = rail() else { return };
    let mut rng = Rng(8);
    let mut pair = Pair::connect(&rail, Want { timeout: 10, retry: 2, ..Want::default() });
    let list = ops(&pair, &mut rng, 100, false);
    pair.b.port.close(0);
    let told = pair.carry(Direction::Write, &list);
    assert_eq!(told.map(|c| c.status), Some(WrStatus::RailError));
    pair.reconnect();
    moves(&mut pair, &mut rng, Direction::Write, &list);
    pair.end();
}

#[test]
fn a_rail_that_is_closed_in_the_middle_tells_nothing_more() {
    let Some(rail) = rail() else { return };
    let mut rng = Rng(13);
    let mut pair = Pair::connect(&rail, Want::default());
    for round in 0..20 {
        let list = ops(&pair, &mut rng, 200, false);
        let direction = if round % 2 == 0 { Direction::Read } else { Direction::Write };
        pair.post_some(direction, &list, round % 7 * 10 + 1);
        pair.a.port.close(0);
        // Nothing of it may write here any more.
        let before = pair.a.copy();
        std::thread::sleep(core::time::Duration::from_millis(5));
        assert!(pair.a.copy() == before, "memory changed after close");
        assert_eq!(core::iter::from_fn(|| pair.a.port.poll()).count(), 0);
        pair.reconnect();
        moves(&mut pair, &mut rng, direction, &list);
    }
    pair.end();
}

#[test]
fn both_ends_may_carry_at_once() {
    let Some(rail) = rail() else { return };
    let mut rng = Rng(21);
    let mut pair = Pair::connect(&rail, Want::default());
    pair.a.fill(3);
    pair.b.fill(4);
    // a writes the first half of b, b reads the first half of a into its second.
    let half = BYTES as u64 / 2;
    let all = ops(&pair, &mut rng, 512, true);
    let from_a: Vec<Op> = all.iter().filter(|o| o.remote < pair.b.base() + half).copied().collect();
    let from_b: Vec<Op> =
        from_a.iter().map(|o| Op { local: o.remote + half, remote: o.local, ..*o }).collect();
    assert_eq!(pair.both(Direction::Write, &from_a, Direction::Read, &from_b), (None, None));
    let (a, b) = (pair.a.copy(), pair.b.copy());
    for op in &from_a {
        let at = (op.local - pair.a.base()) as usize;
        let end = at + op.len as usize;
        assert!(b[at..end] == a[at..end], "written");
        assert!(b[at + half as usize..end + half as usize] == a[at..end], "read");
    }
    pair.end();
}
