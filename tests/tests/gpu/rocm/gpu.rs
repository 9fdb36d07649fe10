//! Holds the device of a rank.

use std::fmt;

use hip_sys::{Library, hipError_t};
use peerlane_tests::{Failure, GpuDriver, Outcome};

use super::memory::{DeviceMemory, Pinned};
use super::stream::CallerStream;

/// A device, which is current on this thread.
#[derive(Clone)]
pub(crate) struct Gpu {
    pub(crate) hip: &'static Library,
    pub(crate) ordinal: u32,
    pub(crate) driver: GpuDriver,
}

impl Gpu {
    /// The device that `rank` has when ranks take the devices in turn.
    pub(crate) fn of_rank(driver: GpuDriver, rank: usize) -> Outcome<Self> {
        let devices = driver.devices::<super::Context>()?;
        Self::open(driver, u32::try_from(rank).unwrap_or(0) % devices)
    }

    pub(crate) fn open(driver: GpuDriver, ordinal: u32) -> Outcome<Self> {
        let hip = Library::load().map_err(|error| Failure::new(error.to_string()))?;
        let gpu = Self { hip, ordinal, driver };
        gpu.make_current()?;
        Ok(gpu)
    }

    /// Goes back to it, where another one was opened since.
    pub(crate) fn make_current(&self) -> Outcome {
        // SAFETY: changes what this thread has current, which the backend leaves as it is.
        granted("hipSetDevice", unsafe { (self.hip.set_device)(self.ordinal.cast_signed()) })
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

/// Whether HIP did `what`.
pub(crate) fn granted(what: impl fmt::Display, code: hipError_t) -> Outcome {
    match code {
        hipError_t::hipSuccess => Ok(()),
        code => Err(Failure::new(format!("{what}: {code:?}"))),
    }
}
