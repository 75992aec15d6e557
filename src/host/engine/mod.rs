//! The engine as an application sees it: every call of the C ABI, in Rust.

mod messages;
mod peers;
mod regions;
mod reports;
mod transfers;

use core::net::{Ipv4Addr, SocketAddrV4};
use core::ptr::NonNull;
use core::time::Duration;
use std::collections::HashMap;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, Once};
use std::thread::JoinHandle;
use std::time::Instant;

use super::config::Config;
use super::control::{self, Control};
use super::error::{Error, Result};
use super::shared::{block_bytes, Shared};
use super::{log, sys, watch, worker};
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
fn say_fallback(why: Option<&str>) {
    static ONCE: Once = Once::new();
    if let Some(why) = why {
        ONCE.call_once(|| {
            log::warn(&format!(
                "transport auto: no RDMA rails, so transport local is used (peers on this host, \
                 host memory); transport=local says the same without this line. {why}"
            ));
        });
    }
}

/// When a rail that became silent is found, in words.
fn patience(c: &Config) -> String {
    let (nominal, worst) = watch::acknowledgement(c.ack_timeout, c.retry);
    format!(
        "a silent rail is closed after {} ms (rail_timeout_ms) or when its NIC gives up, after {} \
         to {} ms (ack_timeout {}, retry {})",
        c.rail_timeout_ms,
        nominal.as_millis(),
        worst.as_millis(),
        c.ack_timeout,
        c.retry
    )
}

/// Listens where peers are told to dial: at the configured address, else at the NICs' own, else on
/// this host only.
fn listen(shared: &Shared) -> Result<(Vec<TcpListener>, Vec<SocketAddrV4>)> {
    let ports = (shared.config.port_min, shared.config.port_max);
    let chosen = match shared.config.listen_ip.as_str() {
        "auto" | "" => None,
        text => Some(text.parse::<Ipv4Addr>().map_err(|_| {
            let text = format!("listen_ip {text:?} is no IPv4 address: give one, or \"auto\"");
            Error::new(Status::Config, text)
        })?),
    };
    // Where peers find this engine, unless it is told.
    let known: Vec<Ipv4Addr> = match &shared.rails {
        Some(rails) => rails.iter().map(|r| r.nic.ipv4).collect(),
        None => vec![Ipv4Addr::LOCALHOST],
    };
    let ips = chosen.map_or_else(|| known.clone(), |ip| vec![ip]);
    let (mut listeners, mut addrs, mut failed) = (Vec::new(), Vec::new(), None);
    for ip in ips {
        match control::listen(ip, ports) {
            Ok((listener, port)) => {
                listeners.push(listener);
                let dialled = if ip.is_unspecified() { &known[..] } else { &[ip] };
                addrs.extend(dialled.iter().map(|ip| SocketAddrV4::new(*ip, port)));
            }
            Err(e) => failed = Some(e),
        }
    }
    match failed {
        Some(e) if listeners.is_empty() => Err(e),
        Some(e) => {
            log::warn(&e.message);
            Ok((listeners, addrs))
        }
        None => Ok((listeners, addrs)),
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
        let (listeners, addrs) = listen(&shared)?;
        let listen = addrs.iter().map(SocketAddrV4::to_string).collect::<Vec<_>>().join(",");
        let metadata = shared.blob(addrs).encode()?;
        let shared = Arc::new(shared);
        let mut engine = Engine {
            shared: shared.clone(),
            threads: Vec::new(),
            metadata,
            listen,
            forks,
            limbo: Mutex::default(),
        };
        let control = Control::new(shared.clone(), listeners);
        engine.spawn("kvrail-ctl", move || control.run())?;
        if shared.config.progress_thread {
            let own = shared.clone();
            engine.spawn("kvrail-poll", move || worker::run(&own))?;
        }
        // Peers may dial as soon as they have the blob, and must find the life word set.
        while !shared.alive.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let rails = match &shared.rails {
            None => format!("{} rails", shared.config.rails),
            Some(r) => {
                let names: Vec<_> = r.iter().map(|r| r.nic.label()).collect();
                format!("{}; {}", names.join(", "), patience(&shared.config))
            }
        };
        log::info(&format!(
            "engine at {}: transport {}, {rails}",
            engine.listen,
            shared.transport()
        ));
        say_fallback(shared.why_local.as_deref());
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
/// When what is ended no longer gets the time to drain: its rails are closed, once.
struct Force {
    due: Option<Instant>,
}

impl Force {
    /// How long it may drain: 100 ms, or half of a shorter limit.
    fn within(limit: Duration) -> Force {
        Force { due: Some(Instant::now() + Duration::from_millis(100).min(limit / 2)) }
    }

    /// `close` says whether there was anything to close.
    fn once(&mut self, close: impl FnOnce() -> bool) {
        if self.due.is_some_and(|t| Instant::now() >= t) && close() {
            self.due = None;
        }
    }
}

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
        if let Some(rails) = &self.shared.rails {
            // Devices are closed after what was made from them is gone.
            rails.graves.wait();
        }
        self.give_keys_back();
    }
}
