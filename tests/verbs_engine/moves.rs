//! Data and messages between two engines of one process, whatever the rails.

use kvrail::host::engine::Engine;
use kvrail::status::Status;
use kvrail::table::{Desc, Direction};

use crate::fake::HANG;
use crate::rig::{
    apply, config, finish, nics, notifs, pattern, same, scatter, twins, Pair, Piece, Rng, Side,
    BOTH, MIB,
};

#[test]
fn every_byte_arrives_over_one_two_four_and_eight_rails() {
    let fake = alone!(16, &twins(8));
    for rails in [1, 2, 4, 8] {
        for width in [0, 1] {
            for background in [true, false] {
                if !background && width == 1 {
                    continue;
                }
                let b = nics((0..rails).map(|i| 8 + i));
                let (mut a, mut b) = (config("a", &nics(0..rails)), config("b", &b));
                (a.stripe_width, b.stripe_width) = (width, width);
                (a.progress_thread, b.progress_thread) = (background, background);
                let mut pair = Pair::new(a, b, MIB);
                assert_eq!(pair.a.e.info().rails, rails as u32);
                for n in [1, 3, 400] {
                    pair.moves_some(n);
                }
                let used = pair.spread().iter().filter(|b| **b > 0).count();
                if width == 0 {
                    assert_eq!(used, rails, "striped over {:?}", pair.spread());
                }
            }
        }
    }
    fake.is_empty();
}

/// Lengths of one block, of one more, of a frame, and the longest.
const LENGTHS: [usize; 6] = [0, 1, 255, 256, 4096, 65536];

#[test]
fn notifications_of_every_length_come_whole_in_order_and_after_the_data() {
    let fake = alone!(4, &twins(2));
    for width in [0, 1] {
        let pair = Pair::twins(2, MIB, |c| c.stripe_width = width);
        for (round, len) in LENGTHS.into_iter().enumerate() {
            let text = pattern(round as u64, len);
            let want = pair.a.mem.fill(round as u64 + 77);
            let all = [Piece { here: 0, there: 0, len: MIB }];
            let t = pair.prepare(Direction::Write, &all).unwrap();
            pair.a.e.post(t, Some(&text)).unwrap();
            let got = notifs(&pair.b.e, 1);
            // Nobody asked `a` yet: the message alone says that all is there.
            same(&pair.b.mem.copy(), &want, Direction::Write, "when the message came");
            assert_eq!(got, [(b"a".to_vec(), text)], "{len} bytes");
            assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
            pair.a.e.release(t).unwrap();
        }
        // Without data, both ways, many at a time.
        let (back, _) = pair.b.meet(&pair.a);
        for len in LENGTHS {
            pair.a.e.notify(pair.peer, &pattern(5, len)).unwrap();
            pair.b.e.notify(back, &pattern(6, len)).unwrap();
        }
        let (there, here) = (notifs(&pair.b.e, 6), notifs(&pair.a.e, 6));
        for (i, len) in LENGTHS.into_iter().enumerate() {
            assert_eq!(there[i], (b"a".to_vec(), pattern(5, len)));
            assert_eq!(here[i], (b"b".to_vec(), pattern(6, len)));
        }
    }
    fake.is_empty();
}

#[test]
fn acknowledged_writes_are_in_place_when_a_transfer_is_done() {
    // Here an acknowledged WRITE lies in the peer's device until something reads behind it.
    let fake = alone!(4, &(twins(2) + ";*.late_writes=1"));
    for width in [0, 1] {
        let mut pair = Pair::twins(2, MIB, |c| c.stripe_width = width);
        for n in [1, 8, 300] {
            let pieces = scatter(&mut pair.rng, n, MIB, MIB);
            pair.moves(Direction::Write, &pieces);
        }
        let want = pair.a.mem.fill(3);
        let t = pair.prepare(Direction::Write, &[Piece { here: 0, there: 0, len: MIB }]).unwrap();
        pair.a.e.post(t, Some(b"x")).unwrap();
        notifs(&pair.b.e, 1);
        same(&pair.b.mem.copy(), &want, Direction::Write, "when the message came");
        finish(&pair.a.e, t).unwrap();
    }
    assert!(fake.get("late_staged") > 0, "no write was late");
    fake.is_empty();
}

#[test]
fn an_engine_moves_within_itself() {
    let fake = alone!(2, &twins(1));
    let mut rng = Rng::new();
    let side = Side::new(config("a", "fake0"), MIB);
    let peer = side.e.peer_self().raw();
    let far = side.e.region_import_self(side.region).unwrap().raw();
    let half = MIB / 2;
    for direction in BOTH {
        let pieces = scatter(&mut rng, 100, half, half);
        let mut want = side.mem.fill(rng.next());
        let (here, there) = want.split_at_mut(half);
        apply(direction, &pieces, here, there);
        let desc = |at: usize, len: usize, region| Desc {
            addr: side.mem.base() + at as u64,
            len: len as u64,
            dev: 0,
            region,
        };
        let local: Vec<_> = pieces.iter().map(|p| desc(p.here, p.len, side.region)).collect();
        let remote: Vec<_> = pieces.iter().map(|p| desc(half + p.there, p.len, far)).collect();
        let t = side.e.prepare_descs(direction, peer, &local, &remote).unwrap().raw();
        side.e.post(t, Some(b"to myself")).unwrap();
        assert_eq!(finish(&side.e, t), Ok(Status::Ok));
        same(&side.mem.copy(), &want, direction, "in the engine");
        assert_eq!(notifs(&side.e, 1), [(b"a".to_vec(), b"to myself".to_vec())]);
        side.e.release(t).unwrap();
    }
    drop(side);
    fake.is_empty();
}

fn connect_both(a: &Engine, b: &Engine) -> [u64; 2] {
    let pa = a.peer_add(b.metadata(), None).unwrap().raw();
    let pb = b.peer_add(a.metadata(), None).unwrap().raw();
    a.peer_connect(pa, HANG).unwrap();
    b.peer_connect(pb, HANG).unwrap();
    [pa, pb]
}

#[test]
fn both_sides_may_dial_at_once() {
    let fake = alone!(4, &twins(2));
    for round in 0..12u64 {
        let (a, b) = (
            Side::new(config("a", &nics(0..2)), 64 << 10),
            Side::new(config("b", &nics(2..4)), 64 << 10),
        );
        let [pa, _] = connect_both(&a.e, &b.e);
        // One connection: a data and a message queue pair for each rail of each side.
        let want = a.e.info().rails * 2 * 2;
        crate::fake::wait(
            || fake.get("live.qp") == u64::from(want),
            || format!("{} queue pairs, not {want}", fake.get("live.qp")),
        );
        let far = a.e.region_import(pa, &b.blob()).unwrap().raw();
        let mut pair = Pair { a, b, peer: pa, far, rng: Rng::new() };
        pair.moves_some(20);
        pair.a.e.notify(pa, &round.to_le_bytes()).unwrap();
        assert_eq!(notifs(&pair.b.e, 1)[0].1, round.to_le_bytes());
    }
    fake.is_empty();
}

#[test]
fn a_peer_that_is_made_anew_under_its_name_is_connected_again() {
    let fake = alone!(4, &twins(2));
    let a = Side::new(config("a", &nics(0..2)), MIB);
    let fresh = fake.live();
    let mut a = Some(a);
    for round in 0..4 {
        let b = Side::new(config("b", &nics(2..4)), MIB);
        let side = a.take().unwrap();
        let (peer, far) = side.meet(&b);
        let mut pair = Pair { a: side, b, peer, far, rng: Rng::new() };
        pair.moves_some(30);
        let Pair { a: side, b, peer, far, .. } = pair;
        // With and without a word to the peer before.
        if round % 2 == 0 {
            side.e.region_forget(far).unwrap();
            side.e.peer_remove(peer).unwrap();
        }
        drop(b);
        fake.settles(&fresh, "the peer is gone");
        a = Some(side);
    }
    drop(a);
    fake.is_empty();
}
