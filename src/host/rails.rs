//! The NICs of an engine: chosen, opened, and what is registered on them.

use core::net::Ipv4Addr;
use core::num::NonZeroU32;
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Once, PoisonError};

use rdma_core_sys::Verbs;

use super::blob::RegionKeys;
use super::config::Config;
use super::error::{Error, Result};
use super::graves::Graves;
use super::nics::{self, Address, Nic, Selection};
use super::rail::{RailEnd, MAX_RAILS};
use super::{log, sys};
use crate::nic::verbs::mail::{MAIL_LEAST, MAIL_RECEIVES, MAIL_SENDS};
use crate::nic::verbs::{Device, Fault, Gid, Mr, Open};
use crate::status::Status;
use crate::table::NO_SEAMS;

/// Longest memory region: larger ones are known to be slower on some NICs, whose translation
/// tables they overflow.
const MAX_PIECE: u64 = 4 << 30;
/// Entries of a lane's message queue for each peer: what a mailbox has in flight.
const MAIL_ENTRIES: u32 = MAIL_RECEIVES + MAIL_SENDS;

/// How an engine moves data.
pub(super) enum Choice {
    /// Copies between processes of this host; why there is no better, if somebody hoped for it.
    Local(Option<String>),
    /// These NICs.
    Nics(Selection),
}

/// What a configuration asks for, on this host. Opens nothing.
pub(super) fn choose(config: &Config) -> Result<Choice> {
    if config.transport == "local" {
        return Ok(Choice::Local(None));
    }
    let mut selection = nics::select(&request(config));
    selection.nics.truncate(MAX_RAILS);
    if !selection.nics.is_empty() {
        return Ok(Choice::Nics(selection));
    }
    let why = selection.explain();
    if config.transport == "verbs" {
        return Err(Error::new(Status::NoRail, why));
    }
    Ok(Choice::Local(Some(why)))
}

/// Rails that the choice has at most.
pub(super) fn count(choice: &Choice) -> u32 {
    match choice {
        Choice::Local(_) => 0,
        Choice::Nics(selection) => selection.nics.len() as u32,
    }
}

fn request(config: &Config) -> nics::Request {
    let names = config.nics.split(',').filter(|n| !n.is_empty());
    let sysroot = PathBuf::from(variable("KVRAIL_SYSROOT").unwrap_or_else(|| "/".into()));
    let given = Some(config.numa_node).filter(|n| *n >= 0);
    let numa = given.or_else(|| nics::numa_of_pci(&sysroot, &card(config)).filter(|n| *n >= 0));
    nics::Request { sysroot, numa, names: names.map(str::to_owned).collect() }
}

/// The accelerator's name in sysfs. Where the runtime shows a process some cards only
/// (`RBLN_VISIBLE_DEVICES`), `device_id` counts those.
fn card(config: &Config) -> String {
    let visible = variable("RBLN_VISIBLE_DEVICES").unwrap_or_default();
    let at = usize::try_from(config.device_id).unwrap_or(usize::MAX);
    let number = visible.split(',').nth(at).map(str::trim).filter(|n| !n.is_empty());
    number.map_or_else(|| format!("rbln{}", config.device_id), |n| format!("rbln{n}"))
}

/// A variable for tests: not a parameter, since it changes what the host looks like.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|v| !v.is_empty())
}

/// The verbs library, loaded once a process and name.
fn library() -> Result<&'static Verbs> {
    static LOADED: Mutex<Vec<(Option<CString>, &'static Verbs)>> = Mutex::new(Vec::new());
    let name = match variable("KVRAIL_IBVERBS").map(CString::new) {
        None => None,
        Some(Ok(name)) => Some(name),
        Some(Err(_)) => return Err(Error::new(Status::Config, "KVRAIL_IBVERBS has a NUL in it")),
    };
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, verbs)) = loaded.iter().find(|(n, _)| *n == name) {
        return Ok(verbs);
    }
    let verbs = Verbs::load(name.as_deref()).map_err(|e| {
        let hint = if name.is_some() { " (named by KVRAIL_IBVERBS)" } else { "" };
        Error::new(Status::NoRail, format!("the verbs library{hint}: {e}"))
    })?;
    let verbs: &'static Verbs = Box::leak(Box::new(verbs));
    loaded.push((name, verbs));
    Ok(verbs)
}

/// One opened NIC.
#[derive(Debug)]
pub(super) struct Rail {
    /// As it was when it was opened.
    pub(super) nic: Nic,
    pub(super) device: Device,
    /// The address of its GID, and the prefix: those of `nic` until they change.
    address: Mutex<Address>,
}

/// The opened NICs of an engine, in the order of its lanes.
#[derive(Debug)]
pub(super) struct Rails {
    list: Vec<Rail>,
    pub(super) graves: Graves,
}

impl Rails {
    /// Opens the NICs of a selection. One that cannot be opened is left out with a warning.
    ///
    /// # Errors
    /// None could be opened: what was wrong with each.
    pub(super) fn open(selection: &Selection, config: &Config) -> Result<Rails> {
        let verbs = library()?;
        for warning in &selection.warnings {
            log::warn(warning);
        }
        let peers = config.max_peers.saturating_add(1);
        let (mut list, mut faults) = (Vec::new(), Vec::new());
        for nic in &selection.nics {
            let want = Open {
                name: &nic.device,
                port: nic.port,
                ipv4: nic.ipv4.octets(),
                ifindex: nic.ifindex,
                cq_entries: peers.saturating_mul(config.sq_depth),
                mail_entries: peers.saturating_mul(MAIL_ENTRIES),
            };
            match Device::open(verbs, &want) {
                Ok(device) => {
                    let address = Mutex::new((nic.ipv4, nic.prefix));
                    list.push(Rail { nic: nic.clone(), device, address });
                }
                Err(fault) => faults.push(format!("{}: {}", nic.label(), said(&fault))),
            }
        }
        if list.is_empty() {
            let text = format!("no NIC could be opened: {}", faults.join("; "));
            return Err(Error::new(Status::NoRail, text));
        }
        for fault in faults {
            log::warn(&format!("left out: {fault}"));
        }
        Ok(Rails { list, graves: Graves::default() })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Rail> {
        self.list.iter()
    }

    pub(super) fn get(&self, lane: usize) -> Option<&Rail> {
        self.list.get(lane)
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Base-2 logarithm of the longest piece that every NIC registers whole.
    fn piece_shift(&self) -> u8 {
        let least = self.list.iter().map(|r| r.device.facts().max_mr_size).min();
        // A device that says nothing is taken at its word only where that is possible.
        let bytes = least.unwrap_or(MAX_PIECE).clamp(4096, MAX_PIECE);
        bytes.ilog2() as u8
    }

    /// Longest message that every NIC here sends.
    pub(super) fn max_msg(&self) -> NonZeroU32 {
        let least = self.list.iter().map(|r| r.device.facts().max_msg_bytes).min();
        least.and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MAX)
    }

    /// Says once when memory lies on a NUMA node that no NIC of ours sits on: every byte then
    /// crosses the link between sockets.
    pub(super) fn judge(&self, addr: u64) {
        static ONCE: Once = Once::new();
        let nodes: Vec<i32> = self.list.iter().map(|r| r.nic.numa).collect();
        let Some(node) = nics::numa_of_address(addr as usize as *const u8) else { return };
        if node >= 0 && !nodes.contains(&node) && nodes.iter().all(|n| *n >= 0) {
            ONCE.call_once(|| {
                log::warn(&format!(
                    "registered memory is on NUMA node {node}, and the rails' NICs are on \
                     {nodes:?}: set numa_node={node}, or allocate it on their node"
                ));
            });
        }
    }

    /// Registers memory on every NIC, all at a time, or on none. A device that died is left out: it
    /// gets no rail any more.
    pub(super) fn register(self: &Arc<Rails>, addr: u64, len: u64) -> Result<Registered> {
        let shift = self.piece_shift();
        let pieces = |rail: &Rail| {
            let mut mrs = Vec::new();
            let mut at = if rail.device.is_dead() { len } else { 0 };
            while at < len {
                let n = (len - at).min(1 << shift);
                match rail.device.register(addr + at, n, addr + at, false) {
                    Ok(mr) => mrs.push(mr),
                    Err(fault) => return (mrs, Some(fault)),
                }
                at += n;
            }
            (mrs, None)
        };
        let results: Vec<_> = std::thread::scope(|scope| {
            // The last one on this thread: with one NIC nothing is spawned.
            let (last, others) =
                self.list.split_last().map_or((None, &[][..]), |(l, o)| (Some(l), o));
            let handles: Vec<_> = others.iter().map(|r| scope.spawn(move || pieces(r))).collect();
            let last = last.map(pieces);
            let lost = |_| (Vec::new(), Some(Fault::new("registration thread", libc::EIO)));
            let others = handles.into_iter().map(|h| h.join().unwrap_or_else(lost));
            others.collect::<Vec<_>>().into_iter().chain(last).collect()
        });
        let mut registered = Registered { rails: self.clone(), mrs: Vec::new(), shift, pieces: 0 };
        let mut failed = None;
        for (rail, (mrs, fault)) in self.list.iter().zip(results) {
            registered.pieces = registered.pieces.max(mrs.len());
            registered.mrs.push(mrs);
            failed = failed.or(fault.map(|f| (rail, f)));
        }
        match failed {
            None if registered.pieces == 0 => {
                let text = format!("registering {len} bytes: all {} NICs failed", self.len());
                Err(Error::new(Status::NoRail, text))
            }
            None => Ok(registered),
            // Dropping `registered` takes back what was registered.
            Some((rail, fault)) => Err(self.refused(rail, &fault, len)),
        }
    }

    fn refused(&self, rail: &Rail, fault: &Fault, len: u64) -> Error {
        let mut text = format!(
            "registering {len} bytes on {}: {}; taken back on all {} NICs",
            rail.nic.label(),
            said(fault),
            self.len()
        );
        let limit = sys::memlock_limit();
        let need = len.saturating_mul(self.len() as u64);
        if fault.errno == libc::ENOMEM && limit.is_some_and(|l| l < need) {
            text += &format!(
                ". RLIMIT_MEMLOCK is {} bytes, and {} NICs pin {need} bytes for this region alone \
                 (each counts): raise it (ulimit -l unlimited, or LimitMEMLOCK=infinity, or give \
                 CAP_IPC_LOCK)",
                limit.unwrap_or_default(),
                self.len()
            );
        }
        Error::new(Status::Os, text)
    }
}

/// A fault with the system's words for its number.
pub(super) fn said(fault: &Fault) -> String {
    format!("{fault} ({})", std::io::Error::from_raw_os_error(fault.errno))
}

impl Nic {
    /// Device and port, as `nics` names them.
    pub(super) fn label(&self) -> String {
        format!("{}:{}", self.device, self.port)
    }
}

impl Rail {
    /// The port's present GID, asked anew. When the netdev has lost the address, another of its
    /// addresses takes its place, one in the same subnet rather than others.
    pub(super) fn gid(&self) -> Result<Gid> {
        let (ip, _) = self.address();
        let gid = match self.device.gid_of(ip.octets()) {
            Err(f) if f.errno == libc::ENOSYS => self.device.gid_at(self.nic.gid_index),
            Err(f) if f.errno == libc::EADDRNOTAVAIL => self.another_gid().ok_or(f),
            other => other,
        };
        gid.map_err(|f| Error::new(Status::NoRail, format!("{}: {}", self.nic.label(), said(&f))))
    }

    /// The address of the GID that was asked for last, and its prefix.
    pub(super) fn address(&self) -> Address {
        *self.address.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn another_gid(&self) -> Option<Gid> {
        let mut found = nics::addresses_of(&self.nic.netdev);
        found.sort_by_key(|(ip, _)| !self.is_near(*ip));
        let fit = |a: Address| Some((a, self.device.gid_of(a.0.octets()).ok()?));
        let ((ip, prefix), gid) = found.into_iter().find_map(fit)?;
        log::warn(&format!("{}: its address is {ip}/{prefix} now", self.nic.label()));
        *self.address.lock().unwrap_or_else(PoisonError::into_inner) = (ip, prefix);
        Some(gid)
    }

    /// Receives, and sends, of a message queue pair on this NIC: fewer than usual where its queues
    /// are small. All peers share its completion queue.
    pub(super) fn mail_window(&self, config: &Config) -> u32 {
        let (facts, peers) = (self.device.facts(), config.max_peers.saturating_add(1));
        let share = facts.mail_entries / peers.saturating_mul(2);
        // With less than the least fewer peers than configured get through.
        let share = share.min(facts.max_qp_wr).clamp(MAIL_LEAST, MAIL_RECEIVES);
        1 << share.ilog2()
    }

    /// Whether an address is in the port's subnet.
    pub(super) fn is_near(&self, ip: Ipv4Addr) -> bool {
        let (own, prefix) = self.address();
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0);
        u32::from(own) & mask == u32::from(ip) & mask
    }

    /// How this side describes its end of a rail.
    pub(super) fn end(&self, gid: [u8; 16]) -> RailEnd {
        let facts = self.device.facts();
        let byte = |n: u32| n.min(255) as u8;
        let (ipv4, prefix) = self.address();
        RailEnd {
            ipv4,
            prefix,
            gid,
            mtu: facts.mtu,
            max_msg: facts.max_msg_bytes,
            rd_initiator: byte(facts.rd_initiator),
            rd_responder: byte(facts.rd_responder),
            numa: self.nic.numa.clamp(-1, i32::from(i16::MAX)) as i16,
            speed_mbps: facts.speed_mbps.max(self.nic.speed_mbps),
        }
    }
}

/// Memory that is registered on every NIC; dropping it ends that.
#[derive(Debug)]
pub(super) struct Registered {
    rails: Arc<Rails>,
    /// NIC by NIC, piece by piece.
    mrs: Vec<Vec<Mr>>,
    shift: u8,
    pieces: usize,
}

impl Registered {
    /// Base-2 logarithm of a piece's bytes.
    pub(super) fn shift(&self) -> u8 {
        if self.pieces > 1 {
            self.shift
        } else {
            NO_SEAMS
        }
    }

    /// A key of each piece, NIC by NIC; 0 where the NIC is dead.
    fn each(&self, key: fn(&Mr) -> u32) -> impl Iterator<Item = u32> + '_ {
        let rows = self.mrs.iter().flat_map(|mrs| (0..self.pieces).map(|i| mrs.get(i)));
        rows.map(move |mr| mr.map_or(0, key))
    }

    /// The lkeys, NIC by NIC, piece by piece.
    pub(super) fn lkeys(&self) -> impl Iterator<Item = u32> + '_ {
        self.each(|mr| mr.lkey)
    }

    /// The rkeys, for peers.
    pub(super) fn keys(&self) -> RegionKeys {
        RegionKeys {
            shift: self.shift(),
            keys: self.each(|mr| mr.rkey).collect(),
            rails: self.mrs.len() as u8,
        }
    }
}

impl Registered {
    /// Ends the registrations. `Err`: a NIC did not end one, so peers may still reach the memory.
    pub(super) fn end(&mut self) -> core::result::Result<(), String> {
        let mut why = Ok(());
        for (rail, mrs) in self.rails.list.iter().zip(self.mrs.drain(..)) {
            for mr in mrs {
                // SAFETY: V23: registered on this device; nothing here uses it any more, and a peer
                // that still does gets an access error.
                if let Err(fault) = unsafe { rail.device.deregister(mr) } {
                    why = Err(format!("{}: {}", rail.nic.label(), said(&fault)));
                }
            }
        }
        why
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Err(why) = self.end() {
            log::warn(&why);
        }
    }
}
