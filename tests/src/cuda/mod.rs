//! The harness of the CUDA backend, over GPUs or over the simulated driver.

mod driver;
mod memory;

use std::cell::Cell;

use peerlane_cuda::{Error, Fabric, Local, Options};
use peerlane_hal::Rank;

use crate::harness::{Harness, OwnMemory};

pub use driver::CudaDriver;

use std::sync::Arc;

thread_local! {
    /// The device of the rank that this thread plays.
    static DEVICE: Cell<u32> = const { Cell::new(0) };
}

/// The CUDA backend with any options; ranks take the devices in turn.
#[derive(Clone, Debug)]
pub struct CudaHarness {
    name: String,
    driver: CudaDriver,
    options: Options,
}

impl CudaHarness {
    /// The CUDA backend under a name of its own, behind that of the driver.
    pub fn new(name: &str, driver: CudaDriver, options: Options) -> Self {
        let name = format!("{}{name}", driver.name());
        Self { name, driver, options }
    }
}

impl Harness for CudaHarness {
    type Fabric = Fabric;

    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<Fabric, Error> {
        let device = rank.0 % self.driver.devices()?;
        DEVICE.set(device);
        Fabric::open_with(rank, ranks, Options { device, ..self.options.clone() })
    }

    // Without a GPU the simulated driver takes its place, so nothing excuses absence.
    fn required(&self) -> bool {
        true
    }

    fn write(&self, region: &Local, offset: u64, bytes: &[u8]) {
        region.upload(offset, bytes).expect("a check writes inside its own region");
    }

    fn read(&self, region: &Local, offset: u64, bytes: &mut [u8]) {
        region.download(offset, bytes).expect("a check reads inside its own region");
    }

    fn own_memory(&self, bytes: u64) -> Option<Arc<dyn OwnMemory>> {
        Some(Arc::new(memory::DeviceMemory::zeroed(DEVICE.get(), bytes)))
    }
}
