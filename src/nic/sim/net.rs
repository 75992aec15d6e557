//! Messages' byte streams, in memory.

use super::Fabric;
use crate::nic::{Closed, Link, Net};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Nobody has this stream.
const FREE: u32 = u32::MAX;

/// One direction: a ring with one byte in each word, so that no memory is shared without an atomic.
#[derive(Debug)]
struct Ring<'m> {
    bytes: &'m [AtomicU32],
    read: AtomicU64,
    written: AtomicU64,
}

impl<'m> Ring<'m> {
    fn new(bytes: &'m [AtomicU32]) -> Ring<'m> {
        Ring { bytes, read: AtomicU64::new(0), written: AtomicU64::new(0) }
    }

    fn reset(&self) {
        self.read.store(0, Ordering::Relaxed);
        self.written.store(0, Ordering::Relaxed);
    }

    fn is_empty(&self) -> bool {
        self.read.load(Ordering::Acquire) == self.written.load(Ordering::Acquire)
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

    fn get(&self, into: &mut [u8], most: usize) -> usize {
        let from = self.read.load(Ordering::Relaxed);
        let there = self.written.load(Ordering::Acquire) - from;
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
}

impl<'m> Pipe<'m> {
    pub(super) fn new(a: &'m [AtomicU32], b: &'m [AtomicU32]) -> Pipe<'m> {
        Pipe {
            rings: [Ring::new(a), Ring::new(b)],
            ends: [AtomicU64::new(0), AtomicU64::new(0)],
            closed: AtomicU32::new(FREE),
        }
    }

    fn other_closed(&self, side: usize) -> bool {
        self.closed.load(Ordering::Acquire) & (2 >> side) != 0
    }
}

/// Takes a free stream.
pub(super) fn open<'m>(
    fabric: &'m Fabric<'m>,
    a: (u32, u32),
    b: (u32, u32),
) -> Option<(SimLink<'m>, SimLink<'m>)> {
    let pipe = fabric.pipes.iter().find(|p| p.closed.load(Ordering::Acquire) == FREE)?;
    for (end, (engine, peer)) in pipe.ends.iter().zip([a, b]) {
        end.store((u64::from(engine) << 32) | u64::from(peer), Ordering::Relaxed);
    }
    pipe.rings.iter().for_each(Ring::reset);
    pipe.closed.store(0, Ordering::Release);
    let chop = fabric.config.chop as usize;
    Some((SimLink { pipe, side: 0, chop }, SimLink { pipe, side: 1, chop }))
}

/// One end of a stream.
#[derive(Debug)]
pub struct SimLink<'m> {
    pipe: &'m Pipe<'m>,
    side: usize,
    chop: usize,
}

impl SimLink<'_> {
    /// Closes this end. The other one reads what is left and then sees it closed.
    pub fn close(self) {
        let bit = 1 << self.side;
        if self.pipe.closed.fetch_or(bit, Ordering::AcqRel) | bit == 3 {
            self.pipe.closed.store(FREE, Ordering::Release);
        }
    }

    /// How much goes at once: a number that changes with the position, so that cuts fall
    /// everywhere.
    fn most(&self, position: u64) -> usize {
        match self.chop {
            0 => usize::MAX,
            n => 1 + (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as usize % n,
        }
    }
}

impl Link for SimLink<'_> {
    fn send(&mut self, parts: &[&[u8]]) -> Result<usize, Closed> {
        if self.pipe.other_closed(self.side) {
            return Err(Closed { vendor: 0 });
        }
        let ring = &self.pipe.rings[self.side];
        Ok(ring.put(parts, self.most(ring.written.load(Ordering::Relaxed))))
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, Closed> {
        // Looked at first: what was written before the close is still delivered.
        let closed = self.pipe.other_closed(self.side);
        let ring = &self.pipe.rings[1 - self.side];
        match ring.get(into, self.most(ring.read.load(Ordering::Relaxed))) {
            0 if closed => Err(Closed { vendor: 0 }),
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
        let (mut n, pipes) = (0, self.fabric.pipes);
        for i in 0..pipes.len() {
            let at = (self.next + i) % pipes.len();
            let pipe = &pipes[at];
            let closed = pipe.closed.load(Ordering::Acquire);
            for side in 0..2 {
                let end = pipe.ends[side].load(Ordering::Relaxed);
                let ours = (end >> 32) as u32 == self.engine && closed & (1 << side) == 0;
                let something = !pipe.rings[1 - side].is_empty() || pipe.other_closed(side);
                if !ours || closed == FREE || !something {
                    continue;
                }
                let Some(peer) = into.get_mut(n) else {
                    // Those that were left out come first next time.
                    self.next = at;
                    return n;
                };
                *peer = end as u32;
                n += 1;
            }
        }
        n
    }
}
