//! What one input of the `handshake` fuzz target does: both machines of the bootstrap, fed with
//! what the other said, cut and changed on the way, or with noise that looks like it.

use crate::held;
use crate::input::Input;
use kvrail::host::handshake::{
    Acceptor, AcceptorParams, Dialer, DialerParams, Step, Version, MAX_READ, UNPROVEN_BYTES, WIRE,
};
use kvrail::status::Status;

const DIALER: [u8; 16] = [0x11; 16];
const ACCEPTOR: [u8; 16] = [0x22; 16];
const SECRET: [u8; 32] = [0x5a; 32];

/// Takes an input apart.
pub(crate) fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.byte() % 4 {
        0 => honest(&mut input),
        1 | 2 => between(&mut input),
        _ => noise(&mut input),
    }
}

/// What the two sides are told before they meet.
struct Setup {
    name: Vec<u8>,
    offers: [Vec<u8>; 2],
    rails: [u32; 2],
    versions: [Version; 2],
    secrets: [[u8; 32]; 2],
    wanted: [u8; 16],
}

impl Setup {
    fn good(input: &mut Input<'_>) -> Setup {
        let minor = |i: &mut Input<'_>| Version { minor: i.below(3) as u16, ..WIRE };
        let offer = |i: &mut Input<'_>| vec![i.byte() as u8; i.below(2049)];
        Setup {
            name: vec![b'a' + input.below(26) as u8; 1 + input.below(255)],
            offers: [offer(input), offer(input)],
            rails: [input.word() as u32, input.word() as u32],
            versions: [minor(input), minor(input)],
            secrets: [SECRET; 2],
            wanted: ACCEPTOR,
        }
    }

    fn dialer(&self) -> Dialer {
        Dialer::new(DialerParams {
            name: self.name.clone(),
            incarnation: DIALER,
            wanted: self.wanted,
            secret: self.secrets[0],
            attempt: 7,
            nonce: [3; 32],
            offer: self.offers[0].clone(),
            version: self.versions[0],
        })
    }

    fn acceptor(&self) -> Acceptor {
        Acceptor::new(AcceptorParams {
            incarnation: ACCEPTOR,
            secret: self.secrets[1],
            nonce: [4; 32],
            version: self.versions[1],
        })
    }
}

/// Messages of a handshake in the order in which they are sent, the dialler's even; the READYs
/// cross.
const HELLO: usize = 0;
const CHALLENGE: usize = 1;
const PROOF: usize = 2;
const WELCOME: usize = 3;
const DIALER_READY: usize = 4;
const ACCEPTOR_READY: usize = 5;

/// What was said and what arrived, by message.
#[derive(Default)]
struct Record {
    /// Everything each side said, and where in it each message ends.
    said: [Vec<u8>; 2],
    ends: [Option<usize>; 6],
    /// What became of it on the way.
    heard: [Vec<u8>; 2],
    /// What each side got when it was done: the other's rails, then what it said as messages.
    done: [Option<(u32, Vec<u8>)>; 2],
    /// What each side knows of the other.
    offers: [Option<Vec<u8>>; 2],
    name: Option<Vec<u8>>,
    errors: [bool; 2],
}

impl Record {
    /// Message `n` was said, and it and all before it arrived as it was.
    fn intact(&self, n: usize) -> bool {
        let (said, heard) = (&self.said[n % 2], &self.heard[n % 2]);
        self.ends[n].is_some_and(|end| heard.get(..end) == said.get(..end))
    }
}

/// Runs two machines until neither has anything to say. `way` may change a message; `cut` says how
/// many of the waiting bytes arrive next.
fn converse(
    setup: &Setup,
    way: &mut dyn FnMut(usize, &mut Vec<u8>),
    cut: &mut dyn FnMut() -> usize,
    words: &[Vec<u8>; 2],
) -> Record {
    let mut record = Record::default();
    let (mut dialer, mut acceptor) = (setup.dialer(), setup.acceptor());
    let mut wire = [Vec::new(), Vec::new()];
    let mut say = |record: &mut Record, to: &mut Vec<u8>, n: usize, mut bytes: Vec<u8>| {
        assert!(record.ends[n].is_none(), "message {n} twice");
        record.said[n % 2].extend(&bytes);
        record.ends[n] = Some(record.said[n % 2].len());
        way(n, &mut bytes);
        record.heard[n % 2].extend(&bytes);
        to.extend(bytes);
    };
    let hello = dialer.start().expect("good parameters");
    say(&mut record, &mut wire[1], HELLO, hello);
    // Far more turns than bytes: a conversation that does not end is a bug.
    for _ in 0..1_000_000 {
        let mut quiet = true;
        for side in 0..2 {
            let waiting = wire[side].len();
            let n = cut().clamp(1, MAX_READ).min(waiting);
            let part: Vec<u8> = wire[side].drain(..n).collect();
            quiet &= part.is_empty();
            let step = if side == 0 { dialer.receive(&part) } else { acceptor.receive(&part) };
            quiet &= matches!(step, Ok(Step::More) | Err(_));
            let to = &mut wire[1 - side];
            match (side, step) {
                (_, Ok(Step::More)) => {}
                (0, Ok(Step::Send(bytes))) => say(&mut record, to, PROOF, bytes),
                (_, Ok(Step::Send(bytes))) => say(&mut record, to, CHALLENGE, bytes),
                (1, Ok(Step::Decide { name, incarnation, attempt, offer })) => {
                    assert_eq!((incarnation, attempt), (DIALER, 7));
                    (record.name, record.offers[1]) = (Some(name), Some(offer));
                    let welcome = acceptor.accept(&setup.offers[1]).expect("it is due");
                    say(&mut record, to, WELCOME, welcome);
                    let ready = acceptor.ready(setup.rails[1]).expect("it is due");
                    say(&mut record, to, ACCEPTOR_READY, ready);
                    to.extend(&words[1]);
                }
                (0, Ok(Step::Proven { offer })) => {
                    record.offers[0] = Some(offer);
                    let ready = dialer.ready(setup.rails[0]).expect("it is due");
                    say(&mut record, to, DIALER_READY, ready);
                    to.extend(&words[0]);
                }
                (_, Ok(Step::Done { rails, leftover })) => {
                    let (_, all) = record.done[side].get_or_insert((rails, Vec::new()));
                    all.extend(leftover);
                }
                (_, Ok(step)) => panic!("a step of the other side: {step:?}"),
                (_, Err(_)) => {
                    record.errors[side] = true;
                    let bye = if side == 0 { dialer.farewell() } else { acceptor.farewell() };
                    to.extend(bye);
                }
            }
        }
        if quiet && wire.iter().all(Vec::is_empty) {
            return record;
        }
    }
    panic!("a conversation without an end");
}

/// Two honest sides, whatever the pieces: both are done, and know what the other said.
fn honest(input: &mut Input<'_>) {
    let setup = Setup::good(input);
    let words = [0, 1].map(|_| vec![input.byte() as u8; input.below(6000)]);
    let mut cuts = *input;
    let mut cut = || if cuts.is_empty() { MAX_READ } else { 1 + cuts.word() % MAX_READ };
    let record = converse(&setup, &mut |_, _| (), &mut cut, &words);
    assert!(!record.errors[0] && !record.errors[1]);
    let [d, a] = record.done;
    assert_eq!(d.expect("the dialler is done"), (setup.rails[1], words[1].clone()));
    assert_eq!(a.expect("the acceptor is done"), (setup.rails[0], words[0].clone()));
    assert_eq!(record.name, Some(setup.name));
    let [offer, other] = setup.offers;
    assert_eq!(record.offers, [Some(other), Some(offer)]);
}

/// One change of one message: a byte turned, put in, taken out, a piece said twice, an end cut off.
fn edit(bytes: &mut Vec<u8>, how: usize, at: usize, with: u8) {
    if bytes.is_empty() {
        return;
    }
    let at = at % bytes.len();
    match how % 6 {
        0 => bytes[at] ^= with.max(1),
        1 => bytes.insert(at, with),
        2 => drop(bytes.remove(at)),
        3 => bytes.extend_from_within(at..),
        4 => bytes.truncate(at),
        _ => bytes[at] = with,
    }
}

/// Somebody between the two who changes what they say, or who holds another secret.
fn between(input: &mut Input<'_>) {
    let mut setup = Setup::good(input);
    let strange = input.byte();
    match strange % 8 {
        0 => setup.secrets[0][usize::from(setup.name[0]) % 32] ^= 1 << (strange / 8 % 8),
        1 => setup.wanted[strange / 8 % 16] ^= 1,
        _ => {}
    }
    let stranger = strange % 8 < 2;
    let chunk = 1 + input.word() % MAX_READ;
    let edits = *input;
    let mut way = |n: usize, bytes: &mut Vec<u8>| {
        for e in edits.0.chunks_exact(5).take(8).filter(|e| usize::from(e[0]) % 6 == n) {
            edit(bytes, usize::from(e[1]), usize::from(e[2]) | usize::from(e[3]) << 8, e[4]);
        }
    };
    let words = [Vec::new(), Vec::new()];
    let record = converse(&setup, &mut way, &mut || chunk, &words);
    let [d, a] = [record.done[0].is_some(), record.done[1].is_some()];
    let early = [HELLO, CHALLENGE, PROOF, WELCOME];
    if d || a {
        assert!(!stranger, "a stranger got in");
        assert!(early.iter().all(|&n| record.intact(n)), "changed bytes passed for a peer");
    }
    assert!(!d || record.intact(ACCEPTOR_READY), "the dialler took a changed READY");
    assert!(!a || record.intact(DIALER_READY), "the acceptor took a changed READY");
    // What was put in behind a READY is the message stream's, and an honest pair always ends well.
    let honest = !stranger && (HELLO..=ACCEPTOR_READY).all(|n| record.intact(n));
    assert_eq!(d && a, honest, "honest: {honest}");
}

/// Noise, or what looks like a peer, for one machine that is alone: it never takes it for a proof,
/// and never holds more than it states.
fn noise(input: &mut Input<'_>) {
    let setup = Setup::good(&mut Input(&[]));
    let (mut dialer, mut acceptor) = (setup.dialer(), setup.acceptor());
    let hello = dialer.start().expect("good parameters");
    // A true greeting and HELLO takes the acceptor further, to where only the proof is missing.
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    if input.byte().is_multiple_of(2) {
        pieces.push(hello);
    }
    while !input.is_empty() && pieces.len() < 64 {
        pieces.push(piece(input));
    }
    for part in pieces.iter().flat_map(|p| p.chunks(MAX_READ)) {
        match dialer.receive(part) {
            Ok(Step::More) => {}
            Ok(step) => panic!("a dialler took noise: {step:?}"),
            Err(_) => drop(dialer.farewell()),
        }
        match acceptor.receive(part) {
            Ok(Step::More | Step::Send(_)) => {}
            Ok(step) => panic!("an acceptor took noise: {step:?}"),
            Err(_) => drop(acceptor.farewell()),
        }
    }
    bounded(&setup, &pieces);
    // Too late or too early, each call answers.
    drop((acceptor.refuse(Status::Busy, "enough"), dialer.refuse(Status::Busy, "enough")));
    drop((acceptor.closed(), dialer.closed(), acceptor.ready(1), dialer.ready(1)));
    drop((acceptor.accept(b"x"), acceptor.minor(), dialer.minor()));
}

/// What an unproven peer makes the acceptor hold, measured at the allocator after every read.
fn bounded(setup: &Setup, pieces: &[Vec<u8>]) {
    let before = held();
    let mut acceptor = setup.acceptor();
    for part in pieces.iter().flat_map(|p| p.chunks(MAX_READ)) {
        drop(acceptor.receive(part));
        let all = size_of::<Acceptor>() + held() - before;
        assert!(all <= UNPROVEN_BYTES, "{all} bytes held; stated: {UNPROVEN_BYTES}");
    }
}

/// A frame of any kind and length, true or not, or bytes as they are.
fn piece(input: &mut Input<'_>) -> Vec<u8> {
    let (kind, stated, long) = (input.byte(), input.byte(), input.below(4200));
    let mut body = input.bytes(usize::from(kind % 2 == 0) * 64).to_vec();
    body.resize(body.len().max(long), 0x41);
    let kind = kind / 2 % 9;
    if kind == 8 {
        return body;
    }
    if kind == 7 {
        let mut greeting = b"KVRB\x01\0\0\0".to_vec();
        greeting[4 + stated % 4] ^= (long & 1) as u8;
        return greeting;
    }
    let len = match stated % 4 {
        0 => stated * 1_000_003,
        _ => body.len() + 1,
    };
    let mut frame = (len as u32).to_le_bytes().to_vec();
    frame.push(kind as u8);
    frame.extend(body);
    frame
}
