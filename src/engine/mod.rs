//! Rails, transfers, claims, completions and notifications. Knows the NIC seam and no driver;
//! allocates nothing.
//!
//! | question | file |
//! |---|---|
//! | where does an op become a work request | `poll.rs`, `post_claim` |
//! | where does a completion become "done" | `retire` in `poll.rs`, `settle` in `slot.rs` |
//! | how are ops claimed | `cursor.rs` |
//! | who may touch a lane | `token.rs` |
//! | what does the state word hold | `state.rs` |
//! | how do messages travel | `channel.rs`, `message.rs`, `notify.rs` |

pub mod arena;
pub mod bell;
pub mod bits;
pub mod channel;
pub mod core;
pub mod cursor;
pub mod fence;
pub mod lane;
pub mod ledger;
pub mod message;
pub mod notify;
pub mod peer;
mod poll;
pub mod region;
pub mod slot;
pub mod stack;
pub mod state;
pub mod stripe;
pub mod token;
pub mod transfer;
