//! Reads and writes host memory that streams can access.

use std::ptr::NonNull;

use crate::vendor::memory::Pinned;

impl Pinned {
    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    pub(crate) fn at(&self, offset: usize, bytes: usize) -> NonNull<u8> {
        assert!(offset + bytes <= self.bytes, "{bytes} bytes at {offset} of {}", self.bytes);
        // SAFETY: inside the allocation, as was just checked.
        unsafe { self.base.add(offset) }
    }

    /// Before the copies that read it are on a stream, or after them.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        let place = self.at(offset, bytes.len());
        // SAFETY: the place holds so many bytes, which no copy of a stream uses now.
        unsafe { place.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }

    /// After the stream with the copies that write it was finished.
    pub(crate) fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        let place = self.at(offset, bytes);
        // SAFETY: the place holds so many bytes, which no copy of a stream uses now.
        unsafe { std::slice::from_raw_parts(place.as_ptr(), bytes) }.to_vec()
    }
}
