//! Reads small files below a root that may be any folder: sysfs and procfs of this host, or a
//! fixture. Nothing leaves the root, nothing blocks, and whatever cannot be read counts as missing.

use core::fmt::Write as _;
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};

/// Symbolic links followed on the way to one file, as in the kernel.
const MAX_LINKS: usize = 40;
/// Names looked at on the way to one file.
const MAX_STEPS: usize = 512;
/// Entries taken from one folder.
const MAX_ENTRIES: usize = 8192;
/// Bytes taken from one attribute; sysfs never has more than a page.
const MAX_ATTRIBUTE: u64 = 4096;
/// Bytes taken from a table such as `/proc/net/route`.
const MAX_TABLE: u64 = 4 << 20;

/// A root to look below.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    root: PathBuf,
    /// The root with its own links resolved: absolute links of a fixture may begin with it.
    real: PathBuf,
}

/// A folder below the root, its links resolved.
#[derive(Clone, Debug)]
pub(super) struct Dir<'t> {
    tree: &'t Tree,
    names: Vec<OsString>,
}

impl Tree {
    pub(super) fn new(root: &Path) -> Tree {
        let root = if root.as_os_str().is_empty() { Path::new("/") } else { root };
        let real = std::fs::canonicalize(root).unwrap_or_else(|_| root.to_path_buf());
        Tree { root: root.to_path_buf(), real }
    }

    /// True when the root is this host's own, so that the kernel may be asked too.
    pub(super) fn is_host(&self) -> bool {
        self.real == Path::new("/")
    }

    pub(super) fn top(&self) -> Dir<'_> {
        Dir { tree: self, names: Vec::new() }
    }

    /// The folder at `path`, counted from the root; `None` when there is none.
    pub(super) fn dir(&self, path: &str) -> Option<Dir<'_>> {
        self.top().dir(path)
    }
}

impl<'t> Dir<'t> {
    fn path(&self, names: &[OsString]) -> PathBuf {
        let mut path = self.tree.real.clone();
        path.extend(names);
        path
    }

    /// Follows `relative` from here, link by link, so that no link and no `..` leads out.
    fn resolve(&self, relative: &Path) -> Option<Vec<OsString>> {
        let mut done = self.names.clone();
        let mut ahead: VecDeque<OsString> = VecDeque::new();
        push_front(&mut ahead, relative);
        let (mut links, mut steps) = (0, 0);
        while let Some(name) = ahead.pop_front() {
            steps += 1;
            if steps > MAX_STEPS || ahead.len() > MAX_STEPS {
                return None;
            }
            if name == OsStr::new("..") {
                done.pop();
                continue;
            }
            done.push(name);
            let path = self.path(&done);
            if !std::fs::symlink_metadata(&path).ok()?.file_type().is_symlink() {
                continue;
            }
            links += 1;
            if links > MAX_LINKS {
                return None;
            }
            done.pop();
            let target = std::fs::read_link(&path).ok()?;
            if target.is_absolute() {
                done.clear();
            }
            push_front(&mut ahead, self.inside(&target));
        }
        Some(done)
    }

    /// An absolute link is counted from the root, whether it was written that way or in full.
    fn inside<'p>(&self, target: &'p Path) -> &'p Path {
        let host = self.tree.is_host();
        let roots = [&self.tree.real, &self.tree.root];
        let full = roots.iter().find_map(|r| target.strip_prefix(r).ok()).filter(|_| !host);
        full.unwrap_or(target)
    }

    pub(super) fn dir(&self, relative: &str) -> Option<Dir<'t>> {
        let names = self.resolve(Path::new(relative))?;
        let meta = std::fs::symlink_metadata(self.path(&names)).ok()?;
        meta.is_dir().then_some(Dir { tree: self.tree, names })
    }

    /// The folder above; `None` at the root.
    pub(super) fn parent(&self) -> Option<Dir<'t>> {
        let (_, above) = self.names.split_last()?;
        Some(Dir { tree: self.tree, names: above.to_vec() })
    }

    /// True when the first names are these.
    pub(super) fn is_below(&self, names: &[&str]) -> bool {
        self.names.len() > names.len() && self.names.iter().zip(names).all(|(a, b)| a == b)
    }

    /// Names in this folder that are text, sorted.
    pub(super) fn names(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path(&self.names)) else {
            return Vec::new();
        };
        let taken =
            entries.take(MAX_ENTRIES).filter_map(|e| e.ok()?.file_name().into_string().ok());
        let mut names: Vec<String> = taken.collect();
        names.sort_unstable();
        names
    }

    /// Numbers that are names in this folder, from the smallest.
    pub(super) fn numbers(&self) -> Vec<u32> {
        let mut numbers: Vec<u32> = self.names().iter().filter_map(|n| decimal(n)).collect();
        numbers.sort_unstable();
        numbers
    }

    /// The text of one attribute, without the white space around it. `None` when it is missing,
    /// a folder, or refuses to be read (an empty GID's type is `EINVAL`).
    pub(super) fn read(&self, relative: &str) -> Option<String> {
        let text = self.read_at_most(relative, MAX_ATTRIBUTE)?;
        Some(printable(text.trim()))
    }

    /// The text of a table.
    pub(super) fn table(&self, relative: &str) -> Option<String> {
        self.read_at_most(relative, MAX_TABLE)
    }

    /// An attribute that is a number.
    pub(super) fn number<T: core::str::FromStr>(&self, relative: &str) -> Option<T> {
        self.read(relative)?.parse().ok()
    }

    fn read_at_most(&self, relative: &str, limit: u64) -> Option<String> {
        let file = self.open(relative)?;
        // Before reading: a pipe or a device has no text of ours.
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::with_capacity(64);
        file.take(limit).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn open(&self, relative: &str) -> Option<File> {
        let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOCTTY;
        let open = |path: PathBuf| File::options().read(true).custom_flags(flags).open(path);
        // Most are plain files of this folder, and soft devices have thousands.
        if !relative.contains('/') && !matches!(relative, "" | "." | "..") {
            match open(self.path(&self.names).join(relative)) {
                Err(e) if e.raw_os_error() == Some(libc::ELOOP) => {}
                done => return done.ok(),
            }
        }
        open(self.path(&self.resolve(Path::new(relative))?)).ok()
    }
}

fn push_front(ahead: &mut VecDeque<OsString>, path: &Path) {
    for part in path.components().rev() {
        match part {
            Component::Normal(name) => ahead.push_front(name.to_os_string()),
            Component::ParentDir => ahead.push_front(OsString::from("..")),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
}

/// A number in plain decimal: no sign, no leading zero.
pub(super) fn decimal(text: &str) -> Option<u32> {
    let plain =
        text.bytes().all(|b| b.is_ascii_digit()) && (text.len() == 1 || !text.starts_with('0'));
    text.parse().ok().filter(|_| plain)
}

/// What reaches a terminal or a log line: control characters are written as escapes.
fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() && c != '\n' && c != '\t' {
            // Writing to a string cannot fail.
            let _ = write!(out, "{}", c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}
