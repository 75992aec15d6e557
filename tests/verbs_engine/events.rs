//! What devices and ports tell, and what engines make of it.

use core::time::Duration;

use kvrail::host::config::Config;

use crate::fake::{wait, Fake, HANG};
use crate::rig::{config, listen, nics, said, twins, Pair, MIB};

const LIMIT: u32 = 300;

fn quick(rails: usize) -> Pair {
    Pair::twins(rails, MIB, |c: &mut Config| {
        c.stripe_width = 0;
        c.rail_timeout_ms = LIMIT;
    })
}

/// Rails that carry something now, of `a`.
fn alive(pair: &mut Pair) -> Vec<usize> {
    let before = pair.spread();
    pair.moves_some(400);
    let after = pair.spread();
    (0..after.len()).filter(|i| after[*i] > before[*i]).collect()
}

/// Longer than a rail is given.
fn pass() {
    std::thread::sleep(Duration::from_millis(u64::from(2 * LIMIT)));
}

fn qps(fake: Fake, device: usize, n: u64) {
    let name = format!("fake{device}.live.qp");
    wait(|| fake.get(&name) == n, || format!("{name} is {}, not {n}", fake.get(&name)));
}

#[test]
fn events_that_mean_nothing_change_nothing() {
    let fake = alone!(4, &(twins(2) + ";*.ports=2"));
    let (a, b) = (config("a", "fake0:1,fake1:1"), config("b", "fake2:1,fake3:1"));
    let tune = |c| Config { stripe_width: 0, rail_timeout_ms: LIMIT, ..c };
    let mut pair = Pair::new(tune(a), tune(b), MIB);
    let before = fake.live();
    for event in [
        "PORT_ERR:2",
        "GID_CHANGE:2",
        "LID_CHANGE",
        "PKEY_CHANGE",
        "SM_CHANGE",
        "CLIENT_REREGISTER",
        "GID_CHANGE:1",
        "PORT_ACTIVE:1",
        // The port is active all the same: it is asked.
        "PORT_ERR:1",
    ] {
        fake.set(&format!("fake0.event={event};fake3.event={event}"));
        pass();
        assert_eq!(alive(&mut pair), [0, 1], "{event}");
        assert_eq!(fake.live(), before, "{event}");
    }
    drop(pair);
    fake.is_empty();
}

#[test]
fn a_port_that_stays_down_takes_its_rail_with_it() {
    let fake = alone!(4, &twins(2));
    listen();
    for quiet in [0, 1] {
        let mut pair = quick(2);
        fake.set(&format!("fake0.quiet_events={quiet};fake0.port1.state=down"));
        // Without the event only work that fails shows it.
        if quiet == 1 {
            pair.moves_some_reads(100);
        }
        qps(fake, 0, 0);
        assert!(quiet == 1 || said(&["Warn", "fake0:1", "link is down"]));
        assert_eq!(alive(&mut pair), [1]);
        fake.set("fake0.port1.state=active;fake0.quiet_events=0");
        qps(fake, 0, 2);
        wait(|| alive(&mut pair) == [0, 1], || "the rail never came back".into());
        drop(pair);
        fake.is_empty();
    }
}

#[test]
fn a_port_that_comes_up_in_time_keeps_its_rail() {
    let fake = alone!(4, &twins(2));
    let mut pair = Pair::twins(2, MIB, |c| {
        c.stripe_width = 0;
        c.rail_timeout_ms = 60_000;
    });
    let before = fake.live();
    fake.set("fake0.port1.state=down");
    std::thread::sleep(Duration::from_millis(50));
    fake.set("fake0.port1.state=active");
    assert_eq!(alive(&mut pair), [0, 1]);
    assert_eq!(fake.live(), before);
    drop(pair);
    fake.is_empty();
}

#[test]
fn a_device_that_dies_takes_its_rails_with_it() {
    // Messages go over the first rail; when it dies they go over the other.
    let fake = alone!(8, &twins(4));
    listen();
    // The fake's devices stay dead, so each round has its own.
    for (dead, first) in [(1, 0), (0, 2)] {
        let tune = |c| Config { stripe_width: 0, rail_timeout_ms: LIMIT, ..c };
        let (a, b) = (nics(first..first + 2), nics(first + 4..first + 6));
        let mut pair = Pair::new(tune(config("a", &a)), tune(config("b", &b)), MIB);
        fake.set(&format!("fake{}.event=DEVICE_FATAL", first + dead));
        let name = format!("fake{}:1", first + dead);
        wait(|| said(&["Warn", &name, "the device failed"]), || "not a word of it".into());
        let left = [1 - dead];
        // Without any work that fails both its queue pairs are gone.
        qps(fake, first + dead, 0);
        assert_eq!(alive(&mut pair), left);
        // Memory is registered on what is left.
        let more = pair.a.e.register(pair.a.mem.base(), MIB as u64, 0).unwrap().raw();
        let first = core::mem::replace(&mut pair.a.region, more);
        assert_eq!(alive(&mut pair), left);
        pair.a.e.deregister(core::mem::replace(&mut pair.a.region, first), false).unwrap();
        pair.a.e.notify(pair.peer, b"still here").unwrap();
        assert_eq!(crate::rig::notifs(&pair.b.e, 1)[0].1, b"still here");
        // A connect leaves it out.
        let peer = pair.peer;
        pair.a.e.peer_remove(peer).unwrap();
        pair.meet_again();
        assert_eq!(alive(&mut pair), left);
        drop(pair);
        fake.is_empty();
    }
}

#[test]
fn a_gid_that_moves_is_found_again_at_the_next_connect() {
    let fake = alone!(4, &twins(2));
    let mut pair = quick(2);
    fake.set("fake0.port1.gid1=none;fake0.port1.gid5=10.1.0.1");
    let peer = pair.peer;
    pair.a.e.peer_remove(peer).unwrap();
    pair.meet_again();
    assert_eq!(alive(&mut pair), [0, 1]);
    // Another address than the one it was chosen for is no GID of ours.
    fake.set("fake0.port1.gid5=10.9.9.9");
    qps(fake, 0, 0);
    let peer = pair.peer;
    pair.a.e.peer_remove(peer).unwrap();
    pair.meet_again();
    assert_eq!(alive(&mut pair), [1]);
    drop(pair);
    fake.is_empty();
}

#[test]
fn queue_pairs_and_queues_that_fail_end_their_rail() {
    let fake = alone!(4, &twins(2));
    for round in 0..2 {
        let mut pair = quick(2);
        let nic = nics([round]);
        fake.set(&format!("{nic}.fail.post_send=1+:EIO"));
        pair.moves_some_reads(100);
        fake.set(&format!("{nic}.fail.post_send=off"));
        pair.a.e.peer_connect(pair.peer, HANG).unwrap();
        pair.moves_some(50);
        drop(pair);
        fake.is_empty();
    }
}
