//! Which rails of two sides go together, and what is said when none do.

use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::host::error::Error;
use kvrail::status::Status;

use crate::fake::HANG;
use crate::rig::{config, listen, nics, said, twins, Pair, Side, MIB};

fn striped(name: &str, nics: &str) -> Config {
    Config { stripe_width: 0, ..config(name, nics) }
}

#[test]
fn sides_with_unequal_numbers_use_what_both_have() {
    // fake0..3 are in the subnets of fake4..7.
    let fake = alone!(8, &twins(4));
    for (a, b, used) in [
        (vec![0, 1, 2, 3], vec![6, 7], vec![2, 3]),
        (vec![1], vec![4, 5, 6, 7], vec![1]),
        (vec![0, 1, 2, 3], vec![5], vec![1]),
    ] {
        let mut pair = Pair::new(striped("a", &nics(a.clone())), striped("b", &nics(b)), MIB);
        pair.moves_some(400);
        let went: Vec<_> = a.iter().zip(pair.spread()).filter(|(_, n)| *n > 0).collect();
        let went: Vec<usize> = went.into_iter().map(|(i, _)| *i).collect();
        assert_eq!(went, used);
    }
    fake.is_empty();
}

/// Rails are in the order of their devices' names, so the subnets are shuffled here.
#[test]
fn the_subnet_decides_and_not_the_order() {
    const NETS: [usize; 4] = [2, 0, 3, 1];
    let shuffled: Vec<_> =
        (0..4).map(|i| format!("fake{}.port1.ip=10.1.{}.2", 4 + i, NETS[i])).collect();
    let fake = alone!(8, &shuffled.join(";"));
    // Packets between subnets have no way at all: a wrong pair would never prove itself.
    for i in 0..4 {
        for net in (0..4).filter(|net| *net != i) {
            fake.set(&format!("fake{i}.block=::ffff:10.1.{net}.2"));
        }
    }
    for order in ["fake7,fake4,fake6,fake5", "fake5,fake6,fake7,fake4"] {
        let mut pair = Pair::new(striped("a", &nics(0..4)), striped("b", order), MIB);
        pair.moves_some(400);
        assert!(pair.spread().iter().all(|n| *n > 0), "{:?}", pair.spread());
    }
    fake.is_empty();
}

#[test]
fn without_a_common_subnet_the_order_decides() {
    // fake4..7 stay in 10.1.4.0 to 10.1.7.0, and only the order's pairs have a way.
    let fake = alone!(8, "");
    for i in 0..4 {
        for j in (4..8).filter(|j| *j != i + 4) {
            fake.set(&format!("fake{i}.block=::ffff:10.1.{j}.1"));
        }
    }
    let mut pair = Pair::new(striped("a", &nics(0..4)), striped("b", &nics(4..8)), MIB);
    pair.moves_some(400);
    assert!(pair.spread().iter().all(|n| *n > 0), "{:?}", pair.spread());
    drop(pair);
    fake.is_empty();
}

/// A rail whose packets vanish, one way or the other, is not used; the others are.
#[test]
fn a_pair_that_does_not_prove_itself_is_left_out() {
    let fake = alone!(8, &twins(4));
    for (bad, knob) in [(1, "fake1.blackhole=1"), (2, "fake6.blackhole=1"), (3, "fake3.drop=1")] {
        fake.set(knob);
        let short =
            |name: &str, nics: &str| Config { connect_timeout_ms: 4000, ..striped(name, nics) };
        let a = short("a", &nics(0..4));
        let mut pair = Pair::new(a, short("b", &nics(4..8)), MIB);
        for device in [bad, bad + 4] {
            let name = format!("fake{device}.live.qp");
            crate::fake::wait(|| fake.get(&name) == 0, || format!("{name}: {}", fake.get(&name)));
        }
        pair.moves_some(400);
        let spread = pair.spread();
        assert!(spread.iter().enumerate().all(|(i, n)| (*n > 0) == (i != bad)), "{spread:?}");
        drop(pair);
        fake.set("*.blackhole=0;*.drop=0");
        fake.is_empty();
    }
}

fn refused(a: &Engine, b: &Engine) -> Error {
    match a.peer_add(b.metadata(), None) {
        Ok(peer) => a.peer_connect(peer.raw(), HANG).unwrap_err(),
        Err(e) => e,
    }
}

#[test]
fn no_rail_that_works_is_an_error_that_lists_both_sides() {
    let fake = alone!(4, &twins(2));
    fake.set("fake2.drop=1;fake3.drop=1");
    let short = |name: &str, nics: &str| Config {
        connect_timeout_ms: 3000,
        ack_timeout: 8,
        ..config(name, nics)
    };
    let a = Engine::new(short("a", &nics(0..2))).unwrap();
    let b = Engine::new(short("b", &nics(2..4))).unwrap();
    let e = refused(&a, &b);
    assert_eq!(e.status, Status::NoRail, "{e}");
    let want = ["rails here: 10.1.0.1/24, 10.1.1.1/24", "of the peer: 10.1.0.2/24, 10.1.1.2/24"];
    assert!(want.iter().all(|w| e.message.contains(w)), "{e}");
    // Ways that work again: the next dial connects.
    fake.set("*.drop=0");
    let peer = a.peer_find(b"b").unwrap().raw();
    a.peer_connect(peer, HANG).unwrap();
    drop((a, b));
    fake.is_empty();
}

#[test]
fn verbs_and_local_refuse_each_other_in_words() {
    let fake = alone!(2, &twins(1));
    let a = Engine::new(config("a", "fake0")).unwrap();
    let b = Engine::new(Config { transport: "local".into(), ..config("b", "") }).unwrap();
    let e = refused(&a, &b);
    assert_eq!(e.status, Status::NoRail);
    let want = ["has transport local only", "rails here: 10.1.0.1/24; rails of the peer: none"];
    assert!(want.iter().all(|w| e.message.contains(w)), "{e}");
    // The other way round the local side has no rails to offer.
    let e = refused(&b, &a);
    assert!(matches!(e.status, Status::NoRail | Status::Refused), "{e}");
    assert!(e.message.contains("transport local only"), "{e}");
    drop((a, b));
    fake.is_empty();
}

#[test]
fn auto_meets_local_on_one_host_by_copies() {
    let fake = alone!(2, &twins(1));
    let auto = Config { transport: "auto".into(), ..config("a", "fake0") };
    let local = Config { transport: "local".into(), ..config("b", "") };
    for swap in [false, true] {
        let (a, b) =
            if swap { (local.clone(), auto.clone()) } else { (auto.clone(), local.clone()) };
        let mut pair = Pair::new(a, b, MIB);
        pair.moves_some(50);
        pair.a.e.notify(pair.peer, b"hello").unwrap();
        assert_eq!(crate::rig::notifs(&pair.b.e, 1)[0].1, b"hello");
        let posted = ["read", "write", "send"].map(|w| fake.get(&format!("wr_{w}")));
        assert_eq!(posted, [0; 3], "nothing goes over the NIC");
    }
    fake.is_empty();
}

#[test]
fn a_nic_that_cannot_be_opened_is_left_out_with_a_warning() {
    let fake = alone!(8, &(twins(4) + ";fake1.fail.open_device=1+:EIO"));
    listen();
    let mut pair = Pair::new(striped("a", &nics(0..4)), striped("b", &nics(4..8)), MIB);
    assert_eq!(pair.a.e.info().rails, 3);
    assert!(said(&["Warn", "left out: fake1:1", "ibv_open_device"]));
    pair.moves_some(200);
    assert!(pair.spread().iter().all(|n| *n > 0), "{:?}", pair.spread());
    drop(pair);
    fake.set("*.fail.open_device=1+:EIO");
    let e = Engine::new(config("a", &nics(0..2))).unwrap_err();
    assert_eq!(e.status, Status::NoRail);
    for want in ["fake0:1", "fake1:1", "ibv_open_device"] {
        assert!(e.message.contains(want), "{e}");
    }
    fake.is_empty();
}

/// Whatever call fails while a rail is made: the others are used, and nothing is lost.
#[test]
fn a_rail_whose_queue_pairs_cannot_be_made_is_left_out() {
    let fake = alone!(6, &twins(3));
    let calls = [
        "create_qp=1+",
        "create_qp=2+",
        "reg_mr=1+",
        "modify_init=1+",
        "modify_rtr=1+",
        "modify_rts=1+",
    ];
    for call in calls {
        for bad in [1usize, 4] {
            let a = Side::new(striped("a", &nics(0..3)), MIB);
            let b = Side::new(striped("b", &nics(3..6)), MIB);
            fake.set(&format!("fake{bad}.fail.{call}:EIO"));
            let (peer, far) = a.meet(&b);
            let mut pair = Pair { a, b, peer, far, rng: crate::rig::Rng::new() };
            pair.moves_some(200);
            let spread = pair.spread();
            let good = spread.iter().enumerate().all(|(i, n)| (*n > 0) == (i != bad % 3));
            assert!(good, "{call} on fake{bad}: {spread:?}");
            fake.set(&format!("fake{bad}.fail.{}=off", call.split('=').next().unwrap()));
            drop(pair);
            fake.is_empty();
        }
    }
}

/// Whoever listens everywhere is found where its rails are.
#[test]
fn an_engine_that_listens_on_any_address_names_those_of_its_rails() {
    let fake = alone!(2, "");
    let c = Config { listen_ip: "0.0.0.0".into(), ..config("a", &nics(0..2)) };
    let e = Engine::new(c).unwrap();
    let all = e.info().listen;
    let (first, second) = all.split_once(',').unwrap();
    let port = first.strip_prefix("10.1.0.1:").unwrap();
    assert_eq!(second, format!("10.1.1.1:{port}"), "{all}");
    drop(e);
    fake.is_empty();
}
