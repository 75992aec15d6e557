//! The rule: which ports become rails, and the first reason why another does not.
//! `docs/nic-selection.md` has it in words, with an example of every reason.

use core::net::Ipv4Addr;

use super::names::Wanted;
use super::net::{Addresses, DefaultRoute};
use super::numa;
use super::ports::{Gid, Port};
use super::tree::Tree;
use super::{Nic, Verdict};

/// How far netdevs are followed to those that they stand on.
const MAX_LOWER: usize = 8;

/// What a judgement rests on, beside the port itself.
#[derive(Debug)]
pub(super) struct Host<'t> {
    pub(super) tree: &'t Tree,
    pub(super) addresses: Addresses,
    pub(super) routes: Vec<DefaultRoute>,
    /// NUMA nodes of this host.
    pub(super) nodes: usize,
    /// The node that the NIC must sit on; `None`: any.
    pub(super) numa: Option<i32>,
    pub(super) wanted: Wanted,
}

/// A RoCE v2 GID whose netdev has its IPv4 address.
#[derive(Clone, Debug)]
struct Candidate<'p> {
    gid: &'p Gid,
    netdev: &'p str,
    ip: Ipv4Addr,
    prefix: u8,
}

/// Judges one port by everything but what other ports are.
pub(super) fn judge(host: &Host<'_>, port: &Port, warnings: &mut Vec<String>) -> Verdict {
    let mut verdict = describe(host, port);
    match choose(host, port, &mut verdict.warnings) {
        Ok(candidate) => verdict.chosen = Some(nic(host, port, &candidate)),
        Err(reason) => {
            verdict.reason = reason;
            verdict.warnings.clear();
        }
    }
    if let Some(nic) = &verdict.chosen {
        verdict.netdev.clone_from(&nic.netdev);
        (verdict.ipv4, verdict.gid_index) = (Some(nic.ipv4), Some(nic.gid_index));
        (verdict.speed_mbps, verdict.mtu) = (nic.speed_mbps, nic.mtu);
    }
    warnings.extend(verdict.warnings.iter().cloned());
    verdict
}

/// What is shown of a port, also of one that is refused.
fn describe(host: &Host<'_>, port: &Port) -> Verdict {
    let candidates = candidates(host, port);
    let first = candidates.first();
    let netdevs = port.netdevs();
    let with_address = netdevs.iter().find(|n| !host.addresses.of(n).is_empty());
    let netdev = first.map(|c| c.netdev).or(with_address.or(netdevs.first()).copied());
    let netdev = netdev.unwrap_or("").to_string();
    let address = host.addresses.of(&netdev).first().map(|a| a.0);
    Verdict {
        device: port.device.clone(),
        port: port.port,
        chosen: None,
        reason: String::new(),
        ipv4: first.map(|c| c.ip).or(address),
        gid_index: first.map(|c| c.gid.index),
        numa: port.numa.number(),
        speed_mbps: speed(host, port, &netdev),
        mtu: mtu(host, &netdev),
        state: port.state.clone(),
        netdev,
        warnings: Vec::new(),
    }
}

/// The GID that the port's rail uses, or the first reason against the port.
fn choose<'p>(
    host: &Host<'_>,
    port: &'p Port,
    warnings: &mut Vec<String>,
) -> Result<Candidate<'p>, String> {
    let named = host.wanted.is_set();
    if named && !host.wanted.has(port) {
        return Err(String::from("not named in KVRAIL_NICS"));
    }
    is_roce(port, named)?;
    if !port.is_active() {
        return Err(not_active(port));
    }
    let mut left = candidates(host, port);
    if left.is_empty() {
        return Err(no_candidate(host, port));
    }
    let mut override_or = |reason: String| -> Result<(), String> {
        if !named {
            return Err(reason);
        }
        let label = port.label();
        warnings.push(format!("{label} is used because KVRAIL_NICS names it, although: {reason}"));
        Ok(())
    };
    if let Some(reason) = keep(&mut left, |c| down(host, c.netdev)) {
        override_or(reason)?;
    }
    if let Some(reason) = wrong_node(host, port) {
        override_or(reason)?;
    }
    if let Some(reason) = keep(&mut left, |c| default_route(host, c.netdev)) {
        override_or(reason)?;
    }
    // A zeroconf address reaches nobody behind a router.
    let _ = keep(&mut left, |c| c.ip.is_link_local().then(String::new));
    let Some(first) = left.first().cloned() else {
        return Err(no_candidate(host, port));
    };
    advise(host, port, &left, &first, warnings);
    Ok(first)
}

/// Keeps what has no reason against it. When that is nothing, all is kept, and the first's reason
/// is the answer.
fn keep<'p>(
    left: &mut Vec<Candidate<'p>>,
    against: impl Fn(&Candidate<'p>) -> Option<String>,
) -> Option<String> {
    let mut first = None;
    let mut good = Vec::new();
    for candidate in left.iter() {
        match against(candidate) {
            None => good.push(candidate.clone()),
            Some(reason) => first = first.or(Some(reason)),
        }
    }
    if good.is_empty() {
        return first;
    }
    *left = good;
    None
}

fn is_roce(port: &Port, named: bool) -> Result<(), String> {
    if port.port == 0 {
        return Err(String::from("no port: the device has no folder `ports` with a port in it"));
    }
    let kind = port.node_type.split(':').next().unwrap_or("").trim();
    let node = if port.node_type.is_empty() { "unknown" } else { &port.node_type };
    if port.link_layer != "Ethernet" {
        let layer = if port.link_layer.is_empty() { "unknown" } else { &port.link_layer };
        return Err(format!("link layer {layer} (node type {node}): RoCE needs Ethernet"));
    }
    if !matches!(kind, "" | "1") && !named {
        return Err(format!("node type {node}: only 1: CA is a RoCE NIC (4: RNIC is iWARP)"));
    }
    Ok(())
}

fn not_active(port: &Port) -> String {
    let state = if port.state.is_empty() { "unknown" } else { &port.state };
    let phys = match port.phys_state.as_str() {
        "" => String::new(),
        phys => format!(", phys_state {phys}"),
    };
    format!("port not ACTIVE: state {state}{phys}; it must be 4: ACTIVE")
}

fn candidates<'p>(host: &Host<'_>, port: &'p Port) -> Vec<Candidate<'p>> {
    let candidate = |gid: &'p Gid| {
        let (ip, netdev) = (gid.ipv4()?, gid.netdev.as_deref()?);
        let (_, prefix) = host.addresses.of(netdev).iter().find(|a| a.0 == ip)?;
        gid.v2.then_some(Candidate { gid, netdev, ip, prefix: *prefix })
    };
    port.gids.iter().filter_map(candidate).collect()
}

/// Why no GID of an ACTIVE port will do.
fn no_candidate(host: &Host<'_>, port: &Port) -> String {
    if port.gids.is_empty() {
        let what = "its GID table is empty or cannot be read; is its netdev up, with an address?";
        return format!("no GID: {what}");
    }
    let netdevs = port.netdevs();
    if netdevs.is_empty() {
        let count = port.gids.len();
        return format!("no netdev: none of its {count} GIDs belongs to a netdev that is here");
    }
    let list = netdevs.join(", ");
    let addresses: Vec<(&str, Ipv4Addr)> =
        netdevs.iter().flat_map(|n| host.addresses.of(n).iter().map(|a| (*n, a.0))).collect();
    let Some((netdev, ip)) = addresses.first() else {
        // Down is said first only here: an address that is missing is the user's next step too.
        let down = netdevs.iter().filter_map(|n| down(host, n)).next();
        let down = down.map(|d| format!(" ({d})")).unwrap_or_default();
        return format!("no IPv4 address on {list}{down}: give it one (ip addr add ...)");
    };
    let v1 = port.gids.iter().find(|g| g.ipv4() == Some(*ip) && !g.v2);
    let only = match v1 {
        Some(gid) => format!("only GID {} of another type than RoCE v2 has it", gid.index),
        None => String::from("no GID has that address and that netdev"),
    };
    format!("no RoCE v2 GID for {ip} on {netdev}: {only}")
}

/// Why a netdev is not up.
fn down(host: &Host<'_>, netdev: &str) -> Option<String> {
    let dir = host.tree.dir("sys/class/net")?.dir(netdev)?;
    let flags = dir.read("flags");
    let flags = flags.and_then(|f| u32::from_str_radix(f.trim_start_matches("0x"), 16).ok());
    let (state, carrier) = (dir.read("operstate"), dir.read("carrier"));
    let state = state.as_deref().unwrap_or("");
    // "unknown" is what drivers without link detection say.
    let down = !matches!(state, "" | "up" | "unknown")
        || carrier.as_deref() == Some("0")
        || flags.is_some_and(|f| f & 1 == 0);
    if !down {
        return None;
    }
    let state = if state.is_empty() { "unknown" } else { state };
    let carrier = carrier.as_deref().unwrap_or("unreadable");
    Some(format!("netdev down: {netdev} has operstate {state}, carrier {carrier}"))
}

fn wrong_node(host: &Host<'_>, port: &Port) -> Option<String> {
    let wanted = host.numa?;
    match port.numa {
        numa::Node::Known(node) if node == wanted => None,
        numa::Node::Known(node) => Some(format!("numa {node}: it must sit on numa {wanted}")),
        _ if host.nodes <= 1 => None,
        numa::Node::NoParent => Some(String::from("numa unknown (no PCI parent)")),
        numa::Node::Unknown => Some(String::from("numa unknown (numa_node is -1)")),
    }
}

/// The netdevs of the default route of the lowest metric. Several of the same metric all count.
fn holders<'h>(host: &'h Host<'_>) -> impl Iterator<Item = &'h DefaultRoute> {
    let lowest = host.routes.iter().map(|r| r.metric).min();
    host.routes.iter().filter(move |r| Some(r.metric) == lowest)
}

fn default_route(host: &Host<'_>, netdev: &str) -> Option<String> {
    let route = holders(host).find(|r| r.netdev == netdev)?;
    let metric = route.metric;
    Some(format!("default route: {netdev} holds the host's default route (metric {metric})"))
}

/// What is allowed, and still worth a word.
fn advise(
    host: &Host<'_>,
    port: &Port,
    left: &[Candidate<'_>],
    first: &Candidate<'_>,
    warnings: &mut Vec<String>,
) {
    let (label, netdev) = (port.label(), first.netdev);
    let holder = holders(host).find(|r| r.netdev != netdev && shares_wire(host, netdev, &r.netdev));
    if let Some(route) = holder {
        let above = &route.netdev;
        warnings.push(format!(
            "{label}: {netdev} shares its wire with {above}, which holds the default route"
        ));
    }
    let lowest = holders(host).any(|r| r.netdev == netdev);
    if let Some(route) = host.routes.iter().find(|r| r.netdev == netdev && !lowest) {
        let metric = route.metric;
        warnings.push(format!(
            "{label}: {netdev} has a default route too, of metric {metric}; only the lowest \
             metric keeps a NIC out"
        ));
    }
    if let Some(key) = port.limited_pkey {
        warnings.push(format!(
            "{label}: partition key {key:#06x} is a limited member; two limited members cannot talk"
        ));
    }
    let others: Vec<String> = left
        .iter()
        .filter(|c| (c.netdev, c.ip) != (netdev, first.ip))
        .map(|c| format!("{} on {} (GID {})", c.ip, c.netdev, c.gid.index))
        .collect();
    if !others.is_empty() {
        let (ip, index, list) = (first.ip, first.gid.index, others.join(", "));
        warnings.push(format!("{label}: uses {ip} on {netdev} (GID {index}), not {list}"));
    }
}

/// True when one netdev stands on the other: a VLAN, a macvlan, a bridge or a bond and its parts.
fn shares_wire(host: &Host<'_>, a: &str, b: &str) -> bool {
    let dotted = |child: &str, parent: &str| {
        child.strip_prefix(parent).is_some_and(|rest| rest.starts_with('.'))
    };
    dotted(a, b) || dotted(b, a) || stands_on(host, a, b) || stands_on(host, b, a)
}

fn stands_on(host: &Host<'_>, netdev: &str, lower: &str) -> bool {
    let Some(class) = host.tree.dir("sys/class/net") else {
        return false;
    };
    let (mut level, mut seen) = (vec![netdev.to_string()], vec![netdev.to_string()]);
    for _ in 0..MAX_LOWER {
        let mut next = Vec::new();
        for name in &level {
            let entries = class.dir(name).map(|d| d.names()).unwrap_or_default();
            for below in entries.iter().filter_map(|e| e.strip_prefix("lower_")) {
                if below == lower {
                    return true;
                }
                if !seen.iter().any(|s| s == below) && seen.len() < 256 {
                    seen.push(below.to_string());
                    next.push(below.to_string());
                }
            }
            let vlan = host.tree.top().table(&format!("proc/net/vlan/{name}")).unwrap_or_default();
            let parent = vlan.lines().find_map(|l| l.trim().strip_prefix("Device:"));
            if parent.is_some_and(|p| p.trim() == lower) {
                return true;
            }
        }
        level = next;
    }
    false
}

fn net_number(host: &Host<'_>, netdev: &str, file: &str) -> u32 {
    let dir = host.tree.dir("sys/class/net").and_then(|c| c.dir(netdev));
    // A speed of -1 is "unknown".
    dir.and_then(|d| d.number::<i64>(file)).and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
}

fn mtu(host: &Host<'_>, netdev: &str) -> u32 {
    if netdev.is_empty() {
        return 0;
    }
    net_number(host, netdev, "mtu")
}

fn speed(host: &Host<'_>, port: &Port, netdev: &str) -> u32 {
    let netdev = if netdev.is_empty() { 0 } else { net_number(host, netdev, "speed") };
    // u32::MAX is how some kernels print -1.
    if netdev == 0 || netdev == u32::MAX {
        port.rate_mbps
    } else {
        netdev
    }
}

fn nic(host: &Host<'_>, port: &Port, chosen: &Candidate<'_>) -> Nic {
    Nic {
        device: port.device.clone(),
        port: port.port,
        netdev: chosen.netdev.to_string(),
        ifindex: net_number(host, chosen.netdev, "ifindex"),
        ipv4: chosen.ip,
        prefix: chosen.prefix,
        gid_index: chosen.gid.index,
        gid: chosen.gid.bytes,
        numa: port.numa.number(),
        speed_mbps: speed(host, port, chosen.netdev),
        mtu: mtu(host, chosen.netdev),
    }
}
