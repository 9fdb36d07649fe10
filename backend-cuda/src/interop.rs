//! Converts memory and regions from and to the types of the crate `cudarc`.
//!
//! Both crates use the device's primary context, so pointers are valid in both. A stream converts with
//! `Stream::from`. On most devices cudarc allocates from a stream-ordered pool, whose memory cannot be
//! exported: a rank can put from it, but a peer cannot put into it. To receive from a peer, allocate with
//! Peerlane and access the region through [`RegionView::with_view`].

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaViewMut, DevicePtr as _};
use peerlane_hal::{PeerMemory as _, Region as _, Role};
use peerlane_toolkit::Fault;

use crate::error::Error;
use crate::memory::{Local, Memory};

/// Registers device memory of the crate cudarc (`CudaSlice`) as memory regions.
pub trait SliceMemory {
    /// Registers device memory of the crate cudarc (`CudaSlice`) as a memory region.
    ///
    /// Work that `stream` holds now may still write to the slice, so start operations behind that stream.
    ///
    /// # Errors
    /// Fails like [`register`](peerlane_hal::PeerMemory::register).
    ///
    /// # Safety
    /// The rules of [`register`](peerlane_hal::PeerMemory::register) apply: the slice must outlive the result
    /// and all its imports.
    unsafe fn register_slice<T>(
        &self,
        slice: &CudaSlice<T>,
        stream: &CudaStream,
        role: Role,
    ) -> Result<Local, Error>;
}

impl SliceMemory for Memory {
    unsafe fn register_slice<T>(
        &self,
        slice: &CudaSlice<T>,
        stream: &CudaStream,
        role: Role,
    ) -> Result<Local, Error> {
        let base = slice_base(slice, stream);
        // SAFETY: the caller upholds the contract of `register`.
        unsafe { self.register(base, slice.num_bytes() as u64, role) }
    }
}

/// Returns the address of a slice of the crate cudarc, and lets `stream` wait for the last write to the slice.
pub fn slice_base<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> NonNull<u8> {
    let (address, _synced) = slice.device_ptr(stream);
    // The address of a slice without elements can be 0.
    NonNull::new(address as *mut u8).unwrap_or(NonNull::dangling())
}

/// Gives the crate cudarc access to the memory of a region.
pub trait RegionView {
    /// Calls `access` with a cudarc view of the region's first `length` elements.
    ///
    /// # Errors
    /// Returns [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if the region is shorter or not
    /// aligned for `T`.
    ///
    /// # Safety
    /// The bytes must be valid as `T`. No engine may access them during the call, or while work that the call
    /// puts onto streams runs.
    unsafe fn with_view<T, R>(
        &self,
        stream: &Arc<CudaStream>,
        length: usize,
        access: impl FnOnce(CudaViewMut<'_, T>) -> R,
    ) -> Result<R, Error>;
}

impl RegionView for Local {
    unsafe fn with_view<T, R>(
        &self,
        stream: &Arc<CudaStream>,
        length: usize,
        access: impl FnOnce(CudaViewMut<'_, T>) -> R,
    ) -> Result<R, Error> {
        let required = length.checked_mul(size_of::<T>()).map(|bytes| bytes as u64);
        let (address, bytes) = (self.device_ptr(), self.bytes());
        if required.is_none_or(|required| required > bytes)
            || !address.is_multiple_of(align_of::<T>() as u64)
        {
            return Err(Fault::Argument(format!(
                "the region of {bytes} bytes at {address:#x} is too small or misaligned for \
                 {length} elements of type {}",
                std::any::type_name::<T>()
            ))
            .into());
        }
        // SAFETY: the span was checked above; the caller vouches for the contents. `Unowned` prevents cudarc
        // from freeing the memory.
        let slice = unsafe { stream.upgrade_device_ptr::<T>(address, length) };
        let mut unowned = Unowned(Some(slice));
        let slice = unowned.0.as_mut().expect("the slice is present until the drop");
        Ok(access(slice.as_view_mut()))
    }
}

/// A cudarc slice that does not free its memory when dropped, even if a closure panics.
struct Unowned<T>(Option<CudaSlice<T>>);

impl<T> Drop for Unowned<T> {
    fn drop(&mut self) {
        if let Some(slice) = self.0.take() {
            let _ = slice.leak();
        }
    }
}
