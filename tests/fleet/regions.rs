//! Registered memory: withdrawn and registered again at random, imported where it is used.

use super::*;

/// A region of a peer as an engine knows it.
pub struct Import {
    pub handle: Handle,
    epoch: u32,
    life: u32,
}

/// Ticks that a deregistration may take before rails are closed for it.
const PATIENCE: u64 = 60;

impl Fleet {
    /// Registers a region of an engine.
    fn register(&mut self, e: usize, at: usize) {
        let region = &mut self.sites[e].regions[at];
        let (base, len) = (region.base(), region.len() as u64);
        let handle = self.world.engines[e].local.open(base, len, 0, (0, 0)).expect("a region");
        let (slot, generation) = (handle.index(), handle.generation());
        // SAFETY: I9: the region is freed with the fleet, and looked at between steps only.
        let fine = unsafe { self.world.fabric.register(e as u32, slot, generation, base, len) };
        assert!(fine);
        region.handle = Some(handle);
        region.free = (0..region.chunks()).rev().collect();
    }

    /// Registers what is not, once nobody watches it any more.
    pub fn registers_tick(&mut self) {
        let now = self.now();
        for e in 0..self.sites.len() {
            for at in 0..self.sites[e].regions.len() {
                let idle = self.sites[e].regions[at].handle.is_none();
                if idle && self.runs(e) && now >= self.sites[e].register_at[at] {
                    self.register(e, at);
                }
            }
        }
    }

    /// The handle of a peer's region, known anew if it was registered anew.
    pub fn import(&mut self, e: usize, other: usize, at: usize) -> Option<Handle> {
        let (life, region) = (self.sites[other].life, &self.sites[other].regions[at]);
        let (epoch, handle) = (region.epoch, region.handle?);
        let (base, len) = (region.base(), region.len() as u64);
        let target = (handle.index(), handle.generation());
        if let Some(known) = self.sites[e].imports.get(&(other, at)) {
            if (known.epoch, known.life) == (epoch, life) {
                return Some(known.handle);
            }
            let old = known.handle;
            let view = self.world.engines[e].remote.close(old).expect("an open import");
            self.sites[e].imports.remove(&(other, at));
            let region = RegionRef { slot: view.slot, generation: view.generation, remote: true };
            self.sites[e].retiring.push((view, region));
        }
        let slot = World::slot(e, other);
        let handle = self.world.engines[e].remote.open(base, len, slot, target)?;
        self.sites[e].imports.insert((other, at), Import { handle, epoch, life });
        Some(handle)
    }

    /// Begins to take a region back.
    pub fn start_withdrawal(&mut self, e: usize) {
        let at = self.rng.below(self.sites[e].regions.len() as u64) as usize;
        let Some(handle) = self.sites[e].regions[at].handle else { return };
        if !self.runs(e) || self.sites[e].closing.contains_key(&at) {
            return;
        }
        let view = self.world.engines[e].local.close(handle).expect("an open region");
        let since = self.now();
        self.sites[e].closing.insert(at, (view, since));
    }

    /// Goes on with regions that are being taken back.
    pub fn withdrawals_tick(&mut self) -> Result<(), String> {
        let now = self.now();
        for e in 0..self.sites.len() {
            if !self.runs(e) {
                continue;
            }
            let core = &self.world.engines[e];
            let mut done = Vec::new();
            for (&at, &(view, since)) in &self.sites[e].closing {
                let (slot, generation) = (view.slot, view.generation);
                let region = RegionRef { slot, generation, remote: false };
                if now > since + PATIENCE {
                    core.evict_users(region);
                }
                match core.quiesce(region) {
                    Ok(()) => done.push((at, view)),
                    Err(_) if now <= since + PATIENCE => {}
                    Err(s) => return Err(format!("engine {e} cannot deregister: {s:?}")),
                }
            }
            self.sites[e].retiring.retain(|(view, region)| {
                let idle = core.quiesce(*region).is_ok();
                if idle {
                    core.remote.free(*view);
                }
                !idle
            });
            for (at, view) in done {
                self.world.engines[e].local.free(view);
                self.sites[e].closing.remove(&at);
                self.withdraw(e, at, "its region was deregistered");
                self.counts.withdrawals += 1;
            }
        }
        Ok(())
    }

    /// Takes all regions back and forgets those of others; none is registered again by itself.
    pub fn return_regions(&mut self) -> Result<(), String> {
        for e in 0..self.sites.len() {
            let imports: Vec<_> = self.sites[e].imports.drain().collect();
            for (_, import) in imports {
                let view = self.world.engines[e].remote.close(import.handle);
                let view = view.map_err(|s| format!("an import of {e} is {s:?}"))?;
                let (slot, generation) = (view.slot, view.generation);
                self.sites[e].retiring.push((view, RegionRef { slot, generation, remote: true }));
            }
            for at in 0..self.sites[e].regions.len() {
                let Some(handle) = self.sites[e].regions[at].handle else { continue };
                let view = self.world.engines[e].local.close(handle);
                let view = view.map_err(|s| format!("region {at} of {e} is {s:?}"))?;
                let since = self.now();
                self.sites[e].closing.insert(at, (view, since));
            }
        }
        let busy = |s: &Site| !s.closing.is_empty() || !s.retiring.is_empty();
        while self.sites.iter().any(busy) || !self.watches.is_empty() {
            self.step()?;
            self.sites.iter_mut().for_each(|s| s.register_at.fill(u64::MAX));
        }
        Ok(())
    }

    /// Nobody may touch a region any more.
    fn withdraw(&mut self, e: usize, at: usize, why: &str) {
        let now = self.now();
        let byte = self.rng.bits() as u8;
        let region = &mut self.sites[e].regions[at];
        if let Some(handle) = region.handle.take() {
            self.world.fabric.deregister(e as u32, handle.index());
        }
        region.epoch += 1;
        region.free.clear();
        let epoch = region.epoch;
        for chunk in 0..region.chunks() {
            region.fill(chunk, CHUNK, byte);
            let what = Watched::Still(byte, CHUNK);
            let (until, why) = (now + WATCH, format!("touched though {why}, at {now}"));
            self.watches.push((epoch, Watch { engine: e, region: at, chunk, until, what, why }));
        }
        self.sites[e].register_at[at] = now + WATCH + 2;
    }

    /// An engine died: nobody may touch its memory.
    pub fn withdraw_all(&mut self, e: usize, why: &str) {
        for at in 0..self.sites[e].regions.len() {
            if self.sites[e].regions[at].handle.is_some() {
                self.withdraw(e, at, why);
            }
        }
        let site = &mut self.sites[e];
        site.imports.clear();
        site.retiring.clear();
        site.closing.clear();
    }
}
