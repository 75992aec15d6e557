//! Models of the index stack, the message pool and the message queues (the notification ring).
//!
//! The bytes of a block are plain memory that loom cannot see, so each block has a loom cell beside
//! it, which the block's owner writes: two owners at a time, or a hand-over without order, are
//! caught by loom itself.
//!
//! | model | preemptions | seconds |
//! |---|---|---|
//! | `an_entry_is_popped_by_one_thread_at_a_time` | 3 | 0.3 |
//! | `messages_arrive_once_whole_and_in_each_senders_order` | 2 | 2 |
//! | `a_block_that_was_given_back_is_another_senders_alone` | 2 | 1 |
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(clippy::arc_with_non_send_sync, reason = "loom's threads are the model's own")]

use core::ptr::NonNull;
use kvrail::engine::arena::{Arena, BLOCK_ALIGN};
use kvrail::engine::message::{Header, Message, Pool, Queue};
use kvrail::engine::stack::{IndexStack, NONE};
use kvrail::sync::AtomicU32;
use loom::cell::UnsafeCell;
use std::sync::Arc;

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

fn spawn<R: 'static>(rig: &Arc<R>, f: impl FnOnce(&R) + 'static) -> loom::thread::JoinHandle<()> {
    let rig = rig.clone();
    loom::thread::spawn(move || f(&rig))
}

struct Free {
    stack: IndexStack,
    links: [AtomicU32; 3],
    owner: [UnsafeCell<u32>; 3],
}

impl Free {
    /// Pops an entry and writes what it names.
    fn pop(&self) -> Option<u32> {
        let i = self.stack.pop(&self.links)?;
        // SAFETY: loom checks that nobody else is in the cell.
        self.owner[i as usize].with_mut(|o| unsafe { *o += 1 });
        Some(i)
    }
}

#[test]
fn an_entry_is_popped_by_one_thread_at_a_time() {
    check(3, || {
        let rig = Arc::new(Free {
            stack: IndexStack::new(),
            links: core::array::from_fn(|_| AtomicU32::new(NONE)),
            owner: core::array::from_fn(|_| UnsafeCell::new(0)),
        });
        for i in (0..3).rev() {
            rig.stack.push(&rig.links, i);
        }
        // The one holds what it popped; the other pops two and puts the first back, so that the
        // head looks as before.
        let holder = spawn(&rig, |r| {
            let mine = [r.pop(), r.pop()];
            assert!(mine[0] != mine[1] || mine[0].is_none());
        });
        if let Some(first) = rig.pop() {
            let second = rig.pop();
            rig.stack.push(&rig.links, first);
            let third = rig.pop();
            assert!(second.is_none() || second != third);
        }
        holder.join().unwrap();
    });
}

const BLOCKS: usize = 4;

/// A pool, a queue, and the memory that both live in.
struct Ring {
    pool: Pool<'static>,
    queue: Queue,
    owner: [UnsafeCell<u32>; BLOCKS],
    _block: Block,
}

#[repr(align(128))]
struct Aligned {
    _bytes: [u8; 2048],
}

struct Block(*mut Aligned);

// SAFETY: a plain address that is freed by the last owner.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw`; the pool in it is not used any more, and loom's atomics
        // need no drop.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl Ring {
    fn new() -> Arc<Ring> {
        let block = Block(Box::into_raw(Box::new(Aligned { _bytes: [0; 2048] })));
        let base = NonNull::new(block.0.cast::<u8>()).unwrap();
        assert_eq!(base.as_ptr() as usize % BLOCK_ALIGN, 0);
        // SAFETY: the block outlives the pool, see `Ring`.
        let mut arena = unsafe { Arena::over(base, size_of::<Aligned>()) };
        let pool = Pool::new(&mut arena, BLOCKS as u32).expect("2 KiB hold four blocks");
        let owner = core::array::from_fn(|_| UnsafeCell::new(0));
        Arc::new(Ring { pool, queue: Queue::new(), owner, _block: block })
    }

    /// Sends a message that says `value`.
    fn send(&self, value: u32) -> bool {
        let Some(m) = self.pool.take(Header { len: 4, ..Header::EMPTY }) else { return false };
        // SAFETY: loom checks that nobody else is in the cell.
        self.owner[m.raw() as usize].with_mut(|o| unsafe { *o = value });
        self.pool.write(m, 0, &value.to_le_bytes());
        self.queue.push(&self.pool, m);
        true
    }

    fn read(&self, m: Message) -> u32 {
        // SAFETY: loom checks that the writer came before.
        let value = self.owner[m.raw() as usize].with(|o| unsafe { *o });
        let mut bytes = Vec::new();
        self.pool.read(m, 0, 4, |b| bytes.extend_from_slice(b));
        assert_eq!(bytes, value.to_le_bytes(), "the bytes are another message's");
        value
    }

    /// Takes all messages and gives them back.
    fn receive(&self, into: &mut Vec<u32>) {
        let mut fifo = self.queue.take_all(&self.pool);
        while let Some(m) = fifo.pop(&self.pool) {
            into.push(self.read(m));
            self.pool.give(m);
        }
    }
}

#[test]
fn messages_arrive_once_whole_and_in_each_senders_order() {
    check(2, || {
        let ring = Ring::new();
        let senders =
            [10, 20].map(|base| spawn(&ring, move |r| assert!(r.send(base) && r.send(base + 1))));
        let mut got = Vec::new();
        ring.receive(&mut got);
        for t in senders {
            t.join().unwrap();
        }
        ring.receive(&mut got);
        for base in [10, 20] {
            let of: Vec<u32> = got.iter().copied().filter(|v| v / 10 == base / 10).collect();
            assert_eq!(of, [base, base + 1], "of all: {got:?}");
        }
        assert_eq!(ring.pool.used(), 0);
    });
}

#[test]
fn a_block_that_was_given_back_is_another_senders_alone() {
    check(2, || {
        let ring = Ring::new();
        // The pool is used up, so that each further message takes blocks that were given back.
        for value in 1..=BLOCKS as u32 {
            assert!(ring.send(value));
        }
        let sender = spawn(&ring, |r| {
            r.send(30);
        });
        let mut got = Vec::new();
        ring.receive(&mut got);
        ring.send(40);
        sender.join().unwrap();
        ring.receive(&mut got);
        assert_eq!(got[..4], [1, 2, 3, 4]);
        assert!(got.contains(&40) && ring.pool.used() == 0);
    });
}
