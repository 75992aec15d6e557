//! Generated files are in git and say what their generators say.

use xtask::{drift, pkgconfig, root};

#[test]
fn header_and_symbols_are_as_generated() -> Result<(), xtask::Failure> {
    drift(&root())
}

#[test]
fn the_pkgconfig_file_has_no_placeholder_left() -> Result<(), xtask::Failure> {
    let text = pkgconfig::generate(&root(), "/opt/kvrail/")?;
    assert!(text.starts_with("prefix=/opt/kvrail\n") && !text.contains('@'), "{text}");
    assert!(pkgconfig::generate(&root(), "relative").is_err());
    Ok(())
}
