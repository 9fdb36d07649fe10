//! Describes the ROCm backend to [`GpuHarness`].
//!
//! Device memory comes from the HIP functions that users call. It is fine-grained, because checks
//! place flags there.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use hip_sys::{Library, hipError_t};
use peerlane_rocm::{Context, Error, Options};
use peerlane_simulated_driver::{Driver, Rocm};

use peerlane_conformance::OwnMemory;

use super::gpu::{Gpu, GpuHarness};

/// The harness of the ROCm backend.
pub type RocmHarness = GpuHarness<Context>;

/// Environment variable with the release of the simulated driver; the newest if it is not set.
const RELEASE: &str = "PEERLANE_TEST_ROCM_RELEASE";

impl Gpu for Context {
    const NAME: &'static str = "rocm";
    const CHOICE: &'static str = "PEERLANE_TEST_ROCM";
    const KERNEL_DEVICE: &'static str = "/dev/kfd";

    fn simulate() -> Driver {
        Rocm::release(std::env::var(RELEASE).as_deref().unwrap_or("7.2")).install()
    }

    fn count() -> Result<usize, Error> {
        Ok(peerlane_rocm::discover()?.len())
    }

    fn options_on(device: u32, options: &Options) -> Options {
        Options { device, ..options.clone() }
    }

    fn zeroed(device: u32, bytes: u64) -> Arc<dyn OwnMemory> {
        Arc::new(DeviceMemory::zeroed(device, bytes))
    }
}

/// Device memory that the test allocated with `hipExtMallocWithFlags`.
struct DeviceMemory {
    library: &'static Library,
    base: NonNull<u8>,
    bytes: u64,
}

// SAFETY: it holds the address of device memory, which is valid on any thread.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above; the memory is only accessed through `base`, by the rules of a region.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Allocates zeroed memory on a device.
    ///
    /// # Panics
    /// If the driver refuses.
    fn zeroed(device: u32, bytes: u64) -> Self {
        let library = Library::load().expect("the backend has loaded it");
        let device = i32::try_from(device).expect("a device of the harness");
        let size = usize::try_from(bytes.max(1)).expect("own memory fits the address space");
        // SAFETY: changes this thread's current device, which the backend sets before each of its calls.
        ensure_success("hipSetDevice", unsafe { (library.set_device)(device) });
        let mut base = std::ptr::null_mut();
        let grain = hip_sys::hipDeviceMallocFinegrained;
        // SAFETY: the result is stored in a local.
        ensure_success("hipExtMallocWithFlags", unsafe {
            (library.ext_malloc_with_flags)(&raw mut base, size, grain)
        });
        // SAFETY: the allocation is `size` bytes long, and only this function knows it.
        let cleared = unsafe { (library.memset_async)(base, 0, size, std::ptr::null_mut()) };
        ensure_success("hipMemsetAsync", cleared);
        // SAFETY: the default stream lives as long as the process.
        ensure_success("hipStreamSynchronize", unsafe {
            (library.stream_synchronize)(std::ptr::null_mut())
        });
        let base = NonNull::new(base.cast()).expect("an allocation is not at 0");
        Self { library, base, bytes }
    }
}

fn ensure_success(call: &str, result: hipError_t) {
    assert_eq!(result, hipError_t::hipSuccess, "{call} failed for the memory of a check");
}

// SAFETY: the value owns the allocation, which is so long and is freed when the value is dropped.
unsafe impl OwnMemory for DeviceMemory {
    fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // A drop cannot report an error. What could not be freed stays allocated.
        // SAFETY: the rendezvous of a check keeps the memory until all ranks have ended.
        let _ = unsafe { (self.library.free)(self.base.as_ptr().cast()) };
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
