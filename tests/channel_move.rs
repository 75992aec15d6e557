//! The message protocol over links that break: each message arrives once and in order, whatever
//! was lost with a link. Links are byte pipes here; they tell how much of what they took arrived.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "tests")]
#![cfg(not(loom))]

use core::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use kvrail::engine::arena::{Arena, BLOCK_ALIGN};
use kvrail::engine::channel::{cost, Channel, Event, Pools, SCRATCH};
use kvrail::engine::message::{Fifo, Header, Message, Pool};
use kvrail::nic::{Closed, Link};
use proptest::prelude::*;

/// One direction of a link.
#[derive(Default)]
struct Way {
    /// Taken from the sender, not with the receiver yet: lost when the link breaks.
    flying: VecDeque<u8>,
    /// With the receiver.
    landed: VecDeque<u8>,
    /// How many bytes got that far.
    acked: u64,
    /// The link broke: nothing lands any more.
    broken: bool,
}

/// One end of a link.
struct End {
    out: Rc<RefCell<Way>>,
    into: Rc<RefCell<Way>>,
    /// Most bytes at once.
    most: usize,
    /// The sender knows of arrivals only up to here, as a completion may come late.
    told: u64,
}

impl Link for End {
    fn send(&mut self, parts: &[&[u8]]) -> Result<usize, Closed> {
        let mut way = self.out.borrow_mut();
        let room = self.most.min(9_000_usize.saturating_sub(way.flying.len()));
        let before = way.flying.len();
        way.flying.extend(parts.iter().copied().flatten().take(room));
        Ok(way.flying.len() - before)
    }

    fn acked(&mut self) -> Option<u64> {
        Some(self.told)
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, Closed> {
        let mut way = self.into.borrow_mut();
        let n = into.len().min(way.landed.len()).min(self.most);
        for (to, byte) in into.iter_mut().zip(way.landed.drain(..n)) {
            *to = byte;
        }
        Ok(n)
    }
}

fn link(most: [usize; 2]) -> [End; 2] {
    let ways: [Rc<RefCell<Way>>; 2] = Default::default();
    let end = |s: usize| End {
        out: ways[s].clone(),
        into: ways[1 - s].clone(),
        most: most[s].max(1),
        told: 0,
    };
    [end(0), end(1)]
}

struct Side {
    channel: Channel,
    fifo: Fifo,
    pool: Pool<'static>,
    end: End,
    /// Which link this side uses.
    on: u32,
    sent: u32,
    done: Vec<u32>,
    got: Vec<u32>,
    consumed: u64,
    /// Rails that the other side said are down.
    downs: Vec<u32>,
}

fn pool() -> Pool<'static> {
    let words = vec![0u128; (2 << 20) / 16];
    let at = words.leak().as_mut_ptr().cast::<u8>();
    let at = core::ptr::NonNull::new(at.wrapping_add(at.align_offset(BLOCK_ALIGN))).unwrap();
    // SAFETY: I1: leaked, so it outlives everything; longer than what is carved.
    Pool::new(&mut unsafe { Arena::over(at, (2 << 20) - BLOCK_ALIGN) }, 4_000).unwrap()
}

const WINDOW: u64 = 40_000;

/// The bytes of message `n`: its number, then a pattern.
fn bytes(n: u32, len: usize) -> Vec<u8> {
    n.to_le_bytes().into_iter().chain((4..len).map(|i| (n as usize + i) as u8)).collect()
}

impl Side {
    fn new(end: End) -> Side {
        Side {
            channel: Channel::new(1, b"x", WINDOW, WINDOW),
            fifo: Fifo::EMPTY,
            pool: pool(),
            end,
            on: 0,
            sent: 0,
            done: Vec::new(),
            got: Vec::new(),
            consumed: 0,
            downs: Vec::new(),
        }
    }

    fn push(&mut self, len: usize) {
        let len = len.max(4);
        let header = Header { len: len as u32, slot: self.sent, ..Header::EMPTY };
        let Some(m) = self.pool.take(header) else { return };
        self.pool.write(m, 0, &bytes(self.sent, len));
        self.fifo.push(&self.pool, m);
        self.sent += 1;
    }

    fn send(&mut self) {
        let (done, pool) = (&mut self.done, &self.pool);
        let sent = |m: Message| {
            done.push(pool.header(m).slot);
            pool.give(m);
        };
        let to = &mut self.end;
        self.channel.send(to, pool, &mut self.fifo, self.consumed, sent).unwrap();
    }

    fn receive(&mut self) -> bool {
        let Side { channel, fifo, pool, end, done, got, consumed, downs, .. } = self;
        let pools = Pools { tx: pool, rx: pool };
        let mut scratch = [0; SCRATCH];
        let take = |e: Event| {
            match e {
                Event::Got(m) => {
                    let mut all = vec![];
                    pool.read(m, 0, usize::MAX / 2, |b| all.extend_from_slice(b));
                    let n = u32::from_le_bytes(all[1..5].try_into().unwrap());
                    assert!(all[1..] == bytes(n, all.len() - 1), "message {n} is garbled");
                    got.push(n);
                    *consumed += cost(all.len() - 1);
                    pool.give(m);
                }
                Event::Arrived(m) => {
                    done.push(pool.header(m).slot);
                    pool.give(m);
                }
                Event::Down(id) => downs.push(id),
            }
            false
        };
        channel.receive(end, &pools, fifo, &mut scratch, take).unwrap()
    }

    /// Takes in all that has arrived, then leaves the link.
    fn leave(&mut self, end: End) {
        while self.receive() {}
        let (done, pool) = (&mut self.done, &self.pool);
        self.channel.settle(&mut self.end, |m| {
            done.push(pool.header(m).slot);
            pool.give(m);
        });
        let pools = Pools { tx: &self.pool, rx: &self.pool };
        self.channel.move_on(&pools, &mut self.fifo);
        self.end = end;
        self.on += 1;
    }
}

#[derive(Clone, Debug)]
enum Act {
    Push(bool, usize),
    Send(bool),
    Receive(bool),
    /// Bytes of a direction land.
    Land(bool, usize),
    /// The sender learns of them.
    Tell(bool),
    /// The link breaks; one side sees it first.
    Break(bool, [usize; 2]),
}

fn act() -> impl Strategy<Value = Act> {
    let side = any::<bool>();
    let len = prop_oneof![3 => 0usize..600, 1 => 0usize..12_000];
    prop_oneof![
        3 => (side, len).prop_map(|(s, n)| Act::Push(s, n)),
        6 => side.prop_map(Act::Send),
        6 => side.prop_map(Act::Receive),
        6 => (side, 1usize..9_000).prop_map(|(s, n)| Act::Land(s, n)),
        3 => side.prop_map(Act::Tell),
        1 => (side, [256usize..9_000, 256usize..9_000]).prop_map(|(s, m)| Act::Break(s, m)),
    ]
}

fn land(side: &Side, most: usize) {
    let mut way = side.end.out.borrow_mut();
    if way.broken {
        way.flying.clear();
    }
    let n = most.min(way.flying.len());
    let bytes: Vec<u8> = way.flying.drain(..n).collect();
    way.landed.extend(bytes);
    way.acked += n as u64;
}

fn tell(side: &mut Side) {
    let acked = side.end.out.borrow().acked;
    side.end.told = acked;
}

fn run(acts: &[Act]) -> Result<(), TestCaseError> {
    let [a, b] = link([9_000; 2]);
    let mut sides = [Side::new(a), Side::new(b)];
    // The end of a new link that the other side has not moved to yet.
    let mut waiting: Option<(usize, End)> = None;
    let mut breaks = 0;
    let quiet =
        [Act::Land(false, 9_000), Act::Land(true, 9_000), Act::Tell(false), Act::Tell(true)];
    let tail = [Act::Send(false), Act::Send(true), Act::Receive(false), Act::Receive(true)];
    let settle = quiet.iter().chain(&tail).cycle().take(8 * 20_000);
    for (i, act) in acts.iter().chain(settle).enumerate() {
        match act.clone() {
            Act::Push(s, n) => sides[usize::from(s)].push(n),
            Act::Send(s) => sides[usize::from(s)].send(),
            Act::Receive(s) => {
                let s = usize::from(s);
                // What comes over a new link makes a side leave the old one.
                let moved = waiting
                    .as_ref()
                    .is_some_and(|(w, end)| *w == s && !end.into.borrow().landed.is_empty());
                if moved {
                    let (_, end) = waiting.take().unwrap();
                    sides[s].leave(end);
                    // The other side's own DOWN comes behind its RESUME, and may be lost yet.
                    sides[s].channel.down(breaks, false);
                }
                sides[s].receive();
            }
            Act::Land(s, n) => land(&sides[usize::from(s)], n),
            Act::Tell(s) => tell(&mut sides[usize::from(s)]),
            Act::Break(s, most) => {
                if waiting.is_some() {
                    continue;
                }
                // What flies is lost both ways.
                for side in &sides {
                    side.end.out.borrow_mut().broken = true;
                }
                breaks += 1;
                let s = usize::from(s);
                let [x, y] = link(most);
                let (mine, theirs) = if s == 0 { (x, y) } else { (y, x) };
                sides[s].leave(mine);
                sides[s].channel.down(breaks, false);
                waiting = Some((1 - s, theirs));
            }
        }
        let told = |s: &Side| (1..=breaks).all(|id| s.downs.contains(&id));
        let idle = |s: &Side| s.done.len() == s.sent as usize && told(s);
        let read = (0..2).all(|s| sides[1 - s].got.len() == sides[s].sent as usize);
        if i > acts.len() && waiting.is_none() && read && sides.iter().all(idle) {
            break;
        }
    }
    for s in 0..2 {
        let (from, to) = (&sides[s], &sides[1 - s]);
        let all: Vec<u32> = (0..from.sent).collect();
        prop_assert_eq!(&to.got, &all, "messages of side {} after {} breaks", s, breaks);
        prop_assert_eq!(&from.done, &all, "what the sender was told");
    }
    // Both sides know of each rail that is down, and nothing is left of it.
    for side in &mut sides {
        side.downs.sort_unstable();
        side.downs.dedup();
        prop_assert_eq!(&side.downs, &(1..=breaks).collect::<Vec<_>>());
        prop_assert_eq!(side.pool.used(), 0);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn messages_arrive_once_and_in_order_whatever_breaks(
        acts in proptest::collection::vec(act(), 0..400),
    ) {
        run(&acts)?;
    }
}
