//! Opens GPU backends, on GPUs or on the simulated driver.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use peerlane_hal::Rank;
use peerlane_toolkit::device::DeviceContext;
use peerlane_toolkit::peers::{Fabric, PeerDevice};
use peerlane_toolkit::regions::Local;

use peerlane_conformance::{Harness, OwnMemory};

/// The error of a device.
type ErrorOf<G> = <G as DeviceContext>::Error;

/// Describes a vendor's GPU backend to the tests.
pub trait Gpu: PeerDevice {
    /// First part of every check's name.
    const NAME: &'static str;
    /// Environment variable that selects the driver: `device` or `simulated`. If it is not set,
    /// tests run on GPUs if the machine has any.
    const CHOICE: &'static str;
    /// File that exists when the kernel's driver is loaded.
    const KERNEL_DEVICE: &'static str;

    /// Loads the simulated driver into this process.
    fn simulate() -> peerlane_simulated_driver::Driver;

    /// Returns the number of devices.
    ///
    /// # Errors
    /// If there is none.
    fn count() -> Result<usize, ErrorOf<Self>>;

    /// Returns the options for another device.
    fn options_on(device: u32, options: &Self::Options) -> Self::Options;

    /// Allocates zeroed device memory with the allocator that users of the vendor's API call.
    fn zeroed(device: u32, bytes: u64) -> Arc<dyn OwnMemory>;
}

/// Runs checks on a GPU backend with any options; ranks take the devices in turn.
pub struct GpuHarness<G: Gpu> {
    name: String,
    driver: GpuDriver,
    options: G::Options,
}

impl<G: Gpu> GpuHarness<G> {
    /// Creates a harness whose name is the driver's, followed by `name`.
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
        Fabric::open_with(rank, ranks, G::options_on(device, &self.options))
    }

    // Without a GPU the simulated driver is used, so the backend is always available.
    fn required(&self) -> bool {
        true
    }

    fn write(&self, region: &Local<G>, offset: u64, bytes: &[u8]) {
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { region.upload(offset, bytes) }.expect("a check writes inside its own region");
    }

    fn read(&self, region: &Local<G>, offset: u64, bytes: &mut [u8]) {
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { region.download(offset, bytes) }.expect("a check reads inside its own region");
    }

    fn own_memory(&self, rank: Rank, bytes: u64) -> Option<Arc<dyn OwnMemory>> {
        let devices = self.driver.devices::<G>().ok()?;
        Some(G::zeroed(rank.0 % devices, bytes))
    }
}

/// The driver that tests run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuDriver {
    /// The vendor's driver, on GPUs.
    Device,
    /// The simulated driver of this repository.
    Simulated,
}

impl GpuDriver {
    /// Selects the driver from the environment, or from the hardware, and loads the simulated one
    /// if it is selected.
    ///
    /// A test program calls it first, because the simulated driver must be loaded before any lookup
    /// of the real one.
    ///
    /// # Panics
    /// For an unknown choice, or if the simulated driver cannot be loaded: then no test can run.
    pub fn load<G: Gpu>() -> Self {
        let driver = match std::env::var(G::CHOICE).as_deref() {
            Ok("device") => Self::Device,
            Ok("simulated") => Self::Simulated,
            Ok(other) => {
                panic!("{} is {other:?}, expected \"device\" or \"simulated\"", G::CHOICE)
            }
            Err(_) if Path::new(G::KERNEL_DEVICE).exists() => Self::Device,
            Err(_) => Self::Simulated,
        };
        if driver == Self::Simulated {
            G::simulate();
        }
        driver
    }

    /// Returns the value of the environment variable that selects this driver.
    pub fn choice(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Simulated => "simulated",
        }
    }

    /// Returns the first part of every check's name.
    pub fn name<G: Gpu>(self) -> String {
        match self {
            Self::Device => G::NAME.to_owned(),
            Self::Simulated => format!("{}-simulated", G::NAME),
        }
    }

    /// Returns whether ranks of a check share a GPU, whose queues the ranks of a process share. Checks have up to five ranks.
    pub fn shares_devices<G: Gpu>(self) -> bool {
        self == Self::Device && matches!(self.devices::<G>(), Ok(1..5))
    }

    /// Returns the number of devices, at least 1.
    ///
    /// # Errors
    /// If the devices cannot be counted.
    pub fn devices<G: Gpu>(self) -> Result<u32, ErrorOf<G>> {
        Ok(u32::try_from(G::count()?.max(1)).unwrap_or(u32::MAX))
    }
}
