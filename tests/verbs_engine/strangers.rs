//! Who must not get in, or not hold anybody up; and what failed connects leave behind: nothing.

use core::net::SocketAddr;
use core::time::Duration;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use kvrail::host::blob::ConnBlob;
use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::status::Status;

use crate::fake::HANG;
use crate::rig::{config, nics, twins, Pair, Rng, Side, MIB};

fn address(e: &Engine) -> SocketAddr {
    e.info().listen.parse().unwrap()
}

#[test]
fn silent_noisy_and_half_open_strangers_hold_nobody_up() {
    let fake = alone!(4, &twins(2));
    let b = Side::new(config("b", &nics(2..4)), MIB);
    let at = address(&b.e);
    let silent = TcpStream::connect(at).unwrap();
    let mut rng = Rng::new();
    // Garbage, from the first byte on or behind a good beginning.
    for round in 0..200u64 {
        let mut socket = TcpStream::connect(at).unwrap();
        let mut bytes: Vec<u8> = (0..rng.below(6000)).map(|_| rng.next() as u8).collect();
        if round % 2 == 0 && bytes.len() > 8 {
            bytes[..8].copy_from_slice(b"KVRB\x01\x00\x00\x00");
        }
        let _ = socket.write_all(&bytes);
    }
    let held: Vec<_> = (0..1000).map(|_| TcpStream::connect(at).unwrap()).collect();
    let limit = 20_000;
    let start = Instant::now();
    let a = Config { connect_timeout_ms: limit, ..config("a", &nics(0..2)) };
    let a = Side::new(a, MIB);
    let (peer, far) = a.meet(&b);
    let mut pair = Pair { a, b, peer, far, rng: Rng::new() };
    pair.moves_some(100);
    pair.a.e.notify(pair.peer, b"hello").unwrap();
    assert_eq!(crate::rig::notifs(&pair.b.e, 1)[0].1, b"hello");
    assert!(start.elapsed() < Duration::from_millis(limit.into()), "a stranger held us up");
    // No more than the limit of unproven connections is kept.
    let mut open = 0;
    for mut socket in held {
        socket.set_nonblocking(true).unwrap();
        let end = socket.read(&mut [0; 64]);
        open += usize::from(end.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock));
    }
    assert!(open <= 128, "{open} half-open connections are kept");
    drop((silent, pair));
    fake.is_empty();
}

/// The blob of `e` with some bytes changed.
pub(crate) fn forged(e: &Engine, change: impl Fn(&mut ConnBlob)) -> Vec<u8> {
    let mut blob = ConnBlob::decode(e.metadata()).unwrap();
    change(&mut blob);
    blob.encode().unwrap()
}

#[test]
fn a_wrong_secret_is_refused_and_leaves_no_queue_pair() {
    let fake = alone!(4, &twins(2));
    let b = Side::new(config("b", &nics(2..4)), MIB);
    let a = Side::new(config("a", &nics(0..2)), MIB);
    let before = fake.live();
    for byte in [0, 13, 31] {
        let blob = forged(&b.e, |blob| blob.secret[byte] ^= 1);
        let peer = a.e.peer_add(&blob, None).unwrap().raw();
        let e = a.e.peer_connect(peer, HANG).unwrap_err();
        assert_eq!(e.status, Status::Refused, "{e}");
        assert_eq!(fake.get("fake2.calls.modify_init"), 0, "the acceptor made rails for it");
        a.e.peer_remove(peer).unwrap();
        fake.settles(&before, "refused");
    }
    let (peer, far) = a.meet(&b);
    let mut pair = Pair { a, b, peer, far, rng: Rng::new() };
    pair.moves_some(20);
    drop(pair);
    fake.is_empty();
}

/// Three engines, all connected, one region each; ended in every order, with regions and peers
/// given back before or not.
#[test]
fn nothing_is_left_in_whatever_order_engines_go() {
    let fake = alone!(6, "");
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for (round, order) in orders.into_iter().enumerate() {
        let name = |i: usize| config(&format!("e{i}"), &nics([2 * i, 2 * i + 1]));
        let mut sides: Vec<_> = (0..3).map(|i| Some(Side::new(name(i), MIB))).collect();
        for i in 0..3 {
            for j in (0..3).filter(|j| *j != i) {
                let (one, other) = (sides[i].as_ref().unwrap(), sides[j].as_ref().unwrap());
                let (peer, far) = one.meet(other);
                if round % 2 == 1 {
                    one.e.notify(peer, &[7; 5000]).unwrap();
                }
                if round % 3 == 1 {
                    one.e.region_forget(far).unwrap();
                }
            }
        }
        for i in order {
            let side = sides[i].take().unwrap();
            if round % 3 == 2 {
                side.e.deregister(side.region, true).unwrap();
            }
            drop(side);
        }
        fake.is_empty();
    }
}
