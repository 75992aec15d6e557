//! The region tables: memory registered here, and memory of peers.

use crate::engine::stack::{IndexStack, NONE};
use crate::handle::{Handle, Kind};
use crate::nic::RemoteKey;
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::table::NO_SEAMS;

const OPEN: u64 = 1;
/// In [`Region::shape`].
const FLUSH: u64 = 1 << 32;

/// The keys of a region: one for each (rail, piece), rail by rail. A region is cut into pieces of
/// `1 << shift` bytes from its first byte on, the same on every rail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyList {
    /// The keys, in the pool; they stay there until the region is freed.
    pub at: *const u32,
    /// Rails (of a local region: lanes; with `flush` twice as many, lkeys and then rkeys).
    pub rails: u16,
    /// Base-2 logarithm of a piece's bytes.
    pub shift: u8,
    /// Kind of the region's memory; 0: host memory, which this process or its owner reaches at the
    /// region's addresses. Any other is for NICs only, by these keys.
    pub mem: u8,
    /// True for a local region where what a NIC has completed may still be on its way: a READ into
    /// it ends with a READ out of it by the same NIC, for which there are the rkeys.
    pub flush: bool,
}

impl KeyList {
    /// No keys, no seams, host memory.
    pub const EMPTY: KeyList = KeyList {
        at: core::ptr::NonNull::dangling().as_ptr(),
        rails: 0,
        shift: NO_SEAMS,
        mem: 0,
        flush: false,
    };

    /// Pieces of a region of `len` bytes.
    pub const fn pieces(&self, len: u64) -> u64 {
        match len {
            0 => 1,
            _ => ((len - 1) >> self.shift) + 1,
        }
    }

    fn shape(&self) -> u64 {
        let flush = if self.flush { FLUSH } else { 0 };
        flush | u64::from(self.mem) << 24 | u64::from(self.rails) << 8 | u64::from(self.shift)
    }
}

/// One region slot. Its fields are atomics only so that a reader with a stale handle reads
/// *something*; the generation word, checked before and after, says whether it is the region that
/// was meant.
///
/// 64 bytes, aligned so: a work request needs one line of it, and finds it by a shift.
#[derive(Debug)]
#[repr(align(64))]
pub struct Region {
    /// `generation:32 | open:1`.
    word: AtomicU64,
    base: AtomicU64,
    len: AtomicU64,
    /// Remote: slot at the target (high half) and its generation there (low half).
    target: AtomicU64,
    /// Remote: peer slot.
    peer: AtomicU32,
    /// Address of the keys.
    keys: AtomicU64,
    /// `flush:1 | mem:8 | rails:16 | shift:8`.
    shape: AtomicU64,
    /// Rails, if there is one key for each: no piece to look for.
    plain: AtomicU32,
}

impl Region {
    fn keys(&self) -> KeyList {
        let shape = self.shape.load(Ordering::Relaxed);
        KeyList {
            at: self.keys.load(Ordering::Relaxed) as usize as *const u32,
            rails: (shape >> 8) as u16,
            shift: shape as u8,
            mem: (shape >> 24) as u8,
            flush: shape & FLUSH != 0,
        }
    }
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
    /// Its keys.
    pub keys: KeyList,
}

// SAFETY: I3: the keys are plain memory of the pool, constant while the region is in its table.
unsafe impl Send for View {}

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
            keys: AtomicU64::new(0),
            shape: AtomicU64::new(KeyList::EMPTY.shape()),
            plain: AtomicU32::new(0),
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

    /// Opens a region without keys in a free slot. `None`: the table is full.
    pub fn open(&self, base: u64, len: u64, peer: u32, target: (u32, u32)) -> Option<Handle> {
        // SAFETY: I3: no rails, so nothing is ever read there.
        unsafe { self.open_with(base, len, peer, target, KeyList::EMPTY) }
    }

    /// Opens a region in a free slot. `None`: the table is full.
    ///
    /// # Safety
    /// `keys` points to `rails * pieces(len)` keys that stay as they are until the region was freed
    /// ([`Regions::free`]) (I3).
    pub unsafe fn open_with(
        &self,
        base: u64,
        len: u64,
        peer: u32,
        target: (u32, u32),
        keys: KeyList,
    ) -> Option<Handle> {
        let slot = self.free.pop(self.links)?;
        let r = &self.slots[slot as usize];
        let generation = (r.word.load(Ordering::Relaxed) >> 32) as u32;
        r.base.store(base, Ordering::Relaxed);
        r.len.store(len, Ordering::Relaxed);
        r.peer.store(peer, Ordering::Relaxed);
        r.keys.store(keys.at as usize as u64, Ordering::Relaxed);
        r.shape.store(keys.shape(), Ordering::Relaxed);
        let plain = if keys.pieces(len) == 1 { keys.rails } else { 0 };
        r.plain.store(plain.into(), Ordering::Relaxed);
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
            keys: r.keys(),
        };
        crate::sync::fence(Ordering::Acquire);
        if r.word.load(Ordering::Relaxed) != word {
            return Err(Status::Stale);
        }
        Ok(view)
    }

    /// Kind of the memory of the region in `slot` ([`KeyList::mem`]).
    pub fn mem(&self, slot: u32) -> u8 {
        self.slots.get(slot as usize).map_or(0, Region::mem)
    }

    /// True while the region in `slot` is open and of `generation`.
    pub fn is_open(&self, slot: u32, generation: u32) -> bool {
        self.slots
            .get(slot as usize)
            .is_some_and(|r| r.word.load(Ordering::Acquire) == (u64::from(generation) << 32) | OPEN)
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

impl Region {
    /// Kind of its memory ([`KeyList::mem`]).
    fn mem(&self) -> u8 {
        (self.shape.load(Ordering::Relaxed) >> 24) as u8
    }

    /// What names a remote region to its owner.
    fn remote_key(&self) -> RemoteKey {
        let target = self.target.load(Ordering::Relaxed);
        RemoteKey {
            slot: (target >> 32) as u32,
            generation: target as u32,
            base: self.base.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
        }
    }

    /// The key on `rail`, if there is only one. The caller holds a transfer that uses the region.
    #[inline]
    fn whole_key(&self, rail: u32) -> Option<u32> {
        if rail >= self.plain.load(Ordering::Relaxed) {
            return None;
        }
        let keys = self.keys.load(Ordering::Relaxed) as usize as *const u32;
        // SAFETY: I3: there are as many keys as rails; an active transfer keeps the region, and
        // with it the list, in place.
        Some(unsafe { keys.add(rail as usize).read() })
    }

    /// The key of the byte at `addr` on `rail`. The caller holds a transfer that uses the region.
    fn key_at(&self, rail: u32, addr: u64) -> Option<u32> {
        let keys = self.keys();
        let len = self.len.load(Ordering::Relaxed);
        let offset = addr.wrapping_sub(self.base.load(Ordering::Relaxed));
        if rail >= u32::from(keys.rails) || offset >= len {
            return None;
        }
        let index = u64::from(rail) * keys.pieces(len) + (offset >> keys.shift);
        // SAFETY: I3: inside the list by the checks above; an active transfer keeps the region, and
        // with it the list, in place.
        Some(unsafe { keys.at.add(index as usize).read() })
    }

    /// Of a device's memory, whose keys are lkeys and then rkeys. Its own function: inlined, it
    /// costs every gathered descriptor of host memory some instructions.
    #[inline(never)]
    fn own_rkey(&self, lane: u32, addr: u64) -> Option<u32> {
        let keys = self.keys();
        keys.flush.then(|| self.key_at(u32::from(keys.rails / 2) + lane, addr)).flatten()
    }
}

/// Both tables, for a port that builds work requests of an active transfer. Slices, so that a loop
/// that writes work requests has them in registers.
#[derive(Clone, Copy, Debug)]
pub struct BothRegions<'m> {
    local: &'m [Region],
    remote: &'m [Region],
}

impl<'m> BothRegions<'m> {
    /// Memory registered here, and memory of peers.
    pub const fn new(local: &Regions<'m>, remote: &Regions<'m>) -> BothRegions<'m> {
        BothRegions { local: local.slots, remote: remote.slots }
    }
}

impl crate::nic::Keys for BothRegions<'_> {
    fn remote(&self, index: u32) -> RemoteKey {
        self.remote.get(index as usize).map_or_else(RemoteKey::default, Region::remote_key)
    }

    fn on_host(&self, index: u32) -> bool {
        self.local.get(index as usize).is_some_and(|r| r.mem() == 0)
    }

    #[inline]
    fn whole_lkey(&self, index: u32, lane: u32) -> Option<u32> {
        self.local.get(index as usize)?.whole_key(lane)
    }

    #[inline]
    fn whole_rkey(&self, index: u32, rail: u32) -> Option<u32> {
        self.remote.get(index as usize)?.whole_key(rail)
    }

    fn lkey(&self, index: u32, lane: u32, addr: u64) -> Option<u32> {
        self.local.get(index as usize)?.key_at(lane, addr)
    }

    fn rkey(&self, index: u32, rail: u32, addr: u64) -> Option<u32> {
        self.remote.get(index as usize)?.key_at(rail, addr)
    }

    fn lands_late(&self, index: u32) -> bool {
        let region = self.local.get(index as usize);
        region.is_some_and(|r| r.shape.load(Ordering::Relaxed) & FLUSH != 0)
    }

    fn own_rkey(&self, index: u32, lane: u32, addr: u64) -> Option<u32> {
        self.local.get(index as usize)?.own_rkey(lane, addr)
    }
}
