//! The region tables: memory registered here, and memory of peers.

use crate::engine::stack::{IndexStack, NONE};
use crate::handle::{Handle, Kind};
use crate::nic::RemoteKey;
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

const OPEN: u64 = 1;

/// One region slot. Its fields are atomics only so that a reader with a stale handle reads
/// *something*; the generation word, checked before and after, says whether it is the region that
/// was meant.
#[derive(Debug)]
pub struct Region {
    /// `generation:32 | open:1`.
    word: AtomicU64,
    base: AtomicU64,
    len: AtomicU64,
    /// Remote: slot at the target (high half) and its generation there (low half).
    target: AtomicU64,
    /// Remote: peer slot.
    peer: AtomicU32,
}

/// What a region is, copied out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct View {
    /// Slot in its table.
    pub slot: u32,
    /// Generation.
    pub generation: u32,
    /// First byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Remote: whose it is.
    pub peer: u32,
}

/// One table of regions.
#[derive(Debug)]
pub struct Regions<'m> {
    kind: Kind,
    slots: &'m [Region],
    links: &'m [AtomicU32],
    free: IndexStack,
    used: AtomicU32,
}

impl<'m> Regions<'m> {
    /// A table of `n` regions out of the arena.
    pub fn new(
        arena: &mut crate::engine::arena::Arena<'m>,
        kind: Kind,
        n: u32,
    ) -> Option<Regions<'m>> {
        let slots = arena.array(n as usize, |_| Region {
            word: AtomicU64::new(1 << 32),
            base: AtomicU64::new(0),
            len: AtomicU64::new(0),
            target: AtomicU64::new(0),
            peer: AtomicU32::new(0),
        })?;
        let links = arena.array(n as usize, |_| AtomicU32::new(NONE))?;
        let free = IndexStack::new();
        for i in (0..links.len() as u32).rev() {
            free.push(links, i);
        }
        Some(Regions { kind, slots, links, free, used: AtomicU32::new(0) })
    }

    /// Regions in use.
    pub fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// How many there can be.
    pub fn capacity(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Opens a region in a free slot. `None`: the table is full.
    pub fn open(&self, base: u64, len: u64, peer: u32, target: (u32, u32)) -> Option<Handle> {
        let slot = self.free.pop(self.links)?;
        let r = &self.slots[slot as usize];
        let generation = (r.word.load(Ordering::Relaxed) >> 32) as u32;
        r.base.store(base, Ordering::Relaxed);
        r.len.store(len, Ordering::Relaxed);
        r.peer.store(peer, Ordering::Relaxed);
        r.target.store((u64::from(target.0) << 32) | u64::from(target.1), Ordering::Relaxed);
        r.word.store((u64::from(generation) << 32) | OPEN, Ordering::Release);
        self.used.fetch_add(1, Ordering::Relaxed);
        Some(Handle::new(self.kind, slot, generation))
    }

    /// Closes a region: no post takes it from here on. The slot stays taken until
    /// [`Regions::free`].
    pub fn close(&self, handle: Handle) -> Result<View, Status> {
        let view = self.view(handle.raw())?;
        let word = (u64::from(view.generation) << 32) | OPEN;
        let next = u64::from(view.generation.wrapping_add(1).max(1)) << 32;
        let r = &self.slots[view.slot as usize];
        r.word
            .compare_exchange(word, next, Ordering::AcqRel, Ordering::Relaxed)
            .map_err(|_| Status::Stale)?;
        Ok(view)
    }

    /// Gives a closed region's slot back, once nothing uses it.
    pub fn free(&self, view: View) {
        self.used.fetch_sub(1, Ordering::Relaxed);
        self.free.push(self.links, view.slot);
    }

    /// Reads a region by its raw handle.
    pub fn view(&self, raw: u64) -> Result<View, Status> {
        let handle = Handle::parse(raw, self.kind).ok_or(Status::Invalid)?;
        let r = self.slots.get(handle.index() as usize).ok_or(Status::Invalid)?;
        let word = (u64::from(handle.generation()) << 32) | OPEN;
        if r.word.load(Ordering::Acquire) != word {
            return Err(Status::Stale);
        }
        let view = View {
            slot: handle.index(),
            generation: handle.generation(),
            base: r.base.load(Ordering::Relaxed),
            len: r.len.load(Ordering::Relaxed),
            peer: r.peer.load(Ordering::Relaxed),
        };
        crate::sync::fence(Ordering::Acquire);
        if r.word.load(Ordering::Relaxed) != word {
            return Err(Status::Stale);
        }
        Ok(view)
    }

    /// True while the region in `slot` is open and of `generation`.
    pub fn is_open(&self, slot: u32, generation: u32) -> bool {
        self.slots
            .get(slot as usize)
            .is_some_and(|r| r.word.load(Ordering::Acquire) == (u64::from(generation) << 32) | OPEN)
    }

    /// The key of the remote region in `slot`, which an active transfer keeps in place.
    pub fn key(&self, slot: u32) -> RemoteKey {
        let Some(r) = self.slots.get(slot as usize) else { return RemoteKey::default() };
        let target = r.target.load(Ordering::Relaxed);
        RemoteKey {
            slot: (target >> 32) as u32,
            generation: target as u32,
            base: r.base.load(Ordering::Relaxed),
            len: r.len.load(Ordering::Relaxed),
        }
    }

    /// Calls `f` with the handle of every open region.
    pub fn each(&self, mut f: impl FnMut(Handle)) {
        for (i, r) in self.slots.iter().enumerate() {
            let word = r.word.load(Ordering::Acquire);
            if word & OPEN != 0 {
                f(Handle::new(self.kind, i as u32, (word >> 32) as u32));
            }
        }
    }
}

impl crate::nic::Keys for Regions<'_> {
    fn remote(&self, index: u32) -> RemoteKey {
        self.key(index)
    }
}
