//! Lines that are weakened on purpose, so that a loom model is seen to refuse them.

/// True while a model runs with the mutant of that name (`scripts/mutants.txt`). Outside of loom
/// it is false to the compiler too, and nothing of it is in a build.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) const fn mutant(_name: &str) -> bool {
    false
}

/// True while a model runs with the mutant of that name, which the environment variable
/// `KVRAIL_MUTANT` has.
#[cfg(loom)]
pub(crate) fn mutant(name: &str) -> bool {
    static NAME: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    NAME.get_or_init(|| std::env::var("KVRAIL_MUTANT").unwrap_or_default()) == name
}
