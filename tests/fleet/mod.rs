//! Whole fleets of engines in one process, from one seed: engines that prefill and engines that
//! decode, transfers both ways, every fault at random, and a reference that looks at every byte.

pub mod control;
pub mod faults;
pub mod flight;
pub mod memory;
pub mod messages;
pub mod pace;
pub mod plan;
pub mod regions;
pub mod rest;
pub mod traffic;

pub use crate::sim_support::*;
pub use control::{Pair, PEER_TIMEOUT};
pub use faults::Mend;
pub use flight::{Fate, Flight, Note, Place};
pub use kvrail::engine::peer::{Link as Peering, PeerState};
pub use kvrail::engine::region::View;
pub use kvrail::engine::slot::{Body, RegionRef};
pub use kvrail::handle::Handle;
pub use kvrail::limits::Limits;
pub use kvrail::nic::sim::{Faults, Lateness, Mail, PortConfig, Rng, SimLink, SimWire};
pub use kvrail::nic::WrStatus;
pub use kvrail::status::Status;
pub use kvrail::table::{Direction, Op};
pub use memory::{Region, Watch, Watched, CHUNK};
pub use messages::{Heard, Stream};
pub use pace::END;
pub use plan::{fault, Plan, FAULTS};
pub use regions::Import;
pub use rest::{counted, Rest};
pub use std::collections::{BTreeMap, HashMap};

/// Most ticks that a packet is late.
pub const LATE: u64 = 300;
/// Ticks for which memory that was given back is watched.
pub const WATCH: u64 = LATE + 60;

/// What one engine is to the test.
pub struct Site {
    pub regions: Vec<Region>,
    pub register_at: Vec<u64>,
    /// Incarnations so far.
    pub life: u32,
    pub paused_until: u64,
    pub was_paused_at: u64,
    pub dead_until: Option<u64>,
    pub looks_every: u64,
    /// Ticks between two looks of its control side.
    pub controls_every: u64,
    pub imports: HashMap<(usize, usize), Import>,
    pub retiring: Vec<(View, RegionRef)>,
    pub closing: BTreeMap<usize, (View, u64)>,
    /// Ticks that its rails need for all that it was asked to carry, one after the other.
    pub asked: u64,
}

/// What a run came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub descriptors: u64,
    pub bytes: u64,
    pub ticks: u64,
    pub done: u64,
    pub failed: u64,
    pub released: u64,
    pub notes: u64,
    pub messages: u64,
    pub connects: u64,
    pub joins: u64,
    pub drops: u64,
    pub hung: u64,
    pub kills: u64,
    pub withdrawals: u64,
    pub landed: u64,
    pub fenced: u64,
}

impl Counts {
    pub fn add(&mut self, o: &Counts) {
        let pairs = [
            (&mut self.descriptors, o.descriptors),
            (&mut self.bytes, o.bytes),
            (&mut self.ticks, o.ticks),
            (&mut self.done, o.done),
            (&mut self.failed, o.failed),
            (&mut self.released, o.released),
            (&mut self.notes, o.notes),
            (&mut self.messages, o.messages),
            (&mut self.connects, o.connects),
            (&mut self.joins, o.joins),
            (&mut self.drops, o.drops),
            (&mut self.hung, o.hung),
            (&mut self.kills, o.kills),
            (&mut self.withdrawals, o.withdrawals),
            (&mut self.landed, o.landed),
            (&mut self.fenced, o.fenced),
        ];
        pairs.into_iter().for_each(|(to, n)| *to += n);
    }
}

/// One run.
pub struct Fleet {
    pub plan: Plan,
    pub world: World,
    pub port: PortConfig,
    pub rng: Rng,
    pub pairs: Vec<Pair>,
    pub sites: Vec<Site>,
    pub flights: Vec<Flight>,
    pub watches: Vec<(u32, Watch)>,
    pub notes: HashMap<u64, Note>,
    pub next_note: u64,
    pub sent: BTreeMap<Stream, Heard>,
    pub heard: BTreeMap<Stream, Heard>,
    pub mends: Vec<(u64, Mend)>,
    pub posted: u32,
    /// No more faults and no more transfers: what is there comes to its end.
    pub calm: bool,
    pub counts: Counts,
}

const REGIONS: usize = 2;
const CHUNKS: usize = 10;

fn setup(plan: &Plan, rng: &mut Rng) -> Setup {
    let engines = plan.prefill + plan.decode;
    let pairs = plan.prefill * plan.decode;
    let has = |name| plan.has(name);
    let port = PortConfig {
        window: [u64::MAX, 20_000][rng.below(2) as usize],
        late: plan.naive == 0,
        depth: 2 + rng.below(100) as u32,
        credits: 2 + rng.below(100) as u32,
        batch_ops: 1 + rng.below(64) as u32,
        batch_bytes: 200 + rng.below(20_000),
        rate: 200 + rng.below(8_000),
        delay: rng.below(20),
        signal: 1 + rng.below(16) as u32,
        seed: rng.bits(),
        faults: Faults {
            rail: if has("cut") { 30 } else { 0 },
            full: if has("full") { 40_000 } else { 0 },
            post_rail: if has("cut") { 100 } else { 0 },
        },
    };
    let limits = Limits {
        peers: engines + 1,
        regions: 2 * REGIONS as u32,
        remote_regions: 3 * engines * REGIONS as u32,
        transfers: 32,
        lanes: plan.lanes,
        message_bytes: 2 * MIN_MESSAGES + 100_000 * engines,
    };
    let tuning = kvrail::engine::core::Tuning {
        inline_bytes: rng.below(2) * 4_000,
        stripe_all: plan.stripe == 0,
        background: true,
    };
    Setup {
        engines,
        limits,
        tuning,
        port,
        auto_tick: 0,
        chop: [0, 0, 50, 1_000][rng.below(4) as usize],
        pipes: (3 * pairs * plan.lanes + 8, 4 << 10),
        late: 256,
    }
}

const MIN_MESSAGES: u32 = kvrail::limits::MIN_MESSAGE_BYTES;

impl Fleet {
    pub fn new(plan: &Plan) -> Fleet {
        Fleet::with(plan, |_| {})
    }

    /// A fleet whose set-up is changed before it is made.
    pub fn with(plan: &Plan, change: impl FnOnce(&mut Setup)) -> Fleet {
        let mut rng = Rng::new(plan.seed);
        let mut setup = setup(plan, &mut rng);
        change(&mut setup);
        assert_eq!(setup.limits.check(), Ok(()));
        let world = World::new(setup);
        let n = setup.engines as usize;
        let site = |rng: &mut Rng| Site {
            regions: (0..REGIONS).map(|_| Region::new(CHUNKS)).collect(),
            register_at: vec![0; REGIONS],
            life: 1,
            paused_until: 0,
            was_paused_at: 0,
            dead_until: None,
            looks_every: [1, 1, 7, 60, 400][rng.below(5) as usize],
            controls_every: [1, 1, 12, 40][rng.below(4) as usize],
            imports: HashMap::new(),
            retiring: Vec::new(),
            closing: BTreeMap::new(),
            asked: 0,
        };
        let sites = (0..n).map(|_| site(&mut rng)).collect();
        let (p, d) = (plan.prefill as usize, plan.decode as usize);
        let pairs = (0..p).flat_map(|a| (p..p + d).map(move |b| Pair::new([a, b]))).collect();
        let mut fleet = Fleet {
            plan: plan.clone(),
            world,
            port: setup.port,
            rng,
            pairs,
            sites,
            flights: Vec::new(),
            watches: Vec::new(),
            notes: HashMap::new(),
            next_note: 0,
            sent: BTreeMap::new(),
            heard: BTreeMap::new(),
            mends: Vec::new(),
            posted: 0,
            calm: false,
            counts: Counts::default(),
        };
        (0..n).for_each(|e| fleet.set_habits(e));
        fleet
    }

    pub fn now(&self) -> u64 {
        self.world.fabric.now()
    }

    /// One tick of everything.
    pub fn step(&mut self) -> Result<(), String> {
        self.world.fabric.tick(1);
        self.registers_tick();
        self.pairs_tick();
        self.traffic_tick();
        let n = self.sites.len();
        let first = self.rng.below(n as u64) as usize;
        for e in (0..n).map(|i| (first + i) % n) {
            if self.runs(e) {
                self.world.engines[e].poll();
                self.control(e)?;
            }
        }
        self.messages_tick()?;
        self.flights_tick()?;
        self.withdrawals_tick()?;
        self.faults_tick();
        self.watches_tick(false)?;
        if self.now().is_multiple_of(64) {
            self.notes_tick()?;
        }
        Ok(())
    }

    /// All that was planned, then calm until everything has come to its end, then what must be
    /// back is counted.
    pub fn run(&mut self) -> Result<Counts, String> {
        while self.posted < self.plan.transfers {
            self.step()?;
            let most = self.most_ticks();
            if self.now() > most {
                return Err(format!("{} transfers posted only, in {most} ticks", self.posted));
            }
        }
        self.settle()?;
        self.check_back()?;
        self.part_all()?;
        self.counts.ticks = self.now();
        (self.counts.landed, self.counts.fenced) = self.world.fabric.landed();
        Ok(self.counts)
    }

    /// Calm until everything has come to its end.
    pub fn settle(&mut self) -> Result<(), String> {
        self.calm = true;
        for mend in &mut self.mends {
            mend.0 = 0;
        }
        let until = self.now() + END + self.ticks_left();
        let mut still = 0;
        while still < 1_200 {
            self.step()?;
            let pairs =
                self.pairs.iter().all(|p| p.is_up() && p.rails.iter().all(|r| r.held == [true; 2]));
            let sites = self.sites.iter().all(|s| s.closing.is_empty() && s.retiring.is_empty());
            let notes = self.notes.values().all(|n| n.fate != Fate::Comes || n.got);
            let rest = self.flights.is_empty() && self.watches.is_empty();
            let run = (0..self.sites.len()).all(|e| self.runs(e));
            let all = pairs && sites && notes && rest && run && self.all_heard().is_ok();
            still = if all { still + 1 } else { 0 };
            if self.now() > until {
                return Err(format!(
                    "no end: {} transfers, {} watched, pairs up {pairs}, regions {sites}, \
                     messages {notes}, {:?}",
                    self.flights.len(),
                    self.watches.len(),
                    self.all_heard()
                ));
            }
        }
        Ok(())
    }

    /// What must be back when nothing is under way.
    pub fn check_back(&self) -> Result<(), String> {
        for (e, core) in self.world.engines.iter().enumerate() {
            let used = (core.transfers_used(), core.message_blocks_used());
            if used != (0, (0, 0)) {
                return Err(format!("engine {e} still uses transfers and blocks: {used:?}"));
            }
            if core.spare().0 != core.limits().returns() {
                let (free, of) = (core.spare().0, core.limits().returns());
                return Err(format!("engine {e} has {free} free return entries of {of}"));
            }
            let regions = (core.local.used() as usize, core.remote.used() as usize);
            if regions != (REGIONS, self.sites[e].imports.len()) {
                return Err(format!("engine {e} still uses regions: {regions:?}"));
            }
            let owes: Vec<u32> = (0..core.limits().peers).map(|p| core.owes(p)).collect();
            if owes.iter().any(|&o| o != 0) {
                return Err(format!("engine {e} still owes fences: {owes:?}"));
            }
            for lane in 0..self.plan.lanes {
                let refused = core.with_port(lane, |port| port.refused());
                if refused > 0 {
                    return Err(format!("engine {e} posted {refused} ops of withdrawn memory"));
                }
            }
            let out: Vec<u64> = core.lanes().iter().map(|l| l.outstanding.load(RELAXED)).collect();
            if out.iter().any(|&o| o != 0) {
                return Err(format!("engine {e} still counts bytes in flight: {out:?}"));
            }
        }
        let wires = self.pairs.len() * self.plan.lanes as usize;
        if self.world.fabric.wires_used() != wires {
            let used = self.world.fabric.wires_used();
            return Err(format!("{used} rails are open, of {wires}"));
        }
        Ok(())
    }

    /// Everybody leaves: no rail is left.
    pub fn part_all(&mut self) -> Result<(), String> {
        for p in 0..self.pairs.len() {
            (0..2).for_each(|side| self.close_side(p, side));
        }
        for (e, core) in self.world.engines.iter().enumerate() {
            let (_, window) = core.spare();
            if window != core.limits().spare_window() {
                let of = core.limits().spare_window();
                return Err(format!("engine {e} has {window} spare window bytes of {of}"));
            }
        }
        match (self.world.fabric.wires_used(), self.world.fabric.flying()) {
            (0, 0) => Ok(()),
            left => Err(format!("rails and packets left at the end: {left:?}")),
        }
    }
}

pub const RELAXED: core::sync::atomic::Ordering = core::sync::atomic::Ordering::Relaxed;

/// Runs a plan; a panic is a failure too.
pub fn run(plan: &Plan) -> Result<Counts, String> {
    let run = || {
        let mut fleet = Fleet::new(plan);
        let result = fleet.run();
        result.map_err(|e| format!("tick {}: {e}; {}", fleet.now(), fleet.habits()))
    };
    match std::panic::catch_unwind(run) {
        Ok(result) => result,
        Err(why) => {
            let text = why.downcast_ref::<String>().cloned();
            let text = text.or(why.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            Err(format!("panic: {}", text.unwrap_or_default()))
        }
    }
}

/// What went wrong, without where and how much: a simpler plan that fails otherwise is another one.
fn kind(why: &str) -> String {
    why.chars().filter(|c| !c.is_ascii_digit()).take(24).collect()
}

/// Runs a plan. When it fails, looks for a simpler one that fails so too: what went wrong there,
/// and the command that replays it.
pub fn run_or_shrink(plan: &Plan) -> Result<Counts, String> {
    let first = match run(plan) {
        Ok(counts) => return Ok(counts),
        Err(why) => why,
    };
    eprintln!("fails: {first}\n  {}", plan.command());
    let (mut plan, mut why) = (plan.clone(), first);
    let mut tries = 0;
    'simpler: loop {
        for next in plan.simpler() {
            tries += 1;
            if tries > 120 {
                break 'simpler;
            }
            if let Some(e) = run(&next).err().filter(|e| kind(e) == kind(&why)) {
                (plan, why) = (next, e);
                continue 'simpler;
            }
        }
        break;
    }
    Err(format!("fails: {why}\nreplay with\n  {}", plan.command()))
}
