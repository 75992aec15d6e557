//! One transfer: its places, its bytes, and how it is made and posted.

use super::*;

/// A place of a transfer: region, chunk, and the registration that it was of.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub region: usize,
    pub chunk: usize,
    pub epoch: u32,
}

/// A prepared transfer, posted once or several times.
pub struct Flight {
    pub from: usize,
    pub to: usize,
    pub direction: Direction,
    pub handle: Handle,
    _ops: Box<[Op]>,
    _regions: Box<[RegionRef]>,
    pub local: Place,
    pub remote: Place,
    pub to_life: u32,
    /// Offsets at the source and the destination, and bytes.
    pub pieces: Vec<(u32, u32, u32)>,
    pub len: usize,
    pub poison: u8,
    pub source: Vec<u8>,
    pub expected: Vec<u8>,
    pub note: Option<u64>,
    pub posted_at: u64,
    pub moved_at: u64,
    pub left: u64,
    pub cancelled: bool,
    /// Since when it is being released.
    pub releasing: Option<u64>,
    pub stalled: bool,
    /// Once its message is queued: the number of the last one without a transfer that was queued
    /// before it. Later ones come later.
    pub behind: Option<u64>,
    pub posts: u32,
    /// The next post is a second try of the same bytes.
    pub repeat: bool,
}

/// What is known of a transfer's message.
pub struct Note {
    pub to: usize,
    pub to_life: u32,
    pub got: bool,
    pub fate: Fate,
    pub due: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// The transfer is under way.
    Open,
    /// It is done: the message comes, once.
    Comes,
    /// It failed: the message must not come.
    Never,
    /// It failed when all data was there, or its receiver died: at most once.
    Perhaps,
}

impl Flight {
    pub fn has_note(&self, id: u64) -> bool {
        self.note == Some(id)
    }

    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|p| u64::from(p.2)).sum()
    }

    pub fn destination(&self) -> (usize, Place) {
        match self.direction {
            Direction::Read => (self.from, self.local),
            Direction::Write => (self.to, self.remote),
        }
    }

    pub fn origin(&self) -> (usize, Place) {
        match self.direction {
            Direction::Read => (self.to, self.remote),
            Direction::Write => (self.from, self.local),
        }
    }
}

impl Fleet {
    pub fn region(&self, (e, place): (usize, Place)) -> Option<&Region> {
        let region = &self.sites[e].regions[place.region];
        (region.epoch == place.epoch).then_some(region)
    }

    pub fn give_chunk(&mut self, (e, place): (usize, Place)) {
        let region = &mut self.sites[e].regions[place.region];
        if region.epoch == place.epoch {
            region.free.push(place.chunk);
        }
    }

    fn take_chunk(&mut self, e: usize) -> Option<Place> {
        let at = self.rng.below(self.sites[e].regions.len() as u64) as usize;
        let site = &mut self.sites[e];
        let region = &mut site.regions[at];
        region.handle.filter(|_| !site.closing.contains_key(&at))?;
        let chunk = region.free.pop()?;
        Some(Place { region: at, chunk, epoch: region.epoch })
    }

    /// New content at the source, poison at the destination.
    fn refill(&mut self, flight: &mut Flight) {
        let words = flight.len.div_ceil(8);
        flight.source.clear();
        for _ in 0..words {
            flight.source.extend_from_slice(&self.rng.bits().to_le_bytes());
        }
        flight.source.truncate(flight.len);
        flight.poison = self.rng.bits() as u8;
        flight.expected.clear();
        flight.expected.resize(flight.len, flight.poison);
        for &(from, to, n) in &flight.pieces {
            let (from, to, n) = (from as usize, to as usize, n as usize);
            flight.expected[to..to + n].copy_from_slice(&flight.source[from..from + n]);
        }
        if let Some(region) = self.region(flight.origin()) {
            region.write(flight.origin().1.chunk, &flight.source);
        }
        if let Some(region) = self.region(flight.destination()) {
            region.fill(flight.destination().1.chunk, flight.len, flight.poison);
        }
    }

    fn pieces(&mut self) -> (Vec<(u32, u32, u32)>, usize) {
        let stride = 1 + self.rng.below(u64::from(self.plan.len));
        let most = (CHUNK as u64 / stride).min(u64::from(self.plan.ops));
        let n = 1 + self.rng.below(most);
        let step = loop {
            let step = 1 + self.rng.below(n);
            let (mut a, mut b) = (step, n);
            while b > 0 {
                (a, b) = (b, a % b);
            }
            if a == 1 {
                break step;
            }
        };
        let shift = self.rng.below(n);
        let pieces = (0..n)
            .map(|i| {
                let len = 1 + self.rng.below(stride);
                let from = i * stride + self.rng.below(stride - len + 1);
                let to = (i * step + shift) % n * stride + self.rng.below(stride - len + 1);
                (from as u32, to as u32, len as u32)
            })
            .collect();
        (pieces, (n * stride) as usize)
    }

    /// Prepares a transfer of an engine to one of its peers. `None`: something is full.
    pub fn prepare(&mut self, p: usize, side: usize) -> Option<Flight> {
        let (from, to) = (self.pairs[p].sides[side], self.pairs[p].sides[1 - side]);
        // Engines that prefill push, those that decode pull.
        let direction = [Direction::Write, Direction::Read][side];
        let local = self.take_chunk(from)?;
        let Some(remote) = self.take_chunk(to) else {
            self.give_chunk((from, local));
            return None;
        };
        let Some(key) = self.import(from, to, remote.region) else {
            self.give_chunk((from, local));
            self.give_chunk((to, remote));
            return None;
        };
        let own = self.sites[from].regions[local.region].handle.expect("a chunk was taken");
        let (pieces, len) = self.pieces();
        let base = |e: usize, place: Place| self.sites[e].regions[place.region].at(place.chunk);
        let (here, there) = (base(from, local), base(to, remote));
        let mut ops: Box<[Op]> = pieces
            .iter()
            .zip(0..)
            .map(|(&(source, dest, len), pair)| {
                let reads = direction == Direction::Read;
                let (l, r) = if reads { (dest, source) } else { (source, dest) };
                Op {
                    local: here + u64::from(l),
                    remote: there + u64::from(r),
                    len,
                    local_region: own.index(),
                    remote_region: key.index(),
                    tag: Op::tagged(pair, false),
                }
            })
            .collect();
        let named =
            |h: Handle, remote| RegionRef { slot: h.index(), generation: h.generation(), remote };
        let regions: Box<[RegionRef]> = [named(own, false), named(key, true)].into();
        let peer = self.world.peer(from, to);
        let body = Body {
            ops: ops.as_mut_ptr(),
            n_ops: ops.len() as u32,
            regions: regions.as_ptr(),
            n_regions: 2,
            direction,
            peer: peer.index(),
            peer_generation: peer.generation(),
            bytes: pieces.iter().map(|p| u64::from(p.2)).sum(),
            descriptors: pieces.len() as u64,
        };
        let handle = self.world.engines[from].adopt(body).expect("room for transfers");
        Some(Flight {
            from,
            to,
            direction,
            handle,
            _ops: ops,
            _regions: regions,
            local,
            remote,
            to_life: self.sites[to].life,
            pieces,
            len,
            poison: 0,
            source: Vec::new(),
            expected: Vec::new(),
            note: None,
            posted_at: 0,
            moved_at: 0,
            left: 0,
            cancelled: false,
            releasing: None,
            stalled: false,
            behind: None,
            posts: 0,
            repeat: false,
        })
    }

    /// Posts a transfer. `Err` brings it back: it was refused.
    pub fn post(&mut self, mut flight: Flight) -> Result<(), Box<Flight>> {
        if !core::mem::take(&mut flight.repeat) {
            self.refill(&mut flight);
        }
        flight.note = (self.rng.below(4) > 0).then(|| {
            self.next_note += 1;
            self.next_note
        });
        let text = flight.note.map(|id| {
            let longest = self.longest();
            let extra = [0, 0, 9, 300, 3_000, longest][self.rng.below(6) as usize];
            let mut text = vec![b'T'];
            text.extend_from_slice(&id.to_le_bytes());
            text.resize(9 + extra, id as u8);
            text
        });
        let raw = flight.handle.raw();
        if self.world.engines[flight.from].post(raw, text.as_deref()).is_err() {
            return Err(Box::new(flight));
        }
        let now = self.now();
        if let Some(id) = flight.note {
            let note = Note {
                to: flight.to,
                to_life: flight.to_life,
                got: false,
                fate: Fate::Open,
                due: 0,
            };
            self.notes.insert(id, note);
        }
        (flight.posted_at, flight.moved_at, flight.left) = (now, now, u64::MAX);
        (flight.cancelled, flight.stalled, flight.behind) = (false, false, None);
        flight.posts += 1;
        self.posted += 1;
        self.counts.descriptors += flight.pieces.len() as u64;
        self.counts.bytes += flight.bytes();
        let ticks = self.ticks_for(flight.pieces.len() as u64, flight.bytes());
        self.sites[flight.from].asked += ticks;
        self.flights.push(flight);
        Ok(())
    }
}
