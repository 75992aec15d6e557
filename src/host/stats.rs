//! `KVRAIL_STATS=FILE`: what the engine did, as one JSON object in a file that is replaced at most
//! every 100 ms while it changes, and once more at the end.

use core::fmt::Write as _;
use std::path::PathBuf;

use super::log;
use super::shared::Shared;
use crate::sync::Ordering;

pub(super) struct Stats {
    path: Option<PathBuf>,
    last: String,
}

impl Stats {
    pub(super) fn new(_shared: &Shared) -> Stats {
        Stats { path: std::env::var_os("KVRAIL_STATS").map(PathBuf::from), last: String::new() }
    }

    pub(super) fn is_on(&self) -> bool {
        self.path.is_some()
    }

    /// Writes the file when something changed.
    pub(super) fn look(&mut self, shared: &Shared) {
        if self.path.is_some() {
            self.write(shared);
        }
    }

    pub(super) fn write(&mut self, shared: &Shared) {
        let Some(path) = &self.path else { return };
        let text = json(shared);
        if text == self.last {
            return;
        }
        let mut fresh = path.clone().into_os_string();
        fresh.push(format!(".{}", std::process::id()));
        let fresh = PathBuf::from(fresh);
        let done = std::fs::write(&fresh, &text).and_then(|()| std::fs::rename(&fresh, path));
        if let Err(e) = done {
            log::warn(&format!("KVRAIL_STATS: cannot write {}: {e}", path.display()));
            self.path = None;
            return;
        }
        self.last = text;
    }
}

fn json(shared: &Shared) -> String {
    // Behind the lanes of NICs there is one for transfers within the engine, as in `info`.
    let (transport, count) = match &shared.rails {
        Some(rails) => ("verbs", rails.len()),
        None => ("local", shared.core.lanes().len()),
    };
    let name = |i: usize| match shared.rails.as_ref().and_then(|r| r.get(i)) {
        Some(rail) => rail.nic.label(),
        None => format!("local{i}"),
    };
    let mut out = format!("{{\"transport\":\"{transport}\",\"rails\":[");
    for (i, lane) in shared.core.lanes().iter().take(count).enumerate() {
        let s = &lane.stats;
        let get = |v: &crate::sync::AtomicU64| v.load(Ordering::Relaxed);
        let comma = if i == 0 { "" } else { "," };
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "{comma}{{\"name\":\"{}\",\"bytes_read\":{},\"bytes_written\":{},\
             \"work_requests\":{},\"claims\":{},\"errors\":{}}}",
            name(i),
            get(&s.bytes_read),
            get(&s.bytes_written),
            get(&s.work_requests),
            get(&s.claims),
            get(&s.errors),
        );
    }
    let c = &shared.counts;
    let get = |v: &crate::sync::AtomicU64| v.load(Ordering::Relaxed);
    let _ = write!(
        out,
        "],\"transfers\":{{\"posted\":{},\"descriptors\":{},\"work_requests\":{},\"bytes\":{},\
         \"post_ns\":{}}}}}",
        get(&c.posted),
        get(&c.descriptors),
        get(&c.work_requests),
        get(&c.bytes),
        get(&c.post_ns),
    );
    out
}
