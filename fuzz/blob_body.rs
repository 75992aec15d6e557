//! What one input of the `blob` fuzz target does. Also compiled into `tests/blob.rs`, which has the
//! same checks on machines without a fuzzer.

use kvrail::host::blob::{ConnBlob, HostOffer, RegionBlob};
use kvrail::host::error::Error;
use kvrail::host::handshake::{Acceptor, AcceptorParams, Dialer, DialerParams, Step, MAX_READ};

/// The acceptor's secret in every session here.
pub(crate) const SECRET: [u8; 32] = [0x5a; 32];
/// The dialler.
pub(crate) const DIALER: [u8; 16] = [0x11; 16];
/// The acceptor.
pub(crate) const ACCEPTOR: [u8; 16] = [0x22; 16];

/// Feeds every decoder and both machines.
pub(crate) fn run(data: &[u8]) {
    decoders(data);
    alone(data);
    between(data);
}

/// What decodes must encode to something that decodes to the same.
fn decoders(data: &[u8]) {
    if let Ok(blob) = ConnBlob::decode(data) {
        let again = blob.encode().expect("a decoded blob encodes");
        assert_eq!(ConnBlob::decode(&again).expect("and decodes"), blob);
    }
    if let Ok(blob) = RegionBlob::decode(data) {
        let again = blob.encode().expect("a decoded blob encodes");
        assert_eq!(RegionBlob::decode(&again).expect("and decodes"), blob);
    }
    if let Ok(offer) = HostOffer::decode(data) {
        assert_eq!(offer.encode(), data[..32]);
    }
}

/// A peer without the secret gets nowhere, with noise or with a recording, however its bytes are
/// cut.
fn alone(data: &[u8]) {
    let (first, rest) = data.split_first().unwrap_or((&0, &[]));
    let chunk = usize::from(*first) * 16 + 1;
    // Nonces of their own: the seeds hold a recorded session, which must not work again.
    let mut dialer = dialer(SECRET, 5);
    dialer.start().expect("good parameters");
    let mut acceptor = acceptor(SECRET, 6);
    for part in rest.chunks(chunk) {
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
}

/// Two honest sides, and somebody between them who changes bytes: `data` is a chunk size, then
/// triples of message, offset and change.
fn between(data: &[u8]) {
    let Some((chunk, edits)) = data.split_first() else { return };
    let mut touched = None;
    let chunk = usize::from(*chunk) + 1;
    let end = converse(dialer(SECRET, 3), acceptor(SECRET, 4), chunk, &mut |n, bytes| {
        let before = bytes.clone();
        for edit in edits.chunks_exact(3).take(8).filter(|e| usize::from(e[0] % 6) == n) {
            let at = usize::from(edit[1]) % bytes.len();
            bytes[at] ^= edit[2];
        }
        if *bytes != before && touched.is_none() {
            touched = Some(n);
        }
    });
    end.check(touched);
}

/// What a side knows of the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Peer {
    name: Vec<u8>,
    incarnation: [u8; 16],
    offer: Vec<u8>,
}

impl Peer {
    /// What the acceptor must know of [`dialer`].
    fn dialer() -> Peer {
        let (name, offer) = (b"decode-0".to_vec(), b"dialler offer".to_vec());
        Peer { name, incarnation: DIALER, offer }
    }

    /// What the dialler must know of [`acceptor`].
    fn acceptor() -> Peer {
        Peer { name: Vec::new(), incarnation: ACCEPTOR, offer: b"acceptor offer".to_vec() }
    }
}

/// How a conversation ended: what each side got, if it is done.
#[derive(Debug, Default)]
pub(crate) struct End {
    /// The acceptor and the first bytes of its messages, when the dialler is done.
    pub(crate) dialer: Option<(Peer, Vec<u8>)>,
    /// The dialler and the first bytes of its messages, when the acceptor is done.
    pub(crate) acceptor: Option<(Peer, Vec<u8>)>,
    /// The dialler's error.
    pub(crate) dialer_error: Option<Error>,
    /// The acceptor's error.
    pub(crate) acceptor_error: Option<Error>,
}

impl End {
    /// `touched` is the first message that was changed on the way.
    pub(crate) fn check(&self, touched: Option<usize>) {
        match touched {
            None => assert!(self.dialer.is_some() && self.acceptor.is_some(), "{self:?}"),
            Some(0..=3) => assert!(self.dialer.is_none() && self.acceptor.is_none(), "{self:?}"),
            // The two READYs cross: the receiver of the bad one is never done.
            Some(4) => assert!(self.acceptor.is_none(), "{self:?}"),
            Some(_) => assert!(self.dialer.is_none(), "{self:?}"),
        }
        let known = |end: &Option<(Peer, Vec<u8>)>, peer: Peer| {
            if let Some(got) = end {
                assert_eq!(*got, (peer, Vec::new()));
            }
        };
        known(&self.dialer, Peer::acceptor());
        known(&self.acceptor, Peer::dialer());
    }
}

/// Runs two machines against each other. Messages are numbered as sent: HELLO 0, CHALLENGE 1, PROOF
/// 2, WELCOME 3, the dialler's READY 4, the acceptor's 5. Farewells are not changed.
pub(crate) fn converse(
    mut dialer: Dialer,
    mut acceptor: Acceptor,
    chunk: usize,
    change: &mut dyn FnMut(usize, &mut Vec<u8>),
) -> End {
    let mut end = End::default();
    let mut to_acceptor = Vec::new();
    let mut to_dialer = Vec::new();
    let (mut of_dialer, mut of_acceptor) = (None, None);
    let mut say = |n: usize, mut bytes: Vec<u8>, to: &mut Vec<u8>| {
        change(n, &mut bytes);
        to.extend(bytes);
    };
    match dialer.start() {
        Ok(bytes) => say(0, bytes, &mut to_acceptor),
        Err(e) => end.dialer_error = Some(e),
    }
    let chunk = chunk.min(MAX_READ);
    // Far more turns than bytes: a conversation that does not end is a bug.
    for _ in 0..100_000 {
        let n = chunk.min(to_acceptor.len());
        let part: Vec<u8> = to_acceptor.drain(..n).collect();
        let quiet = part.is_empty();
        let step = acceptor.receive(&part);
        let idle = matches!(step, Ok(Step::More) | Err(_)) && quiet;
        match step {
            Ok(Step::Send(bytes)) => say(1, bytes, &mut to_dialer),
            Ok(Step::Decide { name, incarnation, offer, .. }) => {
                of_dialer = Some(Peer { name, incarnation, offer });
                say(3, acceptor.accept(b"acceptor offer").expect("due"), &mut to_dialer);
                say(5, acceptor.ready(1).expect("due"), &mut to_dialer);
            }
            Ok(Step::Done { leftover, .. }) => {
                let peer = of_dialer.take().expect("decided first, and done once");
                end.acceptor = Some((peer, leftover));
            }
            Ok(Step::Proven { .. }) => panic!("a dialler's step"),
            Ok(Step::More) => {}
            Err(e) => {
                end.acceptor_error = Some(e);
                to_dialer.extend(acceptor.farewell());
            }
        }
        let n = chunk.min(to_dialer.len());
        let part: Vec<u8> = to_dialer.drain(..n).collect();
        let quiet = part.is_empty();
        let step = dialer.receive(&part);
        let idle = idle && quiet && matches!(step, Ok(Step::More) | Err(_));
        match step {
            Ok(Step::Send(bytes)) => say(2, bytes, &mut to_acceptor),
            Ok(Step::Proven { offer }) => {
                of_acceptor = Some(Peer { name: Vec::new(), incarnation: ACCEPTOR, offer });
                say(4, dialer.ready(1).expect("due"), &mut to_acceptor);
            }
            Ok(Step::Done { leftover, .. }) => {
                let peer = of_acceptor.take().expect("proven first, and done once");
                end.dialer = Some((peer, leftover));
            }
            Ok(Step::Decide { .. }) => panic!("an acceptor's step"),
            Ok(Step::More) => {}
            Err(e) => {
                end.dialer_error = Some(e);
                to_acceptor.extend(dialer.farewell());
            }
        }
        if idle && to_acceptor.is_empty() && to_dialer.is_empty() {
            return end;
        }
    }
    panic!("a conversation without end: {end:?}");
}

/// A dialler of [`ACCEPTOR`].
pub(crate) fn dialer(secret: [u8; 32], nonce: u8) -> Dialer {
    Dialer::new(DialerParams {
        name: b"decode-0".to_vec(),
        incarnation: DIALER,
        wanted: ACCEPTOR,
        secret,
        attempt: 7,
        nonce: [nonce; 32],
        offer: b"dialler offer".to_vec(),
        ..DialerParams::default()
    })
}

/// The acceptor that it dials.
pub(crate) fn acceptor(secret: [u8; 32], nonce: u8) -> Acceptor {
    Acceptor::new(AcceptorParams {
        incarnation: ACCEPTOR,
        secret,
        nonce: [nonce; 32],
        ..AcceptorParams::default()
    })
}
