//! Which NUMA node an engine's NICs must sit on: the parameter's, else the card's. A process of its
//! own, since the engine reads `KVRAIL_SYSROOT`.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests fail by panicking")]

use std::fs;

use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::status::Status;

#[test]
fn the_cards_node_counts_unless_a_node_is_given() {
    let root = std::env::temp_dir().join(format!("kvrail-numa-{}", std::process::id()));
    for (card, node) in [("rbln0", "1"), ("rbln7", "3")] {
        let device = root.join("sys/class/rebellions").join(card).join("device");
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("numa_node"), node).unwrap();
    }
    for node in ["node0", "node1", "node3"] {
        fs::create_dir_all(root.join("sys/devices/system/node").join(node)).unwrap();
    }
    std::env::set_var("KVRAIL_SYSROOT", &root);
    let refused = |device_id, numa_node| {
        let verbs = Config { transport: "verbs".into(), device_id, numa_node, ..Config::default() };
        let e = Engine::new(verbs).unwrap_err();
        assert_eq!(e.status, Status::NoRail);
        e.message
    };
    let says = |text: String, numa: &str| {
        let want = format!("no usable data-plane RoCE NIC on numa={numa}");
        assert!(text.starts_with(&want), "{text} instead of {want}");
    };
    says(refused(0, -1), "1");
    says(refused(7, -1), "3");
    says(refused(0, 0), "0");
    // No such card: nothing is asked of the node.
    says(refused(5, -1), "-1");
    // The runtime shows this process the last card only, as its first.
    std::env::set_var("RBLN_VISIBLE_DEVICES", "7");
    says(refused(0, -1), "3");
    // The same card by its place among those that are here.
    std::env::set_var("RBLN_VISIBLE_DEVICES", "1");
    says(refused(0, -1), "3");
    fs::remove_dir_all(&root).unwrap();
}
