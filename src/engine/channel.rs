//! The message protocol with one peer: frames, order, the window that keeps a slow reader from ever
//! holding up control frames, and the move to another link when one is lost.
//!
//! A frame is `len u32 | kind u8 | 0 0 0 | seq u64 | len bytes`, little-endian. `MSG` carries a
//! message and its number. `ACK` carries the number that is expected next and, as 8 bytes, the
//! window's end: a sum of message costs that the sender may reach. The receiver moves the end as
//! its application takes messages, so it can always read on, and memory for messages nobody takes
//! is bounded per peer. `DOWN` carries a rail's id as its number, and 8 bytes of flags: the sender
//! has closed its end of that rail, so nothing more of it can land there.
//!
//! *Moving.* A message is kept until the link says that it arrived. When the link is lost, all kept
//! ones go back to the front of the queue with their numbers. The first frame of each side on the
//! next link is `RESUME`: the number that it expects next and the window's end. What lies before
//! that number has arrived and is not sent again; the rest is sent from there on. A side that sees
//! the other one's `RESUME` on a link that it did not use yet moves there too. Before it answers it
//! takes in all that the old link has, and nothing of it afterwards, so its number is exact.
//!
//! Owned by the holder of the message token.

use crate::engine::message::{Fifo, Header, Message, Pool, MAX_MESSAGE, MAX_NAME};
use crate::nic::{Closed, Link};
use heapless::Deque;

const FRAME: usize = 16;
/// Messages that may be on their way on one stream: each takes at least one of a mailbox's send
/// buffers, of which there are fewer.
const WAITING: usize = 32;
const MSG: u8 = 1;
const ACK: u8 = 2;
const RESUME: u8 = 3;
const DOWN: u8 = 4;
/// Flag of `DOWN`: the sender has not heard the other side's yet.
const ANSWER: u64 = 1;
/// Rails that may be told to be down at one time.
const DOWNS: usize = 2 * crate::limits::MAX_RAILS as usize;

/// What a message counts against the window: its bytes and the most that a block chain adds to
/// them.
pub const fn cost(len: usize) -> u64 {
    len as u64 + 552
}

/// Bytes read from a stream at once.
pub const SCRATCH: usize = 16 * 1024;

/// Blocks that must be free before a stream is read: what `SCRATCH` bytes of the shortest messages,
/// and one longest message, can take.
pub const READ_RESERVE: u32 =
    (SCRATCH / FRAME * 2) as u32 + (MAX_MESSAGE + 1024).div_ceil(super::message::BLOCK) as u32;

/// Why a stream is of no use any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// It was closed.
    Closed(Closed),
    /// The peer does not speak the protocol: the kind or length seen.
    Garbage {
        /// Frame kind.
        kind: u8,
        /// Frame length.
        len: u32,
    },
}

/// A rail that was closed here, until both sides have said so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Down {
    id: u32,
    /// On its way to the peer, over the link in use.
    told: bool,
    /// The peer said so too.
    heard: bool,
}

/// What came in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A whole message, whose owner the receiver of this becomes.
    Got(Message),
    /// The peer has closed its end of the rail with this id. Answered with whether this side's end
    /// is still open, and thus will be told of later.
    Down(u32),
    /// A message of ours arrived, as the peer says after a move.
    Arrived(Message),
}

/// Where messages go to and come from.
#[derive(Debug)]
pub struct Pools<'a, 'm> {
    /// Outgoing messages.
    pub tx: &'a Pool<'m>,
    /// Incoming messages.
    pub rx: &'a Pool<'m>,
}

/// One peer's end of the protocol.
#[derive(Debug)]
pub struct Channel {
    peer: u32,
    name: [u8; MAX_NAME],
    name_len: usize,
    // Sending.
    out: [u8; FRAME + 8],
    out_len: usize,
    out_at: usize,
    current: Option<(Message, usize)>,
    /// Bytes that the stream took, and messages it took whole that are not known to have arrived,
    /// each with its end.
    tx_bytes: u64,
    waiting: Deque<(Message, u64), WAITING>,
    tx_seq: u64,
    tx_cost: u64,
    tx_end: u64,
    downs: heapless::Vec<Down, DOWNS>,
    // Moving.
    /// `RESUME` is to be sent.
    resume: bool,
    /// The peer's is awaited: no message goes before it. The number behind the last one that was
    /// given to a link.
    awaited: Option<u64>,
    // Receiving.
    head: [u8; FRAME + 8],
    head_len: usize,
    incoming: Option<(Message, usize)>,
    rx_seq: u64,
    /// Costs of what came from this slot so far, and the end of what may come. The peer counts from
    /// `origin` on: what came over earlier connections.
    rx_cost: u64,
    window: u64,
    told_end: u64,
    origin: u64,
    /// The peer is told the end, though it has not moved.
    tell: bool,
}

impl Channel {
    /// A channel on a fresh link. `window`: what this side lets the peer have outstanding;
    /// `peer_window`: the reverse. `peer` is its slot.
    pub fn new(peer: u32, name: &[u8], window: u64, peer_window: u64) -> Channel {
        let name_len = name.len().min(MAX_NAME);
        let mut own = [0; MAX_NAME];
        own[..name_len].copy_from_slice(&name[..name_len]);
        Channel {
            peer,
            name: own,
            name_len,
            out: [0; FRAME + 8],
            out_len: 0,
            out_at: 0,
            current: None,
            tx_bytes: 0,
            waiting: Deque::new(),
            tx_seq: 0,
            tx_cost: 0,
            tx_end: peer_window,
            downs: heapless::Vec::new(),
            resume: false,
            awaited: None,
            head: [0; FRAME + 8],
            head_len: 0,
            incoming: None,
            rx_seq: 0,
            rx_cost: 0,
            window,
            told_end: window,
            origin: 0,
            tell: false,
        }
    }

    /// The same, counting on where earlier connections of the peer's slot stopped: messages of the
    /// cost `arrived` came over them, and the application took `consumed` of that. What it did not
    /// take yet counts against the window, so that is to be as much at least.
    pub fn after(mut self, arrived: u64, consumed: u64) -> Channel {
        (self.rx_cost, self.origin) = (arrived, arrived);
        self.told_end = consumed + self.window;
        // More than the handshake said, perhaps.
        self.tell = arrived > 0;
        self
    }

    fn frame(&mut self, kind: u8, len: u32, seq: u64) {
        self.out[..4].copy_from_slice(&len.to_le_bytes());
        self.out[4..8].copy_from_slice(&[kind, 0, 0, 0]);
        self.out[8..16].copy_from_slice(&seq.to_le_bytes());
        self.out_len = FRAME;
        self.out_at = 0;
    }

    /// Sends what the link takes. `sent` is called for each message that has arrived, or was
    /// handed over whole to a link that does not tell; `consumed` is what the application has
    /// taken from this peer's slot. Returns whether anything moved.
    pub fn send<L: Link>(
        &mut self,
        link: &mut L,
        pool: &Pool<'_>,
        fifo: &mut Fifo,
        consumed: u64,
        mut sent: impl FnMut(Message),
    ) -> Result<bool, Broken> {
        let mut moved = self.arrived(link, &mut sent);
        loop {
            if self.out_at == self.out_len
                && self.current.is_none()
                && !self.next_frame(pool, fifo, consumed)
            {
                return Ok(moved);
            }
            let mut parts: [&[u8]; 17] = [&[]; 17];
            parts[0] = &self.out[self.out_at..self.out_len];
            let head = parts[0].len();
            let (mut n, mut bytes) = (0, 0);
            if let Some((m, at)) = self.current {
                (n, bytes) = pool.parts(m, at, &mut parts[1..]);
            }
            let took = link.send(&parts[..=n]).map_err(Broken::Closed)?;
            self.tx_bytes += took as u64;
            self.out_at += took.min(head);
            let mut rest = 0;
            if let Some((m, at)) = &mut self.current {
                *at += took.saturating_sub(head);
                rest = pool.header(*m).total() - *at;
                if rest == 0 && self.out_at == self.out_len {
                    let m = *m;
                    self.current = None;
                    match link.acked() {
                        // There is room, or `next_frame` had not put it up.
                        Some(_) => drop(self.waiting.push_back((m, self.tx_bytes))),
                        None => sent(m),
                    }
                }
            }
            moved |= took > 0;
            if took < head + bytes || (took == 0 && rest > 0) {
                return Ok(moved);
            }
        }
    }

    /// Tells of the messages that have arrived. Returns whether there were any.
    fn arrived<L: Link>(&mut self, link: &mut L, sent: &mut impl FnMut(Message)) -> bool {
        let acked = link.acked().unwrap_or(u64::MAX);
        let mut any = false;
        while let Some(&(m, _)) = self.waiting.front().filter(|(_, end)| *end <= acked) {
            self.waiting.pop_front();
            sent(m);
            any = true;
        }
        any
    }

    /// True when the stream took only a part of a frame.
    pub fn is_stuck(&self) -> bool {
        self.out_at < self.out_len || self.current.is_some()
    }

    /// Puts the next frame up for sending; control first.
    fn next_frame(&mut self, pool: &Pool<'_>, fifo: &mut Fifo, consumed: u64) -> bool {
        let end = consumed + self.window;
        if core::mem::take(&mut self.resume) {
            self.told_end = end;
            self.control(RESUME, self.rx_seq, end - self.origin);
            return true;
        }
        if let Some(down) = self.downs.iter_mut().find(|d| !d.told) {
            down.told = true;
            let (id, flags) = (down.id, if down.heard { 0 } else { ANSWER });
            self.downs.retain(|d| !(d.told && d.heard));
            self.control(DOWN, id.into(), flags);
            return true;
        }
        let tell = core::mem::take(&mut self.tell);
        if tell || end - self.told_end >= self.window / 8 {
            self.told_end = end;
            self.control(ACK, self.rx_seq, end - self.origin);
            return true;
        }
        if self.awaited.is_some() {
            return false;
        }
        let Some(m) = fifo.front().filter(|_| !self.waiting.is_full()) else { return false };
        let len = pool.header(m).total();
        if self.tx_cost + cost(len) > self.tx_end {
            return false;
        }
        let _ = fifo.pop(pool);
        self.tx_cost += cost(len);
        self.frame(MSG, len as u32, self.tx_seq);
        self.tx_seq += 1;
        self.current = Some((m, 0));
        true
    }

    /// A control frame.
    fn control(&mut self, kind: u8, seq: u64, body: u64) {
        self.frame(kind, 8, seq);
        self.out[FRAME..].copy_from_slice(&body.to_le_bytes());
        self.out_len = FRAME + 8;
    }

    /// Takes bytes that were read from a link elsewhere. `fifo`: as in [`Channel::send`].
    pub fn feed(
        &mut self,
        pools: &Pools<'_, '_>,
        fifo: &mut Fifo,
        early: &[u8],
        mut event: impl FnMut(Event) -> bool,
    ) -> Result<(), Broken> {
        self.take(pools, fifo, early, &mut event)
    }

    /// Receives what is there. Returns whether anything moved.
    pub fn receive<L: Link>(
        &mut self,
        link: &mut L,
        pools: &Pools<'_, '_>,
        fifo: &mut Fifo,
        scratch: &mut [u8; SCRATCH],
        mut event: impl FnMut(Event) -> bool,
    ) -> Result<bool, Broken> {
        let mut moved = false;
        while has_room(pools.rx) {
            let n = link.receive(&mut scratch[..]).map_err(Broken::Closed)?;
            if n == 0 {
                return Ok(moved);
            }
            moved = true;
            self.take(pools, fifo, &scratch[..n], &mut event)?;
            if n < SCRATCH {
                return Ok(true);
            }
        }
        Ok(moved)
    }

    fn take(
        &mut self,
        pools: &Pools<'_, '_>,
        fifo: &mut Fifo,
        mut data: &[u8],
        event: &mut impl FnMut(Event) -> bool,
    ) -> Result<(), Broken> {
        let pool = pools.rx;
        loop {
            if let Some((m, at)) = self.incoming {
                let total = pool.header(m).total();
                let n = data.len().min(total - at);
                pool.write(m, at, &data[..n]);
                data = &data[n..];
                if at + n == total {
                    self.incoming = None;
                    self.rx_seq += 1;
                    event(Event::Got(m));
                } else {
                    self.incoming = Some((m, at + n));
                    return Ok(());
                }
            }
            if data.is_empty() {
                return Ok(());
            }
            let want = if self.head_len >= FRAME { FRAME + 8 } else { FRAME };
            let n = data.len().min(want - self.head_len);
            self.head[self.head_len..self.head_len + n].copy_from_slice(&data[..n]);
            self.head_len += n;
            data = &data[n..];
            if self.head_len >= FRAME {
                self.framed(pools, fifo, event)?;
            }
        }
    }

    /// A frame head, and behind it the body of a control frame if that is here, is complete.
    fn framed(
        &mut self,
        pools: &Pools<'_, '_>,
        fifo: &mut Fifo,
        event: &mut impl FnMut(Event) -> bool,
    ) -> Result<(), Broken> {
        let word = |at: usize| {
            let mut b = [0; 8];
            b.copy_from_slice(&self.head[at..at + 8]);
            u64::from_le_bytes(b)
        };
        let (len, kind, seq) = (word(0) as u32, self.head[4], word(8));
        let garbage = Broken::Garbage { kind, len };
        let whole = self.head_len == FRAME + 8;
        let body = word(FRAME);
        // Nothing comes before the RESUME of a link that was moved to.
        let early = self.awaited.is_some() && kind != RESUME;
        match kind {
            _ if early => Err(garbage),
            ACK | RESUME | DOWN if len == 8 && !whole => Ok(()),
            ACK if len == 8 => {
                self.head_len = 0;
                self.tx_end = self.tx_end.max(body);
                Ok(())
            }
            RESUME if len == 8 => {
                self.head_len = 0;
                self.tx_end = self.tx_end.max(body);
                self.resumed(pools.tx, fifo, seq, event).ok_or(garbage)
            }
            DOWN if len == 8 => {
                self.head_len = 0;
                let id = u32::try_from(seq).ok().filter(|id| *id < u32::MAX).ok_or(garbage)?;
                let open = event(Event::Down(id));
                self.heard_down(id, body & ANSWER != 0 && !open);
                Ok(())
            }
            MSG if len as usize <= MAX_MESSAGE && seq == self.rx_seq => {
                self.head_len = 0;
                if self.rx_cost + cost(len as usize) > self.told_end {
                    return Err(garbage);
                }
                let header =
                    Header { name: self.name_len as u32, len, peer: self.peer, ..Header::EMPTY };
                // The reserve was there before the stream was read: no room means that the peer
                // broke the window.
                let m = pools.rx.take(header).ok_or(garbage)?;
                self.rx_cost += cost(len as usize);
                pools.rx.write(m, 0, &self.name[..self.name_len]);
                self.incoming = Some((m, self.name_len));
                Ok(())
            }
            _ => Err(garbage),
        }
    }

    /// True when the peer has nearly used up what it may send: a larger window would help it.
    pub fn wants_more(&self) -> bool {
        self.told_end - self.rx_cost < self.window / 2
    }

    /// The window, and with it what the peer may send, grows by `more`; the peer is told at the
    /// next send.
    pub fn grow(&mut self, more: u64) {
        self.window += more;
    }

    /// What this side lets the peer have outstanding.
    pub const fn window(&self) -> u64 {
        self.window
    }

    /// Costs of what came from this slot so far and reached the application's side whole.
    pub fn came(&self, rx: &Pool<'_>) -> u64 {
        let part = self.incoming.map_or(0, |(m, _)| cost(rx.header(m).len as usize));
        self.rx_cost - part
    }

    /// Ends the channel. Messages that it had taken from the queue or had half received go to
    /// `lost`.
    pub fn dismantle(mut self, pools: &Pools<'_, '_>, mut lost: impl FnMut(Message)) {
        while let Some((m, _)) = self.waiting.pop_front() {
            lost(m);
        }
        if let Some((m, _)) = self.current {
            lost(m);
        }
        if let Some((m, _)) = self.incoming {
            pools.rx.give(m);
        }
    }
}

/// Whether a link may be read: what one read brings is sure to find blocks.
pub fn has_room(rx: &Pool<'_>) -> bool {
    rx.blocks() - rx.used() >= READ_RESERVE
}

/// Moving from link to link, and rails that are down.
impl Channel {
    /// The link in use is lost, or left: messages that are not known to have arrived go back to
    /// `fifo`, and what came in part is dropped, as it will come again. Give what the link knows of
    /// arrivals first ([`Channel::settle`]).
    pub fn move_on(&mut self, pools: &Pools<'_, '_>, fifo: &mut Fifo) {
        if let Some((m, _)) = self.incoming.take() {
            let len = pools.rx.header(m).len as usize;
            pools.rx.give(m);
            self.rx_cost -= cost(len);
        }
        self.head_len = 0;
        let given = self.tx_seq.max(self.awaited.unwrap_or(0));
        let mut kept = Fifo::EMPTY;
        for m in self.waiting.iter().map(|(m, _)| *m).chain(self.current.map(|(m, _)| m)) {
            self.tx_seq -= 1;
            self.tx_cost -= cost(pools.tx.header(m).total());
            kept.push(pools.tx, m);
        }
        kept.append(pools.tx, *fifo);
        *fifo = kept;
        self.waiting.clear();
        self.current = None;
        (self.out_at, self.out_len, self.tx_bytes) = (0, 0, 0);
        self.awaited = Some(given);
        self.resume = true;
        for down in &mut self.downs {
            down.told = false;
        }
    }

    /// Tells of messages that the link knows to have arrived.
    pub fn settle<L: Link>(&mut self, link: &mut L, mut sent: impl FnMut(Message)) {
        self.arrived(link, &mut sent);
    }

    /// The peer's RESUME: it expects message `seq` next. `None`: that cannot be.
    fn resumed(
        &mut self,
        tx: &Pool<'_>,
        fifo: &mut Fifo,
        seq: u64,
        event: &mut impl FnMut(Event) -> bool,
    ) -> Option<()> {
        let given = self.awaited.take()?;
        if seq < self.tx_seq || seq > given {
            return None;
        }
        while self.tx_seq < seq {
            let m = fifo.pop(tx)?;
            self.tx_seq += 1;
            self.tx_cost += cost(tx.header(m).total());
            event(Event::Arrived(m));
        }
        Some(())
    }

    /// A rail was closed here: the peer is told. `heard`: it said so first.
    pub fn down(&mut self, id: u32, heard: bool) {
        match self.downs.iter_mut().find(|d| d.id == id) {
            Some(d) => d.heard |= heard,
            // More rails than there can be down at a time: the oldest one's fence comes with the
            // next handshake.
            None => {
                if self.downs.is_full() {
                    self.downs.remove(0);
                }
                // There is room now.
                let _ = self.downs.push(Down { id, told: false, heard });
            }
        }
    }

    fn heard_down(&mut self, id: u32, answer: bool) {
        if answer {
            // It has not heard ours, which may have gone over a link that was lost.
            self.down(id, true);
        }
        for d in self.downs.iter_mut().filter(|d| d.id == id) {
            d.heard = true;
            d.told &= !answer;
        }
        self.downs.retain(|d| !(d.told && d.heard));
    }
}
