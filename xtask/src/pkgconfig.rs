//! `kvrail.pc` from its template.

use std::path::Path;

use crate::{read, Failure};

/// Where the template is kept.
pub const TEMPLATE: &str = "ffi/kvrail.pc.in";

/// The file for an installation under `prefix`.
pub fn generate(root: &Path, prefix: &str) -> Result<String, Failure> {
    if !prefix.starts_with('/') || prefix.contains(char::is_whitespace) {
        return Err(Failure(format!(
            "--prefix is {prefix:?}; pass an absolute path without blanks"
        )));
    }
    let text = read(&root.join(TEMPLATE))?;
    Ok(text
        .replace("@PREFIX@", prefix.trim_end_matches('/'))
        .replace("@VERSION@", env!("CARGO_PKG_VERSION")))
}
