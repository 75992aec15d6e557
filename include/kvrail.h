/* kvrail: moves a KV cache between processes and machines. C ABI for C99, C++11 and later.
 *
 * Generated from ffi/src by `cargo xtask header`. Do not edit.
 *
 * Ownership
 *   Everything passed in is the caller's and is copied before the call returns, but for two
 *   things: registered memory (kvr_region_register) and the block of kvr_engine_init, which must
 *   stay until kvr_region_deregister and kvr_engine_destroy returned KVR_OK. Everything handed out
 *   is a handle: it is released by the call that its maker names, or by kvr_engine_destroy with
 *   everything else. A released handle answers KVR_ERR_STALE, never for another object. Buffers
 *   are the caller's: `*len` goes in as the capacity and comes out as the full length. Texts that
 *   are returned are static. Lists may be NULL when their length is 0. Strings with a length need
 *   no NUL. A NULL out pointer is refused, where its comment does not allow it.
 *
 * Threads
 *   Every function may be called from any thread at any time, with two exceptions:
 *   kvr_engine_destroy must be the only call with its engine, and one kvr_config must not be used
 *   by two calls at once. No function blocks unless its comment says so and for how long.
 *   Callbacks run on the calling thread (kvr_notifs), on the engine's control thread
 *   (kvr_set_event_fn) or on any (kvr_log_set). An engine belongs to the process that made it: in
 *   a forked child its calls return KVR_ERR_FORKED.
 *
 * Errors
 *   Functions return a kvr_status: 0 done, positive not finished, negative an error.
 *   kvr_strerror() says what a code means, kvr_last_error() what went wrong in this thread's last
 *   failed call: the value seen, the value allowed, what to do. After an error an output handle is
 *   0 or NULL. Codes are grouped by the largest thing they kill: -1..-29 the call, -30..-49 the
 *   transfer, -50..-59 a rail, -60..-79 the peer, -80.. the engine. Numbers are never reused.
 *   Every function with a handle may return KVR_ERR_INVALID (not such a handle, or a bad
 *   argument), KVR_ERR_STALE, KVR_ERR_FORKED and KVR_ERR_INTERNAL; the comments name the others.
 *   What a comment lists after "Undefined behaviour unless" the library cannot check in full.
 *
 * Versions
 *   kvr_abi_version() is major << 16 | minor of the library, KVR_ABI_MAJOR and KVR_ABI_MINOR those
 *   of this header. Another major number is another ABI (and another SONAME); within one,
 *   functions, codes and fields at the end of structs are added only. Structs that may grow start
 *   with `struct_size`, which the caller sets to its own sizeof: an older program meets a newer
 *   library with fewer fields, and fields it lacks keep their defaults. A newer program's fields
 *   that an older library does not know must be 0, or the call is refused.
 */

#ifndef KVRAIL_H
#define KVRAIL_H

#include <stddef.h>
#include <stdint.h>

/* Version of this header's ABI. A change that breaks callers changes the major number and the
 * library's SONAME.
 */
#define KVR_ABI_MAJOR 0

/* Counts additions within a major version. */
#define KVR_ABI_MINOR 1

/* Success; for a transfer: every byte is in place. */
#define KVR_OK 0

/* Not finished (or, from kvr_progress(), work was done): ask again. */
#define KVR_IN_PROGRESS 1

/* Only this call failed (-1..-29): a bad argument; the text names it. */
#define KVR_ERR_INVALID (-1)

/* The handle names something that was released. */
#define KVR_ERR_STALE (-2)

/* Unknown peer or key. */
#define KVR_ERR_NOT_FOUND (-3)

/* A table or rail index is out of range. */
#define KVR_ERR_RANGE (-4)

/* List lengths differ, or the lengths of one pair differ. */
#define KVR_ERR_MISMATCH (-5)

/* A descriptor is not inside its region. */
#define KVR_ERR_NOT_REGISTERED (-6)

/* A fixed capacity is full, or a buffer is too small; the text names which. */
#define KVR_ERR_CAPACITY (-7)

/* In use: posted twice, memory that a transfer uses, or a transfer that could not be stopped in
 * time, whose memory must not be reused.
 */
#define KVR_ERR_BUSY (-8)

/* Not offered by this driver. */
#define KVR_ERR_UNSUPPORTED (-9)

/* The pool limit (`max_bytes`, KVRAIL_MAX_BYTES) is reached. */
#define KVR_ERR_NO_MEMORY (-10)

/* A metadata blob ends too early. */
#define KVR_ERR_BLOB_TRUNCATED (-11)

/* A metadata blob that is not kvrail's. */
#define KVR_ERR_BLOB_FOREIGN (-12)

/* A metadata blob of another major version; the text has both. */
#define KVR_ERR_BLOB_VERSION (-13)

/* An unknown parameter or a bad value; the text lists what is known. */
#define KVR_ERR_CONFIG (-14)

/* The engine belongs to the process that made it, and this is a forked child. */
#define KVR_ERR_FORKED (-15)

/* The kernel forbids it; the text names the setting. */
#define KVR_ERR_PERMISSION (-16)

/* The transfer was checked before it was posted. */
#define KVR_ERR_NOT_POSTED (-17)

/* The transfer ended (-30..-49): cancelled. */
#define KVR_ERR_CANCELLED (-30)

/* The peer's memory was not accessible: withdrawn, out of range or unmapped. */
#define KVR_ERR_REMOTE_ACCESS (-31)

/* The local memory was not accessible. */
#define KVR_ERR_LOCAL_ACCESS (-32)

/* No progress for `stall_ms`. */
#define KVR_ERR_STALLED (-33)

/* A rail failed (-50..-59): no usable rail to the peer. */
#define KVR_ERR_NO_RAIL (-50)

/* The peer is gone (-60..-79): it died, left, or was removed. */
#define KVR_ERR_DISCONNECTED (-60)

/* The peer did not answer within the dial limit. */
#define KVR_ERR_UNREACHABLE (-61)

/* The handshake was refused: secret, incarnation or version. */
#define KVR_ERR_REFUSED (-62)

/* The engine (-80..): a caught panic, which is a bug in kvrail. Destroy the engine; the text says
 * where.
 */
#define KVR_ERR_INTERNAL (-80)

/* A system call failed; the text has errno. */
#define KVR_ERR_OS (-81)

/* Direction: from the peer into local memory (pull). */
#define KVR_READ 0

/* Direction: from local memory into the peer (push). */
#define KVR_WRITE 1

/* Memory of the host. */
#define KVR_MEM_HOST 0

/* Memory of a device, at an address that a peer-memory module of the kernel resolves. */
#define KVR_MEM_DEVICE 1

/* Memory of a device behind a dma-buf: kvr_region_register_segments(). */
#define KVR_MEM_DMABUF 2

/* Bit of kvr_segment.flags: whoever reads the memory, the device itself or another, sees what a
 * NIC has completed. Without it a READ into the segment ends with a flush: a READ of a few bytes
 * out of it by the NIC that carried it.
 */
#define KVR_SEGMENT_COHERENT 1

/* Bit of kvr_config.flags: the engine's own thread makes progress. Without it kvr_progress(),
 * kvr_transfer_check() and kvr_notifs() do, on the caller's thread.
 */
#define KVR_CFG_PROGRESS_THREAD 1

/* Bit of kvr_region_deregister(): cancel the transfers that use the region instead of
 * KVR_ERR_BUSY.
 */
#define KVR_DEREGISTER_CANCEL 1

/* kvr_event.kind: every port of this engine's rails is down. */
#define KVR_EVENT_LINKS_DOWN 1

/* One of them is up again. */
#define KVR_EVENT_LINKS_UP 2

/* A rail to a connected peer broke. */
#define KVR_EVENT_RAIL_DOWN 3

/* A rail to a connected peer works. */
#define KVR_EVENT_RAIL_UP 4

/* The connection to a peer ended: it died, left, restarted, or was removed here. Its rails went
 * with it.
 */
#define KVR_EVENT_PEER_GONE 5

/* A peer is connected, whoever dialled. */
#define KVR_EVENT_PEER_UP 6

/* kvr_event.lane of an event that concerns no rail. */
#define KVR_NO_LANE UINT32_MAX

/* Longest message of a notification, in bytes. */
#define KVR_MESSAGE_MAX 65536

/* Bytes of kvr_config.name, the NUL included. */
#define KVR_NAME_LEN 256

/* Bytes of kvr_config.listen_ip and kvr_engine_info.listen, the NUL included. */
#define KVR_LISTEN_LEN 64

/* Bytes of a transport's name, the NUL included. */
#define KVR_TRANSPORT_LEN 16

/* Bytes of kvr_config.devmem, the NUL included. */
#define KVR_DEVMEM_LEN 16

/* Bytes of kvr_config.nics, the NUL included. */
#define KVR_NICS_LEN 128

/* Bytes of kvr_config.nics_long, the NUL included. */
#define KVR_NICS_LONG_LEN 1032

/* Bytes of kvr_rail_info.name, the NUL included. */
#define KVR_RAIL_NAME_LEN 32

/* An engine. Opaque: made by kvr_engine_create() or kvr_engine_init(), ended by
 * kvr_engine_destroy().
 */
typedef struct kvr_engine kvr_engine;

/* 0 success, negative an error, positive not finished. Codes are grouped by the largest thing they
 * kill.
 */
typedef int32_t kvr_status;

/* Parameters of an engine. Fill it with kvr_config_init(), then change fields or call
 * kvr_config_env() and kvr_config_set(). Strings end in NUL. The library grows the struct at its
 * end only.
 */
typedef struct kvr_config {
    /* sizeof(kvr_config) of the caller; kvr_config_init() sets it. Fields past it keep their
     * defaults.
     */
    uint32_t struct_size;
    /* KVR_CFG_ bits. Default: KVR_CFG_PROGRESS_THREAD. */
    uint32_t flags;
    /* Most peers at a time; each needs 99,132 of `message_bytes`. */
    uint32_t max_peers;
    /* Most local regions at a time. */
    uint32_t max_regions;
    /* Most remote regions at a time. */
    uint32_t max_remote_regions;
    /* Most descriptor tables at a time. */
    uint32_t max_tables;
    /* Most prepared transfers at a time. */
    uint32_t max_transfers;
    /* Rails (lanes) of the `local` driver, 1 to 16. */
    uint32_t rails;
    /* Rails of one transfer: 1 one rail (default), 0 every rail shared with the peer. */
    uint32_t stripe_width;
    /* A transfer of up to so many bytes in all is copied inside post. */
    uint32_t inline_bytes;
    /* Longest work request, in bytes. */
    uint32_t slice_bytes;
    /* Notification blocks, in bytes: so many for outgoing and so many for incoming ones. */
    uint32_t message_bytes;
    /* Microseconds that the progress thread spins before it sleeps. */
    uint32_t spin_us;
    /* Milliseconds that a dial may take. */
    uint32_t connect_timeout_ms;
    /* Milliseconds that kvr_region_deregister() may block. */
    uint32_t deregister_timeout_ms;
    /* Milliseconds that kvr_transfer_release() may block. */
    uint32_t release_timeout_ms;
    /* Milliseconds without progress after which a transfer ends in KVR_ERR_STALLED. */
    uint32_t stall_ms;
    /* First TCP port of the bootstrap listener; 0 and 0: any. */
    uint16_t port_min;
    /* Last TCP port of the bootstrap listener. */
    uint16_t port_max;
    /* Limit of the pool of tables and ops, in bytes. */
    uint64_t max_bytes;
    /* The agent's name, which peers see with every notification. */
    char name[KVR_NAME_LEN];
    /* IP address that the bootstrap listener binds; "auto" picks. */
    char listen_ip[KVR_LISTEN_LEN];
    /* "auto", "verbs" (RDMA NICs) or "local" (processes of one user on one host). */
    char transport[KVR_TRANSPORT_LEN];
    /* NICs to use, comma separated; empty: all. Not used by `local`. See `nics_long`. */
    char nics[KVR_NICS_LEN];
    /* Device index of this agent's accelerator. Not used by `local`. */
    uint32_t device_id;
    /* NUMA node of this agent; -1: unknown. Not used by `local`. */
    int32_t numa_node;
    /* Context of the device runtime, as a number; 0: none. Not used by `local`. */
    uint64_t rbln_ctx_ptr;
    /* Work requests in flight on one RDMA rail. */
    uint32_t sq_depth;
    /* Most pieces of local memory that one work request of an RDMA rail gathers or scatters. */
    uint32_t sges;
    /* The NIC waits 4.096 us times 2 to the power of this for an acknowledgement. */
    uint32_t ack_timeout;
    /* How often the NIC repeats what was not acknowledged, 0 to 6. */
    uint32_t retry;
    /* How often the NIC repeats a message for which the peer had no receive, 0 to 6. */
    uint32_t rnr_retry;
    /* Traffic class of RDMA packets. */
    uint32_t traffic_class;
    /* Service level of RDMA packets. */
    uint32_t service_level;
    /* Milliseconds without any completion after which an RDMA rail with work in flight is broken;
     * four times what the work needs at the rail's measured rate, where that is longer.
     */
    uint32_t rail_timeout_ms;
    /* Milliseconds between the proofs of an idle RDMA rail; 0: none. */
    uint32_t keepalive_ms;
    /* Milliseconds that all links must be down, or one up again, until it counts. */
    uint32_t link_debounce_ms;
    /* Milliseconds without any rail after which a peer is dead. */
    uint32_t peer_timeout_ms;
    /* Room for a later parameter; leave it as kvr_config_init() left it. */
    uint32_t reserved;
    /* What the NIXL plugin takes VRAM for about which nothing is said: "auto", "none" (an address
     * that a peer-memory module resolves) or "cuda" (kvr_devmem_cuda()).
     */
    char devmem[KVR_DEVMEM_LEN];
    /* Not empty: these NICs, in place of `nics`, which has no room for many; up to 1024 bytes.
     * kvr_config_set() and kvr_config_env() put `nics` where it fits and empty the other.
     */
    char nics_long[KVR_NICS_LONG_LEN];
} kvr_config;

/* Counters of one rail since the engine was made. The caller sets `struct_size`. */
typedef struct kvr_rail_info {
    /* sizeof(kvr_rail_info) of the caller. */
    uint32_t struct_size;
    /* The rail's index. */
    uint32_t index;
    /* The rail's name; a longer one is cut. */
    char name[KVR_RAIL_NAME_LEN];
    /* Bytes read from peers. */
    uint64_t bytes_read;
    /* Bytes written to peers. */
    uint64_t bytes_written;
    /* Work requests done. */
    uint64_t work_requests;
    /* Claims taken. */
    uint64_t claims;
    /* Work requests that failed. */
    uint64_t errors;
} kvr_rail_info;

/* What an engine holds. The caller sets `struct_size`. */
typedef struct kvr_engine_info {
    /* sizeof(kvr_engine_info) of the caller. */
    uint32_t struct_size;
    /* Rails. */
    uint32_t rails;
    /* Bytes of the fixed memory, taken when the engine was made. */
    uint64_t fixed_bytes;
    /* Bytes of the pool in use by tables and ops. */
    uint64_t pool_bytes;
    /* The pool's limit, in bytes. */
    uint64_t pool_limit;
    /* Peers. */
    uint32_t peers;
    /* Local regions. */
    uint32_t regions;
    /* Remote regions. */
    uint32_t remote_regions;
    /* Descriptor tables. */
    uint32_t tables;
    /* Prepared transfers. */
    uint32_t transfers;
    /* The transport in use. */
    char transport[KVR_TRANSPORT_LEN];
    /* Address and port of the bootstrap listener. */
    char listen[KVR_LISTEN_LEN];
    /* 0. */
    uint32_t reserved;
} kvr_engine_info;

/* Handle of a peer. Never 0. */
typedef uint64_t kvr_peer;

/* Handle of a local region (kvr_region_register()) or a remote one (kvr_region_import()). Never 0.
 * Carries a generation: once released it answers KVR_ERR_STALE, whatever took its place.
 */
typedef uint64_t kvr_region;

/* One piece of registered memory. Laid out as nixlMetaDesc, so a NIXL list is passed as it is. */
typedef struct kvr_desc {
    /* First byte. For a remote region: in the peer's addresses. */
    uint64_t addr;
    /* Bytes; 0 is refused. */
    uint64_t len;
    /* Device index; ignored, the region decides. */
    uint64_t dev;
    /* The region that holds all of it. */
    kvr_region region;
} kvr_desc;

/* One piece of device memory: kvr_region_register_segments(), kvr_region_register_device(). */
typedef struct kvr_segment {
    /* First byte, in the addresses that descriptors and peers use. Congruent to `offset` modulo
     * the page size. It need not be mapped in this process.
     */
    uint64_t addr;
    /* Bytes; 0 is refused. */
    uint64_t len;
    /* Where the first byte lies in the dma-buf, in bytes. 0 where `fd` is -1. */
    uint64_t offset;
    /* The dma-buf; -1: none, a peer-memory module of the kernel resolves `addr`. */
    int32_t fd;
    /* Which area of the device (chiplet) it lies in; kept for the caller. */
    uint32_t area;
    /* Which slice of the data it holds: equal numbers are replicas; kept for the caller. */
    uint32_t slice_id;
    /* 0 or KVR_SEGMENT_COHERENT. */
    uint32_t flags;
    /* Out: the region. */
    kvr_region region;
} kvr_segment;

/* A source of device memory: it turns an address of its runtime into segments. The library copies
 * the struct, which grows at its end only.
 *
 * Threads: its functions are called without any lock of the library held, by several threads at a
 * time. They may call the library, but not kvr_engine_destroy(). They must not throw, unwind or
 * longjmp.
 */
typedef struct kvr_devmem_ops {
    /* sizeof(kvr_devmem_ops) of the caller. */
    size_t struct_size;
    /* Stands in errors and logs. Ends in NUL; is copied. */
    const char *name;
    /* Handed to both functions. */
    void *context;
    /* Gives the segments that `len` bytes at `addr` consist of. In: `*n` is the room of
     * `segments`; out: how many were written. They must not be empty, wrap or overlap. Returns
     * KVR_OK; or a negative status, with a reason that ends in NUL in `why`, and then has given
     * nothing (for KVR_ERR_CAPACITY `*n` is the room that it needs).
     */
    kvr_status (*get)(void *context,
                      uint64_t addr,
                      uint64_t len,
                      struct kvr_segment *segments,
                      size_t *n,
                      char *why,
                      size_t why_len);
    /* Takes back what one `get` that returned KVR_OK has given, exactly once, when the last of its
     * regions was deregistered, when they could not be registered, or when the engine is
     * destroyed. No NIC has them registered any more. Closes their fds. Not called where a NIC did
     * not end a registration (kvr_region_deregister() says "before this process ends"): peers may
     * still reach the memory, so nobody may have it again.
     */
    void (*put)(void *context, const struct kvr_segment *segments, size_t n);
} kvr_devmem_ops;

/* Handle of a descriptor table. Never 0. */
typedef uint64_t kvr_table;

/* `count` descriptors of `len` bytes: the i-th at `base + i * stride`, all in one region. */
typedef struct kvr_stride {
    /* First byte of descriptor 0. */
    uint64_t base;
    /* Bytes of each descriptor; 0 is refused. */
    uint64_t len;
    /* Bytes from one descriptor's start to the next one's. */
    uint64_t stride;
    /* How many. */
    uint64_t count;
    /* The region that holds them all. */
    kvr_region region;
} kvr_stride;

/* Handle of a prepared transfer. Never 0. */
typedef uint64_t kvr_transfer;

/* State and counters of a transfer. The caller sets `struct_size`. */
typedef struct kvr_transfer_info {
    /* sizeof(kvr_transfer_info) of the caller. */
    uint32_t struct_size;
    /* What kvr_transfer_check() would say. */
    kvr_status status;
    /* Descriptor pairs. */
    uint64_t descriptors;
    /* Work requests that they became after coalescing. */
    uint64_t work_requests;
    /* Bytes to move. */
    uint64_t bytes;
    /* Bytes known to be in place. */
    uint64_t bytes_done;
    /* Work requests known to be done. */
    uint64_t work_requests_done;
    /* Index of the first descriptor pair that failed; UINT64_MAX: none. */
    uint64_t failed_pair;
    /* Nanoseconds inside the last kvr_transfer_post(). */
    uint64_t post_ns;
    /* Descriptor pairs that arrived whole. While the transfer is in progress an estimate. */
    uint64_t descriptors_done;
    /* Index of the first rail that failed under the last post, see kvr_rail_info_get();
     * UINT32_MAX: none. A transfer may be done in spite of it: other rails took over.
     */
    uint32_t failed_rail;
    /* What the provider said of it: `enum ibv_wc_status` (transport local: 0); 0 when the rail was
     * given up for its silence.
     */
    uint32_t provider_status;
    /* The vendor's own code of it (transport local: errno). */
    uint32_t vendor_code;
    /* 1: something of the last post was given to a NIC, so its destination may have been written,
     * also where it did not arrive whole. 0: it is as it was.
     */
    uint32_t may_have_written;
} kvr_transfer_info;

/* Receives one notification: `name` is the sender's, `msg` its bytes; both are valid for the call
 * only, and neither ends in NUL. Must not throw, unwind or longjmp, must not call kvr_notifs() or
 * kvr_engine_destroy() for this engine.
 */
typedef void (*kvr_notif_cb)(void *ctx, const char *name, size_t name_len, const void *msg,
    size_t len);

/* What happened. The library grows the struct at its end only. */
typedef struct kvr_event {
    /* sizeof(kvr_event) of the library. */
    uint32_t struct_size;
    /* KVR_EVENT_...; leave alone what you do not know. */
    uint32_t kind;
    /* The peer; 0: it concerns none. After KVR_EVENT_PEER_GONE the handle may be stale. */
    kvr_peer peer;
    /* The rail's index, as in kvr_rail_info; KVR_NO_LANE: it concerns none. */
    uint32_t lane;
    /* Why; KVR_OK for good news. */
    kvr_status status;
    /* Milliseconds: KVR_EVENT_LINKS_DOWN: that they have been down; KVR_EVENT_LINKS_UP: that they
     * were. Else 0.
     */
    uint64_t since_ms;
    /* The same in words, ends in NUL; valid for the call only. */
    const char *text;
} kvr_event;

/* Receives one event, on the engine's control thread, which holds no lock that a kvr_ call takes
 * and does nothing else meanwhile: it should be quick. `event` is valid for the call only. It may
 * call the library, but not what waits for that thread: kvr_peer_connect(), kvr_engine_destroy().
 * Must not throw, unwind or longjmp.
 */
typedef void (*kvr_event_cb)(void *ctx, const struct kvr_event *event);

/* Receives one log line: `level` is 1 error, 2 warn, 3 info, 4 debug, 5 trace; `text` is valid for
 * the call only and does not end in NUL. Called from any thread, several at a time. Must not
 * throw, unwind or call the library.
 */
typedef void (*kvr_log_cb)(void *ctx, int level, const char *text, size_t len);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/* KVR_ABI_MAJOR << 16 | KVR_ABI_MINOR of the library. A program built with another major number
 * must not go on.
 */
uint32_t kvr_abi_version(void);

/* The library's version, as "0.1.0". Static text: never freed. */
const char *kvr_version(void);

/* One short line that says what a status means. Static text: never freed, never NULL, for any
 * number.
 */
const char *kvr_strerror(kvr_status status);

/* Writes the text of the calling thread's last failed call into `buf`: at most `len` bytes, always
 * with a NUL. Returns the full length without the NUL, 0 if nothing failed yet.
 *
 * Every negative status sets the text, on its own thread only; it stays until that thread's next
 * failure. Calls that succeed leave it alone, so ask only after a failure.
 * Undefined behaviour unless: `buf` is NULL or writable for `len` bytes.
 */
size_t kvr_last_error(char *buf, size_t len);

/* Fills `cfg` with the defaults and sets its `struct_size`, which is sizeof(kvr_config) of the
 * caller.
 *
 * Threads: `cfg` is the caller's; not two calls on one struct at a time.
 * Errors: KVR_ERR_INVALID for NULL or a struct_size below 4 or above 4096.
 * Undefined behaviour unless: `cfg` is writable for `struct_size` bytes.
 */
kvr_status kvr_config_init(struct kvr_config *cfg, size_t struct_size);

/* Applies every KVRAIL_<PARAMETER> of the environment to `cfg`; after an error `cfg` is as it was.
 * An empty value counts as not set. A KVRAIL_ variable that nobody knows is a warning in the log.
 *
 * Threads: reads the environment, so no thread may call setenv() meanwhile.
 * Errors: KVR_ERR_CONFIG for a bad value; KVR_ERR_INVALID for a bad `cfg`.
 * Undefined behaviour unless: `cfg` was filled by kvr_config_init().
 */
kvr_status kvr_config_env(struct kvr_config *cfg);

/* Sets one parameter from text, as kvr_config_keys() names it; after an error `cfg` is as it was.
 *
 * Errors: KVR_ERR_CONFIG for an unknown parameter (the text lists the known ones) or a bad value
 * (the text has the value seen and the values allowed); KVR_ERR_INVALID for NULL or text that is
 * not UTF-8.
 * Undefined behaviour unless: `cfg` was filled by kvr_config_init(); `key` and `value` end in NUL.
 */
kvr_status kvr_config_set(struct kvr_config *cfg, const char *key, const char *value);

/* Writes one "key=default\n" line a parameter into `buf`: at most `len` bytes, always with a NUL.
 * Returns the full length without the NUL, so that a first call with NULL and 0 says how much is
 * needed.
 * Undefined behaviour unless: `buf` is NULL or writable for `len` bytes.
 */
size_t kvr_config_keys(char *buf, size_t len);

/* Bytes that kvr_engine_init() needs for `cfg` (NULL: the defaults). 0 on a bad configuration,
 * with the last error.
 * Undefined behaviour unless: `cfg` is NULL or was filled by kvr_config_init().
 */
size_t kvr_engine_size(const struct kvr_config *cfg);

/* Makes an engine in memory of its own, with its threads, and stores it in `*out` (NULL after an
 * error). `cfg` NULL: the defaults. `cfg` is copied. Tables and prepared transfers come from the
 * heap, up to `max_bytes`.
 *
 * Ownership: the caller's, until kvr_engine_destroy().
 * Errors: KVR_ERR_CONFIG, KVR_ERR_INVALID, KVR_ERR_UNSUPPORTED (a transport that this build
 * lacks), KVR_ERR_CAPACITY (1024 engines of this process), KVR_ERR_OS, KVR_ERR_PERMISSION.
 * Undefined behaviour unless: `cfg` is NULL or was filled by kvr_config_init(); `out` is writable.
 */
kvr_status kvr_engine_create(const struct kvr_config *cfg, struct kvr_engine **out);

/* Makes an engine in the caller's block: `mem`, `len` bytes, of any alignment, at least
 * kvr_engine_size(cfg). Tables and prepared transfers come from the block too: they have 1 MiB and
 * what the block is longer than that, at most `max_bytes`, and it never grows. Threads, sockets,
 * names, table handles, handshakes and error texts come from the heap.
 *
 * Ownership: the block is the engine's until kvr_engine_destroy() returned KVR_OK, and must not be
 * read, written, moved or freed until then.
 * Errors: KVR_ERR_CAPACITY when `len` is too small (the text has both sizes); else as
 * kvr_engine_create().
 * Undefined behaviour unless: `mem` is writable for `len` bytes; `cfg` is NULL or was filled by
 * kvr_config_init(); `out` is writable.
 */
kvr_status kvr_engine_init(void *mem, size_t len, const struct kvr_config *cfg,
    struct kvr_engine **out);

/* Ends an engine: stops its threads, ends its transfers and lets go of its memory. Blocks
 * until the kernel has destroyed its queue pairs, which no timeout bounds (Soft-RoCE took up to
 * 3 s). Handles of the engine are void afterwards.
 *
 * Threads: no other call with this engine may be running or start. Not from a callback of this
 * engine.
 * Errors: KVR_ERR_INVALID for NULL and for an engine that was destroyed already; KVR_ERR_FORKED in
 * a forked child, where the engine belongs to the parent and nothing happens.
 * Undefined behaviour unless: `e` comes from kvr_engine_create() or kvr_engine_init(), and no other
 * call uses it.
 */
kvr_status kvr_engine_destroy(struct kvr_engine *e);

/* Copies the blob that a peer passes to kvr_peer_add(). In: `*len` is the capacity of `buf` in
 * bytes; out: the blob's full length. The blob holds the secret that lets a peer in: hand it to
 * peers only.
 *
 * Errors: KVR_ERR_CAPACITY when `buf` is too small (NULL and 0 ask for the length), with nothing
 * copied.
 * Undefined behaviour unless: `e` lives; `len` is readable and writable; `buf` is writable for
 * `*len` bytes.
 */
kvr_status kvr_engine_metadata(struct kvr_engine *e, void *buf, size_t *len);

/* Polls every rail and the messages once, on this thread. Does not block. KVR_IN_PROGRESS: work
 * was done, more may follow; KVR_OK: nothing to do. Not needed when the engine has a progress
 * thread.
 * Undefined behaviour unless: `e` lives.
 */
kvr_status kvr_progress(struct kvr_engine *e);

/* Fills `*info` with the counters of rail number `rail`, from 0. Set `info->struct_size` before.
 *
 * Errors: KVR_ERR_RANGE past the last rail.
 * Undefined behaviour unless: `e` lives; `info` is readable and writable for its `struct_size`
 * bytes.
 */
kvr_status kvr_rail_info_get(struct kvr_engine *e, uint32_t rail, struct kvr_rail_info *info);

/* Fills `*info` with what the engine holds now. Set `info->struct_size` before.
 * Undefined behaviour unless: `e` lives; `info` is readable and writable for its `struct_size`
 * bytes.
 */
kvr_status kvr_engine_info_get(struct kvr_engine *e, struct kvr_engine_info *info);

/* Adds the peer whose kvr_engine_metadata() is `blob` and starts a dial in the background. The
 * same blob again gives the same peer. `expected_name` (not NUL terminated) must be the blob's
 * name; NULL: any. Both are copied.
 *
 * Does not block: see kvr_peer_state() and kvr_peer_connect().
 * Errors: KVR_ERR_BLOB_TRUNCATED, KVR_ERR_BLOB_FOREIGN, KVR_ERR_BLOB_VERSION; KVR_ERR_MISMATCH for
 * another name; KVR_ERR_CAPACITY at `max_peers`.
 * Undefined behaviour unless: `e` lives; `blob` and `expected_name` are readable for `len` and
 * `name_len` bytes; `out` is writable.
 */
kvr_status kvr_peer_add(struct kvr_engine *e, const void *blob, size_t len,
    const char *expected_name, size_t name_len, kvr_peer *out);

/* The engine as its own peer, for loopback. Always connected.
 * Undefined behaviour unless: `e` lives; `out` is writable.
 */
kvr_status kvr_peer_self(struct kvr_engine *e, kvr_peer *out);

/* The peer of that name (not NUL terminated): added by kvr_peer_add(), or one that dialled this
 * engine.
 *
 * Errors: KVR_ERR_NOT_FOUND.
 * Undefined behaviour unless: `e` lives; `name` is readable for `name_len` bytes; `out` is
 * writable.
 */
kvr_status kvr_peer_find(struct kvr_engine *e, const char *name, size_t name_len, kvr_peer *out);

/* Waits until the peer is connected. Blocks for at most `timeout_ms` milliseconds.
 *
 * Errors: KVR_ERR_UNREACHABLE when the time is over, KVR_ERR_REFUSED, KVR_ERR_DISCONNECTED,
 * KVR_ERR_NO_RAIL, KVR_ERR_PERMISSION; KVR_ERR_INVALID and KVR_ERR_STALE for the handle.
 * Undefined behaviour unless: `e` lives.
 */
kvr_status kvr_peer_connect(struct kvr_engine *e, kvr_peer p, uint32_t timeout_ms);

/* KVR_OK connected, KVR_IN_PROGRESS dialling or without a rail for now (transfers wait), else the
 * reason why not, as kvr_peer_connect().
 * Undefined behaviour unless: `e` lives.
 */
kvr_status kvr_peer_state(struct kvr_engine *e, kvr_peer p);

/* Forgets a peer: its transfers end in KVR_ERR_DISCONNECTED and its remote regions become
 * stale. Once this returns KVR_OK nothing of this engine touches that peer's memory. Blocks
 * for at most one batch. With transport local it does not wait for what the peer does in
 * memory of this engine: deregister that.
 * Undefined behaviour unless: `e` lives.
 */
kvr_status kvr_peer_remove(struct kvr_engine *e, kvr_peer p);

/* Registers `len` bytes at `addr` with every rail. `mem` is KVR_MEM_HOST or KVR_MEM_DEVICE. For a
 * dma-buf, and for a device's memory that needs no flush: kvr_region_register_segments().
 *
 * Ownership: the memory stays the caller's and must stay mapped until kvr_region_deregister()
 * returned KVR_OK.
 * Errors: KVR_ERR_INVALID for an empty or wrapping range; KVR_ERR_UNSUPPORTED for the kind of
 * memory (a device's without RDMA rails); KVR_ERR_CAPACITY at `max_regions`; KVR_ERR_OS when a NIC
 * refused it (the text says which and why), KVR_ERR_NO_RAIL when every NIC has failed. After an
 * error nothing stays registered.
 * Undefined behaviour unless: `e` lives; `out` is writable; the range is the caller's memory, and
 * peers may read and write it.
 */
kvr_status kvr_region_register(struct kvr_engine *e, uint64_t addr, uint64_t len, uint32_t mem,
    kvr_region *out);

/* Registers `n` ranges with every rail, all or none: `addr` and `len` of each are read, and its
 * `region` is written. Ranges of host memory that touch or overlap become one region, with one key
 * a rail: they get the same handle, which is deregistered once. No byte that is in none of them is
 * registered.
 * One call is quicker than many: the rails register at the same time.
 *
 * Ownership and errors: as kvr_region_register(). After an error every `region` is 0.
 * Undefined behaviour unless: `e` lives; `descs` is writable for `n` items; each range is the
 * caller's memory, and peers may read and write it.
 */
kvr_status kvr_region_register_list(struct kvr_engine *e, struct kvr_desc *descs, size_t n,
    uint32_t mem);

/* Withdraws a local region and waits until nobody is inside. KVR_OK: no rail and no peer touches
 * the memory any more. Blocks for at most `deregister_timeout_ms`.
 *
 * `flags`: 0, or KVR_DEREGISTER_CANCEL to cancel the transfers of this engine that use it.
 * Errors: KVR_ERR_BUSY, and the memory must not be reused. Without KVR_DEREGISTER_CANCEL: a
 * transfer of this engine uses it (the text names it), and the region stays as it was. Or somebody
 * was still inside when the time was over (the text says who): the region is withdrawn, and its
 * handle is KVR_ERR_STALE to every call but this one, which waits again. Where the text says
 * "before this process ends", a NIC did not end the registration, and this is final.
 * Undefined behaviour unless: `e` lives.
 */
kvr_status kvr_region_deregister(struct kvr_engine *e, kvr_region r, uint32_t flags);

/* Copies the blob that a peer passes to kvr_region_import(). In: `*len` is the capacity of `buf`
 * in bytes; out: the blob's full length.
 *
 * Errors: KVR_ERR_CAPACITY when `buf` is too small (NULL and 0 ask for the length), with nothing
 * copied.
 * Undefined behaviour unless: `e` lives; `len` is readable and writable; `buf` is writable for
 * `*len` bytes.
 */
kvr_status kvr_region_metadata(struct kvr_engine *e, kvr_region r, void *buf, size_t *len);

/* Makes a remote region from a blob of kvr_region_metadata() of peer `p`. The blob is copied.
 *
 * Errors: KVR_ERR_BLOB_TRUNCATED, KVR_ERR_BLOB_FOREIGN, KVR_ERR_BLOB_VERSION; KVR_ERR_STALE for
 * another peer's blob; KVR_ERR_UNSUPPORTED for device memory where this engine has no RDMA rails;
 * KVR_ERR_CAPACITY at `max_remote_regions`.
 * Undefined behaviour unless: `e` lives; `blob` is readable for `len` bytes; `out` is writable.
 */
kvr_status kvr_region_import(struct kvr_engine *e, kvr_peer p, const void *blob, size_t len,
    kvr_region *out);

/* A remote view of an own region, for transfers with kvr_peer_self(). They move host memory only:
 * with device memory on either side they are KVR_ERR_UNSUPPORTED.
 * Undefined behaviour unless: `e` lives; `out` is writable.
 */
kvr_status kvr_region_import_self(struct kvr_engine *e, kvr_region local, kvr_region *out);

/* Forgets a remote region: transfers that use it are cancelled. Waits for what is in flight, one
 * batch of each rail as a rule, for at most `release_timeout_ms`.
 *
 * Errors: KVR_ERR_BUSY when something was in flight for longer; the handle is KVR_ERR_STALE to
 * every call but this one, which waits again.
 * Undefined behaviour unless: `e` lives.
 */
kvr_status kvr_region_forget(struct kvr_engine *e, kvr_region remote);

/* Registers `n` pieces of device memory with every rail, all or none: `addr`, `len`, `offset` and
 * `fd` of each are read, and its `region` is written. Each becomes a region of its own, which is
 * deregistered by kvr_region_deregister().
 *
 * A READ into a segment is done when the NIC that carried it has read a few bytes back out of it,
 * over a queue pair that leads to itself: what it wrote has arrived then. KVR_SEGMENT_COHERENT in
 * `flags` says that this is not needed. The first segment without it makes one such queue pair for
 * each rail that is up.
 *
 * Ownership: the fds stay the caller's, who closes them; that may be as soon as this returned, as
 * the kernel holds the buffer of a registered dma-buf. The library keeps and closes none. What
 * lies behind a segment without fd must stay until kvr_region_deregister() returned KVR_OK.
 * Errors: KVR_ERR_INVALID for an empty or wrapping range, unknown `flags`, an `addr` and
 * `offset` that differ modulo the page size, an fd that is not open or no dma-buf, and a range
 * past the dma-buf's end; KVR_ERR_UNSUPPORTED without RDMA rails, and where a NIC or the kernel
 * refuses dma-bufs (the text says what to do instead); KVR_ERR_CAPACITY at `max_regions`;
 * KVR_ERR_NO_RAIL when a NIC gave no queue pair for flushes;
 * KVR_ERR_OS when a NIC refused for another reason. After an error nothing stays registered and
 * every `region` is 0.
 * Undefined behaviour unless: `e` lives; `segments` is readable and writable for `n` items; peers
 * may read and write what lies behind them.
 */
kvr_status kvr_region_register_segments(struct kvr_engine *e, struct kvr_segment *segments,
    size_t n);

/* Asks a provider for the segments of `len` bytes at `addr`, in the addresses of its runtime, and
 * registers them all or none. In: `*n` is the room of `segments`; out: how many there are. Each is
 * a region, as after kvr_region_register_segments().
 *
 * Ownership: what `ops->get` gave goes back through `ops->put` exactly once: when the last of the
 * regions was deregistered, before this returns if it fails, or in kvr_engine_destroy(). `ops` is
 * copied; what its `context` points to must live until then.
 * Errors: as kvr_region_register_segments(); what `ops->get` returned, with its reason;
 * KVR_ERR_INVALID when the provider gave no segment, more than there is room for, or segments that
 * overlap (the text has the provider's name). After an error `*n` is 0, but for KVR_ERR_CAPACITY
 * of `ops->get`: then it is the room that is needed.
 * Undefined behaviour unless: `e` lives; `ops` is readable for its `struct_size` bytes and its
 * functions keep their contract; `n` is readable and writable, and `segments` writable for `*n`
 * items.
 */
kvr_status kvr_region_register_device(struct kvr_engine *e, const struct kvr_devmem_ops *ops,
    uint64_t addr, uint64_t len, struct kvr_segment *segments, size_t *n);

/* The provider for memory of NVIDIA GPUs: kvr_region_register_device() with it registers what
 * cudaMalloc(), cuMemAlloc() or cuMemMap() gave. One segment: a dma-buf of the pages around the
 * range. The driver (libcuda.so.1) is loaded by the first call; nothing links it.
 *
 * What is registered must not be freed or unmapped before kvr_region_deregister() returned KVR_OK.
 * Kernels and copies that write it must have ended before a transfer reads it, as with any NIC.
 * Once it is exported, copies within what cudaMalloc() gave become synchronous
 * (CU_POINTER_ATTRIBUTE_SYNC_MEMOPS), as the manual of GPUDirect RDMA asks, and stay so: nobody
 * can tell who else asked for that. The driver knows no such switch for cuMemMap().
 *
 * Ownership: `*out` is static. NULL after an error.
 * Threads: any; no CUDA context need be current.
 * Errors: KVR_ERR_UNSUPPORTED without a driver, with one that is older than CUDA 11.7, or without
 * a GPU. Its `get` says KVR_ERR_NOT_FOUND for an address that CUDA does not know, KVR_ERR_INVALID
 * for host and managed memory and for a range that is not inside one allocation,
 * KVR_ERR_UNSUPPORTED where the memory, the device or the kernel module cannot be read by NICs,
 * KVR_ERR_OS for any other refusal of the driver.
 * Undefined behaviour unless: `out` is writable.
 */
kvr_status kvr_devmem_cuda(const struct kvr_devmem_ops **out);

/* Makes a table of `n` descriptors, addressed by their place in the list, all of one side: local
 * regions, or remote regions of one peer. The list is copied.
 *
 * Regions and ranges are looked at when a transfer is prepared, not here.
 * Errors: KVR_ERR_CAPACITY at `max_tables`; KVR_ERR_NO_MEMORY at `max_bytes`.
 * Undefined behaviour unless: `e` lives; `descs` is readable for `n` items; `out` is writable.
 */
kvr_status kvr_table_create(struct kvr_engine *e, const struct kvr_desc *descs, size_t n,
    kvr_table *out);

/* The same from `n` strided runs, which are kept as they are and never expanded. Indexes count
 * through the runs.
 *
 * Errors: as kvr_table_create().
 * Undefined behaviour unless: `e` lives; `parts` is readable for `n` items; `out` is writable.
 */
kvr_status kvr_table_create_strided(struct kvr_engine *e, const struct kvr_stride *parts, size_t n,
    kvr_table *out);

/* Destroys a table. Prepared transfers keep what they need of it.
 * Undefined behaviour unless: `e` lives.
 */
kvr_status kvr_table_destroy(struct kvr_engine *e, kvr_table t);

/* Prepares a transfer of pairs: the i-th of `local_idx` in table `local` with the i-th of
 * `remote_idx` in table `remote`. KVR_READ moves remote to local, KVR_WRITE local to remote. No
 * pairs: only the message is sent. The lists are copied. Contiguous pairs become one work request.
 *
 * Ownership: the handle is the caller's, until kvr_transfer_release().
 * Errors: KVR_ERR_MISMATCH when the list lengths or the lengths of a pair differ; KVR_ERR_RANGE
 * for an index; KVR_ERR_NOT_REGISTERED for a descriptor outside its region (the texts name the
 * place in the list); KVR_ERR_INVALID and KVR_ERR_STALE for a handle or a descriptor's region;
 * KVR_ERR_CAPACITY at `max_transfers`; KVR_ERR_NO_MEMORY at `max_bytes`.
 * Undefined behaviour unless: `e` lives; `local_idx` and `remote_idx` are readable for `local_n`
 * and `remote_n` items; `out` is writable.
 */
kvr_status kvr_transfer_prepare(struct kvr_engine *e, uint32_t direction, kvr_peer p,
    kvr_table local, const uint32_t *local_idx, size_t local_n, kvr_table remote,
    const uint32_t *remote_idx, size_t remote_n, kvr_transfer *out);

/* The same from two lists of descriptors, without tables. The lists are copied.
 *
 * Errors: as kvr_transfer_prepare().
 * Undefined behaviour unless: `e` lives; `local` and `remote` are readable for `local_n` and
 * `remote_n` items; `out` is writable.
 */
kvr_status kvr_transfer_prepare_descs(struct kvr_engine *e, uint32_t direction, kvr_peer p,
    const struct kvr_desc *local, size_t local_n, const struct kvr_desc *remote, size_t remote_n,
    kvr_transfer *out);

/* Starts a transfer. Never blocks, allocates nothing. KVR_OK: it is done already; KVR_IN_PROGRESS:
 * ask kvr_transfer_check(). A finished or failed one may be posted again.
 *
 * `notif` (up to KVR_MESSAGE_MAX bytes, copied) reaches the peer after all the data is in place;
 * NULL: none; not NULL with length 0: an empty message. An error sends
 * none, but it may have arrived, once, when KVR_ERR_DISCONNECTED, KVR_ERR_STALLED or
 * KVR_ERR_CANCELLED came while it was on its way.
 * Errors: KVR_ERR_BUSY while it is in flight; KVR_ERR_STALE when it, or a region or the peer that
 * it uses, was released (the text says which); KVR_ERR_CAPACITY when message blocks are out; the
 * peer's and the rails' errors.
 * Undefined behaviour unless: `e` lives; `notif` is readable for `notif_len` bytes.
 */
kvr_status kvr_transfer_post(struct kvr_engine *e, kvr_transfer t, const void *notif,
    size_t notif_len);

/* How a transfer stands: KVR_OK done, KVR_IN_PROGRESS, or the error it ended in, again and again.
 * One atomic load; polls the rails too when there is no progress thread. Does not block.
 *
 * Errors: KVR_ERR_NOT_POSTED before the first post; KVR_ERR_STALE once released; else why the
 * transfer ended, and then nothing of it touches local memory any more: KVR_ERR_REMOTE_ACCESS,
 * KVR_ERR_LOCAL_ACCESS, KVR_ERR_CANCELLED, KVR_ERR_STALLED, KVR_ERR_DISCONNECTED, KVR_ERR_NO_RAIL.
 * Undefined behaviour unless: `e` lives.
 */
kvr_status kvr_transfer_check(struct kvr_engine *e, kvr_transfer t);

/* Asks a transfer to stop. Does not block: it ends in KVR_ERR_CANCELLED once nothing is in flight
 * any more, or in KVR_OK when it was faster.
 * Undefined behaviour unless: `e` lives.
 */
kvr_status kvr_transfer_cancel(struct kvr_engine *e, kvr_transfer t);

/* Gives a transfer back, cancelling it if it is in flight. KVR_OK: no NIC touches local memory of
 * it any more, and the handle is stale. What has not drained after 100 ms is stopped by closing
 * the rails that carry it; others on them go on elsewhere. A message that only has to go out still
 * goes out. Blocks for at most `release_timeout_ms`, and never for a peer.
 *
 * Errors: KVR_ERR_BUSY when it could not be stopped in time (a NIC that does not let go, or a
 * copy of transport local that hangs): the handle stays valid, and so must the memory. Release
 * it again; but where the text says "before this process ends", a NIC kept a queue pair and
 * this is final.
 * Undefined behaviour unless: `e` lives.
 */
kvr_status kvr_transfer_release(struct kvr_engine *e, kvr_transfer t);

/* Fills `*info` with a transfer's state and counters. Set `info->struct_size` before.
 * Undefined behaviour unless: `e` lives; `info` is readable and writable for its `struct_size`
 * bytes.
 */
kvr_status kvr_transfer_info_get(struct kvr_engine *e, kvr_transfer t,
    struct kvr_transfer_info *info);

/* Says which descriptor pairs of a transfer at rest arrived whole in its last post: bit `i % 64`
 * of `bits[i / 64]` is pair `i`; bits behind the last pair are 0. Of a transfer that is done all
 * are set, of one that was never posted none. For what to ask for again after an error; costs a
 * pass over the transfer's work requests.
 *
 * Errors: KVR_ERR_BUSY while it is in progress; KVR_ERR_INVALID when `words` are too few for all
 * pairs.
 * Undefined behaviour unless: `e` lives; `bits` is writable for `words` words.
 */
kvr_status kvr_transfer_arrived(struct kvr_engine *e, kvr_transfer t, uint64_t *bits, size_t words);

/* Sends a message of 0 to KVR_MESSAGE_MAX bytes to a peer. Copied; KVR_OK: queued. Does not block.
 *
 * Errors: KVR_ERR_INVALID for a longer one; KVR_ERR_CAPACITY when message blocks are out; the
 * peer's errors. After KVR_EVENT_PEER_GONE it answers that error and dials again: repeat it after
 * KVR_EVENT_PEER_UP.
 * Undefined behaviour unless: `e` lives; `msg` is readable for `len` bytes.
 */
kvr_status kvr_notify(struct kvr_engine *e, kvr_peer p, const void *msg, size_t len);

/* Takes every pending notification: calls `cb` once for each, on this thread, and stores how many
 * in `*count` (NULL: not wanted). Polls first when there is no progress thread. Does not block.
 * Undefined behaviour unless: `e` lives; `cb` may be called with `ctx` and keeps the rules of
 * kvr_notif_cb; `count` is NULL or writable.
 */
kvr_status kvr_notifs(struct kvr_engine *e, kvr_notif_cb cb, void *ctx, size_t *count);

/* Stores in `*ms` for how many milliseconds every port of this engine's RDMA rails has been down;
 * 0: one is up. Of the rails' own ports, not of every NIC of the host; a port that lost its
 * address counts as down. Less than `link_debounce_ms` does not count: a short down is none, and a
 * short up does not end a down. With transport local there are no ports, so they are never down.
 * Any thread; does not block.
 * Undefined behaviour unless: `e` lives; `ms` is writable.
 */
kvr_status kvr_links_down(struct kvr_engine *e, uint64_t *ms);

/* Sends the engine's events to `cb` from now on; NULL: nowhere. What happened before is not told:
 * ask kvr_links_down() and kvr_peer_state(). None is told once kvr_engine_destroy() returned.
 *
 * Ownership: `ctx` is handed to `cb` as it is. The control thread may still be inside the old
 * callback when this returns, so keep the old `ctx` until the engine is destroyed.
 * Undefined behaviour unless: `e` lives; `cb` is NULL or a function that the engine's control
 * thread may call with `ctx`, and that keeps the rules of kvr_event_cb.
 */
kvr_status kvr_set_event_fn(struct kvr_engine *e, kvr_event_cb cb, void *ctx);

/* Sends the library's log lines to `cb`, for the whole process. NULL: back to standard error. The
 * level comes from KVRAIL_LOG (error, warn, info, debug, trace; default warn).
 *
 * Ownership: `ctx` is handed to `cb` as it is. A thread that is inside the old callback may still
 * be there when this returns, so keep the old `ctx` until the engines are destroyed.
 * Undefined behaviour unless: `cb` is NULL or a function that any thread may call with `ctx`,
 * several at a time.
 */
kvr_status kvr_log_set(kvr_log_cb cb, void *ctx);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVRAIL_H */
