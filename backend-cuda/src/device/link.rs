//! How two devices of this process reach each other.

use std::ffi::c_int;

use peerlane_hal::LinkKind;

use super::visible;
use crate::error::Error;
use crate::sys::{self, CUdevice, Driver};

/// What the driver says of one device's way to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceLink {
    /// Whether the one can read and write the other's memory.
    pub peer_access: bool,
    /// What carries the bytes; meaningless without access.
    pub kind: LinkKind,
    /// The driver's own order of pairs, smaller is faster; `None` where it does not say.
    pub performance_rank: Option<i32>,
}

/// The way from one device of this process to another, by their ordinals.
///
/// # Errors
/// As [`discover`](crate::discover), and
/// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) for an ordinal that is too large.
pub fn link(from: u32, to: u32) -> Result<DeviceLink, Error> {
    let driver = Driver::load()?;
    let (from, _) = visible::open(driver, from)?;
    let (to, _) = visible::open(driver, to)?;
    between(driver, from, to)
}

pub(crate) fn between(driver: &Driver, from: CUdevice, to: CUdevice) -> Result<DeviceLink, Error> {
    if from == to {
        let (peer_access, performance_rank) = (true, None);
        return Ok(DeviceLink { peer_access, kind: LinkKind::Own, performance_rank });
    }
    let mut can = 0;
    // SAFETY: both devices are of this driver; the result is stored in a local.
    let code = unsafe { (driver.device_can_access_peer)(&raw mut can, from, to) };
    if code != sys::CUDA_SUCCESS {
        return Err(Error::driver(driver, "cuDeviceCanAccessPeer", None, code));
    }
    let attribute = |number: c_int| {
        let mut value = 0;
        // SAFETY: as above.
        let code = unsafe { (driver.device_get_p2p_attribute)(&raw mut value, number, from, to) };
        (code == sys::CUDA_SUCCESS).then_some(value)
    };
    // The driver API does not name the wire. Atomic operations on a peer's memory work over NVLink
    // and not over PCI Express, so they tell the two apart.
    let atomics = attribute(sys::P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED) == Some(1);
    Ok(DeviceLink {
        peer_access: can != 0,
        kind: if atomics { LinkKind::NvLink } else { LinkKind::Pcie },
        performance_rank: attribute(sys::P2P_ATTRIBUTE_PERFORMANCE_RANK),
    })
}
