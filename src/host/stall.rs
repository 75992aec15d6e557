//! The stall watch: a transfer without any progress for `stall_ms` ends in an error, so that
//! nothing is "in progress" for ever.

use core::time::Duration;
use std::time::Instant;

use super::log;
use super::shared::Shared;
use crate::engine::transfer::Mark;

pub(super) struct Stalls {
    marks: Vec<Option<(Mark, Instant)>>,
    next: Option<Instant>,
}

impl Stalls {
    /// Takes all of its memory here: an engine that does nothing but wait grows by nothing.
    pub(super) fn new(shared: &Shared) -> Stalls {
        Stalls { marks: vec![None; shared.core.limits().transfers as usize], next: None }
    }

    /// How long to wait between looks: a few looks within the limit.
    pub(super) fn pause(shared: &Shared) -> Duration {
        let limit = Duration::from_millis(u64::from(shared.config.stall_ms));
        (limit / 8).clamp(Duration::from_millis(10), Duration::from_secs(1))
    }

    /// Looks at every transfer.
    pub(super) fn look(&mut self, shared: &Shared) {
        let limit = Duration::from_millis(u64::from(shared.config.stall_ms));
        let now = Instant::now();
        if limit.is_zero() || self.next.is_some_and(|t| now < t) {
            return;
        }
        self.next = Some(now + Stalls::pause(shared));
        for (slot, kept) in (0..).zip(&mut self.marks) {
            let Some(mark) = shared.core.mark(slot) else {
                *kept = None;
                continue;
            };
            match kept {
                Some((old, since)) if *old == mark => {
                    if now.duration_since(*since) >= limit && shared.core.expire(slot, mark) {
                        log::warn(&format!(
                            "a transfer made no progress for {} ms (stall_ms) and was ended",
                            limit.as_millis()
                        ));
                    }
                }
                _ => *kept = Some((mark, now)),
            }
        }
    }
}
