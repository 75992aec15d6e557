//! What the IPv4 stack knows: the addresses of each netdev and the default routes. For this host it
//! comes from the kernel, below another root from text files only (`docs/nic-selection.md`).

use core::net::Ipv4Addr;
use std::collections::BTreeMap;

use super::tree::Tree;

/// An IPv4 address and its prefix length in bits.
pub type Address = (Ipv4Addr, u8);

/// The prefix length of a text file's address that has none.
pub const DEFAULT_PREFIX: u8 = 24;

/// IPv4 addresses of each netdev, in the order in which they were found.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Addresses(BTreeMap<String, Vec<Address>>);

/// A default route of the IPv4 main table.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DefaultRoute {
    /// The netdev that it leaves by.
    pub netdev: String,
    /// Its metric; the kernel takes the lowest.
    pub metric: u32,
}

impl Addresses {
    /// The addresses of one netdev.
    #[must_use]
    pub fn of(&self, netdev: &str) -> &[Address] {
        self.0.get(netdev).map_or(&[], Vec::as_slice)
    }

    pub(super) fn insert(&mut self, netdev: &str, address: Address) {
        let list = self.0.entry(netdev.to_string()).or_default();
        if !list.iter().any(|a| a.0 == address.0) {
            list.push(address);
        }
    }

    fn merge(&mut self, other: Addresses) {
        for (netdev, list) in other.0 {
            for address in list {
                self.insert(&netdev, address);
            }
        }
    }

    /// Reads the text forms that `docs/nic-selection.md` lists; lines that say nothing are skipped.
    #[must_use]
    pub fn parse(text: &str) -> Addresses {
        let mut found = Addresses::default();
        // In `ip addr` the netdev stands on a line of its own, above its addresses.
        let mut above = String::new();
        for line in text.lines() {
            let line = line.split('#').next().unwrap_or("");
            let words = words(line);
            let Some(first) = words.first() else { continue };
            let numbered = first.strip_suffix(':').is_some_and(|n| n.parse::<u32>().is_ok());
            let words = if numbered { words.get(1..).unwrap_or(&[]) } else { &words };
            if let Some(at) = words.iter().position(|w| *w == "inet") {
                let netdev = if at == 0 { above.as_str() } else { netdev_name(words[0]) };
                if let Some(address) = words.get(at + 1).and_then(|w| address(w)) {
                    found.add_named(netdev, address);
                }
            } else if numbered {
                above = words.first().map_or_else(String::new, |w| netdev_name(w).to_string());
            } else {
                let is_name = |w: &&&str| address(w).is_none() && !KEYS.contains(&netdev_name(w));
                let netdev = words.iter().find(is_name);
                for address in words.iter().filter_map(|w| address(w)) {
                    found.add_named(netdev.map_or("", |w| netdev_name(w)), address);
                }
            }
        }
        found
    }

    fn add_named(&mut self, netdev: &str, address: Address) {
        if is_netdev(netdev) {
            self.insert(netdev, address);
        }
    }
}

/// Words that say what the next one is; no netdev is called so.
const KEYS: &[&str] = &[
    "dev",
    "netdev",
    "iface",
    "interface",
    "via",
    "gateway",
    "gw",
    "metric",
    "proto",
    "scope",
    "src",
    "nexthop",
    "onlink",
    "inet",
    "ipv4",
    "ip",
    "addr",
    "address",
    "addresses",
    "prefix",
];

/// Words of a line of a text file: `ens1: 10.1.0.1/24, 10.1.0.2`, `ens1=10.1.0.1` and JSON's
/// punctuation read the same. A `:` stays at the end of its word, where `ip` puts it.
fn words<'w>(line: &'w str) -> Vec<&'w str> {
    let between = |c: char| c.is_whitespace() || ",;=\"'[]{}()\\".contains(c);
    // JSON's colon stands alone or before a number.
    let bare = |w: &'w str| w.strip_prefix(':').filter(|r| !r.starts_with(':')).unwrap_or(w);
    let words = line.split(between).map(bare).filter(|w| !w.is_empty());
    words.flat_map(split_colon).collect()
}

/// `ens1:10.1.0.1/24` is two words.
fn split_colon(word: &str) -> impl Iterator<Item = &str> {
    let parts = word.split_once(':').filter(|(a, b)| !a.is_empty() && address(b).is_some());
    let (first, second) = parts.map_or((word, None), |(a, b)| (a, Some(b)));
    core::iter::once(first).chain(second)
}

/// `bond0.100@bond0:` is the netdev `bond0.100`.
fn netdev_name(word: &str) -> &str {
    let word = word.trim_end_matches(':');
    word.split('@').next().unwrap_or(word)
}

/// A name that a netdev can have; `-` is how tables write "none".
fn is_netdev(name: &str) -> bool {
    let bad = |c: char| c.is_whitespace() || c.is_control() || c == '/' || c == ':';
    (1..=64).contains(&name.len()) && !name.contains(bad) && !matches!(name, "-" | "*" | "none")
}

fn address(word: &str) -> Option<Address> {
    let (ip, prefix) = match word.split_once('/') {
        Some((ip, prefix)) => (ip, prefix.parse().ok().filter(|p| *p <= 32)?),
        None => (word, DEFAULT_PREFIX),
    };
    Some((ip.parse().ok()?, prefix))
}

/// Reads default routes from any of the text forms that `docs/nic-selection.md` lists; routes to
/// anywhere else and lines that say nothing are skipped.
#[must_use]
pub fn parse_routes(text: &str) -> Vec<DefaultRoute> {
    let mut found: Vec<DefaultRoute> = Vec::new();
    // `ip route` writes the hops of a multipath route below it, each on a line of its own.
    let mut above: Option<u32> = None;
    for line in text.lines().flat_map(|l| l.split('#').next().unwrap_or("").split('\\')) {
        let words = words(line);
        let Some(first) = words.first().map(|w| w.trim_end_matches(':')) else { continue };
        let route = if first == "nexthop" {
            above.zip(after(&words, "dev")).map(|(metric, netdev)| (netdev, metric))
        } else {
            above = None;
            let other = kernel_table(&words).or_else(|| route_n(&words));
            other.unwrap_or_else(|| {
                let route = ip_route(&words, first);
                if route.is_none() && is_default(first) && !words.contains(&"nexthop") {
                    above = Some(metric_of(&words));
                }
                route
            })
        };
        let Some((netdev, metric)) = route else { continue };
        let route = DefaultRoute { netdev: netdev_name(netdev).to_string(), metric };
        if is_netdev(&route.netdev) && !found.contains(&route) {
            found.push(route);
        }
    }
    found
}

/// A line's netdev and metric, when it is a default route.
type Line<'w> = Option<(&'w str, u32)>;

/// `/proc/net/route`: addresses and flags in hex. `None`: not that form.
fn kernel_table<'w>(words: &[&'w str]) -> Option<Line<'w>> {
    const UP: u32 = 0x1;
    const REJECT: u32 = 0x200;
    let hex = |at: usize| u32::from_str_radix(words.get(at)?, 16).ok();
    if words.len() < 8 || words[1].len() != 8 || words[7].len() != 8 {
        return if words.len() > 1 && words[1] == "Destination" { Some(None) } else { None };
    }
    let (to, flags, mask) = (hex(1)?, hex(3)?, hex(7)?);
    let usable = to == 0 && mask == 0 && flags & UP != 0 && flags & REJECT == 0;
    Some(usable.then(|| (words[0], words[6].parse().unwrap_or(0))))
}

/// `route -n`: destination, gateway, mask, flags, metric, ref, use, netdev. `None`: not that form.
fn route_n<'w>(words: &[&'w str]) -> Option<Line<'w>> {
    let ip = |at: usize| words.get(at)?.parse::<Ipv4Addr>().ok();
    let (to, _, mask) = (ip(0)?, ip(1)?, ip(2)?);
    let usable = to.is_unspecified() && mask.is_unspecified();
    let line = words.get(4).zip(words.get(7)).filter(|_| usable);
    Some(line.map(|(metric, netdev)| (*netdev, metric.parse().unwrap_or(0))))
}

fn is_default(word: &str) -> bool {
    matches!(word, "default" | "0.0.0.0/0" | "0/0")
}

fn after<'w>(words: &[&'w str], key: &str) -> Option<&'w str> {
    let at = words.iter().position(|w| *w == key)?;
    words.get(at + 1).copied()
}

fn metric_of(words: &[&str]) -> u32 {
    after(words, "metric").and_then(|m| m.parse().ok()).unwrap_or(0)
}

/// `default via X dev Y metric N`, `Y`, `Y metric N`, `Y N`, with or without punctuation.
fn ip_route<'w>(words: &[&'w str], first: &str) -> Line<'w> {
    let other_table = after(words, "table").is_some_and(|t| !matches!(t, "main" | "254"));
    let to_network = !is_default(first) && (address(first).is_some() || first.contains('/'));
    // A gateway with a colon is IPv6, unless the route says that it crosses the families.
    let via = after(words, "via").is_some_and(|w| w.contains(':'));
    let kinds = ["unreachable", "blackhole", "prohibit", "throw", "local", "broadcast"];
    if other_table || to_network || via || kinds.contains(&first) {
        return None;
    }
    if let Some(netdev) = after(words, "dev") {
        return (is_default(first) || words.iter().any(|w| is_default(w)) || first == "dev")
            .then(|| (netdev, metric_of(words)));
    }
    let plain = |w: &&&str| {
        let w = w.trim_end_matches(':');
        !is_default(w) && !KEYS.contains(&w) && address(w).is_none() && w.parse::<u32>().is_err()
    };
    if words.contains(&"proto") || words.contains(&"scope") {
        return None;
    }
    let netdev = words.iter().find(plain)?;
    let number = words.iter().skip(1).find_map(|w| w.parse().ok());
    Some((netdev, after(words, "metric").map_or(number.unwrap_or(0), |_| metric_of(words))))
}

/// The addresses and default routes of `tree`.
pub(super) fn read(tree: &Tree) -> (Addresses, Vec<DefaultRoute>) {
    let top = tree.top();
    let mut routes = parse_routes(&top.table("proc/net/route").unwrap_or_default());
    if tree.is_host() {
        return (super::kernel::addresses(), routes);
    }
    let text = top.table("proc/net/kvrail_ipv4").unwrap_or_default();
    let mut addresses = Addresses::parse(&text);
    for name in top.names() {
        let stem = name.to_lowercase();
        let stem = stem.split('.').next().unwrap_or("");
        if stem.contains("route") {
            for route in parse_routes(&top.table(&name).unwrap_or_default()) {
                if !routes.contains(&route) {
                    routes.push(route);
                }
            }
        } else if stem.contains("addr") || stem.contains("ipv4") {
            addresses.merge(Addresses::parse(&top.table(&name).unwrap_or_default()));
        }
    }
    (addresses, routes)
}
