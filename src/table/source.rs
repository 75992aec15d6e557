//! Where prepare reads descriptors from: a plain list, or index lists into a flat or a strided
//! table.
//!
//! Nothing is expanded: a strided table of six million blocks is its few [`Stride`] parts and one
//! number a part.

use core::fmt;

use super::{Desc, Stride};
use crate::status::Status;

/// What prepare needs of one descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// Raw handle of the region.
    pub region: u64,
}

impl From<&Desc> for Piece {
    #[inline]
    fn from(d: &Desc) -> Piece {
        Piece { addr: d.addr, len: d.len, region: d.region }
    }
}

/// An index that its table does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfRange {
    /// The index seen.
    pub index: u64,
    /// Descriptors in the table: the index must be below it.
    pub table_len: u64,
}

/// An ordered list of pieces, read by position. Reading may move a cursor, never the result. A
/// clone is cheap.
pub trait Source: Clone {
    /// Positions in the list.
    fn len(&self) -> usize;

    /// True for a list without positions.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The piece at position `i`, or `None` when there is none; [`Source::refused`] then says why.
    fn get(&mut self, i: usize) -> Option<Piece>;

    /// `n` positions from `i` on, or as many as there are.
    fn part(&self, i: usize, n: usize) -> Self;

    /// Descriptors at positions `i`, `i + 1`, ... that lie side by side in memory: some of them, or
    /// none where that is not known.
    fn ahead(&self, i: usize) -> &[Desc] {
        let _ = i;
        &[]
    }

    /// Why [`Source::get`] has nothing at `i`. Apart from it, so that the plain path carries no
    /// error.
    fn refused(&self, i: usize) -> OutOfRange;
}

/// A list of descriptors, in order.
#[derive(Clone, Copy, Debug)]
pub struct Listed<'a>(pub &'a [Desc]);

impl Source for Listed<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.0.len()
    }

    #[inline]
    fn get(&mut self, i: usize) -> Option<Piece> {
        self.0.get(i).map(Piece::from)
    }

    #[inline]
    fn part(&self, i: usize, n: usize) -> Self {
        Listed(part(self.0, i, n))
    }

    #[inline]
    fn ahead(&self, i: usize) -> &[Desc] {
        self.0.get(i..).unwrap_or(&[])
    }

    fn refused(&self, i: usize) -> OutOfRange {
        OutOfRange { index: i as u64, table_len: self.0.len() as u64 }
    }
}

/// Indices into a flat table.
#[derive(Clone, Copy, Debug)]
pub struct Indexed<'a> {
    /// The table.
    pub table: &'a [Desc],
    /// Which descriptors, in order; an index may repeat.
    pub indices: &'a [u32],
}

impl Source for Indexed<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.indices.len()
    }

    #[inline]
    fn get(&mut self, i: usize) -> Option<Piece> {
        let index = *self.indices.get(i)?;
        self.table.get(index as usize).map(Piece::from)
    }

    #[inline]
    fn part(&self, i: usize, n: usize) -> Self {
        Indexed { indices: part(self.indices, i, n), ..*self }
    }

    #[inline]
    fn ahead(&self, i: usize) -> &[Desc] {
        let Some(next) = self.indices.get(i..).and_then(|rest| rest.first_chunk::<AHEAD>()) else {
            return &[];
        };
        // Without a way out of the loop, so that several are compared at a time.
        let steps = (0u32..).zip(next).fold(0, |odd, (k, &x)| odd | (x.wrapping_sub(k) ^ next[0]));
        match self.table.get(next[0] as usize..=next[AHEAD - 1] as usize) {
            Some(descs) if steps == 0 => descs,
            _ => &[],
        }
    }

    fn refused(&self, i: usize) -> OutOfRange {
        OutOfRange { index: seen(self.indices, i), table_len: self.table.len() as u64 }
    }
}

/// Indices into an even table: its length and region are read once, not with each descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Even<'a> {
    list: Indexed<'a>,
    len: u64,
    region: u64,
}

impl<'a> Even<'a> {
    pub(super) fn new(table: &'a [Desc], indices: &'a [u32]) -> Even<'a> {
        let (len, region) = table.first().map_or((0, 0), |d| (d.len, d.region));
        Even { list: Indexed { table, indices }, len, region }
    }
}

impl Source for Even<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.list.len()
    }

    #[inline]
    fn get(&mut self, i: usize) -> Option<Piece> {
        let addr = self.list.get(i)?.addr;
        Some(Piece { addr, len: self.len, region: self.region })
    }

    #[inline]
    fn part(&self, i: usize, n: usize) -> Self {
        Even { list: self.list.part(i, n), ..*self }
    }

    #[inline]
    fn ahead(&self, i: usize) -> &[Desc] {
        self.list.ahead(i)
    }

    fn refused(&self, i: usize) -> OutOfRange {
        self.list.refused(i)
    }
}

/// `n` values from `i` on, or as many as there are.
#[inline]
fn part<T>(list: &[T], i: usize, n: usize) -> &[T] {
    let rest = list.get(i..).unwrap_or(&[]);
    rest.get(..n).unwrap_or(rest)
}

/// How many indices are looked at whether they are in a row.
const AHEAD: usize = 32;

/// The index at position `i`, for an error.
fn seen(indices: &[u32], i: usize) -> u64 {
    indices.get(i).map_or(u64::MAX, |&x| u64::from(x))
}

/// Why parts make no table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TableError {
    /// The caller's slice for prefix sums has another length than the parts.
    Ends {
        /// Parts, and so the length wanted.
        parts: u64,
        /// Length of the slice.
        given: u64,
    },
    /// A part has descriptors of 0 bytes.
    ZeroLength {
        /// Which part.
        part: u64,
    },
    /// A part's last byte lies beyond the largest address, so its descriptors would wrap round.
    Wraps {
        /// Which part.
        part: u64,
        /// The part itself.
        stride: Stride,
    },
    /// The counts of all parts add up to more than `u64` holds.
    Count {
        /// The part at which they do.
        part: u64,
    },
}

impl TableError {
    /// Its status code.
    pub const fn status(&self) -> Status {
        Status::Invalid
    }
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            TableError::Ends { parts, given } => write!(
                f,
                "{given} slots for prefix sums, but there are {parts} parts: give one slot a part"
            ),
            TableError::ZeroLength { part } => write!(
                f,
                "part {part}: descriptors of 0 bytes; at least 1 is needed: leave the part out"
            ),
            TableError::Wraps { part, stride: s } => write!(
                f,
                "part {part}: {} descriptors of {} bytes every {} bytes from {:#x} run past the \
                 largest address: correct base, stride or count",
                s.count, s.len, s.stride, s.base
            ),
            TableError::Count { part } => write!(
                f,
                "part {part}: the counts up to here add up to more than 2^64-1: correct the counts"
            ),
        }
    }
}

/// What the parts of a strided table have in common. Computed once, when the table is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shape {
    total: u64,
    /// Descriptors of every part but the last, if those are equal and the last has no more; else
    /// 0.
    each: u64,
    /// Rounded-up 2^64 / `each`, so that a multiplication divides; 0 stands for `each == 1`.
    inverse: u64,
}

impl Shape {
    /// Checks the parts, writes their prefix sums into `ends` (one a part; `ends[k]` is the first
    /// index behind part k).
    pub fn of(parts: &[Stride], ends: &mut [u64]) -> Result<Shape, TableError> {
        if parts.len() != ends.len() {
            return Err(TableError::Ends { parts: parts.len() as u64, given: ends.len() as u64 });
        }
        let mut total = 0u64;
        for ((k, s), end) in (0u64..).zip(parts).zip(ends) {
            if s.count > 0 {
                if s.len == 0 {
                    return Err(TableError::ZeroLength { part: k });
                }
                // Lengths up to the last address and one more: a part may end at 2^64 exactly.
                (s.count - 1)
                    .checked_mul(s.stride)
                    .and_then(|x| x.checked_add(s.base))
                    .and_then(|x| x.checked_add(s.len - 1))
                    .ok_or(TableError::Wraps { part: k, stride: *s })?;
            }
            total = total.checked_add(s.count).ok_or(TableError::Count { part: k })?;
            *end = total;
        }
        let each = match parts {
            [head @ .., last] => {
                let each = head.first().unwrap_or(last).count;
                let even = head.iter().all(|s| s.count == each) && last.count <= each;
                if even {
                    each
                } else {
                    0
                }
            }
            [] => 0,
        };
        Ok(Shape::even(total, each))
    }

    const fn even(total: u64, each: u64) -> Shape {
        Shape { total, each, inverse: if each > 1 { u64::MAX / each + 1 } else { 0 } }
    }

    /// Descriptors in the table.
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// `index / each`, exact for every 32-bit index, without a division.
    #[inline]
    fn part_of(&self, index: u32) -> usize {
        if self.each == 1 {
            return index as usize;
        }
        ((u128::from(self.inverse) * u128::from(index)) >> 64) as usize
    }
}

/// A strided table: parts, their prefix sums and the shape that [`Shape::of`] gave for exactly
/// these.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a> {
    parts: &'a [Stride],
    ends: &'a [u64],
    shape: Shape,
}

impl<'a> Strided<'a> {
    /// Puts together again what [`Shape::of`] checked. Other parts give wrong descriptors, never a
    /// wild access.
    pub const fn new(parts: &'a [Stride], ends: &'a [u64], shape: Shape) -> Strided<'a> {
        Strided { parts, ends, shape }
    }

    /// Descriptors in the table.
    pub const fn len(&self) -> u64 {
        self.shape.total
    }

    /// True for a table without descriptors.
    pub const fn is_empty(&self) -> bool {
        self.shape.total == 0
    }

    /// The part that holds `index`, and the index of that part's first descriptor.
    #[inline]
    fn find(&self, index: u32) -> Option<(&'a Stride, u64)> {
        let wide = u64::from(index);
        if wide >= self.shape.total {
            return None;
        }
        let k = if self.shape.each > 0 {
            self.shape.part_of(index)
        } else {
            self.ends.partition_point(|&end| end <= wide)
        };
        let part = self.parts.get(k)?;
        Some((part, self.ends.get(k)?.wrapping_sub(part.count)))
    }
}

/// Indices into a strided table. Keeps the part of the last index, because the next one is mostly
/// in it too.
#[derive(Clone, Copy, Debug)]
pub struct StridedIndexed<'a> {
    table: Strided<'a>,
    indices: &'a [u32],
    part: Stride,
    /// Index of the part's first descriptor.
    first: u64,
}

impl<'a> StridedIndexed<'a> {
    /// Which descriptors of `table`, in order; an index may repeat.
    pub fn new(table: Strided<'a>, indices: &'a [u32]) -> StridedIndexed<'a> {
        // A part without descriptors holds no index, so the first `get` looks its part up.
        StridedIndexed { table, indices, part: bytemuck::Zeroable::zeroed(), first: 0 }
    }

    #[cold]
    #[inline(never)]
    fn seek(&mut self, index: u32) -> Option<()> {
        let (part, first) = self.table.find(index)?;
        self.part = *part;
        self.first = first;
        Some(())
    }
}

impl Source for StridedIndexed<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.indices.len()
    }

    #[inline]
    fn get(&mut self, i: usize) -> Option<Piece> {
        let index = *self.indices.get(i)?;
        if u64::from(index).wrapping_sub(self.first) >= self.part.count {
            self.seek(index)?;
        }
        let nth = u64::from(index).wrapping_sub(self.first);
        // `Shape::of` showed that no descriptor of a part wraps.
        let addr = self.part.base.wrapping_add(nth.wrapping_mul(self.part.stride));
        Some(Piece { addr, len: self.part.len, region: self.part.region })
    }

    #[inline]
    fn part(&self, i: usize, n: usize) -> Self {
        StridedIndexed { indices: part(self.indices, i, n), ..*self }
    }

    fn refused(&self, i: usize) -> OutOfRange {
        OutOfRange { index: seen(self.indices, i), table_len: self.table.len() }
    }
}

/// A table of either form, as prepare is given it.
#[derive(Clone, Copy, Debug)]
pub enum Table<'a> {
    /// One [`Desc`] a descriptor.
    Flat(&'a [Desc]),
    /// One [`Desc`] a descriptor, all equally long and in one region. Were they not, those of the
    /// first one would be taken for all.
    Even(&'a [Desc]),
    /// A few parts.
    Strided(Strided<'a>),
}

impl<'a> Table<'a> {
    /// A table of these descriptors. Looks at all of them.
    pub fn flat(descs: &'a [Desc]) -> Table<'a> {
        let same = |a: &Desc, b: &Desc| (a.len, a.region) == (b.len, b.region);
        match descs.first() {
            Some(first) if descs.iter().all(|d| same(d, first)) => Table::Even(descs),
            _ => Table::Flat(descs),
        }
    }

    /// Descriptors in the table.
    pub const fn len(&self) -> u64 {
        match self {
            Table::Flat(descs) | Table::Even(descs) => descs.len() as u64,
            Table::Strided(s) => s.len(),
        }
    }

    /// True for a table without descriptors.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inverse_divides_every_32_bit_index() {
        let counts = [1, 2, 3, 5, 7, 10, 63, 64, 641, 75_000, 65_535, 65_536, 6_700_417];
        let wide = [0x7fff_ffff, 0x8000_0001, 0xffff_ffff, 1 << 32, (1 << 32) + 1, 1 << 40];
        for each in counts.into_iter().chain(wide) {
            let shape = Shape::even(0, each);
            let step = (u64::from(u32::MAX) / 997).next_multiple_of(each);
            let edges = (0..=997).flat_map(|k| {
                let x = (k * step).min(u64::from(u32::MAX) / each * each);
                [x.saturating_sub(1), x, x + 1]
            });
            for n in edges.chain([0, 1, 0xffff_fffe, 0xffff_ffff]) {
                let Ok(n) = u32::try_from(n) else { continue };
                assert_eq!(shape.part_of(n) as u64, u64::from(n) / each, "{n} / {each}");
            }
        }
    }
}
