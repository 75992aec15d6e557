//! Small devices: every limit that one may have, and what an engine makes of it.

use kvrail::host::config::Config;
use kvrail::status::Status;
use kvrail::table::{Desc, Direction};

use crate::rig::{config, finish, nics, notifs, scatter, twins, Pair, Piece, Side, BOTH, MIB};

/// Descriptors of one transfer at the edges of claims and queues.
const COUNTS: [usize; 7] = [1, 63, 64, 65, 127, 128, 129];

fn counts(knobs: &str, tune: impl Fn(&mut Config)) {
    for rails in [1, 2] {
        for width in [0, 1] {
            let mut pair = Pair::twins(rails, 256 << 10, |c| {
                c.stripe_width = width;
                tune(c);
            });
            for n in COUNTS {
                eprintln!("{knobs}, {rails} rails, stripe_width {width}, {n} descriptors");
                pair.moves_some(n);
            }
            // More than any window of frames, at once.
            let texts: Vec<_> = (0..40).map(|i| vec![i; 4000]).collect();
            for text in &texts {
                pair.a.e.notify(pair.peer, text).unwrap();
            }
            let got: Vec<_> = notifs(&pair.b.e, 40).into_iter().map(|(_, t)| t).collect();
            assert_eq!(got, texts);
        }
    }
    let fake = crate::fake::Fake::loaded();
    assert_eq!(fake.get("rnr"), 0, "a message met no receive");
}

#[test]
fn queues_of_any_depth_carry_any_number_of_descriptors() {
    let fake = alone!(4, &twins(2));
    for knobs in ["max_qp_wr=8", "max_qp_wr=64", "max_qp_wr=128", "max_qp_wr=65;*.max_cqe=64"] {
        fake.set(&format!("*.{knobs}"));
        counts(knobs, |_| {});
        fake.set("*.max_qp_wr=4096;*.max_cqe=1M");
    }
    fake.is_empty();
}

#[test]
fn completion_queues_never_overrun() {
    let fake = alone!(4, &(twins(2) + ";*.max_cqe=64"));
    counts("max_cqe 64", |_| {});
    assert_eq!(fake.get("cq_overruns"), 0);
    fake.is_empty();
}

#[test]
fn one_or_four_pieces_in_a_work_request_and_no_inline() {
    let fake = alone!(4, &twins(2));
    for knobs in ["max_sge=1;*.max_sge_rd=1", "max_sge=4", "max_sge_rd=1", "max_inline=0"] {
        fake.set(&format!("*.{knobs}"));
        counts(knobs, |_| {});
        let pair = Pair::twins(1, MIB, |_| {});
        for text in [&b""[..], b"x", &[7; 256], &[8; 5000]] {
            pair.a.e.notify(pair.peer, text).unwrap();
            assert_eq!(crate::rig::notifs(&pair.b.e, 1)[0].1, text);
        }
        fake.set("*.max_sge=16;*.max_sge_rd=16;*.max_inline=64");
    }
    fake.is_empty();
}

/// How many work requests a transfer of neighbours takes: the device's limit of pieces decides.
#[test]
fn remote_neighbours_share_a_work_request_up_to_the_limit_of_pieces() {
    let fake = alone!(2, &twins(1));
    for (sges, want) in [(1, 64), (4, 16), (16, 4)] {
        fake.set(&format!("*.max_sge={sges}"));
        let mut pair = Pair::twins(1, MIB, |c| c.keepalive_ms = 0);
        // Neighbours there, apart here.
        let piece = |i: usize| Piece { here: i * 8192, there: i * 4096, len: 4096 };
        let pieces: Vec<_> = (0..64).map(piece).collect();
        for direction in BOTH {
            let name = if direction == Direction::Read { "wr_read" } else { "wr_write" };
            let before = fake.get(name);
            pair.moves(direction, &pieces);
            assert_eq!(fake.get(name) - before, want, "{name}, {sges} pieces");
        }
    }
    fake.is_empty();
}

#[test]
fn seventy_thousand_descriptors_pass_a_queue_of_64() {
    let fake = alone!(4, &(twins(2) + ";*.max_qp_wr=64"));
    for width in [0, 1] {
        let mut pair = Pair::twins(2, 70_000 * 16, |c| c.stripe_width = width);
        pair.moves_some(70_000);
        assert_eq!((fake.get("cq_overruns"), fake.get("wc_error")), (0, 0));
    }
    fake.is_empty();
}

#[test]
fn messages_longer_than_the_devices_are_cut() {
    let fake = alone!(4, &(twins(2) + ";*.port1.max_msg_sz=1M"));
    // One side alone may have the limit, too.
    for knobs in ["", "fake0.port1.max_msg_sz=1G", "fake2.port1.max_msg_sz=1G"] {
        fake.set(knobs);
        for rails in [1, 2] {
            let mut pair = Pair::twins(rails, 4 * MIB, |c| c.slice_bytes = 1 << 30);
            for len in [MIB - 1, MIB, MIB + 1, 3 * MIB + 17] {
                for direction in BOTH {
                    pair.moves(direction, &[Piece { here: 3, there: 77, len }]);
                }
            }
        }
        fake.set("*.port1.max_msg_sz=1M");
    }
    assert_eq!(fake.get("wc_error"), 0);
    fake.is_empty();
}

#[test]
fn regions_longer_than_a_registration_are_cut_at_seams() {
    let fake = alone!(4, &(twins(2) + ";*.max_mr_size=1M"));
    let before = fake.live();
    let bytes = 5 * MIB / 2;
    for (a, b) in [("1M", "1M"), ("1M", "64G"), ("64G", "1M"), ("1M", "512K")] {
        fake.set(&format!("fake0.max_mr_size={a};fake1.max_mr_size={a}"));
        fake.set(&format!("fake2.max_mr_size={b};fake3.max_mr_size={b}"));
        let mut pair = Pair::twins(2, bytes, |c| c.stripe_width = 0);
        let pieces = |of: &str| match of {
            "64G" => 1,
            "512K" => 5,
            _ => 3,
        };
        // Scratch and buffers of messages are registrations too: one of each on every NIC.
        let want = 2 * (pieces(a) + pieces(b)) + 2 * 2 * 2;
        assert_eq!(fake.get("live.mr"), want, "{a} {b}");
        // Across each seam of either side, and all of it.
        let mut places: Vec<_> = [MIB, 2 * MIB, MIB / 2, 3 * MIB / 2]
            .map(|seam| Piece { here: seam - 1000, there: seam - 1000, len: 3000 })
            .to_vec();
        places.push(Piece { here: MIB - 5, there: 2 * MIB - 11, len: MIB / 2 });
        places.push(Piece { here: 0, there: 0, len: bytes });
        for piece in places {
            for direction in BOTH {
                pair.moves(direction, &[piece]);
            }
        }
        for n in [7, 300] {
            let pieces = scatter(&mut pair.rng, n, bytes, bytes);
            pair.moves(Direction::Write, &pieces);
            pair.moves(Direction::Read, &pieces);
        }
        drop(pair);
        fake.settles(&before, "its regions are gone");
    }
    assert_eq!(fake.get("wc_error"), 0);
    fake.is_empty();
}

/// A deeper READ queue or a longer packet than the peer's ends in REM_INV_REQ_ERR at the fake.
#[test]
fn read_depth_and_mtu_are_the_smaller_of_both_sides() {
    let fake = alone!(4, &twins(2));
    for knobs in [
        "fake0.max_qp_rd_atom=1;fake1.max_qp_rd_atom=1",
        "fake2.max_qp_rd_atom=1;fake3.max_qp_rd_atom=1",
        "fake2.max_qp_init_rd_atom=1;fake3.max_qp_init_rd_atom=1",
        "fake0.port1.active_mtu=1024;fake1.port1.active_mtu=1024",
        "fake2.port1.active_mtu=1024;fake3.port1.active_mtu=256",
    ] {
        fake.set(knobs);
        let mut pair = Pair::twins(2, MIB, |c| c.stripe_width = 0);
        pair.moves_some(300);
        pair.a.e.notify(pair.peer, &[1; 60_000]).unwrap();
        crate::rig::notifs(&pair.b.e, 1);
        assert_eq!((fake.get("wc_error"), fake.get("refused_modify")), (0, 0), "{knobs}");
        fake.set("*.max_qp_rd_atom=16;*.max_qp_init_rd_atom=16;*.port1.active_mtu=4096");
    }
    fake.is_empty();
}

#[test]
fn without_thread_domains_all_is_the_same() {
    let fake = alone!(4, &(twins(2) + ";*.thread_domain=0"));
    let mut pair = Pair::twins(2, MIB, |c| c.stripe_width = 0);
    pair.moves_some(200);
    assert_eq!(fake.get("live.td"), 0);
    drop(pair);
    fake.is_empty();
}

/// All peers' completions come through one queue, which is too small for them all at once; they
/// come in one go, when nobody looks.
#[test]
fn peers_share_a_small_completion_queue() {
    let fake = alone!(3, "fake0.max_cqe=16");
    let a = Config { progress_thread: false, ..config("a", "fake0") };
    let a = Side::new(a, MIB);
    let peers: Vec<_> = (1..3)
        .map(|i| {
            let b = Side::new(config(&format!("b{i}"), &nics([i])), 128 << 10);
            let to = a.meet(&b);
            (b, to)
        })
        .collect();
    for direction in BOTH {
        fake.set("fake0.hold=1");
        let own = a.mem.fill(100);
        let (mut posted, mut before) = (Vec::new(), Vec::new());
        for (i, (b, (peer, far))) in peers.iter().enumerate() {
            let there = b.mem.fill(i as u64);
            let base = i * (128 << 10);
            let desc = |at: u64, k: usize, region| Desc {
                addr: at + (k * 256) as u64,
                len: 64,
                dev: 0,
                region,
            };
            let local = |k| desc(a.mem.base() + base as u64, k, a.region);
            let remote = |k| desc(b.mem.base(), k, *far);
            // A transfer each: every one is signalled.
            for k in 0..40 {
                let (local, remote) = ([local(k)], [remote(k)]);
                let t = a.e.prepare_descs(direction, *peer, &local, &remote).unwrap().raw();
                a.e.post(t, None).unwrap();
                posted.push((t, k * 256, i));
            }
            before.push((base, there));
        }
        fake.set("fake0.hold=0");
        std::thread::sleep(core::time::Duration::from_millis(50));
        for (t, k, i) in posted {
            assert_eq!(finish(&a.e, t), Ok(Status::Ok), "{direction:?}, peer {i}");
            a.e.release(t).unwrap();
            let (base, there) = &before[i];
            let (here, now) = (a.mem.copy(), peers[i].0.mem.copy());
            match direction {
                Direction::Read => assert_eq!(here[base + k..][..64], there[k..][..64]),
                Direction::Write => assert_eq!(now[k..][..64], own[base + k..][..64]),
            }
        }
        assert_eq!(fake.get("cq_overruns"), 0, "{direction:?}");
    }
    drop((a, peers));
    fake.is_empty();
}

/// All peers' messages come through one completion queue. It is too small for them all at once, and
/// nobody takes anything out of it meanwhile.
#[test]
fn many_peers_share_a_small_queue_of_messages() {
    let fake = alone!(8, "fake0.max_cqe=64");
    let a = Config { progress_thread: false, ..config("a", "fake0") };
    let a = Side::new(a, MIB);
    let peers: Vec<_> = (1..8)
        .map(|i| {
            let b = Side::new(config(&format!("b{i}"), &nics([i])), MIB);
            let (to, _) = b.meet(&a);
            (b, to)
        })
        .collect();
    const EACH: usize = 40;
    for n in 0..EACH {
        for (b, to) in &peers {
            b.e.notify(*to, &[n as u8; 3000]).unwrap();
        }
    }
    let sent = || fake.get("wr_send") >= 7 * 3;
    crate::fake::wait(sent, || format!("{} sends", fake.get("wr_send")));
    let got = crate::rig::notifs(&a.e, 7 * EACH);
    for i in 1..8 {
        let name = format!("b{i}");
        let mine = got.iter().filter(|(from, _)| from == name.as_bytes());
        let texts: Vec<_> = mine.map(|(_, text)| text.clone()).collect();
        let want: Vec<_> = (0..EACH).map(|n| vec![n as u8; 3000]).collect();
        assert_eq!(texts, want, "{name}");
    }
    assert_eq!(fake.get("cq_overruns"), 0);
    drop((a, peers));
    fake.is_empty();
}

/// A completion queue of 16 entries has room for the messages of two peers.
#[test]
fn a_peer_too_many_for_the_queue_of_messages_is_refused_in_words() {
    let fake = alone!(4, "fake0.max_cqe=16");
    let a = Side::new(config("a", "fake0"), MIB);
    let mut peers = Vec::new();
    for i in 1..4 {
        let b = Side::new(config(&format!("b{i}"), &nics([i])), MIB);
        let to = b.e.peer_add(a.e.metadata(), None).unwrap().raw();
        let up = b.e.peer_connect(to, crate::fake::HANG);
        if i == 3 {
            let e = up.unwrap_err();
            assert!(e.message.contains("queue for messages has 16 entries"), "{e}");
            // One goes, and there is room again.
            drop(peers.pop());
            crate::fake::wait(|| a.e.info().peers < 2, || "a still knows it".into());
            b.e.peer_connect(to, crate::fake::HANG).unwrap();
        }
        peers.push((b, to));
    }
    for (b, to) in &peers {
        b.e.notify(*to, b"hello").unwrap();
    }
    assert_eq!(crate::rig::notifs(&a.e, 2).len(), 2);
    drop((a, peers));
    fake.is_empty();
}
