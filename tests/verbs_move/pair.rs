//! Two connected lanes with memory of their own.

use core::ffi::c_char;
use core::ptr::NonNull;
use core::time::Duration;
use std::ffi::CString;
use std::path::{Path as FilePath, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Instant, SystemTime};

use kvrail::engine::arena::{Arena, BLOCK_ALIGN};
use kvrail::nic::verbs::{Device, Mr, Open, Path, Qp, QpKind, Shape, VerbsPort};
use kvrail::nic::{Batch, Completion, Keys, Port, PostError, RemoteKey, WrStatus};
use kvrail::table::{Direction, Op};
use rdma_core_sys::Verbs;

/// Bytes of each end's memory.
pub(crate) const BYTES: usize = 1 << 20;
/// Nothing here takes so long.
const HANG: Duration = Duration::from_secs(30);

/// One end: device, netdev (if it is known), address.
struct EndName {
    device: String,
    netdev: Option<String>,
    ipv4: [u8; 4],
}

/// The library and both ends. One test at a time: the fake's knobs are the process's.
pub(crate) struct Rail {
    verbs: &'static Verbs,
    library: Option<CString>,
    ends: [EndName; 2],
    _turn: MutexGuard<'static, ()>,
}

static TURN: Mutex<()> = Mutex::new(());
static LOADED: OnceLock<&'static Verbs> = OnceLock::new();

/// The rail to test over. `None`, and why, where there is none.
pub(crate) fn rail() -> Option<Rail> {
    let turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let named = std::env::var("KVRAIL_TEST_RAIL").ok();
    let library = match (std::env::var("KVRAIL_IBVERBS"), &named) {
        (Ok(path), _) => Some(path),
        (Err(_), Some(_)) => None,
        (Err(_), None) => Some(fake()?.to_str().unwrap().to_string()),
    };
    let library = library.map(|l| CString::new(l).unwrap());
    let verbs = *LOADED.get_or_init(|| {
        let verbs = Verbs::load(library.as_deref()).unwrap();
        Box::leak(Box::new(verbs))
    });
    let names = named.unwrap_or_else(|| "fake0=10.1.0.1,fake1=10.1.0.2".to_string());
    let ends: Vec<EndName> = names.split(',').map(end_name).collect();
    let ends = ends.try_into().unwrap_or_else(|_| panic!("KVRAIL_TEST_RAIL={names}: two ends"));
    let rail = Rail { verbs, library, ends, _turn: turn };
    rail.set("*.late_writes=0");
    Some(rail)
}

fn end_name(text: &str) -> EndName {
    let (device, ip) = text.split_once('=').expect("DEVICE[@NETDEV]=ADDRESS");
    let (device, netdev) = match device.split_once('@') {
        Some((device, netdev)) => (device, Some(netdev.to_string())),
        None => (device, None),
    };
    let ipv4 = ip.parse::<core::net::Ipv4Addr>().unwrap().octets();
    EndName { device: device.to_string(), netdev, ipv4 }
}

/// Builds the fake libibverbs, once for a process.
fn fake() -> Option<PathBuf> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT
        .get_or_init(|| {
            let root = FilePath::new(env!("CARGO_MANIFEST_DIR"));
            let headers = Command::new("gcc")
                .args(["-E", "-include", "infiniband/verbs.h", "-x", "c", "/dev/null"])
                .output();
            if !headers.is_ok_and(|o| o.status.success()) {
                eprintln!("SKIPPED: gcc or infiniband/verbs.h is missing (Debian: libibverbs-dev)");
                return None;
            }
            let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("verbs_move-fake");
            let source = root.join("tests/fakeverbs");
            if newest(&source) >= written(&out.join("check")) {
                let built = Command::new(source.join("build.sh")).arg(&out).status();
                assert!(built.unwrap().success(), "tests/fakeverbs/build.sh failed");
            }
            std::env::set_var("FAKEVERBS_SET", "fake0.port1.ip=10.1.0.1;fake1.port1.ip=10.1.0.2");
            Some(out.join("libfakeverbs.so"))
        })
        .clone()
}

/// When a file was written; long ago if it is not there.
fn written(path: &FilePath) -> SystemTime {
    std::fs::metadata(path).and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// When anything in a folder was written last.
fn newest(folder: &FilePath) -> SystemTime {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let times = entries.map(|p| if p.is_dir() { newest(&p) } else { written(&p) });
    times.max().unwrap_or(SystemTime::UNIX_EPOCH)
}

impl Rail {
    pub(crate) fn is_fake(&self) -> bool {
        self.set("")
    }

    /// Turns knobs of the fake. False: this library is not the fake.
    pub(crate) fn set(&self, knobs: &str) -> bool {
        let Some(library) = &self.library else { return false };
        // SAFETY: the library is loaded and stays so.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        // SAFETY: an open library, and a name that ends in NUL.
        let symbol = unsafe { libc::dlsym(handle, c"fakeverbs_set".as_ptr()) };
        if symbol.is_null() {
            return false;
        }
        // SAFETY: `int fakeverbs_set(const char *)`.
        let set: unsafe extern "C" fn(*const c_char) -> i32 =
            unsafe { core::mem::transmute(symbol) };
        let knobs = CString::new(knobs).unwrap();
        // SAFETY: the text ends in NUL.
        assert_eq!(unsafe { set(knobs.as_ptr()) }, 0);
        true
    }
}

/// How a pair is made.
#[derive(Clone, Copy)]
pub(crate) struct Want {
    pub(crate) depth: u32,
    pub(crate) cq: u32,
    pub(crate) sges: u32,
    pub(crate) timeout: u8,
    pub(crate) retry: u8,
}

impl Default for Want {
    fn default() -> Want {
        Want { depth: 128, cq: 1024, sges: 16, timeout: 14, retry: 6 }
    }
}

/// One lane, its device and memory.
pub(crate) struct End {
    pub(crate) port: VerbsPort<'static>,
    pub(crate) device: Device,
    memory: &'static mut [u8],
    base: u64,
    mr: Option<Mr>,
}

/// The memory of an end: its bytes as this process sees them, the address that ops give the first
/// of them, and the registration.
pub(crate) type Memory = (&'static mut [u8], u64, Mr);

/// Memory of the host.
fn host(device: &Device) -> Memory {
    // The NIC writes to it: a whole number of pages, and of this test alone.
    // SAFETY: leaked, and as long as was asked for.
    let bytes = unsafe { core::slice::from_raw_parts_mut(block(BYTES).as_ptr(), BYTES) };
    let base = bytes.as_ptr() as u64;
    let mr = device.register(base, BYTES as u64, base, false);
    (bytes, base, mr.unwrap_or_else(|e| panic!("{e}")))
}

impl End {
    fn open(rail: &Rail, which: usize, want: Want, lend: impl FnOnce(&Device) -> Memory) -> End {
        let name = &rail.ends[which];
        let ifindex = name.netdev.as_ref().map_or(0, |n| {
            let n = CString::new(n.as_str()).unwrap();
            // SAFETY: the name ends in NUL.
            unsafe { libc::if_nametoindex(n.as_ptr()) }
        });
        let open = Open {
            name: &name.device,
            port: 1,
            ipv4: name.ipv4,
            ifindex,
            cq_entries: want.cq,
            mail_entries: 16,
        };
        let device = Device::open(rail.verbs, &open).unwrap_or_else(|e| panic!("{e}"));
        assert!(device.is_active().unwrap());
        let shape = Shape {
            depth: want.depth,
            sges: want.sges,
            signal_every: 8,
            batch_bytes: 256 << 10,
            batch_ops: 64,
        };
        let shape = shape.fit(device.facts());
        let mut measure = Arena::measure();
        VerbsPort::new(&mut measure, which as u32, 1, shape, None).unwrap();
        // SAFETY: the block is leaked, and as long as was measured.
        let mut arena = unsafe { Arena::over(block(measure.used()), measure.used()) };
        let handle = Some(device.handle());
        let port = VerbsPort::new(&mut arena, which as u32, 1, shape, handle).unwrap();
        let (memory, base, mr) = lend(&device);
        assert_eq!(memory.len(), BYTES);
        End { port, device, memory, base, mr: Some(mr) }
    }

    /// Closes the rail, and destroys its queue pair.
    fn close(&mut self) {
        assert!(self.port.close(0), "the device kept a queue pair");
        while let Some(qp) = self.port.take_grave() {
            // SAFETY: V22: the port gave it up.
            unsafe { qp.destroy() }.unwrap();
        }
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    pub(crate) fn fill(&mut self, seed: u64) {
        let mut x = seed;
        for byte in self.memory.iter_mut() {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (x >> 56) as u8;
        }
    }

    pub(crate) fn copy(&self) -> Vec<u8> {
        // SAFETY: in bounds; volatile, since a device may write there.
        (0..BYTES).map(|i| unsafe { self.memory.as_ptr().add(i).read_volatile() }).collect()
    }

    fn keys(&self) -> (u32, u32) {
        let mr = self.mr.as_ref().unwrap();
        (mr.lkey, mr.rkey)
    }
}

fn block(bytes: usize) -> NonNull<u8> {
    let words = vec![0u128; bytes / 16 + BLOCK_ALIGN / 16 + 1].leak();
    let at = words.as_mut_ptr().cast::<u8>();
    NonNull::new(at.wrapping_add(at.align_offset(BLOCK_ALIGN))).unwrap()
}

/// The keys of region 0 of both; of any other a wrong one.
#[derive(Clone, Copy)]
struct TwoKeys {
    lkey: u32,
    rkey: u32,
}

impl Keys for TwoKeys {
    fn remote(&self, _: u32) -> RemoteKey {
        RemoteKey::default()
    }

    fn on_host(&self, _: u32) -> bool {
        true
    }

    fn whole_lkey(&self, index: u32, lane: u32) -> Option<u32> {
        self.lkey(index, lane, 0)
    }

    fn whole_rkey(&self, index: u32, rail: u32) -> Option<u32> {
        self.rkey(index, rail, 0)
    }

    fn lkey(&self, index: u32, _: u32, _: u64) -> Option<u32> {
        Some(if index == 0 { self.lkey } else { self.lkey ^ 0x5555 })
    }

    fn rkey(&self, index: u32, _: u32, _: u64) -> Option<u32> {
        Some(if index == 0 { self.rkey } else { self.rkey ^ 0x5555 })
    }
}

/// Both ends, connected.
pub(crate) struct Pair {
    pub(crate) a: End,
    pub(crate) b: End,
    want: Want,
    /// Number of the first op of the list that end a carried last, and the next.
    first: u32,
    next: u32,
    next_b: u32,
}

impl Pair {
    pub(crate) fn connect(rail: &Rail, want: Want) -> Pair {
        Pair::over(rail, want, host, host)
    }

    /// Over memory that the caller lends, of both ends.
    pub(crate) fn over(
        rail: &Rail,
        want: Want,
        a: impl FnOnce(&Device) -> Memory,
        b: impl FnOnce(&Device) -> Memory,
    ) -> Pair {
        let (a, b) = (End::open(rail, 0, want, a), End::open(rail, 1, want, b));
        let mut pair = Pair { a, b, want, first: 0, next: 0, next_b: 0 };
        pair.reconnect();
        pair
    }

    /// Closes the rail on both ends and connects it anew.
    pub(crate) fn reconnect(&mut self) {
        self.a.close();
        self.b.close();
        let kind = QpKind::Data { depth: self.want.depth, sges: self.want.sges, inline: 0 };
        let make = |end: &End| end.device.create_qp(kind).unwrap_or_else(|e| panic!("{e}"));
        let (qa, qb) = (make(&self.a), make(&self.b));
        raise(&self.a, &self.b, &qa, &qb, self.want);
        raise(&self.b, &self.a, &qb, &qa, self.want);
        let most = self.a.device.facts().max_msg_bytes.min(self.b.device.facts().max_msg_bytes);
        self.a.port.connect(0, qa, 0, most);
        self.b.port.connect(0, qb, 0, most);
        assert!(self.a.port.prove(0) && self.b.port.prove(0));
        let end = Instant::now() + HANG;
        while self.a.port.proof(0).is_none() || self.b.port.proof(0).is_none() {
            assert_eq!((self.a.port.poll(), self.b.port.poll()), (None, None));
            assert!(Instant::now() < end, "the rail never proved itself");
            std::thread::yield_now();
        }
        assert_eq!((self.a.port.proof(0), self.b.port.proof(0)), (Some(true), Some(true)));
    }

    /// Carries ops of end a to their end. The first that failed, if one did.
    pub(crate) fn carry(&mut self, direction: Direction, ops: &[Op]) -> Option<Completion> {
        self.both(direction, ops, direction, &[]).0
    }

    /// Carries ops of both ends at once.
    pub(crate) fn both(
        &mut self,
        from_a: Direction,
        a: &[Op],
        from_b: Direction,
        b: &[Op],
    ) -> (Option<Completion>, Option<Completion>) {
        let ((la, ra), (lb, rb)) = (self.a.keys(), self.b.keys());
        let keys = [TwoKeys { lkey: la, rkey: rb }, TwoKeys { lkey: lb, rkey: ra }];
        (self.first, self.next) = (self.next, self.next.wrapping_add(a.len() as u32));
        let first_b = self.next_b;
        self.next_b = self.next_b.wrapping_add(b.len() as u32);
        let mut work = [
            Work { ops: a, direction: from_a, first: self.first, posted: 0, told: 0, failed: None },
            Work { ops: b, direction: from_b, first: first_b, posted: 0, told: 0, failed: None },
        ];
        let end = Instant::now() + HANG;
        loop {
            let mut moved = work[0].step(&mut self.a.port, &keys[0]);
            moved |= work[1].step(&mut self.b.port, &keys[1]);
            if work.iter().all(|w| w.failed.is_some() || w.told == w.ops.len()) {
                return (work[0].failed, work[1].failed);
            }
            assert!(Instant::now() < end, "hangs: {:?} {:?}", self.a.port, work[0].told);
            if !moved {
                std::thread::yield_now();
            }
        }
    }

    /// Index of an op of the last list by its number.
    pub(crate) fn pair_of(&self, wr: u32) -> u32 {
        wr.wrapping_sub(self.first)
    }

    /// Posts up to `most` ops of end a and does not wait for them.
    pub(crate) fn post_some(&mut self, direction: Direction, ops: &[Op], most: usize) {
        let keys = TwoKeys { lkey: self.a.keys().0, rkey: self.b.keys().1 };
        let batch = Batch {
            peer: 0,
            direction,
            ops: &ops[..most.min(64)],
            first_wr: self.next,
            keys: &keys,
        };
        self.a.port.post(&batch).unwrap();
        self.next = self.next.wrapping_add(most as u32);
    }

    /// Closes all, and sees that the device takes everything back.
    pub(crate) fn end(mut self) {
        for end in [&mut self.a, &mut self.b] {
            end.close();
            // SAFETY: of this device; its queue pairs are gone.
            unsafe { end.device.deregister(end.mr.take().unwrap()) }.unwrap();
        }
    }
}

/// One list under way.
struct Work<'a> {
    ops: &'a [Op],
    direction: Direction,
    first: u32,
    posted: usize,
    told: usize,
    failed: Option<Completion>,
}

impl Work<'_> {
    /// Posts what is taken and takes what is told. False: nothing moved.
    fn step(&mut self, port: &mut VerbsPort<'static>, keys: &TwoKeys) -> bool {
        let mut moved = false;
        if self.failed.is_none() && self.posted < self.ops.len() {
            let n = (self.ops.len() - self.posted).min(port.batch_ops() as usize);
            let batch = Batch {
                peer: 0,
                direction: self.direction,
                ops: &self.ops[self.posted..self.posted + n],
                first_wr: self.first.wrapping_add(self.posted as u32),
                keys,
            };
            let taken = match port.post(&batch) {
                Ok(()) => n,
                Err((taken, PostError::Full)) => taken as usize,
                // An error completion will say why.
                Err((taken, PostError::Rail)) => taken as usize,
            };
            moved = taken > 0;
            self.posted += taken;
        }
        while let Some(c) = port.poll() {
            moved = true;
            if c.status == WrStatus::Success {
                let told = c.wr.wrapping_sub(self.first) as usize + 1;
                assert!(told > self.told && told <= self.posted, "{c:?} of {}", self.posted);
                self.told = told;
            } else {
                self.failed.get_or_insert(c);
            }
        }
        moved
    }
}

fn raise(own: &End, other: &End, qp: &Qp, remote: &Qp, want: Want) {
    let (gid, theirs) = (own.device.gid().unwrap(), other.device.gid().unwrap());
    let (f, g) = (own.device.facts(), other.device.facts());
    let small = |n: u32| n.min(16) as u8;
    let path = Path {
        gid_index: gid.index,
        remote_gid: theirs.raw,
        remote_qpn: remote.number(),
        own_psn: qp.number().wrapping_mul(7919),
        remote_psn: remote.number().wrapping_mul(7919),
        mtu: f.mtu.min(g.mtu),
        rd_initiator: small(f.rd_initiator.min(g.rd_responder)),
        rd_responder: small(f.rd_responder.min(g.rd_initiator)),
        timeout: want.timeout,
        retry: want.retry,
        rnr_retry: 6,
        traffic_class: 0,
        service_level: 0,
    };
    qp.raise(&own.device, &path).unwrap_or_else(|e| panic!("{e}"));
}
