//! Queue pairs that lead back to their own NIC, by which READs into a device's memory are flushed
//! (`src/nic/verbs/port/loopback.rs`). A rail gets one with its other queue pairs, if memory that
//! needs it is registered; rails that are up get theirs at such a registration, and keep it.
//! An engine without such memory makes none.

use std::sync::Arc;

use super::config::Config;
use super::error::{Error, Result};
use super::log;
use super::rails::{said, Late, Rail, Rails};
use super::raise::Owned;
use super::shared::Shared;
use super::sys;
use crate::nic::any::AnyPort;
use crate::nic::verbs::{Path, Qp, QpKind, LANDINGS};
use crate::status::Status;

/// A queue pair on a NIC, connected to itself.
///
/// # Errors
/// What the NIC refused, and what then to do.
pub(super) fn make(rail: &Rail, config: &Config) -> Result<Owned> {
    let refused = |why: String| {
        let text = format!(
            "{}: {why}; this queue pair leads back to the NIC, and flushes READs into device \
             memory: free queue pairs, register the memory as coherent if it is \
             (KVR_SEGMENT_COHERENT), or let the transfer bounce in host memory \
             (kv_buffer_device=cpu)",
            rail.nic.label()
        );
        Error::new(Status::NoRail, text)
    };
    let gid = rail.gid()?;
    let device = &rail.device;
    let facts = device.facts();
    let kind = QpKind::Loopback { depth: LANDINGS as u32 };
    let qp = device.create_qp(kind).map_err(|f| refused(said(&f)))?;
    let number = qp.number();
    let qp = Owned::new(qp);
    let psn = u32::from_le_bytes(sys::random()?) & 0xff_ffff;
    let reads = facts.rd_initiator.min(facts.rd_responder).clamp(1, LANDINGS as u32) as u8;
    let path = Path {
        gid_index: gid.index,
        remote_gid: gid.raw,
        remote_qpn: number,
        own_psn: psn,
        remote_psn: psn,
        mtu: facts.mtu,
        rd_initiator: reads,
        rd_responder: reads,
        timeout: config.ack_timeout as u8,
        retry: config.retry as u8,
        rnr_retry: config.rnr_retry as u8,
        traffic_class: config.traffic_class as u8,
        service_level: config.service_level as u8,
    };
    qp.raise(device, &path).map_err(|f| refused(said(&f)))?;
    Ok(qp)
}

/// Sees to it that every rail has one, those that come up later too. Called before memory is
/// registered that needs it.
///
/// What it returns keeps it so.
///
/// # Errors
/// A NIC that works gave none. Rails that have one keep it.
pub(super) fn furnish_all(shared: &Shared, rails: &Arc<Rails>) -> Result<Late> {
    let late = Late::new(rails);
    for lane in 0..rails.len() as u32 {
        let mut given_up = None;
        // Each look is under the lane's token: a rail that comes up after it sees `late`.
        let lacks = || {
            shared.core.with_port(lane, |port| match port {
                AnyPort::Verbs(port) => port.expect_device_memory(),
                AnyPort::Local(_) => None,
            })
        };
        while let Some(peer) = lacks() {
            let Err(why) = furnish(shared, rails, lane, peer) else { continue };
            let going = rails.get(lane as usize).is_some_and(Rail::is_going);
            if !going || given_up == Some(peer) {
                return Err(why);
            }
            // The port watch would give it up in a moment.
            log::warn(&format!("a rail is given up: {why}"));
            shared.core.fail_rail(lane, peer);
            given_up = Some(peer);
        }
    }
    Ok(late)
}

/// A rail has come up whose queue pairs may have been made before the first registration.
pub(super) fn furnish_new(shared: &Shared, rails: &Arc<Rails>, lane: u32, peer: u32) {
    let lacks = |port: &mut AnyPort<'_>| match port {
        AnyPort::Verbs(port) => port.lacks_loopback(peer),
        AnyPort::Local(_) => false,
    };
    if !rails.land_late() || !shared.core.with_port(lane, lacks) {
        return;
    }
    if let Err(why) = furnish(shared, rails, lane, peer) {
        // It is dialled again, and has one from the start then.
        log::warn(&format!("a rail is given up: {why}"));
        shared.core.fail_rail(lane, peer);
    }
}

fn furnish(shared: &Shared, rails: &Arc<Rails>, lane: u32, peer: u32) -> Result<()> {
    let Some(rail) = rails.get(lane as usize) else { return Ok(()) };
    let Some(qp) = make(rail, &shared.config)?.take() else { return Ok(()) };
    let give = |port: &mut AnyPort<'_>| -> Option<Qp> {
        match port {
            AnyPort::Verbs(port) => port.loop_back(peer, qp),
            AnyPort::Local(_) => Some(qp),
        }
    };
    if let Some(qp) = shared.core.with_port(lane, give) {
        // The rail has gone meanwhile, or another thread was quicker.
        rails.graves.bury((Owned::new(qp), rails.clone()));
    }
    // Transfers may wait for it.
    shared.core.nudge(lane);
    Ok(())
}
