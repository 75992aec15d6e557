//! Whole handshakes between two machines.

use crate::body::{acceptor, converse, dialer, ACCEPTOR, DIALER, SECRET};
use kvrail::host::handshake::{
    dial_wins, Acceptor, AcceptorParams, Dialer, DialerParams, Fault, Step, Version, MAX_READ, WIRE,
};
use kvrail::status::Status;

/// An end without anything between.
fn plain(dialer: Dialer, acceptor: Acceptor, chunk: usize) -> crate::body::End {
    converse(dialer, acceptor, chunk, &mut |_, _| ())
}

/// The messages of a good handshake, as sent.
fn transcript() -> Vec<Vec<u8>> {
    let mut said = vec![Vec::new(); 6];
    let end = converse(dialer(SECRET, 3), acceptor(SECRET, 4), MAX_READ, &mut |n, bytes| {
        said[n] = bytes.clone();
    });
    end.check(None);
    said
}

/// Two machines up to where both await READY.
fn proven() -> (Dialer, Acceptor) {
    let (mut d, mut a) = (dialer(SECRET, 3), acceptor(SECRET, 4));
    let hello = d.start().unwrap();
    let Ok(Step::Send(challenge)) = a.receive(&hello) else { panic!("CHALLENGE") };
    let Ok(Step::Send(proof)) = d.receive(&challenge) else { panic!("PROOF") };
    assert!(matches!(a.receive(&proof), Ok(Step::Decide { attempt: 7, .. })));
    let welcome = a.accept(b"acceptor offer").unwrap();
    assert!(matches!(d.receive(&welcome), Ok(Step::Proven { .. })));
    (d, a)
}

#[test]
fn both_sides_are_done_whatever_the_pieces() {
    for chunk in [1, 2, 3, 7, 64, MAX_READ] {
        plain(dialer(SECRET, 3), acceptor(SECRET, 4), chunk).check(None);
    }
}

#[test]
fn the_secret_never_crosses_the_wire() {
    for message in transcript() {
        assert!(!message.windows(8).any(|w| w == &SECRET[..8]));
    }
}

#[test]
fn a_changed_byte_anywhere_ends_the_dial() {
    for (n, message) in transcript().iter().enumerate() {
        for at in 0..message.len() {
            for flip in [1, 0x80, 0xff] {
                let end =
                    converse(dialer(SECRET, 3), acceptor(SECRET, 4), MAX_READ, &mut |i, bytes| {
                        if i == n {
                            bytes[at] ^= flip;
                        }
                    });
                end.check(Some(n));
            }
        }
    }
}

#[test]
fn a_wrong_secret_is_refused_and_the_other_side_is_told() {
    let end = plain(dialer([1; 32], 3), acceptor(SECRET, 4), MAX_READ);
    assert!(end.dialer.is_none() && end.acceptor.is_none());
    let (d, a) = (end.dialer_error.unwrap(), end.acceptor_error.unwrap());
    assert_eq!((d.status, a.status), (Status::Refused, Status::Refused));
    for text in ["dial 7", &"11".repeat(16), &"22".repeat(16)] {
        assert!(d.message.contains(text) && a.message.contains(text), "{d} / {a}");
    }
    assert!(d.message.contains("different secrets") && a.message.contains("the peer refused"));
}

#[test]
fn a_restarted_agent_refuses_the_old_incarnation_with_both() {
    let restarted = || {
        Acceptor::new(AcceptorParams {
            incarnation: [0x33; 16],
            secret: SECRET,
            ..AcceptorParams::default()
        })
    };
    let end = plain(dialer(SECRET, 3), restarted(), MAX_READ);
    assert!(end.dialer.is_none() && end.acceptor.is_none());
    for e in [end.dialer_error.unwrap(), end.acceptor_error.unwrap()] {
        assert_eq!(e.status, Status::Refused);
        assert!(
            e.message.contains(&"22".repeat(16)) && e.message.contains(&"33".repeat(16)),
            "{e}"
        );
    }
    let mut a = restarted();
    a.receive(&dialer(SECRET, 3).start().unwrap()).unwrap_err();
    assert_eq!(a.fault(), Some(Fault::Incarnation));
}

#[test]
fn an_agent_that_dials_itself_is_refused() {
    let mut d = Dialer::new(DialerParams {
        name: b"n".to_vec(),
        incarnation: ACCEPTOR,
        wanted: ACCEPTOR,
        secret: SECRET,
        ..DialerParams::default()
    });
    let mut a = acceptor(SECRET, 4);
    let e = a.receive(&d.start().unwrap()).unwrap_err();
    assert_eq!(a.fault(), Some(Fault::Incarnation));
    assert!(e.message.contains("dialled itself"), "{e}");
}

#[test]
fn a_recorded_session_does_not_work_again() {
    let said = transcript();
    let mut a = acceptor(SECRET, 5);
    a.receive(&said[0]).unwrap();
    a.receive(&said[2]).unwrap_err();
    assert_eq!(a.fault(), Some(Fault::Proof));
    let mut d = dialer(SECRET, 5);
    d.start().unwrap();
    d.receive(&said[1]).unwrap_err();
    assert_eq!(d.fault(), Some(Fault::Proof));
}

#[test]
fn messages_behind_ready_are_handed_back() {
    let (mut d, mut a) = proven();
    let mut from_d = d.ready(6).unwrap();
    assert_eq!(a.receive(&from_d[..3]).unwrap(), Step::More);
    from_d.drain(..3);
    assert_eq!(a.receive(&from_d).unwrap(), Step::More, "not before our own");
    let mut from_a = a.ready(4).unwrap();
    assert_eq!(a.receive(&[]).unwrap(), Step::Done { rails: 6, leftover: Vec::new() });
    // The acceptor is done and speaks at once, more than a frame.
    let words = vec![0x5a; 100_000];
    from_a.extend(&words);
    assert_eq!(d.receive(&from_a).unwrap(), Step::Done { rails: 4, leftover: words });
    assert_eq!(d.receive(&[]).unwrap(), Step::More);
    assert_eq!(d.receive(b"more").unwrap(), Step::Done { rails: 4, leftover: b"more".to_vec() });
    assert_eq!((d.closed(), a.closed()), (None, None));
    assert_eq!(d.refuse(Status::Busy, "too late"), [0; 0]);
}

#[test]
fn nothing_may_follow_ready_before_ours() {
    let (mut d, mut a) = proven();
    let mut bytes = d.ready(6).unwrap();
    bytes.push(0);
    a.receive(&bytes).unwrap_err();
    assert_eq!(a.fault(), Some(Fault::Order));
}

#[test]
fn a_rail_that_does_not_work_is_told_before_ready_only() {
    let (mut d, mut a) = proven();
    d.ready(6).unwrap();
    let bytes = a.refuse(Status::Permission, "kernel.yama.ptrace_scope is 2");
    let e = d.receive(&bytes).unwrap_err();
    assert_eq!((d.fault(), e.status), (Some(Fault::Peer), Status::Permission));
    assert!(e.message.contains("ptrace_scope is 2"), "{e}");

    // After READY the peer would take it for a message.
    let (mut d, mut a) = proven();
    a.ready(4).unwrap();
    d.ready(6).unwrap();
    assert_eq!(a.refuse(Status::Busy, "late"), [0; 0]);
    assert_eq!((a.fault(), a.receive(&[]).unwrap_err().status), (Some(Fault::Own), Status::Busy));
    d.receive(&[0; 50]).unwrap_err();
    assert_eq!(d.farewell(), [0; 0]);
}

#[test]
fn a_refused_dialler_learns_status_and_text() {
    let (mut d, mut a) = (dialer(SECRET, 3), acceptor(SECRET, 4));
    let Ok(Step::Send(challenge)) = a.receive(&d.start().unwrap()) else { panic!("CHALLENGE") };
    let Ok(Step::Send(proof)) = d.receive(&challenge) else { panic!("PROOF") };
    let Ok(Step::Decide { name, incarnation, attempt, offer }) = a.receive(&proof) else {
        panic!("DECIDE")
    };
    assert_eq!((name, incarnation, attempt), (b"decode-0".to_vec(), DIALER, 7));
    assert_eq!(offer, b"dialler offer");
    let e = d.receive(&a.refuse(Status::Capacity, "max_peers is 1")).unwrap_err();
    assert_eq!((e.status, d.fault()), (Status::Capacity, Some(Fault::Peer)));
    assert!(e.message.contains("max_peers is 1"), "{e}");
    assert_eq!(a.fault(), Some(Fault::Own));
    assert_eq!(a.accept(b"").unwrap_err().status, Status::Capacity, "no way back");
    assert_eq!(d.receive(&[]).unwrap_err(), e, "it stays ended");
}

#[test]
fn frames_out_of_order_are_refused() {
    let said = transcript();
    // Any message of the dialler but the one that is due, at each stage of the acceptor.
    for stage in [0usize, 2] {
        for wrong in [0, 2, 4] {
            if wrong == stage || (stage == 2 && wrong == 0) {
                continue;
            }
            let mut a = acceptor(SECRET, 4);
            let head = if stage == 0 { said[0][..8].to_vec() } else { said[0].clone() };
            a.receive(&head).unwrap();
            a.receive(&said[wrong]).unwrap_err();
            assert_eq!(a.fault(), Some(Fault::Order), "{wrong} at {stage}");
        }
    }
    // A dialler that does not wait for the answer.
    let mut a = acceptor(SECRET, 4);
    let both = [said[0].clone(), said[2].clone()].concat();
    a.receive(&both).unwrap_err();
    assert_eq!(a.fault(), Some(Fault::Order));
    let mut d = dialer(SECRET, 3);
    d.start().unwrap();
    d.receive(&[said[1].clone(), said[3].clone()].concat()).unwrap_err();
    assert_eq!(d.fault(), Some(Fault::Order));
    let mut d = dialer(SECRET, 3);
    d.receive(&said[1]).unwrap_err();
    assert_eq!(d.fault(), Some(Fault::Order), "before start");
}

#[test]
fn something_else_on_the_port_gets_no_answer() {
    let mut a = acceptor(SECRET, 4);
    let e = a.receive(b"GET / HTTP/1.1\r\n").unwrap_err();
    assert_eq!(a.fault(), Some(Fault::Foreign));
    assert!(e.message.contains("47455420") && e.message.contains("GET "), "{e}");
    assert_eq!(a.farewell(), [0; 0]);
    let mut d = dialer(SECRET, 3);
    d.start().unwrap();
    d.receive(b"S").unwrap_err();
    assert_eq!(d.fault(), Some(Fault::Foreign), "at the first byte");
}

#[test]
fn versions_meet_at_the_smaller_minor_and_differ_by_major() {
    let dial = |version| {
        Dialer::new(DialerParams {
            name: b"decode-0".to_vec(),
            incarnation: DIALER,
            wanted: ACCEPTOR,
            secret: SECRET,
            attempt: 7,
            offer: b"dialler offer".to_vec(),
            version,
            ..DialerParams::default()
        })
    };
    let accept = |version| {
        Acceptor::new(AcceptorParams {
            incarnation: ACCEPTOR,
            secret: SECRET,
            version,
            ..AcceptorParams::default()
        })
    };
    let newer = Version { minor: WIRE.minor + 3, ..WIRE };
    let other = Version { major: WIRE.major + 1, ..WIRE };
    for (d, a) in [(newer, WIRE), (WIRE, newer), (newer, newer)] {
        plain(dial(d), accept(a), 5).check(None);
    }
    let mut a = accept(newer);
    a.receive(&dial(WIRE).start().unwrap()).unwrap();
    assert_eq!(a.minor(), Some(WIRE.minor));
    for (d, a) in [(other, WIRE), (WIRE, other)] {
        let end = plain(dial(d), accept(a), MAX_READ);
        assert!(end.dialer.is_none() && end.acceptor.is_none());
        for e in [end.dialer_error.unwrap(), end.acceptor_error.unwrap()] {
            assert_eq!(e.status, Status::Refused);
            let (d, a) = (d.to_string(), a.to_string());
            assert!(e.message.contains(&d) && e.message.contains(&a), "{e}");
        }
    }
}

#[test]
fn a_connection_that_ends_early_says_what_was_due() {
    let (mut d, mut a) = (dialer(SECRET, 3), acceptor(SECRET, 4));
    assert!(a.closed().unwrap().message.contains("HELLO was due"));
    d.start().unwrap();
    let e = d.closed().unwrap();
    assert_eq!((e.status, d.fault()), (Status::Disconnected, Some(Fault::Closed)));
    assert!(e.message.contains("dial 7") && e.message.contains("CHALLENGE was due"), "{e}");
    assert_eq!(d.farewell(), [0; 0]);
    let (mut d, mut a) = proven();
    for e in [d.closed().unwrap(), a.closed().unwrap()] {
        assert!(e.message.contains("READY was due"), "{e}");
    }
}

#[test]
fn a_call_that_is_not_due_is_an_error_and_changes_nothing() {
    let (mut d, mut a) = (dialer(SECRET, 3), acceptor(SECRET, 4));
    assert_eq!(a.accept(b"").unwrap_err().status, Status::Invalid);
    assert_eq!(a.ready(4).unwrap_err().status, Status::Invalid);
    assert_eq!(d.ready(6).unwrap_err().status, Status::Invalid);
    plain(d, a, 9).check(None);
    let (mut d, mut a) = proven();
    assert_eq!(a.accept(b"").unwrap_err().status, Status::Invalid);
    d.ready(6).unwrap();
    assert_eq!(d.ready(6).unwrap_err().status, Status::Invalid, "twice");
    assert_eq!(d.start().unwrap(), [0; 0]);

    let long = DialerParams { name: vec![b'n'; 256], ..DialerParams::default() };
    let mut d = Dialer::new(long);
    let e = d.start().unwrap_err();
    assert!(
        e.status == Status::Invalid && e.message.contains("256 bytes; allowed: 1 to 255"),
        "{e}"
    );
    assert_eq!(d.farewell(), [0; 0], "nobody to tell");
    let offer =
        DialerParams { name: b"n".to_vec(), offer: vec![0; 2049], ..DialerParams::default() };
    assert_eq!(Dialer::new(offer).start().unwrap_err().status, Status::Invalid);
}

#[test]
fn of_two_dials_one_wins() {
    let (low, high) = ([1; 16], [2; 16]);
    assert!(dial_wins(&low, &high) && !dial_wins(&high, &low));
    assert!(!dial_wins(&low, &low), "nobody dials itself");
    // The first byte counts most, on both sides alike.
    let (mut a, mut b) = ([0; 16], [0; 16]);
    (a[0], b[15]) = (1, 255);
    assert!(dial_wins(&b, &a) && !dial_wins(&a, &b));
}
