//! Reads the properties of links between devices, which are peer access, type, hops and bandwidth.
//!
//! HIP reports whether one device may access the memory of another. The HSA runtime reports the link for
//! each agent and memory pool, from the tables of the kernel driver. Without that runtime HIP reports the
//! type and the hops. Neither gives a rate for PCI Express or for several XGMI links on every system; a
//! rate of 0 means that it is not known.

use std::ffi::{c_int, c_void};

use peerlane_hal::LinkKind;

use super::{Agent, Device, agents, find_agent, memory_pools, query_device};
use crate::error::Error;
use crate::sys::hip::hipError_t;
use crate::sys::hsa::{
    hsa_amd_agent_memory_pool_info_t, hsa_amd_link_info_type_t, hsa_amd_memory_pool_link_info_t,
    hsa_status_t,
};
use crate::sys::{Hip, Hsa};

const HOPS_MAX: usize = 16;

/// The properties of the link from one GPU to another.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeviceLink {
    /// Whether the first device can read and write memory of the second.
    pub peer_access: bool,
    /// The type of the link, which has no meaning if the devices lack peer access.
    pub kind: LinkKind,
    /// The number of hops of the link, or `None` if it is not known.
    pub hops: Option<u32>,
    /// The NUMA distance that the kernel driver reports, where smaller is nearer, or `None` if it is not
    /// known.
    pub weight: Option<u32>,
    /// The bandwidth in bytes per second and direction, or `None` if it is not known.
    pub bytes_per_second: Option<f64>,
}

/// Returns the properties of the link from one visible device to another, both given by ordinal.
///
/// # Errors
/// Fails like [`discover`](crate::discover), and with
/// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if an ordinal is too large.
pub fn link(from: u32, to: u32) -> Result<DeviceLink, Error> {
    let hip = Hip::load()?;
    link_between(hip, &query_device(hip, from)?, &query_device(hip, to)?)
}

pub(crate) fn link_between(hip: &Hip, from: &Device, to: &Device) -> Result<DeviceLink, Error> {
    if from.identity() == to.identity() {
        let (kind, hops) = (LinkKind::Local, Some(0));
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
    let link = hsa_link(from, to).unwrap_or_else(|_| hip_link(hip, number(from), number(to)));
    Ok(DeviceLink { peer_access: can != 0, ..link })
}

const UNKNOWN: DeviceLink = DeviceLink {
    peer_access: false,
    kind: LinkKind::Pcie,
    hops: None,
    weight: None,
    bytes_per_second: None,
};

/// Reads a link from HIP, which numbers the link types as the HSA runtime does.
fn hip_link(hip: &Hip, from: c_int, to: c_int) -> DeviceLink {
    let (mut kind, mut hops) = (0, 0);
    let (kind_out, hops_out) = (&raw mut kind, &raw mut hops);
    // SAFETY: both are devices of this runtime; the results are stored in locals.
    let code = unsafe { (hip.calls.ext_get_link_type_and_hop_count)(from, to, kind_out, hops_out) };
    if code != hipError_t::hipSuccess {
        return UNKNOWN;
    }
    let kind = link_kind(hsa_amd_link_info_type_t(kind));
    DeviceLink { kind, hops: Some(hops), ..UNKNOWN }
}

/// Links between processors count as PCI Express, because they carry PCI Express for GPUs.
fn link_kind(kind: hsa_amd_link_info_type_t) -> LinkKind {
    match kind {
        hsa_amd_link_info_type_t::HSA_AMD_LINK_INFO_TYPE_XGMI => LinkKind::Xgmi,
        _ => LinkKind::Pcie,
    }
}

fn hsa_link(from: &Device, to: &Device) -> Result<DeviceLink, Error> {
    let hsa = Hsa::load()?;
    let agents = agents(hsa)?;
    agent_link(hsa, &find_agent(&agents, from)?, &find_agent(&agents, to)?)
}

fn agent_link(hsa: &Hsa, from: &Agent, to: &Agent) -> Result<DeviceLink, Error> {
    // All pools of a GPU are reached over the same links.
    let Some(pool) = memory_pools(hsa, to)?.first().copied() else { return Ok(UNKNOWN) };
    let query = |attribute, out: *mut c_void| {
        let get_info = hsa.calls.amd_agent_memory_pool_get_info;
        // SAFETY: agent and pool are of this runtime; the buffers below have the attribute's size.
        let status = unsafe { get_info(from.handle, pool.handle, attribute, out) };
        if status == hsa_status_t::HSA_STATUS_SUCCESS {
            Ok(())
        } else {
            Err(Error::hsa(hsa, "hsa_amd_agent_memory_pool_get_info", None, status))
        }
    };
    let mut hops = 0_u32;
    let attribute = hsa_amd_agent_memory_pool_info_t::HSA_AMD_AGENT_MEMORY_POOL_INFO_NUM_LINK_HOPS;
    query(attribute, (&raw mut hops).cast())?;
    if hops == 0 || hops as usize > HOPS_MAX {
        return Ok(UNKNOWN);
    }
    // One entry for each hop; some runtimes write only the first.
    let mut links = [hsa_amd_memory_pool_link_info_t::default(); HOPS_MAX];
    let attribute = hsa_amd_agent_memory_pool_info_t::HSA_AMD_AGENT_MEMORY_POOL_INFO_LINK_INFO;
    query(attribute, links.as_mut_ptr().cast())?;
    Ok(combine_hops(hops, &links[..hops as usize]))
}

/// The slowest hop gives the bandwidth of a link, and the link is XGMI only if all hops are.
fn combine_hops(hops: u32, links: &[hsa_amd_memory_pool_link_info_t]) -> DeviceLink {
    let known = || links.iter().filter(|link| link.max_bandwidth > 0 || link.numa_distance > 0);
    let kinds = || known().map(|link| link_kind(link.link_type));
    let first = links.first().map_or(LinkKind::Pcie, |link| link_kind(link.link_type));
    // The runtime reports MB/s.
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
    fn a_link_is_as_fast_as_its_slowest_hop() {
        let (xgmi, pcie) = (
            hsa_amd_link_info_type_t::HSA_AMD_LINK_INFO_TYPE_XGMI,
            hsa_amd_link_info_type_t::HSA_AMD_LINK_INFO_TYPE_PCIE,
        );
        let link = combine_hops(1, &[hop(xgmi, 50_000, 15)]);
        assert_eq!((link.kind, link.hops, link.weight), (LinkKind::Xgmi, Some(1), Some(15)));
        assert_eq!(link.bytes_per_second, Some(50e9));
        let link = combine_hops(2, &[hop(xgmi, 50_000, 15), hop(pcie, 32_000, 40)]);
        assert_eq!((link.kind, link.weight), (LinkKind::Pcie, Some(40)));
        assert_eq!(link.bytes_per_second, Some(32e9));
        // One runtime describes only the first of two hops, another reports no rates.
        let link =
            combine_hops(2, &[hop(xgmi, 50_000, 15), hop(hsa_amd_link_info_type_t(0), 0, 0)]);
        assert_eq!((link.kind, link.bytes_per_second), (LinkKind::Xgmi, Some(50e9)));
        let link = combine_hops(1, &[hop(xgmi, 0, 0)]);
        assert_eq!((link.kind, link.bytes_per_second, link.weight), (LinkKind::Xgmi, None, None));
        assert_eq!(
            combine_hops(1, &[hop(hsa_amd_link_info_type_t(77), 0, 0)]).kind,
            LinkKind::Pcie
        );
    }
}
