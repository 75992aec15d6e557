//! Why a pair of lists makes no ops. Plain data: the texts are written only when somebody reads
//! them.

use core::fmt;

use super::op::MAX_PAIRS;
use super::source::OutOfRange;
use crate::status::Status;

/// One of the two lists of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Memory of this process.
    Local,
    /// Memory of the peer.
    Remote,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Local => "local",
            Side::Remote => "remote",
        })
    }
}

/// A sink that takes no more: what it ran into, and how much that allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full {
    /// [`Status::Capacity`] or [`Status::NoMemory`].
    pub status: Status,
    /// What `limit` counts, for the text: "ops", "regions of one transfer", "bytes of pool".
    pub what: &'static str,
    /// Most of it.
    pub limit: u64,
}

/// What was wrong, with the values seen and allowed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// The lists have different lengths.
    ListLengths {
        /// Descriptors in the local list.
        local: u64,
        /// Descriptors in the remote list.
        remote: u64,
    },
    /// More pairs than an op can name.
    TooManyPairs {
        /// Pairs given.
        pairs: u64,
    },
    /// An index that the table does not have.
    Index(OutOfRange),
    /// The two descriptors of a pair have different lengths.
    PairLengths {
        /// Bytes of the local one.
        local: u64,
        /// Bytes of the remote one.
        remote: u64,
    },
    /// A pair of 0 bytes.
    ZeroLength,
    /// A region handle that names nothing, or something that was released.
    UnknownRegion {
        /// The raw handle.
        region: u64,
    },
    /// A remote region of another peer than the transfer's.
    WrongPeer {
        /// The raw handle.
        region: u64,
        /// Slot of the peer that owns the region.
        owner: u32,
        /// Slot of the transfer's peer.
        wanted: u32,
    },
    /// A descriptor that does not lie inside its region.
    Outside {
        /// First byte of the descriptor.
        addr: u64,
        /// Bytes of the descriptor.
        len: u64,
        /// First byte of the region.
        base: u64,
        /// Bytes of the region.
        region_len: u64,
    },
    /// All pairs together have more bytes than `u64` counts.
    TooManyBytes,
    /// The sink takes no more.
    Full {
        /// Ops made before.
        ops: u64,
        /// Why it took no more.
        why: Full,
    },
}

impl Reason {
    /// The status code of it.
    pub const fn status(&self) -> Status {
        match self {
            Reason::ListLengths { .. } | Reason::PairLengths { .. } => Status::Mismatch,
            Reason::TooManyPairs { .. } => Status::Capacity,
            Reason::Index(_) => Status::Range,
            Reason::ZeroLength | Reason::WrongPeer { .. } | Reason::TooManyBytes => Status::Invalid,
            Reason::UnknownRegion { .. } => Status::Stale,
            Reason::Outside { .. } => Status::NotRegistered,
            Reason::Full { why, .. } => why.status,
        }
    }
}

/// Why no transfer was prepared: the first bad pair, and the first rule that it breaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrepareError {
    /// The status code.
    pub status: Status,
    /// Index of the pair; [`PrepareError::NO_PAIR`] when the lists as such are wrong.
    pub pair: u64,
    /// Which list, where it is one of them.
    pub side: Option<Side>,
    /// What was wrong.
    pub reason: Reason,
}

impl PrepareError {
    /// [`PrepareError::pair`] of an error that no single pair has.
    pub const NO_PAIR: u64 = u64::MAX;

    /// An error of pair `pair`, on `side` if it is one side's alone.
    pub const fn new(pair: u64, side: Option<Side>, reason: Reason) -> PrepareError {
        PrepareError { status: reason.status(), pair, side, reason }
    }
}

impl fmt::Display for PrepareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.pair != Self::NO_PAIR {
            write!(f, "pair {}: ", self.pair)?;
        }
        if let Some(side) = self.side {
            write!(f, "{side}: ")?;
        }
        self.reason.fmt(f)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Reason::ListLengths { local, remote } => write!(
                f,
                "{local} local but {remote} remote descriptors: give lists of equal length"
            ),
            Reason::TooManyPairs { pairs } => {
                write!(f, "{pairs} pairs, at most {MAX_PAIRS} fit one transfer: split the lists")
            }
            Reason::Index(OutOfRange { index, table_len: 0 }) => {
                write!(f, "index {index} into a table without descriptors: use another table")
            }
            Reason::Index(OutOfRange { index, table_len }) => write!(
                f,
                "index {index} is out of range: the table has {table_len} descriptors, \
                 use 0 to {}",
                table_len - 1
            ),
            Reason::PairLengths { local, remote } => write!(
                f,
                "{local} bytes local but {remote} bytes remote: \
                 both descriptors of a pair need the same length"
            ),
            Reason::ZeroLength => {
                f.write_str("0 bytes, at least 1 is needed: leave the pair out of both lists")
            }
            Reason::UnknownRegion { region } => write!(
                f,
                "region {region:#x} is not known or was released: \
                 register or import it, then use the new handle"
            ),
            Reason::WrongPeer { region, owner, wanted } => write!(
                f,
                "region {region:#x} belongs to peer slot {owner}, the transfer goes to peer slot \
                 {wanted}: one transfer takes regions of one peer"
            ),
            Reason::Outside { addr, len, base, region_len } => write!(
                f,
                "{len} bytes at {addr:#x} are not inside their region, {region_len} bytes at \
                 {base:#x}: correct the descriptor or register the whole range"
            ),
            Reason::TooManyBytes => f.write_str(
                "the pairs up to here add up to more than 2^64-1 bytes: split the lists",
            ),
            Reason::Full { ops, why: Full { status, what, limit } } => write!(
                f,
                "full after {ops} ops: at most {limit} {what}; split the lists, or {}",
                match status {
                    Status::NoMemory => "release transfers or raise KVRAIL_MAX_BYTES",
                    _ => "raise that capacity",
                }
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_values_and_what_to_do() {
        let index = Reason::Index(OutOfRange { index: 9, table_len: 9 });
        let outside = Reason::Outside { addr: 0x20, len: 8, base: 0x10, region_len: 16 };
        let full = Full { status: Status::NoMemory, what: "bytes of pool", limit: 4096 };
        let cases = [
            (PrepareError::new(3, Some(Side::Remote), index), "pair 3: remote: index 9 is out"),
            (PrepareError::new(3, Some(Side::Remote), index), "9 descriptors, use 0 to 8"),
            (PrepareError::new(0, Some(Side::Local), outside), "8 bytes at 0x20 are not inside"),
            (PrepareError::new(0, Some(Side::Local), outside), "16 bytes at 0x10: correct"),
            (PrepareError::new(7, None, Reason::ZeroLength), "pair 7: 0 bytes, at least 1"),
            (PrepareError::new(7, None, Reason::Full { ops: 5, why: full }), "KVRAIL_MAX_BYTES"),
            (
                PrepareError::new(
                    PrepareError::NO_PAIR,
                    None,
                    Reason::ListLengths { local: 2, remote: 3 },
                ),
                "2 local but 3 remote descriptors: give",
            ),
        ];
        for (error, text) in cases {
            let said = format!("{error}");
            assert!(said.contains(text), "{said}");
            assert!(!said.contains("pair 18446744073709551615"), "{said}");
        }
    }

    #[test]
    fn every_reason_has_its_status() {
        let full = |status| Reason::Full { ops: 0, why: Full { status, what: "ops", limit: 0 } };
        let outside = Reason::Outside { addr: 0, len: 1, base: 0, region_len: 0 };
        let cases = [
            (Reason::ListLengths { local: 0, remote: 1 }, Status::Mismatch),
            (Reason::PairLengths { local: 0, remote: 1 }, Status::Mismatch),
            (Reason::TooManyPairs { pairs: 1 << 30 }, Status::Capacity),
            (Reason::Index(OutOfRange { index: 0, table_len: 0 }), Status::Range),
            (Reason::ZeroLength, Status::Invalid),
            (Reason::WrongPeer { region: 0, owner: 1, wanted: 2 }, Status::Invalid),
            (Reason::TooManyBytes, Status::Invalid),
            (Reason::UnknownRegion { region: 0 }, Status::Stale),
            (outside, Status::NotRegistered),
            (full(Status::NoMemory), Status::NoMemory),
            (full(Status::Capacity), Status::Capacity),
        ];
        for (reason, status) in cases {
            let e = PrepareError::new(0, None, reason);
            assert_eq!(e.status, status, "{e}");
        }
    }
}
