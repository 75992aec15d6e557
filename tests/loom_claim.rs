//! Models of the claim cursor, the poll token and the bell.
//!
//! | model | preemptions | seconds |
//! |---|---|---|
//! | `an_op_is_claimed_once_and_none_after_the_close` | 3 | 2 |
//! | `published_work_is_done_by_somebody_and_by_one_at_a_time` | 3 | 3 |
//! | `a_sleeper_never_misses_what_was_published` | 3 | 0.1 |
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(clippy::arc_with_non_send_sync, reason = "loom's threads are the model's own")]

use core::sync::atomic::AtomicBool as PlainBool;
use kvrail::engine::bell::Bell;
use kvrail::engine::cursor::Cursor;
use kvrail::engine::token::PollToken;
use kvrail::sync::{AtomicBool, AtomicU32, Ordering};
use loom::cell::UnsafeCell;
use loom::sync::Notify;
use std::sync::Arc;

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

fn spawn<R: 'static>(rig: &Arc<R>, f: impl FnOnce(&R) + 'static) -> loom::thread::JoinHandle<()> {
    let rig = rig.clone();
    loom::thread::spawn(move || f(&rig))
}

const OPS: u32 = 3;

/// A cursor over a few ops; the one who claims an op may write its cell.
struct Claims {
    cursor: Cursor,
    ops: [UnsafeCell<u32>; OPS as usize],
    /// The closer's close has returned.
    closed: AtomicBool,
}

impl Claims {
    fn claim_all(&self) {
        let mut look = self.cursor.look();
        while let Some(seen) = look {
            let op = seen.next();
            if op >= OPS {
                return;
            }
            let late = self.closed.load(Ordering::Acquire);
            match self.cursor.claim(seen, 1) {
                Ok(()) => {
                    assert!(!late, "op {op} was claimed after the close had returned");
                    // SAFETY: loom checks that nobody else is in the cell.
                    self.ops[op as usize].with_mut(|c| unsafe { *c += 1 });
                    look = self.cursor.look();
                }
                Err(now) => look = now,
            }
        }
    }
}

#[test]
fn an_op_is_claimed_once_and_none_after_the_close() {
    check(3, || {
        let rig = Arc::new(Claims {
            cursor: Cursor::new(),
            ops: core::array::from_fn(|_| UnsafeCell::new(0)),
            closed: AtomicBool::new(false),
        });
        let claimers = [spawn(&rig, Claims::claim_all), spawn(&rig, Claims::claim_all)];
        for op in &rig.ops {
            // SAFETY: loom checks that the claimers come after this.
            op.with_mut(|c| unsafe { *c = 10 });
        }
        rig.cursor.open();
        rig.cursor.close();
        rig.closed.store(true, Ordering::Release);
        for t in claimers {
            t.join().unwrap();
        }
        assert!(rig.cursor.look().is_none());
        for op in &rig.ops {
            // SAFETY: all claimers are gone.
            assert!(op.with(|c| unsafe { *c }) <= 11);
        }
    });
}

/// A lane: a list of published work, and what only the holder touches.
struct Lane {
    token: PollToken,
    work: [AtomicBool; 3],
    inner: UnsafeCell<u32>,
}

impl Lane {
    fn new() -> Arc<Lane> {
        Arc::new(Lane {
            token: PollToken::new(),
            work: core::array::from_fn(|_| AtomicBool::new(false)),
            inner: UnsafeCell::new(0),
        })
    }

    /// Publishes and then polls, as every caller of the engine does.
    fn publish(&self, work: usize) {
        self.work[work].store(true, Ordering::Release);
        self.token.publish();
        self.poll();
    }

    fn poll(&self) {
        while self.token.try_take() {
            self.token.look();
            for work in &self.work {
                if work.load(Ordering::Acquire) {
                    work.store(false, Ordering::Release);
                    // SAFETY: loom checks that nobody else is inside.
                    self.inner.with_mut(|i| unsafe { *i += 1 });
                }
            }
            if !self.token.give_back() {
                return;
            }
        }
    }
}

#[test]
fn published_work_is_done_by_somebody_and_by_one_at_a_time() {
    check(3, || {
        let lane = Lane::new();
        let publishers = [spawn(&lane, |l| l.publish(0)), spawn(&lane, |l| l.publish(1))];
        lane.poll();
        for t in publishers {
            t.join().unwrap();
        }
        // SAFETY: all threads are gone.
        assert_eq!(lane.inner.with(|i| unsafe { *i }), 2, "published work was overlooked");
        assert!(!lane.token.is_pending());
    });
}

/// The eventfd of the bell: loom knows how to wait for it, and calls a wait that nobody ends a
/// deadlock.
struct EventFd {
    rung: PlainBool,
    notify: Notify,
}

loom::lazy_static! {
    static ref EVENT_FD: EventFd =
        EventFd { rung: PlainBool::new(false), notify: Notify::new() };
}

impl EventFd {
    fn ring(_fd: i32) {
        EVENT_FD.rung.store(true, Ordering::Relaxed);
        EVENT_FD.notify.notify();
    }

    fn sleep(&self) {
        while !self.rung.swap(false, Ordering::Relaxed) {
            self.notify.wait();
        }
    }
}

struct Worker {
    bell: Bell,
    token: PollToken,
    done: AtomicU32,
}

#[test]
fn a_sleeper_never_misses_what_was_published() {
    check(3, || {
        let rig = Arc::new(Worker {
            bell: Bell::new(EventFd::ring, 0),
            token: PollToken::new(),
            done: AtomicU32::new(0),
        });
        let publisher = spawn(&rig, |w| {
            w.token.publish();
            w.bell.wake();
        });
        // The worker: looks, dozes off, looks again, sleeps until the work was there.
        while !rig.token.is_pending() {
            rig.bell.doze();
            if !rig.token.is_pending() {
                EVENT_FD.sleep();
            }
            rig.bell.rise();
        }
        rig.token.look();
        rig.done.fetch_add(1, Ordering::Relaxed);
        publisher.join().unwrap();
        assert_eq!(rig.done.load(Ordering::Relaxed), 1);
    });
}
