//! How much a lane carries at once.

use super::facts::Facts;
use super::qp::EXTRA;

/// How large a lane's batches and queues are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Ops that one rail may have in flight, and so data work requests.
    pub depth: u32,
    /// Most pieces of local memory in one work request; a queue pair that was given less takes
    /// less.
    pub sges: u32,
    /// Every so many READs one is signalled.
    pub signal_every: u32,
    /// Bytes of a batch, so that nobody waits long for the token.
    pub batch_bytes: u64,
    /// Ops of a batch.
    pub batch_ops: u32,
}

impl Shape {
    /// The same, with no more than the device can do: what every queue pair of it is given.
    #[must_use]
    pub fn fit(self, facts: &Facts) -> Shape {
        // Beside the data there is room for flushes, a marker and a proof; on a small device for
        // one of them at least.
        let queue = facts.max_qp_wr.saturating_sub(EXTRA).max(facts.max_qp_wr.min(2 * EXTRA) / 2);
        let depth = self.depth.min(queue).min(facts.cq_entries.saturating_sub(1)).max(1);
        let sges = self.sges.clamp(1, facts.max_sge);
        Shape { depth, sges, batch_ops: self.batch_ops.max(1), ..self }
    }
}
