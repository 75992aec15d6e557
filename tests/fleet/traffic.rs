//! Transfers: made, posted, cancelled, released, and checked byte by byte.

use super::*;

/// Transfers that one engine has at a time.
const AT_ONCE: usize = 6;
/// Ticks without progress until the stall watch ends a transfer.
const STALL: u64 = 5_000;
/// Ticks without progress after which a transfer hangs.
const HANG: u64 = STALL + 1_500;
/// Ticks that the message of a transfer that is done may take: its receiver may be stopped.
const NOTE: u64 = 12_000;

impl Fleet {
    /// Posts new transfers, and messages without one.
    pub fn traffic_tick(&mut self) {
        if self.calm {
            return;
        }
        for _ in 0..self.world.engines.len() {
            let p = self.rng.below(self.pairs.len() as u64) as usize;
            let side = self.rng.below(2) as usize;
            let from = self.pairs[p].sides[side];
            if !self.runs(from) || self.pairs[p].known[side] != self.other_life(p, side) {
                continue;
            }
            if self.rng.below(30) == 0 {
                self.send_alone(p, side);
            }
            let mine = self.flights.iter().filter(|f| f.from == from).count();
            if self.posted >= self.plan.transfers || mine >= AT_ONCE || self.rng.below(2) == 0 {
                continue;
            }
            let Some(flight) = self.prepare(p, side) else { continue };
            if let Err(flight) = self.post(flight) {
                self.scrap(*flight);
            }
        }
    }

    fn other_life(&self, p: usize, side: usize) -> u32 {
        self.sites[self.pairs[p].sides[1 - side]].life
    }

    /// A transfer that is at rest is released, its places are free.
    pub fn scrap(&mut self, flight: Flight) {
        let released = self.world.engines[flight.from].release(flight.handle.raw());
        assert!(released.is_ok(), "a transfer at rest is released: {:?}", released.err());
        self.give_chunk(flight.origin());
        self.give_chunk(flight.destination());
    }

    /// Looks at every transfer.
    pub fn flights_tick(&mut self) -> Result<(), String> {
        let now = self.now();
        for at in (0..self.flights.len()).rev() {
            let from = self.flights[at].from;
            if !self.runs(from) {
                self.flights[at].moved_at = now;
                continue;
            }
            if self.plan.has("cancel") && !self.calm && self.rng.below(600) == 0 {
                let flight = &mut self.flights[at];
                flight.cancelled = true;
                self.world.engines[from].cancel(flight.handle.raw()).expect("a live handle");
                if self.rng.below(2) == 0 {
                    self.flights[at].releasing = Some(now);
                }
            }
            if self.flights[at].releasing.is_some() {
                self.try_release(at)?;
                continue;
            }
            let flight = &self.flights[at];
            let status = self.world.engines[from].check(flight.handle.raw());
            match status.map_err(|s| format!("check says {s:?}"))? {
                Status::InProgress => self.under_way(at)?,
                Status::Ok => self.done(at)?,
                status => self.failed(at, status)?,
            }
        }
        Ok(())
    }

    fn under_way(&mut self, at: usize) -> Result<(), String> {
        let now = self.now();
        let flight = &mut self.flights[at];
        if !now.is_multiple_of(16) {
            return Ok(());
        }
        let core = &self.world.engines[flight.from];
        let info = core.info(flight.handle.raw()).map_err(|s| format!("info says {s:?}"))?;
        if info.bytes_done != flight.left {
            (flight.left, flight.moved_at) = (info.bytes_done, now);
        }
        let (idle, all) = (now - flight.moved_at, info.bytes_done == info.bytes);
        // Without debts the last claim that ended handed the message over.
        let owing = core.lanes().iter().any(|l| l.owing.load(RELAXED) > 0);
        if all && !owing && flight.note.is_some() && flight.behind.is_none() {
            let stream = (flight.from, self.sites[flight.from].life, flight.to, flight.to_life);
            flight.behind = Some(self.sent.get(&stream).map_or(0, |h| h.last));
        }
        if idle > STALL {
            let index = flight.handle.index();
            if let Some(mark) = core.mark(index) {
                flight.stalled |= core.expire(index, mark);
            }
        }
        if idle > HANG {
            return Err(format!("hangs: {}", self.describe(at)));
        }
        Ok(())
    }

    pub fn describe(&self, at: usize) -> String {
        let f = &self.flights[at];
        let p = self.pair_of(f.from, f.to);
        let side = self.pairs[p].side_of(f.from);
        let core = &self.world.engines[f.from];
        let rails: Vec<_> = self.pairs[p].rails.iter().map(|r| (r.id, r.held)).collect();
        format!(
            "{:?} {} -> {} of {} pairs, posted at {}, now {}: {:?}; up {:?}, rails here {:b}, \
             there {:b}, owes {:b}, {:?}",
            f.direction,
            f.from,
            f.to,
            f.pieces.len(),
            f.posted_at,
            self.now(),
            core.info(f.handle.raw()),
            self.pairs[p].up,
            core.rails(self.slot(p, side)),
            self.core(p, 1 - side).rails(self.slot(p, 1 - side)),
            core.owes(self.slot(p, side)),
            rails,
        )
    }

    /// The bytes at the destination, if its memory is still what it was.
    fn compare(&self, flight: &Flight) -> Result<(), String> {
        let Some(region) = self.region(flight.destination()) else { return Ok(()) };
        let now = region.bytes(flight.destination().1.chunk, flight.len);
        if now == flight.expected {
            return Ok(());
        }
        let at = (0..flight.len).find(|&i| now[i] != flight.expected[i]).unwrap_or(0);
        Err(format!(
            "byte {at} of {} is {:#x}, not {:#x} (poison {:#x}): {:?} {} -> {}, posted at {}",
            flight.len,
            now[at],
            flight.expected[at],
            flight.poison,
            flight.direction,
            flight.from,
            flight.to,
            flight.posted_at
        ))
    }

    pub fn compare_at(&self, at: usize) -> Result<(), String> {
        self.compare(&self.flights[at])
    }

    /// From now on nobody may touch a place.
    fn guard(&mut self, (e, place): (usize, Place), len: usize, why: &str) {
        let byte = self.rng.bits() as u8;
        let Some(region) = self.region((e, place)) else { return };
        region.fill(place.chunk, len, byte);
        let until = self.now() + if self.rng.below(3) == 0 { 0 } else { WATCH };
        self.watch(e, place, until, Watched::Still(byte, len), why);
    }

    fn watch(&mut self, engine: usize, place: Place, until: u64, what: Watched, why: &str) {
        let why = format!("{why}, at {}", self.now());
        let Place { region, chunk, epoch } = place;
        self.watches.push((epoch, Watch { engine, region, chunk, until, what, why }));
    }

    fn close_note(&mut self, id: Option<u64>, fate: Fate) -> Result<(), String> {
        let (now, Some(id)) = (self.now(), id) else { return Ok(()) };
        let Some(note) = self.notes.get_mut(&id) else { return Ok(()) };
        if note.got && fate == Fate::Never {
            return Err(format!("message {id} of a transfer that failed has arrived"));
        }
        let alive = self.sites[note.to].life == note.to_life;
        note.fate = if fate == Fate::Comes && !alive { Fate::Perhaps } else { fate };
        note.due = now + NOTE;
        if note.got {
            // Kept, so that a second one is noticed.
            note.due = u64::MAX;
        }
        Ok(())
    }

    fn done(&mut self, at: usize) -> Result<(), String> {
        let flight = self.flights.swap_remove(at);
        self.compare(&flight).map_err(|e| format!("done, but {e}"))?;
        let info = self.world.engines[flight.from].info(flight.handle.raw());
        let whole = info.is_ok_and(|i| i.bytes_done == i.bytes);
        if !whole {
            return Err(format!("done, but its counts are {info:?}"));
        }
        self.close_note(flight.note, Fate::Comes)?;
        self.counts.done += 1;
        let again = !self.calm
            && self.posted < self.plan.transfers
            && self.sites[flight.to].life == flight.to_life
            && self.rng.below(4) == 0;
        if again {
            return match self.post(flight) {
                Ok(()) => Ok(()),
                Err(flight) => {
                    self.scrap(*flight);
                    Ok(())
                }
            };
        }
        let released = self.world.engines[flight.from].release(flight.handle.raw());
        released.map_err(|s| format!("release of a transfer that is done says {s:?}"))?;
        self.give_chunk(flight.origin());
        self.guard(flight.destination(), flight.len, "touched after done");
        Ok(())
    }

    /// What an error status must have come from.
    fn may_fail(&self, flight: &Flight, status: Status) -> bool {
        let p = self.pair_of(flight.from, flight.to);
        let pair = &self.pairs[p];
        let side = pair.side_of(flight.from);
        let withdrawn = |e: usize, place: Place| {
            let site = &self.sites[e];
            site.regions[place.region].epoch != place.epoch
                || site.closing.contains_key(&place.region)
        };
        let (here, there) =
            (withdrawn(flight.from, flight.local), withdrawn(flight.to, flight.remote));
        match status {
            Status::Cancelled => flight.cancelled || here || there,
            Status::RemoteAccess => pair.access[side] || there,
            Status::Disconnected => pair.closed_at >= flight.posted_at,
            Status::Stalled => {
                let paused = self.sites[flight.to].was_paused_at >= flight.posted_at;
                flight.stalled && (paused || self.waits_for_message(flight))
            }
            _ => false,
        }
    }

    fn failed(&mut self, at: usize, status: Status) -> Result<(), String> {
        let mut flight = self.flights.swap_remove(at);
        if !self.may_fail(&flight, status) {
            self.flights.push(flight);
            let last = self.flights.len() - 1;
            return Err(format!("ended with {status:?} for no reason: {}", self.describe(last)));
        }
        let info = self.world.engines[flight.from].info(flight.handle.raw());
        let info = info.map_err(|s| format!("info says {s:?}"))?;
        let all_there = info.bytes_done == info.bytes;
        let fate = if all_there { Fate::Perhaps } else { Fate::Never };
        self.close_note(flight.note, fate)?;
        self.compare_arrived(&flight, status)?;
        self.counts.failed += 1;
        let p = self.pair_of(flight.from, flight.to);
        let slot = self.slot(p, self.pairs[p].side_of(flight.from));
        let write = flight.direction == Direction::Write;
        // What a WRITE left behind may land until the rails that failed are fenced.
        let fenced = self.world.engines[flight.from].owes(slot) == 0 && self.pairs[p].is_up();
        let again = !write || fenced || self.plan.has("retry");
        if again && !self.calm && self.posted < self.plan.transfers && self.rng.below(4) == 0 {
            // The same bytes: the target may be looking at them.
            flight.repeat = write;
            match self.post(flight) {
                Ok(()) => return Ok(()),
                Err(refused) => flight = *refused,
            }
        }
        let released = self.world.engines[flight.from].release(flight.handle.raw());
        released.map_err(|s| format!("release of a failed transfer says {s:?}"))?;
        self.abandon(flight, "touched after an error");
        Ok(())
    }

    /// Of a transfer that failed: the pairs that are said to have arrived are in place.
    fn compare_arrived(&self, flight: &Flight, status: Status) -> Result<(), String> {
        let core = &self.world.engines[flight.from];
        let mut arrived = vec![true; flight.pieces.len()];
        let missing = core.missing(flight.handle.raw(), |first, last| {
            arrived[first as usize..=last as usize].fill(false);
        });
        missing.map_err(|s| format!("missing says {s:?}"))?;
        let Some(region) = self.region(flight.destination()) else { return Ok(()) };
        let now = region.bytes(flight.destination().1.chunk, flight.len);
        for (i, &(_, to, n)) in flight.pieces.iter().enumerate().filter(|(i, _)| arrived[*i]) {
            let range = to as usize..(to + n) as usize;
            if now[range.clone()] != flight.expected[range] {
                return Err(format!("{status:?}: pair {i} is not there, though it is said to be"));
            }
        }
        Ok(())
    }

    /// Nobody asks for a transfer any more, which was released; a WRITE may still be landing.
    fn abandon(&mut self, flight: Flight, why: &str) {
        self.give_chunk(flight.origin());
        let (e, place) = flight.destination();
        match flight.direction {
            Direction::Read => self.guard((e, place), flight.len, why),
            Direction::Write => {
                let poison = vec![flight.poison; flight.len];
                let until = self.now() + WATCH + PEER_TIMEOUT;
                let what = Watched::Either(poison, flight.expected);
                if self.region((e, place)).is_some() {
                    self.watch(e, place, until, what, "garbage after a WRITE that failed");
                }
            }
        }
    }

    fn try_release(&mut self, at: usize) -> Result<(), String> {
        let now = self.now();
        let flight = &self.flights[at];
        let (core, raw) = (&self.world.engines[flight.from], flight.handle.raw());
        let since = flight.releasing.unwrap_or(now);
        if now > since + 40 {
            core.evict(raw).map_err(|s| format!("evict says {s:?}"))?;
        }
        let before = core.check(raw).map_err(|s| format!("check says {s:?}"))?;
        match core.release(raw) {
            Ok(_) => {}
            Err(Status::Busy) if now <= since + 45 => return Ok(()),
            Err(s) => return Err(format!("release says {s:?}: {}", self.describe(at))),
        }
        let flight = self.flights.swap_remove(at);
        self.counts.released += 1;
        if before == Status::Ok {
            self.close_note(flight.note, Fate::Comes)?;
            self.compare(&flight).map_err(|e| format!("done, but {e}"))?;
        } else {
            self.close_note(flight.note, Fate::Perhaps)?;
        }
        self.abandon(flight, "touched after release");
        Ok(())
    }

    /// An engine dies, and its transfers with it. What its WRITEs left at its peers is theirs again
    /// when they have closed their ends.
    pub fn bury_flights(&mut self, e: usize) {
        for at in (0..self.flights.len()).rev() {
            if self.flights[at].from == e {
                let flight = self.flights.swap_remove(at);
                let _ = self.close_note(flight.note, Fate::Perhaps);
                self.abandon(flight, "garbage after its engine died");
            }
        }
        for note in self.notes.values_mut().filter(|n| n.to == e && n.fate == Fate::Comes) {
            note.fate = Fate::Perhaps;
        }
    }

    /// Looks at what nobody may touch.
    pub fn watches_tick(&mut self, all: bool) -> Result<(), String> {
        let now = self.now();
        for at in (0..self.watches.len()).rev() {
            let (epoch, watch) = &self.watches[at];
            if watch.until > now && !all {
                continue;
            }
            let region = &self.sites[watch.engine].regions[watch.region];
            if region.epoch == *epoch {
                if let Some(wrong) = watch.wrong(region) {
                    return Err(wrong);
                }
            }
            if watch.until > now {
                continue;
            }
            let (epoch, watch) = self.watches.swap_remove(at);
            let place = Place { region: watch.region, chunk: watch.chunk, epoch };
            self.give_chunk((watch.engine, place));
        }
        Ok(())
    }
}
