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
    let mut last = Instant::now();
    let mut files = Vec::new();
    while !shared.stopping() {
        if core.poll() {
            last = Instant::now();
            continue;
        }
        if last.elapsed() < spin {
            spin_loop();
            continue;
        }
        core.worker().doze();
        // Whatever completes from here on rings; what completed before is looked for once more.
        let mut soon = false;
        if shared.rails.is_some() {
            soon = core.arm();
            if core.poll() {
                core.worker().rise();
                last = Instant::now();
                continue;
            }
        }
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
        shared.work.clear();
        for rail in shared.rails.iter().flat_map(|r| r.iter()) {
            rail.device.clear_channel();
        }
        if files[0].revents == 0 && files[1].revents != 0 && !core.poll() {
            // Readable, but nothing could be taken: the application leaves its messages lying, or a
            // stream is closed and its peer about to be buried.
            sys::wait(&mut [], SOON_MS);
        }
        last = Instant::now();
    }
}
