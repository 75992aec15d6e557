//! What both machines share: the inbox, the running hash of everything said, and the proofs over
//! it.

use super::frame::{self, Inbox, Kind};
use super::{Failure, Fault, Outcome, Version, MAX_FRAME, MAX_OFFER};
use crate::host::error::Error;
use crate::host::wire::Writer;
use crate::status::Status;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// Bytes of a proof, the last of its frame.
pub(super) const PROOF: usize = 32;

/// Which proof: the role that gives it and the step. No label is a prefix of another.
pub(super) const ACCEPTOR: &[u8] = b"kvrail-acceptor\0";
pub(super) const DIALER: &[u8] = b"kvrail-dialer\0";
pub(super) const WELCOME: &[u8] = b"kvrail-welcome\0";
pub(super) const DIALER_READY: &[u8] = b"kvrail-dialer-ready\0";
pub(super) const ACCEPTOR_READY: &[u8] = b"kvrail-acceptor-ready\0";

/// One side of a handshake.
pub(super) struct Session {
    secret: [u8; 32],
    version: Version,
    peer: Option<Version>,
    said: Sha256,
    /// What this connection is, for error texts.
    pub(super) title: String,
    pub(super) inbox: Inbox,
    pub(super) ready: [bool; 2],
    /// Rails that the other side's READY names, one bit each.
    pub(super) rails: u32,
    failed: Option<Failure>,
    farewell: Vec<u8>,
    greeted: bool,
}

/// Index into [`Session::ready`].
pub(super) const MINE: usize = 0;
/// Index into [`Session::ready`].
pub(super) const THEIRS: usize = 1;

impl Session {
    pub(super) fn new(secret: [u8; 32], version: Version, title: String) -> Session {
        Session {
            secret,
            version,
            peer: None,
            said: Sha256::new(),
            title,
            inbox: Inbox::default(),
            ready: [false; 2],
            rails: 0,
            failed: None,
            farewell: Vec::new(),
            greeted: false,
        }
    }

    /// The smaller minor version, once the other side has greeted.
    pub(super) fn minor(&self) -> Option<u16> {
        self.peer.map(|p| p.minor.min(self.version.minor))
    }

    /// Our greeting, the first bytes we send.
    pub(super) fn greet(&mut self) -> Vec<u8> {
        self.greeted = true;
        let bytes = frame::greeting(self.version);
        self.hear(&bytes);
        bytes
    }

    /// Adds bytes that both sides have seen to what the proofs cover.
    pub(super) fn hear(&mut self, bytes: &[u8]) {
        self.said.update(bytes);
    }

    /// Reads the other side's greeting unless that was done. `false`: more bytes are needed.
    pub(super) fn greeting(&mut self) -> Outcome<bool> {
        if self.peer.is_some() {
            return Ok(true);
        }
        let Some((peer, bytes)) = self.inbox.greeting()? else { return Ok(false) };
        self.hear(&bytes);
        self.peer = Some(peer);
        if peer.major == self.version.major {
            return Ok(true);
        }
        Err(Failure::new(
            Fault::Version,
            format!(
                "the peer speaks wire version {peer}, this side {}; run kvrail builds of one major \
                 version on both sides",
                self.version
            ),
        ))
    }

    /// A frame that ends with a proof under `label` of all that was said, itself included.
    pub(super) fn seal(
        &mut self,
        label: &[u8],
        kind: Kind,
        fill: impl FnOnce(&mut Writer),
    ) -> Vec<u8> {
        let mut bytes = frame::frame(kind, |w| {
            fill(w);
            w.bytes(&[0; PROOF]);
        });
        let at = bytes.len() - PROOF;
        self.hear(&bytes[..at]);
        let proof: [u8; PROOF] = self.mac(label).finalize().into_bytes().into();
        bytes[at..].copy_from_slice(&proof);
        self.hear(&proof);
        bytes
    }

    /// Checks the proof of a frame, in constant time.
    pub(super) fn open(&mut self, label: &[u8], kind: Kind, bytes: &[u8]) -> Outcome<()> {
        let Some(at) = bytes.len().checked_sub(PROOF).filter(|at| *at > frame::HEADER) else {
            return Err(Failure::new(
                Fault::Malformed,
                format!("{} of {} bytes, its proof alone has {PROOF}", kind.name(), bytes.len()),
            ));
        };
        let (said, proof) = bytes.split_at(at);
        self.hear(said);
        self.mac(label).verify_slice(proof).map_err(|_| {
            Failure::new(
                Fault::Proof,
                format!(
                    "the proof in {} does not match: the two sides hold different secrets (take \
                     the agent's current metadata), or bytes changed on the way",
                    kind.name()
                ),
            )
        })?;
        self.hear(proof);
        Ok(())
    }

    /// Our READY, with the rails that proved themselves here. Both READYs cross, so neither covers
    /// the other.
    pub(super) fn seal_ready(&mut self, label: &[u8], rails: u32) -> Vec<u8> {
        let before = self.said.clone();
        let bytes = self.seal(label, Kind::Ready, |w| {
            w.u32(rails);
        });
        self.said = before;
        bytes
    }

    /// After both proofs: waits for the other side's READY, then says whether both are ready.
    pub(super) fn finish(&mut self, label: &[u8]) -> Outcome<Option<Vec<u8>>> {
        if !self.ready[THEIRS] {
            let Some(bytes) = self.inbox.frame(Kind::Ready)? else { return Ok(None) };
            let before = self.said.clone();
            self.open(label, Kind::Ready, &bytes)?;
            self.said = before;
            self.rails = frame::fields(&bytes).u32().map_err(frame::cut(Kind::Ready))?;
            self.ready[THEIRS] = true;
        }
        if self.ready[MINE] {
            return Ok(Some(self.inbox.take_all()));
        }
        // It has not heard our READY, so it can have nothing to say.
        self.quiet(Kind::Ready)?;
        Ok(None)
    }

    /// Most bytes that may wait in the inbox.
    pub(super) fn room(&self, frames: usize) -> usize {
        if self.ready[MINE] {
            // The message stream may follow; the peer has proved itself.
            return usize::MAX;
        }
        let greeting = if self.peer.is_some() { 0 } else { frame::GREETING };
        greeting + frames * (frame::HEADER + MAX_FRAME)
    }

    /// After a frame that we answer, nothing may follow before the answer.
    pub(super) fn quiet(&self, after: Kind) -> Outcome<()> {
        if self.inbox.is_empty() {
            return Ok(());
        }
        Err(Failure::new(
            Fault::Order,
            format!("{} bytes after {}, before its answer", self.inbox.len(), after.name()),
        ))
    }

    /// Ends the handshake, remembers why, and prepares the farewell.
    pub(super) fn fail(&mut self, mut failure: Failure) -> Error {
        if let Some(first) = &self.failed {
            return first.error.clone();
        }
        let reason = failure.error.message.clone();
        failure.error.message = format!("{}: {reason}", self.title);
        // After our READY the peer may be done, and would take a refusal for a message.
        if failure.told() && !self.ready[MINE] {
            self.farewell = self.refusal(failure.error.status, &reason);
        }
        self.failed = Some(failure.clone());
        self.inbox = Inbox::default();
        failure.error
    }

    /// Bytes of a refusal, with our greeting first if it was not sent.
    pub(super) fn refusal(&mut self, status: Status, text: &str) -> Vec<u8> {
        let mut bytes = if self.greeted { Vec::new() } else { self.greet() };
        bytes.extend(frame::refuse(status, text));
        bytes
    }

    /// The bytes for the other side after an error; once.
    pub(super) fn farewell(&mut self) -> Vec<u8> {
        core::mem::take(&mut self.farewell)
    }

    /// Why it ended, if it did.
    pub(super) fn fault(&self) -> Option<Fault> {
        self.failed.as_ref().map(|f| f.fault)
    }

    /// The error of a machine that has ended.
    pub(super) fn ended(&self) -> Option<Error> {
        self.failed.as_ref().map(|f| f.error.clone())
    }

    fn mac(&self, label: &[u8]) -> Hmac<Sha256> {
        // HMAC pads a short key with zeros to one block, so this is the plain 32-byte key.
        let mut key = [0; 64];
        key[..32].copy_from_slice(&self.secret);
        let mut mac = <Hmac<Sha256> as KeyInit>::new(&key.into());
        mac.update(label);
        mac.update(&self.said.clone().finalize());
        mac
    }

    /// Heap bytes behind this session.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.inbox.held() + self.title.capacity()
    }
}

impl core::fmt::Debug for Session {
    // By hand, to keep the secret out of logs.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Session")
            .field("title", &self.title)
            .field("peer", &self.peer)
            .field("ready", &self.ready)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

/// Writes an offer, whose length was checked.
pub(super) fn put_offer(w: &mut Writer, offer: &[u8]) {
    w.u16(offer.len() as u16).bytes(offer);
}

/// Reads the offer of a frame.
pub(super) fn get_offer(kind: Kind, frame: &[u8]) -> Outcome<Vec<u8>> {
    let mut r = frame::fields(frame);
    let len = usize::from(r.u16().map_err(frame::cut(kind))?);
    let offer = r.bytes(len).map_err(frame::cut(kind))?;
    check_offer(Fault::Malformed, offer)?;
    // The proof is not part of the fields.
    if r.rest().len() < PROOF {
        return Err(Failure::new(
            Fault::Malformed,
            format!("{}: an offer of {len} bytes runs into the proof", kind.name()),
        ));
    }
    Ok(offer.to_vec())
}

/// An offer is at most [`MAX_OFFER`] bytes.
pub(super) fn check_offer(fault: Fault, offer: &[u8]) -> Outcome<()> {
    if offer.len() <= MAX_OFFER {
        return Ok(());
    }
    Err(Failure::new(
        fault,
        format!("an offer of {} bytes; allowed: 0 to {MAX_OFFER}", offer.len()),
    ))
}
