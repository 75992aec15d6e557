//! Which of this engine's ports are of use. A device tells when its port changes, but that may be
//! lost, and the tale of one port may reach another's listener: the port itself is asked.

use std::time::Instant;

use super::super::log;
use super::super::rails::{said, Rail, Rails};
use super::super::shared::Shared;
use super::{fail_lane, limit, PORTS};
use crate::nic::verbs::Event;

/// One port.
struct State {
    /// It is active, and has its address.
    up: bool,
    /// Since when it is not.
    down: Option<Instant>,
    /// When it was asked last; `None`: it is to be asked now.
    asked: Option<Instant>,
    /// Its address may have changed.
    moved: bool,
    /// It is down for so long that its rails were failed.
    lost: bool,
}

pub(super) struct Ports {
    /// By lane.
    list: Vec<State>,
}

impl Ports {
    pub(super) fn new(shared: &Shared) -> Ports {
        let fresh = || State { up: true, down: None, asked: None, moved: false, lost: false };
        Ports { list: (0..shared.nics()).map(|_| fresh()).collect() }
    }

    /// True while a port is down and its rails may soon have to go: looks are more frequent.
    pub(super) fn is_worried(&self) -> bool {
        self.list.iter().any(|p| p.down.is_some() && !p.lost)
    }

    /// True when a device said something of a port.
    pub(super) fn is_due(&self) -> bool {
        self.list.iter().any(|p| p.asked.is_none())
    }

    /// Nobody looked for a while.
    pub(super) fn restart(&mut self, now: Instant) {
        for port in &mut self.list {
            port.down = port.down.map(|_| now);
        }
    }

    /// Takes what the devices tell.
    pub(super) fn hear(&mut self, shared: &Shared, rails: &Rails) {
        for (lane, rail) in rails.iter().enumerate() {
            while let Some(event) = rail.device.next_event() {
                self.told(shared, lane, rail, event);
            }
        }
    }

    fn told(&mut self, shared: &Shared, lane: usize, rail: &Rail, event: Event) {
        let (name, own) = (rail.nic.label(), rail.device.port_number());
        let Some(port) = self.list.get_mut(lane) else { return };
        match event {
            Event::PortDown(n) | Event::PortUp(n) if n == own => port.asked = None,
            Event::GidChange(n) if n == own => (port.asked, port.moved) = (None, true),
            Event::DeviceFatal | Event::CqError => {
                log::warn(&format!("{name}: the device failed ({event:?}); its rails are closed"));
                port.asked = None;
                fail_lane(shared, lane as u32);
            }
            other => log::log(log::Level::Debug, &format!("{name}: {other:?}")),
        }
    }

    /// Asks the ports that it is time for. One that stays down breaks its rails.
    pub(super) fn look(&mut self, shared: &Shared, rails: &Rails, now: Instant) {
        for (lane, (port, rail)) in self.list.iter_mut().zip(rails.iter()).enumerate() {
            let recent = |t: Instant| now.saturating_duration_since(t) < PORTS;
            if (port.up || port.lost) && port.asked.is_some_and(recent) {
                continue;
            }
            port.asked = Some(now);
            port.set(rail, now);
            shared.note_port(lane as u32, port.up);
            let long = |t: Instant| now.saturating_duration_since(t) >= limit(shared);
            port.lost = port.down.is_some_and(|t| port.lost || long(t));
            if port.lost {
                fail_lane(shared, lane as u32);
            }
        }
    }
}

impl State {
    /// Asks the port, and says what changed.
    fn set(&mut self, rail: &Rail, now: Instant) {
        let name = rail.nic.label();
        let why = self.trouble(rail);
        let up = why.is_none();
        if up == self.up {
            return;
        }
        self.up = up;
        self.down = (!up).then_some(now);
        match why {
            None => log::info(&format!("{name}: its link is up")),
            Some(why) => log::warn(&format!("{name}: {why}")),
        }
    }

    /// Why the port is of no use, if it is not.
    fn trouble(&mut self, rail: &Rail) -> Option<String> {
        if rail.device.is_dead() {
            return Some("its device failed".into());
        }
        match rail.device.is_active() {
            Ok(true) => {}
            Ok(false) => return Some("its link is down".into()),
            Err(fault) => return Some(format!("its port does not answer: {}", said(&fault))),
        }
        // The event that it lost its address may be lost as well, so this is asked each time.
        match rail.gid() {
            Ok(gid) => {
                if core::mem::take(&mut self.moved) {
                    let name = rail.nic.label();
                    log::info(&format!("{name}: its GID is at index {} now", gid.index));
                }
                None
            }
            Err(e) => Some(format!("its GID is gone: {}", e.message)),
        }
    }
}
