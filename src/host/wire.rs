//! Little-endian fields and records (type `u16`, length `u32`, body), read with bounds checks.
//!
//! Nothing here panics on any input, and the reader allocates nothing: it lends slices of its
//! input.

/// The input ends before a field does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Short {
    /// Where the field starts, counted from the reader's first byte.
    pub at: usize,
    /// Bytes that the field takes.
    pub wanted: usize,
    /// Bytes that are left.
    pub have: usize,
}

impl core::fmt::Display for Short {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} bytes wanted at offset {}, {} left", self.wanted, self.at, self.have)
    }
}

/// One record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tlv<'a> {
    /// What it is. An unknown one is skipped.
    pub kind: u16,
    /// Its bytes.
    pub body: &'a [u8],
}

/// Reads fields from the front of a byte slice.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    all: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// A reader at the first byte of `bytes`.
    pub const fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { all: bytes, at: 0 }
    }

    /// What was not read yet.
    pub fn rest(&self) -> &'a [u8] {
        self.all.get(self.at..).unwrap_or_default()
    }

    /// The next `n` bytes. On [`Short`] nothing was taken.
    pub fn bytes(&mut self, n: usize) -> Result<&'a [u8], Short> {
        let rest = self.rest();
        match rest.get(..n) {
            Some(field) => {
                self.at += n;
                Ok(field)
            }
            None => Err(Short { at: self.at, wanted: n, have: rest.len() }),
        }
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Short> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(N)?);
        Ok(out)
    }

    /// One byte.
    pub fn u8(&mut self) -> Result<u8, Short> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    /// Two bytes.
    pub fn u16(&mut self) -> Result<u16, Short> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Result<u32, Short> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Result<u64, Short> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// The next record, or `None` at the end. On [`Short`] nothing was taken.
    pub fn tlv(&mut self) -> Result<Option<Tlv<'a>>, Short> {
        if self.rest().is_empty() {
            return Ok(None);
        }
        let mut ahead = *self;
        let kind = ahead.u16()?;
        let len = ahead.u32()?;
        let body = ahead.bytes(usize::try_from(len).unwrap_or(usize::MAX))?;
        *self = ahead;
        Ok(Some(Tlv { kind, body }))
    }
}

/// Appends fields to a byte vector.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Writer {
    out: Vec<u8>,
}

impl Writer {
    /// An empty writer.
    pub const fn new() -> Writer {
        Writer { out: Vec::new() }
    }

    /// Bytes so far.
    pub fn len(&self) -> usize {
        self.out.len()
    }

    /// True when nothing was written.
    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// What was written.
    pub fn finish(self) -> Vec<u8> {
        self.out
    }

    /// Raw bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Writer {
        self.out.extend_from_slice(bytes);
        self
    }

    /// One byte.
    pub fn u8(&mut self, v: u8) -> &mut Writer {
        self.bytes(&[v])
    }

    /// Two bytes.
    pub fn u16(&mut self, v: u16) -> &mut Writer {
        self.bytes(&v.to_le_bytes())
    }

    /// Four bytes.
    pub fn u32(&mut self, v: u32) -> &mut Writer {
        self.bytes(&v.to_le_bytes())
    }

    /// Eight bytes.
    pub fn u64(&mut self, v: u64) -> &mut Writer {
        self.bytes(&v.to_le_bytes())
    }

    /// A record whose body `fill` writes. Bodies are short by construction (a few hundred bytes).
    pub fn tlv(&mut self, kind: u16, fill: impl FnOnce(&mut Writer)) -> &mut Writer {
        self.u16(kind);
        self.counted(fill)
    }

    /// A `u32` length and then the bytes that `fill` writes.
    pub fn counted(&mut self, fill: impl FnOnce(&mut Writer)) -> &mut Writer {
        let at = self.len();
        self.u32(0);
        fill(self);
        self.patch(at, self.len() - at - 4);
        self
    }

    /// Writes `value` over the `u32` at offset `at`.
    pub(crate) fn patch(&mut self, at: usize, value: usize) {
        debug_assert!(u32::try_from(value).is_ok());
        if let Some(field) = self.out.get_mut(at..at + 4) {
            field.copy_from_slice(&(value as u32).to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_round_trip_and_are_little_endian() {
        let mut w = Writer::new();
        w.u8(1).u16(0x0203).u32(0x0405_0607).u64(8).bytes(b"xy");
        let bytes = w.finish();
        assert_eq!(&bytes[..7], [1, 3, 2, 7, 6, 5, 4]);
        let mut r = Reader::new(&bytes);
        assert_eq!(
            (r.u8(), r.u16(), r.u32(), r.u64()),
            (Ok(1), Ok(0x0203), Ok(0x0405_0607), Ok(8))
        );
        assert_eq!(r.rest(), b"xy");
        assert_eq!(r.u32(), Err(Short { at: 15, wanted: 4, have: 2 }));
        assert_eq!(r.array(), Ok(*b"xy"), "a short read takes nothing");
    }

    #[test]
    fn a_record_longer_than_the_input_is_short_and_takes_nothing() {
        let mut w = Writer::new();
        w.tlv(7, |w| {
            w.u32(9);
        });
        let mut bytes = w.finish();
        bytes[2] = 5;
        let mut r = Reader::new(&bytes);
        assert_eq!(r.tlv(), Err(Short { at: 6, wanted: 5, have: 4 }));
        assert_eq!(r.rest().len(), bytes.len());
        bytes[2..6].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Reader::new(&bytes).tlv().is_err());
    }

    proptest! {
        #[test]
        fn records_round_trip(records in prop::collection::vec(
            (any::<u16>(), prop::collection::vec(any::<u8>(), 0..40)), 0..8)) {
            let mut w = Writer::new();
            for (kind, body) in &records {
                w.tlv(*kind, |w| { w.bytes(body); });
            }
            let bytes = w.finish();
            let mut r = Reader::new(&bytes);
            for (kind, body) in &records {
                prop_assert_eq!(r.tlv(), Ok(Some(Tlv { kind: *kind, body })));
            }
            prop_assert_eq!(r.tlv(), Ok(None));
        }

        #[test]
        fn random_bytes_end(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut r = Reader::new(&bytes);
            let mut body = 0;
            while let Ok(Some(tlv)) = r.tlv() {
                body += 6 + tlv.body.len();
            }
            prop_assert_eq!(body + r.rest().len(), bytes.len());
        }
    }
}
