//! Handshakes that are driven by hand: what no engine would say.

use std::io::{Read, Write};
use std::net::TcpStream;

use kvrail::host::blob::{ConnBlob, HostOffer};
use kvrail::host::error::Result;
use kvrail::host::handshake::{Dialer, DialerParams, Step, MAX_READ};
use kvrail::host::wire::Writer;
use kvrail::status::Status;

use crate::fake::HANG;
use crate::rejoin::{qps, quick, whole};
use crate::rig::{config, twins, Pair, Side, MIB};

/// An offer as a dialler makes it: of a connection, or to join one; with one NIC, or none.
pub(crate) fn offer(connection: u64, join: bool, nic: bool) -> Vec<u8> {
    let host = HostOffer { boot_id: [1; 16], pid_ns: 1, uid: 1, pid: 1 };
    let mut w = Writer::new();
    let mut record = |kind, body: &[u8]| {
        w.tlv(kind, |w| {
            w.bytes(body);
        });
    };
    record(1, &host.encode());
    record(2, &[0; 4 + 4 + 8 + 16 + 4 + 4 + 4]);
    record(3, &(1u64 << 20).to_le_bytes());
    if nic {
        let mut w = Writer::new();
        w.u8(1).counted(|w| {
            let gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 1, 0, 77];
            w.u8(0).bytes(&[10, 1, 0, 77]).u8(24).bytes(&gid);
            w.u32(4096).u32(1 << 30).u8(16).u8(16).u16(0).u32(100_000);
            w.u32(101).u32(1).u32(102).u32(2).bytes(&[7; 16]).u8(255).u8(16);
        });
        record(4, &w.finish());
    }
    record(5, &connection.to_le_bytes());
    if join {
        record(6, &[9, 0, 0, 0, 0]);
    }
    w.finish()
}

/// Dials `to` by hand under a name. How that ends: the connection, when the other side takes it in.
pub(crate) fn dial(
    to: &Side,
    name: &[u8],
    incarnation: [u8; 16],
    offer: Vec<u8>,
) -> Result<TcpStream> {
    let blob = ConnBlob::decode(to.e.metadata()).unwrap();
    let mut dialer = Dialer::new(DialerParams {
        name: name.to_vec(),
        incarnation,
        wanted: blob.incarnation,
        secret: blob.secret,
        offer,
        ..DialerParams::default()
    });
    let mut socket = TcpStream::connect(blob.addrs[0]).unwrap();
    socket.set_read_timeout(Some(HANG)).unwrap();
    socket.write_all(&dialer.start().unwrap()).unwrap();
    let mut bytes = [0; MAX_READ];
    loop {
        let n = socket.read(&mut bytes).unwrap();
        assert!(n > 0, "closed without a word");
        let mut more: &[u8] = &bytes[..n];
        loop {
            match dialer.receive(more)? {
                Step::More => break,
                Step::Send(answer) => socket.write_all(&answer).unwrap(),
                Step::Proven { .. } => return Ok(socket),
                step => panic!("{step:?}"),
            }
            more = &[];
        }
    }
}

/// A dialler that gave a handshake up, but whose word of it is lost, tries again: what the first
/// one holds must not be in the way, and what comes of it later does nothing.
#[test]
fn a_handshake_makes_way_for_a_newer_one_of_its_peer() {
    let fake = alone!(2, &twins(1));
    let mut c = config("b", "fake1");
    quick(&mut c);
    c.connect_timeout_ms = 20_000;
    let b = Side::new(c, MIB);
    let mut last = None;
    for round in 0..5 {
        let socket = dial(&b, b"a", [9; 16], offer(round, false, true)).unwrap();
        qps(fake, 2);
        if let Some(mut old) = last.replace(socket) {
            // Closed by the other side, with or without a reason before.
            let end: std::io::Result<usize> = old.read_to_end(&mut Vec::new());
            assert!(!end.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock), "still open");
            let _ = old.write_all(&[0; 64]);
        }
        assert_eq!(b.e.info().peers, 1);
    }
    drop(last);
    qps(fake, 0);
    drop(b);
    fake.is_empty();
}

#[test]
fn a_join_of_a_connection_that_is_not_is_refused_as_stale() {
    let fake = alone!(4, &twins(2));
    let mut pair = Pair::twins(2, MIB, quick);
    let before = fake.live();
    let made = fake.get("calls.create_qp");
    let a = ConnBlob::decode(pair.a.e.metadata()).unwrap();
    for (name, who) in [(&b"a"[..], a.incarnation), (b"a", [7; 16]), (b"nobody", [7; 16])] {
        for connection in [0, 1, u64::MAX] {
            let e = dial(&pair.b, name, who, offer(connection, true, false)).unwrap_err();
            assert_eq!(e.status, Status::Stale, "{e}");
        }
    }
    // To the side that dialled nobody joins.
    let b = ConnBlob::decode(pair.b.e.metadata()).unwrap();
    let e = dial(&pair.a, b"b", b.incarnation, offer(3, true, false)).unwrap_err();
    assert_eq!(e.status, Status::Stale, "{e}");
    assert_eq!(fake.get("calls.create_qp"), made);
    assert_eq!((pair.a.e.info().peers, pair.b.e.info().peers), (1, 1));
    whole(&mut pair);
    assert_eq!(fake.live(), before);
    drop(pair);
    fake.is_empty();
}
