//! Every atomic, cell and fence of the crate, named once for real hardware and once for the model
//! checker.
//!
//! No other file names `core::sync::atomic` or `loom` (`tests/tidy.rs` checks). Device-memory
//! ordering is not here: loom knows nothing of devices.

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

/// Atomics that live in memory shared with another process. A model checker cannot follow those, so
/// these are the hardware's own under loom too.
pub mod shared {
    pub use core::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
}

/// A cell that a protocol of the engine guards: the model checker sees every access, and two
/// at once.
#[cfg(loom)]
#[allow(clippy::unsafe_removed_from_name, reason = "the same name as the type it stands for")]
pub use loom::cell::UnsafeCell as Guarded;

/// A cell that a protocol of the engine guards: the model checker sees every access, and two at
/// once.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct Guarded<T>(UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> Guarded<T> {
    /// A cell that holds `value`.
    pub const fn new(value: T) -> Guarded<T> {
        Guarded(UnsafeCell::new(value))
    }

    /// Calls `f` with a pointer to read through, for the length of the call.
    #[inline]
    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Calls `f` with a pointer to write through, for the length of the call.
    #[inline]
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
