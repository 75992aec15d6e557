//! What is in a `wr_id`, and what a status means.

use rdma_core_sys::*;

use super::rail::Written;
use crate::limits::MAX_PEERS;
use crate::nic::WrStatus;
use crate::table::Op;

/// Most bytes that a flush reads back.
pub(super) const FLUSH: u32 = 8;

// A peer's slot fits its part of a `wr_id`.
const _: () = assert!(MAX_PEERS <= 1 << 16);

/// Makes `wr` a signalled WRITE of nothing, which needs neither memory nor key.
pub(super) fn nothing(wr: &mut ibv_send_wr, id: u64) {
    (wr.wr_id, wr.num_sge) = (id, 0);
    (wr.opcode, wr.send_flags) = (IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
    wr.wr = ibv_send_wr_wr { rdma: ibv_send_wr_rdma { remote_addr: 0, rkey: 0 } };
}

/// The last bytes that an op wrote.
pub(super) fn written(op: &Op, rkey: u32) -> Written {
    let len = op.len.min(FLUSH);
    Written { at: op.remote + u64::from(op.len - len), len, rkey }
}

/// The upper half of a `wr_id`.
pub(super) fn tag(epoch: u16, peer: u32) -> u64 {
    u64::from(epoch) << 48 | u64::from(peer) << 32
}

/// Epoch, peer and number.
pub(super) const fn split(id: u64) -> (u16, u32, u32) {
    ((id >> 48) as u16, (id >> 32) as u32 & 0xffff, id as u32)
}

/// Whose fault an error is. What is nobody's memory is the rail's, and may be repeated elsewhere.
pub(super) const fn classify(status: ibv_wc_status) -> WrStatus {
    match status {
        IBV_WC_LOC_LEN_ERR | IBV_WC_LOC_PROT_ERR => WrStatus::LocalAccess,
        IBV_WC_REM_INV_REQ_ERR | IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_OP_ERR => {
            WrStatus::RemoteAccess
        }
        // Among them LOC_QP_OP_ERR: the queue pair is inconsistent, whatever memory was named.
        _ => WrStatus::RailError,
    }
}

/// Status of libibverbs above the vendor's own code, for the log: `status << 16 | code`.
pub(super) const fn vendor(wc: &ibv_wc) -> u32 {
    wc.status << 16 | (wc.vendor_err & 0xffff)
}

/// In the code of a rail's failure: the NIC failed to read what it wrote itself (a flush, over the
/// queue pair that leads back to it), and the peer has no part in it.
pub const OF_FLUSH: u32 = 1 << 31;

/// The status of libibverbs and the vendor's code of a failure.
pub const fn parts(code: u32) -> (u32, u32) {
    ((code & !OF_FLUSH) >> 16, code & 0xffff)
}

/// What a provider's status means, in few words. Values: `enum ibv_wc_status`.
pub const fn wc_name(status: u32) -> &'static str {
    match status {
        IBV_WC_SUCCESS => "success",
        IBV_WC_LOC_LEN_ERR => "local length error",
        IBV_WC_LOC_QP_OP_ERR => "local queue pair error",
        IBV_WC_LOC_PROT_ERR => "local protection error",
        IBV_WC_WR_FLUSH_ERR => "flushed",
        IBV_WC_BAD_RESP_ERR => "bad response",
        IBV_WC_LOC_ACCESS_ERR => "local access error",
        IBV_WC_REM_INV_REQ_ERR => "remote invalid request",
        IBV_WC_REM_ACCESS_ERR => "remote access error",
        IBV_WC_REM_OP_ERR => "remote operation error",
        IBV_WC_RETRY_EXC_ERR => "retries exceeded: no answer from the peer's NIC",
        IBV_WC_RNR_RETRY_EXC_ERR => "receiver not ready for too long",
        IBV_WC_FATAL_ERR => "fatal error of the device",
        IBV_WC_RESP_TIMEOUT_ERR => "response timeout",
        _ => "error",
    }
}
