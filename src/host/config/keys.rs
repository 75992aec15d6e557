//! The table of parameters. The cost or the reason stands in the help of each.

use super::value::{decimal, flag, number, pointer, ports, Unit};
use super::Config;
use crate::limits::{MAX_MESSAGE_BYTES, MAX_RAILS, MIN_MESSAGE_BYTES};
use core::net::Ipv4Addr;
use core::ops::RangeInclusive;

/// One parameter.
pub(super) struct Key {
    /// Its name; the variable is `KVRAIL_` and the name in capitals.
    pub(super) name: &'static str,
    /// One line with unit and range.
    pub(super) help: &'static str,
    slot: Slot,
}

/// Where a parameter lives and how its text is read.
enum Slot {
    /// On or off.
    Flag(fn(&mut Config) -> &mut bool),
    /// 32 bits.
    Number(fn(&mut Config) -> &mut u32, Unit, RangeInclusive<u64>),
    /// 64 bits.
    Large(fn(&mut Config) -> &mut u64, Unit, RangeInclusive<u64>),
    /// Text with a check that answers with what is allowed.
    Text(fn(&mut Config) -> &mut String, fn(&str) -> Result<(), String>),
    /// Anything else: a getter and a setter.
    Other(fn(&Config) -> String, fn(&mut Config, &str) -> Result<(), String>),
}

impl Key {
    /// `KVRAIL_MAX_PEERS` of `max_peers`.
    pub(super) fn variable(&self) -> String {
        format!("KVRAIL_{}", self.name.to_ascii_uppercase())
    }

    /// The value as text that [`Key::set`] reads back.
    pub(super) fn get(&self, config: &Config) -> String {
        // A copy, since a slot borrows mutably. No hot path comes here.
        let mut c = config.clone();
        match &self.slot {
            Slot::Flag(f) => u8::from(*f(&mut c)).to_string(),
            Slot::Number(f, ..) => f(&mut c).to_string(),
            Slot::Large(f, ..) => f(&mut c).to_string(),
            Slot::Text(f, _) => core::mem::take(f(&mut c)),
            Slot::Other(get, _) => get(&c),
        }
    }

    /// Reads `text`; an error says what is allowed, and nothing changed.
    pub(super) fn set(&self, config: &mut Config, text: &str) -> Result<(), String> {
        match &self.slot {
            Slot::Flag(f) => *f(config) = flag(text)?,
            Slot::Number(f, unit, range) => {
                let value = number(text, *unit, range)?;
                *f(config) = u32::try_from(value).map_err(|_| unit.range(range))?;
            }
            Slot::Large(f, unit, range) => *f(config) = number(text, *unit, range)?,
            Slot::Text(f, check) => {
                check(text)?;
                *f(config) = String::from(text);
            }
            Slot::Other(_, set) => set(config, text)?,
        }
        Ok(())
    }

    /// The ends of a number's range.
    #[cfg(test)]
    pub(super) fn ends(&self) -> Option<(u64, u64)> {
        match &self.slot {
            Slot::Number(_, _, range) | Slot::Large(_, _, range) => {
                Some((*range.start(), *range.end()))
            }
            _ => None,
        }
    }

    /// The range as its help must state it.
    #[cfg(test)]
    pub(super) fn stated_range(&self) -> Option<String> {
        match &self.slot {
            Slot::Number(_, unit, range) | Slot::Large(_, unit, range) => Some(unit.range(range)),
            _ => None,
        }
    }
}

/// Most tables: an index of a handle has 24 bits. The other capacities end where `Limits` says.
const TABLES: RangeInclusive<u64> = 1..=crate::handle::MAX_INDEX as u64;
/// Regions registered here, and transfers.
const MILLION: RangeInclusive<u64> = 1..=1 << 20;
/// Each peer has a window of message memory, so the largest `message_bytes` says how many there can
/// be.
const PEERS: RangeInclusive<u64> = 1..=crate::limits::MAX_PEERS as u64 - 1;
/// Ten minutes: a longer wait is a hang.
const WAIT: RangeInclusive<u64> = 1..=600_000;

const fn number_key(
    name: &'static str,
    help: &'static str,
    field: fn(&mut Config) -> &mut u32,
    unit: Unit,
    range: RangeInclusive<u64>,
) -> Key {
    Key { name, help, slot: Slot::Number(field, unit, range) }
}

/// Every parameter, in the order of the help.
pub(super) const KEYS: &[Key] = &[
    Key {
        name: "name",
        help: "agent name, 0 to 255 bytes without NUL; empty: the engine makes one up",
        slot: Slot::Text(|c| &mut c.name, name),
    },
    Key {
        name: "transport",
        help: "auto, verbs (RDMA NICs) or local (processes of one user on one host)",
        slot: Slot::Text(|c| &mut c.transport, transport),
    },
    Key {
        name: "listen_ip",
        help: "IPv4 address of the bootstrap listener, or auto (the NICs' own; local: 127.0.0.1)",
        slot: Slot::Text(|c| &mut c.listen_ip, listen_ip),
    },
    Key {
        name: "port",
        help: "port of the bootstrap listener: 0 (any), N, or LO-HI for a firewall's range",
        slot: Slot::Other(get_port, set_port),
    },
    Key {
        name: "progress_thread",
        help: "0 or 1: a thread polls; without it check, notifs and progress do",
        slot: Slot::Flag(|c| &mut c.progress_thread),
    },
    number_key(
        "rails",
        "rails of the local driver, 1..=16; each takes fixed memory",
        |c| &mut c.rails,
        Unit::Count,
        1..=MAX_RAILS as u64,
    ),
    Key {
        name: "stripe_width",
        help: "1: one rail a transfer, the others are its failover; 0: every shared rail",
        slot: Slot::Other(|c| c.stripe_width.to_string(), set_stripe_width),
    },
    number_key(
        "inline_bytes",
        "a transfer up to this is copied inside post, 0..=4M bytes; a post takes longer with more",
        |c| &mut c.inline_bytes,
        Unit::Bytes,
        0..=4 << 20,
    ),
    number_key(
        "slice_bytes",
        "longest work request, 4K..=1G bytes; a cancel waits for one",
        |c| &mut c.slice_bytes,
        Unit::Bytes,
        4096..=1 << 30,
    ),
    number_key(
        "message_bytes",
        "notifications on their way, 2M..=1G bytes out and as many in; a peer needs 99132 of them",
        |c| &mut c.message_bytes,
        Unit::Bytes,
        MIN_MESSAGE_BYTES as u64..=MAX_MESSAGE_BYTES as u64,
    ),
    Key {
        name: "max_bytes",
        help: "most bytes of the pool of tables and ops, 1M..=16384G bytes; grows as needed",
        slot: Slot::Large(|c| &mut c.max_bytes, Unit::Bytes, 1 << 20..=16 << 40),
    },
    number_key(
        "max_peers",
        "most peers, 1..=10824; each takes fixed memory and 99132 of message_bytes",
        |c| &mut c.max_peers,
        Unit::Count,
        PEERS,
    ),
    number_key(
        "max_regions",
        "most regions registered here, 1..=1048576; each takes fixed memory",
        |c| &mut c.max_regions,
        Unit::Count,
        MILLION,
    ),
    number_key(
        "max_remote_regions",
        "most regions imported from peers, 1..=4194304; each takes fixed memory",
        |c| &mut c.max_remote_regions,
        Unit::Count,
        1..=1 << 22,
    ),
    number_key(
        "max_tables",
        "most descriptor tables, 1..=16777215; their memory comes from the pool (max_bytes)",
        |c| &mut c.max_tables,
        Unit::Count,
        TABLES,
    ),
    number_key(
        "max_transfers",
        "most prepared transfers, 1..=1048576; each takes fixed memory",
        |c| &mut c.max_transfers,
        Unit::Count,
        MILLION,
    ),
    number_key(
        "spin_us",
        "the progress thread spins this long before it sleeps, 0..=1000000 us; costs a core",
        |c| &mut c.spin_us,
        Unit::Us,
        0..=1_000_000,
    ),
    number_key(
        "connect_timeout_ms",
        "a dial ends within this, 1..=600000 ms",
        |c| &mut c.connect_timeout_ms,
        Unit::Ms,
        WAIT,
    ),
    number_key(
        "deregister_timeout_ms",
        "a deregistration waits this long for peers, 1..=600000 ms",
        |c| &mut c.deregister_timeout_ms,
        Unit::Ms,
        WAIT,
    ),
    number_key(
        "release_timeout_ms",
        "a release waits this long for a transfer in flight, 1..=600000 ms",
        |c| &mut c.release_timeout_ms,
        Unit::Ms,
        WAIT,
    ),
    number_key(
        "stall_ms",
        "a transfer without progress for this long ends in error, 1..=3600000 ms",
        |c| &mut c.stall_ms,
        Unit::Ms,
        1..=3_600_000,
    ),
    number_key(
        "device_id",
        "card whose NUMA node the NICs must share, 0..=65535; unused by local",
        |c| &mut c.device_id,
        Unit::Count,
        0..=65_535,
    ),
    Key {
        name: "numa_node",
        help: "NUMA node whose NICs are used, 0 to 65535, -1: the card's, or any; unused by local",
        slot: Slot::Other(|c| c.numa_node.to_string(), set_numa_node),
    },
    Key {
        name: "nics",
        help: "NIC names with commas, at most 1024 bytes; empty: by the rule; unused by local",
        slot: Slot::Text(|c| &mut c.nics, nics),
    },
    Key {
        name: "rbln_ctx_ptr",
        help: "context pointer of the device runtime, decimal or 0x..., 0: none; unused by local",
        slot: Slot::Other(
            |c| c.rbln_ctx_ptr.to_string(),
            |c, t| {
                c.rbln_ctx_ptr = pointer(t)?;
                Ok(())
            },
        ),
    },
    Key {
        name: "devmem",
        help: "VRAM of NIXL about which nothing is said: auto, none (peer-memory module), cuda",
        slot: Slot::Text(|c| &mut c.devmem, devmem),
    },
    number_key(
        "sq_depth",
        "work requests in flight on one rail, 8..=16384; capped by the NIC; unused by local",
        |c| &mut c.sq_depth,
        Unit::Count,
        8..=16_384,
    ),
    number_key(
        "sges",
        "local pieces in one work request, 1..=64; capped by the NIC; unused by local",
        |c| &mut c.sges,
        Unit::Count,
        1..=64,
    ),
    number_key(
        "ack_timeout",
        "the NIC waits 4.096 us * 2^N for an acknowledgement, N 8..=22; unused by local",
        |c| &mut c.ack_timeout,
        Unit::Count,
        8..=22,
    ),
    number_key(
        "retry",
        "the NIC repeats an unacknowledged packet so often, 0..=6; unused by local",
        |c| &mut c.retry,
        Unit::Count,
        0..=6,
    ),
    number_key(
        "rnr_retry",
        "the NIC repeats a message that met no receive so often, 0..=6; unused by local",
        |c| &mut c.rnr_retry,
        Unit::Count,
        0..=6,
    ),
    number_key(
        "traffic_class",
        "traffic class of RDMA packets (DSCP * 4 + ECN), 0..=255; unused by local",
        |c| &mut c.traffic_class,
        Unit::Count,
        0..=255,
    ),
    number_key(
        "service_level",
        "service level of RDMA packets, 0..=15; unused by local",
        |c| &mut c.service_level,
        Unit::Count,
        0..=15,
    ),
    number_key(
        "rail_timeout_ms",
        "a rail is broken by this long without a completion, 10..=600000 ms; unused by local",
        |c| &mut c.rail_timeout_ms,
        Unit::Ms,
        10..=600_000,
    ),
    number_key(
        "keepalive_ms",
        "an idle rail proves itself this often, 0..=600000 ms, 0: never; unused by local",
        |c| &mut c.keepalive_ms,
        Unit::Ms,
        0..=600_000,
    ),
    number_key(
        "link_debounce_ms",
        "all links down, or up again, counts after this, 0..=600000 ms; unused by local",
        |c| &mut c.link_debounce_ms,
        Unit::Ms,
        0..=600_000,
    ),
    number_key(
        "peer_timeout_ms",
        "a peer without any rail for this long is dead, 1..=600000 ms; unused by local",
        |c| &mut c.peer_timeout_ms,
        Unit::Ms,
        WAIT,
    ),
];

fn name(text: &str) -> Result<(), String> {
    if text.len() <= 255 && !text.contains('\0') {
        return Ok(());
    }
    Err(format!("0 to 255 bytes without NUL (this has {})", text.len()))
}

fn transport(text: &str) -> Result<(), String> {
    match text {
        "auto" | "verbs" | "local" => Ok(()),
        _ => Err(String::from("auto, verbs or local")),
    }
}

fn devmem(text: &str) -> Result<(), String> {
    match text {
        "auto" | "none" | "cuda" => Ok(()),
        _ => Err(String::from("auto, none or cuda")),
    }
}

fn listen_ip(text: &str) -> Result<(), String> {
    if text == "auto" || text.parse::<Ipv4Addr>().is_ok() {
        return Ok(());
    }
    Err(String::from("auto or an IPv4 address such as 127.0.0.1"))
}

fn get_port(c: &Config) -> String {
    if c.port_min == c.port_max {
        return c.port_min.to_string();
    }
    format!("{}-{}", c.port_min, c.port_max)
}

fn set_port(c: &mut Config, text: &str) -> Result<(), String> {
    (c.port_min, c.port_max) = ports(text)?;
    Ok(())
}

fn set_stripe_width(c: &mut Config, text: &str) -> Result<(), String> {
    c.stripe_width = match decimal(text) {
        Some(0) => 0,
        Some(1) => 1,
        _ => return Err(String::from("1 (one rail a transfer) or 0 (every shared rail)")),
    };
    Ok(())
}

fn set_numa_node(c: &mut Config, text: &str) -> Result<(), String> {
    let node = if text.trim() == "-1" {
        Some(-1)
    } else {
        decimal(text).filter(|v| *v <= 65_535).and_then(|v| i32::try_from(v).ok())
    };
    c.numa_node = node.ok_or_else(|| String::from("0 to 65535, or -1 for any"))?;
    Ok(())
}

fn nics(text: &str) -> Result<(), String> {
    let named = |n: &str| {
        let ok = |b: u8| b.is_ascii_alphanumeric() || b"_-.:/".contains(&b);
        !n.is_empty() && n.bytes().all(ok)
    };
    if text.len() <= 1024 && (text.is_empty() || text.split(',').all(named)) {
        return Ok(());
    }
    Err(String::from("NIC names with commas between them, at most 1024 bytes, or empty"))
}
