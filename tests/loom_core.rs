//! The engine's own post, poll and deregister under the model checker, with a port that "moves" at
//! once.
//!
//! | model | preemptions | seconds |
//! |---|---|---|
//! | `memory_of_a_deregistered_region_is_left_alone` | 3 | 8 |
//! | `memory_of_a_region_whose_transfer_ends_is_left_alone` | 3 | 8 |
//! | `memory_is_left_alone_after_the_peer_was_closed` | 2 | 1 |
//! | `memory_is_left_alone_after_cancel_and_release` | 3 | 34 |
//! | `a_post_that_a_rail_overtakes_is_done` | 3 | 9 |
//! | `nothing_is_done_before_a_dead_rail_is_fenced` | 2 | 5 |
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(clippy::arc_with_non_send_sync, reason = "loom's threads are the model's own")]

use core::ptr::NonNull;
use kvrail::engine::arena::{Arena, BLOCK_ALIGN};
use kvrail::engine::bell::Bell;
use kvrail::engine::core::{Core, Parts, Tuning};
use kvrail::engine::region::Regions;
use kvrail::engine::slot::{Body, RegionRef};
use kvrail::handle::{Handle, Kind};
use kvrail::limits::Limits;
use kvrail::nic::{Batch, Closed, Completion, Keys, Link, Net, Port, PostError, WrStatus};
use kvrail::status::Status;
use kvrail::table::{Direction, Op};
use loom::cell::UnsafeCell;
use std::sync::Arc;

/// Touches the memory inside post, and reports it at the next poll; or hangs.
#[derive(Debug)]
struct Copier {
    memory: Arc<UnsafeCell<u32>>,
    done: Option<Completion>,
    hangs: bool,
}

impl Port for Copier {
    fn access_error_breaks_rail(&self) -> bool {
        false
    }

    fn depth(&self) -> u32 {
        8
    }

    fn batch_bytes(&self) -> u64 {
        64
    }

    fn batch_ops(&self) -> u32 {
        8
    }

    fn may_land_late(&self) -> bool {
        self.hangs
    }

    fn post<K: Keys>(&mut self, batch: &Batch<'_, K>) -> Result<(), (u32, PostError)> {
        if self.hangs {
            return Ok(());
        }
        // SAFETY: loom checks that nobody else is in the cell.
        self.memory.with_mut(|m| unsafe { *m += 1 });
        let wr = batch.first_wr + batch.ops.len() as u32 - 1;
        self.done = Some(Completion { peer: batch.peer, wr, status: WrStatus::Success, vendor: 0 });
        Ok(())
    }

    fn poll(&mut self) -> Option<Completion> {
        self.done.take()
    }

    fn close(&mut self, _peer: u32) -> bool {
        true
    }
}

/// No messages.
#[derive(Debug)]
struct Silent;

impl Link for Silent {
    fn send(&mut self, _parts: &[&[u8]]) -> Result<usize, Closed> {
        Ok(0)
    }

    fn receive(&mut self, _into: &mut [u8]) -> Result<usize, Closed> {
        Ok(0)
    }
}

impl Net for Silent {
    type Link = Silent;

    fn ready(&mut self, _into: &mut [u32]) -> usize {
        0
    }
}

const OP: Op = Op { local: 0, remote: 0, len: 8, local_region: 0, remote_region: 0, tag: 0 };
const GENERATION: u32 = 1;
/// Of the engine itself, whose rail carries the ops.
const PEER: u32 = 0;
/// A region's first life.
const REGION: RegionRef = RegionRef { slot: 0, generation: GENERATION, remote: false };

/// An engine of one or two lanes with one transfer and one region, in a block of its own.
struct Rig {
    core: Core<'static, Copier, Silent>,
    memory: Arc<UnsafeCell<u32>>,
    /// The same place as the peer's NIC sees it, where a late packet lands.
    landing: UnsafeCell<u32>,
    transfer: u64,
    region: Handle,
    _ops: Box<[Op]>,
    _block: Vec<u128>,
}

impl Rig {
    /// One lane with a rail.
    fn new() -> Arc<Rig> {
        let rig = Rig::without_rails(1, false);
        rig.core.connect_rail(0, (PEER, 0), GENERATION, |_| ());
        // As after an earlier post: the lane has not yet found out that there is nothing to claim.
        assert!(rig.core.lanes()[0].set(0));
        rig
    }

    /// `hangs`: the first lane does; then the transfer is a WRITE.
    fn without_rails(lanes: u32, hangs: bool) -> Arc<Rig> {
        let limits = Limits {
            peers: 1,
            regions: 1,
            remote_regions: 1,
            transfers: 1,
            lanes,
            message_bytes: 0,
        };
        let memory = Arc::new(UnsafeCell::new(0));
        let mut block = vec![0u128; 1 << 13];
        let at = block.as_mut_ptr().cast::<u8>();
        let at = NonNull::new(at.wrapping_add(at.align_offset(BLOCK_ALIGN))).unwrap();
        // SAFETY: the block lives as long as the core; loom's atomics need no drop.
        let mut arena = unsafe { Arena::over(at, (1 << 17) - BLOCK_ALIGN) };
        let parts = Parts {
            limits,
            tuning: Tuning { inline_bytes: 0, stripe_all: false, background: true },
            net: Silent,
            worker: Bell::new(|_| {}, 0),
            host: Bell::new(|_| {}, 0),
            name: b"loom",
        };
        let core = Core::new(&mut arena, parts, |_, lane| {
            Some(Copier { memory: memory.clone(), done: None, hangs: hangs && lane == 0 })
        });
        let core = core.expect("128 KiB hold the engine");
        let regions: &Regions<'_> = &core.local;
        let region = regions.open(0, 8, PEER, (0, 0)).unwrap();
        assert_eq!((region.index(), region.generation()), (REGION.slot, REGION.generation));
        let mut ops: Box<[Op]> = Box::new([OP]);
        let body = Body {
            direction: if hangs { Direction::Write } else { Direction::Read },
            ops: ops.as_mut_ptr(),
            n_ops: 1,
            regions: &raw const REGION_LIST[0],
            n_regions: 1,
            peer: PEER,
            peer_generation: GENERATION,
            bytes: 8,
            ..Body::EMPTY
        };
        let transfer = core.adopt(body).unwrap();
        assert_eq!(Handle::parse(transfer.raw(), Kind::Transfer), Some(transfer));
        let transfer = transfer.raw();
        let landing = UnsafeCell::new(0);
        Arc::new(Rig { core, memory, landing, transfer, region, _ops: ops, _block: block })
    }
}

static REGION_LIST: [RegionRef; 1] = [REGION];

/// A model on a stack that an engine fits on.
fn check(preemptions: usize, model: impl Fn() + Send + Sync + Clone + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 5_000;
    builder.check(move || {
        let model = model.clone();
        let thread = loom::thread::Builder::new().stack_size(1 << 18).spawn(model).unwrap();
        thread.join().unwrap();
    });
}

impl Rig {
    /// A thread that runs `f`.
    fn spawn(self: &Arc<Rig>, f: impl FnOnce(&Rig) + 'static) -> loom::thread::JoinHandle<()> {
        let rig = self.clone();
        loom::thread::spawn(move || f(&rig))
    }

    fn post(&self) -> Result<Status, Status> {
        self.core.post(self.transfer, None)
    }

    fn poll(&self) {
        self.core.poll_lane(0);
    }

    /// The owner's use of memory that the engine said it would leave alone.
    fn reuse(&self) {
        // SAFETY: loom checks that the rail is not in the cell and does not come again.
        self.memory.with_mut(|m| unsafe { *m += 10 });
    }

    /// All threads but this one are gone: what is left to do is done.
    fn finish(&self) {
        while self.core.poll_lane(0) {}
        let end = self.core.check(self.transfer);
        assert_ne!(end, Ok(Status::InProgress), "nothing is in flight, yet it has not ended");
    }
}

#[test]
fn memory_of_a_deregistered_region_is_left_alone() {
    check(3, || {
        let rig = Rig::new();
        let poster = rig.spawn(|r| {
            let _ = r.post();
        });
        let rail = rig.spawn(Rig::poll);
        rig.core.local.close(rig.region).unwrap();
        let quiet = rig.core.quiesce(REGION).is_ok();
        if quiet {
            rig.reuse();
        }
        poster.join().unwrap();
        rail.join().unwrap();
        rig.finish();
        assert!(quiet || rig.core.quiesce(REGION) == Ok(()));
    });
}

/// The transfer is being cancelled by somebody else meanwhile.
#[test]
fn memory_of_a_region_whose_transfer_ends_is_left_alone() {
    check(3, || {
        let rig = Rig::new();
        rig.post().unwrap();
        let canceller = rig.spawn(|r| r.core.cancel(r.transfer).unwrap());
        let rail = rig.spawn(Rig::poll);
        rig.core.local.close(rig.region).unwrap();
        let quiet = rig.core.quiesce(REGION).is_ok();
        if quiet {
            rig.reuse();
        }
        canceller.join().unwrap();
        rail.join().unwrap();
        rig.finish();
        assert!(quiet || rig.core.quiesce(REGION) == Ok(()));
    });
}

/// A poller that looks only where something was published, as the progress thread does before it
/// sleeps, carries what was posted while the first rail came up on another lane.
#[test]
fn a_post_that_crosses_a_rail_coming_up_is_carried() {
    check(2, || {
        let rig = Rig::without_rails(2, false);
        let poster = rig.spawn(|r| assert!(r.post().is_ok()));
        let control = rig.spawn(|r| {
            r.core.connect_rail(1, (PEER, 1), GENERATION, |_| ());
            r.core.kick(PEER);
        });
        if rig.core.has_work() {
            rig.core.poll();
        }
        poster.join().unwrap();
        control.join().unwrap();
        while rig.core.has_work() {
            rig.core.poll();
        }
        assert_eq!(rig.core.check(rig.transfer), Ok(Status::Ok), "nobody looks at it any more");
    });
}

/// A rail hangs with a WRITE in flight and is dropped; the other one carries it. A packet of the
/// first lands at the peer until that has fenced it; the peer uses the place anew once it is done.
#[test]
fn nothing_is_done_before_a_dead_rail_is_fenced() {
    check(2, || {
        let rig = Rig::without_rails(2, true);
        for lane in 0..2 {
            rig.core.connect_rail(lane, (PEER, lane), GENERATION, |_| ());
        }
        rig.post().unwrap();
        rig.core.poll_lane(0);
        let control = rig.spawn(|r| {
            assert!(r.core.drop_rail(0, PEER).is_none());
            // SAFETY: loom checks that the peer does not use it yet.
            r.landing.with_mut(|m| unsafe { *m += 100 });
            r.core.fence(0, PEER);
        });
        // The first lane finds that its rail is gone and hands on, the second one carries, and what
        // it carried is looked at the next time.
        rig.core.poll();
        rig.core.poll();
        if rig.core.check(rig.transfer) == Ok(Status::Ok) {
            // SAFETY: loom checks that nothing lands any more.
            rig.landing.with_mut(|m| unsafe { *m += 1 });
        }
        control.join().unwrap();
        while rig.core.has_work() {
            rig.core.poll();
        }
        assert_eq!(rig.core.check(rig.transfer), Ok(Status::Ok));
    });
}

#[test]
fn memory_is_left_alone_after_the_peer_was_closed() {
    check(2, || {
        let rig = Rig::new();
        let poster = rig.spawn(|r| {
            let _ = r.post();
        });
        let rail = rig.spawn(Rig::poll);
        rig.core.close_peer(PEER, Status::Disconnected);
        rig.reuse();
        poster.join().unwrap();
        rail.join().unwrap();
        rig.finish();
    });
}

#[test]
fn memory_is_left_alone_after_cancel_and_release() {
    check(3, || {
        let rig = Rig::new();
        let rail = rig.spawn(|r| {
            r.poll();
            r.poll();
        });
        rig.post().unwrap();
        rig.core.cancel(rig.transfer).unwrap();
        while rig.core.release(rig.transfer).is_err() {
            loom::thread::yield_now();
            rig.poll();
        }
        rig.reuse();
        rail.join().unwrap();
        assert_eq!(rig.core.check(rig.transfer), Err(Status::Stale));
    });
}

#[test]
fn a_post_that_a_rail_overtakes_is_done() {
    check(3, || {
        let rig = Rig::new();
        let rail = rig.spawn(|r| {
            r.poll();
            r.poll();
        });
        rig.post().unwrap();
        rail.join().unwrap();
        rig.finish();
        assert_eq!(rig.core.check(rig.transfer), Ok(Status::Ok));
        // SAFETY: the rail is gone.
        assert_eq!(rig.memory.with(|m| unsafe { *m }), 1);
    });
}
