//! `kvrail nics`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use kvrail::host::nics::{numa_of_pci, select, Request, Selection, Verdict};
use serde_json::{json, Value};

/// Version of the JSON form; it changes when a key goes or means something else.
const JSON_VERSION: u32 = 1;

const AFTER: &str = "\
Exit status: 0 there is a rail, 1 there is none (the reasons are on standard error), 2 bad usage.
The rule and every reason: docs/nic-selection.md.";

/// Arguments of `kvrail nics`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// NUMA node of the accelerator or the buffer; -1: unknown, NICs of every node will do
    /// [default: KVRAIL_NUMA_NODE, or -1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = node)]
    numa: Option<i32>,
    /// Take the node from a device: rbln0, or a PCI address such as 0000:c1:00.0
    #[arg(long, value_name = "DEVICE", conflicts_with = "numa")]
    device: Option<String>,
    /// These NICs, whatever their node and route: mlx5_0,mlx5_1:1,mlx5_2/1
    /// [default: KVRAIL_NICS]
    #[arg(long, value_name = "A,B")]
    nics: Option<String>,
    /// One JSON object on standard output
    #[arg(long)]
    json: bool,
    /// Another root than / for sysfs and procfs; it is for tests [default: KVRAIL_SYSROOT]
    #[arg(long, value_name = "DIR")]
    sysroot: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let root = args.sysroot.clone().or_else(|| std::env::var_os("KVRAIL_SYSROOT").map(Into::into));
    let root: Option<PathBuf> = root.filter(|r| !r.as_os_str().is_empty());
    let sysroot = root.unwrap_or_else(|| PathBuf::from("/"));
    if !sysroot.is_dir() {
        let root = sysroot.display();
        return usage(&format!("KVRAIL_SYSROOT: {root} is no folder; name one with sys and proc"));
    }
    let numa = match wanted_node(args, &sysroot) {
        Ok(numa) => numa,
        Err(text) => return usage(&text),
    };
    let names = args.nics.clone().or_else(|| std::env::var("KVRAIL_NICS").ok());
    let names = names.iter().flat_map(|n| n.split(',')).map(String::from).collect();
    let found = select(&Request { sysroot, numa: Some(numa), names });
    let mut out = if args.json { format!("{:#}\n", as_json(&found)) } else { as_table(&found) };
    if !args.json {
        for warning in &found.warnings {
            out.push_str(&format!("warning: {warning}\n"));
        }
    }
    // A reader that went away (`| head`) is no failure of ours.
    let _ = std::io::stdout().write_all(out.as_bytes());
    if found.nics.is_empty() {
        let _ = writeln!(std::io::stderr(), "{}", found.explain());
        return ExitCode::from(1);
    }
    ExitCode::SUCCESS
}

/// `--numa` and `--device` come before the environment, as everywhere.
fn wanted_node(args: &Args, sysroot: &Path) -> Result<i32, String> {
    if let Some(device) = &args.device {
        return numa_of_pci(sysroot, device).ok_or_else(|| {
            format!(
                "--device {device}: it is not there; allowed are an RBLN card (rbln0) and a PCI \
                 address (0000:c1:00.0), or give the node: --numa N"
            )
        });
    }
    let from_env = || match std::env::var("KVRAIL_NUMA_NODE") {
        Ok(text) if !text.is_empty() => {
            node(&text).map_err(|e| format!("KVRAIL_NUMA_NODE={text}: {e}"))
        }
        _ => Ok(-1),
    };
    args.numa.map_or_else(from_env, Ok)
}

fn node(text: &str) -> Result<i32, String> {
    let node = text.trim().parse().ok().filter(|n| (-1..=65_535).contains(n));
    node.ok_or_else(|| String::from("must be 0 to 65535, or -1 for unknown"))
}

fn usage(text: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "kvrail: {text}");
    ExitCode::from(2)
}

const HEAD: [&str; 9] =
    ["DEVICE", "VERDICT", "NETDEV", "IPV4", "GID", "NUMA", "SPEED", "MTU", "REASON"];

fn as_table(found: &Selection) -> String {
    let mut rows = vec![HEAD.map(String::from)];
    rows.extend(found.verdicts.iter().map(row));
    let width = |at: usize| rows.iter().map(|r| r[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

fn row(verdict: &Verdict) -> [String; 9] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| String::from("-"));
    let known = |number: u32| (number > 0).then_some(number);
    let prefix = verdict.chosen.as_ref().map_or_else(String::new, |n| format!("/{}", n.prefix));
    [
        verdict.label(),
        String::from(if verdict.chosen.is_some() { "rail" } else { "refused" }),
        or_dash(Some(verdict.netdev.clone()).filter(|n| !n.is_empty())),
        or_dash(verdict.ipv4.map(|ip| format!("{ip}{prefix}"))),
        or_dash(verdict.gid_index.map(|i| i.to_string())),
        or_dash(Some(verdict.numa).filter(|n| *n >= 0).map(|n| n.to_string())),
        or_dash(known(verdict.speed_mbps).map(speed)),
        or_dash(known(verdict.mtu).map(|m| m.to_string())),
        verdict.reason.clone(),
    ]
}

fn speed(mbps: u32) -> String {
    match mbps {
        1000.. if mbps.is_multiple_of(1000) => format!("{}G", mbps / 1000),
        _ => format!("{mbps}M"),
    }
}

/// Keys are sorted, so that two outputs compare as texts.
fn as_json(found: &Selection) -> Value {
    let routes = found.default_routes.iter();
    let routes: Vec<Value> =
        routes.map(|r| json!({ "netdev": r.netdev, "metric": r.metric })).collect();
    json!({
        "version": JSON_VERSION,
        "numa": found.numa.unwrap_or(-1),
        "rails": found.nics.len(),
        "ports": found.verdicts.iter().map(port_json).collect::<Vec<_>>(),
        "warnings": found.warnings,
        "unknown": found.unknown,
        "default_routes": routes,
        "error": if found.nics.is_empty() { json!(found.explain()) } else { Value::Null },
    })
}

fn port_json(verdict: &Verdict) -> Value {
    let known = |number: u32| (number > 0).then_some(number);
    let nic = verdict.chosen.as_ref();
    json!({
        "device": verdict.device,
        "port": verdict.port,
        "verdict": if nic.is_some() { "rail" } else { "refused" },
        "reason": verdict.reason,
        "state": verdict.state,
        "netdev": Some(&verdict.netdev).filter(|n| !n.is_empty()),
        "ifindex": nic.map(|n| n.ifindex),
        "ipv4": verdict.ipv4.map(|ip| ip.to_string()),
        "prefix": nic.map(|n| n.prefix),
        "gid_index": verdict.gid_index,
        "gid": nic.map(|n| core::net::Ipv6Addr::from(n.gid).to_string()),
        "numa": verdict.numa,
        "speed_mbps": known(verdict.speed_mbps),
        "mtu": known(verdict.mtu),
        "warnings": verdict.warnings,
    })
}
