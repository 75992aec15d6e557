//! The parameters: one table of keys, read by `set`, by the environment (`KVRAIL_<KEY>`), by
//! `check` and by the help.
//!
//! To add one: a field in [`Config`], its default, a row in `KEYS`.

mod keys;
mod value;

use super::error::{shown, Error, Result};
use crate::limits::Limits;
use crate::status::Status;
use keys::{Key, KEYS};
use std::ffi::OsString;

/// Parameters of an engine. The defaults serve a pair of agents on one host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// A thread that polls; without one, check, notifs and progress poll, and calls that wait.
    pub progress_thread: bool,
    /// Most peers.
    pub max_peers: u32,
    /// Most regions registered here.
    pub max_regions: u32,
    /// Most regions imported from peers.
    pub max_remote_regions: u32,
    /// Most descriptor tables.
    pub max_tables: u32,
    /// Most prepared transfers.
    pub max_transfers: u32,
    /// Rails of the `local` driver.
    pub rails: u32,
    /// 1: one rail a transfer; 0: every shared rail.
    pub stripe_width: u32,
    /// Up to this many bytes in all are copied inside post.
    pub inline_bytes: u32,
    /// Longest work request.
    pub slice_bytes: u32,
    /// Notification blocks of each direction, in bytes.
    pub message_bytes: u32,
    /// How long the progress thread spins before it sleeps.
    pub spin_us: u32,
    /// A dial ends within this.
    pub connect_timeout_ms: u32,
    /// How long a deregistration waits for peers to drain.
    pub deregister_timeout_ms: u32,
    /// How long a release waits for a transfer in flight.
    pub release_timeout_ms: u32,
    /// A transfer without progress for this long ends in error.
    pub stall_ms: u32,
    /// First port of the bootstrap listener; 0 with `port_max` 0: any.
    pub port_min: u16,
    /// Last port of the bootstrap listener.
    pub port_max: u16,
    /// Most bytes of the pool of tables and ops.
    pub max_bytes: u64,
    /// Agent name, at most 255 bytes; empty: made up by the engine.
    pub name: String,
    /// IPv4 address of the bootstrap listener, or `auto`.
    pub listen_ip: String,
    /// `auto`, `verbs` or `local`.
    pub transport: String,
    /// Device whose memory is moved; unused by `local`.
    pub device_id: u32,
    /// NUMA node whose NICs are used, -1 for any; unused by `local`.
    pub numa_node: i32,
    /// NIC names that override the selection; unused by `local`.
    pub nics: String,
    /// Device runtime context; unused by `local`.
    pub rbln_ctx_ptr: u64,
    /// What the NIXL plugin takes VRAM for about which nothing is said: auto, none or cuda.
    pub devmem: String,
    /// Work requests in flight on one RDMA rail.
    pub sq_depth: u32,
    /// Most pieces of local memory that one work request of an RDMA rail gathers or scatters.
    pub sges: u32,
    /// The NIC's acknowledgement timeout: 4.096 us times 2 to the power of this.
    pub ack_timeout: u32,
    /// How often the NIC repeats what was not acknowledged.
    pub retry: u32,
    /// How often the NIC repeats a message for which the peer had no receive.
    pub rnr_retry: u32,
    /// Traffic class of RDMA packets (DSCP and ECN).
    pub traffic_class: u32,
    /// Service level of RDMA packets.
    pub service_level: u32,
    /// A rail with work in flight and no completion for this long, or four times what the work
    /// needs, is broken.
    pub rail_timeout_ms: u32,
    /// A rail with nothing in flight proves itself this often; 0: never.
    pub keepalive_ms: u32,
    /// How long all links must be down, or one up again, until it counts.
    pub link_debounce_ms: u32,
    /// A peer without any rail for this long is dead.
    pub peer_timeout_ms: u32,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            progress_thread: true,
            max_peers: 256,
            max_regions: 4096,
            max_remote_regions: 65_536,
            max_tables: 1024,
            max_transfers: 4096,
            rails: 1,
            stripe_width: 1,
            inline_bytes: 64 << 10,
            slice_bytes: 4 << 20,
            message_bytes: 32 << 20,
            spin_us: 50,
            connect_timeout_ms: 3000,
            deregister_timeout_ms: 2000,
            release_timeout_ms: 1000,
            stall_ms: 30_000,
            port_min: 0,
            port_max: 0,
            max_bytes: 4 << 30,
            name: String::new(),
            listen_ip: String::from("auto"),
            transport: String::from("auto"),
            device_id: 0,
            numa_node: -1,
            nics: String::new(),
            rbln_ctx_ptr: 0,
            devmem: String::from("auto"),
            sq_depth: 256,
            sges: 16,
            ack_timeout: 14,
            retry: 6,
            rnr_retry: 6,
            traffic_class: 0,
            service_level: 0,
            rail_timeout_ms: 500,
            keepalive_ms: 1000,
            link_debounce_ms: 1000,
            peer_timeout_ms: 4000,
        }
    }
}

/// Variables that other parts of kvrail read: whole names, and prefixes that end in `_`.
const OTHERS: &[&str] = &[
    "KVRAIL_LOG",
    "KVRAIL_STATS",
    "KVRAIL_SYSROOT",
    "KVRAIL_IBVERBS",
    "KVRAIL_LIBCUDA",
    "KVRAIL_PLUGIN_DIR",
    "KVRAIL_TEST_",
    "KVRAIL_DEMO_",
    "KVRAIL_BENCH_",
    "KVRAIL_FUZZ_",
    "KVRAIL_LAB_",
    "KVRAIL_VLLM_",
    "KVRAIL_RBLN_",
    "KVRAIL_DRIVE_",
    "KVRAIL_FAKEVERBS",
];

impl Config {
    /// Sets one parameter from text. On an error nothing changed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        self.set_named(key, value, key)
    }

    /// Applies every `KVRAIL_<KEY>` of this process. Returns one warning for each variable that
    /// nobody knows. On an error nothing changed.
    pub fn apply_env(&mut self) -> Result<Vec<String>> {
        self.apply_vars(std::env::vars_os())
    }

    /// [`Config::apply_env`] on a given list of variables. An empty value counts as not set.
    pub fn apply_vars(
        &mut self,
        vars: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Vec<String>> {
        let mut mine: Vec<(String, OsString)> = vars
            .into_iter()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .filter(|(name, value)| name.starts_with("KVRAIL_") && !value.is_empty())
            .collect();
        // The environment has no order; the first error should not depend on luck.
        mine.sort();
        let mut next = self.clone();
        let mut warnings = Vec::new();
        for (var, value) in &mine {
            let others = |o: &&str| if o.ends_with('_') { var.starts_with(*o) } else { var == o };
            if OTHERS.iter().any(others) {
                continue;
            }
            let key = var.strip_prefix("KVRAIL_").unwrap_or(var).to_ascii_lowercase();
            if KEYS.iter().any(|k| k.variable() == *var) {
                // A value that is not UTF-8 is refused by the parser, which shows it.
                next.set_named(&key, &value.to_string_lossy(), var)?;
            } else {
                let hint = closest(&key)
                    .map(|k| format!("; did you mean {}?", k.variable()))
                    .unwrap_or_default();
                warnings.push(format!(
                    "environment variable {} is not a kvrail parameter and is left alone{hint}",
                    shown(var.as_bytes(), 64)
                ));
            }
        }
        *self = next;
        Ok(warnings)
    }

    /// Checks every value, and what no single value shows.
    pub fn check(&self) -> Result<()> {
        for key in KEYS {
            let value = key.get(self);
            key.set(&mut self.clone(), &value)
                .map_err(|allowed| bad(key.name, &value, &allowed))?;
        }
        self.limits(0).check().map_err(|(name, value, low, high)| {
            let text = if name == "message_bytes" {
                format!(
                    "parameter `message_bytes`: `{value}` is too little for `max_peers` {}, which \
                     needs {low}: raise message_bytes (at most {high}), or lower max_peers",
                    self.max_peers
                )
            } else {
                // No value that passed its own range comes here.
                format!("parameter `{name}`: {value} is not allowed; allowed: {low} to {high}")
            };
            Error::new(Status::Config, text)
        })
    }

    /// The capacities of the engine that this makes, itself counted among its peers. `nics`: RDMA
    /// rails; with none, there are the lanes of the `local` driver.
    pub(super) fn limits(&self, nics: u32) -> Limits {
        Limits {
            peers: self.max_peers.saturating_add(1),
            regions: self.max_regions,
            remote_regions: self.max_remote_regions,
            transfers: self.max_transfers,
            lanes: if nics == 0 { self.rails } else { nics + 1 },
            message_bytes: self.message_bytes,
        }
    }

    /// Every parameter: its key, its default, and a line of help with unit and range.
    pub fn keys() -> impl Iterator<Item = (&'static str, String, &'static str)> {
        let defaults = Config::default();
        KEYS.iter().map(move |k| (k.name, k.get(&defaults), k.help))
    }

    /// `source` is what the user wrote: the key or the variable.
    fn set_named(&mut self, key: &str, value: &str, source: &str) -> Result<()> {
        let Some(row) = KEYS.iter().find(|k| k.name == key) else {
            let hint =
                closest(key).map(|k| format!("did you mean `{}`? ", k.name)).unwrap_or_default();
            return Err(Error::new(
                Status::Config,
                format!(
                    "unknown parameter `{}` (value `{}`); {hint}{}",
                    shown(source.as_bytes(), 64),
                    shown(value.as_bytes(), 64),
                    known()
                ),
            ));
        };
        row.set(self, value).map_err(|allowed| bad(source, value, &allowed))
    }
}

fn bad(source: &str, value: &str, allowed: &str) -> Error {
    Error::new(
        Status::Config,
        format!(
            "parameter `{source}`: `{}` is not allowed; allowed: {allowed}",
            shown(value.as_bytes(), 64)
        ),
    )
}

fn known() -> String {
    let names: Vec<&str> = KEYS.iter().map(|k| k.name).collect();
    format!("known parameters: {}", names.join(", "))
}

/// The key whose name is nearest to what was typed, if any is near.
fn closest(typed: &str) -> Option<&'static Key> {
    if typed.len() > 64 {
        return None;
    }
    let typed = typed.to_ascii_lowercase().replace('-', "_");
    let near = KEYS.iter().map(|k| (distance(&typed, k.name), k)).min_by_key(|(d, _)| *d)?;
    (near.0 <= 3 && near.0 < near.1.name.len()).then_some(near.1)
}

/// Edits (insert, delete, replace a byte) between two names.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replace = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests;
