//! Every capacity of an engine, and the one place that checks and adds them up.

use crate::engine::channel::{cost, READ_RESERVE};
use crate::engine::message::{BLOCK, MAX_MESSAGE};
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

/// Most rails of one side.
pub const MAX_RAILS: u32 = 16;
/// Most lanes: beside the rails, one for transfers of the engine to itself.
pub const MAX_LANES: u32 = MAX_RAILS + 1;
/// Most bytes of message blocks in each direction.
pub const MAX_MESSAGE_BYTES: u32 = 1 << 30;
/// Fewest: what the channel protocol keeps free before it reads, twice.
pub const MIN_MESSAGE_BYTES: u32 = 2 << 20;

const WINDOW: u64 = cost(MAX_MESSAGE) * 3 / 2;
const RESERVE: u64 = READ_RESERVE as u64 * BLOCK as u64;
/// Most peers, the engine itself included: so many windows fit the largest pool.
pub const MAX_PEERS: u32 = ((MAX_MESSAGE_BYTES as u64 - RESERVE) / WINDOW) as u32;

impl Limits {
    /// The name, value and allowed range of the first capacity that is out of range.
    pub const fn check(&self) -> Result<(), (&'static str, u32, u32, u32)> {
        let all = [
            ("max_peers", self.peers, 2, MAX_PEERS),
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
        let need = self.least_message_bytes();
        if (self.message_bytes as u64) < need && need <= MAX_MESSAGE_BYTES as u64 {
            return Err(("message_bytes", self.message_bytes, need as u32, MAX_MESSAGE_BYTES));
        }
        if need > MAX_MESSAGE_BYTES as u64 {
            return Err(("max_peers", self.peers, 2, MAX_PEERS));
        }
        Ok(())
    }

    /// Blocks of each message pool.
    pub const fn blocks(&self) -> u32 {
        self.message_bytes / BLOCK as u32
    }

    /// Return entries: one for each claim that can be in flight, and for each transfer and lane one
    /// that a failed rail or a post cut short left. A transfer that is striped over lanes can leave
    /// more, when its rails fail again and again; if they ever run out, that transfer ends with
    /// `NoRail`.
    pub const fn returns(&self) -> u32 {
        self.lanes * (crate::engine::lane::LANE_CLAIMS + self.transfers)
    }

    /// What every peer may have in flight towards this engine's application, always: one longest
    /// message, and half as much again, because what the application took is told in steps of an
    /// eighth, at latest after two. A peer that sends much is given more out of
    /// [`Limits::spare_window`].
    pub const fn window(&self) -> u64 {
        WINDOW
    }

    /// Most that one peer is given.
    pub const fn max_window(&self) -> u64 {
        let quarter = self.message_bytes as u64 / 4;
        if quarter > self.window() {
            quarter
        } else {
            self.window()
        }
    }

    /// What is left of the incoming blocks when every peer has its window. All windows together
    /// thus never exceed the blocks, so a reader can always read on.
    pub const fn spare_window(&self) -> u64 {
        (self.message_bytes as u64).saturating_sub(self.least_message_bytes())
    }

    /// Message bytes that so many peers need.
    const fn least_message_bytes(&self) -> u64 {
        RESERVE + self.peers as u64 * WINDOW
    }
}

const _: () = assert!(1 << 22 <= MAX_INDEX && 65_536 <= MAX_INDEX);
const _: () = assert!(WINDOW * 6 / 8 >= cost(MAX_MESSAGE));
const _: () = assert!(MIN_MESSAGE_BYTES / 2 / 256 > READ_RESERVE);
