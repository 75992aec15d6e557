//! Parameters: `kvr_config` to the engine's `Config` and back, here and nowhere else.

use core::ffi::c_char;
use core::mem::{offset_of, size_of_val};

use kvrail_core::host::config::Config;
use kvrail_core::host::error::{Error, Result};
use kvrail_core::host::log::warn;
use kvrail_core::status::Status;

use crate::barrier::{guard, guard_len};
use crate::pointer::{fill_text, read_versioned, string, struct_size, write_versioned};
use crate::types::{kvr_config, kvr_status, KVR_CFG_PROGRESS_THREAD};

/// Calls `$numbers!` and `$strings!` with the fields that are the same on both sides.
macro_rules! fields {
    ($each_number:ident, $each_string:ident) => {
        $each_number!(
            max_peers,
            max_regions,
            max_remote_regions,
            max_tables,
            max_transfers,
            rails,
            stripe_width,
            inline_bytes,
            slice_bytes,
            message_bytes,
            spin_us,
            connect_timeout_ms,
            deregister_timeout_ms,
            release_timeout_ms,
            stall_ms,
            port_min,
            port_max,
            max_bytes,
            device_id,
            numa_node,
            rbln_ctx_ptr,
            sq_depth,
            sges,
            ack_timeout,
            retry,
            rnr_retry,
            traffic_class,
            service_level,
            rail_timeout_ms,
            keepalive_ms,
            link_debounce_ms,
            peer_timeout_ms
        );
        $each_string!(name, listen_ip, transport, devmem);
    };
}

fn refused<T>(text: String) -> Result<T> {
    Err(Error::new(Status::Config, text))
}

/// The defaults, changed by every field that lies whole within the caller's `size` bytes.
fn from_c(c: &kvr_config, size: usize) -> Result<Config> {
    let mut config = Config::default();
    macro_rules! has {
        ($field:ident) => {
            offset_of!(kvr_config, $field) + size_of_val(&c.$field) <= size
        };
    }
    macro_rules! numbers {
        ($($field:ident),+) => { $( if has!($field) { config.$field = c.$field; } )+ };
    }
    macro_rules! strings {
        ($($field:ident),+) => { $(
            if has!($field) { config.$field = text(&c.$field, stringify!($field))?; }
        )+ };
    }
    fields!(numbers, strings);
    if has!(nics) {
        config.nics = text(&c.nics, "nics")?;
    }
    if has!(nics_long) && c.nics_long[0] != 0 {
        config.nics = text(&c.nics_long, "nics_long")?;
    }
    if has!(flags) {
        let unknown = c.flags & !KVR_CFG_PROGRESS_THREAD;
        if unknown != 0 {
            return refused(format!(
                "flags has unknown bits {unknown:#x}; known: KVR_CFG_PROGRESS_THREAD \
                 ({KVR_CFG_PROGRESS_THREAD:#x})"
            ));
        }
        config.progress_thread = c.flags & KVR_CFG_PROGRESS_THREAD != 0;
    }
    Ok(config)
}

fn to_c(config: &Config) -> Result<kvr_config> {
    // SAFETY: F4: integers and arrays of them, for which zeros are a value.
    let mut c: kvr_config = unsafe { core::mem::zeroed() };
    macro_rules! numbers {
        ($($field:ident),+) => { $( c.$field = config.$field; )+ };
    }
    macro_rules! strings {
        ($($field:ident),+) => { $( c.$field = array(&config.$field, stringify!($field))?; )+ };
    }
    fields!(numbers, strings);
    if config.nics.len() < c.nics.len() {
        c.nics = array(&config.nics, "nics")?;
    } else {
        c.nics_long = array(&config.nics, "nics")?;
    }
    if config.progress_thread {
        c.flags = KVR_CFG_PROGRESS_THREAD;
    }
    Ok(c)
}

fn text(array: &[c_char], field: &str) -> Result<String> {
    let bytes: Vec<u8> =
        array.iter().take_while(|c| **c != 0).map(|c| c.to_ne_bytes()[0]).collect();
    if bytes.len() == array.len() {
        return refused(format!(
            "{field} has no NUL within its {} bytes; end it with one",
            array.len()
        ));
    }
    String::from_utf8(bytes).or_else(|e| {
        let seen = String::from_utf8_lossy(e.as_bytes()).into_owned();
        refused(format!("{field} is {seen:?}, which is not UTF-8; pass UTF-8"))
    })
}

fn array<const N: usize>(text: &str, field: &str) -> Result<[c_char; N]> {
    if text.len() >= N {
        return refused(format!(
            "{field} has {} bytes; at most {} fit, shorten it",
            text.len(),
            N - 1
        ));
    }
    if text.contains('\0') {
        return refused(format!("{field} is {text:?}; it must not hold a NUL"));
    }
    Ok(cut(text.as_bytes()))
}

/// `text` as a C array, cut so that a NUL always follows.
pub(crate) fn cut<const N: usize>(text: &[u8]) -> [c_char; N] {
    let mut out = [0; N];
    for (to, from) in out.iter_mut().zip(&text[..text.len().min(N - 1)]) {
        *to = c_char::from_ne_bytes([*from]);
    }
    out
}

/// What the caller's struct says; NULL means the defaults.
///
/// # Safety
/// F4: `cfg` is NULL or readable for its `struct_size` bytes.
pub(crate) unsafe fn read(cfg: *const kvr_config) -> Result<Config> {
    if cfg.is_null() {
        return Ok(Config::default());
    }
    // SAFETY: F4, the caller's promise handed on.
    let (c, size) = unsafe { read_versioned(cfg, "cfg")? };
    from_c(&c, size)
}

/// Changes the caller's struct by `change`, or leaves it alone.
///
/// # Safety
/// F4: `cfg` is readable and writable for its `struct_size` bytes, and nobody else touches it.
unsafe fn update(
    cfg: *mut kvr_config,
    change: impl FnOnce(&mut Config) -> Result<()>,
) -> Result<Status> {
    // SAFETY: F4, the caller's promise handed on.
    let (c, size) = unsafe { read_versioned(cfg.cast_const(), "cfg")? };
    let mut config = from_c(&c, size)?;
    change(&mut config)?;
    let c = to_c(&config)?;
    // An older caller's struct has no room for every field: a value that would be lost is refused.
    if to_c(&from_c(&c, size)?)? != c {
        return refused(format!(
            "the parameter does not fit into a kvr_config of {size} bytes; rebuild with the header \
             of version {}",
            env!("CARGO_PKG_VERSION")
        ));
    }
    // SAFETY: F4, the caller's promise handed on; `read_versioned` let the size pass.
    unsafe { write_versioned(&c, cfg, size, "cfg") }
}

/// Fills `cfg` with the defaults and sets its `struct_size`, which is sizeof(kvr_config) of the
/// caller.
///
/// Threads: `cfg` is the caller's; not two calls on one struct at a time.
/// Errors: KVR_ERR_INVALID for NULL or a struct_size below 4 or above 4096.
///
/// # Safety
/// `cfg` is writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn kvr_config_init(cfg: *mut kvr_config, struct_size: usize) -> kvr_status {
    guard("kvr_config_init", || {
        let size = self::struct_size::<kvr_config>(struct_size, "cfg")?;
        let c = to_c(&Config::default())?;
        // SAFETY: F4, this function's own promise.
        unsafe { write_versioned(&c, cfg, size, "cfg") }
    })
}

/// Applies every KVRAIL_<PARAMETER> of the environment to `cfg`; after an error `cfg` is as it was.
/// An empty value counts as not set. A KVRAIL_ variable that nobody knows is a warning in the log.
///
/// Threads: reads the environment, so no thread may call setenv() meanwhile.
/// Errors: KVR_ERR_CONFIG for a bad value; KVR_ERR_INVALID for a bad `cfg`.
///
/// # Safety
/// `cfg` was filled by kvr_config_init().
#[no_mangle]
pub unsafe extern "C" fn kvr_config_env(cfg: *mut kvr_config) -> kvr_status {
    guard("kvr_config_env", || {
        let apply = |config: &mut Config| {
            config.apply_env()?.iter().for_each(|warning| warn(warning));
            Ok(())
        };
        // SAFETY: F4, this function's own promise.
        unsafe { update(cfg, apply) }
    })
}

/// Sets one parameter from text, as kvr_config_keys() names it; after an error `cfg` is as it was.
///
/// Errors: KVR_ERR_CONFIG for an unknown parameter (the text lists the known ones) or a bad value
/// (the text has the value seen and the values allowed); KVR_ERR_INVALID for NULL or text that is
/// not UTF-8.
///
/// # Safety
/// `cfg` was filled by kvr_config_init(); `key` and `value` end in NUL.
#[no_mangle]
pub unsafe extern "C" fn kvr_config_set(
    cfg: *mut kvr_config,
    key: *const c_char,
    value: *const c_char,
) -> kvr_status {
    guard("kvr_config_set", || {
        // SAFETY: F4 and F5, this function's own promises.
        unsafe {
            let key = string(key, "key")?;
            let value = string(value, "value")?;
            update(cfg, |config| config.set(key, value))
        }
    })
}

/// Writes one "key=default\n" line a parameter into `buf`: at most `len` bytes, always with a NUL.
/// Returns the full length without the NUL, so that a first call with NULL and 0 says how much is
/// needed.
///
/// # Safety
/// `buf` is NULL or writable for `len` bytes.
#[no_mangle]
pub unsafe extern "C" fn kvr_config_keys(buf: *mut c_char, len: usize) -> usize {
    guard_len("kvr_config_keys", || {
        let lines: String =
            Config::keys().map(|(key, default, _)| format!("{key}={default}\n")).collect();
        // SAFETY: F3, this function's own promise.
        Ok(unsafe { fill_text(lines.as_bytes(), buf, len) })
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panicking")]
mod tests {
    use super::*;
    use core::mem::size_of;

    /// No field has its default or another field's value.
    fn distinct() -> Config {
        let mut config = Config { progress_thread: false, ..Config::default() };
        let mut n = 1000;
        macro_rules! numbers {
            ($($field:ident),+) => { $( n += 1; config.$field = n.try_into().unwrap(); )+ };
        }
        macro_rules! strings {
            ($($field:ident),+) => { $( config.$field = stringify!($field).to_owned(); )+ };
        }
        fields!(numbers, strings);
        config.nics = "nics".to_owned();
        config
    }

    #[test]
    fn many_nics_survive_both_ways_and_an_older_struct_refuses_them() {
        for bytes in [126, 127, 128, 129, 1024] {
            let nics = "n".repeat(bytes);
            let mut c = to_c(&Config::default()).unwrap();
            c.struct_size = size_of::<kvr_config>() as u32;
            let value = std::ffi::CString::new(nics.clone()).unwrap();
            // SAFETY: F4 and F5: a whole struct, text that ends in NUL.
            let set =
                |c: &mut kvr_config| unsafe { kvr_config_set(c, c"nics".as_ptr(), value.as_ptr()) };
            assert_eq!(set(&mut c), 0);
            assert_eq!((c.nics[0] != 0, c.nics_long[0] != 0), (bytes < 128, bytes >= 128));
            assert_eq!(from_c(&c, size_of::<kvr_config>()).unwrap().nics, nics);
            let older = offset_of!(kvr_config, nics_long);
            let mut c = to_c(&Config::default()).unwrap();
            c.struct_size = older as u32;
            let fits = if bytes < 128 { 0 } else { Status::Config.code() };
            assert_eq!(set(&mut c), fits);
            // A short list takes the place of a long one.
            c = to_c(&Config { nics, ..Config::default() }).unwrap();
            c.struct_size = size_of::<kvr_config>() as u32;
            // SAFETY: F4 and F5, as above.
            assert_eq!(unsafe { kvr_config_set(&mut c, c"nics".as_ptr(), c"a".as_ptr()) }, 0);
            assert_eq!(from_c(&c, size_of::<kvr_config>()).unwrap().nics, "a");
        }
    }

    #[test]
    fn every_field_survives_both_ways() {
        let config = distinct();
        let c = to_c(&config).unwrap();
        let back = from_c(&c, size_of::<kvr_config>()).unwrap();
        assert_eq!(format!("{config:?}"), format!("{back:?}"));
    }

    #[test]
    fn an_older_struct_keeps_its_fields_and_the_defaults_of_the_others() {
        let c = to_c(&distinct()).unwrap();
        let got = from_c(&c, offset_of!(kvr_config, rails)).unwrap();
        assert_eq!(got.max_transfers, distinct().max_transfers);
        assert_eq!((got.rails, got.name), (Config::default().rails, Config::default().name));
        // A field that is cut in the middle counts as absent.
        let got = from_c(&c, offset_of!(kvr_config, max_bytes) + 4).unwrap();
        assert_eq!(got.max_bytes, Config::default().max_bytes);
    }

    #[test]
    fn a_set_that_an_older_struct_cannot_hold_is_refused_and_changes_nothing() {
        let mut c = to_c(&Config::default()).unwrap();
        c.struct_size = offset_of!(kvr_config, nics) as u32;
        // SAFETY: F4: a whole struct, of which a part is in use.
        let (bad, same, good) = unsafe {
            let bad = kvr_config_set(&mut c, c"nics".as_ptr(), c"mlx5_0".as_ptr());
            let same = c.nics == [0; crate::types::KVR_NICS_LEN];
            (bad, same, kvr_config_set(&mut c, c"rails".as_ptr(), c"4".as_ptr()))
        };
        assert_eq!((bad, same, good, c.rails), (Status::Config.code(), true, 0, 4));
    }

    #[test]
    fn bad_strings_name_the_field_and_the_limit() {
        let mut c = to_c(&Config::default()).unwrap();
        c.transport = [1; 16];
        let e = from_c(&c, size_of::<kvr_config>()).unwrap_err();
        assert_eq!(e.message, "transport has no NUL within its 16 bytes; end it with one");
        c.transport = cut(b"\xff");
        let e = from_c(&c, size_of::<kvr_config>()).unwrap_err();
        assert!(e.message.contains("not UTF-8"), "{e}");
        let long = Config { name: "x".repeat(256), ..Config::default() };
        let e = to_c(&long).unwrap_err();
        assert_eq!(e.message, "name has 256 bytes; at most 255 fit, shorten it");
    }
}
