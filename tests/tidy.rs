//! Reads the sources and refuses what the project's rules refuse (`docs/testing.md`). Each finding
//! names the file, the line and the replacement. Each rule carries samples that it must refuse and
//! samples that it must accept.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

#[path = "tidy/checks.rs"]
mod checks;
#[path = "tidy/lex.rs"]
mod lex;
#[path = "tidy/rules.rs"]
mod rules;

use lex::{extension, Source};
use rules::{Context, Rule, RULES};
use std::collections::BTreeSet;
use std::path::Path;

/// Reads every text file of the repository, build output left out.
fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    walk(root, "", &mut found);
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

fn walk(dir: &Path, prefix: &str, found: &mut Vec<Source>) {
    const SKIP: &[&str] = &[".git", "build", "corpus", "artifacts", "__pycache__", "venv", ".venv"];
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        let (path, kind) = (format!("{prefix}{name}"), entry.file_type().unwrap());
        if kind.is_dir() {
            // Cargo tags its build folders, whatever they are called.
            if !SKIP.contains(&name.as_str()) && !entry.path().join("CACHEDIR.TAG").exists() {
                walk(&entry.path(), &format!("{path}/"), found);
            }
        } else if kind.is_file() && is_text(&path) {
            let bytes = std::fs::read(entry.path()).unwrap();
            match String::from_utf8(bytes) {
                Ok(text) => found.push(Source::new(&path, &text)),
                Err(e) => panic!("{path}: not UTF-8 ({e}); save it as UTF-8"),
            }
        }
    }
}

fn is_text(path: &str) -> bool {
    const EXT: &[&str] = &[
        "rs", "c", "h", "cpp", "hpp", "py", "sh", "md", "toml", "txt", "in", "yml", "yaml", "map",
    ];
    let name = path.rsplit('/').next().unwrap_or(path);
    EXT.contains(&extension(path)) || matches!(name, "Makefile" | "run")
}

/// Ids of the invariant tables of SAFETY.md: rows that start with `| I3 |` or `| F3 |`.
fn invariants(safety_md: &str) -> BTreeSet<String> {
    let cells = safety_md.lines().filter_map(|l| l.strip_prefix('|')?.split('|').next());
    cells.map(|c| c.trim().to_string()).filter(|c| checks::is_invariant(c)).collect()
}

fn context() -> Context {
    let sources = sources();
    let safety = sources.iter().find(|s| s.path == "SAFETY.md").expect("SAFETY.md is missing");
    let invariants = invariants(&safety.lines.join("\n"));
    assert!(!invariants.is_empty(), "SAFETY.md: no row `| I1 | ...` found");
    Context { sources, invariants }
}

fn rule(name: &str) -> &'static Rule {
    RULES.iter().find(|r| r.name == name).unwrap()
}

/// Runs one rule over the repository.
fn holds(name: &str) {
    let context = context();
    assert!(context.sources.len() > 10, "only {} files were read", context.sources.len());
    let mut findings: Vec<String> = Vec::new();
    for source in &context.sources {
        for (line, text) in (rule(name).check)(source, &context) {
            findings.push(format!("{}:{line}: {text}", source.path));
        }
    }
    let list = findings.join("\n  ");
    assert!(findings.is_empty(), "{} finding(s) of rule `{name}`:\n  {list}\n", findings.len());
}

macro_rules! rules {
    ($($test:ident $name:literal)*) => {
        $(#[test] fn $test() { holds($name); })*
        #[test]
        fn every_rule_is_run() {
            let run = [$($name),*];
            assert_eq!(RULES.iter().map(|r| r.name).collect::<Vec<_>>(), run);
        }
    };
}

rules! {
    layers_point_down "layers"
    atomics_are_named_in_one_file "atomics"
    nothing_below_host_allocates "no-alloc"
    lines_fit "columns"
    files_are_short "file-length"
    functions_are_short "function-length"
    nothing_is_left_over "leftovers"
    unsafe_names_its_invariant "safety"
    no_path_of_one_machine "machine-paths"
    links_resolve "links"
}

/// A context of its own for samples: two invariants and a few files that links may name.
fn sample_context(sample: &Source) -> Context {
    let files = [("README.md", "# Top\n\n## Run it: `make`, now\n"), ("docs/a.md", "# A\n")];
    let mut sources: Vec<Source> = files.iter().map(|(p, t)| Source::new(p, t)).collect();
    sources.push(Source::new(&sample.path, &sample.lines.join("\n")));
    Context { sources, invariants: invariants("| id |\n|---|\n| I1 | a |\n| F2 | b |\n") }
}

#[test]
fn each_rule_refuses_its_bad_samples() {
    for rule in RULES {
        assert!(!rule.bad.is_empty() || LIMITS.contains(&rule.name), "`{}`: no sample", rule.name);
        for (path, text, line) in rule.bad {
            let text = text.replace('~', "");
            let source = Source::new(path, &text);
            let found = (rule.check)(&source, &sample_context(&source));
            let lines: Vec<usize> = found.iter().map(|f| f.0).collect();
            assert_eq!(lines, [*line], "rule `{}` on {path}:\n{text}\n{found:?}", rule.name);
            assert!(found[0].1.contains("; "), "`{}` names no replacement: {found:?}", rule.name);
        }
    }
}

#[test]
fn each_rule_accepts_its_good_samples() {
    for rule in RULES {
        assert!(!rule.good.is_empty(), "rule `{}` has no good sample", rule.name);
        for (path, text) in rule.good {
            let source = Source::new(path, &text.replace('~', ""));
            let found = (rule.check)(&source, &sample_context(&source));
            assert!(found.is_empty(), "rule `{}` on {path}:\n{text}\n{found:?}", rule.name);
        }
    }
}

/// Rules whose bad samples are made at their limit, in the test below.
const LIMITS: &[&str] = &["columns", "file-length", "function-length"];

#[test]
fn long_lines_files_and_functions_are_refused_at_their_limit() {
    let body = |n: usize| format!("fn f() {{\n{}}}\n", "    g();\n".repeat(n));
    let py = |n: usize| format!("def f():\n{}\n\nx = 1\n", "    g()\n".repeat(n));
    let cases: &[(&str, &str, String, String)] = &[
        ("columns", "src/a.rs", "a".repeat(rules::COLUMNS), "a".repeat(rules::COLUMNS + 1)),
        ("columns", "b.py", "é".repeat(rules::COLUMNS), "a".repeat(rules::COLUMNS + 1)),
        ("file-length", "src/a.rs", "\n".repeat(rules::LINES), "\n".repeat(rules::LINES + 1)),
        ("function-length", "src/a.rs", body(rules::BODY - 2), body(rules::BODY - 1)),
        ("function-length", "a.cpp", body(rules::BODY - 2), body(rules::BODY - 1)),
        ("function-length", "a.py", py(rules::BODY - 1), py(rules::BODY)),
    ];
    assert!(LIMITS.iter().all(|l| cases.iter().any(|c| c.0 == *l)));
    for (name, path, good, bad) in cases {
        let findings = |text: &str| {
            let source = Source::new(path, text);
            (rule(name).check)(&source, &sample_context(&source)).len()
        };
        assert_eq!((findings(good), findings(bad)), (0, 1), "rule `{name}` on {path}");
    }
}

#[test]
fn the_reader_tells_code_from_text() {
    let text =
        "let a = \"// no\"; // yes 'x'\nlet b = r#\"a \" b\"#; /* c /* d */ e */ let c = 'x';\n\
                fn f<'a>(x: &'a str) -> char { '\\'' }\n";
    let code = Source::new("src/a.rs", text).code.join("\n");
    assert!(!code.contains("no") && !code.contains("yes") && !code.contains(" d "), "{code}");
    assert!(code.contains("let c =") && code.contains("&'a str") && code.contains("}"), "{code}");
    let source =
        Source::new("src/a.rs", "fn a() {}\n#[cfg(test)]\nmod t {\n  fn b() {}\n}\nfn c() {}\n");
    assert_eq!(source.test, [false, true, true, true, true, false]);
}

/// Every test that `docs/failure-model.md` names is there.
#[test]
fn tests_that_the_failure_model_names_exist() {
    let sources = sources();
    let model = sources.iter().find(|s| s.path == "docs/failure-model.md").expect("the page");
    let is_name = |w: &str| {
        w.matches('_').count() >= 3 && w.chars().all(|c| c.is_ascii_lowercase() || c == '_')
    };
    let cells = model.lines.iter().filter(|l| l.starts_with('|')).flat_map(|l| l.split('`'));
    let named: BTreeSet<&str> = cells.filter(|w| is_name(w)).collect();
    assert!(named.len() > 40, "only {} tests are named", named.len());
    let rust = || sources.iter().filter(|s| s.path.ends_with(".rs")).flat_map(|s| &s.lines);
    let missing: Vec<_> =
        named.iter().filter(|name| !rust().any(|l| l.contains(&format!("fn {name}(")))).collect();
    assert!(missing.is_empty(), "docs/failure-model.md names tests that are none: {missing:?}");
}
