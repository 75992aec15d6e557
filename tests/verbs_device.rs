//! The verbs device over a double of libibverbs: opening, limits, GIDs, registrations, events, and
//! how queue pairs are made and brought up.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

#[path = "verbs_port/rig.rs"]
#[allow(dead_code, reason = "the port's tests use the rest")]
mod rig;
mod verbs_double;

use kvrail::nic::verbs::{Device, Event, Fault, Gid, Open, Path, QpKind};
use rdma_core_sys::*;

use rig::{path, OPEN};
use verbs_double::{self as double, with, State};

const DATA: QpKind = QpKind::Data { depth: 64, sges: 4, inline: 64 };
const MAIL: QpKind = QpKind::Mail { send: 16, recv: 16, inline: 256 };
const OURS: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 0, 1];

fn open() -> Device {
    Device::open(double::verbs(), &OPEN).unwrap()
}

fn with_device(change: impl FnOnce(&mut State)) -> Device {
    double::reset();
    with(change);
    open()
}

#[test]
fn opening_reads_every_limit_and_dropping_gives_all_back_in_order() {
    let device = open();
    let f = *device.facts();
    assert_eq!((f.max_qp_wr, f.max_cqe, f.max_sge), (4096, 8192, 16));
    assert_eq!((f.rd_responder, f.rd_initiator), (16, 16));
    assert_eq!((f.max_mr_size, f.max_mr, f.max_msg_bytes), (1 << 40, 1000, 1 << 30));
    assert_eq!((f.mtu, f.speed_mbps), (4096, 100_000));
    assert_eq!((f.cq_entries, f.mail_entries, f.parent_domain), (4096, 64, true));
    assert_eq!((device.name(), device.port_number()), ("double0", 1));
    for fd in [device.channel_fd(), device.event_fd()] {
        // SAFETY: no pointers.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
        assert_ne!(flags & libc::O_NONBLOCK, 0, "a read of {fd} would wait");
    }
    with(|s| s.calls.clear());
    drop(device);
    let order = [
        "dereg_mr",
        "destroy_cq",
        "destroy_cq",
        "destroy_comp_channel",
        "dealloc_pd",
        "dealloc_td",
        "dealloc_pd",
        "close_device",
    ];
    with(|s| assert!(s.calls == order && s.nothing_lives(), "{:?} {:?}", s.calls, s.live));
}

#[test]
fn limits_are_the_smaller_of_what_is_asked_and_what_there_is() {
    let device = with_device(|s| {
        (s.device.max_cqe, s.device.max_sge, s.device.max_sge_rd) = (100, 30, 6);
        (s.device.max_qp_rd_atom, s.device.max_qp_init_rd_atom) = (1, 4);
        s.port.active_mtu = IBV_MTU_1024;
    });
    let f = *device.facts();
    assert_eq!((f.cq_entries, f.mail_entries, f.max_sge), (100, 64, 6));
    assert_eq!((f.rd_responder, f.rd_initiator, f.mtu), (1, 4, 1024));
    let device = with_device(|s| (s.device.max_sge_rd, s.device.max_mr) = (0, -5));
    assert_eq!((device.facts().max_sge, device.facts().max_mr), (1, 0));
}

#[test]
fn whatever_fails_while_opening_is_named_and_nothing_stays_open() {
    let cases = [
        ("get_device_list", "ibv_get_device_list"),
        ("open_device", "ibv_open_device"),
        ("query_port", "ibv_query_port"),
        ("alloc_pd", "ibv_alloc_pd"),
        ("create_comp_channel", "ibv_create_comp_channel"),
        ("create_cq", "ibv_create_cq"),
        ("reg_mr", "ibv_reg_mr"),
    ];
    for (fail, call) in cases {
        double::reset();
        with(|s| s.fail.insert(fail, libc::ENOMEM));
        let fault = Device::open(double::verbs(), &OPEN).unwrap_err();
        assert_eq!((fault.call, fault.errno), (call, libc::ENOMEM));
        with(|s| assert!(s.nothing_lives(), "{fail}: {:?}", s.live));
    }
    // Without thread or parent domain it works, with the provider's locks.
    for fail in ["alloc_td", "alloc_parent_domain"] {
        let device = with_device(|s| {
            s.fail.insert(fail, libc::EOPNOTSUPP);
        });
        assert!(!device.facts().parent_domain);
        drop(device);
        with(|s| assert!(s.nothing_lives(), "{fail}: {:?}", s.live));
    }
}

#[test]
fn a_device_a_port_or_a_limit_that_is_not_there_is_refused_by_name() {
    let refused = |open: &Open<'_>| {
        let text = Device::open(double::verbs(), open).unwrap_err().to_string();
        with(|s| assert!(s.nothing_lives(), "{:?}", s.live));
        text
    };
    let text = refused(&Open { name: "mlx5_9", ..OPEN });
    assert!(text.contains("of which there are 1"), "{text}");
    let long = "x".repeat(200);
    assert!(refused(&Open { name: &long, ..OPEN }).contains("200"));
    for port in [0, 2, 255] {
        let text = refused(&Open { port, ..OPEN });
        assert!(text.contains(&format!("port {port} (at most 1)")), "{text}");
    }
    with(|s| s.port.active_mtu = 9);
    assert!(refused(&OPEN).contains("active MTU code 9"));
    double::reset();
    with(|s| s.device.max_qp_wr = 1);
    assert!(refused(&OPEN).contains("max_qp_wr 1"));
}

#[test]
fn a_gid_is_of_the_address_for_roce_v2_and_on_the_netdev() {
    const V1: u32 = IBV_GID_TYPE_ROCE_V1;
    const V2: u32 = IBV_GID_TYPE_ROCE_V2;
    let other = [7; 16];
    let device = open();
    let find = |gids: &[([u8; 16], u32, u32)]| {
        with(|s| s.gids = gids.to_vec());
        device.gid()
    };
    let gid = |index| Ok(Gid { index, raw: OURS });
    assert_eq!(find(&[(other, V2, 7), (OURS, V1, 7), (OURS, V2, 8), (OURS, V2, 7)]), gid(3));
    // It is read anew each time: here it moved.
    assert_eq!(find(&[(OURS, V1, 7), (OURS, V2, 7)]), gid(1));
    // A library that does not know the netdev says 0.
    assert_eq!(find(&[(other, V2, 0), (OURS, V2, 0)]), gid(1));
    for gids in [&[(OURS, V1, 7)][..], &[(other, V2, 7)], &[(OURS, V2, 8)], &[]] {
        let fault = find(gids).unwrap_err();
        assert_eq!(fault.errno, libc::EADDRNOTAVAIL);
        assert!(fault.to_string().contains("a table of 8"), "{fault}");
    }
    // Not beyond the table.
    with(|s| s.port.gid_tbl_len = 1);
    assert!(find(&[(other, V2, 7), (OURS, V2, 7)]).is_err());
    // An older library: the caller knows the place, the device checks it.
    let device = with_device(|s| {
        s.gid_ex = false;
        s.gids = vec![(other, V2, 0), (OURS, V2, 0)];
    });
    assert_eq!(device.gid().unwrap_err().errno, libc::ENOSYS);
    assert_eq!(device.gid_at(1), gid(1));
    assert_eq!(device.gid_at(0).unwrap_err().errno, libc::EADDRNOTAVAIL);
    assert!(device.gid_at(2).is_err());
    for index in [8, u32::MAX] {
        assert_eq!(device.gid_at(index).unwrap_err().limit, Some(8));
    }
}

#[test]
fn registrations_give_exactly_the_access_that_is_meant() {
    const ACCESS: u32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    let device = open();
    let plain = device.register(0x10_0000, 4096, 0x10_0000, false).unwrap();
    let relaxed = device.register(0x20_0000, 8192, 0x20_0000, true).unwrap();
    let moved = device.register(0x30_0000, 4096, 0x9000, false).unwrap();
    with(|s| {
        let expected = [
            (0x10_0000, 4096, 0x10_0000, ACCESS),
            (0x20_0000, 8192, 0x20_0000, ACCESS | IBV_ACCESS_RELAXED_ORDERING),
            (0x30_0000, 4096, 0x9000, ACCESS),
        ];
        assert_eq!(s.registered[1..], expected);
    });
    assert_ne!(plain.lkey, plain.rkey);
    for mr in [plain, relaxed, moved] {
        // SAFETY: of this device; nothing uses it.
        unsafe { device.deregister(mr) }.unwrap();
    }
    for len in [0, (1 << 40) + 1] {
        let fault = device.register(0x1000, len, 0x1000, false).unwrap_err();
        assert_eq!((fault.asked, fault.limit), (len, Some(1 << 40)));
    }
    with(|s| s.fail.insert("reg_mr", libc::ENOMEM));
    let text = device.register(0x1000, 4096, 0x1000, false).unwrap_err().to_string();
    assert!(text.contains("4096") && text.contains("RLIMIT_MEMLOCK"), "{text}");
    let fault = device.register_dmabuf(3, 0, 4096, 0).unwrap_err();
    assert_eq!((fault.call, fault.errno), ("ibv_reg_dmabuf_mr", libc::EOPNOTSUPP));
    drop(device);
    with(|s| assert!(s.nothing_lives(), "{:?}", s.live));
}

#[test]
fn data_queue_pairs_are_in_the_lanes_domain_and_message_queue_pairs_are_not() {
    let device = open();
    let data = device.create_qp(DATA).unwrap();
    let mail = device.create_qp(MAIL).unwrap();
    with(|s| {
        let (d, m) = (&s.qps[&data.number()], &s.qps[&mail.number()]);
        assert_ne!(d.pd, m.pd);
        assert_eq!(m.cq, device.mail_cq());
        assert_ne!(d.cq, m.cq);
        // 64 for data, 64 flushes, a marker and a proof; no receives.
        assert_eq!(d.cap, (130, 0, 4, 0, 64));
        assert_eq!(m.cap, (16, 16, 1, 1, 256));
    });
    assert_eq!((data.granted().depth, data.granted().sges, data.granted().inline), (130, 4, 64));
    assert_eq!(mail.granted().receives, 16);
    for qp in [data, mail] {
        // SAFETY: nobody has a copy.
        unsafe { qp.destroy() }.unwrap();
    }
}

#[test]
fn what_a_device_cannot_give_is_halved_and_what_it_gave_is_said() {
    let create = |kind| {
        let device = open();
        let qp = device.create_qp(kind).unwrap();
        let granted = qp.granted();
        // SAFETY: nobody has a copy.
        unsafe { qp.destroy() }.unwrap();
        granted
    };
    with(|s| s.most_inline = 70);
    assert_eq!(create(QpKind::Mail { send: 4, recv: 4, inline: 512 }).inline, 64);
    with(|s| s.most_inline = 0);
    assert_eq!(create(QpKind::Mail { send: 4, recv: 4, inline: 512 }).inline, 0);
    with(|s| s.most_sges = 3);
    assert_eq!(create(QpKind::Data { depth: 8, sges: 12, inline: 0 }).sges, 3);
    with(|s| s.device.max_qp_wr = 50);
    let granted = create(QpKind::Data { depth: 1 << 20, sges: 99, inline: 0 });
    assert_eq!(granted.depth, 50);
    let granted = create(QpKind::Mail { send: 1 << 20, recv: u32::MAX, inline: 0 });
    assert_eq!((granted.depth, granted.receives), (50, 50));
    double::reset();
    with(|s| s.fail.insert("create_qp", libc::ENOSPC));
    let fault = open().create_qp(DATA).unwrap_err();
    assert_eq!((fault.call, fault.errno, fault.limit), ("ibv_create_qp", 28, Some(4096)));
}

#[test]
fn a_queue_pair_is_raised_in_three_steps_with_exactly_their_attributes() {
    let device = open();
    for (kind, access) in [(DATA, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE), (MAIL, 0)] {
        let qp = device.create_qp(kind).unwrap();
        qp.raise(&device, &path()).unwrap();
        let steps = with(|s| s.qps[&qp.number()].changes.clone());
        let masks: Vec<u32> = steps.iter().map(|s| s.0).collect();
        // STATE|PKEY|PORT|ACCESS; STATE|AV|MTU|DEST|RQ_PSN|DEST_RD|RNR_TIMER;
        // STATE|TIMEOUT|RETRY|RNR|SQ_PSN|RD. What the kernel asks for, and nothing else.
        assert_eq!(masks, [0x39, 0x12_9181, 0x1_2e01]);
        let (init, rtr, rts) = (&steps[0].1, &steps[1].1, &steps[2].1);
        assert_eq!((init.qp_state, init.port_num, init.pkey_index), (IBV_QPS_INIT, 1, 0));
        assert_eq!(init.qp_access_flags, access);
        assert_eq!((rtr.qp_state, rtr.path_mtu), (IBV_QPS_RTR, IBV_MTU_1024));
        assert_eq!((rtr.dest_qp_num, rtr.rq_psn), (77, 0x65_4321));
        assert_eq!((rtr.max_dest_rd_atomic, rtr.min_rnr_timer), (8, 12));
        let (ah, grh) = (rtr.ah_attr, rtr.ah_attr.grh);
        assert_eq!((ah.is_global, ah.port_num, ah.sl), (1, 1, 3));
        assert_eq!((grh.sgid_index, grh.hop_limit, grh.traffic_class), (3, 64, 0x60));
        // SAFETY: any bytes are a GID.
        assert_eq!(unsafe { grh.dgid.raw }, [9; 16]);
        assert_eq!((rts.qp_state, rts.timeout), (IBV_QPS_RTS, 14));
        assert_eq!((rts.retry_cnt, rts.rnr_retry), (6, 5));
        assert_eq!((rts.sq_psn, rts.max_rd_atomic), (0x12_3456, 4));
        // SAFETY: nobody has a copy.
        unsafe { qp.destroy() }.unwrap();
    }
}

#[test]
fn a_path_that_would_wait_for_ever_or_is_out_of_range_is_refused() {
    let device = with_device(|s| s.port.active_mtu = IBV_MTU_2048);
    let qp = device.create_qp(DATA).unwrap();
    let p = path();
    let bad: [(Path, &str); 13] = [
        (Path { retry: 7, ..p }, "retry 7 (at most 6)"),
        (Path { rnr_retry: 7, ..p }, "rnr_retry 7 (at most 6)"),
        (Path { timeout: 0, ..p }, "timeout 0 (at most 31)"),
        (Path { timeout: 32, ..p }, "timeout 32"),
        (Path { service_level: 16, ..p }, "service level 16"),
        (Path { gid_index: 256, ..p }, "GID index 256"),
        (Path { remote_qpn: 0, ..p }, "queue pair number 0"),
        (Path { remote_qpn: 1 << 24, ..p }, "queue pair number 16777216"),
        (Path { rd_initiator: 17, ..p }, "READs as initiator 17 (at most 16)"),
        (Path { rd_responder: 0, ..p }, "READs as responder 0"),
        (Path { mtu: 4096, ..p }, "MTU 4096 (at most 2048)"),
        (Path { mtu: 1500, ..p }, "1500"),
        (Path { mtu: 128, ..p }, "MTU 128"),
    ];
    for (path, text) in bad {
        let fault = qp.raise(&device, &path).unwrap_err().to_string();
        assert!(fault.contains(text), "{fault}");
    }
    with(|s| assert!(s.qps[&qp.number()].changes.is_empty(), "nothing was tried"));
    // The low 24 bits of a packet number count.
    let far = Path { own_psn: 0xff00_0001, remote_psn: 0xff00_0002, ..p };
    qp.raise(&device, &far).unwrap();
    with(|s| {
        let steps = &s.qps[&qp.number()].changes;
        assert_eq!((steps[1].1.rq_psn, steps[2].1.sq_psn), (2, 1));
    });
    // SAFETY: nobody has a copy.
    unsafe { qp.destroy() }.unwrap();
}

#[test]
fn a_step_that_fails_is_named_and_a_queue_pair_can_be_failed() {
    let device = open();
    for (step, named) in [
        ("to INIT", "ibv_modify_qp (RESET to INIT)"),
        ("to RTR", "ibv_modify_qp (INIT to RTR)"),
        ("to RTS", "ibv_modify_qp (RTR to RTS)"),
    ] {
        let qp = device.create_qp(DATA).unwrap();
        with(|s| s.fail.insert(step, libc::ETIMEDOUT));
        let fault = qp.raise(&device, &path()).unwrap_err();
        assert_eq!((fault.call, fault.errno), (named, libc::ETIMEDOUT));
        with(|s| s.fail.clear());
        qp.fail();
        with(|s| {
            let &(mask, attr) = s.qps[&qp.number()].changes.last().unwrap();
            assert_eq!((mask, attr.qp_state), (IBV_QP_STATE, IBV_QPS_ERR));
        });
        // SAFETY: nobody has a copy.
        unsafe { qp.destroy() }.unwrap();
    }
    let qp = device.create_qp(DATA).unwrap();
    with(|s| s.fail.insert("destroy_qp", libc::EBUSY));
    // SAFETY: nobody has a copy.
    let fault: Fault = unsafe { qp.destroy() }.unwrap_err();
    assert_eq!((fault.call, fault.errno), ("ibv_destroy_qp", libc::EBUSY));
}

#[test]
fn events_are_told_with_their_port_or_queue_pair_and_acknowledged() {
    let device = open();
    let qp = device.create_qp(DATA).unwrap();
    let port = |event_type, port_num| ibv_async_event {
        event_type,
        element: ibv_async_event_element { port_num },
    };
    let raw = qp.pointer().as_ptr();
    let of_qp =
        |event_type| ibv_async_event { event_type, element: ibv_async_event_element { qp: raw } };
    let list = [
        (port(IBV_EVENT_PORT_ERR, 2), Event::PortDown(2)),
        (port(IBV_EVENT_PORT_ACTIVE, 1), Event::PortUp(1)),
        (port(IBV_EVENT_GID_CHANGE, 3), Event::GidChange(3)),
        (port(IBV_EVENT_PORT_ERR, 4000), Event::PortDown(0)),
        (of_qp(IBV_EVENT_QP_FATAL), Event::QpFatal(qp.number())),
        (of_qp(IBV_EVENT_QP_REQ_ERR), Event::QpFatal(qp.number())),
        (of_qp(IBV_EVENT_QP_ACCESS_ERR), Event::QpFatal(qp.number())),
        (port(IBV_EVENT_CQ_ERR, 0), Event::CqError),
        (port(IBV_EVENT_LID_CHANGE, 1), Event::Other(IBV_EVENT_LID_CHANGE)),
        (port(999, 1), Event::Other(999)),
    ];
    assert_eq!(device.next_event(), None);
    with(|s| s.events.extend(list.iter().map(|l| l.0)));
    for (i, (_, told)) in list.iter().enumerate() {
        assert_eq!(device.next_event(), Some(*told));
        assert_eq!(with(|s| s.acknowledged), i + 1);
    }
    assert_eq!(device.next_event(), None);
    // A dead device is told once, by its event or by the call that fails.
    with(|s| s.events.extend([port(IBV_EVENT_DEVICE_FATAL, 0), port(IBV_EVENT_PORT_ERR, 1)]));
    assert_eq!((device.next_event(), device.next_event()), (Some(Event::DeviceFatal), None));
    // SAFETY: nobody has a copy.
    unsafe { qp.destroy() }.unwrap();
    let device = with_device(|s| {
        s.fail.insert("get_async_event", libc::EIO);
    });
    assert_eq!((device.next_event(), device.next_event()), (Some(Event::DeviceFatal), None));
}

#[test]
fn a_port_is_asked_each_time() {
    let device = open();
    assert_eq!(device.is_active(), Ok(true));
    with(|s| s.port.state = IBV_PORT_DOWN);
    assert_eq!(device.is_active(), Ok(false));
    with(|s| s.fail.insert("query_port", libc::EIO));
    assert_eq!(device.is_active().unwrap_err().call, "ibv_query_port");
}
