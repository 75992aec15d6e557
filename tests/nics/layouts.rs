//! One layout a test: what hosts looked like when somebody's selection failed.

use crate::tree::build;
use crate::{pick, rails};

/// What is asked of a layout: the accelerator's node, `KVRAIL_NICS`, the rails that come of it (as
/// `device:port#gid`), and texts that stand in the error (no rail) or in the warnings (rails).
/// No text means no warning.
type Ask<'a> = (i32, &'a str, &'a str, &'a [&'a str]);

fn layout(text: &str, asks: &[Ask<'_>]) {
    let tree = build(text);
    for (numa, names, expected, texts) in asks {
        let found = pick(&tree, *numa, names);
        let said = if found.nics.is_empty() { found.explain() } else { found.warnings.join("\n") };
        let what = format!("numa {numa}, names `{names}`:\n{said}\n{found:#?}");
        assert_eq!(rails(&found), *expected, "{what}");
        for text in *texts {
            assert!(said.contains(text), "no `{text}` for {what}");
        }
        assert!(!texts.is_empty() || said.is_empty(), "a warning too many for {what}");
        let node = if *numa < 0 { String::from("-1") } else { numa.to_string() };
        let head = format!("no usable data-plane RoCE NIC on numa={node}");
        assert!(found.explain().starts_with(&head), "{what}");
        assert!(found.verdicts.iter().all(|v| v.chosen.is_some() == v.reason.is_empty()), "{what}");
    }
}

/// The management netdev of most layouts: it holds the default route and has no RDMA device.
const M: &str = "net eno1 192.168.0.9/24 speed=1000\ndefault eno1 100\n";

fn managed(text: &str, asks: &[Ask<'_>]) {
    layout(&format!("{M}{text}"), asks);
}

#[test]
fn l01_one_nic_on_each_node() {
    let text = "nodes 2\nnic mlx5_0 0 ens1np0 10.1.0.1/24\nnic mlx5_1 1 ens2np0 10.1.1.1/24";
    let both = "mlx5_0:1#3 mlx5_1:1#3";
    managed(
        text,
        &[
            (0, "", "mlx5_0:1#3", &[]),
            (1, "", "mlx5_1:1#3", &[]),
            (-1, "", both, &[]),
            (2, "", "", &["mlx5_0:1: numa 0: it must sit on numa 2", "mlx5_1:1: numa 1"]),
        ],
    );
}

#[test]
fn l02_the_default_route_is_on_one_of_two() {
    layout(
        "nic mlx5_0 0 ens1f0np0 10.0.0.5/24\nnic mlx5_1 0 ens1f1np1 10.1.0.5/24\n\
         default ens1f0np0 0",
        &[(0, "", "mlx5_1:1#3", &[])],
    );
}

#[test]
fn l03_the_default_route_is_on_the_only_one() {
    let text = "nic mlx5_0 0 ens1 10.0.0.5/24\ndefault ens1 100";
    let although = "mlx5_0:1 is used because KVRAIL_NICS names it, although: default route: ens1";
    layout(
        text,
        &[
            (0, "", "", &["mlx5_0:1: default route: ens1 holds the host's default route"]),
            (0, "mlx5_0", "mlx5_0:1#3", &[although]),
        ],
    );
}

#[test]
fn l04_one_port_is_down() {
    managed(
        "nic bnxt_re0 0 ens1 10.1.0.1/24\n\
         dev bnxt_re1 0\nport 1 Ethernet 1:DOWN phys=3:Disabled\nnet ens2 10.1.1.1/24\n\
         gid 0 v2 10.1.1.1 ens2",
        &[
            (0, "", "bnxt_re0:1#3", &[]),
            (0, "bnxt_re1", "", &["bnxt_re1:1: port not ACTIVE: state 1: DOWN", "3: Disabled"]),
        ],
    );
}

#[test]
fn l05_the_port_is_active_and_its_netdev_down() {
    managed(
        "net ens1 10.1.0.1/24 state=down carrier=0\nnic mlx5_0 0 ens1 10.1.0.1/24",
        &[
            (0, "", "", &["mlx5_0:1: netdev down: ens1 has operstate down, carrier 0"]),
            (0, "mlx5_0", "mlx5_0:1#3", &["KVRAIL_NICS names it, although: netdev down"]),
        ],
    );
}

#[test]
fn l06_two_vendors_on_one_node() {
    managed(
        "nic rocep177s0f0 0 ens2 10.1.1.1/24\nnic rocep99s0 0 ens1 10.1.0.1/24",
        &[
            (0, "", "rocep99s0:1#3 rocep177s0f0:1#3", &[]),
            (0, "rocep99s0", "rocep99s0:1#3", &[]),
            (0, "rocep99s0:1", "rocep99s0:1#3", &[]),
            (0, "rocep99s0/1", "rocep99s0:1#3", &[]),
        ],
    );
}

#[test]
fn l07_an_iwarp_nic_is_no_roce_nic() {
    managed(
        "dev irdma0 0 type=4:RNIC\nport 1 Ethernet 4:ACTIVE\nnet ens1 10.1.0.1/24\n\
         gid 0 v2 10.1.0.1 ens1",
        &[
            (0, "", "", &["irdma0:1: node type 4: RNIC: only 1: CA is a RoCE NIC"]),
            (0, "irdma0", "irdma0:1#0", &[]),
        ],
    );
}

#[test]
fn l08_infiniband() {
    let port = |n: u32| {
        format!(
            "dev mlx5_{n} 0\nport 1 InfiniBand 4:ACTIVE\nnet ib{n} 10.2.{n}.1/24\n\
                 gid 0 v1 fe80::1 ib{n}\n"
        )
    };
    let text: String = (0..4).map(port).collect();
    let lines: &[&str] = &[
        "\n  mlx5_0:1: link layer InfiniBand (node type 1: CA): RoCE needs Ethernet",
        "\n  mlx5_3:1: link layer InfiniBand",
    ];
    managed(&text, &[(0, "", "", lines), (0, "mlx5_0", "", &["link layer InfiniBand"])]);
}

#[test]
fn l09_ports_of_two_kinds() {
    managed(
        "dev mlx4_0 0\nport 1 InfiniBand 4:ACTIVE\ngid 0 v1 fe80::1 ib0\n\
         port 2 Ethernet 4:ACTIVE\nnet ens3d1 10.1.0.1/24\ngid 1 v2 10.1.0.1 ens3d1",
        &[
            (0, "", "mlx4_0:2#1", &[]),
            (0, "mlx4_0:2", "mlx4_0:2#1", &[]),
            (0, "mlx4_0:1", "", &["mlx4_0:1: link layer", "mlx4_0:2: not named in KVRAIL_NICS"]),
            (0, "mlx4_0/3", "", &["mlx4_0/3: no port `3` (ports of mlx4_0: 1, 2)"]),
        ],
    );
}

#[test]
fn l10_a_bond_is_one_rail() {
    managed(
        "nic mlx5_bond_0 0 bond0 10.1.0.1/24\nnet ens1f0np0\nnet ens1f1np1\n\
         file sys/class/net/bonding_masters bond0",
        &[(0, "", "mlx5_bond_0:1#3", &[])],
    );
}

#[test]
fn l11_a_vlan_of_the_bond_with_the_default_route() {
    let text = "dev mlx5_bond_0 0\nport 1 Ethernet 4:ACTIVE\nnet bond0 10.0.0.5/24\n\
                net bond0.100 10.1.0.5/24\ngid 3 v2 10.0.0.5 bond0\ngid 7 v2 10.1.0.5 bond0.100\n\
                default bond0 0";
    let shares = "bond0.100 shares its wire with bond0, which holds the default route";
    layout(
        text,
        &[(0, "", "mlx5_bond_0:1#7", &[shares]), (0, "mlx5_bond_0", "mlx5_bond_0:1#7", &[shares])],
    );
    // A VLAN's name says nothing of its parent; the links and procfs do.
    let named = text.replace("bond0.100", "storage");
    let shares = "storage shares its wire with bond0";
    layout(
        &format!("{named}\nfolder sys/class/net/storage/lower_bond0"),
        &[(0, "", "mlx5_bond_0:1#7", &[shares])],
    );
    layout(
        &format!("{named}\nfile proc/net/vlan/storage Device: bond0"),
        &[(0, "", "mlx5_bond_0:1#7", &[shares])],
    );
    layout(&named, &[(0, "", "mlx5_bond_0:1#7", &[])]);
}

#[test]
fn l12_every_nic_is_on_the_other_node() {
    let text = "nodes 2\nnic mlx5_0 0 ens1 10.1.0.1/24";
    let warned = "although: numa 0: it must sit on numa 1";
    managed(
        text,
        &[
            (1, "", "", &["mlx5_0:1: numa 0: it must sit on numa 1"]),
            (1, "mlx5_0", "mlx5_0:1#3", &[warned]),
        ],
    );
}

#[test]
fn l12b_a_virtual_function_of_the_other_node() {
    managed(
        "nodes 2\nnic mlx5_0 1 ens1 192.168.1.1/24\nnic mlx5_12 0 ens1v2 10.1.0.1/24\n\
         default ens1 0",
        &[(1, "", "", &["on numa=1\n", "mlx5_0:1: default route", "mlx5_12:1: numa 0"])],
    );
}

const SF: &str = "nodes 2\nnic rocep193s0f0 0 ens1 10.1.0.1/24\n\
    folder sys/class/infiniband/rocep193s0f0S88\n\
    folder sys/devices/pci0000:00/0000:01:00.0/mlx5_core.sf.4\n\
    link sys/bus/auxiliary/devices/mlx5_core.sf.4 \
    ../../../devices/pci0000:00/0000:01:00.0/mlx5_core.sf.4\n\
    link sys/class/infiniband/rocep193s0f0S88/device \
    ../../../bus/auxiliary/devices/mlx5_core.sf.4\n";

fn sub_function(gids: &str) -> String {
    let port = "sys/class/infiniband/rocep193s0f0S88/ports/1";
    format!(
        "{SF}file {port}/link_layer Ethernet\nfile {port}/state 4: ACTIVE\n\
         net ens1s88 10.1.88.1/24\n{}",
        gids.replace("PORT", port)
    )
}

#[test]
fn l13_a_sub_function_has_its_parents_node() {
    let zero = "file PORT/gids/0 0000:0000:0000:0000:0000:0000:0000:0000\nfolder PORT/gids/1";
    managed(
        &sub_function(zero),
        &[
            (0, "", "rocep193s0f0:1#3", &[]),
            (0, "rocep193s0f0S88", "", &["rocep193s0f0S88:1: no GID"]),
        ],
    );
    let good = "file PORT/gids/5 0000:0000:0000:0000:0000:ffff:0a01:5801\n\
                file PORT/gid_attrs/types/5 RoCE v2\nfile PORT/gid_attrs/ndevs/5 ens1s88";
    managed(
        &sub_function(good),
        &[
            (0, "", "rocep193s0f0:1#3 rocep193s0f0S88:1#5", &[]),
            (1, "", "", &["rocep193s0f0S88:1: numa 0"]),
        ],
    );
}

#[test]
fn l14_a_macvlan_pod_sees_its_own_gids_only() {
    for how in ["unreadable", "folder", "zero"] {
        let text = format!(
            "net net1 10.30.0.12/16\ndev mlx5_0 0\nport 1 Ethernet 4:ACTIVE\nempty 0 3 {how}\n\
             gid 4 v1 fe80::5 net1\ngid 5 v2 fe80::5 net1\ngid 6 v1 10.30.0.12 net1\n\
             gid 7 v2 10.30.0.12 net1\nempty 8 255 {how}"
        );
        managed(&text, &[(0, "", "mlx5_0:1#7", &[])]);
    }
}

#[test]
fn l15_link_local_comes_first_in_the_table() {
    managed(
        "net ens1 10.20.0.1/24\ndev mlx5_0 0\nport 1 Ethernet 4:ACTIVE\n\
         gid 0 v2 fe80::1 ens1\ngid 1 v2 10.20.0.1 ens1",
        &[(0, "", "mlx5_0:1#1", &[])],
    );
}

#[test]
fn l16_ipv6_alone_is_refused() {
    managed(
        "net ens1\ndev ionic_0 0\nport 1 Ethernet 4:ACTIVE\n\
         gid 0 v2 fe80::1 ens1\ngid 1 v2 fd93::5 ens1",
        &[
            (0, "", "", &["ionic_0:1: no IPv4 address on ens1"]),
            (0, "ionic_0", "", &["ionic_0:1: no IPv4 address on ens1"]),
        ],
    );
}

#[test]
fn l17_an_address_that_is_not_ours() {
    managed(
        "net eth1 10.40.8.252/24\ndev mlx5_0 0\nport 1 Ethernet 4:ACTIVE\n\
         gid 3 v2 10.40.8.250 -\ngid 7 v2 10.40.8.252 eth1",
        &[(0, "", "mlx5_0:1#7", &[])],
    );
    // On a netdev of ours, with an address that it has not.
    managed(
        "net eth1 10.40.8.252/24\ndev mlx5_0 0\nport 1 Ethernet 4:ACTIVE\n\
         gid 3 v2 10.40.8.250 eth1\ngid 7 v2 10.40.8.252 eth1",
        &[(0, "", "mlx5_0:1#7", &[])],
    );
    // The address is here, on another netdev than the GID's.
    managed(
        "net eth1\nnet eth2 10.40.8.250/24\ndev mlx5_0 0\nport 1 Ethernet 4:ACTIVE\n\
         gid 3 v2 10.40.8.250 eth1",
        &[(0, "", "", &["mlx5_0:1: no IPv4 address on eth1"])],
    );
    managed(
        "net eth1 10.40.8.252/24\ndev mlx5_0 0\nport 1 Ethernet 4:ACTIVE\ngid 3 v2 fe80::1 eth1",
        &[(0, "", "", &["mlx5_0:1: no RoCE v2 GID for 10.40.8.252 on eth1: no GID has that"])],
    );
    managed(
        "dev mlx5_0 0\nport 1 Ethernet 4:ACTIVE\ngid 3 v2 10.40.8.250 -",
        &[(0, "", "", &["mlx5_0:1: no netdev: none of its 1 GIDs belongs to a netdev"])],
    );
}

#[test]
fn l17b_roce_v1_is_never_taken() {
    let text = "net ens1 10.1.0.1/24\ndev mlx5_0 0\nport 1 Ethernet 4:ACTIVE\n\
                gid 2 v1 10.1.0.1 ens1";
    managed(
        text,
        &[
            (0, "", "", &["mlx5_0:1: no RoCE v2 GID for 10.1.0.1 on ens1: only GID 2 of another"]),
            (0, "mlx5_0", "", &["only GID 2"]),
        ],
    );
    managed(&format!("{text}\ngid 3 v2 10.1.0.1 ens1"), &[(0, "", "mlx5_0:1#3", &[])]);
}

#[test]
fn l18_a_virtual_machine_without_numa() {
    let nic = |n: u32| format!("nic mlx5_{n} -1 ens{n} 10.1.{n}.1/24\n");
    let text: String = (0..8).map(nic).collect();
    let all = (0..8).map(|n| format!("mlx5_{n}:1#3")).collect::<Vec<_>>().join(" ");
    let all = all.as_str();
    let unknown: &[&str] = &["mlx5_0:1: numa unknown", "mlx5_7:1: numa unknown"];
    let although = &["mlx5_3:1 is used because KVRAIL_NICS names it, although: numa unknown"];
    managed(
        &format!("nodes 2\n{text}"),
        &[(0, "", "", unknown), (-1, "", all, &[]), (0, "mlx5_3", "mlx5_3:1#3", although)],
    );
    managed(&format!("nodes 1\n{text}"), &[(0, "", all, &[])]);
    managed(&text, &[(0, "", all, &[])]);
}

#[test]
fn l19_two_in_one_subnet() {
    let text = "nic mlx5_0 0 ens1 10.1.0.1/24\nnic mlx5_1 0 ens2 10.1.0.2/24\n\
                nic mlx5_2 0 ens3 10.1.1.2/24";
    let all = "mlx5_0:1#3 mlx5_1:1#3 mlx5_2:1#3";
    let same = "same subnet 10.1.0.0/24: mlx5_0:1 (10.1.0.1), mlx5_1:1 (10.1.0.2);";
    managed(text, &[(0, "", all, &[same])]);
    // One /31 for each rail is how routed fabrics are built.
    managed(&text.replace("/24", "/31"), &[(0, "", all, &[])]);
    managed(&text.replace("/24", "/0"), &[(0, "", all, &["same subnet 0.0.0.0/0"])]);
}

const SOFT: &str = "nodes 2\nnic mlx5_7 1 ens7 10.9.0.1/24\n\
    dev rxe0 0 device=none\nport 1 Ethernet 4:ACTIVE\nnet eth1 10.1.0.1/24\n\
    file sys/class/infiniband/rxe0/parent eth1\n";

#[test]
fn l20_soft_roce_has_no_node() {
    let although = &["although: numa unknown (no PCI parent)"];
    for ndev in ["eth1", "-"] {
        let text = format!("{SOFT}gid 0 v2 fe80::1 {ndev}\ngid 1 v2 10.1.0.1 {ndev}");
        managed(
            &text,
            &[
                (0, "", "", &["rxe0:1: numa unknown (no PCI parent)", "mlx5_7:1: numa 1"]),
                (0, "rxe0", "rxe0:1#1", although),
                (-1, "", "mlx5_7:1#3 rxe0:1#1", &[]),
            ],
        );
    }
    // As the kernel lays it out: below the virtual devices, with no link named `device`.
    let home = "sys/devices/virtual/infiniband/rxe0";
    let real = format!("{SOFT}gid 1 v2 10.1.0.1 eth1");
    let tree = build(&real);
    std::fs::create_dir_all(tree.root.join("sys/devices/virtual/infiniband")).unwrap();
    std::fs::rename(tree.root.join("sys/class/infiniband/rxe0"), tree.root.join(home)).unwrap();
    tree.link("sys/class/infiniband/rxe0", &format!("../../../{home}"));
    assert_eq!(rails(&pick(&tree, 0, "rxe0")), "rxe0:1#1");
    assert!(pick(&tree, 0, "").explain().contains("rxe0:1: numa unknown (no PCI parent)"));
}

#[test]
fn l21_route_groups_limited_keys_and_other_node_types() {
    let mut text = String::new();
    for n in 0..4 {
        text += &format!("nic mlx5_{n} 0 ens{n} 172.{}.{n}.1/13\n", 16 + 8 * (n % 2));
        let key = if n == 3 { "0x7fff" } else { "0xffff" };
        text += &format!("file sys/class/infiniband/mlx5_{n}/ports/1/pkeys/0 {key}\n");
    }
    text += "dev efa_0 0 type=7:unspecified\nport 1 Unknown 4:ACTIVE\nempty 0 0 zero\n\
             dev usnic_0 0 type=7:unspecified\nport 1 Ethernet 4:ACTIVE\nempty 0 0 folder\n";
    let all = "mlx5_0:1#3 mlx5_1:1#3 mlx5_2:1#3 mlx5_3:1#3";
    let warned: &[&str] = &[
        "same subnet 172.16.0.0/13: mlx5_0:1 (172.16.0.1), mlx5_2:1 (172.16.2.1);",
        "same subnet 172.24.0.0/13: mlx5_1:1 (172.24.1.1), mlx5_3:1 (172.24.3.1);",
        "mlx5_3:1: partition key 0x7fff is a limited member",
    ];
    managed(
        &text,
        &[
            (0, "", all, warned),
            (
                0,
                "efa_0,usnic_0",
                "",
                &["efa_0:1: link layer Unknown (node type 7: unspecified)", "usnic_0:1: no GID"],
            ),
        ],
    );
    let found = pick(&build(&text), 0, "");
    let reason = crate::reason(&found, "usnic_0:1");
    assert!(reason.starts_with("node type 7: unspecified"), "{reason}");
}

#[test]
fn l22_no_gid_at_all() {
    managed(
        "dev mlx5_0 0\nport 1 Ethernet 4:ACTIVE\n\
         dev mlx5_1 0\nport 1 Ethernet 4:ACTIVE\nempty 0 255 zero\n\
         dev mlx5_2 0",
        &[(0, "", "", &["mlx5_0:1: no GID", "mlx5_1:1: no GID", "mlx5_2: no port"])],
    );
}

#[test]
fn l23_two_ports_of_256_gids() {
    let mut text = String::from("dev mlx5_0 0\n");
    for port in 1..=2 {
        text += &format!("port {port} Ethernet 4:ACTIVE\nnet ens{port} 10.{port}.0.1/24\n");
        for n in 0..255 {
            text += &format!("gid {n} v{} fe80::{n} ens{port}\n", 1 + n % 2);
        }
        text += &format!("gid 255 v2 10.{port}.0.1 ens{port}\n");
    }
    managed(
        &text,
        &[(0, "", "mlx5_0:1#255 mlx5_0:2#255", &[]), (0, "mlx5_0:2", "mlx5_0:2#255", &[])],
    );
}

#[test]
fn l24_each_gid_is_bound_to_its_own_netdev() {
    let mut text = String::from("net eth10 10.1.0.100/16\ndefault eth10 0\n");
    for n in 0..12 {
        text += &format!("nic mlx5_{n} 0 eth{} 10.{}.0.1/24\n", (n + 3) % 12 + 20, n + 50);
    }
    let tree = build(&text);
    let found = pick(&tree, 0, "");
    let seen: Vec<String> =
        found.nics.iter().map(|n| format!("{} {} {}", n.device, n.netdev, n.ipv4)).collect();
    let expected: Vec<String> =
        (0..12).map(|n| format!("mlx5_{n} eth{} 10.{}.0.1", (n + 3) % 12 + 20, n + 50)).collect();
    assert_eq!(seen, expected);
}
