//! What one input of the `nics` fuzz target does: it writes the tree that the input describes, and
//! checks what selection says of it. Also compiled into `tests/nics.rs`.

use std::path::{Path, PathBuf};

use kvrail::host::nics::{numa_of_pci, parse_routes, select, Addresses, Request, Selection};

/// Steps of one input; each makes at most one file.
const MAX_STEPS: usize = 64;

/// Paths that mean something; `D` becomes a device, `P` a port, `I` an index, `N` a netdev.
const PATHS: &[&str] = &[
    "sys/class/infiniband/D/node_type",
    "sys/class/infiniband/D/parent",
    "sys/class/infiniband/D/device",
    "sys/class/infiniband/D/device/numa_node",
    "sys/class/infiniband/D/ports/P/state",
    "sys/class/infiniband/D/ports/P/link_layer",
    "sys/class/infiniband/D/ports/P/phys_state",
    "sys/class/infiniband/D/ports/P/rate",
    "sys/class/infiniband/D/ports/P/pkeys/I",
    "sys/class/infiniband/D/ports/P/gids/I",
    "sys/class/infiniband/D/ports/P/gid_attrs/types/I",
    "sys/class/infiniband/D/ports/P/gid_attrs/ndevs/I",
    "sys/class/net/N/operstate",
    "sys/class/net/N/carrier",
    "sys/class/net/N/flags",
    "sys/class/net/N/speed",
    "sys/class/net/N/mtu",
    "sys/class/net/N/ifindex",
    "sys/class/net/N/lower_eth0",
    "sys/class/net/N",
    "sys/devices/system/node/nodeI",
    "sys/devices/system/node/online",
    "sys/devices/pci0/0000:01:00.0/numa_node",
    "sys/class/rebellions/rbln0/device",
    "sys/class/infiniband/D",
    "proc/net/route",
    "proc/net/kvrail_ipv4",
    "proc/net/vlan/N",
    "routes.txt",
    "addresses",
    "sys",
    "sys/class",
];
const DEVICES: &[&str] = &["mlx5_0", "mlx5_1", "mlx5_10", "rxe0"];
const NETDEVS: &[&str] = &["eth0", "eth1", "eth0.5", "bond0"];
const TEXTS: &[&str] = &[
    "4: ACTIVE",
    "1: DOWN",
    "Ethernet",
    "InfiniBand",
    "1: CA",
    "4: RNIC",
    "RoCE v2",
    "IB/RoCE v1",
    "eth0",
    "eth1",
    "eth0.5",
    "bond0",
    "0000:0000:0000:0000:0000:ffff:0a01:0001",
    "0000:0000:0000:0000:0000:ffff:0a01:0002",
    "fe80:0000:0000:0000:0000:0000:0000:0001",
    "0000:0000:0000:0000:0000:0000:0000:0000",
    "up",
    "down",
    "0",
    "1",
    "-1",
    "0-3",
    "eth0 10.1.0.1/24",
    "eth1 10.1.0.2/24\neth0 10.1.0.1",
    "2: eth0.5    inet 10.1.0.2/32 scope global eth0.5",
    "default via 10.1.0.9 dev eth0 metric 5",
    "eth1 7",
    "eth0\t00000000\t0100000A\t0003\t0\t0\t9\t00000000\t0\t0\t0",
    "default metric 1\n nexthop dev eth0\n nexthop dev eth1",
    "0x7fff",
    "..",
    "../..",
    "../../../../../../etc",
    "/sys/devices/pci0/0000:01:00.0",
    ".",
    "mlx5_0",
    "100 Gb/sec (4X EDR)",
    "Device: eth0",
];

/// A tree with two rails, for steps to spoil.
const GOOD: &[(&str, &str)] = &[
    ("sys/devices/system/node/node0/x", ""),
    ("sys/devices/system/node/node1/x", ""),
    ("proc/net/kvrail_ipv4", "eth0 10.1.0.1/24\neth1 10.1.0.2/24\neth0.5 10.1.0.2/24"),
    ("sys/class/infiniband/mlx5_0/device/numa_node", "0"),
    ("sys/class/infiniband/mlx5_0/node_type", "1: CA"),
    ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE"),
    ("sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet"),
    ("sys/class/infiniband/mlx5_0/ports/1/gids/1", "::ffff:10.1.0.1"),
    ("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/1", "RoCE v2"),
    ("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/1", "eth0"),
    ("sys/class/infiniband/mlx5_1/device/numa_node", "1"),
    ("sys/class/infiniband/mlx5_1/ports/1/state", "4: ACTIVE"),
    ("sys/class/infiniband/mlx5_1/ports/1/link_layer", "Ethernet"),
    ("sys/class/infiniband/mlx5_1/ports/1/gids/7", "::ffff:10.1.0.2"),
    ("sys/class/infiniband/mlx5_1/ports/1/gid_attrs/types/7", "RoCE v2"),
    ("sys/class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/7", "eth1"),
];

/// Takes one byte off the front.
fn byte(data: &mut &[u8]) -> usize {
    let Some((first, rest)) = data.split_first() else {
        return 0;
    };
    *data = rest;
    usize::from(*first)
}

fn one_of<'t>(list: &[&'t str], data: &mut &[u8]) -> &'t str {
    list[byte(data) % list.len()]
}

/// One path, one text, and what to make of them. Errors are fine: the paths may clash.
fn step(root: &Path, data: &mut &[u8]) {
    let what = byte(data);
    let path = one_of(PATHS, data)
        .replace('D', one_of(DEVICES, data))
        .replace('P', one_of(&["1", "2", "255", "x"], data))
        .replace('N', one_of(NETDEVS, data))
        .replace('I', one_of(&["0", "1", "2", "7", "255"], data));
    let path = root.join(path);
    let inside = path.parent().is_some_and(|p| {
        let _ = std::fs::create_dir_all(p);
        // A link made earlier must not lead the writes out.
        std::fs::canonicalize(p).is_ok_and(|p| p.starts_with(root))
    });
    if !inside {
        return;
    }
    let _ = std::fs::remove_file(&path);
    let _ = match what % 8 {
        0 => std::fs::create_dir_all(path),
        1 => std::os::unix::fs::symlink(one_of(TEXTS, data), path),
        2 => {
            let (raw, rest) = data.split_at((what / 8).min(data.len()));
            *data = rest;
            std::fs::write(path, raw)
        }
        _ => std::fs::write(path, one_of(TEXTS, data)),
    };
}

/// A folder of this process, in memory where there is such a place.
fn root() -> PathBuf {
    let memory = Path::new("/dev/shm");
    let base = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
    let base = std::fs::canonicalize(&base).unwrap_or(base);
    base.join(format!("kvrail-fuzz-nics-{}", std::process::id()))
}

/// Writes the tree, checks every answer, and says how many rails there were.
pub(crate) fn run(data: &[u8]) -> usize {
    let text = String::from_utf8_lossy(data);
    let _ = (Addresses::parse(&text), parse_routes(&text));
    let root = root();
    let _ = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(&root).expect("a folder for the tree");
    let mut rest = data;
    let (numa, names) = (byte(&mut rest) as i32 % 4 - 1, byte(&mut rest));
    for (path, text) in GOOD.iter().filter(|_| names / 8 % 8 > 0) {
        let path = root.join(path);
        let _ = path.parent().map(std::fs::create_dir_all);
        std::fs::write(path, text).expect("a file of the tree");
    }
    for _ in 0..MAX_STEPS {
        if rest.is_empty() {
            break;
        }
        step(&root, &mut rest);
    }
    let names = match names % 8 {
        0 => vec![String::from("mlx5_0:1"), String::from("rxe0")],
        1 => vec![text.chars().take(20).collect()],
        _ => Vec::new(),
    };
    let request = Request { sysroot: root.clone(), numa: Some(numa), names };
    let found = select(&request);
    assert_eq!(found, select(&request), "the same tree, another answer");
    check(&request, &found);
    let _ = numa_of_pci(&root, "rbln0");
    let _ = std::fs::remove_dir_all(&root);
    found.nics.len()
}

fn check(request: &Request, found: &Selection) {
    let named = request.names.iter().any(|n| n.split(',').any(|n| !n.trim().is_empty()));
    assert!(found.explain().starts_with("no usable data-plane RoCE NIC on numa="));
    let chosen = found.verdicts.iter().filter_map(|v| v.chosen.as_ref());
    assert!(chosen.eq(found.nics.iter()), "{found:#?}");
    let lowest = found.default_routes.iter().map(|r| r.metric).min();
    for (at, verdict) in found.verdicts.iter().enumerate() {
        let Some(nic) = &verdict.chosen else {
            assert!(!verdict.reason.is_empty(), "{found:#?}");
            continue;
        };
        assert!(verdict.reason.is_empty() && verdict.state.starts_with('4'), "{found:#?}");
        assert_eq!(nic.gid[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff], "{found:#?}");
        assert_eq!(nic.gid[12..], nic.ipv4.octets(), "{found:#?}");
        let same = |v: &kvrail::host::nics::Verdict| (&v.device, v.port) == (&nic.device, nic.port);
        assert!(!found.verdicts[..at].iter().any(same), "twice: {found:#?}");
        if named {
            assert!(request.names.iter().any(|n| n.contains(&nic.device)), "{found:#?}");
            continue;
        }
        let holds = |r: &&kvrail::host::nics::DefaultRoute| Some(r.metric) == lowest;
        let holder = found.default_routes.iter().filter(holds).any(|r| r.netdev == nic.netdev);
        assert!(!holder, "the default route's netdev: {found:#?}");
        let wanted = found.numa.is_none_or(|n| nic.numa == n || nic.numa < 0);
        assert!(wanted, "another node: {found:#?}");
        let double = |n: &&kvrail::host::nics::Nic| n.netdev == nic.netdev && n.ipv4 == nic.ipv4;
        assert_eq!(found.nics.iter().filter(double).count(), 1, "two on one: {found:#?}");
    }
}
