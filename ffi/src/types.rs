//! Numbers and structs of the ABI: plain data, no code, so that the layout test can include this
//! file by itself.

use core::ffi::{c_char, c_int, c_void};

/// Version of this header's ABI. A change that breaks callers changes the major number and the
/// library's SONAME.
pub const KVR_ABI_MAJOR: u32 = 0;
/// Counts additions within a major version.
pub const KVR_ABI_MINOR: u32 = 1;

/// 0 success, negative an error, positive not finished. Codes are grouped by the largest thing they
/// kill.
pub type kvr_status = i32;

/// Success; for a transfer: every byte is in place.
pub const KVR_OK: i32 = 0;
/// Not finished (or, from kvr_progress(), work was done): ask again.
pub const KVR_IN_PROGRESS: i32 = 1;

/// Only this call failed (-1..-29): a bad argument; the text names it.
pub const KVR_ERR_INVALID: i32 = -1;
/// The handle names something that was released.
pub const KVR_ERR_STALE: i32 = -2;
/// Unknown peer or key.
pub const KVR_ERR_NOT_FOUND: i32 = -3;
/// A table or rail index is out of range.
pub const KVR_ERR_RANGE: i32 = -4;
/// List lengths differ, or the lengths of one pair differ.
pub const KVR_ERR_MISMATCH: i32 = -5;
/// A descriptor is not inside its region.
pub const KVR_ERR_NOT_REGISTERED: i32 = -6;
/// A fixed capacity is full, or a buffer is too small; the text names which.
pub const KVR_ERR_CAPACITY: i32 = -7;
/// In use: posted twice, memory that a transfer uses, or a transfer that could not be stopped in
/// time, whose memory must not be reused.
pub const KVR_ERR_BUSY: i32 = -8;
/// Not offered by this driver.
pub const KVR_ERR_UNSUPPORTED: i32 = -9;
/// The pool limit (`max_bytes`, KVRAIL_MAX_BYTES) is reached.
pub const KVR_ERR_NO_MEMORY: i32 = -10;
/// A metadata blob ends too early.
pub const KVR_ERR_BLOB_TRUNCATED: i32 = -11;
/// A metadata blob that is not kvrail's.
pub const KVR_ERR_BLOB_FOREIGN: i32 = -12;
/// A metadata blob of another major version; the text has both.
pub const KVR_ERR_BLOB_VERSION: i32 = -13;
/// An unknown parameter or a bad value; the text lists what is known.
pub const KVR_ERR_CONFIG: i32 = -14;
/// The engine belongs to the process that made it, and this is a forked child.
pub const KVR_ERR_FORKED: i32 = -15;
/// The kernel forbids it; the text names the setting.
pub const KVR_ERR_PERMISSION: i32 = -16;
/// The transfer was checked before it was posted.
pub const KVR_ERR_NOT_POSTED: i32 = -17;

/// The transfer ended (-30..-49): cancelled.
pub const KVR_ERR_CANCELLED: i32 = -30;
/// The peer's memory was not accessible: withdrawn, out of range or unmapped.
pub const KVR_ERR_REMOTE_ACCESS: i32 = -31;
/// The local memory was not accessible.
pub const KVR_ERR_LOCAL_ACCESS: i32 = -32;
/// No progress for `stall_ms`.
pub const KVR_ERR_STALLED: i32 = -33;

/// A rail failed (-50..-59): no usable rail to the peer.
pub const KVR_ERR_NO_RAIL: i32 = -50;

/// The peer is gone (-60..-79): it died, left, or was removed.
pub const KVR_ERR_DISCONNECTED: i32 = -60;
/// The peer did not answer within the dial limit.
pub const KVR_ERR_UNREACHABLE: i32 = -61;
/// The handshake was refused: secret, incarnation or version.
pub const KVR_ERR_REFUSED: i32 = -62;

/// The engine (-80..): a caught panic, which is a bug in kvrail. Destroy the engine; the text says
/// where.
pub const KVR_ERR_INTERNAL: i32 = -80;
/// A system call failed; the text has errno.
pub const KVR_ERR_OS: i32 = -81;

/// Direction: from the peer into local memory (pull).
pub const KVR_READ: u32 = 0;
/// Direction: from local memory into the peer (push).
pub const KVR_WRITE: u32 = 1;

/// Memory of the host.
pub const KVR_MEM_HOST: u32 = 0;
/// Memory of a device, at an address that a peer-memory module of the kernel resolves.
pub const KVR_MEM_DEVICE: u32 = 1;
/// Memory of a device behind a dma-buf: kvr_region_register_segments().
pub const KVR_MEM_DMABUF: u32 = 2;

/// Bit of kvr_segment.flags: whoever reads the memory, the device itself or another, sees what a
/// NIC has completed. Without it a READ into the segment ends with a flush: a READ of a few bytes
/// out of it by the NIC that carried it.
pub const KVR_SEGMENT_COHERENT: u32 = 1;

/// Bit of kvr_config.flags: the engine's own thread makes progress. Without it kvr_progress(),
/// kvr_transfer_check() and kvr_notifs() do, on the caller's thread.
pub const KVR_CFG_PROGRESS_THREAD: u32 = 1;

/// Bit of kvr_region_deregister(): cancel the transfers that use the region instead of
/// KVR_ERR_BUSY.
pub const KVR_DEREGISTER_CANCEL: u32 = 1;

/// kvr_event.kind: every port of this engine's rails is down.
pub const KVR_EVENT_LINKS_DOWN: u32 = 1;
/// One of them is up again.
pub const KVR_EVENT_LINKS_UP: u32 = 2;
/// A rail to a connected peer broke.
pub const KVR_EVENT_RAIL_DOWN: u32 = 3;
/// A rail to a connected peer works.
pub const KVR_EVENT_RAIL_UP: u32 = 4;
/// The connection to a peer ended: it died, left, restarted, or was removed here. Its rails went
/// with it.
pub const KVR_EVENT_PEER_GONE: u32 = 5;
/// A peer is connected, whoever dialled.
pub const KVR_EVENT_PEER_UP: u32 = 6;

/// kvr_event.lane of an event that concerns no rail.
pub const KVR_NO_LANE: u32 = u32::MAX;

/// Longest message of a notification, in bytes.
pub const KVR_MESSAGE_MAX: usize = 65536;
/// Bytes of kvr_config.name, the NUL included.
pub const KVR_NAME_LEN: usize = 256;
/// Bytes of kvr_config.listen_ip and kvr_engine_info.listen, the NUL included.
pub const KVR_LISTEN_LEN: usize = 64;
/// Bytes of a transport's name, the NUL included.
pub const KVR_TRANSPORT_LEN: usize = 16;
/// Bytes of kvr_config.devmem, the NUL included.
pub const KVR_DEVMEM_LEN: usize = 16;
/// Bytes of kvr_config.nics, the NUL included.
pub const KVR_NICS_LEN: usize = 128;
/// Bytes of kvr_config.nics_long, the NUL included.
pub const KVR_NICS_LONG_LEN: usize = 1032;
/// Bytes of kvr_rail_info.name, the NUL included.
pub const KVR_RAIL_NAME_LEN: usize = 32;

/// Handle of a local region (kvr_region_register()) or a remote one (kvr_region_import()). Never 0.
/// Carries a generation: once released it answers KVR_ERR_STALE, whatever took its place.
pub type kvr_region = u64;
/// Handle of a peer. Never 0.
pub type kvr_peer = u64;
/// Handle of a descriptor table. Never 0.
pub type kvr_table = u64;
/// Handle of a prepared transfer. Never 0.
pub type kvr_transfer = u64;

/// One piece of registered memory. Laid out as nixlMetaDesc, so a NIXL list is passed as it is.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct kvr_desc {
    /// First byte. For a remote region: in the peer's addresses.
    pub addr: u64,
    /// Bytes; 0 is refused.
    pub len: u64,
    /// Device index; ignored, the region decides.
    pub dev: u64,
    /// The region that holds all of it.
    pub region: kvr_region,
}

/// One piece of device memory: kvr_region_register_segments(), kvr_region_register_device().
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct kvr_segment {
    /// First byte, in the addresses that descriptors and peers use. Congruent to `offset` modulo
    /// the page size. It need not be mapped in this process.
    pub addr: u64,
    /// Bytes; 0 is refused.
    pub len: u64,
    /// Where the first byte lies in the dma-buf, in bytes. 0 where `fd` is -1.
    pub offset: u64,
    /// The dma-buf; -1: none, a peer-memory module of the kernel resolves `addr`.
    pub fd: i32,
    /// Which area of the device (chiplet) it lies in; kept for the caller.
    pub area: u32,
    /// Which slice of the data it holds: equal numbers are replicas; kept for the caller.
    pub slice_id: u32,
    /// 0 or KVR_SEGMENT_COHERENT.
    pub flags: u32,
    /// Out: the region.
    pub region: kvr_region,
}

/// A source of device memory: it turns an address of its runtime into segments. The library copies
/// the struct, which grows at its end only.
///
/// Threads: its functions are called without any lock of the library held, by several threads at a
/// time. They may call the library, but not kvr_engine_destroy(). They must not throw, unwind or
/// longjmp.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct kvr_devmem_ops {
    /// sizeof(kvr_devmem_ops) of the caller.
    pub struct_size: usize,
    /// Stands in errors and logs. Ends in NUL; is copied.
    pub name: *const c_char,
    /// Handed to both functions.
    pub context: *mut c_void,
    /// Gives the segments that `len` bytes at `addr` consist of. In: `*n` is the room of
    /// `segments`; out: how many were written. They must not be empty, wrap or overlap. Returns
    /// KVR_OK; or a negative status, with a reason that ends in NUL in `why`, and then has given
    /// nothing (for KVR_ERR_CAPACITY `*n` is the room that it needs).
    pub get: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            addr: u64,
            len: u64,
            segments: *mut kvr_segment,
            n: *mut usize,
            why: *mut c_char,
            why_len: usize,
        ) -> kvr_status,
    >,
    /// Takes back what one `get` that returned KVR_OK has given, exactly once, when the last of its
    /// regions was deregistered, when they could not be registered, or when the engine is
    /// destroyed. No NIC has them registered any more. Closes their fds. Not called where a NIC did
    /// not end a registration (kvr_region_deregister() says "before this process ends"): peers may
    /// still reach the memory, so nobody may have it again.
    pub put:
        Option<unsafe extern "C" fn(context: *mut c_void, segments: *const kvr_segment, n: usize)>,
}

/// `count` descriptors of `len` bytes: the i-th at `base + i * stride`, all in one region.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct kvr_stride {
    /// First byte of descriptor 0.
    pub base: u64,
    /// Bytes of each descriptor; 0 is refused.
    pub len: u64,
    /// Bytes from one descriptor's start to the next one's.
    pub stride: u64,
    /// How many.
    pub count: u64,
    /// The region that holds them all.
    pub region: kvr_region,
}

/// Parameters of an engine. Fill it with kvr_config_init(), then change fields or call
/// kvr_config_env() and kvr_config_set(). Strings end in NUL. The library grows the struct at its
/// end only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct kvr_config {
    /// sizeof(kvr_config) of the caller; kvr_config_init() sets it. Fields past it keep their
    /// defaults.
    pub struct_size: u32,
    /// KVR_CFG_ bits. Default: KVR_CFG_PROGRESS_THREAD.
    pub flags: u32,
    /// Most peers at a time; each needs 99,132 of `message_bytes`.
    pub max_peers: u32,
    /// Most local regions at a time.
    pub max_regions: u32,
    /// Most remote regions at a time.
    pub max_remote_regions: u32,
    /// Most descriptor tables at a time.
    pub max_tables: u32,
    /// Most prepared transfers at a time.
    pub max_transfers: u32,
    /// Rails (lanes) of the `local` driver, 1 to 16.
    pub rails: u32,
    /// Rails of one transfer: 1 one rail (default), 0 every rail shared with the peer.
    pub stripe_width: u32,
    /// A transfer of up to so many bytes in all is copied inside post.
    pub inline_bytes: u32,
    /// Longest work request, in bytes.
    pub slice_bytes: u32,
    /// Notification blocks, in bytes: so many for outgoing and so many for incoming ones.
    pub message_bytes: u32,
    /// Microseconds that the progress thread spins before it sleeps.
    pub spin_us: u32,
    /// Milliseconds that a dial may take.
    pub connect_timeout_ms: u32,
    /// Milliseconds that kvr_region_deregister() may block.
    pub deregister_timeout_ms: u32,
    /// Milliseconds that kvr_transfer_release() may block.
    pub release_timeout_ms: u32,
    /// Milliseconds without progress after which a transfer ends in KVR_ERR_STALLED.
    pub stall_ms: u32,
    /// First TCP port of the bootstrap listener; 0 and 0: any.
    pub port_min: u16,
    /// Last TCP port of the bootstrap listener.
    pub port_max: u16,
    /// Limit of the pool of tables and ops, in bytes.
    pub max_bytes: u64,
    /// The agent's name, which peers see with every notification.
    pub name: [c_char; KVR_NAME_LEN],
    /// IP address that the bootstrap listener binds; "auto" picks.
    pub listen_ip: [c_char; KVR_LISTEN_LEN],
    /// "auto", "verbs" (RDMA NICs) or "local" (processes of one user on one host).
    pub transport: [c_char; KVR_TRANSPORT_LEN],
    /// NICs to use, comma separated; empty: all. Not used by `local`. See `nics_long`.
    pub nics: [c_char; KVR_NICS_LEN],
    /// Device index of this agent's accelerator. Not used by `local`.
    pub device_id: u32,
    /// NUMA node of this agent; -1: unknown. Not used by `local`.
    pub numa_node: i32,
    /// Context of the device runtime, as a number; 0: none. Not used by `local`.
    pub rbln_ctx_ptr: u64,
    /// Work requests in flight on one RDMA rail.
    pub sq_depth: u32,
    /// Most pieces of local memory that one work request of an RDMA rail gathers or scatters.
    pub sges: u32,
    /// The NIC waits 4.096 us times 2 to the power of this for an acknowledgement.
    pub ack_timeout: u32,
    /// How often the NIC repeats what was not acknowledged, 0 to 6.
    pub retry: u32,
    /// How often the NIC repeats a message for which the peer had no receive, 0 to 6.
    pub rnr_retry: u32,
    /// Traffic class of RDMA packets.
    pub traffic_class: u32,
    /// Service level of RDMA packets.
    pub service_level: u32,
    /// Milliseconds without any completion after which an RDMA rail with work in flight is broken;
    /// four times what the work needs at the rail's measured rate, where that is longer.
    pub rail_timeout_ms: u32,
    /// Milliseconds between the proofs of an idle RDMA rail; 0: none.
    pub keepalive_ms: u32,
    /// Milliseconds that all links must be down, or one up again, until it counts.
    pub link_debounce_ms: u32,
    /// Milliseconds without any rail after which a peer is dead.
    pub peer_timeout_ms: u32,
    /// Room for a later parameter; leave it as kvr_config_init() left it.
    pub reserved: u32,
    /// What the NIXL plugin takes VRAM for about which nothing is said: "auto", "none" (an address
    /// that a peer-memory module resolves) or "cuda" (kvr_devmem_cuda()).
    pub devmem: [c_char; KVR_DEVMEM_LEN],
    /// Not empty: these NICs, in place of `nics`, which has no room for many; up to 1024 bytes.
    /// kvr_config_set() and kvr_config_env() put `nics` where it fits and empty the other.
    pub nics_long: [c_char; KVR_NICS_LONG_LEN],
}

/// State and counters of a transfer. The caller sets `struct_size`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct kvr_transfer_info {
    /// sizeof(kvr_transfer_info) of the caller.
    pub struct_size: u32,
    /// What kvr_transfer_check() would say.
    pub status: kvr_status,
    /// Descriptor pairs.
    pub descriptors: u64,
    /// Work requests that they became after coalescing.
    pub work_requests: u64,
    /// Bytes to move.
    pub bytes: u64,
    /// Bytes known to be in place.
    pub bytes_done: u64,
    /// Work requests known to be done.
    pub work_requests_done: u64,
    /// Index of the first descriptor pair that failed; UINT64_MAX: none.
    pub failed_pair: u64,
    /// Nanoseconds inside the last kvr_transfer_post().
    pub post_ns: u64,
    /// Descriptor pairs that arrived whole. While the transfer is in progress an estimate.
    pub descriptors_done: u64,
    /// Index of the first rail that failed under the last post, see kvr_rail_info_get();
    /// UINT32_MAX: none. A transfer may be done in spite of it: other rails took over.
    pub failed_rail: u32,
    /// What the provider said of it: `enum ibv_wc_status` (transport local: 0); 0 when the rail was
    /// given up for its silence.
    pub provider_status: u32,
    /// The vendor's own code of it (transport local: errno).
    pub vendor_code: u32,
    /// 1: something of the last post was given to a NIC, so its destination may have been written,
    /// also where it did not arrive whole. 0: it is as it was.
    pub may_have_written: u32,
}

/// Counters of one rail since the engine was made. The caller sets `struct_size`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct kvr_rail_info {
    /// sizeof(kvr_rail_info) of the caller.
    pub struct_size: u32,
    /// The rail's index.
    pub index: u32,
    /// The rail's name; a longer one is cut.
    pub name: [c_char; KVR_RAIL_NAME_LEN],
    /// Bytes read from peers.
    pub bytes_read: u64,
    /// Bytes written to peers.
    pub bytes_written: u64,
    /// Work requests done.
    pub work_requests: u64,
    /// Claims taken.
    pub claims: u64,
    /// Work requests that failed.
    pub errors: u64,
}

/// What an engine holds. The caller sets `struct_size`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct kvr_engine_info {
    /// sizeof(kvr_engine_info) of the caller.
    pub struct_size: u32,
    /// Rails.
    pub rails: u32,
    /// Bytes of the fixed memory, taken when the engine was made.
    pub fixed_bytes: u64,
    /// Bytes of the pool in use by tables and ops.
    pub pool_bytes: u64,
    /// The pool's limit, in bytes.
    pub pool_limit: u64,
    /// Peers.
    pub peers: u32,
    /// Local regions.
    pub regions: u32,
    /// Remote regions.
    pub remote_regions: u32,
    /// Descriptor tables.
    pub tables: u32,
    /// Prepared transfers.
    pub transfers: u32,
    /// The transport in use.
    pub transport: [c_char; KVR_TRANSPORT_LEN],
    /// Address and port of the bootstrap listener.
    pub listen: [c_char; KVR_LISTEN_LEN],
    /// 0.
    pub reserved: u32,
}

/// Receives one notification: `name` is the sender's, `msg` its bytes; both are valid for the call
/// only, and neither ends in NUL. Must not throw, unwind or longjmp, must not call kvr_notifs() or
/// kvr_engine_destroy() for this engine.
pub type kvr_notif_cb = Option<
    unsafe extern "C" fn(
        ctx: *mut c_void,
        name: *const c_char,
        name_len: usize,
        msg: *const c_void,
        len: usize,
    ),
>;

/// Receives one log line: `level` is 1 error, 2 warn, 3 info, 4 debug, 5 trace; `text` is valid for
/// the call only and does not end in NUL. Called from any thread, several at a time. Must not
/// throw, unwind or call the library.
pub type kvr_log_cb =
    Option<unsafe extern "C" fn(ctx: *mut c_void, level: c_int, text: *const c_char, len: usize)>;

/// What happened. The library grows the struct at its end only.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct kvr_event {
    /// sizeof(kvr_event) of the library.
    pub struct_size: u32,
    /// KVR_EVENT_...; leave alone what you do not know.
    pub kind: u32,
    /// The peer; 0: it concerns none. After KVR_EVENT_PEER_GONE the handle may be stale.
    pub peer: kvr_peer,
    /// The rail's index, as in kvr_rail_info; KVR_NO_LANE: it concerns none.
    pub lane: u32,
    /// Why; KVR_OK for good news.
    pub status: kvr_status,
    /// Milliseconds: KVR_EVENT_LINKS_DOWN: that they have been down; KVR_EVENT_LINKS_UP: that they
    /// were. Else 0.
    pub since_ms: u64,
    /// The same in words, ends in NUL; valid for the call only.
    pub text: *const c_char,
}

/// Receives one event, on the engine's control thread, which holds no lock that a kvr_ call takes
/// and does nothing else meanwhile: it should be quick. `event` is valid for the call only. It may
/// call the library, but not what waits for that thread: kvr_peer_connect(), kvr_engine_destroy().
/// Must not throw, unwind or longjmp.
pub type kvr_event_cb = Option<unsafe extern "C" fn(ctx: *mut c_void, event: *const kvr_event)>;
