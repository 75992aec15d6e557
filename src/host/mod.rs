//! The std part: parameters, metadata blobs, bootstrap, threads, pools. It may allocate and may
//! block; nothing under it may.

mod backoff;
pub mod blob;
mod card;
pub mod config;
mod conn;
mod connect;
mod control;
pub mod engine;
pub mod error;
mod graves;
pub mod handshake;
mod inbox;
mod join;
mod keylist;
pub mod log;
mod loopback;
pub mod memory;
pub mod nics;
mod offer;
mod peers;
mod pool;
mod prepare;
pub mod rail;
mod rails;
mod raise;
mod rows;
mod shared;
mod silence;
mod stall;
mod stats;
mod sys;
pub mod tell;
mod watch;
pub mod wire;
mod worker;
