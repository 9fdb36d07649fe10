//! Describes the links between the devices of an AMD machine, and their NUMA nodes.

use super::settings::Setting;

/// Kind of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkKind {
    Pcie,
    Xgmi,
}

/// The link from one device to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) kind: LinkKind,
    pub(crate) hops: u32,
    /// The vendor's distance: 15 for one hop of XGMI.
    pub(crate) weight: u32,
    /// Bandwidth in MB/s.
    pub(crate) bandwidth: u32,
}

impl LinkKind {
    /// Returns the number in `hsa_amd_link_info_type_t`.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Pcie => 2,
            Self::Xgmi => 4,
        }
    }
}

/// Returns the link of two devices: XGMI in a hive, otherwise PCIe through the processors.
pub(crate) fn between(device: u32, other: u32) -> Link {
    let hive = |device| u64::from(device) / Setting::Hive.value();
    if hive(device) == hive(other) {
        let hops = Setting::XgmiHops.value() as u32;
        let weight = Setting::XgmiWeight.value() as u32 * hops;
        Link { kind: LinkKind::Xgmi, hops, weight, bandwidth: 50_000 }
    } else {
        let hops = if numa_node(device) == numa_node(other) { 2 } else { 3 };
        Link { kind: LinkKind::Pcie, hops, weight: 20 * hops, bandwidth: 16_000 }
    }
}

/// Returns the NUMA node of a device.
pub(crate) fn numa_node(device: u32) -> u32 {
    (u64::from(device) * Setting::NumaNodes.value() / Setting::Devices.value().max(1)) as u32
}
