//! Two engines with memory, and what moves between them.

use std::sync::Mutex;
use std::time::Instant;

use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::host::error::Result;
use kvrail::host::log;
use kvrail::status::Status;
use kvrail::table::{Desc, Direction};

use crate::fake::{wait, HANG};

pub(crate) const MIB: usize = 1 << 20;
pub(crate) const BOTH: [Direction; 2] = [Direction::Read, Direction::Write];

/// A small generator, so that a failure can be repeated.
pub(crate) struct Rng(u64);

impl Rng {
    /// Says its seed: `KVRAIL_TEST_SEED`, else the clock's.
    pub(crate) fn new() -> Rng {
        let given = std::env::var("KVRAIL_TEST_SEED").ok().and_then(|s| s.parse().ok());
        let clock = || std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
        let seed = given.unwrap_or_else(clock) | 1;
        eprintln!("KVRAIL_TEST_SEED={seed}");
        Rng(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n.max(1)
    }

    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in (1..list.len()).rev() {
            list.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// Memory that peers write to behind Rust's back, so it is reached by pointer only.
pub(crate) struct Memory {
    at: *mut u8,
    pub(crate) len: usize,
}

impl Memory {
    pub(crate) fn new(len: usize) -> Memory {
        let (rw, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping.
        let at = unsafe { libc::mmap(core::ptr::null_mut(), len, rw, kind, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Memory { at: at.cast(), len }
    }

    pub(crate) fn base(&self) -> u64 {
        self.at as u64
    }

    pub(crate) fn put(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len);
        // SAFETY: inside the mapping; no work is in flight when a test writes.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at, bytes.len()) };
    }

    pub(crate) fn copy(&self) -> Vec<u8> {
        let mut out = vec![0u8; self.len];
        // SAFETY: inside the mapping; all transfers that a test looks at have ended.
        unsafe { core::ptr::copy_nonoverlapping(self.at, out.as_mut_ptr(), self.len) };
        out
    }

    /// Every byte anew. What it is now.
    pub(crate) fn fill(&self, seed: u64) -> Vec<u8> {
        let bytes = pattern(seed, self.len);
        self.put(&bytes);
        bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// One descriptor pair: offsets in both memories, and bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) here: usize,
    pub(crate) there: usize,
    pub(crate) len: usize,
}

/// `n` pieces scattered over `here` and `there` bytes, which do not overlap on either side.
pub(crate) fn scatter(rng: &mut Rng, n: usize, here: usize, there: usize) -> Vec<Piece> {
    let cell = here.min(there) / n;
    assert!(cell > 0, "{n} pieces in {} bytes", here.min(there));
    let mut places: [Vec<usize>; 2] = [(0..n).collect(), (0..n).collect()];
    // Often in order on the remote side, so that work requests gather and scatter.
    if rng.below(2) == 0 {
        rng.shuffle(&mut places[1]);
    }
    rng.shuffle(&mut places[0]);
    let [here, there] = places;
    let mut out = Vec::new();
    for (here, there) in here.into_iter().zip(there) {
        let full = rng.below(3) > 0;
        let len = if full { cell } else { 1 + rng.below(cell as u64) as usize };
        let slack = |rng: &mut Rng| rng.below((cell - len) as u64 + 1) as usize;
        out.push(Piece { here: here * cell + slack(rng), there: there * cell + slack(rng), len });
    }
    out
}

/// An engine's parameters for the tests: small, on this host, over the given NICs.
pub(crate) fn config(name: &str, nics: &str) -> Config {
    Config {
        name: name.into(),
        nics: nics.into(),
        transport: "verbs".into(),
        listen_ip: "127.0.0.1".into(),
        max_peers: 8,
        max_transfers: 256,
        max_regions: 64,
        connect_timeout_ms: 20_000,
        ..Config::default()
    }
}

/// `fakeN` for each number.
pub(crate) fn nics(numbers: impl IntoIterator<Item = usize>) -> String {
    let names: Vec<_> = numbers.into_iter().map(|n| format!("fake{n}")).collect();
    names.join(",")
}

/// Knobs by which `fake(n+i)` is in the subnet of `fake(i)`, as another host: two engines in one
/// process.
pub(crate) fn twins(n: usize) -> String {
    let knobs: Vec<_> = (0..n).map(|i| format!("fake{}.port1.ip=10.1.{i}.2", n + i)).collect();
    knobs.join(";")
}

/// An engine with one region.
pub(crate) struct Side {
    pub(crate) e: Engine,
    pub(crate) mem: Memory,
    pub(crate) region: u64,
}

impl Side {
    pub(crate) fn new(config: Config, bytes: usize) -> Side {
        let e = Engine::new(config).unwrap_or_else(|e| panic!("{e}"));
        let mem = Memory::new(bytes);
        let region = e.register(mem.base(), bytes as u64, 0).unwrap_or_else(|e| panic!("{e}"));
        Side { e, mem, region: region.raw() }
    }

    pub(crate) fn blob(&self) -> Vec<u8> {
        self.e.region_metadata(self.region).unwrap()
    }

    /// Makes `other` known, waits for it, imports its region: peer and region.
    pub(crate) fn meet(&self, other: &Side) -> (u64, u64) {
        let peer = self.e.peer_add(other.e.metadata(), None).unwrap().raw();
        self.e.peer_connect(peer, HANG).unwrap_or_else(|e| panic!("{e}"));
        (peer, self.e.region_import(peer, &other.blob()).unwrap().raw())
    }
}

/// Two engines, of which `a` dialled `b`.
pub(crate) struct Pair {
    pub(crate) a: Side,
    pub(crate) b: Side,
    /// `b` and its region, as `a` knows them.
    pub(crate) peer: u64,
    pub(crate) far: u64,
    pub(crate) rng: Rng,
}

impl Pair {
    pub(crate) fn new(a: Config, b: Config, bytes: usize) -> Pair {
        let (a, b) = (Side::new(a, bytes), Side::new(b, bytes));
        let (peer, far) = a.meet(&b);
        Pair { a, b, peer, far, rng: Rng::new() }
    }

    /// Over `n` NICs each, `twins` of each other.
    pub(crate) fn twins(n: usize, bytes: usize, tune: impl Fn(&mut Config)) -> Pair {
        let (mut a, mut b) = (config("a", &nics(0..n)), config("b", &nics(n..2 * n)));
        tune(&mut a);
        tune(&mut b);
        Pair::new(a, b, bytes)
    }

    pub(crate) fn prepare(&self, direction: Direction, pieces: &[Piece]) -> Result<u64> {
        self.prepare_at(direction, (self.a.region, self.a.mem.base()), pieces)
    }

    /// With a region of `a` that was registered at `base`.
    pub(crate) fn prepare_at(
        &self,
        direction: Direction,
        (region, base): (u64, u64),
        pieces: &[Piece],
    ) -> Result<u64> {
        let near =
            |p: &Piece| Desc { addr: base + p.here as u64, len: p.len as u64, dev: 0, region };
        let far = |p: &Piece| Desc {
            addr: self.b.mem.base() + p.there as u64,
            len: p.len as u64,
            dev: 0,
            region: self.far,
        };
        let local: Vec<_> = pieces.iter().map(near).collect();
        let remote: Vec<_> = pieces.iter().map(far).collect();
        Ok(self.a.e.prepare_descs(direction, self.peer, &local, &remote)?.raw())
    }

    /// Carries pieces and says how that ended; the transfer is gone.
    pub(crate) fn carry(&self, direction: Direction, pieces: &[Piece]) -> Result<Status> {
        let t = self.prepare(direction, pieces)?;
        let end = self.a.e.post(t, None).and_then(|_| finish(&self.a.e, t));
        self.a.e.release(t).unwrap();
        end
    }

    /// Carries pieces between memories that are new, and compares every byte of both.
    pub(crate) fn moves(&mut self, direction: Direction, pieces: &[Piece]) {
        let seeds = (self.rng.next(), self.rng.next());
        let (mut here, mut there) = (self.a.mem.fill(seeds.0), self.b.mem.fill(seeds.1));
        apply(direction, pieces, &mut here, &mut there);
        let end = self.carry(direction, pieces);
        assert_eq!(end, Ok(Status::Ok), "{direction:?} of {} pieces", pieces.len());
        same(&self.b.mem.copy(), &there, direction, "there");
        same(&self.a.mem.copy(), &here, direction, "here");
    }

    /// Some scattered pieces in both directions.
    pub(crate) fn moves_some(&mut self, n: usize) {
        for direction in BOTH {
            let pieces = scatter(&mut self.rng, n, self.a.mem.len, self.b.mem.len);
            self.moves(direction, &pieces);
        }
    }

    /// Some scattered pieces, by READ: they may go to another rail.
    pub(crate) fn moves_some_reads(&mut self, n: usize) {
        let pieces = scatter(&mut self.rng, n, self.a.mem.len, self.b.mem.len);
        self.moves(Direction::Read, &pieces);
    }

    /// Waits until the peer can be used again, as an application does: it may still count as
    /// connected for a moment after a transfer ended for want of a rail.
    pub(crate) fn back(&self) {
        let one = [Piece { here: 0, there: 0, len: 1 }];
        let works = || {
            let up = self.a.e.peer_connect(self.peer, HANG);
            up.is_ok() && self.carry(Direction::Read, &one) == Ok(Status::Ok)
        };
        wait(works, || format!("the peer never came back: {:?}", self.a.e.peer_state(self.peer)));
    }

    /// `a` dials `b` again, whom it forgot. Both sides know it.
    pub(crate) fn meet_again(&mut self) {
        wait(|| self.b.e.info().peers == 0, || "b still knows a".into());
        (self.peer, self.far) = self.a.meet(&self.b);
    }

    /// Bytes that went over each rail of `a`, its own lane left out.
    pub(crate) fn spread(&self) -> Vec<u64> {
        let n = self.a.e.info().rails;
        let bytes = |i| self.a.e.rail_info(i).unwrap();
        (0..n).map(bytes).map(|r| r.bytes_read + r.bytes_written).collect()
    }
}

/// What both memories must be afterwards.
pub(crate) fn apply(d: Direction, pieces: &[Piece], here: &mut [u8], there: &mut [u8]) {
    for p in pieces {
        let (h, t) = (p.here..p.here + p.len, p.there..p.there + p.len);
        match d {
            Direction::Read => here[h].copy_from_slice(&there[t]),
            Direction::Write => there[t].copy_from_slice(&here[h]),
        }
    }
}

pub(crate) fn same(seen: &[u8], want: &[u8], direction: Direction, side: &str) {
    if let Some(at) = seen.iter().zip(want).position(|(s, w)| s != w) {
        let bad = seen.iter().zip(want).filter(|(s, w)| s != w).count();
        panic!("{direction:?}: {bad} bytes {side} are wrong, the first at {at}");
    }
    assert_eq!(seen.len(), want.len());
}

/// Polls a transfer to its end.
pub(crate) fn finish(e: &Engine, t: u64) -> Result<Status> {
    let until = Instant::now() + HANG;
    loop {
        match e.check(t)? {
            Status::InProgress => {
                assert!(Instant::now() < until, "hang: {:?}", e.transfer_info(t));
                std::thread::yield_now();
            }
            s => return Ok(s),
        }
    }
}

/// Notifications, until there are `n`.
pub(crate) fn notifs(e: &Engine, n: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut got = Vec::new();
    wait(
        || {
            e.notifs(&mut |name, text| got.push((name.to_vec(), text.to_vec()))).unwrap();
            got.len() >= n
        },
        || format!("{n} notifications are awaited"),
    );
    got
}

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps what engines log, from here on.
pub(crate) fn listen() {
    log::set_callback(Some(Box::new(|level, text| {
        eprintln!("{level:?}: {text}");
        LINES.lock().unwrap().push(format!("{level:?}: {text}"));
    })));
}

/// Whether a line was logged that has all of `parts`.
pub(crate) fn said(parts: &[&str]) -> bool {
    let has = |line: &String| parts.iter().all(|p| line.contains(p));
    LINES.lock().unwrap().iter().any(has)
}

/// The `stat` line of each of this process's threads (proc_pid_stat(5)); one that ends meanwhile
/// has an empty one.
pub(crate) fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .map(|t| std::fs::read_to_string(t.unwrap().path().join("stat")).unwrap_or_default())
        .collect()
}
