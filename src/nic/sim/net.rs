//! Messages' byte streams, in memory: some like a TCP connection, some like the queue pairs for
//! messages of a rail.

use super::{Carries, Fabric, FabricConfig, SimWire};
use crate::nic::{Closed, Link, Net};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Nobody has this stream.
pub(super) const FREE: u32 = u32::MAX;

/// Words for each engine: how many of the others are in use at most, then an end of a stream each.
pub(super) const fn ends_of(config: &FabricConfig) -> usize {
    1 + 2 * config.pipes as usize
}

/// How the messages of a rail go. What was sent and has not arrived is lost when the rail breaks,
/// what arrived can be read, and the sender may not know which is which.
#[derive(Clone, Copy, Debug)]
pub struct Mail {
    /// The rail's wire, as the first of the two ends holds it (side 0).
    pub wire: SimWire,
    /// Ticks until bytes are in the other side's buffers.
    pub delay: u64,
    /// Ticks more until [`Link::acked`] tells.
    pub ack_delay: u64,
    /// Ticks without an answer after which a sender gives up.
    pub retry: u64,
}

/// One direction: a ring with one byte in each word, so that no memory is shared without an atomic.
#[derive(Debug)]
struct Ring<'m> {
    bytes: &'m [AtomicU32],
    read: AtomicU64,
    written: AtomicU64,
    /// Of those written: in the receiver's buffers; the sender knows it.
    arrived: Stage,
    acked: Stage,
    /// When the sender was last told anything (or had nothing to be told).
    heard_at: AtomicU64,
    /// Of those acknowledged: what the sender's last look at all streams found, and what it was
    /// told since.
    seen: AtomicU64,
    told: AtomicU64,
}

/// Bytes that have come so far, and those on their way with the time at which they set off.
#[derive(Debug)]
struct Stage {
    there: AtomicU64,
    coming: AtomicU64,
    since: AtomicU64,
}

impl Stage {
    fn new() -> Stage {
        Stage { there: AtomicU64::new(0), coming: AtomicU64::new(0), since: AtomicU64::new(0) }
    }

    fn reset(&self) {
        self.there.store(0, Ordering::Relaxed);
        self.coming.store(0, Ordering::Relaxed);
    }

    fn there(&self) -> u64 {
        self.there.load(Ordering::Acquire)
    }

    /// Moves on towards `source`, each part `delay` ticks behind. True when some came.
    fn advance(&self, source: u64, now: u64, delay: u64) -> bool {
        let mut came = false;
        for _ in 0..2 {
            let coming = self.coming.load(Ordering::Relaxed);
            if coming > self.there() {
                if now < self.since.load(Ordering::Relaxed) + delay {
                    break;
                }
                self.there.store(coming, Ordering::Release);
                came = true;
            }
            if source > coming {
                self.coming.store(source, Ordering::Relaxed);
                self.since.store(now, Ordering::Relaxed);
            }
        }
        came
    }
}

impl<'m> Ring<'m> {
    fn new(bytes: &'m [AtomicU32]) -> Ring<'m> {
        Ring {
            bytes,
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
            arrived: Stage::new(),
            acked: Stage::new(),
            heard_at: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            told: AtomicU64::new(0),
        }
    }

    fn reset(&self, now: u64) {
        self.read.store(0, Ordering::Relaxed);
        self.written.store(0, Ordering::Relaxed);
        self.arrived.reset();
        self.acked.reset();
        self.heard_at.store(now, Ordering::Relaxed);
        self.seen.store(0, Ordering::Relaxed);
        self.told.store(0, Ordering::Relaxed);
    }

    fn at(&self, position: u64) -> Option<&AtomicU32> {
        self.bytes.get((position % self.bytes.len().max(1) as u64) as usize)
    }

    fn put(&self, parts: &[&[u8]], most: usize) -> usize {
        let from = self.written.load(Ordering::Relaxed);
        let room = self.bytes.len() as u64 - (from - self.read.load(Ordering::Acquire));
        let mut n = 0;
        for &byte in parts.iter().copied().flatten().take(most.min(room as usize)) {
            if let Some(word) = self.at(from + n) {
                word.store(u32::from(byte), Ordering::Relaxed);
            }
            n += 1;
        }
        self.written.store(from + n, Ordering::Release);
        n as usize
    }

    /// Reads bytes before `end`.
    fn get(&self, into: &mut [u8], most: usize, end: u64) -> usize {
        let from = self.read.load(Ordering::Relaxed);
        let there = end - from;
        let mut n = 0;
        for byte in into.iter_mut().take(most.min(there as usize)) {
            *byte = self.at(from + n).map_or(0, |w| w.load(Ordering::Relaxed) as u8);
            n += 1;
        }
        self.read.store(from + n, Ordering::Release);
        n as usize
    }
}

/// One stream: two rings, and who holds which end.
#[derive(Debug)]
pub(super) struct Pipe<'m> {
    rings: [Ring<'m>; 2],
    /// `engine:32 | peer:32` of each end.
    ends: [AtomicU64; 2],
    /// One bit for each end that was closed; [`FREE`] while nobody has the stream.
    closed: AtomicU32,
    /// Mail: one bit for each end that is in error. Nothing comes to it or goes from it.
    failed: AtomicU32,
    /// Mail: its wire, delay, delay of what tells the sender, and patience. A patience of 0: a
    /// stream like TCP.
    mail: [AtomicU64; 4],
}

impl<'m> Pipe<'m> {
    pub(super) fn new(a: &'m [AtomicU32], b: &'m [AtomicU32]) -> Pipe<'m> {
        Pipe {
            rings: [Ring::new(a), Ring::new(b)],
            ends: [AtomicU64::new(0), AtomicU64::new(0)],
            closed: AtomicU32::new(FREE),
            failed: AtomicU32::new(0),
            mail: core::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    fn other_closed(&self, side: usize) -> bool {
        self.closed.load(Ordering::Acquire) & (2 >> side) != 0
    }

    fn is_failed(&self, side: usize) -> bool {
        self.failed.load(Ordering::Acquire) & (1 << side) != 0
    }

    fn set_mail(&self, mail: Option<Mail>) {
        let words = match mail {
            Some(m) => [m.wire.pack(), m.delay, m.ack_delay, m.retry.max(1)],
            None => [0; 4],
        };
        for (to, word) in self.mail.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
    }

    fn is_mail(&self) -> bool {
        self.mail[3].load(Ordering::Relaxed) > 0
    }

    /// Mail: lets what is on its way between the two ends move on, and gives up where nobody
    /// answers.
    fn advance(&self, fabric: &Fabric<'_>) {
        let [wire, delay, ack_delay, retry] =
            core::array::from_fn(|i| self.mail[i].load(Ordering::Relaxed));
        let now = fabric.now();
        let broken = self.failed.load(Ordering::Acquire) | self.closed.load(Ordering::Acquire) != 0;
        let open = !broken && fabric.wires.carries(SimWire::unpack(wire)) == Carries::All;
        for (side, ring) in self.rings.iter().enumerate() {
            let written = ring.written.load(Ordering::Acquire);
            if open {
                ring.arrived.advance(written, now, delay);
                let told = ring.acked.advance(ring.arrived.there(), now, ack_delay);
                if told || ring.acked.there() == written {
                    ring.heard_at.store(now, Ordering::Relaxed);
                }
            }
            let waits = ring.acked.there() < written;
            if waits && now > ring.heard_at.load(Ordering::Relaxed) + retry {
                self.failed.fetch_or(1 << side, Ordering::AcqRel);
            }
        }
    }

    /// Whether an end has something to look at.
    fn is_ready(&self, side: usize, fabric: &Fabric<'_>) -> bool {
        let (out, into) = (&self.rings[side], &self.rings[1 - side]);
        let read = into.read.load(Ordering::Acquire);
        if !self.is_mail() {
            return into.written.load(Ordering::Acquire) != read || self.other_closed(side);
        }
        self.advance(fabric);
        let seen = out.acked.there();
        out.seen.store(seen, Ordering::Relaxed);
        let news = seen != out.told.load(Ordering::Relaxed);
        into.arrived.there() != read || news || self.is_failed(side)
    }
}

/// Takes a free stream.
pub(super) fn open<'m>(
    fabric: &'m Fabric<'m>,
    a: (u32, u32),
    b: (u32, u32),
    mail: Option<Mail>,
) -> Option<(SimLink<'m>, SimLink<'m>)> {
    let free = |p: &Pipe<'_>| p.closed.load(Ordering::Acquire) == FREE;
    let index = fabric.pipes.iter().position(free)?;
    let pipe = &fabric.pipes[index];
    for (side, (engine, peer)) in [a, b].into_iter().enumerate() {
        let word = u64::from(engine) << 32 | u64::from(peer);
        pipe.ends[side].store(word, Ordering::Relaxed);
        let (most, own) = own_ends(fabric, engine)?;
        let at = own.iter().position(|e| e.load(Ordering::Relaxed) == FREE)?;
        own[at].store((index * 2 + side) as u32, Ordering::Release);
        if most.load(Ordering::Relaxed) as usize <= at {
            most.store(at as u32 + 1, Ordering::Release);
        }
    }
    pipe.rings.iter().for_each(|r| r.reset(fabric.now()));
    pipe.failed.store(0, Ordering::Relaxed);
    pipe.set_mail(mail);
    pipe.closed.store(0, Ordering::Release);
    let link = |side| SimLink { fabric, pipe, index, side };
    Some((link(0), link(1)))
}

/// Fails the mail of one end of a wire.
pub(super) fn fail(fabric: &Fabric<'_>, wire: SimWire) {
    let first = if wire.side() == 0 { wire } else { wire.other() };
    for pipe in fabric.pipes {
        let ours = pipe.mail[0].load(Ordering::Relaxed) == first.pack() && pipe.is_mail();
        if ours && pipe.closed.load(Ordering::Acquire) != FREE {
            pipe.failed.fetch_or(1 << wire.side(), Ordering::AcqRel);
        }
    }
}

/// The ends of an engine's streams, and how many words of them were ever used.
fn own_ends<'a>(fabric: &'a Fabric<'_>, engine: u32) -> Option<(&'a AtomicU32, &'a [AtomicU32])> {
    let each = ends_of(&fabric.config);
    fabric.ends.get(engine as usize * each..)?.get(..each)?.split_first()
}

/// One end of a stream.
#[derive(Debug)]
pub struct SimLink<'m> {
    fabric: &'m Fabric<'m>,
    pipe: &'m Pipe<'m>,
    index: usize,
    side: usize,
}

impl SimLink<'_> {
    /// Closes this end. The other one of a stream like TCP reads what is left and then sees it
    /// closed; with mail it learns of it only by sending.
    pub fn close(self) {
        let engine = (self.pipe.ends[self.side].load(Ordering::Relaxed) >> 32) as u32;
        let name = (self.index * 2 + self.side) as u32;
        let own = own_ends(self.fabric, engine).map_or(&[][..], |(_, own)| own);
        if let Some(end) = own.iter().find(|e| e.load(Ordering::Relaxed) == name) {
            end.store(FREE, Ordering::Release);
        }
        let bit = 1 << self.side;
        if self.pipe.closed.fetch_or(bit, Ordering::AcqRel) | bit == 3 {
            self.pipe.closed.store(FREE, Ordering::Release);
        }
    }

    /// How much goes at once: a number that changes with the position, so that cuts fall
    /// everywhere.
    fn most(&self, position: u64) -> usize {
        match self.fabric.config.chop as usize {
            0 => usize::MAX,
            n => 1 + (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as usize % n,
        }
    }
}

impl Link for SimLink<'_> {
    fn send(&mut self, parts: &[&[u8]]) -> Result<usize, Closed> {
        let ring = &self.pipe.rings[self.side];
        let mail = self.pipe.is_mail();
        let broken = if mail {
            self.pipe.advance(self.fabric);
            self.pipe.is_failed(self.side)
        } else {
            self.pipe.other_closed(self.side)
        };
        if broken {
            return Err(Closed { vendor: 0 });
        }
        if mail && ring.acked.there() == ring.written.load(Ordering::Relaxed) {
            // An answer is due from now on.
            ring.heard_at.store(self.fabric.now(), Ordering::Relaxed);
        }
        Ok(ring.put(parts, self.most(ring.written.load(Ordering::Relaxed))))
    }

    fn acked(&mut self) -> Option<u64> {
        if !self.pipe.is_mail() {
            return None;
        }
        // What a completion told that was taken at the last look, and no more.
        let ring = &self.pipe.rings[self.side];
        let seen = ring.seen.load(Ordering::Relaxed);
        ring.told.store(seen, Ordering::Relaxed);
        Some(seen)
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, Closed> {
        let ring = &self.pipe.rings[1 - self.side];
        // Looked at first: what came before the end is still delivered.
        let (over, end) = if self.pipe.is_mail() {
            self.pipe.advance(self.fabric);
            (self.pipe.is_failed(self.side), ring.arrived.there())
        } else {
            (self.pipe.other_closed(self.side), ring.written.load(Ordering::Acquire))
        };
        match ring.get(into, self.most(ring.read.load(Ordering::Relaxed)), end) {
            0 if over => Err(Closed { vendor: 0 }),
            n => Ok(n),
        }
    }
}

/// All streams of one engine.
#[derive(Debug)]
pub struct SimNet<'m> {
    fabric: &'m Fabric<'m>,
    engine: u32,
    next: usize,
}

impl<'m> SimNet<'m> {
    /// The streams of engine number `engine`.
    pub const fn new(fabric: &'m Fabric<'m>, engine: u32) -> SimNet<'m> {
        SimNet { fabric, engine, next: 0 }
    }
}

impl<'m> Net for SimNet<'m> {
    type Link = SimLink<'m>;

    fn ready(&mut self, into: &mut [u32]) -> usize {
        let Some((most, ends)) = own_ends(self.fabric, self.engine) else { return 0 };
        let ends = ends.get(..most.load(Ordering::Acquire) as usize).unwrap_or(&[]);
        let mut n = 0;
        for i in 0..ends.len() {
            let at = (self.next + i) % ends.len();
            let end = ends[at].load(Ordering::Acquire);
            let Some(pipe) = self.fabric.pipes.get(end as usize / 2) else { continue };
            let side = end as usize % 2;
            if pipe.closed.load(Ordering::Acquire) == FREE || !pipe.is_ready(side, self.fabric) {
                continue;
            }
            let Some(peer) = into.get_mut(n) else {
                // Those that were left out come first next time.
                self.next = at;
                return n;
            };
            *peer = pipe.ends[side].load(Ordering::Relaxed) as u32;
            n += 1;
        }
        n
    }
}
