//! One opened NIC port: its limits, domains, completion queues and registrations.

use core::ffi::{c_int, c_void, CStr};
use core::ptr::null_mut;

use rdma_core_sys::*;

use super::facts::{count, mtu_bytes, speed, Facts};
use super::fault::Fault;
use crate::sync::{AtomicBool, Ordering};

/// Bytes of the page into which flush READs go.
const SCRATCH: usize = 4096;
/// Bytes of a device's name: `IBV_SYSFS_NAME_MAX`.
const NAME: usize = 64;

/// What to open.
#[derive(Clone, Copy, Debug)]
pub struct Open<'a> {
    /// The kernel's name of the device, as `rdma link` shows it.
    pub name: &'a str,
    /// Port number, from 1.
    pub port: u8,
    /// Address of the port's netdev: it names the GID.
    pub ipv4: [u8; 4],
    /// Index of the port's netdev; 0: unknown.
    pub ifindex: u32,
    /// Wanted entries of the completion queue of data; capped by the device.
    pub cq_entries: u32,
    /// Wanted entries of the completion queue of messages; capped by the device.
    pub mail_entries: u32,
}

/// A registration of memory: local and remote key.
#[derive(Debug)]
#[must_use = "dropping it leaves the memory registered: `Device::deregister` ends it"]
pub struct Mr {
    /// For local use.
    pub lkey: u32,
    /// For peers.
    pub rkey: u32,
    raw: *mut ibv_mr,
}

// SAFETY: V21: libibverbs' objects may be used from any thread.
unsafe impl Send for Mr {}

/// What a lane's port uses of its device. A copy of addresses: whoever keeps one drops it, and the
/// queue pairs it works with, before the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handle {
    pub(super) cq: *mut ibv_cq,
    /// Entries of `cq`.
    pub(super) entries: u32,
    /// Where flush READs go.
    pub(super) scratch: u64,
    pub(super) scratch_lkey: u32,
}

// SAFETY: V21: libibverbs' objects may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: V21: only a copy of addresses.
unsafe impl Sync for Handle {}

/// One opened NIC port.
///
/// Any thread may register memory and make queue pairs, also several at once. Drop it after the
/// ports, queue pairs and registrations that were made from it: what is left keeps the device open
/// (a leak, no danger).
#[derive(Debug)]
pub struct Device {
    verbs: &'static Verbs,
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    td: *mut ibv_td,
    parent: *mut ibv_pd,
    channel: *mut ibv_comp_channel,
    data_cq: *mut ibv_cq,
    mail_cq: *mut ibv_cq,
    scratch: *mut c_void,
    scratch_mr: *mut ibv_mr,
    facts: Facts,
    port: u8,
    pub(super) ipv4: [u8; 4],
    pub(super) ifindex: u32,
    name: heapless::String<NAME>,
    dead: AtomicBool,
}

// SAFETY: V21: libibverbs' objects may be used from any thread.
unsafe impl Send for Device {}
// SAFETY: V21: libibverbs' calls on a device and its domains lock what they need.
unsafe impl Sync for Device {}

impl Device {
    /// Opens a device's port: domains, completion channel and both completion queues.
    ///
    /// # Errors
    /// The first call that failed. Nothing stays open.
    pub fn open(verbs: &'static Verbs, want: &Open<'_>) -> Result<Device, Fault> {
        let name = heapless::String::try_from(want.name).map_err(|_| {
            let len = want.name.len() as u64;
            Fault::new("ibv_open_device", libc::ENODEV).asking("a name of bytes", len, Some(64))
        })?;
        let mut device = Device {
            verbs,
            context: null_mut(),
            pd: null_mut(),
            td: null_mut(),
            parent: null_mut(),
            channel: null_mut(),
            data_cq: null_mut(),
            mail_cq: null_mut(),
            scratch: null_mut(),
            scratch_mr: null_mut(),
            facts: Facts::NONE,
            port: want.port,
            ipv4: want.ipv4,
            ifindex: want.ifindex,
            name,
            dead: AtomicBool::new(false),
        };
        // Whatever fails from here on, dropping `device` gives back what there is.
        device.context = open_named(verbs, want.name)?;
        device.facts = device.ask(want)?;
        device.make_domains()?;
        device.make_queues(want)?;
        device.make_scratch()?;
        Ok(device)
    }

    /// Limits of device and port, and what was granted.
    pub const fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Port number.
    pub const fn port_number(&self) -> u8 {
        self.port
    }

    /// Asks whether the port is active.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn is_active(&self) -> Result<bool, Fault> {
        Ok(self.port_attr()?.state == IBV_PORT_ACTIVE)
    }

    /// What a lane's port needs; valid until this device is dropped.
    pub fn handle(&self) -> Handle {
        Handle {
            cq: self.data_cq,
            entries: self.facts.cq_entries,
            scratch: self.scratch as u64,
            // SAFETY: V20: made by `open`, released by `drop`.
            scratch_lkey: unsafe { (*self.scratch_mr).lkey },
        }
    }

    /// The library.
    pub const fn verbs(&self) -> &'static Verbs {
        self.verbs
    }

    /// The completion queue of messages.
    pub const fn mail_cq(&self) -> *mut ibv_cq {
        self.mail_cq
    }

    /// Becomes readable when a completion event of either queue is there.
    pub fn channel_fd(&self) -> i32 {
        // SAFETY: V20: made by `open`, released by `drop`.
        unsafe { (*self.channel).fd }
    }

    /// Takes and acknowledges all completion events. Never waits.
    pub fn clear_channel(&self) {
        let (mut cq, mut cookie) = (null_mut(), null_mut());
        // SAFETY: V20: an open channel, which does not block; both places are writable.
        while unsafe { self.verbs.get_cq_event(self.channel, &raw mut cq, &raw mut cookie) } == 0 {
            // SAFETY: V20: the queue whose event this is; one event, acknowledged once.
            unsafe { self.verbs.ack_cq_events(cq, 1) };
        }
    }

    /// Becomes readable when [`Device::next_event`] has something.
    pub fn event_fd(&self) -> i32 {
        // SAFETY: V20: an open device.
        unsafe { (*self.context).async_fd }
    }

    pub(super) const fn context(&self) -> *mut ibv_context {
        self.context
    }

    /// The domain for queue pairs that only a lane's token holder posts to.
    pub(super) fn lane_domain(&self) -> *mut ibv_pd {
        if self.parent.is_null() {
            self.pd
        } else {
            self.parent
        }
    }

    /// The domain for everything else.
    pub(super) const fn domain(&self) -> *mut ibv_pd {
        self.pd
    }

    pub(super) const fn data_cq(&self) -> *mut ibv_cq {
        self.data_cq
    }

    /// True once the device said that nothing of it works any more.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// The device is gone; tells it once.
    pub(super) fn died(&self) -> Option<super::Event> {
        let told = self.dead.swap(true, Ordering::Relaxed);
        (!told).then_some(super::Event::DeviceFatal)
    }

    pub(super) fn port_attr(&self) -> Result<ibv_port_attr, Fault> {
        let mut attr = ibv_port_attr::zeroed();
        // SAFETY: V20: an open device; the place is writable.
        match unsafe { self.verbs.query_port(self.context, self.port, &raw mut attr) } {
            0 => Ok(attr),
            e => Err(Fault::new("ibv_query_port", e).asking("port", self.port.into(), None)),
        }
    }

    /// Asks device and port for their limits.
    fn ask(&self, want: &Open<'_>) -> Result<Facts, Fault> {
        let mut device = ibv_device_attr::zeroed();
        // SAFETY: V20: an open device; the place is writable.
        let e = unsafe { self.verbs.query_device(self.context, &raw mut device) };
        if e != 0 {
            return Err(Fault::new("ibv_query_device", e));
        }
        if want.port == 0 || want.port > device.phys_port_cnt {
            let ports = Some(device.phys_port_cnt.into());
            let fault = Fault::new("ibv_query_port", libc::EINVAL);
            return Err(fault.asking("port", want.port.into(), ports));
        }
        let port = self.port_attr()?;
        let mtu = mtu_bytes(port.active_mtu).ok_or_else(|| {
            let fault = Fault::new("ibv_query_port", libc::EINVAL);
            fault.asking("active MTU code", port.active_mtu.into(), Some(IBV_MTU_4096.into()))
        })?;
        let facts = Facts {
            max_qp_wr: count(device.max_qp_wr),
            max_cqe: count(device.max_cqe),
            // A device that says 0 still takes one.
            max_sge: count(device.max_sge).min(count(device.max_sge_rd)).max(1),
            rd_responder: count(device.max_qp_rd_atom),
            rd_initiator: count(device.max_qp_init_rd_atom),
            max_mr_size: device.max_mr_size,
            max_mr: count(device.max_mr),
            max_msg_bytes: port.max_msg_sz,
            mtu,
            speed_mbps: speed(port.active_width, port.active_speed),
            ..Facts::NONE
        };
        let needed = [
            ("max_qp_wr", facts.max_qp_wr, 2),
            ("max_cqe", facts.max_cqe, 2),
            ("max_msg_sz", facts.max_msg_bytes, 1),
        ];
        for (what, has, least) in needed {
            if has < least {
                let fault = Fault::new("ibv_query_device", libc::EOPNOTSUPP);
                return Err(fault.asking(what, has.into(), None));
            }
        }
        Ok(facts)
    }

    fn make_domains(&mut self) -> Result<(), Fault> {
        // SAFETY: V20: an open device.
        self.pd = unsafe { self.verbs.alloc_pd(self.context) };
        if self.pd.is_null() {
            return Err(Fault::last("ibv_alloc_pd"));
        }
        // Without a thread domain the provider takes its own locks: slower, not wrong.
        let mut attr = ibv_td_init_attr::zeroed();
        // SAFETY: V20: an open device, and attributes without any extension.
        self.td = unsafe { alloc_td(self.context, &raw mut attr) };
        if self.td.is_null() {
            return Ok(());
        }
        let mut attr = ibv_parent_domain_init_attr {
            pd: self.pd,
            td: self.td,
            ..ibv_parent_domain_init_attr::zeroed()
        };
        // SAFETY: V20: an open device, and the two domains made above.
        self.parent = unsafe { alloc_parent_domain(self.context, &raw mut attr) };
        self.facts.parent_domain = !self.parent.is_null();
        Ok(())
    }

    fn make_queues(&mut self, want: &Open<'_>) -> Result<(), Fault> {
        // SAFETY: V20: an open device.
        self.channel = unsafe { self.verbs.create_comp_channel(self.context) };
        if self.channel.is_null() {
            return Err(Fault::last("ibv_create_comp_channel"));
        }
        unblock(self.channel_fd())?;
        unblock(self.event_fd())?;
        let max = self.facts.max_cqe;
        self.data_cq = self.make_queue(want.cq_entries.clamp(2, max))?;
        self.mail_cq = self.make_queue(want.mail_entries.clamp(2, max))?;
        // SAFETY: V20: made above.
        self.facts.cq_entries = count(unsafe { (*self.data_cq).cqe });
        // SAFETY: V20: made above.
        self.facts.mail_entries = count(unsafe { (*self.mail_cq).cqe });
        Ok(())
    }

    fn make_queue(&self, entries: u32) -> Result<*mut ibv_cq, Fault> {
        let n = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: V20: an open device and channel; vector 0 is always there.
        let cq = unsafe { self.verbs.create_cq(self.context, n, null_mut(), self.channel, 0) };
        if cq.is_null() {
            let max = Some(self.facts.max_cqe.into());
            return Err(Fault::last("ibv_create_cq").asking("entries", entries.into(), max));
        }
        Ok(cq)
    }

    fn make_scratch(&mut self) -> Result<(), Fault> {
        let (prot, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: I8: a new mapping.
        let page = unsafe { libc::mmap(null_mut(), SCRATCH, prot, flags, -1, 0) };
        if page == libc::MAP_FAILED {
            return Err(Fault::last("mmap").asking("bytes", SCRATCH as u64, None));
        }
        self.scratch = page;
        // SAFETY: V20: the page was just mapped and is unmapped after its registration ended. A
        // child of fork gets no copy of it: the NIC would write into one of the two only.
        unsafe { libc::madvise(page, SCRATCH, libc::MADV_DONTFORK) };
        // SAFETY: V20: as above.
        let mr = unsafe { self.verbs.reg_mr(self.pd, page, SCRATCH, IBV_ACCESS_LOCAL_WRITE) };
        if mr.is_null() {
            return Err(Fault::last("ibv_reg_mr").asking("bytes", SCRATCH as u64, None));
        }
        self.scratch_mr = mr;
        Ok(())
    }

    /// Registers `len` bytes at `addr`, which peers address from `iova` on, for reading and writing
    /// by both sides. `relaxed`: the device may place bytes in any order, where it can.
    ///
    /// The memory must stay mapped until [`Device::deregister`] returned: peers that have the key
    /// may write there at any time.
    ///
    /// # Errors
    /// `ENOMEM` (most often the limit of locked memory), `EFAULT` (not mapped), and others.
    pub fn register(&self, addr: u64, len: u64, iova: u64, relaxed: bool) -> Result<Mr, Fault> {
        let relaxed = if relaxed { IBV_ACCESS_RELAXED_ORDERING } else { 0 };
        let access = ACCESS | relaxed;
        let (length, at) = (self.length("ibv_reg_mr", len)?, addr as usize as *mut c_void);
        let raw = if iova == addr {
            // SAFETY: V23: the kernel pins the range, or refuses one that is not mapped.
            unsafe { self.verbs.reg_mr(self.pd, at, length, access) }
        } else {
            // SAFETY: V23: as above.
            unsafe { self.verbs.reg_mr_iova2(self.pd, at, length, iova, access) }
        };
        self.registered("ibv_reg_mr", raw, len)
    }

    /// Registers `len` bytes at `offset` of the dma-buf `fd`, which peers address from `iova` on.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: device, driver or library cannot; `EBADF`, `EINVAL`: not such a dma-buf.
    pub fn register_dmabuf(&self, fd: i32, offset: u64, len: u64, iova: u64) -> Result<Mr, Fault> {
        const CALL: &str = "ibv_reg_dmabuf_mr";
        let (length, access) = (self.length(CALL, len)?, ACCESS.cast_signed());
        // SAFETY: V23: the kernel holds the buffer that the descriptor names, or refuses it.
        let raw = unsafe { self.verbs.reg_dmabuf_mr(self.pd, offset, length, iova, fd, access) };
        self.registered(CALL, raw, len)
    }

    /// Ends a registration: no peer reaches the memory after this returned.
    ///
    /// # Errors
    /// The device did not end it. The memory must then stay as it is for the life of the process.
    ///
    /// # Safety
    /// `mr` came from this device (V23), and no work request that names it is in flight.
    pub unsafe fn deregister(&self, mr: Mr) -> Result<(), Fault> {
        // SAFETY: V23: made by this device, and given up by value: it ends once.
        match unsafe { self.verbs.dereg_mr(mr.raw) } {
            0 => Ok(()),
            e => Err(Fault::new("ibv_dereg_mr", e).asking("rkey", mr.rkey.into(), None)),
        }
    }

    fn length(&self, call: &'static str, len: u64) -> Result<usize, Fault> {
        match usize::try_from(len) {
            Ok(length) if length > 0 && len <= self.facts.max_mr_size => Ok(length),
            _ => {
                let max = Some(self.facts.max_mr_size);
                Err(Fault::new(call, libc::EINVAL).asking("bytes", len, max))
            }
        }
    }

    fn registered(&self, call: &'static str, raw: *mut ibv_mr, len: u64) -> Result<Mr, Fault> {
        if raw.is_null() {
            let max = Some(self.facts.max_mr_size);
            return Err(Fault::last(call).asking("bytes", len, max));
        }
        // SAFETY: V23: made just now.
        let (lkey, rkey) = unsafe { ((*raw).lkey, (*raw).rkey) };
        Ok(Mr { lkey, rkey, raw })
    }
}

/// What both sides may do with registered memory.
const ACCESS: ibv_access_flags =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

impl Drop for Device {
    /// Gives back in the reverse order. What the device does not take back (something still uses
    /// it) stays until the process ends; nothing else can be done here.
    fn drop(&mut self) {
        let v = self.verbs;
        if !self.scratch_mr.is_null() {
            // SAFETY: V20: no port and no queue pair is left, so nothing writes there.
            let kept = unsafe { v.dereg_mr(self.scratch_mr) } != 0;
            if kept {
                self.scratch = null_mut();
            }
        }
        if !self.scratch.is_null() {
            // SAFETY: V20: mapped by `make_scratch` with this length; its registration ended.
            unsafe { libc::munmap(self.scratch, SCRATCH) };
        }
        for cq in [self.mail_cq, self.data_cq] {
            if !cq.is_null() {
                // SAFETY: V20: made by `make_queue`, and every event was acknowledged.
                unsafe { v.destroy_cq(cq) };
            }
        }
        if !self.channel.is_null() {
            // SAFETY: V20: made by `make_queues`; its queues are gone.
            unsafe { v.destroy_comp_channel(self.channel) };
        }
        if !self.parent.is_null() {
            // SAFETY: V20: made by `make_domains`; its queue pairs are gone.
            unsafe { v.dealloc_pd(self.parent) };
        }
        if !self.td.is_null() {
            // SAFETY: V20: made by `make_domains`; the domain that tied it is gone.
            unsafe { dealloc_td(self.td) };
        }
        if !self.pd.is_null() {
            // SAFETY: V20: made by `make_domains`.
            unsafe { v.dealloc_pd(self.pd) };
        }
        if !self.context.is_null() {
            // SAFETY: V20: opened by `open_named`; what was made from it is gone.
            unsafe { v.close_device(self.context) };
        }
    }
}

/// Opens the device of this name.
fn open_named(verbs: &Verbs, name: &str) -> Result<*mut ibv_context, Fault> {
    let mut n = 0;
    // SAFETY: V20: a writable place.
    let list = unsafe { verbs.get_device_list(&raw mut n) };
    if list.is_null() {
        return Err(Fault::last("ibv_get_device_list"));
    }
    let mut result = Err(Fault::new("ibv_open_device", libc::ENODEV).asking(
        "a name that is none of the devices, of which there are",
        count(n).into(),
        None,
    ));
    for i in 0..usize::try_from(n).unwrap_or(0) {
        // SAFETY: V20: the list has `n` entries.
        let device = unsafe { *list.add(i) };
        // SAFETY: V20: a device of the list, which is not released yet.
        let text = unsafe { verbs.get_device_name(device) };
        // SAFETY: V20: the library's text ends in NUL and lives as long as the list.
        if text.is_null() || unsafe { CStr::from_ptr(text) }.to_bytes() != name.as_bytes() {
            continue;
        }
        // SAFETY: V20: a device of the list.
        let context = unsafe { verbs.open_device(device) };
        result = if context.is_null() { Err(Fault::last("ibv_open_device")) } else { Ok(context) };
        break;
    }
    // SAFETY: V20: came from `get_device_list`; an open device outlives it.
    unsafe { verbs.free_device_list(list) };
    result
}

/// Makes reads of a descriptor return at once when there is nothing.
fn unblock(fd: i32) -> Result<(), Fault> {
    // SAFETY: I8: no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: I8: no pointers.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(Fault::last("fcntl").asking("descriptor", u64::from(fd.unsigned_abs()), None));
    }
    Ok(())
}
