use super::*;
use proptest::prelude::*;

fn vars(list: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    list.iter().map(|(k, v)| (OsString::from(k), OsString::from(v))).collect()
}

#[track_caller]
fn refused(key: &str, value: &str) -> String {
    let mut c = Config::default();
    let e = c.set(key, value).expect_err("accepted");
    assert_eq!(e.status, Status::Config);
    assert_eq!(c, Config::default(), "a refused value changed something");
    // Who typed a bad value knows the key: its name, the value and what is allowed, nothing else.
    let head = format!("parameter `{key}`: `");
    assert!(KEYS.iter().all(|k| k.name != key) || e.message.starts_with(&head), "{}", e.message);
    assert_eq!(e.message.contains("known parameters"), KEYS.iter().all(|k| k.name != key));
    e.message
}

#[test]
fn defaults_are_those_of_the_c_abi_and_pass_the_check() {
    let c = Config::default();
    c.check().unwrap();
    assert_eq!((c.max_peers, c.max_regions, c.max_remote_regions), (256, 4096, 65_536));
    assert_eq!((c.max_tables, c.max_transfers), (1024, 4096));
    assert_eq!((c.rails, c.stripe_width, c.spin_us), (1, 1, 50));
    assert_eq!((c.inline_bytes, c.slice_bytes, c.message_bytes), (65_536, 4_194_304, 33_554_432));
    assert_eq!((c.connect_timeout_ms, c.deregister_timeout_ms), (3000, 2000));
    assert_eq!((c.release_timeout_ms, c.stall_ms), (1000, 30_000));
    assert_eq!((c.port_min, c.port_max, c.max_bytes), (0, 0, 4_294_967_296));
    assert_eq!((c.name.as_str(), c.listen_ip.as_str(), c.transport.as_str()), ("", "auto", "auto"));
    assert_eq!((c.sq_depth, c.sges, c.ack_timeout, c.retry, c.rnr_retry), (256, 16, 14, 6, 6));
    assert_eq!((c.traffic_class, c.service_level, c.rail_timeout_ms), (0, 0, 500));
    assert_eq!((c.keepalive_ms, c.link_debounce_ms, c.peer_timeout_ms), (1000, 1000, 4000));
    assert_eq!((c.device_id, c.numa_node, c.nics.as_str(), c.rbln_ctx_ptr), (0, -1, "", 0));
    assert_eq!(c.devmem, "auto");
    assert!(c.progress_thread);
}

#[test]
fn every_key_reads_its_own_default_back_and_states_its_range() {
    for (key, default, help) in Config::keys() {
        let mut c = Config::default();
        c.set(key, &default).unwrap();
        assert_eq!(c, Config::default(), "{key}");
        assert!(!help.is_empty() && !help.contains('\n') && help.len() <= 100, "{key}: {help}");
    }
    for (i, k) in KEYS.iter().enumerate() {
        if let Some(range) = k.stated_range() {
            assert!(k.help.contains(&range), "{}: help lacks {range}: {}", k.name, k.help);
        }
        assert!(KEYS[i + 1..].iter().all(|o| o.name != k.name), "{} is there twice", k.name);
    }
}

#[test]
fn every_field_has_a_key() {
    // A value other than the default for every key changes exactly one thing, and all together
    // change every field.
    let mut all = Config::default();
    for k in KEYS {
        let value = match k.name {
            "name" => "decode-0",
            "transport" => "local",
            "devmem" => "cuda",
            "listen_ip" => "10.0.0.1",
            "port" => "7000-7010",
            "progress_thread" | "stripe_width" => "0",
            "nics" => "mlx5_0,rocep1s0",
            "message_bytes" | "max_bytes" => "64M",
            "slice_bytes" | "inline_bytes" => "1M",
            "sq_depth" | "ack_timeout" | "rail_timeout_ms" => "20",
            _ => "5",
        };
        let mut one = Config::default();
        one.set(k.name, value).unwrap();
        assert_ne!(one, Config::default(), "{}", k.name);
        one.check().unwrap();
        all.set(k.name, value).unwrap();
    }
    let default = format!("{:#?}", Config::default());
    let changed = format!("{all:#?}");
    for (a, b) in default.lines().zip(changed.lines()).filter(|(a, _)| a.contains(':')) {
        assert_ne!(a, b, "no key sets this field");
    }
}

#[test]
fn an_unknown_key_gets_the_list_and_the_nearest_name() {
    let m = refused("stripe-widht", "4");
    assert!(m.contains("`stripe-widht` (value `4`); did you mean `stripe_width`?"), "{m}");
    assert!(refused("Max_Peers", "4").contains("did you mean `max_peers`?"));
    assert!(!refused("zzzzzzzz", "4").contains("did you mean"));
    assert!(!refused("max_zzzzzzzz", "4").contains("did you mean"), "too far");
    let long = "k".repeat(100_000);
    assert!(refused(&long, &long).len() < 1000, "outside text is cut");
    refused("", "");
}

#[test]
fn stripe_width_takes_one_and_zero_only() {
    let mut c = Config::default();
    for (text, width) in [("0", 0), ("1", 1), (" 0 ", 0)] {
        c.set("stripe_width", text).unwrap();
        assert_eq!(c.stripe_width, width);
    }
    for text in ["2", "4096", "-1", "", "true", "1.0", "0x1", "+1"] {
        let m = refused("stripe_width", text);
        assert!(m.contains("1 (one rail a transfer) or 0 (every shared rail)"), "{m}");
        assert!(m.contains(&format!("`{text}`")), "{m}");
    }
    c.stripe_width = 2;
    assert_eq!(c.check().unwrap_err().status, Status::Config);
}

#[test]
fn ports_are_one_or_a_range() {
    let mut c = Config::default();
    for (text, ports) in [
        ("0", (0, 0)),
        ("7000", (7000, 7000)),
        ("7000-7010", (7000, 7010)),
        ("65535", (65_535, 65_535)),
    ] {
        c.set("port", text).unwrap();
        assert_eq!((c.port_min, c.port_max), ports);
        assert!(c.check().is_ok());
    }
    for text in ["65536", "7010-7000", "0-5", "-", "7000-", "-7000", "a", "1-2-3", ""] {
        refused("port", text);
    }
    (c.port_min, c.port_max) = (9, 8);
    assert!(c.check().unwrap_err().message.contains("`port`: `9-8`"));
}

#[test]
fn sizes_take_suffixes_and_their_range() {
    let mut c = Config::default();
    for (text, bytes) in [
        ("4096", 4096),
        ("4K", 4096),
        ("4k", 4096),
        ("8KiB", 8192),
        ("2M", 2 << 20),
        ("1G", 1 << 30),
        ("1GiB", 1 << 30),
    ] {
        c.set("slice_bytes", text).unwrap();
        assert_eq!(c.slice_bytes, bytes, "{text}");
    }
    for text in
        ["4095", "2G", "4KB", "4iB", "K", "1.5M", "-1", "99999999999999999999", "20000000000G", ""]
    {
        let m = refused("slice_bytes", text);
        assert!(m.contains("a number in 4K..=1G bytes (plain, or with K, M or G)"), "{m}");
    }
    c.set("max_bytes", "6G").unwrap();
    assert_eq!(c.max_bytes, 6 << 30);
    refused("rails", "1K");
    assert!(refused("rails", "17").contains("`17` is not allowed; allowed: a number in 1..=16"));
    refused("rails", "0");
}

#[test]
fn flags_pointers_names_and_transports() {
    let mut c = Config::default();
    for (text, on) in
        [("0", false), ("TRUE", true), ("off", false), ("on", true), ("No", false), ("yes", true)]
    {
        c.set("progress_thread", text).unwrap();
        assert_eq!(c.progress_thread, on, "{text}");
    }
    refused("progress_thread", "2");
    for (text, ptr) in [("0x7fff00", 0x7f_ff00), ("140737", 140_737), ("0XfF", 255)] {
        c.set("rbln_ctx_ptr", text).unwrap();
        assert_eq!(c.rbln_ctx_ptr, ptr);
    }
    for text in ["0x", "0x+1", "0xg", "-1", "0x11112222333344445"] {
        refused("rbln_ctx_ptr", text);
    }
    c.set("name", &"n".repeat(255)).unwrap();
    assert!(refused("name", &"n".repeat(256)).contains("this has 256"));
    refused("name", "a\0b");
    assert!(refused("transport", "tcp").contains("auto, verbs or local"));
    for text in ["auto", "none", "cuda"] {
        c.set("devmem", text).unwrap();
        assert_eq!(c.devmem, text);
    }
    assert!(
        refused("devmem", "CUDA").contains("`CUDA` is not allowed; allowed: auto, none or cuda")
    );
    // 7 means for ever, for RNR by the specification and for both on Soft-RoCE.
    refused("retry", "7");
    refused("rnr_retry", "7");
    for text in ["::1", "localhost", "1.2.3", ""] {
        refused("listen_ip", text);
    }
    c.set("listen_ip", "auto").unwrap();
    c.set("numa_node", "-1").unwrap();
    refused("numa_node", "-2");
    refused("nics", "a,,b");
    refused("nics", "a b");
    c.check().unwrap();
}

#[test]
fn check_finds_a_bad_field_that_was_set_directly() {
    let bad: [fn(&mut Config); 6] = [
        |c| c.rails = 0,
        |c| c.slice_bytes = 1,
        |c| c.max_transfers = 1 << 24,
        |c| c.port_max = 5,
        |c| c.transport = String::from("tcp"),
        |c| c.numa_node = -7,
    ];
    for (i, spoil) in bad.iter().enumerate() {
        let mut c = Config::default();
        spoil(&mut c);
        assert_eq!(c.check().unwrap_err().status, Status::Config, "{i}");
    }
}

#[test]
fn ranges_of_capacities_are_those_that_an_engine_takes() {
    let capacities = [
        "max_peers",
        "max_regions",
        "max_remote_regions",
        "max_transfers",
        "rails",
        "message_bytes",
    ];
    for name in capacities {
        let key = KEYS.iter().find(|k| k.name == name).unwrap();
        let (low, high) = key.ends().unwrap();
        let limits = |value: u64| {
            // Nothing else is in the way: one peer, or all the message memory there can be.
            let mut c = Config { max_peers: 1, message_bytes: 1 << 30, ..Config::default() };
            match name {
                "max_peers" => c.max_peers = value as u32,
                "max_regions" => c.max_regions = value as u32,
                "max_remote_regions" => c.max_remote_regions = value as u32,
                "max_transfers" => c.max_transfers = value as u32,
                "rails" => c.rails = value as u32,
                _ => c.message_bytes = value as u32,
            }
            c.limits(0).check()
        };
        assert_eq!((limits(low), limits(high)), (Ok(()), Ok(())), "{name}");
        // Beside the most rails there is a lane for the engine itself.
        let next = if name == "rails" { high + 2 } else { high + 1 };
        let outside = (limits(low - 1), limits(next));
        assert!(outside.0.is_err() && outside.1.is_err(), "{name}: more is allowed: {outside:?}");
    }
}

#[test]
fn message_bytes_must_do_for_max_peers_and_the_error_names_both() {
    let mut c = Config { message_bytes: 2 << 20, ..Config::default() };
    let e = c.check().unwrap_err();
    assert_eq!(e.status, Status::Config);
    for part in ["`message_bytes`: `2097152`", "`max_peers` 256", "raise message_bytes", "lower"] {
        assert!(e.message.contains(part), "{part} is not in: {e}");
    }
    let words: Vec<&str> = e.message.split("needs ").collect();
    c.message_bytes = words[1].split(':').next().unwrap().parse().unwrap();
    c.check().unwrap();
    c.message_bytes -= 1;
    c.check().unwrap_err();
    (c.max_peers, c.message_bytes) = (8, 2 << 20);
    c.check().unwrap();
}

#[test]
fn the_environment_sets_parameters_and_leaves_others_alone() {
    let mut c = Config::default();
    let warnings = c
        .apply_vars(vars(&[
            ("KVRAIL_RAILS", "4"),
            ("KVRAIL_STRIPE_WIDTH", "0"),
            ("KVRAIL_MAX_BYTES", "8G"),
            ("KVRAIL_PORT", "7000-7001"),
            ("KVRAIL_LOG", "debug"),
            ("KVRAIL_STATS", "1"),
            ("KVRAIL_SYSROOT", "/x"),
            ("KVRAIL_IBVERBS", "x"),
            ("KVRAIL_LIBCUDA", "x"),
            ("KVRAIL_PLUGIN_DIR", "x"),
            ("KVRAIL_TEST_X", "x"),
            ("KVRAIL_DEMO_Y", "x"),
            ("KVRAIL_VLLM_VENV", "x"),
            ("KVRAIL_RBLN_WHEEL", "x"),
            ("KVRAIL_DRIVE_LOG", "x"),
            ("KVRAIL_FAKEVERBS", "x"),
            ("KVRAIL_MAX_PEERS", ""),
            ("PATH", "/bin"),
            ("kvrail_rails", "9"),
        ]))
        .unwrap();
    assert_eq!(warnings, [""; 0]);
    assert_eq!((c.rails, c.stripe_width, c.max_bytes, c.port_max), (4, 0, 8 << 30, 7001));
    assert_eq!(c.max_peers, 256, "an empty variable is not set");
}

#[test]
fn an_unknown_variable_is_a_warning_and_a_bad_value_an_error_that_names_it() {
    let mut c = Config::default();
    let warnings = c
        .apply_vars(vars(&[("KVRAIL_RAIL", "2"), ("KVRAIL_QQQQQQQQ", "2"), ("KVRAIL_LOGS", "1")]))
        .unwrap();
    assert_eq!(warnings.len(), 3, "{warnings:?}");
    assert!(
        warnings[2].contains("KVRAIL_RAIL ") && warnings[2].contains("did you mean KVRAIL_RAILS?")
    );
    assert_eq!(c, Config::default());

    let e = c.apply_vars(vars(&[("KVRAIL_MAX_PEERS", "7"), ("KVRAIL_RAILS", "99")])).unwrap_err();
    assert_eq!(e.status, Status::Config);
    assert!(e
        .message
        .ends_with("`KVRAIL_RAILS`: `99` is not allowed; allowed: a number in 1..=16"));
    assert_eq!(c, Config::default(), "all or nothing");
}

#[cfg(unix)]
#[test]
fn variables_that_are_not_utf8_never_panic() {
    use std::os::unix::ffi::OsStringExt;
    let mut c = Config::default();
    let odd = OsString::from_vec(vec![b'K', 0xff]);
    c.apply_vars([(odd.clone(), odd.clone())]).unwrap();
    c.apply_vars([(OsString::from("KVRAIL_RAILS"), odd)]).unwrap_err();
    c.apply_env().unwrap();
}

proptest! {
    #[test]
    fn any_text_is_taken_or_refused_whole(which in 0..KEYS.len(), text in ".{0,40}") {
        let mut c = Config::default();
        match c.set(KEYS[which].name, &text) {
            // Two values that are fine each may not go together, which the text says.
            Ok(()) => {
                let together = c.check().map_or_else(|e| e.message, |()| "or lower".into());
                prop_assert!(together.contains("or lower"), "{}", together);
            }
            Err(e) => {
                prop_assert_eq!(e.status, Status::Config);
                prop_assert_eq!(c, Config::default());
            }
        }
    }

    #[test]
    fn a_set_value_reads_back(which in 0..KEYS.len(), n in any::<u64>(), shift in 0..64u32) {
        let key = &KEYS[which];
        let mut c = Config::default();
        if c.set(key.name, &(n >> shift).to_string()).is_ok() {
            let mut again = Config::default();
            again.set(key.name, &key.get(&c)).unwrap();
            prop_assert_eq!(again, c);
        }
    }

    #[test]
    fn distance_is_symmetric_and_zero_for_equals(a in "[a-c_]{0,8}", b in "[a-c_]{0,8}") {
        prop_assert_eq!(distance(&a, &b), distance(&b, &a));
        prop_assert_eq!(distance(&a, &b) == 0, a == b);
    }
}
