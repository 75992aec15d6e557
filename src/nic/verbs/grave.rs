//! How a rail's queue pair ends, and where it waits to be destroyed.

use super::qp::Qp;
use crate::engine::arena::Arena;

/// Queue pairs of closed rails that are reset and not destroyed.
#[derive(Debug)]
pub(super) struct Graves<'m> {
    list: &'m mut [Option<Qp>],
    /// How many are in there, from the first on.
    len: usize,
}

impl<'m> Graves<'m> {
    /// Two for each rail (data, loopback), since all may break at a time.
    pub(super) fn new(arena: &mut Arena<'m>, rails: u32) -> Option<Graves<'m>> {
        let most = (rails as usize).checked_mul(2)?;
        Some(Graves { list: arena.array(most, |_| None)?, len: 0 })
    }

    /// Ends a queue pair, of whose pointer nobody keeps a copy. True: nothing that it carried
    /// touches memory any more. False: it was neither reset nor destroyed.
    pub(super) fn end(&mut self, qp: Qp) -> bool {
        // The error state first: that stops any device, and a peer that still sends hears so.
        qp.fail();
        if let Some(grave) = self.list.get_mut(self.len) {
            if qp.reset().is_ok() {
                *grave = Some(qp);
                self.len += 1;
                return true;
            }
        }
        // SAFETY: V22: the port owned it, and keeps no copy of its pointer.
        unsafe { qp.destroy() }.is_ok()
    }

    pub(super) fn take(&mut self) -> Option<Qp> {
        self.len = self.len.checked_sub(1)?;
        self.list.get_mut(self.len)?.take()
    }
}
