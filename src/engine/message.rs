//! Message buffers: a fixed pool of blocks, chains of blocks, and queues of chains.
//!
//! A message is a chain of blocks that begins with a header. It has one owner at a time: whoever
//! allocated it, the queue it was pushed to, whoever took it from there. Queues are many-producer
//! stacks that the one consumer takes whole and turns around, so each producer's order is kept.

use core::mem::MaybeUninit;

use crate::engine::arena::Arena;
use crate::engine::stack::{IndexStack, NONE};
use crate::engine::state::State;
use crate::mutant::mutant;
use crate::sync::{AtomicU32, Ordering};

/// Bytes of one block.
pub const BLOCK: usize = 256;
/// Longest message, in bytes.
pub const MAX_MESSAGE: usize = 65_536;
/// Longest sender name, in bytes.
pub const MAX_NAME: usize = 255;

/// What a message is, beside its bytes. Stored at the start of its first block.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Header {
    /// Bytes of the sender's name, which come first in the chain (incoming messages only).
    pub name: u32,
    /// Bytes of the message itself.
    pub len: u32,
    /// Outgoing: slot of the transfer that waits for it to be handed over, or [`NONE`].
    pub slot: u32,
    /// State of that transfer then.
    pub state: Option<State>,
    /// Peer slot that it goes to or came from.
    pub peer: u32,
    /// Outgoing: generation of the peer.
    pub life: u32,
}

impl Header {
    /// A message of nobody.
    pub const EMPTY: Header =
        Header { name: 0, len: 0, slot: NONE, state: None, peer: NONE, life: 0 };

    /// Bytes in the chain.
    pub const fn total(&self) -> usize {
        self.name as usize + self.len as usize
    }

    /// Blocks in the chain: at least one, for the header.
    pub const fn blocks(&self) -> u32 {
        (HEADER + self.total()).div_ceil(BLOCK) as u32
    }
}

const HEADER: usize = core::mem::size_of::<Header>();
const _: () = assert!(HEADER <= 64 && core::mem::align_of::<Header>() <= 16);

/// A message that the caller owns: the index of its first block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message(u32);

impl Message {
    /// For storage in an atomic word.
    pub const fn raw(self) -> u32 {
        self.0
    }

    /// Back from [`Message::raw`].
    pub const fn from_raw(raw: u32) -> Option<Message> {
        if raw == NONE {
            None
        } else {
            Some(Message(raw))
        }
    }
}

/// The pool.
#[derive(Debug)]
pub struct Pool<'m> {
    links: &'m [AtomicU32],
    queue: &'m [AtomicU32],
    bytes: *mut MaybeUninit<u8>,
    free: IndexStack,
    fresh: AtomicU32,
    used: AtomicU32,
}

// SAFETY: I4: bytes are touched only by a message's one owner; links and counts are atomic.
unsafe impl Sync for Pool<'_> {}
// SAFETY: I4: as above.
unsafe impl Send for Pool<'_> {}

impl<'m> Pool<'m> {
    /// A pool of `blocks` blocks out of the arena. Blocks are not touched before their first use.
    pub fn new(arena: &mut Arena<'m>, blocks: u32) -> Option<Pool<'m>> {
        let n = blocks as usize;
        Some(Pool {
            links: arena.array(n, |_| AtomicU32::new(NONE))?,
            queue: arena.array(n, |_| AtomicU32::new(NONE))?,
            bytes: arena.bytes(n * BLOCK)?.as_mut_ptr(),
            free: IndexStack::new(),
            fresh: AtomicU32::new(0),
            used: AtomicU32::new(0),
        })
    }

    /// Blocks in the pool.
    pub fn blocks(&self) -> u32 {
        self.links.len() as u32
    }

    /// Blocks in use. Acquire: what is not counted any more can be taken.
    pub fn used(&self) -> u32 {
        self.used.load(Ordering::Acquire)
    }

    /// Takes a message of the header's size. `None`: the pool is full.
    pub fn take(&self, header: Header) -> Option<Message> {
        let n = header.blocks();
        let first = self
            .free
            .pop_chain(self.links, n)
            .or_else(|| self.take_fresh(n))
            .or_else(|| self.take_mixed(n))?;
        self.used.fetch_add(n, Ordering::Relaxed);
        // SAFETY: I4: popped just now, so nobody else owns it; a block is aligned and longer than a
        // header.
        unsafe { self.header_at(first).write(header) };
        Some(Message(first))
    }

    fn header_at(&self, first: u32) -> *mut Header {
        self.bytes.wrapping_add(first as usize * BLOCK).cast()
    }

    /// Neither the free blocks nor the fresh ones suffice alone: the last fresh ones become free
    /// ones.
    fn take_mixed(&self, n: u32) -> Option<u32> {
        let rest = self.blocks() - self.fresh.load(Ordering::Relaxed);
        if let Some(first) = (rest > 0).then(|| self.take_fresh(rest)).flatten() {
            self.free.push_chain(self.links, first, first + rest - 1);
        }
        self.free.pop_chain(self.links, n)
    }

    fn take_fresh(&self, n: u32) -> Option<u32> {
        let mut first = self.fresh.load(Ordering::Relaxed);
        loop {
            let end = first.checked_add(n).filter(|&e| e <= self.blocks())?;
            match self.fresh.compare_exchange_weak(first, end, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => break,
                Err(now) => first = now,
            }
        }
        for i in first..first + n - 1 {
            self.links[i as usize].store(i + 1, Ordering::Relaxed);
        }
        Some(first)
    }

    /// Gives a message back.
    pub fn give(&self, message: Message) {
        let n = self.header(message).blocks();
        let mut last = message.0;
        for _ in 1..n {
            last = self.links[last as usize].load(Ordering::Relaxed);
        }
        // Counted after it can be taken: a stream is read only while enough is left, and a take
        // must then succeed.
        self.free.push_chain(self.links, message.0, last);
        self.used.fetch_sub(n, Ordering::Release);
    }

    /// The header of a message that the caller owns.
    pub fn header(&self, message: Message) -> Header {
        // SAFETY: I4: the caller owns the message, and `take` wrote its header.
        unsafe { self.header_at(message.0).read() }
    }

    /// Says which transfer waits for a message that the caller owns.
    pub fn set_owner(&self, message: Message, slot: u32, state: State) {
        let header = Header { slot, state: Some(state), ..self.header(message) };
        // SAFETY: I4: the caller owns the message.
        unsafe { self.header_at(message.0).write(header) };
    }

    /// Writes `data` at byte `at` of the chain; what does not fit the message is a bug and is cut.
    pub fn write(&self, message: Message, at: usize, data: &[u8]) {
        let total = self.header(message).total();
        let data = &data[..data.len().min(total.saturating_sub(at))];
        self.spans(message, at, data.len(), |to, from, n| {
            // SAFETY: I4: the span lies in a block of a message that the caller owns; `data` is
            // elsewhere.
            unsafe { core::ptr::copy_nonoverlapping(data[from..from + n].as_ptr(), to, n) };
        });
    }

    /// Calls `f` with each stretch of the bytes `at..at + len` of a message that the caller owns.
    /// All of them were written before.
    pub fn read(&self, message: Message, at: usize, len: usize, mut f: impl FnMut(&[u8])) {
        let len = len.min(self.header(message).total().saturating_sub(at));
        self.spans(message, at, len, |from, _, n| {
            // SAFETY: I4: the caller owns the message, whose writer filled these bytes before
            // handing it over.
            f(unsafe { core::slice::from_raw_parts(from, n) });
        });
    }

    /// Collects stretches of the bytes from `at` on, as many as `out` holds. How many, and how many
    /// bytes.
    pub fn parts<'a>(&'a self, m: Message, at: usize, out: &mut [&'a [u8]]) -> (usize, usize) {
        let (mut n, mut bytes, room) = (0, 0, out.len());
        let len = self.header(m).total().saturating_sub(at).min(room * BLOCK);
        self.spans(m, at, len, |from, _, count| {
            if n < room {
                // SAFETY: I4: the caller owns the message for as long as it uses the parts.
                out[n] = unsafe { core::slice::from_raw_parts(from, count) };
                n += 1;
                bytes += count;
            }
        });
        (n, bytes)
    }

    fn spans(&self, m: Message, at: usize, len: usize, mut f: impl FnMut(*mut u8, usize, usize)) {
        let at = at + HEADER;
        let mut block = m.0;
        for _ in 0..at / BLOCK {
            block = self.links[block as usize].load(Ordering::Relaxed);
        }
        let (mut offset, mut done) = (at % BLOCK, 0);
        while done < len {
            let n = (BLOCK - offset).min(len - done);
            let start = self.bytes.wrapping_add(block as usize * BLOCK + offset).cast::<u8>();
            f(start, done, n);
            done += n;
            offset = 0;
            if done < len {
                block = self.links[block as usize].load(Ordering::Relaxed);
            }
        }
    }
}

/// Many producers, one consumer at a time.
#[derive(Debug)]
pub struct Queue(AtomicU32);

impl Queue {
    /// An empty queue.
    pub fn new() -> Queue {
        Queue(AtomicU32::new(NONE))
    }

    /// True when nothing was pushed since the last take.
    pub fn is_empty(&self) -> bool {
        self.0.load(Ordering::Acquire) == NONE
    }

    /// Pushes a message, whose owner the queue becomes.
    pub fn push(&self, pool: &Pool<'_>, message: Message) {
        let mut head = self.0.load(Ordering::Relaxed);
        loop {
            pool.queue[message.0 as usize].store(head, Ordering::Relaxed);
            let order = if mutant("queue_push") { Ordering::Relaxed } else { Ordering::Release };
            match self.0.compare_exchange_weak(head, message.0, order, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Takes everything, oldest first.
    pub fn take_all(&self, pool: &Pool<'_>) -> Fifo {
        let mut newest = self.0.swap(NONE, Ordering::Acquire);
        let mut fifo = Fifo { first: NONE, last: newest };
        while newest != NONE {
            let older = pool.queue[newest as usize].load(Ordering::Relaxed);
            pool.queue[newest as usize].store(fifo.first, Ordering::Relaxed);
            fifo.first = newest;
            newest = older;
        }
        fifo
    }
}

impl Default for Queue {
    fn default() -> Self {
        Queue::new()
    }
}

/// Messages in order, owned by one thread.
#[derive(Clone, Copy, Debug)]
pub struct Fifo {
    first: u32,
    last: u32,
}

impl Fifo {
    /// None.
    pub const EMPTY: Fifo = Fifo { first: NONE, last: NONE };

    /// The oldest, left in place.
    pub fn front(&self) -> Option<Message> {
        Message::from_raw(self.first)
    }

    /// Takes the oldest.
    pub fn pop(&mut self, pool: &Pool<'_>) -> Option<Message> {
        let m = self.front()?;
        self.first = pool.queue[m.0 as usize].load(Ordering::Relaxed);
        if self.first == NONE {
            self.last = NONE;
        }
        Some(m)
    }

    /// Appends one message.
    pub fn push(&mut self, pool: &Pool<'_>, m: Message) {
        pool.queue[m.0 as usize].store(NONE, Ordering::Relaxed);
        self.append(pool, Fifo { first: m.0, last: m.0 });
    }

    /// Appends what `more` has.
    pub fn append(&mut self, pool: &Pool<'_>, more: Fifo) {
        if more.first == NONE {
            return;
        }
        match self.last {
            NONE => self.first = more.first,
            last => pool.queue[last as usize].store(more.first, Ordering::Relaxed),
        }
        self.last = more.last;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::engine::arena::BLOCK_ALIGN;

    #[test]
    fn free_and_fresh_blocks_serve_one_message_together() {
        let mut room = vec![0u128; 16 * (BLOCK + 64) / 16];
        let at = room.as_mut_ptr().cast::<u8>();
        let at = core::ptr::NonNull::new(at.wrapping_add(at.align_offset(BLOCK_ALIGN))).unwrap();
        // SAFETY: I1: the vector is larger than what is carved and outlives the pool.
        let pool = Pool::new(&mut unsafe { Arena::over(at, 15 * (BLOCK + 64)) }, 10).unwrap();
        let of = |blocks: usize| Header { len: (blocks * BLOCK - HEADER) as u32, ..Header::EMPTY };
        let six = pool.take(of(6)).unwrap();
        pool.give(six);
        let two = pool.take(of(2)).unwrap();
        // Four are free, four were never used.
        assert!(pool.take(of(9)).is_none());
        let eight = pool.take(of(8)).unwrap();
        let bytes: Vec<u8> = (0..8 * BLOCK - HEADER).map(|i| (i / 7) as u8).collect();
        pool.write(eight, 0, &bytes);
        let mut back = Vec::new();
        pool.read(eight, 0, bytes.len(), |b| back.extend_from_slice(b));
        assert_eq!(back, bytes);
        assert_eq!(pool.used(), 10);
        assert!(pool.take(of(1)).is_none());
        pool.give(two);
        pool.give(eight);
        assert_eq!(pool.used(), 0);
        assert!(pool.take(of(10)).is_some());
    }
}
