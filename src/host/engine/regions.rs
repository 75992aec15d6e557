//! Regions: memory registered here and taken back, and memory of peers.

use core::time::Duration;
use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};

use super::{bad_handle, wait_until, Engine, Force, Limbo};
use crate::engine::peer::SELF;
use crate::engine::region::{KeyList, View};
use crate::engine::slot::RegionRef;
use crate::handle::{Handle, Kind};
use crate::host::blob::RegionBlob;
use crate::host::error::{hex, Error, Result};
use crate::host::rails::Registered;
use crate::host::{keylist, log};
use crate::status::Status;

impl Engine {
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
                "memory kind {mem}: this build moves host memory (0) only; device memory by \
                 dma-buf is not built yet"
            );
            return Err(Error::new(Status::Unsupported, text));
        }
        let registered = shared.rails.as_ref().map(|r| r.register(addr, len)).transpose()?;
        if let Some(rails) = &shared.rails {
            rails.judge(addr);
        }
        let keys = match &registered {
            None => KeyList::EMPTY,
            Some(r) => {
                let list: Vec<u32> = r.lkeys().collect();
                keylist::store(&shared.pool, &list, shared.nics() as u16, r.shift())?
            }
        };
        // SAFETY: I3: the list is the pool's, and is given back after the region was freed.
        let opened = unsafe { shared.core.local.open_with(addr, len, SELF, (0, 0), keys) };
        let Some(handle) = opened else {
            // SAFETY: I3: no region has the list.
            unsafe { keylist::drop_list(&shared.pool, keys, len) };
            let max = shared.core.local.capacity();
            let text = format!("all {max} regions are registered: raise max_regions");
            return Err(Error::new(Status::Capacity, text));
        };
        if let Some(registered) = registered {
            self.registrations().insert(handle.raw(), registered);
        }
        shared.share.open(handle.index(), handle.generation());
        Ok(handle)
    }

    fn registrations(&self) -> MutexGuard<'_, HashMap<u64, Registered>> {
        self.shared.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Regions that a NIC still has registered although it was told to end that, and why.
    fn reachable(&self) -> MutexGuard<'_, HashMap<u64, String>> {
        self.reachable.lock().unwrap_or_else(PoisonError::into_inner)
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
            if let Some(why) = ended.err().or_else(|| self.reachable().get(&region).cloned()) {
                let text = format!(
                    "region {region:#x}: {why}: peers may still reach this memory; it is \
                     withdrawn, but must not be reused before this process ends"
                );
                self.reachable().insert(region, why);
                return Err(Error::new(Status::Busy, text));
            }
            if let Some(view) = self.limbo().remove(&region) {
                self.registrations().remove(&region);
                shared.core.local.free(view);
                // SAFETY: I3: freed just now.
                unsafe { keylist::free(&shared.pool, &view) };
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
            mem: 0,
            keys: self.registrations().get(&region).map(Registered::keys).unwrap_or_default(),
        }
        .encode()
    }

    /// Makes a peer's region usable in descriptors.
    pub fn region_import(&self, peer: u64, blob: &[u8]) -> Result<Handle> {
        let (index, _) = self.peer(peer)?;
        let shared = &self.shared;
        let blob = RegionBlob::decode(blob)?;
        if blob.mem != 0 {
            let text = format!(
                "the region is of memory kind {}; this build reaches host memory (0) only",
                blob.mem
            );
            return Err(Error::new(Status::Unsupported, text));
        }
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
        let mut list = KeyList { shift: keys.shift, ..KeyList::EMPTY };
        let whole = u64::from(keys.rails) * list.pieces(blob.len);
        if shared.rails.is_some() && keys.keys.len() as u64 == whole {
            list = keylist::store(&shared.pool, &keys.keys, u16::from(keys.rails), keys.shift)?;
        }
        self.open_remote(index, (blob.base, blob.len), (blob.slot, blob.generation), list)
    }

    /// A region of this engine as a remote one, for transfers within it. It does not keep the
    /// region alive.
    pub fn region_import_self(&self, local: u64) -> Result<Handle> {
        let v = self.local_region(local)?;
        self.open_remote(SELF, (v.base, v.len), (v.slot, v.generation), KeyList::EMPTY)
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
