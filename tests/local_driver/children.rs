//! What the children of `tests/local_driver.rs` do, and how they are started and heard.

use core::time::Duration;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::host::log;
use kvrail::nic::local::Share;
use kvrail::status::Status;
use kvrail::table::{Desc, Direction};

pub(crate) const BYTES: usize = 64 << 10;
/// Only against hangs.
pub(crate) const HANG: Duration = Duration::from_secs(60);

pub(crate) type Lines = BufReader<std::process::ChildStdout>;

pub(crate) fn start(role: &str, user: Option<u32>) -> Child {
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["child", "--exact", "--nocapture", "--test-threads=1"])
        .env("KVRAIL_TEST_ROLE", role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    if let Some(uid) = user {
        command.uid(uid).gid(uid).current_dir("/");
    }
    command.spawn().unwrap()
}

/// The child's next line that is meant for us.
pub(crate) fn line(child: &mut Lines) -> Vec<String> {
    let mut text = String::new();
    loop {
        text.clear();
        assert_ne!(child.read_line(&mut text).unwrap(), 0, "the child ended early");
        if let Some((_, rest)) = text.trim_end().split_once("@ ") {
            return rest.split(' ').map(str::to_owned).collect();
        }
    }
}

pub(crate) fn stop(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

fn wait_for_the_end() {
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest).unwrap();
}

fn ask() -> String {
    let mut text = String::new();
    std::io::stdin().read_line(&mut text).unwrap();
    text.trim_end().to_owned()
}

/// A target without an engine: shared memory and a buffer.
fn child_share() {
    let mut seed = 0x9e37_79b9_7f4a_7c15u64 ^ u64::from(std::process::id());
    let share = Share::new(2, 4, *b"cookiecookiecook", move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        seed >> 8
    })
    .unwrap();
    share.live_with_this_thread();
    share.open(0, 1);
    let buffer = vec![1u8; BYTES];
    let o = share.offer(1);
    println!("@ {} {} {} {}", o.pid, o.fd, o.guard, buffer.as_ptr() as u64);
    wait_for_the_end();
}

fn child_target() {
    let e = engine("target");
    let buffer = vec![7u8; BYTES];
    let r = e.register(buffer.as_ptr() as u64, BYTES as u64, 0).unwrap();
    let region = e.region_metadata(r.raw()).unwrap();
    println!("@ {} {} {}", hex(e.metadata()), hex(&region), buffer.as_ptr() as u64);
    wait_for_the_end();
}

/// A target that forks when it is told to. The child has all its files, and only sleeps.
fn child_forker() {
    let e = engine("forker");
    println!("@ {}", hex(e.metadata()));
    ask();
    // SAFETY: the child makes system calls only.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::sleep(120);
            libc::_exit(0);
        }
    }
    println!("@ {child}");
    wait_for_the_end();
}

/// Tries to connect, and prints how that ended.
fn child_reader() {
    let e = engine("reader");
    let peer = e.peer_add(&unhex(&ask()), None).unwrap();
    match e.peer_connect(peer.raw(), HANG) {
        Ok(()) => println!("@ connected"),
        Err(e) => println!("@ {:?} {}", e.status, hex(e.message.as_bytes())),
    }
    wait_for_the_end();
}

/// Writes its pattern into a target's region again and again, until it fails.
fn child_writer() {
    let e = engine("writer");
    let words: Vec<String> = ask().split(' ').map(str::to_owned).collect();
    let peer = e.peer_add(&unhex(&words[0]), None).unwrap();
    e.peer_connect(peer.raw(), HANG).unwrap();
    let far = e.region_import(peer.raw(), &unhex(&words[1])).unwrap();
    let (addr, len): (u64, u64) = (words[2].parse().unwrap(), words[3].parse().unwrap());
    let own = vec![0x55u8; len as usize];
    let near = e.register(own.as_ptr() as u64, len, 0).unwrap();
    let local = Desc { addr: own.as_ptr() as u64, len, dev: 0, region: near.raw() };
    let remote = Desc { addr, len, dev: 0, region: far.raw() };
    let t = e.prepare_descs(Direction::Write, peer.raw(), &[local], &[remote]).unwrap().raw();
    println!("@ writing");
    let until = Instant::now() + HANG;
    while Instant::now() < until && e.post(t, None).and_then(|_| finish(&e, t)).is_ok() {}
    println!("@ stopped");
    wait_for_the_end();
}

/// Prints the fixed bytes of an engine, and by how much it made this process's resident memory
/// grow.
fn child_resident() {
    let resident = || {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        // SAFETY: a plain number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
        text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * page
    };
    let before = resident();
    let e = engine("resident");
    let grown = resident() - before;
    println!("@ {} {grown}", e.info().fixed_bytes);
    wait_for_the_end();
}

/// Prints how many warnings one engine with transport local gave, then how many came by two with
/// auto, then the transport that they report.
fn child_auto() {
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    log::set_callback(Some(Box::new(|level, text| {
        if level == log::Level::Warn {
            LINES.lock().unwrap().push(text.to_owned());
        }
    })));
    let make = |transport: &str| {
        Engine::new(Config { transport: transport.into(), ..Config::default() }).unwrap()
    };
    let plain = make("local");
    let before = LINES.lock().unwrap().len();
    let both = [make("auto"), make("auto")];
    let lines = LINES.lock().unwrap().clone();
    let text = lines.join("\n");
    assert!(text.contains("no RDMA rails") && text.contains("transport local is used"), "{text}");
    println!("@ {before} {} {}", lines.len(), both[0].info().transport);
    drop(plain);
    wait_for_the_end();
}

/// An engine whose epoll file is none, so that it cannot take a connection over. Prints its blob;
/// when asked, how many peers it still knows, and how many shared memories it has mapped.
fn child_deaf() {
    let e = engine("deaf");
    let null = std::fs::File::open("/dev/null").unwrap();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        let is = std::fs::read_link(&path).unwrap_or_default();
        if is.to_string_lossy().contains("eventpoll") {
            let fd: i32 = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
            // SAFETY: open files of this process; the engine is meant to suffer.
            unsafe { libc::dup2(null.as_raw_fd(), fd) };
        }
    }
    println!("@ {}", hex(e.metadata()));
    ask();
    let shares = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|l| l.contains("memfd:kvrail")).count()
    };
    let until = Instant::now() + Duration::from_secs(5);
    while (e.info().peers, shares()) != (0, 1) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    println!("@ {} {}", e.info().peers, shares());
    wait_for_the_end();
}

/// Prints how many files and mappings are left after shares that could not be made.
fn child_leak() {
    let held = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let files = std::fs::read_dir("/proc/self/fd").unwrap().count();
        (files, maps.lines().filter(|l| l.contains("memfd:kvrail")).count())
    };
    let before = held();
    for _ in 0..3 {
        // No such guard address is taken, which comes out after the file was made and mapped.
        Share::new(2, 4, [9; 16], || 0).unwrap_err();
    }
    let after = held();
    println!("@ {} {}", after.0 - before.0, after.1 - before.1);
    wait_for_the_end();
}

/// Runs a child's part.
pub(crate) fn run(role: &str) {
    match role {
        "share" => child_share(),
        "target" => child_target(),
        "forker" => child_forker(),
        "undumpable" => {
            // SAFETY: plain numbers.
            unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
            child_target();
        }
        "reader" => child_reader(),
        "writer" => child_writer(),
        "resident" => child_resident(),
        "auto" => child_auto(),
        "leak" => child_leak(),
        "deaf" => child_deaf(),
        _ => panic!("no part is called {role}"),
    }
}

pub(crate) fn engine(name: &str) -> Engine {
    Engine::new(Config { name: name.into(), ..Config::default() }).unwrap()
}

pub(crate) fn finish(e: &Engine, t: u64) -> kvrail::host::error::Result<Status> {
    let until = Instant::now() + HANG;
    loop {
        match e.check(t)? {
            Status::InProgress => assert!(Instant::now() < until, "hang"),
            s => return Ok(s),
        }
    }
}
