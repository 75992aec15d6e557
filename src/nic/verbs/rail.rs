//! One rail as its port sees it: the queue pair, and what was posted to it and is not done.

use super::qp::Qp;
use crate::nic::{Completion, WrStatus};

/// A signalled work request in flight, and what its completion settles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    /// Number in its `wr_id`.
    pub(super) number: u32,
    /// Last op that it and the unsignalled ones before it carry.
    pub(super) last: u32,
    /// Work requests that its completion settles: itself and the unsignalled ones before it.
    pub(super) wrs: u32,
    /// True when it carries no op: a proof that the rail works.
    pub(super) proof: bool,
}

impl Span {
    pub(super) const NONE: Span = Span { number: 0, last: 0, wrs: 0, proof: false };
}

/// The end of what a WRITE wrote, to read back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Written {
    pub(super) at: u64,
    pub(super) len: u32,
    pub(super) rkey: u32,
}

/// Work requests in flight that no signalled one follows, since the provider refused it: a marker
/// must be posted behind them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Owed {
    /// How many they are.
    pub(super) silent: u32,
    /// Their last op.
    pub(super) last: u32,
    /// They are WRITEs: the marker reads this back.
    pub(super) written: Option<Written>,
}

/// What is known of a rail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Proof {
    /// Never asked.
    Unknown,
    Good,
    Bad,
}

/// The queue pair by which a rail's NIC reads back what it wrote into a device's memory here, and
/// what waits for that.
#[derive(Debug)]
pub(super) struct Echo {
    pub(super) qp: Option<Qp>,
    /// Flush READs in flight.
    pub(super) asked: u32,
    /// Last op that they speak for.
    pub(super) upto: u32,
    /// Last op that came in; not told as long as a flush must follow it.
    pub(super) arrived: Option<u32>,
    /// The failure behind `arrived`, which is told after it.
    pub(super) culprit: Option<Completion>,
    /// A flush must be posted, for which there was no room.
    pub(super) due: bool,
}

impl Echo {
    const NONE: Echo =
        Echo { qp: None, asked: 0, upto: 0, arrived: None, culprit: None, due: false };
}

/// One rail.
#[derive(Debug)]
pub(super) struct Rail {
    pub(super) qp: Option<Qp>,
    /// Raised when the rail is closed: completions of an older one are dropped.
    pub(super) epoch: u16,
    /// Which rail of the peer it leads to.
    pub(super) rail: u32,
    /// Most bytes of a work request.
    pub(super) max_msg: u32,
    /// Pieces of local memory in one.
    pub(super) sges: u32,
    /// An error completion came: what comes now is innocent and ignored.
    pub(super) broken: bool,
    /// Work requests that are not known to be done, and the marker that is owed.
    pub(super) in_flight: u32,
    /// Number behind the newest op.
    pub(super) next: u32,
    pub(super) owed: Option<Owed>,
    /// An op that cannot be posted, to be reported when all before it are done.
    pub(super) refused: Option<(u32, WrStatus)>,
    pub(super) proof: Proof,
    /// A proof is in flight.
    pub(super) proving: bool,
    /// Registrations that READs were posted to and that no flush has followed yet, see
    /// `port/loopback.rs`.
    pub(super) landings: usize,
    pub(super) echo: Echo,
    head: usize,
    len: usize,
}

impl Rail {
    /// Not connected.
    pub(super) const fn new() -> Rail {
        Rail {
            qp: None,
            epoch: 0,
            rail: 0,
            max_msg: 0,
            sges: 1,
            broken: false,
            in_flight: 0,
            next: 0,
            owed: None,
            refused: None,
            proof: Proof::Unknown,
            proving: false,
            landings: 0,
            echo: Echo::NONE,
            head: 0,
            len: 0,
        }
    }

    /// The queue pair, if the rail can be posted to.
    pub(super) fn usable(&self) -> Option<&Qp> {
        self.qp.as_ref().filter(|_| !self.broken)
    }

    /// Work requests that the send queue still takes.
    pub(super) fn free(&self) -> u32 {
        self.qp.as_ref().map_or(0, |qp| qp.granted().depth.saturating_sub(self.in_flight))
    }

    /// Things that [`super::VerbsPort`] must look after without a completion that reminds it.
    pub(super) fn chores(&self) -> u32 {
        u32::from(self.owed.is_some())
            + u32::from(self.refused.is_some())
            + u32::from(self.echo.due)
    }

    /// Spans that still fit the ring.
    pub(super) const fn span_room(&self, ring: &[Span]) -> usize {
        ring.len() - self.len
    }

    /// Remembers a signalled work request. The caller saw that there is room.
    pub(super) fn push(&mut self, ring: &mut [Span], span: Span) {
        debug_assert!(self.len < ring.len());
        if ring.is_empty() {
            return;
        }
        let at = (self.head + self.len) % ring.len();
        ring[at] = span;
        self.len = (self.len + 1).min(ring.len());
    }

    /// The oldest span.
    pub(super) fn pop(&mut self, ring: &[Span]) -> Option<Span> {
        if self.len == 0 {
            return None;
        }
        let span = ring.get(self.head).copied();
        self.head = (self.head + 1) % ring.len();
        self.len -= 1;
        span
    }

    /// The oldest span with this number, and how many are before it.
    pub(super) fn find(&self, ring: &[Span], number: u32) -> Option<(usize, Span)> {
        (0..self.len)
            .map(|i| (i, ring[(self.head + i) % ring.len()]))
            .find(|(_, span)| span.number == number)
    }

    /// Forgets everything but the epoch, which grows.
    pub(super) fn reset(&mut self) {
        *self = Rail { epoch: self.epoch.wrapping_add(1), ..Rail::new() };
    }
}
