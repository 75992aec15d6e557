//! Two engines in two processes: the second is this binary again, told what to do line by line.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvrail::host::config::Config;
use kvrail::status::Status;
use kvrail::table::{Desc, Direction};

use crate::fake::{dress, wait, watch, Fake, HANG};
use crate::rig::{
    apply, config, finish, nics, notifs, pattern, same, scatter, Piece, Rng, Side, BOTH, MIB,
};

const ROLE: &str = "KVRAIL_TEST_ROLE";

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let byte = |i: usize| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap();
    (0..text.len() / 2).map(byte).collect()
}

pub(crate) fn setup(text: &str) -> Config {
    let words: Vec<&str> = text.split('/').collect();
    let port = words.get(3).map_or(0, |w| w.parse().unwrap());
    Config {
        stripe_width: words[2].parse().unwrap(),
        port_min: port,
        port_max: port,
        ..config(words[0], words[1])
    }
}

/// Runs the other process's part, and is an empty test otherwise.
#[test]
fn part() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // SAFETY: only numbers. A test that fails while this process is stopped ends it too.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    watch();
    let fake = Fake::loaded();
    let mut side = Some(Side::new(setup(&role), MIB));
    let mine = side.as_ref().unwrap();
    println!("@ {} {} {}", hex(mine.e.metadata()), hex(&mine.blob()), mine.mem.base());
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let mine = side.as_ref();
        match words[0] {
            "fill" => {
                mine.unwrap().mem.fill(words[1].parse().unwrap());
                println!("@ ok");
            }
            "dump" => {
                std::fs::write(words[1], mine.unwrap().mem.copy()).unwrap();
                println!("@ ok");
            }
            "hear" => {
                let got = notifs(&mine.unwrap().e, words[1].parse().unwrap());
                let texts = got.iter().map(|(n, t)| format!("{}:{}", hex(n), hex(t)));
                let texts: Vec<_> = texts.collect();
                println!("@ {}", texts.join(" "));
            }
            "dial" => {
                let e = &mine.unwrap().e;
                let peer = e.peer_add(&unhex(words[1]), None).unwrap();
                e.peer_connect(peer.raw(), HANG).unwrap();
                e.notify(peer.raw(), b"dialled").unwrap();
                println!("@ ok");
            }
            "pour" => {
                let there = words[3].parse().unwrap();
                pour(mine.unwrap(), &unhex(words[1]), &unhex(words[2]), there);
                println!("@ ok");
            }
            "end" => {
                side = None;
                fake.is_empty();
                println!("@ ok");
            }
            other => panic!("{other}?"),
        }
    }
}

/// Dials, and posts READs and WRITEs of all memory without end, beside what else is asked for.
fn pour(mine: &Side, metadata: &[u8], region: &[u8], there: u64) {
    let peer = mine.e.peer_add(metadata, None).unwrap().raw();
    mine.e.peer_connect(peer, HANG).unwrap();
    let far = mine.e.region_import(peer, region).unwrap().raw();
    let ts = BOTH.map(|direction| {
        let part = if direction == Direction::Read { 0 } else { MIB / 2 };
        let at = || (0..64).map(move |i| (part + i * 8192, 8192));
        let local = descs(mine.mem.base(), mine.region, at());
        let remote = descs(there, far, at());
        mine.e.prepare_descs(direction, peer, &local, &remote).unwrap().raw()
    });
    // Only a signal ends this process.
    loop {
        for t in ts {
            if !matches!(mine.e.check(t), Ok(Status::InProgress)) {
                let _ = mine.e.post(t, None);
                println!("@ ok");
            }
        }
        std::thread::yield_now();
    }
}

pub(crate) struct Other {
    pub(crate) child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    pub(crate) metadata: Vec<u8>,
    pub(crate) region: Vec<u8>,
    pub(crate) base: u64,
}

impl Other {
    pub(crate) fn start(name: &str, nics: &str, width: &str, devices: usize) -> Other {
        let folder = PathBuf::from(std::env::var("KVRAIL_TEST_FOLDER").unwrap());
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["processes::part", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{name}/{nics}/{width}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        dress(&mut command, &folder, 2, devices, "");
        let mut child = command.spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let from = BufReader::new(from);
        let mut other =
            Other { child, to, from, metadata: Vec::new(), region: Vec::new(), base: 0 };
        let words = other.hear();
        (other.metadata, other.region) = (unhex(&words[0]), unhex(&words[1]));
        other.base = words[2].parse().unwrap();
        other
    }

    pub(crate) fn hear(&mut self) -> Vec<String> {
        let mut text = String::new();
        loop {
            text.clear();
            assert_ne!(self.from.read_line(&mut text).unwrap(), 0, "the other process ended");
            if let Some((_, rest)) = text.trim_end().split_once("@ ") {
                return rest.split(' ').map(str::to_owned).collect();
            }
        }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    pub(crate) fn ask(&mut self, line: &str) -> Vec<String> {
        self.tell(line);
        self.hear()
    }

    pub(crate) fn memory(&mut self) -> Vec<u8> {
        let folder = PathBuf::from(std::env::var("KVRAIL_TEST_FOLDER").unwrap());
        let path = folder.join("dump");
        self.ask(&format!("dump {}", path.display()));
        std::fs::read(path).unwrap()
    }

    /// It gave everything back, and left in order.
    pub(crate) fn end(mut self) {
        self.ask("end");
        drop(self.to);
        let mut rest = String::new();
        while self.from.read_line(&mut rest).unwrap() > 0 {}
        assert!(self.child.wait().unwrap().success());
    }
}

pub(crate) fn descs(base: u64, region: u64, at: impl Iterator<Item = (usize, usize)>) -> Vec<Desc> {
    at.map(|(at, len)| Desc { addr: base + at as u64, len: len as u64, dev: 0, region }).collect()
}

/// Carries pieces with a message and compares both processes' memories, byte by byte.
fn moves(
    side: &Side,
    other: &mut Other,
    (peer, far): (u64, u64),
    direction: Direction,
    pieces: &[Piece],
    seed: u64,
) {
    other.ask(&format!("fill {seed}"));
    let (mut here, mut there) = (side.mem.fill(seed + 1), pattern(seed, MIB));
    apply(direction, pieces, &mut here, &mut there);
    let local = descs(side.mem.base(), side.region, pieces.iter().map(|p| (p.here, p.len)));
    let remote = descs(other.base, far, pieces.iter().map(|p| (p.there, p.len)));
    let t = side.e.prepare_descs(direction, peer, &local, &remote).unwrap().raw();
    let text = pattern(seed, pieces.len());
    side.e.post(t, Some(&text)).unwrap();
    let heard = other.ask("hear 1");
    assert_eq!(heard, [format!("{}:{}", hex(b"a"), hex(&text))]);
    same(&other.memory(), &there, direction, "there, when the message came");
    assert_eq!(finish(&side.e, t), Ok(Status::Ok));
    same(&side.mem.copy(), &here, direction, "here");
    side.e.release(t).unwrap();
}

#[test]
fn every_byte_arrives_in_another_process() {
    let fake = alone!(8, "");
    let mut rng = Rng::new();
    for rails in [1, 2, 4, 8] {
        for width in [0, 1] {
            let mut other = Other::start("b", &nics(0..rails), &width.to_string(), 8);
            let side = Side::new(setup(&format!("a/{}/{width}", nics(0..rails))), MIB);
            let peer = side.e.peer_add(&other.metadata, None).unwrap().raw();
            side.e.peer_connect(peer, HANG).unwrap();
            let far = side.e.region_import(peer, &other.region).unwrap().raw();
            for n in [1, 200] {
                for direction in BOTH {
                    let pieces = scatter(&mut rng, n, MIB, MIB);
                    let seed = rng.below(1 << 40);
                    moves(&side, &mut other, (peer, far), direction, &pieces, seed);
                }
            }
            other.end();
            let gone = || side.e.peer_state(peer) != Ok(Status::Ok);
            wait(gone, || "the peer is gone and nobody noticed".into());
        }
    }
    fake.is_empty();
}

#[test]
fn two_processes_may_dial_each_other_at_once_and_anew() {
    let fake = alone!(4, "");
    let side = Side::new(setup("a/fake0,fake1/1"), MIB);
    let mut rng = Rng::new();
    for round in 0..5u64 {
        // Other NICs under the same name.
        let nics = ["fake1,fake0", "fake2,fake1,fake0", "fake3"][round as usize % 3];
        let mut other = Other::start("b", nics, "0", 4);
        other.tell(&format!("dial {}", hex(side.e.metadata())));
        let peer = side.e.peer_add(&other.metadata, None).unwrap().raw();
        side.e.peer_connect(peer, HANG).unwrap();
        assert_eq!(other.hear(), ["ok"]);
        assert_eq!(notifs(&side.e, 1), [(b"b".to_vec(), b"dialled".to_vec())]);
        let far = side.e.region_import(peer, &other.region).unwrap().raw();
        for direction in BOTH {
            let pieces = scatter(&mut rng, 50, MIB, MIB);
            moves(&side, &mut other, (peer, far), direction, &pieces, round + 7);
        }
        if round % 2 == 0 {
            other.end();
        } else {
            // No word of farewell.
            other.child.kill().unwrap();
            other.child.wait().unwrap();
        }
        let gone = || side.e.peer_state(peer) != Ok(Status::Ok);
        wait(gone, || "the peer is gone and nobody noticed".into());
    }
    drop(side);
    fake.is_empty();
}
