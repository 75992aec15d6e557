//! The decisions where the rule is silent, one by one, and what a hostile tree may not do.

use crate::tree::{build, empty};
use crate::{pick, rails, reason};
use kvrail::host::nics::{numa_of_address, numa_of_pci, select, Request};

#[test]
fn a_host_without_rdma_says_what_is_missing() {
    let tree = empty();
    let found = pick(&tree, 1, "");
    let text = found.explain();
    assert!(text.starts_with("no usable data-plane RoCE NIC on numa=1\n"), "{text}");
    assert!(text.contains("there is no RDMA device"), "{text}");
    let class = tree.root.join("sys/class/infiniband").display().to_string();
    assert!(text.contains(&class), "{text}");
    assert!(found.nics.is_empty() && found.verdicts.is_empty() && found.warnings.is_empty());
}

#[test]
fn an_unknown_name_is_named_with_what_is_here() {
    let tree = build("nic mlx5_0 0 ens1 10.1.0.1/24\nnic mlx5_10 0 ens2 10.1.1.1/24");
    let found = pick(&tree, 0, "mlx5_1,mlx5_9:1,ens1");
    assert!(found.nics.is_empty());
    let text = found.explain();
    let expected = "KVRAIL_NICS names mlx5_1: no such device; mlx5_9:1: no such device; \
                    ens1: that is the netdev of mlx5_0; name the device; \
                    here are: mlx5_0:1, mlx5_10:1";
    assert!(text.contains(expected), "{text}");
    assert_eq!(found.unknown.len(), 3);
    // The others are used all the same, and the warning stays.
    let found = pick(&tree, 0, "mlx5_10, mlx5_77");
    assert_eq!(rails(&found), "mlx5_10:1#3");
    assert!(found.warnings[0].contains("mlx5_77: no such device"), "{:?}", found.warnings);
    assert_eq!(reason(&found, "mlx5_0:1"), "not named in KVRAIL_NICS");
    for bad in ["mlx5_0:", "mlx5_0:0", "mlx5_0:01", "mlx5_0:+1", "mlx5_0:257", "mlx5_0/x"] {
        let found = pick(&tree, 0, bad);
        assert_eq!((rails(&found).as_str(), found.unknown.len()), ("", 1), "{bad}");
        assert!(found.unknown[0].contains("(ports of mlx5_0: 1)"), "{:?}", found.unknown);
    }
}

#[test]
fn the_order_is_natural_and_not_that_of_the_names() {
    let text: String =
        [10, 2, 0, 1, 9].map(|n| format!("nic mlx5_{n} 0 ens{n} 10.{n}.0.1/24\n")).concat();
    let tree = build(&format!("{text}nic bnxt_re0 0 eth0 10.77.0.1/24\n"));
    let all = "bnxt_re0:1#3 mlx5_0:1#3 mlx5_1:1#3 mlx5_2:1#3 mlx5_9:1#3 mlx5_10:1#3";
    assert_eq!(rails(&pick(&tree, 0, "")), all);
    assert_eq!(rails(&pick(&tree, 0, "mlx5_10,mlx5_2")), "mlx5_2:1#3 mlx5_10:1#3");
    let found = pick(&tree, 0, "");
    let labels: Vec<String> = found.verdicts.iter().map(|v| v.label()).collect();
    assert_eq!(labels.last().unwrap(), "mlx5_10:1");
}

#[test]
fn only_the_lowest_metric_keeps_a_nic_out() {
    let nics = "nic mlx5_0 0 ens1 10.1.0.1/24\nnic mlx5_1 0 ens2 10.1.1.1/24\n";
    let tree = build(&format!("{nics}default ens1 200\ndefault ens2 100"));
    let found = pick(&tree, 0, "");
    assert_eq!(rails(&found), "mlx5_0:1#3");
    assert!(reason(&found, "mlx5_1:1").starts_with("default route: ens2"));
    let warned = "mlx5_0:1: ens1 has a default route too, of metric 200";
    assert!(found.warnings.iter().any(|w| w.starts_with(warned)), "{:?}", found.warnings);
    // Two of one metric: the kernel may take either.
    let tree = build(&format!("{nics}default ens1 100\ndefault ens2 100"));
    assert_eq!(rails(&pick(&tree, 0, "")), "");
    // A refused default route (flag `!`) and one that is not up are none; nor is a half of all.
    let table = "I Destination G Flags R U Metric Mask\n\
                 ens1 00000000 00000000 0201 0 0 0 00000000\n\
                 ens1 00000000 00000000 0000 0 0 0 00000000\n\
                 ens1 00000000 00000000 0001 0 0 0 00000080\n\
                 ens2 00000080 00000000 0001 0 0 0 00000080";
    let tree = build(nics);
    tree.file("proc/net/route", table);
    assert_eq!(rails(&pick(&tree, 0, "")), "mlx5_0:1#3 mlx5_1:1#3");
}

#[test]
fn two_devices_on_one_netdev_and_address_are_one_rail() {
    let text = "nic mlx5_0 0 ens1 10.1.0.1/24\nnic rxe0 0 ens1 10.1.0.1/24\n\
                file sys/class/infiniband/rxe0/ports/1/pkeys/0 0x7fff";
    let tree = build(text);
    let found = pick(&tree, 0, "");
    assert_eq!(rails(&found), "mlx5_0:1#3");
    let same = "same netdev and address as mlx5_0:1 (ens1, 10.1.0.1)";
    assert_eq!(reason(&found, "rxe0:1"), same);
    assert_eq!(found.warnings, [format!("rxe0:1: {same}: one rail")]);
    // Another address of that netdev is another rail; named ones are used as the user says.
    let other = text.replace("nic rxe0 0 ens1 10.1.0.1", "net x\nnic rxe0 0 ens1 10.1.0.2");
    let tree2 = build(&other);
    tree2.file("ipv4.txt", "ens1 10.1.0.2/32");
    assert_eq!(rails(&pick(&tree2, 0, "")), "mlx5_0:1#3 rxe0:1#3");
    // One address on two netdevs is two wires.
    let tree2 = build("nic mlx5_0 0 ens1 10.1.0.1/24\nnic mlx5_1 0 ens2 10.1.0.1/24");
    assert_eq!(rails(&pick(&tree2, 0, "")), "mlx5_0:1#3 mlx5_1:1#3");
    let found = pick(&tree, 0, "mlx5_0,rxe0");
    assert_eq!(rails(&found), "mlx5_0:1#3 rxe0:1#3");
    assert!(found.warnings.iter().any(|w| w.contains("both are used")), "{:?}", found.warnings);
}

#[test]
fn a_netdev_is_down_by_any_of_its_signs() {
    for (line, up) in [
        ("state=up carrier=1", true),
        ("state=unknown carrier=1", true),
        ("state=lowerlayerdown carrier=1", false),
        ("state=dormant carrier=1", false),
        ("state=notpresent carrier=1", false),
        ("state=up carrier=0", false),
    ] {
        let tree = build(&format!("net ens1 10.1.0.1/24 {line}\nnic mlx5_0 0 ens1 10.1.0.1/24"));
        let found = pick(&tree, 0, "");
        assert_eq!(found.nics.len(), usize::from(up), "{line}: {}", found.explain());
    }
    let tree = build("nic mlx5_0 0 ens1 10.1.0.1/24\nfile sys/class/net/ens1/flags 0x1002");
    assert!(reason(&pick(&tree, 0, ""), "mlx5_0:1").starts_with("netdev down"));
    let tree = build("nic mlx5_0 0 ens1 10.1.0.1/24\nfile sys/class/net/ens1/flags 0x1003");
    assert_eq!(pick(&tree, 0, "").nics.len(), 1);
    // A down netdev often has lost its address: both are said.
    let tree = build(
        "net ens1 state=down carrier=0\ndev a 0\nport 1 Ethernet 4:ACTIVE\n\
                      gid 0 v2 fe80::1 ens1",
    );
    let said = pick(&tree, 0, "");
    assert!(reason(&said, "a:1").starts_with("no IPv4 address on ens1 (netdev down"), "{said:?}");
}

#[test]
fn a_port_is_active_only_in_state_four() {
    for state in ["1:DOWN", "2:INIT", "3:ARMED", "5:ACTIVE_DEFER", "0:NOP", "44:ACTIVE", "x"] {
        let tree = build(&format!(
            "net ens1 10.1.0.1/24\ndev a 0\nport 1 Ethernet {state}\n\
                                   gid 0 v2 10.1.0.1 ens1"
        ));
        for names in ["", "a"] {
            let found = pick(&tree, 0, names);
            assert!(reason(&found, "a:1").starts_with("port not ACTIVE"), "{state}: {found:?}");
        }
    }
}

#[test]
fn the_facts_of_a_rail_are_those_of_its_netdev() {
    let tree = build(
        "net ens1 10.1.2.3/20 speed=400000 mtu=9000\nnet ens2 10.9.0.1/24 speed=-1\n\
         nic mlx5_0 1 ens1 10.1.2.3/20\nnic mlx5_1 0 ens2 10.9.0.1/24",
    );
    let found = pick(&tree, -1, "");
    let nic = &found.nics[0];
    assert_eq!((nic.netdev.as_str(), nic.ifindex, nic.prefix, nic.numa), ("ens1", 2, 20, 1));
    assert_eq!((nic.speed_mbps, nic.mtu, nic.gid_index), (400_000, 9000, 3));
    assert_eq!(nic.gid, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, 3]);
    // A netdev that does not know its speed: the port's own rate.
    assert_eq!((found.nics[1].speed_mbps, found.nics[1].mtu), (100_000, 4200));
    let shown = &found.verdicts[0];
    assert_eq!((shown.netdev.as_str(), shown.ipv4, shown.mtu), ("ens1", Some(nic.ipv4), 9000));
}

#[test]
fn an_address_that_routers_know_comes_before_zeroconf() {
    let tree = build(
        "net ens1 169.254.3.4/16 10.1.0.1/24\ndev a 0\nport 1 Ethernet 4:ACTIVE\n\
                      gid 1 v2 169.254.3.4 ens1\ngid 3 v2 10.1.0.1 ens1\ngid 5 v2 10.1.0.1 ens1",
    );
    assert_eq!(rails(&pick(&tree, 0, "")), "a:1#3");
    let tree = build(
        "net ens1 169.254.3.4/16\ndev a 0\nport 1 Ethernet 4:ACTIVE\n\
                      gid 1 v2 169.254.3.4 ens1",
    );
    assert_eq!(rails(&pick(&tree, 0, "")), "a:1#1");
    // Several good addresses: the first of the table, and the others are named.
    let tree = build(
        "net ens1 10.2.0.1/24 10.1.0.1/24\ndev a 0\nport 1 Ethernet 4:ACTIVE\n\
                      gid 1 v2 10.2.0.1 ens1\ngid 3 v2 10.1.0.1 ens1",
    );
    let found = pick(&tree, 0, "");
    assert_eq!(rails(&found), "a:1#1");
    let warned = "a:1: uses 10.2.0.1 on ens1 (GID 1), not 10.1.0.1 on ens1 (GID 3)";
    assert_eq!(found.warnings, [warned]);
}

#[test]
fn links_of_every_kind_lead_to_the_node() {
    for kind in ["rel", "abs", "full", "dir"] {
        let text = format!(
            "nodes 2\nnet ens1 10.1.0.1/24\ndev a 1 device={kind}\n\
                            port 1 Ethernet 4:ACTIVE\ngid 0 v2 10.1.0.1 ens1"
        );
        let tree = build(&text);
        assert_eq!(rails(&pick(&tree, 1, "")), "a:1#0", "{kind}");
        assert!(reason(&pick(&tree, 0, ""), "a:1").starts_with("numa 1:"), "{kind}");
    }
}

#[test]
fn the_nearest_known_node_counts() {
    let text = "nodes 2\nnet ens1 10.1.0.1/24\ndev a -1\nport 1 Ethernet 4:ACTIVE\n\
                gid 0 v2 10.1.0.1 ens1\n";
    let tree = build(&format!("{text}file sys/devices/pci0000:00/numa_node 1"));
    assert_eq!(rails(&pick(&tree, 1, "")), "a:1#0");
    // Above the devices there is nothing to ask.
    let tree = build(&format!("{text}file sys/devices/numa_node 1\nfile sys/numa_node 1"));
    assert_eq!(reason(&pick(&tree, 1, ""), "a:1"), "numa unknown (numa_node is -1)");
    let tree = build(&format!("{text}file sys/devices/system/node/online 0-1"));
    std::fs::remove_dir_all(tree.root.join("sys/devices/system/node/node1")).unwrap();
    assert_eq!(rails(&pick(&tree, 1, "")), "", "the list of nodes counts as well");
}

#[test]
fn loops_pipes_and_noise_are_all_survived() {
    let tree = build("nic good 0 ens1 10.1.0.1/24");
    let class = "sys/class/infiniband";
    tree.link(&format!("{class}/loop"), "loop");
    tree.link(&format!("{class}/ping"), "pong");
    tree.link(&format!("{class}/pong"), "ping");
    tree.link(&format!("{class}/out"), "../../../../../../../../../../../../../../etc");
    tree.link(&format!("{class}/deep"), &"x/../".repeat(700));
    tree.file(&format!("{class}/plain"), "a file");
    tree.folder(&format!("{class}/void"));
    tree.folder(&format!("{class}/odd/ports/1/link_layer"));
    for name in ["0", "300", "-1", "01", "x", "18446744073709551616"] {
        tree.folder(&format!("{class}/many/ports/{name}"));
    }
    tree.file(&format!("{class}/many/ports/7/link_layer"), "Eth\u{1b}[2Jernet\n");
    tree.link(&format!("{class}/self"), ".");
    tree.link(&format!("{class}/good/ports/1/gids/9"), "/dev/zero");
    tree.file("sys/class/net/real_index", "77");
    std::fs::remove_file(tree.root.join("sys/class/net/ens1/ifindex")).unwrap();
    tree.link("sys/class/net/ens1/ifindex", "/sys/class/net/real_index");
    let pipe = tree.root.join("sys/class/net/ens1/carrier");
    std::fs::remove_file(&pipe).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::fs::write(tree.root.join("sys/class/net/ens1/mtu"), [0xff, 0xfe, 0]).unwrap();
    std::fs::write(tree.root.join("addresses.txt"), vec![0xf0; 9 << 20]).unwrap();
    let found = pick(&tree, 0, "");
    assert_eq!(rails(&found), "good:1#3", "{}", found.explain());
    assert_eq!((found.nics[0].mtu, found.nics[0].ifindex), (0, 77));
    assert_eq!(
        reason(&found, "many:7"),
        "link layer Eth\\u{1b}[2Jernet (node type unknown): \
                                          RoCE needs Ethernet"
    );
    let labels: Vec<String> = found.verdicts.iter().map(|v| v.label()).collect();
    assert_eq!(labels, ["good:1", "many:7", "odd:1", "self", "void"]);
}

#[test]
fn nothing_is_read_outside_the_root() {
    let outside = build("nic mlx5_0 0 ens1 10.1.0.1/24");
    let tree = empty();
    tree.folder("sys/class");
    let target = outside.root.join("sys/class/infiniband").display().to_string();
    tree.link("sys/class/infiniband", &target);
    assert!(pick(&tree, 0, "").verdicts.is_empty());
    let (inside, up) = (empty(), "../".repeat(30));
    inside.link("sys", &format!("{up}{}", outside.root.join("sys").display()));
    assert!(pick(&inside, 0, "").verdicts.is_empty());
    // Nor from the live host: a loopback address is always there.
    let tree = build("net lo\ndev a 0\nport 1 Ethernet 4:ACTIVE\ngid 0 v2 127.0.0.1 lo");
    assert!(reason(&pick(&tree, 0, ""), "a:1").starts_with("no IPv4 address on lo"));
    assert!(pick(&tree, 0, "").default_routes.is_empty());
}

#[test]
fn the_live_host_is_read_without_a_panic() {
    let found = select(&Request::default());
    assert_eq!(found.nics.is_empty(), found.verdicts.iter().all(|v| v.chosen.is_none()));
    for sysroot in ["", "/", "//", "/proc/self/root/.."] {
        let again = select(&Request { sysroot: sysroot.into(), ..Request::default() });
        assert_eq!(again.default_routes, found.default_routes, "{sysroot}");
    }
    let none = select(&Request { sysroot: "/no/such/root".into(), ..Request::default() });
    assert!(none.verdicts.is_empty() && none.default_routes.is_empty());
}

#[test]
fn the_node_of_an_accelerator() {
    let tree = build(
        "file sys/devices/pci0000:c0/0000:c1:00.0/numa_node 1\n\
         folder sys/devices/pci0000:c0/0000:c1:00.0/rebellions/rbln3\n\
         link sys/devices/pci0000:c0/0000:c1:00.0/rebellions/rbln3/device ../..\n\
         link sys/class/rebellions/rbln3 \
         ../../devices/pci0000:c0/0000:c1:00.0/rebellions/rbln3\n\
         link sys/bus/pci/devices/0000:c1:00.0 ../../../devices/pci0000:c0/0000:c1:00.0\n\
         file sys/bus/pci/devices/0000:c2:00.0/numa_node -1",
    );
    for name in ["rbln3", "/dev/rbln3", "3", "0000:c1:00.0", "c1:00.0", "0000:C1:00.0", " rbln3\n"]
    {
        assert_eq!(numa_of_pci(&tree.root, name), Some(1), "{name}");
    }
    assert_eq!(numa_of_pci(&tree.root, "0000:c2:00.0"), Some(-1));
    for name in ["", "rbln0", "0", "0000:c9:00.0", "../rbln3", "..", "."] {
        assert_eq!(numa_of_pci(&tree.root, name), None, "{name}");
    }
}

#[test]
fn the_node_of_a_page() {
    let touched = vec![7u8; 1 << 16];
    let node = numa_of_address(touched.as_ptr());
    assert!(node.is_none_or(|n| (0..1024).contains(&n)), "{node:?}");
    assert_eq!(numa_of_address(core::ptr::null()), None);
    assert_eq!(numa_of_address(usize::MAX as *const u8), None);
}
