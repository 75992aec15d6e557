//! Arguments of the C ABI's calls, good and bad, and what every answer must keep.

use crate::draw::Draw;
use core::ffi::{c_char, c_void};
use core::ptr::null_mut;
use kvrail::status::Status;
use kvrail_cabi::{config::*, engine::*, error::*, log::*, notify::*, peer::*};
use kvrail_cabi::{region::*, table::*, transfer::*, types::*};

/// Filled into every buffer before a call.
const CANARY: u8 = 0xa5;

/// Calls one function of the C ABI and checks that its answer is one that the header knows.
macro_rules! abi {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: every pointer that is made in this target is NULL where that is refused, or of a
        // buffer that lives through the call and is as long as stated; engines are live ones.
        $crate::cabi_args::Answer::known(unsafe { $function($($argument),*) })
    };
}
pub(crate) use abi;

/// What calls answer with.
pub(crate) trait Answer {
    fn known(self) -> Self;
}

impl Answer for kvr_status {
    fn known(self) -> kvr_status {
        assert!(Status::from_code(self).is_some(), "status {self} is none");
        assert_ne!(self, KVR_ERR_INTERNAL, "a panic inside");
        self
    }
}

impl Answer for usize {
    fn known(self) -> usize {
        self
    }
}

/// It worked.
pub(crate) fn ok(status: kvr_status) {
    let mut text = [0u8; 512];
    let len = abi!(kvr_last_error(text.as_mut_ptr().cast(), text.len())).min(511);
    assert_eq!(status, KVR_OK, "{}", String::from_utf8_lossy(&text[..len]));
}

/// Whether a call gave a handle: a success gives one, an error 0.
pub(crate) fn gave(status: kvr_status, raw: u64) -> bool {
    assert_eq!(status == KVR_OK, raw != 0, "status {status} with handle {raw:#x}");
    status == KVR_OK
}

fn defaults() -> kvr_config {
    let mut cfg = core::mem::MaybeUninit::<kvr_config>::zeroed();
    ok(abi!(kvr_config_init(cfg.as_mut_ptr(), size_of::<kvr_config>())));
    // SAFETY: all zeros are a value of this struct of integers, and the call filled it.
    unsafe { cfg.assume_init() }
}

/// Parameters of engine number `made`: small, so that every capacity is reached.
pub(crate) fn config(made: u32, how: usize) -> kvr_config {
    let mut cfg = defaults();
    let name = format!("fz{made}");
    let texts: [(&mut [c_char], &str); 3] =
        [(&mut cfg.name, &name), (&mut cfg.listen_ip, "127.0.0.1"), (&mut cfg.transport, "local")];
    for (to, text) in texts {
        to.fill(0);
        to.iter_mut().zip(text.bytes()).for_each(|(t, b)| *t = b as c_char);
    }
    cfg.flags = if how & 1 == 0 { 0 } else { KVR_CFG_PROGRESS_THREAD };
    cfg.max_peers = 3;
    cfg.max_regions = 5;
    cfg.max_remote_regions = 6;
    cfg.max_tables = 6;
    cfg.max_transfers = 6;
    cfg.rails = 1 + (how as u32 >> 2 & 1);
    cfg.stripe_width = how as u32 >> 3 & 1;
    cfg.inline_bytes = if how & 16 == 0 { 0 } else { 256 };
    cfg.message_bytes = 2 << 20;
    cfg.slice_bytes = 4096;
    cfg.spin_us = 0;
    cfg.connect_timeout_ms = 500;
    cfg.deregister_timeout_ms = 300;
    cfg.release_timeout_ms = 300;
    cfg
}

/// Reads a blob in two calls, and once into less room than it takes: nothing is copied then, and
/// nothing behind the room.
pub(crate) fn blob(
    read: impl Fn(*mut c_void, *mut usize) -> kvr_status,
    draw: &mut Draw,
) -> Vec<u8> {
    let mut len = 0;
    assert_eq!(read(null_mut(), &mut len), KVR_ERR_CAPACITY);
    let mut bytes = vec![CANARY; len + 16];
    let (whole, room) = (len, draw.byte() % len);
    len = room;
    assert_eq!(read(bytes.as_mut_ptr().cast(), &mut len), KVR_ERR_CAPACITY);
    assert!(len == whole && bytes.iter().all(|b| *b == CANARY), "copied to {room} of {whole}");
    ok(read(bytes.as_mut_ptr().cast(), &mut len));
    assert!(bytes[whole..].iter().all(|b| *b == CANARY));
    bytes.truncate(whole);
    bytes
}

/// A blob that is cut (0) or changed (1) before byte `limit`; as it is otherwise.
pub(crate) fn spoil(blob: &[u8], how: usize, limit: usize, draw: &mut Draw) -> Vec<u8> {
    let mut bytes = blob.to_vec();
    match how {
        0 => bytes.truncate(draw.byte() % blob.len()),
        1 => {
            let at = draw.byte() % limit.min(blob.len());
            bytes[at] ^= draw.byte() as u8;
        }
        _ => {}
    }
    bytes
}

/// Byte `k` of every message of `len` bytes.
fn letter(len: usize, k: usize) -> u8 {
    (len * 7 + k) as u8
}

/// A message that says what it is by its length.
pub(crate) fn message(how: usize, draw: &mut Draw) -> Vec<u8> {
    let len = match how % 16 {
        0 => KVR_MESSAGE_MAX + 1,
        1 => KVR_MESSAGE_MAX,
        2..=5 => draw.word() % 5000,
        _ => draw.byte(),
    };
    (0..len).map(|k| letter(len, k)).collect()
}

/// Takes a notification, and counts it at `ctx`.
pub(crate) unsafe extern "C" fn hear(
    ctx: *mut c_void,
    name: *const c_char,
    name_len: usize,
    msg: *const c_void,
    len: usize,
) {
    let read = |at: *const u8, len: usize| {
        // SAFETY: the library lends both for this call.
        (0..len).map(|i| unsafe { at.add(i).read() }).collect::<Vec<u8>>()
    };
    let (name, text) = (read(name.cast(), name_len), read(msg.cast(), len));
    assert!(name.starts_with(b"fz"), "a message of {name:?}");
    assert!(text.iter().enumerate().all(|(k, b)| *b == letter(len, k)), "nobody sent that");
    // SAFETY: the caller's counter, for this call.
    unsafe { *ctx.cast::<u64>() += 1 };
}

/// Bytes for a struct that states its size; what lies behind must stay.
fn versioned<T>(draw: &mut Draw, call: impl Fn(*mut T) -> kvr_status) -> kvr_status {
    let size = match draw.byte() {
        n @ 0..=7 => [0, 1, 3, 4, 5, 4096, 4097, 1 << 20][n],
        n => size_of::<T>() - n % 2 * 4,
    };
    let mut room = vec![u64::from_le_bytes([CANARY; 8]); 1024];
    let at = room.as_mut_ptr();
    // SAFETY: the first bytes of the room; both are at least 8 bytes and as aligned as any struct.
    unsafe { at.cast::<u32>().write(size as u32) };
    let status = call(at.cast());
    let filled = if status < 0 { 4 } else { size };
    assert!((4..=4096).contains(&filled), "a struct_size of {size} was taken");
    let bytes: Vec<u8> = room.iter().flat_map(|w| w.to_le_bytes()).collect();
    assert!(bytes[filled..].iter().all(|b| *b == CANARY), "written behind {filled} bytes");
    assert_eq!(bytes[..4], (size as u32).to_le_bytes());
    status
}

/// The figures of a transfer that answered a check with `status`.
pub(crate) fn transfer_info(
    e: *mut kvr_engine,
    raw: u64,
    status: kvr_status,
    gone: bool,
    draw: &mut Draw,
) {
    let got = versioned(draw, |at| abi!(kvr_transfer_info_get(e, raw, at)));
    assert!(got == KVR_OK || got < 0);
    assert!(!gone || got < 0, "figures of {raw:#x}, which is gone ({status})");
}

/// Calls whose arguments are wrong by themselves, and calls that need no object.
pub(crate) fn bad(e: *mut kvr_engine, draw: &mut Draw) {
    let (null, n) = (null_mut::<u64>(), draw.below(3));
    let mut raw = 7u64;
    let none = null_mut::<kvr_engine>();
    let crooked = (&raw mut raw).wrapping_byte_add(1);
    let refused = match draw.below(20) {
        0 => abi!(kvr_region_register(e, 4096, 4096, 0, null)),
        1 => abi!(kvr_region_register(e, u64::MAX - 9, 11 + n as u64, 0, &mut raw)),
        2 => abi!(kvr_region_register(none, 4096, 1, 0, &mut raw)),
        3 => abi!(kvr_table_create(e, null.cast(), 1 + n, &mut raw)),
        4 => abi!(kvr_table_create(e, crooked.cast(), 1, &mut raw)),
        5 => abi!(kvr_table_create_strided(e, null.cast(), 1 + n, &mut raw)),
        6 => abi!(kvr_transfer_post(none, raw, null.cast(), 0)),
        7 => abi!(kvr_transfer_post(e, raw, null.cast(), 1 + n)),
        8 => abi!(kvr_notifs(e, None, null.cast(), null.cast())),
        9 => abi!(kvr_notify(e, raw, null.cast(), 1 + n)),
        10 => abi!(kvr_peer_add(e, null.cast(), 1 + n, null.cast(), 0, &mut raw)),
        11 => abi!(kvr_peer_add(e, (&raw const raw).cast(), n, null.cast(), 0, &mut raw)),
        12 => abi!(kvr_peer_self(e, crooked)),
        13 => abi!(kvr_region_import(e, 1, (&raw const n).cast(), n, &mut raw)),
        14 => abi!(kvr_engine_metadata(e, null.cast(), null.cast())),
        15 => abi!(kvr_engine_destroy(none)),
        16 => abi!(kvr_config_set(null.cast(), c"rails".as_ptr(), c"1".as_ptr())),
        17 => versioned(draw, |at| abi!(kvr_engine_info_get(e, at))).min(-1),
        18 => {
            let rail = draw.byte() as u32;
            versioned(draw, |at| abi!(kvr_rail_info_get(e, rail, at))).min(-1)
        }
        _ => parameters(draw),
    };
    assert!(refused < 0, "taken");
}

/// A parameter as text: taken or refused, and then the engine's size is one or an error. -1.
fn parameters(draw: &mut Draw) -> kvr_status {
    let mut cfg = defaults();
    let mut keys = vec![0u8; abi!(kvr_config_keys(null_mut(), 0)) + 1];
    abi!(kvr_config_keys(keys.as_mut_ptr().cast(), keys.len()));
    let lines = String::from_utf8_lossy(&keys);
    let names: Vec<&str> = lines.lines().filter_map(|l| Some(l.split_once('=')?.0)).collect();
    let text = |bytes: &[u8]| {
        let mut text: Vec<u8> = bytes.iter().copied().filter(|b| *b != 0).collect();
        text.push(0);
        text
    };
    let key = match draw.byte() {
        255 => text(&draw.bytes(9)),
        n => text(names[n % names.len()].as_bytes()),
    };
    let digits = draw.below(12);
    let value = match draw.byte() % 4 {
        0 => text(&draw.bytes(24)),
        1 => text(b"18446744073709551615"),
        _ => text(&b"48318382080"[..digits.min(11)]),
    };
    let before = cfg.max_bytes;
    let status = abi!(kvr_config_set(&mut cfg, key.as_ptr().cast(), value.as_ptr().cast()));
    assert!(status == KVR_OK || cfg.max_bytes == before);
    let size = abi!(kvr_engine_size(&cfg));
    assert!(status != KVR_OK || size > 0 || abi!(kvr_last_error(null_mut(), 0)) > 0);
    -1
}

unsafe extern "C" fn silent(_: *mut c_void, _: i32, _: *const c_char, _: usize) {}

/// No log lines: provoked errors would be all that one sees.
pub(crate) fn quiet() {
    ok(abi!(kvr_log_set(Some(silent), null_mut())));
}
