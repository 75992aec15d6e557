//! What one input of the `channel` fuzz target does: the message protocol over pipes that take and
//! give as little as they like. Honest ends deliver everything once, in order and whole; foreign
//! bytes give exactly the messages that a plain reading of them gives, or end the stream.

use crate::channel_pipe::{far, Pipe, Room};
use crate::draw::Draw;
use crate::input::Input;
use kvrail::engine::channel::{cost, Channel, SCRATCH};
use kvrail::engine::message::{Fifo, Header, Message, Pool, MAX_MESSAGE};
use std::collections::VecDeque;

/// Name of every sender.
const NAME: &[u8] = b"the-other-end";
/// What an end lets the other have outstanding.
const WINDOW: u64 = 160_000;

/// Takes an input apart.
pub(crate) fn run(data: &[u8]) {
    let (head, rest) = data.split_at(data.len().min(1));
    match head.first().copied().unwrap_or(0) {
        how @ 0..=127 => honest(how, rest),
        how => foreign(how, &mut Input(rest)),
    }
}

/// Bytes of message number `n` of one side.
fn text(side: usize, n: u64, len: usize) -> Vec<u8> {
    let first = (n * 31 + side as u64 * 101) as usize;
    (0..len).map(|k| (first + k * 7) as u8).collect()
}

/// One end: a channel, and what an engine keeps beside it.
struct End<'a, 'm> {
    channel: Channel<Pipe>,
    /// The same pipe as the channel's.
    pipe: Pipe,
    tx: &'a Pool<'m>,
    rx: &'a Pool<'m>,
    fifo: Fifo,
    consumed: u64,
    /// Lengths of the messages that were queued, of those that the link took whole, and of those
    /// that came.
    queued: u64,
    sent: u64,
    got: u64,
    /// Came, and the application has not taken them.
    inbox: VecDeque<Message>,
    scratch: Box<[u8; SCRATCH]>,
}

impl<'a, 'm> End<'a, 'm> {
    fn new(room: &'a [Pool<'m>; 2], pipe: Pipe) -> End<'a, 'm> {
        End {
            channel: Channel::new(pipe.clone(), (3, 9), NAME, WINDOW, WINDOW),
            pipe,
            tx: &room[0],
            rx: &room[1],
            fifo: Fifo::EMPTY,
            consumed: 0,
            queued: 0,
            sent: 0,
            got: 0,
            inbox: VecDeque::new(),
            scratch: Box::new([0; SCRATCH]),
        }
    }

    /// Queues a message, if there is room for it.
    fn queue(&mut self, side: usize, len: usize) {
        let header = Header { len: len as u32, ..Header::EMPTY };
        let Some(m) = self.tx.take(header) else { return };
        self.tx.write(m, 0, &text(side, self.queued, len));
        self.queued += 1;
        self.fifo.push(self.tx, m);
    }

    fn send(&mut self) -> bool {
        let (tx, sent) = (self.tx, &mut self.sent);
        let done = |m| {
            *sent += 1;
            tx.give(m);
        };
        let moved = self.channel.send(tx, &mut self.fifo, self.consumed, done);
        moved.expect("an honest stream")
    }

    fn receive(&mut self) -> Result<bool, ()> {
        let inbox = &mut self.inbox;
        let moved = self.channel.receive(self.rx, &mut self.scratch, |m| inbox.push_back(m));
        // Blocks that the peer can fill are bounded by what it was let have.
        let held = u64::from(self.rx.used()) * 256;
        assert!(held <= self.channel.window(), "{held} bytes held; the window is {WINDOW}");
        moved.map_err(|_| ())
    }

    /// The application takes one message: its bytes.
    fn take(&mut self) -> Option<Vec<u8>> {
        let m = self.inbox.pop_front()?;
        let header = self.rx.header(m);
        assert_eq!((header.peer, header.life), (3, 9));
        let mut all = Vec::new();
        self.rx.read(m, 0, header.total(), |part| all.extend_from_slice(part));
        assert_eq!(all[..header.name as usize], *NAME);
        self.rx.give(m);
        self.consumed += cost(header.len as usize);
        self.got += 1;
        all.drain(..header.name as usize);
        Some(all)
    }
}

/// Two ends that keep the rules.
fn honest(how: u8, steps: &[u8]) {
    let tells = how & 1 == 0;
    let (a, b) = Pipe::pair(tells);
    let rooms = [Room::new(), Room::new()];
    let pools = [rooms[0].pools(), rooms[1].pools()];
    let mut ends = [End::new(&pools[0], a), End::new(&pools[1], b)];
    let mut lens: [Vec<usize>; 2] = [Vec::new(), Vec::new()];
    for (i, step) in steps.chunks_exact(2).take(400).enumerate() {
        let mut draw = Draw(u64::from(step[1]) << 32 | u64::from(step[0]) << 16 | i as u64);
        let side = usize::from(step[0] & 1);
        match step[0] >> 1 & 7 {
            0 | 1 => {
                let most = [1, 9, 300, 3000, MAX_MESSAGE + 1][draw.below(5)];
                let len = draw.word() % most;
                let before = ends[side].queued;
                ends[side].queue(side, len);
                lens[side].extend((ends[side].queued > before).then_some(len));
            }
            2 => ends[side].pipe.limit(draw.word() % 2000, draw.word() % 2000),
            3 => check(side, ends[side].take(), ends[side].got, &lens),
            4 | 5 => drop(ends[side].receive().expect("an honest stream")),
            _ => drop(ends[side].send()),
        }
        assert!(ends[side].sent <= ends[side].queued && ends[side].got <= ends[1 - side].queued);
    }
    drain(&mut ends, &lens);
    for (end, room) in ends.iter().zip(&pools) {
        assert_eq!((room[0].used(), room[1].used()), (0, 0), "blocks are missing");
        assert_eq!(end.sent, end.queued, "said to be sent");
    }
}

/// A message that came is the one that is due.
fn check(side: usize, came: Option<Vec<u8>>, got: u64, lens: &[Vec<usize>; 2]) {
    let Some(bytes) = came else { return };
    let n = got - 1;
    assert!(bytes == text(1 - side, n, lens[1 - side][n as usize]), "message {n} is another");
}

/// Everything arrives now.
fn drain(ends: &mut [End<'_, '_>; 2], lens: &[Vec<usize>; 2]) {
    for round in 0.. {
        assert!(round < 10_000, "messages that never come");
        let mut moved = false;
        for side in 0..2 {
            ends[side].pipe.limit(far(), far());
            moved |= ends[side].send();
            moved |= ends[side].receive().expect("an honest stream");
            while let Some(bytes) = ends[side].take() {
                check(side, Some(bytes), ends[side].got, lens);
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    for side in 0..2 {
        assert_eq!(ends[side].got, ends[1 - side].queued, "lost");
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
            3 => bytes.extend(frame(how as u8, 8, len as u64, &[how as u8; 8])),
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
        match end.receive() {
            Ok(_) => {}
            Err(()) => {
                broken = true;
                break;
            }
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
    let End { channel, mut fifo, tx, rx, .. } = end;
    channel.dismantle(&kvrail::engine::channel::Pools { tx, rx }, |m| tx.give(m));
    while let Some(m) = fifo.pop(tx) {
        tx.give(m);
    }
    assert_eq!((tx.used(), rx.used()), (0, 0), "blocks are missing");
}
