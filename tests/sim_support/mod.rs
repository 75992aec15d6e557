//! A small world for engine tests: engines on one simulated fabric, memory with canaries, transfers
//! with a reference.

mod case;

pub use case::{lanes, striped, with_port, Case, BOTH};

use core::ptr::NonNull;
use kvrail::engine::arena::{Arena, BLOCK_ALIGN};
use kvrail::engine::bell::Bell;
use kvrail::engine::core::{Core, Parts, Tuning};
use kvrail::engine::notify::Piece;
use kvrail::engine::peer::{Link, PeerState, NO_LANE};
use kvrail::engine::slot::{Body, RegionRef};
use kvrail::handle::Handle;
use kvrail::limits::Limits;
use kvrail::nic::sim::{Fabric, FabricConfig, Faults, PortConfig, Rng, SimNet, SimPort};
use kvrail::status::Status;
use kvrail::table::{Direction, Op};

pub type Engine = Core<'static, SimPort<'static>, SimNet<'static>>;

/// Engines with room for a few of everything.
pub const LIMITS: Limits = Limits {
    peers: 4,
    regions: 8,
    remote_regions: 16,
    transfers: 32,
    lanes: 2,
    message_bytes: 2 << 20,
};

/// A lane without surprises.
pub const PORT: PortConfig = PortConfig {
    window: u64::MAX,
    late: false,
    depth: 64,
    credits: 64,
    batch_ops: 32,
    batch_bytes: 1 << 20,
    rate: 4096,
    delay: 2,
    signal: 8,
    seed: 1,
    faults: Faults { rail: 0, full: 0, post_rail: 0 },
};

pub const TUNING: Tuning = Tuning { inline_bytes: 0, stripe_all: true, background: true };

#[derive(Clone, Copy)]
pub struct Setup {
    pub engines: u32,
    pub limits: Limits,
    pub tuning: Tuning,
    pub port: PortConfig,
    pub auto_tick: u64,
    pub chop: u32,
    /// Message streams at one time, and bytes of each direction.
    pub pipes: (u32, u32),
    /// Packets on their way at one time whose rail was closed.
    pub late: u32,
}

pub const SETUP: Setup = Setup {
    engines: 2,
    limits: LIMITS,
    tuning: TUNING,
    port: PORT,
    auto_tick: 1,
    chop: 0,
    pipes: (50, 64 << 10),
    late: 64,
};

/// Seed of this run: `KVRAIL_SEED`, or the test's own.
pub fn seed(own: u64) -> u64 {
    std::env::var("KVRAIL_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(own)
}

/// Prints the seed if the test panics.
pub struct Tell(pub u64);

impl Drop for Tell {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with KVRAIL_SEED={}", self.0);
        }
    }
}

struct Block {
    _memory: Vec<u128>,
    base: NonNull<u8>,
    len: usize,
}

fn block(len: usize) -> Block {
    let mut memory = vec![0u128; len / 16 + BLOCK_ALIGN / 16 + 1];
    let at = memory.as_mut_ptr().cast::<u8>();
    let base = NonNull::new(at.wrapping_add(at.align_offset(BLOCK_ALIGN))).unwrap();
    Block { _memory: memory, base, len }
}

impl Block {
    fn arena(&self) -> Arena<'static> {
        // SAFETY: I1: the block is ours, and `World` drops everything carved from it first.
        unsafe { Arena::over(self.base, self.len) }
    }
}

/// Dropped in this order: engines, fabric, memory.
pub struct World {
    pub engines: Vec<Engine>,
    pub fabric: &'static Fabric<'static>,
    pub setup: Setup,
    owned: *mut Fabric<'static>,
    _blocks: Vec<Block>,
}

// SAFETY: engines and fabric are made to be shared; the pointers are for dropping only.
unsafe impl Sync for World {}

impl Drop for World {
    fn drop(&mut self) {
        self.engines.clear();
        // SAFETY: leaked in `World::new`; the engines that referred to it are gone.
        drop(unsafe { Box::from_raw(self.owned) });
    }
}

fn no_bell(_: i32) {}

impl World {
    pub fn new(setup: Setup) -> World {
        let config = FabricConfig {
            engines: setup.engines,
            regions: setup.limits.regions,
            pipes: setup.pipes.0,
            pipe_bytes: setup.pipes.1,
            auto_tick: setup.auto_tick,
            chop: setup.chop,
            wires: setup.pipes.0,
            late: setup.late,
            late_bytes: 256,
        };
        let mut measure = Arena::measure();
        Fabric::new(&mut measure, config);
        let first = block(measure.used());
        let fabric = Fabric::new(&mut first.arena(), config).expect("fabric fits");
        let owned = Box::into_raw(Box::new(fabric));
        // SAFETY: freed in `drop`, after the engines.
        let fabric = unsafe { &*owned };
        let mut world = World { engines: Vec::new(), fabric, setup, owned, _blocks: vec![first] };
        for e in 0..setup.engines {
            let mut measure = Arena::measure();
            world.build(&mut measure, e).expect("measuring never fails");
            let own = block(measure.used());
            let engine = world.build(&mut own.arena(), e).expect("what was measured fits");
            world._blocks.push(own);
            world.engines.push(engine);
        }
        world
    }

    /// The engine dies and another one takes its place, in the same memory. Its peers are told
    /// nothing, and what it had connected must be closed.
    pub fn rebuild(&mut self, e: usize) {
        // Nothing of it is left but its memory, which the next one is carved from.
        let _ = self.engines.remove(e);
        let mut arena = self._blocks[e + 1].arena();
        let engine = self.build(&mut arena, e as u32).expect("it fitted before");
        self.engines.insert(e, engine);
    }

    fn build<'m>(
        &self,
        arena: &mut Arena<'m>,
        e: u32,
    ) -> Option<Core<'m, SimPort<'m>, SimNet<'m>>> {
        let (fabric, s) = (self.fabric, self.setup);
        let name = format!("engine-{e}");
        let parts = Parts {
            limits: s.limits,
            tuning: s.tuning,
            net: SimNet::new(fabric, e),
            worker: Bell::new(no_bell, -1),
            host: Bell::new(no_bell, -1),
            name: name.as_bytes(),
        };
        Core::new(arena, parts, |arena, lane| {
            let seed = s.port.seed.wrapping_mul(31).wrapping_add(u64::from(e * 16 + lane));
            SimPort::new(arena, fabric, e, s.limits.peers, PortConfig { seed, ..s.port })
        })
    }

    /// Peer slot that engine `to` has at engine `from`: itself is 0, the others follow in order.
    pub fn slot(from: usize, to: usize) -> u32 {
        match to.cmp(&from) {
            core::cmp::Ordering::Equal => 0,
            core::cmp::Ordering::Less => to as u32 + 1,
            core::cmp::Ordering::Greater => to as u32,
        }
    }

    pub fn peer(&self, from: usize, to: usize) -> Handle {
        self.engines[from].peer_handle(World::slot(from, to))
    }

    /// Connects (again) one lane's rail from `a` to `b`.
    pub fn connect_rail(&self, a: usize, b: usize, lane: u32) {
        let slot = World::slot(a, b);
        let generation = self.engines[a].peer_state(slot).generation;
        self.engines[a].connect_rail(lane, (slot, lane), generation, |port| {
            assert!(port.connect(slot, b as u32).is_ok());
        });
    }

    pub fn rails_up(&self, a: usize, b: usize) -> u32 {
        let slot = World::slot(a, b);
        self.engines[a].rails(slot).count_ones()
    }

    /// Connects two engines (or an engine to itself) in both directions.
    pub fn connect(&self, a: usize, b: usize) {
        for (x, y) in [(a, b), (b, a)] {
            let slot = World::slot(x, y);
            let s = self.engines[x].peer_state(slot);
            if slot != 0 {
                let state = PeerState { link: Link::Down, status: Status::Ok, ..s };
                self.engines[x].set_peer(slot, state);
            }
            for lane in 0..self.setup.limits.lanes {
                self.connect_rail(x, y, lane);
            }
        }
        if a != b {
            let (sa, sb) = (World::slot(a, b), World::slot(b, a));
            let (la, lb) = self.fabric.pipe((a as u32, sa), (b as u32, sb)).expect("a pipe");
            let (ea, eb) = (&self.engines[a], &self.engines[b]);
            let (wa, wb) = (ea.first_window(sa), eb.first_window(sb));
            ea.attach(sa, [(NO_LANE, 0, la)], eb.name(), wb, &[]);
            eb.attach(sb, [(NO_LANE, 0, lb)], ea.name(), wa, &[]);
        }
    }

    /// `a` gives `b` up.
    pub fn close(&self, a: usize, b: usize, status: Status) {
        for link in self.engines[a].close_peer(World::slot(a, b), status) {
            link.link.close();
        }
    }

    /// One step of everybody, and the part of the host that gives a peer without rails up.
    pub fn step(&self) {
        for a in 0..self.engines.len() {
            self.engines[a].poll();
            self.tend(a);
        }
    }

    /// What the control side of an engine does about rails that are of no use.
    pub fn tend(&self, a: usize) {
        let e = &self.engines[a];
        while let Some(slot) = e.next_limping().or_else(|| e.next_broken()) {
            let lost = e.lost(slot);
            for lane in (0..self.setup.limits.lanes).filter(|l| lost & 1 << l != 0) {
                if let Some(link) = e.drop_rail(lane, slot) {
                    link.close();
                }
            }
            let b = (0..self.engines.len()).find(|&b| World::slot(a, b) == slot).unwrap();
            if self.rails_up(a, b) == 0 {
                self.close(a, b, Status::NoRail);
            }
        }
        e.forgive();
    }

    /// Steps until a transfer is at rest; its status. Fails when that takes more than `most` steps.
    pub fn finish(&self, a: usize, t: &Transfer, most: usize) -> Status {
        for _ in 0..most {
            let s = self.engines[a].check(t.raw()).unwrap();
            if s != Status::InProgress {
                return s;
            }
            self.step();
        }
        panic!("not done after {most} steps: {:?}", self.engines[a].info(t.raw()));
    }

    /// Takes the messages that came to an engine: sender and bytes.
    pub fn messages(&self, a: usize) -> Vec<(String, Vec<u8>)> {
        let (mut all, mut name, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        self.engines[a].take_messages(|p| match p {
            Piece::Name(b) => name.extend_from_slice(b),
            Piece::Bytes(b) => bytes.extend_from_slice(b),
            Piece::End => {
                let name = String::from_utf8(core::mem::take(&mut name)).unwrap();
                all.push((name, core::mem::take(&mut bytes)));
            }
        });
        all
    }
}

const CANARY: usize = 64;

/// Memory that an engine registered, with canaries around it.
pub struct Memory {
    cells: Box<[u8]>,
    pub len: usize,
    pub owner: usize,
    pub handle: Handle,
}

impl Memory {
    pub fn new(world: &World, owner: usize, len: usize, fill: impl FnMut(usize) -> u8) -> Memory {
        let mut cells = vec![0xC5; len + 2 * CANARY];
        for (cell, byte) in cells[CANARY..][..len].iter_mut().zip((0..len).map(fill)) {
            *cell = byte;
        }
        let mut cells = cells.into_boxed_slice();
        let base = cells.as_mut_ptr() as u64 + CANARY as u64;
        let handle = world.engines[owner].local.open(base, len as u64, 0, (0, 0)).expect("a slot");
        // SAFETY: I9: tests keep memory alive until the world is gone or it was deregistered, and
        // look at it between steps only.
        assert!(unsafe {
            let (slot, generation) = (handle.index(), handle.generation());
            world.fabric.register(owner as u32, slot, generation, base, len as u64)
        });
        Memory { cells, len, owner, handle }
    }

    pub fn base(&self) -> u64 {
        self.cells.as_ptr() as u64 + CANARY as u64
    }

    /// The bytes now; the canaries around them must be whole.
    pub fn bytes(&self) -> Vec<u8> {
        // SAFETY: alive; read volatile because the simulator writes behind the compiler's back.
        let all: Vec<u8> = (0..self.cells.len())
            .map(|i| unsafe { self.cells.as_ptr().add(i).read_volatile() })
            .collect();
        let (front, rest) = all.split_at(CANARY);
        let (middle, back) = rest.split_at(self.len);
        assert!(front.iter().chain(back).all(|&b| b == 0xC5), "written outside of the region");
        middle.to_vec()
    }

    pub fn fill(&mut self, byte: u8) {
        let len = self.len;
        self.cells[CANARY..][..len].fill(byte);
    }

    /// Makes it known to `to` as a remote region.
    pub fn import(&self, world: &World, to: usize) -> Handle {
        let target = (self.handle.index(), self.handle.generation());
        world.engines[to]
            .remote
            .open(self.base(), self.len as u64, World::slot(to, self.owner), target)
            .expect("a slot")
    }
}

/// A prepared transfer and what it needs to stay alive.
pub struct Transfer {
    pub handle: Handle,
    pub ops: Box<[Op]>,
    _regions: Box<[RegionRef]>,
}

impl Transfer {
    pub fn raw(&self) -> u64 {
        self.handle.raw()
    }
}

/// A pair: offset at the local side, at the remote side, bytes.
pub type Pair = (usize, usize, usize);

/// Prepares pairs as they are, one op each.
pub fn prepare(
    world: &World,
    direction: Direction,
    (at, local): (usize, &Memory),
    (remote, key): (&Memory, Handle),
    pairs: &[Pair],
) -> Result<Transfer, Status> {
    let mut ops: Box<[Op]> = pairs
        .iter()
        .enumerate()
        .map(|(i, &(l, r, len))| Op {
            local: local.base() + l as u64,
            remote: remote.base() + r as u64,
            len: len as u32,
            local_region: local.handle.index(),
            remote_region: key.index(),
            tag: i as u32,
        })
        .collect();
    let region =
        |h: Handle, remote| RegionRef { slot: h.index(), generation: h.generation(), remote };
    let regions: Box<[RegionRef]> = [region(local.handle, false), region(key, true)].into();
    let peer = world.peer(at, remote.owner);
    let body = Body {
        ops: ops.as_mut_ptr(),
        n_ops: ops.len() as u32,
        regions: regions.as_ptr(),
        n_regions: 2,
        direction,
        peer: peer.index(),
        peer_generation: peer.generation(),
        bytes: pairs.iter().map(|p| p.2 as u64).sum(),
        descriptors: pairs.len() as u64,
    };
    let handle = world.engines[at].adopt(body).map_err(|_| Status::Capacity)?;
    Ok(Transfer { handle, ops, _regions: regions })
}

/// `n` pairs of 1 to `most` bytes that share no byte with each other on either side, in random
/// order on each; the room that each side needs.
pub fn random_pairs(rng: &mut Rng, n: usize, most: usize) -> (Vec<Pair>, usize) {
    let lens: Vec<usize> = (0..n).map(|_| 1 + rng.below(most as u64) as usize).collect();
    let place = |rng: &mut Rng| {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, rng.below(i as u64 + 1) as usize);
        }
        let (mut at, mut end) = (vec![0; n], 0);
        for i in order {
            at[i] = end;
            end += lens[i] + rng.below(4) as usize;
        }
        (at, end)
    };
    let ((l, l_end), (r, r_end)) = (place(rng), place(rng));
    let pairs = (0..n).map(|i| (l[i], r[i], lens[i])).collect();
    (pairs, l_end.max(r_end))
}

/// What the destination holds after a transfer.
pub fn reference(dir: Direction, local: &[u8], remote: &[u8], pairs: &[Pair]) -> Vec<u8> {
    let mut to = if dir == Direction::Read { local.to_vec() } else { remote.to_vec() };
    for &(l, r, n) in pairs {
        match dir {
            Direction::Read => to[l..l + n].copy_from_slice(&remote[r..r + n]),
            Direction::Write => to[r..r + n].copy_from_slice(&local[l..l + n]),
        }
    }
    to
}

/// Bytes a lane has carried, from `a` to `b`.
pub fn carried(world: &World, a: usize, b: usize, lane: u32) -> u64 {
    world.engines[a].with_port(lane, |p| p.carried(World::slot(a, b)))
}

/// Most work requests queued on any rail from `a` to `b`.
pub fn queued(world: &World, a: usize, b: usize) -> u32 {
    let slot = World::slot(a, b);
    let lanes = 0..world.setup.limits.lanes;
    lanes.map(|l| world.engines[a].with_port(l, |p| p.queued(slot))).max().unwrap_or(0)
}
