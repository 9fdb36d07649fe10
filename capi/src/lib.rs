//! The C library of Peerlane. `include/peerlane.h` is generated from this crate, with its documentation.
//!
//! | file | holds |
//! | --- | --- |
//! | `status` | errors: a status of each call, text and rank of the last error of a thread |
//! | `handle` | handles that a table resolves |
//! | `group`, `window`, `operation`, `channel` | the functions on these objects |

#![allow(clippy::missing_errors_doc, reason = "every function returns a status")]

pub mod channel;
pub mod group;
mod handle;
pub mod numbers;
pub mod operation;
pub mod status;
pub mod window;

use std::ffi::{CStr, c_char};

use status::Failure;

/// The version of the header, which options contain. It changes if a program must be compiled again.
pub const HEADER_VERSION: u32 = 1;

/// Returns the version of the library, such as `0.1.0`. The text is constant.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    CStr::from_bytes_until_nul(VERSION.as_bytes()).unwrap_or_default().as_ptr()
}

/// Writes a text that ends in zero to a buffer of the caller.
fn text_into(text: &str, buffer: *mut c_char, size: usize) -> Result<(), Failure> {
    if buffer.is_null() || size <= text.len() {
        let needed = text.len() + 1;
        return Err(Failure::argument(format!(
            "the buffer has {size} bytes, expected at least {needed}"
        )));
    }
    // SAFETY: the C program owns the buffer, which has this many bytes.
    let buffer = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), size) };
    buffer[..text.len()].copy_from_slice(text.as_bytes());
    buffer[text.len()] = 0;
    Ok(())
}
