//! Greetings and frames: `len:u32 type:u8 body`, where `len` counts type and body.

use super::{Failure, Fault, Outcome, Version, MAX_FRAME, MAX_REASON};
use crate::host::error::{hex, shown, Error};
use crate::host::wire::{Reader, Short, Writer};
use crate::status::Status;

/// First bytes of each direction: magic, major, minor.
pub(super) const GREETING: usize = 8;
/// Length and type are checked once these are in.
pub(super) const HEADER: usize = 4;
const MAGIC: [u8; 4] = *b"KVRB";

/// Type of a frame. The numbers are wire format: never reused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Kind {
    Hello = 1,
    Challenge = 2,
    Proof = 3,
    Welcome = 4,
    Ready = 5,
    Refuse = 6,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Hello => "HELLO",
            Kind::Challenge => "CHALLENGE",
            Kind::Proof => "PROOF",
            Kind::Welcome => "WELCOME",
            Kind::Ready => "READY",
            Kind::Refuse => "REFUSE",
        }
    }
}

/// Bytes that were received and not yet understood.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
}

impl Inbox {
    /// Keeps `bytes`; `max` is the most that the other side may have sent by now.
    pub(super) fn push(&mut self, bytes: &[u8], max: usize) -> Outcome<()> {
        let total = self.bytes.len().saturating_add(bytes.len());
        if total > max {
            return Err(Failure::new(
                Fault::Order,
                format!("{total} bytes before an answer was due; allowed: {max}"),
            ));
        }
        // Exact, so that doubling does not hold more than is stated.
        self.bytes.reserve_exact(bytes.len());
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.bytes.capacity()
    }

    /// Everything that is left.
    pub(super) fn take_all(&mut self) -> Vec<u8> {
        core::mem::take(&mut self.bytes)
    }

    /// The other side's greeting: its version and its bytes, once all are in.
    pub(super) fn greeting(&mut self) -> Outcome<Option<(Version, Vec<u8>)>> {
        let first = self.bytes.get(..MAGIC.len()).unwrap_or(&self.bytes);
        if !MAGIC.starts_with(first) {
            return Err(Failure::new(
                Fault::Foreign,
                format!(
                    "the other side does not speak kvrail: its first bytes are {} (\"{}\"), a \
                     kvrail peer's are {}; check address and port",
                    hex(first),
                    shown(first, 4),
                    hex(&MAGIC)
                ),
            ));
        }
        let mut r = Reader::new(&self.bytes);
        let read = |r: &mut Reader<'_>| {
            r.bytes(MAGIC.len())?;
            Ok::<_, Short>(Version { major: r.u16()?, minor: r.u16()? })
        };
        match read(&mut r) {
            Ok(version) => Ok(Some((version, self.take(GREETING)))),
            Err(_) => Ok(None),
        }
    }

    /// The next frame, which must be of kind `due`, or an error if it is a refusal. The bytes
    /// include the header.
    pub(super) fn frame(&mut self, due: Kind) -> Outcome<Option<Vec<u8>>> {
        let mut r = Reader::new(&self.bytes);
        let Ok(len) = r.u32() else { return Ok(None) };
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        if len == 0 || len > MAX_FRAME {
            return Err(Failure::new(
                Fault::Length,
                format!(
                    "a frame of {len} bytes where {} is due; allowed: 1 to {MAX_FRAME}",
                    due.name()
                ),
            ));
        }
        // The type first: no waiting for the rest of a frame that is wrong anyway.
        let Ok(kind) = r.u8() else { return Ok(None) };
        if kind != due as u8 && kind != Kind::Refuse as u8 {
            return Err(Failure::new(
                Fault::Order,
                format!("a frame of type {kind} where {} (type {}) is due", due.name(), due as u8),
            ));
        }
        if self.bytes.len() < HEADER + len {
            return Ok(None);
        }
        let frame = self.take(HEADER + len);
        if kind == Kind::Refuse as u8 {
            return Err(refusal(&frame));
        }
        Ok(Some(frame))
    }

    fn take(&mut self, n: usize) -> Vec<u8> {
        let rest = self.bytes.split_off(n.min(self.bytes.len()));
        core::mem::replace(&mut self.bytes, rest)
    }
}

/// The bytes that open a direction.
pub(super) fn greeting(version: Version) -> Vec<u8> {
    let mut w = Writer::new();
    w.bytes(&MAGIC).u16(version.major).u16(version.minor);
    w.finish()
}

/// A whole frame.
pub(super) fn frame(kind: Kind, fill: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut w = Writer::new();
    w.counted(|w| {
        w.u8(kind as u8);
        fill(w);
    });
    w.finish()
}

/// The fields of a frame: what follows length and type.
pub(super) fn fields(frame: &[u8]) -> Reader<'_> {
    Reader::new(frame.get(HEADER + 1..).unwrap_or_default())
}

/// Turns a field that is not there into an error.
pub(super) fn cut(kind: Kind) -> impl Fn(Short) -> Failure {
    move |e| Failure::new(Fault::Malformed, format!("{} is cut short: {e}", kind.name()))
}

/// REFUSE: why, for the other side's log and decisions.
pub(super) fn refuse(status: Status, text: &str) -> Vec<u8> {
    let mut end = text.len().min(MAX_REASON);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let text = text.get(..end).unwrap_or_default();
    frame(Kind::Refuse, |w| {
        w.bytes(&status.code().to_le_bytes()).u16(text.len() as u16).bytes(text.as_bytes());
    })
}

/// What the other side refused with. A code that is no error here reads as a plain refusal.
fn refusal(frame: &[u8]) -> Failure {
    let mut r = fields(frame);
    let read = |r: &mut Reader<'_>| {
        let code = i32::from_le_bytes(r.array()?);
        let len = usize::from(r.u16()?);
        Ok::<_, Short>((code, shown(r.bytes(len)?, MAX_REASON)))
    };
    let (code, text) = match read(&mut r) {
        Ok(said) => said,
        Err(e) => return cut(Kind::Refuse)(e),
    };
    let status = Status::from_code(code).filter(|s| s.is_err()).unwrap_or(Status::Refused);
    let error = Error::new(status, format!("the peer refused (status {code}): {text}"));
    Failure { fault: Fault::Peer, error }
}
