//! The error of every call in `host`: a status and the text that says what to do about it.

use crate::status::Status;
use core::fmt;

/// What went wrong: what, the value seen, the value allowed, and what to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    /// The code that crosses the C ABI.
    pub status: Status,
    /// One line for a person.
    pub message: String,
}

/// Result of a call in `host`.
pub type Result<T> = core::result::Result<T, Error>;

impl Error {
    /// An error of `status` with its text. A status that is no error would read as success across
    /// the C ABI, so it becomes [`Status::Internal`].
    pub fn new(status: Status, message: impl Into<String>) -> Error {
        let status = if status.is_err() { status } else { Status::Internal };
        Error { status, message: message.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.message.is_empty() {
            return f.write_str(self.status.text());
        }
        write!(f, "{}: {}", self.status.text(), self.message)
    }
}

impl core::error::Error for Error {}

/// Outside bytes for an error text: printable, on one line, and at most `max` characters.
pub fn shown(bytes: &[u8], max: usize) -> String {
    // A character takes at most four bytes, so no long input is scanned.
    let cut = bytes.len().min(max.saturating_mul(4));
    let text = String::from_utf8_lossy(bytes.get(..cut).unwrap_or_default());
    let mut out = String::new();
    let mut chars = text.chars();
    for c in chars.by_ref().take(max) {
        if c.is_control() || c == '\u{fffd}' {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    if chars.next().is_some() || cut < bytes.len() {
        out.push_str("...");
    }
    out
}

/// Bytes as hexadecimal digits, for an id in an error text.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_never_a_success() {
        for status in [Status::Ok, Status::InProgress] {
            assert_eq!(Error::new(status, "x").status, Status::Internal);
        }
    }

    #[test]
    fn displays_the_status_and_the_text() {
        assert_eq!(Error::new(Status::Busy, "slot 3").to_string(), "in use: slot 3");
        assert_eq!(Error::new(Status::Busy, "").to_string(), "in use");
    }

    #[test]
    fn outside_text_is_cut_and_cannot_forge_a_line() {
        assert_eq!(shown(b"abc", 3), "abc");
        assert_eq!(shown(b"abcd", 3), "abc...");
        assert_eq!(shown(b"a\nb\x1b[", 9), "a\\u{a}b\\u{1b}[");
        assert_eq!(shown(&[0xff, b'x'], 9), "\\u{fffd}x");
        assert_eq!(shown("\u{e9}".repeat(5).as_bytes(), 2), "\u{e9}\u{e9}...");
        assert!(shown(&[0; 1 << 20], 10).len() < 100);
    }

    #[test]
    fn hexadecimal_has_two_digits_a_byte() {
        assert_eq!(hex(&[0, 0xab, 0x0f]), "00ab0f");
    }
}
