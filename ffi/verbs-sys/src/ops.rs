//! What C has as inline functions and macros: calls that reach the provider through the object's
//! own context, and exported functions that older releases lack.

use core::ffi::{c_int, c_uint, c_void};
use core::mem::{offset_of, size_of};

use libc::{EINVAL, ENOSYS, EOPNOTSUPP};

use crate::load::{set_errno, Verbs};
use crate::types::*;
use crate::{Zero as _, IBV_ACCESS_OPTIONAL_RANGE};

/// Posts a list of work requests. 0 or an errno value; then `*bad_wr` is the first that was not
/// posted, and those before it were.
///
/// # Safety
///
/// `qp` is alive, the list and what it points to are valid, `bad_wr` is writable. The memory that
/// the requests name stays registered until they completed.
#[inline]
pub unsafe fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: V5: a live queue pair has a live context.
    match unsafe { (*(*qp).context).ops.post_send } {
        // SAFETY: V4: the caller's promise.
        Some(call) => unsafe { call(qp, wr, bad_wr) },
        None => ENOSYS,
    }
}

/// Posts a list of receive requests. 0 or an errno value; then `*bad_wr` is the first that was not
/// posted.
///
/// # Safety
///
/// As for [`post_send`].
#[inline]
pub unsafe fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: V5: a live queue pair has a live context.
    match unsafe { (*(*qp).context).ops.post_recv } {
        // SAFETY: V4: the caller's promise.
        Some(call) => unsafe { call(qp, wr, bad_wr) },
        None => ENOSYS,
    }
}

/// Takes up to `entries` completions. Their number, or a negative value.
///
/// # Safety
///
/// `cq` is alive and `wc` has room for `entries`.
#[inline]
pub unsafe fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: V5: a live completion queue has a live context.
    match unsafe { (*(*cq).context).ops.poll_cq } {
        // SAFETY: V4: the caller's promise.
        Some(call) => unsafe { call(cq, entries, wc) },
        None => -ENOSYS,
    }
}

/// Asks for an event at the next completion, or with `solicited_only` at the next solicited or
/// failed one. 0 or an errno value.
///
/// # Safety
///
/// `cq` is alive and has a channel.
#[inline]
pub unsafe fn req_notify_cq(cq: *mut ibv_cq, solicited_only: bool) -> c_int {
    // SAFETY: V5: a live completion queue has a live context.
    match unsafe { (*(*cq).context).ops.req_notify_cq } {
        // SAFETY: V4: the caller's promise.
        Some(call) => unsafe { call(cq, c_int::from(solicited_only)) },
        None => ENOSYS,
    }
}

/// The extended context round `context`, or NULL: the library is older than it.
///
/// It grows at its front: a field may be read only where `sz` says that it is there.
///
/// # Safety
///
/// `context` is alive.
#[inline]
#[must_use]
pub unsafe fn extended(context: *mut ibv_context) -> *mut verbs_context {
    // SAFETY: V5: the caller's promise.
    let marker = unsafe { (*context).abi_compat };
    // C's mark for it, `UINTPTR_MAX`.
    if marker as usize != usize::MAX {
        return core::ptr::null_mut();
    }
    context.cast::<u8>().wrapping_sub(offset_of!(verbs_context, context)).cast()
}

/// A function of the extended context; `None` when this library or provider has none.
macro_rules! extended_op {
    ($context:expr, $op:ident) => {{
        // SAFETY: V5: the caller's promise.
        let extended = unsafe { extended($context) };
        let needed = size_of::<verbs_context>() - offset_of!(verbs_context, $op);
        // SAFETY: V6: the mark says that `sz` stands in front of the context.
        if extended.is_null() || unsafe { (*extended).sz } < needed {
            None
        } else {
            // SAFETY: V6: `sz` says that the field is there.
            unsafe { (*extended).$op }
        }
    }};
}

/// A thread domain: its queues are used by one thread at a time, so the provider may drop its
/// locks. NULL and `errno` on failure; EOPNOTSUPP: the provider has none.
///
/// # Safety
///
/// `context` is alive and `attr` valid.
#[inline]
pub unsafe fn alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    match extended_op!(context, alloc_td) {
        // SAFETY: V4: the caller's promise.
        Some(call) => unsafe { call(context, attr) },
        None => {
            set_errno(EOPNOTSUPP);
            core::ptr::null_mut()
        }
    }
}

/// Releases a thread domain. 0 or an errno value.
///
/// # Safety
///
/// `td` is alive and no parent domain uses it.
#[inline]
pub unsafe fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: V5: a live thread domain has a live context.
    let context = unsafe { (*td).context };
    match extended_op!(context, dealloc_td) {
        // SAFETY: V4: the caller's promise.
        Some(call) => unsafe { call(td) },
        None => EOPNOTSUPP,
    }
}

/// A protection domain that ties `attr.pd` to `attr.td`. NULL and `errno` on failure; EOPNOTSUPP:
/// the provider has none. It goes back to `dealloc_pd`, before the two it ties.
///
/// # Safety
///
/// `context` is alive and `attr` valid.
#[inline]
pub unsafe fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    match extended_op!(context, alloc_parent_domain) {
        // SAFETY: V4: the caller's promise.
        Some(call) => unsafe { call(context, attr) },
        None => {
            set_errno(EOPNOTSUPP);
            core::ptr::null_mut()
        }
    }
}

impl Verbs {
    /// State of a port; fields that the library does not know are 0. 0 or an errno value.
    ///
    /// # Safety
    ///
    /// `context` is alive and `attr` writable.
    #[inline]
    pub unsafe fn query_port(
        &self,
        context: *mut ibv_context,
        port: u8,
        attr: *mut ibv_port_attr,
    ) -> c_int {
        // SAFETY: V4: the caller's promise.
        unsafe { attr.write(ibv_port_attr::zeroed()) };
        match extended_op!(context, query_port) {
            // SAFETY: V4: the caller's promise.
            Some(call) => unsafe { call(context, port, attr, size_of::<ibv_port_attr>()) },
            // SAFETY: V4: the compat struct is the front of this one.
            None => unsafe { self.query_port_compat(context, port, attr.cast()) },
        }
    }

    /// Limits of the device, the newer ones too; those that the library does not know are 0.
    /// `input` may be NULL. 0 or an errno value.
    ///
    /// # Safety
    ///
    /// `context` is alive, `input` valid or NULL, `attr` writable.
    pub unsafe fn query_device_ex(
        &self,
        context: *mut ibv_context,
        input: *const ibv_query_device_ex_input,
        attr: *mut ibv_device_attr_ex,
    ) -> c_int {
        // SAFETY: V4: the caller's promise.
        if unsafe { input.as_ref() }.is_some_and(|input| input.comp_mask != 0) {
            return EINVAL;
        }
        // SAFETY: V4: the caller's promise.
        unsafe { attr.write(ibv_device_attr_ex::zeroed()) };
        if let Some(call) = extended_op!(context, query_device_ex) {
            // SAFETY: V4: the caller's promise.
            let code = unsafe { call(context, input, attr, size_of::<ibv_device_attr_ex>()) };
            if code != EOPNOTSUPP && code != ENOSYS {
                return code;
            }
            // SAFETY: V4: the caller's promise.
            unsafe { attr.write(ibv_device_attr_ex::zeroed()) };
        }
        // SAFETY: V4: the caller's promise.
        let plain = unsafe { &raw mut (*attr).orig_attr };
        // SAFETY: V4: the caller's promise.
        unsafe { self.query_device(context, plain) }
    }

    /// An entry of a port's GID table with its type and netdev: `Some(0)` or `Some` errno value.
    /// `None`: this library (before rdma-core 32) has no such call. Then `query_gid` gives the GID,
    /// and the files `gid_attrs/types/N` and `gid_attrs/ndevs/N` below the port's sysfs folder the
    /// rest.
    ///
    /// # Safety
    ///
    /// `context` is alive and `entry` writable.
    pub unsafe fn query_gid_ex(
        &self,
        context: *mut ibv_context,
        port: u32,
        index: u32,
        entry: *mut ibv_gid_entry,
    ) -> Option<c_int> {
        let call = self.query_gid_ex_fn?;
        // SAFETY: V4: the caller's promise. No flags are defined.
        Some(unsafe { call(context, port, index, entry, 0, size_of::<ibv_gid_entry>()) })
    }

    /// Registers memory. NULL and `errno` on failure. Optional access flags
    /// ([`IBV_ACCESS_OPTIONAL_RANGE`], such as relaxed ordering) are dropped where the library does
    /// not know them, as a provider may do too.
    ///
    /// # Safety
    ///
    /// `pd` is alive. The memory stays mapped until `dereg_mr`.
    #[inline]
    pub unsafe fn reg_mr(
        &self,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        access: ibv_access_flags,
    ) -> *mut ibv_mr {
        if access & IBV_ACCESS_OPTIONAL_RANGE != 0 {
            if let Some(call) = self.reg_mr_iova2_fn {
                // SAFETY: V4: the caller's promise.
                return unsafe { call(pd, addr, length, addr as u64, access) };
            }
        }
        let access = (access & !IBV_ACCESS_OPTIONAL_RANGE).cast_signed();
        // SAFETY: V4: the caller's promise.
        unsafe { self.reg_mr_plain(pd, addr, length, access) }
    }

    /// Registers memory under addresses that start at `iova`. NULL and `errno` on failure;
    /// EOPNOTSUPP: before rdma-core 28.
    ///
    /// # Safety
    ///
    /// As for [`reg_mr`](Self::reg_mr).
    pub unsafe fn reg_mr_iova2(
        &self,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        iova: u64,
        access: c_uint,
    ) -> *mut ibv_mr {
        let Some(call) = self.reg_mr_iova2_fn else {
            set_errno(EOPNOTSUPP);
            return core::ptr::null_mut();
        };
        // SAFETY: V4: the caller's promise.
        unsafe { call(pd, addr, length, iova, access) }
    }

    /// Registers `length` bytes at `offset` of a dma-buf under addresses that start at `iova`. NULL
    /// and `errno` on failure; EOPNOTSUPP: before rdma-core 34, or the provider cannot.
    ///
    /// # Safety
    ///
    /// `pd` is alive and `fd` is a dma-buf.
    pub unsafe fn reg_dmabuf_mr(
        &self,
        pd: *mut ibv_pd,
        offset: u64,
        length: usize,
        iova: u64,
        fd: c_int,
        access: c_int,
    ) -> *mut ibv_mr {
        let Some(call) = self.reg_dmabuf_mr_fn else {
            set_errno(EOPNOTSUPP);
            return core::ptr::null_mut();
        };
        // SAFETY: V4: the caller's promise.
        unsafe { call(pd, offset, length, iova, fd, access) }
    }
}
