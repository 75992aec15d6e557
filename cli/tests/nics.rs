//! `kvrail nics` as a program: its table, its JSON, its exit status.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

#[path = "../../tests/nics/tree.rs"]
mod tree;

use std::process::{Command, Output};

use tree::{build, Tree};

const TWO: &str = "nodes 2\nnet eno1 192.168.0.9/24\ndefault eno1 100\n\
    nic mlx5_0 0 ens1 10.1.0.1/24\nnic mlx5_1 1 ens2 10.1.1.1/24\n\
    file sys/bus/pci/devices/0000:c1:00.0/numa_node 1\n\
    file sys/class/rebellions/rbln0/device/numa_node 0\n\
    file sys/class/rebellions/rbln1/device/numa_node -1\n";

fn kvrail(tree: &Tree, env: &[(&str, &str)], args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvrail"));
    for name in ["KVRAIL_NUMA_NODE", "KVRAIL_NICS"] {
        command.env_remove(name);
    }
    command.env("KVRAIL_SYSROOT", &tree.root).envs(env.iter().copied());
    command.arg("nics").args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    core::str::from_utf8(bytes).unwrap()
}

#[test]
fn the_table_shows_every_port_and_its_reason() {
    let output = kvrail(&build(TWO), &[], &["--numa", "0"]);
    let expected = "\
DEVICE    VERDICT  NETDEV  IPV4         GID  NUMA  SPEED  MTU   REASON
mlx5_0:1  rail     ens1    10.1.0.1/24  3    0     100G   4200
mlx5_1:1  refused  ens2    10.1.1.1     3    1     100G   4200  numa 1: it must sit on numa 0
";
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), expected));
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn no_rail_is_status_1_with_the_reasons() {
    let output = kvrail(&build(TWO), &[], &["--numa", "2"]);
    let expected = "no usable data-plane RoCE NIC on numa=2\n  \
        mlx5_0:1: numa 0: it must sit on numa 2\n  mlx5_1:1: numa 1: it must sit on numa 2\n";
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(1), expected));
    assert_eq!(text(&output.stdout).lines().count(), 3);
}

fn chosen(tree: &Tree, env: &[(&str, &str)], args: &[&str]) -> String {
    let all = [args, &["--json"]].concat();
    let output = kvrail(tree, env, &all);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{args:?}: {e}: {}", text(&output.stderr)));
    let ports = json["ports"].as_array().unwrap();
    let rails: Vec<&str> = ports
        .iter()
        .filter(|p| p["verdict"] == "rail")
        .map(|p| p["device"].as_str().unwrap())
        .collect();
    assert_eq!(json["rails"], rails.len(), "{json}");
    assert_eq!(output.status.code(), Some(i32::from(rails.is_empty())), "{json}");
    assert_eq!(json["error"].is_null(), !rails.is_empty(), "{json}");
    rails.join(" ")
}

#[test]
fn the_node_comes_from_the_option_the_device_or_the_environment() {
    let tree = build(TWO);
    let node = |n| [("KVRAIL_NUMA_NODE", n)];
    assert_eq!(chosen(&tree, &[], &[]), "mlx5_0 mlx5_1");
    assert_eq!(chosen(&tree, &[], &["--numa", "-1"]), "mlx5_0 mlx5_1");
    assert_eq!(chosen(&tree, &[], &["--numa", "1"]), "mlx5_1");
    assert_eq!(chosen(&tree, &node("1"), &[]), "mlx5_1");
    assert_eq!(chosen(&tree, &node(""), &[]), "mlx5_0 mlx5_1");
    assert_eq!(chosen(&tree, &node("1"), &["--numa", "0"]), "mlx5_0");
    assert_eq!(chosen(&tree, &node("0"), &["--device", "0000:c1:00.0"]), "mlx5_1");
    assert_eq!(chosen(&tree, &node("1"), &["--device", "rbln0"]), "mlx5_0");
    assert_eq!(chosen(&tree, &node("1"), &["--device", "rbln1"]), "mlx5_0 mlx5_1");
}

#[test]
fn names_come_from_the_option_or_the_environment() {
    let tree = build(TWO);
    let names = |n| [("KVRAIL_NICS", n)];
    assert_eq!(chosen(&tree, &names("mlx5_1"), &["--numa", "0"]), "mlx5_1");
    assert_eq!(chosen(&tree, &names(""), &["--numa", "0"]), "mlx5_0");
    assert_eq!(chosen(&tree, &names("mlx5_1"), &["--nics", "mlx5_0:1"]), "mlx5_0");
    assert_eq!(chosen(&tree, &[], &["--nics", "mlx5_0/1,mlx5_1"]), "mlx5_0 mlx5_1");
    assert_eq!(chosen(&tree, &[], &["--nics", "mlx5_7"]), "");
    let output = kvrail(&tree, &[], &["--nics", "mlx5_7"]);
    let named = "KVRAIL_NICS names mlx5_7: no such device; here are: mlx5_0:1, mlx5_1:1";
    assert!(text(&output.stderr).contains(named), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains(&format!("warning: {named}")));
}

#[test]
fn the_json_form_is_stable() {
    let tree = build("nodes 2\nnic mlx5_0 0 ens1 10.1.0.1/24\ndefault ens9 5");
    let output = kvrail(&tree, &[], &["--json", "--numa", "0"]);
    let expected = r#"{
  "default_routes": [
    {
      "metric": 5,
      "netdev": "ens9"
    }
  ],
  "error": null,
  "numa": 0,
  "ports": [
    {
      "device": "mlx5_0",
      "gid": "::ffff:10.1.0.1",
      "gid_index": 3,
      "ifindex": 2,
      "ipv4": "10.1.0.1",
      "mtu": 4200,
      "netdev": "ens1",
      "numa": 0,
      "port": 1,
      "prefix": 24,
      "reason": "",
      "speed_mbps": 100000,
      "state": "4: ACTIVE",
      "verdict": "rail",
      "warnings": []
    }
  ],
  "rails": 1,
  "unknown": [],
  "version": 1,
  "warnings": []
}
"#;
    assert_eq!(text(&output.stdout), expected);
}

#[test]
fn bad_usage_is_status_2_and_says_what_is_allowed() {
    let tree = build(TWO);
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str], &'a str);
    let cases: &[Case<'_>] = &[
        (&[], &["--numa", "x"], "must be 0 to 65535, or -1 for unknown"),
        (&[], &["--numa", "-2"], "must be 0 to 65535"),
        (&[("KVRAIL_NUMA_NODE", "many")], &[], "KVRAIL_NUMA_NODE=many: must be 0 to 65535"),
        (&[], &["--device", "rbln7"], "--device rbln7: it is not there"),
        (&[], &["--device", "rbln0", "--numa", "1"], "cannot be used with"),
        (&[], &["--jsn"], "--json"),
        (&[("KVRAIL_SYSROOT", "/no/such")], &[], "/no/such is no folder"),
    ];
    for (env, args, expected) in cases {
        let output = kvrail(&tree, env, args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {output:?}");
        assert!(text(&output.stderr).contains(expected), "{args:?}: {}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "", "{args:?}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_kvrail")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("nics"), "{}", text(&output.stderr));
}

#[test]
fn help_names_the_exit_status_and_the_variables() {
    let output = kvrail(&build(""), &[], &["--help"]);
    assert_eq!(output.status.code(), Some(0));
    for word in ["Exit status", "KVRAIL_NICS", "KVRAIL_SYSROOT", "KVRAIL_NUMA_NODE"] {
        assert!(text(&output.stdout).contains(word), "{word}: {}", text(&output.stdout));
    }
}

#[test]
fn the_live_host_is_shown_too() {
    let output = kvrail(&build(""), &[("KVRAIL_SYSROOT", "")], &[]);
    assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
    assert!(text(&output.stdout).starts_with("DEVICE"), "{output:?}");
}
