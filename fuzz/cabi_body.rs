//! What one input of the `cabi` fuzz target does: calls of the C ABI in any order, with handles
//! that live, are stale, are another engine's or nobody's, over transport `local` of two engines in
//! this process. A call answers with a status that the header knows; memory changes only where a
//! transfer in flight may write it; a panic inside aborts the run.

use crate::cabi_args::{self as args, abi, config, ok};
use crate::cabi_model::{descriptor, Kind, Memory, Objects, Region, Table, Target, Transfer};
use crate::draw::Draw;
use core::ffi::c_void;
use core::ptr::{null, null_mut};
use kvrail_cabi::{engine::*, notify::*, peer::*, region::*, table::*, transfer::*, types::*};

/// Calls of one draw.
const MAX_CALLS: usize = 96;

/// One engine and what is known of it.
pub(crate) struct Side {
    pub(crate) engine: *mut kvr_engine,
    pub(crate) number: u32,
    objects: Objects,
    /// Its own peer.
    own: u64,
    blob: Vec<u8>,
    /// The block that it lies in, when it is the caller's.
    _block: Option<Vec<u8>>,
}

/// Everything of one draw.
struct World {
    memory: Memory,
    sides: [Option<Side>; 2],
    /// Engines that were destroyed.
    ghosts: Vec<*mut kvr_engine>,
    /// Blobs of regions: which engine and region, and its blob.
    blobs: Vec<((u32, u64), Vec<u8>)>,
    made: u32,
    sent: u64,
    heard: u64,
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

    fn side(&mut self, slot: usize) -> &mut Side {
        self.sides[slot].as_mut().expect("an engine that lives")
    }

    /// Looks at the memory; what may be written from here on is what is in flight now.
    fn settle(&mut self) {
        let live = self.sides.iter().flatten();
        self.memory.settle(live.flat_map(|s| s.objects.targets()));
    }

    /// A handle: mostly one of this engine and kind, alive or not; else another's, or noise.
    fn pick(&self, slot: usize, kind: Kind, draw: &mut Draw) -> u64 {
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
        if draw.byte() % 2 == 0 {
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
        let of = if how % 8 == 0 { slot } else { 1 - slot };
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
            if how % 5 > 0 {
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

    /// A live region of `peer` (0: our own), mostly; else any handle.
    fn region_of(&self, slot: usize, peer: u64, draw: &mut Draw) -> u64 {
        let objects = &self.sides[slot].as_ref().expect("an engine that lives").objects;
        let mut fit: Vec<u64> =
            objects.regions.iter().filter(|(_, r)| r.peer == peer).map(|(h, _)| *h).collect();
        // A map has no order of its own, and a run must be the same again.
        fit.sort_unstable();
        match draw.one_of(&fit) {
            Some(raw) if !draw.one_in(40) => raw,
            _ => self.pick(slot, Kind::Region, draw),
        }
    }

    /// A descriptor: mostly inside a region and `len` long, else somewhere.
    fn desc(&self, slot: usize, peer: u64, len: u64, draw: &mut Draw) -> kvr_desc {
        let region = self.region_of(slot, peer, draw);
        let at = draw.word() as u64;
        let known = self.sides[slot].as_ref().and_then(|s| s.objects.regions.get(&region));
        let (base, size) = known.map_or((self.memory.base(), 64), |r| (r.base, r.len));
        let len = len.min(size);
        let (addr, len) = match draw.below(128) {
            0 => (u64::MAX - at % 9, len),
            1 => (base.wrapping_sub(at), len),
            2 => (base, u64::MAX - at % 9),
            3 => (base + at % size, size),
            4 => (base, 0),
            _ => (base + at % (size - len + 1), len),
        };
        kvr_desc { addr, len, dev: at, region }
    }

    /// A peer that somebody has a region of, mostly.
    fn some_peer(&self, slot: usize, draw: &mut Draw) -> u64 {
        let objects = &self.sides[slot].as_ref().expect("an engine that lives").objects;
        let mut peers: Vec<u64> = objects.regions.values().map(|r| r.peer).collect();
        peers.retain(|p| *p != 0);
        peers.sort_unstable();
        match draw.one_of(&peers) {
            Some(peer) if !draw.one_in(30) => peer,
            _ => self.pick(slot, Kind::Peer, draw),
        }
    }

    fn table(&mut self, slot: usize, draw: &mut Draw) {
        let (strided, n) = (draw.one_in(3), 1 + draw.below(4));
        let peer = if draw.one_in(2) { 0 } else { self.some_peer(slot, draw) };
        let list: Vec<_> = (0..n).map(|_| self.desc(slot, peer, 8, draw)).collect();
        let mut run = |d: &kvr_desc| kvr_stride {
            base: d.addr,
            len: d.len,
            stride: draw.one_of(&[0, 8, 24, 8, u64::MAX / 3]).unwrap_or(0),
            count: if strided { [1, 2, 3, 2, 3, 0, 1 << 20, u64::MAX][draw.below(8)] } else { 1 },
            region: d.region,
        };
        let runs: Vec<_> = list.iter().map(&mut run).collect();
        let side = self.side(slot);
        let mut raw = 7;
        let status = if strided {
            abi!(kvr_table_create_strided(side.engine, runs.as_ptr(), n, &mut raw))
        } else {
            abi!(kvr_table_create(side.engine, list.as_ptr(), n, &mut raw))
        };
        if args::gave(status, raw) {
            side.objects.give(Kind::Table, raw);
            side.objects.tables.insert(raw, runs);
        }
    }

    /// A live table of `peer` (0: our own), mostly.
    fn table_of(&self, slot: usize, peer: u64, draw: &mut Draw) -> u64 {
        let objects = &self.sides[slot].as_ref().expect("an engine that lives").objects;
        let peer_of = |t: &Table| Some(objects.regions.get(&t.first()?.region)?.peer);
        let fit = |(_, t): &(&u64, &Table)| peer_of(t) == Some(peer);
        let mut fit: Vec<u64> = objects.tables.iter().filter(fit).map(|(h, _)| *h).collect();
        fit.sort_unstable();
        match draw.one_of(&fit) {
            Some(raw) if !draw.one_in(30) => raw,
            _ => self.pick(slot, Kind::Table, draw),
        }
    }

    fn table_destroy(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Table, draw);
        let side = self.side(slot);
        let status = abi!(kvr_table_destroy(side.engine, raw));
        assert_eq!(status != KVR_OK, side.objects.gone(Kind::Table, raw), "table {raw:#x}");
        side.objects.tables.remove(&raw);
    }

    fn prepare(&mut self, slot: usize, draw: &mut Draw) {
        let peer = self.some_peer(slot, draw);
        let tables = [0, peer].map(|peer| self.table_of(slot, peer, draw));
        let (direction, n) = (draw.word() as u32 % 41 / 20, draw.below(5));
        let more = usize::from(n > 0 && draw.one_in(40));
        let mut index = || {
            let most = [1, 2, 3, u32::MAX][draw.below(13) / 4];
            (0..n).map(|_| draw.word() as u32 % most).collect()
        };
        let idx: [Vec<u32>; 2] = [index(), index()];
        let side = self.side(slot);
        let mut raw = 7;
        let status = abi!(kvr_transfer_prepare(
            side.engine,
            direction,
            peer,
            tables[0],
            idx[0].as_ptr(),
            n,
            tables[1],
            idx[1].as_ptr(),
            n - more,
            &mut raw
        ));
        if !args::gave(status, raw) {
            return;
        }
        assert_eq!(more, 0, "lists of two lengths were taken");
        let pairs: Vec<_> = (0..n)
            .map(|i| {
                [0, 1].map(|t| {
                    let table = side.objects.tables.get(&tables[t]).expect("a table that lives");
                    descriptor(table, idx[t][i].into()).expect("an index that it has")
                })
            })
            .collect();
        self.prepared(slot, (direction, peer, raw), &pairs);
    }

    fn prepare_descs(&mut self, slot: usize, draw: &mut Draw) {
        let peer = self.some_peer(slot, draw);
        let (direction, n) = (draw.byte() as u32 % 2, draw.below(4));
        let len = 1 + draw.below(400) as u64;
        let lists =
            [0, peer].map(|p| (0..n).map(|_| self.desc(slot, p, len, draw)).collect::<Vec<_>>());
        let side = self.side(slot);
        let mut raw = 7;
        let (l, r) = (lists[0].as_ptr(), lists[1].as_ptr());
        let status =
            abi!(kvr_transfer_prepare_descs(side.engine, direction, peer, l, n, r, n, &mut raw));
        if args::gave(status, raw) {
            let place = |d: &kvr_desc| (d.addr, d.len, d.region);
            let pairs: Vec<_> =
                (0..n).map(|i| [place(&lists[0][i]), place(&lists[1][i])]).collect();
            self.prepared(slot, (direction, peer, raw), &pairs);
        }
    }

    fn prepared(
        &mut self,
        slot: usize,
        (direction, peer, raw): (u32, u64, u64),
        pairs: &[[(u64, u64, u64); 2]],
    ) {
        assert!(direction < 2, "direction {direction} was taken");
        let objects = &mut self.side(slot).objects;
        let mut t = Transfer {
            peer,
            regions: Vec::new(),
            targets: Vec::new(),
            source: None,
            flying: false,
            expect: None,
        };
        for [local, remote] in pairs {
            match direction {
                KVR_READ => objects.pair(&mut t, *remote, *local),
                _ => objects.pair(&mut t, *local, *remote),
            }
        }
        objects.give(Kind::Transfer, raw);
        objects.transfers.insert(raw, t);
    }

    fn post(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Transfer, draw);
        let how = draw.byte();
        let message = args::message(how, draw);
        let (at, len) = match how % 4 {
            0 => (null(), 0),
            _ => (message.as_ptr().cast(), message.len()),
        };
        self.settle();
        let alone = self.sides.iter().flatten().all(|s| s.objects.targets().next().is_none());
        let before = self.transfer(slot, raw).cloned();
        // Its bytes may change as soon as the call is made.
        for t in before.iter().flat_map(|t| &t.targets) {
            self.memory.allow(t);
        }
        let expect = before.as_ref().and_then(|t| t.source).filter(|_| alone);
        let expect = expect.map(|(addr, len)| self.memory.bytes(addr, len));
        let was = self.contents(before.as_ref());
        let status = abi!(kvr_transfer_post(self.side(slot).engine, raw, at, len));
        if status < 0 {
            // A refused post changes nothing, unless it was in flight already.
            let flying = before.as_ref().is_none_or(|t| t.flying);
            let same = self.contents(before.as_ref()) == was;
            assert!(flying || !alone || same, "a refused post ({status}) wrote");
            return;
        }
        let t = before.expect("only a transfer that lives is posted");
        assert!(!t.flying || self.ended_unseen(slot, raw), "posted twice");
        self.sent += u64::from(how % 4 > 0);
        for side in self.sides.iter_mut().flatten() {
            side.objects.transfers.values_mut().for_each(|t| t.expect = None);
        }
        if let Some(t) = self.side(slot).objects.transfers.get_mut(&raw) {
            (t.flying, t.expect) = (true, expect);
        }
        self.judge(slot, raw, status);
    }

    /// A transfer that is posted again may have ended before, without anybody asking.
    fn ended_unseen(&self, slot: usize, raw: u64) -> bool {
        self.transfer(slot, raw).is_some_and(|t| t.flying)
    }

    /// What lies where a transfer writes.
    fn contents(&self, t: Option<&Transfer>) -> Vec<Vec<u8>> {
        t.iter().flat_map(|t| &t.targets).map(|t| self.bytes(t)).collect()
    }

    fn bytes(&self, t: &Target) -> Vec<u8> {
        self.memory.bytes(t.addr, t.len)
    }

    fn transfer(&self, slot: usize, raw: u64) -> Option<&Transfer> {
        self.sides[slot].as_ref()?.objects.transfers.get(&raw)
    }

    /// What a transfer's status says of the memory.
    fn judge(&mut self, slot: usize, raw: u64, status: kvr_status) {
        // -30 and below: it ended. What is above says something of the call.
        if status == KVR_IN_PROGRESS || (KVR_ERR_CANCELLED < status && status < 0) {
            return;
        }
        let Some(t) = self.transfer(slot, raw).cloned() else { return };
        if let (KVR_OK, Some(expect), [target]) = (status, &t.expect, &t.targets[..]) {
            assert!(self.bytes(target) == *expect, "done, and other bytes than the source's");
        }
        if let Some(t) = self.side(slot).objects.transfers.get_mut(&raw) {
            (t.flying, t.expect) = (false, None);
        }
        self.settle();
    }

    fn check(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Transfer, draw);
        let polls = draw.byte();
        let engine = self.side(slot).engine;
        let mut status = abi!(kvr_transfer_check(engine, raw));
        for _ in 0..polls * 4 {
            if status != KVR_IN_PROGRESS {
                break;
            }
            std::thread::yield_now();
            status = abi!(kvr_transfer_check(engine, raw));
        }
        let gone = self.side(slot).objects.gone(Kind::Transfer, raw);
        assert!(!gone || matches!(status, KVR_ERR_STALE | KVR_ERR_INVALID), "{raw:#x}: {status}");
        args::transfer_info(engine, raw, status, gone, draw);
        self.judge(slot, raw, status);
    }

    fn cancel(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Transfer, draw);
        let side = self.side(slot);
        let status = abi!(kvr_transfer_cancel(side.engine, raw));
        assert!(status < 0 || !side.objects.gone(Kind::Transfer, raw), "{raw:#x} was cancelled");
    }

    fn release(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Transfer, draw);
        let side = self.side(slot);
        let status = abi!(kvr_transfer_release(side.engine, raw));
        let gone = side.objects.gone(Kind::Transfer, raw);
        assert!(status != KVR_OK || !gone, "{raw:#x} was released twice");
        if status == KVR_OK {
            side.objects.transfers.remove(&raw);
            assert_eq!(abi!(kvr_transfer_release(side.engine, raw)), KVR_ERR_STALE);
            self.settle();
        }
    }

    fn notify(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Peer, draw);
        let message = args::message(draw.byte(), draw);
        let at = message.as_ptr().cast();
        let status = abi!(kvr_notify(self.side(slot).engine, raw, at, message.len()));
        self.sent += u64::from(status == KVR_OK);
        assert!(status < 0 || message.len() <= KVR_MESSAGE_MAX as usize);
    }

    fn notifs(&mut self, slot: usize) {
        let mut count = 7;
        let at = (&raw mut self.heard).cast();
        let before = self.heard;
        let engine = self.side(slot).engine;
        ok(abi!(kvr_notifs(engine, Some(args::hear), at, &mut count)));
        assert_eq!(self.heard - before, count as u64);
        assert!(self.heard <= self.sent, "{} messages came, {} were sent", self.heard, self.sent);
    }
}
