//! `include/kvrail.h` from the doc comments and signatures of `ffi/src`.

use std::path::Path;

use cbindgen::{Builder, Config, DocumentationStyle, Language, Style};

use crate::Failure;

/// Where it is kept.
pub const PATH: &str = "include/kvrail.h";

/// Most columns of a line.
const WIDTH: usize = 100;

/// The order of the header.
const SOURCES: &[&str] = &[
    "types", "error", "config", "engine", "peer", "region", "devmem", "cuda", "table", "transfer",
    "notify", "event", "log",
];

const CHAPTERS: &str = "\
/* kvrail: moves a KV cache between processes and machines. C ABI for C99, C++11 and later.
 *
 * Generated from ffi/src by `cargo xtask header`. Do not edit.
 *
 * Ownership
 *   Everything passed in is the caller's and is copied before the call returns, but for two
 *   things: registered memory (kvr_region_register) and the block of kvr_engine_init, which must
 *   stay until kvr_region_deregister and kvr_engine_destroy returned KVR_OK. Everything handed out
 *   is a handle: it is released by the call that its maker names, or by kvr_engine_destroy with
 *   everything else. A released handle answers KVR_ERR_STALE, never for another object. Buffers
 *   are the caller's: `*len` goes in as the capacity and comes out as the full length. Texts that
 *   are returned are static. Lists may be NULL when their length is 0. Strings with a length need
 *   no NUL. A NULL out pointer is refused, where its comment does not allow it.
 *
 * Threads
 *   Every function may be called from any thread at any time, with two exceptions:
 *   kvr_engine_destroy must be the only call with its engine, and one kvr_config must not be used
 *   by two calls at once. No function blocks unless its comment says so and for how long.
 *   Callbacks run on the calling thread (kvr_notifs), on the engine's control thread
 *   (kvr_set_event_fn) or on any (kvr_log_set). An engine belongs to the process that made it: in
 *   a forked child its calls return KVR_ERR_FORKED.
 *
 * Errors
 *   Functions return a kvr_status: 0 done, positive not finished, negative an error.
 *   kvr_strerror() says what a code means, kvr_last_error() what went wrong in this thread's last
 *   failed call: the value seen, the value allowed, what to do. After an error an output handle is
 *   0 or NULL. Codes are grouped by the largest thing they kill: -1..-29 the call, -30..-49 the
 *   transfer, -50..-59 a rail, -60..-79 the peer, -80.. the engine. Numbers are never reused.
 *   Every function with a handle may return KVR_ERR_INVALID (not such a handle, or a bad
 *   argument), KVR_ERR_STALE, KVR_ERR_FORKED and KVR_ERR_INTERNAL; the comments name the others.
 *   What a comment lists after \"Undefined behaviour unless\" the library cannot check in full.
 *
 * Versions
 *   kvr_abi_version() is major << 16 | minor of the library, KVR_ABI_MAJOR and KVR_ABI_MINOR those
 *   of this header. Another major number is another ABI (and another SONAME); within one,
 *   functions, codes and fields at the end of structs are added only. Structs that may grow start
 *   with `struct_size`, which the caller sets to its own sizeof: an older program meets a newer
 *   library with fewer fields, and fields it lacks keep their defaults. A newer program's fields
 *   that an older library does not know must be 0, or the call is refused.
 */
";

fn config() -> Config {
    Config {
        language: Language::C,
        cpp_compat: true,
        include_guard: Some("KVRAIL_H".into()),
        header: Some(CHAPTERS.into()),
        no_includes: true,
        sys_includes: vec!["stddef.h".into(), "stdint.h".into()],
        usize_is_size_t: true,
        style: Style::Both,
        documentation_style: DocumentationStyle::C,
        line_length: 100,
        tab_width: 4,
        ..Config::default()
    }
}

/// The header's text.
pub fn generate(root: &Path) -> Result<String, Failure> {
    let mut builder = Builder::new().with_config(config());
    for source in SOURCES {
        builder = builder.with_src(root.join(format!("ffi/src/{source}.rs")));
    }
    let bindings =
        builder.generate().map_err(|e| Failure(format!("cbindgen cannot read ffi/src: {e}")))?;
    let mut raw = Vec::new();
    bindings.write(&mut raw);
    let raw = String::from_utf8(raw).map_err(|e| Failure(format!("header: {e}")))?;
    let text = polish(&raw);
    match text.lines().find(|line| line.len() > WIDTH) {
        Some(line) => Err(Failure(format!("{PATH} has a line over {WIDTH} columns: {line}"))),
        None => Ok(text),
    }
}

/// What cbindgen leaves to us: comments and declarations set closely, parentheses round negative
/// constants, words for Rust's `# Safety` heading.
fn polish(raw: &str) -> String {
    let mut out: Vec<String> = Vec::new();
    let mut lines = raw.lines().peekable();
    let mut header = true;
    while let Some(line) = lines.next() {
        header &= !line.starts_with("#ifndef");
        let indent = &line[..line.len() - line.trim_start().len()];
        let starts = line.chars().next().is_some_and(|c| c.is_ascii_alphabetic());
        if !header && line.trim() == "/*" {
            let body: Vec<&str> = lines.by_ref().take_while(|l| l.trim() != "*/").collect();
            out.extend(comment(indent, &body));
        } else if starts && line.contains('(') {
            let mut whole = line.to_owned();
            while !whole.ends_with(';') {
                let Some(next) = lines.next() else { break };
                whole.push(' ');
                whole.push_str(next.trim());
            }
            out.extend(wrap(whole.split_inclusive(", ").map(str::trim_end), "", "    "));
        } else if let Some((name, value)) = negative(line) {
            out.push(format!("#define {name} ({value})"));
        } else if !line.is_empty() || out.last().is_some_and(|last| !last.is_empty()) {
            out.push(line.trim_end().to_owned());
        }
    }
    out.push(String::new());
    out.join("\n")
}

fn negative(line: &str) -> Option<(&str, &str)> {
    let (name, value) = line.strip_prefix("#define ")?.split_once(' ')?;
    value.starts_with('-').then_some((name, value))
}

fn comment(indent: &str, body: &[&str]) -> Vec<String> {
    let body: Vec<&str> = body.iter().map(|line| line.trim()).collect();
    let mut text: Vec<String> = Vec::new();
    let mut after_heading = false;
    for (i, line) in body.iter().enumerate() {
        match *line {
            "# Safety" => {
                text.push("Undefined behaviour unless:".into());
                after_heading = true;
            }
            // The heading and its text are one paragraph in C.
            "" if body.get(i + 1) == Some(&"# Safety") => {}
            line if after_heading => match text.last_mut() {
                Some(last) => *last = format!("{last} {line}"),
                None => text.push(line.into()),
            },
            line => text.push(line.into()),
        }
    }
    // A lone summary stays on one line.
    if let [line] = &text[..] {
        if indent.len() + line.len() + 6 <= WIDTH {
            return vec![format!("{indent}/* {line} */")];
        }
    }
    let mut out = Vec::new();
    let (first, rest) = (format!("{indent}/* "), format!("{indent} * "));
    for (i, paragraph) in text.iter().enumerate() {
        let first = if i == 0 { &first } else { &rest };
        out.extend(
            wrap(paragraph.split(' '), first, &rest).iter().map(|l| l.trim_end().to_owned()),
        );
    }
    out.push(format!("{indent} */"));
    out
}

/// Lines of as many `words` as fit. The first line starts with `first`, the others with `rest`.
fn wrap<'a>(words: impl Iterator<Item = &'a str>, first: &str, rest: &str) -> Vec<String> {
    let mut out = Vec::new();
    let mut line = first.to_owned();
    for (i, word) in words.enumerate() {
        if i > 0 && line.len() + 1 + word.len() > WIDTH {
            out.push(core::mem::replace(&mut line, rest.to_owned()));
        } else if i > 0 {
            line.push(' ');
        }
        line.push_str(word);
    }
    out.push(line);
    out
}
