//! Names: their natural order, and the list of `KVRAIL_NICS`.

use core::cmp::Ordering;

use super::ports::Port;
use super::tree::decimal;

/// The order in which people count: `mlx5_2` before `mlx5_10`. Equal only when the texts are.
pub(super) fn natural(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a, b);
    while !left.is_empty() && !right.is_empty() {
        let (l, r) = (chunk(left), chunk(right));
        let order = match (digits(l), digits(r)) {
            // Without leading zeros the longer number is the larger, of any length.
            (Some(l), Some(r)) => l.len().cmp(&r.len()).then_with(|| l.cmp(r)),
            _ => l.cmp(r),
        };
        if order != Ordering::Equal {
            return order;
        }
        (left, right) = (&left[l.len()..], &right[r.len()..]);
    }
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

/// The longest beginning that is all digits or all others.
fn chunk(text: &str) -> &str {
    let first = text.starts_with(|c: char| c.is_ascii_digit());
    let end = text.find(|c: char| c.is_ascii_digit() != first).unwrap_or(text.len());
    &text[..end]
}

fn digits(chunk: &str) -> Option<&str> {
    chunk.starts_with(|c: char| c.is_ascii_digit()).then(|| chunk.trim_start_matches('0'))
}

/// What `KVRAIL_NICS` asks for.
#[derive(Clone, Debug, Default)]
pub(super) struct Wanted {
    names: Vec<(String, Option<u8>)>,
    /// What is wrong with the other names, each with its reason.
    pub(super) unknown: Vec<String>,
}

impl Wanted {
    /// Reads the names; those that fit no port are kept with the reason.
    pub(super) fn new(names: &[String], ports: &[Port]) -> Wanted {
        let mut wanted = Wanted::default();
        let texts = names.iter().flat_map(|n| n.split(',')).map(str::trim);
        for text in texts.filter(|t| !t.is_empty()) {
            match look_up(text, ports) {
                Ok(name) => wanted.names.push(name),
                Err(why) => wanted.unknown.push(why),
            }
        }
        wanted
    }

    /// True when the user named NICs at all, also when none of them is here.
    pub(super) fn is_set(&self) -> bool {
        !self.names.is_empty() || !self.unknown.is_empty()
    }

    pub(super) fn has(&self, port: &Port) -> bool {
        self.names.iter().any(|(d, p)| *d == port.device && p.is_none_or(|p| p == port.port))
    }
}

fn look_up(text: &str, ports: &[Port]) -> Result<(String, Option<u8>), String> {
    let of = |device: &str| ports.iter().filter(|p| p.device == device).collect::<Vec<_>>();
    if !of(text).is_empty() {
        return Ok((text.to_string(), None));
    }
    if let Some((device, port)) = text.rsplit_once([':', '/']) {
        let here = of(device);
        if !here.is_empty() {
            let number = decimal(port).and_then(|n| u8::try_from(n).ok());
            if let Some(number) = number.filter(|n| here.iter().any(|p| p.port == *n && *n > 0)) {
                return Ok((device.to_string(), Some(number)));
            }
            let list: Vec<String> = here.iter().map(|p| p.port.to_string()).collect();
            return Err(format!(
                "{text}: no port `{port}` (ports of {device}: {})",
                list.join(", ")
            ));
        }
    }
    let owner = ports.iter().find(|p| p.netdevs().contains(&text));
    Err(match owner {
        Some(port) => format!("{text}: that is the netdev of {}; name the device", port.device),
        None => format!("{text}: no such device"),
    })
}
