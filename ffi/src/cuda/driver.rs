//! libcuda, loaded at run time: the few calls that the provider makes. Names, numbers and
//! signatures are those of the CUDA Driver API reference manual (sections "Unified Addressing",
//! "Memory Management", "Device Management", "Context Management"), as of CUDA 11.7 to 13.0.

use core::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void, CStr};
use core::fmt;
use core::marker::PhantomData;
use std::ffi::CString;
use std::sync::OnceLock;

use kvrail_core::host::error::{Error, Result};
use kvrail_core::status::Status;

/// What every machine with the driver has; `libcuda.so` alone is a link for developers.
const LIBRARY: &CStr = c"libcuda.so.1";
/// Names another library, for tests.
const VARIABLE: &str = "KVRAIL_LIBCUDA";

pub(super) type Device = c_int;
pub(super) type Context = *mut c_void;

/// A code of `CUresult` that is no success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(c_int);

pub(super) const INVALID_VALUE: Code = Code(1);
pub(super) const NOT_SUPPORTED: Code = Code(801);

/// `CUpointer_attribute`: what the driver knows of an address. No context need be current.
#[derive(Clone, Copy, Debug)]
pub(super) struct PointerAttribute(c_uint);

pub(super) const CONTEXT: PointerAttribute = PointerAttribute(1);
pub(super) const MEMORY_TYPE: PointerAttribute = PointerAttribute(2);
pub(super) const SYNC_MEMOPS: PointerAttribute = PointerAttribute(6);
pub(super) const IS_MANAGED: PointerAttribute = PointerAttribute(8);
pub(super) const DEVICE_ORDINAL: PointerAttribute = PointerAttribute(9);
pub(super) const RANGE_START_ADDR: PointerAttribute = PointerAttribute(11);
pub(super) const RANGE_SIZE: PointerAttribute = PointerAttribute(12);
pub(super) const IS_GPU_DIRECT_RDMA_CAPABLE: PointerAttribute = PointerAttribute(15);
pub(super) const MEMPOOL_HANDLE: PointerAttribute = PointerAttribute(17);
pub(super) const MAPPING_SIZE: PointerAttribute = PointerAttribute(18);
pub(super) const MAPPING_BASE_ADDR: PointerAttribute = PointerAttribute(19);

/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const DMA_BUF_SUPPORTED: c_int = 124;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`: the handle is an `int`.
const DMA_BUF_FD: c_int = 1;

/// Defines [`Driver`] from one table of exported names and signatures.
macro_rules! driver {
    ($( $symbol:ident as $name:ident($($type:ty),*); )*) => {
        /// The loaded driver, initialised.
        #[derive(Debug)]
        pub(super) struct Driver {
            $( $name: unsafe extern "C" fn($($type),*) -> c_int, )*
        }

        impl Driver {
            fn find(library: &Library) -> Result<Driver> {
                Ok(Driver { $(
                    $name: {
                        let at = library.symbol(stringify!($symbol))?;
                        // SAFETY: F11: the manual gives this symbol this signature.
                        unsafe {
                            core::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($type),*) -> c_int,
                            >(at)
                        }
                    },
                )* })
            }
        }
    };
}

driver! {
    cuInit as init(c_uint);
    cuDriverGetVersion as version(*mut c_int);
    cuGetErrorName as error_name(c_int, *mut *const c_char);
    cuDeviceGet as device(*mut Device, c_int);
    cuDeviceGetAttribute as device_attribute(*mut c_int, c_int, Device);
    cuDevicePrimaryCtxRetain as retain(*mut Context, Device);
    cuDevicePrimaryCtxRelease_v2 as release(Device);
    cuCtxPushCurrent_v2 as push(Context);
    cuCtxPopCurrent_v2 as pop(*mut Context);
    cuPointerGetAttribute as pointer_get(*mut c_void, c_uint, u64);
    cuPointerSetAttribute as pointer_set(*const c_void, c_uint, u64);
    cuMemGetHandleForAddressRange as export(*mut c_void, u64, usize, c_int, c_ulonglong);
}

/// An open library. It is never closed: the driver keeps threads and state.
struct Library {
    handle: *mut c_void,
    name: CString,
}

impl Library {
    fn open() -> Result<Library> {
        let name = match std::env::var(VARIABLE).ok().filter(|v| !v.is_empty()) {
            None => LIBRARY.to_owned(),
            Some(name) => CString::new(name)
                .map_err(|_| Error::new(Status::Config, format!("{VARIABLE} has a NUL in it")))?,
        };
        // SAFETY: F11: the name ends in NUL. The library's constructors are trusted as those of
        // any library that the process loads.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return unsupported(format!(
                "the CUDA driver cannot be loaded: {}; install NVIDIA's driver (515 or newer), or \
                 register host memory",
                loader_error().unwrap_or_else(|| format!("{name:?}: no reason given"))
            ));
        }
        Ok(Library { handle, name })
    }

    fn look(&self, symbol: &CStr) -> Option<*mut c_void> {
        // SAFETY: F11: an open library, and a name that ends in NUL.
        let at = unsafe { libc::dlsym(self.handle, symbol.as_ptr()) };
        (!at.is_null()).then_some(at)
    }

    fn symbol(&self, symbol: &str) -> Result<*mut c_void> {
        let found = CString::new(symbol).ok().and_then(|name| self.look(&name));
        found.map_or_else(
            || {
                unsupported(format!(
                    "{} ({}) has no {symbol}; exporting a dma-buf needs the driver of CUDA 11.7 \
                     (515) or newer",
                    self.name.to_string_lossy(),
                    self.version().unwrap_or_else(|| "of unknown version".into())
                ))
            },
            Ok,
        )
    }

    /// For an error, before the table is known to be whole.
    fn version(&self) -> Option<String> {
        let at = self.look(c"cuDriverGetVersion")?;
        // SAFETY: F11: the manual gives this symbol this signature.
        let version = unsafe {
            core::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(at)
        };
        let mut number = 0;
        // SAFETY: F12: the place is writable; the call needs no initialisation.
        (unsafe { version(&raw mut number) } == 0).then(|| release(number))
    }
}

/// 11070 is CUDA 11.7.
fn release(number: c_int) -> String {
    format!("CUDA {}.{}", number / 1000, number % 1000 / 10)
}

fn unsupported<T>(text: String) -> Result<T> {
    Err(Error::new(Status::Unsupported, text))
}

fn loader_error() -> Option<String> {
    // SAFETY: F11: no arguments.
    let text = unsafe { libc::dlerror() };
    // SAFETY: F11: dlerror's text ends in NUL and stays until this thread's next dl call.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

fn checked(code: c_int) -> core::result::Result<(), Code> {
    if code == 0 {
        Ok(())
    } else {
        Err(Code(code))
    }
}

impl Driver {
    /// Loads and initialises the driver at the first call. A failure is tried again by the next.
    ///
    /// # Errors
    /// There is no driver, it is too old, or it finds no GPU.
    pub(super) fn get() -> Result<&'static Driver> {
        static LOADED: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = LOADED.get() {
            return Ok(driver);
        }
        let driver = Driver::find(&Library::open()?)?;
        // SAFETY: F12: the flags must be 0.
        checked(unsafe { (driver.init)(0) }).map_err(|code| {
            let said = driver.name(code);
            let text = format!(
                "cuInit gave {said} ({}); see that nvidia-smi shows a GPU, and do not use CUDA in \
                 a forked child of a process that did",
                driver.release()
            );
            Error::new(Status::Unsupported, text)
        })?;
        Ok(LOADED.get_or_init(|| driver))
    }

    /// `CUDA_ERROR_INVALID_VALUE (1)`.
    pub(super) fn name(&self, code: Code) -> String {
        let mut name = core::ptr::null();
        // SAFETY: F12: the place is writable; an unknown code leaves NULL and is an error.
        let status = unsafe { (self.error_name)(code.0, &raw mut name) };
        if status != 0 || name.is_null() {
            return format!("CUresult {}", code.0);
        }
        // SAFETY: F12: a static text of the driver that ends in NUL.
        let text = unsafe { CStr::from_ptr(name) };
        format!("{} ({})", text.to_string_lossy(), code.0)
    }

    /// The CUDA version of the driver, in words.
    pub(super) fn release(&self) -> String {
        let mut number = 0;
        // SAFETY: F12: the place is writable.
        let known = checked(unsafe { (self.version)(&raw mut number) });
        known.map_or_else(|_| "a driver of unknown version".into(), |()| release(number))
    }

    /// What is known of an address. Every attribute that is asked for here takes at most 8 bytes,
    /// and the machine is little-endian, so that one that takes fewer is read right.
    pub(super) fn of(
        &self,
        attribute: PointerAttribute,
        addr: u64,
    ) -> core::result::Result<u64, Code> {
        const { assert!(cfg!(target_endian = "little")) };
        let mut value = 0u64;
        // SAFETY: F12: the place has room for the largest of the attributes named above.
        let code = unsafe { (self.pointer_get)((&raw mut value).cast(), attribute.0, addr) };
        checked(code).map(|()| value)
    }

    /// Makes copies by the driver that touch the allocation at `addr` end before their calls do.
    pub(super) fn order_copies(&self, addr: u64) -> core::result::Result<(), Code> {
        let on: c_uint = 1;
        // SAFETY: F12: this attribute is an unsigned int, which is read in the call.
        checked(unsafe { (self.pointer_set)((&raw const on).cast(), SYNC_MEMOPS.0, addr) })
    }

    /// Whether the device can export its memory.
    pub(super) fn exports(&self, ordinal: c_int) -> core::result::Result<bool, Code> {
        let (mut device, mut value) = (0, 0);
        // SAFETY: F12: the place is writable.
        checked(unsafe { (self.device)(&raw mut device, ordinal) })?;
        // SAFETY: F12: the place is writable.
        checked(unsafe { (self.device_attribute)(&raw mut value, DMA_BUF_SUPPORTED, device) })?;
        Ok(value != 0)
    }

    /// A dma-buf of whole pages in one allocation. A context of its device must be current.
    pub(super) fn export(&self, addr: u64, len: usize) -> core::result::Result<c_int, Code> {
        let mut fd: c_int = -1;
        // SAFETY: F12: a handle of this type is an int, and there is room for one.
        let code = unsafe { (self.export)((&raw mut fd).cast(), addr, len, DMA_BUF_FD, 0) };
        checked(code).map(|()| fd)
    }

    /// Makes `context`, or if it is NULL the primary one of device `ordinal`, this thread's current
    /// one until the result is dropped.
    pub(super) fn enter(
        &self,
        context: Context,
        ordinal: c_int,
    ) -> core::result::Result<Current<'_>, Code> {
        let (mut context, mut retained) = (context, None);
        if context.is_null() {
            let mut device = 0;
            // SAFETY: F12: the place is writable.
            checked(unsafe { (self.device)(&raw mut device, ordinal) })?;
            // SAFETY: F12: the place is writable; it is released when `Current` is dropped.
            checked(unsafe { (self.retain)(&raw mut context, device) })?;
            retained = Some(device);
        }
        // Dropped in any case, so that what was retained is released.
        let mut current = Current { driver: self, retained, pushed: false, here: PhantomData };
        // SAFETY: F13: the allocation's own context, or one that is retained.
        checked(unsafe { (self.push)(context) })?;
        current.pushed = true;
        Ok(current)
    }
}

/// A context that is current on this thread, whose stack of contexts is as it was afterwards.
pub(super) struct Current<'a> {
    driver: &'a Driver,
    retained: Option<Device>,
    pushed: bool,
    /// The stack is this thread's.
    here: PhantomData<*mut ()>,
}

impl fmt::Debug for Current<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Current").field("retained", &self.retained).finish_non_exhaustive()
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = core::ptr::null_mut();
            // SAFETY: F13: pushed on this thread, as `Current` is not Send.
            let _ = unsafe { (self.driver.pop)(&raw mut popped) };
        }
        if let Some(device) = self.retained {
            // SAFETY: F13: retained once by `enter`.
            let _ = unsafe { (self.driver.release)(device) };
        }
    }
}
