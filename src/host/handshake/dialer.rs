//! The side that holds the other's blob and connects.

use super::frame::{self, Kind};
use super::session::{self, Session, MINE};
use super::{Failure, Fault, Outcome, Step, Version, WIRE};
use crate::host::blob::MAX_NAME;
use crate::host::error::{hex, shown, Error, Result};
use crate::status::Status;

/// What a dial needs to know.
#[derive(Clone)]
pub struct DialerParams {
    /// Our name, 1 to 255 bytes.
    pub name: Vec<u8>,
    /// Our incarnation.
    pub incarnation: [u8; 16],
    /// The incarnation in the other side's blob.
    pub wanted: [u8; 16],
    /// The secret in the other side's blob.
    pub secret: [u8; 32],
    /// Counts our dials of this peer.
    pub attempt: u64,
    /// Fresh random bytes.
    pub nonce: [u8; 32],
    /// Our offer, at most 2048 bytes.
    pub offer: Vec<u8>,
    /// Wire version to speak: [`WIRE`], except in tests of old against new.
    pub version: Version,
}

impl Default for DialerParams {
    fn default() -> DialerParams {
        DialerParams {
            name: Vec::new(),
            incarnation: [0; 16],
            wanted: [0; 16],
            secret: [0; 32],
            attempt: 0,
            nonce: [0; 32],
            offer: Vec::new(),
            version: WIRE,
        }
    }
}

impl core::fmt::Debug for DialerParams {
    // By hand, to keep the secret out of logs.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("DialerParams")
            .field("name", &shown(&self.name, MAX_NAME))
            .field("incarnation", &hex(&self.incarnation))
            .field("wanted", &hex(&self.wanted))
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Fresh,
    Challenge,
    Welcome,
    Ready,
    Done,
}

/// The dialling machine.
#[derive(Debug)]
pub struct Dialer {
    params: DialerParams,
    session: Session,
    state: State,
}

impl Dialer {
    /// A machine for one dial.
    pub fn new(params: DialerParams) -> Dialer {
        let title = format!(
            "dial {} from incarnation {} to {}",
            params.attempt,
            hex(&params.incarnation),
            hex(&params.wanted)
        );
        let session = Session::new(params.secret, params.version, title);
        Dialer { params, session, state: State::Fresh }
    }

    /// The first bytes to send. Later calls give nothing.
    pub fn start(&mut self) -> Result<Vec<u8>> {
        if let Some(e) = self.session.ended() {
            return Err(e);
        }
        if self.state != State::Fresh {
            return Ok(Vec::new());
        }
        self.check_params().map_err(|f| self.session.fail(f))?;
        self.state = State::Challenge;
        let mut bytes = self.session.greet();
        let p = &self.params;
        let hello = frame::frame(Kind::Hello, |w| {
            w.bytes(&p.incarnation).bytes(&p.wanted).u64(p.attempt).bytes(&p.nonce);
            // At most 255, checked above.
            w.u8(p.name.len() as u8).bytes(&p.name);
        });
        self.session.hear(&hello);
        bytes.extend(hello);
        Ok(bytes)
    }

    /// Takes bytes from the connection. Call again with none until it says [`Step::More`].
    pub fn receive(&mut self, bytes: &[u8]) -> Result<Step> {
        if let Some(e) = self.session.ended() {
            return Err(e);
        }
        self.step(bytes).map_err(|f| self.session.fail(f))
    }

    /// These rails proved themselves from this side, one bit each, by their place in the dialler's
    /// offer: gives the bytes to send. Then call `receive` again.
    pub fn ready(&mut self, rails: u32) -> Result<Vec<u8>> {
        if let Some(e) = self.session.ended() {
            return Err(e);
        }
        if self.state != State::Ready || self.session.ready[MINE] {
            let f = Failure::new(Fault::Caller, format!("ready in state {:?}", self.state));
            return Err(f.error);
        }
        self.session.ready[MINE] = true;
        Ok(self.session.seal_ready(session::DIALER_READY, rails))
    }

    /// Gives up before it is done: the bytes that tell the other side why. None after `ready`: then
    /// the caller just closes, as the other side may be done already.
    pub fn refuse(&mut self, status: Status, text: &str) -> Vec<u8> {
        if self.state == State::Done || self.session.ended().is_some() {
            return Vec::new();
        }
        let failure = Failure { fault: Fault::Own, error: Error::new(status, text) };
        self.session.fail(failure);
        self.session.farewell()
    }

    /// The connection ended: the error to report. `None` once it is done.
    pub fn closed(&mut self) -> Option<Error> {
        if self.state == State::Done {
            return None;
        }
        let due = match self.state {
            State::Fresh | State::Challenge => Kind::Challenge,
            State::Welcome => Kind::Welcome,
            State::Ready | State::Done => Kind::Ready,
        };
        let text = format!("the peer closed the connection where {} was due", due.name());
        Some(self.session.fail(Failure::new(Fault::Closed, text)))
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
        // WELCOME and READY may come together.
        self.session.inbox.push(bytes, self.session.room(2))?;
        if !self.session.greeting()? {
            return Ok(Step::More);
        }
        match self.state {
            State::Fresh => Err(Failure::new(Fault::Order, "bytes before the dial started")),
            State::Challenge => self.challenge(),
            State::Welcome => self.welcome(),
            State::Ready => match self.session.finish(session::ACCEPTOR_READY)? {
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

    fn challenge(&mut self) -> Outcome<Step> {
        let Some(bytes) = self.session.inbox.frame(Kind::Challenge)? else {
            return Ok(Step::More);
        };
        let cut = frame::cut(Kind::Challenge);
        let mut r = frame::fields(&bytes);
        let incarnation: [u8; 16] = r.array().map_err(&cut)?;
        let attempt = r.u64().map_err(&cut)?;
        let _nonce: [u8; 32] = r.array().map_err(&cut)?;
        if incarnation != self.params.wanted {
            return Err(Failure::new(
                Fault::Incarnation,
                format!(
                    "the agent there is incarnation {}, the blob is of {}; it restarted, take its \
                     current metadata",
                    hex(&incarnation),
                    hex(&self.params.wanted)
                ),
            ));
        }
        if attempt != self.params.attempt {
            return Err(Failure::new(
                Fault::Attempt,
                format!("CHALLENGE answers attempt {attempt}, this is {}", self.params.attempt),
            ));
        }
        self.session.open(session::ACCEPTOR, Kind::Challenge, &bytes)?;
        self.session.quiet(Kind::Challenge)?;
        self.state = State::Welcome;
        let offer = core::mem::take(&mut self.params.offer);
        Ok(Step::Send(
            self.session.seal(session::DIALER, Kind::Proof, |w| session::put_offer(w, &offer)),
        ))
    }

    fn welcome(&mut self) -> Outcome<Step> {
        let Some(bytes) = self.session.inbox.frame(Kind::Welcome)? else {
            return Ok(Step::More);
        };
        self.session.open(session::WELCOME, Kind::Welcome, &bytes)?;
        let offer = session::get_offer(Kind::Welcome, &bytes)?;
        self.state = State::Ready;
        Ok(Step::Proven { offer })
    }

    fn check_params(&self) -> Outcome<()> {
        session::check_offer(Fault::Caller, &self.params.offer)?;
        if (1..=MAX_NAME).contains(&self.params.name.len()) {
            return Ok(());
        }
        Err(Failure::new(
            Fault::Caller,
            format!("agent name of {} bytes; allowed: 1 to {MAX_NAME}", self.params.name.len()),
        ))
    }
}
