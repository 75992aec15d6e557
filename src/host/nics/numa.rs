//! Which NUMA node a device sits on, and how many nodes the host has.

use std::path::Path;

use super::tree::{decimal, Dir, Tree};

/// What sysfs says of a device's NUMA node.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Node {
    /// No folder on the way up has a `numa_node`: a virtual device without a PCI parent.
    #[default]
    NoParent,
    /// There is a `numa_node`, and it is -1.
    Unknown,
    /// The node.
    Known(i32),
}

impl Node {
    /// The node, or -1.
    pub(super) fn number(self) -> i32 {
        match self {
            Node::Known(node) => node,
            Node::NoParent | Node::Unknown => -1,
        }
    }
}

/// The node of a class device's folder, such as `/sys/class/infiniband/mlx5_0`.
///
/// A device that has no `numa_node` of its own (a sub-function on the auxiliary bus) has that of
/// the nearest ancestor with one. The netdev's node is not looked at: a soft device on a PCI netdev
/// is still a soft device.
pub(super) fn of_device(class_device: &Dir<'_>) -> Node {
    match class_device.dir("device") {
        Some(device) => climb(device),
        // Without the link the folder itself may lie below its device.
        None => climb(class_device.clone()),
    }
}

fn climb(start: Dir<'_>) -> Node {
    let mut found = Node::NoParent;
    let mut at = Some(start.clone());
    while let Some(dir) = at {
        match dir.number::<i32>("numa_node") {
            Some(node) if node >= 0 => return Node::Known(node),
            Some(_) => found = Node::Unknown,
            None => {}
        }
        // Above a device's own folder only /sys/devices is a tree of devices.
        at = dir.parent().filter(|p| p.is_below(&["sys", "devices"]));
    }
    found
}

/// How many NUMA nodes the host has: at least 1, also where sysfs does not say.
pub(super) fn count(tree: &Tree) -> usize {
    let Some(dir) = tree.dir("sys/devices/system/node") else {
        return 1;
    };
    let is_node =
        |n: &String| n.strip_prefix("node").is_some_and(|d| super::tree::decimal(d).is_some());
    let folders = dir.names().iter().filter(|n| is_node(n)).count();
    let online = dir.read("online").map_or(0, |list| listed(&list));
    folders.max(online).max(1)
}

/// How many numbers a kernel list such as `0-1,4` has.
fn listed(list: &str) -> usize {
    let count = |part: &str| {
        let (from, to) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        let (from, to) = (from.parse::<usize>().ok()?, to.parse::<usize>().ok()?);
        to.checked_sub(from)?.checked_add(1)
    };
    list.split(',').filter_map(count).fold(0, usize::saturating_add)
}

/// The NUMA node of an accelerator or any PCI device, by its sysfs entry.
///
/// `device` is a PCI address (`0000:c1:00.0`, the domain may be left out), or an RBLN card as its
/// driver publishes it below `/sys/class/rebellions`: `rbln3`, `/dev/rbln3` or `3`. The class
/// entry's `device` leads to the PCI device. `Some(-1)`: the device is there and its node is
/// unknown, as in most virtual machines. `None`: there is no such device.
#[must_use]
pub fn numa_of_pci(sysroot: &Path, device: &str) -> Option<i32> {
    let tree = Tree::new(sysroot);
    let name = device.trim().trim_start_matches("/dev/").to_lowercase();
    if name.is_empty() || name.contains('/') || name.starts_with('.') {
        return None;
    }
    let cards = tree.dir("sys/class/rebellions");
    let numbered = decimal(&name).map(|n| format!("rbln{n}"));
    if let Some(card) = cards.and_then(|c| c.dir(numbered.as_ref().unwrap_or(&name))) {
        return Some(of_device(&card).number());
    }
    let bus = tree.dir("sys/bus/pci/devices")?;
    let found = bus.dir(&name).or_else(|| bus.dir(&format!("0000:{name}")))?;
    Some(climb(found).number())
}
