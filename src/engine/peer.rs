//! The peer table: who is known, who is connected, and each one's messages.

use crate::engine::channel::Channel;
use crate::engine::message::{Fifo, Queue};
use crate::handle::{Handle, Kind};
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, Ordering, UnsafeCell};

/// Slot of the engine itself: transfers and messages to itself.
pub const SELF: u32 = 0;

/// How things stand with a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Link {
    /// Nobody's slot.
    Free = 0,
    /// Known, not connected (being dialled).
    Down = 1,
    /// Connected; every rail was proven.
    Up = 2,
    /// Gone for good, unless it is dialled again.
    Dead = 3,
}

/// One look at a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerState {
    /// Life of the slot.
    pub generation: u32,
    /// How things stand.
    pub link: Link,
    /// Why, when dead.
    pub status: Status,
}

/// What only the holder of the message token touches.
#[derive(Debug)]
pub struct PeerIo<L> {
    /// Messages taken from the queue, not yet sent.
    pub fifo: Fifo,
    /// The stream, when connected.
    pub channel: Option<Channel<L>>,
}

/// One peer.
#[derive(Debug)]
pub struct Peer<L> {
    word: AtomicU64,
    /// Lanes that have a rail to it, one bit each.
    pub rails: AtomicU32,
    /// Messages to it.
    pub queue: Queue,
    /// Streams that it had; numbers the current one.
    pub streams: AtomicU32,
    /// Sum of the costs of the current stream's messages that the application took.
    pub consumed: AtomicU64,
    /// Message side.
    pub io: UnsafeCell<PeerIo<L>>,
}

// SAFETY: I2: `io` is touched only by the holder of the message token; the rest is atomic.
unsafe impl<L: Send> Sync for Peer<L> {}

impl<L> Peer<L> {
    /// A free slot.
    pub fn new() -> Peer<L> {
        Peer {
            word: AtomicU64::new(1 << 32),
            rails: AtomicU32::new(0),
            queue: Queue::new(),
            streams: AtomicU32::new(0),
            consumed: AtomicU64::new(0),
            io: UnsafeCell::new(PeerIo { fifo: Fifo::EMPTY, channel: None }),
        }
    }

    /// A look at it.
    pub fn load(&self) -> PeerState {
        let word = self.word.load(Ordering::Acquire);
        let link = match (word >> 8) & 0xff {
            1 => Link::Down,
            2 => Link::Up,
            3 => Link::Dead,
            _ => Link::Free,
        };
        PeerState { generation: (word >> 32) as u32, link, status: Status::from_byte(word as u8) }
    }

    /// Publishes a state. Only the control side (one thread at a time) changes it.
    pub fn store(&self, s: PeerState) {
        let word = (u64::from(s.generation) << 32)
            | (u64::from(s.link as u8) << 8)
            | u64::from(s.status.byte());
        self.word.store(word, Ordering::Release);
    }

    /// The peer's state if `handle` is of this life.
    pub fn of(&self, handle: Handle) -> Result<PeerState, Status> {
        let s = self.load();
        if s.generation != handle.generation() || s.link == Link::Free {
            return Err(Status::Stale);
        }
        Ok(s)
    }

    /// The handle of this life.
    pub fn handle(&self, index: u32) -> Handle {
        Handle::new(Kind::Peer, index, self.load().generation)
    }
}

impl<L> Default for Peer<L> {
    fn default() -> Self {
        Peer::new()
    }
}
