//! What an engine tells about itself.

use core::time::Duration;

use super::Engine;
use crate::engine::transfer::Info;
use crate::host::error::{Error, Result};
use crate::host::tell::EventFn;
use crate::status::Status;
use crate::sync::Ordering;

/// Counts of a transfer.
pub type TransferInfo = Info;

/// One rail's counters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RailInfo {
    /// Which, from 0.
    pub index: u32,
    /// The driver's name for it.
    pub name: String,
    /// Bytes that READs brought.
    pub bytes_read: u64,
    /// Bytes that WRITEs took out.
    pub bytes_written: u64,
    /// Work requests completed.
    pub work_requests: u64,
    /// Claims taken.
    pub claims: u64,
    /// Error completions.
    pub errors: u64,
}

/// What an engine holds now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineInfo {
    /// Rails to each peer.
    pub rails: u32,
    /// Memory taken when it was made.
    pub fixed_bytes: u64,
    /// Pool memory in use.
    pub pool_bytes: u64,
    /// Most pool memory.
    pub pool_limit: u64,
    /// Peers, without itself.
    pub peers: u32,
    /// Regions registered.
    pub regions: u32,
    /// Regions imported.
    pub remote_regions: u32,
    /// Tables.
    pub tables: u32,
    /// Prepared transfers.
    pub transfers: u32,
    /// The driver in use.
    pub transport: String,
    /// Where peers dial it.
    pub listen: String,
}

impl Engine {
    /// Counters of a rail.
    pub fn rail_info(&self, rail: u32) -> Result<RailInfo> {
        let lanes = self.here()?.core.lanes();
        let lane = lanes.get(rail as usize).ok_or_else(|| {
            let text = format!("rail {rail}; there are {} (from 0)", lanes.len());
            Error::new(Status::Range, text)
        })?;
        let s = &lane.stats;
        Ok(RailInfo {
            index: rail,
            name: self.lane_name(rail),
            bytes_read: s.bytes_read.load(Ordering::Relaxed),
            bytes_written: s.bytes_written.load(Ordering::Relaxed),
            work_requests: s.work_requests.load(Ordering::Relaxed),
            claims: s.claims.load(Ordering::Relaxed),
            errors: s.errors.load(Ordering::Relaxed),
        })
    }

    /// The NIC port of a lane; beside RDMA rails there is one for the engine itself.
    fn lane_name(&self, lane: u32) -> String {
        match &self.shared.rails {
            None => format!("local{lane}"),
            Some(r) => r.get(lane as usize).map_or_else(|| "self".into(), |r| r.nic.label()),
        }
    }

    /// How long every port of this engine's rails has been down; `None`: one is up. Of the rails'
    /// own ports, not of every NIC of the host; a port that lost its address counts as down. What
    /// lasts less than `link_debounce_ms` does not count, neither down nor up. With transport
    /// `local` there are no ports, so none is ever down.
    pub fn links_down(&self) -> Option<Duration> {
        self.shared.links_down()
    }

    /// Who takes this engine's events from now on: called on its control thread, which does nothing
    /// else meanwhile, and with no lock held. `None`: nobody. An event of before is not told; the
    /// one that is being told may last longer than this call. None is told once the engine is
    /// dropped.
    pub fn set_event_fn(&self, to: Option<EventFn>) -> Result<()> {
        self.here()?.teller.set(to);
        Ok(())
    }

    /// What the engine holds now.
    pub fn info(&self) -> EngineInfo {
        let s = &self.shared;
        EngineInfo {
            rails: s.rails.as_ref().map_or(s.core.limits().lanes, |r| r.len() as u32),
            fixed_bytes: s.fixed_bytes as u64,
            pool_bytes: s.pool.used(),
            pool_limit: s.pool.limit(),
            peers: s.peers().used(),
            regions: s.core.local.used(),
            remote_regions: s.core.remote.used(),
            tables: s.tables.used(),
            transfers: s.core.transfers_used(),
            transport: s.transport().into(),
            listen: self.listen.clone(),
        }
    }
}
