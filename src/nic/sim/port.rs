//! One lane: a queue pair per peer, with states, a ring of work requests, and faults on demand.

use super::{Carries, Fabric, Rng, SimWire};
use crate::engine::arena::Arena;
use crate::nic::{Batch, Completion, Keys, Port, PostError, RemoteKey, WrStatus};
use crate::table::{Direction, Op};

/// Parts of a tick in which a rail's time is counted, so that short work requests are not rounded
/// up.
const FRACTION: u64 = 1024;

/// How a lane behaves.
#[derive(Clone, Copy, Debug)]
pub struct PortConfig {
    /// Work requests that a queue holds.
    pub depth: u32,
    /// What [`Port::depth`] says: more than `depth` makes posts end with [`PostError::Full`].
    pub credits: u32,
    /// [`Port::batch_ops`].
    pub batch_ops: u32,
    /// [`Port::batch_bytes`].
    pub batch_bytes: u64,
    /// Bytes in a tick on each rail; 0: no time passes.
    pub rate: u64,
    /// Ticks from the last byte to the completion.
    pub delay: u64,
    /// Every `signal`-th work request, and the last of each post, is reported.
    pub signal: u32,
    /// [`Port::window_bytes`].
    pub window: u64,
    /// [`Port::may_land_late`].
    pub late: bool,
    /// Seed of this lane's own randomness.
    pub seed: u64,
    /// Random faults.
    pub faults: Faults,
}

/// Random faults, in a million work requests (or posts).
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// A work request breaks its rail.
    pub rail: u32,
    /// A post is cut short as if the queue were full.
    pub full: u32,
    /// A post finds the rail in error.
    pub post_rail: u32,
}

/// What becomes of WRITEs that were in flight when their rail was closed or died.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lateness {
    /// So many in a million still land.
    pub per_million: u32,
    /// At most so many ticks later.
    pub ticks: u64,
}

/// State of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QpState {
    /// Fresh or closed.
    Reset,
    /// Has its attributes.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send: the only state that takes work requests.
    Rts,
    /// In error: what is queued is flushed.
    Err,
}

impl QpState {
    /// The moves that hardware allows.
    const fn may_become(self, to: QpState) -> bool {
        matches!(
            (self, to),
            (_, QpState::Reset | QpState::Err)
                | (QpState::Reset, QpState::Init)
                | (QpState::Init, QpState::Rtr)
                | (QpState::Rtr, QpState::Rts)
        )
    }
}

#[derive(Clone, Copy, Debug)]
struct Wr {
    number: u32,
    direction: Direction,
    op: Op,
    key: RemoteKey,
    /// When it completes, in fractions of a tick.
    due: u64,
    signalled: bool,
    /// How it ends, whatever the checks say.
    fate: Option<WrStatus>,
}

impl Wr {
    const EMPTY: Wr = Wr {
        number: 0,
        direction: Direction::Read,
        op: Op { local: 0, remote: 0, len: 0, local_region: 0, remote_region: 0, tag: 0 },
        key: RemoteKey { slot: 0, generation: 0, base: 0, len: 0 },
        due: 0,
        signalled: false,
        fate: None,
    };
}

#[derive(Clone, Copy, Debug)]
struct Qp {
    state: QpState,
    remote: u32,
    wire: SimWire,
    /// Nothing completes any more until it is closed.
    hung: bool,
    head: u32,
    count: u32,
    /// Unsignalled work requests since the last signalled one.
    silent: u32,
    /// When the wire is free, in fractions of a tick.
    free_at: u64,
    /// When the rail dies, in fractions of a tick.
    dies_at: u64,
    /// Countdown to the work request that gets `fate`; 0: none.
    doom: u32,
    fate: WrStatus,
    rate: u64,
    delay: u64,
    bytes: u64,
}

/// One lane.
#[derive(Debug)]
pub struct SimPort<'m> {
    fabric: &'m Fabric<'m>,
    engine: u32,
    config: PortConfig,
    qps: &'m mut [Qp],
    ring: &'m mut [Wr],
    next: usize,
    rng: Rng,
    lateness: Lateness,
    fulls: u64,
    refused: u64,
}

impl<'m> SimPort<'m> {
    /// A lane of engine number `engine` with room for `peers` rails. `None`: the arena is too
    /// small.
    pub fn new(
        arena: &mut Arena<'m>,
        fabric: &'m Fabric<'m>,
        engine: u32,
        peers: u32,
        config: PortConfig,
    ) -> Option<SimPort<'m>> {
        let config = PortConfig { depth: config.depth.max(1), ..config };
        let qps = arena.array(peers as usize, |_| Qp {
            state: QpState::Reset,
            remote: 0,
            wire: SimWire::NONE,
            hung: false,
            head: 0,
            count: 0,
            silent: 0,
            free_at: 0,
            dies_at: u64::MAX,
            doom: 0,
            fate: WrStatus::Success,
            rate: config.rate,
            delay: config.delay,
            bytes: 0,
        })?;
        let ring = arena.array(peers as usize * config.depth as usize, |_| Wr::EMPTY)?;
        Some(SimPort {
            fabric,
            engine,
            config,
            qps,
            ring,
            next: 0,
            rng: Rng::new(config.seed),
            lateness: Lateness::default(),
            fulls: 0,
            refused: 0,
        })
    }

    /// State of the queue pair to `peer`.
    pub fn state(&self, peer: u32) -> QpState {
        self.qps.get(peer as usize).map_or(QpState::Reset, |q| q.state)
    }

    /// Moves a queue pair. `Err`: where it is; hardware does not allow that move.
    pub fn modify(&mut self, peer: u32, to: QpState) -> Result<(), QpState> {
        let Some(qp) = self.qps.get_mut(peer as usize) else { return Err(QpState::Reset) };
        if !qp.state.may_become(to) {
            return Err(qp.state);
        }
        qp.state = to;
        if to == QpState::Reset {
            (qp.head, qp.count, qp.silent, qp.free_at) = (0, 0, 0, 0);
            (qp.dies_at, qp.doom, qp.hung) = (u64::MAX, 0, false);
        }
        Ok(())
    }

    /// Brings the rail to `peer` up: its memory is that of engine number `remote`. Faults are
    /// forgotten.
    pub fn connect(&mut self, peer: u32, remote: u32) -> Result<(), QpState> {
        for state in [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts] {
            self.modify(peer, state)?;
        }
        self.qps[peer as usize].remote = remote;
        self.qps[peer as usize].wire = SimWire::NONE;
        Ok(())
    }

    /// The same, over an end of a wire whose other end is the peer's: when one of them closes, what
    /// the other one sends ends with an error.
    pub fn connect_over(&mut self, peer: u32, remote: u32, wire: SimWire) -> Result<(), QpState> {
        self.close(peer);
        self.connect(peer, remote)?;
        self.qps[peer as usize].wire = wire;
        Ok(())
    }

    /// The wire of the rail to `peer`.
    pub fn wire(&self, peer: u32) -> SimWire {
        self.qps.get(peer as usize).map_or(SimWire::NONE, |q| q.wire)
    }

    /// The rail goes silent: nothing completes on it any more until it is closed.
    pub fn hang(&mut self, peer: u32) {
        if let Some(qp) = self.qps.get_mut(peer as usize) {
            qp.hung = true;
        }
    }

    /// Changes what becomes of WRITEs whose rail ends. Nothing lands late before this is called.
    pub fn set_lateness(&mut self, lateness: Lateness) {
        self.lateness = lateness;
    }

    /// Changes a rail's bytes per tick and delay.
    pub fn set_speed(&mut self, peer: u32, rate: u64, delay: u64) {
        if let Some(qp) = self.qps.get_mut(peer as usize) {
            (qp.rate, qp.delay) = (rate, delay);
        }
    }

    /// Changes the random faults of the lane.
    pub fn set_faults(&mut self, faults: Faults) {
        self.config.faults = faults;
    }

    /// The `n`-th work request posted from now on (1: the next one) ends with `status`.
    pub fn fail_nth(&mut self, peer: u32, n: u32, status: WrStatus) {
        if let Some(qp) = self.qps.get_mut(peer as usize) {
            (qp.doom, qp.fate) = (n, status);
        }
    }

    /// The rail dies at a time: what is not done then breaks it.
    pub fn die_at(&mut self, peer: u32, tick: u64) {
        if let Some(qp) = self.qps.get_mut(peer as usize) {
            qp.dies_at = tick * FRACTION;
        }
    }

    /// Work requests in the queue to `peer`.
    pub fn queued(&self, peer: u32) -> u32 {
        self.qps.get(peer as usize).map_or(0, |q| q.count)
    }

    /// Posts that were cut short because the queue was full.
    pub const fn fulls(&self) -> u64 {
        self.fulls
    }

    /// Work requests that named local memory which is not registered.
    pub const fn refused(&self) -> u64 {
        self.refused
    }

    /// Bytes that the rail to `peer` has carried.
    pub fn carried(&self, peer: u32) -> u64 {
        self.qps.get(peer as usize).map_or(0, |q| q.bytes)
    }

    /// Checks and copies, as a NIC would: no byte is touched unless every check passes.
    fn execute(&self, remote_engine: u32, wr: &Wr) -> WrStatus {
        let (op, len) = (&wr.op, u64::from(wr.op.len));
        match wr.fate {
            None | Some(WrStatus::Success | WrStatus::RailError) => {}
            Some(refused) => return refused,
        }
        let ours = self.fabric.pin((self.engine, op.local_region), None, op.local, len);
        let Some(_ours) = ours else { return WrStatus::LocalAccess };
        let key = (remote_engine, wr.key.slot);
        let theirs = self.fabric.pin(key, Some(wr.key.generation), op.remote, len);
        let Some(_theirs) = theirs else { return WrStatus::RemoteAccess };
        let (to, from) = match wr.direction {
            Direction::Read => (op.local, op.remote),
            Direction::Write => (op.remote, op.local),
        };
        // A rail that breaks has carried a part, or all of it and the answer was lost.
        let broken = wr.fate == Some(WrStatus::RailError);
        let part = if broken { u64::from(wr.number % 3) } else { 2 };
        let len = (len * part / 2) as usize;
        let (to, from) = (to as usize as *mut u8, from as usize as *const u8);
        // SAFETY: I9: the simulator copies only inside ranges that the test registered and keeps
        // alive; both are pinned.
        unsafe { core::ptr::copy(from, to, len) };
        if broken {
            WrStatus::RailError
        } else {
            WrStatus::Success
        }
    }

    /// A WRITE whose rail ends may be on its way still.
    fn leave_behind(&mut self, qp: &Qp, wr: &Wr) {
        if wr.direction == Direction::Write && self.rng.hits(self.lateness.per_million) {
            // Most are not very late.
            let most = 1 + self.rng.below(self.lateness.ticks + 1);
            let due = self.fabric.now() + self.rng.below(most);
            let target = (qp.remote, wr.key.slot, wr.key.generation);
            self.fabric.launch((qp.wire, due), self.engine, target, &wr.op);
        }
    }

    fn poll_rail(&mut self, peer: usize, now: u64) -> Option<Completion> {
        loop {
            let depth = self.config.depth;
            let qp = self.qps[peer];
            if qp.count == 0 {
                return None;
            }
            let mut wr = self.ring[peer * depth as usize + qp.head as usize];
            let carries = self.fabric.wires.carries(qp.wire);
            let status = if qp.state == QpState::Err {
                WrStatus::RailError
            } else if qp.hung || carries == Carries::Silence {
                return None;
            } else if qp.dies_at <= now && wr.due > qp.dies_at {
                wr.fate = Some(WrStatus::RailError);
                self.execute(qp.remote, &wr);
                WrStatus::RailError
            } else if wr.due > now {
                return None;
            } else if carries == Carries::Nothing {
                WrStatus::RailError
            } else {
                self.execute(qp.remote, &wr)
            };
            self.refused += u64::from(status == WrStatus::LocalAccess);
            if status == WrStatus::RailError {
                self.leave_behind(&qp, &wr);
            }
            let qp = &mut self.qps[peer];
            qp.head = (qp.head + 1) % depth;
            qp.count -= 1;
            if status == WrStatus::Success {
                qp.bytes += u64::from(wr.op.len);
                if !wr.signalled {
                    continue;
                }
            } else {
                qp.state = QpState::Err;
            }
            return Some(Completion { peer: peer as u32, wr: wr.number, status, vendor: 0 });
        }
    }
}

impl Port for SimPort<'_> {
    fn access_error_breaks_rail(&self) -> bool {
        true
    }

    #[allow(clippy::misnamed_getters, reason = "what a port promises may be more than it has")]
    fn depth(&self) -> u32 {
        self.config.credits
    }

    fn batch_bytes(&self) -> u64 {
        self.config.batch_bytes
    }

    fn window_bytes(&self) -> u64 {
        self.config.window
    }

    fn may_land_late(&self) -> bool {
        self.config.late
    }

    fn batch_ops(&self) -> u32 {
        self.config.batch_ops
    }

    fn post<K: Keys>(&mut self, batch: &Batch<'_, K>) -> Result<(), (u32, PostError)> {
        let n = batch.ops.len() as u32;
        let (peer, depth, faults) = (batch.peer as usize, self.config.depth, self.config.faults);
        let now = self.fabric.now() * FRACTION;
        let Some(qp) = self.qps.get_mut(peer) else { return Err((0, PostError::Rail)) };
        if self.rng.hits(faults.post_rail) {
            qp.state = QpState::Err;
        }
        if qp.state != QpState::Rts {
            return Err((0, PostError::Rail));
        }
        let mut take = n.min(depth - qp.count);
        if self.rng.hits(faults.full) {
            take = take.min(self.rng.below(u64::from(n)) as u32);
        }
        for (i, op) in batch.ops.iter().take(take as usize).enumerate() {
            let i = i as u32;
            let mut fate = self.rng.hits(faults.rail).then_some(WrStatus::RailError);
            if qp.doom > 0 {
                qp.doom -= 1;
                fate = if qp.doom == 0 { Some(qp.fate) } else { fate };
            }
            let wire = (u64::from(op.len) * FRACTION).checked_div(qp.rate).unwrap_or(0);
            qp.free_at = qp.free_at.max(now) + wire;
            qp.silent += 1;
            let signalled = qp.silent >= self.config.signal || i + 1 == take;
            if signalled {
                qp.silent = 0;
            }
            let at = peer * depth as usize + ((qp.head + qp.count) % depth) as usize;
            self.ring[at] = Wr {
                number: batch.first_wr.wrapping_add(i),
                direction: batch.direction,
                op: *op,
                key: batch.keys.remote(op.remote_region),
                due: qp.free_at + qp.delay * FRACTION,
                signalled,
                fate,
            };
            qp.count += 1;
        }
        if take < n {
            self.fulls += 1;
            return Err((take, PostError::Full));
        }
        Ok(())
    }

    fn poll(&mut self) -> Option<Completion> {
        let now = self.fabric.now() * FRACTION;
        for _ in 0..self.qps.len() {
            let peer = self.next;
            self.next = (peer + 1) % self.qps.len();
            if let Some(c) = self.poll_rail(peer, now) {
                return Some(c);
            }
        }
        self.fabric.idle();
        None
    }

    fn close(&mut self, peer: u32) -> bool {
        if let Some(&qp) = self.qps.get(peer as usize) {
            let left = if self.lateness.per_million > 0 { qp.count } else { 0 };
            for i in 0..left {
                let depth = self.config.depth;
                let wr = self.ring[(peer * depth + (qp.head + i) % depth) as usize];
                self.leave_behind(&qp, &wr);
            }
            self.fabric.wires.close(qp.wire);
            self.qps[peer as usize].wire = SimWire::NONE;
        }
        // Any state may become `Reset`; the queue is empty afterwards, so nothing of it can run.
        let _ = self.modify(peer, QpState::Reset);
        true
    }
}
