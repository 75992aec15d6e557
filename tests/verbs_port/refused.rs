//! Ops that cannot become work requests.

use kvrail::nic::{Completion, Keys, Port, PostError, WrStatus};

use crate::rig::{apart, op, success, Rig, SHAPE};

#[test]
fn an_op_without_a_key_is_reported_after_those_before_it_and_never_posted() {
    for (local, wanted) in [(true, WrStatus::LocalAccess), (false, WrStatus::RemoteAccess)] {
        let mut rig = Rig::new(1, SHAPE);
        (rig.keys.no_local, rig.keys.no_remote) =
            if local { (Some(4), None) } else { (None, Some(4)) };
        let mut ops = apart(6);
        (ops[3].local_region, ops[3].remote_region) = (4, 4);
        assert_eq!(rig.read(10, &ops), Ok(()));
        assert_eq!(rig.posted(0).len(), 3);
        assert_eq!(rig.poll(), [], "those before it would be taken for done");
        assert_eq!(rig.read(20, &apart(1)), Err((0, PostError::Full)), "nothing overtakes it");
        rig.done(3);
        let refused = Completion { peer: 0, wr: 13, status: wanted, vendor: 0 };
        assert_eq!(rig.poll(), [success(0, 12), refused]);
        // As the first of a batch, with nothing in flight.
        assert_eq!(rig.write(20, &ops[3..]), Ok(()));
        assert_eq!(rig.poll(), [Completion { wr: 20, ..refused }]);
        assert_eq!(rig.posted(0).len(), 0);
        assert!(rig.port.access_error_breaks_rail());
        rig.end();
    }
}

#[test]
fn an_op_that_no_work_request_can_carry_is_refused() {
    let mut rig = Rig::new(1, SHAPE);
    rig.connect(0, 4096);
    for (len, wr) in [(4097, 0), (0, 1)] {
        assert_eq!(rig.read(wr, &[op(0x1000, 0x2000, len)]), Ok(()));
        let status = WrStatus::LocalAccess;
        assert_eq!(rig.poll(), [Completion { peer: 0, wr, status, vendor: 0 }]);
        assert_eq!(rig.posted(0).len(), 0);
    }
    rig.read(2, &[op(0x1000, 0x2000, 4096)]).unwrap();
    assert_eq!(rig.posted(0).len(), 1);
    rig.end();
}

#[test]
fn a_wrong_length_is_seen_however_keys_are_looked_up() {
    // One pair of regions; regions that change with each op; regions of several keys.
    for (regions, seam) in [(1, None), (2, None), (1, Some(0x1_0000))] {
        for len in [0, 4097] {
            let mut rig = Rig::new(1, SHAPE);
            rig.connect(0, 4096);
            rig.keys.seam = seam;
            let mut ops = apart(24);
            for (i, op) in ops.iter_mut().enumerate() {
                op.remote_region += i as u32 % regions;
            }
            ops[21].len = len;
            assert_eq!(rig.read(0, &ops), Ok(()));
            let wrs = rig.posted(0);
            assert_eq!(wrs.len(), 21, "{regions} regions, {seam:?}, length {len}");
            for (wr, op) in wrs.iter().zip(&ops) {
                let key = rig.keys.rkey(op.remote_region, 1, op.remote).unwrap();
                assert_eq!((wr.remote, wr.rkey, wr.bytes()), (op.remote, key, u64::from(op.len)));
            }
            rig.done(21);
            let refused = Completion { wr: 21, status: WrStatus::LocalAccess, ..success(0, 0) };
            assert_eq!(rig.poll().last(), Some(&refused));
            rig.end();
        }
    }
}
