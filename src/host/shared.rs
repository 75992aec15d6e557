//! What the API calls and the engine's threads share.

use core::num::NonZeroU32;
use core::ptr::NonNull;
use core::time::Duration;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::blob::{ConnBlob, HostOffer};
use super::config::Config;
use super::error::{Error, Result};
use super::peers::Peers;
use super::pool::Pool;
use super::prepare::{Preparer, Tables};
use super::rail::RailEnd;
use super::rails::{self, Choice, Rails, Registered};
use super::sys::{self, Event};
use super::tell::Teller;
use crate::engine::arena::{Arena, BLOCK_ALIGN};
use crate::engine::bell::Bell;
use crate::engine::core::{Parts, Tuning};
use crate::engine::peer::SELF;
use crate::nic::any::{AnyNet, AnyPort};
use crate::nic::local::{AttachError, LocalPort, PeerMemory, Share};
use crate::nic::stream::Streams;
use crate::nic::verbs::{Shape, VerbsPort};
use crate::status::Status;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The engine as the host makes it.
pub(super) type Core = crate::engine::core::Core<'static, AnyPort<'static>, AnyNet<'static>>;

/// Bytes of a claim on an RDMA rail.
const CLAIM_BYTES: u64 = 1 << 20;
/// Ops of a claim on an RDMA rail.
const CLAIM_OPS: u32 = 128;
/// Every so many work requests of an RDMA rail one is signalled, beside the last of each claim.
const SIGNAL_EVERY: u32 = 32;

/// Pool bytes that a caller's block has room for at least.
const BLOCK_POOL: usize = 1 << 20;

/// The memory that the core is carved out of.
pub(super) struct Block {
    at: NonNull<u8>,
    /// Bytes that are mapped here; 0: a caller's memory.
    mapped: usize,
}

// SAFETY: I1: the block is only an address; the core that uses it is Sync by itself.
unsafe impl Send for Block {}
// SAFETY: I1: as above.
unsafe impl Sync for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        if self.mapped != 0 {
            // SAFETY: I1: mapped by `own_block` with this length; the core is dropped before (field
            // order).
            unsafe { libc::munmap(self.at.as_ptr().cast(), self.mapped) };
        }
    }
}

/// Counts of calls, for reports.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) posted: AtomicU64,
    pub(super) descriptors: AtomicU64,
    pub(super) work_requests: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) post_ns: AtomicU64,
}

/// Everything of one engine. Field order is drop order: the core before its block, the share after
/// the core.
pub(super) struct Shared {
    pub(super) core: Core,
    pub(super) tables: Tables,
    pub(super) pool: Arc<Pool>,
    pub(super) share: Share,
    /// What is registered with the NICs, by raw region handle.
    pub(super) registered: Mutex<HashMap<u64, Registered>>,
    /// The NICs; none: transport `local`.
    pub(super) rails: Option<Arc<Rails>>,
    /// Why there are no NICs, if they were hoped for.
    pub(super) why_local: Option<String>,
    pub(super) epoll: OwnedFd,
    pub(super) work: Event,
    pub(super) events: Event,
    pub(super) config: Config,
    pub(super) incarnation: [u8; 16],
    pub(super) secret: [u8; 32],
    pub(super) host: HostOffer,
    pub(super) counts: Counts,
    pub(super) stop: AtomicBool,
    /// Made ready by the control thread: the life word is set.
    pub(super) alive: AtomicBool,
    pub(super) fixed_bytes: usize,
    peers: Mutex<Peers>,
    /// Longest message that each peer's NICs take, in bytes; 0: not known, or no NICs.
    longest: Vec<AtomicU32>,
    pub(super) changed: Condvar,
    /// Where events go.
    pub(super) teller: Arc<Teller>,
    /// Lanes whose port is of use, one bit each.
    ports_up: AtomicU32,
    /// When this was made.
    born: Instant,
    /// Milliseconds from then until all links went down, and one; 0: they are not all down.
    links_down: AtomicU64,
    _block: Block,
}

/// Carves the core: `nics` lanes over `rails` (fewer while measuring), and one for the engine
/// itself; or local lanes only.
fn carve<'m>(
    arena: &mut Arena<'m>,
    c: &Config,
    name: &[u8],
    (nics, rails): (u32, Option<&Rails>),
    [epoll, worker, host]: [i32; 3],
) -> Option<crate::engine::core::Core<'m, AnyPort<'m>, AnyNet<'m>>> {
    let limits = c.limits(nics);
    let shape = Shape {
        depth: c.sq_depth,
        sges: c.sges,
        signal_every: SIGNAL_EVERY,
        batch_bytes: CLAIM_BYTES,
        batch_ops: CLAIM_OPS.min(c.sq_depth),
    };
    let mut net = AnyNet::new(arena, Streams::new(epoll), limits.peers, nics)?;
    for (lane, rail) in rails.into_iter().flat_map(Rails::iter).enumerate() {
        let (cq, entries) = (rail.device.mail_cq(), rail.device.facts().mail_entries);
        // SAFETY: V31: the NICs outlive the core (field order of `Shared`), which alone polls this.
        unsafe { net.open_lane(lane as u32, cq, entries) };
    }
    let parts = Parts {
        limits,
        tuning: Tuning {
            inline_bytes: u64::from(c.inline_bytes),
            stripe_all: c.stripe_width == 0,
            background: c.progress_thread,
        },
        net,
        worker: Bell::new(sys::ring, worker),
        host: Bell::new(sys::ring, host),
        name,
    };
    crate::engine::core::Core::new(arena, parts, |arena, lane| {
        if lane >= nics {
            return LocalPort::new(arena, limits.peers).map(AnyPort::Local);
        }
        let rail = rails.and_then(|r| r.get(lane as usize));
        let shape = rail.map_or(shape, |r| shape.fit(r.device.facts()));
        let device = rail.map(|r| r.device.handle());
        VerbsPort::new(arena, lane, limits.peers, shape, device).map(AnyPort::Verbs)
    })
}

/// Bytes of the fixed part with so many NICs.
fn fixed_bytes(c: &Config, nics: u32) -> usize {
    let mut arena = Arena::measure();
    carve(&mut arena, c, b"", (nics, None), [-1; 3]);
    arena.used()
}

/// Bytes of a caller's block: the fixed part, room to align it, and a small pool. What is more goes
/// to the pool.
pub(super) fn block_bytes(c: &Config) -> Result<usize> {
    c.check()?;
    let nics = rails::count(&rails::choose(c)?);
    Ok(fixed_bytes(c, nics) + BLOCK_ALIGN + BLOCK_POOL)
}

/// The NICs that a configuration asks for, opened; or why there are none.
fn open_rails(c: &Config) -> Result<(Option<Arc<Rails>>, Option<String>)> {
    let selection = match rails::choose(c)? {
        Choice::Local(why) => return Ok((None, why)),
        Choice::Nics(selection) => selection,
    };
    match Rails::open(&selection, c) {
        Ok(rails) => Ok((Some(Arc::new(rails)), None)),
        Err(e) if c.transport == "auto" => Ok((None, Some(e.message))),
        Err(e) => Err(e),
    }
}

pub(super) fn attach_error(e: AttachError) -> Error {
    match e {
        AttachError::Os(call, errno) => {
            let os = std::io::Error::from_raw_os_error(errno);
            if !matches!(errno, libc::EPERM | libc::EACCES) {
                return Error::new(Status::Os, format!("{call}: {os}"));
            }
            // Yama looks at copies only, not at files of /proc.
            let yama = match sys::ptrace_scope().filter(|_| call != "open") {
                Some(n @ 2..) => format!(
                    "kernel.yama.ptrace_scope is {n}, which forbids it to all but administrators: \
                     set it to 1 or 0 (sysctl -w kernel.yama.ptrace_scope=1)"
                ),
                Some(1) => String::from(
                    "kernel.yama.ptrace_scope is 1 and the peer did not name this process: set it \
                     to 0, or use a kvrail in the peer that calls PR_SET_PTRACER",
                ),
                _ => String::from(
                    "kernel.yama.ptrace_scope is not the cause: the peer may be another user's, \
                     not dumpable (PR_SET_DUMPABLE), or a container may lack CAP_SYS_PTRACE or \
                     block process_vm_readv by seccomp",
                ),
            };
            Error::new(
                Status::Permission,
                format!("the kernel forbids {call} on the peer's process ({os}). {yama}"),
            )
        }
        AttachError::Foreign => Error::new(
            Status::Refused,
            "the peer's shared memory is not what it offered: is the same process behind that pid?",
        ),
        AttachError::Stranger => Error::new(
            Status::Refused,
            "the process behind the peer's pid does not hold the peer's cookie: pid namespaces \
             differ, or the pid was recycled",
        ),
    }
}

impl Shared {
    /// Makes everything but the threads. `block`: the caller's memory, or none for the heap.
    ///
    /// # Safety
    /// The caller's memory is unused by anybody else and outlives the result (I1).
    pub(super) unsafe fn new(
        config: Config,
        block: Option<(NonNull<u8>, usize)>,
    ) -> Result<Shared> {
        config.check()?;
        let (rails, why_local) = open_rails(&config)?;
        let nics = rails.as_ref().map_or(0, |r| r.len()) as u32;
        let fixed = fixed_bytes(&config, nics);
        let (incarnation, secret, cookie) = (sys::random()?, sys::random()?, sys::random()?);
        let name = match config.name.as_bytes() {
            [] => format!("kvrail-{}", &super::error::hex(&incarnation)[..16]).into_bytes(),
            name => name.to_vec(),
        };
        let (memory, pool) = match block {
            None => (own_block(fixed)?, Pool::heap(config.max_bytes)),
            // SAFETY: I1: by the caller's promise.
            Some(given) => unsafe { parts_of(given, fixed, config.max_bytes)? },
        };
        let (epoll, work, events) = (sys::epoll()?, Event::new()?, Event::new()?);
        // SAFETY: I1: the block outlives the core (field order of `Shared`), and is ours alone.
        let mut arena = unsafe { Arena::over(memory.at, fixed) };
        let files = [epoll.as_raw_fd(), work.fd(), events.fd()];
        let core = carve(&mut arena, &config, &name, (nics, rails.as_deref()), files)
            .ok_or_else(|| Error::new(Status::Internal, "the block is smaller than measured"))?;
        let peers = core.limits().peers;
        let random = || u64::from_le_bytes(sys::random().unwrap_or_default());
        let share = Share::new(peers, config.max_regions, cookie, random).map_err(attach_error)?;
        for lane in nics..core.limits().lanes {
            core.connect_rail(lane, (SELF, lane), 1, |port| {
                connect_local(port, SELF, share.own_memory(SELF))
            });
        }
        let pool = Arc::new(pool);
        let teller = Arc::new(Teller::new(events.clone()));
        let others = (pool.clone(), teller.clone());
        let known = Peers::new(peers, &name, incarnation, rails.clone(), others);
        Ok(Shared {
            teller,
            ports_up: AtomicU32::new((1 << nics) - 1),
            born: Instant::now(),
            links_down: AtomicU64::new(0),
            longest: (0..peers).map(|_| AtomicU32::new(0)).collect(),
            peers: Mutex::new(known),
            tables: Tables::new(pool.clone(), config.max_tables),
            core,
            pool,
            share,
            registered: Mutex::default(),
            rails,
            why_local,
            epoll,
            work,
            events,
            incarnation,
            secret,
            host: sys::host_offer(),
            counts: Counts::default(),
            stop: AtomicBool::new(false),
            alive: AtomicBool::new(false),
            fixed_bytes: fixed,
            changed: Condvar::new(),
            config,
            _block: memory,
        })
    }

    /// The peers; whoever holds this is the control side.
    pub(super) fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the control thread.
    pub(super) fn nudge(&self) {
        sys::ring(self.events.fd());
    }

    /// Lanes whose port is of use now, one bit each: where a rail has a chance. Of the watch's last
    /// look; any thread.
    pub(super) fn ports_up(&self) -> u32 {
        self.ports_up.load(Ordering::Acquire)
    }

    /// The watch only: whether a lane's port is of use.
    pub(super) fn note_port(&self, lane: u32, up: bool) {
        if up {
            self.ports_up.fetch_or(1 << lane, Ordering::AcqRel);
        } else {
            self.ports_up.fetch_and(!(1 << lane), Ordering::AcqRel);
        }
    }

    /// The watch only: since when all links are down.
    pub(super) fn note_links(&self, down: Option<Instant>) {
        let ms = down.map(|t| t.saturating_duration_since(self.born).as_millis() as u64 + 1);
        self.links_down.store(ms.unwrap_or(0), Ordering::Release);
    }

    /// How long all links have been down; `None`: they are not.
    pub(super) fn links_down(&self) -> Option<Duration> {
        let since = self.links_down.load(Ordering::Acquire).checked_sub(1)?;
        Some(self.born.elapsed().saturating_sub(Duration::from_millis(since)))
    }

    pub(super) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(super) fn preparer(&self, peer: u32) -> Preparer<'_, 'static> {
        Preparer {
            pool: &self.pool,
            tables: &self.tables,
            local: &self.core.local,
            remote: &self.core.remote,
            slice_bytes: self.slice_bytes(peer),
            copies: self.copies(peer),
        }
    }

    /// Whether the processor copies between this engine and a peer, as far as is known now: one
    /// that is connected by lanes behind the NICs' only.
    fn copies(&self, peer: u32) -> bool {
        let rails = self.core.rails(peer);
        rails != 0 && rails.trailing_zeros() >= self.nics()
    }

    /// Longest work request: what is configured, and what every NIC here and of the peer takes.
    fn slice_bytes(&self, peer: u32) -> NonZeroU32 {
        let asked = NonZeroU32::new(self.config.slice_bytes).unwrap_or(NonZeroU32::MIN);
        let theirs = self.longest.get(peer as usize).map_or(0, |l| l.load(Ordering::Relaxed));
        let asked = NonZeroU32::new(theirs).map_or(asked, |l| asked.min(l));
        self.rails.as_ref().map_or(asked, |r| asked.min(r.max_msg()))
    }

    /// Keeps the longest message of a peer's rails. Before anything is prepared for the peer: from
    /// its blob, or from the offer with which it dials.
    pub(super) fn learn_longest(&self, peer: u32, rails: impl Iterator<Item = RailEnd>) {
        if let Some(longest) = self.longest.get(peer as usize) {
            longest.store(rails.map(|r| r.max_msg.max(1)).min().unwrap_or(0), Ordering::Relaxed);
        }
    }

    /// RDMA rails; the lanes from here on are local.
    pub(super) fn nics(&self) -> u32 {
        self.rails.as_ref().map_or(0, |r| r.len()) as u32
    }

    /// The driver in use.
    pub(super) fn transport(&self) -> &'static str {
        if self.rails.is_some() {
            "verbs"
        } else {
            "local"
        }
    }

    /// What peers need to reach this engine, which listens at `addrs`.
    pub(super) fn blob(&self, addrs: Vec<core::net::SocketAddrV4>) -> ConnBlob {
        let rails = self.rails.iter().flat_map(|r| r.iter());
        ConnBlob {
            name: self.core.name().to_vec(),
            incarnation: self.incarnation,
            secret: self.secret,
            addrs,
            offer: self.host,
            max_message: crate::engine::message::MAX_MESSAGE as u32,
            rails: rails.map(|r| r.end(r.nic.gid)).collect(),
        }
    }
}

/// Connects a lane of the `local` driver.
pub(super) fn connect_local(port: &mut AnyPort<'_>, peer: u32, memory: PeerMemory) {
    if let AnyPort::Local(port) = port {
        port.connect(peer, memory);
    }
}

/// Mapped, not allocated: an allocator clears what it hands out at this alignment, and then every
/// page is resident. A page that is mapped costs nothing until it is touched.
fn own_block(bytes: usize) -> Result<Block> {
    let (rw, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: I8: a fresh mapping at an address that the kernel chooses.
    let at = unsafe { libc::mmap(core::ptr::null_mut(), bytes, rw, kind, -1, 0) };
    let at = NonNull::new(at.cast()).filter(|_| at != libc::MAP_FAILED).ok_or_else(|| {
        let os = std::io::Error::last_os_error();
        let text = format!("{bytes} bytes of fixed memory ({os}): lower the capacities (max_*)");
        Error::new(Status::NoMemory, text)
    })?;
    Ok(Block { at, mapped: bytes })
}

/// # Safety
/// As for [`Shared::new`].
unsafe fn parts_of(
    (at, len): (NonNull<u8>, usize),
    fixed: usize,
    limit: u64,
) -> Result<(Block, Pool)> {
    let skip = at.as_ptr().align_offset(BLOCK_ALIGN);
    let need = skip.saturating_add(fixed).saturating_add(BLOCK_POOL);
    if len < need {
        let text = format!("the block has {len} bytes and needs {need}: ask kvr_engine_size()");
        return Err(Error::new(Status::Capacity, text));
    }
    // SAFETY: I1: inside the caller's block, by the check above.
    let (block, rest) = unsafe { (at.add(skip), at.add(skip + fixed)) };
    let ahead = rest.as_ptr().align_offset(BLOCK_ALIGN);
    let room = len - skip - fixed - ahead;
    // SAFETY: I1: the rest of the caller's block, which nobody else uses.
    let pool = unsafe { Pool::block(rest.add(ahead), room, limit) };
    Ok((Block { at: block, mapped: 0 }, pool))
}
