//! Tests that need the insides: cheats, newer builds, memory. Whole sessions are in `tests/blob`.

use super::frame::{fields, frame, greeting, refuse, Kind, GREETING, HEADER};
use super::session::{self, Session};
use super::*;

const SECRET: [u8; 32] = [7; 32];
const ME: [u8; 16] = [1; 16];
const YOU: [u8; 16] = [2; 16];

fn acceptor() -> Acceptor {
    Acceptor::new(AcceptorParams {
        incarnation: YOU,
        secret: SECRET,
        nonce: [9; 32],
        version: WIRE,
    })
}

fn dialer(secret: [u8; 32]) -> Dialer {
    Dialer::new(DialerParams {
        name: b"decode".to_vec(),
        incarnation: ME,
        wanted: YOU,
        secret,
        attempt: 3,
        nonce: [8; 32],
        offer: b"mine".to_vec(),
        version: WIRE,
    })
}

fn hello(extra: &[u8], name: &[u8]) -> Vec<u8> {
    frame(Kind::Hello, |w| {
        w.bytes(&ME).bytes(&YOU).u64(3).bytes(&[8; 32]).u8(name.len() as u8).bytes(name);
        w.bytes(extra);
    })
}

/// A dialler without checks, that speaks `version`: greeting, HELLO with `extra`, and its session.
fn raw_dialer(secret: [u8; 32], version: Version, extra: &[u8]) -> (Session, Vec<u8>) {
    let mut s = Session::new(secret, version, String::new());
    let mut bytes = s.greet();
    let hello = hello(extra, b"decode");
    s.hear(&hello);
    bytes.extend(hello);
    (s, bytes)
}

fn sent(step: Result<Step, Error>) -> Vec<u8> {
    match step {
        Ok(Step::Send(bytes)) => bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_dialler_that_ignores_the_acceptors_proof_is_refused_without_the_secret() {
    for (secret, taken) in [(SECRET, true), ([6; 32], false)] {
        let mut a = acceptor();
        let (mut s, bytes) = raw_dialer(secret, WIRE, b"");
        let answer = sent(a.receive(&bytes));
        s.hear(&answer);
        let proof = s.seal(session::DIALER, Kind::Proof, |w| session::put_offer(w, b"x"));
        let step = a.receive(&proof);
        if taken {
            assert!(matches!(step, Ok(Step::Decide { .. })), "{step:?}");
        } else {
            let e = step.unwrap_err();
            assert_eq!((a.fault(), e.status), (Some(Fault::Proof), Status::Refused));
            assert!(e.message.contains("dial 3 from `decode`"), "{e}");
            assert!(e.message.contains(&"01".repeat(16)) && e.message.contains(&"02".repeat(16)));
            assert!(a.accept(b"").is_err(), "no way on");
            assert!(a.farewell().ends_with(b"on the way"), "the dialler is told");
        }
    }
}

#[test]
fn a_proof_of_one_role_or_step_is_none_for_another() {
    let labels = [
        session::ACCEPTOR,
        session::DIALER,
        session::WELCOME,
        session::DIALER_READY,
        session::ACCEPTOR_READY,
    ];
    for (i, label) in labels.iter().enumerate() {
        for (j, other) in labels.iter().enumerate() {
            assert!(i == j || !label.starts_with(other), "labels are free of prefixes");
            let mut a = Session::new(SECRET, WIRE, String::new());
            let mut b = Session::new(SECRET, WIRE, String::new());
            let bytes = a.seal(label, Kind::Proof, |_| ());
            assert_eq!(b.open(other, Kind::Proof, &bytes).is_ok(), i == j);
        }
    }
}

#[test]
fn a_newer_minor_version_may_add_fields_to_every_frame() {
    let newer = Version { major: WIRE.major, minor: WIRE.minor + 1 };
    // New dialler, this acceptor.
    let mut a = acceptor();
    let (mut s, bytes) = raw_dialer(SECRET, newer, b"new fields");
    let answer = sent(a.receive(&bytes));
    assert_eq!(a.minor(), Some(WIRE.minor));
    s.hear(&answer);
    let proof = s.seal(session::DIALER, Kind::Proof, |w| {
        session::put_offer(w, b"x");
        w.bytes(b"more");
    });
    match a.receive(&proof).unwrap() {
        Step::Decide { name, incarnation, attempt, offer } => {
            assert_eq!((name.as_slice(), incarnation, attempt), (&b"decode"[..], ME, 3));
            assert_eq!(offer, b"x");
        }
        other => panic!("{other:?}"),
    }
    s.hear(&a.accept(b"y").unwrap());
    a.ready(1).unwrap();
    let ready = frame_with_extra(&mut s);
    assert_eq!(a.receive(&ready).unwrap(), Step::Done { rails: 5, leftover: Vec::new() });

    // This dialler, new acceptor.
    let mut d = dialer(SECRET);
    let mut s = Session::new(SECRET, newer, String::new());
    s.hear(&d.start().unwrap());
    let mut answer = s.greet();
    answer.extend(s.seal(session::ACCEPTOR, Kind::Challenge, |w| {
        w.bytes(&YOU).u64(3).bytes(&[9; 32]).bytes(b"new");
    }));
    s.hear(&sent(d.receive(&answer)));
    let welcome = s.seal(session::WELCOME, Kind::Welcome, |w| {
        session::put_offer(w, b"z");
        w.u64(1);
    });
    assert_eq!(d.receive(&welcome).unwrap(), Step::Proven { offer: b"z".to_vec() });
}

fn frame_with_extra(s: &mut Session) -> Vec<u8> {
    s.seal(session::DIALER_READY, Kind::Ready, |w| {
        w.u32(5).bytes(b"extra");
    })
}

#[test]
fn the_answer_must_be_of_this_attempt_and_incarnation() {
    for (incarnation, attempt, fault) in
        [(YOU, 3, None), (YOU, 2, Some(Fault::Attempt)), (ME, 3, Some(Fault::Incarnation))]
    {
        let mut d = dialer(SECRET);
        let mut s = Session::new(SECRET, WIRE, String::new());
        s.hear(&d.start().unwrap());
        let mut answer = s.greet();
        answer.extend(s.seal(session::ACCEPTOR, Kind::Challenge, |w| {
            w.bytes(&incarnation).u64(attempt).bytes(&[9; 32]);
        }));
        assert_eq!(d.receive(&answer).is_ok(), fault.is_none());
        assert_eq!(d.fault(), fault);
    }
}

#[test]
fn an_unproven_peer_makes_us_hold_no_more_than_is_stated() {
    let full = |kind: u8| {
        let mut bytes = u32::try_from(MAX_FRAME).unwrap().to_le_bytes().to_vec();
        bytes.push(kind);
        bytes.resize(HEADER + MAX_FRAME, 0);
        bytes
    };
    let mut most = 0;
    let mut feed = |a: &mut Acceptor, bytes: &[u8], chunk: usize| {
        for part in bytes.chunks(chunk) {
            let end = a.receive(part).is_err();
            most = most.max(a.held());
            if end {
                return;
            }
        }
    };
    for chunk in [1, 7, 4096, MAX_READ, 1 << 20] {
        // The longest HELLO that is not complete, then the longest PROOF after a long name.
        let mut a = acceptor();
        let mut bytes = greeting(WIRE);
        bytes.extend(&full(Kind::Hello as u8)[..HEADER + MAX_FRAME - 1]);
        feed(&mut a, &bytes, chunk);
        assert_eq!(a.fault(), None);

        let mut a = acceptor();
        let mut bytes = greeting(WIRE);
        bytes.extend(hello(&vec![0; MAX_FRAME - 74 - 255], &[b'n'; 255]));
        assert_eq!(bytes.len(), MAX_READ, "the longest legal opening");
        let e = acceptor().receive(&[bytes.as_slice(), &[0]].concat()).unwrap_err();
        assert!(e.message.contains("4109 bytes before an answer was due; allowed: 4108"), "{e}");
        feed(&mut a, &bytes, chunk);
        feed(&mut a, &full(Kind::Proof as u8)[..HEADER + MAX_FRAME - 1], chunk);
        assert_eq!(a.fault(), None);

        // More than that is refused, and lets go of everything.
        feed(&mut a, &vec![0; 1 << 20], chunk);
        assert!(a.fault().is_some());
        feed(&mut acceptor(), &vec![b'K'; 1 << 20], chunk);
    }
    assert!(most > MAX_FRAME, "the test fills a frame: {most}");
    assert!(most <= UNPROVEN_BYTES, "{most} of {UNPROVEN_BYTES}");
}

#[test]
fn lengths_and_types_are_refused_before_the_body_is_there() {
    let long = u32::try_from(MAX_FRAME + 1).unwrap().to_le_bytes();
    let cases: [(&[u8], Fault); 5] = [
        (&[0, 0, 0, 0], Fault::Length),
        (&long, Fault::Length),
        (&[255, 255, 255, 255], Fault::Length),
        (&[9, 0, 0, 0, Kind::Proof as u8], Fault::Order),
        (&[9, 0, 0, 0, 99], Fault::Order),
    ];
    for (bytes, fault) in cases {
        let mut a = acceptor();
        a.receive(&greeting(WIRE)).unwrap();
        a.receive(bytes).unwrap_err();
        assert_eq!(a.fault(), Some(fault), "{bytes:?}");
        let bye = a.farewell();
        assert!(bye.starts_with(&greeting(WIRE)), "greets before it refuses");
        assert_eq!(bye[GREETING + HEADER], Kind::Refuse as u8);
        assert_eq!(a.farewell(), [0; 0], "once");
    }
}

#[test]
fn fields_that_are_cut_or_empty_are_malformed() {
    let whole = hello(b"", b"n");
    for len in 0..whole.len() - HEADER - 1 {
        let mut a = acceptor();
        let body = &whole[HEADER + 1..][..len];
        let mut bytes = greeting(WIRE);
        bytes.extend(frame(Kind::Hello, |w| {
            w.bytes(body);
        }));
        assert!(a.receive(&bytes).is_err());
        assert_eq!(a.fault(), Some(Fault::Malformed), "{len} bytes of HELLO");
    }
    let mut a = acceptor();
    let mut bytes = greeting(WIRE);
    bytes.extend(hello(b"", b""));
    assert!(a
        .receive(&bytes)
        .unwrap_err()
        .message
        .contains("a name of 0 bytes; allowed: 1 to 255"));
}

#[test]
fn an_offer_may_not_run_into_the_proof_or_over_its_limit() {
    for (len, claimed, taken) in
        [(4, 4, true), (4, 5, false), (2048, 2048, true), (2049, 2049, false)]
    {
        let mut a = acceptor();
        let (mut s, bytes) = raw_dialer(SECRET, WIRE, b"");
        s.hear(&sent(a.receive(&bytes)));
        let proof = s.seal(session::DIALER, Kind::Proof, |w| {
            w.u16(claimed).bytes(&vec![0; len]);
        });
        assert_eq!(a.receive(&proof).is_ok(), taken, "{claimed} of {len}");
        assert_eq!(a.fault(), (!taken).then_some(Fault::Malformed));
    }
}

#[test]
fn a_refusal_carries_status_and_text_and_cannot_pose_as_success() {
    let cases = [
        (refuse(Status::Busy, "a dial is under way"), Status::Busy),
        (refuse(Status::Ok, "a dial is under way"), Status::Refused),
        (refuse(Status::InProgress, "a dial is under way"), Status::Refused),
    ];
    for (bytes, status) in cases {
        let mut d = dialer(SECRET);
        d.start().unwrap();
        d.receive(&greeting(WIRE)).unwrap();
        let e = d.receive(&bytes).unwrap_err();
        assert_eq!((e.status, d.fault()), (status, Some(Fault::Peer)));
        assert!(e.message.contains("a dial is under way"), "{e}");
        assert_eq!(d.farewell(), [0; 0], "no answer to a refusal");
    }
    let text = "\u{e9}\n".repeat(4000);
    let long = refuse(Status::Busy, &text);
    assert!(long.len() <= HEADER + 1 + 6 + MAX_REASON);
    let mut r = fields(&long);
    r.bytes(6).unwrap();
    assert!(core::str::from_utf8(r.rest()).is_ok(), "cut between characters");
    let mut d = dialer(SECRET);
    d.start().unwrap();
    d.receive(&greeting(WIRE)).unwrap();
    assert!(!d.receive(&long).unwrap_err().message.contains('\n'), "one line");
}

#[test]
fn debug_output_keeps_the_secret() {
    let blob = crate::host::blob::ConnBlob {
        name: b"n".to_vec(),
        incarnation: ME,
        secret: SECRET,
        addrs: Vec::new(),
        offer: Default::default(),
        max_message: 0,
        rails: Vec::new(),
    };
    let text = format!("{:?} {:?} {blob:?}", acceptor(), dialer(SECRET));
    assert!(!text.contains("7, 7, 7") && !text.contains("0707") && !text.contains("secret"));
}
