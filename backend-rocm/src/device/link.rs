//! How two devices of this process reach each other.
//!
//! HIP says whether one may use the other's memory. What lies between them the HSA runtime says, for
//! each agent and each pool of memory, out of the kernel driver's tables; without it HIP says the kind
//! and the hops. Neither names the rate of PCI Express or of several XGMI links together everywhere, so
//! a rate of 0 is none.

use std::ffi::{c_int, c_void};

use peerlane_hal::LinkKind;

use super::agent::{self, Agent};
use super::{Device, pool, visible};
use crate::error::Error;
use crate::sys::hip::hipError_t;
use crate::sys::hsa::{
    hsa_amd_agent_memory_pool_info_t, hsa_amd_link_info_type_t, hsa_amd_memory_pool_link_info_t,
    hsa_status_t,
};
use crate::sys::{Hip, Hsa};

/// Links of one way that the runtime describes; a way of more is described by its first ones.
const HOPS_MAX: usize = 16;

/// What the runtimes say of one device's way to another.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeviceLink {
    /// Whether the one can read and write the other's memory.
    pub peer_access: bool,
    /// What carries the bytes; meaningless without access.
    pub kind: LinkKind,
    /// Links between the two; `None` where nobody says.
    pub hops: Option<u32>,
    /// The kernel driver's weight of the way, smaller is nearer; `None` where nobody says.
    pub weight: Option<u32>,
    /// Bytes per second and direction; `None` where nobody says.
    pub bytes_per_second: Option<f64>,
}

/// The way from one device of this process to another, by their ordinals.
///
/// # Errors
/// As [`discover`](crate::discover), and
/// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) for an ordinal that is too large.
pub fn link(from: u32, to: u32) -> Result<DeviceLink, Error> {
    let hip = Hip::load()?;
    between(hip, &visible::open(hip, from)?, &visible::open(hip, to)?)
}

/// The same, of devices that were found.
///
/// # Errors
/// HIP's refusal.
pub(crate) fn between(hip: &Hip, from: &Device, to: &Device) -> Result<DeviceLink, Error> {
    if from.identity() == to.identity() {
        let (kind, hops) = (LinkKind::Own, Some(0));
        return Ok(DeviceLink {
            peer_access: true,
            kind,
            hops,
            weight: None,
            bytes_per_second: None,
        });
    }
    let number = |device: &Device| c_int::try_from(device.ordinal).unwrap_or(c_int::MAX);
    let mut can = 0;
    // SAFETY: both are devices of this runtime; the result is stored in a local.
    let code =
        unsafe { (hip.calls.device_can_access_peer)(&raw mut can, number(from), number(to)) };
    if code != hipError_t::hipSuccess {
        return Err(Error::hip(hip, "hipDeviceCanAccessPeer", Some(&from.label()), code));
    }
    let mut way = hsa_way(from, to).unwrap_or_else(|_| hip_way(hip, number(from), number(to)));
    way.peer_access = can != 0;
    Ok(way)
}

/// A way of which nothing is known.
const UNKNOWN: DeviceLink = DeviceLink {
    peer_access: false,
    kind: LinkKind::Pcie,
    hops: None,
    weight: None,
    bytes_per_second: None,
};

/// HIP numbers the kinds as the HSA runtime does.
fn hip_way(hip: &Hip, from: c_int, to: c_int) -> DeviceLink {
    let (mut kind, mut hops) = (0, 0);
    let (kind_place, hops_place) = (&raw mut kind, &raw mut hops);
    // SAFETY: both are devices of this runtime; the results are stored in locals.
    let code =
        unsafe { (hip.calls.ext_get_link_type_and_hop_count)(from, to, kind_place, hops_place) };
    if code != hipError_t::hipSuccess {
        return UNKNOWN;
    }
    let kind = kind_of(hsa_amd_link_info_type_t(kind));
    DeviceLink { kind, hops: Some(hops), ..UNKNOWN }
}

/// What lies between processors carries PCI Express for GPUs.
fn kind_of(kind: hsa_amd_link_info_type_t) -> LinkKind {
    match kind {
        hsa_amd_link_info_type_t::HSA_AMD_LINK_INFO_TYPE_XGMI => LinkKind::Xgmi,
        _ => LinkKind::Pcie,
    }
}

fn hsa_way(from: &Device, to: &Device) -> Result<DeviceLink, Error> {
    let hsa = Hsa::load()?;
    let agents = agent::agents(hsa)?;
    agents_way(hsa, &agent::find(&agents, from)?, &agent::find(&agents, to)?)
}

/// The way from an agent to the memory of another.
///
/// # Errors
/// The runtime's refusal.
pub(crate) fn agents_way(hsa: &Hsa, from: &Agent, to: &Agent) -> Result<DeviceLink, Error> {
    // All pools of a GPU lie behind the same links.
    let Some(pool) = pool::pools(hsa, to)?.first().copied() else { return Ok(UNKNOWN) };
    let ask = |attribute, place: *mut c_void| {
        let get_info = hsa.calls.amd_agent_memory_pool_get_info;
        // SAFETY: agent and pool are of this runtime; the places below have the attribute's size.
        let status = unsafe { get_info(from.handle, pool.handle, attribute, place) };
        if status == hsa_status_t::HSA_STATUS_SUCCESS {
            Ok(())
        } else {
            Err(Error::hsa(hsa, "hsa_amd_agent_memory_pool_get_info", None, status))
        }
    };
    let mut hops = 0_u32;
    let attribute = hsa_amd_agent_memory_pool_info_t::HSA_AMD_AGENT_MEMORY_POOL_INFO_NUM_LINK_HOPS;
    ask(attribute, (&raw mut hops).cast())?;
    if hops == 0 || hops as usize > HOPS_MAX {
        return Ok(UNKNOWN);
    }
    // One for each hop; some runtimes write only the first.
    let mut links = [hsa_amd_memory_pool_link_info_t::default(); HOPS_MAX];
    let attribute = hsa_amd_agent_memory_pool_info_t::HSA_AMD_AGENT_MEMORY_POOL_INFO_LINK_INFO;
    ask(attribute, links.as_mut_ptr().cast())?;
    Ok(described(hops, &links[..hops as usize]))
}

/// The whole of its links: a way is as fast as the slowest, and XGMI if all of it is.
fn described(hops: u32, links: &[hsa_amd_memory_pool_link_info_t]) -> DeviceLink {
    let known = || links.iter().filter(|link| link.max_bandwidth > 0 || link.numa_distance > 0);
    let kinds = || known().map(|link| kind_of(link.link_type));
    let first = links.first().map_or(LinkKind::Pcie, |link| kind_of(link.link_type));
    // In MB/s.
    let rate = known().map(|link| link.max_bandwidth).filter(|rate| *rate > 0).min();
    let weight = known().map(|link| link.numa_distance).max().filter(|weight| *weight > 0);
    DeviceLink {
        kind: kinds().find(|kind| *kind != LinkKind::Xgmi).unwrap_or(first),
        hops: Some(hops),
        weight,
        bytes_per_second: rate.map(|rate| f64::from(rate) * 1e6),
        ..UNKNOWN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hop(
        kind: hsa_amd_link_info_type_t,
        rate: u32,
        weight: u32,
    ) -> hsa_amd_memory_pool_link_info_t {
        hsa_amd_memory_pool_link_info_t {
            link_type: kind,
            max_bandwidth: rate,
            numa_distance: weight,
            ..Default::default()
        }
    }

    #[test]
    fn a_way_is_as_fast_as_its_slowest_link() {
        let (xgmi, pcie) = (
            hsa_amd_link_info_type_t::HSA_AMD_LINK_INFO_TYPE_XGMI,
            hsa_amd_link_info_type_t::HSA_AMD_LINK_INFO_TYPE_PCIE,
        );
        let way = described(1, &[hop(xgmi, 50_000, 15)]);
        assert_eq!((way.kind, way.hops, way.weight), (LinkKind::Xgmi, Some(1), Some(15)));
        assert_eq!(way.bytes_per_second, Some(50e9));
        let way = described(2, &[hop(xgmi, 50_000, 15), hop(pcie, 32_000, 40)]);
        assert_eq!((way.kind, way.weight), (LinkKind::Pcie, Some(40)));
        assert_eq!(way.bytes_per_second, Some(32e9));
        // A runtime that describes the first of two, and one that knows no rates.
        let way = described(2, &[hop(xgmi, 50_000, 15), hop(hsa_amd_link_info_type_t(0), 0, 0)]);
        assert_eq!((way.kind, way.bytes_per_second), (LinkKind::Xgmi, Some(50e9)));
        let way = described(1, &[hop(xgmi, 0, 0)]);
        assert_eq!((way.kind, way.bytes_per_second, way.weight), (LinkKind::Xgmi, None, None));
        assert_eq!(described(1, &[hop(hsa_amd_link_info_type_t(77), 0, 0)]).kind, LinkKind::Pcie);
    }
}
