//! The usual case of an engine test: two engines, a region each, one transfer.

use super::*;

pub const BOTH: [Direction; 2] = [Direction::Read, Direction::Write];

/// Two connected engines with a region each and a transfer of engine 0; both sides hold random
/// bytes.
pub struct Case {
    pub world: World,
    pub local: Memory,
    pub remote: Memory,
    pub before: (Vec<u8>, Vec<u8>),
    pub direction: Direction,
    pub pairs: Vec<Pair>,
    pub transfer: Transfer,
}

impl Case {
    pub fn new(setup: Setup, direction: Direction, rng: &mut Rng, n: usize, most: usize) -> Case {
        let world = World::new(setup);
        world.connect(0, 1);
        let (pairs, room) = random_pairs(rng, n, most);
        let local = Memory::new(&world, 0, room, |_| rng.bits() as u8);
        let remote = Memory::new(&world, 1, room, |_| rng.bits() as u8);
        let key = remote.import(&world, 0);
        let transfer =
            prepare(&world, direction, (0, &local), (&remote, key), &pairs).expect("a slot");
        let before = (local.bytes(), remote.bytes());
        Case { world, local, remote, before, direction, pairs, transfer }
    }

    pub fn post(&self, message: Option<&[u8]>) -> Status {
        self.world.engines[0].post(self.transfer.raw(), message).unwrap()
    }

    pub fn finish(&self) -> Status {
        self.world.finish(0, &self.transfer, 1_000_000)
    }

    /// Every byte of the destination is right, and the source is as it was.
    pub fn verify(&self) {
        let want = reference(self.direction, &self.before.0, &self.before.1, &self.pairs);
        let (local, remote) = (self.local.bytes(), self.remote.bytes());
        let (to, from, source) = match self.direction {
            Direction::Read => (local, remote, &self.before.1),
            Direction::Write => (remote, local, &self.before.0),
        };
        assert!(to == want, "wrong bytes at the destination");
        assert!(&from == source, "the source was changed");
    }

    pub fn untouched(&self) {
        assert!(self.local.bytes() == self.before.0 && self.remote.bytes() == self.before.1);
    }

    pub fn port(&self, lane: u32, f: impl FnOnce(&mut SimPort<'static>)) {
        self.world.engines[0].with_port(lane, |p| f(p));
    }
}

pub fn lanes(n: u32) -> Setup {
    Setup { limits: kvrail::limits::Limits { lanes: n, ..LIMITS }, ..SETUP }
}

pub fn striped(setup: Setup, all: bool) -> Setup {
    let tuning = kvrail::engine::core::Tuning { stripe_all: all, ..setup.tuning };
    Setup { tuning, ..setup }
}

pub fn with_port(setup: Setup, port: PortConfig) -> Setup {
    Setup { port, ..setup }
}
