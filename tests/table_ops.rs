//! `build_ops` against the plain reference in `table_oracle`: seeded, by proptest, and at the
//! edges.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

mod table_oracle;

use core::num::NonZeroU32;
use std::collections::BTreeMap;

use kvrail::status::Status;
use kvrail::table::{
    build_indexed, build_ops, Desc, Known, Listed, Op, PrepareError, Reason, RegionView, Shape,
    SliceSink, Stride, Strided, Summary, Table, TableError, Wanted, NO_SEAMS,
};
use proptest::prelude::*;
use table_oracle::{check, decode, fuzz_ops, Asked, Case, Form, List, Log, Outcome, Region};

const LOCAL: u64 = 1 << 56 | 7 << 24;
const REMOTE: u64 = 2 << 56 | 7 << 24;

fn wanted(op_bytes: u32) -> Wanted {
    Wanted { peer: 3, op_bytes: NonZeroU32::new(op_bytes).unwrap() }
}

fn region(raw: u64, slot: u32, base: u64, len: u64) -> Region {
    Region { raw, view: RegionView { slot, generation: 7, base, len, peer: 3, shift: NO_SEAMS } }
}

fn desc(addr: u64, len: u64, region: u64) -> Desc {
    Desc { addr, len, dev: 0, region }
}

/// Two lists in order, one region of `len` bytes at `base` a side.
fn lists(base: u64, len: u64, local: &[(u64, u64)], remote: &[(u64, u64)], op_bytes: u32) -> Case {
    let side = |raw, slot, pieces: &[(u64, u64)]| List {
        regions: vec![region(raw, slot, base, len)],
        form: Form::Flat(pieces.iter().map(|&(addr, len)| desc(addr, len, raw)).collect()),
        indices: Vec::new(),
    };
    Case {
        local: side(LOCAL, 10, local),
        remote: side(REMOTE, 20, remote),
        listed: true,
        wanted: wanted(op_bytes),
    }
}

fn ops_of(case: &Case) -> Vec<Op> {
    match check(case) {
        Outcome::Built(_, ops) => ops,
        other => panic!("{other:?}"),
    }
}

fn refusal_of(case: &Case) -> Reason {
    match check(case) {
        Outcome::Refused(reason) => reason,
        other => panic!("{other:?}"),
    }
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

#[test]
fn seeded_inputs_equal_the_reference_and_reach_every_outcome() {
    let seed = std::env::var("KVRAIL_SEED").ok().map_or(20_240_607, |s| s.parse().unwrap());
    let rounds = if cfg!(debug_assertions) { 20_000 } else { 400_000 };
    println!("KVRAIL_SEED={seed}");
    let mut random = Random(seed);
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    for round in 0..rounds {
        let len = random.next() % 400;
        let data: Vec<u8> = (0..len).map(|_| (random.next() >> 32) as u8).collect();
        let case = decode(&data);
        let outcome = std::panic::catch_unwind(|| check(&case)).unwrap_or_else(|_| {
            panic!("KVRAIL_SEED={seed}, round {round}: {case:#?}");
        });
        let kind = match outcome {
            Outcome::Table => "bad table".into(),
            Outcome::Refused(r) => format!("{r:?}").split([' ', '(']).next().unwrap().into(),
            Outcome::Built(Summary { ops: 0, .. }, _) => "built nothing".into(),
            Outcome::Built(s, ops) => {
                let most = u64::from(case.wanted.op_bytes.get());
                let joins = ops.windows(2).any(|w| w[1].first_pair() > w[0].first_pair() + 1);
                let cuts = ops.windows(2).any(|w| w[1].first_pair() == w[0].first_pair());
                assert!(s.bytes <= s.ops * most);
                let place = |op: &Op| (op.local_region, op.remote_region);
                let regions = ops.windows(2).any(|w| place(&w[0]) != place(&w[1]));
                format!("built, joins {joins}, cuts {cuts}, regions {regions}")
            }
        };
        *seen.entry(kind).or_default() += 1;
    }
    println!("{seen:#?}");
    let kinds = [
        "bad table",
        "ListLengths",
        "Index",
        "PairLengths",
        "ZeroLength",
        "UnknownRegion",
        "WrongPeer",
        "Outside",
        "built nothing",
        "built, joins true, cuts true, regions true",
        "built, joins true, cuts false, regions false",
        "built, joins false, cuts true, regions true",
    ];
    for kind in kinds {
        assert!(seen.get(kind).is_some_and(|n| *n >= 20), "too few of {kind}: {seen:#?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_input_equals_the_reference(data in proptest::collection::vec(any::<u8>(), 0..400)) {
        fuzz_ops(&data);
    }

    /// Real sizes, which the byte map cannot hold: intervals instead of bytes.
    #[test]
    fn long_runs_are_cut_evenly(
        lens in proptest::collection::vec(1u64..9_000_000, 1..20),
        op_bytes in prop_oneof![
            1u32..5_000_000, Just(1 << 20), Just(4 << 20), Just(65_536), Just(4096), Just(u32::MAX)
        ],
        gap in 0usize..20,
    ) {
        let op_bytes = op_bytes.max(1000);
        let mut at = 0x1_0000;
        let pieces: Vec<(u64, u64)> = lens.iter().enumerate().map(|(k, &len)| {
            at += u64::from(k == gap);
            let piece = (at, len);
            at += len;
            piece
        }).collect();
        let mut log = Log::default();
        let case = lists(0, 1 << 40, &pieces, &pieces, op_bytes);
        let (Form::Flat(l), Form::Flat(r)) = (&case.local.form, &case.remote.form) else {
            unreachable!()
        };
        let mut asked = Asked::of(&case);
        let summary = build_ops(Listed(l), Listed(r), case.wanted, &mut asked, &mut log).unwrap();
        prop_assert_eq!(summary.bytes, lens.iter().sum::<u64>());
        let (head, tail) = pieces.split_at(gap.min(pieces.len()));
        let mut rest = &log.ops[..];
        for run in [head, tail].into_iter().filter(|run| !run.is_empty()) {
            let bytes: u64 = run.iter().map(|p| p.1).sum();
            let (mine, others) = rest.split_at(bytes.div_ceil(u64::from(op_bytes)) as usize);
            rest = others;
            check_cut(mine, run, op_bytes);
        }
        prop_assert!(rest.is_empty());
    }
}

/// `ops` are `run` without a gap, name the pair of their first byte, and are about equally long.
fn check_cut(ops: &[Op], run: &[(u64, u64)], op_bytes: u32) {
    let mut at = run[0].0;
    for op in ops {
        assert_eq!((op.local, op.remote), (at, at));
        let pair = run.iter().position(|p| (p.0..p.0 + p.1).contains(&at)).unwrap();
        let first = ops[0].first_pair() as usize;
        assert_eq!(op.first_pair() as usize, first + pair);
        at += u64::from(op.len);
    }
    let last = run[run.len() - 1];
    assert_eq!(at, last.0 + last.1);
    let (shortest, longest) = (
        ops.iter().map(|op| u64::from(op.len)).min().unwrap(),
        ops.iter().map(|op| u64::from(op.len)).max().unwrap(),
    );
    assert!(longest <= u64::from(op_bytes) && shortest > 0);
    if ops.len() > 1 {
        assert!(shortest * 16 >= u64::from(op_bytes) * 7, "{shortest} beside {op_bytes}");
    }
    if op_bytes.is_multiple_of(4096) && op_bytes >= 65_536 {
        assert!(ops[..ops.len() - 1].iter().all(|op| op.len % 4096 == 0), "not whole pages");
    }
}

#[test]
fn no_length_leaves_an_empty_or_tiny_op() {
    let lens = [1, 4095, 4096, 4097, 65_537, 3 << 20, (10 << 20) + 1, (64 << 20) + 4095];
    for op_bytes in [1 << 10, 4096, 4097, 65_536, 1 << 20, 4 << 20, (4 << 20) - 1, u32::MAX] {
        for len in lens {
            let case = lists(0, 1 << 40, &[(8192, len)], &[(8192, len)], op_bytes);
            let (Form::Flat(l), Form::Flat(r)) = (&case.local.form, &case.remote.form) else {
                unreachable!()
            };
            let mut log = Log::default();
            build_ops(Listed(l), Listed(r), case.wanted, &mut Asked::of(&case), &mut log).unwrap();
            assert_eq!(log.ops.len() as u64, len.div_ceil(u64::from(op_bytes)));
            check_cut(&log.ops, &[(8192, len)], op_bytes);
        }
    }
}

#[test]
fn merges_only_what_goes_on_at_both_sides() {
    let local = [(100, 8), (108, 8), (116, 8), (124, 8), (50, 8)];
    // Goes on; goes on at the local side only; goes on; goes on at the remote side only.
    let remote = [(200, 8), (208, 8), (300, 8), (308, 8), (316, 8)];
    let ops = ops_of(&lists(0, 1000, &local, &remote, 4096));
    let got: Vec<_> = ops.iter().map(|op| (op.local, op.remote, op.len, op.first_pair())).collect();
    assert_eq!(got, [(100, 200, 16, 0), (116, 300, 16, 2), (50, 316, 8, 4)]);
}

#[test]
fn touching_regions_do_not_merge() {
    let mut case = lists(0, 100, &[(92, 8), (100, 8)], &[(92, 8), (100, 8)], 4096);
    case.remote.regions[0].view.len = 1000;
    case.local.regions.push(region(LOCAL + 1, 11, 100, 100));
    let Form::Flat(l) = &mut case.local.form else { unreachable!() };
    l[1].region = LOCAL + 1;
    let slots: Vec<_> = ops_of(&case).iter().map(|op| op.local_region).collect();
    assert_eq!(slots, [10, 11]);
}

#[test]
fn a_region_may_end_at_the_last_address_and_nothing_wraps() {
    let base = u64::MAX - 15;
    let whole = [(base, 16)];
    assert_eq!(ops_of(&lists(base, 16, &whole, &whole, 5)).len(), 4);
    for (addr, len) in [(base, 17), (base + 8, 9), (base + 15, 2), (0, 1), (base - 1, 1)] {
        // A region that claims more than there is ends at the last address too.
        for claimed in [16, 17, u64::MAX] {
            let case = lists(base, claimed, &[(addr, len)], &[(addr, len)], 5);
            let want = Reason::Outside { addr, len, base, region_len: 16 };
            assert_eq!(refusal_of(&case), want);
        }
    }
    for len in [u64::MAX, 1 << 63] {
        let case = lists(4096, 4096, &[(5000, len)], &[(5000, len)], 5);
        assert!(matches!(refusal_of(&case), Reason::Outside { addr: 5000, .. }));
    }
}

#[test]
fn a_zero_pair_is_named() {
    let pieces = [(0, 4096), (4096, 0), (8192, 4096)];
    let case = lists(0, 1 << 20, &pieces, &pieces, 4096);
    let mut log = Log::default();
    let (Form::Flat(l), Form::Flat(r)) = (&case.local.form, &case.remote.form) else {
        unreachable!()
    };
    let e =
        build_ops(Listed(l), Listed(r), case.wanted, &mut Asked::of(&case), &mut log).unwrap_err();
    assert_eq!((e.status, e.pair, e.side), (Status::Invalid, 1, None));
    assert_eq!(
        e.to_string(),
        "pair 1: 0 bytes, at least 1 is needed: leave the pair out of both lists"
    );
    assert_eq!(refusal_of(&case), Reason::ZeroLength);
}

#[test]
fn handle_zero_is_stale_even_as_the_first() {
    let mut case = lists(0, 4096, &[(0, 8)], &[(0, 8)], 4096);
    let Form::Flat(l) = &mut case.local.form else { unreachable!() };
    l[0].region = 0;
    assert_eq!(refusal_of(&case), Reason::UnknownRegion { region: 0 });
    let Form::Flat(l) = &mut case.local.form else { unreachable!() };
    l[0].region = u64::MAX;
    assert_eq!(refusal_of(&case), Reason::UnknownRegion { region: u64::MAX });
}

#[test]
fn no_handle_finds_a_vacant_place() {
    for places in [2, 64] {
        let known: Vec<Known> = (0..places).map(Known::vacant).collect();
        for raw in [0, LOCAL, REMOTE, u64::MAX - 1, u64::MAX] {
            assert_eq!(Known::find(&known, raw), None, "{raw:#x} among {places}");
        }
    }
}

fn strided(parts: Vec<Stride>, indices: Vec<u32>) -> List {
    let regions = vec![region(LOCAL, 10, 0, 1 << 20)];
    List { regions, form: Form::Strided(parts), indices }
}

fn part(base: u64, stride: u64, count: u64) -> Stride {
    Stride { base, len: 16, stride, count, region: LOCAL }
}

/// The strided list at both sides.
fn both(list: List) -> Case {
    let mut remote = list.clone();
    remote.regions[0].raw = REMOTE;
    if let Form::Strided(parts) = &mut remote.form {
        parts.iter_mut().for_each(|s| s.region = REMOTE);
    }
    Case { local: list, remote, listed: false, wanted: wanted(4096) }
}

#[test]
fn strides_of_all_kinds() {
    // Equal counts, a short last part, and ragged with empty parts: every index, then in reverse.
    for counts in [
        vec![4, 4, 4],
        vec![4, 4, 1],
        vec![1, 1, 1],
        vec![2, 2, 5],
        vec![0, 3, 0, 0, 5, 1, 0],
        vec![7],
    ] {
        for stride in [0, 1, 15, 16, 17, 400] {
            let parts = (0u64..).zip(&counts).map(|(k, &n)| part(k * 10_000, stride, n)).collect();
            let total: u64 = counts.iter().sum();
            let mut indices: Vec<u32> = (0..total as u32).collect();
            indices.extend(indices.clone().iter().rev());
            let ops = ops_of(&both(strided(parts, indices.clone())));
            if stride == 17 {
                assert_eq!(ops.len(), indices.len());
            }
        }
    }
}

#[test]
fn an_index_equal_to_the_count_is_out_of_range() {
    for counts in [vec![4, 4], vec![4, 2], vec![2, 5], vec![1, 1], vec![]] {
        let total: u64 = counts.iter().sum();
        let parts: Vec<_> = counts.iter().map(|&n| part(0, 16, n)).collect();
        for index in [total as u32, u32::MAX] {
            let case = both(strided(parts.clone(), vec![index]));
            let Reason::Index(out) = refusal_of(&case) else { panic!() };
            assert_eq!((out.index, out.table_len), (u64::from(index), total));
        }
    }
}

#[test]
fn a_table_of_six_million_blocks_is_not_expanded() {
    let parts: Vec<_> = (0..80).map(|k| part(k * 75_000 * 64, 64, 75_000)).collect();
    let mut ends = vec![0; parts.len()];
    let shape = Shape::of(&parts, &mut ends).unwrap();
    assert_eq!(shape.total(), 6_000_000);
    let table = Table::Strided(Strided::new(&parts, &ends, shape));
    let indices: Vec<u32> = (0..6_000_000).step_by(74_999).collect();
    let flat: Vec<Desc> = (0..indices.len() as u64).map(|k| desc(k * 32, 16, REMOTE)).collect();
    let numbers: Vec<u32> = (0..indices.len() as u32).collect();
    let mut case = both(strided(Vec::new(), Vec::new()));
    case.local.regions[0].view.len = 1 << 40;
    let mut log = Log::default();
    let remote = (Table::Flat(&flat), &numbers[..]);
    build_indexed((table, &indices), remote, wanted(4096), &mut Asked::of(&case), &mut log)
        .unwrap();
    let want: Vec<u64> = indices.iter().map(|&i| u64::from(i) * 64).collect();
    assert_eq!(log.ops.iter().map(|op| op.local).collect::<Vec<_>>(), want);
}

#[test]
fn parts_that_make_no_table() {
    let of = |parts: &[Stride]| Shape::of(parts, &mut vec![0; parts.len()]);
    let ok = part(0, 16, 4);
    let wraps = part(u64::MAX - 30, 16, 2);
    assert_eq!(of(&[ok, wraps]), Err(TableError::Wraps { part: 1, stride: wraps }));
    assert!(of(&[part(u64::MAX - 31, 16, 2)]).is_ok(), "ends at 2^64 exactly");
    assert!(of(&[part(u64::MAX, u64::MAX, 0)]).is_ok(), "has no descriptor");
    assert!(of(&[part(0, u64::MAX, 3)]).is_err());
    assert!(of(&[part(0, 0, u64::MAX)]).is_ok());
    assert_eq!(of(&[part(0, 0, u64::MAX), ok]), Err(TableError::Count { part: 1 }));
    let zero = Stride { len: 0, ..ok };
    assert_eq!(of(&[ok, ok, zero]), Err(TableError::ZeroLength { part: 2 }));
    let short = Shape::of(&[ok, ok], &mut [0]);
    assert_eq!(short, Err(TableError::Ends { parts: 2, given: 1 }));
    for e in [of(&[wraps]), of(&[zero]), short] {
        let e = e.unwrap_err();
        assert_eq!(e.status(), Status::Invalid);
        assert!(e.to_string().contains(": "), "{e}");
    }
}

#[test]
fn a_full_sink_says_so() {
    let pieces = [(0, 64), (128, 64)];
    let case = lists(0, 4096, &pieces, &pieces, 16);
    let (Form::Flat(l), Form::Flat(r)) = (&case.local.form, &case.remote.form) else {
        unreachable!()
    };
    for room in 0..=8 {
        let mut ops = vec![bytemuck::Zeroable::zeroed(); room];
        let mut sink = SliceSink::new(&mut ops);
        let got = build_ops(Listed(l), Listed(r), case.wanted, &mut Asked::of(&case), &mut sink);
        assert_eq!(sink.ops().len(), room);
        if room == 8 {
            assert_eq!(got.unwrap().ops, 8);
            continue;
        }
        let e: PrepareError = got.unwrap_err();
        assert_eq!((e.status, e.pair), (Status::Capacity, room as u64 / 4));
        assert!(
            e.to_string().contains(&format!("full after {room} ops: at most {room} ops")),
            "{e}"
        );
    }
}

#[test]
fn no_pairs_make_no_ops() {
    let case = lists(0, 4096, &[], &[], 16);
    assert!(ops_of(&case).is_empty());
    assert_eq!(
        refusal_of(&lists(0, 4096, &[(0, 1)], &[], 16)),
        Reason::ListLengths { local: 1, remote: 0 }
    );
}
