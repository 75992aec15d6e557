//! Two engines' mailboxes, connected over the modelled provider.

use crate::wire::{self, Wire};
use core::ptr::NonNull;
use kvrail::engine::arena::{Arena, BLOCK_ALIGN};
use kvrail::nic::verbs::mail::{MailSetup, Post, MAIL_BYTES, MAIL_RECEIVES, MAIL_SENDS};
use rdma_core_sys::ibv_qp;

pub const A: [u8; 16] = *b"cookie of side A";
pub const B: [u8; 16] = *b"cookie of side B";

/// Numbers in an order that the seed fixes.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn any(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 8
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.any() % n
    }
}

/// Bytes that stay until the process ends; the first is aligned as an arena wants it.
pub fn block(len: usize) -> &'static mut [u8] {
    let all = vec![0u8; len + BLOCK_ALIGN].leak();
    let skip = all.as_ptr().align_offset(BLOCK_ALIGN);
    &mut all[skip..skip + len]
}

pub fn arena(len: usize) -> Arena<'static> {
    let at = block(len);
    // SAFETY: the block is leaked and nobody else has it.
    unsafe { Arena::over(NonNull::new(at.as_mut_ptr()).unwrap(), len) }
}

pub fn post(peers: u32, lanes: u32) -> Post<'static> {
    let mut measure = Arena::measure();
    Post::new(&mut measure, peers, lanes).unwrap();
    Post::new(&mut arena(measure.used()), peers, lanes).unwrap()
}

/// Side 0 and side 1; peer `p` on lane `l` of one is peer `p` on lane `l` of the other.
pub struct Rig {
    pub wire: Wire,
    pub post: [Post<'static>; 2],
    pub lanes: u32,
}

impl Rig {
    pub fn new(peers: u32, lanes: u32) -> Rig {
        let wire = Wire::new(2 * lanes as usize);
        let mut post = [post(peers, lanes), post(peers, lanes)];
        for (side, post) in post.iter_mut().enumerate() {
            for lane in 0..lanes {
                let cq = wire.cq(side * lanes as usize + lane as usize);
                // SAFETY: the model's queues live on.
                unsafe { post.open_lane(lane, cq, u32::MAX) };
            }
        }
        Rig { wire, post, lanes }
    }

    /// Two fresh queue pairs for a mailbox of both sides.
    pub fn qps(&self, lane: u32) -> [*mut ibv_qp; 2] {
        let lane = lane as usize;
        self.wire.pair([lane, self.lanes as usize + lane])
    }

    /// Side 1 connects first, side 0 leads.
    pub fn connect(&mut self, peer: u32, lane: u32) -> [usize; 2] {
        let qps = self.qps(lane);
        let setups = [setup(qps[0], 0), setup(qps[1], 1)];
        for side in [1, 0] {
            // SAFETY: the model's queue pair and the memory live on; one thread.
            unsafe { self.post[side].connect(peer, lane, &setups[side]) }.unwrap();
        }
        qps.map(wire::number)
    }

    /// Connects and lets both sides see the proofs.
    pub fn up(&mut self, peer: u32, lane: u32) -> [usize; 2] {
        let numbers = self.connect(peer, lane);
        for _ in 0..3 {
            self.quiet();
        }
        for post in &self.post {
            assert_eq!(post.proof(peer, lane), Some(true));
        }
        numbers
    }

    /// All frames under way arrive, and both sides look.
    pub fn quiet(&mut self) {
        wire::run();
        for post in &mut self.post {
            post.poll(&mut []);
        }
    }

    pub fn ready(&mut self, side: usize) -> Vec<u32> {
        let mut ready = [9; 8];
        let n = self.post[side].poll(&mut ready);
        ready[..n].to_vec()
    }
}

pub fn setup(qp: *mut ibv_qp, side: usize) -> MailSetup {
    let cookies = [A, B];
    MailSetup {
        qp,
        memory: block(MAIL_BYTES).as_mut_ptr(),
        len: MAIL_BYTES,
        lkey: 77,
        inline: 64,
        receives: MAIL_RECEIVES,
        sends: MAIL_SENDS,
        window: MAIL_RECEIVES,
        cookie: cookies[side],
        expected: cookies[1 - side],
        lead: side == 0,
    }
}
