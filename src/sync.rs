//! Every atomic, cell and fence of the crate, named once for real hardware and once for the model checker.
//!
//! No other file names `core::sync::atomic` or `loom` (`tests/tidy.rs` checks). Device-memory ordering is not here:
//! loom knows nothing of devices.

#[cfg(not(loom))]
mod imp {
    pub use core::cell::UnsafeCell;
    pub use core::hint::spin_loop;
    pub use core::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
}

#[cfg(loom)]
mod imp {
    pub use core::cell::UnsafeCell;
    pub use loom::hint::spin_loop;
    pub use loom::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
}

pub use core::sync::atomic::Ordering;
pub use imp::*;

/// Atomics that live in memory shared with another process. A model checker cannot follow those, so these are the
/// hardware's own under loom too.
pub mod shared {
    pub use core::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
}
