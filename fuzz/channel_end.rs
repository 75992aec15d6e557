//! One end of the message protocol, with several links: what `engine/notify.rs` and
//! `engine/fence.rs` do for one peer, without threads.

use crate::channel_pipe::Pipe;
use kvrail::engine::channel::{cost, Broken, Channel, Event, Pools, SCRATCH};
use kvrail::engine::message::{Fifo, Header, Message, Pool};
use kvrail::nic::Link;
use std::collections::VecDeque;

/// Name of every sender.
pub(crate) const NAME: &[u8] = b"the-other-end";
/// What an end lets the other have outstanding.
pub(crate) const WINDOW: u64 = 160_000;
const PEER: u32 = 3;

/// A link and the id of its rail.
struct Joined {
    id: u32,
    pipe: Pipe,
    broken: bool,
}

/// What came, and what is known to have arrived.
#[derive(Default)]
struct Got {
    inbox: VecDeque<Message>,
    sent: u64,
    /// Rails that the other end said are down.
    heard: Vec<u32>,
}

/// One end.
pub(crate) struct End<'a, 'm> {
    channel: Channel,
    pools: Pools<'a, 'm>,
    fifo: Fifo,
    links: Vec<Joined>,
    on: Option<u32>,
    got: Got,
    consumed: u64,
    /// Messages that were queued, and taken by the application.
    pub(crate) queued: u64,
    pub(crate) taken: u64,
    /// Rails that were dropped here.
    pub(crate) dropped: Vec<u32>,
    scratch: Box<[u8; SCRATCH]>,
}

/// Bytes of message number `n` of one side.
pub(crate) fn text(side: usize, n: u64, len: usize) -> Vec<u8> {
    let first = (n * 31 + side as u64 * 101) as usize;
    (0..len).map(|k| (first + k * 7) as u8).collect()
}

/// What a channel tells, as the engine takes it. Answers whether a rail that the other end says is
/// down is open here.
fn came(got: &mut Got, tx: &Pool<'_>, open: &[u32], event: Event) -> bool {
    match event {
        Event::Got(m) => got.inbox.push_back(m),
        Event::Arrived(m) => {
            got.sent += 1;
            tx.give(m);
        }
        Event::Down(id) => {
            got.heard.push(id);
            return open.contains(&id);
        }
    }
    false
}

impl<'a, 'm> End<'a, 'm> {
    pub(crate) fn new(room: &'a [Pool<'m>; 2], pipe: Pipe) -> End<'a, 'm> {
        End {
            channel: Channel::new(PEER, NAME, WINDOW, WINDOW),
            pools: Pools { tx: &room[0], rx: &room[1] },
            fifo: Fifo::EMPTY,
            links: vec![Joined { id: 0, pipe, broken: false }],
            on: Some(0),
            got: Got::default(),
            consumed: 0,
            queued: 0,
            taken: 0,
            dropped: Vec::new(),
            scratch: Box::new([0; SCRATCH]),
        }
    }

    /// Messages that are known to have arrived.
    pub(crate) fn sent(&self) -> u64 {
        self.got.sent
    }

    /// The other end said that this rail is down.
    pub(crate) fn heard(&self, id: u32) -> bool {
        self.got.heard.contains(&id)
    }

    /// Links that are not known to be lost.
    pub(crate) fn pipes(&self) -> impl Iterator<Item = &Pipe> {
        self.links.iter().filter(|l| !l.broken).map(|l| &l.pipe)
    }

    /// Ids of links, lost or not.
    pub(crate) fn ids(&self) -> Vec<u32> {
        self.links.iter().map(|l| l.id).collect()
    }

    /// Queues a message of `len` bytes, if there is room for it.
    pub(crate) fn queue(&mut self, side: usize, len: usize) -> bool {
        let header = Header { len: len as u32, ..Header::EMPTY };
        let Some(m) = self.pools.tx.take(header) else { return false };
        self.pools.tx.write(m, 0, &text(side, self.queued, len));
        self.queued += 1;
        self.fifo.push(self.pools.tx, m);
        true
    }

    /// A rail was joined.
    pub(crate) fn join(&mut self, id: u32, pipe: Pipe) {
        self.links.push(Joined { id, pipe, broken: false });
        self.on = self.on.or(Some(id));
    }

    /// Sends what the link in use takes.
    pub(crate) fn send(&mut self) -> bool {
        let on = self.on;
        let Some(link) = self.links.iter_mut().find(|l| Some(l.id) == on && !l.broken) else {
            return false;
        };
        let (tx, sent) = (self.pools.tx, &mut self.got.sent);
        let done = |m| {
            *sent += 1;
            tx.give(m);
        };
        match self.channel.send(&mut link.pipe, tx, &mut self.fifo, self.consumed, done) {
            Ok(moved) => moved,
            Err(Broken::Closed(_)) => {
                link.broken = true;
                true
            }
            Err(why) => panic!("sending: {why:?}"),
        }
    }

    /// Takes in what the links have. An error: what came was not of the protocol.
    pub(crate) fn receive(&mut self) -> Result<bool, Broken> {
        let mut moved = false;
        for at in 0..self.links.len() {
            if self.links[at].broken {
                continue;
            }
            let id = self.links[at].id;
            let result = if self.on == Some(id) {
                self.receive_on(at)
            } else {
                match self.links[at].pipe.receive(&mut self.scratch[..]) {
                    Ok(0) => Ok(false),
                    Ok(n) => self.follow(id, n).map(|()| true),
                    Err(why) => Err(Broken::Closed(why)),
                }
            };
            match result {
                Ok(any) => moved |= any,
                Err(Broken::Closed(_)) => {
                    self.links[at].broken = true;
                    moved = true;
                }
                Err(why) => return Err(why),
            }
        }
        // Blocks that the other end can fill are bounded by what it was let have.
        let held = u64::from(self.pools.rx.used()) * 256;
        assert!(held <= WINDOW, "{held} bytes held; the window is {WINDOW}");
        Ok(moved)
    }

    fn receive_on(&mut self, at: usize) -> Result<bool, Broken> {
        let open = self.ids();
        let (tx, got) = (self.pools.tx, &mut self.got);
        let event = |e| came(got, tx, &open, e);
        let pipe = &mut self.links[at].pipe;
        self.channel.receive(pipe, &self.pools, &mut self.fifo, &mut self.scratch, event)
    }

    /// The other end went on with link `id`, whose first `n` bytes are in the scratch.
    fn follow(&mut self, id: u32, n: usize) -> Result<(), Broken> {
        let first = self.scratch[..n].to_vec();
        if let Some(old) = self.on {
            self.leave(old);
        }
        self.on = Some(id);
        let open = self.ids();
        let (tx, got) = (self.pools.tx, &mut self.got);
        self.channel.feed(&self.pools, &mut self.fifo, &first, |e| came(got, tx, &open, e))?;
        Ok(())
    }

    /// Takes in all that the link in use has, and leaves it.
    fn leave(&mut self, id: u32) {
        self.on = None;
        if let Some(at) = self.links.iter().position(|l| l.id == id) {
            while let Ok(true) = self.receive_on(at) {}
            let (tx, sent) = (self.pools.tx, &mut self.got.sent);
            self.channel.settle(&mut self.links[at].pipe, |m| {
                *sent += 1;
                tx.give(m);
            });
            self.links[at].broken = true;
        }
        self.channel.move_on(&self.pools, &mut self.fifo);
    }

    /// The control side drops a rail: its link was stopped before.
    pub(crate) fn drop_rail(&mut self, id: u32) {
        if self.on == Some(id) {
            self.leave(id);
        }
        self.links.retain(|l| l.id != id);
        if self.on.is_none() {
            self.on = self.links.iter().filter(|l| !l.broken).map(|l| l.id).min();
        }
        self.channel.down(id, self.heard(id));
        self.dropped.push(id);
    }

    /// The control side drops what is broken, and stops it first. Whether there was any.
    pub(crate) fn bury(&mut self) -> bool {
        let lost: Vec<u32> = self.links.iter().filter(|l| l.broken).map(|l| l.id).collect();
        for id in &lost {
            self.stop(*id);
            self.drop_rail(*id);
        }
        !lost.is_empty()
    }

    /// Breaks a link.
    pub(crate) fn stop(&self, id: u32) {
        self.links.iter().filter(|l| l.id == id).for_each(|l| l.pipe.fail());
    }

    /// The application takes one message: its bytes.
    pub(crate) fn take(&mut self) -> Option<Vec<u8>> {
        let m = self.got.inbox.pop_front()?;
        let rx = self.pools.rx;
        let header = rx.header(m);
        assert_eq!(header.peer, PEER);
        let mut all = Vec::new();
        rx.read(m, 0, header.total(), |part| all.extend_from_slice(part));
        assert_eq!(all[..header.name as usize], *NAME);
        rx.give(m);
        self.consumed += cost(header.len as usize);
        self.taken += 1;
        all.drain(..header.name as usize);
        Some(all)
    }

    /// Ends it; no block is missing then.
    pub(crate) fn finish(mut self) {
        while self.take().is_some() {}
        let Pools { tx, rx } = self.pools;
        self.channel.dismantle(&self.pools, |m| tx.give(m));
        while let Some(m) = self.fifo.pop(tx) {
            tx.give(m);
        }
        assert_eq!((tx.used(), rx.used()), (0, 0), "blocks are missing");
    }
}
