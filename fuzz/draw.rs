//! Choices for one step, drawn from a seed that the input gives: two bytes of input are one step,
//! so the fuzzer puts steps together and each step's choices are spread evenly.

/// A source of choices (splitmix64).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw(pub(crate) u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0 to 255.
    pub(crate) fn byte(&mut self) -> usize {
        (self.next() >> 13) as u8 as usize
    }

    /// 0 to 65,535.
    pub(crate) fn word(&mut self) -> usize {
        (self.next() >> 13) as u16 as usize
    }

    /// Below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.word() % n.max(1)
    }

    /// One in `n`.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// `n` bytes.
    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.byte() as u8).collect()
    }

    /// One of a list, if there is one.
    pub(crate) fn one_of<T: Copy>(&mut self, list: &[T]) -> Option<T> {
        let at = self.below(list.len());
        list.get(at).copied()
    }
}
