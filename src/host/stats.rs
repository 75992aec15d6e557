//! `KVRAIL_STATS=FILE`: what the engine did, as one JSON object in a file that is replaced at most
//! every 100 ms while it changes, and once more at the end.

use core::fmt::Write as _;
use std::path::{Path, PathBuf};

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
        if let Err(e) = replace(path, &text) {
            log::warn(&format!("KVRAIL_STATS: cannot write {}: {e}", path.display()));
            self.path = None;
            return;
        }
        self.last = text;
    }
}

/// Puts `text` in the place of the file, for readers at once. Engines of one process may have the
/// same file, so each control thread has a name of its own for what is not whole yet.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let mut fresh = path.to_path_buf().into_os_string();
    fresh.push(format!(".{}.{:?}", std::process::id(), std::thread::current().id()));
    std::fs::write(&fresh, text)?;
    std::fs::rename(&fresh, path)
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panicking")]
mod tests {
    use super::*;

    #[test]
    fn engines_with_the_same_file_do_not_take_it_from_each_other() {
        let folder = std::env::temp_dir().join(format!("kvrail-stats-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("figures");
        std::thread::scope(|s| {
            for text in ["one", "another"] {
                let path = &path;
                s.spawn(move || (0..5000).for_each(|_| replace(path, text).unwrap()));
            }
        });
        assert!(["one", "another"].contains(&std::fs::read_to_string(&path).unwrap().as_str()));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
