//! Which GID a port speaks with: the one of its IPv4 address, for RoCE v2, on its own netdev.

use rdma_core_sys::*;

use super::device::Device;
use super::facts::count;
use super::fault::Fault;

/// An entry of a port's GID table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gid {
    /// Its place in the table; it may move when the netdev's addresses change.
    pub index: u32,
    /// The GID, in network order.
    pub raw: [u8; 16],
}

/// An IPv4 address as a GID: `::ffff:a.b.c.d`.
pub(super) const fn of_ipv4([a, b, c, d]: [u8; 4]) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d]
}

impl Device {
    /// The GID of the device's IPv4 address, for RoCE v2, on its netdev. Reads the port's table
    /// anew: ask again after [`Event::GidChange`](super::Event::GidChange).
    ///
    /// # Errors
    /// `EADDRNOTAVAIL`: the table has none such. `ENOSYS`: rdma-core is older than 32 and does not
    /// tell the types; then read `gid_attrs/types/N` and `gid_attrs/ndevs/N` below the port's sysfs
    /// folder, and have [`Device::gid_at`] check the entry.
    pub fn gid(&self) -> Result<Gid, Fault> {
        self.gid_of(self.ipv4)
    }

    /// The same for another IPv4 address of the netdev, which may have come since the device was
    /// opened.
    ///
    /// # Errors
    /// As [`Device::gid`].
    pub fn gid_of(&self, ipv4: [u8; 4]) -> Result<Gid, Fault> {
        const CALL: &str = "ibv_query_gid_ex";
        let wanted = of_ipv4(ipv4);
        let entries = count(self.port_attr()?.gid_tbl_len);
        for index in 0..entries {
            let mut entry = ibv_gid_entry::zeroed();
            let (context, port) = (self.context(), u32::from(self.port_number()));
            // SAFETY: V20: an open device; the place is writable.
            match unsafe { self.verbs().query_gid_ex(context, port, index, &raw mut entry) } {
                None => return Err(Fault::new(CALL, libc::ENOSYS)),
                Some(0) => {}
                // An empty place, or one that was emptied just now.
                Some(_) => continue,
            }
            // SAFETY: V20: both fields of the union are 16 bytes that may be anything.
            let raw = unsafe { entry.gid.raw };
            let ours =
                entry.ndev_ifindex == self.ifindex || entry.ndev_ifindex == 0 || self.ifindex == 0;
            if raw == wanted && entry.gid_type == IBV_GID_TYPE_ROCE_V2 && ours {
                return Ok(Gid { index, raw });
            }
        }
        Err(none(CALL, entries))
    }

    /// Entry `index` of the GID table, if it is that of the device's IPv4 address. For a library
    /// that does not tell types: the caller knows from sysfs that this entry is RoCE v2 and of
    /// this netdev.
    ///
    /// # Errors
    /// `EADDRNOTAVAIL`: it is another GID.
    pub fn gid_at(&self, index: u32) -> Result<Gid, Fault> {
        const CALL: &str = "ibv_query_gid";
        let entries = count(self.port_attr()?.gid_tbl_len);
        let Some(at) = i32::try_from(index).ok().filter(|_| index < entries) else {
            let fault = Fault::new(CALL, libc::EINVAL);
            return Err(fault.asking("index", index.into(), Some(entries.into())));
        };
        let mut gid = ibv_gid::zeroed();
        // SAFETY: V20: an open device; the place is writable.
        let failed = unsafe {
            self.verbs().query_gid(self.context(), self.port_number(), at, &raw mut gid) != 0
        };
        if failed {
            return Err(Fault::last(CALL).asking("index", index.into(), Some(entries.into())));
        }
        // SAFETY: V20: both fields of the union are 16 bytes that may be anything.
        let raw = unsafe { gid.raw };
        if raw != of_ipv4(self.ipv4) {
            return Err(none(CALL, entries));
        }
        Ok(Gid { index, raw })
    }
}

fn none(call: &'static str, entries: u32) -> Fault {
    Fault::new(call, libc::EADDRNOTAVAIL).asking(
        "no RoCE v2 GID of the netdev's IPv4 address in a table of",
        entries.into(),
        None,
    )
}
