//! The inline operations reach the provider's own functions, with the arguments they were given,
//! and fall back as C's do. Provider and context are made by hand: no library is loaded.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests fail by panicking, and nobody reads their docs"
)]

use core::cell::{Cell, RefCell};
use core::ffi::{c_int, c_uint, c_void};
use core::mem::{offset_of, size_of};
use core::ptr::null_mut;

use rdma_core_sys::*;

thread_local! {
    /// What was called, and with what. Tests run on threads of their own.
    static CALLS: RefCell<Vec<(&'static str, Vec<usize>)>> = const { RefCell::new(Vec::new()) };
    /// What the next calls return.
    static CODE: Cell<c_int> = const { Cell::new(0) };
}

fn called(name: &'static str, args: &[usize]) -> c_int {
    CALLS.with_borrow_mut(|calls| calls.push((name, args.to_vec())));
    CODE.get()
}

#[track_caller]
fn expect(calls: &[(&'static str, &[usize])]) {
    let want: Vec<_> = calls.iter().map(|(name, args)| (*name, args.to_vec())).collect();
    assert_eq!(CALLS.take(), want);
}

unsafe extern "C" fn post_send_p(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    called("post_send", &[qp as usize, wr as usize, bad as usize])
}

unsafe extern "C" fn post_recv_p(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    called("post_recv", &[qp as usize, wr as usize, bad as usize])
}

unsafe extern "C" fn poll_cq_p(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    called("poll_cq", &[cq as usize, usize::try_from(entries).unwrap(), wc as usize])
}

unsafe extern "C" fn notify_p(cq: *mut ibv_cq, solicited: c_int) -> c_int {
    called("notify", &[cq as usize, usize::try_from(solicited).unwrap()])
}

unsafe extern "C" fn query_port_p(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    len: usize,
) -> c_int {
    // SAFETY: the test passes a whole struct.
    assert_eq!(unsafe { (*attr).port_cap_flags2 }, 0, "not cleared before the call");
    // SAFETY: as above.
    unsafe { (*attr).active_mtu = IBV_MTU_4096 };
    called("query_port", &[context as usize, port.into(), len])
}

unsafe extern "C" fn query_port_compat_p(
    context: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: the front of the struct that the test passes.
    unsafe { (*attr.cast::<ibv_port_attr>()).active_mtu = IBV_MTU_1024 };
    called("query_port_compat", &[context as usize, port.into()])
}

unsafe extern "C" fn query_device_ex_p(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    len: usize,
) -> c_int {
    // SAFETY: the test passes a whole struct. What a failed call leaves must not stay.
    unsafe { (*attr).phys_port_cnt_ex = 7 };
    called("query_device_ex", &[context as usize, input as usize, len])
}

unsafe extern "C" fn query_device_p(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: the test passes a whole struct.
    unsafe { (*attr).max_qp = 9 };
    called("query_device", &[context as usize, attr as usize]).min(0)
}

unsafe extern "C" fn alloc_td_p(c: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    called("alloc_td", &[c as usize, attr as usize]);
    0x70 as *mut ibv_td
}

unsafe extern "C" fn dealloc_td_p(td: *mut ibv_td) -> c_int {
    called("dealloc_td", &[td as usize])
}

unsafe extern "C" fn alloc_parent_domain_p(
    c: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    called("alloc_parent_domain", &[c as usize, attr as usize]);
    0x90 as *mut ibv_pd
}

unsafe extern "C" fn reg_mr_p(
    pd: *mut ibv_pd,
    a: *mut c_void,
    len: usize,
    f: c_int,
) -> *mut ibv_mr {
    called("reg_mr", &[pd as usize, a as usize, len, usize::try_from(f).unwrap()]);
    null_mut()
}

unsafe extern "C" fn reg_mr_iova2_p(
    pd: *mut ibv_pd,
    a: *mut c_void,
    len: usize,
    iova: u64,
    f: c_uint,
) -> *mut ibv_mr {
    let iova = usize::try_from(iova).unwrap();
    called("reg_mr_iova2", &[pd as usize, a as usize, len, iova, f as usize]);
    null_mut()
}

unsafe extern "C" fn reg_dmabuf_mr_p(
    pd: *mut ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    f: c_int,
) -> *mut ibv_mr {
    let small = [offset, iova].map(|n| usize::try_from(n).unwrap());
    let ints = [fd, f].map(|n| usize::try_from(n).unwrap());
    called("reg_dmabuf_mr", &[pd as usize, small[0], len, small[1], ints[0], ints[1]]);
    null_mut()
}

unsafe extern "C" fn query_gid_ex_p(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    _entry: *mut ibv_gid_entry,
    flags: u32,
    len: usize,
) -> c_int {
    called("query_gid_ex", &[context as usize, port as usize, index as usize, flags as usize, len])
}

unsafe extern "C" fn unexpected() {
    std::process::abort();
}

/// A library whose every function ends the test program, but for those that a test expects.
fn verbs() -> Verbs {
    const FIELDS: usize = size_of::<Verbs>() / size_of::<usize>();
    let all = [unexpected as unsafe extern "C" fn() as usize; FIELDS];
    // SAFETY: only functions, each as large as an address; none is called before it is replaced.
    let mut verbs = unsafe { core::mem::transmute::<[usize; FIELDS], Verbs>(all) };
    verbs.query_port_compat = query_port_compat_p;
    verbs.query_device = query_device_p;
    verbs.reg_mr_plain = reg_mr_p;
    (verbs.reg_mr_iova2_fn, verbs.reg_dmabuf_mr_fn, verbs.query_gid_ex_fn) = (None, None, None);
    verbs
}

/// The context that a provider of the current ABI hands out, `sz` bytes of it filled in.
fn provider(sz: usize) -> Box<verbs_context> {
    let mut provider = Box::new(verbs_context::zeroed());
    provider.sz = sz;
    provider.query_port = Some(query_port_p);
    provider.query_device_ex = Some(query_device_ex_p);
    provider.alloc_td = Some(alloc_td_p);
    provider.dealloc_td = Some(dealloc_td_p);
    provider.alloc_parent_domain = Some(alloc_parent_domain_p);
    provider.context.abi_compat = usize::MAX as *mut c_void;
    provider.context.ops.post_send = Some(post_send_p);
    provider.context.ops.post_recv = Some(post_recv_p);
    provider.context.ops.poll_cq = Some(poll_cq_p);
    provider.context.ops.req_notify_cq = Some(notify_p);
    provider
}

/// The address as C has it, good for the whole struct.
fn context(provider: &mut verbs_context) -> *mut ibv_context {
    let all: *mut verbs_context = provider;
    // SAFETY: a field of a live struct.
    unsafe { &raw mut (*all).context }
}

fn qp(context: *mut ibv_context) -> ibv_qp {
    ibv_qp { context, ..ibv_qp::zeroed() }
}

fn cq(context: *mut ibv_context) -> ibv_cq {
    ibv_cq { context, ..ibv_cq::zeroed() }
}

const ALL: usize = size_of::<verbs_context>();

#[test]
fn posts_reach_the_provider() {
    let mut provider = provider(ALL);
    let mut qp = qp(context(&mut provider));
    let (qp, mut send, mut recv) = (&raw mut qp, ibv_send_wr::zeroed(), ibv_recv_wr::zeroed());
    let (mut bad_send, mut bad_recv) = (null_mut(), null_mut());
    for code in [0, libc::ENOMEM] {
        CODE.set(code);
        // SAFETY: objects of this test, which the provider only compares.
        let send_code = unsafe { post_send(qp, &raw mut send, &raw mut bad_send) };
        // SAFETY: as above.
        let recv_code = unsafe { post_recv(qp, &raw mut recv, &raw mut bad_recv) };
        assert_eq!((send_code, recv_code), (code, code));
        let (qp, send, recv) = (qp as usize, &raw mut send as usize, &raw mut recv as usize);
        expect(&[
            ("post_send", &[qp, send, &raw mut bad_send as usize]),
            ("post_recv", &[qp, recv, &raw mut bad_recv as usize]),
        ]);
    }
}

#[test]
fn polls_reach_the_provider() {
    let mut provider = provider(ALL);
    let mut cq = cq(context(&mut provider));
    let (cq, mut wc) = (&raw mut cq, [ibv_wc::zeroed(); 3]);
    for code in [0, 3, -1] {
        CODE.set(code);
        // SAFETY: objects of this test, which the provider only compares.
        assert_eq!(unsafe { poll_cq(cq, 3, wc.as_mut_ptr()) }, code);
        expect(&[("poll_cq", &[cq as usize, 3, wc.as_mut_ptr() as usize])]);
    }
    for (solicited, number) in [(false, 0), (true, 1)] {
        CODE.set(libc::EBUSY);
        // SAFETY: as above.
        assert_eq!(unsafe { req_notify_cq(cq, solicited) }, libc::EBUSY);
        expect(&[("notify", &[cq as usize, number])]);
    }
}

#[test]
fn a_provider_without_a_function_is_an_error_not_a_crash() {
    let mut provider = provider(ALL);
    provider.context.ops = ibv_context_ops::zeroed();
    let context = context(&mut provider);
    let (mut qp, mut cq) = (qp(context), cq(context));
    let (qp, cq) = (&raw mut qp, &raw mut cq);
    // SAFETY: live objects; nothing else is looked at.
    assert_eq!(unsafe { post_send(qp, null_mut(), null_mut()) }, libc::ENOSYS);
    // SAFETY: as above.
    assert_eq!(unsafe { post_recv(qp, null_mut(), null_mut()) }, libc::ENOSYS);
    // SAFETY: as above.
    assert_eq!(unsafe { poll_cq(cq, 1, null_mut()) }, -libc::ENOSYS);
    // SAFETY: as above.
    assert_eq!(unsafe { req_notify_cq(cq, false) }, libc::ENOSYS);
}

/// A port state full of what was there before.
fn old_port() -> ibv_port_attr {
    // SAFETY: integers only.
    unsafe { core::mem::transmute([0xff_u8; size_of::<ibv_port_attr>()]) }
}

#[test]
fn a_port_is_queried_through_the_extended_context() {
    let mut provider = provider(ALL);
    let (context, mut attr) = (context(&mut provider), old_port());
    // SAFETY: objects of this test.
    assert_eq!(unsafe { verbs().query_port(context, 2, &raw mut attr) }, 0);
    assert_eq!((attr.active_mtu, attr.port_cap_flags2), (IBV_MTU_4096, 0));
    expect(&[("query_port", &[context as usize, 2, size_of::<ibv_port_attr>()])]);
}

#[test]
fn without_it_the_compat_symbol_is_called_and_new_fields_are_zero() {
    // Not extended; too short by its newest field, which stands in front; without the function.
    let cases: [fn(&mut verbs_context); 3] = [
        |p| p.context.abi_compat = null_mut(),
        |p| p.sz = ALL - 1 - offset_of!(verbs_context, query_port),
        |p| p.query_port = None,
    ];
    for case in cases {
        let mut provider = provider(ALL);
        case(&mut provider);
        let (context, mut attr) = (context(&mut provider), old_port());
        // SAFETY: objects of this test.
        assert_eq!(unsafe { verbs().query_port(context, 1, &raw mut attr) }, 0);
        assert_eq!(attr.active_mtu, IBV_MTU_1024);
        assert_eq!((attr.link_layer, attr.flags, attr.port_cap_flags2), (0, 0, 0));
        expect(&[("query_port_compat", &[context as usize, 1])]);
    }
}

#[test]
fn a_field_is_there_exactly_from_the_size_that_holds_it() {
    let needed = ALL - offset_of!(verbs_context, alloc_td);
    for (sz, there) in [(0, false), (needed - 1, false), (needed, true), (ALL + 64, true)] {
        let mut provider = provider(sz);
        let (context, mut attr) = (context(&mut provider), ibv_td_init_attr::zeroed());
        // SAFETY: objects of this test.
        let td = unsafe { alloc_td(context, &raw mut attr) };
        assert_eq!(!td.is_null(), there, "sz {sz}");
        if there {
            expect(&[("alloc_td", &[context as usize, &raw mut attr as usize])]);
        } else {
            assert_eq!(errno(), libc::EOPNOTSUPP);
            expect(&[]);
        }
    }
}

#[test]
fn thread_and_parent_domains_reach_the_provider_or_are_unsupported() {
    let mut provider = provider(ALL);
    let context = context(&mut provider);
    let mut td = ibv_td { context };
    let mut attr = ibv_parent_domain_init_attr::zeroed();
    // SAFETY: objects of this test.
    let pd = unsafe { alloc_parent_domain(context, &raw mut attr) };
    assert_eq!(pd as usize, 0x90);
    // SAFETY: as above.
    assert_eq!(unsafe { dealloc_td(&raw mut td) }, 0);
    expect(&[
        ("alloc_parent_domain", &[context as usize, &raw mut attr as usize]),
        ("dealloc_td", &[&raw mut td as usize]),
    ]);
    // SAFETY: as above.
    unsafe { (*context).abi_compat = null_mut() };
    // SAFETY: as above.
    assert!(unsafe { alloc_parent_domain(context, &raw mut attr) }.is_null());
    assert_eq!(errno(), libc::EOPNOTSUPP);
    // SAFETY: as above.
    assert_eq!(unsafe { dealloc_td(&raw mut td) }, libc::EOPNOTSUPP);
    expect(&[]);
}

#[test]
fn a_device_is_queried_in_full_or_the_old_way() {
    let mut provider = provider(ALL);
    let context = context(&mut provider);
    let mut attr = ibv_device_attr_ex::zeroed();
    let (attr, at) = (&raw mut attr, context as usize);
    let whole = ("query_device_ex", &[at, 0, size_of::<ibv_device_attr_ex>()][..]);
    let plain = ("query_device", &[at, attr as usize][..]);
    for (code, want, ports, qps) in [
        (0, &[whole][..], 7, 0),
        (libc::EIO, &[whole], 7, 0),
        (libc::ENOSYS, &[whole, plain], 0, 9),
        (libc::EOPNOTSUPP, &[whole, plain], 0, 9),
    ] {
        CODE.set(code);
        // SAFETY: objects of this test.
        let got = unsafe { verbs().query_device_ex(context, core::ptr::null(), attr) };
        assert_eq!(got, if qps == 9 { 0 } else { code });
        // SAFETY: as above.
        let values = unsafe { ((*attr).phys_port_cnt_ex, (*attr).orig_attr.max_qp) };
        assert_eq!(values, (ports, qps), "provider said {code}");
        expect(want);
    }
    let input = ibv_query_device_ex_input { comp_mask: 1 };
    // SAFETY: as above.
    let got = unsafe { verbs().query_device_ex(context, &raw const input, attr) };
    assert_eq!(got, libc::EINVAL);
    expect(&[]);
}

#[test]
fn optional_access_flags_take_the_newer_call_where_there_is_one() {
    const RELAXED: ibv_access_flags = IBV_ACCESS_RELAXED_ORDERING;
    const READ: ibv_access_flags = IBV_ACCESS_REMOTE_READ;
    assert_eq!(RELAXED & IBV_ACCESS_OPTIONAL_RANGE, RELAXED);
    let old = verbs();
    let new = Verbs { reg_mr_iova2_fn: Some(reg_mr_iova2_p), ..old };
    let (pd, addr) = (0x10 as *mut ibv_pd, 0x20 as *mut c_void);
    let plain = ("reg_mr", &[0x10, 0x20, 5, READ as usize][..]);
    let newer = ("reg_mr_iova2", &[0x10, 0x20, 5, 0x20, (READ | RELAXED) as usize][..]);
    let cases = [
        (old, READ, plain),
        (new, READ, plain),
        (old, READ | RELAXED, plain),
        (new, READ | RELAXED, newer),
    ];
    for (verbs, access, want) in cases {
        // SAFETY: the doubles look at nothing.
        unsafe { verbs.reg_mr(pd, addr, 5, access) };
        expect(&[want]);
    }
}

#[test]
fn what_an_old_library_lacks_is_unsupported() {
    let old = verbs();
    let (pd, context) = (0x10 as *mut ibv_pd, 0x30 as *mut ibv_context);
    // SAFETY: nothing is called.
    assert!(unsafe { old.reg_mr_iova2(pd, null_mut(), 1, 0, 0) }.is_null());
    assert_eq!(errno(), libc::EOPNOTSUPP);
    // SAFETY: nothing is called. A call that succeeds between two leaves errno, so clear it.
    unsafe { *libc::__errno_location() = 0 };
    // SAFETY: nothing is called.
    assert!(unsafe { old.reg_dmabuf_mr(pd, 0, 1, 0, -1, 0) }.is_null());
    assert_eq!(errno(), libc::EOPNOTSUPP);
    let mut entry = ibv_gid_entry::zeroed();
    // SAFETY: nothing is called.
    assert_eq!(unsafe { old.query_gid_ex(context, 1, 2, &raw mut entry) }, None);
    expect(&[]);

    let new = Verbs {
        reg_mr_iova2_fn: Some(reg_mr_iova2_p),
        reg_dmabuf_mr_fn: Some(reg_dmabuf_mr_p),
        query_gid_ex_fn: Some(query_gid_ex_p),
        ..old
    };
    CODE.set(libc::ENODATA);
    // SAFETY: the doubles look at nothing.
    unsafe { new.reg_mr_iova2(pd, null_mut(), 1, 2, 3) };
    // SAFETY: as above.
    unsafe { new.reg_dmabuf_mr(pd, 1, 2, 3, 4, 5) };
    // SAFETY: as above.
    let code = unsafe { new.query_gid_ex(context, 1, 2, &raw mut entry) };
    assert_eq!(code, Some(libc::ENODATA));
    expect(&[
        ("reg_mr_iova2", &[0x10, 0, 1, 2, 3]),
        ("reg_dmabuf_mr", &[0x10, 1, 2, 3, 4, 5]),
        ("query_gid_ex", &[0x30, 1, 2, 0, 32]),
    ]);
}
