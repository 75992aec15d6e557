//! The memory that a target shares with its initiators: is it alive, which regions are open, who is
//! inside one.
//!
//! One memfd per engine, mapped by every connected initiator (opened through `/proc/PID/fd`, for
//! which the kernel asks PTRACE_MODE_READ; the copies need PTRACE_MODE_ATTACH, which is more, so
//! that attaching ends with a copy as its proof). Layout: a header page, one `u32` per region
//! (`generation << 1 | open`), and for every peer slot a row of in-use counters, one `u32` per
//! region.
//!
//! *Enter and withdraw.* An initiator raises the counter, then reads the region word. The target
//! closes the region word, then reads the counters. A full fence on each side makes one of them see
//! the other, so a copy that began is counted and a region that is withdrawn is not entered.

use crate::nic::local::errno;
use crate::sync::shared::{fence, AtomicU32, Ordering};

const MAGIC: u64 = 0x6b76_7261_696c_3031; // "kvrail01"
const PAGE: usize = 4096;
/// Set by the kernel in a robust futex whose owner died (`linux/futex.h`).
const FUTEX_OWNER_DIED: u32 = 0x4000_0000;
/// Offset of the scratch bytes in the guard page, behind the cookie.
const SCRATCH: u64 = 64;
/// What of the guard page's address is random: 34 bits, in the lower half of 47-bit addresses.
const GUARD_MASK: u64 = 0x3fff_ffff_f000;
const _: () = assert!(GUARD_MASK.count_ones() == 34);
/// The same for a kernel whose processes have 39 bits only (three levels of page tables): 26 bits.
const SMALL_MASK: u64 = 0x3f_ffff_f000;
/// Below this an address is not taken: old programs map there.
const GUARD_LOWEST: u64 = 1 << 32;

/// What an initiator needs to attach to a target's memory. Travels in the handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Offer {
    /// Process id in the pid namespace that both share.
    pub pid: u32,
    /// Number of the shared file in that process.
    pub fd: u32,
    /// Address of the guard page there.
    pub guard: u64,
    /// What its first 16 bytes hold.
    pub cookie: [u8; 16],
    /// Peer slots (rows of counters).
    pub peers: u32,
    /// Regions (counters in a row).
    pub regions: u32,
    /// The row that the initiator counts in.
    pub row: u32,
}

/// `struct robust_list_head` of the kernel, and the one entry in it.
#[repr(C)]
struct Robust {
    head: *mut Robust,
    futex_offset: libc::c_long,
    pending: *mut libc::c_void,
    entry: *mut Robust,
}

#[repr(C)]
struct Header {
    magic: u64,
    peers: u32,
    regions: u32,
    cookie: [u8; 16],
    robust: Robust,
    life: AtomicU32,
}

const _: () = assert!(core::mem::size_of::<Header>() <= PAGE);

/// Why attaching to a peer's memory failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttachError {
    /// A system call failed: its name and errno.
    Os(&'static str, i32),
    /// The shared file is not the one that was offered.
    Foreign,
    /// The proof read reached a process that does not hold the cookie.
    Stranger,
}

/// One shared mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Map {
    base: *mut u8,
    len: usize,
    peers: u32,
    regions: u32,
}

impl Map {
    fn bytes(peers: u32, regions: u32) -> usize {
        let words = regions as usize * (peers as usize + 1);
        (PAGE + words * 4).div_ceil(PAGE) * PAGE
    }

    fn new(fd: i32, peers: u32, regions: u32) -> Result<Map, AttachError> {
        let len = Map::bytes(peers, regions);
        let (rw, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: I8: a fresh mapping at an address the kernel chooses.
        let base = unsafe { libc::mmap(core::ptr::null_mut(), len, rw, shared, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(AttachError::Os("mmap", errno()));
        }
        // A forked child must not count in it. Failure only means that a child inherits the
        // mapping. SAFETY: I8: the mapping made above.
        unsafe { libc::madvise(base, len, libc::MADV_DONTFORK) };
        Ok(Map { base: base.cast(), len, peers, regions })
    }

    fn header(&self) -> *mut Header {
        self.base.cast()
    }

    fn life(&self) -> &AtomicU32 {
        // SAFETY: I5: the mapping is live while a `Map` of it is used; its first page is a header.
        unsafe { &(*self.header()).life }
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        debug_assert!(index < self.regions as usize * (self.peers as usize + 1));
        // SAFETY: I5: live mapping; the index is inside by `region` and `counter`, which are all
        // that call this.
        unsafe { &*self.base.add(PAGE + index * 4).cast() }
    }

    fn region(&self, slot: u32) -> Option<&AtomicU32> {
        (slot < self.regions).then(|| self.word(slot as usize))
    }

    fn counter(&self, row: u32, slot: u32) -> Option<&AtomicU32> {
        let inside = row < self.peers && slot < self.regions;
        let index = self.regions as usize * (row as usize + 1) + slot as usize;
        inside.then(|| self.word(index))
    }

    /// # Safety
    /// Nobody uses the mapping any more (I5).
    unsafe fn unmap(&self) {
        // SAFETY: I5: by the caller's promise; made by `new` with this length.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// A file of ours.
#[derive(Debug)]
struct File(i32);

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: I8: our own file, closed once.
        unsafe { libc::close(self.0) };
    }
}

/// The target's own mapping.
#[derive(Debug)]
struct Mapping(Map);

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: I5: the engine drops its ports and threads before its share.
        unsafe { self.0.unmap() };
    }
}

/// A page at a random address, with the cookie in it, that children do not inherit.
#[derive(Debug)]
struct GuardPage(u64);

impl Drop for GuardPage {
    fn drop(&mut self) {
        // SAFETY: I8: mapped by `GuardPage::new`, ours alone.
        unsafe { libc::munmap(self.0 as *mut libc::c_void, PAGE) };
    }
}

/// The target's side. Owns the file, the mapping and the guard page.
#[derive(Debug)]
pub struct Share {
    map: Mapping,
    guard: GuardPage,
    file: File,
    cookie: [u8; 16],
}

// SAFETY: I5: everything behind the pointer is atomic, or written before the share is offered to
// anybody.
unsafe impl Send for Share {}
// SAFETY: I5: as above.
unsafe impl Sync for Share {}

impl Share {
    /// Makes the shared memory of one engine. `cookie`: 16 random bytes; `random`: gives more for
    /// the guard's address.
    pub fn new(
        peers: u32,
        regions: u32,
        cookie: [u8; 16],
        mut random: impl FnMut() -> u64,
    ) -> Result<Share, AttachError> {
        // SAFETY: I8: a constant name.
        let fd = unsafe { libc::memfd_create(c"kvrail".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(AttachError::Os("memfd_create", errno()));
        }
        let file = File(fd);
        let len = Map::bytes(peers, regions);
        // SAFETY: I8: the file made above.
        if unsafe { libc::ftruncate(fd, len as libc::off_t) } != 0 {
            return Err(AttachError::Os("ftruncate", errno()));
        }
        let map = Mapping(Map::new(fd, peers, regions)?);
        let guard = GuardPage::new(&cookie, &mut random)?;
        let h = map.0.header();
        // SAFETY: I5: the mapping is ours alone yet, zeroed and large enough.
        unsafe {
            (&raw mut (*h).peers).write(peers);
            (&raw mut (*h).regions).write(regions);
            (&raw mut (*h).cookie).write(cookie);
            (&raw mut (*h).magic).write(MAGIC);
        }
        Ok(Share { map, guard, file, cookie })
    }

    /// Binds the life word to the calling thread: when it ends, however it ends, peers see this
    /// engine as dead. The thread must use no robust mutex.
    pub fn live_with_this_thread(&self) {
        let h = self.map.0.header();
        // SAFETY: I5: the mapping outlives the thread (the engine joins it first); fields of the
        // header's `robust` are used by this thread and the kernel only.
        unsafe {
            let head = &raw mut (*h).robust;
            let entry = (&raw mut (*head).entry).cast::<Robust>();
            (&raw mut (*head).entry).write(head);
            (&raw mut (*head).head).write(entry);
            let offset = (&raw const (*h).life).byte_offset_from(entry.cast_const());
            (&raw mut (*head).futex_offset).write(offset as libc::c_long);
            (&raw mut (*head).pending).write(core::ptr::null_mut());
            let tid = libc::syscall(libc::SYS_gettid) as u32;
            self.map.0.life().store(tid, Ordering::SeqCst);
            // Three words: the size of the kernel's own structure, without our entry.
            libc::syscall(libc::SYS_set_robust_list, head, 3 * core::mem::size_of::<usize>());
        }
    }

    /// Says that this engine is gone.
    pub fn die(&self) {
        self.map.0.life().store(0, Ordering::SeqCst);
    }

    /// What the peer in `row` needs to attach.
    pub fn offer(&self, row: u32) -> Offer {
        Offer {
            pid: own_pid(),
            fd: self.file.0 as u32,
            guard: self.guard.0,
            cookie: self.cookie,
            peers: self.map.0.peers,
            regions: self.map.0.regions,
            row,
        }
    }

    /// The engine's own memory as a peer's: for transfers to itself. Counts in `row`.
    pub fn own_memory(&self, row: u32) -> PeerMemory {
        PeerMemory { map: self.map.0, pid: own_pid() as libc::pid_t, guard: self.guard.0, row }
    }

    /// Opens region `slot` for peers.
    pub fn open(&self, slot: u32, generation: u32) {
        if let Some(word) = self.map.0.region(slot) {
            word.store((generation << 1) | 1, Ordering::SeqCst);
        }
    }

    /// Withdraws region `slot`: nobody enters it after this returns.
    pub fn withdraw(&self, slot: u32) {
        if let Some(word) = self.map.0.region(slot) {
            word.fetch_and(!1, Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
    }

    /// True while the peer in `row` is inside region `slot`.
    pub fn is_inside(&self, row: u32, slot: u32) -> bool {
        self.map.0.counter(row, slot).is_some_and(|c| c.load(Ordering::SeqCst) != 0)
    }

    /// True when the peer in `row` is inside no region.
    pub fn row_is_clear(&self, row: u32) -> bool {
        (0..self.map.0.regions).all(|slot| !self.is_inside(row, slot))
    }

    /// Forgets the counts of a peer whose process has ended.
    pub fn clear_row(&self, row: u32) {
        for slot in 0..self.map.0.regions {
            if let Some(c) = self.map.0.counter(row, slot) {
                if c.load(Ordering::Relaxed) != 0 {
                    c.store(0, Ordering::SeqCst);
                }
            }
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.die();
    }
}

impl GuardPage {
    fn new(cookie: &[u8; 16], random: &mut impl FnMut() -> u64) -> Result<GuardPage, AttachError> {
        let (rw, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
        );
        let mut last = libc::EEXIST;
        for _ in 0..64 {
            let mask = if last == libc::ENOMEM { SMALL_MASK } else { GUARD_MASK };
            let hint = random() & mask;
            if hint < GUARD_LOWEST {
                continue;
            }
            // SAFETY: I8: NOREPLACE never replaces a mapping.
            let at = unsafe { libc::mmap(hint as *mut libc::c_void, PAGE, rw, kind, -1, 0) };
            if at == libc::MAP_FAILED {
                last = errno();
                continue;
            }
            let page = GuardPage(at as u64);
            // SAFETY: I8: the page mapped above. A child that inherited it would pass for us, so
            // this must not fail.
            if unsafe { libc::madvise(at, PAGE, libc::MADV_DONTFORK) } != 0 {
                return Err(AttachError::Os("madvise", errno()));
            }
            // SAFETY: I8: a fresh writable page.
            unsafe { core::ptr::copy_nonoverlapping(cookie.as_ptr(), at.cast(), cookie.len()) };
            return Ok(page);
        }
        Err(AttachError::Os("mmap", last))
    }
}

fn own_pid() -> u32 {
    // SAFETY: I8: no arguments.
    unsafe { libc::getpid() as u32 }
}

/// The initiator's side: a target's memory, attached. Plain data that every lane copies; detached
/// once, by the host, after every lane closed its rail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerMemory {
    map: Map,
    pid: libc::pid_t,
    guard: u64,
    row: u32,
}

// SAFETY: I5: everything behind the pointer is atomic; the mapping lives until `detach`.
unsafe impl Send for PeerMemory {}
// SAFETY: I5: as above.
unsafe impl Sync for PeerMemory {}

impl PeerMemory {
    /// Attaches to an offered memory and proves it: the shared file is mapped, and the cookie is
    /// read out of the target's guard page by the very call that will carry data.
    pub fn attach(offer: &Offer) -> Result<PeerMemory, AttachError> {
        let mut path: heapless::String<40> = heapless::String::new();
        let text = format_args!("/proc/{}/fd/{}\0", offer.pid, offer.fd);
        if core::fmt::Write::write_fmt(&mut path, text).is_err() {
            return Err(AttachError::Foreign);
        }
        let flags = libc::O_RDWR | libc::O_CLOEXEC;
        // SAFETY: I8: NUL terminated above.
        let fd = unsafe { libc::open(path.as_ptr().cast(), flags) };
        if fd < 0 {
            return Err(AttachError::Os("open", errno()));
        }
        // Closed at the end: the mapping does not need it.
        let file = File(fd);
        let memory = PeerMemory {
            map: PeerMemory::map(file.0, offer)?,
            pid: offer.pid as libc::pid_t,
            guard: offer.guard,
            row: offer.row,
        };
        memory.prove(&offer.cookie).inspect_err(|_| memory.detach())?;
        Ok(memory)
    }

    fn map(fd: i32, offer: &Offer) -> Result<Map, AttachError> {
        let (max_peers, max_regions) = (1 << 16, 1 << 20);
        if offer.peers > max_peers || offer.regions > max_regions || offer.row >= offer.peers {
            return Err(AttachError::Foreign);
        }
        // SAFETY: I8: all zeroes is a valid `stat`.
        let mut stat: libc::stat = unsafe { core::mem::zeroed() };
        // SAFETY: I8: our own file and structure.
        if unsafe { libc::fstat(fd, &raw mut stat) } != 0 {
            return Err(AttachError::Os("fstat", errno()));
        }
        // A shorter file would turn a load into a SIGBUS.
        if (stat.st_size as usize) < Map::bytes(offer.peers, offer.regions) {
            return Err(AttachError::Foreign);
        }
        let map = Map::new(fd, offer.peers, offer.regions)?;
        // SAFETY: I5: mapped just now; the owner wrote these before it offered the file.
        let (magic, cookie) = unsafe { ((*map.header()).magic, (*map.header()).cookie) };
        if magic != MAGIC || cookie != offer.cookie {
            // SAFETY: I5: nobody else has this mapping.
            unsafe { map.unmap() };
            return Err(AttachError::Foreign);
        }
        Ok(map)
    }

    fn prove(&self, cookie: &[u8; 16]) -> Result<(), AttachError> {
        let mut seen = [0u8; 16];
        let local = libc::iovec { iov_base: seen.as_mut_ptr().cast(), iov_len: seen.len() };
        let remote = libc::iovec { iov_base: self.guard as *mut libc::c_void, iov_len: seen.len() };
        // SAFETY: I7: one element each, of 16 bytes.
        let n = unsafe {
            libc::process_vm_readv(self.pid, &raw const local, 1, &raw const remote, 1, 0)
        };
        if n < 0 {
            return Err(AttachError::Os("process_vm_readv", errno()));
        }
        if n as usize != seen.len() || seen != *cookie {
            return Err(AttachError::Stranger);
        }
        Ok(())
    }

    /// Process id.
    pub const fn pid(&self) -> libc::pid_t {
        self.pid
    }

    /// Where a WRITE may scribble to prove that it reaches the right address space.
    pub const fn scratch_address(&self) -> u64 {
        self.guard + SCRATCH
    }

    /// True until the thread that the target lives with has ended.
    pub fn is_alive(&self) -> bool {
        let life = self.map.life().load(Ordering::SeqCst);
        life != 0 && life & FUTEX_OWNER_DIED == 0
    }

    /// Enters a region. False, and not entered, when it is not open in that generation.
    pub fn enter(&self, slot: u32, generation: u32) -> bool {
        let (Some(counter), Some(word)) = (self.map.counter(self.row, slot), self.map.region(slot))
        else {
            return false;
        };
        counter.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if word.load(Ordering::SeqCst) == (generation << 1) | 1 {
            return true;
        }
        counter.fetch_sub(1, Ordering::SeqCst);
        false
    }

    /// Leaves a region that was entered.
    pub fn leave(&self, slot: u32) {
        if let Some(counter) = self.map.counter(self.row, slot) {
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Gives the mapping back.
    pub fn detach(&self) {
        // SAFETY: I5: the host calls this once, after every lane closed its rail to this peer.
        unsafe { self.map.unmap() };
    }
}
