//! Descriptor tables, and prepared transfers: the calls that may take memory from the pool.

use core::cell::RefCell;
use core::num::NonZeroU32;
use core::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::error::{Error, Result};
use super::pool::{self, copied, List, Pool};
use crate::engine::peer::SELF;
use crate::engine::region::{Regions as RegionTable, View};
use crate::engine::slot::{Body, RegionRef};
use crate::handle::{Handle, Kind};
use crate::status::Status;
use crate::table::{
    build_indexed, build_ops, Desc, Direction, Full, Known, Listed, Op, OpSink, PrepareError,
    RegionView, Regions, Shape, Side, Stride, Strided, Summary, Table, Wanted,
};

/// A table's own copy of what it was made of.
pub(super) struct TableData {
    pool: Arc<Pool>,
    form: Form,
}

enum Form {
    Flat { descs: (NonNull<Desc>, usize), even: bool },
    Strided { parts: (NonNull<Stride>, usize), ends: (NonNull<u64>, usize), shape: Shape },
}

// SAFETY: I1: the pointers are this table's own pool memory, which nobody writes after it was made.
unsafe impl Send for TableData {}
// SAFETY: I1: as above.
unsafe impl Sync for TableData {}

impl TableData {
    fn flat(pool: &Arc<Pool>, descs: &[Desc]) -> core::result::Result<TableData, Full> {
        let (at, len) = copied(pool, descs)?;
        let even = matches!(Table::flat(descs), Table::Even(_));
        Ok(TableData { pool: pool.clone(), form: Form::Flat { descs: (at, len), even } })
    }

    fn strided(pool: &Arc<Pool>, given: &[Stride]) -> Result<TableData> {
        let parts = copied(pool, given).map_err(full)?;
        let ends = copied(pool, &vec![0u64; given.len()]).map_err(|e| {
            // SAFETY: I1: made just now, given back once.
            unsafe { pool::free(pool, parts.0, parts.1) };
            full(e)
        })?;
        let mut data = TableData {
            pool: pool.clone(),
            form: Form::Strided { parts, ends, shape: Shape::default() },
        };
        // SAFETY: I1: this table's own list, which nobody else has seen yet.
        let slots = unsafe { core::slice::from_raw_parts_mut(ends.0.as_ptr(), ends.1) };
        let shape = Shape::of(given, slots)
            .map_err(|e| Error::new(e.status(), format!("strided table: {e}")))?;
        data.form = Form::Strided { parts, ends, shape };
        Ok(data)
    }

    fn table(&self) -> Table<'_> {
        // SAFETY: I1: this table's own lists, constant until it is dropped.
        unsafe {
            match self.form {
                Form::Flat { descs: (at, len), even } => {
                    let descs = core::slice::from_raw_parts(at.as_ptr(), len);
                    if even {
                        Table::Even(descs)
                    } else {
                        Table::Flat(descs)
                    }
                }
                Form::Strided { parts, ends, shape } => Table::Strided(Strided::new(
                    core::slice::from_raw_parts(parts.0.as_ptr(), parts.1),
                    core::slice::from_raw_parts(ends.0.as_ptr(), ends.1),
                    shape,
                )),
            }
        }
    }
}

impl Drop for TableData {
    fn drop(&mut self) {
        // SAFETY: I1: this table's own lists, given back once.
        unsafe {
            match self.form {
                Form::Flat { descs: (at, len), .. } => pool::free(&self.pool, at, len),
                Form::Strided { parts, ends, .. } => {
                    pool::free(&self.pool, parts.0, parts.1);
                    pool::free(&self.pool, ends.0, ends.1);
                }
            }
        }
    }
}

fn full(e: Full) -> Error {
    let text = format!("{} are used up; the limit is {}", e.what, e.limit);
    Error::new(
        e.status,
        format!("{text}: raise max_bytes (KVRAIL_MAX_BYTES), or release transfers or tables"),
    )
}

/// The tables of an engine.
pub(super) struct Tables {
    pool: Arc<Pool>,
    max: u32,
    slots: Mutex<Vec<(u32, Option<Arc<TableData>>)>>,
}

impl Tables {
    pub(super) fn new(pool: Arc<Pool>, max: u32) -> Tables {
        Tables { pool, max, slots: Mutex::new(Vec::new()) }
    }

    fn add(&self, data: TableData) -> Result<Handle> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let free = slots.iter().position(|(_, t)| t.is_none());
        let index = match free {
            Some(i) => i,
            None if slots.len() < self.max as usize => {
                slots.push((1, None));
                slots.len() - 1
            }
            None => {
                let text = format!("all {} tables are in use: raise max_tables", self.max);
                return Err(Error::new(Status::Capacity, text));
            }
        };
        slots[index].1 = Some(Arc::new(data));
        Ok(Handle::new(Kind::Table, index as u32, slots[index].0))
    }

    pub(super) fn create(&self, descs: &[Desc]) -> Result<Handle> {
        self.add(TableData::flat(&self.pool, descs).map_err(full)?)
    }

    pub(super) fn create_strided(&self, parts: &[Stride]) -> Result<Handle> {
        self.add(TableData::strided(&self.pool, parts)?)
    }

    pub(super) fn destroy(&self, raw: u64) -> Result<()> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = Tables::slot(&mut slots, raw)?;
        slot.0 = slot.0.wrapping_add(1).max(1);
        let gone = slot.1.take();
        drop(slots);
        drop(gone);
        Ok(())
    }

    fn slot(
        slots: &mut [(u32, Option<Arc<TableData>>)],
        raw: u64,
    ) -> Result<&mut (u32, Option<Arc<TableData>>)> {
        let handle = Handle::parse(raw, Kind::Table).ok_or_else(|| {
            Error::new(Status::Invalid, format!("{raw:#x} is not a table handle"))
        })?;
        slots
            .get_mut(handle.index() as usize)
            .filter(|s| s.0 == handle.generation() && s.1.is_some())
            .ok_or_else(|| {
                Error::new(Status::Stale, format!("table {raw:#x} was destroyed: make a new one"))
            })
    }

    /// Both tables of a transfer.
    fn both(&self, local: u64, remote: u64) -> Result<(Arc<TableData>, Arc<TableData>)> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let mut get = |raw| {
            let found = Tables::slot(&mut slots, raw)?.1.clone();
            found.ok_or_else(|| Error::new(Status::Stale, format!("table {raw:#x} was destroyed")))
        };
        Ok((get(local)?, get(remote)?))
    }

    pub(super) fn used(&self) -> u32 {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.iter().filter(|(_, t)| t.is_some()).count() as u32
    }
}

/// What one prepare has seen of the regions. Kept from one to the next for its memory only.
#[derive(Default)]
struct Met {
    /// By side and slot, as many as a power of two; vacant where the region was not met.
    known: [Vec<Known>; 2],
    /// All that were met.
    regions: Vec<RegionRef>,
}

thread_local! {
    static MET: RefCell<Met> = RefCell::new(Met::default());
}

/// Looks up regions for one prepare, and notes which it met.
struct Lookup<'a, 'm> {
    local: &'a RegionTable<'m>,
    remote: &'a RegionTable<'m>,
    peer: u32,
    seams: bool,
    met: &'a mut Met,
}

impl Regions for Lookup<'_, '_> {
    #[inline]
    fn known(&self, side: Side) -> &[Known] {
        &self.met.known[usize::from(side == Side::Remote)]
    }

    fn meet(&mut self, side: Side, raw: u64) -> Option<Known> {
        let view = self.look_up(side, raw)?;
        let (slot, generation, remote) = (view.slot, view.generation, side == Side::Remote);
        if remote && view.peer != self.peer {
            return None;
        }
        let all = &mut self.met.known[usize::from(remote)];
        if slot as usize >= all.len() {
            // Two at least: no handle is the number of a vacant place then (see `Known::vacant`).
            let places = (slot as usize + 1).next_power_of_two().max(2);
            all.extend((all.len()..places).map(Known::vacant));
        }
        let known = Known::of(raw, &view);
        all[slot as usize] = known;
        self.seams |= known.has_seams();
        self.met.regions.push(RegionRef { slot, generation, remote });
        Some(known)
    }

    #[inline]
    fn has_seams(&self) -> bool {
        self.seams
    }

    fn look_up(&self, side: Side, raw: u64) -> Option<RegionView> {
        let table = if side == Side::Remote { self.remote } else { self.local };
        let View { slot, generation, base, len, peer, keys } = table.view(raw).ok()?;
        Some(RegionView { slot, generation, base, len, peer, shift: keys.shift })
    }
}

impl Lookup<'_, '_> {
    /// Refuses device memory: within an engine, and to a process of this host without rails, the
    /// processor copies, at the regions' addresses.
    fn all_on_host(&self) -> Result<()> {
        let device = |r: &&RegionRef| {
            let table = if r.remote { self.remote } else { self.local };
            table.mem(r.slot) != 0
        };
        let Some(r) = self.met.regions.iter().find(device) else { return Ok(()) };
        let (side, slot) = (if r.remote { "remote" } else { "local" }, r.slot);
        let why = if self.peer == SELF {
            "a transfer of an engine to itself moves host memory only: register a second engine, \
             or copy on the device"
        } else {
            "the peer is a process of this host without RDMA rails, to and from which the \
             processor copies host memory only: give it an RDMA NIC (transport=verbs says why it \
             has none), or let the transfer bounce in host memory (kv_buffer_device=cpu)"
        };
        let text = format!("the {side} region in slot {slot} is device memory; {why}");
        Err(Error::new(Status::Unsupported, text))
    }
}

impl Drop for Lookup<'_, '_> {
    /// A region may be another one at the next prepare, or this thread's next prepare another
    /// engine's.
    fn drop(&mut self) {
        for r in self.met.regions.drain(..) {
            let slot = r.slot as usize;
            self.met.known[usize::from(r.remote)][slot] = Known::vacant(slot);
        }
    }
}

impl OpSink for List<'_, Op> {
    #[inline]
    fn push(&mut self, op: Op) -> core::result::Result<(), Full> {
        List::push(self, op)
    }

    fn room(&self) -> usize {
        List::room(self)
    }

    #[inline]
    fn extend(&mut self, most: usize, op: impl FnMut(usize) -> Option<Op>) -> usize {
        List::extend(self, most, op)
    }

    fn last(&mut self, n: usize) -> &mut [Op] {
        List::last(self, n)
    }

    fn shorten(&mut self, n: usize) {
        List::shorten(self, n);
    }
}

/// What prepare needs of an engine.
pub(super) struct Preparer<'a, 'm> {
    pub(super) pool: &'a Pool,
    pub(super) tables: &'a Tables,
    pub(super) local: &'a RegionTable<'m>,
    pub(super) remote: &'a RegionTable<'m>,
    pub(super) slice_bytes: NonZeroU32,
    /// The processor copies to and from the peer.
    pub(super) copies: bool,
}

/// The peer of a transfer: slot and generation.
pub(super) type PeerRef = (u32, u32);

impl Preparer<'_, '_> {
    pub(super) fn indexed(
        &self,
        direction: Direction,
        peer: PeerRef,
        local: (u64, &[u32]),
        remote: (u64, &[u32]),
    ) -> Result<Body> {
        let (l, r) = self.tables.both(local.0, remote.0)?;
        let room = local.1.len();
        self.body(direction, peer, room, |wanted, lookup, sink| {
            build_indexed((l.table(), local.1), (r.table(), remote.1), wanted, lookup, sink)
        })
    }

    pub(super) fn listed(
        &self,
        direction: Direction,
        peer: PeerRef,
        local: &[Desc],
        remote: &[Desc],
    ) -> Result<Body> {
        self.body(direction, peer, local.len(), |wanted, lookup, sink| {
            build_ops(Listed(local), Listed(remote), wanted, lookup, sink)
        })
    }

    fn body(
        &self,
        direction: Direction,
        peer: PeerRef,
        pairs: usize,
        build: impl FnOnce(
            Wanted,
            &mut Lookup<'_, '_>,
            &mut List<'_, Op>,
        ) -> core::result::Result<Summary, PrepareError>,
    ) -> Result<Body> {
        MET.with_borrow_mut(|met| {
            let mut ops = List::new(self.pool, pairs).map_err(full)?;
            let wanted = Wanted { peer: peer.0, op_bytes: self.slice_bytes };
            let (local, remote) = (self.local, self.remote);
            let mut lookup = Lookup { local, remote, peer: peer.0, seams: false, met };
            let summary = build(wanted, &mut lookup, &mut ops)
                .map_err(|e| Error::new(e.status, e.to_string()))?;
            if peer.0 == SELF || self.copies {
                lookup.all_on_host()?;
            }
            if summary.ops >= u64::from(u32::MAX) {
                let text = format!("{} work requests; a transfer has at most 2^32-2", summary.ops);
                let text = format!("{text}: split it, or raise KVRAIL_SLICE_BYTES");
                return Err(Error::new(Status::Capacity, text));
            }
            let (ops, n_ops) = ops.into_parts().map_err(full)?;
            let regions = copied(self.pool, &lookup.met.regions).map_err(|e| {
                // SAFETY: I1: made just now, given back once.
                unsafe { pool::free(self.pool, ops, n_ops) };
                full(e)
            })?;
            let body = Body {
                ops: ops.as_ptr(),
                n_ops: n_ops as u32,
                regions: regions.0.as_ptr(),
                n_regions: regions.1 as u32,
                direction,
                peer: peer.0,
                peer_generation: peer.1,
                bytes: summary.bytes,
                descriptors: pairs as u64,
            };
            Ok(body)
        })
    }
}

/// Gives a body's lists back to the pool.
///
/// # Safety
/// The body came from a [`Preparer`] of this pool and its transfer was released (I3).
pub(super) unsafe fn free_body(pool: &Pool, body: &Body) {
    let (ops, regions) = (NonNull::new(body.ops.cast_mut()), NonNull::new(body.regions.cast_mut()));
    if let (Some(ops), Some(regions)) = (ops, regions) {
        // SAFETY: I1: by the caller's promise these are the lists that `body` made.
        unsafe { pool::free(pool, ops, body.n_ops as usize) };
        // SAFETY: I1: as above.
        unsafe { pool::free(pool, regions, body.n_regions as usize) };
    }
}
