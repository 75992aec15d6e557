//! Regions as prepare sees them.

use super::error::Side;

/// What prepare needs of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionView {
    /// Its slot; goes into the op.
    pub slot: u32,
    /// Its generation.
    pub generation: u32,
    /// First byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Slot of the peer that owns it. Not read for a local region.
    pub peer: u32,
    /// Base-2 logarithm of the bytes from one seam to the next, counted from `base`; 63: no seams.
    /// A seam is where one memory region of the NICs ends and the next begins.
    pub shift: u8,
}

impl Default for RegionView {
    fn default() -> RegionView {
        RegionView { slot: 0, generation: 0, base: 0, len: 0, peer: 0, shift: NO_SEAMS }
    }
}

/// The [`RegionView::shift`] of a region without seams.
pub const NO_SEAMS: u8 = 63;

/// Where prepare looks up regions.
pub trait Regions {
    /// The regions of one side that were met, each at the place that the low bits of its handle
    /// name ([`Known::find`]): as many places as a power of two from 2 on, or none.
    fn known(&self, side: Side) -> &[Known];

    /// Looks up a region that is not among the known ones, and puts it there. A remote region must
    /// be the right peer's. `None`: there is no such region; [`Regions::look_up`] helps to say why.
    fn meet(&mut self, side: Side, raw: u64) -> Option<Known>;

    /// Whether a region with seams was met.
    fn has_seams(&self) -> bool;

    /// The region of a raw handle, whoever it belongs to; `None` when the handle is stale or never
    /// was one.
    fn look_up(&self, side: Side, raw: u64) -> Option<RegionView>;
}

/// A region that was looked up: what the check of a pair needs, in half a cache line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C, align(32))]
pub struct Known {
    pub(super) raw: u64,
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) slot: u32,
    pub(super) shift: u8,
}

impl Known {
    /// No region, for place `place` of an array of two or more that is looked into by the low bits
    /// of a handle: no handle that leads there has this number.
    pub const fn vacant(place: usize) -> Known {
        Known { raw: !(place as u64), base: 0, len: 0, slot: 0, shift: NO_SEAMS }
    }

    /// The region of a raw handle.
    pub const fn of(raw: u64, view: &RegionView) -> Known {
        let &RegionView { slot, base, mut len, shift, .. } = view;
        // No region goes on behind the largest address, whatever its length says: nothing may wrap.
        if base != 0 && len > base.wrapping_neg() {
            len = base.wrapping_neg();
        }
        Known { raw, base, len, slot, shift }
    }

    /// Where the region of a handle is kept among `places`, a power of two.
    #[inline]
    pub const fn place(raw: u64, places: usize) -> usize {
        raw as usize & places.wrapping_sub(1)
    }

    /// The region of a raw handle, if it is among those.
    #[inline]
    pub fn find(known: &[Known], raw: u64) -> Option<&Known> {
        known.get(Known::place(raw, known.len())).filter(|k| k.raw == raw)
    }

    /// The raw handle.
    #[inline]
    pub const fn raw(&self) -> u64 {
        self.raw
    }

    /// Whether `len` bytes at `addr` lie inside.
    #[inline]
    pub(super) fn holds(&self, addr: u64, len: u64) -> bool {
        let offset = addr.wrapping_sub(self.base);
        self.len.checked_sub(len).is_some_and(|last| offset <= last)
    }

    /// Bytes from `addr`, which is inside, to the next seam.
    #[inline]
    pub(super) const fn before_seam(&self, addr: u64) -> u64 {
        let piece = 1u64 << self.shift;
        piece - (addr.wrapping_sub(self.base) & (piece - 1))
    }

    /// Whether it has seams.
    #[inline]
    pub const fn has_seams(&self) -> bool {
        self.shift != NO_SEAMS
    }
}

const _: () = assert!(core::mem::size_of::<Known>() == 32);
