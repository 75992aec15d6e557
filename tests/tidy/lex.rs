//! A small reader of Rust and C++: separates code from comments and strings, well enough for the
//! rules.

/// A file, read once for all rules.
pub(crate) struct Source {
    /// Path from the repository's root, with `/`.
    pub(crate) path: String,
    /// The lines as they are.
    pub(crate) lines: Vec<String>,
    /// The same lines with comments and the insides of strings blanked.
    pub(crate) code: Vec<String>,
    /// Words and signs of `code`.
    pub(crate) tokens: Vec<Token>,
    /// For each line: only compiled for tests or under the model checker.
    pub(crate) test: Vec<bool>,
}

/// A word or a sign.
pub(crate) struct Token {
    pub(crate) text: String,
    /// From 1.
    pub(crate) line: usize,
}

/// A path as written in an expression or expanded from a `use` tree: `["crate", "nic", "local"]`.
pub(crate) struct Path {
    pub(crate) parts: Vec<String>,
    pub(crate) line: usize,
}

impl Source {
    pub(crate) fn new(path: &str, text: &str) -> Source {
        let lines: Vec<String> = text.lines().map(String::from).collect();
        let lexed = matches!(extension(path), "rs" | "c" | "h" | "cpp" | "hpp");
        let blanked = if lexed { blank(text, extension(path) == "rs") } else { text.to_string() };
        let code: Vec<String> = blanked.lines().map(String::from).collect();
        let tokens = if lexed { tokens(&code) } else { Vec::new() };
        let mut test = test_lines(&tokens, lines.len());
        if path.ends_with("/tests.rs") || !path.starts_with("src/") && !path.starts_with("ffi/src/")
        {
            test = vec![true; lines.len()];
        }
        Source { path: path.to_string(), lines, code, tokens, test }
    }

    pub(crate) fn ext(&self) -> &str {
        extension(&self.path)
    }

    pub(crate) fn text(&self, index: usize) -> &str {
        self.tokens.get(index).map_or("", |t| t.text.as_str())
    }

    pub(crate) fn is_test(&self, line: usize) -> bool {
        self.test.get(line - 1).copied().unwrap_or(false)
    }

    /// Index of the sign that closes the `{` at `open`, or the last token.
    pub(crate) fn closing(&self, open: usize) -> usize {
        closing(&self.tokens, open)
    }

    /// Every path of two parts or more; `super` is resolved from the file's place, so that a path
    /// to the crate's root starts with `crate`.
    pub(crate) fn paths(&self) -> Vec<Path> {
        let mut found = Vec::new();
        let mut i = 0;
        while i < self.tokens.len() {
            if is_word(self.text(i)) && self.text(i + 1) == "::" {
                i = self.expand(i, &mut Vec::new(), &mut found).max(i + 1);
            } else {
                i += 1;
            }
        }
        let depth = self.module_depth();
        for path in &mut found {
            let supers = path.parts.iter().take_while(|p| *p == "super").count();
            if supers >= depth {
                path.parts.splice(..supers, ["crate".to_string()]);
            }
        }
        found
    }

    /// Reads one path (or one branch of a `use` tree) at `i`; returns the index behind it.
    fn expand(&self, mut i: usize, prefix: &mut Vec<String>, found: &mut Vec<Path>) -> usize {
        let (mark, line) = (prefix.len(), self.tokens.get(i).map_or(0, |t| t.line));
        while is_word(self.text(i)) || self.text(i) == "*" && mark < prefix.len() {
            prefix.push(self.text(i).to_string());
            i += 1;
            if self.text(i) != "::" {
                break;
            }
            i += 1;
            if self.text(i) == "{" {
                let end = self.closing(i);
                i += 1;
                while i < end {
                    let next = self.expand(i, prefix, found);
                    i = if next == i { i + 1 } else { next };
                }
                prefix.truncate(mark);
                return end + 1;
            }
        }
        if prefix.len() > 1 && prefix.len() > mark {
            found.push(Path { parts: prefix.clone(), line });
        }
        prefix.truncate(mark);
        i
    }

    /// How many `super` lead from this file to the crate's root.
    fn module_depth(&self) -> usize {
        let inside = self.path.strip_prefix("src/").unwrap_or(&self.path);
        let parts = inside.split('/').count();
        (parts - usize::from(inside.ends_with("mod.rs"))).max(1)
    }
}

pub(crate) fn extension(path: &str) -> &str {
    path.rsplit('/').next().and_then(|name| name.rsplit_once('.')).map_or("", |(_, ext)| ext)
}

pub(crate) fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphanumeric() || c == '_')
}

fn closing(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0usize;
    for (i, token) in tokens.iter().enumerate().skip(open) {
        match token.text.as_str() {
            "{" => depth += 1,
            "}" if depth <= 1 => return i,
            "}" => depth -= 1,
            _ => {}
        }
    }
    tokens.len().saturating_sub(1)
}

/// Replaces comments and the insides of strings and character literals by spaces; lines stay lines.
fn blank(text: &str, rust: bool) -> String {
    let src: Vec<char> = text.chars().collect();
    let at = |i: usize| src.get(i).copied().unwrap_or('\0');
    let mut out = String::with_capacity(text.len());
    let mut i = 0;
    while i < src.len() {
        let end = match at(i) {
            '/' if at(i + 1) == '/' => line_end(&src, i),
            '/' if at(i + 1) == '*' => comment_end(&src, i, rust),
            '"' => string_end(&src, i + 1),
            'r' if rust
                && matches!(at(i + 1), '"' | '#')
                && !is_word(&at(i.max(1) - 1).to_string()) =>
            {
                raw_end(&src, i)
            }
            'b' | 'c' if rust && at(i + 1) == 'r' && matches!(at(i + 2), '"' | '#') => {
                raw_end(&src, i + 1)
            }
            '\'' if at(i + 1) == '\\' => {
                1 + (i + 3..src.len()).find(|j| at(*j) == '\'').unwrap_or(i)
            }
            '\'' if at(i + 2) == '\'' => i + 3,
            _ => i,
        };
        if end == i {
            out.push(src[i]);
            i += 1;
            continue;
        }
        let quoted = at(i) != '/';
        for (n, c) in src[i..end.min(src.len())].iter().enumerate() {
            let keep = *c == '\n' || quoted && *c == '"' && (n == 0 || i + n + 1 == end);
            out.push(if keep { *c } else { ' ' });
        }
        i = end;
    }
    out
}

fn line_end(src: &[char], from: usize) -> usize {
    (from..src.len()).find(|j| src[*j] == '\n').unwrap_or(src.len())
}

fn comment_end(src: &[char], from: usize, nested: bool) -> usize {
    let (mut depth, mut i) = (0, from);
    while i + 1 < src.len() {
        match (src[i], src[i + 1]) {
            ('/', '*') if nested || depth == 0 => (depth, i) = (depth + 1, i + 1),
            ('*', '/') => (depth, i) = (depth - 1, i + 1),
            _ => {}
        }
        i += 1;
        if depth == 0 {
            return i;
        }
    }
    src.len()
}

fn string_end(src: &[char], mut i: usize) -> usize {
    while i < src.len() {
        match src[i] {
            '\\' => i += 1,
            '"' => return i + 1,
            _ => {}
        }
        i += 1;
    }
    src.len()
}

/// `from` is at the `r`. A raw identifier (`r#fn`) is no string and ends at once.
fn raw_end(src: &[char], from: usize) -> usize {
    let hashes = src[from + 1..].iter().take_while(|c| **c == '#').count();
    if src.get(from + 1 + hashes) != Some(&'"') {
        return from;
    }
    let mut i = from + 2 + hashes;
    while i < src.len() {
        if src[i] == '"' && src[i + 1..].iter().take_while(|c| **c == '#').count() >= hashes {
            return i + 1 + hashes;
        }
        i += 1;
    }
    src.len()
}

fn tokens(code: &[String]) -> Vec<Token> {
    let mut out = Vec::new();
    for (n, line) in code.iter().enumerate() {
        let mut rest = line.as_str();
        while let Some(c) = rest.chars().next() {
            let word = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'));
            let len = match word.unwrap_or(rest.len()) {
                0 if rest.starts_with("::") => 2,
                0 => c.len_utf8(),
                len => len,
            };
            if !c.is_whitespace() {
                out.push(Token { text: rest[..len].to_string(), line: n + 1 });
            }
            rest = &rest[len..];
        }
    }
    out
}

/// Word `i` does not stand in a `not(..)`.
fn stands(words: &[&str], i: usize) -> bool {
    i == 0 || words[i - 1] != "not"
}

/// Lines under `#[cfg(test)]`, `#[cfg(all(test, ..))]`, `#[cfg(loom)]` and the like.
fn test_lines(tokens: &[Token], lines: usize) -> Vec<bool> {
    let mut test = vec![false; lines];
    let text = |i: usize| tokens.get(i).map_or("", |t: &Token| t.text.as_str());
    for i in 0..tokens.len() {
        let inner = text(i + 1) == "!";
        let at = i + 1 + usize::from(inner);
        if text(i) != "#" || text(at) != "[" || text(at + 1) != "cfg" {
            continue;
        }
        let end = (at..tokens.len()).find(|j| text(*j) == "]").unwrap_or(at);
        let words: Vec<&str> = (at + 2..end).map(text).filter(|w| is_word(w)).collect();
        // `all(test, not(loom))` is test code, `not(test)` is none.
        let named = |i: usize| (words[i] == "test" || words[i] == "loom") && stands(&words, i);
        let none = !(0..words.len()).any(named);
        if none || words.contains(&"any") {
            continue;
        }
        let open = (end..tokens.len()).find(|j| matches!(text(*j), "{" | ";")).unwrap_or(end);
        let last = match text(open) {
            _ if inner => lines,
            "{" => tokens[closing(tokens, open)].line,
            _ => tokens[open].line,
        };
        test[tokens[i].line - 1..last.min(lines)].fill(true);
    }
    test
}
