//! RDMA NICs through libibverbs: reliable connections (RC) over RoCE v2.
//!
//! * [`Device`] is one opened port: limits, completion queues, registrations, events. The control
//!   side makes it and the [`Qp`]s.
//! * [`mail`] carries message streams over queue pairs of their own.
//! * [`VerbsPort`] is a lane: it turns ops into work requests and completions into the engine's.
//!   READs into a device's memory it ends with a flush over a queue pair that leads back to its own
//!   NIC (`port/loopback.rs`).
//! * [`Fault`] says which call failed, with what, and what the device allows.

mod build;
mod codes;
mod device;
mod event;
mod facts;
mod fault;
mod gid;
mod grave;
mod list;
pub mod mail;
mod port;
mod qp;
mod rail;
mod shape;

pub use codes::{parts, wc_name, OF_FLUSH};
pub use device::{Device, Handle, Mr, Open};
pub use event::Event;
pub use facts::Facts;
pub use fault::Fault;
pub use gid::Gid;
pub use port::{VerbsPort, LANDINGS};
pub use qp::{Granted, Path, Qp, QpKind, QpPointer, MAX_RETRY};
pub use shape::Shape;
