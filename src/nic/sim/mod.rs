//! `sim`: a deterministic fabric inside one process, for tests.
//!
//! A [`Fabric`] holds what all engines of a test share: virtual time, the table of registered
//! memory, and the byte streams for messages. Each lane of each engine is a [`SimPort`], each
//! engine's streams are a [`SimNet`]. Time moves when a test says so ([`Fabric::tick`]) or by a
//! fixed step whenever a port has nothing to report. The same seed, calls and order of calls give
//! the same run.
//!
//! Memory safety (I9): the simulator copies only inside ranges that the test registered and keeps
//! alive.

mod net;
mod port;
mod rng;
mod wire;

pub use net::{Mail, SimLink, SimNet};
pub use port::{Faults, Lateness, PortConfig, QpState, SimPort};
pub use rng::Rng;
pub use wire::{Carries, SimWire};

use crate::engine::arena::Arena;
use crate::sync::{fence, spin_loop, AtomicU32, AtomicU64, Ordering};
use net::Pipe;
use wire::Wires;

const OPEN: u64 = 1;

/// Capacities and habits of a fabric.
#[derive(Clone, Copy, Debug)]
pub struct FabricConfig {
    /// Engines on it.
    pub engines: u32,
    /// Registered regions of each engine.
    pub regions: u32,
    /// Byte streams at one time.
    pub pipes: u32,
    /// Bytes that a stream holds in each direction.
    pub pipe_bytes: u32,
    /// Ticks that pass when a port is polled and has nothing to report.
    pub auto_tick: u64,
    /// Most bytes a stream takes or gives at once (0: all), so that frames arrive in pieces.
    pub chop: u32,
    /// Wires at one time: what joins the two ports of a rail. A rail may do without one.
    pub wires: u32,
    /// Packets that may be on their way at one time after their sender closed its rail.
    pub late: u32,
    /// Most bytes of one of them.
    pub late_bytes: u32,
}

/// One registered region, as the NICs know it.
#[derive(Debug)]
struct Registered {
    /// `generation:32 | open:1`.
    word: AtomicU64,
    base: AtomicU64,
    len: AtomicU64,
    /// Copies that are touching it now.
    users: AtomicU32,
}

/// Keeps a region from being deregistered while bytes are copied.
#[derive(Debug)]
struct Pin<'a>(&'a AtomicU32);

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What all engines of a test share.
#[derive(Debug)]
pub struct Fabric<'m> {
    config: FabricConfig,
    clock: AtomicU64,
    regions: &'m [Registered],
    pipes: &'m [Pipe<'m>],
    /// The ends of streams that each engine has: `pipe * 2 + side`.
    ends: &'m [AtomicU32],
    wires: Wires<'m>,
}

impl<'m> Fabric<'m> {
    /// A fabric out of the arena. `None`: the arena is too small.
    pub fn new(arena: &mut Arena<'m>, config: FabricConfig) -> Option<Fabric<'m>> {
        let n = config.engines as usize * config.regions as usize;
        let regions = arena.array(n, |_| Registered {
            word: AtomicU64::new(0),
            base: AtomicU64::new(0),
            len: AtomicU64::new(0),
            users: AtomicU32::new(0),
        })?;
        let half = config.pipe_bytes as usize;
        let bytes = arena.array(config.pipes as usize * 2 * half, |_| AtomicU32::new(0))?;
        let mut rest: &'m [AtomicU32] = bytes;
        let pipes = arena.array_from(config.pipes as usize, || {
            let (a, more) = rest.split_at_checked(half)?;
            let (b, more) = more.split_at_checked(half)?;
            rest = more;
            Some(Pipe::new(a, b))
        })?;
        let n = config.engines as usize * net::ends_of(&config);
        let ends = arena.array(n, |i| {
            let count = i % net::ends_of(&config) == 0;
            AtomicU32::new(if count { 0 } else { net::FREE })
        })?;
        let wires = Wires::new(arena, &config)?;
        Some(Fabric { config, clock: AtomicU64::new(0), regions, pipes, ends, wires })
    }

    /// Virtual time, in ticks.
    pub fn now(&self) -> u64 {
        self.clock.load(Ordering::Acquire)
    }

    /// Lets time pass. What is late and due lands.
    pub fn tick(&self, ticks: u64) {
        self.clock.fetch_add(ticks, Ordering::AcqRel);
        self.land();
    }

    fn idle(&self) {
        if self.config.auto_tick > 0 {
            self.tick(self.config.auto_tick);
        }
    }

    fn region(&self, engine: u32, slot: u32) -> Option<&Registered> {
        if engine >= self.config.engines || slot >= self.config.regions {
            return None;
        }
        self.regions.get((engine * self.config.regions + slot) as usize)
    }

    /// Registers memory of an engine: slot and generation are those of its region table. False: no
    /// such slot.
    ///
    /// # Safety
    /// The `len` bytes at `base` stay readable and writable until [`Fabric::deregister`] returned,
    /// and while a copy can run nobody reads or writes them through a reference that forbids it
    /// (I9).
    pub unsafe fn register(
        &self,
        engine: u32,
        slot: u32,
        generation: u32,
        base: u64,
        len: u64,
    ) -> bool {
        let Some(r) = self.region(engine, slot) else { return false };
        r.base.store(base, Ordering::Relaxed);
        r.len.store(len, Ordering::Relaxed);
        r.word.store((u64::from(generation) << 32) | OPEN, Ordering::Release);
        true
    }

    /// Deregisters memory: when this returns no port touches it any more.
    pub fn deregister(&self, engine: u32, slot: u32) {
        let Some(r) = self.region(engine, slot) else { return };
        r.word.store(0, Ordering::Release);
        fence(Ordering::SeqCst);
        while r.users.load(Ordering::Acquire) != 0 {
            spin_loop();
        }
    }

    /// Pins `addr..addr + len` if it lies inside the region and, where one is asked for, the
    /// generation is right.
    fn pin(
        &self,
        (engine, slot): (u32, u32),
        generation: Option<u32>,
        addr: u64,
        len: u64,
    ) -> Option<Pin<'_>> {
        let r = self.region(engine, slot)?;
        r.users.fetch_add(1, Ordering::AcqRel);
        let pin = Pin(&r.users);
        fence(Ordering::SeqCst);
        let word = r.word.load(Ordering::Acquire);
        let right = generation.is_none_or(|g| u64::from(g) == word >> 32);
        let start = addr.checked_sub(r.base.load(Ordering::Relaxed))?;
        let end = start.checked_add(len)?;
        (word & OPEN != 0 && right && end <= r.len.load(Ordering::Relaxed)).then_some(pin)
    }

    /// A fresh stream between two engines, like a TCP connection; each end names its engine and the
    /// other one's peer slot there. `None`: all streams are in use.
    pub fn pipe(&'m self, a: (u32, u32), b: (u32, u32)) -> Option<(SimLink<'m>, SimLink<'m>)> {
        net::open(self, a, b, None)
    }

    /// A fresh stream over the queue pairs for messages of one rail. `None`: all are in use.
    pub fn mail(
        &'m self,
        a: (u32, u32),
        b: (u32, u32),
        mail: Mail,
    ) -> Option<(SimLink<'m>, SimLink<'m>)> {
        net::open(self, a, b, Some(mail))
    }

    /// Moves the queue pair for messages at this end of a wire to ERR, as a control side does
    /// before it drops a rail: nothing more comes in or goes out; what came can be read.
    pub fn fail_mail(&self, wire: SimWire) {
        net::fail(self, wire);
    }
}
