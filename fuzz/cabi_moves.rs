//! Tables, transfers and messages of the `cabi` fuzz target.

use crate::cabi_args::{self as args, abi, ok};
use crate::cabi_body::World;
use crate::cabi_model::{descriptor, Kind, Table, Target, Transfer};
use crate::draw::Draw;
use core::ptr::null;
use kvrail_cabi::{notify::*, table::*, transfer::*, types::*};

impl World {
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

    pub(crate) fn table(&mut self, slot: usize, draw: &mut Draw) {
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

    pub(crate) fn table_destroy(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Table, draw);
        let side = self.side(slot);
        let status = abi!(kvr_table_destroy(side.engine, raw));
        assert_eq!(status != KVR_OK, side.objects.gone(Kind::Table, raw), "table {raw:#x}");
        side.objects.tables.remove(&raw);
    }

    pub(crate) fn prepare(&mut self, slot: usize, draw: &mut Draw) {
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

    pub(crate) fn prepare_descs(&mut self, slot: usize, draw: &mut Draw) {
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

    pub(crate) fn post(&mut self, slot: usize, draw: &mut Draw) {
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
        self.sent += u64::from(!how.is_multiple_of(4));
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

    pub(crate) fn check(&mut self, slot: usize, draw: &mut Draw) {
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

    pub(crate) fn cancel(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Transfer, draw);
        let side = self.side(slot);
        let status = abi!(kvr_transfer_cancel(side.engine, raw));
        assert!(status < 0 || !side.objects.gone(Kind::Transfer, raw), "{raw:#x} was cancelled");
    }

    pub(crate) fn release(&mut self, slot: usize, draw: &mut Draw) {
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

    pub(crate) fn notify(&mut self, slot: usize, draw: &mut Draw) {
        let raw = self.pick(slot, Kind::Peer, draw);
        let message = args::message(draw.byte(), draw);
        let at = message.as_ptr().cast();
        let status = abi!(kvr_notify(self.side(slot).engine, raw, at, message.len()));
        self.sent += u64::from(status == KVR_OK);
        assert!(status < 0 || message.len() <= KVR_MESSAGE_MAX);
    }

    pub(crate) fn notifs(&mut self, slot: usize) {
        let mut count = 7;
        let at = (&raw mut self.heard).cast();
        let before = self.heard;
        let engine = self.side(slot).engine;
        ok(abi!(kvr_notifs(engine, Some(args::hear), at, &mut count)));
        assert_eq!(self.heard - before, count as u64);
        assert!(self.heard <= self.sent, "{} messages came, {} were sent", self.heard, self.sent);
    }
}
