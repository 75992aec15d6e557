//! libibverbs, loaded at run time: nothing here links it, so a program that uses this crate starts
//! on a host without rdma-core too.
//!
//! * The types are bindgen's, from the headers of rdma-core 44, committed for each processor. Newer
//!   and older releases agree with them: structs of this ABI grow at their end only, and what grew
//!   is passed with its size. `verbs_context` grows at its front and says how long it is.
//! * [`Verbs::load`] finds the exported functions; two that older releases lack are optional.
//! * What C has as inline functions is written by hand. [`post_send`], [`post_recv`], [`poll_cq`]
//!   and [`req_notify_cq`] call the provider through the object's own context.
//!
//! Enumerations are plain integers, since a library may return a value that no header knows.
//! Names, arguments and results are those of C (`man ibv_post_send`), without the prefix `ibv_` for
//! functions: int results are 0 or an errno value (some calls: -1 and [`errno`]), pointers are NULL
//! and [`errno`] on failure.
#![no_std]

mod load;
mod opaque;
mod ops;

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    missing_debug_implementations,
    clippy::allow_attributes_without_reason,
    reason = "generated: C's names, documented by rdma-core; a union cannot print itself"
)]
#[cfg_attr(target_arch = "x86_64", path = "types_x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "types_aarch64.rs")]
mod types;

#[cfg(not(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!("kvrail-verbs-sys has bindings for x86_64 and aarch64 Linux with glibc only");

pub use libc::{pthread_cond_t, pthread_mutex_t};
pub use load::{errno, LoadError, Verbs, DEFAULT_LIBRARY};
pub use opaque::*;
pub use ops::*;
pub use types::*;

/// `ibv_port_attr::link_layer`: an old driver that does not say; InfiniBand is meant.
pub const IBV_LINK_LAYER_UNSPECIFIED: u8 = 0;
/// `ibv_port_attr::link_layer`: InfiniBand.
pub const IBV_LINK_LAYER_INFINIBAND: u8 = 1;
/// `ibv_port_attr::link_layer`: Ethernet, so RoCE.
pub const IBV_LINK_LAYER_ETHERNET: u8 = 2;

/// Access flags that a provider may ignore when it does not know them. They reach it only through
/// `ibv_reg_mr_iova2`.
pub const IBV_ACCESS_OPTIONAL_RANGE: ibv_access_flags = 0x3ff0_0000;

/// A value whose every byte may be 0: what C's `memset(&attr, 0, sizeof attr)` makes.
///
/// # Safety
///
/// All bytes 0 must be a value of the type.
pub unsafe trait Zero: Sized {
    /// All bytes 0.
    #[must_use]
    fn zeroed() -> Self {
        // SAFETY: V1: the implementor says so.
        unsafe { core::mem::zeroed() }
    }
}

macro_rules! zero {
    ($($name:ident)*) => { $(
        // SAFETY: V1: integers, arrays of them, raw pointers, optional functions, C's mutex.
        unsafe impl Zero for $name {}
    )* };
}

zero! {
    ibv_ah_attr ibv_async_event ibv_comp_channel ibv_context ibv_context_ops ibv_cq ibv_device
    ibv_device_attr ibv_device_attr_ex ibv_gid ibv_gid_entry ibv_global_route ibv_mr
    ibv_parent_domain_init_attr ibv_pd ibv_port_attr ibv_qp ibv_qp_attr ibv_qp_cap
    ibv_qp_init_attr ibv_query_device_ex_input ibv_recv_wr ibv_send_wr ibv_sge ibv_td
    ibv_td_init_attr ibv_wc verbs_context
}
