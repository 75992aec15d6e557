//! Which accelerator a device id means.

use std::path::Path;

/// Where sysfs lists every card of a host.
const CLASS: &str = "sys/class/rebellions";

/// What the environment says of cards: which ones this process sees, and how many are one device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shown<'a> {
    /// `RBLN_VISIBLE_DEVICES`: numbers with commas or blanks between; empty: all.
    pub(super) visible: &'a str,
    /// `RBLN_NPUS_PER_DEVICE`; of a device of several cards the first one counts.
    pub(super) per_device: usize,
}

/// The name in sysfs of the card of device `id`. As vllm-rbln 0.12 reads it: a device is a place
/// in the list of visible cards, and an entry of that list a place among the cards that are here.
/// What is beyond those is a card's own number.
pub(super) fn name(root: &Path, id: u32, shown: Shown<'_>) -> String {
    let at = usize::try_from(id).unwrap_or(usize::MAX).saturating_mul(shown.per_device.max(1));
    let mut entries =
        shown.visible.split([',', ' ']).filter(|e| !e.is_empty()).map(str::parse::<usize>);
    let place = match entries.nth(at) {
        Some(Ok(place)) => place,
        _ => at,
    };
    // In a container /dev has its own cards only.
    let here = Some(numbers(&root.join("dev"))).filter(|n| !n.is_empty());
    let here = here.unwrap_or_else(|| numbers(&root.join(CLASS)));
    format!("rbln{}", here.get(place).copied().unwrap_or(place))
}

fn numbers(folder: &Path) -> Vec<usize> {
    let Ok(list) = std::fs::read_dir(folder) else { return Vec::new() };
    let number = |e: std::fs::DirEntry| e.file_name().to_str()?.strip_prefix("rbln")?.parse().ok();
    let mut found: Vec<usize> = list.flatten().filter_map(number).collect();
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(root: &Path, id: u32, visible: &str, per_device: usize) -> String {
        name(root, id, Shown { visible, per_device })
    }

    #[test]
    fn a_device_is_a_place_among_the_visible_cards_that_are_here() {
        let root = std::env::temp_dir().join(format!("kvrail-card-{}", std::process::id()));
        for card in ["rbln2", "rbln10", "rbln7", "other"] {
            std::fs::create_dir_all(root.join(CLASS).join(card)).unwrap();
        }
        assert_eq!(of(&root, 0, "", 1), "rbln2");
        assert_eq!(of(&root, 2, "", 1), "rbln10");
        assert_eq!(of(&root, 1, "", 2), "rbln10");
        assert_eq!(of(&root, 0, "1,0", 1), "rbln7");
        assert_eq!(of(&root, 1, "1, 0", 1), "rbln2");
        // No place among three: a number.
        assert_eq!(of(&root, 0, "10", 1), "rbln10");
        assert_eq!(of(&root, 9, "", 1), "rbln9");
        assert_eq!(of(&root, 0, "x", 1), "rbln2");
        // A container that was given one card.
        std::fs::create_dir_all(root.join("dev/rbln7")).unwrap();
        assert_eq!(of(&root, 0, "0", 1), "rbln7");
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(of(&root, 3, "", 1), "rbln3");
    }
}
