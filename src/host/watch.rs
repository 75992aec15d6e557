//! Watches RDMA rails: work requests that never complete, and what the devices tell. A link that
//! goes down can leave a work request hanging for ever, and events can be lost, so neither alone is
//! relied on.

use core::time::Duration;
use std::collections::HashMap;
use std::time::Instant;

use super::log;
use super::rails::{said, Rail};
use super::shared::Shared;
use crate::nic::verbs::Event;

#[derive(Default)]
pub(super) struct Watch {
    /// Oldest op in flight of (lane, peer), and since when it is the oldest.
    oldest: HashMap<(u32, u32), (u32, Instant)>,
    /// The same of frames of messages, by peer and lane.
    frames: HashMap<(u32, u32), (u32, Instant)>,
    /// Since when each lane's port is of no use.
    down: Vec<Option<Instant>>,
    next: Option<Instant>,
}

impl Watch {
    /// How long to wait between looks: a few within the limit.
    pub(super) fn pause(shared: &Shared) -> Duration {
        (limit(shared) / 4).clamp(Duration::from_millis(5), Duration::from_millis(250))
    }

    /// True while a port is down: looks go on though nothing is in flight.
    pub(super) fn is_worried(&self) -> bool {
        self.down.iter().any(Option::is_some)
    }

    /// Takes the devices' events, and fails rails that made no progress for `rail_timeout_ms`.
    pub(super) fn look(&mut self, shared: &Shared) {
        let Some(rails) = &shared.rails else { return };
        self.down.resize(rails.len(), None);
        for (lane, rail) in rails.iter().enumerate() {
            while let Some(event) = rail.device.next_event() {
                self.told(shared, lane, rail, event);
            }
        }
        let now = Instant::now();
        if self.next.is_some_and(|t| now < t) {
            return;
        }
        self.next = Some(now + Watch::pause(shared));
        for (lane, rail) in rails.iter().enumerate() {
            self.look_at_port(shared, lane, rail, now);
        }
        self.look_at_rails(shared, now);
        self.look_at_messages(shared, now);
    }

    fn told(&mut self, shared: &Shared, lane: usize, rail: &Rail, event: Event) {
        let (name, own) = (rail.nic.label(), rail.device.port_number());
        match event {
            Event::PortDown(port) if port == own => {
                log::warn(&format!("{name}: its link is down"));
                self.down[lane].get_or_insert_with(Instant::now);
            }
            Event::PortUp(port) if port == own => {
                log::info(&format!("{name}: its link is up"));
                self.down[lane] = None;
            }
            Event::GidChange(port) if port == own => match rail.gid() {
                Ok(gid) => log::info(&format!("{name}: its GID is at index {} now", gid.index)),
                Err(e) => {
                    log::warn(&format!("{name}: its GID is gone: {}", e.message));
                    self.down[lane].get_or_insert_with(Instant::now);
                }
            },
            Event::DeviceFatal | Event::CqError => {
                log::warn(&format!("{name}: the device failed ({event:?}); its rails are closed"));
                fail_lane(shared, lane as u32);
            }
            other => log::log(log::Level::Debug, &format!("{name}: {other:?}")),
        }
    }

    /// A port that stays down breaks its rails. The event that it is up again may have been lost,
    /// so it is asked.
    fn look_at_port(&mut self, shared: &Shared, lane: usize, rail: &Rail, now: Instant) {
        let Some(since) = self.down[lane] else { return };
        match rail.device.is_active() {
            Ok(true) if rail.gid().is_ok() => self.down[lane] = None,
            Ok(_) => {}
            Err(fault) => log::log(log::Level::Debug, &said(&fault)),
        }
        if now.duration_since(since) >= limit(shared) {
            fail_lane(shared, lane as u32);
        }
    }

    fn look_at_rails(&mut self, shared: &Shared, now: Instant) {
        let core = &shared.core;
        for peer in 1..core.limits().peers {
            let rails = core.rails(peer);
            for lane in (0..shared.nics()).filter(|l| rails & (1 << l) != 0) {
                let key = (lane, peer);
                let Some(oldest) = core.oldest(lane, peer) else {
                    self.oldest.remove(&key);
                    continue;
                };
                let (kept, since) = *self.oldest.entry(key).or_insert((oldest, now));
                if kept != oldest {
                    self.oldest.insert(key, (oldest, now));
                } else if now.duration_since(since) >= limit(shared) {
                    self.oldest.remove(&key);
                    log::warn(&format!(
                        "rail {lane}: no completion for {} ms (rail_timeout_ms) with work in \
                         flight; it is closed",
                        limit(shared).as_millis()
                    ));
                    core.fail_rail(lane, peer);
                }
            }
        }
        self.oldest.retain(|(lane, peer), _| core.rails(*peer) & (1 << lane) != 0);
    }

    /// A message link that hangs is given up, and with it its rail: messages go on over another. It
    /// has twice the limit, since a receiver without buffers holds it up for a while.
    fn look_at_messages(&mut self, shared: &Shared, now: Instant) {
        let core = &shared.core;
        let mut hang = Vec::new();
        for (peer, lane) in shared.peers().message_lanes() {
            let Some(oldest) = core.with_net(|net| net.mail_oldest(peer, lane)) else {
                self.frames.remove(&(peer, lane));
                continue;
            };
            let (kept, since) = *self.frames.entry((peer, lane)).or_insert((oldest, now));
            if kept != oldest {
                self.frames.insert((peer, lane), (oldest, now));
            } else if now.duration_since(since) >= 2 * limit(shared) {
                hang.push((peer, lane));
            }
        }
        for (peer, lane) in hang {
            self.frames.remove(&(peer, lane));
            log::warn(&format!(
                "rail {lane}: no completion of a message for {} ms (twice rail_timeout_ms); it is \
                 closed",
                2 * limit(shared).as_millis()
            ));
            core.with_net(|net| net.give_up_mail(peer, lane));
            core.poll_messages(true);
        }
    }
}

fn limit(shared: &Shared) -> Duration {
    Duration::from_millis(u64::from(shared.config.rail_timeout_ms))
}

fn fail_lane(shared: &Shared, lane: u32) {
    for peer in 1..shared.core.limits().peers {
        if shared.core.rails(peer) & (1 << lane) != 0 {
            shared.core.fail_rail(lane, peer);
        }
    }
}
