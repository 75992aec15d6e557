//! Regions: memory registered here and taken back, and memory of peers.

use core::time::Duration;
use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use super::{bad_handle, wait_until, Engine, Force, Limbo};
use crate::engine::peer::SELF;
use crate::engine::region::{KeyList, View};
use crate::engine::slot::RegionRef;
use crate::handle::{Handle, Kind};
use crate::host::blob::RegionBlob;
use crate::host::error::{hex, Error, Result};
use crate::host::memory::{Lease, Range, Segment, Source};
use crate::host::rails::{Registered, KEPT};
use crate::host::{keylist, log, loopback, memory};
use crate::status::Status;

impl Engine {
    /// Registers memory on every rail. `mem`: [`memory::HOST`], or [`memory::DEVICE`], which needs
    /// RDMA rails.
    pub fn register(&self, addr: u64, len: u64, mem: u32) -> Result<Handle> {
        let list = self.register_list(&[(addr, len)], mem)?;
        list.first().copied().ok_or_else(|| Error::new(Status::Internal, "no region was made"))
    }

    /// Registers several ranges (first byte and bytes), all or none. The region of each, in their
    /// order. Ranges of host memory that touch or overlap are one region, which a peer reaches by
    /// one key a rail: their handle is the same, and is taken back once. No byte between ranges is
    /// registered.
    pub fn register_list(&self, ranges: &[(u64, u64)], mem: u32) -> Result<Vec<Handle>> {
        let shared = self.here()?;
        let mut given = Vec::with_capacity(ranges.len());
        for &(addr, len) in ranges {
            given.push(Range::plain(addr, len, mem)?);
        }
        if given.iter().any(|r| r.source != Source::Host) {
            self.device_memory()?;
            // Neighbours may be different allocations, which their module keeps apart.
            return self.open_all(&given, None);
        }
        let (whole, of) = unite(ranges);
        let whole: Vec<_> = whole.into_iter().map(|(addr, len)| Range::host(addr, len)).collect();
        let opened = self.open_all(&whole, None)?;
        if let Some(rails) = &shared.rails {
            whole.iter().for_each(|r| rails.judge(r.addr));
        }
        Ok(of.into_iter().filter_map(|i| opened.get(i).copied()).collect())
    }

    /// Registers pieces of device memory with every rail, all or none. Each is a region of its own,
    /// also where they touch. Their descriptors stay the caller's and may be closed after this
    /// returned. `lease` is given up when the last of the regions was taken back, when the engine
    /// ends, or before this returns if it fails.
    pub fn register_segments(
        &self,
        segments: &[Segment],
        lease: Option<Lease>,
    ) -> Result<Vec<Handle>> {
        let lease = lease.map(Arc::new);
        self.device_memory()?;
        let ranges = segments.iter().enumerate().map(|(at, s)| Range::segment(at, s));
        self.open_all(&ranges.collect::<Result<Vec<_>>>()?, lease.as_ref())
    }

    /// Refuses where device memory cannot be registered: without RDMA rails.
    pub fn device_memory(&self) -> Result<()> {
        let shared = self.here()?;
        if shared.rails.is_some() {
            return Ok(());
        }
        let why = shared.why_local.as_deref().map(|why| format!(" ({why})")).unwrap_or_default();
        let text = format!(
            "device memory with transport local, which copies host memory only: use \
             transport=verbs on a host with an RDMA NIC{why}, or let the transfer bounce in host \
             memory (kv_buffer_device=cpu)"
        );
        Err(Error::new(Status::Unsupported, text))
    }

    /// Registers ranges and gives each a region, all or none.
    fn open_all(&self, ranges: &[Range], lease: Option<&Arc<Lease>>) -> Result<Vec<Handle>> {
        let shared = &self.shared;
        let (used, max) = (shared.core.local.used(), shared.core.local.capacity());
        // Before anything is pinned, which takes its time.
        if ranges.len() as u64 > u64::from(max.saturating_sub(used)) {
            return Err(too_many(max, ranges.len(), used));
        }
        let mut registered = Vec::new();
        let rails = shared.rails.as_ref().filter(|_| !ranges.is_empty());
        let late = rails.filter(|_| ranges.iter().any(|r| !r.coherent));
        // Held until the registrations have it themselves, or failed.
        let _late = late.map(|rails| loopback::furnish_all(shared, rails)).transpose()?;
        if let Some(rails) = rails {
            registered = rails.register(ranges, lease)?;
        }
        let mut registered = registered.into_iter();
        let mut opened = Vec::new();
        for range in ranges {
            match self.open_local(range.addr, range.len, registered.next()) {
                Ok(handle) => opened.push(handle),
                Err(why) => {
                    opened.into_iter().for_each(|handle| self.unopen(handle));
                    return Err(why);
                }
            }
        }
        // What a peer on this host would copy at its address must be host memory.
        let on_host = opened.iter().zip(ranges).filter(|(_, r)| r.source == Source::Host);
        on_host.for_each(|(h, _)| shared.share.open(h.index(), h.generation()));
        Ok(opened)
    }

    /// Gives registered memory a slot, which peers do not see yet.
    fn open_local(&self, addr: u64, len: u64, registered: Option<Registered>) -> Result<Handle> {
        let shared = &self.shared;
        let keys = match &registered {
            None => KeyList::EMPTY,
            Some(r) => {
                let (list, flush): (Vec<u32>, _) = (r.own_keys().collect(), r.flush());
                let like = KeyList { shift: r.shift(), mem: r.mem(), flush, ..KeyList::EMPTY };
                let rows = shared.nics() as u16 * if flush { 2 } else { 1 };
                keylist::store(&shared.pool, &list, rows, like)?
            }
        };
        // SAFETY: I3: the list is the pool's, and is given back after the region was freed.
        let opened = unsafe { shared.core.local.open_with(addr, len, SELF, (0, 0), keys) };
        let Some(handle) = opened else {
            // SAFETY: I3: no region has the list.
            unsafe { keylist::drop_list(&shared.pool, keys, len) };
            let local = &shared.core.local;
            return Err(too_many(local.capacity(), 1, local.used()));
        };
        if let Some(registered) = registered {
            self.registrations().insert(handle.raw(), registered);
        }
        Ok(handle)
    }

    /// Takes back a region of [`Engine::open_local`] whose handle nobody was given.
    fn unopen(&self, handle: Handle) {
        let Ok(view) = self.shared.core.local.close(handle) else { return };
        let gone = self.registrations().remove(&handle.raw());
        self.shared.core.local.free(view);
        // SAFETY: I3: freed just now.
        unsafe { keylist::free(&self.shared.pool, &view) };
        drop(gone);
    }

    fn registrations(&self) -> MutexGuard<'_, HashMap<u64, Registered>> {
        self.shared.registered.lock().unwrap_or_else(PoisonError::into_inner)
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
        let drained = self.drain((region, named), limit, || {
            let quiet = shared.core.quiesce(named).is_ok();
            inside = self.peer_inside(view.slot);
            quiet && inside.is_none()
        });
        if drained {
            // When this returns no NIC touches the memory; what a peer still asks for is refused by
            // ours. A NIC that does not end a registration may: then the region stays as it is.
            let ended = self.registrations().get_mut(&region).map_or(Ok(()), Registered::end);
            if let Err(why) = ended {
                let text = format!("region {region:#x} is withdrawn, but {why}: {KEPT}");
                return Err(Error::new(Status::Busy, text));
            }
            let view = self.limbo().remove(&region);
            if let Some(view) = view {
                let gone = self.registrations().remove(&region);
                shared.core.local.free(view);
                // SAFETY: I3: freed just now.
                unsafe { keylist::free(&shared.pool, &view) };
                // Last and without a lock: its provider may call the engine.
                drop(gone);
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

    /// Polls until `quiet`, at most `limit`; rails that keep something of it in flight are closed.
    /// A region that another call took out of limbo meanwhile has drained.
    fn drain(
        &self,
        (region, named): (u64, RegionRef),
        limit: Duration,
        mut quiet: impl FnMut() -> bool,
    ) -> bool {
        let core = &self.shared.core;
        let mut force = Force::within(limit);
        wait_until(limit, || {
            let drained = quiet() || !self.limbo().contains_key(&region);
            if !drained {
                core.poll();
                core.forgive();
                force.once(|| core.evict_users(named));
            }
            drained
        })
    }

    /// Who is inside region `slot`: a living peer, or this engine, as its own peer. Counts of dead
    /// processes are cleared.
    fn peer_inside(&self, slot: u32) -> Option<String> {
        let shared = &self.shared;
        if shared.share.is_inside(SELF, slot) {
            return Some("a transfer of this engine to itself".into());
        }
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
            mem: view.keys.mem.into(),
            keys: self.registrations().get(&region).map(Registered::keys).unwrap_or_default(),
        }
        .encode()
    }

    /// Makes a peer's region usable in descriptors.
    pub fn region_import(&self, peer: u64, blob: &[u8]) -> Result<Handle> {
        let (index, _) = self.peer(peer)?;
        let shared = &self.shared;
        let blob = RegionBlob::decode(blob)?;
        let mem = u8::try_from(blob.mem).ok().filter(|m| u32::from(*m) <= memory::DMABUF);
        let Some(mem) = mem.filter(|m| *m == 0 || shared.rails.is_some()) else {
            let text = format!(
                "the region is of memory kind {}; this engine, of transport {}, reaches {}",
                blob.mem,
                shared.transport(),
                if shared.rails.is_some() { "kinds 0 to 2" } else { "host memory (0) only" }
            );
            return Err(Error::new(Status::Unsupported, text));
        };
        let peers = shared.peers();
        let entry = &peers.entries[index as usize];
        if entry.incarnation != blob.incarnation {
            let text = format!(
                "the region is of incarnation {}, {} is another: load fresh metadata of the peer",
                &hex(&blob.incarnation)[..8],
                entry.title()
            );
            return Err(Error::new(Status::Stale, text));
        }
        let keys = &blob.keys;
        let mut list = KeyList { shift: keys.shift, mem, ..KeyList::EMPTY };
        let whole = u64::from(keys.rails) * list.pieces(blob.len);
        if shared.rails.is_some() && keys.keys.len() as u64 == whole {
            list = keylist::store(&shared.pool, &keys.keys, u16::from(keys.rails), list)?;
        }
        self.open_remote(index, (blob.base, blob.len), (blob.slot, blob.generation), list)
    }

    /// A region of this engine as a remote one, for transfers within it. It does not keep the
    /// region alive.
    pub fn region_import_self(&self, local: u64) -> Result<Handle> {
        let v = self.local_region(local)?;
        let keys = KeyList { mem: v.keys.mem, ..KeyList::EMPTY };
        self.open_remote(SELF, (v.base, v.len), (v.slot, v.generation), keys)
    }

    /// At the engine's end, when none of its threads runs: gives the keys back of what is still
    /// registered or imported. The registrations themselves end with the rails.
    pub(super) fn give_keys_back(&self) {
        let shared = &self.shared;
        let give = |view: View| {
            // SAFETY: I3: closed, and nobody is left who would read the list.
            unsafe { keylist::free(&shared.pool, &view) };
        };
        for table in [&shared.core.local, &shared.core.remote] {
            table.each(|handle| table.close(handle).into_iter().for_each(give));
        }
        self.limbo().drain().for_each(|(_, view)| give(view));
    }

    fn open_remote(
        &self,
        peer: u32,
        (base, len): (u64, u64),
        target: (u32, u32),
        keys: KeyList,
    ) -> Result<Handle> {
        let remote = &self.shared.core.remote;
        // SAFETY: I3: the list is the pool's, and is given back after the region was freed.
        let opened = unsafe { remote.open_with(base, len, peer, target, keys) };
        opened.ok_or_else(|| {
            // SAFETY: I3: no region has the list.
            unsafe { keylist::drop_list(&self.shared.pool, keys, len) };
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
        if self.drain((region, named), limit, || shared.core.quiesce(named).is_ok()) {
            if let Some(view) = self.limbo().remove(&region) {
                shared.core.remote.free(view);
                // SAFETY: I3: freed just now.
                unsafe { keylist::free(&shared.pool, &view) };
            }
            return Ok(());
        }
        let text = format!(
            "imported region {region:#x} is still in use by a transfer that ends; forget it again"
        );
        Err(Error::new(Status::Busy, text))
    }
}

fn too_many(max: u32, more: usize, used: u32) -> Error {
    let text = format!(
        "{more} more region(s), and {used} are registered, but there are at most {max}: raise \
         max_regions"
    );
    Error::new(Status::Capacity, text)
}

/// Joins ranges that touch or overlap: what they come to in the order of addresses, and for each
/// range which of those has it. None of them wraps.
fn unite(ranges: &[(u64, u64)]) -> (Vec<(u64, u64)>, Vec<usize>) {
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_unstable_by_key(|&i| ranges[i]);
    let (mut whole, mut of): (Vec<(u64, u64)>, _) = (Vec::new(), vec![0; ranges.len()]);
    for i in order {
        let (addr, len) = ranges[i];
        match whole.last_mut() {
            // By the distance from its first byte, as the end of the address space has no next one.
            Some((base, all)) if addr - *base <= *all => *all = (*all).max(addr - *base + len),
            _ => whole.push((addr, len)),
        }
        of[i] = whole.len() - 1;
    }
    (whole, of)
}

#[cfg(test)]
mod tests {
    use super::unite;

    type Ranges = &'static [(u64, u64)];

    #[test]
    fn ranges_that_touch_or_overlap_are_one_and_no_byte_is_added() {
        const TOP: u64 = u64::MAX;
        let cases: [(Ranges, Ranges, &[usize]); 6] = [
            (&[], &[], &[]),
            (&[(10, 5), (15, 5)], &[(10, 10)], &[0, 0]),
            (&[(16, 5), (10, 5)], &[(10, 5), (16, 5)], &[1, 0]),
            (&[(10, 50), (20, 5), (40, 30), (70, 1)], &[(10, 61)], &[0; 4]),
            (&[(9, 1), (100, 1), (9, 1)], &[(9, 1), (100, 1)], &[0, 1, 0]),
            (&[(TOP - 1, 2), (TOP - 9, 8), (1, 1)], &[(1, 1), (TOP - 9, 10)], &[1, 1, 0]),
        ];
        for (given, whole, of) in cases {
            let (seen, at) = unite(given);
            assert_eq!((&seen[..], &at[..]), (whole, of), "{given:?}");
        }
    }
}
