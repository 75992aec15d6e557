//! Carves fixed arrays out of one block of memory, once, when the engine is made.
//!
//! The same code measures and carves: with no block it only adds up, so `size` and `new` cannot
//! disagree.

use core::marker::PhantomData;
use core::mem::{align_of, size_of, MaybeUninit};
use core::ptr::NonNull;

/// Alignment that a block must have; also the largest alignment of anything carved.
pub const BLOCK_ALIGN: usize = 128;

/// A bump allocator over one block that lives for `'m`.
#[derive(Debug)]
pub struct Arena<'m> {
    base: Option<NonNull<u8>>,
    len: usize,
    used: usize,
    life: PhantomData<&'m mut [u8]>,
}

impl<'m> Arena<'m> {
    /// An arena that only adds up sizes: every array it returns is empty.
    pub const fn measure() -> Arena<'static> {
        Arena { base: None, len: usize::MAX, used: 0, life: PhantomData }
    }

    /// An arena over `len` bytes at `base`.
    ///
    /// # Safety
    /// `base` is aligned to [`BLOCK_ALIGN`], its `len` bytes are writable, unused by anybody else
    /// and stay so for `'m` (I1).
    pub const unsafe fn over(base: NonNull<u8>, len: usize) -> Arena<'m> {
        Arena { base: Some(base), len, used: 0, life: PhantomData }
    }

    /// Bytes carved or measured so far.
    pub const fn used(&self) -> usize {
        self.used
    }

    fn reserve(&mut self, bytes: usize, align: usize) -> Option<usize> {
        debug_assert!(align <= BLOCK_ALIGN);
        let start = self.used.checked_add(align - 1)? & !(align - 1);
        let end = start.checked_add(bytes)?;
        if end > self.len {
            return None;
        }
        self.used = end;
        Some(start)
    }

    /// `n` values made by `init`. `None`: the block is too small. While measuring: an empty array.
    pub fn array<T>(&mut self, n: usize, mut init: impl FnMut(usize) -> T) -> Option<&'m mut [T]> {
        let mut i = 0..n;
        self.array_from(n, || i.next().map(&mut init))
    }

    /// `n` values that `next` hands out one by one. `None`: the block is too small, or `next` ran
    /// out.
    pub fn array_from<T>(
        &mut self,
        n: usize,
        mut next: impl FnMut() -> Option<T>,
    ) -> Option<&'m mut [T]> {
        let start = self.reserve(n.checked_mul(size_of::<T>())?, align_of::<T>())?;
        let Some(base) = self.base else { return Some(&mut []) };
        // SAFETY: I1: reserved above for nobody else.
        let first = unsafe { base.add(start) }.cast::<T>();
        for i in 0..n {
            // SAFETY: I1: inside the reserved range.
            unsafe { first.add(i).write(next()?) };
        }
        // SAFETY: I1: all `n` values were just written; the range is ours for 'm.
        Some(unsafe { core::slice::from_raw_parts_mut(first.as_ptr(), n) })
    }

    /// `n` bytes that are not touched until somebody writes them (so they cost no memory until
    /// then).
    pub fn bytes(&mut self, n: usize) -> Option<&'m mut [MaybeUninit<u8>]> {
        let start = self.reserve(n, BLOCK_ALIGN)?;
        let Some(base) = self.base else { return Some(&mut []) };
        // SAFETY: I1: reserved above for nobody else; MaybeUninit needs no initial value.
        Some(unsafe { core::slice::from_raw_parts_mut(base.add(start).cast().as_ptr(), n) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(arena: &mut Arena<'_>) -> Option<usize> {
        let a = arena.array(3, |i| i as u8)?.len();
        let b = arena.array(5, |i| i as u64)?.len();
        Some(a + b + arena.bytes(100)?.len())
    }

    #[test]
    fn measuring_and_carving_agree_and_one_byte_less_is_refused() {
        let mut m = Arena::measure();
        assert_eq!(build(&mut m), Some(0));
        let need = m.used();
        let mut block = vec![0u128; need / 16 + 16];
        let at = block.as_mut_ptr().cast::<u8>();
        let at = NonNull::new(at.wrapping_add(at.align_offset(BLOCK_ALIGN))).unwrap();
        // SAFETY: I1: the vector is larger than the block and outlives both arenas.
        let mut a = unsafe { Arena::over(at, need) };
        assert_eq!(build(&mut a), Some(108));
        assert_eq!(a.used(), need);
        // SAFETY: I1: the first arena is not used any more.
        let mut a = unsafe { Arena::over(at, need - 1) };
        assert_eq!(build(&mut a), None);
    }
}
