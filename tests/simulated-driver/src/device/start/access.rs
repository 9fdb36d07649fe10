//! Accesses the memory that a launch holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::program::{Control, HostWords, Program};
use crate::device::fault::Fault;
use crate::device::memory::{AddressSpace, Range};
use crate::device::session::Session;

/// All memory that a program names, which stays mapped as long as this lives.
#[derive(Debug)]
pub(super) struct Held {
    _ranges: Vec<Arc<Range>>,
}

impl Held {
    /// Pins the places of all ops, in even and in odd starts, and the words of the program.
    pub(super) fn pin(
        program: &Program,
        blocks: u32,
        session: &Session,
        memory: &AddressSpace,
    ) -> Result<Self, Fault> {
        let words = [
            (program.control, size_of::<Control>() as u64),
            (program.host, size_of::<HostWords>() as u64),
        ];
        let places = program.ops().iter().flat_map(|op| op.spans(blocks));
        let spans = places.flat_map(|(place, bytes)| place.addresses().map(|it| (it, bytes)));

        let mut ranges = Vec::new();
        for (address, bytes) in words.into_iter().chain(spans) {
            ranges.extend(memory.pin(address, bytes, session)?);
        }
        Ok(Self { _ranges: ranges })
    }

    /// Loads an aligned word, ahead of all later loads.
    pub(super) fn load(&self, address: u64) -> u64 {
        self.word(address).load(Ordering::Acquire)
    }

    /// Stores an aligned word at once.
    pub(super) fn store(&self, address: u64, value: u64) {
        self.word(address).store(value, Ordering::SeqCst);
    }

    /// Returns an aligned word of the program or of an op.
    pub(super) fn word(&self, address: u64) -> &AtomicU64 {
        debug_assert!(address.is_multiple_of(8));
        // SAFETY: `pin` has found the word in memory that stays mapped, and `Program::is_valid` that
        // words of slots are aligned. Flags and words of a program are aligned in their regions.
        unsafe { AtomicU64::from_ptr(address as *mut u64) }
    }

    pub(super) fn short_word(&self, address: u64) -> &AtomicU32 {
        debug_assert!(address.is_multiple_of(4));
        // SAFETY: as in `word`.
        unsafe { AtomicU32::from_ptr(address as *mut u32) }
    }

    /// Copies bytes out of memory.
    pub(super) fn read(&self, address: u64, bytes: &mut [u8]) {
        // SAFETY: the span is pinned. As on a device, the caller of the kernel ensures that nobody
        // writes it meanwhile; the bytes are those of a local.
        unsafe { std::ptr::copy(address as *const u8, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies bytes into memory.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) {
        // SAFETY: as in `read`, and nobody reads the span meanwhile.
        unsafe { std::ptr::copy(bytes.as_ptr(), address as *mut u8, bytes.len()) };
    }
}
