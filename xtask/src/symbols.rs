//! `ffi/symbols.txt`: the names that libkvrail.so exports, and nothing else. `tests/cabi/run.sh`
//! compares a built library with it.

use std::path::Path;

use crate::{header, read, Failure};

/// Where it is kept.
pub const PATH: &str = "ffi/symbols.txt";

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
