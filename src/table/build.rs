//! Index pairs become ops: checked, merged where both sides go on, cut where an op would be too
//! long.
//!
//! One pass, nothing kept but the run being built, and nothing divided unless a run is longer than
//! an op may be.

use core::num::NonZeroU32;

use super::error::{Full, PrepareError, Reason, Side};
use super::source::{Indexed, Piece, Source, StridedIndexed, Table};
use super::Op;
use crate::status::Status;

/// What prepare needs of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RegionView {
    /// Its slot; goes into the op.
    pub slot: u32,
    /// Its generation; goes to [`OpSink::region`].
    pub generation: u32,
    /// First byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Slot of the peer that owns it. Not read for a local region.
    pub peer: u32,
}

/// Where prepare looks up regions. Asked once per change of region, not once per pair.
pub trait Regions {
    /// The local region of a raw handle; `None` when the handle is stale or never was one.
    fn local(&self, raw: u64) -> Option<RegionView>;
    /// The remote region of a raw handle; `None` when the handle is stale or never was one.
    fn remote(&self, raw: u64) -> Option<RegionView>;
}

/// Where ops go, in order. After an error it holds the ops of an unfinished list: throw them away.
pub trait OpSink {
    /// Takes one op.
    fn push(&mut self, op: Op) -> Result<(), Full>;

    /// The ops from here on use this region on this side. Lists that go to and fro name a region
    /// again each time.
    fn region(&mut self, side: Side, slot: u32, generation: u32) -> Result<(), Full> {
        let _ = (side, slot, generation);
        Ok(())
    }
}

/// A sink of fixed room.
#[derive(Debug)]
pub struct SliceSink<'a> {
    room: &'a mut [Op],
    len: usize,
}

impl<'a> SliceSink<'a> {
    /// Fills `room` from its start.
    pub fn new(room: &'a mut [Op]) -> SliceSink<'a> {
        SliceSink { room, len: 0 }
    }

    /// The ops taken so far.
    pub fn ops(&self) -> &[Op] {
        self.room.get(..self.len).unwrap_or(&[])
    }
}

impl OpSink for SliceSink<'_> {
    #[inline]
    fn push(&mut self, op: Op) -> Result<(), Full> {
        let Some(place) = self.room.get_mut(self.len) else {
            let limit = self.room.len() as u64;
            return Err(Full { status: Status::Capacity, what: "ops", limit });
        };
        *place = op;
        self.len += 1;
        Ok(())
    }
}

/// What a transfer asks of its ops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// Slot of the peer that every remote region must belong to.
    pub peer: u32,
    /// Longest op in bytes: the smaller of `slice_bytes` and the `max_msg_sz` of both ends.
    pub op_bytes: NonZeroU32,
}

/// What became of the lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Summary {
    /// Ops given to the sink.
    pub ops: u64,
    /// Bytes of all pairs.
    pub bytes: u64,
    /// Stretches of pairs with the same (local, remote) region pair.
    pub region_runs: u64,
}

/// Pairs of two tables, by two index lists. As [`build_ops`], which it calls.
pub fn build_indexed<V: Regions, S: OpSink>(
    (local, local_indices): (Table<'_>, &[u32]),
    (remote, remote_indices): (Table<'_>, &[u32]),
    wanted: Wanted,
    regions: &V,
    sink: &mut S,
) -> Result<Summary, PrepareError> {
    let flat = |table, indices| Indexed { table, indices };
    match (local, remote) {
        (Table::Flat(l), Table::Flat(r)) => {
            let (l, r) = (flat(l, local_indices), flat(r, remote_indices));
            build_ops(l, r, wanted, regions, sink)
        }
        (Table::Flat(l), Table::Strided(r)) => {
            let (l, r) = (flat(l, local_indices), StridedIndexed::new(r, remote_indices));
            build_ops(l, r, wanted, regions, sink)
        }
        (Table::Strided(l), Table::Flat(r)) => {
            let (l, r) = (StridedIndexed::new(l, local_indices), flat(r, remote_indices));
            build_ops(l, r, wanted, regions, sink)
        }
        (Table::Strided(l), Table::Strided(r)) => {
            let l = StridedIndexed::new(l, local_indices);
            build_ops(l, StridedIndexed::new(r, remote_indices), wanted, regions, sink)
        }
    }
}

/// Turns the pairs (local i, remote i) into ops, or names the first bad pair and the first rule it
/// breaks, in this order: index, equal lengths, length above 0, region known, right peer, inside
/// the region; local before remote.
///
/// Neighbours in the list merge when the second goes on where the first ends, on both sides, in the
/// same regions. The sum of the ops is the sum of the pairs, byte for byte and in order; no op is
/// empty or longer than [`Wanted::op_bytes`]; there are as few as these rules allow, and those of
/// one cut run are about equally long.
pub fn build_ops<L: Source, R: Source, V: Regions, S: OpSink>(
    mut local: L,
    mut remote: R,
    wanted: Wanted,
    regions: &V,
    sink: &mut S,
) -> Result<Summary, PrepareError> {
    let pairs = check_lists(local.len(), remote.len())?;
    let mut maker = Maker {
        wanted,
        sink,
        local: Known::none(&mut local),
        remote: Known::none(&mut remote),
        run: Run::default(),
        summary: Summary::default(),
    };
    for pair in 0..pairs {
        let i = pair as usize;
        let Some(l) = local.get(i) else { return Err(no_piece(&local, Side::Local, i)) };
        let Some(r) = remote.get(i) else { return Err(no_piece(&remote, Side::Remote, i)) };
        if l.len != r.len || l.len == 0 {
            return Err(bad_lengths(pair, l.len, r.len));
        }
        if l.region != maker.local.raw || r.region != maker.remote.raw {
            maker.finish(&local)?;
            maker.change(regions, pair, l.region, r.region)?;
        }
        if !maker.local.view.holds(&l) {
            return Err(outside(pair, Side::Local, &l, &maker.local));
        }
        if !maker.remote.view.holds(&r) {
            return Err(outside(pair, Side::Remote, &r, &maker.remote));
        }
        if !maker.run.extend(&l, &r) {
            maker.finish(&local)?;
            maker.run = Run { local: l.addr, remote: r.addr, len: l.len, pair };
        }
    }
    maker.finish(&local)?;
    Ok(maker.summary)
}

/// A region that was looked up last.
#[derive(Clone, Copy)]
struct Known {
    raw: u64,
    view: RegionView,
}

impl Known {
    /// None yet: a handle that the first piece does not have, so that it is looked up.
    fn none<T: Source>(list: &mut T) -> Known {
        let raw = list.get(0).map_or(0, |p| !p.region);
        Known { raw, view: RegionView::default() }
    }

    fn of(raw: u64, mut view: RegionView) -> Known {
        // No region goes on behind the largest address, whatever its length says: nothing may wrap.
        if view.base != 0 {
            view.len = view.len.min(view.base.wrapping_neg());
        }
        Known { raw, view }
    }
}

impl RegionView {
    #[inline]
    fn holds(&self, p: &Piece) -> bool {
        let offset = p.addr.wrapping_sub(self.base);
        offset <= self.len && p.len <= self.len - offset
    }
}

/// Pairs that follow each other on both sides. Of 0 bytes before the first pair and after
/// [`Maker::finish`].
#[derive(Clone, Copy, Default)]
struct Run {
    local: u64,
    remote: u64,
    len: u64,
    pair: u32,
}

impl Run {
    /// Takes the next pair in, if it is in the same regions and goes on where this ends.
    #[inline]
    fn extend(&mut self, l: &Piece, r: &Piece) -> bool {
        let follows = l.addr == self.local.wrapping_add(self.len)
            && r.addr == self.remote.wrapping_add(self.len)
            && self.len > 0;
        if follows {
            self.len += l.len;
        }
        follows
    }
}

struct Maker<'s, S: OpSink> {
    wanted: Wanted,
    sink: &'s mut S,
    local: Known,
    remote: Known,
    run: Run,
    summary: Summary,
}

impl<S: OpSink> Maker<'_, S> {
    /// Makes ops of the run. The one place where a run ends up in ops, so a further limit (the
    /// seams of a region that is cut into several MRs) belongs here.
    #[inline]
    fn finish<L: Source>(&mut self, local: &L) -> Result<(), PrepareError> {
        let Run { len, pair, .. } = self.run;
        if len.wrapping_sub(1) >= u64::from(self.wanted.op_bytes.get()) {
            return if len == 0 { Ok(()) } else { self.cut(local.clone()) };
        }
        self.push(0, len as u32, pair)?;
        self.end()
    }

    /// The run is in the sink: counts its bytes.
    #[inline]
    fn end(&mut self) -> Result<(), PrepareError> {
        let Some(bytes) = self.summary.bytes.checked_add(self.run.len) else {
            let pair = u64::from(self.run.pair);
            return Err(PrepareError::new(pair, None, Reason::TooManyBytes));
        };
        self.summary.bytes = bytes;
        self.run.len = 0;
        Ok(())
    }

    #[inline]
    fn push(&mut self, offset: u64, len: u32, pair: u32) -> Result<(), PrepareError> {
        let op = Op {
            local: self.run.local + offset,
            remote: self.run.remote + offset,
            len,
            local_region: self.local.view.slot,
            remote_region: self.remote.view.slot,
            pair,
        };
        self.sink.push(op).map_err(|why| full(pair, None, self.summary.ops, why))?;
        self.summary.ops += 1;
        Ok(())
    }

    /// Cuts a run that is longer than an op may be: into as few ops as possible, all about equally
    /// long, so that there is no tiny tail.
    #[cold]
    #[inline(never)]
    fn cut<L: Source>(&mut self, mut list: L) -> Result<(), PrepareError> {
        let Run { len, mut pair, .. } = self.run;
        let limit = u64::from(self.wanted.op_bytes.get());
        let grain = grain(limit);
        let count = len.div_ceil(limit);
        let grains = len.div_ceil(grain);
        let (each, one_more) = (grains / count, grains % count);
        let mut done = 0;
        // The first pair that reaches beyond `done`, and where it ends; lengths are equal, so one
        // side is enough.
        let mut length = |pair: u32| list.get(pair as usize).map_or(len, |p| p.len);
        let mut pair_end = length(pair);
        for k in 0..count {
            while pair_end <= done {
                pair += 1;
                pair_end = pair_end.saturating_add(length(pair));
            }
            let size = ((each + u64::from(k < one_more)) * grain).min(len - done);
            self.push(done, size as u32, pair)?;
            done += size;
        }
        self.end()
    }

    /// Looks up the regions of `pair`, which has others than the pair before it.
    #[cold]
    #[inline(never)]
    fn change<V: Regions>(
        &mut self,
        regions: &V,
        pair: u32,
        local: u64,
        remote: u64,
    ) -> Result<(), PrepareError> {
        let unknown = |side, region| {
            PrepareError::new(u64::from(pair), Some(side), Reason::UnknownRegion { region })
        };
        if local != self.local.raw {
            let view = regions.local(local).ok_or_else(|| unknown(Side::Local, local))?;
            self.local = Known::of(local, view);
            self.tell(pair, Side::Local, view)?;
        }
        if remote != self.remote.raw {
            let view = regions.remote(remote).ok_or_else(|| unknown(Side::Remote, remote))?;
            let RegionView { peer: owner, .. } = view;
            let wanted = self.wanted.peer;
            if owner != wanted {
                let reason = Reason::WrongPeer { region: remote, owner, wanted };
                return Err(PrepareError::new(u64::from(pair), Some(Side::Remote), reason));
            }
            self.remote = Known::of(remote, view);
            self.tell(pair, Side::Remote, view)?;
        }
        self.summary.region_runs += 1;
        Ok(())
    }

    fn tell(&mut self, pair: u32, side: Side, view: RegionView) -> Result<(), PrepareError> {
        self.sink
            .region(side, view.slot, view.generation)
            .map_err(|why| full(pair, Some(side), self.summary.ops, why))
    }
}

/// What op lengths are a multiple of, so that ops of an aligned run are aligned: at most a page,
/// and small enough beside the limit that ops stay about equal.
fn grain(limit: u64) -> u64 {
    let mut grain = 4096;
    while grain > 1 && (limit % grain != 0 || limit / grain < 16) {
        grain /= 2;
    }
    grain
}

fn check_lists(local: usize, remote: usize) -> Result<u32, PrepareError> {
    let (local, remote) = (local as u64, remote as u64);
    let whole = |reason| PrepareError::new(PrepareError::NO_PAIR, None, reason);
    if local != remote {
        return Err(whole(Reason::ListLengths { local, remote }));
    }
    u32::try_from(local).map_err(|_| whole(Reason::TooManyPairs { pairs: local }))
}

#[cold]
fn no_piece<T: Source>(list: &T, side: Side, i: usize) -> PrepareError {
    PrepareError::new(i as u64, Some(side), Reason::Index(list.refused(i)))
}

#[cold]
fn bad_lengths(pair: u32, local: u64, remote: u64) -> PrepareError {
    let reason =
        if local == remote { Reason::ZeroLength } else { Reason::PairLengths { local, remote } };
    PrepareError::new(u64::from(pair), None, reason)
}

#[cold]
fn outside(pair: u32, side: Side, p: &Piece, known: &Known) -> PrepareError {
    let RegionView { base, len: region_len, .. } = known.view;
    let reason = Reason::Outside { addr: p.addr, len: p.len, base, region_len };
    PrepareError::new(u64::from(pair), Some(side), reason)
}

#[cold]
fn full(pair: u32, side: Option<Side>, ops: u64, why: Full) -> PrepareError {
    PrepareError::new(u64::from(pair), side, Reason::Full { ops, why })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_beyond_64_bits_are_refused_not_wrapped() {
        let op = bytemuck::Zeroable::zeroed();
        let mut room = [op; 8];
        let mut sink = SliceSink::new(&mut room);
        let known = Known::of(1, RegionView { len: 100, ..RegionView::default() });
        let mut maker = Maker {
            wanted: Wanted { peer: 0, op_bytes: NonZeroU32::MIN.saturating_add(9) },
            sink: &mut sink,
            local: known,
            remote: known,
            run: Run { len: 10, pair: 3, ..Run::default() },
            // As after 2^64 - 21 bytes, which no test can wait for.
            summary: Summary { bytes: u64::MAX - 20, ..Summary::default() },
        };
        let list = super::super::Listed(&[]);
        assert_eq!(maker.finish(&list), Ok(()));
        for len in [11, 20] {
            maker.run.len = len;
            let e = maker.finish(&list).unwrap_err();
            assert_eq!((e.status, e.pair, e.reason), (Status::Invalid, 3, Reason::TooManyBytes));
        }
    }
}
