//! What one run is, made from a seed or from a line that a failing run printed.

use kvrail::nic::sim::Rng;

/// Kinds of faults, one bit each.
pub const FAULTS: [(&str, u32); 14] = [
    ("cut", 1),
    ("hang", 1 << 1),
    ("slow", 1 << 2),
    ("full", 1 << 3),
    ("access", 1 << 4),
    ("kill", 1 << 5),
    ("pause", 1 << 6),
    ("flap", 1 << 7),
    ("break", 1 << 8),
    ("cancel", 1 << 9),
    ("dereg", 1 << 10),
    ("late", 1 << 11),
    ("part", 1 << 12),
    // A WRITE that failed is tried again before the rails that may still bring its packets are
    // fenced.
    ("retry", 1 << 13),
];

/// The bit of a kind of fault.
pub fn fault(name: &str) -> u32 {
    FAULTS.iter().find(|f| f.0 == name).map(|f| f.1).expect("a kind of fault")
}

/// Everything that a run is made from. The same plan gives the same run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub seed: u64,
    /// Engines that prefill: they push, and are pulled from.
    pub prefill: u32,
    /// Engines that decode: they pull, and are pushed to.
    pub decode: u32,
    pub lanes: u32,
    /// Stripe width 0 (every rail) or 1.
    pub stripe: u32,
    /// Transfers to post, prepared ones that are posted again included.
    pub transfers: u32,
    /// Most pairs of one.
    pub ops: u32,
    /// Most bytes of a pair.
    pub len: u32,
    /// Kinds of faults.
    pub faults: u32,
    /// 1: the port denies that anything lands late, so the engine asks for no fence.
    pub naive: u32,
}

impl Plan {
    /// A plan from a seed alone.
    pub fn new(seed: u64) -> Plan {
        let mut rng = Rng::new(seed ^ 0x5eed);
        let sizes = [1, 2, 2, 3, 4, 4, 6, 8, 16];
        let size = |rng: &mut Rng| sizes[rng.below(sizes.len() as u64) as usize];
        let (prefill, decode) = (size(&mut rng), size(&mut rng));
        Plan {
            seed,
            prefill,
            decode,
            lanes: 1 + rng.below(4) as u32,
            stripe: rng.below(2) as u32,
            transfers: 200 + 25 * (prefill + decode),
            ops: [20, 200, 600, 1_200][rng.below(4) as usize],
            len: [8, 40, 100, 250][rng.below(4) as usize],
            // Some runs have few kinds, so that each is seen without the others.
            faults: match rng.below(3) {
                0 => u32::MAX,
                1 => rng.bits() as u32,
                _ => rng.bits() as u32 & rng.bits() as u32,
            } & 0x3fff,
            naive: 0,
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.faults & fault(name) != 0
    }

    fn fields(&mut self) -> [(&'static str, &mut u32); 9] {
        [
            ("prefill", &mut self.prefill),
            ("decode", &mut self.decode),
            ("lanes", &mut self.lanes),
            ("stripe", &mut self.stripe),
            ("transfers", &mut self.transfers),
            ("ops", &mut self.ops),
            ("len", &mut self.len),
            ("faults", &mut self.faults),
            ("naive", &mut self.naive),
        ]
    }

    /// Changes fields by `name=value,...`; faults also by `faults=cut+late`.
    pub fn read(&mut self, line: &str) -> Result<(), String> {
        for part in line.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (name, value) = part.split_once('=').ok_or(format!("{part}: no ="))?;
            let kinds: Option<Vec<u32>> =
                value.split('+').map(|k| FAULTS.iter().find(|f| f.0 == k).map(|f| f.1)).collect();
            let number = match (name, kinds) {
                ("faults", Some(bits)) => bits.into_iter().fold(0, |a, b| a | b),
                _ => value.parse().map_err(|_| format!("{part}: not a number"))?,
            };
            let mut fields = self.fields();
            let known = fields.each_ref().map(|f| f.0);
            match fields.iter_mut().find(|f| f.0 == name) {
                Some(field) => *field.1 = number,
                None => return Err(format!("{name}: known are {}", known.join(", "))),
            }
        }
        Ok(())
    }

    /// The command that runs it again.
    pub fn command(&self) -> String {
        let mut copy = self.clone();
        let fields: Vec<String> =
            copy.fields().iter().map(|(name, v)| format!("{name}={v}")).collect();
        format!(
            "KVRAIL_SEED={} KVRAIL_FLEET={} cargo test --profile fleet --features sim \
             --test fleet_sim replay -- --ignored --nocapture",
            self.seed,
            fields.join(",")
        )
    }

    /// Simpler plans that may fail too, the boldest first.
    pub fn simpler(&self) -> Vec<Plan> {
        let mut all = Vec::new();
        let mut add = |change: &dyn Fn(&mut Plan)| {
            let mut plan = self.clone();
            change(&mut plan);
            if plan != *self {
                all.push(plan);
            }
        };
        for part in [8, 2] {
            add(&|p| p.transfers = (p.transfers / part).max(1));
        }
        add(&|p| (p.prefill, p.decode) = (1, 1));
        add(&|p| p.prefill = (p.prefill / 2).max(1));
        add(&|p| p.decode = (p.decode / 2).max(1));
        for (_, bit) in FAULTS {
            add(&|p| p.faults &= !bit);
        }
        add(&|p| p.lanes = (p.lanes - 1).max(1));
        add(&|p| p.ops = (p.ops / 4).max(1));
        add(&|p| p.len = (p.len / 4).max(1));
        add(&|p| p.transfers = (p.transfers * 3 / 4).max(1));
        all
    }
}
