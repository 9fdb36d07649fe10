//! The C library of Peerlane. `include/peerlane.h` is generated from this crate, with its
//! documentation.
//!
//! | file | holds |
//! | --- | --- |
//! | `status` | errors: a status of each call, text and rank of the last error of a thread |
//! | `handle` | handles that a table resolves |
//! | `group`, `window`, `operation`, `channel` | the functions on these objects |
//! | `blocks` | arrivals and departures of single blocks of a start |
//! | `all_to_all_v` | all-to-alls with counts for each start |
//! | `immediate` | calls of collectives without an operation |

#![allow(clippy::missing_errors_doc, reason = "every function returns a status")]

pub mod all_to_all_v;
pub mod blocks;
pub mod channel;
pub mod group;
mod handle;
pub mod immediate;
pub mod numbers;
pub mod operation;
pub mod status;
pub mod window;

use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::time::Duration;

use peerlane::{Error, ErrorKind};
use status::Failure;

/// The version of the header, which options contain. It changes if a program must be compiled
/// again.
pub const HEADER_VERSION: u32 = 6;

/// Returns the version of the library, such as `0.1.0`. The text is constant.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    CStr::from_bytes_until_nul(VERSION.as_bytes()).unwrap_or_default().as_ptr()
}

/// Converts a number of milliseconds that the caller gives. Refuses those that a negative number
/// becomes, so that the time left until a deadline that has passed is not a wait without end.
fn milliseconds(name: &str, value: u64) -> Result<Duration, Error> {
    let signed = value.cast_signed();
    if signed >= 0 {
        return Ok(Duration::from_millis(value));
    }
    let text = format!(
        "{name} is {value}, which is {signed} with a sign, expected at most {}; give 0 for a time that has passed",
        i64::MAX
    );
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Writes a text that ends in zero to a buffer of the caller, which may be uninitialised.
///
/// # Safety
/// `buffer` is NULL or valid for writes of `size` bytes.
unsafe fn text_into(text: &str, buffer: *mut c_char, size: usize) -> Result<(), Failure> {
    let needed = text.len() + 1;
    if buffer.is_null() || size < needed {
        return Err(Failure::small_buffer(size, needed));
    }

    let buffer = buffer.cast::<u8>();
    // SAFETY: `text.len() < size`, and the contract of this function says that `size` bytes are
    // valid for writes. The text is memory of the library, which does not overlap with a buffer of
    // the caller.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr(), buffer, text.len()) };
    // SAFETY: `text.len() < size`, so this is the place behind the text in the buffer.
    unsafe { buffer.wrapping_add(text.len()).write(0) };
    Ok(())
}

/// Writes a file descriptor that the library keeps.
///
/// # Safety
/// `to` is NULL or valid for writes.
unsafe fn descriptor_into(
    to: *mut c_int,
    descriptor: impl FnOnce() -> Result<c_int, Failure>,
) -> Result<(), Failure> {
    if to.is_null() {
        return Err(Failure::argument("descriptor is NULL, expected where to write it"));
    }
    let descriptor = descriptor()?;
    // SAFETY: it is not NULL, and the contract of this function says that it is valid for writes
    // then.
    unsafe { to.write(descriptor) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;

    use super::*;

    #[test]
    fn a_text_fits_with_its_zero_or_nothing_is_written() {
        let mut buffer = [MaybeUninit::<c_char>::uninit(); 6];
        // SAFETY: the buffer has six bytes.
        let mut write = |text, size| unsafe { text_into(text, buffer.as_mut_ptr().cast(), size) };
        assert!(write("peers", 6).is_ok());
        let needed = write("others", 6).err().map(|failure| failure.needed());
        assert_eq!(needed, Some(7));
        assert!(write("", 0).is_err());
        // SAFETY: the first call has written all six bytes, and the others nothing.
        let text = unsafe { CStr::from_ptr(buffer.as_ptr().cast()) };
        assert_eq!(text, c"peers");
        // SAFETY: NULL is refused.
        assert!(unsafe { text_into("", ptr::null_mut(), 9) }.is_err());
    }
}
