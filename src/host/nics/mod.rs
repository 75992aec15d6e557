//! Which RDMA NICs become rails.
//!
//! A RoCE NIC counts when its port is ACTIVE, its netdev carries an IPv4 address, it sits on the
//! accelerator's NUMA node, and its netdev is not the one holding the host's default route.
//! `docs/nic-selection.md` has the whole rule, what was decided where it is silent, and an example
//! of every reason. Everything is read from sysfs and procfs below a root, addresses from the
//! kernel when that root is `/`.
//!
//! ```
//! use kvrail::host::nics::{select, Request};
//! let found = select(&Request { numa: Some(0), ..Request::default() });
//! match found.nics.first() {
//!     Some(nic) => println!("{} {}", nic.device, nic.ipv4),
//!     None => println!("{}", found.explain()),
//! }
//! ```

mod kernel;
mod names;
mod net;
mod numa;
mod ports;
mod rule;
mod tree;

use core::fmt::Write as _;
use core::net::Ipv4Addr;
use std::path::PathBuf;

pub use kernel::numa_of_address;
pub use net::{parse_routes, Address, Addresses, DefaultRoute, DEFAULT_PREFIX};
pub use numa::numa_of_pci;

use names::Wanted;
use rule::Host;
use tree::Tree;

/// What to look for, and where.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Request {
    /// Where `sys` and `proc` are: `/`. Another root is for tests; the live host is then not asked.
    pub sysroot: PathBuf,
    /// NUMA node of the accelerator, or of the buffer. `None` or negative: unknown, and then no NIC
    /// is refused for its node.
    pub numa: Option<i32>,
    /// The names of `KVRAIL_NICS`: `mlx5_0`, `mlx5_0:1` or `mlx5_0/1`. Not empty: these NICs and
    /// no others, whatever the rule says beyond RoCE, ACTIVE and IPv4.
    pub names: Vec<String>,
}

impl Default for Request {
    /// This host, any node, by the rule.
    fn default() -> Request {
        Request { sysroot: PathBuf::from("/"), numa: None, names: Vec::new() }
    }
}

/// A NIC port that becomes a rail.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Nic {
    /// RDMA device, such as `mlx5_0`.
    pub device: String,
    /// Its port, from 1.
    pub port: u8,
    /// The netdev that the GID belongs to.
    pub netdev: String,
    /// The netdev's index; 0: sysfs does not say.
    pub ifindex: u32,
    /// The address that the GID is made of.
    pub ipv4: Ipv4Addr,
    /// Prefix length of that address, in bits.
    pub prefix: u8,
    /// Where the GID is now. A hint: the table changes, so ask the library again before use.
    pub gid_index: u32,
    /// The GID: `::ffff:a.b.c.d`.
    pub gid: [u8; 16],
    /// NUMA node; -1: unknown.
    pub numa: i32,
    /// Link speed in Mbit/s; 0: unknown.
    pub speed_mbps: u32,
    /// MTU of the netdev in bytes; 0: unknown.
    pub mtu: u32,
}

/// What was found out about one port, or about a device that has none (port 0).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Verdict {
    /// RDMA device.
    pub device: String,
    /// Its port, from 1; 0: the device has no port.
    pub port: u8,
    /// The rail; `None`: refused.
    pub chosen: Option<Nic>,
    /// The first reason why it was refused; empty when it was not.
    pub reason: String,
    /// The netdev of its GIDs, the likeliest where there are several; empty: none is known.
    pub netdev: String,
    /// Its address, where it has one.
    pub ipv4: Option<Ipv4Addr>,
    /// The GID that fits the address, where there is one.
    pub gid_index: Option<u32>,
    /// NUMA node; -1: unknown.
    pub numa: i32,
    /// Link speed in Mbit/s; 0: unknown.
    pub speed_mbps: u32,
    /// MTU of the netdev in bytes; 0: unknown.
    pub mtu: u32,
    /// The port's state as sysfs writes it: `4: ACTIVE`.
    pub state: String,
    /// What is odd about a port that was chosen.
    pub warnings: Vec<String>,
}

/// The answer of [`select`].
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Selection {
    /// The rails: by device name in natural order (`mlx5_2` before `mlx5_10`), then by port.
    pub nics: Vec<Nic>,
    /// Every port of every device, in the same order.
    pub verdicts: Vec<Verdict>,
    /// What is allowed and still worth a word, those of the verdicts included.
    pub warnings: Vec<String>,
    /// The node that was asked for; `None`: unknown.
    pub numa: Option<i32>,
    /// Names of the request that fit no port, each with what is wrong with it.
    pub unknown: Vec<String>,
    /// The default routes that were found.
    pub default_routes: Vec<DefaultRoute>,
    /// The root that was looked below.
    pub sysroot: PathBuf,
}

/// The IPv4 addresses that a netdev has now.
pub(super) fn addresses_of(netdev: &str) -> Vec<Address> {
    kernel::addresses().of(netdev).to_vec()
}

/// Judges every RDMA port.
///
/// Reads some small files for each port and asks the kernel for the addresses; may take
/// milliseconds, tens of them with soft devices, which have 1,024 GIDs. Never fails and never
/// panics, whatever the files say: what cannot be read counts as missing. Any thread may call it.
#[must_use]
pub fn select(request: &Request) -> Selection {
    let tree = Tree::new(&request.sysroot);
    let ports = ports::read(&tree);
    let (addresses, routes) = net::read(&tree);
    let numa = request.numa.filter(|n| *n >= 0);
    let wanted = Wanted::new(&request.names, &ports);
    let mut found = Selection {
        numa,
        unknown: wanted.unknown.clone(),
        default_routes: routes.clone(),
        sysroot: request.sysroot.clone(),
        ..Selection::default()
    };
    let host = Host { tree: &tree, addresses, routes, nodes: numa::count(&tree), numa, wanted };
    for port in &ports {
        let verdict = rule::judge(&host, port, &mut found.warnings);
        found.verdicts.push(verdict);
    }
    if !found.unknown.is_empty() {
        found.warnings.insert(0, found.unknown_text());
    }
    found.merge_doubles(host.wanted.is_set());
    found.nics = found.verdicts.iter().filter_map(|v| v.chosen.clone()).collect();
    found.warn_of_subnets();
    found
}

impl Selection {
    /// Two devices on one netdev and address are one wire and one address: one rail. NICs that the
    /// user named are kept.
    fn merge_doubles(&mut self, named: bool) {
        let mut kept: Vec<(String, Nic)> = Vec::new();
        for verdict in &mut self.verdicts {
            let Some(nic) = verdict.chosen.clone() else { continue };
            let label = verdict.label();
            let same = |k: &&(String, Nic)| k.1.netdev == nic.netdev && k.1.ipv4 == nic.ipv4;
            let Some((first, _)) = kept.iter().find(same) else {
                kept.push((label, nic));
                continue;
            };
            let what = format!("same netdev and address as {first} ({}, {})", nic.netdev, nic.ipv4);
            let end = if named { "both are used, as KVRAIL_NICS says" } else { "one rail" };
            self.warnings.push(format!("{label}: {what}: {end}"));
            if !named {
                verdict.chosen = None;
                verdict.reason = what;
                // Its own warnings were about a rail that it is not.
                let gone = core::mem::take(&mut verdict.warnings);
                self.warnings.retain(|w| !gone.contains(w));
            }
        }
    }

    fn warn_of_subnets(&mut self) {
        let mut seen: Vec<(u32, u8)> = Vec::new();
        for nic in &self.nics {
            let subnet = (network(nic.ipv4, nic.prefix), nic.prefix);
            if seen.contains(&subnet) {
                continue;
            }
            seen.push(subnet);
            let here = |n: &&Nic| (network(n.ipv4, n.prefix), n.prefix) == subnet;
            let same: Vec<String> = self
                .nics
                .iter()
                .filter(here)
                .map(|n| format!("{}:{} ({})", n.device, n.port, n.ipv4))
                .collect();
            if same.len() > 1 {
                let net = Ipv4Addr::from(subnet.0);
                let list = same.join(", ");
                self.warnings.push(format!(
                    "same subnet {net}/{}: {list}; without a route of its own for each, the host \
                     may send all of them by one netdev",
                    nic.prefix
                ));
            }
        }
    }

    /// The names that fit nothing, and those that would fit something.
    fn unknown_text(&self) -> String {
        let here: Vec<String> = self.verdicts.iter().map(Verdict::label).collect();
        let here = if here.is_empty() { String::from("none") } else { here.join(", ") };
        format!("KVRAIL_NICS names {}; here are: {here}", self.unknown.join("; "))
    }

    /// Why there is no rail, for people: `no usable data-plane RoCE NIC on numa=N`, then a line for
    /// each port with the first reason against it.
    #[must_use]
    pub fn explain(&self) -> String {
        let node = match self.numa {
            Some(node) => node.to_string(),
            None => String::from("-1 (unknown: NICs of every node were looked at)"),
        };
        let mut text = format!("no usable data-plane RoCE NIC on numa={node}");
        // Writing to a string cannot fail.
        if !self.unknown.is_empty() {
            let _ = write!(text, "\n  {}", self.unknown_text());
        }
        if self.verdicts.is_empty() {
            let class = self.sysroot.join("sys/class/infiniband");
            let _ = write!(
                text,
                "\n  there is no RDMA device ({} is missing or empty); load the NIC's RDMA \
                 driver, or give the container its devices",
                class.display()
            );
        }
        for verdict in &self.verdicts {
            let reason = if verdict.chosen.is_some() { "usable" } else { &verdict.reason };
            let _ = write!(text, "\n  {}: {reason}", verdict.label());
        }
        text
    }
}

impl Verdict {
    /// `mlx5_0:1`, or the device alone when it has no port.
    #[must_use]
    pub fn label(&self) -> String {
        match self.port {
            0 => self.device.clone(),
            port => format!("{}:{port}", self.device),
        }
    }
}

fn network(ip: Ipv4Addr, prefix: u8) -> u32 {
    let mask = u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0);
    u32::from(ip) & mask
}
