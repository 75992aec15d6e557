//! Faults at random.

use super::*;

impl Fleet {
    /// How the lanes of an engine behave, from the start or from its rebirth on.
    pub fn set_habits(&mut self, e: usize) {
        let lateness =
            Lateness { per_million: if self.plan.has("late") { 400_000 } else { 0 }, ticks: LATE };
        for lane in 0..self.plan.lanes {
            self.world.engines[e].with_port(lane, |port| port.set_lateness(lateness));
        }
    }

    /// Lets a fault happen now and then.
    pub fn faults_tick(&mut self) {
        let now = self.now();
        for at in (0..self.mends.len()).rev() {
            if self.mends[at].0 <= now {
                let (_, mend) = self.mends.swap_remove(at);
                self.mend(mend);
            }
        }
        for e in 0..self.sites.len() {
            if self.sites[e].dead_until.is_some_and(|t| now >= t) {
                self.bear(e);
            }
        }
        if self.calm || self.rng.below(25) > 0 {
            return;
        }
        let (_, bit) = FAULTS[self.rng.below(FAULTS.len() as u64) as usize];
        if self.plan.faults & bit == 0 {
            return;
        }
        let p = self.rng.below(self.pairs.len() as u64) as usize;
        let side = self.rng.below(2) as usize;
        let e = self.pairs[p].sides[side];
        if bit == fault("kill") {
            if self.rng.below(2) == 0 && self.sites[e].dead_until.is_none() {
                self.kill(e);
            }
        } else if bit == fault("pause") {
            let long = self.rng.below(12) == 0;
            let ticks = 20 + self.rng.below(if long { 8_000 } else { 900 });
            self.sites[e].paused_until = now + ticks;
            self.sites[e].was_paused_at = now + ticks;
        } else if bit == fault("part") {
            if self.rng.below(4) == 0 && self.runs(e) {
                self.close_side(p, side);
            }
        } else if bit == fault("dereg") {
            self.start_withdrawal(e);
        } else if self.pairs[p].is_up() {
            self.rail_fault(bit, p, side);
        }
    }

    fn rail_fault(&mut self, bit: u32, p: usize, side: usize) {
        let now = self.now();
        let all = self.rng.below(5) == 0;
        let only = self.rng.below(u64::from(self.plan.lanes)) as u32;
        let slot = self.slot(p, side);
        let how = self.rng.bits();
        for lane in (0..self.plan.lanes).filter(|&l| all || l == only) {
            let rail = self.pairs[p].rails[lane as usize];
            if !rail.held[side] {
                continue;
            }
            let wire = rail.wires[side];
            let fabric = self.world.fabric;
            if bit == fault("cut") {
                fabric.cut(wire);
            } else if bit == fault("hang") && how.is_multiple_of(2) {
                fabric.mute(wire, true);
            } else if bit == fault("hang") {
                self.core(p, side).with_port(lane, |port| port.hang(slot));
            } else if bit == fault("flap") {
                fabric.mute(wire, true);
                let at = now + 3 + how % 250;
                self.mends.push((at, Mend::Unmute(wire)));
            } else if bit == fault("slow") {
                let (rate, delay) = (self.port.rate / 8, self.port.delay + 5);
                self.core(p, side).with_port(lane, |port| port.set_speed(slot, rate.max(1), delay));
                self.mends.push((now + 300, Mend::Speed(p, side, lane)));
            } else if bit == fault("access") {
                let n = 1 + how as u32 % 20;
                let core = self.core(p, side);
                core.with_port(lane, |port| port.fail_nth(slot, n, WrStatus::RemoteAccess));
                self.pairs[p].access[side] = true;
            } else if bit == fault("break") {
                fabric.fail_mail(wire);
            }
        }
    }

    fn mend(&mut self, mend: Mend) {
        match mend {
            Mend::Unmute(wire) => self.world.fabric.mute(wire, false),
            Mend::Speed(p, side, lane) => {
                let (slot, port) = (self.slot(p, side), self.port);
                self.core(p, side).with_port(lane, |q| q.set_speed(slot, port.rate, port.delay));
            }
        }
    }
}

/// What mends itself.
pub enum Mend {
    Unmute(SimWire),
    Speed(usize, usize, u32),
}
