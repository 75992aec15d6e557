//! Watches RDMA rails: work requests that never complete, peers' NICs that do not answer, and ports
//! that are of no use. A link that goes down can leave a work request hanging for ever, and events
//! can be lost, so neither alone is relied on.

mod links;
mod pace;
mod ports;

use core::time::Duration;
use std::collections::HashMap;
use std::time::Instant;

use super::log;
use super::rails::Rails;
use super::shared::Shared;
use super::tell::{Event, EventKind, NO_LANE};
use crate::engine::peer::Link;
use crate::nic::any::AnyPort;
use crate::status::Status;
use crate::sync::Ordering;
use links::{Change, Links};
pub(super) use pace::acknowledgement;
use pace::{Care, Gap, Pace, Progress, Pulse};
use ports::Ports;

/// How often an engine with NICs looks at their ports at least.
const PORTS: Duration = Duration::from_millis(500);

/// One rail to one peer.
#[derive(Default)]
struct Watched {
    progress: Progress,
    pulse: Pulse,
    /// The doubt for whose sake it was asked last.
    doubt: Option<Instant>,
}

pub(super) struct Watch {
    /// By lane.
    pace: Vec<Pace>,
    ports: Ports,
    links: Links,
    /// By (lane, peer).
    rails: HashMap<(u32, u32), Watched>,
    /// Frames of messages, by (peer, lane).
    frames: HashMap<(u32, u32), Progress>,
    /// Handle and rails of each peer as they were told last.
    told: Vec<(u64, u32)>,
    gap: Gap,
    next: Option<Instant>,
    /// When the rails were looked at last.
    looked: Option<Instant>,
    /// By peer: since when its rails are in doubt, as another one was lost.
    doubts: HashMap<u32, Instant>,
}

impl Watch {
    pub(super) fn new(shared: &Shared) -> Watch {
        let rails = shared.rails.iter().flat_map(|r| r.iter());
        let speed = |r: &super::rails::Rail| r.device.facts().speed_mbps.max(r.nic.speed_mbps);
        let mut ports = Ports::new(shared);
        if let Some(rails) = &shared.rails {
            ports.look(shared, rails, Instant::now());
        }
        Watch {
            pace: rails.map(|r| Pace::new(speed(r))).collect(),
            ports,
            links: Links::default(),
            rails: HashMap::new(),
            frames: HashMap::new(),
            told: vec![(0, 0); shared.core.limits().peers as usize],
            gap: Gap::new(),
            next: None,
            looked: None,
            doubts: HashMap::new(),
        }
    }

    /// How long the thread may sleep before it looks again: a few looks within each limit.
    pub(super) fn pause(&mut self, shared: &Shared, messages: bool) -> Duration {
        let (limit, least) = (limit(shared), Duration::from_millis(5));
        let busy = shared.core.transfers_used() > 0 || self.ports.is_worried();
        let busy = busy || !self.doubts.is_empty();
        let pause = if busy || self.links.is_pending() {
            (limit / 8).clamp(least, Duration::from_millis(125))
        } else if messages {
            (limit / 2).clamp(least, Duration::from_millis(250))
        } else {
            PORTS
        };
        let keepalive = keepalive(shared);
        let often = !keepalive.is_zero() && !self.rails.is_empty();
        self.gap.meant = if often { pause.min((keepalive / 4).max(least)) } else { pause };
        self.gap.meant
    }

    /// Takes the devices' events, fails what is of no use, asks idle rails.
    pub(super) fn look(&mut self, shared: &Shared) {
        self.tell_rails(shared);
        let Some(rails) = &shared.rails else { return };
        let now = Instant::now();
        if self.gap.overslept(now, limit(shared)) {
            self.restart(shared, now);
        }
        self.ports.hear(shared, rails);
        if self.next.is_some_and(|t| now < t) && !self.ports.is_due() {
            return;
        }
        self.next = Some(now + self.gap.meant);
        self.ports.look(shared, rails, now);
        self.look_at_links(shared, now);
        self.look_at_rails(shared, rails, now);
        self.look_at_messages(shared, now);
    }

    /// This thread did not run for a while: nothing is failed for that time.
    fn restart(&mut self, shared: &Shared, now: Instant) {
        shared.peers().doubt_from(now);
        for rail in self.rails.values_mut() {
            rail.progress.restart(now);
            rail.pulse.restart(now);
        }
        self.frames.values_mut().for_each(|f| f.restart(now));
        self.pace.iter_mut().for_each(Pace::restart);
        self.ports.restart(now);
        self.links.restart(now);
    }

    fn look_at_links(&mut self, shared: &Shared, now: Instant) {
        let debounce = Duration::from_millis(u64::from(shared.config.link_debounce_ms));
        let up = shared.ports_up() != 0;
        let Some(change) = self.links.look(now, up, debounce) else { return };
        let (kind, status, since) = match change {
            Change::Down(since) => (EventKind::LinksDown, Status::NoRail, since),
            Change::Up(since) => (EventKind::LinksUp, Status::Ok, since),
        };
        shared.note_links(matches!(change, Change::Down(_)).then_some(since));
        let since = now.saturating_duration_since(since);
        let ms = since.as_millis();
        let text = match change {
            Change::Down(_) => {
                format!("all links of this engine's rails are down, for {ms} ms now")
            }
            Change::Up(_) => format!("a link of this engine's rails is up; all were down {ms} ms"),
        };
        log::warn(&text);
        shared.teller.tell(Event { kind, peer: 0, lane: NO_LANE, status, since, text });
    }

    fn look_at_rails(&mut self, shared: &Shared, rails: &Rails, now: Instant) {
        let core = &shared.core;
        for (lane, pace) in core.lanes().iter().zip(&mut self.pace) {
            let stats = &lane.stats;
            let done = [&stats.bytes_read, &stats.bytes_written];
            let done = done.iter().map(|b| b.load(Ordering::Relaxed)).fold(0, u64::wrapping_add);
            pace.see(now, lane.outstanding.load(Ordering::Relaxed), done);
        }
        self.rails.retain(|(lane, peer), _| core.rails(*peer) & (1 << lane) != 0);
        self.doubts.clear();
        self.doubts.extend(shared.peers().doubts());
        let before = self.looked.replace(now);
        let mut signs = Vec::new();
        for peer in 1..core.limits().peers {
            let up = core.rails(peer);
            for lane in (0..shared.nics()).filter(|l| up & (1 << l) != 0) {
                if let Some(why) = self.judge(shared, (lane, peer), now) {
                    let name = rails.get(lane as usize).map(|r| r.nic.label()).unwrap_or_default();
                    log::warn(&format!("rail {lane} ({name}): {why}; it is closed"));
                    core.fail_rail(lane, peer);
                    self.rails.remove(&(lane, peer));
                }
                let watched = self.rails.get_mut(&(lane, peer));
                let alive = watched.is_some_and(|w| w.progress.take() | w.pulse.take());
                if alive && self.doubts.contains_key(&peer) {
                    signs.push(peer);
                }
            }
        }
        // Seen now, so it happened since the look before.
        let Some(before) = before.filter(|_| !signs.is_empty()) else { return };
        let mut peers = shared.peers();
        for peer in signs {
            if let Some(life) = &mut peers.entry(peer).life {
                life.silence.sign(before);
            }
        }
    }

    /// Why a rail is of no use, if it is not.
    fn judge(&mut self, shared: &Shared, key: (u32, u32), now: Instant) -> Option<String> {
        let (core, (lane, peer)) = (&shared.core, key);
        let least = limit(shared);
        let pace = self.pace.get(lane as usize)?;
        let busy = || core.lanes()[lane as usize].outstanding.load(Ordering::Relaxed);
        let watched = self.rails.entry(key).or_default();
        let doubt = self.doubts.get(&peer).copied();
        let doubtful = core::mem::replace(&mut watched.doubt, doubt) != doubt && doubt.is_some();
        let mut oldest = core.oldest(lane, peer);
        let mut wait = pace.limit(least, busy());
        if watched.progress.is_late(now, oldest, wait) {
            // Perhaps only nobody looked: without a progress thread the application does.
            core.poll_lane(lane);
            oldest = core.oldest(lane, peer);
            wait = pace.limit(least, busy());
            if watched.progress.is_late(now, oldest, wait) {
                return Some(format!(
                    "no completion for {} ms with work in flight (rail_timeout_ms {}; {} bytes at \
                     {} bytes/s)",
                    wait.as_millis(),
                    least.as_millis(),
                    busy(),
                    pace.rate()
                ));
            }
        }
        // Work in flight is looked after already, and asking takes the lane from whoever polls it.
        let ask = oldest.is_none() || watched.pulse.is_asking();
        let mut asking = if ask { is_asking(shared, key) } else { Asked::No };
        if asking == Asked::Waits {
            core.poll_lane(lane);
            asking = is_asking(shared, key);
        }
        let state = (oldest.is_none(), asking == Asked::Waits);
        // Twice the limit: no work waits for the answer, and a peer may be busy on our account.
        // Work that is posted meanwhile has its own clock. Where another rail was lost, its work
        // may come here next.
        let times = if watched.pulse.is_hurried() { 1 } else { 2 };
        let wait = times * wait;
        match watched.pulse.look(now, state, keepalive(shared), wait) {
            _ if asking == Asked::Failed => {
                return Some("the peer's NIC does not answer (keepalive_ms)".into());
            }
            Care::Nothing => {}
            Care::Ask => {
                let sent = core.with_port(lane, |port| match port {
                    AnyPort::Verbs(port) => port.prove(peer),
                    AnyPort::Local(_) => true,
                });
                if !sent {
                    watched.pulse.unasked();
                }
            }
            Care::Late => {
                return Some(format!(
                    "the peer's NIC does not answer for {} ms ({times} * rail_timeout_ms; \
                     keepalive_ms)",
                    wait.as_millis()
                ));
            }
        }
        // Behind the look: an answer that it saw may be from before.
        if doubtful {
            watched.pulse.hurry(now);
        }
        None
    }

    /// A message link that hangs is given up, and with it its rail: messages go on over another. It
    /// has twice the limit, since a receiver without buffers holds it up for a while.
    fn look_at_messages(&mut self, shared: &Shared, now: Instant) {
        let core = &shared.core;
        let limit = 2 * limit(shared);
        let streams: Vec<_> = shared.peers().message_lanes().collect();
        self.frames.retain(|key, _| streams.contains(key));
        for key in streams {
            let (peer, lane) = key;
            let oldest = || core.with_net(|net| net.mail_oldest(peer, lane));
            let frames = self.frames.entry(key).or_default();
            if !frames.is_late(now, oldest(), limit) {
                continue;
            }
            // Perhaps only nobody looked.
            core.poll_messages(true);
            if !frames.is_late(now, oldest(), limit) {
                continue;
            }
            self.frames.remove(&key);
            log::warn(&format!(
                "rail {lane}: no completion of a message for {} ms (twice rail_timeout_ms); it is \
                 closed",
                limit.as_millis()
            ));
            core.with_net(|net| net.give_up_mail(peer, lane));
            core.poll_messages(true);
        }
    }

    /// Tells which rails to connected peers came and went since it was told last. A peer that is
    /// gone took its rails with it, and that is told already.
    fn tell_rails(&mut self, shared: &Shared) {
        let core = &shared.core;
        let nics = (1u32 << shared.nics()) - 1;
        for peer in 1..core.limits().peers {
            let now = match core.peer_state(peer).link {
                Link::Up => (core.peer_handle(peer).raw(), core.rails(peer) & nics),
                _ => (0, 0),
            };
            let Some(kept) = self.told.get_mut(peer as usize) else { continue };
            let (handle, mask) = core::mem::replace(kept, now);
            let before = if handle == now.0 { mask } else { 0 };
            if before == now.1 || !shared.teller.is_wanted() {
                continue;
            }
            let title = shared.peers().entry(peer).title();
            for lane in (0..shared.nics()).filter(|l| (before ^ now.1) & (1 << l) != 0) {
                let up = now.1 & (1 << lane) != 0;
                let rail = shared.rails.as_ref().and_then(|r| r.get(lane as usize));
                let name = rail.map(|r| r.nic.label()).unwrap_or_default();
                let (kind, status, what) = if up {
                    (EventKind::RailUp, Status::Ok, "works")
                } else {
                    (EventKind::RailDown, Status::NoRail, "broke")
                };
                let text = format!("rail {lane} ({name}) to {title} {what}");
                let since = Duration::ZERO;
                shared.teller.tell(Event { kind, peer: now.0, lane, status, since, text });
            }
        }
    }
}

/// A question to the peer's NIC.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    No,
    Waits,
    Failed,
}

fn is_asking(shared: &Shared, (lane, peer): (u32, u32)) -> Asked {
    shared.core.with_port(lane, |port| match port {
        AnyPort::Verbs(port) if port.proof(peer) == Some(false) => Asked::Failed,
        AnyPort::Verbs(port) if port.is_proving(peer) => Asked::Waits,
        _ => Asked::No,
    })
}

fn limit(shared: &Shared) -> Duration {
    Duration::from_millis(u64::from(shared.config.rail_timeout_ms))
}

fn keepalive(shared: &Shared) -> Duration {
    Duration::from_millis(u64::from(shared.config.keepalive_ms))
}

fn fail_lane(shared: &Shared, lane: u32) {
    for peer in 1..shared.core.limits().peers {
        if shared.core.rails(peer) & (1 << lane) != 0 {
            shared.core.fail_rail(lane, peer);
        }
    }
}
