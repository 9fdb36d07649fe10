//! Ranges of registered memory, for computations outside of this crate.

use std::ptr::NonNull;

use peerlane_hal::{Region, Space};

/// A range of registered memory of this rank.
///
/// For device memory, a kernel takes its address. The method that returns a range says when the bytes may be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    /// The address of the first byte, in the address space of `space`.
    pub base: NonNull<u8>,
    /// The number of bytes.
    pub bytes: u64,
    /// The processors that can load and store the bytes.
    pub space: Space,
}

impl MemoryRange {
    /// Returns `bytes` bytes of a region, starting at `offset`.
    pub(crate) fn within(region: &dyn Region, offset: u64, bytes: u64) -> Self {
        let offset = usize::try_from(offset).expect("a region fits the address space");
        let base = NonNull::new(region.base().as_ptr().wrapping_add(offset));
        // A region does not wrap around the address space.
        let base = base.expect("an address inside a region is not null");
        Self { base, bytes, space: region.space() }
    }
}
