//! Models of a transfer slot: post, claim, complete, cancel, release and the next life, with the
//! engine's own `Slot`, `Cursor` and `StateWord`. The memory of a life is a loom cell for each op,
//! so a rail that touches it after the release, or two rails that carry the same op, are caught by
//! loom itself.
//!
//! | model | preemptions | seconds |
//! |---|---|---|
//! | `memory_is_free_after_release` | 3 | 13 |
//! | `the_next_life_is_whole` | 2 | 4 |
//! | `two_rails_bring_the_last_two_ops` | 3 | 11 |
//! | `an_error_that_comes_while_the_transfer_is_being_posted` | 3 | 0.1 |
//! | `a_deadline_ends_only_the_post_that_it_watched` | 3 | 2 |
//!
//! (On one core of a busy machine.) loom orders a write only against the *last* access before it:
//! of two loads and a write it may leave out that the write comes before the first load. So a model
//! hands on the state that it knows instead of loading it again, and waits for an answer in a loop
//! instead of asking once.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(clippy::arc_with_non_send_sync, reason = "loom's threads are the model's own")]

use core::sync::atomic::{AtomicU32, Ordering};
use kvrail::engine::cursor::Seen;
use kvrail::engine::slot::{Body, Settled, Slot};
use kvrail::engine::state::{Phase, State};
use kvrail::status::Status;
use loom::cell::UnsafeCell;
use std::sync::Arc;

const OPS: usize = 2;

/// One slot, and the memory that each of its lives moves.
struct Rig {
    slot: Slot,
    memory: [[UnsafeCell<u32>; OPS]; 2],
    /// Not loom's: how often a transfer landed is asked after all threads ended.
    landed: AtomicU32,
}

impl Rig {
    fn new() -> Arc<Rig> {
        let cells = || core::array::from_fn(|_| UnsafeCell::new(0));
        let memory = [cells(), cells()];
        Arc::new(Rig { slot: Slot::new(), memory, landed: AtomicU32::new(0) })
    }

    /// What `Core::adopt` does: a body whose peer number says which life's memory it moves.
    fn adopt(&self, life: u32, n_ops: u32) {
        let free = self.slot.state.load();
        assert_eq!(free.phase, Phase::Free);
        // SAFETY: the slot is free; loom checks that no rail looks.
        unsafe { self.slot.set_body(Body { peer: life, n_ops, ..Body::EMPTY }) };
        assert!(self.slot.state.change(free, free.to(Phase::Idle, Status::NotPosted)));
    }

    /// What `Core::post` does.
    fn post(&self) -> State {
        let state = self.slot.state.load();
        assert!(self.slot.state.change(state, state.next_post()));
        // SAFETY: made `Posting` just now.
        let n_ops = unsafe { self.slot.body() }.n_ops;
        self.slot.enter();
        self.slot.arm(n_ops);
        self.slot.cursor.open();
        let active = state.next_post().to(Phase::Active, Status::InProgress);
        assert!(self.slot.state.change(state.next_post(), active));
        self.leave();
        active
    }

    fn leave(&self) {
        match self.slot.leave() {
            Settled::Nothing => {}
            Settled::Landed(s) => {
                self.landed.fetch_add(1, Ordering::Relaxed);
                assert!(self.slot.state.change(s, s.to(Phase::Done, Status::Ok)));
            }
            Settled::Ended(s) => {
                assert!(self.slot.state.change(s, s.to(Phase::Ended, s.status)));
            }
        }
    }

    /// Holds the slot and claims one op. The hold stays raised when there is a claim.
    fn claim(&self) -> Option<(u32, u32)> {
        self.slot.enter();
        let mut look = self.slot.look();
        while let Some(seen) = look {
            // SAFETY: held, and the cursor was open after that.
            let body = unsafe { self.slot.body() };
            let op = Seen::next(seen);
            if op >= body.n_ops {
                break;
            }
            match self.slot.cursor.claim(seen, 1) {
                Ok(()) => return Some((body.peer, op)),
                Err(now) => look = now,
            }
        }
        self.leave();
        None
    }

    /// Carries one op, as a rail does.
    fn serve(&self) -> bool {
        let Some((life, op)) = self.claim() else { return false };
        // The NIC takes its time.
        loom::thread::yield_now();
        // SAFETY: loom checks that nobody else is in the cell.
        self.memory[life as usize][op as usize].with_mut(|m| unsafe { *m += 1 });
        self.slot.arrived(1, 8);
        self.leave();
        true
    }

    /// What `Core::cancel` does; `seen` was looked up before.
    fn cancel(&self, seen: State) {
        self.slot.enter();
        self.slot.end_seen(seen, Status::Cancelled);
        self.leave();
    }

    /// What `Core::release` does; the body of the next life may be put in after a success.
    fn release(&self) -> bool {
        let s = self.slot.state.load();
        let closing = s.to(Phase::Closing, s.status);
        if !s.phase.at_rest() || !self.slot.state.change(s, closing) {
            return false;
        }
        assert!(self.slot.state.change(closing, closing.next_life()));
        true
    }

    /// The owner's use of released memory.
    fn reuse(&self, life: usize) -> u32 {
        // SAFETY: loom checks that nobody else is in the cell.
        self.memory[life].iter().map(|c| c.with_mut(|m| unsafe { *m })).sum()
    }

    fn phase(&self) -> Phase {
        self.slot.state.load().phase
    }
}

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

fn spawn(rig: &Arc<Rig>, f: impl FnOnce(&Rig) + 'static) -> loom::thread::JoinHandle<()> {
    let rig = rig.clone();
    loom::thread::spawn(move || f(&rig))
}

fn join<const N: usize>(threads: [loom::thread::JoinHandle<()>; N]) {
    for t in threads {
        t.join().unwrap();
    }
}

/// Waits as an owner does who calls check again and again.
fn wait(mut done: impl FnMut() -> bool) {
    while !done() {
        loom::thread::yield_now();
    }
}

#[test]
fn memory_is_free_after_release() {
    check(3, || {
        let rig = Rig::new();
        rig.adopt(0, 2);
        let active = rig.post();
        let rails = [(); 2].map(|()| {
            spawn(&rig, |r| {
                r.serve();
            })
        });
        rig.cancel(active);
        wait(|| rig.release());
        rig.reuse(0);
        join(rails);
    });
}

#[test]
fn the_next_life_is_whole() {
    check(2, || {
        let rig = Rig::new();
        rig.adopt(0, 1);
        let active = rig.post();
        let rails = [(); 2].map(|()| {
            spawn(&rig, |r| {
                r.serve();
            })
        });
        rig.cancel(active);
        wait(|| rig.release());
        rig.reuse(0);
        rig.adopt(1, 1);
        rig.post();
        join(rails);
        while rig.serve() {}
        assert_eq!(rig.phase(), Phase::Done, "nobody cancelled the second life");
        assert_eq!(rig.reuse(1), 1);
    });
}

#[test]
fn two_rails_bring_the_last_two_ops() {
    check(3, || {
        let rig = Rig::new();
        rig.adopt(0, 2);
        rig.post();
        let rails = [(); 2].map(|()| spawn(&rig, |r| assert!(r.serve())));
        wait(|| rig.phase() == Phase::Done);
        // SAFETY: loom checks that both writes came before.
        let sum: u32 = rig.memory[0].iter().map(|c| c.with(|m| unsafe { *m })).sum();
        assert_eq!(sum, 2);
        join(rails);
        assert_eq!(rig.landed.load(Ordering::Relaxed), 1);
    });
}

/// A deadline passes in one post; the transfer ends, well or not, and is posted again meanwhile.
#[test]
fn a_deadline_ends_only_the_post_that_it_watched() {
    check(3, || {
        let rig = Rig::new();
        rig.adopt(0, 1);
        let seen = rig.post();
        let deadline = spawn(&rig, move |r| {
            r.slot.enter();
            r.slot.end_seen(seen, Status::Stalled);
            r.leave();
        });
        rig.serve();
        wait(|| rig.slot.state.load().phase.at_rest());
        rig.post();
        while rig.serve() {}
        deadline.join().unwrap();
        assert_eq!(rig.phase(), Phase::Done, "the second post ended by the first one's deadline");
    });
}

#[test]
fn an_error_that_comes_while_the_transfer_is_being_posted() {
    check(3, || {
        let rig = Rig::new();
        rig.adopt(0, 1);
        let rail = spawn(&rig, |r| {
            if r.claim().is_some() {
                assert!(r.slot.end(Status::RemoteAccess));
                r.leave();
            }
        });
        rig.post();
        rail.join().unwrap();
        while rig.serve() {}
        let failed = rig.reuse(0) == 0;
        assert_eq!(rig.phase(), if failed { Phase::Ended } else { Phase::Done });
        assert!(rig.release());
    });
}
