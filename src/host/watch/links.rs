//! Whether every link is down, and since when, without its flutter. Pure: the time comes in.

use core::time::Duration;
use std::time::Instant;

/// What changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// All links are down, since then.
    Down(Instant),
    /// One is up; all were down since then.
    Up(Instant),
}

/// All links of an engine as one.
#[derive(Default)]
pub(super) struct Links {
    /// Since when all are down, if that counts.
    down: Option<Instant>,
    /// Since when they are not what counts.
    other: Option<Instant>,
}

impl Links {
    /// Whether one is up now. What stays so for `debounce` counts, from when it began.
    pub(super) fn look(&mut self, now: Instant, up: bool, debounce: Duration) -> Option<Change> {
        if up == self.down.is_none() {
            self.other = None;
            return None;
        }
        let since = *self.other.get_or_insert(now);
        if now.saturating_duration_since(since) < debounce {
            return None;
        }
        self.other = None;
        if let Some(down) = self.down.take() {
            return Some(Change::Up(down));
        }
        self.down = Some(since);
        Some(Change::Down(since))
    }

    /// True while something may soon count that does not yet.
    pub(super) fn is_pending(&self) -> bool {
        self.other.is_some()
    }

    /// Nobody looked for a while: what does not count yet begins anew.
    pub(super) fn restart(&mut self, now: Instant) {
        self.other = self.other.map(|_| now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Plays (milliseconds, up) and gives what changed, in milliseconds.
    fn play(steps: &[(u64, bool)]) -> Vec<(u64, bool, u64)> {
        let (start, mut links, mut out) = (Instant::now(), Links::default(), Vec::new());
        let ms = |t: Instant| t.duration_since(start).as_millis() as u64;
        for &(at, up) in steps {
            match links.look(start + Duration::from_millis(at), up, SECOND) {
                Some(Change::Down(since)) => out.push((at, false, ms(since))),
                Some(Change::Up(since)) => out.push((at, true, ms(since))),
                None => {}
            }
        }
        out
    }

    #[test]
    fn a_short_down_does_not_count_and_a_long_one_counts_from_its_start() {
        let short = [(0, true), (100, false), (1099, false), (1100, true), (9000, true)];
        assert_eq!(play(&short), []);
        let long = [(0, true), (100, false), (600, false), (1100, false), (5000, false)];
        assert_eq!(play(&long), [(1100, false, 100)]);
        // Each for itself is short.
        let flaps: Vec<_> = (0..40).map(|i| (i * 500, i % 2 == 0)).collect();
        assert_eq!(play(&flaps), []);
    }

    #[test]
    fn a_short_up_does_not_end_a_down() {
        let steps =
            [(0, false), (1000, false), (2000, true), (2900, false), (3100, true), (4099, true)];
        assert_eq!(play(&steps), [(1000, false, 0)]);
        let steps = [&steps[..], &[(4100, true), (4200, false), (5200, false)]].concat();
        assert_eq!(play(&steps), [(1000, false, 0), (4100, true, 0), (5200, false, 4200)]);
    }

    #[test]
    fn what_nobody_watched_does_not_count() {
        let (start, mut links) = (Instant::now(), Links::default());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(links.look(at(0), false, SECOND), None);
        assert!(links.is_pending());
        links.restart(at(30_000));
        assert_eq!(links.look(at(30_000), false, SECOND), None);
        assert_eq!(links.look(at(31_000), false, SECOND), Some(Change::Down(at(30_000))));
        // What counts already goes on counting.
        links.restart(at(60_000));
        assert_eq!(links.look(at(60_000), true, SECOND), None);
        assert_eq!(links.look(at(61_000), true, SECOND), Some(Change::Up(at(30_000))));
        assert!(!links.is_pending());
    }

    #[test]
    fn without_debounce_every_change_counts_at_once() {
        let (now, mut links) = (Instant::now(), Links::default());
        assert_eq!(links.look(now, true, Duration::ZERO), None);
        assert_eq!(links.look(now, false, Duration::ZERO), Some(Change::Down(now)));
        assert_eq!(links.look(now, true, Duration::ZERO), Some(Change::Up(now)));
    }

    proptest! {
        /// Whatever comes: changes take turns, and each was true for a second before it counted.
        #[test]
        fn changes_alternate_and_were_steady(
            steps in prop::collection::vec((1..700u64, any::<bool>()), 1..60)
        ) {
            let mut at = 0;
            let steps: Vec<_> = steps.iter().map(|(d, up)| { at += d; (at, *up) }).collect();
            let mut up = true;
            for (when, now, _) in play(&steps) {
                prop_assert_ne!(now, up);
                up = now;
                let steady = steps.iter().filter(|s| s.0 <= when).rev().take_while(|s| s.1 == now);
                prop_assert!(when - steady.last().unwrap().0 >= 1000);
            }
        }
    }
}
