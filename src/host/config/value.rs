//! Text to values. An error is the text of what is allowed; the caller names the key and the value
//! seen.

use core::ops::RangeInclusive;

/// What a number counts, for parsing and for the text of its range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unit {
    /// Things.
    Count,
    /// Bytes: K, M and G count 1024, 1024^2 and 1024^3.
    Bytes,
    /// Milliseconds.
    Ms,
    /// Microseconds.
    Us,
}

impl Unit {
    /// `1..=16`, `4K..=1G bytes`, `1..=600000 ms`.
    pub(super) fn range(self, r: &RangeInclusive<u64>) -> String {
        let (lo, hi) = (*r.start(), *r.end());
        match self {
            Unit::Count => format!("{lo}..={hi}"),
            Unit::Bytes => format!("{}..={} bytes", short(lo), short(hi)),
            Unit::Ms => format!("{lo}..={hi} ms"),
            Unit::Us => format!("{lo}..={hi} us"),
        }
    }
}

/// Bytes with the largest suffix that divides them.
fn short(bytes: u64) -> String {
    for (shift, suffix) in [(30, 'G'), (20, 'M'), (10, 'K')] {
        if bytes > 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{suffix}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// A number of `unit` inside `range`.
pub(super) fn number(text: &str, unit: Unit, range: &RangeInclusive<u64>) -> Result<u64, String> {
    let value = if unit == Unit::Bytes { bytes(text) } else { decimal(text) };
    value.filter(|v| range.contains(v)).ok_or_else(|| {
        let how = if unit == Unit::Bytes { " (plain, or with K, M or G)" } else { "" };
        format!("a number in {}{how}", unit.range(range))
    })
}

/// `1`, `true`, `on`, `yes` and their opposites, in any case.
pub(super) fn flag(text: &str) -> Result<bool, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" => Ok(true),
        "0" | "false" | "off" | "no" => Ok(false),
        _ => Err(String::from("0, 1, true, false, on, off, yes or no")),
    }
}

/// `N` or `LO-HI`; 0 alone is any port.
pub(super) fn ports(text: &str) -> Result<(u16, u16), String> {
    let port = |t: &str| decimal(t).and_then(|v| u16::try_from(v).ok());
    let pair = match text.split_once('-') {
        None => port(text).map(|p| (p, p)),
        Some((lo, hi)) => port(lo).zip(port(hi)),
    };
    pair.filter(|(lo, hi)| lo <= hi && (*lo > 0 || *hi == 0))
        .ok_or_else(|| String::from("0 (any), N or LO-HI with 1 <= LO <= HI <= 65535"))
}

/// Decimal, or hexadecimal after `0x`.
pub(super) fn pointer(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let value = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) if digits.bytes().all(|b| b.is_ascii_hexdigit()) => {
            u64::from_str_radix(digits, 16).ok()
        }
        Some(_) => None,
        None => decimal(text),
    };
    value.ok_or_else(|| String::from("an address of 64 bits, decimal or hexadecimal after 0x"))
}

/// Digits only: no sign, no underscore, no fraction.
pub(super) fn decimal(text: &str) -> Option<u64> {
    let text = text.trim();
    // `parse` takes a leading plus.
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

fn bytes(text: &str) -> Option<u64> {
    let lower = text.trim().to_ascii_lowercase();
    let bare = lower.strip_suffix("ib").unwrap_or(&lower);
    for (suffix, shift) in [('k', 10), ('m', 20), ('g', 30)] {
        if let Some(digits) = bare.strip_suffix(suffix) {
            return decimal(digits)?.checked_mul(1 << shift);
        }
    }
    // "12ib" has no letter before the "ib".
    if bare.len() == lower.len() {
        decimal(bare)
    } else {
        None
    }
}
