//! Tables, and transfers from prepare to release.

use core::time::Duration;
use std::time::Instant;

use super::messages::too_long;
use super::{bad_handle, wait_until, Engine, Force, TransferInfo};
use crate::engine::slot::Body;
use crate::handle::Handle;
use crate::host::error::{Error, Result};
use crate::host::prepare;
use crate::nic::verbs::{self, wc_name, OF_FLUSH};
use crate::status::Status;
use crate::sync::{AtomicU64, Ordering};
use crate::table::{Desc, Direction, Stride};

impl Engine {
    /// A table of descriptors, copied.
    pub fn table_create(&self, descs: &[Desc]) -> Result<Handle> {
        self.here()?.tables.create(descs)
    }

    /// A table of few strided parts, which is never expanded.
    pub fn table_create_strided(&self, parts: &[Stride]) -> Result<Handle> {
        self.here()?.tables.create_strided(parts)
    }

    /// Destroys a table. Transfers that were prepared from it do not need it.
    pub fn table_destroy(&self, table: u64) -> Result<()> {
        self.here()?.tables.destroy(table)
    }

    /// Prepares the transfer of descriptor `local_idx[i]` of one table against `remote_idx[i]` of
    /// the other, for all `i`.
    pub fn prepare(
        &self,
        direction: Direction,
        peer: u64,
        local: u64,
        local_idx: &[u32],
        remote: u64,
        remote_idx: &[u32],
    ) -> Result<Handle> {
        let (index, s) = self.peer(peer)?;
        let p = self.shared.preparer(index);
        let peer = (index, s.generation);
        self.adopt(p.indexed(direction, peer, (local, local_idx), (remote, remote_idx))?)
    }

    /// Prepares the transfer of `local[i]` against `remote[i]`, for all `i`.
    pub fn prepare_descs(
        &self,
        direction: Direction,
        peer: u64,
        local: &[Desc],
        remote: &[Desc],
    ) -> Result<Handle> {
        let (index, s) = self.peer(peer)?;
        let p = self.shared.preparer(index);
        self.adopt(p.listed(direction, (index, s.generation), local, remote)?)
    }

    fn adopt(&self, body: Body) -> Result<Handle> {
        self.shared.core.adopt(body).map_err(|body| {
            // SAFETY: I3: prepared just now, and no slot took it.
            unsafe { prepare::free_body(&self.shared.pool, &body) };
            let max = self.shared.core.limits().transfers;
            let text = format!("all {max} transfers are prepared: release some, or raise ");
            Error::new(Status::Capacity, text + "max_transfers")
        })
    }

    /// Posts a transfer that is at rest; the message, if any, is delivered after the data. Never
    /// waits. To a peer with RDMA rails that was given up it is taken too, and waits for the dial
    /// that begins with it.
    pub fn post(&self, transfer: u64, notif: Option<&[u8]>) -> Result<Status> {
        let shared = self.here()?;
        let start = Instant::now();
        let status = match shared.core.post(transfer, notif) {
            Err(s) if self.may_post_again(transfer, s) => shared.core.post(transfer, notif),
            other => other,
        };
        let status =
            status.map_err(|s| self.post_error(transfer, s, notif.map_or(0, <[u8]>::len)))?;
        let ns = start.elapsed().as_nanos() as u64;
        if let Ok((descriptors, work_requests, bytes)) = shared.core.posted(transfer, ns) {
            let add = |to: &AtomicU64, n| to.fetch_add(n, Ordering::Relaxed);
            add(&shared.counts.posted, 1);
            add(&shared.counts.descriptors, descriptors);
            add(&shared.counts.work_requests, work_requests);
            add(&shared.counts.bytes, bytes);
            add(&shared.counts.post_ns, ns);
        }
        self.answer(transfer, status)
    }

    /// Whether a post that was refused is taken when it is tried again: it was for the peer's sake,
    /// who is being dialled now.
    fn may_post_again(&self, transfer: u64, status: Status) -> bool {
        let own = [Status::Busy, Status::Stale, Status::Invalid, Status::Capacity];
        let peer = self.shared.core.peer_of(transfer).filter(|_| !own.contains(&status));
        peer.is_some_and(|peer| self.may_wait(peer))
    }

    fn post_error(&self, transfer: u64, status: Status, len: usize) -> Error {
        let text = match status {
            Status::Busy => format!("transfer {transfer:#x} is in flight: wait until it is done"),
            Status::Invalid if len > crate::engine::message::MAX_MESSAGE => {
                return too_long(len);
            }
            Status::Capacity => return self.messages_full(),
            // The handle is good, so what is stale is something that it was prepared with.
            Status::Stale if self.shared.core.info(transfer).is_ok() => format!(
                "transfer {transfer:#x}: a region or the peer that it uses was released since it \
                 was prepared; release it and prepare another"
            ),
            Status::Stale | Status::Invalid => return bad_handle("transfer", transfer, status),
            _ => {
                if let Some(peer) = self.shared.core.peer_of(transfer) {
                    let why = self.peer_error(peer, status);
                    self.redial(peer);
                    return why;
                }
                format!("transfer {transfer:#x}")
            }
        };
        Error::new(status, text)
    }

    pub(super) fn messages_full(&self) -> Error {
        let (used, _) = self.shared.core.message_blocks_used();
        let all = self.shared.core.limits().blocks();
        let text = format!(
            "{used} of {all} outgoing message blocks of 256 bytes are in use: the peers must take \
             their notifications, or raise message_bytes"
        );
        Error::new(Status::Capacity, text)
    }

    /// A failed transfer as an error with its cause.
    fn answer(&self, transfer: u64, status: Status) -> Result<Status> {
        if !status.is_err() {
            return Ok(status);
        }
        let mut text = format!("transfer {transfer:#x}");
        if let Ok(info) = self.shared.core.info(transfer) {
            if info.failed_pair != u64::MAX {
                text += &format!(", descriptor pair {}", info.failed_pair);
            }
            text += &format!(", {} of {} bytes done", info.bytes_done, info.bytes);
            if let Some((lane, code)) = info.cause {
                text += &format!(", {}", self.rail_fault(lane, code, status));
            }
            if info.touched {
                text += ", the rest of its destination may have been written";
            }
        }
        let peers = [Status::Disconnected, Status::Unreachable, Status::Refused, Status::NoRail];
        if peers.contains(&status) {
            if let Some(peer) = self.shared.core.peer_of(transfer) {
                let why = self.peer_error(peer, status);
                text += &format!(": {}", why.message);
            }
        }
        Err(Error::new(status, text))
    }

    /// Which rail failed, and what its provider said.
    fn rail_fault(&self, lane: u32, code: u32, end: Status) -> String {
        let label = self.shared.rails.as_ref().and_then(|r| r.get(lane as usize));
        let label = label.map_or_else(|| "local".into(), |r| r.nic.label());
        let (status, vendor) = verbs::parts(code);
        let said = match (status, vendor) {
            (0, 0) if matches!(end, Status::RemoteAccess | Status::LocalAccess) => {
                "a work request was refused".into()
            }
            (0, 0) => "silent for too long, or closed".into(),
            (0, errno) => format!("errno {errno}"),
            _ => format!("{} ({status}), vendor code {vendor:#x}", wc_name(status)),
        };
        // A status of a work request alone reads as the peer's silence.
        let whose = if code & OF_FLUSH == 0 {
            ""
        } else {
            ", of the flush that this NIC sends to itself: see KVR_SEGMENT_COHERENT"
        };
        format!("first trouble on rail {lane} ({label}): {said}{whose}")
    }

    /// Where a transfer stands; a failed one is an error with its cause.
    pub fn check(&self, transfer: u64) -> Result<Status> {
        let core = &self.here()?.core;
        let status = core.check(transfer).map_err(|s| bad_handle("transfer", transfer, s))?;
        if status == Status::InProgress || status == Status::Ok {
            return Ok(status);
        }
        if status == Status::NotPosted {
            let text = format!("transfer {transfer:#x} was never posted");
            return Err(Error::new(status, text));
        }
        self.answer(transfer, status)
    }

    /// Stops a transfer: it ends with `Cancelled` when nothing of it is in flight any more.
    pub fn cancel(&self, transfer: u64) -> Result<()> {
        let core = &self.here()?.core;
        core.cancel(transfer).map_err(|s| bad_handle("transfer", transfer, s))
    }

    /// Ends a transfer's life, stopping it if need be. `Ok`: nothing touches its memory any more.
    /// Waits at most `release_timeout_ms`; after that `Busy`, and the handle stays valid.
    pub fn release(&self, transfer: u64) -> Result<()> {
        let shared = self.here()?;
        let limit = Duration::from_millis(u64::from(shared.config.release_timeout_ms));
        let (mut last, mut kept) = (Ok(()), false);
        let mut force = Force::within(limit);
        let done = wait_until(limit, || match shared.core.release(transfer) {
            Ok(body) => {
                // SAFETY: I3: released just now, by us.
                unsafe { prepare::free_body(&shared.pool, &body) };
                true
            }
            Err(Status::Busy) => {
                let _ = shared.core.cancel(transfer);
                shared.core.poll();
                force.once(|| shared.core.evict(transfer).unwrap_or(false));
                kept = shared.core.is_kept(transfer);
                kept
            }
            Err(s) => {
                last = Err(bad_handle("transfer", transfer, s));
                true
            }
        });
        if kept {
            let text = format!(
                "transfer {transfer:#x}: a NIC did not let go of a queue pair that carried it, so \
                 it may still use this memory, which must not be reused before this process ends"
            );
            return Err(Error::new(Status::Busy, text));
        }
        if done {
            return last;
        }
        let text = format!(
            "transfer {transfer:#x} still has something in flight, so its memory must not be \
             reused, after {} ms (release_timeout_ms): release it again",
            limit.as_millis()
        );
        Err(Error::new(Status::Busy, text))
    }

    /// Which pairs of a transfer at rest arrived whole in its last post: bit `i % 64` of word
    /// `i / 64` is pair `i`.
    pub fn transfer_arrived(&self, transfer: u64, bits: &mut [u64]) -> Result<()> {
        let core = &self.here()?.core;
        let bad = |s| match s {
            Status::Busy => {
                let text = format!("transfer {transfer:#x} is in progress: ask when it has ended");
                Error::new(s, text)
            }
            _ => bad_handle("transfer", transfer, s),
        };
        let pairs = core.info(transfer).map_err(bad)?.descriptors;
        let room = bits.len() as u64 * 64;
        if room < pairs {
            let text = format!("room for {room} bits, but the transfer has {pairs} pairs");
            return Err(Error::new(Status::Invalid, text));
        }
        let fill = |bits: &mut [u64], mut from: u64, end: u64, value: bool| {
            while from < end {
                let (word, bit) = ((from / 64) as usize, from % 64);
                let n = (64 - bit).min(end - from);
                let mask = (u64::MAX >> (64 - n)) << bit;
                bits[word] = if value { bits[word] | mask } else { bits[word] & !mask };
                from += n;
            }
        };
        bits.fill(0);
        fill(bits, 0, pairs, true);
        core.missing(transfer, |first, last| fill(bits, first, last + 1, false)).map_err(bad)
    }

    /// Counts of a transfer.
    pub fn transfer_info(&self, transfer: u64) -> Result<TransferInfo> {
        let core = &self.here()?.core;
        core.info(transfer).map_err(|s| bad_handle("transfer", transfer, s))
    }
}
