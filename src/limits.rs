//! Every capacity of an engine, and the one place that checks and adds them up.

use crate::handle::MAX_INDEX;

/// Capacities that are fixed when an engine is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Peers, this engine itself included.
    pub peers: u32,
    /// Regions registered here.
    pub regions: u32,
    /// Imported regions of all peers.
    pub remote_regions: u32,
    /// Prepared transfers, in flight or not.
    pub transfers: u32,
    /// Lanes: local NIC ports.
    pub lanes: u32,
    /// Bytes of outgoing message blocks, and as many of incoming ones.
    pub message_bytes: u32,
}

/// Most lanes.
pub const MAX_LANES: u32 = 16;
/// Most bytes of message blocks in each direction.
pub const MAX_MESSAGE_BYTES: u32 = 1 << 30;
/// Fewest: what the channel protocol keeps free before it reads, twice.
pub const MIN_MESSAGE_BYTES: u32 = 2 << 20;

impl Limits {
    /// The name, value and allowed range of the first capacity that is out of range.
    pub const fn check(&self) -> Result<(), (&'static str, u32, u32, u32)> {
        let all = [
            ("max_peers", self.peers, 2, 65_536),
            ("max_regions", self.regions, 1, 1 << 20),
            ("max_remote_regions", self.remote_regions, 1, 1 << 22),
            ("max_transfers", self.transfers, 1, 1 << 20),
            ("rails", self.lanes, 1, MAX_LANES),
            ("message_bytes", self.message_bytes, MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
        ];
        let mut i = 0;
        while i < all.len() {
            let (_, value, low, high) = all[i];
            if value < low || value > high {
                return Err(all[i]);
            }
            i += 1;
        }
        Ok(())
    }

    /// Blocks of each message pool.
    pub const fn blocks(&self) -> u32 {
        self.message_bytes / crate::engine::message::BLOCK as u32
    }

    /// Return entries: one for each claim that can be in flight, and one for each transfer and lane
    /// that had a post cut short. So it cannot run out.
    pub const fn returns(&self) -> u32 {
        self.lanes * (crate::engine::lane::LANE_CLAIMS + self.transfers)
    }

    /// Bytes that a peer may have in flight towards this engine's application.
    pub const fn window(&self) -> u64 {
        self.message_bytes as u64 / 2
    }
}

const _: () = assert!(1 << 22 <= MAX_INDEX && 65_536 <= MAX_INDEX);
const _: () = assert!(MIN_MESSAGE_BYTES / 2 / 256 > crate::engine::channel::READ_RESERVE);
