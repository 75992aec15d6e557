//! Descriptors, and their compact strided form.

use bytemuck::{Pod, Zeroable};

/// One piece of registered memory. 32 bytes, laid out as NIXL lays out its own, so a list crosses
/// without a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Desc {
    /// First byte.
    pub addr: u64,
    /// Bytes; 0 is refused.
    pub len: u64,
    /// Device index, which the engine ignores: the region decides.
    pub dev: u64,
    /// Raw handle of the region that holds it.
    pub region: u64,
}

/// `count` descriptors of `len` bytes, the i-th at `base + i * stride`, all in one region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Stride {
    /// First byte of descriptor 0.
    pub base: u64,
    /// Bytes of each descriptor; 0 is refused.
    pub len: u64,
    /// Bytes from one descriptor's start to the next one's.
    pub stride: u64,
    /// How many.
    pub count: u64,
    /// Raw handle of the region that holds them all.
    pub region: u64,
}

const _: () = assert!(core::mem::size_of::<Desc>() == 32 && core::mem::size_of::<Stride>() == 40);
