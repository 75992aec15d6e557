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
    /// Index of the first descriptor pair in it, for errors.
    pub pair: u32,
}

const _: () = assert!(core::mem::size_of::<Op>() == 32);
