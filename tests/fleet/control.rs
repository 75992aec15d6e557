//! The control side of every engine: what the host does for real. It drops rails that were lost,
//! connects them anew after a while, gives peers up that cannot be reached, and watches for rails
//! that hang. Handshakes are not played: both sides do their part in one go.

use super::*;

/// Ticks without progress on a rail with work posted until it counts as broken.
const WATCHDOG: u64 = 400;
/// Ticks without any rail until a peer counts as dead.
pub const PEER_TIMEOUT: u64 = 2_500;

/// One lane's rail between two engines.
#[derive(Clone, Copy)]
pub struct Rail {
    pub id: u32,
    pub wires: [SimWire; 2],
    /// Which side still has its end.
    pub held: [bool; 2],
    /// When it is connected anew.
    pub join_at: Option<u64>,
    /// The oldest op of each side at the last look, and since when.
    oldest: [Option<(u32, u64)>; 2],
}

/// Two engines that talk to each other: side 0 prefills, side 1 decodes.
pub struct Pair {
    pub sides: [usize; 2],
    pub up: [bool; 2],
    pub rails: Vec<Rail>,
    next_id: u32,
    /// Since when a side has no rail.
    adrift: [Option<u64>; 2],
    /// When a side learns that the other one has closed the connection.
    told_at: [Option<u64>; 2],
    connect_at: Option<u64>,
    /// Which incarnation of the other one each side knows.
    pub known: [u32; 2],
    /// How often a side has closed a connection.
    pub closes: u32,
    pub closed_at: u64,
    /// Access errors were injected into what a side posts.
    pub access: [bool; 2],
    /// When a message of each side last came, or had a reason not to come: a rail was lost or is
    /// fresh, or one of the two did not run.
    pub talked_at: [u64; 2],
}

impl Pair {
    pub fn new(sides: [usize; 2]) -> Pair {
        Pair {
            sides,
            up: [false; 2],
            rails: Vec::new(),
            next_id: 0,
            adrift: [None; 2],
            told_at: [None; 2],
            connect_at: Some(0),
            known: [0; 2],
            closes: 0,
            closed_at: 0,
            access: [false; 2],
            talked_at: [0; 2],
        }
    }

    pub fn is_up(&self) -> bool {
        self.up == [true; 2]
    }

    pub fn side_of(&self, e: usize) -> usize {
        usize::from(self.sides[1] == e)
    }
}

impl Fleet {
    pub fn pair_of(&self, a: usize, b: usize) -> usize {
        let (p, d) = (a.min(b), a.max(b));
        p * self.plan.decode as usize + d - self.plan.prefill as usize
    }

    /// Slot of the other side's engine.
    pub fn slot(&self, p: usize, side: usize) -> u32 {
        let sides = self.pairs[p].sides;
        World::slot(sides[side], sides[1 - side])
    }

    pub fn core(&self, p: usize, side: usize) -> &Engine {
        &self.world.engines[self.pairs[p].sides[side]]
    }

    /// The control thread of one engine.
    pub fn control(&mut self, e: usize) -> Result<(), String> {
        if !self.now().is_multiple_of(self.sites[e].controls_every) {
            return Ok(());
        }
        if let Some(slot) = self.world.engines[e].next_broken() {
            return Err(format!("engine {e} says that peer {slot} broke the protocol"));
        }
        while let Some(slot) = self.world.engines[e].next_limping() {
            let other = (0..self.world.engines.len()).find(|&b| World::slot(e, b) == slot);
            let Some(other) = other.filter(|&b| b != e) else { continue };
            let p = self.pair_of(e, other);
            let side = self.pairs[p].side_of(e);
            let lost = self.world.engines[e].lost(slot);
            for lane in (0..self.plan.lanes).filter(|l| lost & 1 << l != 0) {
                self.drop_rail(p, side, lane);
            }
        }
        if self.sites[e].controls_every > 1 || self.rng.below(32) == 0 {
            self.world.engines[e].forgive();
        }
        Ok(())
    }

    /// One side lets go of a rail, which is connected anew some time later.
    fn drop_rail(&mut self, p: usize, side: usize, lane: u32) {
        let slot = self.slot(p, side);
        let wire = self.pairs[p].rails[lane as usize].wires[side];
        self.world.fabric.fail_mail(wire);
        if let Some(link) = self.core(p, side).drop_rail(lane, slot) {
            link.close();
        }
        let at = self.now() + 20 + self.rng.below(300);
        self.pairs[p].talked_at = [self.now(); 2];
        let rail = &mut self.pairs[p].rails[lane as usize];
        rail.held[side] = false;
        rail.join_at.get_or_insert(at);
        self.counts.drops += 1;
    }

    fn mail(&mut self, p: usize, wire: SimWire) -> [SimLink<'static>; 2] {
        let [a, b] = self.pairs[p].sides;
        let (sa, sb) = (self.slot(p, 0), self.slot(p, 1));
        let mail = Mail {
            wire,
            delay: self.rng.below(4),
            ack_delay: self.rng.below(6),
            retry: 60 + self.rng.below(100),
        };
        let ends = self.world.fabric.mail((a as u32, sa), (b as u32, sb), mail);
        let (la, lb) = ends.expect("streams for every rail and its successor");
        [la, lb]
    }

    /// Both ends of a fresh rail.
    fn open_rail(&mut self, p: usize, lane: u32, id: u32) -> Rail {
        let wires = self.world.fabric.wire().expect("wires for every rail and its successor");
        for (side, wire) in wires.into_iter().enumerate() {
            let slot = self.slot(p, side);
            let remote = self.pairs[p].sides[1 - side] as u32;
            let core = self.core(p, side);
            let generation = core.peer_state(slot).generation;
            core.connect_rail(lane, (slot, id), generation, |port| {
                assert!(port.connect_over(slot, remote, wire).is_ok());
            });
        }
        Rail { id, wires, held: [true; 2], join_at: None, oldest: [None; 2] }
    }

    fn connect(&mut self, p: usize) {
        for side in 0..2 {
            let (slot, other) = (self.slot(p, side), self.pairs[p].sides[1 - side]);
            let life = self.sites[other].life;
            let reborn = self.pairs[p].known[side] != life;
            self.pairs[p].known[side] = life;
            let core = self.core(p, side);
            let old = core.peer_state(slot);
            let generation = old.generation + u32::from(reborn);
            let down = PeerState { generation, link: Peering::Down, status: Status::Ok };
            if reborn {
                core.set_peer(slot, PeerState { link: Peering::Free, ..down });
            }
            core.set_peer(slot, down);
        }
        let mut links: [Vec<(u32, u32, SimLink<'static>)>; 2] = [Vec::new(), Vec::new()];
        let mut rails = Vec::new();
        for lane in 0..self.plan.lanes {
            let rail = self.open_rail(p, lane, lane);
            for (side, link) in self.mail(p, rail.wires[0]).into_iter().enumerate() {
                links[side].push((lane, lane, link));
            }
            rails.push(rail);
        }
        let windows = [1, 0].map(|far| self.core(p, far).first_window(self.slot(p, far)));
        for (side, links) in links.into_iter().enumerate() {
            let (slot, other) = (self.slot(p, side), self.core(p, 1 - side));
            let window = windows[side];
            self.core(p, side).attach(slot, links, other.name(), window, &[]);
        }
        let pair = &mut self.pairs[p];
        (pair.rails, pair.next_id) = (rails, self.plan.lanes);
        (pair.up, pair.adrift, pair.told_at) = ([true; 2], [None; 2], [None; 2]);
        pair.connect_at = None;
        self.counts.connects += 1;
    }

    /// A handshake that adds a rail to a living connection. Each side tells which rails it holds,
    /// and the other one drops the rest.
    fn join(&mut self, p: usize, lane: u32) {
        for side in 0..2 {
            if self.pairs[p].rails[lane as usize].held[side] {
                self.drop_rail(p, side, lane);
            }
        }
        for side in 0..2 {
            self.core(p, side).fence(lane, self.slot(p, side));
        }
        let id = self.pairs[p].next_id;
        self.pairs[p].next_id += 1;
        let rail = self.open_rail(p, lane, id);
        for (side, link) in self.mail(p, rail.wires[0]).into_iter().enumerate() {
            let slot = self.slot(p, side);
            assert!(self.core(p, side).add_link(slot, lane, id, link).is_ok(), "room for a link");
        }
        self.pairs[p].rails[lane as usize] = rail;
        self.pairs[p].talked_at = [self.now(); 2];
        self.counts.joins += 1;
    }

    /// One side ends a connection; the other one learns of it a little later.
    pub fn close_side(&mut self, p: usize, side: usize) {
        if !self.pairs[p].up[side] {
            return;
        }
        let slot = self.slot(p, side);
        self.core(p, side).drain_stream(slot);
        for link in self.core(p, side).close_peer(slot, Status::Disconnected) {
            link.link.close();
        }
        let at = self.now() + 1 + self.rng.below(60);
        let now = self.now();
        let pair = &mut self.pairs[p];
        pair.up[side] = false;
        for rail in &mut pair.rails {
            rail.held[side] = false;
        }
        pair.closed_at = now;
        pair.closes += 1;
        if pair.up[1 - side] {
            pair.told_at[1 - side] = Some(at);
        } else {
            pair.connect_at = Some(at + 100);
        }
    }

    /// What is due between engines.
    pub fn pairs_tick(&mut self) {
        let now = self.now();
        for p in 0..self.pairs.len() {
            let runs = self.pairs[p].sides.map(|e| self.runs(e));
            if runs != [true; 2] || !self.pairs[p].is_up() {
                self.pairs[p].talked_at = [now; 2];
            }
            for (side, runs) in runs.into_iter().enumerate() {
                if !runs || !self.pairs[p].up[side] {
                    continue;
                }
                let adrift = self.core(p, side).rails(self.slot(p, side)) == 0;
                let pair = &mut self.pairs[p];
                let since = *pair.adrift[side].get_or_insert(now);
                let dead = adrift && now > since + PEER_TIMEOUT;
                if !adrift {
                    pair.adrift[side] = None;
                }
                if dead || pair.told_at[side].is_some_and(|at| now >= at) {
                    self.close_side(p, side);
                }
            }
            if runs != [true; 2] {
                continue;
            }
            if self.pairs[p].up == [false; 2] && self.pairs[p].connect_at.is_some_and(|t| now >= t)
            {
                self.connect(p);
            }
            for lane in 0..self.plan.lanes {
                let due = |r: &Rail| r.join_at.is_some_and(|t| now >= t);
                let pair = &self.pairs[p];
                if pair.is_up() && pair.rails.get(lane as usize).is_some_and(due) {
                    self.join(p, lane);
                }
            }
        }
        if now.is_multiple_of(16) {
            self.watchdog();
        }
    }

    fn watchdog(&mut self) {
        let now = self.now();
        for p in 0..self.pairs.len() {
            for side in 0..2 {
                if !self.pairs[p].up[side] {
                    continue;
                }
                if !self.runs(self.pairs[p].sides[side]) {
                    // Its clocks stood still too.
                    self.pairs[p].rails.iter_mut().for_each(|r| r.oldest[side] = None);
                    continue;
                }
                let slot = self.slot(p, side);
                for lane in 0..self.plan.lanes {
                    let oldest = self.core(p, side).oldest(lane, slot);
                    let kept = &mut self.pairs[p].rails[lane as usize].oldest[side];
                    let hung = match (oldest, *kept) {
                        (Some(op), Some((before, since))) if op == before => now > since + WATCHDOG,
                        (op, _) => {
                            *kept = op.map(|op| (op, now));
                            false
                        }
                    };
                    if hung {
                        *kept = None;
                        self.counts.hung += 1;
                        self.core(p, side).fail_rail(lane, slot);
                    }
                }
            }
        }
    }

    /// An engine dies: its queue pairs are destroyed, its memory is the system's.
    pub fn kill(&mut self, e: usize) {
        let now = self.now();
        for p in 0..self.pairs.len() {
            if self.pairs[p].sides.contains(&e) {
                let side = self.pairs[p].side_of(e);
                self.close_side(p, side);
            }
        }
        self.bury_flights(e);
        self.withdraw_all(e, "its engine had died");
        let until = now + WATCH + self.rng.below(500);
        let site = &mut self.sites[e];
        site.dead_until = Some(until);
        site.life += 1;
        self.counts.kills += 1;
    }

    /// Another engine takes the place of a dead one.
    pub fn bear(&mut self, e: usize) {
        self.world.rebuild(e);
        self.set_habits(e);
        for pair in self.pairs.iter_mut().filter(|pair| pair.sides.contains(&e)) {
            // It knows nobody.
            let side = pair.side_of(e);
            pair.known[side] = 0;
            pair.access[side] = false;
        }
        self.sites[e].dead_until = None;
    }

    /// Whether an engine lives and is not stopped.
    pub fn runs(&self, e: usize) -> bool {
        let site = &self.sites[e];
        site.dead_until.is_none() && self.now() >= site.paused_until
    }
}
