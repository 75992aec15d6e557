//! A lane over the double, and the ops and keys of the tests.

use core::ptr::NonNull;

use kvrail::engine::arena::{Arena, BLOCK_ALIGN};
use kvrail::nic::verbs::{Device, Open, Path, Qp, QpKind, Shape, VerbsPort, LANDINGS};
use kvrail::nic::{Batch, Completion, Keys, Port, PostError, RemoteKey, WrStatus};
use kvrail::table::{Direction, Op};

use crate::verbs_double::{self as double, with, Wr, NAME};

pub(crate) const OPEN: Open<'_> = Open {
    name: NAME,
    port: 1,
    ipv4: [10, 1, 0, 1],
    ifindex: 7,
    cq_entries: 4096,
    mail_entries: 64,
};

pub(crate) const SHAPE: Shape =
    Shape { depth: 64, sges: 4, signal_every: 4, batch_bytes: 1 << 20, batch_ops: 32 };

pub(crate) fn path() -> Path {
    Path {
        gid_index: 3,
        remote_gid: [9; 16],
        remote_qpn: 77,
        own_psn: 0x12_3456,
        remote_psn: 0x65_4321,
        mtu: 1024,
        rd_initiator: 4,
        rd_responder: 8,
        timeout: 14,
        retry: 6,
        rnr_retry: 5,
        traffic_class: 0x60,
        service_level: 3,
    }
}

/// Local regions from here on are of a device.
pub(crate) const LATE: u32 = 50;

pub(crate) fn own_rkey(index: u32, lane: u32) -> u32 {
    300_000 + index * 100 + lane
}

/// Keys that tell region, lane or rail, and piece; some are withheld.
#[derive(Clone, Copy, Default)]
pub(crate) struct TestKeys {
    pub(crate) no_local: Option<u32>,
    pub(crate) no_remote: Option<u32>,
    /// Remote memory from here on is another piece.
    pub(crate) seam: Option<u64>,
}

impl Keys for TestKeys {
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
        self.seam.map_or_else(|| self.rkey(index, rail, 0), |_| None)
    }

    fn lkey(&self, index: u32, lane: u32, _: u64) -> Option<u32> {
        (self.no_local != Some(index)).then_some(100_000 + index * 100 + lane)
    }

    fn rkey(&self, index: u32, rail: u32, addr: u64) -> Option<u32> {
        let piece = u32::from(self.seam.is_some_and(|s| addr >= s));
        (self.no_remote != Some(index)).then_some(200_000 + index * 1000 + rail * 10 + piece)
    }

    fn lands_late(&self, index: u32) -> bool {
        index >= LATE
    }

    fn own_rkey(&self, index: u32, lane: u32, _: u64) -> Option<u32> {
        Some(own_rkey(index, lane))
    }
}

/// A block for an arena that lives as long as the test process.
pub(crate) fn block(bytes: usize) -> NonNull<u8> {
    let words = vec![0u128; bytes / 16 + BLOCK_ALIGN / 16 + 1].leak();
    let at = words.as_mut_ptr().cast::<u8>();
    NonNull::new(at.wrapping_add(at.align_offset(BLOCK_ALIGN))).unwrap()
}

pub(crate) struct Rig {
    pub(crate) port: VerbsPort<'static>,
    pub(crate) device: Device,
    /// Number of each peer's queue pair.
    pub(crate) qp: Vec<u32>,
    pub(crate) keys: TestKeys,
}

pub(crate) const LANE: u32 = 2;

impl Rig {
    pub(crate) fn new(peers: u32, shape: Shape) -> Rig {
        Rig::with(peers, shape, OPEN)
    }

    pub(crate) fn with(peers: u32, shape: Shape, open: Open<'_>) -> Rig {
        let device = Device::open(double::verbs(), &open).unwrap();
        let handle = Some(device.handle());
        let mut measure = Arena::measure();
        VerbsPort::new(&mut measure, LANE, peers, shape, None).unwrap();
        // SAFETY: I1: the block is leaked, so it lives for ever, and is as long as was measured.
        let mut arena = unsafe { Arena::over(block(measure.used()), measure.used()) };
        let port = VerbsPort::new(&mut arena, LANE, peers, shape, handle).unwrap();
        let mut rig = Rig { port, device, qp: vec![0; peers as usize], keys: TestKeys::default() };
        (0..peers).for_each(|p| rig.connect(p, 1 << 20));
        rig
    }

    /// Connects peer `p` over its rail `p + 1`.
    pub(crate) fn connect(&mut self, p: u32, max_msg: u32) {
        let kind = QpKind::Data { depth: 64, sges: 4, inline: 0 };
        let qp = self.device.create_qp(kind).unwrap();
        qp.raise(&self.device, &path()).unwrap();
        self.qp[p as usize] = qp.number();
        self.port.connect(p, qp, p + 1, max_msg);
    }

    /// Gives peer `p` a loopback queue pair. Its number.
    pub(crate) fn loop_back(&mut self, p: u32) -> u32 {
        let qp = self.device.create_qp(QpKind::Loopback { depth: LANDINGS as u32 }).unwrap();
        let number = qp.number();
        qp.raise(&self.device, &Path { remote_qpn: number, ..path() }).unwrap();
        assert!(self.port.loop_back(p, qp).is_none());
        number
    }

    pub(crate) fn post(
        &mut self,
        peer: u32,
        direction: Direction,
        first_wr: u32,
        ops: &[Op],
    ) -> Result<(), (u32, PostError)> {
        let keys = &self.keys;
        self.port.post(&Batch { peer, direction, ops, first_wr, keys })
    }

    pub(crate) fn read(&mut self, first_wr: u32, ops: &[Op]) -> Result<(), (u32, PostError)> {
        self.post(0, Direction::Read, first_wr, ops)
    }

    pub(crate) fn write(&mut self, first_wr: u32, ops: &[Op]) -> Result<(), (u32, PostError)> {
        self.post(0, Direction::Write, first_wr, ops)
    }

    pub(crate) fn posted(&self, peer: u32) -> Vec<Wr> {
        with(|s| s.posted(self.qp[peer as usize]))
    }

    /// The next `n` of peer 0 succeed.
    pub(crate) fn done(&self, n: usize) -> Vec<Wr> {
        with(|s| s.done(self.qp[0], n))
    }

    /// The next of peer 0 fails.
    pub(crate) fn fails(&self, status: u32) {
        with(|s| s.fails(self.qp[0], status));
    }

    /// Everything that the port has to say.
    pub(crate) fn poll(&mut self) -> Vec<Completion> {
        core::iter::from_fn(|| self.port.poll()).collect()
    }

    /// Destroys what closed rails left. Their queue pairs' numbers.
    pub(crate) fn bury(&mut self) -> Vec<u32> {
        let graves: Vec<_> = core::iter::from_fn(|| self.port.take_grave()).collect();
        let numbers = graves.iter().map(Qp::number).collect();
        for qp in graves {
            // SAFETY: V22: the port gave it up.
            unsafe { qp.destroy() }.unwrap();
        }
        numbers
    }

    /// Closes everything; the device must get all of its objects back.
    pub(crate) fn end(mut self) {
        assert!((0..self.qp.len() as u32).all(|p| self.port.close(p)));
        self.bury();
        drop(self.device);
        with(|s| {
            assert!(s.nothing_lives(), "{:?}", s.live);
            assert!(!s.overrun, "the completion queue overran");
        });
    }
}

pub(crate) fn success(peer: u32, wr: u32) -> Completion {
    Completion { peer, wr, status: WrStatus::Success, vendor: 0 }
}

/// An op between two places, of region 1 here and region 5 there.
pub(crate) fn op(local: u64, remote: u64, len: u32) -> Op {
    Op { local, remote, len, local_region: 1, remote_region: 5, tag: 0 }
}

/// `n` ops that touch nowhere.
pub(crate) fn apart(n: u64) -> Vec<Op> {
    (0..n).map(|i| op(0x10_0000 + i * 0x100, 0x90_0000 + i * 0x1000, 0x40)).collect()
}
