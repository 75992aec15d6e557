//! The memory of one engine: regions of equal chunks, each of which one transfer uses at a time.

use super::*;

/// Bytes of a chunk, and of the canary behind each.
pub const CHUNK: usize = 32 << 10;
const CANARY: usize = 32;
const CANARY_BYTE: u8 = 0xC5;
const STEP: usize = CHUNK + CANARY;

/// One region: plain memory that the simulator writes behind the compiler's back, so it is reached
/// by its address only.
pub struct Region {
    cells: *mut u8,
    chunks: usize,
    /// While it is registered.
    pub handle: Option<Handle>,
    /// Registrations so far.
    pub epoch: u32,
    pub free: Vec<usize>,
}

impl Region {
    pub fn new(chunks: usize) -> Region {
        let cells = vec![CANARY_BYTE; chunks * STEP].into_boxed_slice();
        let cells = Box::into_raw(cells).cast::<u8>();
        Region { cells, chunks, handle: None, epoch: 0, free: (0..chunks).rev().collect() }
    }

    pub fn base(&self) -> u64 {
        self.cells as u64
    }

    pub fn len(&self) -> usize {
        self.chunks * STEP
    }

    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Address of a chunk.
    pub fn at(&self, chunk: usize) -> u64 {
        self.base() + (chunk * STEP) as u64
    }

    /// The bytes of a chunk now. Nothing runs while they are looked at.
    pub fn bytes(&self, chunk: usize, len: usize) -> &[u8] {
        assert!(chunk < self.chunks && len <= CHUNK);
        // SAFETY: inside the allocation, and nobody writes while the test looks.
        unsafe { core::slice::from_raw_parts(self.cells.add(chunk * STEP), len) }
    }

    pub fn write(&self, chunk: usize, bytes: &[u8]) {
        assert!(chunk < self.chunks && bytes.len() <= CHUNK);
        let to = self.cells.wrapping_add(chunk * STEP);
        // SAFETY: inside the allocation, and nobody else looks meanwhile.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    pub fn fill(&self, chunk: usize, len: usize, byte: u8) {
        assert!(chunk < self.chunks && len <= CHUNK);
        // SAFETY: inside the allocation, and nobody else looks meanwhile.
        unsafe { core::ptr::write_bytes(self.cells.add(chunk * STEP), byte, len) };
    }

    /// Whether the canary behind a chunk is whole.
    pub fn is_whole(&self, chunk: usize) -> bool {
        // SAFETY: inside the allocation, and nobody writes while the test looks.
        let canary =
            unsafe { core::slice::from_raw_parts(self.cells.add(chunk * STEP + CHUNK), CANARY) };
        canary.iter().all(|&b| b == CANARY_BYTE)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let whole = core::ptr::slice_from_raw_parts_mut(self.cells, self.chunks * STEP);
        // SAFETY: made by `Region::new`; nothing is registered when a fleet is dropped.
        drop(unsafe { Box::from_raw(whole) });
    }
}

/// A chunk that nobody may write any more (or nobody but a transfer that failed).
pub struct Watch {
    pub engine: usize,
    pub region: usize,
    pub chunk: usize,
    pub until: u64,
    pub what: Watched,
    pub why: String,
}

pub enum Watched {
    /// Filled with this byte, so many.
    Still(u8, usize),
    /// Each byte is of one of the two.
    Either(Vec<u8>, Vec<u8>),
}

impl Watch {
    /// The first byte that is not what it must be.
    pub fn wrong(&self, region: &Region) -> Option<String> {
        let at = match &self.what {
            Watched::Still(byte, len) => {
                let now = region.bytes(self.chunk, *len);
                now.iter().position(|b| b != byte)
            }
            Watched::Either(a, b) => {
                let now = region.bytes(self.chunk, a.len());
                (0..a.len()).find(|&i| now[i] != a[i] && now[i] != b[i])
            }
        };
        let at = at.map(|i| format!("byte {i} of chunk {} is wrong", self.chunk));
        let at = at.or_else(|| {
            (!region.is_whole(self.chunk)).then(|| format!("behind chunk {}", self.chunk))
        });
        at.map(|at| {
            let (engine, which) = (self.engine, self.region);
            format!("engine {engine}, region {which}: {at}: {}", self.why)
        })
    }
}
