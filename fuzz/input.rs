//! Reads choices off the front of a fuzzer's input. Past its end every choice is 0, so a short
//! input is a short run and never an error.

/// The rest of an input.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    /// True when nothing is left to choose from.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One byte.
    pub(crate) fn byte(&mut self) -> usize {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        usize::from(*first)
    }

    /// Two bytes.
    pub(crate) fn word(&mut self) -> usize {
        self.byte() | self.byte() << 8
    }

    /// Below `n`, from one byte or two.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        let drawn = if n > 256 { self.word() } else { self.byte() };
        drawn % n.max(1)
    }

    /// At most `n` bytes.
    pub(crate) fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (front, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        front
    }
}
