//! What a device says of itself, and how its codes are read.

use core::ffi::c_int;

use rdma_core_sys::*;

/// What device and port said when they were opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Facts {
    /// Most work requests in one queue.
    pub max_qp_wr: u32,
    /// Most entries of a completion queue.
    pub max_cqe: u32,
    /// Most pieces of local memory in one work request, READ or WRITE.
    pub max_sge: u32,
    /// READs that the device answers at once, for one queue pair.
    pub rd_responder: u32,
    /// READs that the device has open at once, for one queue pair.
    pub rd_initiator: u32,
    /// Most bytes of one registration.
    pub max_mr_size: u64,
    /// Most registrations.
    pub max_mr: u32,
    /// Most bytes of one work request.
    pub max_msg_bytes: u32,
    /// Bytes of a packet's payload, as the port has it now.
    pub mtu: u32,
    /// Speed of the port in Mbit/s; 0: unknown.
    pub speed_mbps: u32,
    /// Entries that the completion queue of data has.
    pub cq_entries: u32,
    /// Entries that the completion queue of messages has.
    pub mail_entries: u32,
    /// True when the data queue pairs are in a thread domain, so that the provider needs no locks.
    pub parent_domain: bool,
}

impl Facts {
    pub(super) const NONE: Facts = Facts {
        max_qp_wr: 0,
        max_cqe: 0,
        max_sge: 0,
        rd_responder: 0,
        rd_initiator: 0,
        max_mr_size: 0,
        max_mr: 0,
        max_msg_bytes: 0,
        mtu: 0,
        speed_mbps: 0,
        cq_entries: 0,
        mail_entries: 0,
        parent_domain: false,
    };
}

/// A count of C, where a negative one means none.
pub(super) fn count(n: c_int) -> u32 {
    u32::try_from(n).unwrap_or(0)
}

/// Bytes that an MTU code stands for.
pub(super) const fn mtu_bytes(code: ibv_mtu) -> Option<u32> {
    match code {
        IBV_MTU_256..=IBV_MTU_4096 => Some(128 << code),
        _ => None,
    }
}

/// Mbit/s of a port: lanes times the speed of one (InfiniBand Architecture Specification, PortInfo,
/// LinkWidthActive and LinkSpeedActive).
pub(super) const fn speed(width: u8, speed: u8) -> u32 {
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    };
    let each = match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => 0,
    };
    lanes * each
}
