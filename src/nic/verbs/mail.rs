//! Message queue pairs as reliable byte streams, with credits.
//!
//! A *mailbox* is one message queue pair: one for each peer and lane. It has
//! [`MAIL_RECEIVES`] receive buffers and [`MAIL_SENDS`] send buffers of [`MAIL_BUFFER`] bytes, or
//! less where the device has less: each side tells the other how many receives it has. A
//! frame is 8 bytes of header (`len u16 | credits u8 | kind u8 | seq u32`, little-endian) and `len`
//! bytes. The kinds: 1 `PROOF`, the first frame of each side, carries its cookie; 2 `DATA` carries
//! bytes of the stream; 3 `CREDIT` carries nothing.
//!
//! **Credits.** A side may send as many frames as the other has receives posted, so no frame ever
//! meets a queue without a receive. Each frame uses up one credit; a receive that was posted again
//! is owed to the peer and told to it in the next frame of any kind. When half of all are owed and
//! no data carries them, a `CREDIT` frame does. `DATA` leaves the last credit alone: it is for
//! `CREDIT` only. That is why two sides that only send never starve each other: who spends its last
//! credit gives the other at least half a window with it, so both cannot be at 0 with nothing
//! under way. Two idle sides fall silent: a `CREDIT` frame needs half a window of received frames.
//!
//! **Order of a handshake.** One side leads: the one that dialled. The other brings its queue pair
//! to RTS, calls [`Post::connect`], which posts its receives, and tells the leader. Then the leader
//! does the same and its `connect` sends the first proof; the other answers with its own when that
//! arrived. So nobody sends to a queue pair that is not in RTR or has no receive. A proof fills its
//! whole buffer, so that a path that does not carry the MTU that was agreed on shows here.
//!
//! Everything here is called by the holder of the message token (I2).

use core::cell::UnsafeCell;
use core::fmt;

use rdma_core_sys::{ibv_cq, ibv_qp, ibv_wc, poll_cq, req_notify_cq, Zero, IBV_WC_SUCCESS};

use crate::engine::arena::Arena;
use crate::engine::stack::NONE;
use crate::nic::{Closed, Link, Net};

mod mailbox;
mod wire;

use mailbox::Mailbox;
use wire::Id;

/// Bytes of one buffer: a header, and what the engine hands over in one call (a frame head of 16
/// bytes and 4096 of a message), so that this goes out as one frame.
pub const MAIL_BUFFER: usize = 4096 + 64;
/// Receive buffers of a mailbox, which is the window of its peer.
pub const MAIL_RECEIVES: u32 = 16;
/// Send buffers of a mailbox.
pub const MAIL_SENDS: u32 = 16;
/// Fewest of either: a device with less carries no messages.
pub const MAIL_LEAST: u32 = 4;
/// Bytes of a mailbox's buffers: receive buffers first.
pub const MAIL_BYTES: usize = MAIL_BUFFER * (MAIL_RECEIVES + MAIL_SENDS) as usize;

/// Completions taken from one lane in one call of [`Post::poll`], so that a busy lane does not keep
/// the token.
const AT_ONCE: u32 = 64;
/// Completions asked for at once.
const CHUNK: usize = 16;

/// Codes of [`Closed`] beside the provider's status (`enum ibv_wc_status`, below 256).
pub mod vendor {
    /// The peer sent a frame that is not of the protocol.
    pub const FRAME: u32 = 0x100;
    /// The peer's cookie is not the one that was agreed on: another queue pair answered.
    pub const COOKIE: u32 = 0x101;
    /// The completion queue broke.
    pub const QUEUE: u32 = 0x102;
    /// The mailbox was closed.
    pub const CLOSED: u32 = 0x103;
    /// What was sent did not complete in time.
    pub const HANGS: u32 = 0x104;
    /// The provider refused a work request; its errno in the low bits.
    pub const POST: u32 = 0x1_0000;

    /// The peer broke the protocol: what it sends afterwards counts for nothing.
    pub(super) const fn is_protocol(code: u32) -> bool {
        matches!(code, FRAME | COOKIE)
    }
}

/// What a mailbox is made of.
#[derive(Clone, Copy)]
pub struct MailSetup {
    /// The message queue pair, in RTS, with `receives` receives and `sends` sends of one range
    /// each, both completing on the lane's queue, and sends signalled on request only.
    pub qp: *mut ibv_qp,
    /// [`MAIL_BYTES`] bytes, mapped and registered for local write.
    pub memory: *mut u8,
    /// Bytes there.
    pub len: usize,
    /// Their local key.
    pub lkey: u32,
    /// Bytes that the queue pair sends inline, 0 if none.
    pub inline: u32,
    /// Receives to post, a power of two from [`MAIL_LEAST`] to [`MAIL_RECEIVES`].
    pub receives: u32,
    /// Sends that may be in flight, a power of two from [`MAIL_LEAST`] to [`MAIL_SENDS`].
    pub sends: u32,
    /// Receives that the peer posts, as it said; as `receives`.
    pub window: u32,
    /// Own cookie, sent in the proof.
    pub cookie: [u8; 16],
    /// The peer's cookie, as it said over the control connection.
    pub expected: [u8; 16],
    /// Whether this side sends its proof at once: the peer has connected already. False: it
    /// answers the peer's.
    pub lead: bool,
}

impl fmt::Debug for MailSetup {
    /// Cookies are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MailSetup")
            .field("qp", &self.qp)
            .field("memory", &self.memory)
            .field("len", &self.len)
            .field("inline", &self.inline)
            .field("lead", &self.lead)
            .finish_non_exhaustive()
    }
}

/// Why a mailbox could not be set up. The host destroys the queue pair then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MailError {
    /// There is no such mailbox.
    Unknown {
        /// Peer asked for.
        peer: u32,
        /// Lane asked for.
        lane: u32,
        /// Lanes there are.
        lanes: u32,
    },
    /// The lane has no completion queue.
    NoLane(u32),
    /// It has a queue pair already.
    Busy,
    /// Too little memory: bytes given.
    Memory(usize),
    /// A number of receives or sends that is not allowed.
    Size(u32),
    /// The lane's completion queue has no room for another mailbox.
    Queue {
        /// Entries it has.
        entries: u32,
        /// Entries that other mailboxes may fill.
        used: u32,
    },
    /// The provider refused a work request.
    Post {
        /// Which: `ibv_post_recv` or `ibv_post_send`.
        call: &'static str,
        /// Its errno.
        errno: u32,
    },
}

impl fmt::Display for MailError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            MailError::Unknown { peer, lane, lanes } => write!(
                f,
                "no mailbox of peer slot {peer} on lane {lane}: there are {lanes} lanes; raise the \
                 limit of peers or lanes"
            ),
            MailError::NoLane(lane) => {
                write!(f, "lane {lane} has no completion queue for messages; open it first")
            }
            MailError::Busy => {
                write!(f, "the mailbox still has a queue pair; close it first")
            }
            MailError::Memory(len) => {
                write!(f, "{len} bytes of message buffers, but a mailbox needs {MAIL_BYTES}")
            }
            MailError::Size(n) => {
                write!(
                    f,
                    "{n} receives or sends of a message queue pair: a power of two from \
                     {MAIL_LEAST} to {MAIL_RECEIVES} is needed; the device may have too few"
                )
            }
            MailError::Queue { entries, used } => {
                write!(
                    f,
                    "the completion queue for messages has {entries} entries, and other peers may \
                     fill {used}: the device takes no more peers; remove some"
                )
            }
            MailError::Post { call, errno } => {
                write!(
                    f,
                    "{call} failed with errno {errno}; destroy the queue pair and make another"
                )
            }
        }
    }
}

/// A mailbox that its links and its [`Post`] reach.
#[derive(Debug)]
struct Cell(UnsafeCell<Mailbox>);

// SAFETY: I2: touched by the holder of the message token only; see `Post::connect`.
unsafe impl Sync for Cell {}

impl Cell {
    /// `f` does not reach the cell again.
    fn with<R>(&self, f: impl FnOnce(&mut Mailbox) -> R) -> R {
        // SAFETY: I2: the caller holds the message token, as it promised to `Post::connect`; before
        // that nothing is ever changed.
        f(unsafe { &mut *self.0.get() })
    }
}

/// A lane's completion queue.
#[derive(Clone, Copy, Debug)]
struct Lane {
    cq: *mut ibv_cq,
    /// Its size, and how many of it the open mailboxes may fill.
    entries: u32,
    used: u32,
    /// Completions were left in it, or it could not be armed.
    more: bool,
}

impl Lane {
    const CLOSED: Lane = Lane { cq: core::ptr::null_mut(), entries: 0, used: 0, more: false };
}

/// A peer in the queue of those that have something.
#[derive(Clone, Copy, Debug)]
struct Turn {
    next: u32,
    queued: bool,
}

/// All mailboxes of an engine.
#[derive(Debug)]
pub struct Post<'m> {
    boxes: &'m [Cell],
    lanes: &'m mut [Lane],
    turns: &'m mut [Turn],
    first: u32,
    last: u32,
    queued: u32,
}

// SAFETY: I2, V31: the queues may be used by any thread, and only the message token's holder does.
unsafe impl Send for Post<'_> {}

impl<'m> Post<'m> {
    /// Mailboxes for `peers` peers on `lanes` lanes, all closed. `None`: the arena is too small.
    pub fn new(arena: &mut Arena<'m>, peers: u32, lanes: u32) -> Option<Post<'m>> {
        let boxes = peers.checked_mul(lanes)? as usize;
        Some(Post {
            boxes: arena.array(boxes, |i| Cell(UnsafeCell::new(Mailbox::new(i as u32))))?,
            lanes: arena.array(lanes as usize, |_| Lane::CLOSED)?,
            turns: arena.array(peers as usize, |_| Turn { next: NONE, queued: false })?,
            first: NONE,
            last: NONE,
            queued: 0,
        })
    }

    /// Gives a lane its completion queue of `entries` entries. NULL takes it away; close the lane's
    /// mailboxes first. No more mailboxes can be open than it has room for.
    ///
    /// # Safety
    /// The queue lives until it is taken away or the `Post` is of no use any more, and nobody else
    /// polls it (V31).
    pub unsafe fn open_lane(&mut self, lane: u32, cq: *mut ibv_cq, entries: u32) {
        if let Some(l) = self.lanes.get_mut(lane as usize) {
            *l = Lane { cq, entries, ..Lane::CLOSED };
        }
    }

    fn cell(&self, peer: u32, lane: u32) -> Option<&'m Cell> {
        let lanes = self.lanes.len();
        if lane as usize >= lanes {
            return None;
        }
        self.boxes.get((peer as usize).checked_mul(lanes)? + lane as usize)
    }

    /// Opens a mailbox and posts all its receives: the peer may send from now on. The leading side
    /// sends its proof, so the peer must have done this before. After an error the mailbox is
    /// closed and the queue pair is to be destroyed.
    ///
    /// # Safety
    /// * The queue pair and the memory live, and nobody else uses them, until the queue pair was
    ///   destroyed after [`Post::close`], or after an error of this call (V30, V31).
    /// * From now on this `Post` and all its links are used by the holder of one token only (I2).
    pub unsafe fn connect(
        &mut self,
        peer: u32,
        lane: u32,
        setup: &MailSetup,
    ) -> Result<(), MailError> {
        let lanes = self.lanes.len() as u32;
        let cell = self.cell(peer, lane).ok_or(MailError::Unknown { peer, lane, lanes })?;
        let Some(l) = self.lanes.get_mut(lane as usize).filter(|l| !l.cq.is_null()) else {
            return Err(MailError::NoLane(lane));
        };
        if setup.len < MAIL_BYTES {
            return Err(MailError::Memory(setup.len));
        }
        let fine = |n: &&u32| n.is_power_of_two() && (MAIL_LEAST..=MAIL_RECEIVES).contains(n);
        if let Some(n) = [setup.receives, setup.sends, setup.window].iter().find(|n| !fine(n)) {
            return Err(MailError::Size(*n));
        }
        cell.with(|m| {
            if m.is_open() {
                return Err(MailError::Busy);
            }
            let (entries, used, need) = (l.entries, l.used, setup.receives + setup.sends);
            if entries.saturating_sub(used) < need {
                return Err(MailError::Queue { entries, used });
            }
            // SAFETY: V30, V31: the caller's promise; the length was checked above.
            unsafe { m.open(setup) }.inspect_err(|_| m.close())?;
            l.used += need;
            Ok(())
        })
    }

    /// Whether the queue pair works both ways. True: the peer's cookie arrived and the own one was
    /// received. False: it failed, or another cookie came. `None`: not known yet, or closed.
    pub fn proof(&self, peer: u32, lane: u32) -> Option<bool> {
        self.cell(peer, lane)?.with(|m| m.proof())
    }

    /// Number of the oldest frame that a mailbox sent and whose completion is due. The same number
    /// twice means no progress between. `None`: nothing is due.
    pub fn oldest(&self, peer: u32, lane: u32) -> Option<u32> {
        self.cell(peer, lane)?.with(|m| if m.is_open() { m.oldest() } else { None })
    }

    /// Breaks a mailbox whose frames do not complete, as if the queue pair had.
    pub fn give_up(&mut self, peer: u32, lane: u32) {
        let Some(cell) = self.cell(peer, lane) else { return };
        let open = cell.with(|m| {
            if m.is_open() {
                m.fail(vendor::HANGS);
            }
            m.is_open()
        });
        if open {
            self.enqueue(peer);
        }
    }

    /// The byte stream over a mailbox's present queue pair. After [`Post::close`] it says that it
    /// is closed, also when the mailbox is opened again.
    pub fn link(&self, peer: u32, lane: u32) -> MailLink<'m> {
        let cell = self.cell(peer, lane);
        MailLink { cell, epoch: cell.map_or(0, |c| c.with(|m| m.epoch())) }
    }

    /// Forgets a mailbox's queue pair: what it still had is gone, its later completions are
    /// dropped. The caller destroys the queue pair after this and then frees its memory.
    pub fn close(&mut self, peer: u32, lane: u32) {
        let Some(cell) = self.cell(peer, lane) else { return };
        let freed = cell.with(|m| {
            let freed = if m.is_open() { m.entries() } else { 0 };
            if freed > 0 {
                m.close();
            }
            freed
        });
        if let Some(l) = self.lanes.get_mut(lane as usize) {
            l.used = l.used.saturating_sub(freed);
        }
    }

    /// Takes completions of all lanes, and says which peers have something to receive or a broken
    /// queue pair, each once, as many as `ready` holds and in turn. A peer is named again and again
    /// until all was taken, or its broken mailbox was closed.
    pub fn poll(&mut self, ready: &mut [u32]) -> usize {
        for lane in 0..self.lanes.len() {
            self.poll_lane(lane);
        }
        let mut n = 0;
        for _ in 0..self.queued {
            if n == ready.len() {
                break;
            }
            let peer = self.first;
            self.first = self.turns[peer as usize].next;
            self.queued -= 1;
            self.turns[peer as usize].queued = false;
            if self.is_ready(peer) {
                ready[n] = peer;
                n += 1;
                self.enqueue(peer);
            }
        }
        n
    }

    /// Takes the completions that are in the queues now, all of them.
    pub fn gather(&mut self) {
        for lane in 0..self.lanes.len() {
            // A queue has so many entries, so no stream of arrivals keeps us here.
            for _ in 0..=self.lanes[lane].entries / AT_ONCE {
                self.poll_lane(lane);
                if !self.lanes[lane].more {
                    break;
                }
            }
        }
    }

    /// True when [`Post::poll`] has something to do that no completion event will tell: who is
    /// about to sleep looks again soon instead.
    pub fn is_pending(&self) -> bool {
        self.queued > 0 || self.lanes.iter().any(|l| l.more)
    }

    /// Asks every lane's queue for an event at its next completion. Poll once more after it.
    pub fn arm(&mut self) {
        for lane in self.lanes.iter_mut().filter(|l| !l.cq.is_null()) {
            // SAFETY: V31: the lane's queue lives.
            lane.more |= unsafe { req_notify_cq(lane.cq, false) } != 0;
        }
    }

    fn is_ready(&self, peer: u32) -> bool {
        (0..self.lanes.len() as u32)
            .filter_map(|lane| self.cell(peer, lane))
            .any(|cell| cell.with(|m| m.is_ready()))
    }

    fn enqueue(&mut self, peer: u32) {
        let Some(turn) = self.turns.get_mut(peer as usize) else { return };
        if turn.queued {
            return;
        }
        *turn = Turn { next: NONE, queued: true };
        if self.queued == 0 {
            self.first = peer;
        } else {
            self.turns[self.last as usize].next = peer;
        }
        self.last = peer;
        self.queued += 1;
    }

    fn poll_lane(&mut self, lane: usize) {
        let cq = self.lanes[lane].cq;
        self.lanes[lane].more = false;
        if cq.is_null() {
            return;
        }
        for _ in 0..AT_ONCE / CHUNK as u32 {
            let mut wcs: [ibv_wc; CHUNK] = core::array::from_fn(|_| ibv_wc::zeroed());
            // SAFETY: V31: the lane's queue lives, and `wcs` holds as many as are asked for.
            let n = unsafe { poll_cq(cq, CHUNK as i32, wcs.as_mut_ptr()) };
            let Ok(n) = usize::try_from(n) else {
                self.lose_lane(lane);
                return;
            };
            for wc in &wcs[..n.min(CHUNK)] {
                self.file(lane, wc);
            }
            if n < CHUNK {
                return;
            }
        }
        self.lanes[lane].more = true;
    }

    /// Hands one completion to its mailbox.
    fn file(&mut self, lane: usize, wc: &ibv_wc) {
        let id = Id::of(wc.wr_id);
        let (lanes, index) = (self.lanes.len(), id.mailbox as usize);
        let Some(cell) = self.boxes.get(index).filter(|_| index % lanes == lane) else { return };
        let ready = cell.with(|m| {
            if !m.is_open() || m.epoch() as u16 != id.epoch {
                return false;
            }
            // Of a failed completion only `wr_id` and `status` mean anything.
            match (wc.status, id.receive) {
                (IBV_WC_SUCCESS, true) => m.arrive(id.buffer, wc.byte_len),
                (IBV_WC_SUCCESS, false) => m.retire(id.buffer),
                (status, _) => m.fail(status),
            }
            m.settle();
            m.is_ready()
        });
        if ready {
            self.enqueue((index / lanes) as u32);
        }
    }

    /// The provider cannot tell completions any more: every mailbox of the lane is broken.
    fn lose_lane(&mut self, lane: usize) {
        self.lanes[lane].cq = core::ptr::null_mut();
        for peer in 0..self.turns.len() as u32 {
            let Some(cell) = self.cell(peer, lane as u32) else { continue };
            let open = cell.with(|m| {
                if m.is_open() {
                    m.fail(vendor::QUEUE);
                }
                m.is_open()
            });
            if open {
                self.enqueue(peer);
            }
        }
    }
}

impl<'m> Net for Post<'m> {
    type Link = MailLink<'m>;

    fn ready(&mut self, into: &mut [u32]) -> usize {
        self.poll(into)
    }

    fn arm(&mut self) -> bool {
        Post::arm(self);
        self.is_pending()
    }
}

/// The byte stream over one queue pair of a mailbox.
#[derive(Clone, Copy, Debug)]
pub struct MailLink<'m> {
    cell: Option<&'m Cell>,
    epoch: u32,
}

impl MailLink<'_> {
    /// True while its mailbox is open for this queue pair.
    pub fn is_current(&self) -> bool {
        self.cell.is_some_and(|c| c.with(|m| m.is_open() && m.epoch() == self.epoch))
    }

    fn with<R>(&self, f: impl FnOnce(&mut Mailbox) -> Result<R, Closed>) -> Result<R, Closed> {
        const GONE: Closed = Closed { vendor: vendor::CLOSED };
        self.cell.ok_or(GONE)?.with(|m| {
            if m.is_open() && m.epoch() == self.epoch {
                f(m)
            } else {
                Err(GONE)
            }
        })
    }
}

impl Link for MailLink<'_> {
    fn send(&mut self, parts: &[&[u8]]) -> Result<usize, Closed> {
        self.with(|m| m.send(parts))
    }

    fn acked(&mut self) -> Option<u64> {
        Some(self.with(|m| Ok(m.acked())).unwrap_or(0))
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, Closed> {
        self.with(|m| m.receive(into))
    }
}
