//! A device of the tests' own: it keeps what is posted, and completes it when a test says so.
//!
//! Everything is of the calling thread: each test has its own device. Objects that were destroyed
//! are poisoned and leaked, so that a late use is seen.

#![allow(dead_code, reason = "each test file uses its part")]

mod calls;

use core::cell::RefCell;
use std::collections::{HashMap, VecDeque};

use rdma_core_sys::*;

/// Name of the only device.
pub(crate) const NAME: &str = "double0";

/// A work request, copied when it was posted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Wr {
    pub(crate) id: u64,
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    pub(crate) remote: u64,
    pub(crate) rkey: u32,
    /// Address, bytes, key.
    pub(crate) sges: Vec<(u64, u32, u32)>,
}

impl Wr {
    pub(crate) fn number(&self) -> u32 {
        self.id as u32
    }

    pub(crate) fn signalled(&self) -> bool {
        self.flags & IBV_SEND_SIGNALED != 0
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.sges.iter().map(|s| u64::from(s.1)).sum()
    }
}

/// What a post that is refused says of where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Bad {
    /// The first that was not posted.
    Right,
    /// Nothing.
    Null,
    /// An address that is in none of the list.
    Elsewhere,
}

/// The next post is refused at a work request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refuse {
    pub(crate) at: usize,
    pub(crate) code: i32,
    pub(crate) bad: Bad,
}

pub(crate) struct QpState {
    pub(crate) object: *mut ibv_qp,
    pub(crate) cq: *mut ibv_cq,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) cap: (u32, u32, u32, u32, u32),
    pub(crate) queue: VecDeque<Wr>,
    /// Each change: mask and attributes.
    pub(crate) changes: Vec<(u32, ibv_qp_attr)>,
}

#[derive(Debug, Default)]
pub(crate) struct CqState {
    pub(crate) entries: usize,
    pub(crate) queue: VecDeque<Entry>,
    pub(crate) armed: bool,
}

/// A completion: what an error leaves unwritten stays garbage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) id: u64,
    pub(crate) status: u32,
    pub(crate) qp: u32,
}

/// The device, and what happened to it.
pub(crate) struct State {
    pub(crate) device: ibv_device_attr,
    pub(crate) port: ibv_port_attr,
    /// GID, type, netdev.
    pub(crate) gids: Vec<([u8; 16], u32, u32)>,
    /// The library knows `ibv_query_gid_ex`.
    pub(crate) gid_ex: bool,
    /// Most inline bytes, and pieces, that a queue pair gets; more is refused.
    pub(crate) most_inline: u32,
    pub(crate) most_sges: u32,
    /// Errors of calls to come.
    pub(crate) fail: HashMap<&'static str, i32>,
    pub(crate) refuse: VecDeque<Refuse>,
    /// Live objects of each kind.
    pub(crate) live: HashMap<&'static str, i32>,
    /// Calls in order.
    pub(crate) calls: Vec<&'static str>,
    pub(crate) qps: HashMap<u32, QpState>,
    pub(crate) cqs: HashMap<usize, CqState>,
    pub(crate) events: VecDeque<ibv_async_event>,
    pub(crate) acknowledged: usize,
    pub(crate) cq_events: usize,
    /// Access flags of each registration.
    pub(crate) registered: Vec<(u64, usize, u64, u32)>,
    pub(crate) lists: usize,
    pub(crate) overrun: bool,
    pub(crate) next: u32,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::new(State::new());
}

/// A new device, as if nothing had happened.
pub(crate) fn reset() {
    with(|s| *s = State::new());
}

/// Looks at the device, or changes it.
pub(crate) fn with<R>(f: impl FnOnce(&mut State) -> R) -> R {
    STATE.with(|s| f(&mut s.borrow_mut()))
}

impl State {
    fn new() -> State {
        let device = ibv_device_attr {
            max_qp_wr: 4096,
            max_cqe: 8192,
            max_sge: 16,
            max_sge_rd: 16,
            max_qp_rd_atom: 16,
            max_qp_init_rd_atom: 16,
            max_mr: 1000,
            max_mr_size: 1 << 40,
            phys_port_cnt: 1,
            ..ibv_device_attr::zeroed()
        };
        let port = ibv_port_attr {
            state: IBV_PORT_ACTIVE,
            active_mtu: IBV_MTU_4096,
            max_mtu: IBV_MTU_4096,
            gid_tbl_len: 8,
            max_msg_sz: 1 << 30,
            active_width: 2,
            active_speed: 32,
            link_layer: IBV_LINK_LAYER_ETHERNET,
            ..ibv_port_attr::zeroed()
        };
        State {
            device,
            port,
            gids: Vec::new(),
            gid_ex: true,
            most_inline: 512,
            most_sges: 16,
            fail: HashMap::new(),
            refuse: VecDeque::new(),
            live: HashMap::new(),
            calls: Vec::new(),
            qps: HashMap::new(),
            cqs: HashMap::new(),
            events: VecDeque::new(),
            acknowledged: 0,
            cq_events: 0,
            registered: Vec::new(),
            lists: 0,
            overrun: false,
            next: 100,
        }
    }

    /// Every object was given back.
    pub(crate) fn nothing_lives(&self) -> bool {
        self.live.values().all(|&n| n == 0)
    }

    fn complete(&mut self, entry: Entry) {
        let Some(qp) = self.qps.get(&entry.qp) else { return };
        let Some(cq) = self.cqs.get_mut(&(qp.cq as usize)) else { return };
        if cq.queue.len() == cq.entries {
            self.overrun = true;
        }
        cq.queue.push_back(entry);
        if core::mem::take(&mut cq.armed) {
            self.cq_events += 1;
        }
    }

    /// The next `n` work requests of a queue pair succeed. What was done.
    pub(crate) fn done(&mut self, qp: u32, n: usize) -> Vec<Wr> {
        let mut done = Vec::new();
        for _ in 0..n {
            let Some(wr) = self.qps.get_mut(&qp).and_then(|q| q.queue.pop_front()) else { break };
            if wr.signalled() {
                self.complete(Entry { id: wr.id, status: IBV_WC_SUCCESS, qp });
            }
            done.push(wr);
        }
        done
    }

    /// The next work request fails, and those behind it are flushed.
    pub(crate) fn fails(&mut self, qp: u32, status: u32) {
        let mut status = status;
        while let Some(wr) = self.qps.get_mut(&qp).and_then(|q| q.queue.pop_front()) {
            self.complete(Entry { id: wr.id, status, qp });
            status = IBV_WC_WR_FLUSH_ERR;
        }
    }

    /// Any completion.
    pub(crate) fn puts(&mut self, qp: u32, id: u64, status: u32) {
        self.complete(Entry { id, status, qp });
    }

    /// What is posted to a queue pair and not done.
    pub(crate) fn posted(&self, qp: u32) -> Vec<Wr> {
        self.qps[&qp].queue.iter().cloned().collect()
    }
}

/// The library: its functions are the double's.
pub(crate) fn verbs() -> &'static Verbs {
    let mut table = calls::table();
    if !with(|s| s.gid_ex) {
        table.query_gid_ex_fn = None;
    }
    Box::leak(Box::new(table))
}
