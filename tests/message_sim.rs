//! Messages and notifications on the simulated fabric. `KVRAIL_SEED` replays a failing seed.
#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "tests")]
#![allow(dead_code, unreachable_pub, unused_imports, reason = "shared support")]

mod sim_support;

use kvrail::engine::channel::READ_RESERVE;
use kvrail::engine::message::BLOCK;
use kvrail::limits::Limits;
use kvrail::nic::sim::Rng;
use kvrail::status::Status;
use kvrail::table::Direction;
use sim_support::*;

#[test]
fn a_notification_comes_once_and_after_all_data() {
    let seed = seed(15);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    for (i, len) in [0, 1, 7, 255, 256, 4_095, 65_535, 65_536].into_iter().enumerate() {
        // Pieces of three bytes at most would take ages for the longest.
        for chop in [0, if len > 5_000 { 300 } else { 3 }, 5_000] {
            let setup = Setup { chop, ..striped(lanes(3), i % 2 == 0) };
            let case = Case::new(setup, BOTH[i % 2], &mut rng, 300, 300);
            let text: Vec<u8> = (0..len).map(|_| rng.bits() as u8).collect();
            case.post(Some(&text));
            let mut got = Vec::new();
            while got.is_empty() {
                case.world.step();
                got.append(&mut case.world.messages(1));
            }
            case.verify();
            assert_eq!(case.finish(), Status::Ok);
            (0..500).for_each(|_| case.world.step());
            got.append(&mut case.world.messages(1));
            assert!(got == [("engine-0".to_string(), text)], "exactly one, whole: {len} {chop}");
        }
    }
}

#[test]
fn a_transfer_of_nothing_and_one_to_itself_send_their_message() {
    let mut rng = Rng::new(seed(16));
    let case = Case::new(lanes(2), Direction::Write, &mut rng, 3, 9);
    let key = case.remote.import(&case.world, 0);
    let (l, r) = ((0, &case.local), (&case.remote, key));
    let empty = prepare(&case.world, Direction::Write, l, r, &[]).unwrap();
    case.world.engines[0].post(empty.raw(), Some(b"")).unwrap();
    assert_eq!(case.world.finish(0, &empty, 100), Status::Ok);
    case.world.step();
    assert_eq!(case.world.messages(1), [("engine-0".into(), vec![])]);
    case.world.connect(0, 0);
    let twin = Memory::new(&case.world, 0, case.local.len, |_| 0);
    let key = twin.import(&case.world, 0);
    let own = prepare(&case.world, Direction::Write, (0, &case.local), (&twin, key), &case.pairs)
        .unwrap();
    case.world.engines[0].post(own.raw(), Some(b"me")).unwrap();
    assert_eq!(case.world.finish(0, &own, 1_000), Status::Ok);
    let zeros = vec![0; case.local.len];
    assert_eq!(twin.bytes(), reference(Direction::Write, &case.before.0, &zeros, &case.pairs));
    assert_eq!(case.world.messages(0), [("engine-0".into(), b"me".to_vec())]);
}

#[test]
fn a_slow_reader_holds_the_sender_up_and_loses_nothing() {
    let seed = seed(17);
    let _tell = Tell(seed);
    let mut rng = Rng::new(seed);
    for (chop, most) in [(0, 40), (700, 3_000), (0, 65_536)] {
        let world = World::new(Setup { chop, ..lanes(1) });
        world.connect(0, 1);
        let peer = world.peer(0, 1).raw();
        let total = match (most > 10_000, cfg!(debug_assertions)) {
            (true, true) => 60,
            (true, false) | (false, true) => 600,
            (false, false) => 6_000,
        };
        let text = |i: u64, len: u64| {
            let mut t = i.to_le_bytes().to_vec();
            t.extend((0..len).map(|k| (i + k) as u8));
            t
        };
        let lens: Vec<u64> = (0..total).map(|_| rng.below(most - 8)).collect();
        let (mut sent, mut got, mut held, mut deepest) = (0, 0, 0, 0);
        let limit = u64::from(LIMITS.message_bytes) / 2;
        let (mut posted, mut taken) = (0, 0);
        for step in 0.. {
            assert!(step < 5_000_000, "sent {sent}, got {got} of {total}");
            if sent < total {
                let m = text(sent, lens[sent as usize]);
                match world.engines[0].notify(peer, &m) {
                    Ok(()) => {
                        sent += 1;
                        posted += m.len() as u64;
                    }
                    Err(s) => {
                        assert_eq!(s, Status::Capacity);
                        held += 1;
                    }
                }
            }
            // A message the other way now and then: acknowledgements and data share the stream.
            if step % 50 == 0 && world.engines[1].notify(world.peer(1, 0).raw(), b"back").is_ok() {
                world.messages(0);
            }
            world.step();
            let blocks = u64::from(world.engines[1].message_blocks_used().1);
            deepest = deepest.max(blocks * 256);
            // The reader sleeps until the sender cannot go on, and then for a while each time.
            if (held > 0 && step % 97 == 0) || sent == total {
                for (name, bytes) in world.messages(1) {
                    assert_eq!(name, "engine-0");
                    assert!(bytes == text(got, lens[got as usize]), "message {got} is wrong");
                    taken += bytes.len() as u64;
                    got += 1;
                }
            }
            if got == total {
                break;
            }
        }
        assert_eq!(posted, taken);
        assert!(deepest <= limit, "{deepest} bytes unread, more than the window of {limit}");
        (0..1_000).for_each(|_| world.step());
        world.messages(0);
        let used = |e: usize| world.engines[e].message_blocks_used();
        assert_eq!((world.messages(1).len(), used(0), used(1)), (0, (0, 0), (0, 0)));
    }
}

#[test]
fn every_peer_is_heard_and_order_is_kept_for_each() {
    let mut rng = Rng::new(seed(18));
    let world = World::new(Setup { engines: 4, chop: 900, ..lanes(1) });
    for e in 1..4 {
        world.connect(0, e);
    }
    const EACH: u32 = if cfg!(debug_assertions) { 200 } else { 1_000 };
    let (mut sent, mut got) = ([0u32; 4], [0u32; 4]);
    for _ in 0..60_000 {
        let e = 1 + rng.below(3) as usize;
        let mut text = sent[e].to_le_bytes().to_vec();
        text.resize(4 + rng.below(2_000) as usize, e as u8);
        if sent[e] < EACH && world.engines[e].notify(world.peer(e, 0).raw(), &text).is_ok() {
            sent[e] += 1;
        }
        world.step();
        if rng.below(300) == 0 || sent[1..] == [EACH; 3] {
            for (name, bytes) in world.messages(0) {
                let from: usize = name.strip_prefix("engine-").unwrap().parse().unwrap();
                assert_eq!(bytes[..4], got[from].to_le_bytes());
                assert!(bytes[4..].iter().all(|&b| b == from as u8));
                got[from] += 1;
            }
        }
        if got[1..] == [EACH; 3] {
            return;
        }
    }
    panic!("sent {sent:?}, got {got:?}");
}

#[test]
fn unread_messages_of_many_peers_do_not_stop_what_we_send() {
    let world = World::new(Setup { engines: 4, ..lanes(1) });
    for e in 1..4 {
        world.connect(0, e);
    }
    for _ in 0..20_000 {
        for e in 1..4 {
            let _ = world.engines[e].notify(world.peer(e, 0).raw(), &[e as u8; 900]);
        }
        world.step();
    }
    let (mut sent, mut got) = (0, 0);
    for _ in 0..20_000 {
        sent += usize::from(world.engines[0].notify(world.peer(0, 1).raw(), &[0; 9_000]).is_ok());
        world.step();
        got += world.messages(1).len();
    }
    assert!(got > 1_000, "sent {sent}, got {got}");
}

/// Peers come, send what they may and more, and leave; nobody takes what they sent.
#[test]
fn messages_of_peers_that_left_leave_room_for_the_others() {
    let limits = Limits { peers: 5, ..LIMITS };
    let world = World::new(Setup { engines: 5, limits, pipes: (20, 64 << 10), ..lanes(1) });
    world.connect(1, 4);
    let reader = &world.engines[1];
    let (_, spare) = reader.spare();
    let most = u64::from(limits.blocks() - READ_RESERVE) * BLOCK as u64;
    let notify = |from: usize, to: usize, text: &[u8]| {
        world.engines[from].notify(world.peer(from, to).raw(), text).is_ok()
    };
    let part = |e: usize| {
        world.close(e, 1, Status::Disconnected);
        world.close(1, e, Status::Disconnected);
        (0..50).for_each(|_| world.step());
    };
    for life in 0..15u8 {
        let from = [0, 2, 3][usize::from(life) % 3];
        world.connect(from, 1);
        // Long ones fill their blocks nearly as much as they cost.
        let mut text = [life; 20_000];
        for i in 0..60u32 {
            text[1..5].copy_from_slice(&i.to_le_bytes());
            notify(from, 1, &text);
            (0..5).for_each(|_| world.step());
        }
        part(from);
        // And there is room for what others may be given, beside the bystander's window.
        let used = u64::from(reader.message_blocks_used().1) * BLOCK as u64;
        let given = used + reader.spare().1 + limits.window();
        assert!(given <= most, "life {life}: {used} bytes are in use of {most}, {given} given");
    }
    // Streams are read: the bystander's acknowledgements come in.
    let (mut sent, mut got) = (0, 0);
    for _ in 0..5_000 {
        sent += u32::from(notify(1, 4, &[0; 9_000]));
        world.step();
        got += world.messages(4).len();
    }
    assert!(got > 300, "sent {sent}, got {got}");
    // The next life sends again as what the ones before left is taken.
    world.connect(0, 1);
    let long = vec![77; 65_536];
    assert!(notify(0, 1, &long));
    (0..2_000).for_each(|_| world.step());
    let (mut last, mut whole) = ((0, 0), false);
    for _ in 0..2_000 {
        for (_, text) in world.messages(1) {
            whole = text == long;
            if !whole {
                let now = (text[0], u32::from_le_bytes(text[1..5].try_into().unwrap()) + 1);
                assert!(now.0 > last.0 || now.1 == last.1 + 1, "{now:?} after {last:?}");
                last = now;
            }
        }
        world.step();
    }
    assert!(whole, "the message of the last life did not come");
    part(0);
    assert_eq!((reader.message_blocks_used().1, reader.spare().1), (0, spare));
}

/// A peer comes back while all that it may send lies untaken: what is to spare makes up for that.
#[test]
fn a_peer_that_comes_back_may_send_at_once_while_there_is_room() {
    let world = World::new(lanes(1));
    let send = |text: &[u8]| world.engines[0].notify(world.peer(0, 1).raw(), text).unwrap();
    world.connect(0, 1);
    let window = world.engines[1].limits().window();
    for n in 0..window / 1_552 {
        send(&[n as u8; 1_000]);
    }
    (0..200).for_each(|_| world.step());
    world.close(0, 1, Status::Disconnected);
    world.close(1, 0, Status::Disconnected);
    assert!(world.engines[1].first_window(World::slot(1, 0)) < window / 8);
    world.connect(0, 1);
    send(&[99; 65_536]);
    (0..200).for_each(|_| world.step());
    let texts: Vec<_> = world.messages(1).into_iter().map(|(_, text)| text).collect();
    assert_eq!(texts.len() as u64, window / 1_552 + 1);
    assert!(texts.last().unwrap() == &[99; 65_536]);
}
