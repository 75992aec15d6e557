//! What the `channel` fuzz target stands on: pipes that take and give a bounded number of bytes and
//! can break, and memory for pools.

use core::cell::RefCell;
use core::ptr::NonNull;
use kvrail::engine::arena::{Arena, BLOCK_ALIGN};
use kvrail::engine::message::{Pool, BLOCK};
use kvrail::nic::{Closed, Link};
use std::collections::VecDeque;
use std::rc::Rc;

/// One direction.
#[derive(Debug, Default)]
struct Way {
    /// Bytes that were not taken out yet.
    bytes: VecDeque<u8>,
    /// Bytes that were taken out, that are with the receiver, and that the sender knows of.
    out: u64,
    arrived: u64,
    known: u64,
    broken: bool,
}

impl Way {
    fn arrive(&mut self, most: u64) {
        let all = self.out + self.bytes.len() as u64;
        if !self.broken {
            self.arrived = self.arrived.max(self.out.saturating_add(most).min(all));
        }
    }
}

/// How one end is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Temper {
    /// Most bytes that one call takes.
    pub(crate) take: usize,
    /// Most bytes that one call gives.
    pub(crate) give: usize,
    /// Bytes that have arrived and are not known to have.
    pub(crate) lag: usize,
}

/// Everything at once.
pub(crate) const FAST: Temper = Temper { take: 1 << 30, give: 1 << 30, lag: 0 };

/// One end of a pipe. Copies are the same end.
#[derive(Clone, Debug)]
pub(crate) struct Pipe {
    ways: [Rc<RefCell<Way>>; 2],
    temper: Rc<RefCell<Temper>>,
    tells: bool,
}

impl Pipe {
    /// Both ends. `tells`: they know what has arrived.
    pub(crate) fn pair(tells: bool) -> (Pipe, Pipe) {
        let ways = [Rc::default(), Rc::default()];
        let end = |ways: [&Rc<RefCell<Way>>; 2]| Pipe {
            ways: ways.map(Rc::clone),
            // Who lost a link does not know of all that arrived.
            temper: Rc::new(RefCell::new(Temper { lag: 700, ..FAST })),
            tells,
        };
        (end([&ways[0], &ways[1]]), end([&ways[1], &ways[0]]))
    }

    pub(crate) fn be(&self, temper: Temper) {
        *self.temper.borrow_mut() = temper;
    }

    /// Breaks both directions. What has arrived can still be taken out, the rest is lost.
    pub(crate) fn fail(&self) {
        for way in &self.ways {
            let mut way = way.borrow_mut();
            let keep = (way.arrived - way.out) as usize;
            way.bytes.truncate(keep);
            way.broken = true;
        }
    }

    /// Bytes for the other end.
    pub(crate) fn put(&self, bytes: &[u8]) {
        self.ways[0].borrow_mut().bytes.extend(bytes);
    }

    /// Up to `most` bytes of ours reach the other end.
    pub(crate) fn arrive(&self, most: usize) {
        self.ways[0].borrow_mut().arrive(most as u64);
    }
}

impl Link for Pipe {
    fn send(&mut self, parts: &[&[u8]]) -> Result<usize, Closed> {
        if self.ways[0].borrow().broken {
            return Err(Closed { vendor: 0 });
        }
        let mut left = self.temper.borrow().take;
        let mut took = 0;
        for part in parts {
            let n = part.len().min(left);
            self.put(&part[..n]);
            (took, left) = (took + n, left - n);
        }
        Ok(took)
    }

    fn acked(&mut self) -> Option<u64> {
        let mut way = self.ways[0].borrow_mut();
        let known = way.arrived.saturating_sub(self.temper.borrow().lag as u64);
        way.known = way.known.max(known);
        self.tells.then_some(way.known)
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, Closed> {
        let mut way = self.ways[1].borrow_mut();
        let give = self.temper.borrow().give;
        way.arrive(give as u64);
        let n = into.len().min(give.max(1)).min((way.arrived - way.out) as usize);
        if n == 0 && way.broken {
            return Err(Closed { vendor: 0 });
        }
        into[..n].copy_from_slice(&way.bytes.make_contiguous()[..n]);
        way.bytes.drain(..n);
        way.out += n as u64;
        Ok(n)
    }
}

/// Memory for the two pools of one end.
pub(crate) struct Room(Vec<u128>);

/// Blocks of the pool for outgoing messages, and of that for incoming ones.
const BLOCKS: [usize; 2] = [600, 4096];
const BYTES: usize = (BLOCKS[0] + BLOCKS[1]) * (BLOCK + 8) + 4096;

impl Room {
    pub(crate) fn new() -> Room {
        Room(vec![0; BYTES / 16])
    }

    /// Pools for outgoing and incoming messages.
    pub(crate) fn pools(&self) -> [Pool<'_>; 2] {
        let at = self.0.as_ptr().cast_mut().cast::<u8>();
        let skip = at.align_offset(BLOCK_ALIGN);
        let at = NonNull::new(at.wrapping_add(skip)).expect("memory has an address");
        // SAFETY: the vector is longer than that, and nobody else looks into it.
        let mut arena = unsafe { Arena::over(at, BYTES - BLOCK_ALIGN) };
        BLOCKS.map(|n| Pool::new(&mut arena, n as u32).expect("it was measured"))
    }
}
