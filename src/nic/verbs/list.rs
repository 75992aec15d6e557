//! A port's work requests and their pieces of local memory, ready to be posted as one list.
//!
//! They are templates, linked once: each leads to the one behind it, has one piece, the one in the
//! same place, is not signalled, and does what those of the last batch did. So of a plain work
//! request only number, addresses, length and keys are written (13 of 58 instructions saved,
//! `benches/null`). What a post needs different is set for it, and undone behind it or before the
//! next one.

use core::marker::PhantomData;
use core::ptr::{null_mut, NonNull};
use core::slice::from_raw_parts_mut;

use rdma_core_sys::*;

use crate::engine::arena::Arena;
use crate::nic::PostError;

/// How a post of a list ended.
pub(super) struct Posted {
    /// Work requests that are in flight now, from the first on.
    pub(super) wrs: usize,
    /// Why not all.
    pub(super) failed: Option<PostError>,
    /// The provider did not say which: any of them may be in flight.
    pub(super) unknown: bool,
}

/// The arrays. They are used only through the pointers that the links were made of, so that these
/// stay good.
#[derive(Debug)]
pub(super) struct List<'m> {
    wrs: NonNull<ibv_send_wr>,
    sges: NonNull<ibv_sge>,
    len: usize,
    /// The work request that leads nowhere.
    end: usize,
    /// Work requests, from the first on, that may have other pieces than the one in their place.
    moved: usize,
    /// What each does.
    opcode: ibv_wr_opcode,
    life: PhantomData<&'m mut [ibv_send_wr]>,
}

impl<'m> List<'m> {
    /// Room for `len` work requests of one piece each. `None`: the arena is too small.
    pub(super) fn new(arena: &mut Arena<'m>, len: usize) -> Option<List<'m>> {
        let wrs = arena.array(len, |_| ibv_send_wr::zeroed())?;
        let sges = arena.array(len, |_| ibv_sge::zeroed())?;
        let len = wrs.len();
        let (wrs, sges) = (NonNull::from(wrs).cast(), NonNull::from(sges).cast());
        let (end, opcode) = (len.saturating_sub(1), IBV_WR_RDMA_WRITE);
        let mut list = List { wrs, sges, len, end, moved: len, opcode, life: PhantomData };
        for i in 0..list.end {
            let next = list.at(i + 1);
            list.parts().0[i].next = next;
        }
        for i in 0..len {
            list.plain(i);
        }
        list.put_back();
        Some(list)
    }

    fn at(&self, i: usize) -> *mut ibv_send_wr {
        self.wrs.as_ptr().wrapping_add(i)
    }

    /// The work requests, and the pieces; as many of these.
    pub(super) fn parts(&mut self) -> (&mut [ibv_send_wr], &mut [ibv_sge]) {
        // SAFETY: V24: the arrays that `new` made, `len` long, which this list has alone; both are
        // borrowed as long as it is.
        let wrs = unsafe { from_raw_parts_mut(self.wrs.as_ptr(), self.len) };
        // SAFETY: V24: as above.
        let sges = unsafe { from_raw_parts_mut(self.sges.as_ptr(), self.len) };
        (wrs, sges)
    }

    /// Work request `i`.
    pub(super) fn wr(&mut self, i: usize) -> &mut ibv_send_wr {
        &mut self.parts().0[i]
    }

    /// Piece `i`.
    pub(super) fn sge(&mut self, i: usize) -> &mut ibv_sge {
        &mut self.parts().1[i]
    }

    /// Readies all for a batch of what `opcode` says.
    pub(super) fn aim(&mut self, opcode: ibv_wr_opcode) {
        if self.moved > 0 {
            self.put_back();
        }
        if self.opcode != opcode {
            self.opcode = opcode;
            self.parts().0.iter_mut().for_each(|wr| wr.opcode = opcode);
        }
    }

    /// Makes work request `i` one like the others again.
    pub(super) fn plain(&mut self, i: usize) {
        let opcode = self.opcode;
        let wr = self.wr(i);
        (wr.num_sge, wr.opcode, wr.send_flags) = (1, opcode, 0);
    }

    /// Gives each work request the piece in its place, and no other.
    fn put_back(&mut self) {
        for i in 0..core::mem::take(&mut self.moved) {
            let piece = self.sges.as_ptr().wrapping_add(i);
            let wr = self.wr(i);
            (wr.sg_list, wr.num_sge) = (piece, 1);
        }
    }

    /// Makes one list of the first `n` work requests, which have the first `sges` pieces, in order.
    /// Nothing may touch the arrays between this and the post.
    fn link(&mut self, n: usize, sges: usize) -> *mut ibv_send_wr {
        let last = n.min(self.len).saturating_sub(1);
        if last != self.end {
            let (end, next) = (self.end, self.at(self.end + 1));
            let wrs = self.parts().0;
            wrs[end].next = if end + 1 < wrs.len() { next } else { null_mut() };
            wrs[last].next = null_mut();
            self.end = last;
        }
        if sges != n {
            let mut piece = self.sges.as_ptr();
            for wr in self.parts().0.iter_mut().take(n) {
                wr.sg_list = piece;
                piece = piece.wrapping_add(usize::try_from(wr.num_sge).unwrap_or(0));
            }
            self.moved = n;
        }
        self.wrs.as_ptr()
    }

    /// Posts the first `n` work requests as one list, with the first `sges` pieces.
    pub(super) fn post(&mut self, qp: *mut ibv_qp, n: usize, sges: usize) -> Posted {
        let first = self.link(n, sges);
        let mut bad = null_mut();
        // SAFETY: V22 and V24: the rail's own queue pair, and a list in the port's own arrays,
        // which the provider has copied when it returns. The memory that it names is registered
        // and held by the claim.
        let e = unsafe { post_send(qp, first, &raw mut bad) };
        // Each list ends with what was made special: a flush, a marker, a proof, a signalled READ.
        self.plain(n - 1);
        if e == 0 {
            return Posted { wrs: n, failed: None, unknown: false };
        }
        // -1 and `errno`, of older providers.
        let e = if e < 0 { errno() } else { e };
        let offset = (bad as usize).wrapping_sub(first as usize);
        let wrs = offset / size_of::<ibv_send_wr>();
        if bad.is_null() || wrs >= n || !offset.is_multiple_of(size_of::<ibv_send_wr>()) {
            return Posted { wrs: 0, failed: Some(PostError::Rail), unknown: true };
        }
        let why = if e == libc::ENOMEM { PostError::Full } else { PostError::Rail };
        Posted { wrs, failed: Some(why), unknown: false }
    }
}
