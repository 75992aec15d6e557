//! The plain reference for `build_ops`: every byte of every pair, written down one by one, in
//! 128-bit arithmetic.
//!
//! Driven by `tests/table_ops.rs` (seeded and proptest) and by the fuzz target `ops`: [`fuzz_ops`]
//! is its whole body.
#![allow(dead_code, reason = "the fuzz target uses fuzz_ops only")]

use core::num::NonZeroU32;
use std::collections::BTreeSet;

use kvrail::table::{
    build_indexed, build_ops, Desc, Full, Known, Listed, Op, OpSink, OutOfRange, PrepareError,
    Reason, RegionView, Regions, Shape, Side, Stride, Strided, Summary, Table, TableError, Wanted,
    NO_SEAMS,
};

/// A region and the raw handle that names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub raw: u64,
    pub view: RegionView,
}

#[derive(Clone, Debug)]
pub(crate) enum Form {
    Flat(Vec<Desc>),
    Strided(Vec<Stride>),
}

/// One side of a transfer. No indices: the flat list itself, in order.
#[derive(Clone, Debug)]
pub(crate) struct List {
    pub regions: Vec<Region>,
    pub form: Form,
    pub indices: Vec<u32>,
}

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub local: List,
    pub remote: List,
    /// Take the flat lists as they are, without indices.
    pub listed: bool,
    pub wanted: Wanted,
}

/// What came of a case, for tests that want to see all kinds.
#[derive(Debug)]
pub(crate) enum Outcome {
    Table,
    Refused(Reason),
    Built(Summary, Vec<Op>),
}

/// Where one byte goes: (local slot, address, remote slot, address, pair).
type Byte = (u32, u64, u32, u64, u32);
type Refusal = (u64, Option<Side>, Reason);

/// The regions of a case, and those that were asked for.
pub(crate) struct Asked<'a> {
    case: &'a Case,
    /// Too few places for all, so that some must be looked up again.
    known: [[Known; 2]; 2],
    found: Vec<(Side, Known)>,
}

impl<'a> Asked<'a> {
    pub(crate) fn of(case: &'a Case) -> Asked<'a> {
        let known = [[Known::vacant(0), Known::vacant(1)]; 2];
        Asked { case, known, found: Vec::new() }
    }
}

impl Regions for Asked<'_> {
    fn known(&self, side: Side) -> &[Known] {
        &self.known[usize::from(side == Side::Remote)]
    }

    fn meet(&mut self, side: Side, raw: u64) -> Option<Known> {
        let view = self.look_up(side, raw)?;
        if side == Side::Remote && view.peer != self.case.wanted.peer {
            return None;
        }
        let known = Known::of(raw, &view);
        let places = &mut self.known[usize::from(side == Side::Remote)];
        places[Known::place(raw, places.len())] = known;
        self.found.push((side, known));
        Some(known)
    }

    fn has_seams(&self) -> bool {
        self.found.iter().any(|(_, known)| known.has_seams())
    }

    fn look_up(&self, side: Side, raw: u64) -> Option<RegionView> {
        let list = if side == Side::Local { &self.case.local } else { &self.case.remote };
        find(&list.regions, raw)
    }
}

fn find(regions: &[Region], raw: u64) -> Option<RegionView> {
    regions.iter().find(|r| r.raw == raw).map(|r| r.view)
}

/// Keeps all ops, and has room for a few at a time only.
#[derive(Default, Debug)]
pub(crate) struct Log {
    pub ops: Vec<Op>,
}

/// Ops that a [`Log`] takes at once.
const ROOM: usize = 7;

impl OpSink for Log {
    fn push(&mut self, op: Op) -> Result<(), Full> {
        self.ops.push(op);
        Ok(())
    }
    fn room(&self) -> usize {
        ROOM
    }
    fn extend(&mut self, most: usize, op: impl FnMut(usize) -> Option<Op>) -> usize {
        assert!(most <= ROOM, "{most} ops at once");
        let before = self.ops.len();
        self.ops.extend((0..most).map_while(op));
        self.ops.len() - before
    }
    fn last(&mut self, n: usize) -> &mut [Op] {
        let from = self.ops.len().saturating_sub(n);
        &mut self.ops[from..]
    }
    fn shorten(&mut self, n: usize) {
        self.ops.truncate(self.ops.len() - n);
    }
}

impl List {
    /// The table, expanded. Addresses are 128 bits wide, so none wraps.
    fn expand(&self) -> Vec<(u128, u64, u64)> {
        match &self.form {
            Form::Flat(descs) => {
                descs.iter().map(|d| (u128::from(d.addr), d.len, d.region)).collect()
            }
            Form::Strided(parts) => parts
                .iter()
                .flat_map(|s| {
                    (0..u128::from(s.count))
                        .map(|i| (u128::from(s.base) + i * u128::from(s.stride), s.len, s.region))
                })
                .collect(),
        }
    }

    /// The first part that makes no table, if there is one.
    fn bad_part(&self) -> Option<TableError> {
        let Form::Strided(parts) = &self.form else { return None };
        (0u64..).zip(parts).find_map(|(part, s)| {
            let last =
                u128::from(s.base) + u128::from(s.count.saturating_sub(1)) * u128::from(s.stride);
            if s.count == 0 {
                None
            } else if s.len == 0 {
                Some(TableError::ZeroLength { part })
            } else if last + u128::from(s.len) > 1 << 64 {
                Some(TableError::Wraps { part, stride: *s })
            } else {
                None
            }
        })
    }
}

/// The whole answer, the slow way.
fn reference(case: &Case) -> Result<Vec<Byte>, Refusal> {
    let lists = [(Side::Local, &case.local), (Side::Remote, &case.remote)];
    let tables = lists.map(|(_, list)| list.expand());
    let order = [0, 1].map(|s| {
        if case.listed {
            (0..tables[s].len() as u32).collect()
        } else {
            lists[s].1.indices.clone()
        }
    });
    let [local, remote] = [0, 1].map(|s| order[s].len() as u64);
    if local != remote {
        return Err((u64::MAX, None, Reason::ListLengths { local, remote }));
    }
    let mut bytes = Vec::new();
    for pair in 0..local {
        let mut piece = [(0, 0, 0); 2];
        for (s, (side, _)) in lists.iter().enumerate() {
            let (index, table_len) = (order[s][pair as usize], tables[s].len() as u64);
            let index = u64::from(index);
            piece[s] = *tables[s].get(index as usize).ok_or((
                pair,
                Some(*side),
                Reason::Index(OutOfRange { index, table_len }),
            ))?;
        }
        let [l, r] = piece;
        if l.1 != r.1 {
            return Err((pair, None, Reason::PairLengths { local: l.1, remote: r.1 }));
        }
        if l.1 == 0 {
            return Err((pair, None, Reason::ZeroLength));
        }
        let stale = |side, region| (pair, Some(side), Reason::UnknownRegion { region });
        let lr = find(&case.local.regions, l.2).ok_or(stale(Side::Local, l.2))?;
        let rr = find(&case.remote.regions, r.2).ok_or(stale(Side::Remote, r.2))?;
        let (owner, wanted) = (rr.peer, case.wanted.peer);
        if owner != wanted {
            let reason = Reason::WrongPeer { region: r.2, owner, wanted };
            return Err((pair, Some(Side::Remote), reason));
        }
        for ((addr, len, _), view, side) in [(l, lr, Side::Local), (r, rr, Side::Remote)] {
            let end = (u128::from(view.base) + u128::from(view.len)).min(1 << 64);
            if addr < u128::from(view.base) || addr + u128::from(len) > end {
                let region_len = (end - u128::from(view.base)).min(u128::from(u64::MAX)) as u64;
                let reason =
                    Reason::Outside { addr: addr as u64, len, base: view.base, region_len };
                return Err((pair, Some(side), reason));
            }
        }
        for k in 0..u128::from(l.1) {
            bytes.push((lr.slot, (l.0 + k) as u64, rr.slot, (r.0 + k) as u64, pair as u32));
        }
    }
    Ok(bytes)
}

/// The piece between two seams that an address is in.
fn piece(list: &List, slot: u32, addr: u64) -> u64 {
    let view = list.regions.iter().find(|r| r.view.slot == slot).expect("a region").view;
    (addr - view.base) >> view.shift
}

/// Lengths of the stretches of bytes that go on by one on both sides, in the same pieces of the
/// same regions.
fn stretches(case: &Case, bytes: &[Byte]) -> Vec<u64> {
    let place = |b: &Byte| (piece(&case.local, b.0, b.1), piece(&case.remote, b.2, b.3));
    let mut lengths = Vec::new();
    let mut last: Option<Byte> = None;
    for &b in bytes {
        let goes_on = last.is_some_and(|a| {
            (a.0, a.2) == (b.0, b.2)
                && a.1.checked_add(1) == Some(b.1)
                && a.3.checked_add(1) == Some(b.3)
                && place(&a) == place(&b)
        });
        match lengths.last_mut() {
            Some(n) if goes_on => *n += 1,
            _ => lengths.push(1),
        }
        last = Some(b);
    }
    lengths
}

/// The regions that the bytes need.
fn regions_used(bytes: &[Byte]) -> BTreeSet<(bool, u32)> {
    bytes.iter().flat_map(|b| [(false, b.0), (true, b.2)]).collect()
}

/// Runs the code under test: `None` when a table is refused.
fn build(
    case: &Case,
    asked: &mut Asked<'_>,
    log: &mut Log,
) -> Option<Result<Summary, PrepareError>> {
    if case.listed {
        let (Form::Flat(l), Form::Flat(r)) = (&case.local.form, &case.remote.form) else {
            panic!("a list without indices is flat");
        };
        return Some(build_ops(Listed(l), Listed(r), case.wanted, asked, log));
    }
    let mut ends = [Vec::new(), Vec::new()];
    let mut shapes = [Shape::default(); 2];
    for (s, list) in [&case.local, &case.remote].into_iter().enumerate() {
        if let Form::Strided(parts) = &list.form {
            ends[s] = vec![0; parts.len()];
            match Shape::of(parts, &mut ends[s]) {
                Ok(shape) => shapes[s] = shape,
                Err(e) => {
                    assert_eq!(Some(e), list.bad_part());
                    return None;
                }
            }
        }
        assert_eq!(list.bad_part(), None);
    }
    let table = |s: usize| {
        let list: &List = [&case.local, &case.remote][s];
        match &list.form {
            Form::Flat(descs) => Table::flat(descs),
            Form::Strided(parts) => Table::Strided(Strided::new(parts, &ends[s], shapes[s])),
        }
    };
    let (l, r) = (table(0), table(1));
    let (li, ri) = (&case.local.indices, &case.remote.indices);
    Some(build_indexed((l, li), (r, ri), case.wanted, asked, log))
}

/// Compares the code under test with the reference.
pub(crate) fn check(case: &Case) -> Outcome {
    let mut log = Log::default();
    let mut asked = Asked::of(case);
    let Some(got) = build(case, &mut asked, &mut log) else { return Outcome::Table };
    let bytes = match reference(case) {
        Err((pair, side, reason)) => {
            let want = PrepareError { status: reason.status(), pair, side, reason };
            assert_eq!(got, Err(want), "another refusal than the reference");
            assert!(!want.to_string().is_empty());
            return Outcome::Refused(reason);
        }
        Ok(bytes) => bytes,
    };
    let summary = got.expect("refused what the reference takes");
    let limit = u64::from(case.wanted.op_bytes.get());
    let mut moved: Vec<Byte> = Vec::new();
    for op in &log.ops {
        assert!(op.len > 0, "an empty op");
        assert!(u64::from(op.len) <= limit, "op of {} over {limit}", op.len);
        let last = u64::from(op.len) - 1;
        for (list, slot, addr) in
            [(&case.local, op.local_region, op.local), (&case.remote, op.remote_region, op.remote)]
        {
            assert_eq!(piece(list, slot, addr), piece(list, slot, addr + last), "over a seam");
        }
        // A pair is checked for the op's first byte only; the others take it from the reference.
        let at = moved.len();
        assert_eq!(Some(op.first_pair()), bytes.get(at).map(|b| b.4), "op names another pair");
        let before = at.checked_sub(1).and_then(|before| bytes.get(before)).map(|b| b.4);
        assert_eq!(op.is_inside(), before == Some(op.first_pair()), "cut inside of a pair or not");
        for k in 0..u64::from(op.len) {
            let pair = bytes.get(at + k as usize).map_or(u32::MAX, |b| b.4);
            moved.push((op.local_region, op.local + k, op.remote_region, op.remote + k, pair));
        }
    }
    assert_eq!(moved, bytes, "bytes go elsewhere");
    let fewest: u64 = stretches(case, &bytes).iter().map(|n| n.div_ceil(limit)).sum();
    let want = Summary { ops: fewest, bytes: bytes.len() as u64 };
    assert_eq!(summary, want);
    assert_eq!(log.ops.len() as u64, fewest);
    let slot = |(side, known): &(Side, Known)| {
        let list = if *side == Side::Local { &case.local } else { &case.remote };
        let region = list.regions.iter().find(|r| r.raw == known.raw()).expect("a region");
        (*side == Side::Remote, region.view.slot)
    };
    let asked: BTreeSet<_> = asked.found.iter().map(slot).collect();
    assert_eq!(asked, regions_used(&bytes), "regions found that no op needs, or the reverse");
    Outcome::Built(summary, log.ops)
}

/// Bytes of the fuzzer, one by one; 0 when there are no more.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u64 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        u64::from(first)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.byte() % n
    }

    /// True once in `n`; never at the end of the input.
    fn rarely(&mut self, n: u64) -> bool {
        self.below(n) == n - 1
    }

    fn regions(&mut self, kind: u64, peer: u32) -> Vec<Region> {
        (0..1 + self.below(3)).map(|k| self.region(kind, k, peer)).collect()
    }

    fn region(&mut self, kind: u64, k: u64, peer: u32) -> Region {
        let len = 200 + 2 * self.byte();
        let base = match self.below(6) {
            0 => 0,
            1 => u64::MAX - len,     // the last address is the first one outside
            2 => u64::MAX - len + 1, // ends at 2^64 exactly
            3 => u64::MAX - 300,     // may say more than there is
            _ => 0x10_0000 + 0x200 * k,
        };
        let peer = if self.rarely(24) { peer + 1 } else { peer };
        let shift = if self.below(3) == 0 { 2 + self.below(7) as u8 } else { NO_SEAMS };
        let slot = 10 * kind as u32 + k as u32;
        let view = RegionView { slot, generation: 7, base, len, peer, shift };
        Region { raw: kind << 56 | 7 << 24 | k, view }
    }

    fn raw(&mut self, regions: &[Region]) -> (u64, RegionView) {
        let r = regions[self.below(regions.len() as u64) as usize];
        match self.below(48) {
            46 => (r.raw ^ 1 << 24, r.view),
            47 => (0, r.view),
            _ => (r.raw, r.view),
        }
    }

    fn flat(&mut self, regions: &[Region], lens: &[u64]) -> Vec<Desc> {
        let count = if self.rarely(32) { 0 } else { 1 + self.below(24) };
        let (mut region, mut view) = self.raw(regions);
        let mut addr = view.base;
        (0..count as usize)
            .map(|k| {
                let mut len = lens[k % lens.len()];
                match self.below(8) {
                    0 => addr = view.base.wrapping_add(self.below(100)),
                    1 => {
                        (region, view) = self.raw(regions);
                        addr = view.base.wrapping_add(self.below(100));
                    }
                    2 if self.rarely(8) => addr = addr.wrapping_sub(self.byte()),
                    3 if self.rarely(8) => len = [0, 1, u64::MAX, 1 << 63][self.below(4) as usize],
                    _ => {}
                }
                let desc = Desc { addr, len, dev: self.below(2), region };
                addr = addr.wrapping_add(len);
                desc
            })
            .collect()
    }

    fn strided(&mut self, regions: &[Region], lens: &[u64]) -> Vec<Stride> {
        let even = self.below(2) == 0;
        let each = 1 + self.below(6);
        (0..(1 + self.below(5)) % 6)
            .map(|_| {
                let (region, view) = self.raw(regions);
                let len = if self.rarely(32) { self.below(2) } else { lens[0] };
                let stride = match self.below(6) {
                    0 => 0,
                    1 => len.saturating_sub(1),
                    2 => len + self.below(9),
                    3 if self.rarely(16) => 1 << 62,
                    _ => len,
                };
                let count = if even { each } else { self.below(6) };
                Stride { base: view.base.wrapping_add(self.below(60)), len, stride, count, region }
            })
            .collect()
    }

    fn indices(&mut self, table: u64) -> Vec<u32> {
        let mut index = 0;
        (0..self.below(40))
            .map(|_| {
                match self.below(8) {
                    0 => index = self.below(table.max(1)),
                    1 => index = index.saturating_sub(1),
                    2 => {}
                    3 if self.rarely(24) => index = table + self.below(2),
                    _ => index = (index + 1) % table.max(1),
                }
                index as u32
            })
            .collect()
    }

    fn list(&mut self, kind: u64, peer: u32, lens: &[u64]) -> List {
        let regions = self.regions(kind, peer);
        let form = if self.below(2) == 0 {
            Form::Flat(self.flat(&regions, lens))
        } else {
            Form::Strided(self.strided(&regions, lens))
        };
        List { regions, form, indices: Vec::new() }
    }

    fn case(&mut self) -> Case {
        let wide = [1, 2, 3, 4, 5, 7, 8, 16, 17, 64, 100, 4096];
        let op_bytes = wide[self.below(wide.len() as u64) as usize];
        let wanted = Wanted { peer: 3, op_bytes: NonZeroU32::new(op_bytes).expect("above 0") };
        let mut lens = [1 + self.below(16); 4];
        if self.below(2) == 0 {
            lens[1..].fill_with(|| if self.rarely(32) { 0 } else { 1 + self.below(24) });
        }
        let (local_peer, peer) = (self.byte() as u32, 3);
        let mut local = self.list(1, local_peer, &lens);
        let mut remote = self.list(2, peer, &lens);
        let sizes = [&local, &remote].map(|l| match &l.form {
            Form::Flat(d) => d.len() as u64,
            Form::Strided(s) => s.iter().map(|s| s.count).sum(),
        });
        let most = if self.rarely(8) { sizes[0] } else { sizes[0].min(sizes[1]) };
        local.indices = self.indices(most);
        remote.indices = local.indices.clone();
        match self.below(16) {
            0 => remote.indices = self.indices(sizes[1]),
            1 => remote.indices.reverse(),
            _ => {}
        }
        let flat = [&local, &remote].iter().all(|l| matches!(l.form, Form::Flat(_)));
        let listed = flat && self.below(2) == 0;
        if listed && !self.rarely(8) {
            let (Form::Flat(l), Form::Flat(r)) = (&mut local.form, &mut remote.form) else {
                unreachable!("both are flat");
            };
            let both = l.len().min(r.len());
            l.truncate(both);
            r.truncate(both);
        }
        Case { local, remote, listed, wanted }
    }
}

/// Makes regions, tables and index lists of any bytes.
pub(crate) fn decode(data: &[u8]) -> Case {
    Input(data).case()
}

/// The body of fuzz target `ops`. Panics when the code under test and the reference differ.
pub(crate) fn fuzz_ops(data: &[u8]) {
    check(&decode(data));
}
