//! Loading: the real library, older ones, wrong ones, none.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests fail by panicking, and nobody reads their docs"
)]

mod support;

use core::ffi::{c_int, CStr};
use core::fmt::Write as _;
use std::ffi::CString;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use rdma_core_sys::{Verbs, DEFAULT_LIBRARY};
use support::{folder, has, skip};

/// Every symbol, with the version it has in rdma-core.
const SYMBOLS: &[(&str, &str)] = &[
    ("ibv_create_comp_channel", "1.0"),
    ("ibv_destroy_comp_channel", "1.0"),
    ("ibv_ack_async_event", "1.1"),
    ("ibv_ack_cq_events", "1.1"),
    ("ibv_alloc_pd", "1.1"),
    ("ibv_close_device", "1.1"),
    ("ibv_create_cq", "1.1"),
    ("ibv_create_qp", "1.1"),
    ("ibv_dealloc_pd", "1.1"),
    ("ibv_dereg_mr", "1.1"),
    ("ibv_destroy_cq", "1.1"),
    ("ibv_destroy_qp", "1.1"),
    ("ibv_event_type_str", "1.1"),
    ("ibv_free_device_list", "1.1"),
    ("ibv_get_async_event", "1.1"),
    ("ibv_get_cq_event", "1.1"),
    ("ibv_get_device_list", "1.1"),
    ("ibv_get_device_name", "1.1"),
    ("ibv_modify_qp", "1.1"),
    ("ibv_open_device", "1.1"),
    ("ibv_query_device", "1.1"),
    ("ibv_query_gid", "1.1"),
    ("ibv_query_port", "1.1"),
    ("ibv_query_qp", "1.1"),
    ("ibv_reg_mr", "1.1"),
    ("ibv_wc_status_str", "1.1"),
    ("ibv_reg_mr_iova2", "1.8"),
    ("_ibv_query_gid_ex", "1.11"),
    ("ibv_reg_dmabuf_mr", "1.12"),
];

/// What may be missing: rdma-core 28 has the first only.
const OPTIONAL: [&str; 3] = ["ibv_reg_mr_iova2", "_ibv_query_gid_ex", "ibv_reg_dmabuf_mr"];

fn load(path: &str) -> Result<Verbs, String> {
    let path = CString::new(path).unwrap();
    Verbs::load(Some(&path)).map_err(|e| e.to_string())
}

fn optional(verbs: &Verbs) -> [bool; 3] {
    [
        verbs.reg_mr_iova2_fn.is_some(),
        verbs.query_gid_ex_fn.is_some(),
        verbs.reg_dmabuf_mr_fn.is_some(),
    ]
}

/// Builds a library of `symbols`, each of which returns its place in [`SYMBOLS`]; with versions
/// named `versions` + number, or none at all.
fn library(name: &str, symbols: &[(&str, &str)], versions: Option<&str>) -> Option<String> {
    if !has("cc") {
        skip(&format!("library {name}: no C compiler `cc`; install gcc"));
        return None;
    }
    let dir = folder("load");
    let (mut source, mut script) = (String::new(), String::new());
    let mut known: Vec<&str> = Vec::new();
    for (symbol, version) in symbols {
        let place = SYMBOLS.iter().position(|(s, _)| s == symbol).unwrap();
        writeln!(source, "long {symbol}(void) {{ return {place}; }}").unwrap();
        if !known.contains(version) {
            known.push(version);
        }
    }
    for version in known {
        let of: Vec<&str> = symbols.iter().filter(|s| s.1 == version).map(|s| s.0).collect();
        let prefix = versions.unwrap_or_default();
        writeln!(script, "{prefix}{version} {{ global: {}; }};", of.join("; ")).unwrap();
    }
    let file = |extension: &str| dir.join(format!("{name}.{extension}"));
    fs::write(file("c"), source).unwrap();
    fs::write(file("map"), script).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(file("so")).arg(file("c"));
    if versions.is_some() {
        cc.arg(format!("-Wl,--version-script={}", file("map").display()));
    }
    assert!(cc.status().expect("run cc").success(), "{name} does not build");
    Some(file("so").to_str().unwrap().to_owned())
}

fn without(names: &[&str]) -> Vec<(&'static str, &'static str)> {
    SYMBOLS.iter().copied().filter(|(symbol, _)| !names.contains(symbol)).collect()
}

#[test]
fn every_function_is_the_one_of_its_name() {
    let Some(path) = library("whole", SYMBOLS, Some("IBVERBS_")) else { return };
    let verbs = load(&path).unwrap();
    assert_eq!(optional(&verbs), [true; 3]);
    let place = |address: usize| {
        // SAFETY: every function of this library takes nothing and returns its place.
        unsafe { core::mem::transmute::<usize, unsafe extern "C" fn() -> i64>(address)() }
    };
    macro_rules! same {
        ($($field:ident $symbol:literal)*) => {[$(
            assert_eq!(
                SYMBOLS[usize::try_from(place(verbs.$field as usize)).unwrap()].0,
                $symbol,
                "{}", stringify!($field)
            )
        ),*]};
    }
    let checked = same! {
        get_device_list "ibv_get_device_list" free_device_list "ibv_free_device_list"
        get_device_name "ibv_get_device_name" open_device "ibv_open_device"
        close_device "ibv_close_device" get_async_event "ibv_get_async_event"
        ack_async_event "ibv_ack_async_event" query_device "ibv_query_device"
        query_port_compat "ibv_query_port" query_gid "ibv_query_gid" alloc_pd "ibv_alloc_pd"
        dealloc_pd "ibv_dealloc_pd" reg_mr_plain "ibv_reg_mr" dereg_mr "ibv_dereg_mr"
        create_comp_channel "ibv_create_comp_channel"
        destroy_comp_channel "ibv_destroy_comp_channel" create_cq "ibv_create_cq"
        destroy_cq "ibv_destroy_cq" get_cq_event "ibv_get_cq_event"
        ack_cq_events "ibv_ack_cq_events" create_qp "ibv_create_qp" modify_qp "ibv_modify_qp"
        query_qp "ibv_query_qp" destroy_qp "ibv_destroy_qp" wc_status_str "ibv_wc_status_str"
        event_type_str "ibv_event_type_str"
    };
    let newer = [
        verbs.reg_mr_iova2_fn.unwrap() as usize,
        verbs.query_gid_ex_fn.unwrap() as usize,
        verbs.reg_dmabuf_mr_fn.unwrap() as usize,
    ];
    let newer = newer.map(|address| SYMBOLS[usize::try_from(place(address)).unwrap()].0);
    assert_eq!(newer, OPTIONAL);
    assert_eq!(checked.len() + newer.len(), SYMBOLS.len());
}

#[test]
fn an_older_library_lacks_only_what_is_optional() {
    for (i, name) in OPTIONAL.iter().enumerate() {
        let symbols = without(&[name]);
        let Some(path) = library(&format!("no{i}"), &symbols, Some("IBVERBS_")) else { return };
        let mut want = [true; 3];
        want[i] = false;
        assert_eq!(optional(&load(&path).unwrap()), want, "without {name}");
    }
    let path = library("base", &without(&OPTIONAL), Some("IBVERBS_")).unwrap();
    assert_eq!(optional(&load(&path).unwrap()), [false; 3]);
}

#[test]
fn a_required_function_that_is_missing_is_named() {
    for (symbol, version) in without(&OPTIONAL) {
        let rest = without(&[symbol]);
        // Without this one the library has no versions that are known: see below.
        let Some(path) = library(&format!("no_{symbol}"), &rest, Some("IBVERBS_")) else { return };
        let name = CString::new(path.as_str()).unwrap();
        let error = Verbs::load(Some(&name)).expect_err("a library without it loads");
        assert_eq!(error.missing().unwrap().to_str().unwrap(), symbol);
        let text = error.to_string();
        assert!(text.contains(&format!("{symbol}@IBVERBS_{version}")), "{text}");
        assert!(text.contains("rdma-core 28 or newer"), "{text}");
    }
}

#[test]
fn a_symbol_of_another_version_is_not_taken() {
    let mut symbols = SYMBOLS.to_vec();
    symbols.last_mut().unwrap().1 = "2.0";
    let Some(path) = library("later", &symbols, Some("IBVERBS_")) else { return };
    assert_eq!(optional(&load(&path).unwrap()), [true, true, false]);
}

#[test]
fn a_double_without_these_versions_is_taken_by_name() {
    let Some(path) = library("plain", SYMBOLS, None) else { return };
    assert_eq!(optional(&load(&path).unwrap()), [true; 3]);
    let path = library("foreign", SYMBOLS, Some("DOUBLE_")).unwrap();
    assert_eq!(optional(&load(&path).unwrap()), [true; 3]);
    let path = library("foreign_base", &without(&OPTIONAL), Some("DOUBLE_")).unwrap();
    assert_eq!(optional(&load(&path).unwrap()), [false; 3]);
}

#[test]
fn a_library_that_cannot_be_loaded_says_why() {
    let error = Verbs::load(Some(c"/nowhere/libibverbs.so.1")).expect_err("it is not there");
    assert_eq!((error.library(), error.missing()), ("/nowhere/libibverbs.so.1", None));
    let text = error.to_string();
    assert!(text.starts_with("cannot load /nowhere/libibverbs.so.1: "), "{text}");
    assert!(text.contains("No such file or directory"), "{text}");
    assert!(text.ends_with("(on Debian libibverbs1 and ibverbs-providers)"), "{text}");

    let file = folder("load").join("text.so");
    fs::write(&file, "no library").unwrap();
    let text = load(file.to_str().unwrap()).expect_err("it is a text");
    assert!(text.contains("file too short") || text.contains("invalid ELF header"), "{text}");

    // Any other library of the system.
    let text = load("libc.so.6").expect_err("it is not libibverbs");
    assert!(text.starts_with("libc.so.6 has no ibv_get_device_list@IBVERBS_1.1; "), "{text}");
}

#[test]
fn texts_of_any_length_and_bytes_are_cut_not_refused() {
    let long = CString::new("/é".repeat(5000)).unwrap();
    let error = Verbs::load(Some(&long)).expect_err("it is not there");
    assert!(long.to_str().unwrap().starts_with(error.library()));
    assert!((120..=128).contains(&error.library().len()), "{}", error.library().len());
    assert!(error.to_string().len() < 600);
    let error = Verbs::load(Some(c"/a\xffb")).expect_err("it is not there");
    assert_eq!(error.library(), "/a");
}

/// The system's own library.
fn system() -> Option<PathBuf> {
    let folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"];
    let found = folders.iter().map(|dir| PathBuf::from(dir).join("libibverbs.so.1"));
    let found = found.chain([PathBuf::from("/usr/lib/libibverbs.so.1")]).find(|p| p.exists());
    if found.is_none() {
        skip("no libibverbs.so.1 on this machine; install libibverbs1");
    }
    found
}

/// Asks the library for its devices; a machine may have none.
fn use_it(verbs: &Verbs) {
    let mut count: c_int = -1;
    // SAFETY: `count` is writable.
    let list = unsafe { verbs.get_device_list(&raw mut count) };
    if list.is_null() {
        let code = rdma_core_sys::errno();
        assert_eq!(code, libc::ENOSYS, "no devices, and not for want of RDMA in the kernel");
    } else {
        assert!(count >= 0, "{count}");
        for i in 0..usize::try_from(count).unwrap() {
            // SAFETY: the list has `count` entries.
            let device = unsafe { *list.add(i) };
            // SAFETY: a device of a list that is alive.
            let name = unsafe { CStr::from_ptr(verbs.get_device_name(device)) };
            assert!(!name.is_empty());
        }
        // SAFETY: it is used no more.
        unsafe { verbs.free_device_list(list) };
    }
    // SAFETY: any number has a text.
    let text = unsafe { CStr::from_ptr(verbs.wc_status_str(rdma_core_sys::IBV_WC_RETRY_EXC_ERR)) };
    assert_eq!(text.to_str().unwrap(), "transport retry counter exceeded");
}

#[test]
fn the_system_library_loads_and_answers() {
    if system().is_none() {
        return;
    }
    let verbs = Verbs::load(None).unwrap();
    assert_eq!(DEFAULT_LIBRARY, c"libibverbs.so.1");
    use_it(&verbs);
    // Twice is the same library, since it is never closed.
    let again = Verbs::load(Some(DEFAULT_LIBRARY)).unwrap();
    assert_eq!(again.open_device as usize, verbs.open_device as usize);
}

#[test]
fn the_system_library_without_its_newer_symbols_loads_and_answers() {
    let Some(system) = system() else { return };
    // Newest first, each copy older than the one before, down to what release 28 had. (The third
    // optional one came with 28, and the library needs it itself.)
    let mut bytes = fs::read(system).unwrap();
    let mut want = [true; 3];
    for (i, name) in ["ibv_reg_dmabuf_mr", "_ibv_query_gid_ex"].iter().enumerate() {
        // The name in the table of strings; the hash of the old name no longer leads to it.
        let old = [b"\0", name.as_bytes(), b"\0"].concat();
        let at = bytes.windows(old.len()).position(|w| w == old).expect("the symbol's name");
        bytes[at + 1] = b'X';
        let path = folder("load").join(format!("older{i}.so"));
        fs::write(&path, &bytes).unwrap();
        let verbs = load(path.to_str().unwrap()).unwrap();
        want[OPTIONAL.iter().position(|o| o == name).unwrap()] = false;
        assert_eq!(optional(&verbs), want, "without {name}");
        // SAFETY: any number has a text.
        let text = unsafe { CStr::from_ptr(verbs.wc_status_str(0)) };
        assert_eq!(text, c"success");
    }
}
