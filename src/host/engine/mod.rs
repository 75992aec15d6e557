//! The engine as an application sees it: every call of the C ABI, in Rust.

mod messages;
mod peers;
mod regions;
mod reports;
mod transfers;

use core::net::Ipv4Addr;
use core::ptr::NonNull;
use core::time::Duration;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Once};
use std::thread::JoinHandle;
use std::time::Instant;

use super::config::Config;
use super::control::{self, Control};
use super::error::{Error, Result};
use super::shared::{block_bytes, Shared};
use super::{log, sys, worker};
use crate::engine::region::View;
use crate::status::Status;
use crate::sync::Ordering;
pub use reports::{EngineInfo, RailInfo, TransferInfo};

/// One engine with its threads. Every call is safe from any thread; two calls on one transfer at a
/// time are the caller's mistake, which at worst fails one of them.
pub struct Engine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    metadata: Vec<u8>,
    listen: String,
    forks: u32,
    limbo: Mutex<Limbo>,
}

/// Regions that were withdrawn and may still be in use, by their raw handles. Their slots stay
/// taken: whoever is inside must not be mistaken for a user of another region.
type Limbo = HashMap<u64, View>;

impl core::fmt::Debug for Engine {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Engine").field("listen", &self.listen).finish_non_exhaustive()
    }
}

/// Warns, once a process, whoever let kvrail choose the transport: it is not the fast one.
fn say_fallback(asked: &str) {
    static ONCE: Once = Once::new();
    if asked == "auto" {
        ONCE.call_once(|| {
            log::warn(
                "transport auto: no RDMA rails in this build, so transport local is used (peers on \
                 this host, host memory); transport=local says the same without this line",
            );
        });
    }
}

fn bad_handle(what: &str, raw: u64, status: Status) -> Error {
    let text = match status {
        Status::Stale => format!("{what} {raw:#x} was released; its generation is over"),
        _ => format!("{raw:#x} is not a {what} handle"),
    };
    Error::new(status, text)
}

impl Engine {
    /// Bytes of a block that [`Engine::new_in`] needs. What a block has more goes to the pool of
    /// tables and ops.
    pub fn size(config: &Config) -> Result<usize> {
        block_bytes(config)
    }

    /// An engine in memory of its own. Starts its threads.
    pub fn new(config: Config) -> Result<Engine> {
        // SAFETY: I1: no caller's block.
        let shared = unsafe { Shared::new(config, None)? };
        Engine::start(shared)
    }

    /// An engine in the caller's block, which never grows: the pool of tables and ops is what is
    /// left of it. Threads, sockets and names still take memory from the heap, in calls that are
    /// no hot path.
    ///
    /// # Safety
    /// The `len` bytes at `mem` are writable, used by nobody else, and outlive the engine (I1).
    pub unsafe fn new_in(mem: *mut u8, len: usize, config: Config) -> Result<Engine> {
        let at = NonNull::new(mem)
            .ok_or_else(|| Error::new(Status::Invalid, "the block's address is NULL"))?;
        // SAFETY: I1: by the caller's promise.
        let shared = unsafe { Shared::new(config, Some((at, len)))? };
        Engine::start(shared)
    }

    fn start(shared: Shared) -> Result<Engine> {
        let forks = sys::forks();
        let ip = match shared.config.listen_ip.as_str() {
            "auto" | "" => Ipv4Addr::LOCALHOST,
            text => text.parse().map_err(|_| {
                let text = format!("listen_ip {text:?} is no IPv4 address: give one, or \"auto\"");
                Error::new(Status::Config, text)
            })?,
        };
        let listener = control::listen(ip, (shared.config.port_min, shared.config.port_max))?;
        let at =
            listener.local_addr().map_err(|e| Error::new(Status::Os, format!("listener: {e}")))?;
        let dialled_at = if ip.is_unspecified() { Ipv4Addr::LOCALHOST } else { ip };
        let metadata = shared.blob(at.port(), dialled_at).encode()?;
        let shared = Arc::new(shared);
        let mut engine = Engine {
            shared: shared.clone(),
            threads: Vec::new(),
            metadata,
            listen: at.to_string(),
            forks,
            limbo: Mutex::default(),
        };
        let control = Control::new(shared.clone(), listener);
        engine.spawn("kvrail-ctl", move || control.run())?;
        if shared.config.progress_thread {
            let own = shared.clone();
            engine.spawn("kvrail-poll", move || worker::run(&own))?;
        }
        // Peers may dial as soon as they have the blob, and must find the life word set.
        while !shared.alive.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        log::info(&format!("engine at {at}: transport local, {} rails", shared.config.rails));
        say_fallback(&shared.config.transport);
        Ok(engine)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(run);
        let thread = thread.map_err(|e| Error::new(Status::Os, format!("thread {name}: {e}")))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Refuses a forked child: the threads and what they hold are the parent's.
    fn here(&self) -> Result<&Shared> {
        if sys::forks() != self.forks {
            let text = "the engine belongs to the parent process: make one after fork";
            return Err(Error::new(Status::Forked, text));
        }
        Ok(&self.shared)
    }

    /// The blob that peers load. Constant, never empty.
    pub fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    /// One round over all rails and messages. True: something moved.
    pub fn progress(&self) -> Result<bool> {
        Ok(self.here()?.core.poll())
    }
}

/// Asks `done` until it says so, at most `limit`: in a spin first, then with pauses.
fn wait_until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if done() {
            return true;
        }
        match start.elapsed() {
            t if t >= limit => return false,
            t if t < Duration::from_micros(200) => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if sys::forks() != self.forks {
            // A child has neither the threads nor a say in the parent's files: leave everything to
            // the parent.
            self.threads.clear();
            core::mem::forget(self.shared.clone());
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.shared.nudge();
        sys::ring(self.shared.work.fd());
        for thread in self.threads.drain(..) {
            // A thread that panicked said so already.
            let _ = thread.join();
        }
    }
}
