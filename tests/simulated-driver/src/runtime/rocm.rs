//! Describes the machine to HIP and HSA: visible agents and versions.

use super::pci;
use super::start::variable;
use super::visible::parse;
use crate::device::settings::Setting;

/// Name of every device.
pub(crate) const NAME: &str = "Simulated Instinct";

/// Flags of a pool for the grain of its memory.
pub(crate) const FINE_GRAINED: u32 = 2;
pub(crate) const COARSE_GRAINED: u32 = 4;

/// The GPUs that the lower runtime sees, numbered as the machine does. Without the kernel driver's
/// node, or the right to open it, there are none.
pub(crate) fn visible_agents() -> Vec<u32> {
    if !has_driver() {
        return Vec::new();
    }
    let devices: Vec<u32> = (0..Setting::Devices.value() as u32).collect();
    let wanted = variable("ROCR_VISIBLE_DEVICES");
    parse(wanted.as_deref(), &devices, |device| format!("GPU-{}", pci::unique_id(device)))
}

/// Whether the lower runtime starts at all.
pub(crate) fn has_driver() -> bool {
    Setting::KernelDriver.is("there")
}

/// As HIP counts: 6.4.43482 is 60443482.
pub(crate) fn hip_version() -> u64 {
    let rocm = Setting::RocmVersion.value();
    let (major, minor) = (rocm / 10_000, rocm / 100 % 100);
    major * 10_000_000 + minor * 100_000 + 43_482
}
