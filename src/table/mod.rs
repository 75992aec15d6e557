//! Regions, descriptors, tables, and the ops that index pairs become. Knows no NIC and allocates
//! nothing.
//!
//! A transfer is two lists of equal length; position i of both is *pair* i. Where the lists come
//! from:
//!
//! | the caller has | source |
//! |---|---|
//! | descriptors, in order | [`Listed`] |
//! | a flat table and indices | [`Indexed`] |
//! | a table of few [`Stride`] parts, indices | [`StridedIndexed`], made of [`Strided`] |
//!
//! [`build_ops`] checks every pair, merges neighbours, cuts long runs and pushes [`Op`]s into an
//! [`OpSink`]; [`build_indexed`] picks the sources for two [`Table`]s. Addresses and lengths are
//! bytes, indices count descriptors of a table, pairs count positions of the lists. Every refusal
//! is a [`PrepareError`], which names the pair, the side, the values seen and allowed, and what to
//! do.

mod build;
mod desc;
mod error;
mod op;
mod regions;
mod run;
mod sink;
mod source;

pub use build::{build_indexed, build_ops};
pub use desc::{Desc, Stride};
pub use error::{Full, PrepareError, Reason, Side};
pub use op::{Direction, Op};
pub use regions::{Known, RegionView, Regions, NO_SEAMS};
pub use run::{Summary, Wanted};
pub use sink::{OpSink, SliceSink};
pub use source::{
    Indexed, Listed, OutOfRange, Piece, Shape, Source, Strided, StridedIndexed, Table, TableError,
};
