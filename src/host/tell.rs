//! What an engine tells without being asked: events, put down by whoever knows, told by the control
//! thread when it holds no lock.

use core::fmt;
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::sys;
use crate::status::Status;

/// No lane.
pub const NO_LANE: u32 = u32::MAX;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventKind {
    /// Every port of this engine's rails is down.
    LinksDown = 1,
    /// One of them is up again.
    LinksUp,
    /// A rail to a connected peer broke.
    RailDown,
    /// A rail to a connected peer works.
    RailUp,
    /// The connection to a peer ended, whoever ended it.
    PeerGone,
    /// A peer is connected.
    PeerUp,
}

/// An event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// The peer's handle; 0: of no peer.
    pub peer: u64,
    /// Which rail, as in `rail_info`; [`NO_LANE`]: of no rail.
    pub lane: u32,
    /// Why; `Ok` if it is good news.
    pub status: Status,
    /// `LinksDown`: how long they have been down; `LinksUp`: how long they were. Else zero.
    pub since: Duration,
    /// The same in words.
    pub text: String,
}

/// Takes events, on the control thread: it should be quick, and must not wait for the engine
/// (connect a peer, destroy the engine).
pub type EventFn = Arc<dyn Fn(&Event) + Send + Sync>;

/// Events on their way to whoever wants them.
pub(super) struct Teller {
    /// None: nobody wants them.
    to: Mutex<Option<EventFn>>,
    waiting: Mutex<VecDeque<Event>>,
    bell: sys::Event,
}

impl fmt::Debug for Teller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Teller").finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Teller {
    /// `bell` wakes the control thread.
    pub(super) fn new(bell: sys::Event) -> Teller {
        Teller { to: Mutex::new(None), waiting: Mutex::default(), bell }
    }

    /// Who takes events from now on.
    pub(super) fn set(&self, to: Option<EventFn>) {
        *lock(&self.to) = to;
    }

    /// True: somebody takes events.
    pub(super) fn is_wanted(&self) -> bool {
        lock(&self.to).is_some()
    }

    /// Puts down an event, whatever the caller holds. Without anybody who takes it, it is dropped.
    pub(super) fn tell(&self, event: Event) {
        if self.is_wanted() {
            lock(&self.waiting).push_back(event);
            sys::ring(self.bell.fd());
        }
    }

    /// Control thread, with no lock held: hands over what was put down, in that order.
    pub(super) fn deliver(&self) {
        loop {
            let next = lock(&self.waiting).pop_front();
            let Some(event) = next else { return };
            let to = lock(&self.to).clone();
            if let Some(to) = to {
                to(&event);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(lane: u32) -> Event {
        let (kind, status) = (EventKind::RailDown, Status::NoRail);
        Event { kind, peer: 1, lane, status, since: Duration::ZERO, text: String::new() }
    }

    fn lanes(seen: &Mutex<Vec<u32>>) -> Vec<u32> {
        lock(seen).clone()
    }

    #[test]
    fn events_come_in_order_and_only_while_somebody_takes_them() {
        let (teller, seen) = (Teller::new(sys::Event::new().unwrap()), Arc::new(Mutex::default()));
        let to: Arc<Mutex<Vec<u32>>> = seen.clone();
        teller.tell(event(0));
        teller.set(Some(Arc::new(move |e: &Event| lock(&to).push(e.lane))));
        teller.deliver();
        assert_eq!(lanes(&seen), [], "nobody took it when it came");
        teller.tell(event(1));
        teller.tell(event(2));
        assert_eq!(lanes(&seen), [], "not before the control thread is free");
        teller.deliver();
        teller.deliver();
        assert_eq!(lanes(&seen), [1, 2]);
        teller.tell(event(3));
        teller.set(None);
        teller.deliver();
        assert_eq!(lanes(&seen), [1, 2]);
    }

    #[test]
    fn who_takes_an_event_may_do_everything_with_the_teller() {
        let teller = Arc::new(Teller::new(sys::Event::new().unwrap()));
        let (seen, me) = (Arc::new(Mutex::default()), teller.clone());
        let to: Arc<Mutex<Vec<u32>>> = seen.clone();
        teller.set(Some(Arc::new(move |e: &Event| {
            lock(&to).push(e.lane);
            if e.lane < 3 {
                me.tell(event(e.lane + 1));
            } else {
                me.set(None);
            }
        })));
        teller.tell(event(1));
        teller.deliver();
        assert_eq!(lanes(&seen), [1, 2, 3]);
        assert!(!teller.is_wanted());
    }
}
