//! Memory of the crate `cudarc`, in and out.
//!
//! Both sides use the device's primary context, so that pointers are the same. A stream converts by
//! `Stream::from`. Memory that cudarc allocates comes from a stream-ordered pool on most devices,
//! which has no handle that leaves its process: it can be put from, and not be received into by a
//! peer. For that, allocate here and look at it through [`RegionView::with_view`].

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaViewMut, DevicePtr as _};
use peerlane_hal::{PeerMemory as _, Region as _, Role};
use peerlane_toolkit::device::Fault;

use crate::error::Error;
use crate::memory::{Local, Memory};

/// Memory that takes slices of cudarc.
pub trait SliceMemory {
    /// Registers a slice of cudarc. What `stream` holds now may still write to it: start behind that
    /// stream.
    ///
    /// # Errors
    /// As [`register`](peerlane_hal::PeerMemory::register).
    ///
    /// # Safety
    /// As for [`register`](peerlane_hal::PeerMemory::register): the slice outlives the result and all
    /// its imports.
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
        let (address, _synced) = slice.device_ptr(stream);
        let base = NonNull::new(address as *mut u8).unwrap_or(NonNull::dangling());
        // SAFETY: the caller's.
        unsafe { self.register(base, slice.num_bytes() as u64, role) }
    }
}

/// A region that cudarc looks at.
pub trait RegionView {
    /// Looks at the first `length` elements of the region as a view of cudarc, for as long as the
    /// call lasts.
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument): the region is shorter, or not
    /// aligned for `T`.
    ///
    /// # Safety
    /// The bytes are valid as `T`, and no engine touches them while the call lasts, or what the
    /// call puts onto streams.
    unsafe fn with_view<T, R>(
        &self,
        stream: &Arc<CudaStream>,
        length: usize,
        look: impl FnOnce(CudaViewMut<'_, T>) -> R,
    ) -> Result<R, Error>;
}

impl RegionView for Local {
    unsafe fn with_view<T, R>(
        &self,
        stream: &Arc<CudaStream>,
        length: usize,
        look: impl FnOnce(CudaViewMut<'_, T>) -> R,
    ) -> Result<R, Error> {
        let wanted = length.checked_mul(size_of::<T>()).map(|bytes| bytes as u64);
        let (address, bytes) = (self.device_ptr(), self.bytes());
        if wanted.is_none_or(|wanted| wanted > bytes)
            || !address.is_multiple_of(align_of::<T>() as u64)
        {
            return Err(Fault::Argument(format!(
                "the region of {bytes} bytes at {address:#x} holds no {length} elements of {}",
                std::any::type_name::<T>()
            ))
            .into());
        }
        // SAFETY: the span was checked, the rest is the caller's. `Lent` gives the memory up again.
        let slice = unsafe { stream.upgrade_device_ptr::<T>(address, length) };
        let mut lent = Lent(Some(slice));
        let slice = lent.0.as_mut().expect("it is there until it is dropped");
        Ok(look(slice.as_view_mut()))
    }
}

/// A slice that does not free its memory, also if the closure panics.
struct Lent<T>(Option<CudaSlice<T>>);

impl<T> Drop for Lent<T> {
    fn drop(&mut self) {
        if let Some(slice) = self.0.take() {
            let _ = slice.leak();
        }
    }
}
