//! Device memory as a caller allocates it, through the functions that callers use: fine-grained,
//! because checks let flags lie there.

use std::fmt;
use std::ptr::NonNull;

use hip_sys::{Library, hipError_t};

use crate::harness::OwnMemory;

/// The caller's own device memory, from `hipExtMallocWithFlags`.
pub(super) struct DeviceMemory {
    library: &'static Library,
    base: NonNull<u8>,
    bytes: u64,
}

// SAFETY: the address of device memory, which any thread may name.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above; the memory itself is only reached through `base`, by the rules of a region.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Zeroed memory of a device.
    ///
    /// # Panics
    /// If the driver refuses.
    pub(super) fn zeroed(device: u32, bytes: u64) -> Self {
        let library = Library::load().expect("the backend has loaded it");
        let device = i32::try_from(device).expect("a device of the harness");
        let size = usize::try_from(bytes.max(1)).expect("own memory fits the address space");
        // SAFETY: changes what this thread has current, which the backend sets at each of its calls.
        granted("hipSetDevice", unsafe { (library.set_device)(device) });
        let mut base = std::ptr::null_mut();
        let grain = hip_sys::hipDeviceMallocFinegrained;
        // SAFETY: the result is stored in a local.
        granted("hipExtMallocWithFlags", unsafe {
            (library.ext_malloc_with_flags)(&raw mut base, size, grain)
        });
        // SAFETY: the allocation is `size` bytes long and nobody else knows it.
        let cleared = unsafe { (library.memset_async)(base, 0, size, std::ptr::null_mut()) };
        granted("hipMemsetAsync", cleared);
        // SAFETY: the default stream lives as long as the process.
        granted("hipStreamSynchronize", unsafe {
            (library.stream_synchronize)(std::ptr::null_mut())
        });
        let base = NonNull::new(base.cast()).expect("an allocation is not at 0");
        Self { library, base, bytes }
    }
}

fn granted(call: &str, result: hipError_t) {
    assert_eq!(result, hipError_t::hipSuccess, "{call} for a check");
}

impl OwnMemory for DeviceMemory {
    fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // What cannot be freed is the driver's; there is nobody to tell.
        // SAFETY: the board of a check keeps the memory until all ranks have ended.
        let _ = unsafe { (self.library.free)(self.base.as_ptr().cast()) };
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
