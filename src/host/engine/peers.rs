//! Peers: made known, dialled, waited for, removed.

use core::time::Duration;
use std::time::Instant;

use super::{bad_handle, Engine};
use crate::engine::peer::{Link, PeerState, SELF};
use crate::handle::Handle;
use crate::host::blob::ConnBlob;
use crate::host::connect;
use crate::host::error::{shown, Error, Result};
use crate::host::peers::Entry;
use crate::status::Status;

impl Engine {
    /// Makes a peer known by its blob and starts to dial it in the background. The same blob again
    /// gives the same peer; a blob of another incarnation under the same name replaces it: it
    /// restarted.
    pub fn peer_add(&self, blob: &[u8], expected_name: Option<&[u8]>) -> Result<Handle> {
        let shared = self.here()?;
        let blob = ConnBlob::decode(blob)?;
        if let Some(expected) = expected_name.filter(|n| *n != blob.name) {
            let text = format!(
                "the blob is of {}, not of {}: was it fetched from the right agent?",
                shown(&blob.name, 64),
                shown(expected, 64)
            );
            return Err(Error::new(Status::Mismatch, text));
        }
        if blob.incarnation == shared.incarnation {
            return Ok(self.peer_self());
        }
        connect::reachable(shared, &blob)?;
        let mut peers = shared.peers();
        let (core, share) = (&shared.core, &shared.share);
        let index = peers.find_or_add(core, share, &blob.name, blob.incarnation)?;
        let s = shared.core.peer_state(index);
        let entry = peers.entry(index);
        shared.learn_longest(index, blob.rails.iter().copied());
        // Other addresses of the same engine count from the next dial on.
        entry.route.clear();
        entry.blob = Some(blob);
        if s.link != Link::Up {
            entry.wanted = true;
            entry.dialled = None;
            shared.core.set_peer(index, PeerState { link: Link::Down, ..s });
            shared.nudge();
        }
        Ok(shared.core.peer_handle(index))
    }

    /// This engine as a peer: for transfers within it.
    pub fn peer_self(&self) -> Handle {
        self.shared.core.self_peer()
    }

    /// The peer of a name.
    pub fn peer_find(&self, name: &[u8]) -> Result<Handle> {
        let shared = self.here()?;
        let found = shared.peers().by_name.get(name).copied();
        found.map(|i| shared.core.peer_handle(i)).ok_or_else(|| {
            let text = format!("no peer is called {}: load its metadata first", shown(name, 64));
            Error::new(Status::NotFound, text)
        })
    }

    pub(super) fn peer(&self, raw: u64) -> Result<(u32, PeerState)> {
        self.here()?.core.peer(raw).map_err(|s| bad_handle("peer", raw, s))
    }

    /// Why a peer is of no use, in words. `status` is what the caller was refused with: how things
    /// stand with the peer may have changed since.
    pub(super) fn peer_error(&self, index: u32, status: Status) -> Error {
        let status = if status.is_err() { status } else { Status::Disconnected };
        let known = self.shared.peers().entry(index).error.clone();
        Error::new(status, known.map_or_else(|| "the peer is gone".into(), |e| e.message))
    }

    /// How things stand with a peer: connected, or being dialled (or without a rail for now), or an
    /// error that says why not.
    pub fn peer_state(&self, peer: u64) -> Result<Status> {
        let (index, s) = self.peer(peer)?;
        match s.link {
            Link::Up if self.has_rail(index) => Ok(Status::Ok),
            Link::Up | Link::Down => Ok(Status::InProgress),
            _ => Err(self.peer_error(index, s.status)),
        }
    }

    /// False for a peer whose rails all broke: it counts as connected for a while, and waits.
    fn has_rail(&self, index: u32) -> bool {
        self.shared.core.rails(index) != 0
    }

    /// Waits until a peer is connected, with a rail at least, or failed, at most `timeout`. Dials
    /// again if it was given up.
    pub fn peer_connect(&self, peer: u64, timeout: Duration) -> Result<()> {
        let (index, s) = self.peer(peer)?;
        let shared = self.here()?;
        if s.link == Link::Dead {
            self.redial(index);
        }
        let until = Instant::now() + timeout;
        let mut peers = shared.peers();
        loop {
            match shared.core.peer(peer).map_err(|s| bad_handle("peer", peer, s))?.1 {
                s if s.link == Link::Up && self.has_rail(index) => return Ok(()),
                s if s.link == Link::Dead => {
                    drop(peers);
                    return Err(self.peer_error(index, s.status));
                }
                _ => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let title = peers.entry(index).title();
                let text = format!("{title}: not connected within {} ms", timeout.as_millis());
                return Err(Error::new(Status::Unreachable, text));
            }
            peers = match shared.changed.wait_timeout(peers, left) {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// A peer that was given up is dialled once more, if it can be.
    pub(super) fn redial(&self, index: u32) {
        let mut peers = self.shared.peers();
        let s = self.shared.core.peer_state(index);
        let entry = peers.entry(index);
        if s.link == Link::Dead && entry.blob.is_some() {
            entry.wanted = true;
            self.shared.core.set_peer(index, PeerState { link: Link::Down, ..s });
            self.shared.nudge();
        }
    }

    /// Whether what was refused for a dead peer's sake may wait for a new dial, which begins: with
    /// RDMA rails, and a blob to dial by.
    pub(super) fn may_wait(&self, index: u32) -> bool {
        let dead = self.shared.core.peer_state(index).link == Link::Dead;
        let blob = |e: &Entry| e.blob.as_ref().is_some_and(|b| !b.rails.is_empty());
        let verbs = self.shared.rails.is_some() && blob(self.shared.peers().entry(index));
        if dead && verbs {
            self.redial(index);
        }
        dead && verbs
    }

    /// Ends and forgets a peer: its transfers end with `Disconnected`, its handle and its regions'
    /// are stale. When this returns nothing moves between it and us. Waits for at most one
    /// batch of each rail.
    pub fn peer_remove(&self, peer: u64) -> Result<()> {
        let (index, _) = self.peer(peer)?;
        if index == SELF {
            return Err(Error::new(Status::Invalid, "an engine cannot remove itself: destroy it"));
        }
        let mut peers = self.shared.peers();
        self.shared.core.peer(peer).map_err(|s| bad_handle("peer", peer, s))?;
        let why = Error::new(Status::Disconnected, "the peer was removed here");
        peers.remove(&self.shared.core, index, &why);
        Ok(())
    }
}
