//! Device memory as a caller allocates it, through the crate that callers use.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use crate::harness::OwnMemory;

/// The caller's own device memory, from `cuMemAlloc`.
pub(super) struct DeviceMemory {
    context: Arc<CudaContext>,
    base: sys::CUdeviceptr,
    bytes: u64,
}

impl DeviceMemory {
    /// Zeroed memory of a device.
    ///
    /// # Panics
    /// If the driver refuses.
    pub(super) fn zeroed(device: u32, bytes: u64) -> Self {
        let context = CudaContext::new(device as usize).expect("a device of the harness");
        let size = usize::try_from(bytes.max(1)).expect("own memory fits the address space");
        // SAFETY: the context is current on this thread since it was made.
        let base = unsafe { result::malloc_sync(size) }.expect("memory for a check");
        // SAFETY: the allocation is `size` bytes long and nobody else knows it.
        unsafe { result::memset_d8_sync(base, 0, size) }.expect("zero the memory of a check");
        Self { context, base, bytes }
    }
}

impl OwnMemory for DeviceMemory {
    fn base(&self) -> NonNull<u8> {
        NonNull::new(self.base as *mut u8).expect("an allocation is not at 0")
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // What cannot be freed is the driver's; there is nobody to tell.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the board of a check keeps the memory until all ranks have ended.
            let _ = unsafe { result::free_sync(self.base) };
        }
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
