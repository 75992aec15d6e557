//! Status codes, grouped by the largest thing that they kill. Numbers are ABI: never reused.

/// Outcome of a call or a transfer. `0` is success, negative an error, positive "in progress".
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Status {
    /// Finished.
    Ok = 0,
    /// Not finished; ask again.
    InProgress = 1,

    // -1..-29: only the call failed.
    /// A bad argument.
    Invalid = -1,
    /// A handle of something that was released: its generation differs.
    Stale = -2,
    /// Unknown peer or key.
    NotFound = -3,
    /// A table index out of range.
    Range = -4,
    /// List lengths differ, or the lengths of one pair differ.
    Mismatch = -5,
    /// A descriptor does not lie inside its region.
    NotRegistered = -6,
    /// A fixed capacity is full; the text names it.
    Capacity = -7,
    /// In use: posted already, or memory that a transfer uses.
    Busy = -8,
    /// Not offered by this driver.
    Unsupported = -9,
    /// The pool limit (`KVRAIL_MAX_BYTES`) is reached.
    NoMemory = -10,
    /// A metadata blob ends too early.
    BlobTruncated = -11,
    /// A metadata blob that is not ours.
    BlobForeign = -12,
    /// A metadata blob of another major version.
    BlobVersion = -13,
    /// An unknown parameter or a bad value; the text lists what is known.
    Config = -14,
    /// Called in a forked child.
    Forked = -15,
    /// The kernel forbids it; the text names the setting.
    Permission = -16,
    /// Checked before it was posted.
    NotPosted = -17,

    // -30..-49: the transfer ended.
    /// Cancelled by release, deregistration or the caller.
    Cancelled = -30,
    /// The peer's memory was not accessible: withdrawn, out of range or unmapped.
    RemoteAccess = -31,
    /// The local memory was not accessible (unmapped, or not writable).
    LocalAccess = -32,
    /// No progress for the stall limit.
    Stalled = -33,

    // -50..-59: a rail failed.
    /// No usable rail to the peer.
    NoRail = -50,

    // -60..-79: the peer is gone.
    /// The peer died, left, or was removed.
    Disconnected = -60,
    /// The peer did not answer within the dial limit.
    Unreachable = -61,
    /// The handshake was refused: secret, incarnation or version.
    Refused = -62,

    // -80..: the engine.
    /// A caught panic: a bug in kvrail.
    Internal = -80,
    /// A system call failed; the text has errno.
    Os = -81,
}

impl Status {
    /// Every status, for tables and tests.
    pub const ALL: &'static [Status] = &[
        Status::Ok,
        Status::InProgress,
        Status::Invalid,
        Status::Stale,
        Status::NotFound,
        Status::Range,
        Status::Mismatch,
        Status::NotRegistered,
        Status::Capacity,
        Status::Busy,
        Status::Unsupported,
        Status::NoMemory,
        Status::BlobTruncated,
        Status::BlobForeign,
        Status::BlobVersion,
        Status::Config,
        Status::Forked,
        Status::Permission,
        Status::NotPosted,
        Status::Cancelled,
        Status::RemoteAccess,
        Status::LocalAccess,
        Status::Stalled,
        Status::NoRail,
        Status::Disconnected,
        Status::Unreachable,
        Status::Refused,
        Status::Internal,
        Status::Os,
    ];

    /// The number that crosses the C ABI.
    pub const fn code(self) -> i32 {
        self as i32
    }

    /// The status of a number, if there is one.
    pub fn from_code(code: i32) -> Option<Status> {
        // Its low byte tells it from all others.
        let status = Status::from_byte(code as u8);
        (status.code() == code).then_some(status)
    }

    /// True for negative codes.
    pub const fn is_err(self) -> bool {
        (self as i32) < 0
    }

    /// The low byte, which is unique per status and fits a state word.
    pub(crate) const fn byte(self) -> u8 {
        (self as i32 as i8).cast_unsigned()
    }

    /// Back from [`Status::byte`]. An unknown byte is a bug and reads as [`Status::Internal`].
    pub(crate) fn from_byte(byte: u8) -> Status {
        BY_BYTE[byte as usize]
    }

    /// One short line that says what the code means, NUL terminated for C.
    pub const fn text_c(self) -> &'static core::ffi::CStr {
        match self {
            Status::Ok => c"ok",
            Status::InProgress => c"in progress",
            Status::Invalid => c"invalid argument",
            Status::Stale => c"stale handle: the object was released",
            Status::NotFound => c"not found",
            Status::Range => c"index out of range",
            Status::Mismatch => c"lengths differ",
            Status::NotRegistered => c"memory is not registered",
            Status::Capacity => c"a fixed capacity is full",
            Status::Busy => c"in use",
            Status::Unsupported => c"not supported",
            Status::NoMemory => c"pool limit KVRAIL_MAX_BYTES reached",
            Status::BlobTruncated => c"metadata blob is truncated",
            Status::BlobForeign => c"metadata blob is not kvrail's",
            Status::BlobVersion => c"metadata blob of another major version",
            Status::Config => c"unknown parameter or bad value",
            Status::Forked => c"called in a forked child",
            Status::Permission => c"forbidden by the kernel",
            Status::NotPosted => c"not posted",
            Status::Cancelled => c"cancelled",
            Status::RemoteAccess => c"remote memory access error",
            Status::LocalAccess => c"local memory access error",
            Status::Stalled => c"no progress within the stall limit",
            Status::NoRail => c"no usable rail",
            Status::Disconnected => c"peer disconnected",
            Status::Unreachable => c"peer unreachable",
            Status::Refused => c"connection refused by the peer",
            Status::Internal => c"internal error (a bug in kvrail)",
            Status::Os => c"system call failed",
        }
    }

    /// One short line that says what the code means.
    pub fn text(self) -> &'static str {
        self.text_c().to_str().unwrap_or("")
    }
}

/// The status of each byte: a search would cost every look at a transfer 50 instructions.
static BY_BYTE: [Status; 256] = {
    let mut table = [Status::Internal; 256];
    let mut i = 0;
    while i < Status::ALL.len() {
        table[Status::ALL[i].byte() as usize] = Status::ALL[i];
        i += 1;
    }
    table
};

impl core::fmt::Display for Status {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_round_trip_through_a_byte() {
        for (i, a) in Status::ALL.iter().enumerate() {
            assert_eq!(Status::from_byte(a.byte()), *a);
            assert_eq!(Status::from_code(a.code()), Some(*a));
            assert!(Status::ALL[i + 1..].iter().all(|b| b.code() != a.code()), "{a:?}");
            // A number that differs from a code by whole bytes only is no code.
            for far in [a.code() + 256, a.code() - 256] {
                assert_eq!(Status::from_code(far), None);
            }
        }
        assert_eq!((Status::from_code(2), Status::from_byte(2)), (None, Status::Internal));
    }
}
