//! Builds a sysfs and procfs tree from a few lines of text, laid out as the kernel does it:
//!
//! ```text
//! nodes 2                              NUMA nodes of the host (none: the folder is missing)
//! net eno1 10.0.0.5/24 state=down      a netdev; keys: state carrier speed mtu ifindex lower
//! default eno1 100                     a default route and its metric
//! nic mlx5_0 0 ens1 10.1.0.1/24        device on node 0, port 1 ACTIVE, netdev, GIDs 0 to 3
//! dev mlx5_0 0 type=4:RNIC             device alone; keys: type, device (rel abs full dir none)
//! port 1 Ethernet 4:ACTIVE             a port of the last device; keys: phys rate
//! gid 3 v2 10.1.0.1 ens1               GID, its type and netdev (`-`: none, so no such file)
//! empty 4 7 zero                       GIDs that are zero, their types and netdevs missing (zero)
//!                                      or folders (folder), or GIDs that are folders (unreadable)
//! file PATH TEXT                       any file; `link PATH TARGET`, `folder PATH` as well
//! ```

use core::net::{Ipv4Addr, Ipv6Addr};
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;

static MADE: Mutex<u32> = Mutex::new(0);

/// A tree that is removed with its value.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) root: PathBuf,
    device: String,
    port: String,
    buses: u32,
    netdevs: u32,
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// An empty folder of this test alone.
pub(crate) fn empty() -> Tree {
    let mut made = MADE.lock().unwrap();
    *made += 1;
    let name = format!("kvrail-nics-{}-{made}", std::process::id());
    let root = std::env::temp_dir().join(name);
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root).unwrap();
    Tree { root, device: String::new(), port: String::new(), buses: 0, netdevs: 1 }
}

/// The tree of a description.
pub(crate) fn build(text: &str) -> Tree {
    let mut tree = empty();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        tree.line(line);
    }
    tree
}

/// `key=value` of a line; `4:ACTIVE` stands for the kernel's `4: ACTIVE`.
fn key<'w>(words: &[&'w str], name: &str) -> Option<&'w str> {
    words.iter().find_map(|w| w.strip_prefix(name)?.strip_prefix('='))
}

fn spaced(text: &str) -> String {
    text.replacen(':', ": ", 1)
}

impl Tree {
    pub(crate) fn file(&self, path: &str, text: &str) {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }

    fn append(&self, path: &str, line: &str) {
        let old = fs::read_to_string(self.root.join(path)).unwrap_or_default();
        self.file(path, &format!("{old}{line}\n"));
    }

    pub(crate) fn link(&self, path: &str, target: &str) {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    }

    pub(crate) fn folder(&self, path: &str) {
        fs::create_dir_all(self.root.join(path)).unwrap();
    }

    fn line(&mut self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let rest = |n: usize| words[n..].join(" ");
        match words[0] {
            "nodes" => {
                for node in 0..words[1].parse::<u32>().unwrap() {
                    self.folder(&format!("sys/devices/system/node/node{node}"));
                }
            }
            "net" => self.net(&words[1..]),
            "default" => self.default_route(words[1], words[2].parse().unwrap()),
            "nic" => self.nic(words[1], words[2], words[3], words[4]),
            "dev" => self.dev(&words[1..]),
            "port" => self.add_port(&words[1..]),
            "empty" => {
                for index in words[1].parse::<u32>().unwrap()..=words[2].parse().unwrap() {
                    self.no_gid(index, words[3]);
                }
            }
            "gid" => self.gid(words[1], words[2], words[3], words[4]),
            "file" => self.file(words[1], &format!("{}\n", rest(2))),
            "link" => self.link(words[1], words[2]),
            "folder" => self.folder(words[1]),
            other => panic!("no such line: {other}"),
        }
    }

    fn net(&mut self, words: &[&str]) {
        let name = words[0];
        let dir = format!("sys/class/net/{name}");
        self.netdevs += 1;
        let state = key(words, "state").unwrap_or("up");
        let carrier = key(words, "carrier").unwrap_or("1");
        self.file(&format!("{dir}/operstate"), &format!("{state}\n"));
        self.file(&format!("{dir}/carrier"), &format!("{carrier}\n"));
        self.file(&format!("{dir}/ifindex"), &format!("{}\n", self.netdevs));
        self.file(&format!("{dir}/mtu"), key(words, "mtu").unwrap_or("4200\n"));
        self.file(&format!("{dir}/speed"), key(words, "speed").unwrap_or("100000\n"));
        if let Some(lower) = key(words, "lower") {
            self.folder(&format!("{dir}/lower_{lower}"));
        }
        for address in words[1..].iter().filter(|w| !w.contains('=')) {
            self.append("proc/net/kvrail_ipv4", &format!("{name} {address}"));
        }
    }

    fn default_route(&self, netdev: &str, metric: u32) {
        let path = "proc/net/route";
        if !self.root.join(path).exists() {
            self.append(path, "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask");
        }
        let (to, gateway) = ("00000000", "010200C0");
        self.append(
            path,
            &format!("{netdev}\t{to}\t{gateway}\t0003\t0\t0\t{metric}\t{to}\t0\t0\t0"),
        );
        self.append(path, &format!("{netdev}\t000200C0\t{to}\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0"));
    }

    fn nic(&mut self, device: &str, node: &str, netdev: &str, address: &str) {
        self.dev(&[device, node]);
        self.add_port(&["1", "Ethernet", "4:ACTIVE"]);
        if !self.root.join("sys/class/net").join(netdev).exists() {
            self.net(&[netdev, address]);
        }
        let ip = address.split('/').next().unwrap();
        for (index, kind, gid) in [("0", "v1", "fe80::1"), ("1", "v2", "fe80::1")] {
            self.gid(index, kind, gid, netdev);
        }
        self.gid("2", "v1", ip, netdev);
        self.gid("3", "v2", ip, netdev);
    }

    /// A device below a PCI device of its own, as the kernel lays it out.
    fn dev(&mut self, words: &[&str]) {
        let (name, node) = (words[0], words[1]);
        self.buses += 1;
        let pci = format!("sys/devices/pci0000:00/0000:{:02x}:00.0", self.buses);
        let home = format!("{pci}/infiniband/{name}");
        let class = format!("sys/class/infiniband/{name}");
        let device = key(words, "device").unwrap_or("rel");
        if device != "none" {
            self.file(&format!("{pci}/numa_node"), &format!("{node}\n"));
        }
        match device {
            "rel" => {
                self.link(&format!("{home}/device"), "../..");
                self.link(&class, &format!("../../../{home}"));
            }
            "abs" => {
                self.link(&format!("{home}/device"), &format!("/{pci}"));
                self.link(&class, &format!("/{home}"));
            }
            "full" => {
                let full = |path: &str| self.root.join(path).display().to_string();
                self.link(&format!("{home}/device"), &full(&pci));
                self.link(&class, &full(&home));
            }
            "dir" => self.file(&format!("{class}/device/numa_node"), &format!("{node}\n")),
            "none" => self.folder(&class),
            other => panic!("device={other}"),
        }
        let kind = spaced(key(words, "type").unwrap_or("1:CA"));
        // Not through the link: an absolute one leads to the live host from here.
        self.device = if matches!(device, "dir" | "none") { class } else { home };
        self.file(&format!("{}/node_type", self.device), &format!("{kind}\n"));
    }

    fn add_port(&mut self, words: &[&str]) {
        self.port = format!("{}/ports/{}", self.device, words[0]);
        let text = |name: &str, text: &str| {
            self.file(&format!("{}/{name}", self.port), &format!("{text}\n"));
        };
        text("link_layer", words[1]);
        text("state", &spaced(words[2]));
        text("phys_state", &spaced(key(words, "phys").unwrap_or("5:LinkUp")));
        text("rate", &format!("{} Gb/sec (4X EDR)", key(words, "rate").unwrap_or("100")));
        self.folder(&format!("{}/gids", self.port));
    }

    fn gid(&self, index: &str, kind: &str, address: &str, netdev: &str) {
        let port = &self.port;
        let groups = match address.parse::<Ipv4Addr>() {
            Ok(ip) => groups(ip.to_ipv6_mapped()),
            Err(_) => groups(address.parse().unwrap()),
        };
        self.file(&format!("{port}/gids/{index}"), &format!("{groups}\n"));
        let kind = if kind == "v2" { "RoCE v2" } else { "IB/RoCE v1" };
        for (folder, text) in [("types", kind), ("ndevs", netdev)] {
            if folder == "types" || netdev != "-" {
                self.file(&format!("{port}/gid_attrs/{folder}/{index}"), &format!("{text}\n"));
            }
        }
    }

    fn no_gid(&self, index: u32, how: &str) {
        let port = &self.port;
        if how == "unreadable" {
            return self.folder(&format!("{port}/gids/{index}"));
        }
        self.file(&format!("{port}/gids/{index}"), &format!("{}\n", groups(Ipv6Addr::UNSPECIFIED)));
        for folder in ["types", "ndevs"].iter().filter(|_| how == "folder") {
            self.folder(&format!("{port}/gid_attrs/{folder}/{index}"));
        }
    }
}

/// Eight groups of four digits, as sysfs writes a GID.
fn groups(ip: Ipv6Addr) -> String {
    ip.segments().map(|s| format!("{s:04x}")).join(":")
}
