//! Messages: to peers, from peers, and the one that a transfer sends when its data has landed.

use crate::engine::channel::{cost, has_room, Broken, Event, Pools};
use crate::engine::core::{Core, NetInner};
use crate::engine::message::{Header, Message, MAX_MESSAGE};
use crate::engine::peer::{Link, Links, Peer, PeerIo, NO_LANE, SELF};
use crate::engine::slot::Slot;
use crate::engine::stack::NONE;
use crate::engine::state::{Phase, State};
use crate::nic::{Link as _, Net, Port};
use crate::status::Status;
use crate::sync::Ordering;

/// Streams looked at in one round.
const READY: usize = 64;
/// Reads from a link that is left: more than what any link holds, if it came byte by byte.
const GATHERED: usize = 1 << 17;

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
            moved |= self.receive_from(peer, io, net);
            let Some(channel) = &mut io.channel else { continue };
            if channel.wants_more() {
                let has = channel.window();
                let room = self.limits.max_window().saturating_sub(has);
                channel.grow(self.spare_window(has.min(room)));
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

    /// Takes in what a peer's links have. The caller holds the message token.
    fn receive_from(&self, peer: u32, io: &mut PeerIo<N::Link>, net: &mut NetInner<N>) -> bool {
        let mut moved = false;
        for at in 0..io.links.len() {
            let PeerIo { fifo, channel, links, on, .. } = io;
            let (Some(channel), Some(link)) = (channel, links.get_mut(at)) else { break };
            if link.broken {
                continue;
            }
            let pools = Pools { tx: &self.tx, rx: &self.rx };
            let came = |e| self.came(peer, e);
            let result = if *on == Some(link.id) {
                channel.receive(&mut link.link, &pools, fifo, &mut net.scratch, came)
            } else if !has_room(&self.rx) {
                Ok(false)
            } else {
                match link.link.receive(&mut net.scratch[..]) {
                    Ok(0) => Ok(false),
                    Ok(n) => {
                        let id = link.id;
                        self.follow(peer, io, net, (id, n)).map(|()| true)
                    }
                    Err(why) => Err(Broken::Closed(why)),
                }
            };
            match result {
                Ok(any) => moved |= any,
                Err(why) => self.link_broke(peer, io, at, why),
            }
        }
        moved
    }

    /// The peer went on with the link `id`, whose first `n` bytes are in the scratch: it has lost
    /// the one in use. What that still has comes first.
    fn follow(
        &self,
        peer: u32,
        io: &mut PeerIo<N::Link>,
        net: &mut NetInner<N>,
        (id, n): (u32, usize),
    ) -> Result<(), Broken> {
        // Links are left for ones with higher ids only. What comes over a lower one is from before
        // the peer moved on again.
        if io.on.is_some_and(|on| id < on) {
            for link in io.links.iter_mut().filter(|l| l.id == id) {
                link.broken = true;
                self.lose(peer, link.lane);
            }
            return Ok(());
        }
        let mut first = [0; crate::engine::channel::SCRATCH];
        first[..n].copy_from_slice(&net.scratch[..n]);
        if let Some(old) = io.on {
            self.leave_link(peer, io, net, old);
        }
        io.on = Some(id);
        let PeerIo { fifo, channel, links, .. } = io;
        let Some(channel) = channel else { return Ok(()) };
        let pools = Pools { tx: &self.tx, rx: &self.rx };
        channel.feed(&pools, fifo, &first[..n], |e| self.came(peer, e))?;
        let Some(link) = links.iter_mut().find(|l| l.id == id) else { return Ok(()) };
        let came = |e| self.came(peer, e);
        channel.receive(&mut link.link, &pools, fifo, &mut net.scratch, came).map(|_| ())
    }

    /// Takes in all that the link in use has, and leaves it. Its rail is lost.
    pub(super) fn leave_link(
        &self,
        peer: u32,
        io: &mut PeerIo<N::Link>,
        net: &mut NetInner<N>,
        id: u32,
    ) {
        net.net.gather();
        let PeerIo { fifo, channel, links, on, .. } = io;
        *on = None;
        let Some(channel) = channel else { return };
        let pools = Pools { tx: &self.tx, rx: &self.rx };
        if let Some(link) = links.iter_mut().find(|l| l.id == id) {
            // So much is more than any link holds; a peer that goes on and on is not waited for.
            for _ in 0..GATHERED {
                let came = |e| self.came(peer, e);
                let link = &mut link.link;
                let more = channel.receive(link, &pools, fifo, &mut net.scratch, came);
                if more != Ok(true) {
                    break;
                }
                net.net.gather();
            }
            channel.settle(&mut link.link, |m| self.handed_over(m, Status::Ok));
            link.broken = true;
            self.lose(peer, link.lane);
        }
        channel.move_on(&pools, fifo);
    }

    /// What a channel tells. For `Down`: whether the rail's end here is open.
    pub(super) fn came(&self, peer: u32, event: Event) -> bool {
        match event {
            Event::Got(m) => self.inbox.push(&self.rx, m),
            Event::Arrived(m) => self.handed_over(m, Status::Ok),
            Event::Down(id) => {
                let open = self.peers[peer as usize].book.hear(id);
                self.mark_limping(peer);
                return open;
            }
        }
        false
    }

    /// The rail of a lane to a peer is of no use: the control side drops it.
    pub(super) fn lose(&self, peer: u32, lane: u32) {
        if lane != NO_LANE {
            self.peers[peer as usize].book.lost.fetch_or(1 << lane, Ordering::AcqRel);
            self.mark_limping(peer);
        }
    }

    fn link_broke(&self, peer: u32, io: &mut PeerIo<N::Link>, at: usize, why: Broken) {
        let Some(link) = io.links.get_mut(at) else { return };
        match why {
            Broken::Closed(_) if link.lane != NO_LANE => {
                link.broken = true;
                self.lose(peer, link.lane);
            }
            _ => self.mark_broken(peer),
        }
    }

    /// What a peer that connects may send before it hears more: a window, without what came from
    /// its slot before and nobody took yet. To be told in the handshake.
    pub fn first_window(&self, index: u32) -> u64 {
        let peer = &self.peers[index as usize];
        self.with_net(|_| {
            // SAFETY: I2: `with_net` holds the message token.
            let io = unsafe { &*peer.io.get() };
            let left = io.arrived.saturating_sub(peer.consumed.load(Ordering::Acquire));
            self.limits.window().saturating_sub(left)
        })
    }

    /// The window of a peer that connects. What came from its slot before and was not taken, for
    /// which it has room, is made up for where there is something to spare.
    pub(super) fn open_window(&self, io: &mut PeerIo<N::Link>, consumed: u64) -> u64 {
        let has = self.limits.window() + core::mem::take(&mut io.extra);
        let short = (io.arrived - consumed).saturating_sub(has - self.limits.window());
        has + self.spare_window(short.min(self.limits.max_window().saturating_sub(has)))
    }

    /// A peer without a connection: what its slot has of the spare window goes back as far as
    /// messages that were not taken do not fill it.
    fn shrink_window(&self, peer: &Peer<N::Link>, io: &mut PeerIo<N::Link>) {
        let left = io.arrived - peer.consumed.load(Ordering::Acquire);
        let keeps = left.saturating_sub(self.limits.window()).min(io.extra);
        self.spare_window.fetch_add(io.extra - keeps, Ordering::Relaxed);
        io.extra = keeps;
    }

    /// Takes so much more window, or what there is to spare.
    fn spare_window(&self, want: u64) -> u64 {
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
        if io.channel.is_none() {
            self.shrink_window(peer, io);
        }
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
        let PeerIo { fifo, channel, links, on, .. } = io;
        let usable = links.iter().position(|l| Some(l.id) == *on && !l.broken);
        let (Some(channel), Some(at)) = (channel, usable) else { return false };
        let consumed = peer.consumed.load(Ordering::Acquire);
        let sent = |m| self.handed_over(m, Status::Ok);
        match channel.send(&mut links[at].link, &self.tx, fifo, consumed, sent) {
            Ok(moved) => {
                if channel.is_stuck() {
                    self.outgoing.set(index);
                }
                moved
            }
            Err(why) => {
                self.link_broke(index, io, at, why);
                false
            }
        }
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
            net.net.gather();
            for _ in 0..GATHERED {
                if !self.receive_from(index, io, net) {
                    break;
                }
                net.net.gather();
            }
        });
    }

    /// Control side: a peer's messages end with `status`; its links come out.
    pub(super) fn drop_messages(&self, index: u32, status: Status) -> Links<N::Link> {
        let peer = &self.peers[index as usize];
        self.with_net(|_| {
            // SAFETY: I2: `with_net` holds the message token.
            let io = unsafe { &mut *peer.io.get() };
            let pools = Pools { tx: &self.tx, rx: &self.rx };
            if let Some(c) = io.channel.take() {
                io.arrived = c.came(&self.rx);
                io.extra = c.window() - self.limits.window();
                self.shrink_window(peer, io);
                c.dismantle(&pools, |m| self.handed_over(m, status));
            }
            io.on = None;
            io.fifo.append(&self.tx, peer.queue.take_all(&self.tx));
            while let Some(m) = io.fifo.pop(&self.tx) {
                self.handed_over(m, status);
            }
            core::mem::take(&mut io.links)
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

    /// The application took a message: the window of its sender, or of who has its slot now, moves,
    /// and is told in steps.
    fn took(&self, h: Header) {
        let peer = &self.peers[h.peer as usize];
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
