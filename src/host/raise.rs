//! Queue pairs of one connection, from their making until the engine takes them over: made by both
//! sides, named to each other in the handshake, brought up beside the control thread (a NIC may
//! resolve an address for seconds), proved by a message each way.

use core::net::Ipv4Addr;
use core::ptr::NonNull;
use core::time::Duration;
use std::sync::mpsc::{channel, Receiver, TryRecvError};
use std::sync::Arc;
use std::time::Instant;

use super::config::Config;
use super::error::{Error, Result};
use super::rail::{both, pair, RailEnd, RailPart, RailQps};
use super::rails::{said, Rails};
use super::shared::Shared;
use super::sys;
use super::{log, loopback};
use crate::nic::any::AnyNet;
use crate::nic::verbs::mail::{MailLink, MailSetup, MAIL_BYTES};
use crate::nic::verbs::{Device, Fault, Gid, Mr, Path, Qp, QpKind};
use crate::status::Status;

/// Bytes of a send that are asked to be carried in the work request: a notification's frame often
/// fits.
const MAIL_INLINE: u32 = 256;

/// A message queue pair and the memory of its buffers.
pub(super) struct Mail {
    rails: Arc<Rails>,
    /// Whose NIC it is on.
    pub(super) lane: u32,
    qp: Owned,
    memory: NonNull<u8>,
    mr: Option<Mr>,
}

// SAFETY: V21, V30: the queue pair and its memory belong to this object alone.
unsafe impl Send for Mail {}

impl Mail {
    /// Moves the queue pair to the error state: nothing more is received, and a peer that still
    /// sends to it hears so.
    pub(super) fn fail(&self) {
        if let Some(qp) = &self.qp.0 {
            qp.fail();
        }
    }

    /// Ends it beside this thread: its mailbox is closed, and destroying may take seconds. Its
    /// buffers stay registered until then; nothing comes into the message queue any more.
    pub(super) fn bury(self) {
        // Where the device refused it ends here, with this function.
        if self.qp.reset() {
            let rails = self.rails.clone();
            rails.graves.bury(self);
        }
    }
}

impl Drop for Mail {
    fn drop(&mut self) {
        self.qp.destroy();
        if let (Some(mr), Some(rail)) = (self.mr.take(), self.rails.get(self.lane as usize)) {
            // SAFETY: V23: registered on this device; its queue pair is gone.
            if let Err(fault) = unsafe { rail.device.deregister(mr) } {
                log::warn(&said(&fault));
            }
        }
        sys::unmap(self.memory, MAIL_BYTES);
    }
}

/// A queue pair that ends with this.
pub(super) struct Owned(Option<Qp>);

impl Owned {
    pub(super) const fn new(qp: Qp) -> Owned {
        Owned(Some(qp))
    }

    /// Gives it up.
    pub(super) fn take(&mut self) -> Option<Qp> {
        self.0.take()
    }

    /// As [`Qp::raise`].
    pub(super) fn raise(&self, device: &Device, path: &Path) -> core::result::Result<(), Fault> {
        self.0.as_ref().map_or(Ok(()), |qp| qp.raise(device, path))
    }

    /// Resets it. False: the device refused, so it is to be destroyed at once.
    fn reset(&self) -> bool {
        self.0.as_ref().is_none_or(|qp| qp.reset().is_ok())
    }

    fn destroy(&mut self) {
        let Some(qp) = self.0.take() else { return };
        // SAFETY: V22: nobody else has this queue pair: ports and mailboxes closed it before.
        if let Err(fault) = unsafe { qp.destroy() } {
            log::warn(&said(&fault));
        }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.destroy();
    }
}

/// Both queue pairs of one rail.
pub(super) struct Pair {
    // These go before the other, which keeps the devices open.
    data: Owned,
    loopback: Option<Owned>,
    mail: Mail,
    gid: Gid,
    own: RailPart,
}

impl Pair {
    fn make(rails: &Arc<Rails>, lane: usize, config: &Config) -> Result<Pair> {
        let absent = || Error::new(Status::Internal, format!("there is no NIC {lane}"));
        let rail = rails.get(lane).ok_or_else(absent)?;
        let bad = |f| Error::new(Status::NoRail, format!("{}: {}", rail.nic.label(), said(&f)));
        let device = &rail.device;
        if !device.is_active().map_err(bad)? {
            let text = format!("{}: its port is not active", rail.nic.label());
            return Err(Error::new(Status::NoRail, text));
        }
        let gid = rail.gid()?;
        let memory = sys::map(MAIL_BYTES)?;
        let mut mail =
            Mail { rails: rails.clone(), lane: lane as u32, qp: Owned(None), memory, mr: None };
        let at = memory.as_ptr() as u64;
        mail.mr = Some(device.register(at, MAIL_BYTES as u64, at, false).map_err(bad)?);
        let window = rail.mail_window(config);
        let kind = QpKind::Mail { send: window, recv: window, inline: MAIL_INLINE };
        let mail_qp = device.create_qp(kind).map_err(bad)?;
        let mail_number = mail_qp.number();
        mail.qp = Owned::new(mail_qp);
        let kind = QpKind::Data { depth: config.sq_depth, sges: config.sges, inline: 0 };
        let data = device.create_qp(kind).map_err(bad)?;
        let data_number = data.number();
        // From here on it ends with this, whatever fails.
        let data = Owned::new(data);
        let loopback = if rails.land_late() { Some(loopback::make(rail, config)?) } else { None };
        let psn = || Ok::<u32, Error>(u32::from_le_bytes(sys::random()?) & 0xff_ffff);
        let own = RailPart {
            rail: lane as u8,
            end: rail.end(gid.raw),
            qps: RailQps {
                data: (data_number, psn()?),
                mail: (mail_number, psn()?),
                cookie: sys::random()?,
                window: window as u8,
            },
            partner: None,
        };
        Ok(Pair { data, loopback, mail, gid, own })
    }

    /// Ends both as [`Mail::bury`] does.
    pub(super) fn bury(self) {
        let looped = self.loopback.as_ref().is_none_or(Owned::reset);
        if self.data.reset() && self.mail.qp.reset() && looped {
            let rails = self.mail.rails.clone();
            rails.graves.bury(self);
        }
    }

    /// Brings both queue pairs up. May take seconds.
    fn raise(&self, their: &RailPart, config: &Config) -> Result<()> {
        let Some(rail) = self.mail.rails.get(self.mail.lane as usize) else { return Ok(()) };
        let (own, end) = (&self.own, &their.end);
        // A peer that tells nothing gets what every RoCE port can do.
        let mtu = |m: u32| if (256..=4096).contains(&m) { m } else { 1024 };
        let path = |own: (u32, u32), theirs: (u32, u32)| Path {
            gid_index: self.gid.index,
            remote_gid: end.gid,
            remote_qpn: theirs.0,
            own_psn: own.1,
            remote_psn: theirs.1,
            mtu: mtu(self.own.end.mtu).min(mtu(end.mtu)),
            rd_initiator: self.own.end.rd_initiator.min(end.rd_responder),
            rd_responder: self.own.end.rd_responder,
            timeout: config.ack_timeout as u8,
            retry: config.retry as u8,
            rnr_retry: config.rnr_retry as u8,
            traffic_class: config.traffic_class as u8,
            service_level: config.service_level as u8,
        };
        let pairs = [
            (&self.mail.qp.0, path(own.qps.mail, their.qps.mail)),
            (&self.data.0, path(own.qps.data, their.qps.data)),
        ];
        for (qp, path) in pairs {
            let Some(qp) = qp else { continue };
            qp.raise(&rail.device, &path).map_err(|f| {
                let text = format!("{} to {end}: {}", rail.nic.label(), said(&f));
                Error::new(Status::NoRail, text)
            })?;
        }
        Ok(())
    }

    fn setup(&self, their: &RailQps, lead: bool) -> Option<MailSetup> {
        let qp = self.mail.qp.0.as_ref()?;
        Some(MailSetup {
            qp: qp.pointer().as_ptr(),
            memory: self.mail.memory.as_ptr(),
            len: MAIL_BYTES,
            lkey: self.mail.mr.as_ref()?.lkey,
            inline: qp.granted().inline,
            cookie: self.own.qps.cookie,
            receives: self.own.qps.window.into(),
            sends: self.own.qps.window.into(),
            window: their.window.into(),
            expected: their.cookie,
            lead,
        })
    }
}

/// A rail that both sides proved.
pub(super) struct Proven {
    pub(super) mail: Mail,
    pub(super) link: MailLink<'static>,
    pub(super) data: Qp,
    /// For flushes, where the engine has memory that needs them.
    pub(super) loopback: Option<Qp>,
    /// Which of the peer's NICs it goes to: the row of its rkeys.
    pub(super) rail: u32,
    /// Longest message that both ends take.
    pub(super) max_msg: u32,
    /// Its place in the dialler's offer.
    pub(super) bit: u32,
    /// The address of the peer's end.
    pub(super) far: Ipv4Addr,
}

struct Rising {
    /// `None` while a thread brings it up, and when it failed.
    pair: Option<Pair>,
    their: Option<RailPart>,
    /// Its place in the dialler's offer.
    bit: u32,
    lane: u32,
    /// Its mailbox, once open.
    link: Option<MailLink<'static>>,
    proof: Option<bool>,
}

/// How far the rails of one connection are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Made; not told who the others are.
    Made,
    /// Threads bring them up.
    Rising,
    /// Up, and their mailboxes open.
    Proving,
}

/// The rails of one connection in its handshake.
pub(super) struct Raise {
    list: Vec<Rising>,
    phase: Phase,
    up: Option<Receiver<(usize, Result<Pair>)>>,
    /// What went wrong with which rail, for the error when none is left.
    faults: Vec<String>,
    theirs: Vec<RailEnd>,
    ours: Vec<RailEnd>,
    /// The mailboxes of this peer slot are ours.
    peer: Option<u32>,
    lead: bool,
    /// How long the other rails may take once one is where all are to be; `None`: to the limit.
    patience: Option<Duration>,
    /// When the first of the present phase was.
    first: Option<Instant>,
}

impl Drop for Raise {
    fn drop(&mut self) {
        for r in self.list.iter_mut().filter(|r| r.link.is_some()) {
            // Its mailbox was not closed, and may still look at the buffers: better lost than
            // reused.
            log::warn("a rail's queue pairs were given up without closing its mailbox: a bug");
            core::mem::forget(r.pair.take());
        }
    }
}

impl Raise {
    fn new(lead: bool) -> Raise {
        Raise {
            list: Vec::new(),
            phase: Phase::Made,
            up: None,
            faults: Vec::new(),
            theirs: Vec::new(),
            ours: Vec::new(),
            peer: None,
            lead,
            patience: None,
            first: None,
        }
    }

    /// Makes a rail's queue pairs. `bit`: its place in the dialler's offer; `their`: the dialler's
    /// end, which the acceptor knows already.
    fn add(
        &mut self,
        rails: &Arc<Rails>,
        lane: usize,
        config: &Config,
        bit: u32,
        their: Option<RailPart>,
    ) {
        match Pair::make(rails, lane, config) {
            Ok(mut pair) => {
                pair.own.partner = their.map(|_| bit as u8);
                let (pair, lane) = (Some(pair), lane as u32);
                self.list.push(Rising { pair, their, bit, lane, link: None, proof: None });
            }
            Err(e) => self.faults.push(e.message),
        }
    }

    /// The dialler's: queue pairs on every NIC of `lanes`, since it does not know which the peer
    /// has.
    pub(super) fn dialler(shared: &Shared, rails: &Arc<Rails>, lanes: u32) -> Result<Raise> {
        let mut raise = Raise::new(true);
        for lane in (0..rails.len()).filter(|lane| lanes & (1 << lane) != 0) {
            let bit = raise.list.len() as u32;
            raise.add(rails, lane, &shared.config, bit, None);
        }
        raise.ours = raise.ends();
        if raise.list.is_empty() {
            return Err(raise.none());
        }
        Ok(raise)
    }

    /// The acceptor's: queue pairs on those NICs of `lanes` that go with one of the dialler's.
    pub(super) fn acceptor(
        shared: &Shared,
        rails: &Arc<Rails>,
        lanes: u32,
        theirs: &[RailPart],
    ) -> Result<Raise> {
        let mut raise = Raise::new(false);
        raise.theirs = theirs.iter().map(|p| p.end).collect();
        let mut usable = Vec::new();
        for (lane, rail) in rails.iter().enumerate().filter(|(i, _)| lanes & (1 << i) != 0) {
            match rail.gid() {
                Ok(gid) => usable.push((lane, rail.end(gid.raw))),
                Err(e) => raise.faults.push(e.message),
            }
        }
        raise.ours = usable.iter().map(|(_, end)| *end).collect();
        for (mine, their) in pair(&raise.ours, &raise.theirs) {
            let part = Some(theirs[their]);
            raise.add(rails, usable[mine].0, &shared.config, their as u32, part);
        }
        if raise.list.is_empty() {
            return Err(raise.none());
        }
        Ok(raise)
    }

    /// Rails that are late by more than `patience` against the first are left behind: a rail that
    /// works shall not wait for one that does not.
    pub(super) fn hurry(&mut self, patience: Duration) {
        self.patience = Some(patience);
    }

    /// The end of the present phase: `late`, or the end of the patience with those that are behind.
    fn end(&mut self, late: Instant, any: bool) -> Instant {
        if any {
            self.first.get_or_insert_with(Instant::now);
        }
        let patience = self.first.zip(self.patience).map(|(first, more)| first + more);
        patience.map_or(late, |t| late.min(t))
    }

    /// Rails of the dialler's offer.
    pub(super) fn dialled(&self) -> u32 {
        if self.lead {
            self.list.len() as u32
        } else {
            self.theirs.len() as u32
        }
    }

    fn ends(&self) -> Vec<RailEnd> {
        self.list.iter().filter_map(|r| Some(r.pair.as_ref()?.own.end)).collect()
    }

    /// What the other side is told.
    pub(super) fn parts(&self) -> Vec<RailPart> {
        self.list.iter().filter_map(|r| Some(r.pair.as_ref()?.own)).collect()
    }

    /// The dialler learns which of its rails go with which of the acceptor's.
    pub(super) fn meet(&mut self, theirs: &[RailPart]) -> Result<()> {
        self.theirs = theirs.iter().map(|p| p.end).collect();
        for their in theirs {
            let place = their.partner.map_or(usize::MAX, usize::from);
            match self.list.get_mut(place) {
                Some(r) if r.their.is_none() => r.their = Some(*their),
                _ => {
                    let text = format!(
                        "the peer pairs its rail {} with number {place} of {} here, which is none \
                         or taken",
                        their.end,
                        self.list.len()
                    );
                    return Err(Error::new(Status::Refused, text));
                }
            }
        }
        Ok(())
    }

    /// Starts a thread for each rail with a partner; it rings the control thread when done.
    pub(super) fn start(&mut self, shared: &Shared) {
        let (tell, up) = channel();
        for (i, rising) in self.list.iter_mut().enumerate() {
            let Some(their) = rising.their else {
                // No partner: its queue pairs are of no use.
                rising.pair = None;
                rising.proof = Some(false);
                continue;
            };
            let Some(pair) = rising.pair.take() else { continue };
            let (tell, config, bell) = (tell.clone(), shared.config.clone(), shared.events.clone());
            let work = move || {
                let result = pair.raise(&their, &config).map(|()| pair);
                // Nobody listens any more when the handshake was given up: dropped here, then.
                let _ = tell.send((i, result));
                sys::ring(bell.fd());
            };
            let thread = std::thread::Builder::new().name("kvrail-raise".into());
            if let Err(e) = thread.spawn(work) {
                rising.proof = Some(false);
                self.faults.push(format!("thread: {e}"));
            }
        }
        self.up = Some(up);
        self.phase = Phase::Rising;
    }

    /// True while [`Raise::advance`] should be asked again soon, whatever comes in.
    pub(super) fn is_busy(&self) -> bool {
        self.phase != Phase::Made
    }

    /// Moves on what rises. True, once: all that will come up are up, and their mailboxes open
    /// (the acceptor tells its rails now). At `late` the others are left behind.
    pub(super) fn advance(&mut self, shared: &Shared, peer: u32, late: Instant) -> Result<bool> {
        if self.phase != Phase::Rising {
            return Ok(false);
        }
        let waiting = loop {
            let Some(up) = &self.up else { break false };
            match up.try_recv() {
                Ok((i, Ok(pair))) => self.list[i].pair = Some(pair),
                Ok((i, Err(e))) => {
                    self.list[i].proof = Some(false);
                    self.faults.push(e.message);
                }
                Err(TryRecvError::Empty) => break true,
                Err(TryRecvError::Disconnected) => break false,
            }
        };
        let rising = self.list.iter().any(|r| r.pair.is_none() && r.proof.is_none());
        let late = self.end(late, self.list.iter().any(|r| r.pair.is_some()));
        if waiting && rising && Instant::now() < late {
            return Ok(false);
        }
        (self.up, self.first) = (None, None);
        for r in self.list.iter_mut().filter(|r| r.pair.is_none() && r.proof.is_none()) {
            r.proof = Some(false);
            self.faults.push(format!("rail {} did not come up in time", r.lane));
        }
        self.open(shared, peer);
        if self.list.iter().all(|r| r.proof.is_some()) {
            return Err(self.none());
        }
        Ok(true)
    }

    /// Opens the mailboxes; the lead's begin to prove.
    fn open(&mut self, shared: &Shared, peer: u32) {
        self.phase = Phase::Proving;
        self.peer = Some(peer);
        let lead = self.lead;
        for r in &mut self.list {
            let (Some(pair), Some(their)) = (&r.pair, &r.their) else { continue };
            let Some(setup) = pair.setup(&their.qps, lead) else { continue };
            // SAFETY: V30, V31: the queue pair and its memory live in `Mail`, whose mailbox is
            // closed before it is dropped; the net is used under the message token.
            match shared.core.with_net(|net| unsafe { net.open_mail(peer, r.lane, &setup) }) {
                Ok(link) => r.link = Some(link),
                Err(e) => {
                    r.proof = Some(false);
                    self.faults.push(format!("rail {}: {e}", r.lane));
                }
            }
        }
    }

    /// The rails that proved themselves, one bit each by their place in the dialler's offer, once
    /// all have or `late` has come.
    pub(super) fn proven(&mut self, shared: &Shared, late: Instant) -> Result<Option<u32>> {
        if self.phase != Phase::Proving {
            return Ok(None);
        }
        shared.core.poll_messages(true);
        let Some(peer) = self.peer else { return Ok(None) };
        for r in self.list.iter_mut().filter(|r| r.proof.is_none()) {
            r.proof = shared.core.with_net(|net| net.mail_proof(peer, r.lane));
        }
        let late = self.end(late, self.list.iter().any(|r| r.proof == Some(true)));
        if self.list.iter().any(|r| r.proof.is_none()) && Instant::now() < late {
            return Ok(None);
        }
        let good = self.list.iter().filter(|r| r.proof == Some(true));
        let mask = good.fold(0u32, |m, r| m | 1 << r.bit);
        if mask == 0 {
            return Err(self.none());
        }
        Ok(Some(mask))
    }

    /// Takes out the rails of `mask`. The others are closed with this object.
    pub(super) fn take(&mut self, mask: u32) -> Vec<Proven> {
        let mut out = Vec::new();
        for r in &mut self.list {
            if mask & (1 << r.bit) == 0 || r.proof != Some(true) {
                continue;
            }
            let (Some(mut pair), Some(their)) = (r.pair.take(), r.their) else { continue };
            let (Some(data), Some(link)) = (pair.data.0.take(), r.link.take()) else { continue };
            let max_msg = pair.own.end.max_msg.min(their.end.max_msg.max(1));
            let (rail, bit, far) = (u32::from(their.rail), r.bit, their.end.ipv4);
            let loopback = pair.loopback.as_mut().and_then(Owned::take);
            out.push(Proven { mail: pair.mail, link, data, loopback, rail, max_msg, bit, far });
        }
        out
    }

    /// Gives up: closes the mailboxes that are still of this attempt. The queue pairs, to be ended
    /// by [`Pair::bury`] when the net is free again.
    pub(super) fn close(&mut self, net: &mut AnyNet<'static>) -> Vec<Pair> {
        for r in &mut self.list {
            if let (Some(peer), Some(link)) = (self.peer, r.link.take()) {
                net.close_mail(peer, r.lane, &link);
            }
        }
        self.list.drain(..).filter_map(|r| r.pair).collect()
    }

    /// Why no rail is left.
    pub(super) fn none(&self) -> Error {
        let mut text = format!("no rail works; {}", both(&self.ours, &self.theirs));
        if !self.faults.is_empty() {
            text += &format!("; {}", self.faults.join("; "));
        }
        let silent = self.list.iter().filter(|r| r.proof.is_none()).count();
        if silent > 0 {
            text += &format!(
                "; {silent} came up but no message crossed in time: check that these networks \
                 reach each other, and that switches take the MTU"
            );
        }
        Error::new(Status::NoRail, text)
    }
}
