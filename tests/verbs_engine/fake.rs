//! The fake libibverbs: built, and loaded in a process for one test.

use core::ffi::{c_char, c_void, CStr};
use core::time::Duration;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Instant, SystemTime};

/// Only against hangs: of one wait.
pub(crate) const HANG: Duration = Duration::from_secs(60);
/// Only against hangs: of one test.
const TEST_HANG: u64 = 240;
/// Begins a line that says what a test measured.
pub(crate) const MEASURED: &str = "measured: ";
/// Names the test that this process is for.
const CASE: &str = "KVRAIL_TEST_CASE";

/// Kinds of objects that libibverbs has alive.
const KINDS: [&str; 7] = ["qp", "mr", "cq", "channel", "td", "pd", "ctx"];

/// The loaded fake.
#[derive(Clone, Copy)]
pub(crate) struct Fake {
    set: unsafe extern "C" fn(*const c_char) -> i32,
    get: unsafe extern "C" fn(*const c_char, *mut u64) -> i32,
}

impl Fake {
    /// The fake that this process's `KVRAIL_IBVERBS` names.
    pub(crate) fn loaded() -> Fake {
        let path = CString::new(std::env::var("KVRAIL_IBVERBS").unwrap()).unwrap();
        // SAFETY: a path that ends in NUL; the library stays loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "{path:?} cannot be loaded");
        let find = |name: &CStr| {
            // SAFETY: an open library, a name that ends in NUL.
            let at = unsafe { libc::dlsym(handle, name.as_ptr()) };
            assert!(!at.is_null(), "{name:?}");
            at
        };
        let (set, get) = (find(c"fakeverbs_set"), find(c"fakeverbs_get"));
        Fake {
            // SAFETY: `int fakeverbs_set(const char *)`.
            set: unsafe {
                core::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> i32>(set)
            },
            // SAFETY: `int fakeverbs_get(const char *, uint64_t *)`.
            get: unsafe {
                core::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*const c_char, *mut u64) -> i32,
                >(get)
            },
        }
    }

    pub(crate) fn set(self, knobs: &str) {
        let text = CString::new(knobs).unwrap();
        // SAFETY: the text ends in NUL.
        assert_eq!(unsafe { (self.set)(text.as_ptr()) }, 0, "{knobs}");
    }

    pub(crate) fn get(self, name: &str) -> u64 {
        let (text, mut value) = (CString::new(name).unwrap(), 0);
        // SAFETY: the text ends in NUL, the place is writable.
        assert_eq!(unsafe { (self.get)(text.as_ptr(), &raw mut value) }, 0, "{name}");
        value
    }

    /// What is alive now, by kind.
    pub(crate) fn live(self) -> Vec<(&'static str, u64)> {
        KINDS.iter().map(|k| (*k, self.get(&format!("live.{k}")))).collect()
    }

    /// Waits until what is alive is `want`: threads that bring rails up end a little later.
    pub(crate) fn settles(self, want: &[(&'static str, u64)], when: &str) {
        wait(|| self.live() == want, || format!("{when}: {:?}, not {want:?}", self.live()));
    }

    /// Nothing is left of any engine, and all was destroyed in order.
    pub(crate) fn is_empty(self) {
        let none: Vec<_> = KINDS.iter().map(|k| (*k, 0)).collect();
        self.settles(&none, "all engines are gone");
        let bad = [self.get("order_violations"), self.get("busy_events")];
        assert_eq!(bad, [0, 0], "order_violations, busy_events");
    }
}

/// Waits for something, not for ever.
pub(crate) fn wait(mut done: impl FnMut() -> bool, what: impl Fn() -> String) {
    let until = Instant::now() + HANG;
    while !done() {
        assert!(Instant::now() < until, "hang: {}", what());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn can_build() -> bool {
    let mut gcc = Command::new("gcc");
    gcc.args(["-fsyntax-only", "-include", "infiniband/verbs.h", "-x", "c", "/dev/null"]);
    gcc.stderr(Stdio::null()).status().is_ok_and(|s| s.success())
}

fn written(path: &Path) -> SystemTime {
    std::fs::metadata(path).and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}

fn newest(folder: &Path) -> SystemTime {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let times = entries.map(|p| if p.is_dir() { newest(&p) } else { written(&p) });
    times.max().unwrap_or(SystemTime::UNIX_EPOCH)
}

/// The folder of the built fake, made once a process.
fn built() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let path = BUILT.get_or_init(|| {
        if !can_build() {
            let text = "no gcc, or no infiniband/verbs.h (Debian: libibverbs-dev)";
            assert!(std::env::var("STRICT").as_deref() != Ok("1"), "STRICT=1 and {text}");
            eprintln!("SKIPPED: {text}");
            return None;
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fakeverbs");
        let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("verbs_engine-fake");
        if newest(&source) >= written(&out.join("bench")) {
            let status = Command::new("bash").arg(source.join("build.sh")).arg(&out).status();
            assert!(status.unwrap().success(), "tests/fakeverbs/build.sh failed");
        }
        Some(out)
    });
    path.as_deref()
}

/// A folder of one test, gone with this.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The environment of a process with `devices` fake ones, as host `host` on the bus in `folder`.
pub(crate) fn dress(command: &mut Command, folder: &Path, host: u8, devices: usize, knobs: &str) {
    let tree = folder.join(format!("tree{host}"));
    let vars = [
        ("FAKEVERBS_DEVICES", devices.to_string()),
        ("FAKEVERBS_HOST", host.to_string()),
        ("FAKEVERBS_BUS", folder.join("bus").display().to_string()),
        ("FAKEVERBS_SET", knobs.to_string()),
        ("KVRAIL_SYSROOT", tree.display().to_string()),
        ("KVRAIL_TEST_FOLDER", folder.display().to_string()),
        ("KVRAIL_LOG", "info".to_string()),
        ("RUST_BACKTRACE", "0".to_string()),
    ];
    let library = built().unwrap();
    let mut maker = Command::new(library.join("fakeverbs-tree"));
    let made = maker.arg(&tree).envs(vars.clone()).status().unwrap();
    assert!(made.success(), "fakeverbs-tree, {knobs}");
    command.envs(vars).env("KVRAIL_IBVERBS", library.join("libfakeverbs.so"));
}

/// This program, under another one if `KVRAIL_TEST_WRAP` names one with its options (valgrind).
fn wrapped() -> Command {
    let wrap = std::env::var("KVRAIL_TEST_WRAP").unwrap_or_default();
    let mut words = wrap.split_whitespace();
    let Some(first) = words.next() else { return Command::new("/proc/self/exe") };
    let mut command = Command::new(first);
    command.args(words).arg(std::env::current_exe().unwrap());
    command
}

/// In the process of test `name`: the fake. Elsewhere: starts that process and judges it.
pub(crate) fn alone(name: &str, devices: usize, knobs: &str) -> Option<Fake> {
    let name = name.strip_suffix("::here").unwrap();
    let (_, name) = name.split_once("::").unwrap();
    if std::env::var(CASE).as_deref() == Ok(name) {
        watch();
        return Some(Fake::loaded());
    }
    built()?;
    let short = name.replace("::", "-");
    let shm = Path::new("/dev/shm");
    let base = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
    // The fake's bus takes short paths only.
    let sum = name.bytes().fold(7u32, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
    let folder = Folder(base.join(format!("kve-{}-{sum:08x}", std::process::id())));
    std::fs::create_dir_all(folder.0.join("bus")).unwrap();
    let mut command = wrapped();
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(CASE, name);
    dress(&mut command, &folder.0, 1, devices, knobs);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let (text, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let ran = text.contains("1 passed");
    assert!(output.status.success() && ran, "{short}: {}\n{text}\n{err}", output.status);
    // What a test measured is told when it passed, too.
    err.lines().filter(|line| line.starts_with(MEASURED)).for_each(|line| eprintln!("{line}"));
    None
}

/// Ends this process when its test hangs.
pub(crate) fn watch() {
    // Who asks for many cycles gives them time.
    let cycles = std::env::var("KVRAIL_TEST_CYCLES").ok().and_then(|n| n.parse::<u64>().ok());
    let limit = TEST_HANG + 2 * cycles.unwrap_or(0);
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(limit));
        eprintln!("the test hangs: ended after {limit} s");
        std::process::abort();
    });
}
