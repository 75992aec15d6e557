//! Generators and checks: `cargo xtask <task>`.
fn main() {}
