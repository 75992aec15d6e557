//! The message protocol on one stream to one peer: frames, order, and the window that keeps a slow
//! reader from ever holding up control frames.
//!
//! A frame is `len u32 | kind u8 | 0 0 0 | seq u64 | len bytes`, little-endian. `MSG` carries a
//! message and its number. `ACK` carries the number that is expected next and, as 8 bytes, the
//! window's end: a sum of message costs that the sender may reach. The receiver moves the end as
//! its application takes messages, so it can always read on, and memory for messages nobody takes
//! is bounded per peer.
//!
//! Owned by the holder of the message token.

use crate::engine::message::{Fifo, Header, Message, Pool, MAX_MESSAGE, MAX_NAME};
use crate::engine::stack::NONE;
use crate::nic::{Closed, Link};
use heapless::Deque;

const FRAME: usize = 16;
/// Messages that may be on their way on one stream: each takes at least one of a mailbox's send
/// buffers, of which there are fewer.
const WAITING: usize = 32;
const MSG: u8 = 1;
const ACK: u8 = 2;

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
pub struct Channel<L> {
    link: L,
    peer: (u32, u32),
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
    // Receiving.
    head: [u8; FRAME + 8],
    head_len: usize,
    incoming: Option<(Message, usize)>,
    rx_seq: u64,
    rx_cost: u64,
    window: u64,
    told_end: u64,
}

impl<L: Link> Channel<L> {
    /// A channel on a fresh stream. `window`: what this side lets the peer have outstanding;
    /// `peer_window`: the reverse. `peer` is its slot and the number of this stream.
    pub fn new(
        link: L,
        peer: (u32, u32),
        name: &[u8],
        window: u64,
        peer_window: u64,
    ) -> Channel<L> {
        let name_len = name.len().min(MAX_NAME);
        let mut own = [0; MAX_NAME];
        own[..name_len].copy_from_slice(&name[..name_len]);
        Channel {
            link,
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
            head: [0; FRAME + 8],
            head_len: 0,
            incoming: None,
            rx_seq: 0,
            rx_cost: 0,
            window,
            told_end: window,
        }
    }

    fn frame(&mut self, kind: u8, len: u32, seq: u64) {
        self.out[..4].copy_from_slice(&len.to_le_bytes());
        self.out[4..8].copy_from_slice(&[kind, 0, 0, 0]);
        self.out[8..16].copy_from_slice(&seq.to_le_bytes());
        self.out_len = FRAME;
        self.out_at = 0;
    }

    /// Sends what the stream takes. `sent` is called for each message that has arrived, or was
    /// handed over whole to a stream that does not tell; `consumed` is what the application has
    /// taken from this peer. Returns whether anything moved.
    pub fn send(
        &mut self,
        pool: &Pool<'_>,
        fifo: &mut Fifo,
        consumed: u64,
        mut sent: impl FnMut(Message),
    ) -> Result<bool, Broken> {
        let mut moved = self.arrived(&mut sent);
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
            let took = self.link.send(&parts[..=n]).map_err(Broken::Closed)?;
            self.tx_bytes += took as u64;
            self.out_at += took.min(head);
            let mut rest = 0;
            if let Some((m, at)) = &mut self.current {
                *at += took.saturating_sub(head);
                rest = pool.header(*m).total() - *at;
                if rest == 0 && self.out_at == self.out_len {
                    let m = *m;
                    self.current = None;
                    match self.link.acked() {
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
    fn arrived(&mut self, sent: &mut impl FnMut(Message)) -> bool {
        let acked = self.link.acked().unwrap_or(u64::MAX);
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
        if end - self.told_end >= self.window / 8 {
            self.frame(ACK, 8, self.rx_seq);
            self.out[FRAME..].copy_from_slice(&end.to_le_bytes());
            self.out_len = FRAME + 8;
            self.told_end = end;
            return true;
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

    /// Takes bytes that were read from the stream before the channel was made.
    pub fn feed(
        &mut self,
        pool: &Pool<'_>,
        early: &[u8],
        mut got: impl FnMut(Message),
    ) -> Result<(), Broken> {
        self.take(pool, early, &mut got)
    }

    /// Receives what is there, into messages that `got` becomes the owner of. Returns whether
    /// anything moved.
    pub fn receive(
        &mut self,
        pool: &Pool<'_>,
        scratch: &mut [u8; SCRATCH],
        mut got: impl FnMut(Message),
    ) -> Result<bool, Broken> {
        let mut moved = false;
        loop {
            if pool.blocks() - pool.used() < READ_RESERVE {
                return Ok(moved);
            }
            let n = self.link.receive(&mut scratch[..]).map_err(Broken::Closed)?;
            if n == 0 {
                return Ok(moved);
            }
            moved = true;
            self.take(pool, &scratch[..n], &mut got)?;
            if n < SCRATCH {
                return Ok(true);
            }
        }
    }

    fn take(
        &mut self,
        pool: &Pool<'_>,
        mut data: &[u8],
        got: &mut impl FnMut(Message),
    ) -> Result<(), Broken> {
        loop {
            if let Some((m, at)) = self.incoming {
                let total = pool.header(m).total();
                let n = data.len().min(total - at);
                pool.write(m, at, &data[..n]);
                data = &data[n..];
                if at + n == total {
                    self.incoming = None;
                    self.rx_seq += 1;
                    got(m);
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
                self.framed(pool)?;
            }
        }
    }

    /// A frame head (and, for an ACK, its body) is complete.
    fn framed(&mut self, pool: &Pool<'_>) -> Result<(), Broken> {
        let word = |at: usize| {
            let mut b = [0; 8];
            b.copy_from_slice(&self.head[at..at + 8]);
            u64::from_le_bytes(b)
        };
        let (len, kind, seq) = (word(0) as u32, self.head[4], word(8));
        let garbage = Broken::Garbage { kind, len };
        match kind {
            ACK if len == 8 => {
                if self.head_len == FRAME + 8 {
                    self.tx_end = self.tx_end.max(word(FRAME));
                    self.head_len = 0;
                }
                Ok(())
            }
            MSG if len as usize <= MAX_MESSAGE && seq == self.rx_seq => {
                self.head_len = 0;
                self.rx_cost += cost(len as usize);
                if self.rx_cost > self.told_end {
                    return Err(garbage);
                }
                let header = Header {
                    name: self.name_len as u32,
                    len,
                    peer: self.peer.0,
                    life: self.peer.1,
                    slot: NONE,
                    state: None,
                };
                // The reserve was there before the stream was read: no room means that the peer
                // broke the window.
                let m = pool.take(header).ok_or(garbage)?;
                pool.write(m, 0, &self.name[..self.name_len]);
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

    /// Ends the channel. Messages that it had taken from the queue or had half received go to
    /// `lost`.
    pub fn dismantle(mut self, pools: &Pools<'_, '_>, mut lost: impl FnMut(Message)) -> L {
        while let Some((m, _)) = self.waiting.pop_front() {
            lost(m);
        }
        if let Some((m, _)) = self.current {
            lost(m);
        }
        if let Some((m, _)) = self.incoming {
            pools.rx.give(m);
        }
        self.link
    }
}
