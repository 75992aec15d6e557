//! The C ABI seen from C: layouts on both sides, and the programs of this folder and of `examples`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests fail by panicking, and nobody reads their docs"
)]
#![allow(
    non_camel_case_types,
    dead_code,
    unreachable_pub,
    reason = "the ABI's C names, public for the header, of which a part is used"
)]

#[path = "../../ffi/src/types.rs"]
mod types;

use core::fmt::Write as _;
use core::mem::{align_of, offset_of, size_of};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;

use types::*;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("ffi has a parent").to_owned()
}

/// Where cargo put the library: beside the folder of this test's own program.
fn library_dir() -> PathBuf {
    let program = env::current_exe().expect("own path");
    let deps = program.parent().expect("deps");
    let near = [deps.to_owned(), deps.parent().expect("profile").to_owned()];
    near.into_iter()
        .find(|dir| dir.join("libkvrail.so").exists() && dir.join("libkvrail.a").exists())
        .unwrap_or_else(|| panic!("no libkvrail.so and .a near {}", program.display()))
}

fn compiler(variable: &str, default: &str) -> Option<String> {
    let name = env::var(variable).unwrap_or_else(|_| default.into());
    let works = Command::new(&name).arg("--version").output().is_ok_and(|out| out.status.success());
    if !works {
        eprintln!("SKIPPED: no compiler `{name}`; install one or set {variable}");
    }
    works.then_some(name)
}

/// Field names, once: Rust's numbers, and the C program that prints C's.
struct Layout {
    rust: String,
    c: String,
}

macro_rules! layout {
    ($layout:ident, $name:ident { $($field:ident: $t:ty),+ $(,)? }) => {{
        let n = stringify!($name);
        writeln!($layout.rust, "{n} {} {}", size_of::<$name>(), align_of::<$name>()).unwrap();
        writeln!($layout.c, "struct {n}_a {{ char c; {n} s; }};").unwrap();
        let mut body = String::new();
        let (size, align) = (format!("sizeof({n})"), format!("offsetof(struct {n}_a, s)"));
        write!(body, "printf(\"{n} %zu %zu\\n\", {size}, {align});").unwrap();
        let mut sum = 0;
        $(
            let f = stringify!($field);
            let size = size_of::<$t>();
            sum += size;
            // The type given here is the field's own, or this does not compile.
            let _ = |s: $name| -> $t { s.$field };
            writeln!($layout.rust, "{n}.{f} {} {size}", offset_of!($name, $field)).unwrap();
            write!(
                body,
                "printf(\"{n}.{f} %zu %zu\\n\", offsetof({n}, {f}), sizeof((({n} *)0)->{f}));"
            )
            .unwrap();
        )+
        // Neither padding nor a field that was forgotten here.
        assert_eq!(sum, size_of::<$name>(), "{n}: its fields do not fill it; list them all");
        writeln!($layout.c, "static void {n}_print(void) {{ {body} }}").unwrap();
        writeln!($layout.c, "#define {n}_CALL {n}_print()").unwrap();
    }};
}

type Get = Option<
    unsafe extern "C" fn(
        *mut core::ffi::c_void,
        u64,
        u64,
        *mut kvr_segment,
        *mut usize,
        *mut core::ffi::c_char,
        usize,
    ) -> kvr_status,
>;
type Put = Option<unsafe extern "C" fn(*mut core::ffi::c_void, *const kvr_segment, usize)>;

/// What goes into a call.
fn inputs(layout: &mut Layout) {
    layout!(layout, kvr_desc { addr: u64, len: u64, dev: u64, region: kvr_region });
    layout!(
        layout,
        kvr_stride { base: u64, len: u64, stride: u64, count: u64, region: kvr_region }
    );
    layout!(
        layout,
        kvr_segment {
            addr: u64,
            len: u64,
            offset: u64,
            fd: i32,
            area: u32,
            slice_id: u32,
            flags: u32,
            region: kvr_region,
        }
    );
    layout!(
        layout,
        kvr_devmem_ops {
            struct_size: usize,
            name: *const core::ffi::c_char,
            context: *mut core::ffi::c_void,
            get: Get,
            put: Put,
        }
    );
    layout!(
        layout,
        kvr_config {
            struct_size: u32,
            flags: u32,
            max_peers: u32,
            max_regions: u32,
            max_remote_regions: u32,
            max_tables: u32,
            max_transfers: u32,
            rails: u32,
            stripe_width: u32,
            inline_bytes: u32,
            slice_bytes: u32,
            message_bytes: u32,
            spin_us: u32,
            connect_timeout_ms: u32,
            deregister_timeout_ms: u32,
            release_timeout_ms: u32,
            stall_ms: u32,
            port_min: u16,
            port_max: u16,
            max_bytes: u64,
            name: [core::ffi::c_char; KVR_NAME_LEN],
            listen_ip: [core::ffi::c_char; KVR_LISTEN_LEN],
            transport: [core::ffi::c_char; KVR_TRANSPORT_LEN],
            nics: [core::ffi::c_char; KVR_NICS_LEN],
            device_id: u32,
            numa_node: i32,
            rbln_ctx_ptr: u64,
            sq_depth: u32,
            sges: u32,
            ack_timeout: u32,
            retry: u32,
            rnr_retry: u32,
            traffic_class: u32,
            service_level: u32,
            rail_timeout_ms: u32,
            keepalive_ms: u32,
            link_debounce_ms: u32,
            peer_timeout_ms: u32,
            reserved: u32,
            devmem: [core::ffi::c_char; KVR_DEVMEM_LEN],
            nics_long: [core::ffi::c_char; KVR_NICS_LONG_LEN],
        }
    );
}

/// What comes out of one.
fn reports(layout: &mut Layout) {
    layout!(
        layout,
        kvr_transfer_info {
            struct_size: u32,
            status: kvr_status,
            descriptors: u64,
            work_requests: u64,
            bytes: u64,
            bytes_done: u64,
            work_requests_done: u64,
            failed_pair: u64,
            post_ns: u64,
            descriptors_done: u64,
            failed_rail: u32,
            provider_status: u32,
            vendor_code: u32,
            may_have_written: u32,
        }
    );
    layout!(
        layout,
        kvr_rail_info {
            struct_size: u32,
            index: u32,
            name: [core::ffi::c_char; KVR_RAIL_NAME_LEN],
            bytes_read: u64,
            bytes_written: u64,
            work_requests: u64,
            claims: u64,
            errors: u64,
        }
    );
    layout!(
        layout,
        kvr_engine_info {
            struct_size: u32,
            rails: u32,
            fixed_bytes: u64,
            pool_bytes: u64,
            pool_limit: u64,
            peers: u32,
            regions: u32,
            remote_regions: u32,
            tables: u32,
            transfers: u32,
            transport: [core::ffi::c_char; KVR_TRANSPORT_LEN],
            listen: [core::ffi::c_char; KVR_LISTEN_LEN],
            reserved: u32,
        }
    );
    layout!(
        layout,
        kvr_event {
            struct_size: u32,
            kind: u32,
            peer: kvr_peer,
            lane: u32,
            status: kvr_status,
            since_ms: u64,
            text: *const core::ffi::c_char,
        }
    );
}

#[test]
fn structs_have_the_same_layout_on_both_sides() {
    let Some(cc) = compiler("CC", "cc") else { return };
    let mut layout = Layout { rust: String::new(), c: String::new() };
    inputs(&mut layout);
    reports(&mut layout);
    let calls: String = layout
        .rust
        .lines()
        .filter_map(|line| line.split(' ').next().filter(|name| !name.contains('.')))
        .map(|name| format!("{name}_CALL; "))
        .collect();
    let source = format!(
        "#include <stdio.h>\n#include \"kvrail.h\"\n{}int main(void) {{ {calls}return 0; }}\n",
        layout.c
    );
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (file, program) = (dir.join("layout.c"), dir.join("layout"));
    fs::write(&file, source).expect("write the C program");
    let built = Command::new(cc)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
        .arg(root().join("include"))
        .arg(&file)
        .arg("-o")
        .arg(&program)
        .status();
    assert!(built.expect("run the compiler").success(), "the layout program does not compile");
    let out = Command::new(&program).output().expect("run the layout program");
    assert_eq!(String::from_utf8_lossy(&out.stdout), layout.rust);
}

/// Cargo builds no library for the tests of a package that has only a cdylib and a staticlib. Once:
/// a build, also one that finds all done, takes the files away and links them again, and another
/// test would miss them.
fn build_library() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "-p", "kvrail-ffi"]).current_dir(root());
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        assert!(build.status().expect("run cargo").success(), "the library does not build");
    });
}

/// Runs a script of `tests` with the library's folder and those for what it builds.
fn run(script: &str, out: &[&str]) {
    build_library();
    let status = Command::new("sh")
        .arg(root().join(script))
        .arg(library_dir())
        .args(out.iter().map(|folder| Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder)))
        .status();
    assert!(status.expect("run sh").success(), "{script} failed; see above");
}

#[test]
fn programs_in_c_and_cpp_build_and_run() {
    if compiler("CC", "cc").is_some() && compiler("CXX", "c++").is_some() {
        run("tests/cabi/run.sh", &["cabi"]);
    }
}

#[test]
fn cuda_memory_over_a_fake_driver() {
    if compiler("CC", "cc").is_some() {
        // The fake NICs are those of `verbs_engine`, which cargo runs before or after this.
        run("tests/fakecuda/run.sh", &["fakecuda", "verbs_engine-fake"]);
    }
}
