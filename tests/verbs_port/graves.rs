//! How a rail's queue pair ends.

use kvrail::nic::{Port, PostError};

use crate::double::with;
use crate::rig::{apart, success, Rig, SHAPE};

/// What the device was asked since the last call.
fn calls() -> Vec<&'static str> {
    with(|s| core::mem::take(&mut s.calls))
}

#[test]
fn a_queue_pair_is_stopped_and_reset_and_then_handed_out() {
    let mut rig = Rig::new(2, SHAPE);
    let first = rig.qp[0];
    rig.read(0, &apart(8)).unwrap();
    assert!(rig.port.take_grave().is_none(), "it is in use");
    calls();
    assert!(rig.port.close(0), "it touches no memory");
    assert_eq!(calls(), ["to ERR", "to RESET"]);
    assert_eq!(rig.posted(0).len(), 0);
    assert_eq!(rig.read(0, &apart(1)), Err((0, PostError::Rail)));
    // The rail is made anew meanwhile, and the other one works.
    rig.connect(0, 1 << 20);
    let second = rig.qp[0];
    rig.read(0, &apart(1)).unwrap();
    rig.done(1);
    assert_eq!(rig.poll(), [success(0, 0)]);
    calls();
    rig.port.close(1);
    rig.port.close(1);
    assert_eq!(calls(), ["to ERR", "to RESET"]);
    let other = rig.qp[1];
    let mut graves = rig.bury();
    graves.sort_unstable();
    assert_eq!(graves, [first, other], "and not {second}, which is in use");
    assert_eq!(calls(), ["destroy_qp", "destroy_qp"]);
    assert!(rig.port.take_grave().is_none());
    rig.end();
}

#[test]
fn a_queue_pair_that_cannot_be_reset_is_destroyed_in_place() {
    let mut rig = Rig::new(2, SHAPE);
    with(|s| s.fail.insert("to RESET", libc::EIO));
    calls();
    assert!(rig.port.close(0), "it is gone");
    assert_eq!(calls(), ["to ERR", "to RESET", "destroy_qp"]);
    assert!(rig.port.take_grave().is_none());
    // Neither: nothing is known of what it does to memory.
    with(|s| s.fail.insert("destroy_qp", libc::EBUSY));
    assert!(!rig.port.close(1));
    assert!(rig.port.take_grave().is_none());
    assert_eq!(
        rig.post(1, kvrail::table::Direction::Read, 0, &apart(1)),
        Err((0, PostError::Rail))
    );
}

#[test]
fn where_no_grave_is_free_a_queue_pair_is_destroyed_in_place() {
    let mut rig = Rig::new(1, SHAPE);
    // Two a rail: for data, and what leads back.
    let mut first = Vec::new();
    for _ in 0..2 {
        first.push(rig.qp[0]);
        rig.port.close(0);
        rig.connect(0, 1 << 20);
    }
    calls();
    rig.port.close(0);
    assert_eq!(calls(), ["to ERR", "destroy_qp"]);
    first.reverse();
    assert_eq!(rig.bury(), first);
    // It is free again.
    rig.connect(0, 1 << 20);
    calls();
    rig.port.close(0);
    assert_eq!(calls(), ["to ERR", "to RESET"]);
    rig.end();
}
