//! An op: one contiguous local-to-remote run, never longer than a slice, so it becomes exactly one
//! work request.

use bytemuck::{Pod, Zeroable};

/// Which way the bytes go, seen from the side that posts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the peer into local memory (pull).
    Read,
    /// From local memory into the peer (push).
    Write,
}

/// One contiguous run after coalescing and slicing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Op {
    /// First local byte.
    pub local: u64,
    /// First remote byte.
    pub remote: u64,
    /// Bytes, 1 to the slice limit.
    pub len: u32,
    /// Slot of the local region.
    pub local_region: u32,
    /// Slot of the remote region.
    pub remote_region: u32,
    /// [`Op::first_pair`] and flags.
    pub tag: u32,
}

/// Most descriptor pairs of one transfer.
pub(super) const MAX_PAIRS: u32 = (1 << 30) - 1;
/// The op begins in the middle of its first pair.
const INSIDE: u32 = 1 << 31;
/// It did not arrive; the transfer ended without.
const MISSING: u32 = 1 << 30;

impl Op {
    /// The tag of an op whose first byte is of pair `pair`; `inside`: not the pair's first byte.
    #[inline]
    pub const fn tagged(pair: u32, inside: bool) -> u32 {
        pair | if inside { INSIDE } else { 0 }
    }

    /// First byte behind it, on both sides.
    #[inline]
    pub(super) const fn end(&self) -> (u64, u64) {
        let len = self.len as u64;
        (self.local.wrapping_add(len), self.remote.wrapping_add(len))
    }

    /// Slots of its two regions.
    #[inline]
    pub const fn regions(&self) -> (u32, u32) {
        (self.local_region, self.remote_region)
    }

    /// Index of the first descriptor pair in it, for errors.
    #[inline]
    pub const fn first_pair(&self) -> u32 {
        self.tag & MAX_PAIRS
    }

    /// True when the pair before it goes on into it.
    pub const fn is_inside(&self) -> bool {
        self.tag & INSIDE != 0
    }

    /// True when it did not arrive before its transfer ended.
    pub const fn is_missing(&self) -> bool {
        self.tag & MISSING != 0
    }

    /// Says whether it is missing.
    pub const fn set_missing(&mut self, missing: bool) {
        self.tag = if missing { self.tag | MISSING } else { self.tag & !MISSING };
    }
}

const _: () = assert!(core::mem::size_of::<Op>() == 32);
