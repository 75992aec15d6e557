//! The text forms of addresses and default routes (`docs/nic-selection.md` lists them).

use crate::tree::build;
use crate::{pick, rails};
use kvrail::host::nics::{parse_routes, Addresses};

fn addresses(text: &str, netdev: &str) -> String {
    let found = Addresses::parse(text);
    let list = found.of(netdev).iter().map(|(ip, prefix)| format!("{ip}/{prefix}"));
    list.collect::<Vec<_>>().join(" ")
}

#[test]
fn addresses_in_every_form() {
    for text in [
        "ens1 10.1.0.1/20 10.2.0.1",
        "ens1\t10.1.0.1/20\nens1\t10.2.0.1/24",
        "# a comment\n\nens1 10.1.0.1/20 # the rail\nens1: 10.2.0.1",
        "ens1: 10.1.0.1/20, 10.2.0.1",
        "ens1:10.1.0.1/20\nens1 : 10.2.0.1",
        "ens1=10.1.0.1/20\nens1 = 10.2.0.1",
        "ens1,10.1.0.1/20\nens1;10.2.0.1",
        "10.1.0.1/20 ens1\n10.2.0.1 ens1",
        "\"ens1\": [\"10.1.0.1/20\", \"10.2.0.1/24\"],",
        "2: ens1    inet 10.1.0.1/20 brd 10.1.15.255 scope global ens1\\  valid_lft forever\n\
         2: ens1    inet 10.2.0.1/24 scope global secondary ens1:1",
        "2: ens1@if7    inet 10.1.0.1/20 scope global ens1\nens1@if7 10.2.0.1",
        "2: ens1: <BROADCAST,UP> mtu 1500 qdisc mq state UP group default\n\
         \x20   link/ether 02:00:00:00:00:01 brd ff:ff:ff:ff:ff:ff\n\
         \x20   inet 10.1.0.1/20 brd 10.1.15.255 scope global ens1\n\
         \x20   inet 10.2.0.1/24 scope global secondary ens1\n\
         \x20   inet6 fe80::1/64 scope link",
        "ens1             UP             10.1.0.1/20 10.2.0.1/24",
        "{\"netdev\":\"ens1\",\"ipv4\":\"10.1.0.1/20\"}\ndev ens1 addr 10.2.0.1",
        "ens1 inet 10.1.0.1/20\nens1 inet 10.2.0.1",
        "ens1 10.1.0.1/20\r\nens1 10.2.0.1\r\n",
        "ens1 10.1.0.1/20\nens1 10.1.0.1/20\nens1 10.2.0.1",
    ] {
        assert_eq!(addresses(text, "ens1"), "10.1.0.1/20 10.2.0.1/24", "{text}");
    }
    for none in [
        "ens1",
        "ens1 -",
        "ens1: none",
        "ens1 10.1.0.1/33",
        "ens1 10.1.0",
        "ens1 fe80::1/64",
        "#ens1 10.1.0.1",
        "10.1.0.1",
        "inet 10.1.0.1/24",
        "ens1 10.1.0.1.2",
    ] {
        assert_eq!(addresses(none, "ens1"), "", "{none}");
        assert_eq!(Addresses::parse(none), Addresses::default(), "{none}");
    }
}

fn routes(text: &str) -> String {
    let routes = parse_routes(text).into_iter().map(|r| format!("{} {}", r.netdev, r.metric));
    routes.collect::<Vec<_>>().join(", ")
}

#[test]
fn default_routes_in_every_form() {
    for text in [
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
         eno1\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
         eno1\t0000A8C0\t00000000\t0001\t0\t0\t50\t00FFFFFF\t0\t0\t0",
        "default via 192.168.0.1 dev eno1 proto dhcp src 192.168.0.9 metric 100\n\
         192.168.0.0/24 dev eno1 proto kernel scope link src 192.168.0.9 metric 50",
        "default dev eno1 metric 100 # the management",
        "default via 10.0.0.1 dev eno1 table main metric 100\n\
         default via 10.1.0.1 dev ens1 table 100\ndefault via fe80::1 dev ens1 metric 1",
        "eno1 metric 100",
        "eno1 100",
        "eno1: 100",
        "eno1,100",
        "eno1=100",
        "default eno1 100",
        "default: eno1 100",
        "default = eno1 metric=100",
        "{\"netdev\": \"eno1\", \"metric\":100}",
        "iface=eno1 metric=100",
        "eno1 default via 10.0.0.1 metric 100",
        "eno1 10.0.0.1 100",
        "0.0.0.0/0 via 10.0.0.1 dev eno1 metric 100",
        "via 10.0.0.1 dev eno1 metric 100\ndefault via 10.0.0.1 dev eno1 metric 100",
        "0.0.0.0 10.0.0.1 0.0.0.0 UG 100 0 0 eno1\n10.1.0.0 0.0.0.0 255.255.255.0 U 0 0 0 ens1",
        "\nunreachable default metric 1\nblackhole default dev lo\neno1 100\n\n",
    ] {
        assert_eq!(routes(text), "eno1 100", "{text}");
    }
    for text in [
        "eno1",
        "default via 10.0.0.1 dev eno1",
        "default dev eno1",
        "dev eno1",
        "default eno1",
        "default via inet6 fe80::1 dev eno1",
        "eno1 metric x",
    ] {
        assert_eq!(routes(text), "eno1 0", "{text}");
    }
    for text in [
        "default metric 7\n\tnexthop via 10.0.0.1 dev a weight 1\n\
                  \tnexthop via 10.0.0.2 dev b weight 1\n10.0.0.0/8 dev c",
        "default proto static metric 7 \\\tnexthop via 10.0.0.1 dev a weight 1 \
                  \\\tnexthop via 10.0.0.2 dev b weight 1",
    ] {
        assert_eq!(routes(text), "a 7, b 7", "{text}");
    }
    for none in [
        "",
        "-",
        "none",
        "# eno1",
        "10.0.0.0/8 dev eno1",
        "10.0.0.0/8 eno1",
        "10.0.0.1",
        "default",
        "nexthop via 10.0.0.1 dev a",
        "Iface Destination Gateway",
    ] {
        assert_eq!(routes(none), "", "{none}");
    }
}

#[test]
fn a_root_of_another_brings_its_texts_in_files() {
    let names = [
        "ipv4",
        "ipv4.txt",
        "addresses",
        "addresses.txt",
        "ipv4_addresses",
        "ipv4_addresses.txt",
        "addrs",
        "addrs.txt",
        "netdev-IPv4.conf",
        "proc/net/kvrail_ipv4",
    ];
    for name in names {
        let tree = build("net ens1\nnic mlx5_0 0 ens1 10.1.0.1/24");
        assert_eq!(rails(&pick(&tree, 0, "")), "", "{name}");
        tree.file(name, "ens1 10.1.0.1/24");
        assert_eq!(rails(&pick(&tree, 0, "")), "mlx5_0:1#3", "{name}");
    }
    let names = [
        "routes",
        "routes.txt",
        "Default-Route.list",
        "default_routes",
        "default_routes.txt",
        "route",
        "proc/net/route",
    ];
    for name in names {
        let tree = build("nic mlx5_0 0 ens1 10.1.0.1/24");
        tree.file(name, "default via 10.1.0.254 dev ens1 metric 5");
        assert_eq!(rails(&pick(&tree, 0, "")), "", "{name}");
    }
}
