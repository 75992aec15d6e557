//! Since when nothing shows that a peer can be reached. Pure: the time comes in.

use std::time::Instant;

/// What a connection's rails show, all together.
///
/// Where all links fall silent at one time, the rails are found one after the other: what the first
/// one had to carry goes to the next, and is silent there. Those losses are one, which began with
/// the first, unless a rail gave a sign of life between.
#[derive(Default)]
pub(super) struct Silence {
    /// When a rail was lost, the first of those after which none gave a sign of life.
    lost: Option<Instant>,
    /// Since when it counts as without rails.
    adrift: Option<Instant>,
}

impl Silence {
    /// A rail was lost. `left`: there are others. `asked`: those are asked for a sign of life; if
    /// not, their silence says nothing.
    pub(super) fn lost(&mut self, now: Instant, left: bool, asked: bool) {
        let since = if asked { *self.lost.get_or_insert(now) } else { now };
        if !left {
            self.adrift.get_or_insert(since);
        }
    }

    /// A rail gave a sign of life, then or later.
    pub(super) fn sign(&mut self, from: Instant) {
        self.lost = self.lost.filter(|lost| from < *lost);
    }

    /// Nobody looked for signs of life for a while: a silence begins now.
    pub(super) fn restart(&mut self, now: Instant) {
        self.lost = self.lost.map(|_| now);
    }

    /// When rails to the peer became doubtful.
    pub(super) fn doubt(&self) -> Option<Instant> {
        self.lost
    }

    /// Since when the peer counts as without rails, if none is left.
    pub(super) fn adrift(&self) -> Option<Instant> {
        self.adrift
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug)]
    enum Seen {
        Lost(bool),
        Sign,
    }
    use Seen::{Lost, Sign};

    /// Since when the peer is adrift after that, in milliseconds.
    fn play(steps: &[(u64, Seen)], asked: bool) -> Option<u64> {
        let (start, mut silence) = (Instant::now(), Silence::default());
        for &(at, seen) in steps {
            let at = start + Duration::from_millis(at);
            match seen {
                Lost(left) => silence.lost(at, left, asked),
                Sign => silence.sign(at),
            }
        }
        silence.adrift().map(|t| t.duration_since(start).as_millis() as u64)
    }

    #[test]
    fn rails_that_fall_silent_one_after_the_other_are_one_silence() {
        let row = [(500, Lost(true)), (1000, Lost(true)), (1500, Lost(true)), (2000, Lost(false))];
        assert_eq!(play(&row, true), Some(500));
        assert_eq!(play(&row[..3], true), None, "a rail is left");
        // Nobody asked whether the others work.
        assert_eq!(play(&row, false), Some(2000));
    }

    #[test]
    fn a_silence_in_which_nobody_listened_begins_anew() {
        let (start, mut silence) = (Instant::now(), Silence::default());
        silence.restart(start);
        assert_eq!(silence.doubt(), None);
        silence.lost(start, true, true);
        silence.restart(start + Duration::from_secs(9));
        silence.lost(start + Duration::from_secs(10), false, true);
        assert_eq!(silence.adrift(), Some(start + Duration::from_secs(9)));
    }

    #[test]
    fn a_sign_of_life_ends_a_silence() {
        let row = [(500, Lost(true)), (1000, Sign), (1500, Lost(true)), (9000, Lost(false))];
        assert_eq!(play(&row, true), Some(1500));
        let row = [(500, Lost(true)), (8000, Sign), (9000, Lost(false))];
        assert_eq!(play(&row, true), Some(9000));
        // One from before, of which was heard after.
        let row = [(500, Lost(true)), (499, Sign), (900, Lost(false))];
        assert_eq!(play(&row, true), Some(500));
        let row = [(500, Lost(true)), (500, Sign), (900, Lost(false))];
        assert_eq!(play(&row, true), Some(900));
    }

    proptest! {
        /// Whatever happens: the clock starts at a loss, after the last sign of life, and that loss
        /// is the first after it.
        #[test]
        fn the_clock_starts_at_the_first_loss_after_the_last_sign(
            steps in prop::collection::vec((1..900u64, any::<bool>()), 0..40)
        ) {
            let mut at = 0;
            let seen = |lost| if lost { Lost(true) } else { Sign };
            let mut steps: Vec<_> =
                steps.iter().map(|(d, lost)| { at += d; (at, seen(*lost)) }).collect();
            steps.push((at + 1, Lost(false)));
            let last = steps.iter().rposition(|(_, s)| matches!(s, Sign)).map_or(0, |i| i + 1);
            prop_assert_eq!(play(&steps, true), Some(steps[last].0));
        }
    }
}
