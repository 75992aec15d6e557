//! A run of pairs that follow each other becomes ops: one, or as many as its length and the seams
//! of its regions ask for.

use core::num::NonZeroU32;

use super::error::{PrepareError, Reason};
use super::op::Op;
use super::regions::Known;
use super::sink::OpSink;
use super::source::{Piece, Source};

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
}

/// Pairs that follow each other on both sides.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub(super) local: u64,
    pub(super) remote: u64,
    pub(super) len: u64,
    pub(super) pair: u32,
}

impl Run {
    /// First byte behind it, on both sides.
    #[inline]
    pub(super) fn end(&self) -> (u64, u64) {
        (self.local.wrapping_add(self.len), self.remote.wrapping_add(self.len))
    }

    /// The pair goes on where this run ends, on both sides.
    #[inline]
    pub(super) fn meets(&self, l: &Piece, r: &Piece) -> bool {
        // Cannot meet at 0 by wrapping: a region that has the last address does not have 0.
        (l.addr, r.addr) == self.end()
    }

    /// The op of `len` bytes at `offset`.
    #[inline]
    pub(super) fn op(&self, offset: u64, len: u32, tag: u32, (l, r): &(Known, Known)) -> Op {
        Op {
            local: self.local + offset,
            remote: self.remote + offset,
            len,
            local_region: l.slot,
            remote_region: r.slot,
            tag,
        }
    }
}

/// Makes ops of a run: the one place where a run turns into ops.
#[inline]
pub(super) fn finish<L: Source, S: OpSink>(
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

#[cfg(test)]
mod tests {
    use super::super::{Listed, RegionView, SliceSink};
    use super::*;
    use crate::status::Status;

    #[test]
    fn bytes_beyond_64_bits_are_refused_not_wrapped() {
        let op = bytemuck::Zeroable::zeroed();
        let mut room = [op; 8];
        let mut sink = SliceSink::new(&mut room);
        let known = Known::of(1, &RegionView { len: 100, ..RegionView::default() });
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
}
