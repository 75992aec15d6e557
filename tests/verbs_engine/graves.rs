//! Queue pairs that take long to destroy: nothing waits for them but the end of the engine.

use core::time::Duration;

use kvrail::status::Status;
use kvrail::table::Direction;

use crate::fake::wait;
use crate::rejoin::{quick, whole};
use crate::rig::{finish, scatter, twins, Pair, BOTH, MIB};

/// Queue pairs that were destroyed.
const DESTROYED: &str = "calls.destroy_qp";

#[test]
fn a_rail_comes_back_before_the_old_one_is_destroyed() {
    let fake = alone!(4, &twins(2));
    for thread in [false, true] {
        let mut pair = Pair::twins(2, MIB, |c| {
            quick(c);
            c.progress_thread = thread;
        });
        let before = fake.live();
        let destroyed = fake.get(DESTROYED);
        fake.set("*.hold_destroy=1;fake0.wc_force=n:2:RETRY_EXC_ERR");
        for direction in BOTH {
            let pieces = scatter(&mut pair.rng, 400, MIB, MIB);
            pair.moves(direction, &pieces);
        }
        whole(&mut pair);
        assert_eq!(fake.get(DESTROYED), destroyed);
        assert_eq!(fake.get("live.qp"), 12, "two rails, and one that ends, of both sides");
        fake.set("*.hold_destroy=0");
        fake.settles(&before, "the old rail is destroyed");
        drop(pair);
    }
    fake.is_empty();
}

#[test]
fn transfers_end_in_time_when_no_queue_pair_can_be_destroyed() {
    let fake = alone!(4, &twins(2));
    for direction in BOTH {
        let mut pair = Pair::twins(2, MIB, |c| {
            quick(c);
            c.peer_timeout_ms = 1000;
        });
        let destroyed = fake.get(DESTROYED);
        let pieces = scatter(&mut pair.rng, 300, MIB, MIB);
        let t = pair.prepare(direction, &pieces).unwrap();
        fake.set("*.hold_destroy=1;*.drop=1");
        pair.a.e.post(t, None).unwrap();
        let end = finish(&pair.a.e, t).unwrap_err();
        assert_eq!(end.status, Status::Disconnected, "{end}");
        pair.a.e.release(t).unwrap();
        // The calls of the application do not wait for it either.
        pair.a.e.peer_remove(pair.peer).unwrap();
        pair.a.e.deregister(pair.a.region, false).unwrap();
        assert_eq!(fake.get(DESTROYED), destroyed);
        fake.set("*.hold_destroy=0;*.drop=0");
        drop(pair);
        assert_eq!(fake.get("live.qp"), 0, "the engine waited for them");
        fake.is_empty();
    }
}

#[test]
fn an_engine_ends_after_its_queue_pairs() {
    let fake = alone!(4, &twins(2));
    let mut pair = Pair::twins(2, MIB, quick);
    pair.moves_some(100);
    fake.set("*.hold_destroy=1;fake0.wc_force=n:1:RETRY_EXC_ERR");
    pair.moves_some_reads(100);
    let held = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        fake.set("*.hold_destroy=0");
    });
    drop(pair);
    assert_eq!((fake.get("live.qp"), fake.get("live.ctx")), (0, 0));
    held.join().unwrap();
    fake.is_empty();
}

#[test]
fn a_device_that_resets_nothing_loses_no_queue_pair() {
    let fake = alone!(4, &twins(2));
    let mut pair = Pair::twins(2, MIB, quick);
    let before = fake.live();
    fake.set("*.fail.modify_reset=1+:EIO;fake0.wc_force=n:2:RETRY_EXC_ERR");
    pair.moves_some(400);
    whole(&mut pair);
    fake.settles(&before, "the old rail is destroyed");
    // One that it does not destroy either: the transfer that it carried is never given back.
    fake.set("*.fail.destroy_qp=1+:EBUSY;fake0.wc_force=n:2:RETRY_EXC_ERR");
    let pieces = scatter(&mut pair.rng, 400, MIB, MIB);
    let t = pair.prepare(Direction::Read, &pieces).unwrap();
    pair.a.e.post(t, None).unwrap();
    assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
    for _ in 0..2 {
        let e = pair.a.e.release(t).unwrap_err();
        assert_eq!(e.status, Status::Busy);
        assert!(e.to_string().contains("did not let go of a queue pair"), "{e}");
    }
    // Others are, and the registration's end lets nothing reach the memory.
    fake.set("*.wc_force=off");
    pair.moves(Direction::Read, &pieces);
    pair.a.e.deregister(pair.a.region, false).unwrap();
    wait(|| pair.a.e.info().peers == 1, || "the peer is gone".into());
}
