//! Index pairs become ops: checked, merged where both sides go on, cut where an op would be too
//! long.
//!
//! One pass, nothing kept but the run being built, and nothing divided unless a run is longer than
//! an op may be.

use core::num::NonZeroU32;

use super::error::{Full, PrepareError, Reason, Side};
use super::op::{Op, MAX_PAIRS};
use super::source::{Indexed, Piece, Source, StridedIndexed, Table};
use crate::status::Status;

/// What prepare needs of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
    /// Base-2 logarithm of the bytes from one seam to the next, counted from `base`; 63: no seams.
    /// A seam is where one memory region of the NICs ends and the next begins.
    pub shift: u8,
}

impl Default for RegionView {
    fn default() -> RegionView {
        RegionView { slot: 0, generation: 0, base: 0, len: 0, peer: 0, shift: NO_SEAMS }
    }
}

/// The [`RegionView::shift`] of a region without seams.
pub const NO_SEAMS: u8 = 63;

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
    let mut summary = Summary::default();
    let mut here = (Known::default(), Known::default());
    let mut i = 0;
    while i < pairs {
        let Some((l, r)) = pair_at(&mut local, &mut remote, i) else {
            return Err(bad_pair(local, remote, i));
        };
        let handles = (l.region, r.region);
        let first = if i == 0 { None } else { Some(&here) };
        here = enter(first, i, handles, wanted.peer, regions, summary.ops, sink)?;
        summary.region_runs += 1;
        i = stretch(&mut local, &mut remote, (i, l, r), &here, wanted, &mut summary, sink)?;
    }
    Ok(summary)
}

fn check_lists(local: usize, remote: usize) -> Result<usize, PrepareError> {
    let whole = |reason| Err(PrepareError::new(PrepareError::NO_PAIR, None, reason));
    if local != remote {
        return whole(Reason::ListLengths { local: local as u64, remote: remote as u64 });
    }
    if local > MAX_PAIRS as usize {
        return whole(Reason::TooManyPairs { pairs: local as u64 });
    }
    Ok(local)
}

/// Both pieces of a pair, if there are both, equally long and not empty; else [`bad_pair`] says.
#[inline]
fn pair_at<L: Source, R: Source>(
    local: &mut L,
    remote: &mut R,
    i: usize,
) -> Option<(Piece, Piece)> {
    let (l, r) = (local.get(i)?, remote.get(i)?);
    (l.len == r.len && l.len > 0).then_some((l, r))
}

#[cold]
#[inline(never)]
fn bad_pair<L: Source, R: Source>(mut local: L, mut remote: R, i: usize) -> PrepareError {
    let error = |side, reason| PrepareError::new(i as u64, side, reason);
    let Some(l) = local.get(i) else {
        return error(Some(Side::Local), Reason::Index(local.refused(i)));
    };
    let Some(r) = remote.get(i) else {
        return error(Some(Side::Remote), Reason::Index(remote.refused(i)));
    };
    if l.len != r.len {
        return error(None, Reason::PairLengths { local: l.len, remote: r.len });
    }
    error(None, Reason::ZeroLength)
}

/// A region that was looked up.
#[derive(Clone, Copy, Default)]
struct Known {
    raw: u64,
    view: RegionView,
}

impl Known {
    fn of(raw: u64, mut view: RegionView) -> Known {
        // No region goes on behind the largest address, whatever its length says: nothing may wrap.
        if view.base != 0 {
            view.len = view.len.min(view.base.wrapping_neg());
        }
        Known { raw, view }
    }

    /// Bytes from `addr`, which is inside, to the next seam.
    #[inline]
    fn before_seam(&self, addr: u64) -> u64 {
        let piece = 1u64 << self.view.shift;
        piece - (addr.wrapping_sub(self.view.base) & (piece - 1))
    }

    #[inline]
    fn holds(&self, p: &Piece) -> bool {
        let offset = p.addr.wrapping_sub(self.view.base);
        offset <= self.view.len && p.len <= self.view.len - offset
    }
}

/// The regions of a pair: looked up where they differ from the pair before it, and told to the
/// sink.
#[inline(never)]
fn enter<V: Regions, S: OpSink>(
    before: Option<&(Known, Known)>,
    i: usize,
    (l, r): (u64, u64),
    wanted: u32,
    regions: &V,
    ops: u64,
    sink: &mut S,
) -> Result<(Known, Known), PrepareError> {
    let error = |side, reason| PrepareError::new(i as u64, Some(side), reason);
    let unknown = |side, region| error(side, Reason::UnknownRegion { region });
    let mut tell = |side, view: RegionView| {
        sink.region(side, view.slot, view.generation)
            .map_err(|why| error(side, Reason::Full { ops, why }))
    };
    let local = match before {
        Some((known, _)) if known.raw == l => *known,
        _ => {
            let view = regions.local(l).ok_or_else(|| unknown(Side::Local, l))?;
            tell(Side::Local, view)?;
            Known::of(l, view)
        }
    };
    let remote = match before {
        Some((_, known)) if known.raw == r => *known,
        _ => {
            let view = regions.remote(r).ok_or_else(|| unknown(Side::Remote, r))?;
            if view.peer != wanted {
                let reason = Reason::WrongPeer { region: r, owner: view.peer, wanted };
                return Err(error(Side::Remote, reason));
            }
            tell(Side::Remote, view)?;
            Known::of(r, view)
        }
    };
    Ok((local, remote))
}

/// Pairs that follow each other on both sides.
#[derive(Clone, Copy)]
struct Run {
    local: u64,
    remote: u64,
    len: u64,
    pair: u32,
}

impl Run {
    /// The pair goes on where this run ends, on both sides.
    #[inline]
    fn meets(&self, l: &Piece, r: &Piece) -> bool {
        // Cannot meet at 0 by wrapping: a region that has the last address does not have 0.
        l.addr == self.local.wrapping_add(self.len) && r.addr == self.remote.wrapping_add(self.len)
    }

    /// The op of `len` bytes at `offset`.
    #[inline]
    fn op(&self, offset: u64, len: u32, tag: u32, (l, r): &(Known, Known)) -> Op {
        Op {
            local: self.local + offset,
            remote: self.remote + offset,
            len,
            local_region: l.view.slot,
            remote_region: r.view.slot,
            tag,
        }
    }
}

/// Makes ops of all pairs from `i` on that are in the same two regions. Returns the pair behind.
#[inline]
fn stretch<L: Source, R: Source, S: OpSink>(
    local: &mut L,
    remote: &mut R,
    (mut i, mut l, mut r): (usize, Piece, Piece),
    here: &(Known, Known),
    wanted: Wanted,
    summary: &mut Summary,
    sink: &mut S,
) -> Result<usize, PrepareError> {
    let pairs = local.len();
    let mut run = Run { local: l.addr, remote: r.addr, len: 0, pair: i as u32 };
    loop {
        if !here.0.holds(&l) || !here.1.holds(&r) {
            return Err(outside(local.clone(), remote.clone(), i, here));
        }
        if run.meets(&l, &r) {
            run.len += l.len;
        } else {
            finish(&run, here, wanted, local, summary, sink)?;
            run = Run { local: l.addr, remote: r.addr, len: l.len, pair: i as u32 };
        }
        i += 1;
        if i >= pairs {
            break;
        }
        let Some(next) = pair_at(local, remote, i) else {
            return Err(bad_pair(local.clone(), remote.clone(), i));
        };
        (l, r) = next;
        if l.region != here.0.raw || r.region != here.1.raw {
            break;
        }
    }
    finish(&run, here, wanted, local, summary, sink)?;
    Ok(i)
}

/// Makes ops of a run: the one place where a run turns into ops.
#[inline]
fn finish<L: Source, S: OpSink>(
    run: &Run,
    here: &(Known, Known),
    wanted: Wanted,
    list: &L,
    summary: &mut Summary,
    sink: &mut S,
) -> Result<(), PrepareError> {
    let error = |reason| PrepareError::new(u64::from(run.pair), None, reason);
    let whole = u64::from(wanted.op_bytes.get())
        .min(here.0.before_seam(run.local))
        .min(here.1.before_seam(run.remote));
    let ops = if run.len <= whole {
        let op = run.op(0, run.len as u32, run.pair, here);
        sink.push(op).map_err(|why| error(Reason::Full { ops: summary.ops, why }))?;
        1
    } else {
        // Pairs of numbers, not the run itself, whose address would keep it out of registers.
        let (start, extent) = ((run.local, run.remote), (run.len, run.pair));
        cut(start, extent, here, wanted.op_bytes, list.clone(), summary.ops, sink)?
    };
    summary.ops += ops;
    summary.bytes =
        summary.bytes.checked_add(run.len).ok_or_else(|| error(Reason::TooManyBytes))?;
    Ok(())
}

/// Cuts a run at the seams of both sides, and each stretch between them that is longer than an op
/// may be into as few ops as possible, all about equally long, so that there is no tiny tail.
/// Returns how many.
#[cold]
#[inline(never)]
fn cut<L: Source, S: OpSink>(
    (local, remote): (u64, u64),
    (len, first): (u64, u32),
    here: &(Known, Known),
    op_bytes: NonZeroU32,
    mut list: L,
    ops: u64,
    sink: &mut S,
) -> Result<u64, PrepareError> {
    let run = Run { local, remote, len, pair: first };
    let mut pair = first;
    let limit = u64::from(op_bytes.get());
    let grain = grain(limit);
    // Which pair an op starts in: lengths are equal, so one side is enough.
    let mut length = |pair: u32| list.get(pair as usize).map_or(len, |p| p.len);
    let (mut pair_start, mut pair_end) = (0, length(pair));
    let (mut done, mut pushed) = (0, 0);
    while done < len {
        let seam = here.0.before_seam(local + done).min(here.1.before_seam(remote + done));
        let stretch = (len - done).min(seam);
        let end = done + stretch;
        let count = stretch.div_ceil(limit);
        let grains = stretch.div_ceil(grain);
        let (each, one_more) = (grains / count, grains % count);
        for k in 0..count {
            while pair_end <= done {
                pair += 1;
                pair_start = pair_end;
                pair_end = pair_end.saturating_add(length(pair));
            }
            let size = ((each + u64::from(k < one_more)) * grain).min(end - done);
            let tag = Op::tagged(pair, done > pair_start);
            sink.push(run.op(done, size as u32, tag, here)).map_err(|why| {
                PrepareError::new(u64::from(pair), None, Reason::Full { ops: ops + pushed, why })
            })?;
            done += size;
            pushed += 1;
        }
    }
    Ok(pushed)
}

/// What op lengths are a multiple of, so that ops of an aligned run are aligned: at most a page,
/// and small enough beside the limit that ops stay about equal.
fn grain(limit: u64) -> u64 {
    let mut grain = 4096;
    while grain > 1 && (!limit.is_multiple_of(grain) || limit / grain < 16) {
        grain /= 2;
    }
    grain
}

#[cold]
#[inline(never)]
fn outside<L: Source, R: Source>(
    mut local: L,
    mut remote: R,
    i: usize,
    here: &(Known, Known),
) -> PrepareError {
    let beyond = |p: Option<Piece>, known: &Known, side| {
        let p = p.filter(|p| !known.holds(p))?;
        let RegionView { base, len: region_len, .. } = known.view;
        let reason = Reason::Outside { addr: p.addr, len: p.len, base, region_len };
        Some(PrepareError::new(i as u64, Some(side), reason))
    };
    beyond(local.get(i), &here.0, Side::Local)
        .or_else(|| beyond(remote.get(i), &here.1, Side::Remote))
        .unwrap_or_else(|| bad_pair(local, remote, i))
}

#[cfg(test)]
mod tests {
    use super::super::Listed;
    use super::*;

    #[test]
    fn bytes_beyond_64_bits_are_refused_not_wrapped() {
        let op = bytemuck::Zeroable::zeroed();
        let mut room = [op; 8];
        let mut sink = SliceSink::new(&mut room);
        let known = Known::of(1, RegionView { len: 100, ..RegionView::default() });
        let here = (known, known);
        let wanted = Wanted { peer: 0, op_bytes: NonZeroU32::MIN.saturating_add(9) };
        // As after 2^64 - 21 bytes, which no test can wait for.
        let mut summary = Summary { bytes: u64::MAX - 20, ..Summary::default() };
        let mut run = Run { local: 0, remote: 0, len: 10, pair: 3 };
        let list = Listed(&[]);
        assert_eq!(finish(&run, &here, wanted, &list, &mut summary, &mut sink), Ok(()));
        for len in [11, 20] {
            run.len = len;
            let e = finish(&run, &here, wanted, &list, &mut summary, &mut sink).unwrap_err();
            assert_eq!((e.status, e.pair, e.reason), (Status::Invalid, 3, Reason::TooManyBytes));
        }
    }

    #[test]
    fn more_pairs_than_an_op_can_name_are_refused() {
        let most = MAX_PAIRS as usize;
        assert_eq!(check_lists(most, most), Ok(most));
        let e = check_lists(most + 1, most + 1).unwrap_err();
        assert_eq!((e.status, e.pair), (Status::Capacity, PrepareError::NO_PAIR));
        assert_eq!(e.reason, Reason::TooManyPairs { pairs: 1 << 30 });
    }
}
