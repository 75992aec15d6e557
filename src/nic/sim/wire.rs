//! Wires: what joins the two ports of a rail, and the packets that are still on it after one of
//! them has let go.

use super::Fabric;
use crate::engine::arena::Arena;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::table::Op;

/// Somebody has this wire.
const TAKEN: u64 = 1;
/// The end of side 0 was closed; that of side 1 is the next bit.
const CLOSED: u64 = 2;
/// What is sent ends with an error.
const CUT: u64 = 8;
/// What is sent vanishes, and nobody is told.
const MUTE: u64 = 16;

/// One end of a wire. Both ends have the same number, and a number is given out once only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SimWire {
    index: u32,
    life: u32,
    side: u32,
}

impl SimWire {
    /// No wire: a rail whose other end nobody models. It always reaches, and never fences.
    pub const NONE: SimWire = SimWire { index: u32::MAX, life: 0, side: 0 };

    /// The other end.
    pub const fn other(self) -> SimWire {
        SimWire { side: 1 - self.side, ..self }
    }

    pub(super) const fn side(self) -> u32 {
        self.side
    }

    pub(super) const fn pack(self) -> u64 {
        (self.life as u64) << 32 | (self.index as u64 & 0x7fff_ffff) << 1 | self.side as u64
    }

    pub(super) const fn unpack(word: u64) -> SimWire {
        let index = (word as u32) >> 1;
        let index = if index == 0x7fff_ffff { u32::MAX } else { index };
        SimWire { index, life: (word >> 32) as u32, side: word as u32 & 1 }
    }
}

/// How a wire is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Carries {
    /// What is sent arrives.
    All,
    /// What is sent vanishes, and nobody is told: for now.
    Silence,
    /// What is sent ends with an error: the other end was closed, or the wire was cut.
    Nothing,
}

/// A packet on its way though its sender has closed the rail.
#[derive(Debug)]
struct Late<'m> {
    state: AtomicU32,
    wire: AtomicU64,
    due: AtomicU64,
    /// `engine:32 | region:32`.
    region: AtomicU64,
    generation: AtomicU32,
    addr: AtomicU64,
    len: AtomicU32,
    bytes: &'m [AtomicU32],
}

const EMPTY: u32 = 0;
const BUSY: u32 = 1;
const FLYING: u32 = 2;

/// All wires of a fabric, and what flies on them.
#[derive(Debug)]
pub(super) struct Wires<'m> {
    words: &'m [AtomicU64],
    late: &'m [Late<'m>],
    flying: AtomicU32,
    landed: AtomicU64,
    fenced: AtomicU64,
}

impl<'m> Wires<'m> {
    pub(super) fn new(arena: &mut Arena<'m>, config: &super::FabricConfig) -> Option<Wires<'m>> {
        let words = arena.array(config.wires as usize, |_| AtomicU64::new(0))?;
        let each = config.late_bytes as usize;
        let n = config.late as usize;
        let mut rest: &'m [AtomicU32] = arena.array(n * each, |_| AtomicU32::new(0))?;
        let late = arena.array_from(n, || {
            let (bytes, more) = rest.split_at_checked(each)?;
            rest = more;
            Some(Late {
                state: AtomicU32::new(EMPTY),
                wire: AtomicU64::new(0),
                due: AtomicU64::new(0),
                region: AtomicU64::new(0),
                generation: AtomicU32::new(0),
                addr: AtomicU64::new(0),
                len: AtomicU32::new(0),
                bytes,
            })
        })?;
        Some(Wires {
            words,
            late,
            flying: AtomicU32::new(0),
            landed: AtomicU64::new(0),
            fenced: AtomicU64::new(0),
        })
    }

    /// The word of a wire while it is in the life that `wire` names.
    fn word(&self, wire: SimWire) -> Option<(&AtomicU64, u64)> {
        let word = self.words.get(wire.index as usize)?;
        let now = word.load(Ordering::Acquire);
        ((now >> 32) as u32 == wire.life && now & TAKEN != 0).then_some((word, now))
    }

    pub(super) fn carries(&self, wire: SimWire) -> Carries {
        if wire.index == u32::MAX {
            return Carries::All;
        }
        match self.word(wire) {
            Some((_, now)) if now & (CUT | CLOSED | CLOSED << 1) != 0 => Carries::Nothing,
            Some((_, now)) if now & MUTE != 0 => Carries::Silence,
            Some(_) => Carries::All,
            None => Carries::Nothing,
        }
    }

    /// Closes one end; when both are closed somebody else may have the wire.
    pub(super) fn close(&self, wire: SimWire) {
        let Some((word, now)) = self.word(wire) else { return };
        let ends = CLOSED | CLOSED << 1;
        let next = now | CLOSED << wire.side;
        let next = if next & ends == ends { u64::from(wire.life) << 32 } else { next };
        word.store(next, Ordering::Release);
    }

    /// Whether a packet that was sent into the other end of this one may still be taken here.
    fn takes(&self, wire: SimWire) -> bool {
        wire.index == u32::MAX
            || self.word(wire).is_some_and(|(_, now)| now & (CLOSED << wire.side) == 0)
    }
}

impl Fabric<'_> {
    /// A fresh wire: its two ends. `None`: all are in use.
    pub fn wire(&self) -> Option<[SimWire; 2]> {
        let free = |w: &AtomicU64| w.load(Ordering::Acquire) & TAKEN == 0;
        let index = self.wires.words.iter().position(free)? as u32;
        let word = &self.wires.words[index as usize];
        let life = ((word.load(Ordering::Acquire) >> 32) as u32).wrapping_add(1);
        word.store(u64::from(life) << 32 | TAKEN, Ordering::Release);
        let end = SimWire { index, life, side: 0 };
        Some([end, end.other()])
    }

    /// Wires in use: those with an end that is not closed.
    pub fn wires_used(&self) -> usize {
        self.wires.words.iter().filter(|w| w.load(Ordering::Acquire) & TAKEN != 0).count()
    }

    /// Cuts a wire: from now on what is sent ends with an error, on both sides.
    pub fn cut(&self, wire: SimWire) {
        if let Some((word, _)) = self.wires.word(wire) {
            word.fetch_or(CUT, Ordering::AcqRel);
        }
    }

    /// Makes a wire silent, or lets it carry again.
    pub fn mute(&self, wire: SimWire, mute: bool) {
        if let Some((word, _)) = self.wires.word(wire) {
            if mute {
                word.fetch_or(MUTE, Ordering::AcqRel);
            } else {
                word.fetch_and(!MUTE, Ordering::AcqRel);
            }
        }
    }

    /// Packets on their way whose sender has closed its rail.
    pub fn flying(&self) -> u32 {
        self.wires.flying.load(Ordering::Acquire)
    }

    /// Late packets so far that landed, and that a closed end (or a withdrawn region) kept out.
    pub fn landed(&self) -> (u64, u64) {
        (self.wires.landed.load(Ordering::Relaxed), self.wires.fenced.load(Ordering::Relaxed))
    }

    /// Sends a piece of a WRITE off, to land at `due` if the peer's end of the wire is open then.
    /// False: too many are on their way already, or the memory is not there.
    pub(super) fn launch(
        &self,
        (wire, due): (SimWire, u64),
        engine: u32,
        (remote, slot, generation): (u32, u32, u32),
        op: &Op,
    ) -> bool {
        let free = |l: &&Late<'_>| {
            let busy = l.state.compare_exchange(EMPTY, BUSY, Ordering::AcqRel, Ordering::Relaxed);
            busy.is_ok()
        };
        let Some(late) = self.wires.late.iter().find(free) else { return false };
        // The end of it, which is what arrives last.
        let len = (late.bytes.len() as u32).min(op.len);
        let skip = u64::from(op.len - len);
        let from = op.local + skip;
        let Some(_pin) = self.pin((engine, op.local_region), None, from, u64::from(len)) else {
            late.state.store(EMPTY, Ordering::Release);
            return false;
        };
        for (i, to) in late.bytes.iter().take(len as usize).enumerate() {
            let at = (from as usize + i) as *const u8;
            // SAFETY: I9: inside a range that the test registered and keeps alive; it is pinned.
            to.store(u32::from(unsafe { at.read_volatile() }), Ordering::Relaxed);
        }
        late.wire.store(wire.other().pack(), Ordering::Relaxed);
        late.due.store(due, Ordering::Relaxed);
        late.region.store(u64::from(remote) << 32 | u64::from(slot), Ordering::Relaxed);
        late.generation.store(generation, Ordering::Relaxed);
        late.addr.store(op.remote + skip, Ordering::Relaxed);
        late.len.store(len, Ordering::Relaxed);
        late.state.store(FLYING, Ordering::Release);
        self.wires.flying.fetch_add(1, Ordering::AcqRel);
        true
    }

    /// Lets land what is due.
    pub(super) fn land(&self) {
        if self.flying() == 0 {
            return;
        }
        let now = self.now();
        for late in self.wires.late {
            let due = late.state.load(Ordering::Acquire) == FLYING
                && late.due.load(Ordering::Relaxed) <= now;
            let ours = |from, to| {
                late.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            };
            if !due || !ours(FLYING, BUSY) {
                continue;
            }
            let count = if self.touch_down(late) { &self.wires.landed } else { &self.wires.fenced };
            count.fetch_add(1, Ordering::Relaxed);
            self.wires.flying.fetch_sub(1, Ordering::AcqRel);
            late.state.store(EMPTY, Ordering::Release);
        }
    }

    fn touch_down(&self, late: &Late<'_>) -> bool {
        if !self.wires.takes(SimWire::unpack(late.wire.load(Ordering::Relaxed))) {
            return false;
        }
        let region = late.region.load(Ordering::Relaxed);
        let (addr, len) = (late.addr.load(Ordering::Relaxed), late.len.load(Ordering::Relaxed));
        let generation = Some(late.generation.load(Ordering::Relaxed));
        let at = ((region >> 32) as u32, region as u32);
        let Some(_pin) = self.pin(at, generation, addr, u64::from(len)) else { return false };
        for (i, byte) in late.bytes.iter().take(len as usize).enumerate() {
            let to = (addr as usize + i) as *mut u8;
            // SAFETY: I9: inside a range that the test registered and keeps alive; it is pinned.
            unsafe { to.write_volatile(byte.load(Ordering::Relaxed) as u8) };
        }
        true
    }
}
