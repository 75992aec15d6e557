//! Peers that are other processes: killed, stopped, started again under the same name and address,
//! as target and as initiator. Their other peers feel nothing.

use core::time::Duration;

use kvrail::host::blob::ConnBlob;
use kvrail::host::config::Config;
use kvrail::status::Status;
use kvrail::table::Direction;

use crate::fake::{wait, HANG};
use crate::processes::{descs, hex, setup, Other};
use crate::rig::{finish, listen, nics, notifs, pattern, said, same, Pair, Rng, Side, BOTH, MIB};

fn quick(text: &str) -> Config {
    Config {
        rail_timeout_ms: 300,
        ack_timeout: 8,
        peer_timeout_ms: 60_000,
        connect_timeout_ms: 3000,
        ..setup(text)
    }
}

/// Two engines here that are connected, and one of which knows the other process.
struct Scene {
    pair: Pair,
    peer: u64,
    far: u64,
}

impl Scene {
    /// `a` has four NICs, the bystander the last two of eight.
    fn new(other: &Other, tune: impl Fn(&mut Config)) -> Scene {
        let (mut a, mut c) = (quick("a/fake0,fake1/0"), quick("c/fake6,fake7/0"));
        tune(&mut a);
        tune(&mut c);
        let (a, b) = (Side::new(a, MIB), Side::new(c, MIB));
        let (peer, far) = a.meet(&b);
        let pair = Pair { a, b, peer, far, rng: Rng::new() };
        let (peer, far) = meet(&pair.a, other);
        Scene { pair, peer, far }
    }

    fn prepare(&self, other: &Other, direction: Direction) -> u64 {
        let a = &self.pair.a;
        let at = || (0..256).map(|i| (i * 4096, 4096));
        let local = descs(a.mem.base(), a.region, at());
        let remote = descs(other.base, self.far, at());
        a.e.prepare_descs(direction, self.peer, &local, &remote).unwrap().raw()
    }

    /// All memory both ways, every byte compared.
    fn moves_all(&self, other: &mut Other) {
        for direction in BOTH {
            other.ask("fill 3");
            let here = self.pair.a.mem.fill(4);
            let t = self.prepare(other, direction);
            self.pair.a.e.post(t, Some(b"whole")).unwrap();
            assert_eq!(finish(&self.pair.a.e, t), Ok(Status::Ok));
            let want = if direction == Direction::Read { pattern(3, MIB) } else { here };
            same(&self.pair.a.mem.copy(), &want, direction, "here");
            other.ask("hear 1");
            same(&other.memory(), &want, direction, "there");
            self.pair.a.e.release(t).unwrap();
        }
    }

    /// The bystander is connected, has all its rails, and was never dialled anew.
    fn bystander(&mut self) {
        let [up, one] = [self.pair.peer, self.peer].map(|p| self.pair.a.e.peer_state(p));
        assert_eq!(up, Ok(Status::Ok), "the other peer is {one:?}");
        self.pair.moves_some(100);
        self.pair.b.e.notify(self.pair.b.e.peer_find(b"a").unwrap().raw(), b"here").unwrap();
        assert_eq!(notifs(&self.pair.a.e, 1)[0].1, b"here");
    }
}

fn meet(a: &Side, other: &Other) -> (u64, u64) {
    let peer = a.e.peer_add(&other.metadata, None).unwrap().raw();
    a.e.peer_connect(peer, HANG).unwrap_or_else(|e| panic!("{e}"));
    (peer, a.e.region_import(peer, &other.region).unwrap().raw())
}

fn signal(other: &Other, number: i32) {
    // SAFETY: a child of ours that was not waited for.
    assert_eq!(unsafe { libc::kill(other.child.id() as i32, number) }, 0);
}

#[test]
fn a_target_that_is_killed_ends_its_transfers_and_can_be_born_again() {
    let fake = alone!(8, "");
    let mut other = Other::start("b", &nics(0..2), "0", 8);
    let mut scene = Scene::new(&other, |_| {});
    scene.moves_all(&mut other);
    for round in 0..4 {
        let direction = BOTH[round % 2];
        let (t, idle) = (scene.prepare(&other, direction), scene.prepare(&other, direction));
        let old = ConnBlob::decode(&other.metadata).unwrap();
        scene.pair.a.e.post(t, Some(b"never")).unwrap();
        if round < 2 {
            std::thread::sleep(Duration::from_millis(2));
        }
        other.child.kill().unwrap();
        other.child.wait().unwrap();
        // It may have got through before.
        let end = finish(&scene.pair.a.e, t);
        assert!(!end.as_ref().is_err_and(|e| e.status != Status::Disconnected), "{end:?}");
        let gone = || scene.pair.a.e.peer_state(scene.peer).is_err();
        wait(gone, || "the peer is gone and nobody noticed".into());
        scene.bystander();
        // The same name, address and port.
        let text = format!("0/{}", old.addrs[0].port());
        other = Other::start("b", &nics(0..2), &text, 8);
        let new = ConnBlob::decode(&other.metadata).unwrap();
        assert_eq!((new.addrs, &new.name), (old.addrs, &old.name));
        // Who knows only the old metadata meets a stranger there.
        let e = scene.pair.a.e.peer_connect(scene.peer, HANG).unwrap_err();
        assert_eq!(e.status, Status::Refused, "{e}");
        let before = (scene.peer, scene.far);
        (scene.peer, scene.far) = meet(&scene.pair.a, &other);
        assert_ne!(before.0, scene.peer);
        assert_eq!(scene.pair.a.e.peer_state(before.0).unwrap_err().status, Status::Stale);
        assert_eq!(scene.pair.a.e.post(idle, None).unwrap_err().status, Status::Stale);
        assert!(scene.pair.a.e.region_forget(before.1).is_err());
        scene.pair.a.e.release(t).unwrap();
        scene.pair.a.e.release(idle).unwrap();
        scene.moves_all(&mut other);
        scene.bystander();
    }
    other.end();
    drop(scene);
    fake.is_empty();
}

#[test]
fn a_target_learns_that_its_initiator_was_killed() {
    let fake = alone!(8, "");
    for round in 0..3u64 {
        let mut other = Other::start("b", &nics(0..2), "0", 8);
        let a = Side::new(quick("a/fake0,fake1/0"), MIB);
        let c = Side::new(quick("c/fake6,fake7/0"), MIB);
        let (peer, far) = a.meet(&c);
        let mut pair = Pair { a, b: c, peer, far, rng: Rng::new() };
        let (blob, region) = (hex(pair.a.e.metadata()), hex(&pair.a.blob()));
        other.tell(&format!("pour {blob} {region} {}", pair.a.mem.base()));
        (0..20 + 10 * round).for_each(|_| drop(other.hear()));
        let initiator = pair.a.e.peer_find(b"b").unwrap().raw();
        assert_eq!(pair.a.e.peer_state(initiator), Ok(Status::Ok));
        other.child.kill().unwrap();
        other.child.wait().unwrap();
        // Nobody has its blob, so it is forgotten: from then on nothing of it lands here.
        let gone = || pair.a.e.peer_find(b"b").is_err();
        wait(gone, || "the initiator is gone and nobody noticed".into());
        assert_eq!(pair.a.e.peer_state(initiator).unwrap_err().status, Status::Stale);
        let want = pair.a.mem.fill(9);
        std::thread::sleep(Duration::from_millis(20));
        same(&pair.a.mem.copy(), &want, Direction::Write, "here");
        pair.moves_some(100);
        drop(pair);
        fake.is_empty();
    }
}

/// The fake's NIC is a thread of its process, so a process that is stopped answers nothing: its
/// rails break. Neither its transfers nor itself are lost, as long as it may be adrift.
#[test]
fn a_target_that_is_stopped_for_a_while_goes_on_where_it_was() {
    let fake = alone!(8, "slow_peer_ms=200");
    for direction in BOTH {
        let mut other = Other::start("b", &nics(0..2), "0", 8);
        let mut scene = Scene::new(&other, |_| {});
        scene.moves_all(&mut other);
        other.ask("fill 5");
        let here = scene.pair.a.mem.fill(6);
        let t = scene.prepare(&other, direction);
        signal(&other, libc::SIGSTOP);
        scene.pair.a.e.post(t, Some(b"late")).unwrap();
        let adrift = || scene.pair.a.e.peer_state(scene.peer) == Ok(Status::InProgress);
        wait(adrift, || "rails to a process that is stopped count as up".into());
        assert_eq!(scene.pair.a.e.check(t), Ok(Status::InProgress));
        signal(&other, libc::SIGCONT);
        assert_eq!(finish(&scene.pair.a.e, t), Ok(Status::Ok), "{direction:?}");
        let want = if direction == Direction::Read { pattern(5, MIB) } else { here };
        same(&scene.pair.a.mem.copy(), &want, direction, "here");
        other.ask("hear 1");
        same(&other.memory(), &want, direction, "there");
        scene.moves_all(&mut other);
        scene.bystander();
        scene.pair.a.e.release(t).unwrap();
        other.end();
        drop(scene);
        fake.is_empty();
    }
}

#[test]
fn a_target_that_is_stopped_for_too_long_is_dead_and_works_again_afterwards() {
    let fake = alone!(8, "slow_peer_ms=200");
    for direction in BOTH {
        let mut other = Other::start("b", &nics(0..2), "0", 8);
        let mut scene = Scene::new(&other, |c| c.peer_timeout_ms = 500);
        let t = scene.prepare(&other, direction);
        signal(&other, libc::SIGSTOP);
        scene.pair.a.e.post(t, None).unwrap();
        assert_eq!(finish(&scene.pair.a.e, t).unwrap_err().status, Status::Disconnected);
        scene.bystander();
        signal(&other, libc::SIGCONT);
        let again = || {
            let end = scene.pair.a.e.post(t, None).and_then(|_| finish(&scene.pair.a.e, t));
            end == Ok(Status::Ok)
        };
        wait(again, || "no transfer ever works again".into());
        scene.pair.a.e.release(t).unwrap();
        scene.moves_all(&mut other);
        scene.bystander();
        other.end();
        drop(scene);
        fake.is_empty();
    }
}

/// Its last rail keeps it alive, and it does not answer the dial for the one that broke.
#[test]
fn a_stopped_target_that_answers_no_dial_for_a_rail_is_named_with_the_limit() {
    let fake = alone!(8, "slow_peer_ms=60000");
    listen();
    let mut other = Other::start("b", &nics(0..2), "0", 8);
    let scene = Scene::new(&other, |c| {
        (c.rail_timeout_ms, c.peer_timeout_ms, c.stripe_width) = (60_000, 1000, 0);
    });
    let t = scene.prepare(&other, Direction::Write);
    signal(&other, libc::SIGSTOP);
    fake.set("fake0.wc_force=n:1:RETRY_EXC_ERR");
    scene.pair.a.e.post(t, None).unwrap();
    let told = || said(&["no answer within 750 ms (for a rail to join, by peer_timeout_ms)"]);
    wait(told, || "nobody said that the peer does not answer".into());
    signal(&other, libc::SIGCONT);
    assert_eq!(finish(&scene.pair.a.e, t), Ok(Status::Ok));
    scene.pair.a.e.release(t).unwrap();
    scene.moves_all(&mut other);
    other.end();
    drop(scene);
    fake.is_empty();
}
