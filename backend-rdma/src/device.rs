//! Lists the RDMA NICs of this machine, with their ports and addresses.

mod affinity;
mod choice;
mod gid;
mod trial;

use std::sync::Arc;

use ibverbs_sys::{
    IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND, ibv_mtu, ibv_port_attr, ibv_port_state,
};

use crate::error::Error;
use crate::sys::{self, Context};

pub use affinity::{Distance, distance};
pub use choice::DeviceChoice;
pub(crate) use choice::{Place, choose};
pub use gid::{Gid, GidKind};
pub use trial::{DmabufRefusal, try_dmabuf};

/// An RDMA NIC.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// The name, such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// The version of the firmware; empty for software devices.
    pub firmware: String,
    /// The GUID of the node.
    pub node_guid: u64,
    /// The PCI address, such as `0000:17:00.0`; `None` for software devices.
    pub pci: Option<String>,
    /// The largest number of queue pairs.
    pub queue_pairs_max: u32,
    /// The largest size of a registration in bytes.
    pub region_bytes_max: u64,
    /// The number of interrupts over which completions can be spread.
    pub completion_vectors: u32,
    /// The ports, from number 1.
    pub ports: Vec<Port>,
}

/// A port of a NIC.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    /// The number, from 1.
    pub number: u8,
    /// Whether the port is active.
    pub active: bool,
    /// The name of the state in libibverbs.
    pub state: &'static str,
    /// The link layer.
    pub link: LinkLayer,
    /// The largest packet's payload in bytes.
    pub mtu_bytes: u32,
    /// The bandwidth in bytes per second and direction, from link width and speed. The value of a software device means little.
    pub bytes_per_second: Option<f64>,
    /// The largest single message in bytes.
    pub message_bytes_max: u32,
    /// The addresses of the port.
    pub gids: Vec<Gid>,
}

/// The link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet, with RoCE.
    Ethernet,
    /// Another link layer.
    Other,
}

impl Port {
    /// Returns the address that is used by default: with RoCE the best one that other hosts reach, with InfiniBand the first.
    pub fn best_gid(&self) -> Option<Gid> {
        if self.link != LinkLayer::Ethernet {
            return self.gids.first().copied();
        }
        // Of two that are alike the first.
        let reached = self.gids.iter().rev().filter(|gid| gid.rank().is_some());
        reached.max_by_key(|gid| gid.rank()).copied()
    }
}

/// Lists the RDMA NICs of this machine. The list is empty if the kernel has no RDMA.
///
/// # Errors
/// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): libibverbs is missing or too old, or a device cannot be
/// opened.
pub fn discover() -> Result<Vec<Device>, Error> {
    let contexts = sys::open_all(sys::library()?, |_, _| true)?;
    contexts.iter().map(describe).collect()
}

/// Queries everything about a device.
pub(crate) fn describe(context: &Arc<Context>) -> Result<Device, Error> {
    let attributes = context.attributes()?;
    let ports = (1..=attributes.phys_port_cnt)
        .map(|number| context.port(number).map(|port| describe_port(context, number, &port)))
        .collect::<Result<_, _>>()?;
    let firmware = attributes.fw_ver.iter().map(|byte| byte.cast_unsigned());
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
    let places = port.gid_tbl_len.max(0).cast_unsigned();
    let gids =
        (0..places).filter_map(|index| Some(Gid::of(&context.gid(number, index)?))).collect();
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

/// Returns link width times speed, as the InfiniBand specification numbers them.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_the_specification_are_read() {
        assert_eq!(mtu_bytes(ibv_mtu::MTU_256), 256);
        assert_eq!(mtu_bytes(ibv_mtu::MTU_4096), 4096);
        assert_eq!(mtu_bytes(ibv_mtu(0)), 0);
        assert_eq!(mtu_bytes(ibv_mtu(900)), 0);
        let port = ibv_port_attr { active_width: 2, active_speed: 64, ..Default::default() };
        assert_eq!(bytes_per_second(&port), Some(25e9));
        assert_eq!(bytes_per_second(&ibv_port_attr::default()), None);
    }

    #[test]
    fn discovery_answers_or_says_what_is_missing() {
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
}
