//! Regions over dma-bufs: parts of buffers, addresses other than offsets, and what is refused.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use kvrail::nic::verbs::{Device, Mr};
use kvrail::table::Direction;

use super::pair::{rail, Memory, Pair, Rail, Want, BYTES};
use super::{moves, ops, Rng};

const PAGE: u64 = 4096;
/// Bytes of a buffer: both parts below, and pages around them that nothing may touch.
const ROOM: usize = BYTES + (32 << 10);
/// What the bytes around a part are.
const EDGE: u8 = 0xA5;

/// Where dma-bufs come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// A file in memory, which is good enough for the fake library.
    File,
    /// `/dev/udmabuf`: pages of such a file.
    Udmabuf,
    /// `/dev/dma_heap/system`: pages of the kernel's own.
    Heap,
}

/// What `KVRAIL_TEST_DMABUF` says; with the fake library, files. Empty, and a line that says why:
/// nothing of a real kernel is assumed.
fn kinds(rail: &Rail) -> Vec<Kind> {
    if rail.is_fake() {
        return vec![Kind::File];
    }
    let Ok(named) = std::env::var("KVRAIL_TEST_DMABUF") else {
        println!("SKIPPED: KVRAIL_TEST_DMABUF does not say what this kernel has");
        return Vec::new();
    };
    named.split(',').filter(|&name| name != "refused").map(kind).collect()
}

fn kind(name: &str) -> Kind {
    match name {
        "udmabuf" => Kind::Udmabuf,
        "heap" => Kind::Heap,
        _ => panic!("KVRAIL_TEST_DMABUF: {name}; known: udmabuf, heap, refused"),
    }
}

fn owned(fd: i32, what: &str) -> OwnedFd {
    assert!(fd >= 0, "{what}: {}", std::io::Error::last_os_error());
    // SAFETY: just made, and of nobody else.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn memory_file(len: usize) -> OwnedFd {
    // SAFETY: the name ends in NUL.
    let fd = unsafe { libc::memfd_create(c"buffer".as_ptr(), libc::MFD_ALLOW_SEALING) };
    let file = owned(fd, "memfd_create");
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::ftruncate(fd, len as i64) }, 0);
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) }, 0);
    file
}

fn udmabuf(len: usize) -> OwnedFd {
    /// `struct udmabuf_create` of `linux/udmabuf.h`, and `UDMABUF_CREATE`.
    #[repr(C)]
    struct Create {
        memfd: u32,
        flags: u32,
        offset: u64,
        size: u64,
    }
    const CREATE: libc::Ioctl = 0x4018_7542;
    let file = memory_file(len);
    let device = File::open("/dev/udmabuf").unwrap_or_else(|e| panic!("/dev/udmabuf: {e}"));
    let ask = Create { memfd: file.as_raw_fd() as u32, flags: 1, offset: 0, size: len as u64 };
    // SAFETY: an open device, and the struct that this request reads.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), CREATE, &raw const ask) };
    owned(fd, "UDMABUF_CREATE")
}

fn heap(len: usize) -> OwnedFd {
    /// `struct dma_heap_allocation_data` of `linux/dma-heap.h`, and `DMA_HEAP_IOCTL_ALLOC`.
    #[repr(C)]
    struct Alloc {
        len: u64,
        fd: u32,
        fd_flags: u32,
        heap_flags: u64,
    }
    const ALLOC: libc::Ioctl = 0xC018_4800;
    let path = "/dev/dma_heap/system";
    let device = File::open(path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let fd_flags = (libc::O_RDWR | libc::O_CLOEXEC) as u32;
    let mut ask = Alloc { len: len as u64, fd: 0, fd_flags, heap_flags: 0 };
    // SAFETY: an open device, and the struct that this request reads and writes.
    let e = unsafe { libc::ioctl(device.as_raw_fd(), ALLOC, &raw mut ask) };
    assert_eq!(e, 0, "DMA_HEAP_IOCTL_ALLOC: {}", std::io::Error::last_os_error());
    owned(ask.fd as i32, "DMA_HEAP_IOCTL_ALLOC")
}

fn dmabuf(kind: Kind, len: usize) -> OwnedFd {
    match kind {
        Kind::File => memory_file(len),
        Kind::Udmabuf => udmabuf(len),
        Kind::Heap => heap(len),
    }
}

/// All bytes of a buffer, as long as the process lives.
fn map(fd: &OwnedFd) -> &'static mut [u8] {
    let (prot, raw) = (libc::PROT_READ | libc::PROT_WRITE, fd.as_raw_fd());
    // SAFETY: a new mapping.
    let at = unsafe { libc::mmap(core::ptr::null_mut(), ROOM, prot, libc::MAP_SHARED, raw, 0) };
    assert_ne!(at, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    // SAFETY: mapped just now with this length, and never unmapped.
    unsafe { core::slice::from_raw_parts_mut(at.cast(), ROOM) }
}

/// Open descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A buffer of which a part is registered, and the bytes around that part.
struct Buffer {
    fd: OwnedFd,
    whole: &'static mut [u8],
    offset: usize,
    iova: u64,
}

impl Buffer {
    fn new(kind: Kind, offset: u64, iova: u64) -> Buffer {
        let fd = dmabuf(kind, ROOM);
        let whole = map(&fd);
        whole.fill(EDGE);
        Buffer { fd, whole, offset: offset as usize, iova }
    }

    fn register(&self, device: &Device, offset: u64, len: usize, iova: u64) -> Mr {
        device
            .register_dmabuf(self.fd.as_raw_fd(), offset, len as u64, iova)
            .unwrap_or_else(|e| panic!("{e}"))
    }

    /// Lends the part to an end, closes the descriptor, and gives the pages around it.
    fn lend(self, device: &Device, edges: &mut Vec<&'static [u8]>) -> Memory {
        // Another registration of the same bytes, under other addresses, has no part in it.
        let other = self.register(device, 0, ROOM, 0x7000_0000_0000);
        let mr = self.register(device, self.offset as u64, BYTES, self.iova);
        // SAFETY: of this device; nothing uses it.
        unsafe { device.deregister(other) }.unwrap();
        let (front, rest) = self.whole.split_at_mut(self.offset);
        let (part, back) = rest.split_at_mut(BYTES);
        edges.extend([&*front, &*back]);
        (part, self.iova, mr)
    }
}

#[test]
fn bytes_of_a_dmabuf_arrive_in_the_part_that_was_registered_and_nowhere_else() {
    let Some(rail) = rail() else { return };
    let mut rng = Rng(0xDAB0);
    for kind in kinds(&rail) {
        // Offset and address of both parts. First addresses that could be offsets of the buffer;
        // the fake, under valgrind, has no time for more.
        let places = [
            [(0x3040, 0x1040), (0x1FF8, 0x4FF8)],
            [(0x1000, 0x6000_0000_0000), (0x5678, 0xFFFF_0000_0000_0678)],
        ];
        let some = if rail.is_fake() { 1 } else { 2 };
        for [a, b] in &places[..some] {
            let (a, b) = (Buffer::new(kind, a.0, a.1), Buffer::new(kind, b.0, b.1));
            let (mut edges, mut more) = (Vec::new(), Vec::new());
            let lend_a = |device: &Device| a.lend(device, &mut edges);
            let lend_b = |device: &Device| b.lend(device, &mut more);
            let mut pair = Pair::over(&rail, Want::default(), lend_a, lend_b);
            for direction in [Direction::Read, Direction::Write] {
                let ops = ops(&pair, &mut rng, 300, false);
                moves(&mut pair, &mut rng, direction, &ops);
            }
            pair.end();
            for edge in edges.iter().chain(&more) {
                let touched = edge.iter().position(|&byte| byte != EDGE);
                assert_eq!((edge.is_empty(), touched), (false, None), "{kind:?}");
            }
        }
    }
}

#[test]
fn what_is_no_dmabuf_or_not_inside_it_is_refused_and_leaves_nothing() {
    let Some(rail) = rail() else { return };
    for kind in kinds(&rail) {
        let pair = Pair::connect(&rail, Want::default());
        let device = &pair.b.device;
        let buffer = dmabuf(kind, ROOM);
        let mut pipe = [0; 2];
        // SAFETY: room for two.
        assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
        let pipe = pipe.map(|fd| owned(fd, "pipe"));
        let closed = dmabuf(kind, ROOM).as_raw_fd();
        let (fd, room) = (buffer.as_raw_fd(), ROOM as u64);
        let before = descriptors();
        let bad = [
            ("no descriptor", -1, 0, PAGE, 0, libc::EBADF),
            ("a closed descriptor", closed, 0, PAGE, 0, libc::EBADF),
            ("a descriptor of something else", pipe[0].as_raw_fd(), 0, PAGE, 0, libc::EINVAL),
            ("a byte past the end", fd, 0, room + 1, 0, libc::EINVAL),
            ("a part past the end", fd, PAGE, room, PAGE, libc::EINVAL),
            ("a part behind the end", fd, room + PAGE, PAGE, 0, libc::EINVAL),
            ("an end past all addresses", fd, PAGE.wrapping_neg(), 2 * PAGE, 0, libc::EINVAL),
            ("another place in the page", fd, 0, PAGE, 123, libc::EINVAL),
            ("no byte", fd, 0, 0, 0, libc::EINVAL),
        ];
        for (what, fd, offset, len, iova, errno) in bad {
            let fault = device.register_dmabuf(fd, offset, len, iova).unwrap_err();
            assert_eq!((fault.call, fault.errno), ("ibv_reg_dmabuf_mr", errno), "{kind:?}: {what}");
            let text = fault.to_string();
            println!("{what}: {text}");
            assert!(text.contains(&format!("bytes {len}")), "{kind:?}: {what}: {text}");
        }
        let good = device.register_dmabuf(fd, 0, room, 0).unwrap_or_else(|e| panic!("{e}"));
        // SAFETY: of this device; nothing uses it.
        unsafe { device.deregister(good) }.unwrap();
        assert_eq!(descriptors(), before, "{kind:?}");
        pair.end();
    }
}

#[test]
fn a_dmabuf_registered_many_times_leaves_no_descriptors() {
    let Some(rail) = rail() else { return };
    for kind in kinds(&rail) {
        let pair = Pair::connect(&rail, Want::default());
        let device = &pair.b.device;
        let small = dmabuf(kind, ROOM);
        let cycle = |fd: i32, len: usize| {
            let mr = device.register_dmabuf(fd, 0, len as u64, 0);
            // SAFETY: of this device; nothing uses it.
            unsafe { device.deregister(mr.unwrap_or_else(|e| panic!("{e}"))) }.unwrap();
        };
        cycle(small.as_raw_fd(), ROOM);
        let before = descriptors();
        for _ in 0..50 {
            cycle(small.as_raw_fd(), ROOM);
            cycle(dmabuf(kind, ROOM).as_raw_fd(), ROOM);
        }
        assert_eq!(descriptors(), before, "{kind:?}");
        pair.end();
    }
}

#[test]
fn a_kernel_that_takes_no_dmabufs_says_so_and_keeps_nothing() {
    let Some(rail) = rail() else { return };
    let fake = rail.is_fake();
    if !fake && std::env::var("KVRAIL_TEST_DMABUF").as_deref() != Ok("refused") {
        return;
    }
    rail.set("*.dmabuf=0");
    let pair = Pair::connect(&rail, Want::default());
    for kind in if fake { vec![Kind::File] } else { vec![Kind::Udmabuf, Kind::Heap] } {
        let buffer = dmabuf(kind, ROOM);
        let before = descriptors();
        for _ in 0..10 {
            let fault = pair.b.device.register_dmabuf(buffer.as_raw_fd(), 0, ROOM as u64, 0);
            let fault = fault.unwrap_err();
            assert_eq!((fault.call, fault.errno), ("ibv_reg_dmabuf_mr", libc::EOPNOTSUPP));
            let text = fault.to_string();
            assert!(text.contains("cannot do this"), "{text}");
        }
        assert_eq!(descriptors(), before, "{kind:?}");
    }
    rail.set("*.dmabuf=1");
    pair.end();
}
