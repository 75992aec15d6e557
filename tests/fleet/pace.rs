//! How long things may take: computed from what the ports and the streams of a run can do, so that
//! a slow one has the time that it needs, and a fast one no more.

use super::*;
use kvrail::engine::ledger::CLAIMS;

/// Ticks beside what the ports need until everything has come to its end: messages, rails that are
/// connected anew, engines that are stopped or dead.
pub const END: u64 = 40_000;
/// The same for all transfers of a run, while faults go on.
const RUN: u64 = 400_000;

impl Fleet {
    /// Ticks that one rail needs at most for work requests of so many bytes in all. A queue of few
    /// entries and a long delay is the slowest: then so many go in each delay.
    pub fn ticks_for(&self, requests: u64, bytes: u64) -> u64 {
        let port = &self.port;
        let slow = self.plan.has("slow");
        let (rate, delay) = match slow {
            true => ((port.rate / 8).max(1), port.delay + 6),
            false => (port.rate, port.delay + 1),
        };
        let claims = CLAIMS as u64 * u64::from(port.batch_ops);
        let at_once = claims.min(port.depth.min(port.credits).into());
        let ticks = requests.div_ceil(at_once) * delay
            + bytes.div_ceil(rate)
            + requests.div_ceil(port.batch_ops.into())
            + 2 * bytes.div_ceil(port.batch_bytes)
            + bytes.saturating_mul(delay) / port.window;
        // Posts that were cut short, and a round that ended before one's turn.
        ticks + ticks / 8
    }

    /// Ticks that a run may take until all its transfers were posted. No more than a few of an
    /// engine are under way at a time, so those before must have been carried.
    pub fn most_ticks(&self) -> u64 {
        RUN + self.sites.iter().map(|s| s.asked).max().unwrap_or(0)
    }

    /// Ticks that the rails need for what is under way.
    pub fn ticks_left(&self) -> u64 {
        let mut left = vec![0; self.sites.len()];
        for f in &self.flights {
            let Ok(info) = self.world.engines[f.from].info(f.handle.raw()) else { continue };
            let requests = info.work_requests - info.work_requests_done;
            left[f.from] += self.ticks_for(requests, info.bytes - info.bytes_done);
        }
        left.into_iter().max().unwrap_or(0)
    }

    /// Bytes of the longest message. A stream that gives a few bytes at a time takes too long for
    /// more.
    pub fn longest(&self) -> usize {
        match self.world.setup.chop {
            1..1_000 => 3_000,
            _ => 20_000,
        }
    }

    /// Ticks in which a stream that nothing disturbs brings a message, if it has any: the longest
    /// one at half of what a tick brings on average, and until its receiver looks twice.
    fn quiet(&self, to: usize) -> u64 {
        let each = match self.world.setup.chop {
            0 => 400,
            n => u64::from(n) / 4,
        };
        let looks = if self.calm { 1 } else { self.sites[to].looks_every };
        200 + self.longest() as u64 / each + 2 * looks
    }

    /// Whether a transfer stalls because its message waits: all data is there, and the stream
    /// either brings the messages before it, or loses its rail again and again, so that it has to
    /// begin anew.
    pub fn waits_for_message(&self, flight: &Flight) -> bool {
        let info = self.world.engines[flight.from].info(flight.handle.raw());
        let all_there = info.is_ok_and(|i| i.bytes_done == i.bytes);
        let p = self.pair_of(flight.from, flight.to);
        let talked_at = self.pairs[p].talked_at[self.pairs[p].side_of(flight.from)];
        let alive = self.now() <= talked_at + self.quiet(flight.to);
        all_there && flight.behind.is_some() && alive
    }

    /// What the run's ports and streams are like, for one that failed.
    pub fn habits(&self) -> String {
        let looks: Vec<_> = self.sites.iter().map(|s| (s.looks_every, s.controls_every)).collect();
        let (port, chop) = (self.port, self.world.setup.chop);
        format!("{port:?}, chop {chop}, looks {looks:?}")
    }
}
