//! What each rule looks for. Words that a rule forbids are spelled in two halves.

use crate::lex::{is_word, Source};
use crate::rules::{
    Context, Finding, BODY, COLUMNS, GENERATED, LAYERS, LINES, LONG_FILES, MAY_ALLOCATE,
};

fn is_code(source: &Source) -> bool {
    matches!(source.ext(), "rs" | "c" | "h" | "cpp" | "hpp" | "py" | "sh")
        && !GENERATED.contains(&source.path.as_str())
}

/// In `src/`, and not in its top layer.
fn is_below_host(source: &Source) -> bool {
    source.path.starts_with("src/")
        && source.ext() == "rs"
        && !source.path.starts_with("src/host/")
        && source.path != "src/host.rs"
}

pub(crate) fn layers(source: &Source, _: &Context) -> Vec<Finding> {
    let mut found: Vec<Finding> = Vec::new();
    if !is_below_host(source) {
        return found;
    }
    for path in source.paths().iter().filter(|p| p.parts[0] == "crate") {
        let to = path.parts[1..].join("::");
        for (folder, modules, instead) in LAYERS.iter().filter(|l| source.path.starts_with(l.0)) {
            let hit = modules.iter().find(|m| to == **m || to.starts_with(&format!("{m}::")));
            let known = found.iter().any(|f| f.0 == path.line);
            if let (Some(module), false) = (hit, known) {
                let why = format!("`{folder}` must not name crate::{module} (here {to})");
                found.push((path.line, format!("{why}; {instead}")));
            }
        }
    }
    found
}

pub(crate) fn atomics(source: &Source, _: &Context) -> Vec<Finding> {
    if !source.path.starts_with("src/") || source.path == "src/sync.rs" {
        return Vec::new();
    }
    let mut found = Vec::new();
    for path in source.paths() {
        let names = path.parts.windows(2).any(|w| w[0] == "sync" && w[1] == "atomic");
        let model = path.parts[0] == "loom" && !source.is_test(path.line);
        if names && path.parts[0] != "crate" || model {
            let what = path.parts.join("::");
            found.push((path.line, format!("names {what}; use crate::sync, and add to it there")));
        }
    }
    found
}

pub(crate) fn no_alloc(source: &Source, _: &Context) -> Vec<Finding> {
    const TYPES: &[&str] = &[
        "Vec",
        "VecDeque",
        "Box",
        "String",
        "HashMap",
        "HashSet",
        "BTreeMap",
        "BTreeSet",
        "Rc",
        "Arc",
        "to_vec",
        "to_string",
        "to_owned",
    ];
    const MACROS: &[&str] = &["vec", "format", "println", "eprintln", "print", "eprint"];
    if !is_below_host(source) || MAY_ALLOCATE.iter().any(|(path, _)| *path == source.path) {
        return Vec::new();
    }
    let mut found: Vec<Finding> = Vec::new();
    for (i, token) in source.tokens.iter().enumerate().filter(|(_, t)| !source.is_test(t.line)) {
        if [0, 1, 2].map(|n| source.text(i + n)) == ["mod", "tests", ";"] {
            found.push((token.line, "tests in every build; put #[cfg(test)] above it".to_string()));
            continue;
        }
        let (word, next) = (token.text.as_str(), source.text(i + 1));
        let (from, before) = match i {
            0 | 1 => ("", ""),
            _ => (source.text(i - 2), source.text(i - 1)),
        };
        let heapless = before == "::" && from == "heapless";
        let hit = TYPES.contains(&word) && !heapless
            || MACROS.contains(&word) && next == "!"
            || matches!(word, "std" | "alloc") && next == "::" && before != "::";
        if hit && found.last().map(|f| f.0) != Some(token.line) {
            let instead =
                "use core, a fixed array, or `heapless::Vec` in full; or move it to src/host";
            found.push((token.line, format!("`{word}` below src/host; {instead}")));
        }
    }
    found
}

pub(crate) fn columns(source: &Source, _: &Context) -> Vec<Finding> {
    if !is_code(source) {
        return Vec::new();
    }
    let long = source.lines.iter().map(|l| l.chars().count()).enumerate();
    long.filter(|(_, n)| *n > COLUMNS)
        .map(|(i, n)| (i + 1, format!("{n} columns; break the line at {COLUMNS}")))
        .collect()
}

pub(crate) fn file_length(source: &Source, _: &Context) -> Vec<Finding> {
    let allowed = LONG_FILES.iter().find(|(path, ..)| *path == source.path);
    let (limit, lines) = (allowed.map_or(LINES, |a| a.1), source.lines.len());
    if !is_code(source) || lines <= limit && (allowed.is_none() || lines > LINES) {
        return Vec::new();
    }
    if lines <= LINES {
        return vec![(lines, format!("{lines} lines; drop its entry in LONG_FILES of tests/tidy"))];
    }
    vec![(lines, format!("{lines} lines, limit {limit}; split the file by what its parts know"))]
}

pub(crate) fn function_length(source: &Source, _: &Context) -> Vec<Finding> {
    let mut found = Vec::new();
    if !is_code(source) {
        return found;
    }
    let functions = match source.ext() {
        "rs" => rust_functions(source),
        "py" => python_functions(source),
        "c" | "h" | "cpp" | "hpp" => c_functions(source),
        _ => Vec::new(),
    };
    for (from, to) in functions {
        let lines = to + 1 - from;
        if lines > BODY {
            let what = format!("a function of {lines} lines, limit {BODY}");
            found.push((from, format!("{what}; move a step of it into a function with a name")));
        }
    }
    found
}

/// First and last line of each `fn` with a body.
fn rust_functions(source: &Source) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    for i in (0..source.tokens.len()).filter(|i| source.text(*i) == "fn") {
        let mut depth = 0;
        let body = (i + 1..source.tokens.len()).find(|j| {
            match source.text(*j) {
                "(" | "[" => depth += 1,
                ")" | "]" => depth -= 1,
                "{" | ";" => return depth == 0,
                _ => {}
            }
            false
        });
        if let Some(open) = body.filter(|j| is_word(source.text(i + 1)) && source.text(*j) == "{") {
            found.push((source.tokens[i].line, source.tokens[source.closing(open)].line));
        }
    }
    found
}

/// Blocks of C and C++ whose head has a parameter list. Control blocks match too: a long one sits
/// in a function that is longer still.
fn c_functions(source: &Source) -> Vec<(usize, usize)> {
    const TYPES: &[&str] = &["struct", "class", "enum", "union", "namespace", "extern"];
    let (mut found, mut head) = (Vec::new(), 0);
    for i in 0..source.tokens.len() {
        match source.text(i) {
            "{" => {
                let words: Vec<&str> = (head..i).map(|j| source.text(j)).collect();
                let value = words.last() == Some(&"=") || words.iter().all(|w| *w != "(");
                if !value && !words.first().is_some_and(|w| TYPES.contains(w)) {
                    found.push((source.tokens[head].line, source.tokens[source.closing(i)].line));
                }
                head = i + 1;
            }
            "}" | ";" => head = i + 1,
            _ => {}
        }
    }
    found
}

fn python_functions(source: &Source) -> Vec<(usize, usize)> {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut found = Vec::new();
    for (i, line) in source.lines.iter().enumerate() {
        let head = line.trim_start();
        if !head.starts_with("def ") && !head.starts_with("async def ") {
            continue;
        }
        let inside = |l: &&String| {
            l.trim().is_empty() || indent(l) > indent(line) || l.trim_start().starts_with(')')
        };
        let body: Vec<&String> = source.lines[i + 1..].iter().take_while(inside).collect();
        let blank = body.iter().rev().take_while(|l| l.trim().is_empty()).count();
        found.push((i + 1, i + 1 + body.len() - blank));
    }
    found
}

pub(crate) fn leftovers(source: &Source, _: &Context) -> Vec<Finding> {
    const CALLS: &[&str] =
        &[concat!("db", "g!"), concat!("to", "do!"), concat!("unimple", "mented!")];
    const NOTES: &[&str] = &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
    let mut found = Vec::new();
    for (i, line) in source.lines.iter().enumerate() {
        let hit = CALLS.iter().chain(NOTES).find(|word| has_word(line, word));
        if let Some(word) = hit {
            found.push((
                i + 1,
                format!("left-over {word}; finish it, or file an issue and drop it"),
            ));
        }
    }
    found
}

/// `word` with no letter, digit or `_` on either side.
fn has_word(line: &str, word: &str) -> bool {
    let joins = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(word).any(|(at, _)| {
        !joins(line[..at].chars().next_back()) && !joins(line[at + word.len()..].chars().next())
    })
}

pub(crate) fn is_invariant(text: &str) -> bool {
    text.strip_prefix(['I', 'F', 'M', 'V'])
        .is_some_and(|n| !n.is_empty() && n.chars().all(|c| c.is_ascii_digit()))
}

pub(crate) fn safety(source: &Source, context: &Context) -> Vec<Finding> {
    let mut found: Vec<Finding> = Vec::new();
    for (i, token) in source.tokens.iter().enumerate() {
        let block = matches!(source.text(i + 1), "{" | "impl");
        if source.ext() != "rs" || token.text != "unsafe" || !block {
            continue;
        }
        let above = source.lines[token.line.saturating_sub(5)..token.line].iter().rev();
        let reason = above.filter_map(|l| l.split_once("SAFETY:")).next();
        let instead = match reason {
            None => "write `// SAFETY: I3: why it holds here` within the 4 lines above".to_string(),
            Some(_) if source.is_test(token.line) => continue,
            Some((_, text)) => {
                let words = text.split(|c: char| !c.is_alphanumeric());
                let ids: Vec<&str> = words.filter(|w| is_invariant(w)).collect();
                match ids.iter().find(|id| !context.invariants.contains(**id)) {
                    Some(id) => format!("{id} is not in the table of SAFETY.md; name one that is"),
                    None if ids.is_empty() => {
                        "name an invariant of SAFETY.md: `// SAFETY: I3: why it holds`".to_string()
                    }
                    None => continue,
                }
            }
        };
        found.push((token.line, format!("`unsafe` without its invariant; {instead}")));
    }
    found
}

pub(crate) fn machine_paths(source: &Source, _: &Context) -> Vec<Finding> {
    const PATHS: &[&str] = &[
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
        concat!("/wo", "rk/"),
        concat!("/tmp/", "wt"),
    ];
    let mut found = Vec::new();
    for (i, line) in source.lines.iter().enumerate() {
        let starts = |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '.');
        let hit = PATHS.iter().find(|p| line.match_indices(**p).any(|(at, _)| starts(at)));
        if let Some(path) = hit {
            let what = format!("`{path}` is a path of one machine");
            found.push((
                i + 1,
                format!("{what}; use a path from the repository's root or a variable"),
            ));
        }
    }
    found
}

pub(crate) fn links(source: &Source, context: &Context) -> Vec<Finding> {
    let mut found = Vec::new();
    if source.ext() != "md" {
        return found;
    }
    let mut fenced = false;
    for (i, line) in source.lines.iter().enumerate() {
        fenced ^= line.trim_start().starts_with("```");
        let prose: String = line.split('`').step_by(2).collect();
        for (at, _) in prose.match_indices("](").filter(|_| !fenced) {
            let target = prose[at + 2..].split([')', ' ']).next().unwrap_or("");
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = resolve(&source.path, file);
            if !exists(context, &path) {
                let what = format!("link to {target}: no file {path}");
                found.push((i + 1, format!("{what}; mend the path or drop the link")));
            } else if !anchor.is_empty() && !has_anchor(context, &path, anchor) {
                let what = format!("link to {target}: {path} has no heading #{anchor}");
                found.push((
                    i + 1,
                    format!("{what}; use a heading's text in lower case, with dashes"),
                ));
            }
        }
    }
    found
}

/// A link's target as a path from the root.
fn resolve(from: &str, link: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    if link.is_empty() {
        return from.to_string();
    }
    parts.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => _ = parts.pop(),
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

fn exists(context: &Context, path: &str) -> bool {
    let known = |p: &str| p == path || p.starts_with(&format!("{path}/"));
    // Files that are no text (pictures, LICENSE) are not among the sources.
    context.sources.iter().any(|s| known(&s.path))
        || std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path).is_file()
            && !path.ends_with(".md")
}

fn has_anchor(context: &Context, path: &str, anchor: &str) -> bool {
    let slug = |heading: &str| -> String {
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    let file = context.sources.iter().find(|s| s.path == path);
    file.is_some_and(|f| f.lines.iter().any(|l| l.starts_with('#') && slug(l) == anchor))
}
