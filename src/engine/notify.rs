//! Messages: to peers, from peers, and the one that a transfer sends when its data has landed.

use crate::engine::channel::{cost, Broken, Pools};
use crate::engine::core::Core;
use crate::engine::message::{Header, Message, MAX_MESSAGE};
use crate::engine::peer::{Link, SELF};
use crate::engine::slot::Slot;
use crate::engine::stack::NONE;
use crate::engine::state::{Phase, State};
use crate::nic::{Net, Port};
use crate::status::Status;
use crate::sync::Ordering;

/// Streams looked at in one round.
const READY: usize = 64;

impl<'m, P: Port, N: Net> Core<'m, P, N> {
    /// Puts a message together for a peer. It may be at most 65,536 bytes.
    pub(super) fn compose(&self, peer: u32, life: u32, bytes: &[u8]) -> Result<Message, Status> {
        if bytes.len() > MAX_MESSAGE {
            return Err(Status::Invalid);
        }
        // A message to itself goes straight to the inbox, so it carries the sender's name already.
        let name = if peer == SELF { self.name() } else { &[] };
        let header = Header {
            name: name.len() as u32,
            len: bytes.len() as u32,
            peer,
            life,
            ..Header::EMPTY
        };
        let m = self.tx.take(header).ok_or(Status::Capacity)?;
        self.tx.write(m, 0, name);
        self.tx.write(m, name.len(), bytes);
        Ok(m)
    }

    /// Sends bytes to a peer, in order with other messages of the calling thread. Returns when they
    /// are queued.
    pub fn notify(&self, raw: u64, bytes: &[u8]) -> Result<(), Status> {
        let (peer, state) = self.peer(raw)?;
        if state.link == Link::Dead {
            return Err(state.status);
        }
        let m = self.compose(peer, state.generation, bytes)?;
        self.queue(peer, m);
        Ok(())
    }

    fn queue(&self, peer: u32, m: Message) {
        if peer == SELF {
            self.own_inbox.push(&self.tx, m);
            return;
        }
        self.peers[peer as usize].queue.push(&self.tx, m);
        self.outgoing.set(peer);
        self.net_token.publish();
        if !self.poll_messages(false) && self.net_token.is_pending() {
            self.worker.wake();
        }
    }

    /// All data of a transfer has landed and nothing of it is in flight: its message goes out, and
    /// it is done when the message was handed to the stream.
    pub(super) fn landed(&self, index: u32, state: State) {
        let slot = &self.slots[index as usize];
        let raw = slot.message.swap(NONE, Ordering::AcqRel);
        let Some(m) = Message::from_raw(raw) else {
            slot.state.change(state, state.to(Phase::Done, Status::Ok));
            return;
        };
        let peer = self.tx.header(m).peer;
        if peer == SELF {
            self.queue(peer, m);
            slot.state.change(state, state.to(Phase::Done, Status::Ok));
            return;
        }
        self.tx.set_owner(m, index, state);
        self.queue(peer, m);
    }

    /// A message left the engine one way or the other: the transfer that waits for that ends.
    fn handed_over(&self, m: Message, status: Status) {
        let header = self.tx.header(m);
        self.tx.give(m);
        let (Some(state), Some(slot)) = (header.state, self.slots.get(header.slot as usize)) else {
            return;
        };
        let phase = if status == Status::Ok { Phase::Done } else { Phase::Ended };
        slot.state.change(state, state.to(phase, status));
    }

    /// The message of a transfer that will not send it.
    pub(super) fn drop_message(&self, slot: &Slot) {
        if let Some(m) = Message::from_raw(slot.message.swap(NONE, Ordering::AcqRel)) {
            self.tx.give(m);
        }
    }

    /// One round over the message streams. `receive`: look for incoming ones too. False when
    /// another thread holds the token or nothing moved.
    pub fn poll_messages(&self, receive: bool) -> bool {
        if !self.net_token.try_take() {
            return false;
        }
        // SAFETY: I2: token taken above, given back below.
        let net = unsafe { &mut *self.net.get() };
        self.net_token.look();
        let mut moved = false;
        let mut ready = [0; READY];
        let n = if receive { net.net.ready(&mut ready) } else { 0 };
        for &peer in &ready[..n.min(READY)] {
            let Some(p) = self.peers.get(peer as usize) else { continue };
            // SAFETY: I2: we hold the message token.
            let io = unsafe { &mut *p.io.get() };
            let Some(channel) = &mut io.channel else { continue };
            match channel.receive(&self.rx, &mut net.scratch, |m| self.inbox.push(&self.rx, m)) {
                Ok(any) => moved |= any,
                Err(why) => self.stream_broke(peer, why),
            }
            if channel.wants_more() {
                channel.grow(self.spare_window(channel.window()));
            }
            // What came may have opened the window.
            self.outgoing.set(peer);
        }
        self.outgoing.take_each(|peer| moved |= self.send_to(peer));
        let again = self.net_token.give_back();
        if again {
            self.worker.wake();
        }
        moved | again
    }

    /// Takes more window for a peer that has `has`: as much again, if there is so much to spare.
    fn spare_window(&self, has: u64) -> u64 {
        let want = has.min(self.limits.max_window().saturating_sub(has));
        let mut spare = self.spare_window.load(Ordering::Relaxed);
        loop {
            let more = want.min(spare);
            match self.spare_window.compare_exchange_weak(
                spare,
                spare - more,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return more,
                Err(now) => spare = now,
            }
        }
    }

    /// Sends what a peer's stream takes. The caller holds the message token.
    fn send_to(&self, index: u32) -> bool {
        let peer = &self.peers[index as usize];
        let state = peer.load();
        // SAFETY: I2: the caller holds the message token.
        let io = unsafe { &mut *peer.io.get() };
        let mut fresh = peer.queue.take_all(&self.tx);
        while let Some(m) = fresh.pop(&self.tx) {
            if self.tx.header(m).life == state.generation {
                io.fifo.push(&self.tx, m);
            } else {
                // Meant for a peer that had this slot before.
                self.handed_over(m, Status::Disconnected);
            }
        }
        if matches!(state.link, Link::Dead | Link::Free) {
            let status = if state.status.is_err() { state.status } else { Status::Disconnected };
            while let Some(m) = io.fifo.pop(&self.tx) {
                self.handed_over(m, status);
            }
            return false;
        }
        let Some(channel) = &mut io.channel else { return false };
        let consumed = peer.consumed.load(Ordering::Acquire);
        let sent = |m| self.handed_over(m, Status::Ok);
        match channel.send(&self.tx, &mut io.fifo, consumed, sent) {
            Ok(moved) => {
                if channel.is_stuck() {
                    self.outgoing.set(index);
                }
                moved
            }
            Err(why) => {
                self.stream_broke(index, why);
                false
            }
        }
    }

    fn stream_broke(&self, peer: u32, _why: Broken) {
        self.mark_broken(peer);
    }

    /// True when a stream took less than there was: whoever sleeps should look again soon.
    pub fn is_stuck(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Control side only: takes in what a stream that is about to be closed still has.
    pub fn drain_stream(&self, index: u32) {
        self.with_net_inner(|net| {
            // SAFETY: I2: `with_net_inner` holds the message token.
            let io = unsafe { &mut *self.peers[index as usize].io.get() };
            if let Some(channel) = &mut io.channel {
                let take = |m| self.inbox.push(&self.rx, m);
                while channel.receive(&self.rx, &mut net.scratch, take) == Ok(true) {}
            }
        });
    }

    /// Control side: a peer's messages end with `status`; its stream comes out.
    pub(super) fn drop_messages(&self, index: u32, status: Status) -> Option<N::Link> {
        let peer = &self.peers[index as usize];
        self.with_net(|_| {
            // SAFETY: I2: `with_net` holds the message token.
            let io = unsafe { &mut *peer.io.get() };
            let pools = Pools { tx: &self.tx, rx: &self.rx };
            let link = io.channel.take().map(|c| {
                let extra = c.window().saturating_sub(self.limits.window());
                self.spare_window.fetch_add(extra, Ordering::Relaxed);
                c.dismantle(&pools, |m| self.handed_over(m, status))
            });
            io.fifo.append(&self.tx, peer.queue.take_all(&self.tx));
            while let Some(m) = io.fifo.pop(&self.tx) {
                self.handed_over(m, status);
            }
            link
        })
    }

    /// Takes every message that has arrived: `f` gets each in stretches, first of the sender's
    /// name, then of the bytes, then [`Piece::End`]. Returns how many messages.
    pub fn take_messages(&self, mut f: impl FnMut(Piece<'_>)) -> usize {
        let mut n = 0;
        for (inbox, pool) in [(&self.own_inbox, &self.tx), (&self.inbox, &self.rx)] {
            let mut fifo = inbox.take_all(pool);
            while let Some(m) = fifo.pop(pool) {
                let h = pool.header(m);
                pool.read(m, 0, h.name as usize, |b| f(Piece::Name(b)));
                pool.read(m, h.name as usize, h.len as usize, |b| f(Piece::Bytes(b)));
                f(Piece::End);
                pool.give(m);
                n += 1;
                if h.peer != SELF {
                    self.took(h);
                }
            }
        }
        n
    }

    /// The application took a message: the window of its sender moves, and the sender is told in
    /// steps.
    fn took(&self, h: Header) {
        let peer = &self.peers[h.peer as usize];
        if peer.streams.load(Ordering::Acquire) != h.life {
            return;
        }
        let before = peer.consumed.fetch_add(cost(h.len as usize), Ordering::AcqRel);
        let step = self.limits.window() / 8;
        if before / step != (before + cost(h.len as usize)) / step {
            self.outgoing.set(h.peer);
            self.net_token.publish();
            self.poll_messages(false);
        }
    }
}

/// A stretch of a message on its way to the application.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// Part of the sender's name.
    Name(&'a [u8]),
    /// Part of the message.
    Bytes(&'a [u8]),
    /// The message is complete.
    End,
}
