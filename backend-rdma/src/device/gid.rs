//! The addresses of a port.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use ibverbs_sys::{IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, ibv_gid_entry};

/// What travels in front of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GidKind {
    /// InfiniBand's own.
    InfiniBand,
    /// Ethernet frames, inside one segment.
    RoceV1,
    /// UDP, which routers pass on.
    RoceV2,
    /// One that this build does not know.
    Other,
}

/// An address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gid {
    /// Its place in the port's table.
    pub index: u32,
    /// Its bytes.
    pub bytes: [u8; 16],
    /// What it is for.
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

    /// The address as one of the Internet protocol.
    pub fn ip(&self) -> IpAddr {
        Ipv6Addr::from(self.bytes).to_canonical()
    }

    /// Whether only hosts of the same segment can be reached from it, and only if they are told which
    /// of their interfaces leads here.
    pub fn is_link_local(&self) -> bool {
        match self.ip() {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        }
    }

    /// How good it is for RoCE: more is better; `None` where it is only used on demand.
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
