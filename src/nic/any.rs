//! The drivers of an engine behind one type each: lanes of RDMA NICs beside one that copies within
//! the host, message streams over queue pairs beside TCP.

use rdma_core_sys::ibv_cq;

use crate::engine::arena::Arena;
use crate::nic::local::LocalPort;
use crate::nic::stream::{Stream, Streams};
use crate::nic::verbs::mail::{MailError, MailLink, MailSetup, Post};
use crate::nic::verbs::VerbsPort;
use crate::nic::{Batch, Closed, Completion, Keys, Link, Net, Port, PostError};

/// A lane.
#[derive(Debug)]
pub enum AnyPort<'m> {
    /// Copies within this host.
    Local(LocalPort<'m>),
    /// A port of an RDMA NIC.
    Verbs(VerbsPort<'m>),
}

/// Runs `$call` on the driver in there.
macro_rules! each {
    ($port:expr, $p:ident => $call:expr) => {
        match $port {
            AnyPort::Local($p) => $call,
            AnyPort::Verbs($p) => $call,
        }
    };
}

impl Port for AnyPort<'_> {
    fn access_error_breaks_rail(&self) -> bool {
        each!(self, p => p.access_error_breaks_rail())
    }

    fn may_land_late(&self) -> bool {
        each!(self, p => p.may_land_late())
    }

    #[inline]
    fn depth(&self) -> u32 {
        each!(self, p => p.depth())
    }

    #[inline]
    fn room(&self) -> u32 {
        each!(self, p => p.room())
    }

    #[inline]
    fn window_bytes(&self) -> u64 {
        each!(self, p => p.window_bytes())
    }

    #[inline]
    fn batch_bytes(&self) -> u64 {
        each!(self, p => p.batch_bytes())
    }

    #[inline]
    fn batch_ops(&self) -> u32 {
        each!(self, p => p.batch_ops())
    }

    #[inline]
    fn post<K: Keys>(&mut self, batch: &Batch<'_, K>) -> Result<(), (u32, PostError)> {
        each!(self, p => p.post(batch))
    }

    #[inline]
    fn poll(&mut self) -> Option<Completion> {
        each!(self, p => p.poll())
    }

    fn arm(&mut self) {
        each!(self, p => p.arm());
    }

    fn close(&mut self, peer: u32) -> bool {
        each!(self, p => p.close(peer))
    }
}

/// A message stream.
#[derive(Debug)]
pub enum AnyLink<'m> {
    /// Over a TCP socket.
    Stream(Stream),
    /// Over a message queue pair.
    Mail(MailLink<'m>),
}

impl Link for AnyLink<'_> {
    fn send(&mut self, parts: &[&[u8]]) -> Result<usize, Closed> {
        match self {
            AnyLink::Stream(s) => s.send(parts),
            AnyLink::Mail(m) => m.send(parts),
        }
    }

    fn acked(&mut self) -> Option<u64> {
        match self {
            AnyLink::Stream(s) => s.acked(),
            AnyLink::Mail(m) => m.acked(),
        }
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, Closed> {
        match self {
            AnyLink::Stream(s) => s.receive(into),
            AnyLink::Mail(m) => m.receive(into),
        }
    }
}

/// All message streams.
#[derive(Debug)]
pub struct AnyNet<'m> {
    streams: Streams,
    post: Post<'m>,
    watched: u32,
}

impl<'m> AnyNet<'m> {
    /// Streams over `streams`, and mailboxes for `peers` peers on `rails` lanes. `None`: the arena
    /// is too small.
    pub fn new(
        arena: &mut Arena<'m>,
        streams: Streams,
        peers: u32,
        rails: u32,
    ) -> Option<AnyNet<'m>> {
        Some(AnyNet { streams, post: Post::new(arena, peers, rails)?, watched: 0 })
    }

    /// Adds or removes the TCP stream of a peer. False: the kernel refused.
    pub fn watch(&mut self, stream: &Stream, peer: Option<u32>) -> bool {
        let done = self.streams.watch(stream, peer);
        if done {
            let change = if peer.is_some() { 1 } else { u32::MAX };
            self.watched = self.watched.wrapping_add(change);
        }
        done
    }

    /// Gives a lane the completion queue of its messages, of `entries` entries.
    ///
    /// # Safety
    /// As for [`Post::open_lane`] (V31).
    pub unsafe fn open_lane(&mut self, lane: u32, cq: *mut ibv_cq, entries: u32) {
        // SAFETY: V31: the caller's promise.
        unsafe { self.post.open_lane(lane, cq, entries) };
    }

    /// Opens a mailbox, in place of the one that was there.
    ///
    /// # Safety
    /// As for [`Post::connect`] (V30, V31).
    pub unsafe fn open_mail(
        &mut self,
        peer: u32,
        lane: u32,
        setup: &MailSetup,
    ) -> Result<MailLink<'m>, MailError> {
        self.post.close(peer, lane);
        // SAFETY: V30, V31: the caller's promise.
        unsafe { self.post.connect(peer, lane, setup) }?;
        Ok(self.post.link(peer, lane))
    }

    /// Whether a mailbox works both ways, once that is known.
    pub fn mail_proof(&self, peer: u32, lane: u32) -> Option<bool> {
        self.post.proof(peer, lane)
    }

    /// The oldest frame of a mailbox that did not complete, if one is due.
    pub fn mail_oldest(&self, peer: u32, lane: u32) -> Option<u32> {
        self.post.oldest(peer, lane)
    }

    /// Breaks a mailbox whose frames do not complete.
    pub fn give_up_mail(&mut self, peer: u32, lane: u32) {
        self.post.give_up(peer, lane);
    }

    /// Closes a mailbox, unless it is another one by now.
    pub fn close_mail(&mut self, peer: u32, lane: u32, link: &MailLink<'m>) {
        if link.is_current() {
            self.post.close(peer, lane);
        }
    }
}

impl<'m> Net for AnyNet<'m> {
    type Link = AnyLink<'m>;

    fn ready(&mut self, into: &mut [u32]) -> usize {
        let n = self.post.poll(into);
        // Without TCP streams nothing is asked of the kernel.
        match into.get_mut(n..) {
            Some(rest) if self.watched > 0 => n + self.streams.ready(rest),
            _ => n,
        }
    }

    fn gather(&mut self) {
        self.post.gather();
    }

    fn arm(&mut self) -> bool {
        self.post.arm();
        self.post.is_pending()
    }
}
