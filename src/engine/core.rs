//! The engine's fixed state, carved out of one block, and who may change what in it.
//!
//! `poll.rs` turns descriptors' ops into work requests and completions into "done"; `transfer.rs`
//! posts, checks, cancels and releases; `notify.rs` moves messages; this file makes the whole and
//! connects and closes peers.

use crate::engine::arena::Arena;
use crate::engine::bell::Bell;
use crate::engine::bits::Bits;
use crate::engine::channel::{Channel, Pools, SCRATCH};
use crate::engine::lane::{Inner, Lane};
use crate::engine::message::{Pool, Queue, MAX_NAME};
use crate::engine::peer::{Link, Links, Peer, PeerLink, PeerState, SELF};
use crate::engine::region::Regions;
use crate::engine::slot::Slot;
use crate::engine::stack::{IndexStack, NONE};
use crate::engine::state::Phase;
use crate::engine::token::PollToken;
use crate::handle::{Handle, Kind};
use crate::limits::Limits;
use crate::nic::{Net, Port};
use crate::status::Status;
use crate::sync::{fence, AtomicU32, AtomicU64, Ordering, UnsafeCell};

/// What can be chosen beside the capacities.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// A transfer of at most so many bytes is carried inside post.
    pub inline_bytes: u64,
    /// True: a transfer uses every lane; false: the idlest one.
    pub stripe_all: bool,
    /// True: somebody polls in the background, so check need not.
    pub background: bool,
}

/// A claim that came back unfinished.
#[derive(Debug)]
pub(super) struct Return {
    /// First op (high half) and count (low half).
    pub(super) ops: AtomicU64,
}

/// What only the holder of the message token touches.
#[derive(Debug)]
pub(super) struct NetInner<N> {
    pub(super) net: N,
    pub(super) scratch: [u8; SCRATCH],
}

/// The engine.
#[derive(Debug)]
pub struct Core<'m, P: Port, N: Net> {
    pub(super) limits: Limits,
    pub(super) tuning: Tuning,
    pub(super) lanes: &'m [Lane<'m, P>],
    pub(super) slots: &'m [Slot],
    pub(super) slot_links: &'m [AtomicU32],
    pub(super) slot_free: IndexStack,
    pub(super) slots_used: AtomicU32,
    pub(super) returns: &'m [Return],
    pub(super) return_links: &'m [AtomicU32],
    pub(super) return_free: IndexStack,
    pub(super) peers: &'m [Peer<N::Link>],
    /// Peers with messages to send, one bit each.
    pub(super) outgoing: Bits<'m>,
    /// Peers whose stream broke the protocol or was closed, one bit each: the host closes them.
    pub(super) broken: Bits<'m>,
    /// Peers that lost a rail, one bit each.
    pub(super) limping: Bits<'m>,
    pub(super) tx: Pool<'m>,
    pub(super) rx: Pool<'m>,
    pub(super) inbox: Queue,
    /// Messages to itself, in blocks of `tx`.
    pub(super) own_inbox: Queue,
    /// What is left for windows beyond the least.
    pub(super) spare_window: AtomicU64,
    pub(super) net_token: PollToken,
    pub(super) net: UnsafeCell<NetInner<N>>,
    pub(super) worker: Bell,
    pub(super) host: Bell,
    pub(super) name: [u8; MAX_NAME],
    pub(super) name_len: usize,
    /// Memory registered here.
    pub local: Regions<'m>,
    /// Memory of peers.
    pub remote: Regions<'m>,
}

// SAFETY: I2: `net` is touched only by the holder of the message token; everything else is Sync by
// itself.
unsafe impl<P: Port + Send, N: Net + Send> Sync for Core<'_, P, N> where N::Link: Send {}

/// What an engine is made of beside memory.
#[derive(Debug)]
pub struct Parts<'a, N> {
    /// Capacities.
    pub limits: Limits,
    /// Choices.
    pub tuning: Tuning,
    /// Message streams.
    pub net: N,
    /// Wakes the thread that polls.
    pub worker: Bell,
    /// Wakes the host's control side.
    pub host: Bell,
    /// Own name, at most 255 bytes.
    pub name: &'a [u8],
}

impl<'m, P: Port, N: Net> Core<'m, P, N> {
    /// Carves an engine out of the arena; `port` makes the port of each lane. `None`: the arena is
    /// too small. With a measuring arena the result only tells the size and must not be used.
    pub fn new(
        arena: &mut Arena<'m>,
        parts: Parts<'_, N>,
        mut port: impl FnMut(&mut Arena<'m>, u32) -> Option<P>,
    ) -> Option<Core<'m, P, N>> {
        let l = parts.limits;
        let mut failed = false;
        let mut staged: heapless::Vec<Lane<'m, P>, { crate::limits::MAX_LANES as usize }> =
            heapless::Vec::new();
        for i in 0..l.lanes {
            let port = port(arena, i)?;
            let sizes = (l.peers, l.transfers);
            let lane = Lane::new(arena, i, port, sizes, parts.tuning.stripe_all)?;
            failed |= staged.push(lane).is_err();
        }
        let mut staged = staged.into_iter();
        let lanes = arena.array_from(l.lanes as usize, || staged.next())?;
        let slot_links = arena.array(l.transfers as usize, |_| AtomicU32::new(NONE))?;
        let return_links = arena.array(l.returns() as usize, |_| AtomicU32::new(NONE))?;
        let mut name = [0; MAX_NAME];
        let name_len = parts.name.len().min(MAX_NAME);
        name[..name_len].copy_from_slice(&parts.name[..name_len]);
        let core = Core {
            limits: l,
            tuning: parts.tuning,
            lanes,
            slots: arena.array(l.transfers as usize, |_| Slot::new())?,
            slot_links,
            slot_free: IndexStack::new(),
            slots_used: AtomicU32::new(0),
            returns: arena.array(l.returns() as usize, |_| Return { ops: AtomicU64::new(0) })?,
            return_links,
            return_free: IndexStack::new(),
            peers: arena.array(l.peers as usize, |_| Peer::new())?,
            outgoing: Bits::new(arena, l.peers)?,
            broken: Bits::new(arena, l.peers)?,
            limping: Bits::new(arena, l.peers)?,
            tx: Pool::new(arena, l.blocks())?,
            rx: Pool::new(arena, l.blocks())?,
            inbox: Queue::new(),
            own_inbox: Queue::new(),
            spare_window: AtomicU64::new(l.spare_window()),
            net_token: PollToken::new(),
            net: UnsafeCell::new(NetInner { net: parts.net, scratch: [0; SCRATCH] }),
            worker: parts.worker,
            host: parts.host,
            name,
            name_len,
            local: Regions::new(arena, Kind::LocalRegion, l.regions)?,
            remote: Regions::new(arena, Kind::RemoteRegion, l.remote_regions)?,
        };
        for i in (0..core.slot_links.len() as u32).rev() {
            core.slot_free.push(core.slot_links, i);
        }
        for i in (0..core.return_links.len() as u32).rev() {
            core.return_free.push(core.return_links, i);
        }
        if let Some(own) = core.peers.first() {
            own.store(PeerState { generation: 1, link: Link::Up, status: Status::Ok });
        }
        (!failed).then_some(core)
    }

    /// Own name.
    pub fn name(&self) -> &[u8] {
        &self.name[..self.name_len]
    }

    /// Capacities.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Choices.
    pub const fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// The lanes.
    pub const fn lanes(&self) -> &[Lane<'m, P>] {
        self.lanes
    }

    /// Transfers prepared, in flight or not.
    pub fn transfers_used(&self) -> u32 {
        self.slots_used.load(Ordering::Relaxed)
    }

    /// Blocks in use: outgoing, incoming.
    pub fn message_blocks_used(&self) -> (u32, u32) {
        (self.tx.used(), self.rx.used())
    }

    /// Return entries and bytes of message windows that are not given out. Only while nothing is
    /// under way, to look for leaks.
    pub fn spare(&self) -> (u32, u64) {
        let returns = self.return_free.count(self.return_links);
        (returns, self.spare_window.load(Ordering::Relaxed))
    }

    /// Whether a raw handle names a living peer, and which state it is in.
    pub fn peer(&self, raw: u64) -> Result<(u32, PeerState), Status> {
        let handle = Handle::parse(raw, Kind::Peer).ok_or(Status::Invalid)?;
        let peer = self.peers.get(handle.index() as usize).ok_or(Status::Invalid)?;
        Ok((handle.index(), peer.of(handle)?))
    }

    /// The peer in slot `index` as it is now.
    pub fn peer_state(&self, index: u32) -> PeerState {
        self.peers[index as usize].load()
    }

    /// The handle of the peer in slot `index`.
    pub fn peer_handle(&self, index: u32) -> Handle {
        self.peers[index as usize].handle(index)
    }

    /// Control side only: publishes how things stand with a peer.
    pub fn set_peer(&self, index: u32, state: PeerState) {
        self.peers[index as usize].store(state);
    }

    /// Not for who polls: runs `f` on a lane's port while nobody polls it. Waits for the token (a
    /// holder never waits).
    pub fn with_port<R>(&self, lane: u32, f: impl FnOnce(&mut P) -> R) -> R {
        self.with_lane(lane, |inner| f(&mut inner.port))
    }

    /// Control side only: after `connect` connected a lane's port to a peer, the rail carries
    /// transfers of peers of that generation. `id` names it on both sides and was never used in
    /// this connection. The handshake that made it fenced the one that the lane had. Call before
    /// [`Core::attach`], or [`Core::add_link`] or [`Core::kick`] after it.
    pub fn connect_rail<R>(
        &self,
        lane: u32,
        (peer, id): (u32, u32),
        generation: u32,
        connect: impl FnOnce(&mut P) -> R,
    ) -> R {
        self.with_net(|_| self.peers[peer as usize].book.open(lane, id));
        let (r, debts) = self.with_lane(lane, |inner| {
            let r = connect(&mut inner.port);
            let rail = &mut inner.rails[peer as usize];
            rail.generation = generation;
            self.peers[peer as usize].rails.fetch_or(1 << lane, Ordering::AcqRel);
            (r, self.lanes[lane as usize].take_debts(rail))
        });
        for slot in debts {
            self.leave(slot);
        }
        if self.tuning.stripe_all {
            self.offer(lane, peer, generation);
        }
        r
    }

    /// Shows a lane whose rail came up the striped transfers that are under way to its peer.
    fn offer(&self, lane: u32, peer: u32, generation: u32) {
        // Whoever posts makes a transfer active and then looks which rails there are.
        fence(Ordering::SeqCst);
        let lane = &self.lanes[lane as usize];
        self.under_way(&[Phase::Active], |slot, body| {
            if (body.peer, body.peer_generation) == (peer, generation) && lane.set(slot) {
                lane.token.publish();
            }
            false
        });
    }

    /// Lanes that have a rail to a peer, one bit each.
    pub fn rails(&self, peer: u32) -> u32 {
        self.peers[peer as usize].rails.load(Ordering::Acquire)
    }

    /// The lanes of a peer's rails.
    pub(super) fn lanes_of(&self, rails: u32) -> impl Iterator<Item = &Lane<'m, P>> {
        self.lanes.iter().filter(move |l| rails & (1 << l.index) != 0)
    }

    pub(super) fn with_lane<R>(&self, lane: u32, f: impl FnOnce(&mut Inner<'m, P>) -> R) -> R {
        self.lanes[lane as usize].token.wait_and_take();
        self.held_lane(lane, f)
    }

    /// The same, or `None` at once if somebody has the token: a copy of `local` may hang inside of
    /// a poll.
    pub(super) fn try_lane<R>(
        &self,
        lane: u32,
        f: impl FnOnce(&mut Inner<'m, P>) -> R,
    ) -> Option<R> {
        self.lanes[lane as usize].token.try_take().then(|| self.held_lane(lane, f))
    }

    /// The caller took the lane's token.
    fn held_lane<R>(&self, lane: u32, f: impl FnOnce(&mut Inner<'m, P>) -> R) -> R {
        let lane = &self.lanes[lane as usize];
        // SAFETY: I2: the caller took the token, which is given back below; asked once.
        let inner = unsafe { lane.inner() };
        let r = f(inner);
        if lane.token.give_back() {
            self.worker.wake();
        }
        r
    }

    /// Control side only: runs `f` on the message streams while nobody polls them.
    pub fn with_net<R>(&self, f: impl FnOnce(&mut N) -> R) -> R {
        self.with_net_inner(|inner| f(&mut inner.net))
    }

    pub(super) fn with_net_inner<R>(&self, f: impl FnOnce(&mut NetInner<N>) -> R) -> R {
        self.net_token.wait_and_take();
        // SAFETY: I2: token taken above, given back below.
        let net = unsafe { &mut *self.net.get() };
        let r = f(net);
        if self.net_token.give_back() {
            self.worker.wake();
        }
        r
    }

    /// Control side only: a peer is ready for messages over `links`: each with its rail's lane and
    /// id, or one with [`crate::engine::peer::NO_LANE`] and 0. They go over the one with the
    /// lowest id, which the other side chooses too. Call after its rails are connected.
    /// `peer_window`: what the other side's [`Core::first_window`] said. `early`: bytes that were
    /// read from that link already. False: they are not of our protocol.
    pub fn attach(
        &self,
        index: u32,
        links: impl IntoIterator<Item = (u32, u32, N::Link)>,
        name: &[u8],
        peer_window: u64,
        early: &[u8],
    ) -> bool {
        let peer = &self.peers[index as usize];
        let fine = self.with_net(|_| {
            // SAFETY: I2: `with_net` holds the message token.
            let io = unsafe { &mut *peer.io.get() };
            let open = |(lane, id, link)| PeerLink { lane, id, broken: false, link };
            io.links = links.into_iter().map(open).take(self.lanes.len()).collect();
            io.on = io.links.iter().map(|l| l.id).min();
            let consumed = peer.consumed.load(Ordering::Acquire);
            let window = self.open_window(io, consumed);
            let mut channel =
                Channel::new(index, name, window, peer_window).after(io.arrived, consumed);
            let pools = Pools { tx: &self.tx, rx: &self.rx };
            let fine = channel.feed(&pools, &mut io.fifo, early, |e| self.came(index, e)).is_ok();
            io.channel = Some(channel);
            fine
        });
        let s = peer.load();
        peer.store(PeerState { link: Link::Up, status: Status::Ok, ..s });
        self.kick(index);
        fine
    }

    /// Makes a lane look at its transfers again.
    pub fn nudge(&self, lane: u32) {
        self.lanes[lane as usize].token.publish();
        self.worker.wake();
    }

    /// Makes every lane and the messages look at a peer again.
    pub fn kick(&self, index: u32) {
        self.outgoing.set(index);
        self.net_token.publish();
        for lane in self.lanes {
            lane.token.publish();
        }
        self.worker.wake();
    }

    /// Control side only: ends a peer with `status`: its transfers end, its rails and its stream
    /// are closed. When this returns nothing moves between this engine and it any more. Returns
    /// its links.
    pub fn close_peer(&self, index: u32, status: Status) -> Links<N::Link> {
        let peer = &self.peers[index as usize];
        let s = peer.load();
        peer.store(PeerState { link: Link::Dead, status, ..s });
        // A post that did not see this yet has its transfer active before the fence, so the walk
        // below finds it.
        fence(Ordering::SeqCst);
        self.end_where(status, |body| body.peer == index && body.peer_generation == s.generation);
        for lane in 0..self.lanes.len() as u32 {
            self.close_rail(lane, index, status);
        }
        let links = self.drop_messages(index, status);
        // Marks of this connection must not end the next one. No new one comes: its rails and its
        // stream are closed.
        self.broken.clear(index);
        self.limping.clear(index);
        peer.forget_rails();
        links
    }

    /// True when a poll might find something: what a sleeper asks after it dozed off.
    pub fn has_work(&self) -> bool {
        self.net_token.is_pending() || self.lanes.iter().any(|l| l.token.is_pending())
    }

    /// The bell of the thread that polls in the background.
    pub const fn worker(&self) -> &Bell {
        &self.worker
    }

    /// The bell of the control side.
    pub const fn control_bell(&self) -> &Bell {
        &self.host
    }

    /// True when [`Core::next_broken`] or [`Core::next_limping`] has one.
    pub fn has_broken(&self) -> bool {
        !self.broken.is_empty() || !self.limping.is_empty()
    }

    /// Control side only: takes the next peer that lost a rail.
    pub fn next_limping(&self) -> Option<u32> {
        let index = self.limping.next(0)?;
        self.limping.clear(index);
        Some(index)
    }

    pub(super) fn mark_limping(&self, index: u32) {
        self.limping.set(index);
        self.host.wake();
    }

    /// Control side only: takes the next peer whose stream is of no use any more.
    pub fn next_broken(&self) -> Option<u32> {
        let index = self.broken.next(0)?;
        self.broken.clear(index);
        Some(index)
    }

    pub(super) fn mark_broken(&self, index: u32) {
        self.broken.set(index);
        self.host.wake();
    }

    /// One round over all lanes and messages. True when anything moved.
    pub fn poll(&self) -> bool {
        let mut moved = false;
        for lane in 0..self.lanes.len() as u32 {
            moved |= self.poll_lane(lane);
        }
        moved | self.poll_messages(true)
    }

    /// Own index among the peers.
    pub fn self_peer(&self) -> Handle {
        self.peer_handle(SELF)
    }
}
