//! The std part: parameters, metadata blobs, bootstrap. It may allocate and may block; nothing
//! under it may.

pub mod blob;
pub mod config;
pub mod error;
pub mod handshake;
pub mod wire;
