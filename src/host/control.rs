//! The control thread: accepts and dials, drives handshakes, connects rails, notices peers that are
//! gone, and watches for stalls. It sleeps in `poll` and costs nothing while nothing happens.

use core::time::Duration;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use super::conn::{Conn, Role};
use super::error::{Error, Result};
use super::handshake::{dial_wins, AcceptorParams, DialerParams, Step, WIRE};
use super::log;
use super::offer::RailOffer;
use super::peers::Peers;
use super::shared::{attach_error, Shared};
use super::stall::Stalls;
use super::stats::Stats;
use super::sys;
use crate::engine::peer::{Link, SELF};
use crate::nic::local::PeerMemory;
use crate::nic::stream::Stream;
use crate::status::Status;
use crate::sync::Ordering;

/// Most connections that have not proved themselves yet; the oldest is dropped for a newer one.
const UNPROVEN: usize = 128;
/// How often the thread looks around by itself while it waits for somebody.
const TICK: Duration = Duration::from_millis(100);
/// How long nobody is accepted after the system refused to.
const DEAF: Duration = Duration::from_secs(1);
/// How soon a peer that could not be reached is dialled again at the earliest.
const REDIAL: Duration = Duration::from_millis(250);

pub(super) struct Control {
    shared: Arc<Shared>,
    listener: TcpListener,
    conns: Vec<Conn>,
    /// What `sleep` waits for; kept, so that an idle engine allocates nothing.
    files: Vec<libc::pollfd>,
    /// No connection can be accepted until then.
    deaf_until: Option<Instant>,
    stalls: Stalls,
    stats: Stats,
}

impl Control {
    pub(super) fn new(shared: Arc<Shared>, listener: TcpListener) -> Control {
        let stats = Stats::new(&shared);
        Control {
            shared,
            listener,
            conns: Vec::new(),
            files: Vec::new(),
            deaf_until: None,
            stalls: Stalls::default(),
            stats,
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
            files.push(sys::interest(self.listener.as_raw_fd(), libc::POLLIN));
        }
        for c in &self.conns {
            let out = if c.wants_to_write() { libc::POLLOUT } else { 0 };
            files.push(sys::interest(c.socket.as_raw_fd(), libc::POLLIN | out));
        }
        let peers = self.shared.peers();
        for (index, fd) in peers.sockets() {
            files.push(sys::interest(fd, libc::POLLRDHUP));
            // A forked child keeps the socket open beyond the peer's end.
            files.extend(peers.rows.current(index).map(|p| sys::interest(p, libc::POLLIN)));
        }
        let waiting = peers.is_waiting() || self.deaf_until.is_some();
        let ms = if !self.conns.is_empty() || self.stats.is_on() || waiting {
            TICK.as_millis() as i32
        } else if self.shared.core.transfers_used() > 0 {
            Stalls::pause(&self.shared).as_millis() as i32
        } else {
            -1
        };
        drop(peers);
        if self.shared.core.has_broken() {
            self.shared.core.control_bell().rise();
            return;
        }
        sys::wait(files, ms);
        self.shared.core.control_bell().rise();
    }

    fn limit(&self) -> Duration {
        Duration::from_millis(u64::from(self.shared.config.connect_timeout_ms))
    }

    fn accept(&mut self) {
        if self.deaf_until.is_some() {
            return;
        }
        loop {
            let (socket, from) = match self.listener.accept() {
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
                    self.conns.remove(oldest);
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

    fn dial(&self, peers: &mut Peers, index: u32) -> Result<Conn> {
        let generation = self.shared.core.peer_state(index).generation;
        let limit = self.limit();
        let offer = self.offer(index);
        let entry = peers.entry(index);
        entry.dialled = Some(Instant::now());
        let Some(blob) = entry.blob.clone() else {
            let text = format!("{} dialled us; its blob was never loaded", entry.title());
            return Err(Error::new(Status::Unreachable, text));
        };
        same_place(&self.shared, &entry.title(), &blob)?;
        entry.attempt += 1;
        let params = DialerParams {
            name: self.shared.core.name().to_vec(),
            incarnation: self.shared.incarnation,
            wanted: blob.incarnation,
            secret: blob.secret,
            attempt: entry.attempt,
            nonce: sys::random()?,
            offer: offer.encode(),
            version: WIRE,
        };
        let mut last = String::from("no address in its blob");
        for addr in &blob.addrs {
            match sys::connect(*addr) {
                Ok(socket) => {
                    entry.dialling = true;
                    let until = Instant::now() + limit;
                    return Conn::dialled(socket, params, until, (index, generation));
                }
                Err(e) => last = format!("{addr}: {e}"),
            }
        }
        Err(Error::new(Status::Unreachable, format!("{}: {last}", entry.title())))
    }

    fn offer(&self, row: u32) -> RailOffer {
        RailOffer {
            host: self.shared.host,
            local: self.shared.share.offer(row),
            window: self.shared.core.limits().window(),
        }
    }

    /// A dial failed: what waits for the peer ends.
    fn give_up(&self, peers: &mut Peers, index: u32, why: Error) {
        log::warn(&format!("no connection: {why}"));
        peers.entry(index).dialling = false;
        if self.shared.core.peer_state(index).link != Link::Up {
            peers.close(&self.shared.core, index, &why);
        } else {
            peers.entry(index).error = Some(why);
        }
        self.shared.changed.notify_all();
    }

    /// Moves every handshake on.
    fn drive(&mut self) {
        let mut i = 0;
        while i < self.conns.len() {
            let mut conn = self.conns.swap_remove(i);
            match self.advance(&mut conn) {
                Ok(false) => {
                    self.conns.push(conn);
                    let last = self.conns.len() - 1;
                    self.conns.swap(i, last);
                    i += 1;
                }
                Ok(true) => {}
                Err(e) => self.failed(conn, e),
            }
        }
    }

    /// True: the connection is done with (taken over, or given up in order).
    fn advance(&mut self, conn: &mut Conn) -> Result<bool> {
        if Instant::now() >= conn.until {
            let ms = self.shared.config.connect_timeout_ms;
            let text = format!("no answer within {ms} ms (connect_timeout_ms)");
            return Err(Error::new(Status::Unreachable, text));
        }
        if let (Role::Dialer, Some((index, _))) = (conn.role(), conn.peer) {
            if !self.shared.peers().entry(index).dialling {
                return Ok(true);
            }
        }
        conn.flush()?;
        while let Some(step) = conn.next_step()? {
            match step {
                Step::More => {}
                Step::Send(bytes) => conn.queue(&bytes),
                Step::Decide { name, incarnation, offer, .. } => {
                    self.decide(conn, &name, incarnation, &offer)?;
                }
                Step::Proven { offer } => {
                    sys::allow_copies();
                    self.prove(conn, RailOffer::decode(&offer)?)?;
                }
                Step::Done { leftover, .. } => return self.finish(conn, &leftover).map(|()| true),
            }
            conn.flush()?;
        }
        Ok(false)
    }

    /// Somebody who holds our blob wants in: which peer is it, and may it?
    fn decide(&self, conn: &mut Conn, name: &[u8], who: [u8; 16], offer: &[u8]) -> Result<()> {
        let shared = &self.shared;
        let offer = RailOffer::decode(offer)?;
        let mut peers = shared.peers();
        let index = peers.find_or_add(&shared.core, &shared.share, name, who)?;
        let entry = peers.entry(index);
        if entry.dialling && dial_wins(&shared.incarnation, &who) {
            return Err(Error::new(Status::Busy, "both sides dial, and this side's dial stays"));
        }
        let title = entry.title();
        if entry.socket.as_ref().is_some_and(|s| !is_closed(s.as_raw_fd())) {
            // A dial that crossed ours. Had the peer given the connection up, its end would have
            // come before this dial.
            return Err(Error::new(Status::Busy, "connected already, by the other side's dial"));
        }
        entry.parked = None;
        // If both dial, theirs stays: ours is dropped at its next step.
        entry.dialling = false;
        entry.wanted = false;
        if shared.core.peer_state(index).link == Link::Up {
            let why = Error::new(Status::Disconnected, format!("{title} connected anew"));
            peers.close(&shared.core, index, &why);
        }
        let s = shared.core.peer_state(index);
        if s.link == Link::Dead {
            let down = crate::engine::peer::PeerState { link: Link::Down, ..s };
            shared.core.set_peer(index, down);
        }
        conn.peer = Some((index, s.generation));
        drop(peers);
        sys::allow_copies();
        let bytes = conn.accept(&self.offer(index).encode())?;
        conn.queue(&bytes);
        conn.flush()?;
        self.prove(conn, offer)
    }

    /// The other side proved the secret: this side proves the rail, by a read through the driver,
    /// and says so. From then on the other side may count in its row.
    fn prove(&self, conn: &mut Conn, offer: RailOffer) -> Result<()> {
        conn.offer = Some(offer);
        // Opened before the proof: the number is the peer's then, and was since it was offered.
        let process = sys::pidfd(offer.local.pid).ok();
        conn.memory = Some(PeerMemory::attach(&offer.local).map_err(attach_error)?);
        let mut peers = self.shared.peers();
        let known = |&(i, g): &(u32, u32)| self.shared.core.peer_state(i).generation == g;
        let Some((index, _)) = conn.peer.filter(known) else {
            return Err(Error::new(Status::Stale, "the peer was removed meanwhile"));
        };
        let title = peers.entry(index).title();
        peers.rows.give(index, offer.local.pid, process, title);
        drop(peers);
        let ready = conn.ready(0)?;
        conn.queue(&ready);
        Ok(())
    }

    /// Both sides are ready: the rails and the message stream belong to the engine now.
    fn finish(&self, conn: &mut Conn, early: &[u8]) -> Result<()> {
        let shared = &self.shared;
        let (Some((index, generation)), Some(offer)) = (conn.peer, conn.offer) else {
            return Err(Error::new(Status::Internal, "a handshake ended without an offer"));
        };
        let mut peers = shared.peers();
        if shared.core.peer_state(index).generation != generation {
            return Err(Error::new(Status::Stale, "the peer was removed meanwhile"));
        }
        if shared.core.peer_state(index).link == Link::Up {
            return Err(Error::new(Status::Busy, "the peer is connected already"));
        }
        // What may fail comes first: the connection still owns all, and is closed on an error.
        let dup = |e| Error::new(Status::Os, format!("dup: {e}"));
        let socket = conn.socket.try_clone().map_err(dup)?;
        let stream = Stream::new(socket.as_raw_fd());
        if !shared.core.with_net(|net| net.watch(&stream, Some(index))) {
            return Err(sys::os_error("epoll_ctl"));
        }
        let Some(memory) = conn.memory.take() else {
            shared.core.with_net(|net| net.watch(&stream, None));
            return Err(Error::new(Status::Internal, "a handshake ended without memory"));
        };
        let entry = peers.entry(index);
        entry.memory = Some(memory);
        entry.socket = Some(socket);
        entry.dialling = false;
        entry.wanted = false;
        entry.error = None;
        let (name, title) = (entry.name.clone(), entry.title());
        for lane in 0..shared.core.limits().lanes {
            shared.core.connect_rail(lane, index, generation, |port| port.connect(index, memory));
        }
        let fine = shared.core.attach(index, stream, &name, offer.window, early);
        log::info(&format!(
            "connected to {title}: transport local (process {}), {} rails",
            offer.local.pid,
            shared.core.limits().lanes
        ));
        if !fine {
            let why = Error::new(Status::Disconnected, "it does not speak the message protocol");
            peers.close(&shared.core, index, &why);
        }
        shared.changed.notify_all();
        Ok(())
    }

    fn failed(&self, mut conn: Conn, why: Error) {
        conn.refuse(&why);
        let mut peers = self.shared.peers();
        let current = conn.peer.filter(|(i, g)| self.shared.core.peer_state(*i).generation == *g);
        let Some((index, _)) = current else {
            log::log(log::Level::Debug, &format!("a connection was refused: {why}"));
            return;
        };
        if conn.role() == Role::Acceptor && self.shared.core.peer_state(index).link == Link::Up {
            return;
        }
        if conn.role() == Role::Acceptor {
            log::warn(&format!("{} could not connect: {why}", peers.entry(index).title()));
            let entry = peers.entry(index);
            if entry.blob.is_none() && entry.socket.is_none() {
                peers.remove(&self.shared.core, index, &why);
            } else if !entry.dialling {
                // What waits for this peer must end: our own dial decides.
                entry.wanted = true;
            }
            return;
        }
        if why.status == Status::Busy {
            // The other side's dial stays; it is on its way, or here already.
            let entry = peers.entry(index);
            entry.dialling = false;
            if self.shared.core.peer_state(index).link != Link::Up {
                entry.parked = Some(Instant::now() + self.limit());
            }
            return;
        }
        let title = peers.entry(index).title();
        self.give_up(
            &mut peers,
            index,
            Error::new(why.status, format!("{title}: {}", why.message)),
        );
    }

    /// Peers whose stream was closed or broke: what they sent before is read, then they are dead.
    fn bury(&self) {
        let shared = &self.shared;
        // Under the lock, so that no mark is of a connection before the one that is here now.
        let mut peers = shared.peers();
        let mut gone: Vec<u32> = core::iter::from_fn(|| shared.core.next_broken()).collect();
        for (index, fd) in peers.sockets() {
            if is_closed(fd) || peers.rows.current(index).is_some_and(sys::is_ready) {
                gone.push(index);
            }
        }
        gone.sort_unstable();
        gone.dedup();
        for index in gone {
            if index == SELF || shared.core.peer_state(index).link != Link::Up {
                continue;
            }
            shared.core.drain_stream(index);
            let why = Error::new(
                Status::Disconnected,
                format!("{} is gone: its connection was closed", peers.entry(index).title()),
            );
            log::info(&why.message);
            peers.close(&shared.core, index, &why);
            if peers.entry(index).blob.is_none() {
                // It only ever dialled us: nothing of it is kept.
                peers.remove(&shared.core, index, &why);
            }
            shared.changed.notify_all();
        }
    }

    fn shut_down(&mut self) {
        let shared = self.shared.clone();
        for mut conn in self.conns.drain(..) {
            conn.refuse(&Error::new(Status::Disconnected, "the engine is being destroyed"));
        }
        let mut peers = shared.peers();
        let why = Error::new(Status::Disconnected, "the engine is being destroyed");
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

/// True when the other side has closed a connection.
fn is_closed(fd: i32) -> bool {
    let mut file = [sys::interest(fd, libc::POLLRDHUP)];
    sys::wait(&mut file, 0);
    file[0].revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
}

/// The `local` driver needs both processes on one host, in one pid namespace, of one user.
pub(super) fn same_place(shared: &Shared, title: &str, blob: &super::blob::ConnBlob) -> Result<()> {
    let (ours, theirs) = (&shared.host, &blob.offer);
    let what = if ours.boot_id != theirs.boot_id {
        "is on another host".to_owned()
    } else if ours.pid_ns != theirs.pid_ns {
        "is in another pid namespace (another container)".to_owned()
    } else if ours.uid != theirs.uid {
        format!("belongs to user {}, this process to user {}", theirs.uid, ours.uid)
    } else {
        return Ok(());
    };
    let text = format!(
        "{title} {what}. Transport local copies between processes of one user on one host; peers \
         elsewhere need RDMA rails, which this build does not have yet"
    );
    Err(Error::new(Status::NoRail, text))
}

/// A listener on the configured address and the first free port of the configured range.
pub(super) fn listen(ip: core::net::Ipv4Addr, ports: (u16, u16)) -> Result<TcpListener> {
    let (low, high) = ports;
    let mut last = None;
    for port in low..=high {
        match TcpListener::bind((ip, port)) {
            Ok(l) => {
                l.set_nonblocking(true)
                    .map_err(|e| Error::new(Status::Os, format!("listener: {e}")))?;
                return Ok(l);
            }
            Err(e) => last = Some(e),
        }
    }
    let why = last.map_or_else(|| "the range is empty".to_owned(), |e| e.to_string());
    let text = format!(
        "cannot listen on {ip}, port {low} to {high}: {why}. Choose another listen_ip or port \
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
