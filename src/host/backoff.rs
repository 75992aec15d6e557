//! When to try again what may fail again and again.

use core::time::Duration;
use std::time::Instant;

/// First pause.
const FIRST: Duration = Duration::from_millis(50);
/// Longest pause.
const LONGEST: Duration = Duration::from_secs(5);
/// How long success must last before the pauses start anew, at least.
const CALM: Duration = Duration::from_secs(5);

/// Pauses that double, from [`FIRST`] to [`LONGEST`]. Only a success that lasted starts them anew,
/// so that what comes and goes is not tried more often than what never comes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Backoff {
    pause: Duration,
    /// Not before then; `None`: at once.
    due: Option<Instant>,
    /// When it last succeeded.
    since: Option<Instant>,
}

impl Backoff {
    /// When it may be tried, if that is later than now.
    pub(super) fn waits(&self, now: Instant) -> Option<Instant> {
        self.due.filter(|due| *due > now)
    }

    /// It worked.
    pub(super) fn came(&mut self, now: Instant) {
        self.since = Some(now);
        self.due = None;
    }

    /// What had come is lost. The first loss after a calm time is tried again at once.
    pub(super) fn lost(&mut self, now: Instant) {
        let calm = CALM.max(4 * self.pause);
        // Several losses after one success are one.
        let Some(since) = self.since.take() else { return };
        if now.duration_since(since) >= calm {
            *self = Backoff::default();
        } else {
            self.failed(now);
        }
    }

    /// It did not work, or did not last.
    pub(super) fn failed(&mut self, now: Instant) {
        self.pause = (2 * self.pause).clamp(FIRST, LONGEST);
        self.due = Some(now + self.pause);
    }

    /// No pause from now on is longer than `most`, this one included.
    pub(super) fn hurry(&mut self, now: Instant, most: Duration) {
        self.pause = self.pause.min(most);
        self.due = self.due.map(|due| due.min(now + most));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    impl Backoff {
        fn is_due(&self, now: Instant) -> bool {
            self.waits(now).is_none()
        }
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let (mut b, start) = (Backoff::default(), Instant::now());
        assert!(b.is_due(start));
        for ms in [50, 100, 200, 400, 800, 1600, 3200, 5000, 5000] {
            b.failed(start);
            assert!(!b.is_due(start + ms * MS - MS), "{ms}");
            assert!(b.is_due(start + ms * MS), "{ms}");
        }
    }

    /// A rail that is up for a second at a time.
    #[test]
    fn what_flaps_does_not_start_the_pauses_anew() {
        let (mut b, start) = (Backoff::default(), Instant::now());
        let (mut now, mut tries) = (start, 0);
        while now < start + 600_000 * MS {
            now = b.waits(now).unwrap_or(now);
            tries += 1;
            b.came(now);
            now += 1000 * MS;
            b.lost(now);
        }
        // 8 while the pause grows, then one each 6 seconds.
        assert!(tries <= 8 + 100, "{tries}");
    }

    #[test]
    fn a_calm_time_starts_the_pauses_anew() {
        for (fails, calm) in [(1, 5000), (5, 5000), (6, 6400), (9, 20_000)] {
            let (mut b, start) = (Backoff::default(), Instant::now());
            (0..fails).for_each(|_| b.failed(start));
            let (mut short, mut long) = (b, b);
            short.came(start);
            short.lost(start + calm * MS - MS);
            assert!(!short.is_due(start + calm * MS), "{fails}");
            long.came(start);
            long.lost(start + calm * MS);
            assert!(long.is_due(start + calm * MS), "{fails}");
        }
    }

    #[test]
    fn a_second_loss_of_the_same_success_counts_once() {
        let (mut b, start) = (Backoff::default(), Instant::now());
        b.came(start);
        b.lost(start + MS);
        let due = b.waits(start);
        b.lost(start + 2 * MS);
        assert_eq!(b.waits(start), due);
    }

    #[test]
    fn who_is_in_a_hurry_does_not_wait_long() {
        let (mut b, start) = (Backoff::default(), Instant::now());
        (0..9).for_each(|_| b.failed(start));
        b.hurry(start, 1000 * MS);
        assert!(b.is_due(start + 1000 * MS) && !b.is_due(start + 999 * MS));
    }
}
