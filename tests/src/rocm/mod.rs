//! What the harness of GPUs asks of the ROCm backend.

mod memory;

use std::sync::Arc;

use peerlane_rocm::{Context, Error, Options};
use peerlane_simulated_driver::{Driver, Rocm};

use crate::gpu::{Gpu, GpuHarness};
use crate::harness::OwnMemory;

/// The harness of the ROCm backend.
pub type RocmHarness = GpuHarness<Context>;

/// Which release the simulated driver is of, where it is not the newest.
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
        Arc::new(memory::DeviceMemory::zeroed(device, bytes))
    }
}
