//! What the `cabi` fuzz target knows of what it did: which handles live, where they lead, and which
//! bytes somebody may write now.

use kvrail_cabi::types::kvr_stride;
use std::collections::HashMap;

/// Bytes of the memory in which all regions lie.
pub(crate) const MEMORY: usize = 8192;

/// Memory that engines write behind our back, so it is never behind a reference.
pub(crate) struct Memory {
    at: *mut [u8; MEMORY],
    /// As it was when it was last looked at.
    before: Vec<u8>,
    /// Bytes that a transfer in flight may write.
    open: Vec<bool>,
}

impl Memory {
    pub(crate) fn new() -> Memory {
        let fresh: Vec<u8> = (0..MEMORY).map(|i| (i * 31 + i / 256 * 7) as u8).collect();
        let mut bytes = Box::new([0; MEMORY]);
        bytes.copy_from_slice(&fresh);
        Memory { at: Box::into_raw(bytes), before: fresh, open: vec![false; MEMORY] }
    }

    pub(crate) fn base(&self) -> u64 {
        self.at as u64
    }

    pub(crate) fn bytes(&self, from: u64, len: u64) -> Vec<u8> {
        let first = (from - self.base()) as usize;
        assert!(first + len as usize <= MEMORY);
        let one = |i: usize| {
            // SAFETY: inside the memory, which lives until `self` is dropped.
            unsafe { self.at.cast::<u8>().add(first + i).read_volatile() }
        };
        (0..len as usize).map(one).collect()
    }

    pub(crate) fn allow(&mut self, target: &Target) {
        let first = (target.addr - self.base()) as usize;
        self.open[first..first + target.len as usize].fill(true);
    }

    /// What nobody may write has not changed. From here on only `targets` may.
    pub(crate) fn settle<'a>(&mut self, targets: impl Iterator<Item = &'a Target>) {
        let now = self.bytes(self.base(), MEMORY as u64);
        for (i, (new, old)) in now.iter().zip(&self.before).enumerate() {
            assert!(self.open[i] || new == old, "byte {i} was written by nobody");
        }
        self.before = now;
        self.open.fill(false);
        targets.for_each(|t| self.allow(t));
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: from `Box::into_raw`, and all engines are gone.
        drop(unsafe { Box::from_raw(self.at) });
    }
}

/// Bytes that a transfer writes, and the region that they belong to: its engine's number and its
/// handle there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) owner: (u32, u64),
}

/// A region as one engine sees it: its own or a peer's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) owner: (u32, u64),
    /// The peer that it was imported from; 0: our own.
    pub(crate) peer: u64,
}

/// A prepared transfer.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    pub(crate) peer: u64,
    pub(crate) regions: Vec<u64>,
    pub(crate) targets: Vec<Target>,
    /// Source of the only pair, when there is one.
    pub(crate) source: Option<(u64, u64)>,
    /// Posted, and not known to have ended.
    pub(crate) flying: bool,
    /// What must be at the only target once it is done.
    pub(crate) expect: Option<Vec<u8>>,
}

/// A table: strided runs; a plain list is runs of one.
pub(crate) type Table = Vec<kvr_stride>;

/// Descriptor `i`: address, length, region.
pub(crate) fn descriptor(table: &Table, mut i: u64) -> Option<(u64, u64, u64)> {
    for run in table {
        if i < run.count {
            let offset = i.checked_mul(run.stride)?;
            return Some((run.base.checked_add(offset)?, run.len, run.region));
        }
        i -= run.count;
    }
    None
}

/// Kinds of handles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Peer,
    Region,
    Table,
    Transfer,
}

/// One engine's objects.
#[derive(Default)]
pub(crate) struct Objects {
    /// Handles that were ever given, by kind.
    pub(crate) given: [Vec<u64>; 4],
    pub(crate) regions: HashMap<u64, Region>,
    pub(crate) tables: HashMap<u64, Table>,
    pub(crate) transfers: HashMap<u64, Transfer>,
}

impl Objects {
    /// A handle that a call gave. Peers are given again and again, others never.
    pub(crate) fn give(&mut self, kind: Kind, raw: u64) {
        assert_ne!(raw, 0, "a success gives a handle");
        let list = &mut self.given[kind as usize];
        let again = list.contains(&raw);
        assert!(!again || kind == Kind::Peer, "{kind:?} {raw:#x} was given twice");
        if !again {
            list.push(raw);
        }
    }

    /// True when the call must refuse this handle.
    pub(crate) fn gone(&self, kind: Kind, raw: u64) -> bool {
        match kind {
            Kind::Peer => false,
            Kind::Region => !self.regions.contains_key(&raw),
            Kind::Table => !self.tables.contains_key(&raw),
            Kind::Transfer => !self.transfers.contains_key(&raw),
        }
    }

    /// Adds one pair to a transfer that was prepared: both places must lie in regions that live,
    /// and be equally long.
    pub(crate) fn pair(&self, transfer: &mut Transfer, from: (u64, u64, u64), to: (u64, u64, u64)) {
        for (addr, len, region) in [from, to] {
            let r = self.regions.get(&region).expect("a region that lives");
            let inside = addr >= r.base && addr - r.base <= r.len && len <= r.len - (addr - r.base);
            assert!(inside && len > 0, "{addr:#x}+{len} was taken in {r:x?}");
            transfer.regions.push(region);
        }
        assert_eq!(from.1, to.1, "a pair of two lengths was taken");
        let owner = self.regions[&to.2].owner;
        transfer.targets.push(Target { addr: to.0, len: to.1, owner });
        let apart = from.0 + from.1 <= to.0 || to.0 + to.1 <= from.0;
        let only = transfer.targets.len() == 1 && apart;
        transfer.source = only.then_some((from.0, from.1));
    }

    /// Where transfers that may be in flight write.
    pub(crate) fn targets(&self) -> impl Iterator<Item = &Target> {
        self.transfers.values().filter(|t| t.flying).flat_map(|t| &t.targets)
    }

    /// These transfers have ended.
    pub(crate) fn land(&mut self, which: impl Fn(&Transfer) -> bool) {
        for t in self.transfers.values_mut().filter(|t| which(t)) {
            t.flying = false;
            t.expect = None;
        }
    }

    /// Nobody writes this owner's bytes any more.
    pub(crate) fn withdraw(&mut self, gone: impl Fn((u32, u64)) -> bool) {
        for t in self.transfers.values_mut() {
            t.targets.retain(|target| !gone(target.owner));
            t.expect = None;
        }
    }
}
