//! Buffers in registered memory, accessible as slices of elements or by address.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use peerlane_hal::{DynRegion, ErrorKind, Region, Space};

use crate::element::{self, Element};
use crate::error::Error;

/// The address range of registered memory on this rank.
///
/// For device memory, a kernel takes its address. The method that returns a range says when the bytes may be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    /// The address of the first byte of the range, in the address space of `space`.
    pub base: NonNull<u8>,
    /// The length of the range in bytes.
    pub bytes: u64,
    /// The kind of processor, host or device, that can load and store the bytes.
    pub space: Space,
}

impl MemoryRange {
    pub(crate) fn within(region: &dyn Region, offset: u64, bytes: u64) -> Self {
        let offset = usize::try_from(offset).expect("a region fits the address space");
        let base = NonNull::new(region.base().as_ptr().wrapping_add(offset));
        // A region does not wrap around the address space.
        let base = base.expect("an address inside a region is not null");
        Self { base, bytes, space: region.space() }
    }
}

/// Registered memory of this rank that holds the input or the output of an operation.
pub struct Buffer<T> {
    region: DynRegion,
    elements: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    pub(crate) fn new(region: DynRegion) -> Self {
        Self { region, elements: PhantomData }
    }

    pub(crate) fn into_region(self) -> DynRegion {
        self.region
    }

    /// Keeps `owner`, such as the allocation of the memory, until this rank no longer uses the memory.
    ///
    /// This is when the buffer, or the operation or window over it, has been dropped and its last start is complete. After an
    /// aborted start it is when the group has been dropped.
    #[must_use]
    pub fn keep_alive(self, owner: impl Send + Sync + 'static) -> Self {
        Self::new(self.region.keep_alive(owner))
    }

    /// Returns the registered region that contains the buffer's elements.
    pub fn region(&self) -> &DynRegion {
        &self.region
    }

    /// Returns the number of elements in the buffer.
    pub fn len(&self) -> usize {
        usize::try_from(self.region.bytes()).unwrap_or(usize::MAX) / T::DTYPE.bytes()
    }

    /// Returns whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address range of the buffer's elements.
    pub fn memory(&self) -> MemoryRange {
        MemoryRange::within(&self.region, 0, self.region.bytes())
    }

    /// Returns the elements of the buffer as a slice for reading.
    ///
    /// # Errors
    /// If only a device can read them.
    pub fn as_slice(&self) -> Result<&[T], Error> {
        // SAFETY: the buffer is in no operation, so that nobody writes to it.
        element::cast(unsafe { bytes(&self.region, 0..self.region.bytes()) }?)
    }

    /// Returns the elements of the buffer as a slice for writing.
    ///
    /// # Errors
    /// If only a device can write them.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T], Error> {
        // SAFETY: the buffer is in no operation, and borrowed for as long as the slice.
        element::cast_mut(unsafe { bytes_mut(&self.region, 0..self.region.bytes()) }?)
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").finish_non_exhaustive()
    }
}

/// Borrows bytes of registered memory that the host can read.
///
/// # Safety
/// Nobody writes to them while the slice lives.
///
/// # Panics
/// If they are not all in the region.
pub(crate) unsafe fn bytes(region: &dyn Region, range: Range<u64>) -> Result<&[u8], Error> {
    let (base, length) = host_bytes(region, range)?;
    // SAFETY: a host region is readable over its length while it lives; nobody writes, as the
    // caller says.
    Ok(unsafe { std::slice::from_raw_parts(base, length) })
}

/// Borrows bytes of registered memory that the host can write.
///
/// # Safety
/// Nobody else touches them while the slice lives.
///
/// # Panics
/// If they are not all in the region.
#[expect(
    clippy::mut_from_ref,
    reason = "a region only names memory; exclusiveness is the caller's"
)]
pub(crate) unsafe fn bytes_mut(region: &dyn Region, range: Range<u64>) -> Result<&mut [u8], Error> {
    let (base, length) = host_bytes(region, range)?;
    // SAFETY: as for `bytes`; nobody else touches them, as the caller says.
    Ok(unsafe { std::slice::from_raw_parts_mut(base, length) })
}

pub(crate) fn host_bytes(
    region: &dyn Region,
    range: Range<u64>,
) -> Result<(*mut u8, usize), Error> {
    let Range { start, end } = range;
    assert!(start <= end && end <= region.bytes(), "bytes {start} to {end} are not in the region");
    if region.space() != Space::Host {
        let text = "the buffer is device memory, which the host cannot access; read and write it \
                    on the device";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let index = |at| usize::try_from(at).expect("a host region fits the address space");
    Ok((region.base().as_ptr().wrapping_add(index(start)), index(end - start)))
}
