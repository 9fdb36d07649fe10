//! Registered memory as a slice of elements.

use std::fmt;
use std::marker::PhantomData;

use peerlane_hal::{ErrorKind, Region, Space};

use crate::element::{self, Element};
use crate::error::Error;
use crate::group::place::Place;

/// Registered memory of this rank, for the shards of an operation.
pub struct Buffer<L, T> {
    region: L,
    elements: PhantomData<T>,
}

impl<L: Region, T: Element> Buffer<L, T> {
    pub(crate) fn new(region: L) -> Self {
        Self { region, elements: PhantomData }
    }

    pub(crate) fn into_region(self) -> L {
        self.region
    }

    /// How many elements it holds.
    pub fn len(&self) -> usize {
        usize::try_from(self.region.bytes()).unwrap_or(usize::MAX) / T::DTYPE.bytes()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where they lie.
    pub fn place(&self) -> Place {
        Place::within(&self.region, 0, self.region.bytes())
    }

    /// The elements, to read.
    ///
    /// # Errors
    /// If only a device can read them.
    pub fn as_slice(&self) -> Result<&[T], Error> {
        // SAFETY: the buffer is in no operation, so that nobody writes to it.
        element::cast(unsafe { bytes(&self.region) }?)
    }

    /// The elements, to write.
    ///
    /// # Errors
    /// If only a device can write them.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T], Error> {
        // SAFETY: the buffer is in no operation, and borrowed for as long as the slice.
        element::cast_mut(unsafe { bytes_mut(&self.region) }?)
    }
}

impl<L, T> fmt::Debug for Buffer<L, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").finish_non_exhaustive()
    }
}

/// The bytes of a region that the host can read.
///
/// # Safety
/// Nobody writes to them while the slice lives.
pub(crate) unsafe fn bytes(region: &dyn Region) -> Result<&[u8], Error> {
    let length = host_bytes(region)?;
    // SAFETY: a host region is readable over its length while it lives; nobody writes, as the
    // caller says.
    Ok(unsafe { std::slice::from_raw_parts(region.base().as_ptr(), length) })
}

/// The bytes of a region that the host can write.
///
/// # Safety
/// Nobody else touches them while the slice lives.
#[expect(
    clippy::mut_from_ref,
    reason = "a region only names memory; exclusiveness is the caller's"
)]
pub(crate) unsafe fn bytes_mut(region: &dyn Region) -> Result<&mut [u8], Error> {
    let length = host_bytes(region)?;
    // SAFETY: as for `bytes`; nobody else touches them, as the caller says.
    Ok(unsafe { std::slice::from_raw_parts_mut(region.base().as_ptr(), length) })
}

fn host_bytes(region: &dyn Region) -> Result<usize, Error> {
    match (region.space(), usize::try_from(region.bytes())) {
        (Space::Host, Ok(length)) => Ok(length),
        _ => Err(Error::new(
            ErrorKind::InvalidArgument,
            "the buffer is device memory; read and write it on the device",
        )),
    }
}
