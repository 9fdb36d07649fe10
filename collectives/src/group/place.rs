//! Where bytes lie, for whoever computes on them outside of this crate.

use std::ptr::NonNull;

use peerlane_hal::{Region, Space};

/// A span of registered memory of this rank.
///
/// For memory of a device this is what a kernel takes. It says nothing of when the bytes may be
/// read or written; that is said where a place is handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The first byte, in the address space that `space` names.
    pub base: NonNull<u8>,
    /// How many bytes.
    pub bytes: u64,
    /// Who can load and store them.
    pub space: Space,
}

impl Place {
    /// `bytes` from `offset` of a region, in which they lie.
    pub(crate) fn within(region: &dyn Region, offset: u64, bytes: u64) -> Self {
        let offset = usize::try_from(offset).expect("a region fits the address space");
        let base = NonNull::new(region.base().as_ptr().wrapping_add(offset));
        // A region does not wrap around the address space.
        let base = base.expect("an address inside a region is not null");
        Self { base, bytes, space: region.space() }
    }
}
