//! The panic barrier and the calling thread's last error text.

use core::any::Any;
use core::cell::RefCell;
use core::panic::AssertUnwindSafe;
use std::panic::catch_unwind;

use kvrail_core::host::error::{Error, Result};
use kvrail_core::status::Status;

use crate::types::kvr_status;

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs the body of `function`: the one way in for every call that returns a status. A negative
/// status always leaves its text in this thread's last error; success leaves the text alone.
pub(crate) fn guard(function: &str, body: impl FnOnce() -> Result<Status>) -> kvr_status {
    // The engine keeps its own state consistent across a panic or not at all: the header says to
    // destroy it.
    let error = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) if !status.is_err() => return status.code(),
        Ok(Ok(status)) => Error::new(status, status.text()),
        Ok(Err(error)) => error,
        Err(panic) => Error::new(Status::Internal, panic_text(panic.as_ref())),
    };
    keep(function, &error);
    error.status.code()
}

/// The same barrier for calls that return a length: 0 on failure, the text kept.
pub(crate) fn guard_len(function: &str, body: impl FnOnce() -> Result<usize>) -> usize {
    let mut len = 0;
    guard(function, || {
        len = body()?;
        Ok(Status::Ok)
    });
    len
}

/// A bad argument of the call itself.
pub(crate) fn invalid<T>(text: impl Into<String>) -> Result<T> {
    Err(Error::new(Status::Invalid, text))
}

/// Gives the last text to `read`; an empty one if there is none (or the thread is ending).
pub(crate) fn last_error<T>(read: impl FnOnce(&str) -> T) -> Option<T> {
    LAST.try_with(|text| text.try_borrow().ok().map(|text| read(&text))).ok().flatten()
}

fn keep(function: &str, error: &Error) {
    let what = if error.message.is_empty() { error.status.text() } else { &error.message };
    // A thread that is ending has no text any more; the code alone has to do then.
    let _ = LAST.try_with(|text| {
        if let Ok(mut text) = text.try_borrow_mut() {
            text.clear();
            text.push_str(function);
            text.push_str(": ");
            text.push_str(what);
        }
    });
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let what = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without text");
    format!("internal error: {what}; this is a bug in kvrail, destroy the engine and report it")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        last_error(str::to_owned).unwrap_or_default()
    }

    #[test]
    #[allow(clippy::panic, reason = "the panic is what is tested")]
    fn a_panic_is_a_code_and_a_text() {
        assert_eq!(guard("f", || panic!("slot {}", 7)), Status::Internal.code());
        assert!(last().starts_with("f: internal error: slot 7; "), "{}", last());
        assert_eq!(guard_len("g", || panic!("plain")), 0);
        assert!(last().starts_with("g: internal error: plain; "), "{}", last());
    }

    #[test]
    fn every_negative_status_sets_the_text_and_success_keeps_it() {
        assert_eq!(guard("f", || Ok(Status::Stalled)), Status::Stalled.code());
        assert_eq!(last(), format!("f: {}", Status::Stalled.text()));
        assert_eq!(guard("g", || Err(Error::new(Status::Busy, ""))), Status::Busy.code());
        assert_eq!(last(), format!("g: {}", Status::Busy.text()));
        assert_eq!(guard("h", || Ok(Status::InProgress)), 1);
        assert_eq!(last(), format!("g: {}", Status::Busy.text()));
    }

    #[test]
    fn the_text_is_the_threads_own() {
        guard("mine", || invalid("x"));
        let other = std::thread::spawn(last).join().unwrap_or_default();
        assert_eq!((last().as_str(), other.as_str()), ("mine: x", ""));
    }
}
