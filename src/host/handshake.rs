//! The bootstrap handshake over TCP, as two state machines that do no input or output.
//!
//! ```text
//! dialler                                acceptor
//! greeting HELLO{name, both incarnations, attempt, nonce}  ->
//!       <-  greeting CHALLENGE{incarnation, attempt, nonce, proof}
//! PROOF{offer, proof}  ->                the caller decides: accept or refuse
//!       <-  WELCOME{offer, proof}
//! READY{rails, proof}  <->  READY{rails, proof}    each side once its rails proved themselves
//! ```
//!
//! A proof is an HMAC under the acceptor's secret (which the dialler has from the blob, and which
//! never crosses the wire) over a label of its role and step and every byte exchanged so far:
//! versions, name, both incarnations, attempt, both nonces, offers, and whatever a newer minor
//! version adds. So a changed byte anywhere ends the dial. REFUSE{status, text} may come instead of
//! any frame; it proves nothing, as a refusal must work without the secret. After its READY a side
//! that gives up only closes: the other may be done, and what follows READY is messages.
//!
//! How to drive a machine: `receive(bytes)`, then `receive(&[])` until it says [`Step::More`]. On
//! an error send what `farewell` gives, if anything, and close. Time limits are the caller's, and
//! so is reading at most [`MAX_READ`] bytes at a time.
//!
//! What an unproven peer can make us hold is [`UNPROVEN_BYTES`], once per connection.

mod acceptor;
mod dialer;
mod frame;
mod session;

pub use acceptor::{Acceptor, AcceptorParams};
pub use dialer::{Dialer, DialerParams};

use super::error::Error;
use crate::status::Status;

/// Longest frame: type and body.
pub const MAX_FRAME: usize = 4096;
/// Longest offer.
pub const MAX_OFFER: usize = 2048;
/// Longest text of a refusal; the rest is cut.
pub const MAX_REASON: usize = 512;
/// Most bytes that a caller hands to `receive` at a time before the handshake is done.
pub const MAX_READ: usize = frame::GREETING + frame::HEADER + MAX_FRAME;
/// Most memory that a connection takes in an [`Acceptor`] before its peer has proved the secret:
/// the machine itself, one greeting and frame, and a name. Asserted by a test.
pub const UNPROVEN_BYTES: usize = 5120;

const _: () = assert!(
    core::mem::size_of::<Acceptor>() + MAX_READ + super::blob::MAX_NAME <= UNPROVEN_BYTES,
    "an unproven connection holds more than is stated"
);

/// Version of the wire. Builds of one major version work together; the smaller minor version
/// decides what is said.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Version {
    /// Another one is refused.
    pub major: u16,
    /// A newer one adds fields that an older one skips.
    pub minor: u16,
}

/// What this build speaks.
pub const WIRE: Version = Version { major: 1, minor: 1 };

impl core::fmt::Display for Version {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What the caller does next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Read more bytes.
    More,
    /// Send these.
    Send(Vec<u8>),
    /// Acceptor: the dialler proved the secret. Answer with `accept` or `refuse`.
    Decide {
        /// The name it gave, 1 to 255 bytes.
        name: Vec<u8>,
        /// Its incarnation.
        incarnation: [u8; 16],
        /// Which of its dials this is.
        attempt: u64,
        /// Its offer.
        offer: Vec<u8>,
    },
    /// Dialler: the acceptor proved the secret and accepted. Prove the rail, then call `ready`.
    Proven {
        /// Its offer.
        offer: Vec<u8>,
    },
    /// Both sides are ready.
    Done {
        /// Rails that proved themselves on the other side, one bit each, by their place in the
        /// dialler's offer.
        rails: u32,
        /// Bytes that already belong to the message stream.
        leftover: Vec<u8>,
    },
}

/// Why a handshake ended, for decisions; the text is in the [`Error`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The other side does not speak this protocol.
    Foreign,
    /// Another major version of the wire.
    Version,
    /// A frame of length 0 or above [`MAX_FRAME`].
    Length,
    /// A frame, or bytes, where another was due.
    Order,
    /// A frame whose fields are cut short or out of range.
    Malformed,
    /// The acceptor is another life of the agent than the dialler wanted, or the dialler itself.
    Incarnation,
    /// The answer belongs to another attempt.
    Attempt,
    /// The proof does not match: another secret, or bytes changed on the way.
    Proof,
    /// The other side refused; the error carries its status and text.
    Peer,
    /// This side refused.
    Own,
    /// The connection ended.
    Closed,
    /// The caller asked for a step that is not due.
    Caller,
}

/// Of two simultaneous dials between `mine` and `theirs`, does mine stay? The lower incarnation's
/// does.
pub fn dial_wins(mine: &[u8; 16], theirs: &[u8; 16]) -> bool {
    mine < theirs
}

/// An error of this layer with its kind.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Failure {
    fault: Fault,
    error: Error,
}

impl Failure {
    fn new(fault: Fault, text: impl Into<String>) -> Failure {
        let status = match fault {
            Fault::Closed => Status::Disconnected,
            Fault::Caller => Status::Invalid,
            _ => Status::Refused,
        };
        Failure { fault, error: Error::new(status, text) }
    }

    /// Is the other side told? Not one that speaks something else, refused first, or heard nothing
    /// yet.
    fn told(&self) -> bool {
        !matches!(self.fault, Fault::Foreign | Fault::Peer | Fault::Closed | Fault::Caller)
    }
}

type Outcome<T> = core::result::Result<T, Failure>;

#[cfg(test)]
mod tests;
