//! Queue pairs: how they are made, brought up and ended.

use core::ffi::c_int;

use rdma_core_sys::*;

use super::device::Device;
use super::facts::mtu_bytes;
use super::fault::Fault;
use crate::engine::ledger::CLAIMS;

/// Work requests beside the data that a rail may have in flight: a flush READ for each claim, a
/// marker and a proof.
pub(super) const EXTRA: u32 = CLAIMS as u32 + 2;
/// How often a peer that is not ready is asked again: code 12 is 0.64 ms (InfiniBand Architecture
/// Specification, table "Encoding for RNR NAK Timer Field").
const MIN_RNR_TIMER: u8 = 12;
/// Routers that a packet may pass: RoCE v2 sends it as the packet's time to live, for which RFC
/// 1700 (and Linux's `ip_default_ttl`) says 64.
const HOP_LIMIT: u8 = 64;
/// Most repeats: 7 means for ever, for RNR by the specification and for both on Soft-RoCE.
pub const MAX_RETRY: u8 = 6;

/// What a queue pair is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QpKind {
    /// READ and WRITE of one rail: no receives; completions in the queue of data.
    Data {
        /// Wanted data work requests in flight.
        depth: u32,
        /// Wanted pieces of local memory in one work request.
        sges: u32,
        /// Wanted bytes that a work request may carry in itself.
        inline: u32,
    },
    /// READs of this NIC's own memory, from itself: completions in the queue of data.
    Loopback {
        /// Wanted work requests in flight.
        depth: u32,
    },
    /// Messages: completions in the queue of messages.
    Mail {
        /// Wanted sends in flight.
        send: u32,
        /// Wanted receives.
        recv: u32,
        /// Wanted bytes that a send may carry in itself.
        inline: u32,
    },
}

/// A queue pair. It owns the object: [`Qp::destroy`] ends it; dropping it leaks it.
#[derive(Debug)]
#[must_use = "a queue pair that is only dropped is leaked: `Qp::destroy` ends it"]
pub struct Qp {
    verbs: &'static Verbs,
    raw: *mut ibv_qp,
    number: u32,
    cap: Granted,
    access: ibv_access_flags,
}

// SAFETY: V21: libibverbs' objects may be used from any thread.
unsafe impl Send for Qp {}
// SAFETY: V21: what takes `&self` here locks what it needs.
unsafe impl Sync for Qp {}

/// Names a queue pair without owning it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpPointer(pub(super) *mut ibv_qp);

// SAFETY: V21: libibverbs' objects may be used from any thread.
unsafe impl Send for QpPointer {}
// SAFETY: V21: only a copy of an address.
unsafe impl Sync for QpPointer {}

impl QpPointer {
    /// The object of C. Valid until [`Qp::destroy`].
    pub const fn as_ptr(self) -> *mut ibv_qp {
        self.0
    }
}

/// What the device gave a queue pair: at least what was asked for, or less where it could not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Granted {
    /// Work requests in the send queue, those for flushes and markers included.
    pub depth: u32,
    /// Receives.
    pub receives: u32,
    /// Pieces of local memory in one work request.
    pub sges: u32,
    /// Bytes that a work request may carry in itself.
    pub inline: u32,
}

/// How to reach the other end, and what both ends agreed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Path {
    /// Place of the own GID in the port's table.
    pub gid_index: u32,
    /// GID of the other end.
    pub remote_gid: [u8; 16],
    /// Number of the other end's queue pair.
    pub remote_qpn: u32,
    /// First packet number that this end sends; random, the low 24 bits count.
    pub own_psn: u32,
    /// First packet number that the other end sends.
    pub remote_psn: u32,
    /// Bytes of a packet's payload: the smaller of both ends.
    pub mtu: u32,
    /// READs that this end has open at once: the smaller of own initiator and peer's responder.
    pub rd_initiator: u8,
    /// READs that this end answers at once.
    pub rd_responder: u8,
    /// How long to wait for an acknowledgement: 4.096 us times 2 to the power of this, 1 to 31.
    pub timeout: u8,
    /// Repeats without an acknowledgement, 0 to 6.
    pub retry: u8,
    /// Repeats when the peer has no receive, 0 to 6.
    pub rnr_retry: u8,
    /// The packets' traffic class (DSCP and ECN).
    pub traffic_class: u8,
    /// Service level, 0 to 15 (RoCE: priority).
    pub service_level: u8,
}

impl Device {
    /// Makes a queue pair. What the device cannot give is asked for again with half of it: first
    /// inline bytes, then pieces, then depth; [`Qp::granted`] says what it gave.
    ///
    /// # Errors
    /// The device gives none at all, with the first error number.
    pub fn create_qp(&self, kind: QpKind) -> Result<Qp, Fault> {
        let facts = self.facts();
        let (data, mut cap) = match kind {
            QpKind::Data { depth, sges, inline } => {
                let depth = depth.saturating_add(EXTRA).clamp(2, facts.max_qp_wr);
                (true, Granted { depth, receives: 0, sges: sges.clamp(1, facts.max_sge), inline })
            }
            QpKind::Loopback { depth } => {
                let depth = depth.clamp(1, facts.max_qp_wr);
                (true, Granted { depth, receives: 0, sges: 1, inline: 0 })
            }
            QpKind::Mail { send, recv, inline } => {
                let (most, sges) = (facts.max_qp_wr, 1);
                let (depth, receives) = (send.clamp(1, most), recv.clamp(1, most));
                (false, Granted { depth, receives, sges, inline })
            }
        };
        // What the other end may do; messages need no access from outside.
        let access = match kind {
            QpKind::Data { .. } => IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
            QpKind::Loopback { .. } => IBV_ACCESS_REMOTE_READ,
            QpKind::Mail { .. } => 0,
        };
        let wanted = cap;
        let mut first = 0;
        loop {
            match self.try_create(data, cap) {
                Ok(qp) => return Ok(Qp { access, ..qp }),
                Err(e) if first == 0 => first = e,
                Err(_) => {}
            }
            // The limits of a device hold for each alone; together they may be too much.
            if cap.inline > 0 {
                cap.inline = if cap.inline < 32 { 0 } else { cap.inline / 2 };
            } else if cap.sges > 1 {
                cap.sges /= 2;
            } else if data && cap.depth > 2 * EXTRA {
                cap.depth /= 2;
            } else {
                let max = Some(facts.max_qp_wr.into());
                return Err(Fault::new("ibv_create_qp", first).asking(
                    "send work requests",
                    wanted.depth.into(),
                    max,
                ));
            }
        }
    }

    fn try_create(&self, data: bool, want: Granted) -> Result<Qp, i32> {
        let cq = if data { self.data_cq() } else { self.mail_cq() };
        // The message side has another token than the lane, so it is outside the lane's domain.
        let domain = if data { self.lane_domain() } else { self.domain() };
        let mut attr = ibv_qp_init_attr {
            send_cq: cq,
            recv_cq: cq,
            qp_type: IBV_QPT_RC,
            cap: ibv_qp_cap {
                max_send_wr: want.depth,
                max_recv_wr: want.receives,
                max_send_sge: want.sges,
                max_recv_sge: u32::from(!data),
                max_inline_data: want.inline,
            },
            ..ibv_qp_init_attr::zeroed()
        };
        // SAFETY: V22: domain and queues are of this open device.
        let raw = unsafe { self.verbs().create_qp(domain, &raw mut attr) };
        if raw.is_null() {
            return Err(errno());
        }
        // SAFETY: V22: made just now.
        let number = unsafe { (*raw).qp_num };
        let cap = Granted {
            depth: attr.cap.max_send_wr,
            receives: attr.cap.max_recv_wr,
            sges: attr.cap.max_send_sge,
            inline: attr.cap.max_inline_data,
        };
        Ok(Qp { verbs: self.verbs(), raw, number, cap, access: 0 })
    }
}

impl Qp {
    /// The number that the other end must know.
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// What the device gave.
    pub const fn granted(&self) -> Granted {
        self.cap
    }

    /// Names the queue pair.
    pub const fn pointer(&self) -> QpPointer {
        QpPointer(self.raw)
    }

    /// Brings it from RESET to RTS: it can be posted to, and takes what the other end sends.
    ///
    /// # Errors
    /// The step that failed. The queue pair is good for [`Qp::destroy`] only.
    pub fn raise(&self, device: &Device, path: &Path) -> Result<(), Fault> {
        let mtu = check(path, device)?;
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            port_num: device.port_number(),
            qp_access_flags: self.access,
            ..ibv_qp_attr::zeroed()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify("ibv_modify_qp (RESET to INIT)", &mut attr, mask)?;

        attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: mtu,
            dest_qp_num: path.remote_qpn,
            rq_psn: path.remote_psn & 0xff_ffff,
            max_dest_rd_atomic: path.rd_responder,
            min_rnr_timer: MIN_RNR_TIMER,
            ah_attr: ibv_ah_attr {
                is_global: 1,
                sl: path.service_level,
                port_num: device.port_number(),
                grh: ibv_global_route {
                    dgid: ibv_gid { raw: path.remote_gid },
                    sgid_index: path.gid_index as u8, // `check` saw that it fits
                    hop_limit: HOP_LIMIT,
                    traffic_class: path.traffic_class,
                    ..ibv_global_route::zeroed()
                },
                ..ibv_ah_attr::zeroed()
            },
            ..ibv_qp_attr::zeroed()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify("ibv_modify_qp (INIT to RTR)", &mut attr, mask)?;

        attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            timeout: path.timeout,
            retry_cnt: path.retry,
            rnr_retry: path.rnr_retry,
            sq_psn: path.own_psn & 0xff_ffff,
            max_rd_atomic: path.rd_initiator,
            ..ibv_qp_attr::zeroed()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("ibv_modify_qp (RTR to RTS)", &mut attr, mask)
    }

    /// Moves it to the error state: what is in flight is flushed. A failure changes nothing that
    /// matters: destroying it ends everything.
    pub fn fail(&self) {
        let mut attr = ibv_qp_attr { qp_state: IBV_QPS_ERR, ..ibv_qp_attr::zeroed() };
        let _ = self.modify("ibv_modify_qp (to ERR)", &mut attr, IBV_QP_STATE);
    }

    /// Moves it to the state in which it was made: what was posted is gone without completions.
    /// When this has returned `Ok`, nothing that it carried touches memory here any more; the
    /// object is left, and may take seconds to destroy.
    ///
    /// # Errors
    /// The device did not: nothing is known of what was posted.
    pub fn reset(&self) -> Result<(), Fault> {
        let mut attr = ibv_qp_attr { qp_state: IBV_QPS_RESET, ..ibv_qp_attr::zeroed() };
        self.modify("ibv_modify_qp (to RESET)", &mut attr, IBV_QP_STATE)
    }

    /// Destroys it. When this has returned `Ok`, nothing that it carried touches memory any more.
    ///
    /// # Errors
    /// The device did not destroy it, and may still use memory that its work requests name. It is
    /// leaked.
    ///
    /// # Safety
    /// Nobody else uses the queue pair, or a copy of its [`QpPointer`], from now on (V22).
    pub unsafe fn destroy(self) -> Result<(), Fault> {
        // SAFETY: V22: made by `create_qp`, given up by value, and the caller says that no copy of
        // the pointer is used any more.
        match unsafe { self.verbs.destroy_qp(self.raw) } {
            0 => Ok(()),
            e => Err(Fault::new("ibv_destroy_qp", e).asking("number", self.number.into(), None)),
        }
    }

    fn modify(
        &self,
        step: &'static str,
        attr: &mut ibv_qp_attr,
        mask: ibv_qp_attr_mask,
    ) -> Result<(), Fault> {
        // SAFETY: V22: alive until `destroy`, which takes it by value.
        match unsafe { self.verbs.modify_qp(self.raw, attr, mask as c_int) } {
            0 => Ok(()),
            // -1 and `errno`, of older providers.
            e => Err(Fault::new(step, if e < 0 { errno() } else { e }).asking(
                "number",
                self.number.into(),
                None,
            )),
        }
    }
}

/// Refuses what a path may not have, and finds the code of its MTU.
fn check(path: &Path, device: &Device) -> Result<ibv_mtu, Fault> {
    let facts = device.facts();
    let max = |n: u32| u64::from(n.min(255));
    let rules = [
        ("retry", path.retry.into(), 0, MAX_RETRY.into()),
        ("rnr_retry", path.rnr_retry.into(), 0, MAX_RETRY.into()),
        // 0 would wait for ever.
        ("timeout", path.timeout.into(), 1, 31),
        ("service level", path.service_level.into(), 0, 15),
        ("GID index", path.gid_index.into(), 0, 255),
        ("queue pair number", path.remote_qpn.into(), 1, 0xff_ffff),
        ("READs as initiator", path.rd_initiator.into(), 1, max(facts.rd_initiator)),
        ("READs as responder", path.rd_responder.into(), 1, max(facts.rd_responder)),
        ("MTU", path.mtu.into(), 256, facts.mtu.into()),
    ];
    for (what, asked, least, most) in rules {
        if asked < least || asked > most {
            let fault = Fault::new("ibv_modify_qp", libc::EINVAL);
            return Err(fault.asking(what, asked, Some(most)));
        }
    }
    let codes = [IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096];
    codes.into_iter().find(|&c| mtu_bytes(c) == Some(path.mtu)).ok_or_else(|| {
        let fault = Fault::new("ibv_modify_qp", libc::EINVAL);
        fault.asking("MTU, which is none of 256 to 4096,", path.mtu.into(), None)
    })
}
