//! Message streams over queue pairs: credits, order, failures, and who is told. The provider is a
//! model behind the function pointers of a hand-made context.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "tests")]
#![allow(unreachable_pub, missing_debug_implementations, reason = "shared support")]

#[path = "verbs_mail/count.rs"]
mod count;
#[path = "verbs_mail/faults.rs"]
mod faults;
#[path = "verbs_mail/rig.rs"]
mod rig;
#[path = "verbs_mail/streams.rs"]
mod streams;
#[path = "verbs_mail/wire.rs"]
mod wire;
