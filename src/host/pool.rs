//! The pool of tables and ops: grows in register and prepare calls only, up to a limit; from the
//! heap, or inside the caller's block, which never grows.

use core::alloc::Layout;
use core::mem::{align_of, size_of};
use core::ptr::NonNull;
use std::alloc::{alloc, dealloc, realloc};
use std::sync::{Mutex, PoisonError};

use linked_list_allocator::Heap;

use crate::status::Status;
use crate::sync::{AtomicU64, Ordering};
use crate::table::Full;

/// Alignment of everything in the pool.
const ALIGN: usize = 16;

/// The pool.
pub(super) struct Pool {
    /// Inside the caller's block, or none: the heap.
    block: Option<Mutex<Heap>>,
    limit: u64,
    used: AtomicU64,
}

impl core::fmt::Debug for Pool {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Pool").field("limit", &self.limit).field("used", &self.used()).finish()
    }
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(ALIGN), ALIGN).ok()
}

impl Pool {
    /// A pool on the heap.
    pub(super) fn heap(limit: u64) -> Pool {
        Pool { block: None, limit, used: AtomicU64::new(0) }
    }

    /// A pool inside `len` bytes at `at`.
    ///
    /// # Safety
    /// The bytes are unused by anybody else and outlive the pool (I1).
    pub(super) unsafe fn block(at: NonNull<u8>, len: usize, limit: u64) -> Pool {
        let mut heap = Heap::empty();
        // SAFETY: I1: by the caller's promise.
        unsafe { heap.init(at.as_ptr(), len) };
        let limit = limit.min(heap.size() as u64);
        Pool { block: Some(Mutex::new(heap)), limit, used: AtomicU64::new(0) }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    fn full(&self) -> Full {
        Full { status: Status::NoMemory, what: "bytes of pool (max_bytes)", limit: self.limit }
    }

    fn charge(&self, bytes: usize) -> Result<(), Full> {
        let before = self.used.fetch_add(bytes as u64, Ordering::Relaxed);
        if before + bytes as u64 > self.limit {
            self.used.fetch_sub(bytes as u64, Ordering::Relaxed);
            return Err(self.full());
        }
        Ok(())
    }

    fn take(&self, bytes: usize) -> Result<NonNull<u8>, Full> {
        let layout = layout(bytes).ok_or_else(|| self.full())?;
        self.charge(layout.size())?;
        let got = match &self.block {
            Some(heap) => {
                let mut heap = heap.lock().unwrap_or_else(PoisonError::into_inner);
                heap.allocate_first_fit(layout).ok()
            }
            // SAFETY: I1: the size is not 0.
            None => NonNull::new(unsafe { alloc(layout) }),
        };
        got.ok_or_else(|| {
            self.used.fetch_sub(layout.size() as u64, Ordering::Relaxed);
            self.full()
        })
    }

    /// # Safety
    /// `at` came from `take(bytes)` or `resize(.., bytes)` and is not used any more.
    unsafe fn give(&self, at: NonNull<u8>, bytes: usize) {
        let Some(layout) = layout(bytes) else { return };
        self.used.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        match &self.block {
            Some(heap) => {
                let mut heap = heap.lock().unwrap_or_else(PoisonError::into_inner);
                // SAFETY: I1: by the caller's promise.
                unsafe { heap.deallocate(at, layout) };
            }
            // SAFETY: I1: by the caller's promise.
            None => unsafe { dealloc(at.as_ptr(), layout) },
        }
    }

    /// # Safety
    /// As for `give`; the old address is not used any more when this succeeds.
    unsafe fn resize(&self, at: NonNull<u8>, old: usize, new: usize) -> Result<NonNull<u8>, Full> {
        let (Some(from), Some(to)) = (layout(old), layout(new)) else { return Err(self.full()) };
        if self.block.is_some() {
            let fresh = self.take(new)?;
            let n = old.min(new);
            // SAFETY: I1: both are ours, apart, and at least `n` long.
            unsafe { core::ptr::copy_nonoverlapping(at.as_ptr(), fresh.as_ptr(), n) };
            // SAFETY: I1: by the caller's promise.
            unsafe { self.give(at, old) };
            return Ok(fresh);
        }
        self.charge(to.size())?;
        // SAFETY: I1: allocated with `from`; the new size is not 0.
        let Some(fresh) = NonNull::new(unsafe { realloc(at.as_ptr(), from, to.size()) }) else {
            self.used.fetch_sub(to.size() as u64, Ordering::Relaxed);
            return Err(self.full());
        };
        self.used.fetch_sub(from.size() as u64, Ordering::Relaxed);
        Ok(fresh)
    }
}

/// A growing list of plain values in the pool.
pub(super) struct List<'a, T: Copy> {
    pool: &'a Pool,
    at: NonNull<T>,
    len: usize,
    room: usize,
}

impl<'a, T: Copy> List<'a, T> {
    const FITS: () = assert!(align_of::<T>() <= ALIGN && size_of::<T>() > 0);

    /// An empty list with room for `room` values.
    pub(super) fn new(pool: &'a Pool, room: usize) -> Result<List<'a, T>, Full> {
        let () = Self::FITS;
        let room = room.max(1);
        let bytes = room.checked_mul(size_of::<T>()).ok_or_else(|| pool.full())?;
        Ok(List { pool, at: pool.take(bytes)?.cast(), len: 0, room })
    }

    #[inline]
    pub(super) fn push(&mut self, value: T) -> Result<(), Full> {
        if self.len == self.room {
            self.set_room(self.room * 2)?;
        }
        // SAFETY: I1: there is room behind the last value.
        unsafe { self.at.add(self.len).write(value) };
        self.len += 1;
        Ok(())
    }

    /// Values that there is room for without growing.
    pub(super) fn room(&self) -> usize {
        self.room - self.len
    }

    /// Takes `value(0)`, `value(1)`, ... while there are any, at most `most`; none if that is more
    /// than there is room for. Returns how many.
    #[inline]
    pub(super) fn extend(
        &mut self,
        most: usize,
        mut value: impl FnMut(usize) -> Option<T>,
    ) -> usize {
        if most > self.room() {
            return 0;
        }
        let mut n = 0;
        while n < most {
            let Some(value) = value(n) else { break };
            // SAFETY: I1: there is room for `most` values behind the last one.
            unsafe { self.at.add(self.len + n).write(value) };
            n += 1;
        }
        self.len += n;
        n
    }

    /// The last `n` values, or as many as there are.
    pub(super) fn last(&mut self, n: usize) -> &mut [T] {
        let n = n.min(self.len);
        // SAFETY: I1: our own allocation, whose first `len` values were written.
        unsafe { core::slice::from_raw_parts_mut(self.at.add(self.len - n).as_ptr(), n) }
    }

    /// Forgets the last `n` values.
    pub(super) fn shorten(&mut self, n: usize) {
        self.len = self.len.saturating_sub(n);
    }

    fn set_room(&mut self, room: usize) -> Result<(), Full> {
        let bytes = room.checked_mul(size_of::<T>()).ok_or_else(|| self.pool.full())?;
        let old = self.room * size_of::<T>();
        // SAFETY: I1: our own allocation of `room` values.
        self.at = unsafe { self.pool.resize(self.at.cast(), old, bytes)? }.cast();
        self.room = room;
        Ok(())
    }

    /// Gives the values away, in an allocation of exactly their size. Free it with [`free`].
    pub(super) fn into_parts(mut self) -> Result<(NonNull<T>, usize), Full> {
        if self.room != self.len.max(1) {
            self.set_room(self.len.max(1))?;
        }
        let parts = (self.at, self.len);
        core::mem::forget(self);
        Ok(parts)
    }
}

impl<T: Copy> Drop for List<'_, T> {
    fn drop(&mut self) {
        // SAFETY: I1: our own allocation.
        unsafe { self.pool.give(self.at.cast(), self.room * size_of::<T>()) };
    }
}

/// A copy of values in the pool, in an allocation of exactly their size. Free it with [`free`].
pub(super) fn copied<T: Copy>(pool: &Pool, values: &[T]) -> Result<(NonNull<T>, usize), Full> {
    let list: List<'_, T> = List::new(pool, values.len())?;
    // SAFETY: I1: there is room for all of them, in memory of the list's own.
    unsafe { list.at.as_ptr().copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    let parts = (list.at, values.len());
    core::mem::forget(list);
    Ok(parts)
}

/// Gives back what [`List::into_parts`] or [`copied`] gave away.
///
/// # Safety
/// Exactly that pointer and length, from a list of the same pool, not used any more.
pub(super) unsafe fn free<T: Copy>(pool: &Pool, at: NonNull<T>, len: usize) {
    // SAFETY: I1: by the caller's promise.
    unsafe { pool.give(at.cast(), len.max(1) * size_of::<T>()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(pool: &Pool) -> Result<(NonNull<u64>, usize), Full> {
        let mut list = List::new(pool, 1)?;
        for i in 0..100u64 {
            list.push(i)?;
        }
        list.into_parts()
    }

    #[test]
    fn both_kinds_keep_the_values_count_exactly_and_stop_at_the_limit() {
        let mut memory = vec![0u128; 1024];
        let at = NonNull::new(memory.as_mut_ptr().cast()).unwrap();
        // SAFETY: I1: the vector outlives the pool.
        let block = unsafe { Pool::block(at, memory.len() * 16, u64::MAX) };
        for pool in [Pool::heap(16 << 10), block] {
            let (at, len) = fill(&pool).unwrap();
            // SAFETY: I1: the list's own parts.
            assert!(unsafe { core::slice::from_raw_parts(at.as_ptr(), len) }
                .iter()
                .copied()
                .eq(0..100));
            assert_eq!(pool.used(), 800);
            let big = List::<u64>::new(&pool, 4096).err().unwrap();
            assert_eq!((big.status, big.limit), (Status::NoMemory, pool.limit()));
            // SAFETY: I1: the list's own parts, once.
            unsafe { free(&pool, at, len) };
            assert_eq!(pool.used(), 0);
        }
    }
}
