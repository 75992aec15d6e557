//! What a fleet holds when nothing is under way and everybody has given everything back.

use super::*;
use crate::heap;
use heapless::Vec as Few;

/// One engine. Of fixed size, so that what is kept of an hour does not count in the next one's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parts {
    pub transfers: u32,
    /// Blocks of messages that go out and that came.
    pub blocks: (u32, u32),
    /// Return entries and bytes of windows that are free.
    pub spare: (u32, u64),
    /// Regions of its own and of others.
    pub regions: (u32, u32),
    /// Per lane: work requests in its ledgers and in its queues, claims, bytes in flight, debts.
    pub lanes: Few<(u32, u32, u32, u64, u32), 4>,
    /// Per peer: rails up, rails held, rails that owe a fence.
    pub peers: Few<(u32, u32, u32), 8>,
    /// Work for its worker, or for its control side.
    pub work: (bool, bool),
}

/// A fleet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rest {
    pub engines: Few<Parts, 8>,
    pub wires: usize,
    pub flying: u32,
    pub heap: i64,
}

impl Rest {
    fn parts(core: &Engine) -> Parts {
        let slots = 0..core.limits().peers;
        let lane = |l: u32| {
            let of = &core.lanes()[l as usize];
            let queued = core.with_port(l, |p| slots.clone().map(|s| p.queued(s)).sum());
            // SAFETY: I2: nobody else has a handle of the engine while a fleet stands still.
            let inner = unsafe { of.inner() };
            let posted = inner.rails.iter().map(|r| r.ledger.outstanding()).sum();
            let (bytes, owing) = (of.outstanding.load(RELAXED), of.owing.load(RELAXED));
            (posted, queued, inner.claims, bytes, owing)
        };
        Parts {
            transfers: core.transfers_used(),
            blocks: core.message_blocks_used(),
            spare: core.spare(),
            regions: (core.local.used(), core.remote.used()),
            lanes: (0..core.limits().lanes).map(lane).collect(),
            peers: slots.map(|s| (core.rails(s), core.held_rails(s), core.owes(s))).collect(),
            work: (core.has_work(), core.has_broken()),
        }
    }
}

impl Fleet {
    /// Everybody gives everything back, and the books of the test itself are emptied.
    pub fn lie_down(&mut self) -> Result<Rest, String> {
        self.settle()?;
        self.check_back()?;
        self.return_regions()?;
        self.part_all()?;
        (self.flights, self.watches, self.mends) = (Vec::new(), Vec::new(), Vec::new());
        (self.sent, self.heard, self.notes) = Default::default();
        for site in &mut self.sites {
            (site.imports, site.retiring) = (HashMap::new(), Vec::new());
        }
        // All that a fleet has is made and freed on one thread.
        let heap = heap::of_thread();
        let engines = self.world.engines.iter().map(Rest::parts).collect();
        let (wires, flying) = (self.world.fabric.wires_used(), self.world.fabric.flying());
        Ok(Rest { engines, wires, flying, heap })
    }

    /// All regions are registered again.
    pub fn rise(&mut self) {
        let now = self.now();
        self.sites.iter_mut().for_each(|s| s.register_at.fill(now));
    }
}

/// The counter sees what is kept.
pub fn counted(f: impl FnOnce()) -> i64 {
    let before = heap::of_thread();
    f();
    heap::of_thread() - before
}
