//! The doorbell of a thread that sleeps when there is nothing to do.
//!
//! The sleeper raises `asleep`, then looks for work once more, then waits. A publisher publishes,
//! then looks at `asleep`. A full fence on each side makes one of them see the other.

use crate::mutant::mutant;
use crate::sync::{fence, AtomicBool, Ordering};

/// Rings by `ring(fd)`: an eventfd write, given by the host.
#[derive(Debug)]
pub struct Bell {
    asleep: AtomicBool,
    ring: fn(i32),
    fd: i32,
}

impl Bell {
    /// A bell that rings by `ring(fd)`.
    pub fn new(ring: fn(i32), fd: i32) -> Bell {
        Bell { asleep: AtomicBool::new(false), ring, fd }
    }

    /// After publishing: wakes the sleeper, if it sleeps.
    pub fn wake(&self) {
        if !mutant("bell_fence") {
            fence(Ordering::SeqCst);
        }
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            (self.ring)(self.fd);
        }
    }

    /// The sleeper is about to sleep: it must look for work once more after this.
    pub fn doze(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The sleeper woke up.
    pub fn rise(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }
}
