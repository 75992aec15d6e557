//! The host's view of peers: names, incarnations, blobs, sockets, attached memory. Under one mutex,
//! which is also what makes the control side of the engine one thread at a time. Neither check nor
//! notifs nor notify takes it.

use core::net::{Ipv4Addr, SocketAddrV4};
use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use super::backoff::Backoff;
use super::blob::ConnBlob;
use super::error::{hex, shown, Error};
use super::graves;
use super::keylist;
use super::pool::Pool;
use super::rail::MAX_RAILS;
use super::rails::Rails;
use super::raise::Mail;
use super::rows::Rows;
use super::shared::Core;
use super::silence::Silence;
use super::tell::{Event, EventKind, Teller, NO_LANE};
use crate::engine::peer::{Link, PeerState, SELF};
use crate::nic::any::AnyLink;
use crate::nic::local::{PeerMemory, Share};
use crate::nic::verbs::mail::MailLink;
use crate::status::Status;

/// The message queue pair of an RDMA rail.
pub(super) struct Line {
    pub(super) link: MailLink<'static>,
    pub(super) mail: Mail,
    /// The address of the rail's other end.
    pub(super) far: Ipv4Addr,
}

/// A connection over RDMA rails, as long as it lives.
#[derive(Default)]
pub(super) struct Life {
    /// What both sides call it; `None`: the other side joins no rails (1.0).
    pub(super) id: Option<u64>,
    /// This side's dial made it, so this side's dials keep it up.
    pub(super) ours: bool,
    /// Ids from here on were given to no rail yet.
    pub(super) next_id: u32,
    /// Id of the last rail of each lane, up or not.
    pub(super) ids: [Option<u32>; MAX_RAILS],
    /// Since when its rails show no sign of life.
    pub(super) silence: Silence,
    /// Part of a number that has come over the connection.
    pub(super) part: Vec<u8>,
}

/// A peer's slot as the host knows it.
#[derive(Default)]
pub(super) struct Entry {
    pub(super) name: Vec<u8>,
    pub(super) incarnation: [u8; 16],
    /// How to dial it; a peer that only ever dialled us has none.
    pub(super) blob: Option<ConnBlob>,
    pub(super) memory: Option<PeerMemory>,
    pub(super) socket: Option<TcpStream>,
    /// Message queue pairs of its RDMA rails, with their streams.
    pub(super) mails: Vec<Line>,
    /// Its connection, if that is over RDMA rails.
    pub(super) life: Option<Life>,
    /// When rails may be dialled for again, or the peer that died for want of them.
    pub(super) backoff: Backoff,
    /// A join of ours is under way.
    pub(super) joining: bool,
    /// It died for want of rails: it is dialled until it is there again.
    pub(super) revive: bool,
    /// Why the last dial for rails came to nothing, so that this is said once.
    pub(super) lament: Option<String>,
    /// Its addresses that the present dial has not tried yet.
    pub(super) route: VecDeque<SocketAddrV4>,
    /// Our dials so far.
    pub(super) attempt: u64,
    /// A dial of ours is under way.
    pub(super) dialling: bool,
    /// Somebody wants it dialled.
    pub(super) wanted: bool,
    /// Its own dial was preferred; it must be here by then.
    pub(super) parked: Option<Instant>,
    /// Why it is dead.
    pub(super) error: Option<Error>,
    /// When it was last dialled, so that nobody makes us dial in a loop.
    pub(super) dialled: Option<Instant>,
}

impl Entry {
    /// Name and incarnation for a message.
    pub(super) fn title(&self) -> String {
        format!("{} (incarnation {})", shown(&self.name, 64), &hex(&self.incarnation)[..8])
    }

    /// Says over the connection that the last rail of a lane is closed here. A hint that saves
    /// time: where it is lost the other side finds out by itself.
    pub(super) fn tell_down(&mut self, lane: u32) {
        let life = self.life.as_ref().filter(|l| l.id.is_some());
        let id = life.and_then(|l| l.ids.get(lane as usize).copied().flatten());
        if let (Some(id), Some(socket)) = (id, &mut self.socket) {
            // Fewer bytes than any socket takes at once, or none when the other side reads nothing.
            let _ = socket.write(&id.to_le_bytes());
        }
    }

    /// The rails of which the other side said so since the last call, by their ids.
    pub(super) fn told_down(&mut self) -> Vec<u32> {
        let life = self.life.as_mut().filter(|l| l.id.is_some());
        let (Some(life), Some(socket)) = (life, &mut self.socket) else { return Vec::new() };
        let mut bytes = [0; 4 * MAX_RAILS];
        // Its end is noticed elsewhere.
        let n = socket.read(&mut bytes).unwrap_or(0);
        if n == 0 {
            return Vec::new();
        }
        life.part.extend_from_slice(&bytes[..n]);
        let (words, rest) = life.part.as_chunks::<4>();
        let (ids, rest) = (words.iter().map(|w| u32::from_le_bytes(*w)).collect(), rest.to_vec());
        life.part = rest;
        ids
    }

    /// Whether a new dial of the peer shows that it has left the connection, though its end has not
    /// come: a side never dials anew what it dialled and still has. A connection of our own dial
    /// without a rail is in doubt, and then the other side's word counts.
    pub(super) fn is_left(&self) -> bool {
        let life = self.life.as_ref().filter(|l| l.id.is_some());
        life.is_some_and(|l| !l.ours || l.silence.adrift().is_some())
    }
}

/// All peers.
pub(super) struct Peers {
    pub(super) entries: Vec<Entry>,
    pub(super) by_name: HashMap<Vec<u8>, u32>,
    pub(super) rows: Rows,
    rails: Option<Arc<Rails>>,
    pool: Arc<Pool>,
    teller: Arc<Teller>,
}

impl Peers {
    pub(super) fn new(
        count: u32,
        name: &[u8],
        incarnation: [u8; 16],
        rails: Option<Arc<Rails>>,
        (pool, teller): (Arc<Pool>, Arc<Teller>),
    ) -> Peers {
        let mut entries: Vec<Entry> = (0..count).map(|_| Entry::default()).collect();
        let own = &mut entries[SELF as usize];
        own.name = name.to_vec();
        own.incarnation = incarnation;
        let by_name = HashMap::from([(name.to_vec(), SELF)]);
        Peers { entries, by_name, rows: Rows::new(count), rails, pool, teller }
    }

    pub(super) fn entry(&mut self, index: u32) -> &mut Entry {
        &mut self.entries[index as usize]
    }

    /// Peers in use, without the engine itself.
    pub(super) fn used(&self) -> u32 {
        self.by_name.len() as u32 - 1
    }

    /// The peer of that name and incarnation, made if need be. One of another incarnation is dead:
    /// it restarted.
    pub(super) fn find_or_add(
        &mut self,
        core: &Core,
        share: &Share,
        name: &[u8],
        incarnation: [u8; 16],
    ) -> Result<u32, Error> {
        if let Some(&index) = self.by_name.get(name) {
            if self.entries[index as usize].incarnation == incarnation {
                return Ok(index);
            }
            if index == SELF {
                let text = format!("{} is this agent's own name", shown(name, 64));
                return Err(Error::new(Status::Refused, text));
            }
            self.remove(core, index, &Error::new(Status::Disconnected, "it restarted"));
        }
        let rows = &mut self.rows;
        let mut free =
            (1..self.entries.len() as u32).filter(|&i| core.peer_state(i).link == Link::Free);
        let Some(index) = free.find(|&i| rows.is_clear(share, i)) else {
            let text = format!(
                "{} of at most {} peers are in use, and the rest belongs to processes that stopped \
                 inside a copy: remove peers, or raise max_peers",
                self.used(),
                self.entries.len() - 1
            );
            return Err(Error::new(Status::Capacity, text));
        };
        *self.entry(index) = Entry { name: name.to_vec(), incarnation, ..Entry::default() };
        self.by_name.insert(name.to_vec(), index);
        let s = core.peer_state(index);
        core.set_peer(index, PeerState { link: Link::Down, status: Status::InProgress, ..s });
        Ok(index)
    }

    /// Ends a connection: transfers and messages end with the error; nothing touches memory any
    /// more. The peer stays known. Bounded by one batch of each lane.
    pub(super) fn close(&mut self, core: &Core, index: u32, why: &Error) {
        let was = core.peer_state(index).link;
        // What has arrived was told as such to its sender.
        core.drain_stream(index);
        for link in core.close_peer(index, why.status) {
            if let AnyLink::Stream(stream) = link.link {
                core.with_net(|net| net.watch(&stream, None));
            }
        }
        if was == Link::Up {
            let title = self.entry(index).title();
            let text = if why.message.contains(&title) {
                why.message.clone()
            } else {
                format!("{title}: {}", why.message)
            };
            self.tell(core, index, EventKind::PeerGone, why.status, text);
        }
        let entry = self.entry(index);
        let mails = core::mem::take(&mut entry.mails);
        core.with_net(|net| {
            for line in &mails {
                net.close_mail(index, line.mail.lane, &line.link);
            }
        });
        mails.into_iter().for_each(|line| line.mail.bury());
        entry.life = None;
        entry.joining = false;
        entry.error = Some(why.clone());
        entry.parked = None;
        if let Some(memory) = entry.memory.take() {
            memory.detach();
        }
        if let Some(socket) = entry.socket.take() {
            // Dropping it is not enough: as long as somebody waits for it in `poll`, or a forked
            // child has it, the other side would not be told. What was sent still arrives.
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        self.collect_graves(core);
    }

    /// Has the queue pairs of rails that were closed destroyed, beside this thread. To be called
    /// when a rail was taken off, whoever closed it.
    pub(super) fn collect_graves(&self, core: &Core) {
        if let Some(rails) = &self.rails {
            graves::collect(rails, core);
        }
    }

    /// Tells that a peer is connected, and how.
    pub(super) fn tell_up(&mut self, core: &Core, index: u32, how: &str) {
        let text = format!("{} is connected: {how}", self.entry(index).title());
        self.tell(core, index, EventKind::PeerUp, Status::Ok, text);
    }

    fn tell(&self, core: &Core, index: u32, kind: EventKind, status: Status, text: String) {
        let (peer, since) = (core.peer_handle(index).raw(), Duration::ZERO);
        self.teller.tell(Event { kind, peer, lane: NO_LANE, status, since, text });
    }

    /// Closes and forgets a peer: its handle and its regions' handles are stale.
    pub(super) fn remove(&mut self, core: &Core, index: u32, why: &Error) {
        self.close(core, index, why);
        let mut regions = Vec::new();
        core.remote.each(|handle| {
            if core.remote.view(handle.raw()).is_ok_and(|v| v.peer == index) {
                regions.push(handle);
            }
        });
        for handle in regions {
            if let Ok(view) = core.remote.close(handle) {
                core.remote.free(view);
                // SAFETY: I3: freed just now; the peer's transfers have ended.
                unsafe { keylist::free(&self.pool, &view) };
            }
        }
        let entry = core::mem::take(self.entry(index));
        self.by_name.remove(&entry.name);
        let s = core.peer_state(index);
        let generation = s.generation.wrapping_add(1).max(1);
        core.set_peer(
            index,
            PeerState { generation, link: Link::Free, status: Status::Disconnected },
        );
    }

    /// The sockets of connected peers, with their slots.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (u32, i32)> + '_ {
        let open = self.entries.iter().enumerate();
        open.filter_map(|(i, e)| Some((i as u32, e.socket.as_ref()?.as_raw_fd())))
    }

    /// What the control thread waits for on a peer's socket. Messages are read by others.
    pub(super) fn awaits(&self, index: u32) -> i16 {
        let life = self.entries[index as usize].life.as_ref();
        let said = life.is_some_and(|l| l.id.is_some());
        libc::POLLRDHUP | if said { libc::POLLIN } else { 0 }
    }

    /// The message queue pairs: peer and lane.
    pub(super) fn message_lanes(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let entries = self.entries.iter().enumerate();
        entries.flat_map(|(i, e)| e.mails.iter().map(move |l| (i as u32, l.mail.lane)))
    }

    /// Peers of whose rails some were lost, and since when none showed that it works.
    pub(super) fn doubts(&self) -> impl Iterator<Item = (u32, Instant)> + '_ {
        let entries = self.entries.iter().enumerate();
        entries.filter_map(|(i, e)| Some((i as u32, e.life.as_ref()?.silence.doubt()?)))
    }

    /// Doubts begin now: nobody looked before.
    pub(super) fn doubt_from(&mut self, now: Instant) {
        let lives = self.entries.iter_mut().filter_map(|e| e.life.as_mut());
        lives.for_each(|life| life.silence.restart(now));
    }

    /// True while somebody is to be dialled, or expected to dial.
    pub(super) fn is_waiting(&self) -> bool {
        self.entries.iter().any(|e| e.wanted || e.parked.is_some())
    }
}
