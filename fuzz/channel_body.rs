//! What one input of the `channel` fuzz target does: the message protocol over pipes that take and
//! give as little as they like, and break. Honest ends deliver everything once, in order and whole;
//! foreign bytes give exactly the messages that a plain reading of them gives, or end the stream.

use crate::channel_end::{text, End, WINDOW};
use crate::channel_pipe::{Pipe, Room, Temper, FAST};
use crate::draw::Draw;
use crate::input::Input;
use kvrail::engine::channel::cost;
use kvrail::engine::message::MAX_MESSAGE;

/// Links of one run.
const LINKS: u32 = 12;

/// Takes an input apart.
pub(crate) fn run(data: &[u8]) {
    let (head, rest) = data.split_at(data.len().min(1));
    match head.first().copied().unwrap_or(0) {
        how @ 0..=159 => honest(how, rest),
        how => foreign(how, &mut Input(rest)),
    }
}

/// Two ends that keep the rules, and what they queued.
struct Pair<'a, 'm> {
    ends: [End<'a, 'm>; 2],
    lens: [Vec<usize>; 2],
    /// A link that one side has joined already: which one has not, and its end.
    half: Option<(usize, u32, Pipe)>,
    made: u32,
}

/// Messages both ways over links that may break and be joined anew. Links that do not tell what
/// arrived do not move.
fn honest(how: u8, steps: &[u8]) {
    let moves = !how.is_multiple_of(4);
    let (a, b) = Pipe::pair(moves);
    let rooms = [Room::new(), Room::new()];
    let pools = [rooms[0].pools(), rooms[1].pools()];
    let ends = [End::new(&pools[0], a), End::new(&pools[1], b)];
    let mut pair = Pair { ends, lens: [Vec::new(), Vec::new()], half: None, made: 1 };
    for (i, step) in steps.chunks_exact(2).take(300).enumerate() {
        let mut draw = Draw(u64::from(step[1]) << 32 | u64::from(step[0]) << 16 | i as u64);
        pair.step(usize::from(step[0] & 1), step[0] >> 1 & 15, moves, &mut draw);
    }
    pair.drain();
    let ids: Vec<u32> = (0..pair.made).collect();
    for side in 0..2 {
        let (end, other) = (&pair.ends[side], &pair.ends[1 - side]);
        assert_eq!(end.taken, other.queued, "lost");
        assert_eq!(end.sent(), end.queued, "said to have arrived");
        let told = |id: &&u32| end.dropped.contains(id) && !other.heard(**id);
        assert_eq!(ids.iter().find(told), None, "a rail is down and nobody was told");
    }
    pair.ends.into_iter().for_each(End::finish);
}

impl Pair<'_, '_> {
    fn step(&mut self, side: usize, what: u8, moves: bool, draw: &mut Draw) {
        let end = &mut self.ends[side];
        match what {
            0..=2 => {
                let most = [1, 9, 300, 3000, MAX_MESSAGE + 1][draw.below(5)];
                let len = draw.word() % most;
                if end.queue(side, len) {
                    self.lens[side].push(len);
                }
            }
            3 => {
                let [take, give, lag] = [0; 3].map(|_| draw.word() % 2000);
                end.pipes().for_each(|p| p.be(Temper { take, give, lag }));
            }
            4 => end.pipes().for_each(|p| p.arrive(draw.word())),
            5 | 6 => {
                self.check(side);
            }
            7..=9 => drop(end.receive().expect("an honest stream")),
            10 if moves => self.join(),
            11 if moves && self.made < LINKS => {
                let id = draw.one_of(&end.ids());
                id.iter().for_each(|id| end.stop(*id));
                if draw.one_in(2) {
                    id.iter().for_each(|id| end.drop_rail(*id));
                }
            }
            12 if moves => drop(end.bury()),
            _ => drop(end.send()),
        }
        let [a, b] = &self.ends;
        assert!(a.sent() <= a.queued && b.sent() <= b.queued);
    }

    /// The application of one side takes a message: the one that is due.
    fn check(&mut self, side: usize) -> bool {
        let n = self.ends[side].taken;
        let Some(bytes) = self.ends[side].take() else { return false };
        let len = self.lens[1 - side].get(n as usize).expect("no more than were queued");
        assert!(bytes == text(1 - side, n, *len), "message {n} is another");
        true
    }

    /// A fresh link: one side has it now, the other at the next call.
    fn join(&mut self) {
        if let Some((side, id, pipe)) = self.half.take() {
            self.ends[side].join(id, pipe);
        } else if self.made < LINKS {
            let (near, far) = Pipe::pair(true);
            let side = self.made as usize % 2;
            self.ends[side].join(self.made, near);
            self.half = Some((1 - side, self.made, far));
            self.made += 1;
        }
    }

    /// What is broken is dropped, a link is there, and everything arrives.
    fn drain(&mut self) {
        self.half.is_some().then(|| self.join());
        for round in 0.. {
            assert!(round < 10_000, "messages that never come");
            let mut moved = false;
            for side in 0..2 {
                self.ends[side].pipes().for_each(|p| p.be(FAST));
                moved |= self.ends[side].bury();
                moved |= self.ends[side].receive().expect("an honest stream");
                moved |= self.ends[side].send();
                while self.check(side) {
                    moved = true;
                }
            }
            let [a, b] = &self.ends;
            if a.pipes().next().is_none() && b.pipes().next().is_none() && !moved {
                let (near, far) = Pipe::pair(true);
                self.ends[0].join(self.made, near);
                self.ends[1].join(self.made, far);
                self.made += 1;
            } else if !moved {
                return;
            }
        }
    }
}

/// A frame as bytes.
fn frame(kind: u8, len: u32, seq: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = len.to_le_bytes().to_vec();
    bytes.extend([kind, 0, 0, 0]);
    bytes.extend(seq.to_le_bytes());
    bytes.extend(body);
    bytes
}

/// Bytes of a peer that does not keep the rules, mostly near to what one that does would say.
fn strange(input: &mut Input<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut seq = 0;
    while !input.is_empty() && bytes.len() < 250_000 {
        let how = input.byte();
        let len = [input.byte(), input.word()][how & 1];
        match how >> 1 & 31 {
            0 => bytes.extend(input.bytes(len)),
            1 => bytes.extend(frame(1, len as u32, seq ^ 1 << (len % 64), &text(0, seq, len))),
            2 => bytes.extend(frame(1, (len * 65_537) as u32, seq, &text(0, seq, len))),
            3 => bytes.extend(frame(len as u8 % 6, 8, len as u64, &[how as u8; 8])),
            11 => bytes.extend(frame(4, 8, (len as u64) << (len % 40), &[len as u8 & 1; 8])),
            4 => bytes.extend(frame(2, len as u32 % 12, seq, &text(1, seq, len % 12))),
            5..=8 => bytes.extend(frame(2, 8, seq, &(len as u64 * 1000).to_le_bytes())),
            9 => bytes.extend(frame(2, 8, u64::MAX, &u64::MAX.to_le_bytes())),
            _ => {
                bytes.extend(frame(1, len as u32, seq, &text(0, seq, len)));
                seq += 1;
            }
        }
    }
    bytes
}

/// What a plain reading of the whole stream gives: the messages, and whether it ends in garbage.
fn reading(mut bytes: &[u8]) -> (Vec<Vec<u8>>, bool) {
    let (mut messages, mut spent) = (Vec::new(), 0);
    while bytes.len() >= 16 {
        let len = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        let seq = u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes"));
        match bytes[4] {
            1 if len <= MAX_MESSAGE && seq == messages.len() as u64 => {
                spent += cost(len);
                if spent > WINDOW {
                    return (messages, true);
                }
                let Some(body) = bytes.get(16..16 + len) else { break };
                messages.push(body.to_vec());
                bytes = &bytes[16 + len..];
            }
            2 if len == 8 => bytes = bytes.get(24..).unwrap_or_default(),
            // No link was left, so a RESUME has no place; a rail's number has 32 bits.
            3 if len == 8 && bytes.len() < 24 => break,
            4 if len == 8 && bytes.len() < 24 => break,
            4 if len == 8 && seq <= u64::from(u32::MAX) => bytes = &bytes[24..],
            _ => return (messages, true),
        }
    }
    (messages, false)
}

/// One end alone with bytes that nobody honest sent.
fn foreign(how: u8, input: &mut Input<'_>) {
    let (near, other) = Pipe::pair(how & 1 == 0);
    let room = Room::new();
    let pools = room.pools();
    let mut end = End::new(&pools, near);
    let cut = 1 + input.word() % 3000;
    let bytes = strange(input);
    let (due, garbage) = reading(&bytes);
    let mut broken = false;
    for part in bytes.chunks(cut) {
        other.put(part);
        if end.receive().is_err() {
            broken = true;
            break;
        }
        // Said windows are believed, and nothing else happens to what is sent.
        if how & 2 == 0 {
            end.queue(0, usize::from(how));
            end.send();
        }
    }
    assert_eq!(broken, garbage, "the stream must end where it is garbage, and only there");
    let came: Vec<_> = core::iter::from_fn(|| end.take()).collect();
    assert_eq!(came.len(), due.len(), "messages came that were not sent, or did not come");
    assert!(came == due, "other bytes than were sent");
    end.finish();
}
