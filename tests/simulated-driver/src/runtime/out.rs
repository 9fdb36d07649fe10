//! Stores the results of calls through the caller's pointers.

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;

use super::code::{INVALID_VALUE, Outcome};

/// A pointer for a result; it may be null.
pub(crate) type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Stores a result; fails if the pointer is null.
pub(crate) fn store<T>(out: Out<'_, T>, value: T) -> Outcome {
    out.ok_or(INVALID_VALUE)?.write(value);
    Ok(())
}

/// Stores a result unless the pointer is null.
pub(crate) fn store_if<T>(out: Out<'_, T>, value: T) -> Outcome {
    if out.is_some() { store(out, value) } else { Ok(()) }
}

/// Stores text with its terminating zero, cut to the length of the buffer.
pub(crate) fn store_text(out: *mut c_char, length: c_int, text: &str) -> Outcome {
    let room = usize::try_from(length).ok().filter(|room| *room > 0 && !out.is_null());
    let room = room.ok_or(INVALID_VALUE)?;
    let taken = &text.as_bytes()[..text.len().min(room - 1)];
    // SAFETY: the caller's buffer has this length, and the text with its end is not longer.
    unsafe { std::ptr::copy_nonoverlapping(taken.as_ptr(), out.cast(), taken.len()) };
    // SAFETY: as above.
    let end = unsafe { out.add(taken.len()) };
    // SAFETY: as above.
    unsafe { end.write(0) };
    Ok(())
}
