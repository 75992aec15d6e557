//! Where queue pairs end that nothing uses any more: on threads of their own, since a kernel may
//! take seconds to destroy one (Soft-RoCE waits for every packet that still looks for an address),
//! and meanwhile the control thread must see to the other rails.

use core::fmt;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::rails::Rails;
use super::raise::Owned;
use super::shared::Core;
use super::{log, sys};
use crate::nic::any::AnyPort;

/// Most threads at a time; what is more waits for one of them.
const DIGGERS: usize = 16;

#[derive(Default)]
struct Inner {
    /// Each ends when it is dropped.
    waiting: VecDeque<Box<dyn Send>>,
    /// Threads that still look into `waiting`.
    diggers: usize,
    threads: Vec<JoinHandle<()>>,
}

/// What is being ended.
#[derive(Default)]
pub(super) struct Graves(Arc<Mutex<Inner>>);

impl fmt::Debug for Graves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = lock(&self.0);
        let parts = (inner.waiting.len(), inner.diggers);
        f.debug_tuple("Graves").field(&parts).finish()
    }
}

fn lock(inner: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops what waits until nothing does.
fn dig(inner: &Mutex<Inner>) {
    loop {
        let mut held = lock(inner);
        let Some(next) = held.waiting.pop_front() else {
            held.diggers -= 1;
            return;
        };
        drop(held);
        drop(next);
    }
}

impl Graves {
    /// Drops `what` on another thread, soon; on this one where the system gives no thread.
    pub(super) fn bury(&self, what: impl Send + 'static) {
        let mut inner = lock(&self.0);
        inner.waiting.push_back(Box::new(what));
        inner.threads.retain(|t| !t.is_finished());
        if inner.diggers == DIGGERS {
            return;
        }
        inner.diggers += 1;
        let own = self.0.clone();
        let work = move || {
            sys::block_signals();
            dig(&own);
        };
        match std::thread::Builder::new().name("kvrail-bury".into()).spawn(work) {
            Ok(thread) => inner.threads.push(thread),
            Err(e) => {
                drop(inner);
                log::warn(&format!("thread kvrail-bury: {e}: this one destroys the queue pairs"));
                dig(&self.0);
            }
        }
    }

    /// Waits until all that was buried is gone: as long as the kernel takes.
    pub(super) fn wait(&self) {
        loop {
            let threads = core::mem::take(&mut lock(&self.0).threads);
            if threads.is_empty() {
                return;
            }
            for thread in threads {
                // One that panicked said so already.
                let _ = thread.join();
            }
        }
    }
}

/// Takes the queue pairs that the lanes' ports have done with. They are reset and touch no memory,
/// so one that cannot be destroyed is only said (`Owned`), and does not count as stuck.
pub(super) fn collect(rails: &Arc<Rails>, core: &Core) {
    for lane in 0..rails.len() as u32 {
        let take = || {
            core.with_port(lane, |port| match port {
                AnyPort::Verbs(port) => port.take_grave(),
                AnyPort::Local(_) => None,
            })
        };
        while let Some(qp) = take() {
            // The devices stay open until then.
            rails.graves.bury((Owned::new(qp), rails.clone()));
        }
    }
}
