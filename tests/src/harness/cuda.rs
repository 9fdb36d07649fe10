//! Describes the CUDA backend to [`GpuHarness`].
//!
//! Device memory comes from cudarc, as for the backend's users.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};
use peerlane_cuda::{Context, Error, Options};
use peerlane_simulated_driver::Driver;

use peerlane_conformance::OwnMemory;

use super::gpu::{Gpu, GpuHarness};

/// The harness of the CUDA backend.
pub type CudaHarness = GpuHarness<Context>;

impl Gpu for Context {
    const NAME: &'static str = "cuda";
    const CHOICE: &'static str = "PEERLANE_TEST_CUDA";
    const KERNEL_DEVICE: &'static str = "/dev/nvidiactl";

    fn simulate() -> Driver {
        peerlane_simulated_driver::install()
    }

    fn count() -> Result<usize, Error> {
        Ok(peerlane_cuda::discover()?.len())
    }

    fn options_on(device: u32, options: &Options) -> Options {
        Options { device, ..options.clone() }
    }

    fn zeroed(device: u32, bytes: u64) -> Arc<dyn OwnMemory> {
        Arc::new(DeviceMemory::zeroed(device, bytes))
    }
}

/// Device memory that the test allocated with `cuMemAlloc`.
struct DeviceMemory {
    context: Arc<CudaContext>,
    base: sys::CUdeviceptr,
    bytes: u64,
}

impl DeviceMemory {
    /// Allocates zeroed memory on a device.
    ///
    /// # Panics
    /// If the driver refuses.
    fn zeroed(device: u32, bytes: u64) -> Self {
        let context = CudaContext::new(device as usize).expect("a device of the harness");
        let size = usize::try_from(bytes.max(1)).expect("own memory fits the address space");
        // SAFETY: the context is current on this thread since it was made.
        let base = unsafe { result::malloc_sync(size) }.expect("memory for a check");
        // SAFETY: the allocation is `size` bytes long, and only this function knows it.
        unsafe { result::memset_d8_sync(base, 0, size) }.expect("zero the memory of a check");
        Self { context, base, bytes }
    }
}

// SAFETY: the value owns the allocation, which is so long and is freed when the value is dropped.
unsafe impl OwnMemory for DeviceMemory {
    fn base(&self) -> NonNull<u8> {
        NonNull::new(self.base as *mut u8).expect("an allocation is not at 0")
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // A drop cannot report an error. What could not be freed stays allocated.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the rendezvous of a check keeps the memory until all ranks have ended.
            let _ = unsafe { result::free_sync(self.base) };
        }
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
