//! Stores attributes whose type depends on the attribute.

use std::ffi::{CStr, c_char, c_void};

use super::status::{INVALID_ARGUMENT, Outcome};

#[derive(Clone, Debug)]
pub(super) enum Value {
    Flag(bool),
    Half(u16),
    Word(u32),
    Long(u64),
    /// Two words, one behind the other.
    Pair([u64; 2]),
    /// The address of text that stays.
    Text(&'static CStr),
    /// Text in a field of so many bytes.
    Field(String, usize),
    Links(Vec<super::types::hsa_amd_memory_pool_link_info_t>),
}

impl Value {
    /// Writes it where the caller has room for what it asked for.
    pub(super) fn store(self, out: *mut c_void) -> Outcome {
        if out.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        match self {
            // SAFETY: what is written is what the attribute is documented to be, for which the
            // caller gives the place.
            Self::Flag(value) => unsafe { out.cast::<bool>().write(value) },
            // SAFETY: as above.
            Self::Half(value) => unsafe { out.cast::<u16>().write(value) },
            // SAFETY: as above.
            Self::Word(value) => unsafe { out.cast::<u32>().write(value) },
            // SAFETY: as above.
            Self::Long(value) => unsafe { out.cast::<u64>().write(value) },
            // SAFETY: as above.
            Self::Pair(pair) => unsafe { out.cast::<[u64; 2]>().write(pair) },
            // SAFETY: as above.
            Self::Text(text) => unsafe { out.cast::<*const c_char>().write(text.as_ptr()) },
            Self::Field(text, bytes) => {
                let mut field = vec![0; bytes];
                let taken = text.len().min(bytes - 1);
                field[..taken].copy_from_slice(&text.as_bytes()[..taken]);
                // SAFETY: as above; the field is this long.
                unsafe { std::ptr::copy_nonoverlapping(field.as_ptr(), out.cast(), bytes) };
            }
            Self::Links(links) => {
                // SAFETY: as above; the caller has asked for the number of hops before.
                unsafe { std::ptr::copy_nonoverlapping(links.as_ptr(), out.cast(), links.len()) };
            }
        }
        Ok(())
    }
}
