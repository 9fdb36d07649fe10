//! The harness of a backend for GPUs, over devices or over the simulated driver.

mod driver;

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use peerlane_hal::Rank;
use peerlane_toolkit::device::DeviceContext;
use peerlane_toolkit::peers::{Fabric, PeerDevice};
use peerlane_toolkit::regions::Local;

use crate::harness::{Harness, OwnMemory};

pub use driver::GpuDriver;

/// The error of a device.
type ErrorOf<G> = <G as DeviceContext>::Error;

/// A vendor's device, as tests ask for it.
pub trait Gpu: PeerDevice {
    /// The first part of every check's name.
    const NAME: &'static str;
    /// Chooses the driver: `device` or `simulated`; without it, GPUs where there are any.
    const CHOICE: &'static str;
    /// What the kernel's module makes when it is loaded.
    const KERNEL_DEVICE: &'static str;

    /// Lets this process have the simulated driver.
    fn simulate() -> peerlane_simulated_driver::Driver;

    /// How many devices there are.
    ///
    /// # Errors
    /// If there is none.
    fn count() -> Result<usize, ErrorOf<Self>>;

    /// The options for another device.
    fn options_on(device: u32, options: &Self::Options) -> Self::Options;

    /// Zeroed memory of a device, from the allocator that callers use.
    fn zeroed(device: u32, bytes: u64) -> Arc<dyn OwnMemory>;
}

thread_local! {
    /// The device of the rank that this thread plays.
    static DEVICE: Cell<u32> = const { Cell::new(0) };
}

/// A backend with any options; ranks take the devices in turn.
pub struct GpuHarness<G: Gpu> {
    name: String,
    driver: GpuDriver,
    options: G::Options,
}

impl<G: Gpu> GpuHarness<G> {
    /// The backend under a name of its own, behind that of the driver.
    pub fn new(name: &str, driver: GpuDriver, options: G::Options) -> Self {
        let name = format!("{}{name}", driver.name::<G>());
        Self { name, driver, options }
    }
}

impl<G: Gpu> fmt::Debug for GpuHarness<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuHarness").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<G: Gpu> Harness for GpuHarness<G>
where
    G::Options: Sync,
{
    type Fabric = Fabric<G>;

    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<Fabric<G>, ErrorOf<G>> {
        let device = rank.0 % self.driver.devices::<G>()?;
        DEVICE.set(device);
        Fabric::open_with(rank, ranks, G::options_on(device, &self.options))
    }

    // Without a GPU the simulated driver takes its place, so nothing excuses absence.
    fn required(&self) -> bool {
        true
    }

    fn write(&self, region: &Local<G>, offset: u64, bytes: &[u8]) {
        region.upload(offset, bytes).expect("a check writes inside its own region");
    }

    fn read(&self, region: &Local<G>, offset: u64, bytes: &mut [u8]) {
        region.download(offset, bytes).expect("a check reads inside its own region");
    }

    fn own_memory(&self, bytes: u64) -> Option<Arc<dyn OwnMemory>> {
        Some(G::zeroed(DEVICE.get(), bytes))
    }
}
