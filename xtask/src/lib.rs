//! The tasks of `cargo xtask`, as a library so that `cargo test` runs the same checks.

pub mod header;
pub mod pkgconfig;
pub mod symbols;
pub mod verbs;

use core::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use verbs::Made;

/// Why a task failed, and what to do about it.
#[derive(Debug)]
pub struct Failure(pub String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for Failure {}

/// The workspace's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Reads a file of the repository.
pub fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|e| Failure(format!("cannot read {}: {e}", path.display())))
}

/// Writes a generated file.
pub fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|e| Failure(format!("cannot write {}: {e}", path.display())))
}

/// Fails when a generated file differs from what its generator says now.
pub fn drift(root: &Path) -> Result<(), Failure> {
    same(root, header::PATH, &header::generate(root)?, "cargo xtask header")?;
    same(root, symbols::PATH, &symbols::from_header(root)?, "cargo xtask symbols")?;
    for target in &verbs::TARGETS {
        match verbs::generate(root, target)? {
            Made::Text(text) => same(root, target.path, &text, "cargo xtask verbs")?,
            Made::Skipped(why) => skipped(&why)?,
        }
    }
    Ok(())
}

/// Says that a check did not run, past the test harness, which keeps the output of a test that
/// passed. With STRICT=1, as in CI, it is a failure.
fn skipped(why: &str) -> Result<(), Failure> {
    if std::env::var("STRICT").as_deref() == Ok("1") {
        return Err(Failure(format!("cannot check {why}")));
    }
    writeln!(io::stderr(), "SKIPPED: {why}")
        .map_err(|e| Failure(format!("cannot write to stderr: {e}")))
}

fn same(root: &Path, path: &str, want: &str, task: &str) -> Result<(), Failure> {
    let have = fs::read_to_string(root.join(path)).unwrap_or_default();
    if have == want {
        return Ok(());
    }
    let line = have.lines().zip(want.lines()).take_while(|(a, b)| a == b).count();
    let (a, b) = (have.lines().nth(line), want.lines().nth(line));
    Err(Failure(format!(
        "{path} differs from its sources in line {}: it has {:?}, they say {:?}; run `{task}` \
         and commit the file",
        line + 1,
        a.unwrap_or("nothing"),
        b.unwrap_or("nothing")
    )))
}
