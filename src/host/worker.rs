//! The progress thread: polls while there is something to do, spins for a moment, then sleeps until
//! somebody rings or a message comes.

use core::time::Duration;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use super::shared::Shared;
use super::sys;
use crate::sync::spin_loop;

/// How long it sleeps when a socket took only part of a message, or messages wait for room.
const SOON_MS: i32 = 1;

pub(super) fn run(shared: &Arc<Shared>) {
    sys::block_signals();
    let spin = Duration::from_micros(u64::from(shared.config.spin_us));
    let core = &shared.core;
    // Since when polls are empty. One that finds work makes no system call, so it leaves even the
    // clock alone.
    let mut idle: Option<Instant> = None;
    let mut files = Vec::new();
    while !shared.stopping() {
        if core.poll() {
            idle = None;
            continue;
        }
        if idle.get_or_insert_with(Instant::now).elapsed() < spin {
            spin_loop();
            continue;
        }
        let mut soon = false;
        if shared.rails.is_some() {
            // Whatever completes from here on is an event; what completed before is looked for once
            // more. The bell is still off, or this thread would ring it for work of its own.
            soon = core.arm();
            if core.poll() {
                idle = None;
                continue;
            }
        }
        core.worker().doze();
        if core.has_work() || shared.stopping() {
            core.worker().rise();
            std::thread::yield_now();
            continue;
        }
        files.clear();
        files.push(sys::interest(shared.work.fd(), libc::POLLIN));
        files.push(sys::interest(shared.epoll.as_raw_fd(), libc::POLLIN));
        for rail in shared.rails.iter().flat_map(|r| r.iter()) {
            files.push(sys::interest(rail.device.channel_fd(), libc::POLLIN));
        }
        sys::wait(&mut files, if soon || core.is_stuck() { SOON_MS } else { -1 });
        core.worker().rise();
        // What woke us comes first: clearing descriptors is system calls. The next sleep polls once
        // more, for what comes between.
        let found = core.poll();
        if files[0].revents != 0 {
            shared.work.clear();
        }
        let channels = files[2..].iter();
        for (rail, file) in shared.rails.iter().flat_map(|r| r.iter()).zip(channels) {
            if file.revents != 0 {
                rail.device.clear_channel();
            }
        }
        if !found && files[0].revents == 0 && files[1].revents != 0 && !core.poll() {
            // Readable, but nothing could be taken: the application leaves its messages lying, or a
            // stream is closed and its peer about to be buried.
            sys::wait(&mut [], SOON_MS);
        }
        idle = None;
    }
}
