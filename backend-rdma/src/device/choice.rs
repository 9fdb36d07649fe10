//! Chooses a device, a port and an address.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use ibverbs_sys::{ibv_device_attr, ibv_mtu, ibv_port_attr};
use peerlane_toolkit::device::Fault;

use super::affinity::{PciLocation, SYSFS};
use super::{Device, Gid, GidKind, LinkLayer, Port, describe};
use crate::error::Error;
use crate::sys::{self, Context};

/// The choice of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first device with an active port.
    #[default]
    Any,
    /// The device of this name.
    Name(String),
    /// The device at this position of the list, from 0.
    Index(usize),
    /// The device with an active port that is nearest to the PCI device at this address, such as a GPU at `0000:3b:00.0`; the
    /// first one if several are equally near.
    Near(String),
}

impl DeviceChoice {
    /// Returns whether a device has the requested name or index.
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

/// A selected port, with everything that connecting needs.
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

/// Selects the device, port and address of the options.
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

/// Sorts NICs by their distance from a PCI device. The order of equally near NICs does not change.
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

/// Selects a port and an address of an opened device.
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

/// Returns the requested port, or the first active one.
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

/// Returns the requested address of a port, or the best one.
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

#[cfg(test)]
mod tests {
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
        let machine = crate::device::affinity::tests::machine("choice");
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
}
