//! What the harness of GPUs asks of the CUDA backend.

mod memory;

use std::sync::Arc;

use peerlane_cuda::{Context, Error, Options};
use peerlane_simulated_driver::Driver;

use crate::gpu::{Gpu, GpuHarness};
use crate::harness::OwnMemory;

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
        Arc::new(memory::DeviceMemory::zeroed(device, bytes))
    }
}
