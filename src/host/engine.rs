//! The engine as an application sees it: every call of the C ABI, in Rust.

use core::net::Ipv4Addr;
use core::ptr::NonNull;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::blob::{ConnBlob, RegionBlob};
use super::config::Config;
use super::control::{self, Control};
use super::error::{hex, shown, Error, Result};
use super::prepare::{self};
use super::shared::{block_bytes, Shared};
use super::{log, sys, worker};
use crate::engine::peer::{Link, PeerState, SELF};
use crate::engine::region::View;
use crate::engine::slot::{Body, RegionRef};
use crate::engine::transfer::Info;
use crate::handle::{Handle, Kind};
use crate::status::Status;
use crate::sync::{AtomicU64, Ordering};
use crate::table::{Desc, Direction, Stride};

/// Counts of a transfer.
pub type TransferInfo = Info;

/// One rail's counters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RailInfo {
    /// Which, from 0.
    pub index: u32,
    /// The driver's name for it.
    pub name: String,
    /// Bytes that READs brought.
    pub bytes_read: u64,
    /// Bytes that WRITEs took out.
    pub bytes_written: u64,
    /// Work requests completed.
    pub work_requests: u64,
    /// Claims taken.
    pub claims: u64,
    /// Error completions.
    pub errors: u64,
}

/// What an engine holds now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineInfo {
    /// Rails to each peer.
    pub rails: u32,
    /// Memory taken when it was made.
    pub fixed_bytes: u64,
    /// Pool memory in use.
    pub pool_bytes: u64,
    /// Most pool memory.
    pub pool_limit: u64,
    /// Peers, without itself.
    pub peers: u32,
    /// Regions registered.
    pub regions: u32,
    /// Regions imported.
    pub remote_regions: u32,
    /// Tables.
    pub tables: u32,
    /// Prepared transfers.
    pub transfers: u32,
    /// The driver in use.
    pub transport: String,
    /// Where peers dial it.
    pub listen: String,
}

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

    // ---- peers ----

    /// Makes a peer known by its blob and starts to dial it in the background. The same blob again
    /// gives the same peer; a blob of another incarnation under the same name replaces it: it
    /// restarted.
    pub fn peer_add(&self, blob: &[u8], expected_name: Option<&[u8]>) -> Result<Handle> {
        let shared = self.here()?;
        let blob = ConnBlob::decode(blob)?;
        if let Some(expected) = expected_name.filter(|n| *n != blob.name) {
            let text = format!(
                "the blob is of {}, not of {}: was it fetched from the right agent?",
                shown(&blob.name, 64),
                shown(expected, 64)
            );
            return Err(Error::new(Status::Mismatch, text));
        }
        if blob.incarnation == shared.incarnation {
            return Ok(self.peer_self());
        }
        control::same_place(shared, &shown(&blob.name, 64), &blob)?;
        let mut peers = shared.peers();
        let (core, share) = (&shared.core, &shared.share);
        let index = peers.find_or_add(core, share, &blob.name, blob.incarnation)?;
        let s = shared.core.peer_state(index);
        let entry = peers.entry(index);
        entry.blob = Some(blob);
        if s.link != Link::Up {
            entry.wanted = true;
            entry.dialled = None;
            shared.core.set_peer(index, PeerState { link: Link::Down, ..s });
            shared.nudge();
        }
        Ok(shared.core.peer_handle(index))
    }

    /// This engine as a peer: for transfers within it.
    pub fn peer_self(&self) -> Handle {
        self.shared.core.self_peer()
    }

    /// The peer of a name.
    pub fn peer_find(&self, name: &[u8]) -> Result<Handle> {
        let shared = self.here()?;
        let found = shared.peers().by_name.get(name).copied();
        found.map(|i| shared.core.peer_handle(i)).ok_or_else(|| {
            let text = format!("no peer is called {}: load its metadata first", shown(name, 64));
            Error::new(Status::NotFound, text)
        })
    }

    fn peer(&self, raw: u64) -> Result<(u32, PeerState)> {
        self.here()?.core.peer(raw).map_err(|s| bad_handle("peer", raw, s))
    }

    /// Why a peer is of no use, in words.
    fn peer_error(&self, index: u32, state: PeerState) -> Error {
        let known = self.shared.peers().entry(index).error.clone();
        known.unwrap_or_else(|| Error::new(state.status, "the peer is gone"))
    }

    /// How things stand with a peer: connected, or being dialled, or an error that says why not.
    pub fn peer_state(&self, peer: u64) -> Result<Status> {
        let (index, s) = self.peer(peer)?;
        match s.link {
            Link::Up => Ok(Status::Ok),
            Link::Down => Ok(Status::InProgress),
            _ => Err(self.peer_error(index, s)),
        }
    }

    /// Waits until a peer is connected or failed, at most `timeout`. Dials again if it was given
    /// up.
    pub fn peer_connect(&self, peer: u64, timeout: Duration) -> Result<()> {
        let (index, s) = self.peer(peer)?;
        let shared = self.here()?;
        if s.link == Link::Dead {
            self.redial(index);
        }
        let until = Instant::now() + timeout;
        let mut peers = shared.peers();
        loop {
            match shared.core.peer(peer).map_err(|s| bad_handle("peer", peer, s))?.1 {
                s if s.link == Link::Up => return Ok(()),
                s if s.link == Link::Dead => {
                    drop(peers);
                    return Err(self.peer_error(index, s));
                }
                _ => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let title = peers.entry(index).title();
                let text = format!("{title}: not connected within {} ms", timeout.as_millis());
                return Err(Error::new(Status::Unreachable, text));
            }
            peers = match shared.changed.wait_timeout(peers, left) {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// A peer that was given up is dialled once more, if it can be.
    fn redial(&self, index: u32) {
        let mut peers = self.shared.peers();
        let s = self.shared.core.peer_state(index);
        let entry = peers.entry(index);
        if s.link == Link::Dead && entry.blob.is_some() {
            entry.wanted = true;
            self.shared.core.set_peer(index, PeerState { link: Link::Down, ..s });
            self.shared.nudge();
        }
    }

    /// Ends and forgets a peer: its transfers end with `Disconnected`, its handle and its regions'
    /// are stale. When this returns nothing moves between it and us. Waits for at most one
    /// batch of each rail.
    pub fn peer_remove(&self, peer: u64) -> Result<()> {
        let (index, _) = self.peer(peer)?;
        if index == SELF {
            return Err(Error::new(Status::Invalid, "an engine cannot remove itself: destroy it"));
        }
        let mut peers = self.shared.peers();
        self.shared.core.peer(peer).map_err(|s| bad_handle("peer", peer, s))?;
        let why = Error::new(Status::Disconnected, "the peer was removed here");
        peers.remove(&self.shared.core, index, &why);
        Ok(())
    }

    // ---- regions ----

    /// Registers memory on every rail. `mem` 0 is host memory; device memory needs RDMA rails.
    pub fn register(&self, addr: u64, len: u64, mem: u32) -> Result<Handle> {
        let shared = self.here()?;
        if len == 0 || addr == 0 || addr.checked_add(len - 1).is_none() {
            let text = format!(
                "region of {len} bytes at {addr:#x}: it must have at least 1 byte, not begin at 0 \
                 and not run past the largest address"
            );
            return Err(Error::new(Status::Invalid, text));
        }
        if mem != 0 {
            let text = format!(
                "memory kind {mem}: transport local moves host memory (0) only; device memory \
                 needs RDMA rails, which this build does not have yet"
            );
            return Err(Error::new(Status::Unsupported, text));
        }
        let handle = shared.core.local.open(addr, len, SELF, (0, 0)).ok_or_else(|| {
            let max = shared.core.local.capacity();
            let text = format!("all {max} regions are registered: raise max_regions");
            Error::new(Status::Capacity, text)
        })?;
        shared.share.open(handle.index(), handle.generation());
        Ok(handle)
    }

    fn local_region(&self, raw: u64) -> Result<View> {
        self.here()?.core.local.view(raw).map_err(|s| bad_handle("region", raw, s))
    }

    /// Takes memory back. With `cancel` the transfers that use it end with `Cancelled`; without,
    /// the call is refused while one is in flight. Peers that read or write it lose those
    /// transfers. `Ok`: nobody touches it any more. After a `Busy` that came too late for that, the
    /// region is of no use but to this call, which waits again.
    pub fn deregister(&self, region: u64, cancel: bool) -> Result<()> {
        let shared = self.here()?;
        let handle = Handle::parse(region, Kind::LocalRegion)
            .ok_or_else(|| bad_handle("region", region, Status::Invalid))?;
        let mut limbo = self.limbo();
        let view = match limbo.get(&region) {
            Some(&view) => view,
            None => {
                let view = self.withdraw(handle, cancel)?;
                limbo.insert(region, view);
                view
            }
        };
        drop(limbo);
        let named = RegionRef { slot: view.slot, generation: view.generation, remote: false };
        let limit = Duration::from_millis(u64::from(shared.config.deregister_timeout_ms));
        let mut inside = None;
        let drained = self.drain(region, limit, || {
            let quiet = shared.core.quiesce(named).is_ok();
            inside = self.peer_inside(view.slot);
            quiet && inside.is_none()
        });
        if drained {
            if let Some(view) = self.limbo().remove(&region) {
                shared.core.local.free(view);
            }
            return Ok(());
        }
        let who = inside.unwrap_or_else(|| "a transfer of this engine".into());
        let text = format!(
            "region {region:#x}: {who} was still inside after {} ms (deregister_timeout_ms); it is \
             withdrawn, but do not reuse its memory before that process goes on or ends and \
             deregistering it again succeeds",
            limit.as_millis()
        );
        log::warn(&text);
        Err(Error::new(Status::Busy, text))
    }

    /// Closes a region of this engine: nobody begins to use it from here on.
    fn withdraw(&self, handle: Handle, cancel: bool) -> Result<View> {
        let (shared, region) = (&self.shared, handle.raw());
        let view = self.local_region(region)?;
        let named = RegionRef { slot: view.slot, generation: view.generation, remote: false };
        if let Some(user) = shared.core.first_user(named).filter(|_| !cancel) {
            let text = format!(
                "region {region:#x} is used by transfer {:#x} in flight: wait for it or cancel it",
                user.raw()
            );
            return Err(Error::new(Status::Busy, text));
        }
        shared.core.local.close(handle).map_err(|s| bad_handle("region", region, s))?;
        shared.share.withdraw(view.slot);
        Ok(view)
    }

    fn limbo(&self) -> MutexGuard<'_, Limbo> {
        self.limbo.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls until `quiet`, at most `limit`. A region that another call took out of limbo meanwhile
    /// has drained.
    fn drain(&self, region: u64, limit: Duration, mut quiet: impl FnMut() -> bool) -> bool {
        wait_until(limit, || {
            let drained = quiet() || !self.limbo().contains_key(&region);
            if !drained {
                self.shared.core.poll();
            }
            drained
        })
    }

    /// A living peer that is inside region `slot`. Counts of dead processes are cleared.
    fn peer_inside(&self, slot: u32) -> Option<String> {
        let shared = &self.shared;
        let rows = 1..shared.core.limits().peers;
        let inside: Vec<u32> = rows.filter(|&r| shared.share.is_inside(r, slot)).collect();
        let mut peers = if inside.is_empty() { return None } else { shared.peers() };
        inside.into_iter().find_map(|row| peers.rows.inside(&shared.share, row, slot))
    }

    /// The blob by which peers import a region.
    pub fn region_metadata(&self, region: u64) -> Result<Vec<u8>> {
        let view = self.local_region(region)?;
        RegionBlob {
            incarnation: self.shared.incarnation,
            slot: view.slot,
            generation: view.generation,
            base: view.base,
            len: view.len,
            mem: 0,
        }
        .encode()
    }

    /// Makes a peer's region usable in descriptors.
    pub fn region_import(&self, peer: u64, blob: &[u8]) -> Result<Handle> {
        let (index, _) = self.peer(peer)?;
        let blob = RegionBlob::decode(blob)?;
        if blob.mem != 0 {
            let text = format!(
                "the region is of memory kind {}; transport local reaches host memory (0) only",
                blob.mem
            );
            return Err(Error::new(Status::Unsupported, text));
        }
        let peers = self.shared.peers();
        let entry = &peers.entries[index as usize];
        if entry.incarnation != blob.incarnation {
            let text = format!(
                "the region is of incarnation {}, {} is another: load fresh metadata of the peer",
                &hex(&blob.incarnation)[..8],
                entry.title()
            );
            return Err(Error::new(Status::Stale, text));
        }
        self.open_remote(index, (blob.base, blob.len), (blob.slot, blob.generation))
    }

    /// A region of this engine as a remote one, for transfers within it. It does not keep the
    /// region alive.
    pub fn region_import_self(&self, local: u64) -> Result<Handle> {
        let v = self.local_region(local)?;
        self.open_remote(SELF, (v.base, v.len), (v.slot, v.generation))
    }

    fn open_remote(&self, peer: u32, at: (u64, u64), target: (u32, u32)) -> Result<Handle> {
        let remote = &self.shared.core.remote;
        remote.open(at.0, at.1, peer, target).ok_or_else(|| {
            let max = remote.capacity();
            let text = format!("all {max} imported regions are in use: forget some, or raise ");
            Error::new(Status::Capacity, text + "max_remote_regions")
        })
    }

    /// Forgets an imported region. Transfers in flight that use it end with `Cancelled` before this
    /// returns. After `Busy` the region is of no use but to this call, which waits again.
    pub fn region_forget(&self, region: u64) -> Result<()> {
        let shared = self.here()?;
        let bad = |s| bad_handle("imported region", region, s);
        let handle =
            Handle::parse(region, Kind::RemoteRegion).ok_or_else(|| bad(Status::Invalid))?;
        let mut limbo = self.limbo();
        let view = match limbo.get(&region) {
            Some(&view) => view,
            None => {
                let view = shared.core.remote.close(handle).map_err(bad)?;
                limbo.insert(region, view);
                view
            }
        };
        drop(limbo);
        let named = RegionRef { slot: view.slot, generation: view.generation, remote: true };
        let limit = Duration::from_millis(u64::from(shared.config.release_timeout_ms));
        if self.drain(region, limit, || shared.core.quiesce(named).is_ok()) {
            if let Some(view) = self.limbo().remove(&region) {
                shared.core.remote.free(view);
            }
            return Ok(());
        }
        let text = format!(
            "imported region {region:#x} is still in use by a transfer that ends; forget it again"
        );
        Err(Error::new(Status::Busy, text))
    }

    // ---- tables and transfers ----

    /// A table of descriptors, copied.
    pub fn table_create(&self, descs: &[Desc]) -> Result<Handle> {
        self.here()?.tables.create(descs)
    }

    /// A table of few strided parts, which is never expanded.
    pub fn table_create_strided(&self, parts: &[Stride]) -> Result<Handle> {
        self.here()?.tables.create_strided(parts)
    }

    /// Destroys a table. Transfers that were prepared from it do not need it.
    pub fn table_destroy(&self, table: u64) -> Result<()> {
        self.here()?.tables.destroy(table)
    }

    /// Prepares the transfer of descriptor `local_idx[i]` of one table against `remote_idx[i]` of
    /// the other, for all `i`.
    pub fn prepare(
        &self,
        direction: Direction,
        peer: u64,
        local: u64,
        local_idx: &[u32],
        remote: u64,
        remote_idx: &[u32],
    ) -> Result<Handle> {
        let (index, s) = self.peer(peer)?;
        let p = self.shared.preparer();
        let peer = (index, s.generation);
        self.adopt(p.indexed(direction, peer, (local, local_idx), (remote, remote_idx))?)
    }

    /// Prepares the transfer of `local[i]` against `remote[i]`, for all `i`.
    pub fn prepare_descs(
        &self,
        direction: Direction,
        peer: u64,
        local: &[Desc],
        remote: &[Desc],
    ) -> Result<Handle> {
        let (index, s) = self.peer(peer)?;
        let p = self.shared.preparer();
        self.adopt(p.listed(direction, (index, s.generation), local, remote)?)
    }

    fn adopt(&self, body: Body) -> Result<Handle> {
        self.shared.core.adopt(body).map_err(|body| {
            // SAFETY: I3: prepared just now, and no slot took it.
            unsafe { prepare::free_body(&self.shared.pool, &body) };
            let max = self.shared.core.limits().transfers;
            let text = format!("all {max} transfers are prepared: release some, or raise ");
            Error::new(Status::Capacity, text + "max_transfers")
        })
    }

    /// Posts a transfer that is at rest; the message, if any, is delivered after the data. Never
    /// waits.
    pub fn post(&self, transfer: u64, notif: Option<&[u8]>) -> Result<Status> {
        let shared = self.here()?;
        let start = Instant::now();
        let status = shared
            .core
            .post(transfer, notif)
            .map_err(|s| self.post_error(transfer, s, notif.map_or(0, <[u8]>::len)))?;
        let ns = start.elapsed().as_nanos() as u64;
        shared.core.set_post_ns(transfer, ns);
        if let Ok(info) = shared.core.info(transfer) {
            let add = |to: &AtomicU64, n| to.fetch_add(n, Ordering::Relaxed);
            add(&shared.counts.posted, 1);
            add(&shared.counts.descriptors, info.descriptors);
            add(&shared.counts.work_requests, info.work_requests);
            add(&shared.counts.bytes, info.bytes);
            add(&shared.counts.post_ns, ns);
        }
        self.answer(transfer, status)
    }

    fn post_error(&self, transfer: u64, status: Status, len: usize) -> Error {
        let text = match status {
            Status::Busy => format!("transfer {transfer:#x} is in flight: wait until it is done"),
            Status::Invalid if len > crate::engine::message::MAX_MESSAGE => {
                return too_long(len);
            }
            Status::Capacity => return self.messages_full(),
            // The handle is good, so what is stale is something that it was prepared with.
            Status::Stale if self.shared.core.info(transfer).is_ok() => format!(
                "transfer {transfer:#x}: a region or the peer that it uses was released since it \
                 was prepared; release it and prepare another"
            ),
            Status::Stale | Status::Invalid => return bad_handle("transfer", transfer, status),
            _ => {
                if let Some(peer) = self.shared.core.peer_of(transfer) {
                    self.redial(peer);
                    return self.peer_error(peer, self.shared.core.peer_state(peer));
                }
                format!("transfer {transfer:#x}")
            }
        };
        Error::new(status, text)
    }

    fn messages_full(&self) -> Error {
        let (used, _) = self.shared.core.message_blocks_used();
        let all = self.shared.core.limits().blocks();
        let text = format!(
            "{used} of {all} outgoing message blocks of 256 bytes are in use: the peers must take \
             their notifications, or raise message_bytes"
        );
        Error::new(Status::Capacity, text)
    }

    /// A failed transfer as an error with its cause.
    fn answer(&self, transfer: u64, status: Status) -> Result<Status> {
        if !status.is_err() {
            return Ok(status);
        }
        let mut text = format!("transfer {transfer:#x}");
        if let Ok(info) = self.shared.core.info(transfer) {
            if info.failed_pair != u64::MAX {
                text += &format!(", descriptor pair {}", info.failed_pair);
            }
            text += &format!(", {} of {} bytes done", info.bytes_done, info.bytes);
        }
        if matches!(status, Status::Disconnected | Status::Unreachable | Status::Refused) {
            if let Some(peer) = self.shared.core.peer_of(transfer) {
                let why = self.peer_error(peer, self.shared.core.peer_state(peer));
                text += &format!(": {}", why.message);
            }
        }
        Err(Error::new(status, text))
    }

    /// Where a transfer stands; a failed one is an error with its cause.
    pub fn check(&self, transfer: u64) -> Result<Status> {
        let core = &self.here()?.core;
        let status = core.check(transfer).map_err(|s| bad_handle("transfer", transfer, s))?;
        if status == Status::InProgress || status == Status::Ok {
            return Ok(status);
        }
        if status == Status::NotPosted {
            let text = format!("transfer {transfer:#x} was never posted");
            return Err(Error::new(status, text));
        }
        self.answer(transfer, status)
    }

    /// Stops a transfer: it ends with `Cancelled` when nothing of it is in flight any more.
    pub fn cancel(&self, transfer: u64) -> Result<()> {
        let core = &self.here()?.core;
        core.cancel(transfer).map_err(|s| bad_handle("transfer", transfer, s))
    }

    /// Ends a transfer's life, stopping it if need be. `Ok`: nothing touches its memory any more.
    /// Waits at most `release_timeout_ms`; after that `Busy`, and the handle stays valid.
    pub fn release(&self, transfer: u64) -> Result<()> {
        let shared = self.here()?;
        let limit = Duration::from_millis(u64::from(shared.config.release_timeout_ms));
        let mut last = Ok(());
        let done = wait_until(limit, || match shared.core.release(transfer) {
            Ok(body) => {
                // SAFETY: I3: released just now, by us.
                unsafe { prepare::free_body(&shared.pool, &body) };
                true
            }
            Err(Status::Busy) => {
                let _ = shared.core.cancel(transfer);
                shared.core.poll();
                false
            }
            Err(s) => {
                last = Err(bad_handle("transfer", transfer, s));
                true
            }
        });
        if done {
            return last;
        }
        let text = format!(
            "transfer {transfer:#x} still has something in flight after {} ms \
             (release_timeout_ms): its memory must not be reused; release it again",
            limit.as_millis()
        );
        Err(Error::new(Status::Busy, text))
    }

    /// Counts of a transfer.
    pub fn transfer_info(&self, transfer: u64) -> Result<TransferInfo> {
        let core = &self.here()?.core;
        core.info(transfer).map_err(|s| bad_handle("transfer", transfer, s))
    }

    // ---- messages ----

    /// Sends 0 to 65,536 bytes to a peer. Returns when they are queued.
    pub fn notify(&self, peer: u64, msg: &[u8]) -> Result<()> {
        if msg.len() > crate::engine::message::MAX_MESSAGE {
            return Err(too_long(msg.len()));
        }
        let (index, s) = self.peer(peer)?;
        self.shared.core.notify(peer, msg).map_err(|status| match status {
            Status::Capacity => self.messages_full(),
            _ => {
                self.redial(index);
                self.peer_error(index, s)
            }
        })
    }

    /// Takes every notification that has come: `f` gets the sender's name and the bytes. Polls
    /// first when there is no background thread.
    pub fn notifs(&self, f: &mut dyn FnMut(&[u8], &[u8])) -> Result<usize> {
        let core = &self.here()?.core;
        if !core.tuning().background {
            core.poll();
        }
        Ok(super::inbox::take(core, f))
    }

    // ---- reports ----

    /// Counters of a rail.
    pub fn rail_info(&self, rail: u32) -> Result<RailInfo> {
        let lanes = self.here()?.core.lanes();
        let lane = lanes.get(rail as usize).ok_or_else(|| {
            let text = format!("rail {rail}; there are {} (from 0)", lanes.len());
            Error::new(Status::Range, text)
        })?;
        let s = &lane.stats;
        Ok(RailInfo {
            index: rail,
            name: format!("local{rail}"),
            bytes_read: s.bytes_read.load(Ordering::Relaxed),
            bytes_written: s.bytes_written.load(Ordering::Relaxed),
            work_requests: s.work_requests.load(Ordering::Relaxed),
            claims: s.claims.load(Ordering::Relaxed),
            errors: s.errors.load(Ordering::Relaxed),
        })
    }

    /// What the engine holds now.
    pub fn info(&self) -> EngineInfo {
        let s = &self.shared;
        EngineInfo {
            rails: s.core.limits().lanes,
            fixed_bytes: s.fixed_bytes as u64,
            pool_bytes: s.pool.used(),
            pool_limit: s.pool.limit(),
            peers: s.peers().used(),
            regions: s.core.local.used(),
            remote_regions: s.core.remote.used(),
            tables: s.tables.used(),
            transfers: s.core.transfers_used(),
            transport: "local".into(),
            listen: self.listen.clone(),
        }
    }
}

fn too_long(len: usize) -> Error {
    let max = crate::engine::message::MAX_MESSAGE;
    Error::new(Status::Invalid, format!("a message of {len} bytes; 0 to {max} are allowed"))
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
