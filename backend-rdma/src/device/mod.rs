//! Lists the RDMA NICs of this machine with their ports and addresses, and probes their support of dma-bufs.

mod choice;

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use ibverbs_sys::{
    IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET,
    IBV_LINK_LAYER_INFINIBAND, ibv_gid_entry, ibv_mtu, ibv_port_attr, ibv_port_state,
};
use rustix::io::Errno;

use crate::error::Error;
use crate::sys::{self, Context, Domain};

pub use choice::{DeviceChoice, Distance, distance};
pub(crate) use choice::{OpenPort, choose};

/// An RDMA NIC of this machine, with its limits and ports.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// The name of the NIC, such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// The firmware version of the NIC; empty for software devices.
    pub firmware: String,
    /// The node GUID, which identifies the NIC.
    pub node_guid: u64,
    /// The PCI address of the NIC, such as `0000:17:00.0`; `None` for software devices.
    pub pci: Option<String>,
    /// The maximum number of queue pairs that the NIC supports.
    pub queue_pairs_max: u32,
    /// The largest memory region that the NIC can register, in bytes.
    pub region_bytes_max: u64,
    /// The number of interrupts over which the NIC can spread completions.
    pub completion_vectors: u32,
    /// The ports of the NIC, numbered from 1.
    pub ports: Vec<Port>,
}

/// A port of an RDMA NIC, with its state, limits and addresses.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    /// The number of the port on its NIC, from 1.
    pub number: u8,
    /// Whether the port is up and can send and receive data.
    pub active: bool,
    /// The state of the port as text, such as `active` or `down`.
    pub state: &'static str,
    /// The link layer of the port, InfiniBand or Ethernet.
    pub link: LinkLayer,
    /// The largest payload of one packet on the port, in bytes.
    pub mtu_bytes: u32,
    /// The bandwidth of the port in bytes per second and direction, from link width and speed. The value of a
    /// software device means little.
    pub bytes_per_second: Option<f64>,
    /// The largest message that the port can send, in bytes.
    pub message_bytes_max: u32,
    /// The addresses of the port, which are the valid entries of its GID table.
    pub gids: Vec<Gid>,
}

/// The link layer of an RDMA port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkLayer {
    /// An InfiniBand link.
    InfiniBand,
    /// An Ethernet link, which carries RoCE.
    Ethernet,
    /// A link layer other than InfiniBand and Ethernet.
    Other,
}

impl Port {
    /// Returns the address that the port uses by default. With RoCE it is the best one that other hosts
    /// reach, with InfiniBand the first.
    pub fn best_gid(&self) -> Option<Gid> {
        if self.link != LinkLayer::Ethernet {
            return self.gids.first().copied();
        }
        // `max_by_key` returns the last of equals, and the first one is preferred.
        let reachable = self.gids.iter().rev().filter(|gid| gid.preference().is_some());
        reachable.max_by_key(|gid| gid.preference()).copied()
    }
}

/// Lists the RDMA NICs of this machine. The list is empty if the kernel has no RDMA.
///
/// # Errors
/// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): libibverbs is missing or too old, or a device
/// cannot be opened.
pub fn discover() -> Result<Vec<Device>, Error> {
    let contexts = sys::open_all(sys::library()?, |_, _| true)?;
    contexts.iter().map(describe).collect()
}

pub(crate) fn describe(context: &Arc<Context>) -> Result<Device, Error> {
    let attributes = context.attributes()?;
    let ports = (1..=attributes.phys_port_cnt)
        .map(|number| context.port(number).map(|port| describe_port(context, number, &port)))
        .collect::<Result<_, _>>()?;
    let firmware = attributes.fw_ver.iter().map(|byte| byte.to_ne_bytes()[0]);
    let firmware: Vec<u8> = firmware.take_while(|byte| *byte != 0).collect();
    Ok(Device {
        name: context.name.to_string(),
        firmware: String::from_utf8_lossy(&firmware).into_owned(),
        node_guid: u64::from_be(attributes.node_guid),
        pci: pci_of(&context.name),
        queue_pairs_max: attributes.max_qp.max(0).cast_unsigned(),
        region_bytes_max: attributes.max_mr_size,
        completion_vectors: context.completion_vectors(),
        ports,
    })
}

fn pci_of(name: &str) -> Option<String> {
    let device = std::fs::canonicalize(format!("/sys/class/infiniband/{name}/device")).ok()?;
    let last = device.file_name()?.to_string_lossy().into_owned();
    (last.matches(':').count() == 2).then_some(last)
}

fn describe_port(context: &Context, number: u8, port: &ibv_port_attr) -> Port {
    let entries = port.gid_tbl_len.max(0).cast_unsigned();
    let gids =
        (0..entries).filter_map(|index| Some(Gid::new(&context.gid(number, index)?))).collect();
    Port {
        number,
        active: port.state == ibv_port_state::ACTIVE,
        state: state_name(port.state),
        link: link_layer(port),
        mtu_bytes: mtu_bytes(port.active_mtu),
        bytes_per_second: bytes_per_second(port),
        message_bytes_max: port.max_msg_sz,
        gids,
    }
}

fn link_layer(port: &ibv_port_attr) -> LinkLayer {
    match port.link_layer {
        IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
        IBV_LINK_LAYER_INFINIBAND | 0 => LinkLayer::InfiniBand,
        _ => LinkLayer::Other,
    }
}

fn state_name(state: ibv_port_state) -> &'static str {
    match state {
        ibv_port_state::DOWN => "down",
        ibv_port_state::INIT => "initializing",
        ibv_port_state::ARMED => "armed",
        ibv_port_state::ACTIVE => "active",
        ibv_port_state::ACTIVE_DEFER => "active, deferred",
        _ => "unknown",
    }
}

fn mtu_bytes(mtu: ibv_mtu) -> u32 {
    128_u32.checked_shl(mtu.0).filter(|_| (1..=5).contains(&mtu.0)).unwrap_or(0)
}

/// Computes the bandwidth of a port from the width and speed codes of the InfiniBand specification.
fn bytes_per_second(port: &ibv_port_attr) -> Option<f64> {
    let lanes = match port.active_width {
        1 => 1.0,
        2 => 4.0,
        4 => 8.0,
        8 => 12.0,
        16 => 2.0,
        _ => return None,
    };
    let gigabits = match port.active_speed {
        1 => 2.5,
        2 => 5.0,
        4 | 8 => 10.0,
        16 => 14.062_5,
        32 => 25.781_25,
        64 => 50.0,
        128 => 100.0,
        _ => return None,
    };
    Some(lanes * gigabits * 1e9 / 8.0)
}

/// The transport protocol that an address of an RDMA port belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GidKind {
    /// The native transport of InfiniBand.
    InfiniBand,
    /// RoCE v1, whose Ethernet frames stay inside one network segment.
    RoceV1,
    /// RoCE v2, whose UDP packets routers can forward.
    RoceV2,
    /// A transport protocol that this version of the crate does not know.
    Other,
}

/// An address of an RDMA port, which is one entry of the port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gid {
    /// The index of the address in the GID table of its port.
    pub index: u32,
    /// The 16 bytes of the GID, in network byte order.
    pub bytes: [u8; 16],
    /// The kind of the address, which decides the transport protocol.
    pub kind: GidKind,
}

impl Gid {
    fn new(entry: &ibv_gid_entry) -> Self {
        let kind = match entry.gid_type {
            IBV_GID_TYPE_IB => GidKind::InfiniBand,
            IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
            IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
            _ => GidKind::Other,
        };
        Self { index: entry.gid_index, bytes: entry.gid.raw, kind }
    }

    /// Returns the IP address that the GID contains.
    pub fn ip(&self) -> IpAddr {
        Ipv6Addr::from(self.bytes).to_canonical()
    }

    /// Returns whether the GID is a link-local address, which only hosts of the same network segment reach.
    /// They must also name the interface.
    pub fn is_link_local(&self) -> bool {
        match self.ip() {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        }
    }

    /// Returns the preference for this RoCE address, larger is better; `None` means that only the user can
    /// select it.
    fn preference(&self) -> Option<u32> {
        let kind = match self.kind {
            GidKind::RoceV2 => 2,
            GidKind::RoceV1 => 0,
            GidKind::InfiniBand | GidKind::Other => return None,
        };
        let usable = !self.is_link_local() && self.bytes != [0; 16];
        usable.then_some(kind + u32::from(self.ip().is_ipv4()))
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            GidKind::InfiniBand => "InfiniBand",
            GidKind::RoceV1 => "RoCE v1",
            GidKind::RoceV2 => "RoCE v2",
            GidKind::Other => "other",
        };
        write!(f, "{} ({kind}, index {})", self.ip(), self.index)
    }
}

/// The reason why an RDMA device cannot register dma-bufs of other devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DmabufRefusal {
    /// libibverbs is older than rdma-core 34, which added dma-bufs.
    Library,
    /// The provider, the driver or the kernel does not support dma-bufs.
    Driver(Errno),
}

impl fmt::Display for DmabufRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library => f.write_str("libibverbs is older than rdma-core 34"),
            Self::Driver(errno) => write!(f, "its driver refuses dma-bufs: {errno}"),
        }
    }
}

/// Returns whether the named RDMA device can register dma-bufs of other devices, or the reason why not.
///
/// # Errors
/// Returns the errors of [`discover`], and [`Unavailable`](peerlane_hal::ErrorKind::Unavailable) if there is no
/// such device.
pub fn probe_dmabuf(name: &str) -> Result<Result<(), DmabufRefusal>, Error> {
    let contexts = sys::open_all(sys::library()?, |_, found| found == name)?;
    let Some(context) = contexts.first() else {
        return Err(Error::unavailable(format!("there is no RDMA device {name:?}")));
    };
    let domain = Domain::open(Arc::clone(context))?;
    Ok(dmabuf_support(context.library.reg_dmabuf_mr.is_some(), domain.refuse_dmabuf()))
}

/// Derives whether a driver supports dma-bufs from the error of registering an invalid file.
///
/// A driver that checks the file supports them.
fn dmabuf_support(library: bool, errno: Option<Errno>) -> Result<(), DmabufRefusal> {
    match errno {
        _ if !library => Err(DmabufRefusal::Library),
        None | Some(Errno::BADF) => Ok(()),
        Some(errno) => Err(DmabufRefusal::Driver(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_the_specification_are_decoded() {
        assert_eq!(mtu_bytes(ibv_mtu::MTU_256), 256);
        assert_eq!(mtu_bytes(ibv_mtu::MTU_4096), 4096);
        assert_eq!(mtu_bytes(ibv_mtu(0)), 0);
        assert_eq!(mtu_bytes(ibv_mtu(900)), 0);
        let port = ibv_port_attr { active_width: 2, active_speed: 64, ..Default::default() };
        assert_eq!(bytes_per_second(&port), Some(25e9));
        assert_eq!(bytes_per_second(&ibv_port_attr::default()), None);
    }

    #[test]
    fn discovery_lists_devices_or_names_what_is_missing() {
        match discover() {
            Ok(devices) => {
                for device in devices {
                    assert!(!device.name.is_empty());
                }
            }
            Err(error) => {
                use peerlane_hal::Error as _;
                assert_eq!(error.kind(), peerlane_hal::ErrorKind::Unavailable, "{error}");
            }
        }
    }

    pub(super) fn gid(index: u32, ip: &str, kind: GidKind) -> Gid {
        let bytes = match ip.parse().expect("an address") {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        Gid { index, bytes, kind }
    }

    #[test]
    fn version_2_and_mapped_addresses_come_first_and_link_local_never() {
        let rank = |ip, kind| gid(0, ip, kind).preference();
        let order = [
            rank("10.0.0.1", GidKind::RoceV2),
            rank("fd00::1", GidKind::RoceV2),
            rank("10.0.0.1", GidKind::RoceV1),
            rank("fd00::1", GidKind::RoceV1),
            None,
        ];
        assert!(order.is_sorted_by(|a, b| a > b), "{order:?}");
        assert_eq!(rank("fe80::1", GidKind::RoceV2), None);
        assert_eq!(rank("169.254.3.4", GidKind::RoceV2), None);
        assert_eq!(rank("::", GidKind::RoceV2), None);
    }

    #[test]
    fn a_mapped_address_reads_as_it_is_written_elsewhere() {
        let text = gid(1, "192.168.7.1", GidKind::RoceV2).to_string();
        assert_eq!(text, "192.168.7.1 (RoCE v2, index 1)");
    }

    #[test]
    fn a_driver_that_checks_the_file_supports_dma_bufs() {
        assert_eq!(dmabuf_support(true, Some(Errno::BADF)), Ok(()));
        let text = |library, errno| dmabuf_support(library, Some(errno)).unwrap_err().to_string();
        assert_eq!(
            text(true, Errno::OPNOTSUPP),
            "its driver refuses dma-bufs: Operation not supported (os error 95)"
        );
        assert_eq!(text(false, Errno::BADF), "libibverbs is older than rdma-core 34");
    }
}
