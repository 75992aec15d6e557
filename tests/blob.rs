//! Metadata blobs and the bootstrap handshake from outside: versions, truncation, noise, tampering.
#![cfg(feature = "std")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

#[path = "blob/blobs.rs"]
mod blobs;
#[path = "../fuzz/blob_body.rs"]
mod body;
#[path = "blob/handshakes.rs"]
mod handshakes;

use core::net::{Ipv4Addr, SocketAddrV4};
use kvrail::host::blob::{ConnBlob, HostOffer, RegionBlob};

/// A blob with a name of 36 bytes (as a UUID has) and one address.
fn conn() -> ConnBlob {
    ConnBlob {
        name: b"0f8fad5b-d9cb-469f-a165-70867728950e".to_vec(),
        incarnation: [1; 16],
        secret: [2; 32],
        addrs: vec![SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, 1), 40_000)],
        offer: HostOffer { boot_id: [3; 16], pid_ns: 4_026_531_836, uid: 1000, pid: 4242 },
        max_message: 65_536,
        rails: Vec::new(),
    }
}

/// A region somewhere in the middle.
fn region() -> RegionBlob {
    RegionBlob {
        incarnation: [1; 16],
        slot: 5,
        generation: 6,
        base: 0x7f00_0000_0000,
        len: 1 << 30,
        mem: 0,
        keys: Default::default(),
    }
}

/// Random numbers from a seed (splitmix64).
struct Rng(pub u64);

impl Rng {
    /// The next one.
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`.
    fn below(&mut self, n: usize) -> usize {
        (self.draw() % n as u64) as usize
    }
}

/// Good inputs to start from: both blobs, and what either side of a handshake hears.
fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut to_dialer = vec![255];
    let mut to_acceptor = vec![255];
    body::converse(
        body::dialer(body::SECRET, 3),
        body::acceptor(body::SECRET, 4),
        4096,
        &mut |n, bytes| match n {
            0 | 2 | 4 => to_acceptor.extend_from_slice(bytes),
            _ => to_dialer.extend_from_slice(bytes),
        },
    );
    vec![
        ("conn", conn().encode().unwrap()),
        ("region", region().encode().unwrap()),
        ("to_dialer", to_dialer),
        ("to_acceptor", to_acceptor),
        ("edits", vec![40, 0, 9, 1, 3, 60, 128]),
    ]
}

/// Writes the seeds to the directory of `KVRAIL_FUZZ_SEEDS`, for `cargo fuzz run blob`:
/// `KVRAIL_FUZZ_SEEDS=fuzz/corpus/blob cargo test --test blob seeds_of_the_fuzzer`.
#[test]
fn seeds_of_the_fuzzer() {
    let dir = std::env::var_os("KVRAIL_FUZZ_SEEDS");
    for (name, bytes) in seeds() {
        body::run(&bytes);
        if let Some(dir) = &dir {
            std::fs::create_dir_all(dir).unwrap();
            std::fs::write(std::path::Path::new(dir).join(name), bytes).unwrap();
        }
    }
}

/// `KVRAIL_TEST_SEED` and `KVRAIL_TEST_INPUTS` repeat or lengthen it.
#[test]
fn fuzz_body_on_seeded_inputs() {
    let number =
        |name: &str, or: u64| std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(or);
    let seed = number("KVRAIL_TEST_SEED", 1);
    let inputs = number("KVRAIL_TEST_INPUTS", 3000);
    println!("KVRAIL_TEST_SEED={seed} KVRAIL_TEST_INPUTS={inputs}");
    let mut rng = Rng(seed);
    let seeds = seeds();
    for _ in 0..inputs {
        let mut bytes = if rng.below(3) == 0 {
            (0..rng.below(300)).map(|_| rng.draw() as u8).collect()
        } else {
            seeds[rng.below(seeds.len())].1.clone()
        };
        for _ in 0..=rng.below(4) {
            if !bytes.is_empty() {
                let at = rng.below(bytes.len());
                match rng.below(4) {
                    0 => bytes.truncate(at),
                    1 => bytes.insert(at, rng.draw() as u8),
                    2 => drop(bytes.remove(at)),
                    _ => bytes[at] ^= 1 << rng.below(8),
                }
            }
        }
        body::run(&bytes);
    }
}
