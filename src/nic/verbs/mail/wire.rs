//! What a mailbox puts on the wire, and its calls into the provider.

use rdma_core_sys::{
    ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_sge, post_recv, post_send, Zero, IBV_SEND_INLINE,
    IBV_SEND_SIGNALED, IBV_WR_SEND,
};

/// Bytes of a frame's header.
pub(super) const HEAD: usize = 8;

/// The first frame of each side: its cookie.
pub(super) const PROOF: u8 = 1;
/// Bytes of the stream.
pub(super) const DATA: u8 = 2;
/// Nothing but credits.
pub(super) const CREDIT: u8 = 3;

/// A frame's header: `len u16 | credits u8 | kind u8 | seq u32`, little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Head {
    /// Bytes that follow.
    pub(super) len: u16,
    /// Receives that the sender of this frame has posted again since its last one.
    pub(super) credits: u8,
    /// [`PROOF`], [`DATA`] or [`CREDIT`].
    pub(super) kind: u8,
    /// Number of the frame, from 0, wrapping.
    pub(super) seq: u32,
}

impl Head {
    pub(super) const fn bytes(self) -> [u8; HEAD] {
        let (l, s) = (self.len.to_le_bytes(), self.seq.to_le_bytes());
        [l[0], l[1], self.credits, self.kind, s[0], s[1], s[2], s[3]]
    }

    /// Of the first bytes of a frame. `None`: there are not enough.
    pub(super) fn of(frame: &[u8]) -> Option<Head> {
        let b: [u8; HEAD] = *frame.first_chunk()?;
        Some(Head {
            len: u16::from_le_bytes([b[0], b[1]]),
            credits: b[2],
            kind: b[3],
            seq: u32::from_le_bytes([b[4], b[5], b[6], b[7]]),
        })
    }
}

/// What a work request is, in its `wr_id`: `mailbox 32 | epoch 16 | receive 8 | buffer 8`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Id {
    /// Index of the mailbox.
    pub(super) mailbox: u32,
    /// Low bits of the mailbox's epoch.
    pub(super) epoch: u16,
    /// A receive; else a send.
    pub(super) receive: bool,
    /// Index of the buffer.
    pub(super) buffer: u8,
}

impl Id {
    pub(super) const fn raw(self) -> u64 {
        (self.mailbox as u64) << 32
            | (self.epoch as u64) << 16
            | (self.receive as u64) << 8
            | self.buffer as u64
    }

    pub(super) const fn of(raw: u64) -> Id {
        Id {
            mailbox: (raw >> 32) as u32,
            epoch: (raw >> 16) as u16,
            receive: raw & 0x100 != 0,
            buffer: raw as u8,
        }
    }
}

/// Posts the receive of one buffer. `Err`: errno.
///
/// # Safety
/// The queue pair lives. The buffer is registered under the key and left alone until the receive
/// completes or the queue pair is destroyed (V30).
pub(super) unsafe fn receive(qp: *mut ibv_qp, mut sge: ibv_sge, id: Id) -> Result<(), u32> {
    let mut wr = ibv_recv_wr::zeroed();
    wr.wr_id = id.raw();
    wr.sg_list = &raw mut sge;
    wr.num_sge = 1;
    let mut bad = core::ptr::null_mut();
    // SAFETY: V31: the caller's queue pair lives; the request and its list are local and only read.
    match unsafe { post_recv(qp, &raw mut wr, &raw mut bad) } {
        0 => Ok(()),
        e => Err(e.unsigned_abs()),
    }
}

/// Posts the send of one buffer. `Err`: errno.
///
/// # Safety
/// As for [`receive`].
pub(super) unsafe fn send(
    qp: *mut ibv_qp,
    mut sge: ibv_sge,
    id: Id,
    (inline, signal): (bool, bool),
) -> Result<(), u32> {
    let mut wr = ibv_send_wr::zeroed();
    wr.wr_id = id.raw();
    wr.sg_list = &raw mut sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = if inline { IBV_SEND_INLINE } else { 0 };
    wr.send_flags |= if signal { IBV_SEND_SIGNALED } else { 0 };
    let mut bad = core::ptr::null_mut();
    // SAFETY: V31: the caller's queue pair lives; the request and its list are local and only read.
    match unsafe { post_send(qp, &raw mut wr, &raw mut bad) } {
        0 => Ok(()),
        e => Err(e.unsigned_abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_ids_come_back_as_they_were() {
        let head = Head { len: 0x1234, credits: 0x56, kind: DATA, seq: 0x89ab_cdef };
        assert_eq!(head.bytes(), [0x34, 0x12, 0x56, 2, 0xef, 0xcd, 0xab, 0x89]);
        assert_eq!(Head::of(&head.bytes()), Some(head));
        assert_eq!(Head::of(&head.bytes()[..7]), None);
        for receive in [false, true] {
            let id = Id { mailbox: 0x8765_4321, epoch: 0xfedc, receive, buffer: 0xba };
            assert_eq!(Id::of(id.raw()), id);
        }
    }
}
