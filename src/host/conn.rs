//! One connection in its handshake: a non-blocking socket and a state machine.

use core::net::SocketAddrV4;
use core::time::Duration;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::control::tune;
use super::error::{Error, Result};
use super::handshake::{Acceptor, AcceptorParams, Dialer, DialerParams, Step, MAX_READ};
use super::offer::RailOffer;
use super::raise::Raise;
use crate::nic::local::PeerMemory;
use crate::status::Status;

enum Machine {
    Dialer(Dialer),
    Acceptor(Acceptor),
}

/// Which side of the handshake we are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    Dialer,
    Acceptor,
}

pub(super) struct Conn {
    pub(super) socket: TcpStream,
    machine: Machine,
    /// What was dialled. A socket that was refused does not know it.
    dialled: Option<SocketAddrV4>,
    out: Vec<u8>,
    /// It must be done by then.
    pub(super) until: Instant,
    /// How long that is in all.
    pub(super) limit: Duration,
    /// The other side must have answered by then, or another address is tried.
    pub(super) answer: Instant,
    /// It has.
    pub(super) answered: bool,
    /// Slot and generation, once known.
    pub(super) peer: Option<(u32, u32)>,
    pub(super) offer: Option<RailOffer>,
    /// Attached for the proof; detached with the connection unless the engine takes it over.
    pub(super) memory: Option<PeerMemory>,
    /// RDMA rails that are being raised; none: transport `local`.
    pub(super) raise: Option<Raise>,
    /// Those that proved themselves here, once that is told.
    pub(super) mask: Option<u32>,
    /// The connection that it makes or adds rails to, as this side calls it.
    pub(super) connection: Option<u64>,
    /// It adds rails to a connection that lives.
    pub(super) join: Option<Join>,
}

/// What a join knows beside its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Join {
    /// Id of the first rail of the dialler's offer.
    pub(super) first_id: u32,
    /// Lanes whose old rail will be over on the other side when that is ready, one bit each.
    pub(super) fences: u32,
}

impl Drop for Conn {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            memory.detach();
        }
    }
}

impl Conn {
    pub(super) fn accepted(socket: TcpStream, params: AcceptorParams, until: Instant) -> Conn {
        Conn::new(socket, Machine::Acceptor(Acceptor::new(params)), until, None)
    }

    pub(super) fn dialled(
        (socket, addr): (TcpStream, SocketAddrV4),
        params: DialerParams,
        until: Instant,
        peer: (u32, u32),
    ) -> Result<Conn> {
        let mut dialer = Dialer::new(params);
        let hello = dialer.start()?;
        let mut conn = Conn::new(socket, Machine::Dialer(dialer), until, Some(peer));
        conn.dialled = Some(addr);
        conn.queue(&hello);
        Ok(conn)
    }

    fn new(socket: TcpStream, machine: Machine, until: Instant, peer: Option<(u32, u32)>) -> Conn {
        tune(&socket);
        let limit = until.saturating_duration_since(Instant::now());
        Conn {
            socket,
            machine,
            dialled: None,
            out: Vec::new(),
            until,
            answer: until,
            answered: false,
            peer,
            offer: None,
            memory: None,
            raise: None,
            limit,
            mask: None,
            connection: None,
            join: None,
        }
    }

    pub(super) fn role(&self) -> Role {
        match self.machine {
            Machine::Dialer(_) => Role::Dialer,
            Machine::Acceptor(_) => Role::Acceptor,
        }
    }

    /// True for a connection that came in and has not proved the secret.
    pub(super) fn is_unproven(&self) -> bool {
        self.role() == Role::Acceptor && self.peer.is_none()
    }

    pub(super) fn wants_to_write(&self) -> bool {
        !self.out.is_empty()
    }

    pub(super) fn queue(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// Sends what the socket takes. A dial that is not through yet takes nothing.
    pub(super) fn flush(&mut self) -> Result<()> {
        while !self.out.is_empty() {
            match self.socket.write(&self.out) {
                Ok(n) => drop(self.out.drain(..n)),
                Err(e) if is_later(&e) => return Ok(()),
                Err(e) => return Err(self.lost(&e)),
            }
        }
        Ok(())
    }

    /// The next thing to do, or `None` when nothing more has come. Bytes that are in the machine
    /// already go first.
    pub(super) fn next_step(&mut self) -> Result<Option<Step>> {
        let step = self.receive(&[])?;
        if step != Step::More {
            return Ok(Some(step));
        }
        let mut bytes = [0; MAX_READ];
        match self.socket.read(&mut bytes) {
            Ok(0) => Err(self.closed()),
            Ok(n) => {
                self.answered = true;
                self.receive(&bytes[..n]).map(Some)
            }
            Err(e) if is_later(&e) => Ok(None),
            Err(e) => Err(self.lost(&e)),
        }
    }

    fn receive(&mut self, bytes: &[u8]) -> Result<Step> {
        match &mut self.machine {
            Machine::Dialer(m) => m.receive(bytes),
            Machine::Acceptor(m) => m.receive(bytes),
        }
    }

    pub(super) fn accept(&mut self, offer: &[u8]) -> Result<Vec<u8>> {
        match &mut self.machine {
            Machine::Acceptor(m) => m.accept(offer),
            Machine::Dialer(_) => Err(Error::new(Status::Internal, "a dialler does not accept")),
        }
    }

    pub(super) fn ready(&mut self, rails: u32) -> Result<Vec<u8>> {
        match &mut self.machine {
            Machine::Dialer(m) => m.ready(rails),
            Machine::Acceptor(m) => m.ready(rails),
        }
    }

    /// Tells the other side why, as far as the socket takes it.
    pub(super) fn refuse(&mut self, why: &Error) {
        let bytes = match &mut self.machine {
            Machine::Dialer(m) => [m.farewell(), m.refuse(why.status, &why.message)].concat(),
            Machine::Acceptor(m) => [m.farewell(), m.refuse(why.status, &why.message)].concat(),
        };
        self.queue(&bytes);
        // It may be gone already, and then needs no reason.
        let _ = self.flush();
    }

    fn closed(&mut self) -> Error {
        let known = match &mut self.machine {
            Machine::Dialer(m) => m.closed(),
            Machine::Acceptor(m) => m.closed(),
        };
        known.unwrap_or_else(|| Error::new(Status::Disconnected, "the connection was closed"))
    }

    fn lost(&mut self, e: &std::io::Error) -> Error {
        let status = match self.role() {
            Role::Dialer => Status::Unreachable,
            Role::Acceptor => Status::Disconnected,
        };
        let at = match self.dialled {
            Some(addr) => addr.to_string(),
            None => self.socket.peer_addr().map_or_else(|_| "a caller".into(), |a| a.to_string()),
        };
        let hint = match (e.kind(), self.dialled) {
            (ErrorKind::ConnectionRefused, _) => {
                "; nobody listens there: is the peer running, and is its metadata of this run?"
            }
            (_, Some(_)) => "; check that the peer runs, and the route and firewalls between",
            (_, None) => "",
        };
        Error::new(status, format!("{at}: {e}{hint}"))
    }
}

fn is_later(e: &std::io::Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::NotConnected)
}

#[cfg(test)]
mod tests {
    use super::super::sys;
    use super::*;

    #[test]
    fn a_refused_dial_names_its_address_and_what_to_do() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let core::net::SocketAddr::V4(addr) = listener.local_addr().unwrap() else { panic!() };
        drop(listener);
        let params = DialerParams {
            name: b"a".to_vec(),
            incarnation: [1; 16],
            wanted: Default::default(),
            secret: Default::default(),
            attempt: 1,
            nonce: sys::random().unwrap(),
            offer: Vec::new(),
            version: super::super::handshake::WIRE,
        };
        let until = Instant::now() + Duration::from_secs(30);
        let socket = sys::connect(addr).unwrap();
        let mut conn = Conn::dialled((socket, addr), params, until, (1, 1)).unwrap();
        let e = loop {
            match conn.flush() {
                Err(e) => break e,
                Ok(()) => assert!(Instant::now() < until, "the dial hangs"),
            }
            std::thread::yield_now();
        };
        assert_eq!(e.status, Status::Unreachable);
        let want = [addr.to_string(), "nobody listens there: is the peer running".into()];
        assert!(want.iter().all(|w| e.message.contains(w)), "{e}");
    }
}
