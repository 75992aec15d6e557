//! Where ops go.

use super::error::Full;
use super::op::Op;
use crate::status::Status;

/// Where ops go, in order. After an error it holds the ops of an unfinished list: throw them away.
pub trait OpSink {
    /// Takes one op.
    fn push(&mut self, op: Op) -> Result<(), Full>;

    /// Ops that [`OpSink::extend`] takes now.
    fn room(&self) -> usize;

    /// Takes `op(0)`, `op(1)`, ... while there are ops, at most `most`, which is no more than there
    /// is room for. Returns how many it took.
    fn extend(&mut self, most: usize, op: impl FnMut(usize) -> Option<Op>) -> usize;

    /// The last `n` ops, or as many as there are.
    fn last(&mut self, n: usize) -> &mut [Op];

    /// Forgets the last `n` ops.
    fn shorten(&mut self, n: usize);
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

    fn room(&self) -> usize {
        self.room.len() - self.len
    }

    #[inline]
    fn extend(&mut self, most: usize, mut op: impl FnMut(usize) -> Option<Op>) -> usize {
        let mut n = 0;
        for place in self.room.iter_mut().skip(self.len).take(most) {
            let Some(op) = op(n) else { break };
            *place = op;
            n += 1;
        }
        self.len += n;
        n
    }

    fn last(&mut self, n: usize) -> &mut [Op] {
        let from = self.len.saturating_sub(n);
        self.room.get_mut(from..self.len).unwrap_or(&mut [])
    }

    fn shorten(&mut self, n: usize) {
        self.len = self.len.saturating_sub(n);
    }
}
