//! What engines notice by themselves, and what they tell.

use core::time::Duration;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvrail::host::config::Config;
use kvrail::host::tell::{Event, EventKind, NO_LANE};
use kvrail::status::Status;
use kvrail::table::Direction;

use crate::fake::{wait, Fake};
use crate::rig::{config, finish, listen, nics, said, threads, twins, Pair, Piece, Side, MIB};

const LIMIT: u32 = 300;

/// What an engine told.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<Event>>>);

impl Told {
    fn by(side: &Side) -> Told {
        let told = Told::default();
        let to = told.clone();
        side.e
            .set_event_fn(Some(Arc::new(move |e: &Event| {
                eprintln!("event: {e:?}");
                to.0.lock().unwrap().push(e.clone());
            })))
            .unwrap();
        told
    }

    fn all(&self) -> Vec<Event> {
        self.0.lock().unwrap().clone()
    }

    /// Kinds and lanes, in order.
    fn kinds(&self) -> Vec<(EventKind, u32)> {
        self.all().iter().map(|e| (e.kind, e.lane)).collect()
    }

    /// The same but for rails that came up: who listens right after a connect may hear of those.
    fn news(&self) -> Vec<(EventKind, u32)> {
        self.kinds().into_iter().filter(|(kind, _)| *kind != EventKind::RailUp).collect()
    }

    fn awaits(&self, kind: EventKind, lane: u32) -> Event {
        let find = || self.all().into_iter().find(|e| (e.kind, e.lane) == (kind, lane));
        wait(|| find().is_some(), || format!("no {kind:?} of {lane}: {:?}", self.all()));
        find().unwrap()
    }
}

/// Two engines that ask no idle rail.
fn silent(rails: usize, tune: impl Fn(&mut Config)) -> Pair {
    Pair::twins(rails, MIB, |c| {
        (c.stripe_width, c.rail_timeout_ms, c.keepalive_ms, c.link_debounce_ms) = (0, LIMIT, 0, 50);
        tune(c);
    })
}

/// Several looks of the watch.
fn pass() {
    std::thread::sleep(Duration::from_millis(1500));
}

fn errors(side: &Side) -> Vec<u64> {
    (0..side.e.info().rails).map(|i| side.e.rail_info(i).unwrap().errors).collect()
}

#[test]
fn connections_and_rails_are_told_on_both_sides() {
    let fake = alone!(4, &twins(2));
    let (a, b) = (config("a", &nics([0, 1])), config("b", &nics([2, 3])));
    let (a, b) = (Side::new(a, MIB), Side::new(b, MIB));
    let (by_a, by_b) = (Told::by(&a), Told::by(&b));
    let (peer, _) = a.meet(&b);
    let up =
        [(EventKind::PeerUp, NO_LANE), (EventKind::RailUp, 0), (EventKind::RailUp, 1)].to_vec();
    for (told, side, name) in [(&by_a, &a, "b"), (&by_b, &b, "a")] {
        told.awaits(EventKind::RailUp, 1);
        assert_eq!(told.kinds(), up);
        let handle = side.e.peer_find(name.as_bytes()).unwrap().raw();
        for event in told.all() {
            assert_eq!((event.peer, event.status), (handle, Status::Ok), "{event:?}");
            assert!(event.text.contains(name), "{event:?}");
        }
    }
    // A target learns that its initiator is gone.
    let handle = b.e.peer_find(b"a").unwrap().raw();
    drop(a);
    let gone = by_b.awaits(EventKind::PeerGone, NO_LANE);
    assert_eq!((gone.peer, gone.status), (handle, Status::Disconnected));
    assert_eq!(by_b.kinds().len(), 4, "its rails went with it: {:?}", by_b.all());
    assert_eq!(by_a.all()[0].peer, peer);
    drop(b);
    fake.is_empty();
}

#[test]
fn an_idle_rail_that_died_silently_is_found_and_told() {
    let fake = alone!(4, &twins(2));
    // A hole that swallows everything, and a link whose packets are lost: the NIC says so, perhaps
    // of the first question already. With and without a thread that polls.
    let faults = [
        ("blackhole", true, false),
        ("blackhole", false, false),
        ("drop", false, false),
        ("drop", true, true),
    ];
    for (fault, thread, first) in faults {
        let tune = |c: &mut Config| {
            c.keepalive_ms = if first { 1000 } else { 100 };
            c.progress_thread = thread;
        };
        let pair = silent(2, tune);
        let told = Told::by(&pair.a);
        // Rails that answer stay.
        let before = fake.get("wr_write");
        let answered = || first || fake.get("wr_write") >= before + 20;
        wait(answered, || "nobody is asked".into());
        assert_eq!((told.news(), errors(&pair.a)), (vec![], vec![0, 0]));
        // The one without messages, so that nothing but the question shows it.
        fake.set(&format!("fake1.{fault}=1"));
        let down = told.awaits(EventKind::RailDown, 1);
        assert_eq!((down.peer, down.status), (pair.peer, Status::NoRail));
        assert!(down.text.contains("fake1:1"), "{down:?}");
        assert_eq!(told.news(), [(EventKind::RailDown, 1)]);
        fake.set(&format!("fake1.{fault}=0"));
        drop(pair);
        fake.is_empty();
    }
}

#[test]
fn nobody_is_asked_without_keepalive() {
    let fake = alone!(4, &twins(2));
    let pair = silent(2, |_| {});
    let told = Told::by(&pair.a);
    let before = fake.get("wr_write");
    fake.set("fake1.blackhole=1");
    pass();
    assert_eq!((fake.get("wr_write"), told.news()), (before, vec![]));
    fake.set("fake1.blackhole=0");
    drop(pair);
    fake.is_empty();
}

/// Processor time of this process's threads of that name.
fn worked(name: &str) -> Duration {
    let mut ticks = 0;
    for stat in threads() {
        if stat.contains(&format!("({name})")) {
            let rest: Vec<_> = stat.rsplit(") ").next().unwrap().split(' ').collect();
            ticks += rest[11].parse::<u64>().unwrap() + rest[12].parse::<u64>().unwrap();
        }
    }
    Duration::from_millis(ticks * 10)
}

#[test]
fn an_idle_engine_sleeps_between_its_questions() {
    let fake = alone!(4, &twins(2));
    let every = Duration::from_millis(200);
    let pair = silent(2, |c| (c.keepalive_ms, c.rail_timeout_ms) = (200, 5000));
    let (start, before) = (Instant::now(), fake.get("wr_write"));
    let work = || worked("kvrail-poll") + worked("kvrail-ctl");
    let worked = work();
    wait(|| fake.get("wr_write") >= before + 40, || "nobody is asked".into());
    let (took, asked) = (start.elapsed(), fake.get("wr_write") - before);
    // Each of the two engines asks over two rails.
    let most = 4 * (took.as_millis() / every.as_millis() + 1);
    assert!(u128::from(asked) <= most, "{asked} questions in {took:?}");
    let worked = work().saturating_sub(worked);
    assert!(worked < took / 4, "worked {worked:?} of {took:?}");
    assert_eq!((errors(&pair.a), errors(&pair.b)), (vec![0, 0], vec![0, 0]));
    drop(pair);
    fake.is_empty();
}

#[test]
fn work_that_nobody_polls_is_no_broken_rail() {
    let fake = alone!(2, &twins(1));
    let pair = silent(1, |c| c.progress_thread = false);
    pair.a.mem.fill(1);
    pair.b.mem.fill(2);
    fake.set("fake0.delay_us=20000");
    // More than is carried inside the post.
    let t = pair.prepare(Direction::Read, &[Piece { here: 0, there: 0, len: MIB }]).unwrap();
    for _ in 0..2 {
        pair.a.e.post(t, None).unwrap();
        // This puts it in flight. Then the application is elsewhere.
        assert_eq!(pair.a.e.check(t), Ok(Status::InProgress));
        pass();
        assert_eq!(finish(&pair.a.e, t), Ok(Status::Ok));
        assert_eq!(errors(&pair.a), [0]);
    }
    pair.a.e.release(t).unwrap();
    assert_eq!(pair.a.mem.copy(), pair.b.mem.copy());
    drop(pair);
    fake.is_empty();
}

#[test]
fn a_slow_rail_has_the_time_that_its_bytes_need() {
    let fake = alone!(2, &twins(1));
    let len = 6 * MIB;
    let pair = Pair::twins(1, len, |c| {
        (c.rail_timeout_ms, c.slice_bytes, c.keepalive_ms) = (LIMIT, 64 << 10, 0);
    });
    // The rate is measured with claims of 256 KiB, which take 63 ms.
    fake.set("fake0.bandwidth=4M");
    let write = |piece: usize, bytes: usize| {
        let place = |at| Piece { here: at, there: len - piece - at, len: piece };
        let pieces: Vec<_> = (0..bytes).step_by(piece).map(place).collect();
        assert_eq!(pair.carry(Direction::Write, &pieces), Ok(Status::Ok));
        assert_eq!(errors(&pair.a), [0]);
    };
    write(4096, len);
    // Then a claim of 1 MiB takes 700 ms: longer than the limit, but at the rate that was measured
    // it needs a quarter of a second, and four times that is a second.
    fake.set("fake0.bandwidth=1500K");
    write(64 << 10, 3 * MIB);
    fake.set("fake0.bandwidth=0");
    drop(pair);
    fake.is_empty();
}

/// All links of `a` go and come without a word from the device, or with one.
fn links(fake: Fake, quiet: bool) {
    let pair = silent(1, |_| {});
    let told = Told::by(&pair.a);
    assert_eq!(pair.a.e.links_down(), None);
    let before = Instant::now();
    fake.set(&format!("fake0.quiet_events={};fake0.port1.state=down", u8::from(quiet)));
    let down = told.awaits(EventKind::LinksDown, NO_LANE);
    assert_eq!((down.peer, down.status), (0, Status::NoRail));
    assert!(down.since >= Duration::from_millis(50), "{down:?}");
    let ms = pair.a.e.links_down().expect("down");
    assert!(ms <= before.elapsed() + Duration::from_millis(2) && ms >= down.since, "{ms:?}");
    assert_eq!(pair.b.e.links_down(), None, "its own are up");
    fake.set("fake0.port1.state=active");
    let up = told.awaits(EventKind::LinksUp, NO_LANE);
    assert!(up.status == Status::Ok && up.since > down.since, "{up:?}");
    assert_eq!(pair.a.e.links_down(), None);
    // The rail's own port is what counts, and it is used again.
    fake.set("fake0.quiet_events=0");
    pair.back();
    drop(pair);
    fake.is_empty();
}

#[test]
fn links_that_are_all_down_are_told() {
    links(alone!(2, &twins(1)), false);
}

#[test]
fn a_port_whose_events_are_lost_is_found_by_asking_it() {
    links(alone!(2, &twins(1)), true);
}

#[test]
fn one_link_of_two_is_enough() {
    let fake = alone!(4, &twins(2));
    listen();
    let pair = silent(2, |_| {});
    let told = Told::by(&pair.a);
    fake.set("fake0.port1.state=down");
    told.awaits(EventKind::RailDown, 0);
    pass();
    assert_eq!(pair.a.e.links_down(), None);
    assert_eq!(told.news(), [(EventKind::RailDown, 0)]);
    drop(pair);
    fake.is_empty();
}

#[test]
fn a_flap_is_neither_down_nor_up() {
    let fake = alone!(2, &twins(1));
    listen();
    let pair = silent(1, |c| (c.link_debounce_ms, c.rail_timeout_ms) = (60_000, 60_000));
    let told = Told::by(&pair.a);
    for _ in 0..3 {
        fake.set("fake0.port1.state=down");
        wait(|| said(&["Warn", "fake0:1", "link is down"]), || "not noticed".into());
        fake.set("fake0.port1.state=active");
        wait(|| said(&["Info", "fake0:1", "link is up"]), || "not noticed".into());
    }
    assert_eq!((pair.a.e.links_down(), told.news()), (None, vec![]));
    assert_eq!(errors(&pair.a), [0]);
    drop(pair);
    fake.is_empty();
}

#[test]
fn events_of_another_port_and_lies_change_nothing() {
    let fake = alone!(4, &(twins(2) + ";*.ports=2"));
    listen();
    let (a, b) = (config("a", "fake0:1,fake1:1"), config("b", "fake2:1,fake3:1"));
    let tune = |c| Config { link_debounce_ms: 0, rail_timeout_ms: LIMIT, ..c };
    let pair = Pair::new(tune(a), tune(b), MIB);
    let told = Told::by(&pair.a);
    for nic in [0, 1] {
        for event in ["PORT_ERR:2", "GID_CHANGE:2", "PORT_ERR:1", "GID_CHANGE:1"] {
            fake.set(&format!("fake{nic}.event={event}"));
        }
    }
    fake.set("fake0.port2.state=down;fake1.port2.state=down");
    pass();
    assert_eq!((pair.a.e.links_down(), told.news()), (None, vec![]));
    assert!(!said(&["link is down"]) && !said(&["GID is gone"]));
    assert_eq!(errors(&pair.a), [0, 0]);
    drop(pair);
    fake.is_empty();
}

#[test]
fn a_port_that_comes_back_without_its_address_is_of_no_use_yet() {
    let fake = alone!(2, &twins(1));
    listen();
    let pair = silent(1, |_| {});
    let told = Told::by(&pair.a);
    fake.set("fake0.quiet_events=1;fake0.port1.state=down");
    told.awaits(EventKind::LinksDown, NO_LANE);
    fake.set("fake0.port1.gid1=none;fake0.port1.state=active");
    pass();
    assert!(pair.a.e.links_down().is_some() && !said(&["Info", "fake0:1", "link is up"]));
    // At another place of the table it is found as well.
    fake.set("fake0.port1.gid6=10.1.0.1");
    told.awaits(EventKind::LinksUp, NO_LANE);
    fake.set("fake0.quiet_events=0");
    drop(pair);
    fake.is_empty();
}

#[test]
fn an_engine_without_peers_knows_its_links_too() {
    let fake = alone!(1, "");
    let mut c = config("a", "fake0");
    c.link_debounce_ms = 50;
    let side = Side::new(c, MIB);
    fake.set("fake0.quiet_events=1;fake0.port1.state=down");
    wait(|| side.e.links_down().is_some(), || "not noticed".into());
    fake.set("fake0.port1.state=active;fake0.quiet_events=0");
    wait(|| side.e.links_down().is_none(), || "not noticed".into());
    drop(side);
    fake.is_empty();
}

/// One side finds its links silent one after the other, and nobody tells it.
fn one_by_one(keepalive_ms: u32) -> (Pair, Told) {
    let (a, b) = (config("a", &nics([0, 1])), config("b", &nics([2, 3])));
    let tune = |c, keepalive_ms| Config {
        stripe_width: 1,
        // A peer may be without rails for less than it takes to find one silent.
        rail_timeout_ms: 1000,
        peer_timeout_ms: 700,
        keepalive_ms,
        ..c
    };
    let pair = Pair::new(tune(a, keepalive_ms), tune(b, 0), MIB);
    let told = Told::by(&pair.a);
    (pair, told)
}

#[test]
fn links_that_fall_silent_together_are_one_silence() {
    let fake = alone!(4, &twins(2));
    let (pair, told) = one_by_one(60_000);
    fake.set("*.blackhole=1");
    let one = [Piece { here: 0, there: 0, len: 1 }];
    let e = pair.carry(Direction::Read, &one).unwrap_err();
    assert_eq!(e.status, Status::Disconnected, "{e}");
    let gone = told.awaits(EventKind::PeerGone, NO_LANE);
    assert!(gone.text.contains("peer_timeout_ms"), "{gone:?}");
    // When the second one is found, the time is over since the first was: it is not told apart.
    assert_eq!(told.news().len(), 2, "{:?}", told.news());
    assert_eq!(told.news()[0].0, EventKind::RailDown);
    fake.set("*.blackhole=0");
    drop(pair);
    fake.is_empty();
}

#[test]
fn a_rail_that_answers_after_another_was_lost_ends_the_silence() {
    let fake = alone!(4, &twins(2));
    listen();
    let (pair, told) = one_by_one(60_000);
    let one = [Piece { here: 0, there: 0, len: 1 }];
    fake.set("fake0.blackhole=1;fake2.blackhole=1");
    let asked = fake.get("wr_write");
    assert_eq!(pair.carry(Direction::Read, &one), Ok(Status::Ok));
    told.awaits(EventKind::RailDown, 0);
    // The other one is asked at once, and by that or its work is not in doubt any more.
    wait(|| fake.get("wr_write") > asked, || "nobody is asked".into());
    pass();
    fake.set("*.blackhole=1");
    let e = pair.carry(Direction::Read, &one).unwrap_err();
    assert_eq!(e.status, Status::Disconnected, "{e}");
    told.awaits(EventKind::PeerGone, NO_LANE);
    let rails = [(EventKind::RailDown, 0), (EventKind::RailDown, 1)];
    assert_eq!(told.news(), [rails[0], rails[1], (EventKind::PeerGone, NO_LANE)]);
    fake.set("*.blackhole=0");
    drop(pair);
    fake.is_empty();
}

#[test]
fn idle_rails_are_asked_at_once_when_another_was_lost() {
    let fake = alone!(6, &twins(3));
    listen();
    let (a, b) = (config("a", &nics(0..3)), config("b", &nics(3..6)));
    let tune =
        |c, keepalive_ms| Config { stripe_width: 1, rail_timeout_ms: LIMIT, keepalive_ms, ..c };
    // The other side asks nobody, so it does not find it first.
    let pair = Pair::new(tune(a, 60_000), tune(b, 0), MIB);
    let told = Told::by(&pair.a);
    // The first carries the work, the second after it; the third is idle.
    fake.set("fake0.blackhole=1;fake2.blackhole=1");
    let one = [Piece { here: 0, there: 0, len: 1 }];
    assert_eq!(pair.carry(Direction::Read, &one), Ok(Status::Ok));
    told.awaits(EventKind::RailDown, 2);
    assert_eq!(told.news(), [(EventKind::RailDown, 0), (EventKind::RailDown, 2)]);
    assert!(said(&["rail 2", "does not answer for 300 ms (1 * rail_timeout_ms"]));
    fake.set("*.blackhole=0");
    drop(pair);
    fake.is_empty();
}
