//! The control thread: accepts and dials, drives handshakes, connects rails, notices peers that are
//! gone, and watches for stalls. It sleeps in `poll` and costs nothing while nothing happens.

use core::time::Duration;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use super::conn::Conn;
use super::error::{Error, Result};
use super::handshake::{AcceptorParams, WIRE};
use super::log;
use super::peers::Peers;
use super::raise::Raise;
use super::shared::Shared;
use super::stall::Stalls;
use super::stats::Stats;
use super::sys;
use super::watch::Watch;
use crate::engine::peer::{Link, SELF};
use crate::status::Status;
use crate::sync::Ordering;

/// Most connections that have not proved themselves yet; the oldest is dropped for a newer one.
const UNPROVEN: usize = 128;
/// The same while rails prove themselves, in milliseconds.
const SOON: i32 = 1;
/// How often the thread looks around by itself while it waits for somebody.
pub(super) const TICK: Duration = Duration::from_millis(100);
/// How long nobody is accepted after the system refused to.
const DEAF: Duration = Duration::from_secs(1);
/// How soon a peer that could not be reached is dialled again at the earliest.
const REDIAL: Duration = Duration::from_millis(250);

pub(super) struct Control {
    pub(super) shared: Arc<Shared>,
    listeners: Vec<TcpListener>,
    pub(super) conns: Vec<Conn>,
    /// What `sleep` waits for; kept, so that an idle engine allocates nothing.
    files: Vec<libc::pollfd>,
    /// No connection can be accepted until then.
    deaf_until: Option<Instant>,
    stalls: Stalls,
    watch: Watch,
    stats: Stats,
    /// When somebody is to be dialled, or given up, at the latest.
    alarm: Option<Instant>,
    /// False only in tests against builds that join nothing (1.0), which this engine stands for.
    pub(super) joins: bool,
}

impl Control {
    pub(super) fn new(shared: Arc<Shared>, listeners: Vec<TcpListener>) -> Control {
        let (stats, watch) = (Stats::new(&shared), Watch::new(&shared));
        let stalls = Stalls::new(&shared);
        Control {
            shared,
            listeners,
            conns: Vec::new(),
            files: Vec::new(),
            deaf_until: None,
            stalls,
            watch,
            stats,
            alarm: None,
            joins: std::env::var_os("KVRAIL_TEST_NO_JOINS").is_none(),
        }
    }

    /// Runs until the engine stops.
    pub(super) fn run(mut self) {
        sys::block_signals();
        self.shared.share.live_with_this_thread();
        self.shared.alive.store(true, Ordering::Release);
        while !self.shared.stopping() {
            self.sleep();
            self.shared.events.clear();
            self.accept();
            self.dial_wanted();
            self.drive();
            self.bury();
            self.watch.look(&self.shared);
            self.alarm = self.rejoin();
            self.shared.core.forgive();
            self.shared.teller.deliver();
            self.stalls.look(&self.shared);
            self.stats.look(&self.shared);
        }
        self.shut_down();
        self.stats.write(&self.shared);
    }

    fn sleep(&mut self) {
        // From here on whoever has news rings; then we look what there is.
        self.shared.core.control_bell().doze();
        let files = &mut self.files;
        files.clear();
        files.push(sys::interest(self.shared.events.fd(), libc::POLLIN));
        self.deaf_until = self.deaf_until.filter(|&t| t > Instant::now());
        if self.deaf_until.is_none() {
            files.extend(self.listeners.iter().map(|l| sys::interest(l.as_raw_fd(), libc::POLLIN)));
        }
        for c in &self.conns {
            let out = if c.wants_to_write() { libc::POLLOUT } else { 0 };
            files.push(sys::interest(c.socket.as_raw_fd(), libc::POLLIN | out));
        }
        let peers = self.shared.peers();
        for (index, fd) in peers.sockets() {
            files.push(sys::interest(fd, peers.awaits(index)));
            // A forked child keeps the socket open beyond the peer's end.
            files.extend(peers.rows.current(index).map(|p| sys::interest(p, libc::POLLIN)));
        }
        for rail in self.shared.rails.iter().flat_map(|r| r.iter()) {
            if !rail.device.is_dead() {
                files.push(sys::interest(rail.device.event_fd(), libc::POLLIN));
            }
        }
        let waiting = peers.is_waiting() || self.deaf_until.is_some();
        let rising = |c: &Conn| c.raise.as_ref().is_some_and(Raise::is_busy);
        let ms = if self.conns.iter().any(rising) {
            SOON
        } else if !self.conns.is_empty() || self.stats.is_on() || waiting {
            TICK.as_millis() as i32
        } else if self.shared.core.transfers_used() > 0 {
            Stalls::pause(&self.shared).as_millis() as i32
        } else {
            -1
        };
        let messages = peers.message_lanes().next().is_some();
        drop(peers);
        let watch = Some(self.watch.pause(&self.shared, messages));
        let watch = watch.filter(|_| self.shared.nics() > 0).map(|pause| pause.as_millis() as i32);
        // Rounded up, or the last millisecond is spent in a spin.
        let alarm = self.alarm.map(|t| t.saturating_duration_since(Instant::now()));
        let alarm = alarm.map(|left| left.as_millis() as i32 + 1);
        let least = [watch, alarm].into_iter().flatten().min();
        let ms = least.map_or(ms, |least| if ms < 0 { least } else { ms.min(least) });
        if self.shared.core.has_broken() {
            self.shared.core.control_bell().rise();
            return;
        }
        sys::wait(files, ms);
        self.shared.core.control_bell().rise();
    }

    fn accept(&mut self) {
        for at in 0..self.listeners.len() {
            self.accept_at(at);
        }
    }

    fn accept_at(&mut self, at: usize) {
        while self.deaf_until.is_none() {
            let (socket, from) = match self.listeners[at].accept() {
                Ok(accepted) => accepted,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(e) => {
                    // Out of files, most likely. Who wants in waits; we must not spin meanwhile.
                    log::warn(&format!("cannot accept connections for now: {e}"));
                    self.deaf_until = Some(Instant::now() + DEAF);
                    return;
                }
            };
            let nonce = sys::random();
            let (Ok(nonce), Ok(())) = (nonce, socket.set_nonblocking(true)) else { continue };
            let unproven = self.conns.iter().filter(|c| c.is_unproven()).count();
            if unproven >= UNPROVEN {
                if let Some(oldest) = self.conns.iter().position(Conn::is_unproven) {
                    let conn = self.conns.remove(oldest);
                    self.dismiss(conn);
                }
            }
            log::log(log::Level::Debug, &format!("connection from {from}"));
            let params = AcceptorParams {
                incarnation: self.shared.incarnation,
                secret: self.shared.secret,
                nonce,
                version: WIRE,
            };
            self.conns.push(Conn::accepted(socket, params, Instant::now() + self.limit()));
        }
    }

    /// Starts the dials that were asked for.
    fn dial_wanted(&mut self) {
        let shared = self.shared.clone();
        let mut peers = shared.peers();
        let now = Instant::now();
        for index in 1..peers.entries.len() as u32 {
            let entry = peers.entry(index);
            if entry.parked.is_some_and(|t| t <= now) {
                entry.parked = None;
                let text = format!("{}: its own dial never arrived", entry.title());
                self.give_up(&mut peers, index, Error::new(Status::Unreachable, text));
                continue;
            }
            let coming = self.conns.iter().any(|c| c.peer.is_some_and(|(i, _)| i == index));
            if !entry.wanted || entry.dialling || coming {
                continue;
            }
            if entry.dialled.is_some_and(|t| now < t + REDIAL) {
                continue;
            }
            entry.wanted = false;
            match self.dial(&mut peers, index) {
                Ok(conn) => self.conns.push(conn),
                Err(e) => self.give_up(&mut peers, index, e),
            }
        }
    }

    /// A dial failed: what waits for the peer ends.
    pub(super) fn give_up(&self, peers: &mut Peers, index: u32, why: Error) {
        let entry = peers.entry(index);
        entry.dialling = false;
        if entry.lament.as_ref() != Some(&why.message) {
            log::warn(&format!("no connection: {why}"));
            // Said once only of what nobody asked for.
            entry.lament = Some(why.message.clone()).filter(|_| entry.revive);
        }
        // Another incarnation, or another secret: this one never comes back.
        entry.revive &= why.status != Status::Refused;
        if entry.revive {
            entry.backoff.failed(Instant::now());
        }
        if self.shared.core.peer_state(index).link != Link::Up {
            peers.close(&self.shared.core, index, &why);
        } else {
            peers.entry(index).error = Some(why);
        }
        self.shared.changed.notify_all();
    }

    /// Takes off rails that broke, and ends peers that are gone: what they sent before is read,
    /// then they are dead.
    fn bury(&self) {
        let shared = &self.shared;
        // Under the lock, so that no mark is of a connection before the one that is here now.
        let mut peers = shared.peers();
        let closed = || "its connection was closed".to_owned();
        let mut gone: Vec<(u32, String)> =
            core::iter::from_fn(|| shared.core.next_broken()).map(|i| (i, closed())).collect();
        for index in core::iter::from_fn(|| shared.core.next_limping()) {
            if peers.entry(index).life.is_some() {
                self.tend(&mut peers, index);
            } else {
                // A rail of transport `local` breaks with the process.
                gone.push((index, closed()));
            }
        }
        let mut said = Vec::new();
        for (index, fd) in peers.sockets() {
            let news = news(fd, peers.awaits(index));
            if news & libc::POLLIN != 0 {
                said.push(index);
            }
            if news & ENDED != 0 || peers.rows.current(index).is_some_and(sys::is_ready) {
                gone.push((index, closed()));
            }
        }
        said.into_iter().for_each(|index| self.hear(&mut peers, index));
        gone.extend(self.lost_at_sea(&mut peers, Instant::now()));
        for (index, how) in gone {
            if index == SELF || shared.core.peer_state(index).link != Link::Up {
                continue;
            }
            let entry = peers.entry(index);
            let text = format!("{} is gone: {how}", entry.title());
            let adrift = entry.life.as_ref().is_some_and(|l| l.silence.adrift().is_some());
            self.part(&mut peers, index, &Error::new(Status::Disconnected, text), adrift);
        }
    }

    fn shut_down(&mut self) {
        let shared = self.shared.clone();
        let why = Error::new(Status::Disconnected, "the engine is being destroyed");
        for mut conn in core::mem::take(&mut self.conns) {
            conn.refuse(&why);
            self.dismiss(conn);
        }
        let mut peers = shared.peers();
        for index in 1..peers.entries.len() as u32 {
            if shared.core.peer_state(index).link != Link::Free {
                // What is queued goes out if the socket takes it.
                shared.core.poll_messages(false);
                peers.remove(&shared.core, index, &why);
            }
        }
        shared.share.die();
        shared.changed.notify_all();
    }
}

/// What tells that the other side has closed a connection.
const ENDED: i16 = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR;

/// What there is of a connection now, of what is awaited.
fn news(fd: i32, awaited: i16) -> i16 {
    let mut file = [sys::interest(fd, awaited)];
    sys::wait(&mut file, 0);
    file[0].revents
}

/// True when the other side has closed a connection.
pub(super) fn is_closed(fd: i32) -> bool {
    news(fd, libc::POLLRDHUP) & ENDED != 0
}

/// A listener on an address and the first free port of a range.
pub(super) fn listen(ip: core::net::Ipv4Addr, ports: (u16, u16)) -> Result<(TcpListener, u16)> {
    let (low, high) = ports;
    let open = |port| {
        let listener = TcpListener::bind((ip, port))?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        Ok::<_, std::io::Error>((listener, port))
    };
    let mut last = None;
    for port in low..=high {
        match open(port) {
            Ok(found) => return Ok(found),
            Err(e) => last = Some(e),
        }
    }
    let range = match ports {
        (0, 0) => "any port".to_owned(),
        _ => format!("port {low} to {high}"),
    };
    let why = last.map_or_else(|| "the range is empty".to_owned(), |e| e.to_string());
    let text = format!(
        "cannot listen on {ip}, {range}: {why}. Choose another listen_ip or port \
         (KVRAIL_LISTEN_IP, KVRAIL_PORT; port 0 takes any)"
    );
    Err(Error::new(Status::Os, text))
}

/// A connected socket's settings for messages.
pub(super) fn tune(socket: &TcpStream) {
    // Without it a message waits for the acknowledgement of the one before. Failure only costs
    // time.
    let _ = socket.set_nodelay(true);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_that_fails_names_its_ports_as_they_were_given() {
        // An address for documentation, which no host has.
        let ip = core::net::Ipv4Addr::new(192, 0, 2, 1);
        let any = listen(ip, (0, 0)).unwrap_err().message;
        assert!(any.contains("on 192.0.2.1, any port: ") && !any.contains("0 to 0"), "{any}");
        let some = listen(ip, (7000, 7001)).unwrap_err().message;
        assert!(some.contains("on 192.0.2.1, port 7000 to 7001: "), "{some}");
    }
}
