//! Which processes may count in which row of the shared memory. A process that was killed inside a
//! copy leaves its counts behind, and so may a peer that is forgotten already. A row may be cleared
//! only when every process that had it has ended.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use super::sys;
use crate::nic::local::Share;

/// A process that was given a row.
struct Tenant {
    pid: u32,
    /// Becomes readable when the process has ended. `None`: the kernel gave no such file, so nobody
    /// knows.
    process: Option<OwnedFd>,
    /// The peer, for messages.
    title: String,
}

impl Tenant {
    fn has_ended(&self) -> bool {
        self.process.as_ref().is_some_and(|p| sys::is_ready(p.as_raw_fd()))
    }
}

/// The processes of each row that have not been seen to end.
pub(super) struct Rows(Vec<Vec<Tenant>>);

impl Rows {
    pub(super) fn new(count: u32) -> Rows {
        Rows((0..count).map(|_| Vec::new()).collect())
    }

    /// Notes who may count in `row` from now on. `process` must have been opened before the peer
    /// proved that `pid` is its own.
    pub(super) fn give(&mut self, row: u32, pid: u32, process: Option<OwnedFd>, title: String) {
        let tenants = &mut self.0[row as usize];
        // The same process again, or a recycled number: the new file stands for it.
        tenants.retain(|t| t.pid != pid && !t.has_ended());
        tenants.push(Tenant { pid, process, title });
    }

    /// The file that becomes readable when the process that has `row` now has ended.
    pub(super) fn current(&self, row: u32) -> Option<RawFd> {
        Some(self.0[row as usize].last()?.process.as_ref()?.as_raw_fd())
    }

    /// True when nobody is inside any region by this row. The counts of processes that have ended
    /// are cleared.
    pub(super) fn is_clear(&mut self, share: &Share, row: u32) -> bool {
        share.row_is_clear(row) || self.clear(share, row)
    }

    /// The peer that is inside region `slot` by this row, if its process lives.
    pub(super) fn inside(&mut self, share: &Share, row: u32, slot: u32) -> Option<String> {
        if !share.is_inside(row, slot) || self.clear(share, row) {
            return None;
        }
        let titles: Vec<&str> = self.0[row as usize].iter().map(|t| t.title.as_str()).collect();
        Some(titles.join(" or "))
    }

    /// Clears a row if all who may count in it have ended.
    fn clear(&mut self, share: &Share, row: u32) -> bool {
        let tenants = &mut self.0[row as usize];
        tenants.retain(|t| !t.has_ended());
        if tenants.is_empty() {
            share.clear_row(row);
        }
        tenants.is_empty()
    }
}
