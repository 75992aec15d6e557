//! The NICs of an engine: chosen, opened, and what is registered on them.

use core::net::Ipv4Addr;
use core::num::NonZeroU32;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Once, PoisonError};

use rdma_core_sys::Verbs;

use super::blob::RegionKeys;
use super::card;
use super::config::Config;
use super::error::{Error, Result};
use super::graves::Graves;
use super::memory::{Lease, Range, Source};
use super::nics::{self, Address, Nic, Selection};
use super::rail::{RailEnd, MAX_RAILS};
use super::{log, sys};
use crate::nic::verbs::mail::{MAIL_LEAST, MAIL_RECEIVES, MAIL_SENDS};
use crate::nic::verbs::{Device, Fault, Gid, Mr, Open};
use crate::status::Status;
use crate::sync::{AtomicU32, Ordering};
use crate::table::NO_SEAMS;

/// Longest memory region: those above about 4 GiB are known to be slower on some NICs, whose
/// translation tables they overflow. The largest power of two that is below.
const MAX_PIECE: u64 = 2 << 30;
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
    let numa =
        given.or_else(|| nics::numa_of_pci(&sysroot, &card(&sysroot, config)).filter(|n| *n >= 0));
    nics::Request { sysroot, numa, names: names.map(str::to_owned).collect() }
}

/// The accelerator's name in sysfs.
fn card(sysroot: &Path, config: &Config) -> String {
    let visible = variable("RBLN_VISIBLE_DEVICES").unwrap_or_default();
    let per_device = variable("RBLN_NPUS_PER_DEVICE").and_then(|n| n.parse().ok()).unwrap_or(1);
    card::name(sysroot, config.device_id, card::Shown { visible: &visible, per_device })
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

/// Keeps rails with loopback queue pairs coming up, for memory where READs land late.
#[derive(Debug)]
pub(super) struct Late(Arc<Rails>);

impl Late {
    pub(super) fn new(rails: &Arc<Rails>) -> Late {
        rails.late.fetch_add(1, Ordering::AcqRel);
        Late(rails.clone())
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        self.0.late.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The opened NICs of an engine, in the order of its lanes.
#[derive(Debug)]
pub(super) struct Rails {
    list: Vec<Rail>,
    pub(super) graves: Graves,
    /// Registrations of memory where READs land late, and tries: as long as there are any, every
    /// rail has a loopback queue pair.
    late: AtomicU32,
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
        Ok(Rails { list, graves: Graves::default(), late: AtomicU32::new(0) })
    }

    /// Whether a rail needs a loopback queue pair.
    pub(super) fn land_late(&self) -> bool {
        self.late.load(Ordering::Acquire) > 0
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

    /// Registers ranges on every NIC, all NICs at a time, or none of them on any. A device that
    /// died is left out: it gets no rail any more. All others are open from the start to the end of
    /// the engine, so a rail that comes up later finds its keys here. `lease`: who lent the memory.
    pub(super) fn register(
        self: &Arc<Rails>,
        ranges: &[Range],
        lease: Option<&Arc<Lease>>,
    ) -> Result<Vec<Registered>> {
        let shift = self.piece_shift();
        let new = |range: &Range| {
            let (rails, lease, mem) = (self.clone(), lease.cloned(), range.mem());
            let (mrs, flush) = (Vec::new(), (!range.coherent).then(|| Late::new(self)));
            Registered { rails, mrs, kept: None, shift, pieces: 0, mem, flush, lease }
        };
        let mut all: Vec<_> = ranges.iter().map(new).collect();
        let mut failed = None;
        for (rail, (mrs, fault)) in self.list.iter().zip(self.on_each(|r| r.pieces(ranges, shift)))
        {
            // The last one is what could not be registered, from behind its pieces on.
            let fault = fault.map(|f| (f, mrs.len(), mrs.last().map_or(0, Vec::len) as u64));
            let mut mrs = mrs.into_iter();
            for registered in &mut all {
                let mrs = mrs.next().unwrap_or_default();
                registered.pieces = registered.pieces.max(mrs.len());
                registered.mrs.push(mrs);
            }
            failed = failed.or(fault.map(|f| (rail, f)));
        }
        let len: u64 = ranges.iter().map(|r| r.len).fold(0, u64::saturating_add);
        match failed {
            None if all.iter().any(|r| r.pieces == 0) => {
                let text = format!("registering {len} bytes: all {} NICs failed", self.len());
                Err(Error::new(Status::NoRail, text))
            }
            None => Ok(all),
            Some((rail, (fault, count, done))) => {
                let kept = all.iter_mut().filter_map(|r| r.end().err()).last();
                let after = kept.map_or_else(
                    || format!("taken back on all {} NICs", self.len()),
                    |why| format!("and not taken back: {why}: {KEPT}"),
                );
                let range = ranges.get(count.saturating_sub(1));
                let Some(range) = range.filter(|r| r.source != Source::Host) else {
                    return Err(self.refused(rail, &fault, len, &after));
                };
                let at = (done << shift).min(range.len);
                let piece = range.piece(at, (range.len - at).min(1 << shift));
                let (status, text) = piece.refused(&rail.nic.label(), &fault);
                Err(Error::new(status, format!("{text}; {after}")))
            }
        }
    }

    /// Asks every NIC at the same time, as each takes its own while to pin memory.
    fn on_each(&self, f: impl Fn(&Rail) -> OnRail + Sync) -> Vec<OnRail> {
        std::thread::scope(|scope| {
            // The last one on this thread: with one NIC nothing is spawned.
            let Some((last, others)) = self.list.split_last() else { return Vec::new() };
            let f = &f;
            let spawn = |r| std::thread::Builder::new().spawn_scoped(scope, move || f(r));
            let handles: Vec<_> = others.iter().map(spawn).collect();
            let last = f(last);
            let lost = |_| (Vec::new(), Some(Fault::new("registration thread", libc::EIO)));
            // A thread that could not be had is done without.
            let ended = handles.into_iter().zip(others).map(|(handle, rail)| {
                handle.map_or_else(|_| f(rail), |h| h.join().unwrap_or_else(lost))
            });
            ended.collect::<Vec<_>>().into_iter().chain([last]).collect()
        })
    }

    fn refused(&self, rail: &Rail, fault: &Fault, len: u64, after: &str) -> Error {
        let mut text =
            format!("registering {len} bytes on {}: {}; {after}", rail.nic.label(), said(fault));
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

/// What becomes of memory that a NIC did not let go of.
pub(super) const KEPT: &str = "peers may still reach this memory, which must not be reused before \
                               this process ends";

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

/// What a NIC registered, range by range and piece by piece, and what was wrong with the next one.
type OnRail = (Vec<Vec<Mr>>, Option<Fault>);

impl Rail {
    /// Registers ranges in pieces of at most `1 << shift` bytes, up to the first that is refused.
    fn pieces(&self, ranges: &[Range], shift: u8) -> OnRail {
        let mut all = Vec::new();
        for range in ranges {
            let len = range.len;
            let mut mrs = Vec::new();
            let mut at = if self.device.is_dead() { len } else { 0 };
            let mut fault = None;
            while at < len && fault.is_none() {
                let n = (len - at).min(1 << shift);
                match self.one(range.piece(at, n)) {
                    Ok(mr) => mrs.push(mr),
                    Err(why) => fault = Some(why),
                }
                at += n;
            }
            all.push(mrs);
            if fault.is_some() {
                return (all, fault);
            }
        }
        (all, None)
    }

    fn one(&self, piece: Range) -> core::result::Result<Mr, Fault> {
        let Range { addr, len, source, .. } = piece;
        match source {
            Source::Host | Source::Device => self.device.register(addr, len, addr, false),
            Source::DmaBuf { fd, offset } => self.device.register_dmabuf(fd, offset, len, addr),
        }
    }

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

    /// Whether its rails are about to be given up: the device is dead, or the address gone.
    pub(super) fn is_going(&self) -> bool {
        self.device.is_dead() || self.gid().is_err()
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
    /// The NIC that did not end its registration, and why.
    kept: Option<String>,
    shift: u8,
    pieces: usize,
    mem: u8,
    /// READs into it end with a flush.
    flush: Option<Late>,
    /// Who lent the memory. Given up after the registrations ended: fields are dropped after
    /// [`Drop::drop`].
    lease: Option<Arc<Lease>>,
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

    /// Kind of memory, as blobs have it.
    pub(super) fn mem(&self) -> u8 {
        self.mem
    }

    /// A key of each piece, NIC by NIC; 0 where the NIC is dead.
    fn each(&self, key: fn(&Mr) -> u32) -> impl Iterator<Item = u32> + '_ {
        let rows = self.mrs.iter().flat_map(|mrs| (0..self.pieces).map(|i| mrs.get(i)));
        rows.map(move |mr| mr.map_or(0, key))
    }

    /// True when READs into it end with a flush.
    pub(super) fn flush(&self) -> bool {
        self.flush.is_some()
    }

    /// The lkeys, NIC by NIC, piece by piece; for flushes then the rkeys in the same order.
    pub(super) fn own_keys(&self) -> impl Iterator<Item = u32> + '_ {
        let rkeys = self.flush().then(|| self.each(|mr| mr.rkey));
        self.each(|mr| mr.lkey).chain(rkeys.into_iter().flatten())
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
    /// Ends the registrations. `Err`, then and ever after: a NIC did not end one, so peers may
    /// still reach the memory.
    pub(super) fn end(&mut self) -> core::result::Result<(), String> {
        for (rail, mrs) in self.rails.list.iter().zip(self.mrs.drain(..)) {
            for mr in mrs {
                // SAFETY: V23: registered on this device; nothing here uses it any more, and a peer
                // that still does gets an access error.
                if let Err(fault) = unsafe { rail.device.deregister(mr) } {
                    self.kept = Some(format!("{}: {}", rail.nic.label(), said(&fault)));
                    self.lease.iter().for_each(|lease| lease.lose());
                }
            }
        }
        self.kept.clone().map_or(Ok(()), Err)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // What was kept before has been told.
        if self.kept.is_none() {
            if let Err(why) = self.end() {
                log::warn(&format!("{why}: {KEPT}"));
            }
        }
    }
}
