//! Memory of the caller, with guards in front and behind that nobody may touch.

use peerlane_collectives::element::{self, Element};

use super::failed;
use crate::failure::{Outcome, ensure_all};

const GUARD: u8 = 0x5C;
const GUARD_BYTES: usize = 64;
const WORD_BYTES: usize = size_of::<u64>();

/// A span of own memory at any offset.
pub(super) struct Guarded {
    words: Vec<u64>,
    start: usize,
    bytes: usize,
}

impl Guarded {
    /// `bytes` that start `offset` bytes behind an aligned address.
    pub(super) fn new(bytes: usize, offset: usize) -> Self {
        let start = GUARD_BYTES + offset;
        let words = (start + bytes + GUARD_BYTES).div_ceil(WORD_BYTES);
        Self { words: vec![u64::from_ne_bytes([GUARD; WORD_BYTES]); words], start, bytes }
    }

    pub(super) fn elements<T: Element>(&mut self) -> Outcome<&mut [T]> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        element::cast_mut(&mut bytes[self.start..self.start + self.bytes]).map_err(failed)
    }

    pub(super) fn check(&self) -> Outcome {
        let bytes: &[u8] = bytemuck::cast_slice(&self.words);
        ensure_all("guard in front", &bytes[..self.start], GUARD)?;
        ensure_all("guard behind", &bytes[self.start + self.bytes..], GUARD)
    }
}
