//! Notifications: sent, and taken.

use super::Engine;
use crate::engine::message::MAX_MESSAGE;
use crate::host::error::{Error, Result};
use crate::host::inbox;
use crate::status::Status;

impl Engine {
    /// Sends 0 to 65,536 bytes to a peer. Returns when they are queued.
    pub fn notify(&self, peer: u64, msg: &[u8]) -> Result<()> {
        if msg.len() > MAX_MESSAGE {
            return Err(too_long(msg.len()));
        }
        let (index, _) = self.peer(peer)?;
        self.shared.core.notify(peer, msg).map_err(|status| match status {
            Status::Capacity => self.messages_full(),
            _ => {
                let why = self.peer_error(index, status);
                self.redial(index);
                why
            }
        })
    }

    /// Takes every notification that has come: `f` gets the sender's name and the bytes. Polls
    /// first when there is no background thread.
    pub fn notifs(&self, f: &mut dyn FnMut(&[u8], &[u8])) -> Result<usize> {
        let core = &self.here()?.core;
        if !core.tuning().background {
            core.poll();
        }
        Ok(inbox::take(core, f))
    }
}

pub(super) fn too_long(len: usize) -> Error {
    let max = MAX_MESSAGE;
    Error::new(Status::Invalid, format!("a message of {len} bytes; 0 to {max} are allowed"))
}
