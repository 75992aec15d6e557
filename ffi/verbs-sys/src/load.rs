//! The exported functions, found at run time by name and version.

use core::ffi::{c_char, c_int, c_uint, c_void, CStr};
use core::fmt;

use crate::types::*;

/// What is loaded when no other library is named.
pub const DEFAULT_LIBRARY: &CStr = c"libibverbs.so.1";

/// Why there is no libibverbs to call. `Display` says it in full, and what to do.
#[derive(Clone, Copy)]
pub struct LoadError {
    library: Text<128>,
    cause: Cause,
}

#[derive(Clone, Copy)]
#[allow(clippy::large_enum_variant, reason = "it cannot allocate")]
enum Cause {
    /// `dlopen` failed, and said this.
    Open(Text<256>),
    /// A library, but without this function.
    Missing { symbol: &'static CStr, version: &'static CStr },
}

impl LoadError {
    /// The name that was asked for.
    #[must_use]
    pub fn library(&self) -> &str {
        self.library.as_str()
    }

    /// The function that the library lacks; `None` when it could not be loaded at all.
    #[must_use]
    pub fn missing(&self) -> Option<&'static CStr> {
        match self.cause {
            Cause::Open(_) => None,
            Cause::Missing { symbol, .. } => Some(symbol),
        }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let library = self.library.as_str();
        match &self.cause {
            Cause::Open(why) => write!(
                f,
                "cannot load {library}: {}; install rdma-core 28 or newer (on Debian libibverbs1 \
                 and ibverbs-providers)",
                why.as_str()
            ),
            Cause::Missing { symbol, version } => {
                let (symbol, version) = (symbol.to_bytes(), version.to_bytes());
                write!(
                    f,
                    "{library} has no {}@{}; it must be libibverbs of rdma-core 28 or newer",
                    symbol.escape_ascii(),
                    version.escape_ascii()
                )
            }
        }
    }
}

impl fmt::Debug for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl core::error::Error for LoadError {}

/// The start of a text that belongs to somebody else.
#[derive(Clone, Copy)]
struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    fn new(text: &[u8]) -> Self {
        let mut bytes = [0; N];
        let mut len = 0;
        for (to, from) in bytes.iter_mut().zip(text) {
            *to = *from;
            len += 1;
        }
        Self { bytes, len }
    }

    /// As much as is UTF-8.
    fn as_str(&self) -> &str {
        let bytes = self.bytes.get(..self.len).unwrap_or_default();
        bytes.utf8_chunks().next().map_or("", |chunk| chunk.valid())
    }
}

/// The calling thread's `errno`, which libibverbs sets when it returns NULL or -1.
#[must_use]
pub fn errno() -> c_int {
    // SAFETY: V2: the C library gives every thread a place of its own, always valid.
    unsafe { *libc::__errno_location() }
}

pub(crate) fn set_errno(code: c_int) {
    // SAFETY: V2: the C library gives every thread a place of its own, always valid.
    unsafe { *libc::__errno_location() = code };
}

/// An open library.
struct Library {
    handle: *mut c_void,
    /// Its symbols carry the versions of rdma-core; a test double's may not.
    versioned: bool,
}

impl Library {
    #[allow(clippy::result_large_err, reason = "made once, and it cannot allocate")]
    fn open(name: &CStr) -> Result<Self, Cause> {
        // SAFETY: V2: the name ends in NUL. The library's constructors are trusted as any
        // library's are that the process loads.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(Cause::Open(last_error()));
        }
        let mut library = Self { handle, versioned: true };
        library.versioned = library.find(c"ibv_get_device_list", c"IBVERBS_1.1").is_some();
        Ok(library)
    }

    /// The function's address, of this very version: another one may take other arguments.
    fn find(&self, symbol: &CStr, version: &CStr) -> Option<*mut c_void> {
        let address = if self.versioned {
            // SAFETY: V2: an open handle, and names that end in NUL.
            unsafe { libc::dlvsym(self.handle, symbol.as_ptr(), version.as_ptr()) }
        } else {
            // SAFETY: V2: an open handle, and a name that ends in NUL.
            unsafe { libc::dlsym(self.handle, symbol.as_ptr()) }
        };
        (!address.is_null()).then_some(address)
    }
}

fn last_error() -> Text<256> {
    // SAFETY: V2: no arguments.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return Text::new(b"no reason given");
    }
    // SAFETY: V2: dlerror's text ends in NUL and stays until this thread's next dl call.
    Text::new(unsafe { CStr::from_ptr(text) }.to_bytes())
}

/// Defines [`Verbs`] from one table: the field, how it is found, and the method that calls it.
macro_rules! verbs {
    (
        required { $(
            $(#[$doc:meta])*
            $version:literal $symbol:literal
            fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)?;
        )* }
        optional { $(
            $(#[$odoc:meta])*
            $oversion:literal $osymbol:literal
            fn $oname:ident($($oarg:ident: $otype:ty),* $(,)?) -> $oresult:ty;
        )* }
    ) => {
        /// The functions that libibverbs exports. The methods of the same names call them; those
        /// that older releases lack end in `_fn`, and the methods without it say so when they are
        /// missing. A test may put functions of its own into the fields.
        ///
        /// The library stays loaded for the life of the process, so a copy may be kept anywhere.
        #[derive(Debug, Clone, Copy)]
        pub struct Verbs {
            $(
                $(#[$doc])*
                pub $name: unsafe extern "C" fn($($type),*) $(-> $result)?,
            )*
            $(
                $(#[$odoc])*
                pub $oname: Option<unsafe extern "C" fn($($otype),*) -> $oresult>,
            )*
        }

        impl Verbs {
            #[allow(clippy::result_large_err, reason = "made once, and it cannot allocate")]
            fn find(library: &Library) -> Result<Self, Cause> {
                Ok(Self {
                    $(
                        $name: match library.find($symbol, $version) {
                            // SAFETY: V3: the symbol of this version has this signature.
                            Some(address) => unsafe {
                                core::mem::transmute::<
                                    *mut c_void,
                                    unsafe extern "C" fn($($type),*) $(-> $result)?,
                                >(address)
                            },
                            None => {
                                return Err(Cause::Missing { symbol: $symbol, version: $version })
                            }
                        },
                    )*
                    $(
                        $oname: library.find($osymbol, $oversion).map(|address| {
                            // SAFETY: V3: the symbol of this version has this signature.
                            unsafe {
                                core::mem::transmute::<
                                    *mut c_void,
                                    unsafe extern "C" fn($($otype),*) -> $oresult,
                                >(address)
                            }
                        }),
                    )*
                })
            }

            $(
                $(#[$doc])*
                ///
                /// # Safety
                ///
                /// As in C (rdma-core's manual page of this name): objects are alive and of the
                /// same device, pointers are valid for what the call reads and writes there.
                #[inline]
                pub unsafe fn $name(&self, $($arg: $type),*) $(-> $result)? {
                    // SAFETY: V4: the caller's promise.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }
    };
}

verbs! {
    required {
        /// The devices of this host, NULL at the end; their number goes to `count` unless NULL.
        /// The list goes back to `free_device_list`. NULL and `errno` on failure; ENOSYS: the
        /// kernel has no RDMA.
        c"IBVERBS_1.1" c"ibv_get_device_list"
        fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device;

        /// Releases a list, and its devices that are not open.
        c"IBVERBS_1.1" c"ibv_free_device_list"
        fn free_device_list(list: *mut *mut ibv_device);

        /// The kernel's name, valid as long as the device.
        c"IBVERBS_1.1" c"ibv_get_device_name"
        fn get_device_name(device: *mut ibv_device) -> *const c_char;

        /// Opens a device. NULL and `errno` on failure.
        c"IBVERBS_1.1" c"ibv_open_device"
        fn open_device(device: *mut ibv_device) -> *mut ibv_context;

        /// Closes it; what was made from it must be gone. 0 or an error.
        c"IBVERBS_1.1" c"ibv_close_device"
        fn close_device(context: *mut ibv_context) -> c_int;

        /// Next event of the device; blocks unless `async_fd` is non-blocking. 0, or -1 and
        /// `errno`. Each event goes back to `ack_async_event`.
        c"IBVERBS_1.1" c"ibv_get_async_event"
        fn get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;

        /// Releases an event; its object cannot be destroyed before.
        c"IBVERBS_1.1" c"ibv_ack_async_event"
        fn ack_async_event(event: *mut ibv_async_event);

        /// Limits of the device. 0 or an errno value.
        c"IBVERBS_1.1" c"ibv_query_device"
        fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;

        /// A compatibility symbol, which leaves the newer fields unwritten: call
        /// [`query_port`](Self::query_port). 0 or an errno value.
        c"IBVERBS_1.1" c"ibv_query_port"
        fn query_port_compat(
            context: *mut ibv_context,
            port: u8,
            attr: *mut crate::_compat_ibv_port_attr,
        ) -> c_int;

        /// One entry of a port's GID table. 0, or -1 and `errno`.
        c"IBVERBS_1.1" c"ibv_query_gid"
        fn query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid)
            -> c_int;

        /// A protection domain. NULL and `errno` on failure.
        c"IBVERBS_1.1" c"ibv_alloc_pd"
        fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;

        /// Releases a protection or parent domain. 0 or an errno value.
        c"IBVERBS_1.1" c"ibv_dealloc_pd"
        fn dealloc_pd(pd: *mut ibv_pd) -> c_int;

        /// Registers memory by the plain call, which knows no optional access flags: call
        /// [`reg_mr`](Self::reg_mr). NULL and `errno` on failure.
        c"IBVERBS_1.1" c"ibv_reg_mr"
        fn reg_mr_plain(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int)
            -> *mut ibv_mr;

        /// Ends a registration. 0 or an errno value.
        c"IBVERBS_1.1" c"ibv_dereg_mr"
        fn dereg_mr(mr: *mut ibv_mr) -> c_int;

        /// A channel for completion events. NULL and `errno` on failure.
        c"IBVERBS_1.0" c"ibv_create_comp_channel"
        fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;

        /// Releases it. 0 or an errno value.
        c"IBVERBS_1.0" c"ibv_destroy_comp_channel"
        fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;

        /// A completion queue of at least `cqe` entries. `channel` may be NULL. NULL and `errno`
        /// on failure.
        c"IBVERBS_1.1" c"ibv_create_cq"
        fn create_cq(
            context: *mut ibv_context,
            cqe: c_int,
            cq_context: *mut c_void,
            channel: *mut ibv_comp_channel,
            comp_vector: c_int,
        ) -> *mut ibv_cq;

        /// Releases it; waits for events that are not acknowledged. 0 or an errno value.
        c"IBVERBS_1.1" c"ibv_destroy_cq"
        fn destroy_cq(cq: *mut ibv_cq) -> c_int;

        /// Next completion event; blocks unless the channel's fd is non-blocking. 0, or -1 and
        /// `errno`. Each event goes back to `ack_cq_events`.
        c"IBVERBS_1.1" c"ibv_get_cq_event"
        fn get_cq_event(
            channel: *mut ibv_comp_channel,
            cq: *mut *mut ibv_cq,
            cq_context: *mut *mut c_void,
        ) -> c_int;

        /// Acknowledges events. Takes a mutex: many at once are cheaper.
        c"IBVERBS_1.1" c"ibv_ack_cq_events"
        fn ack_cq_events(cq: *mut ibv_cq, events: c_uint);

        /// A queue pair; `attr.cap` comes back with what was given. NULL and `errno` on failure.
        c"IBVERBS_1.1" c"ibv_create_qp"
        fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;

        /// Changes what `mask` names. 0 or an errno value.
        c"IBVERBS_1.1" c"ibv_modify_qp"
        fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;

        /// Reads at least what `mask` names. 0 or an errno value.
        c"IBVERBS_1.1" c"ibv_query_qp"
        fn query_qp(
            qp: *mut ibv_qp,
            attr: *mut ibv_qp_attr,
            mask: c_int,
            init: *mut ibv_qp_init_attr,
        ) -> c_int;

        /// Releases it; waits for events that are not acknowledged. 0 or an errno value.
        c"IBVERBS_1.1" c"ibv_destroy_qp"
        fn destroy_qp(qp: *mut ibv_qp) -> c_int;

        /// A static text for a status, also for one that is unknown.
        c"IBVERBS_1.1" c"ibv_wc_status_str"
        fn wc_status_str(status: ibv_wc_status) -> *const c_char;

        /// A static text for an event, also for one that is unknown.
        c"IBVERBS_1.1" c"ibv_event_type_str"
        fn event_type_str(event: ibv_event_type) -> *const c_char;
    }
    optional {
        /// Registers memory with any access flags; from rdma-core 28.
        c"IBVERBS_1.8" c"ibv_reg_mr_iova2"
        fn reg_mr_iova2_fn(
            pd: *mut ibv_pd,
            addr: *mut c_void,
            length: usize,
            iova: u64,
            access: c_uint,
        ) -> *mut ibv_mr;

        /// An entry of a port's GID table with its type and netdev; from rdma-core 32.
        c"IBVERBS_1.11" c"_ibv_query_gid_ex"
        fn query_gid_ex_fn(
            context: *mut ibv_context,
            port: u32,
            index: u32,
            entry: *mut ibv_gid_entry,
            flags: u32,
            entry_size: usize,
        ) -> c_int;

        /// Registers a dma-buf; from rdma-core 34.
        c"IBVERBS_1.12" c"ibv_reg_dmabuf_mr"
        fn reg_dmabuf_mr_fn(
            pd: *mut ibv_pd,
            offset: u64,
            length: usize,
            iova: u64,
            fd: c_int,
            access: c_int,
        ) -> *mut ibv_mr;
    }
}

impl Verbs {
    /// Loads libibverbs, or the library `name` (for tests), and finds its functions. Never unloads
    /// it: its providers keep threads and state. Loading twice gives the same library.
    ///
    /// # Errors
    ///
    /// The library cannot be loaded, or lacks a function that is not optional.
    #[allow(clippy::result_large_err, reason = "made once, and it cannot allocate")]
    pub fn load(name: Option<&CStr>) -> Result<Self, LoadError> {
        let name = name.unwrap_or(DEFAULT_LIBRARY);
        let library = Library::open(name);
        library
            .and_then(|library| Self::find(&library))
            .map_err(|cause| LoadError { library: Text::new(name.to_bytes()), cause })
    }
}
