//! `ffi/symbols.txt`: the names that libkvrail.so exports, and nothing else.

use std::path::Path;
use std::process::Command;

use crate::{header, read, Failure};

/// Where it is kept.
pub const PATH: &str = "ffi/symbols.txt";

/// The SONAME: the ABI's major version.
pub const SONAME: &str = "libkvrail.so.0";

/// The functions that the committed header declares, sorted, one a line.
pub fn from_header(root: &Path) -> Result<String, Failure> {
    let text = read(&root.join(header::PATH))?;
    let mut names: Vec<&str> = Vec::new();
    let mut comment = false;
    for line in text.lines() {
        comment |= line.trim_start().starts_with("/*");
        // A declaration starts in column 0 and is no typedef, directive or struct field.
        let starts = line.chars().next().is_some_and(|c| c.is_ascii_alphabetic());
        if starts && !comment && !line.starts_with("typedef") {
            if let Some(name) = line.split('(').next().filter(|_| line.contains('(')) {
                let name = name.rsplit([' ', '*']).next().unwrap_or("");
                names.extend(Some(name).filter(|name| name.starts_with("kvr_")));
            }
        }
        comment &= !line.trim_end().ends_with("*/");
    }
    if names.is_empty() {
        return Err(Failure(format!(
            "{} declares no function; run `cargo xtask header`",
            header::PATH
        )));
    }
    names.sort_unstable();
    Ok(names.iter().map(|name| format!("{name}\n")).collect())
}

/// Compares a built library with the committed list and the SONAME.
pub fn check_library(root: &Path, library: &Path) -> Result<(), Failure> {
    let want = read(&root.join(PATH))?;
    let have = tool("nm", &["-D", "--defined-only", "--format=posix"], library)?;
    let mut have: Vec<&str> = have.lines().filter_map(|l| l.split_whitespace().next()).collect();
    have.sort_unstable();
    let want: Vec<&str> = want.lines().collect();
    let extra: Vec<_> = have.iter().filter(|name| !want.contains(name)).collect();
    let missing: Vec<_> = want.iter().filter(|name| !have.contains(name)).collect();
    if !extra.is_empty() || !missing.is_empty() {
        return Err(Failure(format!(
            "{} exports {extra:?} too many and lacks {missing:?}; make the names match {PATH}, \
             or run `cargo xtask header` and `cargo xtask symbols`",
            library.display()
        )));
    }
    let dynamic = tool("readelf", &["-d"], library)?;
    if !dynamic.contains(&format!("soname: [{SONAME}]")) {
        return Err(Failure(format!(
            "{} has not SONAME {SONAME}; see ffi/build.rs",
            library.display()
        )));
    }
    Ok(())
}

fn tool(name: &str, args: &[&str], file: &Path) -> Result<String, Failure> {
    let out = Command::new(name).args(args).arg(file).output();
    let out = out.map_err(|e| Failure(format!("cannot run {name}: {e}; install binutils")))?;
    if !out.status.success() {
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        return Err(Failure(format!("{name} {}: {text}", file.display())));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}
