//! The functions of the library.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::ptr::null_mut;

use super::{with, Bad, CqState, Entry, QpState, State, Wr};
use rdma_core_sys::*;

/// A live object of a kind.
fn made(s: &mut State, kind: &'static str) {
    s.calls.push(kind);
    *s.live.entry(kind).or_default() += 1;
}

fn unmade(s: &mut State, kind: &'static str, call: &'static str) -> c_int {
    s.calls.push(call);
    if let Some(&e) = s.fail.get(call) {
        return e;
    }
    *s.live.entry(kind).or_default() -= 1;
    0
}

/// The error that a test wants of a call, left in `errno`.
fn fails(call: &'static str) -> bool {
    let Some(e) = with(|s| s.fail.get(call).copied()) else { return false };
    // SAFETY: the C library's own place.
    unsafe { *libc::__errno_location() = e };
    true
}

fn leak<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    if fails("get_device_list") {
        return null_mut();
    }
    let device = leak(ibv_device::zeroed());
    // SAFETY: the caller's place.
    unsafe { *count = 1 };
    with(|s| made(s, "list"));
    leak([device, null_mut()]).cast()
}

unsafe extern "C" fn free_device_list(_: *mut *mut ibv_device) {
    with(|s| unmade(s, "list", "free_device_list"));
}

unsafe extern "C" fn get_device_name(_: *mut ibv_device) -> *const c_char {
    c"double0".as_ptr()
}

unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    if fails("open_device") {
        return null_mut();
    }
    with(|s| made(s, "context"));
    let mut context = verbs_context::zeroed();
    context.sz = size_of::<verbs_context>();
    context.query_port = Some(query_port);
    context.alloc_td = Some(alloc_td);
    context.dealloc_td = Some(dealloc_td);
    context.alloc_parent_domain = Some(alloc_parent_domain);
    context.context.abi_compat = usize::MAX as *mut c_void;
    context.context.device = device;
    // SAFETY: no pointers.
    context.context.async_fd = unsafe { libc::eventfd(0, 0) };
    context.context.ops.post_send = Some(post_send);
    context.context.ops.poll_cq = Some(poll_cq);
    context.context.ops.req_notify_cq = Some(req_notify_cq);
    let context = leak(context);
    // SAFETY: made just now.
    unsafe { &raw mut (*context).context }
}

unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: the double's own; the descriptor is the context's.
    unsafe { libc::close((*context).async_fd) };
    with(|s| unmade(s, "context", "close_device"))
}

unsafe extern "C" fn query_device(_: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: the caller's place.
    unsafe { *attr = with(|s| s.device) };
    0
}

unsafe extern "C" fn query_port(
    _: *mut ibv_context,
    _: u8,
    attr: *mut ibv_port_attr,
    _: usize,
) -> c_int {
    // SAFETY: the caller's place.
    unsafe { *attr = with(|s| s.port) };
    with(|s| s.fail.get("query_port").copied()).unwrap_or(0)
}

unsafe extern "C" fn query_port_compat(
    _: *mut ibv_context,
    _: u8,
    _: *mut _compat_ibv_port_attr,
) -> c_int {
    libc::EINVAL
}

unsafe extern "C" fn query_gid(
    _: *mut ibv_context,
    _: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    with(|s| match s.gids.get(index as usize) {
        Some(entry) => {
            // SAFETY: the caller's place.
            unsafe { *gid = ibv_gid { raw: entry.0 } };
            0
        }
        None => -1,
    })
}

unsafe extern "C" fn query_gid_ex(
    _: *mut ibv_context,
    _: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    _: u32,
    _: usize,
) -> c_int {
    with(|s| match s.gids.get(index as usize) {
        Some(&(raw, gid_type, ndev_ifindex)) => {
            let gid = ibv_gid { raw };
            let all = ibv_gid_entry { gid, gid_index: index, port_num: 1, gid_type, ndev_ifindex };
            // SAFETY: the caller's place.
            unsafe { *entry = all };
            0
        }
        None => libc::ENODATA,
    })
}

unsafe extern "C" fn get_async_event(_: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    match with(|s| s.events.pop_front()) {
        Some(e) => {
            // SAFETY: the caller's place.
            unsafe { *event = e };
            0
        }
        None => {
            let code = with(|s| s.fail.get("get_async_event").copied()).unwrap_or(libc::EAGAIN);
            // SAFETY: the C library's own place.
            unsafe { *libc::__errno_location() = code };
            -1
        }
    }
}

unsafe extern "C" fn ack_async_event(_: *mut ibv_async_event) {
    with(|s| s.acknowledged += 1);
}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    if fails("alloc_pd") {
        return null_mut();
    }
    with(|s| made(s, "pd"));
    leak(ibv_pd { context, ..ibv_pd::zeroed() })
}

unsafe extern "C" fn dealloc_pd(_: *mut ibv_pd) -> c_int {
    with(|s| unmade(s, "pd", "dealloc_pd"))
}

unsafe extern "C" fn alloc_td(context: *mut ibv_context, _: *mut ibv_td_init_attr) -> *mut ibv_td {
    if fails("alloc_td") {
        return null_mut();
    }
    with(|s| made(s, "td"));
    leak(ibv_td { context })
}

unsafe extern "C" fn dealloc_td(_: *mut ibv_td) -> c_int {
    with(|s| unmade(s, "td", "dealloc_td"))
}

unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: the caller's attributes.
    let attr = unsafe { *attr };
    if fails("alloc_parent_domain") || attr.pd.is_null() || attr.td.is_null() {
        return null_mut();
    }
    with(|s| made(s, "pd"));
    leak(ibv_pd { context, ..ibv_pd::zeroed() })
}

unsafe extern "C" fn reg_mr_plain(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: as the caller says.
    unsafe { reg_mr_iova2(pd, addr, length, addr as u64, access as c_uint) }
}

unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    if fails("reg_mr") {
        return null_mut();
    }
    with(|s| {
        made(s, "mr");
        s.registered.push((addr as u64, length, iova, access));
        s.next += 1;
        leak(ibv_mr { pd, addr, length, lkey: s.next, rkey: s.next + 1000, ..ibv_mr::zeroed() })
    })
}

unsafe extern "C" fn dereg_mr(_: *mut ibv_mr) -> c_int {
    with(|s| unmade(s, "mr", "dereg_mr"))
}

unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    if fails("create_comp_channel") {
        return null_mut();
    }
    with(|s| made(s, "channel"));
    // SAFETY: no pointers.
    let fd = unsafe { libc::eventfd(0, 0) };
    leak(ibv_comp_channel { context, fd, refcnt: 0 })
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: the double's own.
    unsafe { libc::close((*channel).fd) };
    with(|s| unmade(s, "channel", "destroy_comp_channel"))
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    _: *mut c_void,
    channel: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    if fails("create_cq") {
        return null_mut();
    }
    let cq = leak(ibv_cq { context, channel, cqe, ..ibv_cq::zeroed() });
    with(|s| {
        made(s, "cq");
        s.cqs.insert(cq as usize, CqState { entries: cqe as usize, ..CqState::default() });
    });
    cq
}

unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    with(|s| {
        s.cqs.remove(&(cq as usize));
        unmade(s, "cq", "destroy_cq")
    })
}

unsafe extern "C" fn get_cq_event(
    _: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    _: *mut *mut c_void,
) -> c_int {
    with(|s| {
        if s.cq_events == 0 {
            return -1;
        }
        s.cq_events -= 1;
        let any = s.cqs.keys().next().copied().unwrap_or(0);
        // SAFETY: the caller's place.
        unsafe { *cq = any as *mut ibv_cq };
        0
    })
}

unsafe extern "C" fn ack_cq_events(_: *mut ibv_cq, n: c_uint) {
    with(|s| s.acknowledged += n as usize);
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller's attributes and domain.
    let (cap, cq, context) = unsafe { ((*attr).cap, (*attr).send_cq, (*pd).context) };
    let (inline, sges) = with(|s| (s.most_inline, s.most_sges));
    if cap.max_inline_data > inline || cap.max_send_sge > sges {
        with(|s| s.calls.push("create_qp refused"));
        // SAFETY: the C library's own place.
        unsafe { *libc::__errno_location() = libc::EINVAL };
        return null_mut();
    }
    if fails("create_qp") {
        return null_mut();
    }
    with(|s| {
        made(s, "qp");
        s.next += 1;
        let number = s.next;
        let object = leak(ibv_qp { context, pd, send_cq: cq, qp_num: number, ..ibv_qp::zeroed() });
        let cap = (
            cap.max_send_wr,
            cap.max_recv_wr,
            cap.max_send_sge,
            cap.max_recv_sge,
            cap.max_inline_data,
        );
        let (queue, changes) = (Default::default(), Vec::new());
        s.qps.insert(number, QpState { object, cq, pd, cap, queue, changes });
        object
    })
}

unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the caller's queue pair and attributes.
    let (number, attr) = unsafe { ((*qp).qp_num, *attr) };
    with(|s| {
        let step = match attr.qp_state {
            IBV_QPS_INIT => "to INIT",
            IBV_QPS_RTR => "to RTR",
            IBV_QPS_RTS => "to RTS",
            IBV_QPS_RESET => "to RESET",
            _ => "to ERR",
        };
        s.calls.push(step);
        let e = s.fail.get(step).copied().unwrap_or(0);
        if let Some(q) = s.qps.get_mut(&number) {
            q.changes.push((mask as u32, attr));
            if e == 0 && attr.qp_state == IBV_QPS_RESET {
                q.queue.clear();
            }
        }
        e
    })
}

unsafe extern "C" fn query_qp(
    _: *mut ibv_qp,
    _: *mut ibv_qp_attr,
    _: c_int,
    _: *mut ibv_qp_init_attr,
) -> c_int {
    libc::EOPNOTSUPP
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: the caller's queue pair.
    let number = unsafe { (*qp).qp_num };
    with(|s| {
        let e = unmade(s, "qp", "destroy_qp");
        if e == 0 {
            s.qps.remove(&number);
            // SAFETY: the double's own: a post to it finds no context.
            unsafe { (*qp).context = null_mut() };
        }
        e
    })
}

unsafe extern "C" fn wc_status_str(_: ibv_wc_status) -> *const c_char {
    c"status".as_ptr()
}

unsafe extern "C" fn event_type_str(_: ibv_event_type) -> *const c_char {
    c"event".as_ptr()
}

/// Copies a work request, with the pieces that it names.
fn copied(wr: &ibv_send_wr) -> Wr {
    // SAFETY: an RDMA operation.
    let rdma = unsafe { wr.wr.rdma };
    let sges = (0..wr.num_sge as usize).map(|i| {
        // SAFETY: the list has `num_sge` pieces.
        let s = unsafe { *wr.sg_list.add(i) };
        (s.addr, s.length, s.lkey)
    });
    Wr {
        id: wr.wr_id,
        opcode: wr.opcode,
        flags: wr.send_flags,
        remote: rdma.remote_addr,
        rkey: rdma.rkey,
        sges: sges.collect(),
    }
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller's queue pair.
    let number = unsafe { (*qp).qp_num };
    with(|s| {
        s.lists += 1;
        let refuse = s.refuse.pop_front();
        let Some(q) = s.qps.get_mut(&number) else { return libc::EINVAL };
        let (mut at, mut i) = (wr, 0);
        while !at.is_null() {
            let full = q.queue.len() as u32 >= q.cap.0;
            let refused = refuse.filter(|r| r.at == i);
            if full || refused.is_some() {
                let place = match refused.map(|r| r.bad) {
                    None | Some(Bad::Right) => at,
                    Some(Bad::Null) => null_mut(),
                    Some(Bad::Elsewhere) => 0x1000 as *mut ibv_send_wr,
                };
                // SAFETY: the caller's place.
                unsafe { *bad = place };
                return refused.map_or(libc::ENOMEM, |r| r.code);
            }
            // SAFETY: an element of the caller's list.
            let one = unsafe { *at };
            q.queue.push_back(copied(&one));
            (at, i) = (one.next, i + 1);
        }
        0
    })
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, n: c_int, wc: *mut ibv_wc) -> c_int {
    with(|s| {
        let Some(state) = s.cqs.get_mut(&(cq as usize)) else { return -1 };
        let mut i = 0;
        while i < n {
            let Some(Entry { id, status, qp }) = state.queue.pop_front() else { break };
            // An error leaves the other fields unwritten; here they are garbage.
            let one = ibv_wc {
                wr_id: id,
                status,
                opcode: 0xdead,
                vendor_err: if status == IBV_WC_SUCCESS { 0 } else { 0x77 },
                byte_len: u32::MAX,
                qp_num: qp,
                ..ibv_wc::zeroed()
            };
            // SAFETY: the caller has room for `n`.
            unsafe { *wc.add(i as usize) = one };
            i += 1;
        }
        i
    })
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, _: c_int) -> c_int {
    with(|s| {
        if let Some(state) = s.cqs.get_mut(&(cq as usize)) {
            state.armed = true;
        }
        0
    })
}

pub(super) fn table() -> Verbs {
    Verbs {
        get_device_list,
        free_device_list,
        get_device_name,
        open_device,
        close_device,
        get_async_event,
        ack_async_event,
        query_device,
        query_port_compat,
        query_gid,
        alloc_pd,
        dealloc_pd,
        reg_mr_plain,
        dereg_mr,
        create_comp_channel,
        destroy_comp_channel,
        create_cq,
        destroy_cq,
        get_cq_event,
        ack_cq_events,
        create_qp,
        modify_qp,
        query_qp,
        destroy_qp,
        wc_status_str,
        event_type_str,
        reg_mr_iova2_fn: Some(reg_mr_iova2),
        query_gid_ex_fn: Some(query_gid_ex),
        reg_dmabuf_mr_fn: None,
    }
}
