//! Holds the device of a rank.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError};
use peerlane_tests::{Failure, GpuDriver, Outcome};

use super::memory::{DeviceMemory, Pinned};
use super::stream::CallerStream;

/// A device, whose context is current on this thread.
#[derive(Clone)]
pub(crate) struct Gpu {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) ordinal: u32,
    pub(crate) driver: GpuDriver,
}

impl Gpu {
    /// The device that `rank` has when ranks take the devices in turn.
    pub(crate) fn of_rank(driver: GpuDriver, rank: usize) -> Outcome<Self> {
        let ordinal = u32::try_from(rank).unwrap_or(0) % driver.devices::<super::Context>()?;
        Self::open(driver, ordinal)
    }

    pub(crate) fn open(driver: GpuDriver, ordinal: u32) -> Outcome<Self> {
        let context = CudaContext::new(ordinal as usize).map_err(refused("open the device"))?;
        Ok(Self { context, ordinal, driver })
    }

    /// Goes back to it, where another one was opened since.
    pub(crate) fn make_current(&self) -> Outcome {
        self.context.bind_to_thread().map_err(refused("make the device current"))
    }

    /// A stream of the caller, that no other stream waits for by itself.
    pub(crate) fn stream(&self) -> Outcome<CallerStream> {
        CallerStream::new(self)
    }

    pub(crate) fn memory(&self, bytes: usize) -> Outcome<DeviceMemory> {
        DeviceMemory::new(self, bytes)
    }

    pub(crate) fn pinned(&self, bytes: usize) -> Outcome<Pinned> {
        Pinned::new(self, bytes)
    }
}

/// The driver's refusal of `what`.
pub(crate) fn refused(what: impl fmt::Display) -> impl FnOnce(DriverError) -> Failure {
    move |error| Failure::new(format!("{what}: {error:?}"))
}
