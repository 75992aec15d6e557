//! Queue pairs and completion queues of a modelled provider, behind the function pointers of a
//! hand-made `ibv_context`. Nothing moves by itself: `step` delivers or acknowledges one frame.

use core::cell::RefCell;
use rdma_core_sys::*;
use std::collections::VecDeque;

/// Sends that a queue pair holds, as a provider would grant for 16.
const DEPTH: u64 = 16;

/// A change to a frame on its way.
type Tamper = fn(&mut Vec<u8>);

struct Send {
    id: u64,
    number: u64,
    signalled: bool,
    /// Copied at once, or where the bytes are when the frame is delivered.
    inline: Option<Vec<u8>>,
    at: (usize, usize),
}

#[derive(Default)]
struct Qp {
    cq: usize,
    peer: usize,
    error: bool,
    sends: VecDeque<Send>,
    unacknowledged: VecDeque<Send>,
    receives: VecDeque<(u64, usize, usize)>,
    posted: u64,
    retired: u64,
}

struct Done {
    wc: ibv_wc,
    /// Number of the send that it ends.
    send: Option<(usize, u64)>,
}

#[derive(Default)]
struct State {
    qps: Vec<Qp>,
    cqs: Vec<VecDeque<Done>>,
    tamper: Vec<(usize, Tamper)>,
    facts: Facts,
    limits: Limits,
}

/// What the tests look at.
#[derive(Default, Clone, Copy, Debug)]
pub struct Facts {
    /// Frames posted while the other side had no receive for them.
    pub starved: u32,
    pub frames: u32,
    pub inline: u32,
    pub signalled: u32,
    pub armed: u32,
}

/// What the provider refuses.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Receives that are still taken.
    pub receives: u32,
    /// Sends that are still taken.
    pub sends: u32,
    /// `poll_cq` fails.
    pub poll_fails: bool,
    /// `req_notify_cq` fails.
    pub arm_fails: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { receives: u32::MAX, sends: u32::MAX, poll_fails: false, arm_fails: false }
    }
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

fn with<R>(f: impl FnOnce(&mut State) -> R) -> R {
    crate::count::uncounted(|| STATE.with(|s| f(&mut s.borrow_mut())))
}

impl State {
    fn complete(&mut self, qp: usize, id: u64, status: ibv_wc_status, bytes: usize) {
        self.done(qp, id, status, bytes, None);
    }

    fn done(
        &mut self,
        qp: usize,
        id: u64,
        status: ibv_wc_status,
        bytes: usize,
        number: Option<u64>,
    ) {
        let mut wc = ibv_wc::zeroed();
        wc.wr_id = id;
        wc.status = status;
        wc.qp_num = qp as u32;
        // A failed one says nothing else.
        wc.byte_len = if status == IBV_WC_SUCCESS { bytes as u32 } else { 0xdead };
        self.cqs[self.qps[qp].cq].push_back(Done { wc, send: number.map(|n| (qp, n)) });
    }

    fn flush(&mut self, qp: usize, first: ibv_wc_status) {
        let q = &mut self.qps[qp];
        q.error = true;
        let mut sends = core::mem::take(&mut q.unacknowledged);
        sends.append(&mut q.sends);
        let receives = core::mem::take(&mut q.receives);
        let mut status = first;
        for s in sends {
            self.done(qp, s.id, status, 0, Some(s.number));
            status = IBV_WC_WR_FLUSH_ERR;
        }
        for (id, ..) in receives {
            self.complete(qp, id, IBV_WC_WR_FLUSH_ERR, 0);
        }
    }

    fn deliver(&mut self, qp: usize) -> bool {
        let peer = self.qps[qp].peer;
        if self.qps[peer].receives.is_empty() {
            return false;
        }
        let Some(s) = self.qps[qp].sends.pop_front() else { return false };
        let (id, at, room) = self.qps[peer].receives.pop_front().unwrap();
        let mut bytes = s.inline.clone().unwrap_or_else(|| {
            // The NIC reads the bytes when it sends them, so a buffer used again too early shows.
            // SAFETY: pointers of the caller, valid for the call as for a real provider.
            unsafe { core::slice::from_raw_parts(s.at.0 as *const u8, s.at.1) }.to_vec()
        });
        if let Some(i) = self.tamper.iter().position(|t| t.0 == qp) {
            self.tamper.remove(i).1(&mut bytes);
        }
        assert!(bytes.len() <= room, "a frame of {} in a receive of {room}", bytes.len());
        // SAFETY: pointers of the caller, valid for the call as for a real provider.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
        self.complete(peer, id, IBV_WC_SUCCESS, bytes.len());
        self.qps[qp].unacknowledged.push_back(s);
        true
    }

    fn acknowledge(&mut self, qp: usize) -> bool {
        let Some(s) = self.qps[qp].unacknowledged.pop_front() else { return false };
        if s.signalled {
            self.done(qp, s.id, IBV_WC_SUCCESS, 0, Some(s.number));
        }
        true
    }
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> i32 {
    // SAFETY: pointers of the caller, valid for the call as for a real provider.
    let (index, w) = unsafe { ((*qp).qp_num as usize, &*wr) };
    // SAFETY: pointers of the caller, valid for the call as for a real provider.
    let sge = unsafe { &*w.sg_list };
    assert!(w.next.is_null() && w.num_sge == 1 && w.opcode == IBV_WR_SEND && sge.lkey == 77);
    with(|s| {
        let peer = s.qps[index].peer;
        let waiting = s.qps[index].sends.len();
        s.facts.starved += u32::from(waiting >= s.qps[peer].receives.len() && !s.qps[peer].error);
        let q = &mut s.qps[index];
        if s.limits.sends == 0 || q.posted - q.retired >= DEPTH {
            // SAFETY: pointers of the caller, valid for the call as for a real provider.
            unsafe { *bad = wr };
            return 12;
        }
        s.limits.sends -= 1;
        let number = q.posted;
        q.posted += 1;
        s.facts.frames += 1;
        let at = (sge.addr as usize, sge.length as usize);
        let inline = w.send_flags & IBV_SEND_INLINE != 0;
        let signalled = w.send_flags & IBV_SEND_SIGNALED != 0;
        s.facts.signalled += u32::from(signalled);
        s.facts.inline += u32::from(inline);
        // SAFETY: pointers of the caller, valid for the call as for a real provider.
        let copy = || unsafe { core::slice::from_raw_parts(at.0 as *const u8, at.1) }.to_vec();
        let inline = inline.then(copy);
        q.sends.push_back(Send { id: w.wr_id, number, signalled, inline, at });
        if q.error {
            s.flush(index, IBV_WC_WR_FLUSH_ERR);
        }
        0
    })
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> i32 {
    // SAFETY: pointers of the caller, valid for the call as for a real provider.
    let (index, w) = unsafe { ((*qp).qp_num as usize, &*wr) };
    // SAFETY: pointers of the caller, valid for the call as for a real provider.
    let sge = unsafe { &*w.sg_list };
    assert!(w.next.is_null() && w.num_sge == 1 && sge.lkey == 77);
    with(|s| {
        if s.limits.receives == 0 || s.qps[index].receives.len() as u64 >= DEPTH {
            // SAFETY: pointers of the caller, valid for the call as for a real provider.
            unsafe { *bad = wr };
            return 12;
        }
        s.limits.receives -= 1;
        let at = (sge.addr as usize, sge.length as usize);
        // The buffer is the NIC's: what was in it is gone.
        // SAFETY: pointers of the caller, valid for the call as for a real provider.
        unsafe { core::ptr::write_bytes(at.0 as *mut u8, 0xee, at.1) };
        s.qps[index].receives.push_back((w.wr_id, at.0, at.1));
        if s.qps[index].error {
            s.flush(index, IBV_WC_WR_FLUSH_ERR);
        }
        0
    })
}

unsafe extern "C" fn poll(cq: *mut ibv_cq, entries: i32, wc: *mut ibv_wc) -> i32 {
    // SAFETY: pointers of the caller, valid for the call as for a real provider.
    let index = unsafe { (*cq).handle } as usize;
    with(|s| {
        if s.limits.poll_fails {
            return -5;
        }
        let n = s.cqs[index].len().min(entries as usize);
        for i in 0..n {
            let done = s.cqs[index].pop_front().unwrap();
            if let Some((qp, number)) = done.send {
                s.qps[qp].retired = s.qps[qp].retired.max(number + 1);
            }
            // SAFETY: pointers of the caller, valid for the call as for a real provider.
            unsafe { wc.add(i).write(done.wc) };
        }
        n as i32
    })
}

unsafe extern "C" fn arm(_: *mut ibv_cq, solicited: i32) -> i32 {
    with(|s| {
        s.facts.armed += u32::from(solicited == 0);
        if s.limits.arm_fails {
            5
        } else {
            0
        }
    })
}

/// A fresh fabric of `cqs` queues; pairs of queue pairs are added to it.
pub struct Wire {
    context: *mut ibv_context,
}

impl Wire {
    pub fn new(cqs: usize) -> Wire {
        with(|s| {
            *s = State::default();
            s.cqs.resize_with(cqs, VecDeque::new);
        });
        let mut context = Box::new(ibv_context::zeroed());
        context.ops.post_send = Some(post_send);
        context.ops.post_recv = Some(post_recv);
        context.ops.poll_cq = Some(poll);
        context.ops.req_notify_cq = Some(arm);
        // Test objects stay until the process ends.
        Wire { context: Box::leak(context) }
    }

    pub fn cq(&self, index: usize) -> *mut ibv_cq {
        let mut cq = Box::new(ibv_cq::zeroed());
        cq.context = self.context;
        cq.handle = index as u32;
        Box::leak(cq)
    }

    /// Two queue pairs connected to each other, which complete on these queues.
    pub fn pair(&self, cqs: [usize; 2]) -> [*mut ibv_qp; 2] {
        with(|s| {
            let first = s.qps.len();
            core::array::from_fn(|i| {
                s.qps.push(Qp { cq: cqs[i], peer: first + 1 - i, ..Qp::default() });
                let mut qp = Box::new(ibv_qp::zeroed());
                qp.context = self.context;
                qp.qp_num = (first + i) as u32;
                let qp: *mut ibv_qp = Box::leak(qp);
                qp
            })
        })
    }
}

pub fn number(qp: *mut ibv_qp) -> usize {
    // SAFETY: pointers of the caller, valid for the call as for a real provider.
    unsafe { (*qp).qp_num as usize }
}

/// Delivers or acknowledges one frame of one queue pair, chosen by `choice`.
pub fn step(choice: u64) -> bool {
    with(|s| {
        let qp = (choice >> 1) as usize % s.qps.len();
        if choice & 1 == 0 {
            s.deliver(qp)
        } else {
            s.acknowledge(qp)
        }
    })
}

/// Delivers all frames of one queue pair, without acknowledging any.
pub fn deliver(qp: usize) {
    while with(|s| s.deliver(qp)) {}
}

/// Acknowledges all that one queue pair has delivered.
pub fn acknowledge(qp: usize) {
    while with(|s| s.acknowledge(qp)) {}
}

/// Delivers and acknowledges all that is under way.
pub fn run() {
    while with(|s| (0..s.qps.len()).any(|qp| s.deliver(qp) || s.acknowledge(qp))) {}
}

/// Breaks a pair: the oldest send of `qp` fails with `status`, all else is flushed.
pub fn fail(qp: usize, status: ibv_wc_status) {
    with(|s| {
        let peer = s.qps[qp].peer;
        s.flush(qp, status);
        s.flush(peer, IBV_WC_WR_FLUSH_ERR);
    });
}

/// A completion that belongs to no work request.
pub fn forge(qp: usize, id: u64, status: ibv_wc_status) {
    with(|s| s.complete(qp, id, status, 9));
}

/// Changes the next frame that `qp` sends, on its way.
pub fn tamper(qp: usize, how: Tamper) {
    with(|s| s.tamper.push((qp, how)));
}

pub fn facts() -> Facts {
    with(|s| s.facts)
}

pub fn limit(change: impl FnOnce(&mut Limits)) {
    with(|s| change(&mut s.limits));
}

/// Frames under way, completions not taken.
pub fn backlog() -> (usize, usize) {
    with(|s| (s.qps.iter().map(|q| q.sends.len()).sum(), s.cqs.iter().map(VecDeque::len).sum()))
}
