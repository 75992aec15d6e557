//! What the programs of this folder share: two engines of one process over the null NIC, and memory
//! that is never touched.

use core::time::Duration;

use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::table::Desc;

/// Only against hangs.
pub(crate) const HANG: Duration = Duration::from_secs(300);

/// Command line arguments `KEY=VALUE`, each asked for once by its name.
pub(crate) struct Args(Vec<(String, String)>);

impl Args {
    pub(crate) fn new() -> Args {
        let split = |a: String| {
            let (key, value) =
                a.split_once('=').unwrap_or_else(|| panic!("`{a}` is not KEY=VALUE"));
            (key.to_owned(), value.to_owned())
        };
        Args(std::env::args().skip(1).map(split).collect())
    }

    pub(crate) fn text(&mut self, key: &str, default: &str) -> String {
        let at = self.0.iter().position(|(k, _)| k == key);
        at.map_or_else(|| default.to_owned(), |i| self.0.swap_remove(i).1)
    }

    pub(crate) fn number(&mut self, key: &str, default: u64) -> u64 {
        let text = self.text(key, &default.to_string());
        text.parse().unwrap_or_else(|_| panic!("{key}={text}: not a number"))
    }

    /// One of several words.
    pub(crate) fn word(&mut self, key: &str, words: &[&str]) -> String {
        let text = self.text(key, words[0]);
        assert!(words.contains(&text.as_str()), "{key}={text}: none of {words:?}");
        text
    }

    /// All were asked for.
    pub(crate) fn end(&self) {
        assert!(self.0.is_empty(), "unknown: {:?}", self.0);
    }
}

/// An engine over the devices `fakeFROM` to `fake(FROM + rails - 1)`. `KVRAIL_...` variables
/// change it.
pub(crate) fn engine(name: &str, from: usize, rails: usize, tune: impl Fn(&mut Config)) -> Engine {
    let nics: Vec<_> = (from..from + rails).map(|i| format!("fake{i}")).collect();
    let mut config = Config {
        name: name.into(),
        nics: nics.join(","),
        transport: "verbs".into(),
        listen_ip: "127.0.0.1".into(),
        stripe_width: 0,
        max_peers: 8,
        connect_timeout_ms: 60_000,
        // Under valgrind time runs for the clock and not for us.
        rail_timeout_ms: 20_000,
        peer_timeout_ms: 120_000,
        keepalive_ms: 0,
        ..Config::default()
    };
    tune(&mut config);
    config.apply_env().unwrap();
    Engine::new(config).unwrap()
}

/// A counter of the fake libibverbs; 0 over another one, such as that of `benches/peers`, which
/// counts by itself.
pub(crate) fn counter(name: &str) -> u64 {
    type Get = extern "C" fn(*const libc::c_char, *mut u64) -> i32;
    let c_string = |s: &str| std::ffi::CString::new(s).unwrap();
    let path = c_string(&std::env::var("KVRAIL_IBVERBS").unwrap());
    // SAFETY: a path that ends in NUL; the engines have loaded the library already.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!library.is_null(), "{path:?} cannot be loaded");
    // SAFETY: an open library, a name that ends in NUL.
    let at = unsafe { libc::dlsym(library, c"fakeverbs_get".as_ptr()) };
    if at.is_null() {
        return 0;
    }
    // SAFETY: `int fakeverbs_get(const char *, uint64_t *)`.
    let get = unsafe { core::mem::transmute::<*mut libc::c_void, Get>(at) };
    let (name, mut value) = (c_string(name), 0);
    assert_eq!(get(name.as_ptr(), &raw mut value), 0, "{name:?}");
    value
}

/// Mapped memory whose pages are never made: the null NIC reads and writes none of it.
pub(crate) struct Memory {
    at: usize,
    len: usize,
}

impl Memory {
    pub(crate) fn new(len: u64) -> Memory {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let (rw, len) = (libc::PROT_READ | libc::PROT_WRITE, len as usize);
        // SAFETY: a new mapping.
        let at = unsafe { libc::mmap(core::ptr::null_mut(), len, rw, kind, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED, "{len} bytes cannot be mapped");
        Memory { at: at as usize, len }
    }

    pub(crate) fn base(&self) -> u64 {
        self.at as u64
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; the engines that had it registered are gone or have let it go.
        unsafe { libc::munmap(self.at as *mut libc::c_void, self.len) };
    }
}

/// Regions of equal blocks: as the layers of a KV cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) regions: usize,
    /// Bytes of a block.
    pub(crate) len: u64,
    /// Blocks of each region that one transfer takes.
    pub(crate) blocks: usize,
}

/// `REGIONS:BYTES:BLOCKS[,...]`.
pub(crate) fn groups(text: &str) -> Vec<Group> {
    let one = |part: &str| {
        let n: Vec<u64> = part.split(':').map(|x| x.parse().expect("a number")).collect();
        assert_eq!(n.len(), 3, "`{part}` is not REGIONS:BYTES:BLOCKS");
        Group { regions: n[0] as usize, len: n[1], blocks: n[2] as usize }
    };
    text.split(',').map(one).collect()
}

/// One side: registered regions, and each block of each region as a descriptor, region by region.
pub(crate) struct Side {
    pub(crate) memory: Memory,
    pub(crate) regions: Vec<u64>,
    pub(crate) descs: Vec<Desc>,
}

/// Memory for `requests` transfers. With `gap` a block never touches the next one.
pub(crate) fn side(e: &Engine, groups: &[Group], requests: usize, gap: bool) -> Side {
    let stride = |g: &Group| if gap { 2 * g.len } else { g.len };
    let part = |g: &Group| (g.blocks * requests) as u64 * stride(g);
    let all = groups.iter().map(|g| g.regions as u64 * part(g)).sum();
    let memory = Memory::new(all);
    let (mut at, mut regions, mut descs) = (memory.base(), Vec::new(), Vec::new());
    for g in groups {
        for _ in 0..g.regions {
            let region = e.register(at, part(g), 0).unwrap().raw();
            let cell =
                |i: usize| Desc { addr: at + i as u64 * stride(g), len: g.len, dev: 0, region };
            descs.extend((0..g.blocks * requests).map(cell));
            regions.push(region);
            at += part(g);
        }
    }
    Side { memory, regions, descs }
}

/// A small generator.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn shuffle(&mut self, list: &mut [u32]) {
        for i in (1..list.len()).rev() {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            list.swap(i, (self.0 % (i as u64 + 1)) as usize);
        }
    }
}

/// Makes `b` known to `a`, connects, and imports its regions: the peer and their handles.
pub(crate) fn meet(a: &Engine, b: &Engine, theirs: &[u64]) -> (u64, Vec<u64>) {
    let peer = a.peer_add(b.metadata(), None).unwrap().raw();
    a.peer_connect(peer, HANG).unwrap();
    let import = |r: &u64| a.region_import(peer, &b.region_metadata(*r).unwrap()).unwrap().raw();
    (peer, theirs.iter().map(import).collect())
}

/// The blocks of `b`'s side as descriptors of `a`.
pub(crate) fn imported(side: &Side, handles: &[u64]) -> Vec<Desc> {
    let known: std::collections::HashMap<u64, u64> =
        side.regions.iter().copied().zip(handles.iter().copied()).collect();
    side.descs.iter().map(|d| Desc { region: known[&d.region], ..*d }).collect()
}
