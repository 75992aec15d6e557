//! Generation-tagged handles: a number that names a slot and the life of it that was meant.
//!
//! Layout of the 64 bits: `kind:8 | generation:32 | index:24`. The kind is never 0, so no handle is
//! 0.

/// What a handle names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Memory registered here.
    LocalRegion = 1,
    /// A peer's memory, imported from its blob.
    RemoteRegion = 2,
    /// A descriptor table.
    Table = 3,
    /// A prepared transfer.
    Transfer = 4,
    /// A peer.
    Peer = 5,
}

/// Most slots that one kind can have.
pub const MAX_INDEX: u32 = (1 << 24) - 1;

/// A slot index and the generation it had when the handle was given out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Handle(u64);

impl Handle {
    /// Packs a handle. `index` must be at most [`MAX_INDEX`].
    pub const fn new(kind: Kind, index: u32, generation: u32) -> Handle {
        debug_assert!(index <= MAX_INDEX);
        Handle(((kind as u64) << 56) | ((generation as u64) << 24) | (index & MAX_INDEX) as u64)
    }

    /// Reads a number that came from outside. `None` when it is not a handle of `kind`.
    pub const fn parse(raw: u64, kind: Kind) -> Option<Handle> {
        if (raw >> 56) as u8 == kind as u8 {
            Some(Handle(raw))
        } else {
            None
        }
    }

    /// The number that crosses the C ABI.
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// Which slot.
    pub const fn index(self) -> u32 {
        (self.0 as u32) & MAX_INDEX
    }

    /// Which life of the slot.
    pub const fn generation(self) -> u32 {
        (self.0 >> 24) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs_at_the_limits_and_never_is_zero() {
        for kind in [Kind::LocalRegion, Kind::RemoteRegion, Kind::Table, Kind::Transfer, Kind::Peer]
        {
            for index in [0, 1, 65_535, MAX_INDEX] {
                for generation in [0, 1, u32::MAX] {
                    let h = Handle::new(kind, index, generation);
                    assert_ne!(h.raw(), 0);
                    assert_eq!((h.index(), h.generation()), (index, generation));
                    assert_eq!(Handle::parse(h.raw(), kind), Some(h));
                }
            }
        }
        assert_eq!(Handle::parse(Handle::new(Kind::Table, 1, 1).raw(), Kind::Peer), None);
        assert_eq!(Handle::parse(0, Kind::Peer), None);
    }
}
