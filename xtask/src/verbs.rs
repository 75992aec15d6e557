//! `ffi/verbs-sys/src/types_*.rs`: the types and constants of libibverbs that kvrail uses, read by
//! bindgen from the headers of the oldest rdma-core that is supported.
//!
//! Only this task needs the headers and libclang; what it writes is in git. The files follow from
//! the headers of one release, so any other release of rdma-core is as good as none.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use bindgen::callbacks::{DeriveTrait, ImplementsTrait, ParseCallbacks};

use crate::Failure;

/// Release of rdma-core whose headers are read: Debian 12's.
const RELEASE: &str = "1.14.44.";

/// What Debian calls the packages that hold all of it.
const PACKAGES: &str = "libibverbs-dev pkg-config libclang-dev libc6-dev-arm64-cross";

/// A processor that the bindings are made for.
#[derive(Debug)]
pub struct Target {
    /// The file that is written, from the repository's root.
    pub path: &'static str,
    triple: &'static str,
    /// Headers of its C library, where they are not the machine's own.
    sysroot: Option<&'static str>,
}

/// Every target, the machine that kvrail is tested on first.
pub const TARGETS: [Target; 2] = [
    Target {
        path: "ffi/verbs-sys/src/types_x86_64.rs",
        triple: "x86_64-unknown-linux-gnu",
        sysroot: Some("/usr/include/x86_64-linux-gnu"),
    },
    Target {
        path: "ffi/verbs-sys/src/types_aarch64.rs",
        triple: "aarch64-unknown-linux-gnu",
        sysroot: Some("/usr/aarch64-linux-gnu/include"),
    },
];

/// A generated text, or why this machine cannot make it.
#[derive(Debug)]
pub enum Made {
    /// The file's text.
    Text(String),
    /// What is missing, and how to get it.
    Skipped(String),
}

/// Types to write, as one pattern; with them go the inner ones that have no name in C. What stands
/// only behind pointers is left to `src/opaque.rs`: the crate does not compile without it.
const TYPES: &str = "verbs_context|__be(32|64)|__u(8|16|32|64)|_ibv_device_ops|\
    ibv_(access_flags|ah_attr|async_event|atomic_cap|comp_channel|context|context_ops|cq|\
    cq_moderation_caps|device|device_attr|device_attr_ex|device_cap_flags|event_type|fork_status|\
    gid|gid_entry|gid_type|global_route|mig_state|mr|mtu|mw_bind_info|mw_type|node_type|odp_caps|\
    odp_general_caps|odp_transport_cap_bits|packet_pacing_caps|parent_domain_init_attr|\
    pci_atomic_caps|pd|port_attr|port_cap_flags|port_state|qp|qp_attr|qp_attr_mask|qp_cap|\
    qp_init_attr|qp_state|qp_type|query_device_ex_input|raw_packet_caps|recv_wr|\
    rss_caps|send_flags|send_wr|sge|td|td_init_attr|tm_caps|transport_type|tso_caps|wc|wc_flags|\
    wc_opcode|wc_status|wr_opcode)(__bindgen_ty_[0-9_a-z]*)?";

/// Names for what has none in C, the inner ones first.
const NAMES: &[(&str, &str)] = &[
    ("ibv_async_event__bindgen_ty_1", "ibv_async_event_element"),
    ("ibv_gid__bindgen_ty_1", "ibv_gid_global"),
    ("ibv_odp_caps__bindgen_ty_1", "ibv_odp_per_transport_caps"),
    ("ibv_send_wr__bindgen_ty_2__bindgen_ty_1", "ibv_send_wr_rdma"),
    ("ibv_send_wr__bindgen_ty_2__bindgen_ty_2", "ibv_send_wr_atomic"),
    ("ibv_send_wr__bindgen_ty_2__bindgen_ty_3", "ibv_send_wr_ud"),
    ("ibv_send_wr__bindgen_ty_3__bindgen_ty_1", "ibv_send_wr_xrc"),
    ("ibv_send_wr__bindgen_ty_4__bindgen_ty_1", "ibv_send_wr_bind_mw"),
    ("ibv_send_wr__bindgen_ty_4__bindgen_ty_2", "ibv_send_wr_tso"),
    ("ibv_send_wr__bindgen_ty_1", "ibv_send_wr_imm"),
    ("ibv_send_wr__bindgen_ty_2", "ibv_send_wr_wr"),
    ("ibv_send_wr__bindgen_ty_3", "ibv_send_wr_qp_type"),
    ("ibv_send_wr__bindgen_ty_4", "ibv_send_wr_extra"),
    ("ibv_wc__bindgen_ty_1", "ibv_wc_imm"),
];

/// Opaque types may be behind pointers of types that are copied and printed.
#[derive(Debug)]
struct Pointees;

impl ParseCallbacks for Pointees {
    fn blocklisted_type_implements_trait(
        &self,
        _name: &str,
        derive: DeriveTrait,
    ) -> Option<ImplementsTrait> {
        let plain = matches!(derive, DeriveTrait::Copy | DeriveTrait::Debug);
        Some(if plain { ImplementsTrait::Yes } else { ImplementsTrait::No })
    }
}

/// The text for `target`.
pub fn generate(root: &Path, target: &Target) -> Result<Made, Failure> {
    if let Some(missing) = missing(target) {
        return Ok(skipped(target, &missing));
    }
    let mut builder = bindgen::Builder::default()
        .header_contents("verbs.h", "#include </usr/include/infiniband/verbs.h>\n")
        .clang_arg(format!("--target={}", target.triple));
    for folder in target.sysroot.iter().chain(&["/usr/include"]) {
        builder = builder.clang_args(["-isystem", folder]);
    }
    let bindings = builder
        .use_core()
        .ctypes_prefix("core::ffi")
        .allowlist_type(TYPES)
        .allowlist_var("IBV_ACCESS_OPTIONAL_FIRST")
        .allowlist_recursively(false)
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .anon_fields_prefix("anon")
        .generate_comments(false)
        .layout_tests(true)
        .disable_header_comment()
        .parse_callbacks(Box::new(Pointees))
        .formatter(bindgen::Formatter::None)
        .generate();
    let text = match bindings {
        Ok(bindings) => bindings.to_string(),
        // Such as clang's own headers, which are not in the package of its library.
        Err(e) if e.to_string().contains("file not found") => {
            return Ok(skipped(target, e.to_string().trim()));
        }
        Err(e) => return Err(Failure(format!("bindgen cannot read infiniband/verbs.h: {e}"))),
    };
    Ok(Made::Text(format(root, &polish(&text, target)?)?))
}

fn skipped(target: &Target, missing: &str) -> Made {
    Made::Skipped(format!("{}: {missing}; Debian 12 has it: {PACKAGES}", target.path))
}

/// The first thing that this machine lacks.
fn missing(target: &Target) -> Option<String> {
    match output("pkg-config", &["--modversion", "libibverbs"]) {
        None => return Some("no pkg-config or no headers of libibverbs".into()),
        Some(version) if !version.starts_with(RELEASE) => {
            let version = version.trim();
            return Some(format!("the headers are of libibverbs {version}, not of {RELEASE}*"));
        }
        Some(_) => {}
    }
    for folder in target.sysroot.iter().chain(&["/usr/include"]) {
        if fs::metadata(Path::new(folder)).is_err() {
            return Some(format!("no C headers in {folder}"));
        }
    }
    if output("rustfmt", &["--version"]).is_none() {
        return Some("no rustfmt".into());
    }
    // Bindgen takes the libclang that is loaded, and panics where it finds none.
    clang_sys::load().err().map(|e| format!("no libclang ({e})"))
}

fn output(program: &str, args: &[&str]) -> Option<String> {
    let out = Command::new(program).args(args).output().ok().filter(|out| out.status.success())?;
    String::from_utf8(out.stdout).ok()
}

/// As `cargo fmt` would leave it.
fn format(root: &Path, text: &str) -> Result<String, Failure> {
    let failed = |e: &dyn core::fmt::Display| Failure(format!("rustfmt failed: {e}"));
    let mut child = Command::new("rustfmt")
        .args(["--edition", "2021", "--config-path"])
        .arg(root.join("rustfmt.toml"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| failed(&e))?;
    // It reads all before it writes, so neither waits for the other. Dropping the pipe ends it.
    let pipe = child.stdin.take();
    pipe.map_or(Ok(()), |mut pipe| pipe.write_all(text.as_bytes())).map_err(|e| failed(&e))?;
    let out = child.wait_with_output().map_err(|e| failed(&e))?;
    if !out.status.success() {
        return Err(failed(&out.status));
    }
    String::from_utf8(out.stdout).map_err(|e| failed(&e))
}

/// Readable names for what has none in C, and a heading.
fn polish(text: &str, target: &Target) -> Result<String, Failure> {
    let mut text = text.to_owned();
    for (from, to) in NAMES {
        if !text.contains(from) {
            return Err(Failure(format!(
                "bindgen made no {from}; correct NAMES in xtask/src/verbs"
            )));
        }
        text = text.replace(from, to);
    }
    if let Some(name) = text.split_whitespace().find(|word| word.contains("__bindgen_ty_")) {
        return Err(Failure(format!("{name} has no name yet; add it to NAMES in xtask/src/verbs")));
    }
    Ok(format!(
        "// Generated by `cargo xtask verbs` for {}, from the\n\
         // headers of rdma-core 44. Do not edit.\n\n\
         use super::*;\n\n{text}",
        target.triple
    ))
}
