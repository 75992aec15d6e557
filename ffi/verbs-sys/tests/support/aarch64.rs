//! The types of aarch64, with what its C library has: sizes from its `pthreadtypes.h`, which the C
//! compiler compares through the structs that hold them.

#[path = "../../src/opaque.rs"]
mod opaque;
#[allow(
    non_camel_case_types,
    non_snake_case,
    missing_debug_implementations,
    clippy::allow_attributes_without_reason,
    reason = "generated: C's names"
)]
#[path = "../../src/types_aarch64.rs"]
mod types;

pub(crate) use opaque::*;

#[allow(non_camel_case_types, reason = "the name it has in C")]
#[derive(Debug, Clone, Copy)]
#[repr(C, align(8))]
pub struct pthread_mutex_t(pub [u8; 48]);

#[allow(non_camel_case_types, reason = "the name it has in C")]
#[derive(Debug, Clone, Copy)]
#[repr(C, align(8))]
pub struct pthread_cond_t(pub [u8; 48]);
