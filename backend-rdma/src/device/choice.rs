//! Chooses the RDMA device, port and address of a rank, and measures the distance of PCI devices.
//!
//! The kernel's tree of devices is the tree of PCI bridges. Two devices behind one switch share the beginning
//! of their path, and data between them need not pass the processor. If they share no bridge, the host bridge
//! and the NUMA node tell what the path crosses.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ibverbs_sys::{ibv_device_attr, ibv_mtu, ibv_port_attr};
use peerlane_toolkit::Fault;

use super::{Device, Gid, GidKind, LinkLayer, Port, describe};
use crate::error::Error;
use crate::sys::{self, Context};

/// Selects the RDMA device to open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first RDMA device with an active port.
    #[default]
    Any,
    /// The RDMA device with this name, such as `mlx5_0`.
    Name(String),
    /// The RDMA device at this position of the list of devices, from 0.
    Index(usize),
    /// The RDMA device nearest to the PCI device at this address, such as the GPU at `0000:3b:00.0`. It has
    /// an active port, and is the first one if several are equally near.
    Near(String),
}

impl DeviceChoice {
    fn matches(&self, index: usize, name: &str) -> bool {
        match self {
            Self::Any | Self::Near(_) => true,
            Self::Name(requested) => requested == name,
            Self::Index(requested) => *requested == index,
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::Name(name) => write!(f, "{name:?}"),
            Self::Index(index) => write!(f, "number {index}"),
            Self::Near(address) => write!(f, "near {address}"),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct OpenPort {
    pub(crate) context: Arc<Context>,
    pub(crate) limits: ibv_device_attr,
    pub(crate) number: u8,
    pub(crate) link: LinkLayer,
    pub(crate) lid: u16,
    pub(crate) gid: Gid,
    pub(crate) mtu: ibv_mtu,
    pub(crate) message_bytes_max: u32,
    pub(crate) bytes_per_second: Option<f64>,
}

pub(crate) fn choose(
    device: &DeviceChoice,
    port: Option<u8>,
    gid: Option<u32>,
) -> Result<OpenPort, Error> {
    let library = sys::library()?;
    let mut contexts = sys::open_all(library, |index, name| device.matches(index, name))?;
    if let DeviceChoice::Near(address) = device {
        sort_by_distance(Path::new(SYSFS), &mut contexts, address, |context| &context.name)?;
    }
    if contexts.is_empty() {
        return Err(none_found(device, &sys::names(library)?));
    }
    let mut refused = Vec::new();
    for context in contexts {
        match open_port(&context, port, gid) {
            Err(Error::Fault(Fault::Unavailable(text))) => refused.push(text),
            result => return result,
        }
    }
    Err(Error::unavailable(refused.join("; ")))
}

/// Sorts NICs by their distance from a PCI device, and keeps the order of NICs that are equally near.
fn sort_by_distance<T>(
    sysfs: &Path,
    nics: &mut [T],
    address: &str,
    name: impl Fn(&T) -> &str,
) -> Result<(), Error> {
    let near = PciLocation::of_address(sysfs, address)?;
    nics.sort_by_cached_key(|nic| near.distance(PciLocation::of_nic(sysfs, name(nic)).as_ref()));
    Ok(())
}

fn none_found(device: &DeviceChoice, names: &[String]) -> Error {
    if names.is_empty() {
        return Error::unavailable(
            "there is no RDMA device: see `rdma link` and /sys/class/infiniband; for tests, soft RoCE \
             makes one of a network interface: `rdma link add rxe0 type rxe netdev eth0`"
                .to_owned(),
        );
    }
    let names = names.join(", ");
    Error::unavailable(format!("there is no RDMA device {device}; there are: {names}"))
}

fn open_port(
    context: &Arc<Context>,
    port: Option<u8>,
    gid: Option<u32>,
) -> Result<OpenPort, Error> {
    let limits = context.attributes()?;
    let device = describe(context)?;
    let found = port_of(&device, port)?;
    let gid = gid_of(&device.name, found, gid)?;
    let attributes: ibv_port_attr = context.port(found.number)?;
    Ok(OpenPort {
        context: Arc::clone(context),
        limits,
        number: found.number,
        link: found.link,
        lid: attributes.lid,
        gid,
        mtu: attributes.active_mtu,
        message_bytes_max: found.message_bytes_max,
        bytes_per_second: found.bytes_per_second,
    })
}

fn port_of(device: &Device, requested: Option<u8>) -> Result<&Port, Error> {
    let name = &device.name;
    let named = |port: &&Port| requested.is_none_or(|requested| requested == port.number);
    if let Some(requested) = requested.filter(|_| !device.ports.iter().any(|port| named(&port))) {
        let count = device.ports.len();
        return Err(Error::argument(format!("port is {requested}, {name} has 1 to {count}")));
    }
    let mut ports = device.ports.iter().filter(named);
    ports.clone().find(|port| port.active).ok_or_else(|| {
        let states: Vec<String> =
            ports.by_ref().map(|port| format!("port {} is {}", port.number, port.state)).collect();
        let states = states.join(", ");
        Error::unavailable(format!("{name} has no active port: {states}; see `rdma link`"))
    })
}

fn gid_of(name: &str, port: &Port, requested: Option<u32>) -> Result<Gid, Error> {
    let available = || {
        let gids: Vec<String> = port.gids.iter().map(ToString::to_string).collect();
        if gids.is_empty() { "none".to_owned() } else { gids.join(", ") }
    };
    if let Some(requested) = requested {
        let found = port.gids.iter().find(|gid| gid.index == requested);
        return found.copied().ok_or_else(|| {
            let (number, available) = (port.number, available());
            Error::argument(format!(
                "gid_index is {requested}, port {number} of {name} has no address there; it has: {available}"
            ))
        });
    }
    let best = port.best_gid();
    if port.link != LinkLayer::Ethernet {
        return Ok(best.unwrap_or(Gid { index: 0, bytes: [0; 16], kind: GidKind::InfiniBand }));
    }
    best.ok_or_else(|| {
        let (number, available) = (port.number, available());
        Error::unavailable(format!(
            "port {number} of {name} has no address that other hosts reach; it has: {available}; give its \
             network interface an IP address, or choose one by gid_index"
        ))
    })
}

const SYSFS: &str = "/sys";

/// The distance between two PCI devices, ordered from near to far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Distance {
    /// The devices are behind one PCI switch or root port, this number of bridges apart.
    Bridges(u32),
    /// The devices are behind one host bridge of the processor.
    HostBridge,
    /// The devices are on one NUMA node, behind different host bridges.
    NumaNode,
    /// The devices are on different NUMA nodes.
    OtherNumaNode,
    /// The location of a device is unknown, for example because it is a software device.
    Unknown,
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bridges(count) => write!(f, "{count} bridges apart"),
            Self::HostBridge => f.write_str("behind one host bridge"),
            Self::NumaNode => f.write_str("on one NUMA node"),
            Self::OtherNumaNode => f.write_str("on different NUMA nodes"),
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

#[derive(Clone, Debug, PartialEq, Eq)]
struct PciLocation {
    /// The names of the host bridge, the PCI bridges below it, and the device, in this order.
    path: Vec<String>,
    numa_node: Option<u32>,
}

impl PciLocation {
    fn of_address(sysfs: &Path, address: &str) -> Result<Self, Error> {
        let location = kernel_notation(address)
            .and_then(|address| Self::at(sysfs, &sysfs.join("bus/pci/devices").join(address)));
        location.ok_or_else(|| {
            Error::argument(format!(
                "device is the one nearest to {address:?}, and there is no PCI device at that address; \
                 expected one of /sys/bus/pci/devices, such as 0000:3b:00.0"
            ))
        })
    }

    /// Returns the location of a NIC in the tree of PCI bridges, or `None` for a software device.
    fn of_nic(sysfs: &Path, name: &str) -> Option<Self> {
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

    fn distance(&self, other: Option<&Self>) -> Distance {
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
                (Some(one), Some(two)) if one == two => Distance::NumaNode,
                (Some(_), Some(_)) => Distance::OtherNumaNode,
                _ => Distance::Unknown,
            },
        }
    }
}

/// Converts a PCI address to the notation of the Linux kernel, which has lower-case digits and a domain of
/// four digits.
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
mod tests {
    use std::os::unix::fs::symlink;

    use peerlane_hal::{Error as _, ErrorKind};

    use super::*;
    use crate::device::tests::gid;

    fn port(number: u8, active: bool, gids: Vec<Gid>) -> Port {
        Port {
            number,
            active,
            state: if active { "active" } else { "down" },
            link: LinkLayer::Ethernet,
            mtu_bytes: 1024,
            bytes_per_second: None,
            message_bytes_max: 1 << 23,
            gids,
        }
    }

    fn device(ports: Vec<Port>) -> Device {
        Device {
            name: "rxe0".into(),
            firmware: String::new(),
            node_guid: 1,
            pci: None,
            queue_pairs_max: 1000,
            region_bytes_max: u64::MAX,
            completion_vectors: 1,
            ports,
        }
    }

    #[test]
    fn the_first_active_port_is_taken_and_a_missing_one_is_named() {
        let two = device(vec![port(1, false, vec![]), port(2, true, vec![])]);
        assert_eq!(port_of(&two, None).unwrap().number, 2);
        let error = port_of(&two, Some(1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(error.to_string(), "rxe0 has no active port: port 1 is down; see `rdma link`");
        let error = port_of(&two, Some(3)).unwrap_err();
        assert_eq!(error.to_string(), "port is 3, rxe0 has 1 to 2");
    }

    #[test]
    fn the_best_address_is_taken_and_link_local_only_on_demand() {
        let local = gid(0, "fe80::1", GidKind::RoceV2);
        let old = gid(1, "10.0.0.1", GidKind::RoceV1);
        let best = gid(2, "10.0.0.1", GidKind::RoceV2);
        let later = gid(3, "10.0.0.2", GidKind::RoceV2);
        let full = port(1, true, vec![local, old, best, later]);
        assert_eq!(gid_of("rxe0", &full, None).unwrap(), best);
        assert_eq!(gid_of("rxe0", &full, Some(0)).unwrap(), local);
        let error = gid_of("rxe0", &full, Some(9)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().starts_with("gid_index is 9, port 1 of rxe0 has no address"));
        let error = gid_of("rxe0", &port(1, true, vec![local]), None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("it has: fe80::1 (RoCE v2, index 0)"), "{error}");
    }

    #[test]
    fn the_nearest_nic_comes_first_and_equals_keep_their_order() {
        let machine = machine("choice");
        let mut nics = ["rxe0", "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5"];
        sort_by_distance(&machine.0, &mut nics, "0000:13:00.0", |name| name).unwrap();
        assert_eq!(nics, ["mlx5_2", "mlx5_3", "mlx5_1", "mlx5_0", "mlx5_4", "rxe0", "mlx5_5"]);
        sort_by_distance(&machine.0, &mut nics, "0000:31:00.0", |name| name).unwrap();
        assert_eq!(nics[0], "mlx5_4");
        let error = sort_by_distance(&machine.0, &mut nics, "mlx5_1", |name| name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(
            error.to_string().starts_with("device is the one nearest to \"mlx5_1\""),
            "{error}"
        );
    }

    #[test]
    fn a_missing_device_is_named_with_the_existing_ones() {
        let requested = DeviceChoice::Name("mlx5_7".into());
        let text = none_found(&requested, &["rxe0".into(), "rxe1".into()]).to_string();
        assert_eq!(text, "there is no RDMA device \"mlx5_7\"; there are: rxe0, rxe1");
        assert!(
            none_found(&requested, &[]).to_string().starts_with("there is no RDMA device: see")
        );
    }

    /// A simulated sysfs tree of a machine with two processors. One host bridge has two root ports, the
    /// others have one. Dropping it removes the files.
    struct Machine(PathBuf);

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

    fn machine(name: &str) -> Machine {
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
        assert_eq!(distance("mlx5_0"), Distance::NumaNode);
        assert_eq!(distance("mlx5_4"), Distance::OtherNumaNode);
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
