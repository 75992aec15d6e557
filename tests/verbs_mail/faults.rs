//! Proofs, epochs, who is named by `poll`, and what a peer or a provider may do wrong.

use crate::rig::{post, setup, Rig};
use crate::wire;
use kvrail::nic::verbs::mail::{vendor, MailError, MailSetup, MAIL_BUFFER, MAIL_BYTES};
use kvrail::nic::{Closed, Link, Net};
use rdma_core_sys::*;

const FLUSHED: Closed = Closed { vendor: IBV_WC_WR_FLUSH_ERR };

#[test]
fn a_proof_takes_both_cookies_and_the_leader_goes_first() {
    let mut rig = Rig::new(1, 1);
    assert_eq!(rig.post[0].proof(0, 0), None);
    rig.connect(0, 0);
    assert_eq!(wire::facts().frames, 1);
    // Nothing is sent before the proof.
    let mut links = [rig.post[0].link(0, 0), rig.post[1].link(0, 0)];
    assert_eq!(links[1].send(&[b"early"]), Ok(0));
    wire::run();
    assert_eq!(rig.ready(0), []);
    assert_eq!(rig.post[0].proof(0, 0), None);
    assert_eq!(rig.ready(1), []);
    assert_eq!(wire::facts().frames, 2);
    assert_eq!(rig.post[1].proof(0, 0), None);
    wire::run();
    assert_eq!(rig.ready(1), []);
    assert_eq!(rig.post[1].proof(0, 0), Some(true));
    assert_eq!(rig.post[0].proof(0, 0), None);
    assert_eq!(rig.ready(0), []);
    assert_eq!(rig.post[0].proof(0, 0), Some(true));
    assert_eq!(links[1].send(&[b"now"]), Ok(3));
    assert_eq!(wire::facts().starved, 0);
    rig.post[0].close(0, 0);
    assert_eq!(rig.post[0].proof(0, 0), None);
}

#[test]
fn a_proof_fills_its_buffer() {
    let mut rig = Rig::new(1, 1);
    let qps = rig.qps(0);
    wire::tamper(wire::number(qps[0]), |frame| assert_eq!(frame.len(), MAIL_BUFFER));
    wire::tamper(wire::number(qps[1]), |frame| assert_eq!(frame.len(), MAIL_BUFFER));
    for side in [1, 0] {
        // SAFETY: the model's queue pairs and the memory live on; one thread.
        unsafe { rig.post[side].connect(0, 0, &setup(qps[side], side)) }.unwrap();
    }
    rig.quiet();
    rig.quiet();
    assert_eq!(rig.post[1].proof(0, 0), Some(true));
}

#[test]
fn another_cookie_proves_nothing() {
    let mut rig = Rig::new(1, 1);
    let qps = rig.qps(0);
    let mut other = setup(qps[0], 0);
    other.cookie[15] ^= 1;
    // SAFETY: the model's queue pairs and the memory live on; one thread.
    unsafe { rig.post[1].connect(0, 0, &setup(qps[1], 1)) }.unwrap();
    // SAFETY: the model's queue pairs and the memory live on; one thread.
    unsafe { rig.post[0].connect(0, 0, &other) }.unwrap();
    rig.quiet();
    assert_eq!(rig.post[1].proof(0, 0), Some(false));
    assert_eq!(rig.ready(1), [0]);
    let mut link = rig.post[1].link(0, 0);
    let why = Closed { vendor: vendor::COOKIE };
    assert_eq!(link.receive(&mut [0; 4]), Err(why));
    assert_eq!(link.send(&[b"x"]), Err(why));
    // It was not answered.
    assert_eq!(wire::facts().frames, 1);
}

#[test]
fn a_proof_that_cannot_be_sent_says_no() {
    let mut rig = Rig::new(1, 1);
    let qps = rig.connect(0, 0);
    wire::fail(qps[0], IBV_WC_RETRY_EXC_ERR);
    assert_eq!((rig.ready(0), rig.ready(1)), (vec![0], vec![0]));
    assert_eq!(rig.post[0].proof(0, 0), Some(false));
    assert_eq!(rig.post[1].proof(0, 0), Some(false));
    let end = Err(Closed { vendor: IBV_WC_RETRY_EXC_ERR });
    assert_eq!(rig.post[0].link(0, 0).receive(&mut [0]), end);
}

/// What a peer must not send, on the way from side 0 to side 1.
#[test]
fn frames_outside_the_protocol_break_the_link() {
    let first: [fn(&mut Vec<u8>); 3] = [
        // Data or credits before the proof; a proof that is too short.
        |f| f[3] = 2,
        |f| {
            f.truncate(8);
            f[..4].copy_from_slice(&[0, 0, 0, 3]);
        },
        |f| {
            f.truncate(24);
            f[..2].copy_from_slice(&[16, 0]);
        },
    ];
    for (i, how) in first.into_iter().enumerate() {
        let mut rig = Rig::new(1, 1);
        let qps = rig.connect(0, 0);
        wire::tamper(qps[0], how);
        rig.quiet();
        assert_eq!(rig.post[1].proof(0, 0), Some(false), "first {i}");
        let end = Err(Closed { vendor: vendor::FRAME });
        assert_eq!(rig.post[1].link(0, 0).receive(&mut [0]), end, "first {i}");
    }
    let later: [fn(&mut Vec<u8>); 8] = [
        |f| f.truncate(7),
        |f| f.truncate(8),
        |f| f[0] += 1,
        |f| f[0] -= 1,
        // More credits than this side ever used; a frame lost, repeated, of no kind.
        |f| f[2] = 17,
        |f| f[4] += 1,
        |f| f[3] = 0,
        // A credit frame with bytes.
        |f| f[3] = 3,
    ];
    for (i, how) in later.into_iter().enumerate() {
        breaks_later(&format!("later {i}"), false, how);
        breaks_later(&format!("again {i}"), true, how);
    }
    // A data frame of nothing; a second proof.
    breaks_later("empty", false, |f| {
        f.truncate(8);
        f[..2].copy_from_slice(&[0, 0]);
    });
    breaks_later("proof", false, |f| {
        f[3] = 1;
        f.truncate(8);
        f.extend_from_slice(&crate::rig::A);
        f.resize(MAIL_BUFFER, 0);
        f[..2].copy_from_slice(&((MAIL_BUFFER - 8) as u16).to_le_bytes());
    });
}

fn breaks_later(what: &str, again: bool, how: fn(&mut Vec<u8>)) {
    let mut rig = Rig::new(1, 1);
    let qps = rig.up(0, 0);
    let mut links = [rig.post[0].link(0, 0), rig.post[1].link(0, 0)];
    assert_eq!(links[0].send(&[b"good"]), Ok(4));
    rig.quiet();
    wire::tamper(qps[0], how);
    assert_eq!(links[0].send(&[b"bad"]), Ok(3));
    if again {
        // Not even a good one that takes its place counts.
        wire::tamper(qps[0], |f| f[4] = 2);
    }
    assert_eq!(links[0].send(&[b"after"]), Ok(5));
    rig.quiet();
    let (mut into, end) = ([0; 16], Err(Closed { vendor: vendor::FRAME }));
    assert_eq!(rig.ready(1), [0]);
    assert_eq!(links[1].receive(&mut into), Ok(4), "{what}");
    assert_eq!(&into[..4], b"good");
    assert_eq!(links[1].receive(&mut into), end, "{what}");
    assert_eq!(rig.post[1].proof(0, 0), Some(false));
}

#[test]
fn a_peer_is_named_until_all_is_read_and_a_broken_one_until_it_is_closed() {
    let mut rig = Rig::new(4, 2);
    let qps = rig.up(1, 1);
    rig.up(3, 0);
    assert_eq!((rig.ready(0), rig.ready(1)), (vec![], vec![]));
    assert!(!rig.post[1].is_pending());
    assert_eq!(rig.post[0].link(1, 1).send(&[b"abc"]), Ok(3));
    assert_eq!(rig.post[0].link(3, 0).send(&[b"d"]), Ok(1));
    assert_eq!(rig.ready(1), []);
    wire::run();
    // Lane 0 is looked at first.
    assert_eq!(rig.ready(1), [3, 1]);
    assert!(rig.post[1].is_pending());
    let mut links = [rig.post[1].link(1, 1), rig.post[1].link(3, 0)];
    let mut into = [0; 2];
    assert_eq!(links[0].receive(&mut into), Ok(2));
    assert_eq!(rig.ready(1), [3, 1]);
    // In turn, when the caller has room for one only.
    let mut one = [9];
    for expected in [3, 1, 3] {
        assert_eq!((rig.post[1].ready(&mut one), one[0]), (1, expected));
    }
    assert_eq!(links[1].receive(&mut into), Ok(1));
    assert_eq!(rig.ready(1), [1]);
    assert_eq!(links[0].receive(&mut into), Ok(1));
    assert_eq!(rig.ready(1), []);
    assert!(!rig.post[1].is_pending());
    wire::fail(qps[0], IBV_WC_RETRY_EXC_ERR);
    for _ in 0..3 {
        assert_eq!(rig.ready(1), [1]);
        assert_eq!(links[0].receive(&mut into), Err(FLUSHED));
    }
    rig.post[1].close(1, 1);
    assert_eq!(rig.ready(1), []);
    assert_eq!(links[0].receive(&mut into), Err(Closed { vendor: vendor::CLOSED }));
    assert_eq!(links[0].send(&[b"x"]), Err(Closed { vendor: vendor::CLOSED }));
    // The other peer is as it was.
    assert_eq!(rig.post[1].proof(3, 0), Some(true));
}

#[test]
fn a_peer_with_bytes_on_two_lanes_is_named_once() {
    let mut rig = Rig::new(2, 2);
    rig.up(1, 0);
    rig.up(1, 1);
    for lane in 0..2 {
        assert_eq!(rig.post[0].link(1, lane).send(&[b"x"]), Ok(1));
    }
    wire::run();
    assert_eq!(rig.ready(1), [1]);
    assert_eq!(rig.post[1].link(1, 0).receive(&mut [0; 4]), Ok(1));
    assert_eq!(rig.ready(1), [1]);
    assert_eq!(rig.post[1].link(1, 1).receive(&mut [0; 4]), Ok(1));
    assert_eq!(rig.ready(1), []);
}

#[test]
fn completions_of_a_closed_mailbox_do_not_reach_the_next_one() {
    let mut rig = Rig::new(1, 1);
    let old = rig.up(0, 0);
    let mut stale = rig.post[1].link(0, 0);
    assert_eq!(rig.post[0].link(0, 0).send(&[b"old"]), Ok(3));
    wire::run();
    wire::fail(old[0], IBV_WC_RETRY_EXC_ERR);
    // Neither side has looked yet: a good completion and flushed ones are waiting.
    assert!(wire::backlog().1 > 30);
    rig.post[0].close(0, 0);
    rig.post[1].close(0, 0);
    rig.up(0, 0);
    assert_eq!((rig.ready(0), rig.ready(1)), (vec![], vec![]));
    assert_eq!(stale.receive(&mut [0; 8]), Err(Closed { vendor: vendor::CLOSED }));
    assert_eq!(stale.send(&[b"x"]), Err(Closed { vendor: vendor::CLOSED }));
    assert_eq!(rig.post[0].link(0, 0).send(&[b"new"]), Ok(3));
    rig.quiet();
    let mut into = [0; 8];
    assert_eq!(rig.post[1].link(0, 0).receive(&mut into), Ok(3));
    assert_eq!(&into[..3], b"new");
    // Closed and not opened again: late ones are nobody's.
    wire::fail(old[0] + 2, IBV_WC_RETRY_EXC_ERR);
    rig.post[0].close(0, 0);
    assert_eq!(rig.ready(0), []);
    assert_eq!(rig.post[0].proof(0, 0), None);
}

/// A completion's id: `mailbox 32 | epoch 16 | receive 8 | buffer 8`.
#[test]
fn completions_of_nobody_change_nothing() {
    let mut rig = Rig::new(2, 2);
    let qps = rig.up(0, 0);
    rig.up(0, 1);
    let mut links = [rig.post[0].link(0, 0), rig.post[1].link(0, 0)];
    assert_eq!(links[0].send(&[b"abc"]), Ok(3));
    rig.quiet();
    let receive = 0x100;
    // The buffer of `abc`, once more; one that does not exist; a send that was not made; another
    // lane's mailbox; one that was never opened; one that does not exist.
    wire::forge(qps[1], receive | 1, IBV_WC_SUCCESS);
    wire::forge(qps[1], receive | 16, IBV_WC_SUCCESS);
    wire::forge(qps[1], receive | 255, IBV_WC_SUCCESS);
    wire::forge(qps[1], 9, IBV_WC_SUCCESS);
    wire::forge(qps[1], 1 << 32, IBV_WC_GENERAL_ERR);
    wire::forge(qps[1], 2 << 32, IBV_WC_GENERAL_ERR);
    wire::forge(qps[1], 4 << 32, IBV_WC_GENERAL_ERR);
    wire::forge(qps[1], u64::MAX, IBV_WC_GENERAL_ERR);
    let mut into = [0; 99];
    assert_eq!(rig.ready(1), [0]);
    assert_eq!(links[1].receive(&mut into), Ok(3));
    for _ in 0..100 {
        assert_eq!(links[1].send(&[b"defg"]), Ok(4));
        rig.quiet();
        assert_eq!(links[0].receive(&mut into), Ok(4));
        rig.quiet();
    }
    assert_eq!((rig.ready(0), rig.ready(1)), (vec![], vec![]));
    // Not even a broken one that was never opened.
    rig.up(1, 0);
    assert_eq!(rig.post[1].proof(0, 1), Some(true));
    assert_eq!(wire::facts().starved, 0);
}

#[test]
fn one_call_takes_a_bounded_number_and_says_that_more_is_left() {
    let mut rig = Rig::new(8, 1);
    let qps: Vec<usize> = (0..8).map(|peer| rig.up(peer, 0)[1]).collect();
    for &qp in &qps {
        wire::fail(qp, IBV_WC_RETRY_EXC_ERR);
    }
    let all = wire::backlog().1;
    assert_eq!(rig.post[1].poll(&mut []), 0);
    assert_eq!(wire::backlog().1, all - 64);
    assert!(rig.post[1].is_pending());
    for _ in 0..3 {
        rig.ready(1);
    }
    assert_eq!(rig.ready(1).len(), 8);
    for peer in 0..8 {
        rig.post[1].close(peer, 0);
    }
    assert_eq!(rig.ready(1), []);
    assert!(!rig.post[1].is_pending());
}

#[test]
fn completions_left_behind_are_pending_even_if_nobody_is_named() {
    let mut rig = Rig::new(8, 1);
    let qps: Vec<usize> = (0..8).map(|peer| rig.up(peer, 0)[1]).collect();
    for (peer, &qp) in qps.iter().enumerate() {
        wire::fail(qp, IBV_WC_RETRY_EXC_ERR);
        rig.post[1].close(peer as u32, 0);
    }
    assert_eq!(rig.ready(1), []);
    assert!(rig.post[1].is_pending());
    rig.ready(1);
    rig.ready(1);
    assert!(!rig.post[1].is_pending());
}

#[test]
fn a_broken_completion_queue_breaks_the_mailboxes_of_its_lane() {
    let mut rig = Rig::new(3, 1);
    rig.up(0, 0);
    rig.up(2, 0);
    wire::limit(|l| l.poll_fails = true);
    assert_eq!(rig.ready(0), [0, 2]);
    assert_eq!(rig.post[0].proof(2, 0), Some(false));
    let end = Err(Closed { vendor: vendor::QUEUE });
    assert_eq!(rig.post[0].link(2, 0).receive(&mut [0]), end);
    assert_eq!(rig.ready(0), [0, 2]);
    rig.post[0].close(0, 0);
    rig.post[0].close(2, 0);
    let qp = rig.qps(0)[0];
    // SAFETY: the model's queue pairs and the memory live on; one thread.
    let again = unsafe { rig.post[0].connect(0, 0, &setup(qp, 0)) };
    assert_eq!(again, Err(MailError::NoLane(0)));
    assert_eq!(rig.ready(0), []);
}

#[test]
fn arming_asks_for_any_completion_and_failing_to_keeps_awake() {
    let mut rig = Rig::new(1, 2);
    rig.post[0].arm();
    assert_eq!(wire::facts().armed, 2);
    assert!(!rig.post[0].is_pending());
    wire::limit(|l| l.arm_fails = true);
    Net::arm(&mut rig.post[0]);
    assert!(rig.post[0].is_pending());
    // A lane without a queue is left alone.
    post(1, 1).arm();
}

#[test]
fn a_work_request_that_the_provider_refuses_breaks_the_link() {
    let mut rig = Rig::new(1, 1);
    rig.up(0, 0);
    let mut links = [rig.post[0].link(0, 0), rig.post[1].link(0, 0)];
    let end = Err(Closed { vendor: vendor::POST | 12 });
    assert_eq!(links[0].send(&[b"abc"]), Ok(3));
    rig.quiet();
    wire::limit(|l| l.receives = 0);
    // The bytes come first; the receive could not be posted again.
    assert_eq!(links[1].receive(&mut [0; 9]), Ok(3));
    assert_eq!(rig.ready(1), [0]);
    assert_eq!(links[1].receive(&mut [0; 9]), end.map(|()| 0));
    assert_eq!(rig.post[1].proof(0, 0), Some(false));
    wire::limit(|l| l.sends = 1);
    assert_eq!(links[0].send(&[&[1; 10_000]]), Ok(MAIL_BUFFER - 8));
    assert_eq!(links[0].send(&[b"x"]), end.map(|()| 0));
}

#[test]
fn a_mailbox_is_refused_what_it_cannot_work_with() {
    let mut rig = Rig::new(2, 1);
    let [qp, _] = rig.qps(0);
    let good = setup(qp, 0);
    let unknown = |peer, lane| MailError::Unknown { peer, lane, lanes: 1 };
    let mut connect =
        // SAFETY: the model's queue pairs and the memory live on; one thread.
        |peer, lane, setup: &MailSetup| unsafe { rig.post[0].connect(peer, lane, setup) };
    assert_eq!(connect(2, 0, &good), Err(unknown(2, 0)));
    assert_eq!(connect(0, 1, &good), Err(unknown(0, 1)));
    let mut short = good;
    short.len -= 1;
    assert_eq!(connect(0, 0, &short), Err(MailError::Memory(MAIL_BYTES - 1)));
    wire::limit(|l| l.receives = 7);
    let refused = |call| Err(MailError::Post { call, errno: 12 });
    assert_eq!(connect(0, 0, &good), refused("ibv_post_recv"));
    wire::limit(|l| (l.receives, l.sends) = (99, 0));
    let [qp, _] = rig.wire.pair([0, 1]);
    assert_eq!(connect(0, 0, &setup(qp, 0)), refused("ibv_post_send"));
    wire::limit(|l| l.sends = 9);
    let [qp, _] = rig.wire.pair([0, 1]);
    // The failed ones left it closed.
    assert_eq!(connect(0, 0, &setup(qp, 0)), Ok(()));
    assert_eq!(connect(0, 0, &setup(qp, 0)), Err(MailError::Busy));
    let text = MailError::Memory(7).to_string();
    assert!(text.contains("7 bytes") && text.contains(&MAIL_BYTES.to_string()), "{text}");
    assert_eq!(rig.post[0].link(9, 0).send(&[b"x"]), Err(Closed { vendor: vendor::CLOSED }));
    assert_eq!(rig.post[0].proof(9, 0), None);
    rig.post[0].close(9, 9);
}
