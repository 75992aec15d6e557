//! Index pairs become ops: checked, merged where both sides go on, cut where an op would be too
//! long.
//!
//! One pass, nothing kept but the run being built, and nothing divided unless a run is longer than
//! an op may be. What most lists are full of, pairs that go on nowhere and pairs that all go on,
//! have loops of their own (`plain`, `goes_on`), which leave all that is not of their kind to the
//! loop that knows every rule (`run`).

use super::error::{PrepareError, Reason, Side};
use super::op::{Op, MAX_PAIRS};
use super::regions::{Known, RegionView, Regions};
use super::run::{finish, Run, Summary, Wanted};
use super::sink::OpSink;
use super::source::{Even, Indexed, Piece, Source, StridedIndexed, Table};

/// Pairs of two tables, by two index lists. As [`build_ops`], which it calls.
pub fn build_indexed<V: Regions, S: OpSink>(
    (local, local_indices): (Table<'_>, &[u32]),
    (remote, remote_indices): (Table<'_>, &[u32]),
    wanted: Wanted,
    regions: &mut V,
    sink: &mut S,
) -> Result<Summary, PrepareError> {
    let flat = |table, indices| Indexed { table, indices };
    match (local, remote) {
        (Table::Even(l), Table::Even(r)) => {
            let (l, r) = (Even::new(l, local_indices), Even::new(r, remote_indices));
            build_ops(l, r, wanted, regions, sink)
        }
        (Table::Flat(l) | Table::Even(l), Table::Flat(r) | Table::Even(r)) => {
            let (l, r) = (flat(l, local_indices), flat(r, remote_indices));
            build_ops(l, r, wanted, regions, sink)
        }
        (Table::Flat(l) | Table::Even(l), Table::Strided(r)) => {
            let (l, r) = (flat(l, local_indices), StridedIndexed::new(r, remote_indices));
            build_ops(l, r, wanted, regions, sink)
        }
        (Table::Strided(l), Table::Flat(r) | Table::Even(r)) => {
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
    local: L,
    remote: R,
    wanted: Wanted,
    regions: &mut V,
    sink: &mut S,
) -> Result<Summary, PrepareError> {
    let pairs = check_lists(local.len(), remote.len())?;
    let here = (Known::vacant(0), Known::vacant(0));
    let mut b = Builder { local, remote, pairs, wanted, here, summary: Summary::default() };
    let (mut i, mut block) = (0, BLOCK);
    while i < pairs {
        i = b.run(i, regions, sink)?;
        // Most lists have one pair an op, in regions that change seldom, or else with every pair.
        let (n, goes_on) = b.spread(i, sink);
        i += n;
        if n < LEAST && !goes_on && i < pairs && !b.begins_run(i) {
            let n = b.mix(i, block, regions, sink);
            // What is not taken was made for nothing.
            block = if n < block { (2 * n).max(LEAST) } else { (2 * block).min(BLOCK) };
            i += n;
        }
    }
    Ok(b.summary)
}

/// Pairs that [`Builder::mix`] takes at a time, at most and at least.
const BLOCK: usize = 128;
const LEAST: usize = 8;

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
fn bad_pair<L: Source, R: Source>(local: &L, remote: &R, i: usize) -> PrepareError {
    let (mut local, mut remote) = (local.clone(), remote.clone());
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

/// The pass over the pairs.
struct Builder<L, R> {
    local: L,
    remote: R,
    pairs: usize,
    wanted: Wanted,
    /// The regions of the last run.
    here: (Known, Known),
    summary: Summary,
}

impl<L: Source, R: Source> Builder<L, R> {
    /// Makes ops of pair `i` and of all that go on where it ends, by the book: whatever is wrong
    /// with a pair is found here. Returns the pair behind.
    #[inline(never)]
    fn run<V: Regions, S: OpSink>(
        &mut self,
        mut i: usize,
        regions: &mut V,
        sink: &mut S,
    ) -> Result<usize, PrepareError> {
        let Some((l, r)) = pair_at(&mut self.local, &mut self.remote, i) else {
            return Err(bad_pair(&self.local, &self.remote, i));
        };
        self.enter(i, &l, &r, regions)?;
        let mut run = Run { local: l.addr, remote: r.addr, len: l.len, pair: i as u32 };
        let mut alone = 0;
        loop {
            i += 1;
            if i >= self.pairs {
                break;
            }
            let Some((l, r)) = pair_at(&mut self.local, &mut self.remote, i) else {
                return Err(bad_pair(&self.local, &self.remote, i));
            };
            let same = l.region == self.here.0.raw && r.region == self.here.1.raw;
            if !same || !run.meets(&l, &r) {
                break;
            }
            if !self.here.0.holds(l.addr, l.len) || !self.here.1.holds(r.addr, r.len) {
                return Err(self.outside(i, &l, &r));
            }
            run.len += l.len;
            alone += 1;
            if alone == PROVEN {
                alone = 0;
                while let Some(n) = self.goes_on(i + 1, &run, l.len) {
                    run.len += n as u64 * l.len;
                    i += n;
                }
            }
        }
        finish(&run, &self.here, self.wanted, &self.local, &mut self.summary, sink)?;
        Ok(i)
    }

    /// Makes sure of the regions of pair `i`, and that it lies inside of them.
    fn enter<V: Regions>(
        &mut self,
        i: usize,
        l: &Piece,
        r: &Piece,
        regions: &mut V,
    ) -> Result<(), PrepareError> {
        for (side, here, raw) in
            [(Side::Local, &mut self.here.0, l.region), (Side::Remote, &mut self.here.1, r.region)]
        {
            let known = Known::find(regions.known(side), raw).copied();
            *here = match known.or_else(|| regions.meet(side, raw)) {
                Some(known) => known,
                None => return Err(no_region(i, side, raw, self.wanted.peer, regions)),
            };
        }
        if !self.here.0.holds(l.addr, l.len) || !self.here.1.holds(r.addr, r.len) {
            return Err(self.outside(i, l, r));
        }
        Ok(())
    }

    /// How many pairs from `i` on go on where the run ends, `len` bytes each, as far as both lists
    /// have their descriptors side by side. `None`: look at them one by one.
    #[inline]
    fn goes_on(&self, i: usize, run: &Run, len: u64) -> Option<usize> {
        let (locals, remotes) = (self.local.ahead(i), self.remote.ahead(i));
        let (mut local, mut remote) = run.end();
        let (here, there) = (self.here.0.raw, self.here.1.raw);
        let mut n = 0;
        for (l, r) in locals.iter().zip(remotes) {
            let goes_on = l.addr == local && r.addr == remote && l.len == len && r.len == len;
            if !goes_on || l.region != here || r.region != there {
                break;
            }
            (local, remote) = (local.wrapping_add(len), remote.wrapping_add(len));
            n += 1;
        }
        // Looked at for all of them: the pair that is outside is found one by one.
        let total = (n as u64).checked_mul(len)?.checked_add(run.len)?;
        let inside = self.here.0.holds(run.local, total) && self.here.1.holds(run.remote, total);
        (n > 0 && inside).then_some(n)
    }

    /// Makes one op of each pair from `i` on, as long as there is nothing special about them: they
    /// are in the same regions as the last run, as long as the first one, need no cut, and do not
    /// go on where the last one ended. Returns how many, and whether the next pair goes on where
    /// the last op ended; that pair is for [`Builder::run`].
    fn spread<S: OpSink>(&mut self, i: usize, sink: &mut S) -> (usize, bool) {
        let Some((len, most)) = self.plain_len(i, self.pairs, sink) else { return (0, false) };
        let lists = (self.local.part(i, most), self.remote.part(i, most));
        let n = plain(lists, i as u32, len, &self.here, sink);
        self.settle(i, n, len, sink)
    }

    /// Whether the pair behind `i` goes on where that one ends.
    fn begins_run(&mut self, i: usize) -> bool {
        let Some((l, r)) = pair_at(&mut self.local, &mut self.remote, i) else { return false };
        let run = Run { local: l.addr, remote: r.addr, len: l.len, pair: i as u32 };
        let next = (self.local.get(i + 1), self.remote.get(i + 1));
        let (Some(a), Some(b)) = next else { return false };
        (a.region, b.region) == (l.region, r.region) && run.meets(&a, &b)
    }

    /// As [`Builder::spread`], for pairs in any regions, a block of them.
    fn mix<V: Regions, S: OpSink>(
        &mut self,
        i: usize,
        block: usize,
        regions: &mut V,
        sink: &mut S,
    ) -> usize {
        let Some((len, most)) = self.plain_len(i, block, sink) else { return 0 };
        let mut half = 0;
        while half < most {
            let list = self.local.part(i + half, most - half);
            let with = (regions.known(Side::Local), regions.has_seams());
            half += locals(list, (i + half) as u32, len, with, sink);
            let rest = self.local.part(i + half, most - half);
            if half == most || !meets(rest, Side::Local, regions) {
                break;
            }
        }
        let (mut n, mut joined) = (0, false);
        while n < half && !joined {
            let list = self.remote.part(i + n, half - n);
            let with = (regions.known(Side::Remote), regions.has_seams());
            (n, joined) = remotes(list, len, with, sink.last(half), n);
            let rest = self.remote.part(i + n, half - n);
            if n == half || joined || !meets(rest, Side::Remote, regions) {
                break;
            }
        }
        sink.shorten(half - n);
        self.settle(i, n, len, sink).0
    }

    /// The length of pair `i`, and how many pairs of that length, at most `most`, may be made ops
    /// one by one. `None`: not even one.
    fn plain_len<S: OpSink>(&mut self, i: usize, most: usize, sink: &S) -> Option<(u64, usize)> {
        let most = most.min(self.pairs - i).min(sink.room());
        let len = self.local.get(i)?.len;
        let bytes = (most as u64).checked_mul(len)?;
        self.summary.bytes.checked_add(bytes)?;
        let fits = len > 0 && len <= u64::from(self.wanted.op_bytes.get());
        fits.then_some((len, most))
    }

    /// Counts `n` ops that were made of pairs from `i` on. The pair behind may go on where the last
    /// one ends, so that they are one run: then that one is taken back. Returns how many are left,
    /// and whether one was taken back.
    fn settle<S: OpSink>(
        &mut self,
        i: usize,
        mut n: usize,
        len: u64,
        sink: &mut S,
    ) -> (usize, bool) {
        let end = sink.last(n.min(1)).first().map(Op::end);
        let next = (self.local.get(i + n), self.remote.get(i + n));
        let goes_on = matches!(next, (Some(l), Some(r)) if Some((l.addr, r.addr)) == end);
        if goes_on {
            sink.shorten(1);
            n -= 1;
        }
        self.summary.ops += n as u64;
        self.summary.bytes += n as u64 * len;
        (n, goes_on)
    }

    #[cold]
    #[inline(never)]
    fn outside(&self, i: usize, l: &Piece, r: &Piece) -> PrepareError {
        let (side, p, known) = match self.here.0.holds(l.addr, l.len) {
            false => (Side::Local, l, &self.here.0),
            true => (Side::Remote, r, &self.here.1),
        };
        let (base, region_len) = (known.base, known.len);
        let reason = Reason::Outside { addr: p.addr, len: p.len, base, region_len };
        PrepareError::new(i as u64, Some(side), reason)
    }
}

/// The loop of [`Builder::spread`]. Returns how many.
///
/// A function of its own, with as little around the loop as can be: the loop alone needs more
/// registers than there are.
#[inline(never)]
fn plain<L: Source, R: Source, S: OpSink>(
    (mut local, mut remote): (L, R),
    first: u32,
    len: u64,
    (here, there): &(Known, Known),
    sink: &mut S,
) -> usize {
    let pairs = local.len();
    let seams = here.has_seams() || there.has_seams();
    let mut end = (0, 0);
    if remote.len() != pairs {
        return 0;
    }
    sink.extend(pairs, |k| {
        let (l, r) = (local.get(k)?, remote.get(k)?);
        if l.len != len || r.len != len || l.region != here.raw || r.region != there.raw {
            return None;
        }
        if !here.holds(l.addr, len) || !there.holds(r.addr, len) {
            return None;
        }
        if seams && here.before_seam(l.addr).min(there.before_seam(r.addr)) < len {
            return None;
        }
        if l.addr == end.0 && r.addr == end.1 {
            return None;
        }
        end = (l.addr.wrapping_add(len), r.addr.wrapping_add(len));
        Some(Op {
            local: l.addr,
            remote: r.addr,
            len: len as u32,
            local_region: here.slot,
            remote_region: there.slot,
            tag: Op::tagged(first + k as u32, false),
        })
    })
}

/// The local half of [`Builder::mix`]: ops that lack their remote side. Returns how many.
///
/// With a region looked up for each piece, one loop over both sides would run out of registers: in
/// halves a pair costs 20 instructions less.
#[inline(never)]
fn locals<L: Source, S: OpSink>(
    mut list: L,
    first: u32,
    len: u64,
    (known, seams): (&[Known], bool),
    sink: &mut S,
) -> usize {
    sink.extend(list.len(), |k| {
        let p = list.get(k)?;
        let local_region = whole(&p, len, known, seams)?;
        let tag = Op::tagged(first + k as u32, false);
        let (local, len) = (p.addr, len as u32);
        Some(Op { local, remote: 0, len, local_region, remote_region: 0, tag })
    })
}

/// The other half, for `ops[from..]`. Returns how many of all ops are whole now, and whether the
/// next one goes on where the last one of those ends.
#[inline(never)]
fn remotes<R: Source>(
    mut list: R,
    len: u64,
    (known, seams): (&[Known], bool),
    ops: &mut [Op],
    from: usize,
) -> (usize, bool) {
    if list.len() != ops.len().saturating_sub(from) {
        return (from, false);
    }
    let mut end = from.checked_sub(1).and_then(|k| ops.get(k)).map_or(0, |op| op.end().1);
    for (k, n) in (from..ops.len()).enumerate() {
        let piece = list.get(k).and_then(|p| Some((p.addr, whole(&p, len, known, seams)?)));
        let Some((remote, slot)) = piece else { return (n, false) };
        if remote == end && touches(ops, n) {
            return (n, true);
        }
        end = remote.wrapping_add(len);
        let Some(op) = ops.get_mut(n) else { return (n, false) };
        op.remote = remote;
        op.remote_region = slot;
    }
    (ops.len(), false)
}

/// Whether op `n` begins, on the local side, where the one before it ends.
#[cold]
fn touches(ops: &[Op], n: usize) -> bool {
    let before = n.checked_sub(1).and_then(|k| ops.get(k));
    before.zip(ops.get(n)).is_some_and(|(a, b)| a.end().0 == b.local)
}

/// The slot of a piece's region, if that is known and the piece has `len` bytes and needs no cut.
#[inline]
fn whole(p: &Piece, len: u64, known: &[Known], seams: bool) -> Option<u32> {
    let known = Known::find(known, p.region).filter(|k| p.len == len && k.holds(p.addr, len))?;
    let cut = seams && known.before_seam(p.addr) < len;
    (!cut).then_some(known.slot)
}

/// Looks up the regions of a list's pieces, up to the first that is wrong or that takes the place
/// of the first one's. False: the first one's region is known, or there is none.
#[inline(never)]
fn meets<L: Source, V: Regions>(mut list: L, side: Side, regions: &mut V) -> bool {
    let Some(first) = list.get(0) else { return false };
    let knows = |regions: &V, raw| Known::find(regions.known(side), raw).is_some();
    if knows(regions, first.region) || regions.meet(side, first.region).is_none() {
        return false;
    }
    for k in 1..list.len() {
        let Some(p) = list.get(k) else { break };
        if !knows(regions, p.region) && regions.meet(side, p.region).is_none() {
            break;
        }
        if !knows(regions, first.region) {
            return regions.meet(side, first.region).is_some();
        }
    }
    true
}

/// Pairs that must go on one by one before many are tried at once.
const PROVEN: u32 = 8;

#[cold]
#[inline(never)]
fn no_region<V: Regions>(
    i: usize,
    side: Side,
    region: u64,
    wanted: u32,
    regions: &V,
) -> PrepareError {
    let reason = match regions.look_up(side, region) {
        Some(RegionView { peer, .. }) if side == Side::Remote && peer != wanted => {
            Reason::WrongPeer { region, owner: peer, wanted }
        }
        _ => Reason::UnknownRegion { region },
    };
    PrepareError::new(i as u64, Some(side), reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Status;

    #[test]
    fn more_pairs_than_an_op_can_name_are_refused() {
        let most = MAX_PAIRS as usize;
        assert_eq!(check_lists(most, most), Ok(most));
        let e = check_lists(most + 1, most + 1).unwrap_err();
        assert_eq!((e.status, e.pair), (Status::Capacity, PrepareError::NO_PAIR));
        assert_eq!(e.reason, Reason::TooManyPairs { pairs: 1 << 30 });
    }
}
