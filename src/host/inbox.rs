//! Messages on their way to the application, put together from their stretches.

use core::cell::Cell;

use super::shared::Core;
use crate::engine::notify::Piece;

thread_local! {
    /// Room for one message, kept per thread, so that taking messages allocates only once. A
    /// callback that takes messages itself finds none here and makes its own.
    static ROOM: Cell<(Vec<u8>, Vec<u8>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

/// Gives every message that has come to `f`. How many.
pub(super) fn take(core: &Core, f: &mut dyn FnMut(&[u8], &[u8])) -> usize {
    let (mut name, mut bytes) = ROOM.take();
    let n = core.take_messages(|piece| match piece {
        Piece::Name(part) => name.extend_from_slice(part),
        Piece::Bytes(part) => bytes.extend_from_slice(part),
        Piece::End => {
            f(&name, &bytes);
            name.clear();
            bytes.clear();
        }
    });
    ROOM.set((name, bytes));
    n
}
