//! The NIC seam: what the engine asks of a device, and the drivers that answer.
//!
//! A driver implements [`Port`]: one local lane (a NIC port). The engine calls it only while it
//! holds the lane's poll token, so a port needs no lock. A *rail* is (port, peer): the port keeps
//! its connection to peer `p` under index `p`.
//!
//! How to add a driver: implement [`Port`] in a module here and let `host` make it
//! (`docs/architecture.md`, "Adding a driver").

use crate::table::{Direction, Op};

pub mod any;
pub mod local;
#[cfg(feature = "sim")]
pub mod sim;
pub mod stream;
pub mod verbs;

/// The key of a remote region, as the initiator holds it. Plain data that a port reads at post.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemoteKey {
    /// Region slot at the target.
    pub slot: u32,
    /// Its generation there: a region that was withdrawn and registered again is another region.
    pub generation: u32,
    /// First byte, in the target's addresses.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

/// Where a port looks up keys while it builds work requests.
pub trait Keys: Copy {
    /// The key of the remote region in slot `index` of the initiator's own table.
    fn remote(&self, index: u32) -> RemoteKey;

    /// True when the local region in slot `index` is host memory, where the processor may copy.
    fn on_host(&self, index: u32) -> bool;

    /// The lkey of all bytes of the local region in slot `index`, on local lane `lane`. `None`: it
    /// has several, or none; [`Keys::lkey`] says.
    fn whole_lkey(&self, index: u32, lane: u32) -> Option<u32>;

    /// The rkey of all bytes of the remote region in slot `index`, on rail `rail` of its owner.
    /// `None`: it has several, or none; [`Keys::rkey`] says.
    fn whole_rkey(&self, index: u32, rail: u32) -> Option<u32>;

    /// The lkey of the byte at `addr` of the local region in slot `index`, on local lane `lane`.
    /// `None`: it is not registered there.
    fn lkey(&self, index: u32, lane: u32, addr: u64) -> Option<u32>;

    /// The rkey of the byte at `addr` of the remote region in slot `index`, on rail `rail` of its
    /// owner. `None`: the owner gave none.
    fn rkey(&self, index: u32, rail: u32, addr: u64) -> Option<u32>;

    /// True when what a NIC wrote into the local region in slot `index` may still be on its way
    /// when the NIC says that it is done, until the same NIC has read there.
    fn lands_late(&self, _index: u32) -> bool {
        false
    }

    /// Where [`Keys::lands_late`]: the rkey of the byte at `addr` of the local region in slot
    /// `index`, on local lane `lane`. `None`: it is not registered there.
    fn own_rkey(&self, _index: u32, _lane: u32, _addr: u64) -> Option<u32> {
        None
    }
}

/// A run of ops for one rail, in order. A port may carry several in one work request.
#[derive(Debug)]
pub struct Batch<'a, K: Keys> {
    /// Peer slot: names the rail on this port.
    pub peer: u32,
    /// READ or WRITE.
    pub direction: Direction,
    /// The ops.
    pub ops: &'a [Op],
    /// Number of the first op on this rail; the i-th has `first_wr + i` (wrapping).
    pub first_wr: u32,
    /// Key lookup.
    pub keys: &'a K,
}

/// How a work request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WrStatus {
    /// Done, and every earlier one of this rail that has not been reported is done too.
    Success,
    /// The target's memory refused it. Ends the transfer; never repeated on another rail.
    RemoteAccess,
    /// Local memory refused it. Ends the transfer.
    LocalAccess,
    /// The kernel or the provider forbids the access. Ends the transfer.
    Permission,
    /// The rail is broken (retry exceeded, flushed, peer gone): not the work request's own fault.
    RailError,
}

/// One completion. RC rails complete in order: `Success` retires every earlier work request of the
/// rail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// Peer slot of the rail.
    pub peer: u32,
    /// Number on that rail, of the last op that the work request carried; of the first one if it
    /// failed.
    pub wr: u32,
    /// What happened to it.
    pub status: WrStatus,
    /// Provider's own code (errno for `local`), 0 if none.
    pub vendor: u32,
}

/// A post that took fewer work requests than it was offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PostError {
    /// The queue is full: progress, not a fault.
    Full,
    /// The rail is not connected or in error; nothing from `posted` on will complete.
    Rail,
}

/// One local lane. Called only by the holder of the lane's poll token.
pub trait Port {
    /// True when an access error breaks the rail, as on RC queue pairs: what else was in flight is
    /// flushed and the rail must be connected again. False: only the batch of the culprit ends.
    fn access_error_breaks_rail(&self) -> bool;

    /// True when a WRITE of a rail that broke may still land after [`Port::close`], because packets
    /// are on their way: until the peer has fenced the rail, nobody may write the same place anew.
    fn may_land_late(&self) -> bool {
        false
    }

    /// Most ops in flight on one rail.
    fn depth(&self) -> u32;

    /// Ops that the lane takes now, over all its rails: what its completion queue has room for.
    fn room(&self) -> u32 {
        u32::MAX
    }

    /// Most bytes that one batch should carry, so that a cancel waits for one batch only.
    fn batch_bytes(&self) -> u64;

    /// Bytes in flight on the lane beyond which it takes no more: enough to keep the wire busy.
    /// More would only lie in its queue, where no faster rail can take it.
    fn window_bytes(&self) -> u64 {
        u64::MAX
    }

    /// Most ops in one batch.
    fn batch_ops(&self) -> u32;

    /// Posts a batch. `Ok` took all of it; `Err((n, why))` took the first `n`. Those taken will be
    /// reported by [`Port::poll`], the others never.
    fn post<K: Keys>(&mut self, batch: &Batch<'_, K>) -> Result<(), (u32, PostError)>;

    /// Takes one completion, if there is one.
    fn poll(&mut self) -> Option<Completion>;

    /// Asks for an event at the next completion, for whoever is about to sleep; poll once more
    /// after it.
    fn arm(&mut self) {}

    /// Closes the rail to `peer`. Work requests that were in flight are not reported any more; the
    /// engine retires them itself. True: nothing it carried touches memory after this returns.
    /// False: the device would not let go of it, so what was in flight may go on.
    fn close(&mut self, peer: u32) -> bool;
}

/// Why a stream of messages to a peer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Closed {
    /// Provider's own code (errno), 0 when the peer closed it in order.
    pub vendor: u32,
}

/// A reliable ordered byte stream to one peer, for messages. Never waits.
pub trait Link {
    /// Sends as much of the parts, in order, as is taken now; 0 when none is.
    fn send(&mut self, parts: &[&[u8]]) -> Result<usize, Closed>;

    /// How many of the bytes that were sent are known to be with the peer, whatever becomes of this
    /// stream. `None`: a stream that does not tell; what it took counts as delivered.
    fn acked(&mut self) -> Option<u64> {
        None
    }

    /// Receives what is there; 0 when nothing is.
    fn receive(&mut self, into: &mut [u8]) -> Result<usize, Closed>;
}

/// All message streams of an engine.
pub trait Net {
    /// One stream.
    type Link: Link;

    /// Peers whose stream has something to receive (or was closed), at most `into.len()`. Never
    /// waits.
    fn ready(&mut self, into: &mut [u32]) -> usize;

    /// Takes in all that has arrived so far, whoever it is for: before a stream is left for good.
    /// What is there for others is named by [`Net::ready`] as ever.
    fn gather(&mut self) {}

    /// Asks for an event at the next arrival, for whoever is about to sleep. True: there is more to
    /// do that no event will tell, so look again soon.
    fn arm(&mut self) -> bool {
        false
    }
}
