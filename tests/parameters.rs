//! `docs/parameters.md` lists every parameter as the code has it.
#![cfg(feature = "std")]

use kvrail::host::config::Config;

/// The rows that the page must have, in this order.
fn rows() -> Vec<String> {
    let row = |(key, default, help): (&str, String, &str)| {
        let default =
            if default.is_empty() { String::from("empty") } else { format!("`{default}`") };
        format!("| `{key}` | `KVRAIL_{}` | {default} | {help} |", key.to_ascii_uppercase())
    };
    Config::keys().map(row).collect()
}

#[test]
fn the_page_lists_every_parameter_with_its_default_and_its_help() {
    let page = include_str!("../docs/parameters.md");
    let seen: Vec<&str> = page.lines().filter(|l| l.contains("| `KVRAIL_")).collect();
    let wanted = rows();
    assert!(wanted.len() > 20);
    assert_eq!(seen, wanted, "\ndocs/parameters.md needs these rows:\n{}\n", wanted.join("\n"));
}
