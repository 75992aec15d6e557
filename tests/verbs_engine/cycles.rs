//! Connections made and ended over and over, with work in between, and tries that come to nothing:
//! what is there afterwards is what was there before.

use core::time::Duration;
use std::collections::BTreeMap;
use std::time::Instant;

use kvrail::host::engine::EngineInfo;
use kvrail::status::Status;
use kvrail::table::{Desc, Direction};

use crate::byhand::{dial, offer};
use crate::fake::{wait, Fake, HANG, MEASURED};
use crate::heap;
use crate::rejoin::{cycles, files, quick};
use crate::rig::{config, finish, notifs, threads, twins, Pair, Rng, Side, BOTH};
use crate::strangers::forged;

/// What is held while nobody is connected.
#[derive(PartialEq, Debug)]
struct Held {
    verbs: Vec<(&'static str, u64)>,
    files: usize,
    threads: usize,
    engines: [EngineInfo; 2],
}

fn held(fake: Fake, a: &Side, b: &Side) -> Held {
    let threads = threads().len();
    Held { verbs: fake.live(), files: files(), threads, engines: [a.e.info(), b.e.info()] }
}

/// True while a queue pair is being destroyed.
fn is_burying() -> bool {
    threads().iter().any(|stat| stat.contains("(kvrail-bury)"))
}

/// The bytes of the heap at each rest.
pub(crate) struct Heap(Vec<i64>);

impl Heap {
    /// For `n` looks.
    pub(crate) fn new(n: u64) -> Heap {
        Heap(Vec::with_capacity(n as usize))
    }

    pub(crate) fn look(&mut self) {
        self.0.push(heap::of_process());
    }

    /// A thread may be about to give something back, so what half of the looks exceed counts; and
    /// lists grow to their size in the first quarter. The rest is for one that did so later.
    pub(crate) fn is_flat(&self) {
        let (n, slack) = (self.0.len(), 2048);
        if n < 100 {
            eprintln!("{MEASURED}heap at rest: {n} cycles are too few to tell");
            return;
        }
        let middle = |part: &[i64]| {
            let mut part = part.to_vec();
            part.sort_unstable();
            part.get(part.len() / 2).copied().unwrap_or(0)
        };
        let (early, late) = (middle(&self.0[n / 4..n / 2]), middle(&self.0[n - n / 4..]));
        eprintln!(
            "{MEASURED}heap at rest: {early} bytes in the second quarter, {late} in the last"
        );
        assert!(late <= early + slack, "the heap grew from {early} to {late} bytes in {n} cycles");
    }
}

const BYTES: usize = 16 << 10;
const PAIRS: u64 = 16;

/// One transfer of `from` with `to` by prepared tables and with a notification.
fn carry(from: &Side, to: &Side, (peer, far): (u64, u64), direction: Direction, seed: u64) {
    let (here, there) = (from.mem.fill(seed), to.mem.fill(seed + 1));
    let piece = BYTES as u64 / PAIRS;
    let table = |base: u64, region: u64| {
        let desc = |i| Desc { addr: base + i * piece, len: piece, dev: 0, region };
        from.e.table_create(&(0..PAIRS).map(desc).collect::<Vec<_>>()).unwrap().raw()
    };
    let (local, remote) = (table(from.mem.base(), from.region), table(to.mem.base(), far));
    let order: Vec<u32> = (0..PAIRS as u32).collect();
    let turned: Vec<u32> = order.iter().rev().copied().collect();
    let t = from.e.prepare(direction, peer, local, &order, remote, &turned).unwrap().raw();
    let text = seed.to_le_bytes();
    from.e.post(t, Some(&text)).unwrap();
    assert_eq!(finish(&from.e, t), Ok(Status::Ok), "{direction:?}");
    let got = notifs(&to.e, 1);
    assert_eq!((got.len(), &got[0].1[..]), (1, &text[..]));
    let (source, end) = match direction {
        Direction::Read => (there, from.mem.copy()),
        Direction::Write => (here, to.mem.copy()),
    };
    let mut want = source;
    want.chunks_mut(piece as usize).for_each(|c| c.reverse());
    want.reverse();
    assert!(end == want, "{direction:?}: wrong bytes");
    from.e.release(t).unwrap();
    [local, remote].into_iter().for_each(|table| from.e.table_destroy(table).unwrap());
}

/// Everything both ways, by both sides.
fn work(pair: &Pair, i: u64) {
    let back = pair.b.e.peer_find(b"a").unwrap().raw();
    let near = pair.b.e.region_import(back, &pair.a.blob()).unwrap().raw();
    for (at, direction) in (0..).zip(BOTH) {
        carry(&pair.a, &pair.b, (pair.peer, pair.far), direction, 4 * i + at);
        carry(&pair.b, &pair.a, (back, near), direction, 4 * i + at + 2);
    }
    // Registered for this connection only; imports go by hand or with their peer.
    let more = pair.a.e.register(pair.a.mem.base(), BYTES as u64, 0).unwrap().raw();
    pair.a.e.deregister(more, false).unwrap();
    if i.is_multiple_of(2) {
        pair.b.e.region_forget(near).unwrap();
        pair.a.e.region_forget(pair.far).unwrap();
    }
}

/// Ends the connection from either side, or from both.
fn part(pair: &Pair, i: u64) {
    let a = pair.b.e.peer_find(b"a").unwrap().raw();
    if i % 3 == 1 {
        pair.b.e.peer_remove(a).unwrap();
        let gone = || pair.a.e.peer_state(pair.peer) != Ok(Status::Ok);
        wait(gone, || "a does not notice that it was removed".into());
    }
    pair.a.e.peer_remove(pair.peer).unwrap();
    if i % 3 == 2 {
        // It may have noticed and forgotten the other side by itself.
        let _ = pair.b.e.peer_remove(a);
    }
}

/// What must be there again after each cycle.
struct Rest {
    fake: Fake,
    /// After the first cycle: what each kind of work makes once is there from then on.
    first: Option<Held>,
    heap: Heap,
}

impl Rest {
    fn new(fake: Fake, n: u64) -> Rest {
        Rest { fake, first: None, heap: Heap::new(n) }
    }

    /// Waits until all is back.
    fn comes(&mut self, a: &Side, b: &Side, what: &str) {
        let now = || held(self.fake, a, b);
        let first = self.first.get_or_insert_with(|| {
            let calm = || [a, b].map(|s| s.e.info().peers) == [0, 0];
            wait(calm, || "the first connection does not end".into());
            wait(|| self.fake.get("live.qp") == 0, || "queue pairs are left".into());
            wait(|| !is_burying(), || "queue pairs are being destroyed for ever".into());
            now()
        });
        // A thread that has just begun has no name yet, or one that ends is still listed: the first
        // look may have counted some that are not there for good.
        let same =
            |n: Held| n.threads <= first.threads && Held { threads: first.threads, ..n } == *first;
        wait(|| same(now()), || format!("{what}: {:#?}\nnot {first:#?}", now()));
        self.heap.look();
    }
}

/// No failures, so nothing waits: ten thousand cycles take minutes.
#[test]
fn connects_and_transfers_leave_nothing() {
    let fake = alone!(4, &twins(2));
    let mut pair = Pair::twins(2, BYTES, quick);
    let n = cycles(200);
    let mut rest = Rest::new(fake, n);
    let mut took = [Duration::ZERO; 4];
    work(&pair, 0);
    part(&pair, 0);
    rest.comes(&pair.a, &pair.b, "the first");
    for i in 0..n {
        let start = Instant::now();
        let mut lap = |at: usize| took[at] += start.elapsed();
        pair.meet_again();
        lap(0);
        work(&pair, i);
        lap(1);
        part(&pair, i);
        lap(2);
        rest.comes(&pair.a, &pair.b, &format!("cycle {i}"));
        lap(3);
    }
    let each = took.map(|t| t / n as u32);
    eprintln!("{MEASURED}{n} cycles; connected, done, parted, at rest after {each:?}");
    rest.heap.is_flat();
    drop(pair);
    fake.is_empty();
}

/// How connects are made to fail, in turn.
const WAYS: u64 = 6;

/// The calls of one side's NICs that a connect needs: each may fail from the first time on, or from
/// the second, which is the rail's other queue pair.
const CALLS: [(&str, u64); 9] = [
    ("query_port", 1),
    ("query_gid", 1),
    ("reg_mr", 1),
    ("create_qp", 2),
    ("modify_init", 2),
    ("modify_rtr", 2),
    ("modify_rts", 2),
    ("post_recv", 2),
    ("post_send", 1),
];

/// Refused at any step: nobody there, a wrong secret, another life, NICs of either side that fail,
/// a dialler that proved itself and went.
#[test]
fn failed_connects_leave_nothing() {
    let fake = alone!(4, &twins(2));
    let side = |name: &str, nics: &str| {
        let mut c = config(name, nics);
        quick(&mut c);
        Side::new(c, BYTES)
    };
    let (a, b) = (side("a", "fake0,fake1"), side("b", "fake2,fake3"));
    let n = cycles(200);
    let (mut rest, mut rng) = (Rest::new(fake, n), Rng::new());
    rest.comes(&a, &b, "before any");
    let mut slowest = BTreeMap::new();
    for i in 0..n {
        let start = Instant::now();
        let byte = rng.below(16) as usize;
        let blob = match i % WAYS {
            0 => {
                // A port that was free just now.
                let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
                let at = free.local_addr().unwrap().to_string().parse().unwrap();
                forged(&b.e, |blob| blob.addrs = vec![at])
            }
            1 => forged(&b.e, |blob| blob.secret[2 * byte] ^= 1),
            2 => forged(&b.e, |blob| blob.incarnation[byte] ^= 1),
            _ => b.e.metadata().to_vec(),
        };
        let (call, most) = CALLS[rng.below(CALLS.len() as u64) as usize];
        let fails = |nics: [u32; 2], from: u64| {
            let each = nics.map(|n| format!("fake{n}.fail.{call}={from}+:EIO"));
            fake.set(&each.join(";"));
        };
        let kind = match i % WAYS {
            3 => {
                fails([2, 3], 1 + rng.below(most));
                format!("{call} of the acceptor")
            }
            4 => {
                fails([0, 1], 1 + rng.below(most));
                format!("{call} of the dialler")
            }
            way => ["nobody", "secret", "incarnation", "", "", "gone"][way as usize].to_owned(),
        };
        if i % WAYS == 5 {
            drop(dial(&b, b"a", [9; 16], offer(i, false, true)).unwrap());
        } else {
            let peer = a.e.peer_add(&blob, None).unwrap().raw();
            let e = a.e.peer_connect(peer, HANG).expect_err(&kind);
            assert!(e.status.is_err(), "{kind}: {e}");
            a.e.peer_remove(peer).unwrap();
        }
        fake.set(&format!("*.fail.{call}=off"));
        let most = slowest.entry(kind.clone()).or_insert(Duration::ZERO);
        *most = start.elapsed().max(*most);
        rest.comes(&a, &b, &kind);
    }
    eprintln!("{MEASURED}{n} connects failed; the slowest of each kind: {slowest:?}");
    rest.heap.is_flat();
    let (peer, far) = a.meet(&b);
    let mut pair = Pair { a, b, peer, far, rng };
    pair.moves_some(20);
    drop(pair);
    fake.is_empty();
}
