//! Two engines in one process over the `local` driver: the shortest whole path.
#![cfg(feature = "std")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

use core::time::Duration;
use std::time::Instant;

use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::status::Status;
use kvrail::table::{Desc, Direction};

fn engine(name: &str, background: bool) -> Engine {
    let config = Config { name: name.into(), progress_thread: background, ..Config::default() };
    Engine::new(config).unwrap()
}

fn finish(e: &Engine, t: u64) -> Result<Status, kvrail::host::error::Error> {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        match e.check(t)? {
            Status::InProgress => assert!(Instant::now() < until, "hang"),
            s => return Ok(s),
        }
    }
}

#[test]
fn bytes_and_a_message_cross_in_both_directions() {
    for background in [true, false] {
        let (a, b) = (engine("a", background), engine("b", background));
        let src: Vec<u8> = (0..1 << 20).map(|i| (i * 7 % 251) as u8).collect();
        let mut dst = vec![0u8; 1 << 20];
        let ra = a.register(src.as_ptr() as u64, src.len() as u64, 0).unwrap();
        let rb = b.register(dst.as_mut_ptr() as u64, dst.len() as u64, 0).unwrap();
        let pa = b.peer_add(a.metadata(), Some(b"a")).unwrap();
        b.peer_connect(pa.raw(), Duration::from_secs(10)).unwrap();
        let remote = b.region_import(pa.raw(), &a.region_metadata(ra.raw()).unwrap()).unwrap();
        let n = 100;
        let len = 10_000;
        let desc =
            |base: u64, i: u64, region: u64| Desc { addr: base + i * len, len, dev: 0, region };
        let local: Vec<Desc> = (0..n).map(|i| desc(dst.as_ptr() as u64, i, rb.raw())).collect();
        let far: Vec<Desc> =
            (0..n).map(|i| desc(src.as_ptr() as u64, n - 1 - i, remote.raw())).collect();
        let t = b.prepare_descs(Direction::Read, pa.raw(), &local, &far).unwrap().raw();
        b.post(t, Some(b"fetched")).unwrap();
        assert_eq!(finish(&b, t).unwrap(), Status::Ok);
        for i in 0..n as usize {
            let (l, r) = (i * len as usize, (n as usize - 1 - i) * len as usize);
            assert_eq!(dst[l..l + len as usize], src[r..r + len as usize], "block {i}");
        }
        let mut got = Vec::new();
        let until = Instant::now() + Duration::from_secs(60);
        while got.is_empty() && Instant::now() < until {
            a.notifs(&mut |name, msg| got.push((name.to_vec(), msg.to_vec()))).unwrap();
        }
        assert_eq!(got, [(b"b".to_vec(), b"fetched".to_vec())]);
        b.release(t).unwrap();
        b.deregister(rb.raw(), true).unwrap();
        a.deregister(ra.raw(), true).unwrap();
    }
}
