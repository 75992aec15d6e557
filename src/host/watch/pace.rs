//! How long a rail may be silent. Pure: the time comes in, nothing sleeps.

use core::time::Duration;
use std::time::Instant;

/// A rail is given so many times what its bytes need.
const PATIENCE: u64 = 4;
/// Bytes a second of a port that tells no speed, until it is measured: 1 Gbit/s.
const GUESS: u64 = 125_000_000;
/// A tenth of the nominal speed until it is measured: the other end may be slower.
const CAUTION: u64 = 10;
/// Less in flight than this does not show how fast a rail is, only how long one message takes.
const LOAD: u64 = 64 << 10;

/// How fast a lane moves bytes while it has some to move.
pub(super) struct Pace {
    guess: u64,
    /// Bytes a second, a decaying mean; 0: not measured.
    rate: u64,
    /// When a measurement began, how much was done then, and how much was in flight.
    mark: Option<(Instant, u64, u64)>,
}

impl Pace {
    /// Of a port of this speed (0: unknown).
    pub(super) fn new(speed_mbps: u32) -> Pace {
        let nominal = u64::from(speed_mbps) * 125_000;
        let guess = if nominal == 0 { GUESS } else { (nominal / CAUTION).max(1) };
        Pace { guess, rate: 0, mark: None }
    }

    /// What the lane has in flight and has done, in bytes.
    ///
    /// A measurement lasts until what was in flight at its start has gone through, so that a rail
    /// that hangs does not make its neighbours on the lane look slow. It ends unused when the lane
    /// runs dry.
    pub(super) fn see(&mut self, now: Instant, outstanding: u64, done: u64) {
        let Some((since, before, load)) = self.mark.filter(|_| outstanding > 0) else {
            self.mark = (outstanding > 0).then_some((now, done, outstanding));
            return;
        };
        let got = done.saturating_sub(before);
        if got == 0 || got < load {
            return;
        }
        self.mark = Some((now, done, outstanding));
        let ns = now.duration_since(since).as_nanos().max(1);
        let seen = u128::from(got) * 1_000_000_000 / ns;
        let seen = u64::try_from(seen).unwrap_or(u64::MAX).max(1);
        if load < LOAD && seen < self.rate() {
            return;
        }
        self.rate = match self.rate {
            0 => seen,
            rate => (rate - rate / 4).saturating_add(seen / 4).max(1),
        };
    }

    /// Bytes a second: measured, or guessed.
    pub(super) fn rate(&self) -> u64 {
        if self.rate == 0 {
            self.guess
        } else {
            self.rate
        }
    }

    /// Drops a measurement that is under way: its time is of no worth.
    pub(super) fn restart(&mut self) {
        self.mark = None;
    }

    /// How long a rail may be silent with so many bytes in flight on its lane.
    pub(super) fn limit(&self, least: Duration, outstanding: u64) -> Duration {
        let need = u128::from(outstanding) * 1_000_000 / u128::from(self.rate());
        let need = u64::try_from(need * u128::from(PATIENCE)).unwrap_or(u64::MAX);
        least.max(Duration::from_micros(need))
    }
}

/// Whether work that was posted gets done.
#[derive(Default)]
pub(super) struct Progress {
    /// The oldest work in flight, and since when it is the oldest.
    oldest: Option<(u32, Instant)>,
    /// Work got done since the last [`Progress::take`].
    moved: bool,
}

impl Progress {
    /// `oldest`: number of the oldest work in flight. True: it has been that for `limit`.
    pub(super) fn is_late(&mut self, now: Instant, oldest: Option<u32>, limit: Duration) -> bool {
        match (self.oldest, oldest) {
            (Some((kept, since)), Some(seen)) if kept == seen => {
                now.saturating_duration_since(since) >= limit
            }
            _ => {
                self.moved |= self.oldest.is_some();
                self.oldest = oldest.map(|n| (n, now));
                false
            }
        }
    }

    /// True when work got done since the last call, as far as the looks between saw.
    pub(super) fn take(&mut self) -> bool {
        core::mem::take(&mut self.moved)
    }

    /// Starts the clock anew.
    pub(super) fn restart(&mut self, now: Instant) {
        self.oldest = self.oldest.map(|(n, _)| (n, now));
    }
}

/// What to do about a rail that may be idle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Care {
    Nothing,
    /// Ask the peer's NIC for a sign of life.
    Ask,
    /// It gave none for too long.
    Late,
}

/// Signs of life of a rail on which nothing is in flight.
#[derive(Default)]
pub(super) struct Pulse {
    /// Since when there is nothing to show that it works.
    quiet: Option<Instant>,
    /// When it was asked.
    asked: Option<Instant>,
    /// It is to be asked as soon as nothing is in flight.
    hurried: bool,
    /// It answered since the last [`Pulse::take`].
    answered: bool,
}

impl Pulse {
    /// `idle`: nothing is in flight. `asking`: a question is on its way. `every`: how often to ask,
    /// zero: never. `limit`: how long an answer may take.
    pub(super) fn look(
        &mut self,
        now: Instant,
        (idle, asking): (bool, bool),
        every: Duration,
        limit: Duration,
    ) -> Care {
        if asking {
            let asked = *self.asked.get_or_insert(now);
            let late = now.saturating_duration_since(asked) >= limit;
            return if late { Care::Late } else { Care::Nothing };
        }
        let answered = self.asked.take().is_some();
        if answered || !idle {
            // It answered; or it works, and the watchdog looks after it.
            self.quiet = Some(now);
            self.answered |= answered;
            self.hurried &= !answered;
        }
        let quiet = *self.quiet.get_or_insert(now);
        let due = idle && (self.hurried || now.saturating_duration_since(quiet) >= every);
        if every.is_zero() || !due {
            return Care::Nothing;
        }
        self.asked = Some(now);
        Care::Ask
    }

    /// True when an answer is awaited, as far as is known.
    pub(super) fn is_asking(&self) -> bool {
        self.asked.is_some()
    }

    /// Another rail to the peer was lost: is this one any better? A question that is on its way has
    /// the shorter time from now on.
    pub(super) fn hurry(&mut self, now: Instant) {
        self.hurried = true;
        self.asked = self.asked.map(|_| now);
    }

    /// True from [`Pulse::hurry`] until it answered.
    pub(super) fn is_hurried(&self) -> bool {
        self.hurried
    }

    /// True when it answered since the last call.
    pub(super) fn take(&mut self) -> bool {
        core::mem::take(&mut self.answered)
    }

    /// The question could not be asked now.
    pub(super) fn unasked(&mut self) {
        self.asked = None;
    }

    /// Starts the clocks anew.
    pub(super) fn restart(&mut self, now: Instant) {
        self.asked = self.asked.map(|_| now);
    }
}

/// Whether the thread that looks was kept from it.
pub(super) struct Gap {
    last: Option<Instant>,
    /// How long it means to sleep at most.
    pub(super) meant: Duration,
}

impl Gap {
    pub(super) const fn new() -> Gap {
        Gap { last: None, meant: Duration::ZERO }
    }

    /// True when it ran last more than half a limit before it meant to run again. What did not
    /// happen meanwhile is nobody's fault.
    pub(super) fn overslept(&mut self, now: Instant, limit: Duration) -> bool {
        let last = self.last.replace(now);
        last.is_some_and(|t| now.saturating_duration_since(t) > self.meant + limit / 2)
    }
}

/// How long a NIC repeats what the peer does not acknowledge before it says so: as the
/// specification has it, and as long as it allows a NIC to stretch each wait.
pub(in crate::host) fn acknowledgement(ack_timeout: u32, retry: u32) -> (Duration, Duration) {
    let one = Duration::from_nanos(4096) * (1 << ack_timeout.min(22));
    let nominal = one * (retry.min(7) + 1);
    (nominal, nominal * 4)
}

#[cfg(test)]
mod tests;
