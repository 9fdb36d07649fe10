//! Which NVIDIA GPUs this process may use, what they can do, and how they reach each other.
//!
//! Ordinals count the devices that `CUDA_VISIBLE_DEVICES` leaves; two processes may give one device
//! different ordinals, so peers name devices by UUID.
//!
//! The number of copy engines (`asyncEngineCount`) bounds how many copies an engine keeps in flight,
//! because more at once collapse.

mod context;
mod link;
mod probe;
mod visible;

use std::ffi::c_int;
use std::sync::Arc;

pub use context::Context;
pub(crate) use link::between;
pub use link::{DeviceLink, link};
pub use probe::{HandleTrials, try_handles};
pub(crate) use visible::{attribute, find};

use crate::error::Error;
use crate::sys::{self, Driver};

/// Who may use a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ComputeMode {
    /// Any number of processes.
    Shared,
    /// One process at a time.
    ExclusiveProcess,
    /// Nobody.
    Prohibited,
    /// One that this crate does not know, as the driver numbers it.
    Unknown(i32),
}

impl ComputeMode {
    fn of(number: c_int) -> Self {
        match number {
            sys::COMPUTE_MODE_DEFAULT => Self::Shared,
            sys::COMPUTE_MODE_EXCLUSIVE_PROCESS => Self::ExclusiveProcess,
            sys::COMPUTE_MODE_PROHIBITED => Self::Prohibited,
            other => Self::Unknown(other),
        }
    }
}

/// What the driver says that a device can do. It may say yes where the deed is refused:
/// [`try_handles`] does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Abilities {
    /// Physical memory and addresses can be had apart (`cuMemCreate`, `cuMemMap`).
    pub virtual_memory: bool,
    /// Such memory can leave the process as a file descriptor.
    pub posix_handles: bool,
    /// Such memory can leave the host over NVLink.
    pub fabric_handles: bool,
    /// Memory can be given to a NIC as a dma-buf.
    pub dma_buf: bool,
    /// Memory of [`virtual_memory`](Self::virtual_memory) can be made fit for a NIC.
    pub rdma_virtual_memory: bool,
    /// Streams can write and wait for 64-bit words.
    pub stream_values_64: bool,
}

/// An NVIDIA GPU, or a part of one (MIG).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// Its number among the devices that this process may use.
    pub ordinal: u32,
    /// The product name.
    pub name: String,
    /// Names the device, or the MIG instance, for all processes.
    pub uuid: [u8; 16],
    /// Where it sits, such as `0000:3b:00.0`.
    pub pci_bus_id: String,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Copies that it does at once beside compute.
    pub copy_engines: u32,
    /// Its multiprocessors.
    pub multiprocessors: u32,
    /// Major and minor version of its instruction set.
    pub compute_capability: (u32, u32),
    /// Who may use it.
    pub compute_mode: ComputeMode,
    /// Whether it is an instance of a divided GPU; instances do not reach each other.
    pub mig: bool,
    /// What it can do.
    pub abilities: Abilities,
}

impl Device {
    /// The device in texts, such as `device 2 (NVIDIA H200)`.
    pub(crate) fn label(&self) -> Arc<str> {
        format!("device {} ({})", self.ordinal, self.name).into()
    }

    /// The UUID as nvidia-smi and `CUDA_VISIBLE_DEVICES` write it.
    pub fn uuid_text(&self) -> String {
        uuid_text(&self.uuid, self.mig)
    }
}

/// A UUID as nvidia-smi writes it.
pub(crate) fn uuid_text(uuid: &[u8; 16], mig: bool) -> String {
    let mut text = String::from(if mig { "MIG-" } else { "GPU-" });
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The NVIDIA GPUs that this process may use; at least one.
///
/// # Errors
/// Of kind [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): there is no driver, it is too old
/// or does not start, or there is no device. The text says what to do.
pub fn discover() -> Result<Vec<Device>, Error> {
    let driver = Driver::load()?;
    visible::all(driver)
}

/// The version of CUDA that the driver supports, such as `(13, 0)`.
///
/// # Errors
/// As [`discover`].
pub fn driver_version() -> Result<(u32, u32), Error> {
    let driver = Driver::load()?;
    let mut version = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (driver.driver_get_version)(&raw mut version) };
    if code != sys::CUDA_SUCCESS {
        return Err(Error::driver(driver, "cuDriverGetVersion", None, code));
    }
    let version = version.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_does() {
        let uuid: [u8; 16] = std::array::from_fn(|index| index as u8 * 0x11);
        assert_eq!(uuid_text(&uuid, false), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(&uuid_text(&uuid, true)[..4], "MIG-");
    }
}
