//! Regions, descriptors, tables, and the ops that index pairs become. Knows no NIC and allocates nothing.

mod desc;
mod op;

pub use desc::{Desc, Stride};
pub use op::{Direction, Op};
