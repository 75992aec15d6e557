//! The one word that says where a transfer stands: `generation:24 | epoch:24 | phase:8 | status:8`.
//!
//! The generation is the handle's (a released slot is another transfer); the epoch counts posts, so
//! that a thread that fell asleep inside one post can never end the next.

use crate::mutant::mutant;
use crate::status::Status;
use crate::sync::{AtomicU64, Ordering};

/// Where a transfer stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Phase {
    /// Nobody's slot.
    Free = 0,
    /// Prepared, never posted.
    Idle = 1,
    /// One thread is posting it.
    Posting = 2,
    /// Rails may claim.
    Active = 3,
    /// Every byte arrived; waits for the last holder, who hands the message over.
    Landed = 4,
    /// The message is being handed to the transport.
    Notifying = 5,
    /// Failed or cancelled; waits until nothing is in flight.
    Ending = 6,
    /// Nothing is in flight any more; the last one out is tidying up before it publishes the
    /// error.
    Closing = 7,
    /// Finished well. Terminal.
    Done = 8,
    /// Finished with the error in `status`. Terminal.
    Ended = 9,
}

impl Phase {
    const ALL: [Phase; 10] = [
        Phase::Free,
        Phase::Idle,
        Phase::Posting,
        Phase::Active,
        Phase::Landed,
        Phase::Notifying,
        Phase::Ending,
        Phase::Closing,
        Phase::Done,
        Phase::Ended,
    ];

    /// True when nothing of the transfer is in flight and nothing will happen by itself.
    pub const fn at_rest(self) -> bool {
        matches!(self, Phase::Idle | Phase::Done | Phase::Ended)
    }
}

const MASK24: u32 = (1 << 24) - 1;

/// The unpacked word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct State {
    /// Life of the slot, 24 bits.
    pub generation: u32,
    /// Number of the post, 24 bits.
    pub epoch: u32,
    /// Where it stands.
    pub phase: Phase,
    /// Why it ended, when it ended or is ending.
    pub status: Status,
}

impl State {
    fn pack(self) -> u64 {
        (u64::from(self.generation & MASK24) << 40)
            | (u64::from(self.epoch & MASK24) << 16)
            | (u64::from(self.phase as u8) << 8)
            | u64::from(self.status.byte())
    }

    fn unpack(word: u64) -> State {
        State {
            generation: (word >> 40) as u32 & MASK24,
            epoch: (word >> 16) as u32 & MASK24,
            phase: phase_of(word),
            status: Status::from_byte((word & 0xff) as u8),
        }
    }

    /// The same life and post in another phase.
    pub const fn to(self, phase: Phase, status: Status) -> State {
        State { phase, status, ..self }
    }

    /// The next post of the same life, being posted.
    pub const fn next_post(self) -> State {
        State { epoch: (self.epoch + 1) & MASK24, ..self.to(Phase::Posting, Status::InProgress) }
    }

    /// The next life. Generation 0 is never given out.
    pub const fn next_life(self) -> State {
        let generation = match (self.generation + 1) & MASK24 {
            0 => 1,
            g => g,
        };
        State { generation, ..self.to(Phase::Free, Status::NotPosted) }
    }

    /// What `check` answers.
    pub const fn answer(self) -> Status {
        match self.phase {
            Phase::Free => Status::Stale,
            Phase::Idle => Status::NotPosted,
            Phase::Done => Status::Ok,
            Phase::Ended => self.status,
            _ => Status::InProgress,
        }
    }
}

fn phase_of(word: u64) -> Phase {
    Phase::ALL.get(((word >> 8) & 0xff) as usize).copied().unwrap_or(Phase::Free)
}

/// The atomic word.
#[derive(Debug)]
pub struct StateWord(AtomicU64);

impl StateWord {
    /// A free slot of generation 1.
    pub fn new() -> StateWord {
        let first =
            State { generation: 1, epoch: 0, phase: Phase::Free, status: Status::NotPosted };
        StateWord(AtomicU64::new(first.pack()))
    }

    /// The state now. Acquire: what the thread that published it wrote before is visible.
    pub fn load(&self) -> State {
        State::unpack(self.0.load(Ordering::Acquire))
    }

    /// The phase now, as [`StateWord::load`].
    pub fn phase(&self) -> Phase {
        phase_of(self.0.load(Ordering::Acquire))
    }

    /// Moves from exactly `from` to `to`. False when somebody else moved first.
    pub fn change(&self, from: State, to: State) -> bool {
        let publish = if mutant("state_publish") { Ordering::Relaxed } else { Ordering::AcqRel };
        self.0.compare_exchange(from.pack(), to.pack(), publish, Ordering::Relaxed).is_ok()
    }
}

impl Default for StateWord {
    fn default() -> Self {
        StateWord::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_field_round_trips_at_its_limits() {
        for phase in Phase::ALL {
            for &status in Status::ALL {
                for generation in [1, MASK24] {
                    for epoch in [0, MASK24] {
                        let s = State { generation, epoch, phase, status };
                        assert_eq!(State::unpack(s.pack()), s);
                    }
                }
            }
        }
    }

    #[test]
    fn generations_skip_zero_and_epochs_wrap() {
        let s = State { generation: MASK24, epoch: MASK24, phase: Phase::Done, status: Status::Ok };
        assert_eq!(s.next_life().generation, 1);
        assert_eq!(s.next_post().epoch, 0);
        assert_eq!(s.next_post().generation, MASK24);
    }
}
