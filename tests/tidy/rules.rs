//! The rules. In samples `~` is dropped, so that this file does not break the rules it states.

use crate::checks::*;
use crate::lex::Source;
use std::collections::BTreeSet;

/// Longest line, in characters.
pub(crate) const COLUMNS: usize = 100;
/// Longest source file, in lines.
pub(crate) const LINES: usize = 600;
/// Longest function, in lines, from its first line to its closing brace.
pub(crate) const BODY: usize = 80;

/// What a rule may look at beside the file.
pub(crate) struct Context {
    pub(crate) sources: Vec<Source>,
    pub(crate) invariants: BTreeSet<String>,
}

/// A line, and what is wrong with it and what to write instead.
pub(crate) type Finding = (usize, String);

pub(crate) struct Rule {
    pub(crate) name: &'static str,
    pub(crate) check: fn(&Source, &Context) -> Vec<Finding>,
    /// Path, text, and the one line that must be found.
    pub(crate) bad: &'static [(&'static str, &'static str, usize)],
    pub(crate) good: &'static [(&'static str, &'static str)],
}

/// Written by `cargo xtask`, not by hand: no limit on columns or lines.
pub(crate) const GENERATED: &[&str] = &[
    "include/kvrail.h",
    "ffi/verbs-sys/src/types_aarch64.rs",
    "ffi/verbs-sys/src/types_x86_64.rs",
];

/// Files that may be longer, how long, and why. An entry that is no longer needed is refused.
pub(crate) const LONG_FILES: &[(&str, usize, &str)] = &[];

/// Files below `src/host` that may allocate, and why.
pub(crate) const MAY_ALLOCATE: &[(&str, &str)] = &[];

/// Folder, what it must not name, and what to do instead.
pub(crate) const LAYERS: &[(&str, &[&str], &str)] = &[
    ("src/table/", &["engine", "nic", "host"], "pass plain data in, or move the code up a layer"),
    ("src/engine/", &["host"], "take what is needed as an argument, or move the code to src/host"),
    ("src/engine/", &["nic::local", "nic::sim", "nic::verbs"], "use the traits of crate::nic"),
    ("src/nic/", &["host"], "take what is needed as an argument, or move the code to src/host"),
    ("src/", &["host"], "take what is needed as an argument, or move the code to src/host"),
];

/// Every rule, in the order in which `tests/tidy.rs` runs them.
pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "layers",
        check: layers,
        bad: &[
            ("src/table/a.rs", "use crate::status;\nuse crate::nic::Port;\n", 2),
            ("src/table/a.rs", "use crate::{\n  limits,\n  engine::{Slot, Cursor as C},\n};\n", 3),
            ("src/table/a.rs", "fn f() { super::super::nic::f() }\n", 1),
            ("src/engine/mod.rs", "use super::host;\n", 1),
            ("src/engine/a.rs", "use crate::nic::{Port, sim};\n", 1),
            ("src/engine/a.rs", "use crate::nic::local::Local;\n", 1),
            ("src/nic/local/a.rs", "fn f() -> crate::host::Error {}\n", 1),
            ("src/limits.rs", "use crate::host::Config;\n", 1),
        ],
        good: &[
            ("src/engine/a.rs", "use crate::nic::Port;\nuse crate::table;\n// crate::host\n"),
            ("src/host/a.rs", "use crate::{engine, nic::local, table};\n"),
            ("src/table/a.rs", "use super::nic_free;\nfn f() { super::host::g() }\n"),
            ("src/lib.rs", "pub mod host;\n"),
        ],
    },
    Rule {
        name: "atomics",
        check: atomics,
        bad: &[
            ("src/engine/a.rs", "use core::sync::atomic::AtomicU32;\n", 1),
            ("src/host/a.rs", "use std::{\n sync::{Mutex,\n atomic::AtomicBool},\n};\n", 3),
            ("src/engine/a.rs", "fn f() { loom::model(g) }\n", 1),
            ("src/a.rs", "#[cfg(test)]\nmod t { use core::sync::atomic; }\n", 2),
        ],
        good: &[
            ("src/sync.rs", "pub use core::sync::atomic::AtomicU32;\n"),
            ("src/engine/a.rs", "use crate::sync::{AtomicU32, Ordering};\n"),
            ("src/engine/a.rs", "#[cfg(all(test, loom))]\nmod t { fn f() { loom::model(g) } }\n"),
            ("tests/a.rs", "use std::sync::atomic::AtomicU32;\n"),
        ],
    },
    Rule {
        name: "no-alloc",
        check: no_alloc,
        bad: &[
            ("src/table/a.rs", "struct A { v: Vec<u8> }\n", 1),
            ("src/nic/a.rs", "use std::net::Ipv4Addr;\n", 1),
            ("src/engine/a.rs", "fn f() {\n    let s = format!(\"{}\", 1);\n}\n", 2),
            ("src/engine/a.rs", "fn f(x: &[u8]) { x.to_vec(); }\n", 1),
            ("src/status.rs", "fn f() -> Box<u8> { g() }\n", 1),
            ("src/engine/a.rs", "use alloc::sync::Weak;\n", 1),
            ("src/engine/a.rs", "mod tests;\n", 1),
        ],
        good: &[
            ("src/host/a.rs", "use std::net::TcpStream;\nfn f() -> Vec<u8> { vec![] }\n"),
            ("src/table/a.rs", "fn f(v: &heapless::Vec<u8, 4>) {} // no Vec here\n"),
            ("src/table/a.rs", "#[cfg(test)]\nmod tests;\n"),
            ("src/table/a.rs", "#[cfg(all(test, not(loom)))]\nmod t { fn g() { vec![1]; } }\n"),
            ("src/table/a.rs", "fn f() {}\n#[cfg(test)]\nmod tests { fn g() { vec![1]; } }\n"),
        ],
    },
    // The three limits have their samples in a test of their own.
    Rule { name: "columns", check: columns, bad: &[], good: OK },
    Rule { name: "file-length", check: file_length, bad: &[], good: OK },
    Rule { name: "function-length", check: function_length, bad: &[], good: OK },
    Rule {
        name: "leftovers",
        check: leftovers,
        bad: &[
            ("src/a.rs", "fn f() { d~bg!(1); }\n", 1),
            ("ffi/src/a.rs", "fn f() {\n    to~do!()\n}\n", 2),
            ("a.py", "x = 1  # FIX~ME later\n", 1),
            ("docs/x.md", "TO~DO: write\n", 1),
            ("a.cpp", "int a; // XX~X\n", 1),
        ],
        good: &[("a.c", "char t[] = \"/tmp/kvXXXXXX\";\n"), ("src/a.rs", "fn todos() {}\n")],
    },
    Rule {
        name: "safety",
        check: safety,
        bad: &[
            ("src/a.rs", "fn f() {\n    unsafe { g() }\n}\n", 2),
            ("src/a.rs", "// SAFETY: it is fine\nunsafe impl Send for A {}\n", 2),
            ("src/a.rs", "// SAFETY: I1, I9: the arena\nunsafe impl Send for A {}\n", 2),
            ("src/a.rs", "// SAFETY: I1: far\n\n\n\n\nunsafe impl Send for A {}\n", 6),
            ("tests/a.rs", "fn f() {\n    unsafe { g() }\n}\n", 2),
        ],
        good: &[
            ("src/a.rs", "// SAFETY: I1: carved once.\nunsafe impl Send for A {}\n"),
            (
                "ffi/src/a.rs",
                "// SAFETY: I1 and F2: both,\n// as\n// said.\nlet x =\n    unsafe { g() };\n",
            ),
            ("src/a.rs", "/// # Safety\n/// `p` lives.\npub unsafe fn f(p: *const u8) {}\n"),
            ("tests/a.rs", "// SAFETY: the buffer lives on the stack.\nunsafe { g() }\n"),
        ],
    },
    Rule {
        name: "machine-paths",
        check: machine_paths,
        bad: &[("scripts/a.sh", "cd /ro~ot/kvrail\n", 1), ("docs/a.md", "see `/ho~me/me/x`\n", 1)],
        good: &[("a.sh", "cd \"$HOME\"/kvrail\n"), ("src/a.rs", "// at the root/leaf, homes/x\n")],
    },
    Rule {
        name: "links",
        check: links,
        bad: &[
            ("docs/b.md", "[a](a.md)\n[b](c.md)\n", 2),
            ("docs/b.md", "[a](../README.md#run)\n", 1),
            ("README.md", "[safety](./SAFETY.md)\n", 1),
        ],
        good: &[
            ("docs/b.md", "[a](a.md), [b](../README.md#run-it-make-now), [c](https://x.org/c)\n"),
            ("docs/b.md", "`[a](nowhere.md)`\n```\n[a](nowhere.md)\n```\n[d](../docs)\n"),
        ],
    },
];

const OK: &[(&str, &str)] = &[("src/a.rs", "fn f() {\n    g();\n}\n")];
