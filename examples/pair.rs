//! Two engines in one process: decode reads the even blocks of prefill and writes the odd ones.
//! Every byte is compared.
//!
//!     cargo run --release --example pair

use core::error::Error;
use core::time::Duration;
use std::thread;
use std::time::Instant;

use kvrail::host::config::Config;
use kvrail::host::engine::Engine;
use kvrail::status::Status;
use kvrail::table::{Desc, Direction, Stride};

const BLOCKS: usize = 64;
const BLOCK: usize = 4097;
const HOST: u32 = 0;
const MESSAGE: &[u8] = b"all blocks moved";

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Every byte of every block of either side is its own.
fn pattern(side: usize, block: usize, byte: usize) -> u8 {
    (side * 101 + block * 31 + byte * 7 + (byte >> 8)) as u8
}

fn filled(side: usize) -> Vec<u8> {
    (0..BLOCKS * BLOCK).map(|i| pattern(side, i / BLOCK, i % BLOCK)).collect()
}

fn expect(memory: &[u8], place: usize, side: usize, block: usize) -> Outcome<()> {
    let seen = &memory[place * BLOCK..(place + 1) * BLOCK];
    match seen.iter().enumerate().position(|(i, byte)| *byte != pattern(side, block, i)) {
        Some(byte) => Err(format!("block {place} differs at byte {byte}").into()),
        None => Ok(()),
    }
}

fn engine(name: &str) -> Outcome<Engine> {
    let mut config = Config { name: name.into(), ..Config::default() };
    for warning in config.apply_env()? {
        eprintln!("pair.rs: {warning}");
    }
    Ok(Engine::new(config)?)
}

fn run(engine: &Engine, transfer: u64, message: Option<&[u8]>) -> Outcome<()> {
    let mut status = engine.post(transfer, message)?;
    while status == Status::InProgress {
        thread::yield_now();
        status = engine.check(transfer)?;
    }
    Ok(engine.release(transfer)?)
}

fn wait_for_message(engine: &Engine) -> Outcome<()> {
    let end = Instant::now() + Duration::from_secs(10);
    let mut seen = Vec::new();
    while seen.is_empty() {
        engine.notifs(&mut |name, message| seen.push((name.to_vec(), message.to_vec())))?;
        if Instant::now() > end {
            return Err("no notification within 10 s".into());
        }
        thread::yield_now();
    }
    if seen != [(b"decode".to_vec(), MESSAGE.to_vec())] {
        return Err(format!("unexpected notifications: {seen:?}").into());
    }
    Ok(())
}

fn main() -> Outcome<()> {
    // Peers write to this memory behind Rust's back, so it is reached by pointer until they stop.
    let (theirs, ours) = (filled(1).leak(), filled(2).leak());
    let (theirs_at, ours_at) = (theirs.as_mut_ptr() as u64, ours.as_mut_ptr() as u64);
    let len = (BLOCKS * BLOCK) as u64;

    let (prefill, decode) = (engine("prefill")?, engine("decode")?);
    let there = prefill.register(theirs_at, len, HOST)?.raw();
    let here = decode.register(ours_at, len, HOST)?.raw();

    let peer = decode.peer_add(prefill.metadata(), Some(b"prefill"))?.raw();
    decode.peer_connect(peer, Duration::from_secs(10))?;
    let imported = decode.region_import(peer, &prefill.region_metadata(there)?)?.raw();

    // Tables: strided here, a list there. They say the same.
    let block = BLOCK as u64;
    let strided =
        Stride { base: ours_at, len: block, stride: block, count: BLOCKS as u64, region: here };
    let list: Vec<Desc> = (0..BLOCKS as u64)
        .map(|i| Desc { addr: theirs_at + i * block, len: block, dev: 0, region: imported })
        .collect();
    let local = decode.table_create_strided(&[strided])?.raw();
    let remote = decode.table_create(&list)?.raw();

    let even: Vec<u32> = (0..BLOCKS as u32).step_by(2).collect();
    let odd: Vec<u32> = (1..BLOCKS as u32).step_by(2).collect();
    let reversed: Vec<u32> = even.iter().rev().copied().collect();
    let pull = decode.prepare(Direction::Read, peer, local, &reversed, remote, &even)?;
    run(&decode, pull.raw(), None)?;
    let push = decode.prepare(Direction::Write, peer, local, &odd, remote, &odd)?;
    run(&decode, push.raw(), Some(MESSAGE))?;
    wait_for_message(&prefill)?;

    decode.table_destroy(local)?;
    decode.table_destroy(remote)?;
    decode.region_forget(imported)?;
    decode.deregister(here, false)?;
    prefill.deregister(there, false)?;

    for (to, from) in reversed.iter().zip(&even) {
        expect(ours, *to as usize, 1, *from as usize)?;
    }
    for i in 0..BLOCKS {
        expect(theirs, i, 1 + i % 2, i)?;
    }
    let half = BLOCKS / 2;
    println!(
        "pair.rs: OK, {half} blocks of {BLOCK} bytes read and {half} written between two engines, \
         1 notification"
    );
    Ok(())
}
