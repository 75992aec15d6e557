//! Pointers that cross: checked for NULL, alignment and size in one place, then typed.

use core::ffi::{c_char, c_void, CStr};
use core::mem::{align_of, size_of};

use kvrail_core::host::error::{Error, Result};
use kvrail_core::status::Status;
use kvrail_core::table::{Desc, Stride};

use crate::barrier::invalid;
use crate::types::{
    kvr_config, kvr_desc, kvr_engine_info, kvr_rail_info, kvr_stride, kvr_transfer_info,
};

/// Largest `struct_size` that is believed.
pub(crate) const STRUCT_MAX: usize = 4096;

/// Types of the ABI that are the engine's own under another name.
///
/// # Safety
/// `Self` and `Core` have the same size, alignment and fields at the same offsets, and any bytes
/// are a value (F6).
pub(crate) unsafe trait SameLayout: Sized {
    /// The engine's type.
    type Core;
    /// Fails to compile when the sizes or alignments differ.
    const CHECK: () = assert!(
        size_of::<Self>() == size_of::<Self::Core>()
            && align_of::<Self>() == align_of::<Self::Core>()
    );
}

macro_rules! same_layout {
    ($c:ident = $core:ident { $($field:ident),+ }) => {
        const _: () = {
            $(assert!(core::mem::offset_of!($c, $field) == core::mem::offset_of!($core, $field));)+
        };
        // SAFETY: F6: the assertions above and in `CHECK`, and every field is a u64.
        unsafe impl SameLayout for $c {
            type Core = $core;
        }
    };
}
same_layout!(kvr_desc = Desc { addr, len, dev, region });
same_layout!(kvr_stride = Stride { base, len, stride, count, region });

/// Structs that start with their size, so that both sides may be of different versions.
///
/// # Safety
/// `repr(C)`, the first field is `struct_size: u32`, no padding, and any bytes are a value (F4).
pub(crate) unsafe trait Versioned: Copy {}

macro_rules! versioned {
    ($($t:ident),+) => { $(
        const _: () = assert!(core::mem::offset_of!($t, struct_size) == 0);
        // SAFETY: F4: integers and arrays of them only; the layout test shows that they fill the
        // struct.
        unsafe impl Versioned for $t {}
    )+ };
}
versioned!(kvr_config, kvr_transfer_info, kvr_rail_info, kvr_engine_info);

pub(crate) fn check<T>(pointer: *const T, what: &str) -> Result<()> {
    if pointer.is_null() {
        return invalid(format!("{what} is NULL; pass a valid pointer"));
    }
    if !pointer.is_aligned() {
        let need = align_of::<T>();
        return invalid(format!("{what} is {pointer:p}, which is not aligned to {need} bytes"));
    }
    Ok(())
}

/// A list of the caller's. NULL is allowed for an empty one.
///
/// # Safety
/// F2: `pointer` is readable for `len` items, and nobody writes them, as long as the result lives.
pub(crate) unsafe fn slice<'a, T>(pointer: *const T, len: usize, what: &str) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    check(pointer, what)?;
    let most = isize::MAX as usize / size_of::<T>();
    if len > most {
        return invalid(format!("{what} has {len} items; at most {most} fit in memory"));
    }
    // SAFETY: F2, with NULL, alignment and size checked above.
    Ok(unsafe { core::slice::from_raw_parts(pointer, len) })
}

/// A list of the caller's to write to. NULL is allowed for an empty one.
///
/// # Safety
/// F3: `pointer` is writable for `len` items, and nobody else touches them, as long as the result
/// lives.
pub(crate) unsafe fn slice_mut<'a, T>(
    pointer: *mut T,
    len: usize,
    what: &str,
) -> Result<&'a mut [T]> {
    // SAFETY: F3, which includes what F2 asks for; only the checks are wanted.
    unsafe { slice(pointer.cast_const(), len, what)? };
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: F3, with NULL, alignment and size checked above.
    Ok(unsafe { core::slice::from_raw_parts_mut(pointer, len) })
}

/// Bytes of the caller's.
///
/// # Safety
/// As [`slice`].
pub(crate) unsafe fn bytes<'a>(pointer: *const c_void, len: usize, what: &str) -> Result<&'a [u8]> {
    // SAFETY: F2, the caller's promise handed on.
    unsafe { slice(pointer.cast::<u8>(), len, what) }
}

/// A list of ABI structs as the engine's own.
///
/// # Safety
/// As [`slice`].
pub(crate) unsafe fn list<'a, T: SameLayout>(
    pointer: *const T,
    len: usize,
    what: &str,
) -> Result<&'a [T::Core]> {
    const { T::CHECK };
    // SAFETY: F2, the caller's promise handed on; F6 makes the cast a change of name.
    unsafe { slice(pointer.cast::<T::Core>(), len, what) }
}

/// A string that ends in NUL.
///
/// # Safety
/// F5: `pointer` is readable up to and with its NUL as long as the result lives.
pub(crate) unsafe fn string<'a>(pointer: *const c_char, what: &str) -> Result<&'a str> {
    check(pointer, what)?;
    // SAFETY: F5, with NULL checked above.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().or_else(|_| invalid(format!("{what} is {text:?}; pass UTF-8")))
}

/// A place for one result. It is written at once, so that a failed call leaves `empty` and not an
/// old value.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// # Safety
    /// F3: `pointer` is writable, and nobody else touches it, as long as the result lives.
    pub(crate) unsafe fn new(pointer: *mut T, empty: T, what: &str) -> Result<Out<T>> {
        check(pointer, what)?;
        // SAFETY: F3, with NULL and alignment checked above.
        unsafe { pointer.write(empty) };
        Ok(Out(pointer))
    }

    pub(crate) fn set(self, value: T) -> Result<Status> {
        // SAFETY: F3, promised and checked in `new`.
        unsafe { self.0.write(value) };
        Ok(Status::Ok)
    }
}

/// Copies `data` to a caller's buffer: `*len` is its capacity, and becomes the full length.
///
/// # Safety
/// F3: `len` is readable and writable, and `buf` is writable for `*len` bytes.
pub(crate) unsafe fn fill(data: &[u8], buf: *mut c_void, len: *mut usize) -> Result<Status> {
    check(len, "len")?;
    // SAFETY: F3, checked above.
    let capacity = unsafe { len.replace(data.len()) };
    if capacity < data.len() {
        let need = data.len();
        let text = format!("the buffer holds {capacity} bytes; {need} are needed, as *len says");
        return Err(Error::new(Status::Capacity, text));
    }
    if !data.is_empty() {
        check(buf.cast::<u8>(), "buf")?;
        // SAFETY: F3: `buf` has room for `capacity` bytes, and `data` is ours, so they cannot
        // overlap.
        unsafe { core::ptr::copy_nonoverlapping(data.as_ptr(), buf.cast::<u8>(), data.len()) };
    }
    Ok(Status::Ok)
}

/// Copies `text` to a caller's buffer of `len` bytes, cut if need be, always with a NUL. Gives the
/// full length.
///
/// # Safety
/// F3: `buf` is NULL or writable for `len` bytes.
pub(crate) unsafe fn fill_text(text: &[u8], buf: *mut c_char, len: usize) -> usize {
    if !buf.is_null() && len > 0 {
        let n = text.len().min(len - 1);
        // SAFETY: F3: n + 1 bytes are at most `len`; `text` is ours, so they cannot overlap.
        unsafe {
            core::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast::<u8>(), n);
            buf.add(n).write(0);
        }
    }
    text.len()
}

/// Checks the `struct_size` that a caller gave for a `T`.
pub(crate) fn struct_size<T: Versioned>(size: usize, what: &str) -> Result<usize> {
    if !(size_of::<u32>()..=STRUCT_MAX).contains(&size) {
        let own = size_of::<T>();
        return invalid(format!(
            "{what}: struct_size is {size}; set it to the sizeof of the struct (4 to {STRUCT_MAX}, \
             {own} in this version)"
        ));
    }
    Ok(size)
}

/// The `struct_size` that a caller set in a struct to be filled.
///
/// # Safety
/// F4: the struct's first 4 bytes are readable.
pub(crate) unsafe fn read_size<T: Versioned>(pointer: *const T, what: &str) -> Result<usize> {
    check(pointer, what)?;
    // SAFETY: F4: the struct starts with its size.
    struct_size::<T>(unsafe { pointer.cast::<u32>().read() } as usize, what)
}

/// Reads a versioned struct: what the caller has of it, zeros for the rest, and how many bytes it
/// has.
///
/// # Safety
/// F4: the first `struct_size` bytes are readable.
pub(crate) unsafe fn read_versioned<T: Versioned>(
    pointer: *const T,
    what: &str,
) -> Result<(T, usize)> {
    // SAFETY: F4, the caller's promise handed on.
    let size = unsafe { read_size(pointer, what)? };
    // A newer caller may have set something that this version does not know: never silently
    // dropped.
    let tail = size.saturating_sub(size_of::<T>());
    if tail > 0 {
        // SAFETY: F2 from F4: `size` bytes are readable.
        let bytes = unsafe { slice(pointer.add(1).cast::<u8>(), tail, what)? };
        if let Some(at) = bytes.iter().position(|b| *b != 0) {
            return invalid(format!(
                "{what}: byte {} is set, but this version of the library ({}) knows {} bytes; \
                 leave newer fields 0 or update the library",
                size_of::<T>() + at,
                env!("CARGO_PKG_VERSION"),
                size_of::<T>()
            ));
        }
    }
    // SAFETY: F4: any bytes are a value, so zeros are; the copy stays inside both.
    let value = unsafe {
        let mut value: T = core::mem::zeroed();
        let to = (&raw mut value).cast::<u8>();
        core::ptr::copy_nonoverlapping(pointer.cast::<u8>(), to, size.min(size_of::<T>()));
        value
    };
    Ok((value, size))
}

/// Writes a versioned struct of `size` bytes: what the caller has room for; bytes newer than this
/// version become 0. `struct_size` becomes `size`.
///
/// # Safety
/// F4: `pointer` is writable for `size` bytes, which [`struct_size`] let pass.
pub(crate) unsafe fn write_versioned<T: Versioned>(
    value: &T,
    pointer: *mut T,
    size: usize,
    what: &str,
) -> Result<Status> {
    check(pointer, what)?;
    let known = size.min(size_of::<T>());
    // SAFETY: F4: `size` bytes are writable, `known` of `value` are readable, and `value` is ours.
    unsafe {
        core::ptr::copy_nonoverlapping((&raw const *value).cast::<u8>(), pointer.cast(), known);
        pointer.cast::<u8>().add(known).write_bytes(0, size - known);
        pointer.cast::<u32>().write(size as u32);
    }
    Ok(Status::Ok)
}

/// The caller's context of a callback, which the caller lets other threads use.
pub(crate) struct Context(pub(crate) *mut c_void);

// SAFETY: F8, F10: what takes a callback asks for a context that its threads may use: any thread
// for the log and for providers, the control thread for events.
unsafe impl Send for Context {}
// SAFETY: F8, F10: as above, several at a time for the log and for providers.
unsafe impl Sync for Context {}

impl Context {
    // A method, so that a closure captures the whole struct and with it Send and Sync.
    pub(crate) fn get(&self) -> *mut c_void {
        self.0
    }
}
