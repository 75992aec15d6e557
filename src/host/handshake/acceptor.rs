//! The side that was dialled. Until the dialler has proved the secret it holds at most one frame
//! and a name.

use super::frame::{self, Kind};
use super::session::{self, Session, MINE};
use super::{Failure, Fault, Outcome, Step, Version, WIRE};
use crate::host::blob::MAX_NAME;
use crate::host::error::{hex, shown, Error, Result};
use crate::status::Status;

/// What a listener knows.
#[derive(Clone)]
pub struct AcceptorParams {
    /// Our incarnation, as in our blob.
    pub incarnation: [u8; 16],
    /// Our secret, as in our blob.
    pub secret: [u8; 32],
    /// Fresh random bytes.
    pub nonce: [u8; 32],
    /// Wire version to speak: [`WIRE`], except in tests of old against new.
    pub version: Version,
}

impl Default for AcceptorParams {
    fn default() -> AcceptorParams {
        AcceptorParams { incarnation: [0; 16], secret: [0; 32], nonce: [0; 32], version: WIRE }
    }
}

impl core::fmt::Debug for AcceptorParams {
    // By hand, to keep the secret out of logs.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("AcceptorParams")
            .field("incarnation", &hex(&self.incarnation))
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Hello,
    Proof,
    Decide,
    Ready,
    Done,
}

/// The accepting machine.
#[derive(Debug)]
pub struct Acceptor {
    params: AcceptorParams,
    session: Session,
    state: State,
    name: Vec<u8>,
    dialer: [u8; 16],
    attempt: u64,
}

impl Acceptor {
    /// A machine for one accepted connection.
    pub fn new(params: AcceptorParams) -> Acceptor {
        let title = String::from("dial to this agent");
        let session = Session::new(params.secret, params.version, title);
        let state = State::Hello;
        Acceptor { params, session, state, name: Vec::new(), dialer: [0; 16], attempt: 0 }
    }

    /// Takes bytes from the connection. Call again with none until it says [`Step::More`].
    pub fn receive(&mut self, bytes: &[u8]) -> Result<Step> {
        if let Some(e) = self.session.ended() {
            return Err(e);
        }
        self.step(bytes).map_err(|f| self.fail(f))
    }

    /// After [`Step::Decide`]: takes the dialler in, and gives the bytes to send. The offer is at
    /// most 2048 bytes.
    pub fn accept(&mut self, offer: &[u8]) -> Result<Vec<u8>> {
        if let Some(e) = self.session.ended() {
            return Err(e);
        }
        session::check_offer(Fault::Caller, offer).map_err(|f| f.error)?;
        if self.state != State::Decide {
            return Err(self.not_due("accept"));
        }
        self.state = State::Ready;
        Ok(self.session.seal(session::WELCOME, Kind::Welcome, |w| session::put_offer(w, offer)))
    }

    /// Turns the dialler away before it is done: the bytes that tell it why. None after `ready`:
    /// then the caller just closes, as the other side may be done already.
    pub fn refuse(&mut self, status: Status, text: &str) -> Vec<u8> {
        if self.state == State::Done || self.session.ended().is_some() {
            return Vec::new();
        }
        let failure = Failure { fault: Fault::Own, error: Error::new(status, text) };
        self.fail(failure);
        self.session.farewell()
    }

    /// These rails proved themselves from this side, one bit each, by their place in the dialler's
    /// offer: gives the bytes to send. Then call `receive` again.
    pub fn ready(&mut self, rails: u32) -> Result<Vec<u8>> {
        if let Some(e) = self.session.ended() {
            return Err(e);
        }
        if self.state != State::Ready || self.session.ready[MINE] {
            return Err(self.not_due("ready"));
        }
        self.session.ready[MINE] = true;
        Ok(self.session.seal_ready(session::ACCEPTOR_READY, rails))
    }

    /// The connection ended: the error to report. `None` once it is done.
    pub fn closed(&mut self) -> Option<Error> {
        if self.state == State::Done {
            return None;
        }
        let due = match self.state {
            State::Hello => "HELLO was due",
            State::Proof => "PROOF was due",
            State::Decide => "this side's answer was due",
            State::Ready | State::Done => "READY was due",
        };
        let text = format!("the peer closed the connection where {due}");
        Some(self.fail(Failure::new(Fault::Closed, text)))
    }

    /// After an error: bytes to send before closing, perhaps none.
    pub fn farewell(&mut self) -> Vec<u8> {
        self.session.farewell()
    }

    /// Why it ended, if it did.
    pub fn fault(&self) -> Option<Fault> {
        self.session.fault()
    }

    /// The minor version that both sides speak, once the other side has greeted.
    pub fn minor(&self) -> Option<u16> {
        self.session.minor()
    }

    fn step(&mut self, bytes: &[u8]) -> Outcome<Step> {
        self.session.inbox.push(bytes, self.session.room(1))?;
        if !self.session.greeting()? {
            return Ok(Step::More);
        }
        match self.state {
            State::Hello => self.hello(),
            State::Proof => self.proof(),
            State::Decide => {
                // Only a refusal may come while the caller decides.
                self.session.inbox.frame(Kind::Refuse).map(|_| Step::More)
            }
            State::Ready => match self.session.finish(session::DIALER_READY)? {
                None => Ok(Step::More),
                Some(leftover) => {
                    self.state = State::Done;
                    Ok(Step::Done { rails: self.session.rails, leftover })
                }
            },
            State::Done => match self.session.inbox.take_all() {
                rest if rest.is_empty() => Ok(Step::More),
                rest => Ok(Step::Done { rails: self.session.rails, leftover: rest }),
            },
        }
    }

    fn hello(&mut self) -> Outcome<Step> {
        let Some(bytes) = self.session.inbox.frame(Kind::Hello)? else {
            return Ok(Step::More);
        };
        let cut = frame::cut(Kind::Hello);
        let mut r = frame::fields(&bytes);
        self.dialer = r.array().map_err(&cut)?;
        let wanted: [u8; 16] = r.array().map_err(&cut)?;
        self.attempt = r.u64().map_err(&cut)?;
        let _nonce: [u8; 32] = r.array().map_err(&cut)?;
        let len = usize::from(r.u8().map_err(&cut)?);
        let name = r.bytes(len).map_err(&cut)?;
        if name.is_empty() {
            return Err(Failure::new(
                Fault::Malformed,
                format!("HELLO: a name of 0 bytes; allowed: 1 to {MAX_NAME}"),
            ));
        }
        self.name = name.to_vec();
        let mine = self.params.incarnation;
        if wanted != mine {
            return Err(Failure::new(
                Fault::Incarnation,
                format!(
                    "incarnation {} was wanted, this agent is {}; it restarted, take its current \
                     metadata",
                    hex(&wanted),
                    hex(&mine)
                ),
            ));
        }
        if self.dialer == mine {
            return Err(Failure::new(
                Fault::Incarnation,
                format!("incarnation {} dialled itself; use the peer of self", hex(&mine)),
            ));
        }
        self.session.hear(&bytes);
        self.session.quiet(Kind::Hello)?;
        self.state = State::Proof;
        let mut out = self.session.greet();
        let (attempt, nonce) = (self.attempt, self.params.nonce);
        out.extend(self.session.seal(session::ACCEPTOR, Kind::Challenge, |w| {
            w.bytes(&mine).u64(attempt).bytes(&nonce);
        }));
        Ok(Step::Send(out))
    }

    fn proof(&mut self) -> Outcome<Step> {
        let Some(bytes) = self.session.inbox.frame(Kind::Proof)? else {
            return Ok(Step::More);
        };
        self.session.open(session::DIALER, Kind::Proof, &bytes)?;
        let offer = session::get_offer(Kind::Proof, &bytes)?;
        self.session.quiet(Kind::Proof)?;
        self.state = State::Decide;
        Ok(Step::Decide {
            name: self.name.clone(),
            incarnation: self.dialer,
            attempt: self.attempt,
            offer,
        })
    }

    fn fail(&mut self, failure: Failure) -> Error {
        // Named only now: a text per unproven connection would be memory per unproven connection.
        if !self.name.is_empty() {
            self.session.title = format!(
                "dial {} from `{}`, incarnation {}, to {}",
                self.attempt,
                shown(&self.name, 64),
                hex(&self.dialer),
                hex(&self.params.incarnation)
            );
        }
        self.session.fail(failure)
    }

    fn not_due(&self, call: &str) -> Error {
        Failure::new(Fault::Caller, format!("{call} in state {:?}", self.state)).error
    }

    /// Bytes that this connection holds.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        size_of::<Acceptor>() + self.session.held() + self.name.capacity()
    }
}
