//! Every port of every RDMA device, as sysfs tells it. Nothing is judged here.

use core::net::{Ipv4Addr, Ipv6Addr};

use super::numa;
use super::tree::{Dir, Tree};

/// Devices looked at.
const MAX_DEVICES: usize = 1024;
/// GIDs looked at on one port; drivers have up to 256.
const MAX_GIDS: usize = 1024;
/// Partition keys looked at on one port.
const MAX_PKEYS: usize = 256;

/// One non-empty entry of a port's GID table.
#[derive(Clone, Debug)]
pub(super) struct Gid {
    pub(super) index: u32,
    pub(super) bytes: [u8; 16],
    /// RoCE v2, which is UDP; everything else (v1, InfiniBand, iWARP) is no use here.
    pub(super) v2: bool,
    /// The netdev that it belongs to; `None`: to none that can be seen from here.
    pub(super) netdev: Option<String>,
}

impl Gid {
    /// The IPv4 address that it was made of.
    pub(super) fn ipv4(&self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.bytes).to_ipv4_mapped()
    }
}

/// One port, or a device without any (port 0).
#[derive(Clone, Debug, Default)]
pub(super) struct Port {
    pub(super) device: String,
    pub(super) port: u8,
    /// As read: `1: CA`; empty: missing.
    pub(super) node_type: String,
    /// As read: `Ethernet`; empty: missing.
    pub(super) link_layer: String,
    /// As read: `4: ACTIVE`; empty: missing.
    pub(super) state: String,
    /// As read: `5: LinkUp`.
    pub(super) phys_state: String,
    /// In Mbit/s, from the port's own rate; 0: unknown.
    pub(super) rate_mbps: u32,
    /// The first partition key that is not empty makes a limited member: its number.
    pub(super) limited_pkey: Option<u16>,
    pub(super) gids: Vec<Gid>,
    pub(super) numa: numa::Node,
}

impl Port {
    pub(super) fn is_active(&self) -> bool {
        let (number, word) = self.state.split_once(':').unwrap_or(("", &self.state));
        number.trim() == "4" || number.is_empty() && word.trim() == "ACTIVE"
    }

    /// `mlx5_0:1`.
    pub(super) fn label(&self) -> String {
        match self.port {
            0 => self.device.clone(),
            port => format!("{}:{port}", self.device),
        }
    }

    /// The netdevs that its GIDs belong to, each once.
    pub(super) fn netdevs(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for name in self.gids.iter().filter_map(|g| g.netdev.as_deref()) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }
}

/// Ports of all devices: devices in natural order, then by port.
pub(super) fn read(tree: &Tree) -> Vec<Port> {
    let Some(class) = tree.dir("sys/class/infiniband") else {
        return Vec::new();
    };
    let mut names = class.names();
    names.sort_by(|a, b| super::names::natural(a, b));
    let mut found = Vec::new();
    for name in names.into_iter().take(MAX_DEVICES) {
        // A plain file here is no device (`bonding_masters` has cousins).
        let Some(dir) = class.dir(&name) else { continue };
        let device = Port {
            node_type: dir.read("node_type").unwrap_or_default(),
            numa: numa::of_device(&dir),
            device: name,
            ..Port::default()
        };
        let ports = dir.dir("ports");
        let numbers = ports.as_ref().map(Dir::numbers).unwrap_or_default();
        let numbers = numbers.into_iter().filter_map(|n| u8::try_from(n).ok()).filter(|n| *n > 0);
        let before = found.len();
        for number in numbers {
            let dir = ports.as_ref().and_then(|p| p.dir(&number.to_string()));
            let Some(port) = dir else { continue };
            // Soft devices say which netdev they stand on; of use where a GID does not.
            let parent = dir_parent(&class, &device.device);
            found.push(read_port(&device, number, &port, parent));
        }
        if found.len() == before {
            found.push(device);
        }
    }
    found
}

fn dir_parent(class: &Dir<'_>, device: &str) -> Option<String> {
    class.dir(device)?.read("parent").filter(|name| !name.is_empty())
}

fn read_port(device: &Port, number: u8, port: &Dir<'_>, parent: Option<String>) -> Port {
    let text = |name: &str| port.read(name).unwrap_or_default();
    Port {
        port: number,
        link_layer: text("link_layer"),
        state: text("state"),
        phys_state: text("phys_state"),
        rate_mbps: rate(&text("rate")),
        limited_pkey: limited(port),
        gids: gids(port, parent),
        ..device.clone()
    }
}

/// `100 Gb/sec (4X EDR)` in Mbit/s.
fn rate(text: &str) -> u32 {
    let gbps: f64 = text.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0.0);
    // A cast from a float saturates, and NaN is 0.
    (gbps * 1000.0) as u32
}

/// The top bit of a partition key is full membership; two limited members cannot talk.
fn limited(port: &Dir<'_>) -> Option<u16> {
    let dir = port.dir("pkeys")?;
    let key = |n: u32| {
        let text = dir.read(&n.to_string())?;
        u16::from_str_radix(text.trim_start_matches("0x"), 16).ok().filter(|k| *k != 0)
    };
    let first = dir.numbers().into_iter().take(MAX_PKEYS).find_map(key)?;
    (first & 0x8000 == 0).then_some(first)
}

fn gids(port: &Dir<'_>, parent: Option<String>) -> Vec<Gid> {
    let Some(table) = port.dir("gids") else {
        return Vec::new();
    };
    let (types, netdevs) = (port.dir("gid_attrs/types"), port.dir("gid_attrs/ndevs"));
    let mut found = Vec::new();
    for index in table.numbers().into_iter().take(MAX_GIDS) {
        let name = index.to_string();
        let gid = table.read(&name).and_then(|t| t.parse::<Ipv6Addr>().ok());
        let Some(gid) = gid.filter(|g| !g.is_unspecified()) else { continue };
        let kind = types.as_ref().and_then(|d| d.read(&name)).unwrap_or_default();
        let netdev = netdevs.as_ref().and_then(|d| d.read(&name)).filter(|n| !n.is_empty());
        found.push(Gid {
            index,
            bytes: gid.octets(),
            v2: kind.to_lowercase().replace(' ', "").ends_with("rocev2"),
            netdev: netdev.or_else(|| parent.clone()),
        });
    }
    found
}
