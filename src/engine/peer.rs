//! The peer table: who is known, who is connected, and each one's messages.

use crate::engine::channel::Channel;
use crate::engine::message::{Fifo, Queue};
use crate::handle::{Handle, Kind};
use crate::limits::MAX_LANES;
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, Ordering, UnsafeCell};

/// Slot of the engine itself: transfers and messages to itself.
pub const SELF: u32 = 0;
/// Lane of a message link that belongs to no rail.
pub const NO_LANE: u32 = u32::MAX;

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

/// A link for messages: that of a rail, or one of its own.
#[derive(Debug)]
pub struct PeerLink<L> {
    /// Lane of its rail, or [`NO_LANE`].
    pub lane: u32,
    /// Id of its rail.
    pub id: u32,
    /// It is of no use any more.
    pub broken: bool,
    /// The driver's.
    pub link: L,
}

/// The links of one peer.
pub type Links<L> = heapless::Vec<PeerLink<L>, { MAX_LANES as usize }>;

/// What only the holder of the message token touches.
#[derive(Debug)]
pub struct PeerIo<L> {
    /// Messages taken from the queue, not yet sent.
    pub fifo: Fifo,
    /// The protocol, when connected.
    pub channel: Option<Channel>,
    /// What it may go over.
    pub links: Links<L>,
    /// Id of the link that it goes over; none: all were lost.
    pub on: Option<u32>,
    /// Sum of the costs of all messages that came over connections of this slot that ended.
    pub arrived: u64,
    /// While not connected: bytes of window beyond the least that what was not taken still fills.
    pub extra: u64,
}

/// What is known of the rails to a peer, beside which are up. Lanes are bits. Opened, closed and
/// heard of by the holder of the message token, so that these have an order.
#[derive(Debug)]
pub struct RailBook {
    /// Broken, or down at the peer, and not dropped yet.
    pub lost: AtomicU32,
    /// Of those and of those dropped: the peer said that its end is closed.
    pub heard: AtomicU32,
    /// Id + 1 of each lane's rail, until it is dropped; 0: none.
    ids: [AtomicU32; MAX_LANES as usize],
    /// Id + 1 of the rail that was dropped last and is not fenced.
    unfenced: [AtomicU32; MAX_LANES as usize],
    /// The lanes that have one, for who asks often.
    owes: AtomicU32,
    /// Id + 1 of the newest rail.
    newest: AtomicU32,
}

impl RailBook {
    fn new() -> RailBook {
        RailBook {
            lost: AtomicU32::new(0),
            heard: AtomicU32::new(0),
            ids: core::array::from_fn(|_| AtomicU32::new(0)),
            unfenced: core::array::from_fn(|_| AtomicU32::new(0)),
            owes: AtomicU32::new(0),
            newest: AtomicU32::new(0),
        }
    }

    /// The id of a lane's rail that is not dropped.
    pub fn id(&self, lane: u32) -> Option<u32> {
        self.ids.get(lane as usize)?.load(Ordering::Acquire).checked_sub(1)
    }

    /// A rail is being connected.
    pub fn open(&self, lane: u32, id: u32) {
        self.heard.fetch_and(!(1 << lane), Ordering::AcqRel);
        self.lost.fetch_and(!(1 << lane), Ordering::AcqRel);
        self.settle(lane);
        self.ids[lane as usize].store(id.wrapping_add(1), Ordering::Release);
        self.newest.fetch_max(id.wrapping_add(1), Ordering::AcqRel);
    }

    /// Lanes with a rail that is up, or broken and not dropped yet.
    pub fn held(&self) -> u32 {
        let bits = self.ids.iter().enumerate();
        bits.fold(0, |m, (i, w)| m | u32::from(w.load(Ordering::Acquire) != 0) << i)
    }

    /// A rail was closed here. Its id, and whether the peer had said so of its end.
    pub fn close(&self, lane: u32) -> Option<(u32, bool)> {
        let id = self.ids[lane as usize].swap(0, Ordering::AcqRel).checked_sub(1);
        if let Some(id) = id {
            self.unfenced[lane as usize].store(id.wrapping_add(1), Ordering::Release);
            self.owes.fetch_or(1 << lane, Ordering::AcqRel);
        }
        // Last, so that the lane counts as unsafe all the time.
        self.lost.fetch_and(!(1 << lane), Ordering::AcqRel);
        let id = id?;
        Some((id, self.heard.load(Ordering::Acquire) & 1 << lane != 0))
    }

    /// The peer said `down` of a rail. True: its end here is open; it is lost now. Or it is still
    /// being brought up here, and will be found dead.
    pub fn hear(&self, id: u32) -> bool {
        if id.wrapping_add(1) > self.newest.load(Ordering::Acquire) {
            return true;
        }
        let has = |list: &[AtomicU32]| {
            list.iter().position(|w| w.load(Ordering::Acquire) == id.wrapping_add(1))
        };
        if let Some(lane) = has(&self.ids) {
            self.heard.fetch_or(1 << lane, Ordering::AcqRel);
            self.lost.fetch_or(1 << lane, Ordering::AcqRel);
            return true;
        }
        if let Some(lane) = has(&self.unfenced) {
            self.heard.fetch_or(1 << lane, Ordering::AcqRel);
        }
        false
    }

    /// Lanes whose dropped rail the peer has not fenced.
    pub fn unfenced(&self) -> u32 {
        self.owes.load(Ordering::Acquire)
    }

    /// Lanes whose last rail may still bring something to the peer: it broke, and is not fenced.
    pub fn unsafe_lanes(&self) -> u32 {
        // In this order: a rail that is being dropped is in the second before it leaves the first.
        self.lost.load(Ordering::Acquire) | self.owes.load(Ordering::Acquire)
    }

    fn settle(&self, lane: u32) {
        self.unfenced[lane as usize].store(0, Ordering::Release);
        self.owes.fetch_and(!(1 << lane), Ordering::AcqRel);
    }

    /// Control side: the fence of a lane's dropped rail was seen to.
    pub fn fenced(&self, lane: u32) {
        self.settle(lane);
        self.heard.fetch_and(!(1 << lane), Ordering::AcqRel);
    }

    fn clear(&self) {
        let masks = [&self.lost, &self.heard, &self.owes, &self.newest];
        for word in self.ids.iter().chain(&self.unfenced).chain(masks) {
            word.store(0, Ordering::Release);
        }
    }
}

/// One peer.
#[derive(Debug)]
pub struct Peer<L> {
    word: AtomicU64,
    /// Lanes that have a rail to it, one bit each.
    pub rails: AtomicU32,
    /// What became of the others.
    pub book: RailBook,
    /// Messages to it.
    pub queue: Queue,
    /// Sum of the costs of the messages that came from this slot, over whichever connection of
    /// whichever peer, and that the application took.
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
            book: RailBook::new(),
            queue: Queue::new(),
            consumed: AtomicU64::new(0),
            io: UnsafeCell::new(PeerIo {
                fifo: Fifo::EMPTY,
                channel: None,
                links: heapless::Vec::new(),
                on: None,
                arrived: 0,
                extra: 0,
            }),
        }
    }

    /// Control side: nothing of a connection is left.
    pub fn forget_rails(&self) {
        self.book.clear();
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
