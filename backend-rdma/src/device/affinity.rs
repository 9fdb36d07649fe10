//! Measures the distance between a NIC and another PCI device, such as a GPU.
//!
//! The kernel's tree of devices is the tree of PCI bridges. Two devices behind one switch share the beginning of
//! their path, and data between them need not pass the processor. If they share no bridge, the host bridge and
//! the NUMA node tell what the path crosses.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// The directory in which the kernel shows its devices.
pub(crate) const SYSFS: &str = "/sys";

/// The distance between two devices, from near to far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Distance {
    /// Behind one switch or root port, this number of bridges apart.
    Bridges(u32),
    /// Behind one host bridge of the processor.
    HostBridge,
    /// On one NUMA node.
    MemoryNode,
    /// On different NUMA nodes.
    Far,
    /// Software devices, or devices whose location the kernel does not report.
    Unknown,
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bridges(count) => write!(f, "{count} bridges apart"),
            Self::HostBridge => f.write_str("behind one host bridge"),
            Self::MemoryNode => f.write_str("at one memory node"),
            Self::Far => f.write_str("across processors"),
            Self::Unknown => f.write_str("at an unknown distance"),
        }
    }
}

/// Returns the distance of the NIC `name` from the PCI device at `address`, such as `0000:3b:00.0`.
///
/// # Errors
/// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument): there is no PCI device at that address.
pub fn distance(name: &str, address: &str) -> Result<Distance, Error> {
    let sysfs = Path::new(SYSFS);
    Ok(PciLocation::of_address(sysfs, address)?.distance(PciLocation::of_nic(sysfs, name).as_ref()))
}

/// The location of a PCI device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PciLocation {
    /// The host bridge, the bridges, and the device.
    path: Vec<String>,
    numa_node: Option<u32>,
}

impl PciLocation {
    /// Returns the location of the PCI device at an address, in the notation of the vendors' drivers.
    pub(super) fn of_address(sysfs: &Path, address: &str) -> Result<Self, Error> {
        let location = kernel_notation(address)
            .and_then(|address| Self::at(sysfs, &sysfs.join("bus/pci/devices").join(address)));
        location.ok_or_else(|| {
            Error::argument(format!(
                "device is the one nearest to {address:?}, and there is no PCI device at that address; \
                 expected one of /sys/bus/pci/devices, such as 0000:3b:00.0"
            ))
        })
    }

    /// Returns the location of a NIC, or `None` for a software device.
    pub(super) fn of_nic(sysfs: &Path, name: &str) -> Option<Self> {
        Self::at(sysfs, &sysfs.join("class/infiniband").join(name).join("device"))
    }

    fn at(sysfs: &Path, link: &Path) -> Option<Self> {
        let device: PathBuf = std::fs::canonicalize(link).ok()?;
        let devices = std::fs::canonicalize(sysfs.join("devices")).ok()?;
        let below = device.strip_prefix(devices).ok()?;
        let path: Vec<String> =
            below.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        if !path.first()?.starts_with("pci") {
            return None;
        }
        let numa_node = std::fs::read_to_string(device.join("numa_node")).ok();
        // The kernel reports -1 if there is only one node, or if the firmware does not report it.
        let numa_node = numa_node.and_then(|text| text.trim().parse().ok());
        Some(Self { path, numa_node })
    }

    /// Returns the distance to another device; `None` is a software device.
    pub(super) fn distance(&self, other: Option<&Self>) -> Distance {
        let Some(other) = other else { return Distance::Unknown };
        let same = self.path.iter().zip(&other.path).take_while(|(one, two)| one == two).count();
        match same {
            // Counts the bridge above both, and those on the paths down to each device.
            2.. => {
                let apart = (self.path.len() - same) + (other.path.len() - same);
                Distance::Bridges(apart.saturating_sub(1) as u32)
            }
            1 => Distance::HostBridge,
            _ => match (self.numa_node, other.numa_node) {
                (Some(one), Some(two)) if one == two => Distance::MemoryNode,
                (Some(_), Some(_)) => Distance::Far,
                _ => Distance::Unknown,
            },
        }
    }
}

/// Returns an address in the notation of the kernel: lower case, and four digits of the domain.
fn kernel_notation(address: &str) -> Option<String> {
    let mut parts = address.trim().split(':');
    let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
    let (slot, function) = device.split_once('.')?;
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let [domain, bus, slot, function] =
        [number(domain)?, number(bus)?, number(slot)?, number(function)?];
    parts.next().is_none().then(|| format!("{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"))
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::symlink;

    use peerlane_hal::{Error as _, ErrorKind};

    use super::*;

    /// A simulated machine with two processors, which have one host bridge per switch except for one. Removed when dropped.
    pub(crate) struct Machine(pub(crate) PathBuf);

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const DEVICES: [(&str, &str, &str); 7] = [
        // A GPU and two NICs behind the switch at 0000:11:00.0, one of them behind one more bridge.
        ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", "gpu", "0"),
        ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0", "mlx5_2", "0"),
        (
            "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:02.0/0000:15:00.0/0000:16:00.0",
            "mlx5_3",
            "0",
        ),
        // The same host bridge.
        ("pci0000:10/0000:10:02.0/0000:18:00.0", "mlx5_1", "0"),
        // The same processor, and the other one.
        ("pci0000:20/0000:20:01.0/0000:21:00.0", "mlx5_0", "0"),
        ("pci0000:30/0000:30:01.0/0000:31:00.0", "mlx5_4", "1"),
        ("pci0000:40/0000:40:01.0/0000:41:00.0", "mlx5_5", "-1"),
    ];

    pub(crate) fn machine(name: &str) -> Machine {
        let root = std::env::temp_dir().join(format!("peerlane-{}-{name}", std::process::id()));
        let machine = Machine(root.clone());
        let folder = |path: PathBuf| {
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        let (pci, nics) = (folder(root.join("bus/pci/devices")), root.join("class/infiniband"));
        for (path, name, node) in DEVICES {
            let device = folder(root.join("devices").join(path));
            std::fs::write(device.join("numa_node"), format!("{node}\n")).unwrap();
            symlink(&device, pci.join(device.file_name().unwrap())).unwrap();
            if name != "gpu" {
                symlink(&device, folder(nics.join(name)).join("device")).unwrap();
            }
        }
        // Software devices have no PCI device.
        folder(nics.join("rxe0"));
        machine
    }

    #[test]
    fn the_shared_path_to_the_processor_is_the_distance() {
        let machine = machine("distances");
        let gpu = PciLocation::of_address(&machine.0, "0000:13:00.0").unwrap();
        let distance = |nic| gpu.distance(PciLocation::of_nic(&machine.0, nic).as_ref());
        assert_eq!(distance("mlx5_2"), Distance::Bridges(3));
        assert_eq!(distance("mlx5_3"), Distance::Bridges(4));
        assert_eq!(distance("mlx5_1"), Distance::HostBridge);
        assert_eq!(distance("mlx5_0"), Distance::MemoryNode);
        assert_eq!(distance("mlx5_4"), Distance::Far);
        for nic in ["mlx5_5", "rxe0", "mlx5_77"] {
            assert_eq!(distance(nic), Distance::Unknown, "{nic}");
        }
        let order = ["mlx5_2", "mlx5_3", "mlx5_1", "mlx5_0", "mlx5_4", "rxe0"].map(distance);
        assert!(order.is_sorted(), "{order:?}");
        assert_eq!(order[0].to_string(), "3 bridges apart");
    }

    #[test]
    fn addresses_are_read_as_drivers_write_them() {
        let machine = machine("addresses");
        for address in ["0000:13:00.0", "00000000:13:00.0", "0000:13:00.0\n", "0:13:0.0"] {
            PciLocation::of_address(&machine.0, address).unwrap();
        }
        for address in
            ["", "13:00.0", "0000:13:00", "0000:13:00.0:1", "0000:zz:00.0", "0000:99:00.0"]
        {
            let error = PciLocation::of_address(&machine.0, address).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert_eq!(
                error.to_string(),
                format!(
                    "device is the one nearest to {address:?}, and there is no PCI device at that \
                     address; expected one of /sys/bus/pci/devices, such as 0000:3b:00.0"
                )
            );
        }
        assert_eq!(kernel_notation("0000:3B:0A.1").as_deref(), Some("0000:3b:0a.1"));
    }
}
