//! The addresses of a port: the entries of its GID table.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use ibverbs_sys::{IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, ibv_gid_entry};

/// The transport of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE v1: Ethernet frames, which stay inside one segment.
    RoceV1,
    /// RoCE v2: UDP, which routers forward.
    RoceV2,
    /// A transport that this build does not know.
    Other,
}

/// An address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gid {
    /// The index in the GID table of the port.
    pub index: u32,
    /// The bytes of the address.
    pub bytes: [u8; 16],
    /// The transport.
    pub kind: GidKind,
}

impl Gid {
    pub(crate) fn of(entry: &ibv_gid_entry) -> Self {
        let kind = match entry.gid_type {
            IBV_GID_TYPE_IB => GidKind::InfiniBand,
            IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
            IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
            _ => GidKind::Other,
        };
        Self { index: entry.gid_index, bytes: entry.gid.raw, kind }
    }

    /// Returns the IP address.
    pub fn ip(&self) -> IpAddr {
        Ipv6Addr::from(self.bytes).to_canonical()
    }

    /// Returns whether the address is link-local: only hosts of the same segment reach it, and only if they name the interface.
    pub fn is_link_local(&self) -> bool {
        match self.ip() {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        }
    }

    /// Returns how suitable the address is for RoCE; larger is better. `None` means only on request.
    pub(crate) fn rank(&self) -> Option<u32> {
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn gid(index: u32, ip: &str, kind: GidKind) -> Gid {
        let bytes = match ip.parse().expect("an address") {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        Gid { index, bytes, kind }
    }

    #[test]
    fn version_2_and_mapped_addresses_come_first_and_link_local_never() {
        let rank = |ip, kind| gid(0, ip, kind).rank();
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
}
