//! The keys of a region in the pool, where the hot path reads them.

use core::ptr::NonNull;

use super::error::{Error, Result};
use super::pool::{self, List, Pool};
use crate::engine::region::{KeyList, View};

/// Copies keys, rail by rail and piece by piece, into the pool. `like` says the rest of the list.
pub(super) fn store(pool: &Pool, keys: &[u32], rails: u16, like: KeyList) -> Result<KeyList> {
    if keys.is_empty() {
        return Ok(KeyList { rails: 0, ..like });
    }
    let full = |e: crate::table::Full| {
        let text = format!("{} are used up; the limit is {}: raise max_bytes", e.what, e.limit);
        Error::new(e.status, text)
    };
    let mut list = List::new(pool, keys.len()).map_err(full)?;
    for key in keys {
        list.push(*key).map_err(full)?;
    }
    let (at, _) = list.into_parts().map_err(full)?;
    Ok(KeyList { at: at.as_ptr(), rails, ..like })
}

/// Gives a list of [`store`] back.
///
/// # Safety
/// The list is of this pool, for a region of `len` bytes that was freed or never opened (I3).
pub(super) unsafe fn drop_list(pool: &Pool, keys: KeyList, len: u64) {
    let count = u64::from(keys.rails) * keys.pieces(len);
    if let Some(at) = NonNull::new(keys.at.cast_mut()).filter(|_| count > 0) {
        // SAFETY: I1: by the caller's promise.
        unsafe { pool::free(pool, at, count as usize) };
    }
}

/// Gives the keys of a freed region back.
///
/// # Safety
/// As for [`drop_list`]: the view's region was freed just now (I3).
pub(super) unsafe fn free(pool: &Pool, view: &View) {
    // SAFETY: I3: by the caller's promise.
    unsafe { drop_list(pool, view.keys, view.len) };
}
