//! What the loss of a rail costs in software: the test to count instructions under
//! (`scripts/failover.sh`).

use kvrail::status::Status;

use crate::rig::{apply, finish, same, scatter, twins, Pair, BOTH, MIB};

/// One rail of four breaks with all that it may have in flight.
#[test]
fn one_rail_of_four_breaks_under_a_striped_transfer() {
    let fake = alone!(8, &twins(4));
    for direction in BOTH {
        let mut pair = Pair::twins(4, 4 * MIB, |c| {
            c.stripe_width = 0;
            c.rail_timeout_ms = 20_000;
        });
        let pieces = scatter(&mut pair.rng, 1_000, 4 * MIB, 4 * MIB);
        let (here, there) = (pair.a.mem.fill(91), pair.b.mem.fill(92));
        let (mut done_here, mut done_there) = (here, there);
        apply(direction, &pieces, &mut done_here, &mut done_there);
        let t = pair.prepare(direction, &pieces).unwrap();
        fake.set("fake0.wc_force=n:3:RETRY_EXC_ERR");
        pair.a.e.post(t, Some(b"after")).unwrap();
        assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
        same(&pair.a.mem.copy(), &done_here, direction, "here");
        same(&pair.b.mem.copy(), &done_there, direction, "there");
        pair.a.e.release(t).unwrap();
    }
    fake.is_empty();
}
