//! Bytes arrive in order and whole, whatever the delays and however slow the reader.

use crate::rig::{arena, Dice, Rig};
use crate::wire;
use kvrail::engine::channel::{cost, Channel, Event, Pools, SCRATCH};
use kvrail::engine::message::{Fifo, Header, Pool};
use kvrail::nic::verbs::mail::{MailLink, MAIL_RECEIVES};
use kvrail::nic::{Closed, Link};
use rdma_core_sys::*;

/// Byte `at` of what `side` sends.
fn byte(side: usize, at: usize) -> u8 {
    ((at * 31 + at / 251 + side * 77) ^ (at >> 9)) as u8
}

fn bytes(side: usize, from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|at| byte(side, at)).collect()
}

/// One side of a run.
struct Side {
    link: MailLink<'static>,
    total: usize,
    sent: usize,
    got: usize,
    end: Option<Closed>,
}

/// How a run goes.
struct Plan {
    /// Rounds in which nobody reads.
    flood: u64,
    /// One read in so many rounds, for each side.
    slow: [u64; 2],
    /// Read only when named, as the engine does.
    polite: bool,
    /// Longest read.
    gulp: u64,
    /// Longest part of a send.
    part: u64,
    /// The round in which the queue pair breaks.
    breaks: Option<u64>,
}

struct Run {
    rig: Rig,
    dice: Dice,
    plan: Plan,
    sides: [Side; 2],
    streams: [Vec<u8>; 2],
    qps: [usize; 2],
}

impl Run {
    fn new(seed: u64, plan: Plan, totals: [usize; 2]) -> Run {
        let mut rig = Rig::new(1, 1);
        let qps = rig.up(0, 0);
        let side = |s: usize| Side {
            link: rig.post[s].link(0, 0),
            total: totals[s],
            sent: 0,
            got: 0,
            end: None,
        };
        let streams = [bytes(0, 0, totals[0]), bytes(1, 0, totals[1])];
        Run { sides: [side(0), side(1)], streams, rig, dice: Dice::new(seed), plan, qps }
    }

    fn send(&mut self, side: usize) {
        let s = &mut self.sides[side];
        let mut parts = vec![];
        let mut at = s.sent;
        for _ in 0..self.dice.below(4) {
            let n = (self.dice.below(self.plan.part + 1) as usize).min(s.total - at);
            parts.push(&self.streams[side][at..at + n]);
            at += n;
        }
        match s.link.send(&parts) {
            Ok(n) => {
                assert!(n <= at - s.sent);
                s.sent += n;
            }
            Err(_) => assert!(self.plan.breaks.is_some()),
        }
    }

    fn receive(&mut self, side: usize) -> usize {
        let mut into = vec![0; 1 + self.dice.below(self.plan.gulp) as usize];
        let s = &mut self.sides[side];
        match s.link.receive(&mut into) {
            Ok(n) => {
                let expected = &self.streams[1 - side][s.got..];
                assert!(expected.starts_with(&into[..n]), "side {side} at {}", s.got);
                s.got += n;
                n
            }
            Err(why) => {
                s.end = Some(why);
                0
            }
        }
    }

    /// Looks, and holds what `poll` says against what can be received.
    fn poll(&mut self, side: usize) {
        let named = self.rig.ready(side) == [0];
        if self.plan.polite && !named {
            return;
        }
        if self.plan.flood == 0 && self.dice.below(self.plan.slow[side]) == 0 {
            let n = self.receive(side);
            assert_eq!(named, n > 0 || self.sides[side].end.is_some());
        }
    }

    fn round(&mut self) {
        let side = self.dice.below(2) as usize;
        match self.dice.below(8) {
            0 | 1 => self.send(side),
            2 if self.plan.flood == 0
                && !self.plan.polite
                && self.dice.below(self.plan.slow[side]) == 0 =>
            {
                self.receive(side);
            }
            3 | 4 => self.poll(side),
            _ => {
                wire::step(self.dice.any());
            }
        }
        self.plan.flood = self.plan.flood.saturating_sub(1);
    }

    fn is_over(&self) -> bool {
        let [a, b] = &self.sides;
        if self.plan.breaks.is_some() {
            return a.end.is_some() && b.end.is_some();
        }
        a.got == b.total && b.got == a.total
    }

    fn go(mut self, seed: u64) {
        let mut round = 0;
        while !self.is_over() {
            assert!(round < 1_000_000, "seed {seed}: stuck: {:?}", wire::backlog());
            if self.plan.breaks == Some(round) {
                wire::fail(self.qps[0], IBV_WC_RETRY_EXC_ERR);
            }
            self.round();
            round += 1;
        }
        let facts = wire::facts();
        assert_eq!(facts.starved, 0, "seed {seed}: frames without a receive");
        let [a, b] = &self.sides;
        assert!(a.got <= b.sent && b.got <= a.sent);
    }
}

fn plan(dice: &mut Dice) -> Plan {
    Plan {
        flood: if dice.below(2) == 0 { 2000 } else { 0 },
        polite: dice.below(2) == 0,
        slow: [1 + dice.below(30), 1 + dice.below(3)],
        gulp: [10, 3000, 20_000][dice.below(3) as usize],
        part: [20, 500, 9000][dice.below(3) as usize],
        breaks: None,
    }
}

fn totals(dice: &mut Dice, plan: &Plan) -> [usize; 2] {
    let most = (plan.part.min(plan.gulp) * 300).min(150_000);
    [0; 2].map(|_| dice.below(most) as usize)
}

#[test]
fn random_streams_arrive_byte_for_byte() {
    for seed in 1..=100 {
        let mut dice = Dice::new(seed);
        let plan = plan(&mut dice);
        let totals = totals(&mut dice, &plan);
        Run::new(seed, plan, totals).go(seed);
    }
}

#[test]
fn a_stream_that_breaks_has_delivered_a_prefix_and_says_so() {
    for seed in 1000..1100 {
        let mut dice = Dice::new(seed);
        let mut plan = plan(&mut dice);
        let totals = totals(&mut dice, &plan);
        plan.breaks = Some(dice.below(4000));
        Run::new(seed, plan, totals).go(seed);
    }
}

/// Both sides send until nothing is taken any more, nobody reads; then both read at once.
#[test]
fn two_sides_that_only_send_do_not_starve_each_other() {
    for seed in 0..30 {
        let part = [1, 40, 5000][seed as usize % 3];
        let polite = seed % 2 == 0;
        let plan = Plan { flood: 5000, polite, slow: [1, 1], gulp: 20_000, part, breaks: None };
        Run::new(seed, plan, [(part as usize * 200).min(200_000); 2]).go(seed);
    }
}

#[test]
fn what_arrived_before_the_break_is_delivered_before_it_is_told() {
    let mut rig = Rig::new(1, 1);
    let qps = rig.up(0, 0);
    let mut links = [rig.post[0].link(0, 0), rig.post[1].link(0, 0)];
    assert_eq!(links[0].send(&[b"first ", b"second"]), Ok(12));
    wire::run();
    assert_eq!(links[0].send(&[b"lost"]), Ok(4));
    wire::fail(qps[0], IBV_WC_RETRY_EXC_ERR);
    assert_eq!(rig.ready(1), [0]);
    let mut into = [0; 5];
    assert_eq!(links[1].send(&[b"x"]), Err(Closed { vendor: IBV_WC_WR_FLUSH_ERR }));
    let waiting = wire::backlog().1;
    assert_eq!(links[1].receive(&mut into), Ok(5));
    assert_eq!(links[1].receive(&mut into), Ok(5));
    assert_eq!(links[1].receive(&mut into), Ok(2));
    assert_eq!(&into[..2], b"nd");
    // Nothing is posted to a broken queue pair.
    assert_eq!(wire::backlog().1, waiting);
    assert_eq!(links[1].receive(&mut into), Err(Closed { vendor: IBV_WC_WR_FLUSH_ERR }));
    assert_eq!(rig.ready(0), [0]);
    // The first error is the reason; what was flushed after it is not.
    assert_eq!(links[0].receive(&mut into), Err(Closed { vendor: IBV_WC_RETRY_EXC_ERR }));
    assert_eq!(links[0].send(&[b"x"]), Err(Closed { vendor: IBV_WC_RETRY_EXC_ERR }));
}

#[test]
fn a_reader_that_never_reads_bounds_what_is_sent_and_gives_it_all_later() {
    let mut rig = Rig::new(1, 1);
    rig.up(0, 0);
    let mut links = [rig.post[0].link(0, 0), rig.post[1].link(0, 0)];
    let mut sent = 0;
    for _ in 0..100 {
        sent += links[0].send(&[&[5]]).unwrap();
        rig.quiet();
    }
    // All receives but the one for a bare credit frame.
    assert_eq!(sent, MAIL_RECEIVES as usize - 1);
    let mut into = [0; 100];
    assert_eq!(links[1].receive(&mut into), Ok(sent));
    rig.quiet();
    assert_eq!(links[0].send(&[&[6]]), Ok(1));
    assert_eq!(wire::facts().starved, 0);
}

/// What was read while every send buffer was in flight is given back once one is free, although
/// nobody reads or sends then.
#[test]
fn credits_that_waited_for_a_buffer_go_out_by_themselves() {
    let mut rig = Rig::new(1, 1);
    let qps = rig.up(0, 0);
    let mut links = [rig.post[0].link(0, 0), rig.post[1].link(0, 0)];
    let mut into = [0; 99];
    while links[0].send(&[b"a"]).unwrap() > 0 {}
    for _ in 0..3 {
        // Side 0 hears of no acknowledgement: its buffers stay in flight.
        wire::deliver(qps[0]);
        rig.ready(1);
        links[1].receive(&mut into).unwrap();
        while links[1].send(&[b"b"]).unwrap() > 0 {}
        wire::deliver(qps[1]);
        wire::acknowledge(qps[1]);
        rig.ready(0);
        links[0].receive(&mut into).unwrap();
        rig.ready(1);
    }
    assert_eq!(links[1].send(&[b"b"]), Ok(0));
    let before = wire::facts().frames;
    wire::acknowledge(qps[0]);
    assert_eq!(rig.ready(0), []);
    assert_eq!(wire::facts().frames, before + 1);
    wire::deliver(qps[0]);
    rig.ready(1);
    assert_eq!(links[1].send(&[b"b"]), Ok(1));
}

/// Only a peer that breaks the protocol can make this side run out of all credits while it owes
/// much; it is sent no more then.
#[test]
fn a_peer_that_gives_nothing_back_is_sent_no_more() {
    let mut rig = Rig::new(1, 1);
    let qps = rig.up(0, 0);
    let mut links = [rig.post[0].link(0, 0), rig.post[1].link(0, 0)];
    let mut sent = 0;
    for _ in 0..300 {
        wire::tamper(qps[0], |frame| frame[2] = 0);
        sent += links[0].send(&[b"x"]).unwrap();
        rig.quiet();
        links[1].receive(&mut [0; 9]).unwrap();
        rig.quiet();
    }
    assert!((100..150).contains(&sent), "{sent}");
    assert_eq!(links[1].send(&[b"x"]), Ok(0));
}

#[test]
fn credits_alone_cost_few_frames_and_then_there_is_silence() {
    let mut rig = Rig::new(1, 1);
    rig.up(0, 0);
    let mut links = [rig.post[0].link(0, 0), rig.post[1].link(0, 0)];
    let before = wire::facts();
    let mut into = [0; 100];
    for i in 0..800 {
        assert_eq!(links[0].send(&[&[1; 65]]), Ok(65), "frame {i}");
        rig.quiet();
        assert_eq!(links[1].receive(&mut into), Ok(65));
    }
    rig.quiet();
    let after = wire::facts();
    let (frames, signalled) = (after.frames - before.frames, after.signalled - before.signalled);
    // One bare credit frame for each half window.
    assert!((900..=915).contains(&frames), "{frames}");
    // Each send ends with a signalled frame; of the bare ones every fourth is.
    assert!((800..frames).contains(&signalled), "{signalled} of {frames}");
    for _ in 0..10 {
        rig.quiet();
        assert_eq!(wire::facts().frames, after.frames);
        assert_eq!(wire::backlog(), (0, 0));
    }
}

#[test]
fn the_end_of_a_send_is_signalled_and_of_a_long_one_each_fourth_frame() {
    let mut rig = Rig::new(1, 1);
    rig.up(0, 0);
    let mut link = rig.post[0].link(0, 0);
    let before = wire::facts().signalled;
    for n in 1..5 {
        assert_eq!(link.send(&[b"x", b""]), Ok(1));
        assert_eq!(wire::facts().signalled, before + n);
    }
    // Frames 5 to 9: the proof was number 0, so 7 is a fourth one, and 9 is the end.
    let long = vec![7; 4 * 4152 + 1];
    assert_eq!(link.send(&[&long]), Ok(long.len()));
    assert_eq!(wire::facts().signalled, before + 4 + 2);
}

/// What a transfer with a message waits for.
#[test]
fn bytes_count_as_arrived_when_their_send_completed_and_the_peer_is_named_for_it() {
    let mut rig = Rig::new(1, 1);
    let qps = rig.up(0, 0);
    let mut link = rig.post[0].link(0, 0);
    assert_eq!(link.send(&[&[1; 5000]]), Ok(5000));
    assert_eq!(link.acked(), Some(0));
    wire::deliver(qps[0]);
    assert_eq!(link.acked(), Some(0), "it lies at the peer, and nobody said so");
    wire::acknowledge(qps[0]);
    let mut ready = [9; 8];
    assert_eq!(rig.post[0].poll(&mut ready), 1);
    assert_eq!((ready[0], link.acked()), (0, Some(5000)));
    assert_eq!(rig.post[0].poll(&mut ready), 0, "told once");
    // What did not arrive is not counted when the queue pair breaks.
    assert_eq!(link.send(&[&[1; 100]]), Ok(100));
    wire::forge(qps[0], 3, rdma_core_sys::IBV_WC_RETRY_EXC_ERR);
    rig.post[0].poll(&mut ready);
    assert_eq!(link.acked(), Some(5000));
    rig.post[0].close(0, 0);
    assert_eq!(link.acked(), Some(0));
}

#[test]
fn short_frames_are_sent_inline() {
    let mut rig = Rig::new(1, 1);
    rig.up(0, 0);
    let mut link = rig.post[0].link(0, 0);
    let before = wire::facts();
    assert_eq!(link.send(&[&[1; 57]]), Ok(57));
    assert_eq!(wire::facts().inline, before.inline);
    assert_eq!(link.send(&[&[1; 56]]), Ok(56));
    assert_eq!(wire::facts().inline, before.inline + 1);
}

#[test]
fn what_the_engine_sends_in_one_call_is_one_frame() {
    let mut rig = Rig::new(1, 1);
    rig.up(0, 0);
    let mut link = rig.post[0].link(0, 0);
    let before = wire::facts().frames;
    assert_eq!(link.send(&[&[1; 16], &[2; 4096]]), Ok(4112));
    assert_eq!(wire::facts().frames, before + 1);
    assert_eq!(link.send(&[&[], &[]]), Ok(0));
    assert_eq!(wire::facts().frames, before + 1);
}

/// The engine's own protocol on top, with its longest messages.
#[test]
fn the_engines_messages_pass_whole_and_in_order() {
    let mut rig = Rig::new(1, 1);
    rig.up(0, 0);
    let pools: [Pool<'static>; 2] = [0, 1].map(|_| Pool::new(&mut arena(4 << 20), 8000).unwrap());
    let mut links: [MailLink<'static>; 2] = [0, 1].map(|s| rig.post[s].link(0, 0));
    let mut channels = [0, 1].map(|_| Channel::new(0, b"peer", 200_000, 200_000));
    let mut fifos = [Fifo::EMPTY; 2];
    let (mut sent, mut got) = ([0u32; 2], [0u32; 2]);
    let mut consumed = [0u64; 2];
    let mut scratch = [0; SCRATCH];
    let mut dice = Dice::new(5);
    let len = |side: usize, i: u32| [65_536, 0, 100, 5000][(i as usize + side) % 4];
    while got != [60, 60] {
        let s = dice.below(2) as usize;
        if sent[s] < 60 && sent[s] < got[1 - s] + 4 {
            let n = len(s, sent[s]);
            let m = pools[s].take(Header { len: n as u32, ..Header::EMPTY }).unwrap();
            pools[s].write(m, 0, &bytes(s, sent[s] as usize, n));
            fifos[s].push(&pools[s], m);
            sent[s] += 1;
        }
        let (channel, link, fifo) = (&mut channels[s], &mut links[s], &mut fifos[s]);
        channel.send(link, &pools[s], fifo, consumed[s], |m| pools[s].give(m)).unwrap();
        wire::step(dice.any());
        wire::step(dice.any());
        if rig.ready(s) == [0] {
            let take = |e: Event| {
                let Event::Got(m) = e else { panic!("{e:?}") };
                let mut all = vec![];
                pools[s].read(m, 0, usize::MAX / 2, |b| all.extend_from_slice(b));
                let n = len(1 - s, got[s]);
                assert_eq!(&all[..4], b"peer");
                assert!(all[4..] == bytes(1 - s, got[s] as usize, n));
                consumed[s] += cost(n);
                got[s] += 1;
                pools[s].give(m);
                false
            };
            let both = Pools { tx: &pools[s], rx: &pools[s] };
            channel.receive(link, &both, fifo, &mut scratch, take).unwrap();
        }
    }
    assert_eq!(wire::facts().starved, 0);
}
