//! What one input of the `cabi` fuzz target does: calls of the C ABI in any order, with handles
//! that live, are stale, are another engine's or nobody's, over transport `local` of two engines in
//! this process. A call answers with a status that the header knows; memory changes only where a
//! transfer in flight may write it; a panic inside aborts the run.

use crate::cabi_args::{self as args, abi, config, ok};
use crate::cabi_model::{Kind, Memory, Objects, Region};
use crate::draw::Draw;
use core::ffi::c_void;
use core::ptr::{null, null_mut};
use kvrail_cabi::{engine::*, peer::*, region::*, types::*};

/// Calls of one draw.
const MAX_CALLS: usize = 96;

/// One engine and what is known of it.
pub(crate) struct Side {
    pub(crate) engine: *mut kvr_engine,
    pub(crate) number: u32,
    pub(crate) objects: Objects,
    /// Its own peer.
    own: u64,
    blob: Vec<u8>,
    /// The block that it lies in, when it is the caller's.
    _block: Option<Vec<u8>>,
}

/// Everything of one draw.
pub(crate) struct World {
    pub(crate) memory: Memory,
    pub(crate) sides: [Option<Side>; 2],
    /// Engines that were destroyed.
    ghosts: Vec<*mut kvr_engine>,
    /// Blobs of regions: which engine and region, and its blob.
    blobs: Vec<((u32, u64), Vec<u8>)>,
    made: u32,
    pub(crate) sent: u64,
    pub(crate) heard: u64,
}

/// Takes an input apart: how it begins, then two bytes a call, which and with what choices.
pub(crate) fn run(data: &[u8]) {
    let (head, calls) = data.split_at(data.len().min(3));
    let mut draw = Draw(head.iter().fold(0, |sum, b| sum << 8 | u64::from(*b)));
    let mut world = World {
        memory: Memory::new(),
        sides: [None, None],
        ghosts: Vec::new(),
        blobs: Vec::new(),
        made: 0,
        sent: 0,
        heard: 0,
    };
    for slot in 0..2 {
        world.create(slot, &mut draw);
    }
    if !draw.one_in(8) {
        world.acquaint(&mut draw);
    }
    for (i, call) in calls.chunks_exact(2).take(MAX_CALLS).enumerate() {
        let salt = u64::from(call[1]) << 32 | u64::from(call[0]) << 16 | i as u64;
        world.step(usize::from(call[0]), &mut Draw(salt));
    }
    let first = draw.below(2);
    for slot in [first, 1 - first] {
        world.destroy(slot, &mut draw);
    }
    world.settle();
}

impl World {
    /// Regions on both sides, each side the other's peer, and every region known to both.
    fn acquaint(&mut self, draw: &mut Draw) {
        for slot in [0, 1, 0, 1] {
            self.register(slot, draw);
        }
        for slot in 0..2 {
            let blob = self.sides[1 - slot].as_ref().expect("made above").blob.clone();
            let side = self.side(slot);
            let (at, len, mut raw) = (blob.as_ptr().cast(), blob.len(), 7);
            ok(abi!(kvr_peer_add(side.engine, at, len, null(), 0, &mut raw)));
            side.objects.give(Kind::Peer, raw);
            ok(abi!(kvr_peer_connect(side.engine, raw, 10_000)));
            for (owner, blob) in self.blobs.clone() {
                let side = self.side(slot);
                let (at, n, mut known) = (blob.as_ptr().cast(), blob.len(), 7);
                let own = owner.0 == side.number;
                let (status, peer) = match own {
                    true => {
                        (abi!(kvr_region_import_self(side.engine, owner.1, &mut known)), side.own)
                    }
                    false => (abi!(kvr_region_import(side.engine, raw, at, n, &mut known)), raw),
                };
                ok(status);
                self.imported(slot, known, owner, peer);
            }
        }
    }

    fn step(&mut self, call: usize, draw: &mut Draw) {
        let (slot, call) = (call & 1, (call >> 1) % 32);
        if self.sides[slot].is_none() {
            return self.create(slot, draw);
        }
        match call {
            0 | 1 => self.register(slot, draw),
            2 => self.deregister(slot, draw),
            3 => self.peer_add(slot, draw),
            4 => self.peer_other(slot, draw),
            5 => self.import(slot, draw),
            6 => self.import_self(slot, draw),
            7..=9 => self.table(slot, draw),
            10 => self.table_destroy(slot, draw),
            11..=13 => self.prepare(slot, draw),
            14..=16 => self.prepare_descs(slot, draw),
            17..=20 => self.post(slot, draw),
            21 | 22 => self.check(slot, draw),
            23 => self.cancel(slot, draw),
            24 => self.release(slot, draw),
            25 => self.notify(slot, draw),
            26 => self.notifs(slot),
            27 => self.forget(slot, draw),
            28 if draw.one_in(4) => self.destroy(slot, draw),
            28 if draw.one_in(3) => self.remove(slot, draw),
            29 | 30 => args::bad(self.side(slot).engine, draw),
            _ => {
                abi!(kvr_progress(self.side(slot).engine));
            }
        }
    }

    pub(crate) fn side(&mut self, slot: usize) -> &mut Side {
        self.sides[slot].as_mut().expect("an engine that lives")
    }

    /// Looks at the memory; what may be written from here on is what is in flight now.
    pub(crate) fn settle(&mut self) {
        let live = self.sides.iter().flatten();
        self.memory.settle(live.flat_map(|s| s.objects.targets()));
    }

    /// A handle: mostly one of this engine and kind, alive or not; else another's, or noise.
    pub(crate) fn pick(&self, slot: usize, kind: Kind, draw: &mut Draw) -> u64 {
        let which = draw.byte();
        let from = |slot: usize, kind: Kind| {
            let given = &self.sides[slot].as_ref()?.objects.given[kind as usize];
            // The newest is the likeliest to be of use.
            given.iter().rev().nth(which % given.len().max(1)).copied()
        };
        let kinds = [Kind::Peer, Kind::Region, Kind::Table, Kind::Transfer];
        let raw = match draw.below(24) {
            0 => from(1 - slot, kind),
            1 => from(slot, kinds[draw.below(4)]),
            2 => from(slot, kind).map(|h| h ^ 1 << draw.below(64)),
            3 => Some(which as u64),
            _ => from(slot, kind),
        };
        raw.unwrap_or(0)
    }

    fn create(&mut self, slot: usize, draw: &mut Draw) {
        let how = draw.byte();
        let cfg = config(self.made, how);
        let (mut engine, mut block) = (null_mut(), None);
        if how & 2 == 0 {
            ok(abi!(kvr_engine_create(&cfg, &mut engine)));
        } else {
            let len = abi!(kvr_engine_size(&cfg)) + (1 << 20);
            let mut bytes = vec![0u8; len + 8];
            let at = bytes[how / 4 % 8..].as_mut_ptr().cast::<c_void>();
            ok(abi!(kvr_engine_init(at, len, &cfg, &mut engine)));
            block = Some(bytes);
        }
        assert!(!engine.is_null());
        self.ghosts.retain(|g| *g != engine);
        let blob = args::blob(|buf, len| abi!(kvr_engine_metadata(engine, buf, len)), draw);
        let number = self.made;
        self.made += 1;
        let (mut objects, mut own) = (Objects::default(), 7);
        ok(abi!(kvr_peer_self(engine, &mut own)));
        objects.give(Kind::Peer, own);
        let _block = block;
        self.sides[slot] = Some(Side { engine, number, objects, own, blob, _block });
    }

    fn destroy(&mut self, slot: usize, draw: &mut Draw) {
        if let Some(side) = self.sides[slot].take() {
            ok(abi!(kvr_engine_destroy(side.engine)));
            self.ghosts.push(side.engine);
            for other in self.sides.iter_mut().flatten() {
                other.objects.withdraw(|(number, _)| number == side.number);
            }
            drop(side);
            self.settle();
        }
        if draw.byte().is_multiple_of(2) {
            for ghost in &self.ghosts {
                assert_eq!(abi!(kvr_engine_destroy(*ghost)), KVR_ERR_INVALID);
            }
        }
    }

    fn register(&mut self, slot: usize, draw: &mut Draw) {
        let offset = draw.below(30) * 256 + draw.below(8);
        let len = 1 + draw.below(512) as u64;
        let addr = self.memory.base() + offset as u64;
        let (mut raw, mem) = (7, u32::from(draw.byte() == 255));
        let side = self.side(slot);
        let status = abi!(kvr_region_register(side.engine, addr, len, mem, &mut raw));
        if args::gave(status, raw) {
            let owner = (side.number, raw);
            side.objects.give(Kind::Region, raw);
            side.objects.regions.insert(raw, Region { base: addr, len, owner, peer: 0 });
            let engine = side.engine;
            let read =
                |buf: *mut c_void, n: *mut usize| abi!(kvr_region_metadata(engine, raw, buf, n));
            let blob = args::blob(read, draw);
            self.blobs.push((owner, blob));
        }
    }

    fn deregister(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Region, draw);
        let flags = draw.byte() as u32 % 3;
        let side = self.side(slot);
        let own = side.objects.regions.get(&raw).is_some_and(|r| r.peer == 0);
        let status = abi!(kvr_region_deregister(side.engine, raw, flags));
        if status != KVR_OK {
            return;
        }
        assert!(flags < 2 && own, "{raw:#x} was deregistered with flags {flags}");
        let owner = (side.number, raw);
        side.objects.regions.remove(&raw);
        side.objects.land(|t| t.regions.contains(&raw));
        for side in self.sides.iter_mut().flatten() {
            side.objects.withdraw(|o| o == owner);
        }
        self.settle();
    }

    fn peer_add(&mut self, slot: usize, draw: &mut Draw) {
        let how = draw.byte();
        let of = if how.is_multiple_of(8) { slot } else { 1 - slot };
        let Some(other) = &self.sides[of] else { return };
        // Addresses in it stay as they are: nobody outside is dialled.
        let blob = args::spoil(&other.blob, how / 8 % 4, 12, draw);
        let name = format!("fz{}", other.number);
        let (name, name_len) = match how % 3 {
            0 => (null(), 0),
            1 => (name.as_ptr().cast(), name.len()),
            _ => (name.as_ptr().cast(), name.len() - 1),
        };
        let (at, len, mut raw) = (blob.as_ptr().cast(), blob.len(), 7);
        let side = self.side(slot);
        let status = abi!(kvr_peer_add(side.engine, at, len, name, name_len, &mut raw));
        if args::gave(status, raw) {
            side.objects.give(Kind::Peer, raw);
            if !how.is_multiple_of(5) {
                abi!(kvr_peer_connect(side.engine, raw, 100));
            }
        }
    }

    fn peer_other(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Peer, draw);
        let how = draw.byte();
        let name = format!("fz{}", self.made - 1 - (how / 4) as u32 % self.made);
        let side = self.side(slot);
        let mut found = 7;
        let status = match how % 4 {
            0 => abi!(kvr_peer_self(side.engine, &mut found)),
            1 => abi!(kvr_peer_find(side.engine, name.as_ptr().cast(), name.len(), &mut found)),
            2 => {
                abi!(kvr_peer_state(side.engine, raw));
                return;
            }
            _ => {
                abi!(kvr_peer_connect(side.engine, raw, how as u32 / 8));
                return;
            }
        };
        if args::gave(status, found) {
            side.objects.give(Kind::Peer, found);
        }
    }

    fn remove(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Peer, draw);
        let side = self.side(slot);
        if abi!(kvr_peer_remove(side.engine, raw)) == KVR_OK {
            side.objects.land(|t| t.peer == raw);
            self.settle();
        }
    }

    fn import(&mut self, slot: usize, draw: &mut Draw) {
        let peer = self.pick(slot, Kind::Peer, draw);
        let (which, how) = (draw.byte(), draw.byte());
        let Some((owner, blob)) = self.blobs.iter().rev().nth(which % self.blobs.len().max(1))
        else {
            return;
        };
        let owner = *owner;
        let bad = args::spoil(blob, how % 8, blob.len(), draw);
        let spoilt = bad != *blob;
        let (at, n, mut raw) = (bad.as_ptr().cast(), bad.len(), 7);
        let side = self.side(slot);
        let status = abi!(kvr_region_import(side.engine, peer, at, n, &mut raw));
        if !args::gave(status, raw) {
            return;
        }
        if spoilt || self.place(owner).1 == 0 {
            // Whoever says where a peer's memory is, is believed: not used here.
            ok(abi!(kvr_region_forget(self.side(slot).engine, raw)));
            return;
        }
        self.imported(slot, raw, owner, peer);
    }

    fn imported(&mut self, slot: usize, raw: u64, owner: (u32, u64), peer: u64) {
        let (base, len) = self.place(owner);
        let objects = &mut self.side(slot).objects;
        objects.give(Kind::Region, raw);
        objects.regions.insert(raw, Region { base, len, owner, peer });
    }

    /// Where an engine's region is or was; 0 long: not known any more.
    fn place(&self, owner: (u32, u64)) -> (u64, u64) {
        let side = self.sides.iter().flatten().find(|s| s.number == owner.0);
        let region = side.and_then(|s| s.objects.regions.get(&owner.1));
        region.map_or((0, 0), |r| (r.base, r.len))
    }

    fn import_self(&mut self, slot: usize, draw: &mut Draw) {
        let local = self.pick(slot, Kind::Region, draw);
        let side = self.side(slot);
        let mut raw = 7;
        let status = abi!(kvr_region_import_self(side.engine, local, &mut raw));
        if args::gave(status, raw) {
            let of = *side.objects.regions.get(&local).expect("only of a region that lives");
            assert_eq!(of.owner, (side.number, local), "only of a region of its own");
            let own = side.own;
            self.imported(slot, raw, of.owner, own);
        }
    }

    fn forget(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Region, draw);
        let side = self.side(slot);
        if abi!(kvr_region_forget(side.engine, raw)) == KVR_OK {
            let known = side.objects.regions.remove(&raw);
            assert!(known.is_some_and(|r| r.peer != 0), "{raw:#x} was forgotten");
            side.objects.land(|t| t.regions.contains(&raw));
            self.settle();
        }
    }
}
