//! Which memory of the host is near a device.

use std::fs;
use std::path::Path;

use super::PciAddress;

/// Where Linux describes what sits on PCI Express.
pub(super) const DEVICES: &str = "/sys/bus/pci/devices";

/// The NUMA node of the device there, if the system has several and says which.
pub(super) fn node(devices: impl AsRef<Path>, address: PciAddress) -> Option<u32> {
    let file = devices.as_ref().join(address.to_string()).join("numa_node");
    // Without nodes it holds -1.
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_read_where_there_is_one() {
        let root = std::env::temp_dir().join(format!("peerlane-rocm-numa-{}", std::process::id()));
        let address = PciAddress { domain: 0, bus: 0xc1, device: 0, function: 0 };
        assert_eq!(node(&root, address), None);
        let device = root.join("0000:c1:00.0");
        fs::create_dir_all(&device).unwrap();
        for (text, wanted) in [("1\n", Some(1)), ("-1\n", None), ("", None)] {
            fs::write(device.join("numa_node"), text).unwrap();
            assert_eq!(node(&root, address), wanted);
        }
        fs::remove_dir_all(&root).unwrap();
    }
}
