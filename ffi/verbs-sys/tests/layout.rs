//! The committed types against C's, for each processor, by a compiler of that processor. The
//! numbers are those of the assertions in the files, which Rust's own compiler checks: for this
//! machine in the crate, for the other one here.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests fail by panicking, and nobody reads their docs"
)]

mod support;

use core::fmt::Write as _;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use support::{folder, has, skip};

#[allow(dead_code, unreachable_pub, reason = "only their layout is looked at")]
#[path = "support/aarch64.rs"]
mod aarch64;

/// C's words for types that have no name there.
const NAMELESS: &[(&str, &str)] = &[
    ("ibv_async_event_element", "__typeof__(((struct ibv_async_event *)0)->element)"),
    ("ibv_gid", "union ibv_gid"),
    ("ibv_gid_global", "__typeof__(((union ibv_gid *)0)->global)"),
    ("ibv_odp_per_transport_caps", "__typeof__(((struct ibv_odp_caps *)0)->per_transport_caps)"),
    ("ibv_send_wr_atomic", "__typeof__(((struct ibv_send_wr *)0)->wr.atomic)"),
    ("ibv_send_wr_bind_mw", "__typeof__(((struct ibv_send_wr *)0)->bind_mw)"),
    ("ibv_send_wr_qp_type", "__typeof__(((struct ibv_send_wr *)0)->qp_type)"),
    ("ibv_send_wr_rdma", "__typeof__(((struct ibv_send_wr *)0)->wr.rdma)"),
    ("ibv_send_wr_tso", "__typeof__(((struct ibv_send_wr *)0)->tso)"),
    ("ibv_send_wr_ud", "__typeof__(((struct ibv_send_wr *)0)->wr.ud)"),
    ("ibv_send_wr_wr", "__typeof__(((struct ibv_send_wr *)0)->wr)"),
    ("ibv_send_wr_xrc", "__typeof__(((struct ibv_send_wr *)0)->qp_type.xrc)"),
];

/// Unions without a type or a field name in C: the struct that holds them, our name of the field,
/// and their members there.
const ANONYMOUS: &[(&str, &str, &str, &[&str])] = &[
    ("ibv_send_wr", "anon1", "ibv_send_wr_imm", &["imm_data", "invalidate_rkey"]),
    ("ibv_send_wr", "anon2", "ibv_send_wr_extra", &["bind_mw", "tso"]),
    ("ibv_wc", "anon1", "ibv_wc_imm", &["imm_data", "invalidated_rkey"]),
];

fn c_type(name: &str) -> String {
    let known = NAMELESS.iter().find(|(ours, _)| *ours == name);
    known.map_or_else(|| format!("struct {name}"), |(_, c)| (*c).to_owned())
}

/// What the assertions of a file of types say, as assertions in C.
fn assertions(text: &str) -> String {
    let mut out = String::new();
    let mut sized = BTreeSet::new();
    // One assertion is `["what"][expression - NUMBERusize];`, on one line or several.
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in flat.split("[\"").skip(1) {
        let (what, rest) = part.split_once("\"]").expect("the end of a text");
        let number = rest.split_once("usize]").expect("a number").0;
        let number = number.rsplit(' ').next().expect("a number");
        let union = ANONYMOUS.iter().any(|(_, _, name, _)| what.contains(name));
        let check = if let Some(name) = what.strip_prefix("Size of ") {
            sized.insert(name.to_owned());
            format!("sizeof({})", c_type(name))
        } else if let Some(name) = what.strip_prefix("Alignment of ") {
            format!("_Alignof({})", c_type(name))
        } else {
            let field = what.strip_prefix("Offset of field: ").expect("no other kind");
            let (name, field) = field.split_once("::").expect("a field");
            let hidden = ANONYMOUS.iter().find(|a| a.0 == name && a.1 == field);
            let field = hidden.map_or(field.trim_end_matches('_'), |a| a.3[0]);
            format!("__builtin_offsetof({}, {field})", c_type(name))
        };
        if !union {
            writeln!(out, "_Static_assert({check} == {number}, \"{what}: Rust has {number}\");")
                .unwrap();
        }
    }
    for line in text.lines() {
        let name = line.strip_prefix("pub struct ").or_else(|| line.strip_prefix("pub union "));
        if let Some(name) = name.and_then(|name| name.split([' ', '<']).next()) {
            assert!(sized.contains(name), "the file asserts nothing about {name}");
        }
    }
    out
}

/// The unions that C has no word for, member by member.
fn unions() -> String {
    let mut out = String::new();
    for (outer, _, name, members) in ANONYMOUS {
        let first = members[0];
        for member in *members {
            writeln!(
                out,
                "_Static_assert(__builtin_offsetof(struct {outer}, {member}) == \
                 __builtin_offsetof(struct {outer}, {first}), \"{name}: {member}\");"
            )
            .unwrap();
        }
    }
    out
}

/// Constants and the widths of the names for integers, as assertions in C.
fn constants(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let Some((name, rest)) = line.strip_prefix("pub const ").and_then(|l| l.split_once(": "))
        else {
            continue;
        };
        let value = rest.split_once(" = ").expect("a value").1.trim_end_matches(';');
        writeln!(out, "_Static_assert({name} == {value}, \"{name}: Rust has {value}\");").unwrap();
    }
    for line in text.lines() {
        let Some((name, kind)) = line.strip_prefix("pub type ").and_then(|l| l.split_once(" = "))
        else {
            continue;
        };
        let size = match kind.trim_end_matches(';') {
            "core::ffi::c_uchar" => 1,
            "core::ffi::c_ushort" => 2,
            "core::ffi::c_uint" | "core::ffi::c_int" | "__u32" => 4,
            "core::ffi::c_ulonglong" | "__u64" => 8,
            other => panic!("{name} is a new kind of integer, {other}"),
        };
        let word = if name.starts_with("__") { "" } else { "enum " };
        writeln!(out, "_Static_assert(sizeof({word}{name}) == {size}, \"{name}\");").unwrap();
    }
    out
}

/// Constants that the crate writes by hand.
fn by_hand() -> String {
    use rdma_core_sys as ours;
    let mut out = String::new();
    for (name, value) in [
        ("IBV_LINK_LAYER_UNSPECIFIED", u32::from(ours::IBV_LINK_LAYER_UNSPECIFIED)),
        ("IBV_LINK_LAYER_INFINIBAND", u32::from(ours::IBV_LINK_LAYER_INFINIBAND)),
        ("IBV_LINK_LAYER_ETHERNET", u32::from(ours::IBV_LINK_LAYER_ETHERNET)),
        ("IBV_ACCESS_OPTIONAL_RANGE", ours::IBV_ACCESS_OPTIONAL_RANGE),
    ] {
        writeln!(out, "_Static_assert({name} == {value}, \"{name}: Rust has {value}\");").unwrap();
    }
    out
}

/// The headers of the release that the types are from; any other's structs may be longer.
fn headers() -> Result<(), String> {
    let version = Command::new("pkg-config").args(["--modversion", "libibverbs"]).output();
    let version = version.ok().filter(|out| out.status.success());
    let Some(version) = version.and_then(|out| String::from_utf8(out.stdout).ok()) else {
        return Err("no headers of libibverbs; install libibverbs-dev and pkg-config".into());
    };
    if version.starts_with("1.14.44.") {
        return Ok(());
    }
    Err(format!("the headers are of libibverbs {}, the types of 1.14.44", version.trim()))
}

/// What the compiler says to the program, or nothing.
fn compile(cc: &str, name: &str, source: &str) -> String {
    let dir = folder("layout");
    let file = dir.join(format!("{name}.c"));
    fs::write(&file, source).expect("write the program");
    // The headers are the same for every processor, but those of its C library come first.
    let out = Command::new(cc)
        .args(["-std=gnu11", "-fsyntax-only", "-fmax-errors=20", "-idirafter", "/usr/include"])
        .arg(&file)
        .output()
        .expect("run the compiler");
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.success(), text.is_empty(), "{cc}: {text}");
    text
}

fn agrees(cc: &str, package: &str, arch: &str) {
    let name = format!("types_{arch}.rs");
    let skipped = format!("layout of {name}");
    if let Err(why) = headers() {
        return skip(&format!("{skipped}: {why}"));
    }
    if !has(cc) {
        return skip(&format!("{skipped}: no compiler {cc}; install {package}"));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(&name);
    let text = fs::read_to_string(path).expect("the types");
    let checks = [assertions(&text), unions(), constants(&text), by_hand()].concat();
    assert!(checks.lines().count() > 600, "only {} checks", checks.lines().count());
    let head = "#include <infiniband/verbs.h>\n";
    assert_eq!(compile(cc, arch, &format!("{head}{checks}")), "", "{name} differs from C");
    // The compiler does refuse a number that is wrong.
    let wrong = "_Static_assert(sizeof(struct ibv_sge) == 15, \"ibv_sge is not 15\");\n";
    let text = compile(cc, &format!("{arch}_wrong"), &format!("{head}{wrong}"));
    assert!(text.contains("ibv_sge is not 15"), "{text}");
}

#[test]
fn the_types_of_x86_64_are_those_of_c() {
    let native = cfg!(target_arch = "x86_64");
    agrees(if native { "cc" } else { "x86_64-linux-gnu-gcc" }, "gcc", "x86_64");
}

#[test]
fn the_types_of_aarch64_are_those_of_c() {
    let native = cfg!(target_arch = "aarch64");
    agrees(if native { "cc" } else { "aarch64-linux-gnu-gcc" }, "gcc-aarch64-linux-gnu", "aarch64");
}
