//! What the `channel` fuzz target stands on: pipes that take and give a bounded number of bytes, and
//! memory for pools.

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
    bytes: VecDeque<u8>,
    /// Bytes that were taken out at the other end.
    out: u64,
}

/// One end of a pipe. Copies are the same end.
#[derive(Clone, Debug)]
pub(crate) struct Pipe {
    ways: [Rc<RefCell<Way>>; 2],
    /// Most bytes that one call takes, and that one gives.
    limits: Rc<RefCell<(usize, usize)>>,
    tells: bool,
}

/// No limit to speak of.
pub(crate) fn far() -> usize {
    1 << 30
}

impl Pipe {
    /// Both ends. `tells`: they know what has arrived.
    pub(crate) fn pair(tells: bool) -> (Pipe, Pipe) {
        let ways = [Rc::default(), Rc::default()];
        let end = |ways: [&Rc<RefCell<Way>>; 2]| Pipe {
            ways: ways.map(Rc::clone),
            limits: Rc::new(RefCell::new((far(), far()))),
            tells,
        };
        (end([&ways[0], &ways[1]]), end([&ways[1], &ways[0]]))
    }

    pub(crate) fn limit(&self, take: usize, give: usize) {
        *self.limits.borrow_mut() = (take, give);
    }

    /// Bytes for the other end.
    pub(crate) fn put(&self, bytes: &[u8]) {
        self.ways[0].borrow_mut().bytes.extend(bytes);
    }
}

impl Link for Pipe {
    fn send(&mut self, parts: &[&[u8]]) -> Result<usize, Closed> {
        let mut left = self.limits.borrow().0;
        let mut took = 0;
        for part in parts {
            let n = part.len().min(left);
            self.put(&part[..n]);
            (took, left) = (took + n, left - n);
        }
        Ok(took)
    }

    fn acked(&mut self) -> Option<u64> {
        self.tells.then(|| self.ways[0].borrow().out)
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, Closed> {
        let mut way = self.ways[1].borrow_mut();
        let n = into.len().min(self.limits.borrow().1).min(way.bytes.len());
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
