//! Whether a rail works: the answer of the peer's NIC to a WRITE of nothing.

use super::{nothing, ring_of, tag, Proof, Qp, Span, VerbsPort};
use crate::nic::PostError;

impl VerbsPort<'_> {
    /// Sends a WRITE of nothing to `peer`, whose NIC acknowledges it. The first proves the rail;
    /// later ones keep it alive: if one fails, the rail is reported broken. False: the rail cannot
    /// take it now.
    pub fn prove(&mut self, peer: u32) -> bool {
        let free = self.free();
        let Some(rail) = self.rails.get_mut(peer as usize) else { return false };
        if rail.proving {
            return true;
        }
        let ring = ring_of(self.spans, self.ring, peer);
        let room = rail.free() > 0 && free > 0 && rail.span_room(ring) > 0;
        let (number, tag) = (rail.next, tag(rail.epoch, peer));
        let Some(qp) = rail.usable().filter(|_| room).map(Qp::pointer) else { return false };
        nothing(self.list.wr(0), tag | u64::from(number));
        let posted = self.list.post(qp.as_ptr(), 1, 1);
        let rail = &mut self.rails[peer as usize];
        if let Some(why) = posted.failed {
            if why == PostError::Rail {
                (rail.broken, rail.proof) = (true, Proof::Bad);
            }
            return false;
        }
        rail.proving = true;
        let ring = ring_of(self.spans, self.ring, peer);
        rail.push(ring, Span { number, last: 0, wrs: 1, proof: true });
        rail.in_flight += 1;
        self.in_flight += 1;
        true
    }

    /// Whether the rail to `peer` works: `None` as long as its first proof is on the way.
    pub fn proof(&self, peer: u32) -> Option<bool> {
        match self.rails.get(peer as usize)?.proof {
            Proof::Unknown => None,
            Proof::Good => Some(true),
            Proof::Bad => Some(false),
        }
    }

    /// True while a proof is on its way to `peer`.
    pub fn is_proving(&self, peer: u32) -> bool {
        self.rails.get(peer as usize).is_some_and(|r| r.proving)
    }
}
