//! The life of a connection's RDMA rails: one that broke is taken off, the side that dialled dials
//! for another, and a peer that has had none for too long is given up.

use core::time::Duration;
use std::time::Instant;

use super::conn::{Conn, Join, Role};
use super::control::{Control, TICK};
use super::error::{Error, Result};
use super::log;
use super::offer::{JoinPart, RailOffer};
use super::peers::Peers;
use super::raise::Raise;
use super::silence::Silence;
use crate::engine::peer::{Link, SELF};
use crate::status::Status;

/// How long a rail may be behind the first one of its join: it is tried again with the next.
const PATIENCE: Duration = Duration::from_millis(500);
/// Shortest limit of a join.
const SHORTEST: Duration = Duration::from_millis(500);

/// The lanes of a mask.
fn lanes(mask: u32) -> impl Iterator<Item = u32> {
    (0..u32::BITS).filter(move |lane| mask & (1 << lane) != 0)
}

impl Control {
    fn peer_timeout(&self) -> Duration {
        Duration::from_millis(u64::from(self.shared.config.peer_timeout_ms))
    }

    /// How long a join may take: less than a peer may be without rails, or one that hangs would be
    /// its end.
    pub(super) fn join_limit(&self) -> Duration {
        (self.peer_timeout() * 3 / 4).max(SHORTEST).min(self.limit())
    }

    /// Takes off the rails of a peer that broke.
    pub(super) fn tend(&self, peers: &mut Peers, index: u32) {
        let lost = self.shared.core.lost(index);
        if lost == 0 || peers.entry(index).life.is_none() {
            return;
        }
        self.drop_lanes(peers, index, lost);
        self.say_limping(peers, index, lost);
    }

    fn drop_lanes(&self, peers: &mut Peers, index: u32, mask: u32) {
        let core = &self.shared.core;
        let entry = peers.entry(index);
        for lane in lanes(mask) {
            let at = entry.mails.iter().position(|l| l.mail.lane == lane);
            let line = at.map(|at| entry.mails.remove(at));
            // Nothing comes in any more, so that what the engine takes in now is all there is.
            line.iter().for_each(|line| line.mail.fail());
            core.drop_rail(lane, index);
            if let Some(line) = line {
                core.with_net(|net| net.close_mail(index, lane, &line.link));
                line.mail.bury();
            }
            entry.tell_down(lane);
        }
        let now = Instant::now();
        entry.backoff.lost(now);
        if let Some(life) = &mut entry.life {
            let asked = self.shared.config.keepalive_ms != 0;
            life.silence.lost(now, core.rails(index) != 0, asked);
        }
        peers.collect_graves(core);
    }

    /// The other side's list of living rails: what it does not have is over here too, and of a
    /// dead rail that it does not have nothing lands any more.
    fn settle(&self, peers: &mut Peers, index: u32, alive: &[u32]) {
        let core = &self.shared.core;
        self.tend(peers, index);
        let over = |lane: &u32| core.rail_id(*lane, index).is_some_and(|id| !alive.contains(&id));
        let over = lanes(core.rails(index)).filter(over).fold(0, |mask, lane| mask | 1 << lane);
        if over != 0 {
            self.drop_lanes(peers, index, over);
            self.say_limping(peers, index, over);
        }
        let Some(life) = &peers.entry(index).life else { return };
        for lane in lanes(core.owes(index) & !core.rails(index)) {
            let id = life.ids.get(lane as usize).copied().flatten();
            if id.is_none_or(|id| !alive.contains(&id)) {
                core.fence(lane, index);
            }
        }
    }

    /// What a peer said of its rails over its connection: those are closed there, so they are of no
    /// use here, and nothing of them lands any more. It says the same over a rail's messages, if
    /// one is left.
    pub(super) fn hear(&self, peers: &mut Peers, index: u32) {
        let core = &self.shared.core;
        for id in peers.entry(index).told_down() {
            let ids = peers.entry(index).life.iter().flat_map(|l| l.ids);
            let Some((lane, _)) = ids.enumerate().find(|(_, i)| *i == Some(id)) else { continue };
            let lane = lane as u32;
            if core.rail_id(lane, index) == Some(id) {
                self.drop_lanes(peers, index, 1 << lane);
                self.say_limping(peers, index, 1 << lane);
            }
            core.fence(lane, index);
        }
    }

    /// Ids of a peer's living rails.
    fn alive(&self, index: u32) -> Vec<u32> {
        let core = &self.shared.core;
        lanes(core.rails(index)).filter_map(|lane| core.rail_id(lane, index)).collect()
    }

    /// Which rails to a peer broke, and which are left.
    fn say_limping(&self, peers: &mut Peers, index: u32, broken: u32) {
        let left = self.shared.core.rails(index);
        let names = |mask: u32| {
            let rails = |lane| self.shared.rails.as_ref()?.get(lane as usize);
            let names = lanes(mask).filter_map(rails).map(|r| r.nic.label());
            let names = names.collect::<Vec<_>>().join(", ");
            if names.is_empty() {
                String::from("none")
            } else {
                names
            }
        };
        log::warn(&format!(
            "{}: rail {} broke; left: {}",
            peers.entry(index).title(),
            names(broken),
            names(left)
        ));
    }

    /// Peers that died for want of rails: without one for `peer_timeout_ms`, or without one and
    /// without a way to get one.
    pub(super) fn lost_at_sea(&self, peers: &mut Peers, now: Instant) -> Vec<(u32, String)> {
        let limit = self.peer_timeout();
        let mut gone = Vec::new();
        for (index, entry) in peers.entries.iter().enumerate() {
            let Some(life) = &entry.life else { continue };
            let Some(since) = life.silence.adrift() else { continue };
            let how = if life.id.is_none() {
                "its last rail broke, and its build takes no rails later".to_owned()
            } else if now.duration_since(since) >= limit {
                format!("no rail to it for {} ms (peer_timeout_ms)", limit.as_millis())
            } else {
                continue;
            };
            gone.push((index as u32, how));
        }
        gone
    }

    /// Rails that a connection of ours lacks: as many as both sides have NICs.
    fn lacks(&self, peers: &Peers, index: u32) -> bool {
        let entry = &peers.entries[index as usize];
        let Some(life) = entry.life.as_ref().filter(|l| l.ours && l.id.is_some()) else {
            return false;
        };
        let Some(blob) = &entry.blob else { return false };
        let ours = self.shared.rails.iter().flat_map(|r| r.iter());
        let ours = ours.filter(|r| !r.device.is_dead()).count();
        let have = self.shared.core.rails(index).count_ones() as usize;
        have < ours.min(blob.rails.len()) && life.next_id < u32::MAX / 2
    }

    /// Dials for the rails that connections lack, and for peers that died for want of them, as soon
    /// as each may. When to look again, if anybody waits.
    pub(super) fn rejoin(&mut self) -> Option<Instant> {
        let shared = self.shared.clone();
        let mut peers = shared.peers();
        let now = Instant::now();
        let mut alarm = None::<Instant>;
        let mut wake = |t: Instant| alarm = Some(alarm.map_or(t, |a| a.min(t)));
        for index in 1..peers.entries.len() as u32 {
            let entry = peers.entry(index);
            if let Some(since) = entry.life.as_ref().and_then(|l| l.silence.adrift()) {
                // Whoever has nothing left must not wait for longer than it may live.
                entry.backoff.hurry(now, self.peer_timeout() / 4);
                wake((since + self.peer_timeout()).max(now));
            }
            let due = entry.backoff.waits(now);
            if entry.revive && shared.core.peer_state(index).link == Link::Dead {
                let busy = entry.dialling || entry.wanted || entry.parked.is_some();
                entry.wanted |= due.is_none() && !busy;
                wake(due.unwrap_or(now + TICK));
                continue;
            }
            if peers.entry(index).joining || !self.lacks(&peers, index) {
                continue;
            }
            wake(due.unwrap_or(now + TICK));
            if due.is_some() {
                continue;
            }
            let free = shared.ports_up() & !shared.core.held_rails(index);
            if free == 0 {
                continue;
            }
            match self.join(&mut peers, index, free) {
                Ok(conn) => self.conns.push(conn),
                Err(e) => self.lament(&mut peers, index, &e),
            }
        }
        alarm
    }

    /// Dials for rails on `lanes`.
    fn join(&self, peers: &mut Peers, index: u32, lanes: u32) -> Result<Conn> {
        let shared = &self.shared;
        let absent = || Error::new(Status::Internal, "a connection over rails that are not there");
        let rails = shared.rails.as_ref().ok_or_else(absent)?;
        self.tend(peers, index);
        let generation = shared.core.peer_state(index).generation;
        let alive = self.alive(index);
        let mut raise = Raise::dialler(shared, rails, lanes & !shared.core.rails(index))?;
        raise.hurry(PATIENCE);
        let life = peers.entry(index).life.as_mut().ok_or_else(absent)?;
        let (connection, first_id) = (life.id, life.next_id);
        life.next_id += raise.dialled();
        let part = JoinPart { first_id, alive };
        let offer = self.offer(index, Some(&raise), connection, Some(part));
        let limit = self.join_limit();
        let mut conn = self.reach(peers.entry(index), (index, generation), &offer, limit)?;
        conn.raise = Some(raise);
        (conn.connection, conn.join) = (connection, Some(Join { first_id, fences: 0 }));
        peers.entry(index).joining = true;
        Ok(conn)
    }

    /// Whether the connection that a join is for is still the one that is up.
    pub(super) fn is_joinable(&self, peers: &mut Peers, conn: &Conn) -> bool {
        let Some((index, generation)) = conn.peer else { return false };
        let s = self.shared.core.peer_state(index);
        let entry = peers.entry(index);
        let same = entry.life.as_ref().is_some_and(|l| l.id.is_some() && l.id == conn.connection);
        let wanted = conn.role() == Role::Acceptor || entry.joining;
        s.generation == generation && s.link == Link::Up && same && wanted
    }

    /// Somebody wants to add rails: to a connection that this side knows too?
    pub(super) fn decide_join(
        &mut self,
        conn: &mut Conn,
        name: &[u8],
        who: [u8; 16],
        offer: RailOffer,
        join: &JoinPart,
    ) -> Result<()> {
        let shared = self.shared.clone();
        let stale = || {
            let text = "this agent has no such connection any more, so no rail can join it";
            Error::new(Status::Stale, text)
        };
        let mut peers = shared.peers();
        let index = peers.by_name.get(name).copied().filter(|i| *i != SELF).ok_or_else(stale)?;
        let s = shared.core.peer_state(index);
        (conn.peer, conn.connection) = (Some((index, s.generation)), offer.connection);
        let entry = peers.entry(index);
        let known = entry.incarnation == who && entry.life.as_ref().is_some_and(|l| !l.ours);
        if !known || !self.is_joinable(&mut peers, conn) {
            conn.peer = None;
            return Err(stale());
        }
        conn.answered = true;
        conn.limit = self.join_limit();
        conn.until = Instant::now() + conn.limit;
        conn.join = Some(Join { first_id: join.first_id, fences: 0 });
        // An earlier try that the dialler gave up.
        self.supersede(index);
        self.settle(&mut peers, index, &join.alive);
        drop(peers);
        let free = self.shared.ports_up() & !shared.core.held_rails(index);
        let Some(rails) = shared.rails.as_ref().filter(|_| free != 0) else {
            return Err(Error::new(Status::NoRail, "no port without a rail is usable here"));
        };
        let mut raise = Raise::acceptor(&shared, rails, free, &offer.rails)?;
        raise.hurry(PATIENCE);
        raise.start(&shared);
        (conn.raise, conn.offer) = (Some(raise), Some(offer));
        Ok(())
    }

    /// The acceptor's rails are up: which of the old ones live, for the dialler. What does not is
    /// over there when that is ready.
    pub(super) fn call_roll(&self, conn: &mut Conn) -> Result<Option<JoinPart>> {
        let Some(mut join) = conn.join else { return Ok(None) };
        let mut peers = self.shared.peers();
        let Some((index, _)) = conn.peer.filter(|_| self.is_joinable(&mut peers, conn)) else {
            return Err(gone());
        };
        self.tend(&mut peers, index);
        let core = &self.shared.core;
        join.fences = core.owes(index) & !core.rails(index);
        conn.join = Some(join);
        Ok(Some(JoinPart { first_id: join.first_id, alive: self.alive(index) }))
    }

    /// The dialler learns which rails the acceptor has.
    pub(super) fn meet_join(&self, conn: &Conn, offer: &RailOffer) -> Result<()> {
        let mut peers = self.shared.peers();
        let Some((index, _)) = conn.peer.filter(|_| self.is_joinable(&mut peers, conn)) else {
            return Err(gone());
        };
        let Some(join) = offer.join.as_ref().filter(|_| offer.connection == conn.connection) else {
            return Err(Error::new(Status::Refused, "the peer's answer is not to a join"));
        };
        self.settle(&mut peers, index, &join.alive);
        Ok(())
    }

    /// Both sides are ready: the rails are the connection's.
    pub(super) fn finish_join(&self, conn: &mut Conn, rails: u32) -> Result<()> {
        let core = &self.shared.core;
        let mut peers = self.shared.peers();
        let here = conn.peer.filter(|_| self.is_joinable(&mut peers, conn));
        let (Some((index, generation)), Some(join)) = (here, conn.join) else {
            return Err(gone());
        };
        let mask = conn.mask.unwrap_or(0) & rails;
        let Some(raise) = &mut conn.raise else { return Err(gone()) };
        let proven = raise.take(mask);
        if proven.is_empty() {
            return Err(raise.none());
        }
        lanes(join.fences).for_each(|lane| core.fence(lane, index));
        let (mut links, names) =
            self.install(&mut peers, (index, generation), proven, join.first_id);
        // Messages go over the first one that is added if there was none: the same on both sides.
        links.sort_unstable_by_key(|(_, id, _)| *id);
        for (lane, id, link) in links {
            // There is room: at most one a lane.
            let _ = core.add_link(index, lane, id, link);
        }
        core.kick(index);
        let entry = peers.entry(index);
        if let Some(life) = &mut entry.life {
            life.silence = Silence::default();
        }
        (entry.joining, entry.lament) = (false, None);
        entry.route.clear();
        entry.backoff.came(Instant::now());
        log::info(&format!("{}: rails {names} are back", entry.title()));
        self.shared.changed.notify_all();
        Ok(())
    }

    /// A join came to nothing. The connection is as it was.
    pub(super) fn failed_join(&self, conn: Conn, why: &Error) {
        let (role, answered) = (conn.role(), conn.answered);
        let mut peers = self.shared.peers();
        let here = conn.peer.filter(|_| self.is_joinable(&mut peers, &conn));
        drop(peers);
        self.dismiss(conn);
        let (Role::Dialer, Some((index, _))) = (role, here) else {
            log::log(log::Level::Debug, &format!("a join was refused: {why}"));
            return;
        };
        peers = self.shared.peers();
        let entry = peers.entry(index);
        entry.joining = false;
        if !answered && why.status == Status::Unreachable && !entry.route.is_empty() {
            // This address did not answer; the peer has others, which are tried at once.
            return;
        }
        entry.route.clear();
        if answered && why.status == Status::Stale {
            let title = entry.title();
            let text = format!("{title} is gone: it has given the connection up");
            self.part(&mut peers, index, &Error::new(Status::Disconnected, text), true);
            return;
        }
        self.lament(&mut peers, index, why);
    }

    fn lament(&self, peers: &mut Peers, index: u32, why: &Error) {
        let entry = peers.entry(index);
        entry.backoff.failed(Instant::now());
        if entry.lament.as_ref() != Some(&why.message) {
            log::warn(&format!("{}: no rail comes back yet: {why}", entry.title()));
            entry.lament = Some(why.message.clone());
        }
    }

    /// Ends a peer whose connection is over: what it sent before is read, then it is dead.
    /// `revive`: it is dialled until it is there again, if it can be.
    pub(super) fn part(&self, peers: &mut Peers, index: u32, why: &Error, revive: bool) {
        let shared = &self.shared;
        shared.core.drain_stream(index);
        log::info(&why.message);
        peers.close(&shared.core, index, why);
        let entry = peers.entry(index);
        if entry.blob.is_none() {
            // It only ever dialled us: nothing of it is kept.
            peers.remove(&shared.core, index, why);
        } else if revive {
            entry.revive = true;
            entry.backoff.failed(Instant::now());
        }
        shared.changed.notify_all();
    }

    /// A newer connection of a peer takes the place of every handshake with it.
    pub(super) fn supersede(&mut self, index: u32) {
        let of = |c: &Conn| c.peer.is_some_and(|(i, _)| i == index);
        while let Some(at) = self.conns.iter().position(of) {
            let conn = self.conns.remove(at);
            self.dismiss(conn);
        }
    }
}

fn gone() -> Error {
    Error::new(Status::Stale, "the connection ended while rails joined it")
}
