//! On which driver the tests of the CUDA backend run.

use std::path::Path;

use peerlane_cuda::Error;

/// Chooses the driver: `device` or `simulated`; without it, GPUs where there are any.
const CHOICE: &str = "PEERLANE_TEST_CUDA";
/// What the kernel module makes when it is loaded.
const KERNEL_DEVICE: &str = "/dev/nvidiactl";

/// A driver that tests run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaDriver {
    /// NVIDIA's, on GPUs.
    Device,
    /// The simulated one of this repository.
    Simulated,
}

impl CudaDriver {
    /// What the environment asks for, or what there is. The simulated driver is loaded here, before
    /// anybody asks for the real one; a test program calls it first thing.
    ///
    /// # Panics
    /// For an unknown choice, or if the simulated driver cannot be loaded: then no test can run.
    pub fn load() -> Self {
        let driver = match std::env::var(CHOICE).as_deref() {
            Ok("device") => Self::Device,
            Ok("simulated") => Self::Simulated,
            Ok(other) => panic!("{CHOICE} is {other:?}, wanted \"device\" or \"simulated\""),
            Err(_) if Path::new(KERNEL_DEVICE).exists() => Self::Device,
            Err(_) => Self::Simulated,
        };
        if driver == Self::Simulated {
            peerlane_simulated_driver::install();
        }
        driver
    }

    /// The first part of every check's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "cuda",
            Self::Simulated => "cuda-simulated",
        }
    }

    /// How many devices it has.
    ///
    /// # Errors
    /// If there is none.
    pub fn devices(self) -> Result<u32, Error> {
        let devices = peerlane_cuda::discover()?;
        Ok(u32::try_from(devices.len().max(1)).unwrap_or(u32::MAX))
    }
}
