//! Lists whose runs are short and whose regions change with each run: no pair may be made an op
//! many times over.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests fail by panicking")]

use core::num::NonZeroU32;

use kvrail::table::{
    build_ops, Desc, Full, Known, Listed, Op, OpSink, RegionView, Regions, Side, Wanted,
};

const SPAN: u64 = 1 << 20;
const LAYERS: u64 = 60;

struct Layers([Vec<Known>; 2]);

impl Regions for Layers {
    fn known(&self, side: Side) -> &[Known] {
        &self.0[usize::from(side == Side::Remote)]
    }
    fn meet(&mut self, side: Side, raw: u64) -> Option<Known> {
        let known = Known::of(raw, &self.look_up(side, raw)?);
        self.0[usize::from(side == Side::Remote)][raw as usize & 63] = known;
        Some(known)
    }
    fn has_seams(&self) -> bool {
        false
    }
    fn look_up(&self, _: Side, raw: u64) -> Option<RegionView> {
        let (slot, peer) = (raw as u32 & 63, 1);
        let base = (u64::from(slot) + 1) * 2 * SPAN;
        Some(RegionView { slot, generation: 1, base, len: SPAN, peer, ..RegionView::default() })
    }
}

/// Ops, and how many were made, those that were taken back included.
#[derive(Default)]
struct Made(Vec<Op>, usize);

impl OpSink for Made {
    fn push(&mut self, op: Op) -> Result<(), Full> {
        self.1 += 1;
        self.0.push(op);
        Ok(())
    }
    fn room(&self) -> usize {
        1 << 20
    }
    fn extend(&mut self, most: usize, op: impl FnMut(usize) -> Option<Op>) -> usize {
        let before = self.0.len();
        self.0.extend((0..most).map_while(op));
        self.1 += self.0.len() - before;
        self.0.len() - before
    }
    fn last(&mut self, n: usize) -> &mut [Op] {
        let from = self.0.len().saturating_sub(n);
        &mut self.0[from..]
    }
    fn shorten(&mut self, n: usize) {
        self.0.truncate(self.0.len() - n);
    }
}

/// Block by block, of each layer's region so many pieces side by side, as K and V are.
fn made(pieces: u64) -> (usize, usize, usize) {
    let piece = |block: u64, layer: u64, k: u64| Desc {
        addr: (layer + 1) * 2 * SPAN + (block * 2 * pieces + k) * 4096,
        len: 4096,
        dev: 0,
        region: 1 << 24 | layer,
    };
    let list: Vec<Desc> = (0..20_u64)
        .flat_map(|b| (0..LAYERS).flat_map(move |l| (0..pieces).map(move |k| piece(b, l, k))))
        .collect();
    let vacant: Vec<Known> = (0..64).map(Known::vacant).collect();
    let (mut regions, mut sink) = (Layers([vacant.clone(), vacant]), Made::default());
    let wanted = Wanted { peer: 1, op_bytes: NonZeroU32::new(1 << 20).unwrap() };
    build_ops(Listed(&list), Listed(&list), wanted, &mut regions, &mut sink).unwrap();
    (list.len(), sink.0.len(), sink.1)
}

#[test]
fn a_pair_is_not_made_an_op_over_and_over() {
    for pieces in [1, 2, 4] {
        let (pairs, ops, made) = made(pieces);
        assert_eq!(ops as u64, pairs as u64 / pieces);
        assert!(made <= 4 * pairs, "{pieces} a run: {pairs} pairs, {ops} ops, {made} made");
    }
}
