//! Compilers and headers that a machine may lack.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;

/// Says that a check did not run, past the test harness, which keeps the output of a test that
/// passed. With STRICT=1, as in CI, it is a failure.
pub(crate) fn skip(why: &str) {
    assert!(std::env::var("STRICT").as_deref() != Ok("1"), "cannot run here: {why}");
    writeln!(std::io::stderr(), "SKIPPED: {why}").expect("stderr");
}

/// Whether a program answers.
pub(crate) fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|out| out.status.success())
}

/// A folder for what a test makes. All packages of the workspace share the one around it.
pub(crate) fn folder(name: &str) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("verbs-sys").join(name);
    std::fs::create_dir_all(&dir).expect("make a folder");
    dir
}
