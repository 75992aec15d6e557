//! Log lines: one that names the cause. `KVRAIL_LOG` sets the level and, behind a comma, a file; a
//! callback replaces both targets. With the feature `tracing` every line is an event there too.

use std::fs::File;
use std::io::Write;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// How much a line matters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// Something failed.
    Error = 1,
    /// Something is not as it should be.
    Warn,
    /// What an operator wants to know once.
    Info,
    /// What a developer wants to know.
    Debug,
    /// Everything.
    Trace,
}

impl Level {
    const ALL: [(Level, &'static str); 5] = [
        (Level::Error, "error"),
        (Level::Warn, "warn"),
        (Level::Info, "info"),
        (Level::Debug, "debug"),
        (Level::Trace, "trace"),
    ];

    fn name(self) -> &'static str {
        Level::ALL[self as usize - 1].1
    }
}

/// Receives lines, from any thread.
pub type Callback = Box<dyn Fn(Level, &str) + Send + Sync>;

static CALLBACK: RwLock<Option<Arc<Callback>>> = RwLock::new(None);

struct Setting {
    level: Level,
    file: Option<File>,
}

fn setting() -> &'static Setting {
    static SETTING: OnceLock<Setting> = OnceLock::new();
    SETTING.get_or_init(|| {
        let (setting, complaint) = parse(&std::env::var("KVRAIL_LOG").unwrap_or_default());
        if let Some(text) = complaint {
            eprintln!("kvrail: warn: {text}");
        }
        setting
    })
}

/// `LEVEL`, `LEVEL,FILE` or `,FILE`.
fn parse(text: &str) -> (Setting, Option<String>) {
    let (level, path) = text.split_once(',').unwrap_or((text, ""));
    let mut complaint = None;
    let wanted = level.trim().to_ascii_lowercase();
    let level = Level::ALL.iter().find(|(_, n)| *n == wanted).map_or(Level::Warn, |(l, _)| *l);
    if !wanted.is_empty() && level.name() != wanted {
        complaint = Some(format!(
            "KVRAIL_LOG: {wanted:?} is no level (error, warn, info, debug, trace); using warn"
        ));
    }
    let mut file = None;
    if !path.is_empty() {
        match File::options().create(true).append(true).open(path) {
            Ok(f) => file = Some(f),
            Err(e) => complaint = Some(format!("KVRAIL_LOG: cannot write to {path:?}: {e}")),
        }
    }
    (Setting { level, file }, complaint)
}

/// Sends lines to `callback`, or with `None` back to where `KVRAIL_LOG` says (standard error).
pub fn set_callback(callback: Option<Callback>) {
    *CALLBACK.write().unwrap_or_else(PoisonError::into_inner) = callback.map(Arc::new);
}

/// One line.
pub(crate) fn log(level: Level, text: &str) {
    #[cfg(feature = "tracing")]
    match level {
        Level::Error => tracing::error!(target: "kvrail", "{text}"),
        Level::Warn => tracing::warn!(target: "kvrail", "{text}"),
        Level::Info => tracing::info!(target: "kvrail", "{text}"),
        Level::Debug => tracing::debug!(target: "kvrail", "{text}"),
        Level::Trace => tracing::trace!(target: "kvrail", "{text}"),
    }
    let setting = setting();
    if level > setting.level {
        return;
    }
    // The lock is not held during the call, which may set another callback.
    let callback = CALLBACK.read().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(call) = callback {
        call(level, text);
        return;
    }
    let line = format!("kvrail: {}: {text}\n", level.name());
    // A line that cannot be written is lost; there is nowhere to say so.
    let _ = match &setting.file {
        Some(file) => { &mut &*file }.write_all(line.as_bytes()),
        None => std::io::stderr().write_all(line.as_bytes()),
    };
}

/// A line at level `warn`.
pub fn warn(text: &str) {
    log(Level::Warn, text);
}

pub(crate) fn info(text: &str) {
    log(Level::Info, text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_files_are_read_and_nonsense_is_named() {
        let (s, complaint) = parse("");
        assert!(s.level == Level::Warn && s.file.is_none() && complaint.is_none());
        assert_eq!(parse("DEBUG").0.level, Level::Debug);
        assert!(parse("loud").1.unwrap().contains("\"loud\" is no level (error, warn"));
        assert!(parse("info,/nonexistent/x").1.unwrap().contains("/nonexistent/x"));
    }
}
