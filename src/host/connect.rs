//! From a dial or an accepted connection to rails and a message stream: what the control thread
//! does with each handshake.

use core::net::SocketAddrV4;
use core::time::Duration;
use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use super::blob::ConnBlob;
use super::conn::{Conn, Role};
use super::control::{is_closed, Control};
use super::error::{shown, Error, Result};
use super::handshake::{dial_wins, DialerParams, Step, WIRE};
use super::offer::{JoinPart, RailOffer};
use super::peers::{Entry, Life, Line, Peers};
use super::rail::{both, MAX_RAILS};
use super::rails::Rails;
use super::raise::{Pair, Proven, Raise};
use super::shared::{attach_error, connect_local, Shared};
use super::sys;
use super::{log, loopback};
use crate::engine::peer::{Link, NO_LANE};
use crate::nic::any::{AnyLink, AnyPort};
use crate::nic::local::PeerMemory;
use crate::nic::stream::Stream;
use crate::status::Status;

/// Links for a peer's messages: lane and id of the rail, and the driver's.
type Links = Vec<(u32, u32, AnyLink<'static>)>;

/// Which driver carries a peer.
enum Way {
    /// Copies within this host.
    Local,
    /// RDMA rails.
    Verbs(Arc<Rails>),
}

impl Control {
    pub(super) fn limit(&self) -> Duration {
        Duration::from_millis(u64::from(self.shared.config.connect_timeout_ms))
    }

    pub(super) fn dial(&self, peers: &mut Peers, index: u32) -> Result<Conn> {
        let generation = self.shared.core.peer_state(index).generation;
        let entry = peers.entry(index);
        entry.dialled = Some(Instant::now());
        let Some(blob) = entry.blob.clone() else {
            let text = format!("{} dialled us; its blob was never loaded", entry.title());
            return Err(Error::new(Status::Unreachable, text));
        };
        let raise = match way(&self.shared, &entry.title(), &blob)? {
            Way::Local => None,
            Way::Verbs(rails) => Some(Raise::dialler(&self.shared, &rails, u32::MAX)?),
        };
        let connection = Some(u64::from_le_bytes(sys::random()?));
        let offer = self.offer(index, raise.as_ref(), connection, None);
        let mut conn = self.reach(entry, (index, generation), &offer, self.limit())?;
        entry.dialling = true;
        (conn.raise, conn.connection) = (raise, connection);
        Ok(conn)
    }

    /// Begins a handshake with the next address of a peer that may answer.
    pub(super) fn reach(
        &self,
        entry: &mut Entry,
        peer: (u32, u32),
        offer: &RailOffer,
        limit: Duration,
    ) -> Result<Conn> {
        entry.attempt += 1;
        let blob = entry.blob.as_ref();
        let params = DialerParams {
            name: self.shared.core.name().to_vec(),
            incarnation: self.shared.incarnation,
            wanted: entry.incarnation,
            secret: blob.map(|b| b.secret).unwrap_or_default(),
            attempt: entry.attempt,
            nonce: sys::random()?,
            offer: offer.encode(),
            version: WIRE,
        };
        if entry.route.is_empty() {
            entry.route = self.route(entry);
        }
        let mut last = String::from("no address in its blob");
        while let Some(addr) = entry.route.pop_front() {
            match sys::connect(addr) {
                Ok(socket) => {
                    let now = Instant::now();
                    let mut conn = Conn::dialled((socket, addr), params, now + limit, peer)?;
                    // Those that are left want their time too.
                    conn.answer = now + limit / (entry.route.len() as u32 + 1);
                    return Ok(conn);
                }
                Err(e) => last = format!("{addr}: {e}"),
            }
        }
        Err(Error::new(Status::Unreachable, format!("{}: {last}", entry.title())))
    }

    /// A peer's addresses, those first that are likely to answer: of a NIC that has a rail, then in
    /// the subnet of a port that is up.
    fn route(&self, entry: &Entry) -> VecDeque<SocketAddrV4> {
        let mut addrs = entry.blob.as_ref().map(|b| b.addrs.clone()).unwrap_or_default();
        let usable = self.shared.ports_up();
        let rails = self.shared.rails.iter().flat_map(|r| r.iter()).enumerate();
        let rails: Vec<_> = rails.filter(|(i, _)| usable & (1 << i) != 0).map(|(_, r)| r).collect();
        addrs.sort_by_key(|addr| {
            let has_rail = entry.mails.iter().any(|l| l.far == *addr.ip());
            (!has_rail, !rails.iter().any(|r| r.is_near(*addr.ip())))
        });
        addrs.into()
    }

    /// What this side tells of itself.
    pub(super) fn offer(
        &self,
        row: u32,
        raise: Option<&Raise>,
        connection: Option<u64>,
        join: Option<JoinPart>,
    ) -> RailOffer {
        RailOffer {
            host: self.shared.host,
            local: self.shared.share.offer(row),
            window: self.shared.core.first_window(row),
            rails: raise.map(Raise::parts).unwrap_or_default(),
            connection: connection.filter(|_| self.joins),
            join,
        }
    }

    /// Moves every handshake on.
    pub(super) fn drive(&mut self) {
        let mut i = 0;
        while i < self.conns.len() {
            let mut conn = self.conns.swap_remove(i);
            match self.advance(&mut conn) {
                Ok(false) => {
                    self.conns.push(conn);
                    // It may have taken the place of others, and the list be shorter than it was.
                    let last = self.conns.len() - 1;
                    self.conns.swap(i.min(last), last);
                    i += 1;
                }
                Ok(true) => self.dismiss(conn),
                Err(e) => self.failed(conn, e),
            }
        }
    }

    /// Ends what a connection still holds.
    pub(super) fn dismiss(&self, mut conn: Conn) {
        if let Some(mut raise) = conn.raise.take() {
            let pairs = self.shared.core.with_net(|net| raise.close(net));
            pairs.into_iter().for_each(Pair::bury);
        }
    }

    /// True: the connection is done with (taken over, or given up in order).
    fn advance(&mut self, conn: &mut Conn) -> Result<bool> {
        let now = Instant::now();
        if now >= conn.until || (!conn.answered && now >= conn.answer) {
            let text = match &conn.raise {
                Some(raise) if conn.answered => raise.none().message,
                _ => {
                    let limit = if conn.join.is_some() { self.join_limit() } else { self.limit() };
                    let whose = if limit < self.limit() {
                        "for a rail to join, by peer_timeout_ms"
                    } else {
                        "connect_timeout_ms"
                    };
                    format!("no answer within {} ms ({whose})", limit.as_millis())
                }
            };
            return Err(Error::new(Status::Unreachable, text));
        }
        if self.is_idle(conn) {
            return Ok(true);
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
                    let offer = RailOffer::decode(&offer)?;
                    if conn.join.is_some() {
                        self.meet_join(conn, &offer)?;
                    }
                    match &mut conn.raise {
                        None => {
                            sys::allow_copies();
                            self.prove(conn, offer)?;
                        }
                        Some(raise) => {
                            raise.meet(&offer.rails)?;
                            raise.start(&self.shared);
                            conn.offer = Some(offer);
                        }
                    }
                }
                Step::Done { rails, leftover } => {
                    return self.finish(conn, rails, &leftover).map(|()| true)
                }
            }
            conn.flush()?;
        }
        self.rise(conn)?;
        Ok(false)
    }

    /// True for a dial of ours that nobody waits for any more.
    fn is_idle(&self, conn: &Conn) -> bool {
        let mut peers = self.shared.peers();
        match (conn.role(), conn.peer) {
            _ if conn.join.is_some() => !self.is_joinable(&mut peers, conn),
            (Role::Dialer, Some((index, _))) => !peers.entry(index).dialling,
            _ => false,
        }
    }

    /// Moves on the RDMA rails of a connection.
    fn rise(&self, conn: &mut Conn) -> Result<()> {
        let role = conn.role();
        let (Some(raise), Some((index, _))) = (&mut conn.raise, conn.peer) else { return Ok(()) };
        // Half of the time for coming up, half of what is left for the proof.
        let (until, limit) = (conn.until, conn.limit);
        let left = |part: u32| until.checked_sub(limit / part).unwrap_or(until);
        if raise.advance(&self.shared, index, left(2))? && role == Role::Acceptor {
            let join = self.call_roll(conn)?;
            let offer = self.offer(index, conn.raise.as_ref(), conn.connection, join).encode();
            let bytes = conn.accept(&offer)?;
            conn.queue(&bytes);
            return conn.flush();
        }
        if conn.mask.is_none() {
            conn.mask = raise.proven(&self.shared, left(4))?;
            if let Some(mask) = conn.mask {
                let bytes = conn.ready(mask)?;
                conn.queue(&bytes);
                conn.flush()?;
            }
        }
        Ok(())
    }

    /// Somebody who holds our blob wants in: which peer is it, and may it?
    fn decide(&mut self, conn: &mut Conn, name: &[u8], who: [u8; 16], offer: &[u8]) -> Result<()> {
        let shared = &self.shared.clone();
        let mut offer = RailOffer::decode(offer)?;
        if let Some(join) = offer.join.take() {
            return self.decide_join(conn, name, who, offer, &join);
        }
        let mut peers = shared.peers();
        let index = peers.find_or_add(&shared.core, &shared.share, name, who)?;
        shared.learn_longest(index, offer.rails.iter().map(|p| p.end));
        let entry = peers.entry(index);
        if entry.dialling && dial_wins(&shared.incarnation, &who) {
            return Err(Error::new(Status::Busy, "both sides dial, and this side's dial stays"));
        }
        let title = entry.title();
        if entry.socket.as_ref().is_some_and(|s| !is_closed(s.as_raw_fd())) && !entry.is_left() {
            // A dial that crossed ours.
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
        (conn.answered, conn.connection) = (true, offer.connection.filter(|_| self.joins));
        self.supersede(index);
        drop(peers);
        if !offer.rails.is_empty() {
            return self.meet(conn, offer);
        }
        if shared.config.transport == "verbs" {
            return Err(mixed(shared, &title));
        }
        sys::allow_copies();
        let bytes = conn.accept(&self.offer(index, None, offer.connection, None).encode())?;
        conn.queue(&bytes);
        conn.flush()?;
        self.prove(conn, offer)
    }

    /// The dialler offers RDMA rails: those that go with ours are brought up.
    fn meet(&self, conn: &mut Conn, offer: RailOffer) -> Result<()> {
        let Some(rails) = &self.shared.rails else {
            let theirs: Vec<_> = offer.rails.iter().map(|p| p.end).collect();
            let text = format!("this side has transport local only; {}", both(&[], &theirs));
            return Err(Error::new(Status::NoRail, text));
        };
        let mut raise = Raise::acceptor(&self.shared, rails, u32::MAX, &offer.rails)?;
        raise.start(&self.shared);
        conn.raise = Some(raise);
        conn.offer = Some(offer);
        Ok(())
    }

    /// The other side proved the secret: this side proves the local rail, by a read through the
    /// driver, and says so. From then on the other side may count in its row.
    fn prove(&self, conn: &mut Conn, offer: RailOffer) -> Result<()> {
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
        conn.offer = Some(offer);
        let ready = conn.ready(0)?;
        conn.queue(&ready);
        Ok(())
    }

    /// Both sides are ready: the rails and the message stream belong to the engine now.
    fn finish(&self, conn: &mut Conn, rails: u32, early: &[u8]) -> Result<()> {
        let shared = &self.shared;
        if conn.join.is_some() {
            return self.finish_join(conn, rails);
        }
        let (Some((index, generation)), Some(offer)) = (conn.peer, conn.offer.take()) else {
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
        let (links, how) = match &mut conn.raise {
            Some(raise) => {
                let both = conn.mask.unwrap_or(0) & rails;
                let (proven, next_id) = (raise.take(both), raise.dialled());
                if proven.is_empty() {
                    return Err(raise.none());
                }
                peers.entry(index).life = Some(Life {
                    // Only if both sides know of it is it of use.
                    id: conn.connection.filter(|id| offer.connection == Some(*id)),
                    ours: conn.role() == Role::Dialer,
                    next_id,
                    ..Life::default()
                });
                let (links, names) = self.install(&mut peers, (index, generation), proven, 0);
                (links, format!("transport verbs, rails {names}"))
            }
            None => {
                let found =
                    self.install_local(&mut peers, (index, generation), conn.memory, &socket)?;
                conn.memory = None;
                found
            }
        };
        let entry = peers.entry(index);
        entry.socket = Some(socket);
        entry.dialling = false;
        entry.wanted = false;
        (entry.error, entry.lament, entry.revive) = (None, None, false);
        entry.route.clear();
        entry.backoff.came(Instant::now());
        let (name, title) = (entry.name.clone(), entry.title());
        let early = if conn.raise.is_some() { &[] } else { early };
        let fine = shared.core.attach(index, links, &name, offer.window, early);
        log::info(&format!("connected to {title}: {how}"));
        peers.tell_up(&shared.core, index, &how);
        if !fine {
            let why = Error::new(Status::Disconnected, "it does not speak the message protocol");
            peers.close(&shared.core, index, &why);
        }
        shared.changed.notify_all();
        Ok(())
    }

    /// Gives the engine RDMA rails to a peer, whose ids count from `first_id` on. Their mailboxes,
    /// which it gets next, and their names.
    pub(super) fn install(
        &self,
        peers: &mut Peers,
        (index, generation): (u32, u32),
        proven: Vec<Proven>,
        first_id: u32,
    ) -> (Links, String) {
        let core = &self.shared.core;
        let (mut links, mut names) = (Vec::new(), Vec::new());
        let entry = peers.entry(index);
        for p in proven {
            let (lane, id) = (p.mail.lane, first_id.wrapping_add(p.bit));
            core.connect_rail(lane, (index, id), generation, |port| {
                if let AnyPort::Verbs(port) = port {
                    port.connect(index, p.data, p.rail, p.max_msg);
                    // The rail is new, so it takes it.
                    let _none = p.loopback.and_then(|qp| port.loop_back(index, qp));
                }
            });
            if let Some(rails) = &self.shared.rails {
                loopback::furnish_new(&self.shared, rails, lane, index);
            }
            names.extend(
                self.shared
                    .rails
                    .iter()
                    .filter_map(|r| r.get(lane as usize))
                    .map(|r| format!("{} ({})", r.nic.label(), r.address().0)),
            );
            if let Some(life) = &mut entry.life {
                life.ids[lane as usize % MAX_RAILS] = Some(id);
            }
            links.push((lane, id, AnyLink::Mail(p.link)));
            entry.mails.push(Line { link: p.link, mail: p.mail, far: p.far });
        }
        (links, names.join(", "))
    }

    /// Gives the engine the local lanes to a peer, and the socket for messages.
    fn install_local(
        &self,
        peers: &mut Peers,
        (index, generation): (u32, u32),
        memory: Option<PeerMemory>,
        socket: &std::net::TcpStream,
    ) -> Result<(Links, String)> {
        let shared = &self.shared;
        let stream = Stream::new(socket.as_raw_fd());
        if !shared.core.with_net(|net| net.watch(&stream, Some(index))) {
            return Err(sys::os_error("epoll_ctl"));
        }
        let Some(memory) = memory else {
            shared.core.with_net(|net| net.watch(&stream, None));
            return Err(Error::new(Status::Internal, "a handshake ended without memory"));
        };
        peers.entry(index).memory = Some(memory);
        let lanes = shared.nics()..shared.core.limits().lanes;
        for lane in lanes.clone() {
            let connect = |port: &mut _| connect_local(port, index, memory);
            shared.core.connect_rail(lane, (index, lane), generation, connect);
        }
        let how = format!("transport local (process {}), {} rails", memory.pid(), lanes.len());
        Ok((vec![(NO_LANE, 0, AnyLink::Stream(stream))], how))
    }

    fn failed(&self, mut conn: Conn, why: Error) {
        conn.refuse(&why);
        if conn.join.is_some() {
            self.failed_join(conn, &why);
            return;
        }
        let (role, known, answered) = (conn.role(), conn.peer, conn.answered);
        self.dismiss(conn);
        let mut peers = self.shared.peers();
        let current = known.filter(|(i, g)| self.shared.core.peer_state(*i).generation == *g);
        let Some((index, _)) = current else {
            log::log(log::Level::Debug, &format!("a connection was refused: {why}"));
            return;
        };
        if role == Role::Acceptor && self.shared.core.peer_state(index).link == Link::Up {
            return;
        }
        if role == Role::Acceptor {
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
        let entry = peers.entry(index);
        if why.status == Status::Busy {
            // The other side's dial stays; it is on its way, or here already.
            entry.dialling = false;
            if self.shared.core.peer_state(index).link != Link::Up {
                entry.parked = Some(Instant::now() + self.limit());
            }
            return;
        }
        if !answered && !entry.route.is_empty() && why.status == Status::Unreachable {
            // This address did not answer; the peer has others.
            entry.dialling = false;
            entry.wanted = true;
            entry.dialled = None;
            return;
        }
        entry.route.clear();
        let title = entry.title();
        self.give_up(
            &mut peers,
            index,
            Error::new(why.status, format!("{title}: {}", why.message)),
        );
    }
}

fn mixed(shared: &Shared, title: &str) -> Error {
    let ours: Vec<_> =
        shared.rails.iter().flat_map(|r| r.iter()).map(|r| r.end(r.nic.gid)).collect();
    let text = format!(
        "{title} has transport local only, and transport=verbs is set here: it has no usable NIC, \
         or was started with transport=local; {}",
        both(&ours, &[])
    );
    Error::new(Status::NoRail, text)
}

/// How a peer is reached: by RDMA where both sides have rails, else by copies where both are
/// processes of one user on one host.
fn way(shared: &Shared, title: &str, blob: &ConnBlob) -> Result<Way> {
    match &shared.rails {
        Some(rails) if !blob.rails.is_empty() => return Ok(Way::Verbs(rails.clone())),
        Some(_) if shared.config.transport == "verbs" => return Err(mixed(shared, title)),
        _ => {}
    }
    let (ours, theirs) = (&shared.host, &blob.offer);
    let what = if ours.boot_id != theirs.boot_id {
        "is on another host".to_owned()
    } else if ours.pid_ns != theirs.pid_ns {
        "is in another pid namespace (another container)".to_owned()
    } else if ours.uid != theirs.uid {
        format!("belongs to user {}, this process to user {}", theirs.uid, ours.uid)
    } else {
        return Ok(Way::Local);
    };
    let rails = if blob.rails.is_empty() {
        "the peer has no RDMA rails"
    } else {
        "this side has no RDMA rails"
    };
    let mut text = format!(
        "{title} {what}. Transport local copies between processes of one user on one host; peers \
         elsewhere need RDMA rails on both sides, and {rails}"
    );
    if let Some(why) = &shared.why_local {
        text += &format!(": {why}");
    }
    Err(Error::new(Status::NoRail, text))
}

/// Whether a peer can be reached at all, before anybody dials it.
pub(super) fn reachable(shared: &Shared, blob: &ConnBlob) -> Result<()> {
    way(shared, &shown(&blob.name, 64), blob).map(|_| ())
}
