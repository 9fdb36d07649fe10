//! Lists the agents of the HSA runtime with their memory pools, and matches them to HIP devices.

use std::ffi::{CStr, c_void};

use peerlane_toolkit::Fault;

use super::{Device, PciAddress, uuid_text};
use crate::error::Error;
use crate::sys::Hsa;
use crate::sys::hsa::{
    hsa_agent_info_t, hsa_agent_t, hsa_amd_agent_info_s, hsa_amd_memory_pool_global_flag_s,
    hsa_amd_memory_pool_info_t, hsa_amd_memory_pool_t, hsa_amd_segment_t, hsa_device_type_t,
    hsa_status_t,
};

/// The longest text attribute of an HSA agent in bytes, because names have 64 bytes, and UUIDs at most 21.
const TEXT_BYTES: usize = 64;

/// A device of the HSA runtime, which is a GPU or the processors of a NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Agent {
    /// The handle of the HSA agent, which is valid until the process ends.
    pub(crate) handle: hsa_agent_t,
    /// Whether the agent is a GPU, a processor or another device.
    pub kind: AgentKind,
    /// The name of the GPU architecture, such as `gfx942`, or the product name of a processor.
    pub name: String,
    /// The number that the kernel driver gives to the agent.
    pub node: u32,
    /// The PCI address of the agent, which is meaningless for processors.
    pub pci: PciAddress,
    /// The UUID of the agent as `GPU-` and 16 digits, or a text that says the UUID is missing.
    pub uuid: String,
}

/// The type of an agent of the HSA runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AgentKind {
    /// The processors of a NUMA node with the memory of the node.
    Processor,
    /// A GPU together with its device memory.
    Gpu,
    /// Another type of agent that the runtime reports.
    Other,
}

impl Agent {
    pub(crate) fn sdma_engine_counts(&self, hsa: &Hsa) -> Result<(u32, u32), Error> {
        let number = |attribute: hsa_amd_agent_info_s| {
            agent_info(hsa, self.handle, hsa_agent_info_t(attribute.0), 0_u32)
        };
        Ok((
            number(hsa_amd_agent_info_s::HSA_AMD_AGENT_INFO_NUM_SDMA_ENG)?,
            number(hsa_amd_agent_info_s::HSA_AMD_AGENT_INFO_NUM_SDMA_XGMI_ENG)?,
        ))
    }
}

/// Returns the agent of the HSA runtime that corresponds to a HIP device.
///
/// # Errors
/// Returns an error of kind [`Unavailable`](peerlane_hal::ErrorKind::Unavailable) if there is no HSA
/// runtime or if it does not start, and of kind [`Mismatch`](peerlane_hal::ErrorKind::Mismatch) if it has
/// no such device or several.
pub fn agent(device: &Device) -> Result<Agent, Error> {
    find_agent(&agents(Hsa::load()?)?, device)
}

pub(crate) fn agents(hsa: &Hsa) -> Result<Vec<Agent>, Error> {
    extern "C" fn add(agent: hsa_agent_t, list: *mut c_void) -> hsa_status_t {
        // SAFETY: `list` is the vector below, which only this function uses while the runtime calls it.
        let list = unsafe { &mut *list.cast::<Vec<hsa_agent_t>>() };
        list.push(agent);
        hsa_status_t::HSA_STATUS_SUCCESS
    }
    let mut handles: Vec<hsa_agent_t> = Vec::new();
    // SAFETY: `add` takes the vector that is passed with it, which lives until the call returns.
    let status = unsafe { (hsa.calls.iterate_agents)(Some(add), (&raw mut handles).cast()) };
    if status != hsa_status_t::HSA_STATUS_SUCCESS {
        return Err(Error::hsa(hsa, "hsa_iterate_agents", None, status));
    }
    handles.into_iter().map(|handle| describe(hsa, handle)).collect()
}

/// Finds the agent of a device by its PCI address, and by its UUID if partitions of a GPU share the
/// address.
///
/// # Errors
/// Returns an error of kind [`Mismatch`](peerlane_hal::ErrorKind::Mismatch) if no agent matches, or
/// several.
pub(crate) fn find_agent(agents: &[Agent], device: &Device) -> Result<Agent, Error> {
    let gpus = || agents.iter().filter(|agent| agent.kind == AgentKind::Gpu);
    let mut found: Vec<&Agent> = gpus().filter(|agent| agent.pci == device.pci).collect();
    let at_address = found.len();
    if at_address > 1 {
        let uuid = uuid_text(&device.uuid);
        found.retain(|agent| agent.uuid.eq_ignore_ascii_case(&uuid));
    }
    if let [agent] = found.as_slice() {
        return Ok((*agent).clone());
    }
    let label = device.label();
    let listed: Vec<String> =
        gpus().map(|agent| format!("{} ({})", agent.pci, agent.uuid)).collect();
    Err(Error::Fault(Fault::Mismatch(format!(
        "cannot find {label} in the HSA runtime: {at_address} agents have its PCI address {}, \
         expected one that also has its UUID {}; the GPUs of the HSA runtime are {}",
        device.pci,
        device.uuid_text(),
        if listed.is_empty() { "none".to_owned() } else { listed.join(", ") }
    ))))
}

fn describe(hsa: &Hsa, handle: hsa_agent_t) -> Result<Agent, Error> {
    let kind =
        agent_info(hsa, handle, hsa_agent_info_t::HSA_AGENT_INFO_DEVICE, hsa_device_type_t(0))?;
    let amd = |attribute: hsa_amd_agent_info_s| hsa_agent_info_t(attribute.0);
    let number = |attribute| agent_info(hsa, handle, amd(attribute), 0_u32);
    let bdf = number(hsa_amd_agent_info_s::HSA_AMD_AGENT_INFO_BDFID)?;
    let domain = number(hsa_amd_agent_info_s::HSA_AMD_AGENT_INFO_DOMAIN)?;
    let uuid = amd(hsa_amd_agent_info_s::HSA_AMD_AGENT_INFO_UUID);
    Ok(Agent {
        handle,
        kind: match kind {
            hsa_device_type_t::HSA_DEVICE_TYPE_CPU => AgentKind::Processor,
            hsa_device_type_t::HSA_DEVICE_TYPE_GPU => AgentKind::Gpu,
            _ => AgentKind::Other,
        },
        name: agent_text(hsa, handle, hsa_agent_info_t::HSA_AGENT_INFO_NAME)?,
        node: number(hsa_amd_agent_info_s::HSA_AMD_AGENT_INFO_DRIVER_NODE_ID)?,
        pci: PciAddress::from_hsa(domain, bdf),
        uuid: agent_text(hsa, handle, uuid)?,
    })
}

fn agent_text(hsa: &Hsa, agent: hsa_agent_t, attribute: hsa_agent_info_t) -> Result<String, Error> {
    // One byte more than the runtime may write, so that the text is always terminated.
    let bytes = agent_info(hsa, agent, attribute, [0_u8; TEXT_BYTES + 1])?;
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

/// Reads an attribute of an HSA agent into `value`, which must have the size that the runtime documents.
fn agent_info<T>(
    hsa: &Hsa,
    agent: hsa_agent_t,
    attribute: hsa_agent_info_t,
    mut value: T,
) -> Result<T, Error> {
    // SAFETY: the agent is of this runtime; the callers above pass values of the attribute's type.
    let status = unsafe { (hsa.calls.agent_get_info)(agent, attribute, (&raw mut value).cast()) };
    if status == hsa_status_t::HSA_STATUS_SUCCESS {
        Ok(value)
    } else {
        Err(Error::hsa(hsa, "hsa_agent_get_info", None, status))
    }
}

/// A memory pool of an HSA agent, to which every other agent can be given access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryPool {
    pub(crate) handle: hsa_amd_memory_pool_t,
    /// Whether stores of one agent are visible to others at once, and not only when a kernel ends.
    pub(crate) fine_grained: bool,
}

pub(crate) fn memory_pools(hsa: &Hsa, agent: &Agent) -> Result<Vec<MemoryPool>, Error> {
    extern "C" fn add(pool: hsa_amd_memory_pool_t, list: *mut c_void) -> hsa_status_t {
        // SAFETY: `list` is the vector below, which only this function uses while the runtime calls it.
        let list = unsafe { &mut *list.cast::<Vec<hsa_amd_memory_pool_t>>() };
        list.push(pool);
        hsa_status_t::HSA_STATUS_SUCCESS
    }
    let mut handles: Vec<hsa_amd_memory_pool_t> = Vec::new();
    let list: *mut c_void = (&raw mut handles).cast();
    // SAFETY: the agent is of this runtime; `add` takes the vector that is passed with it.
    let status =
        unsafe { (hsa.calls.amd_agent_iterate_memory_pools)(agent.handle, Some(add), list) };
    if status != hsa_status_t::HSA_STATUS_SUCCESS {
        return Err(Error::hsa(hsa, "hsa_amd_agent_iterate_memory_pools", None, status));
    }
    let mut pools = Vec::new();
    for handle in handles {
        let segment = hsa_amd_memory_pool_info_t::HSA_AMD_MEMORY_POOL_INFO_SEGMENT;
        if pool_info(hsa, handle, segment, hsa_amd_segment_t(u32::MAX))?
            != hsa_amd_segment_t::HSA_AMD_SEGMENT_GLOBAL
        {
            continue;
        }
        let flags = hsa_amd_memory_pool_info_t::HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS;
        let flags = pool_info(hsa, handle, flags, 0_u32)?;
        let fine =
            hsa_amd_memory_pool_global_flag_s::HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_FINE_GRAINED.0;
        pools.push(MemoryPool { handle, fine_grained: flags & fine != 0 });
    }
    Ok(pools)
}

fn pool_info<T>(
    hsa: &Hsa,
    pool: hsa_amd_memory_pool_t,
    attribute: hsa_amd_memory_pool_info_t,
    mut value: T,
) -> Result<T, Error> {
    let out: *mut c_void = (&raw mut value).cast();
    // SAFETY: the pool is of this runtime; the callers above pass values of the attribute's type.
    let status = unsafe { (hsa.calls.amd_memory_pool_get_info)(pool, attribute, out) };
    if status == hsa_status_t::HSA_STATUS_SUCCESS {
        Ok(value)
    } else {
        Err(Error::hsa(hsa, "hsa_amd_memory_pool_get_info", None, status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(handle: u64, kind: AgentKind, address: &str, uuid: &str) -> Agent {
        Agent {
            handle: hsa_agent_t { handle },
            kind,
            name: "gfx942".into(),
            node: 0,
            pci: PciAddress::parse(address).unwrap(),
            uuid: uuid.into(),
        }
    }

    fn device(address: &str, uuid: &[u8; 16]) -> Device {
        Device {
            ordinal: 0,
            name: "AMD Instinct MI300X".into(),
            uuid: *uuid,
            pci: PciAddress::parse(address).unwrap(),
            memory_bytes: 1 << 30,
            compute_units: 304,
            numa_node: None,
            virtual_memory: true,
        }
    }

    fn agents() -> Vec<Agent> {
        vec![
            agent(1, AgentKind::Processor, "0000:00:00.0", "CPU-XX"),
            agent(2, AgentKind::Gpu, "0000:c1:00.0", "GPU-00000000000000c1"),
            agent(3, AgentKind::Gpu, "0000:05:00.0", "GPU-0000000000000005"),
            agent(4, AgentKind::Gpu, "0000:05:00.0", "GPU-000000000000000a"),
        ]
    }

    #[test]
    fn an_agent_is_found_by_pci_address() {
        let found = find_agent(&agents(), &device("0000:c1:00.0", &[0; 16])).unwrap();
        assert_eq!(found.handle.handle, 2);
    }

    #[test]
    fn partitions_of_one_gpu_are_distinguished_by_uuid() {
        let found = find_agent(&agents(), &device("0000:05:00.0", b"000000000000000A")).unwrap();
        assert_eq!(found.handle.handle, 4);
    }

    #[test]
    fn an_ambiguous_or_missing_agent_is_an_error() {
        let text =
            |address, uuid| find_agent(&agents(), &device(address, uuid)).unwrap_err().to_string();
        assert_eq!(
            text("0000:05:00.0", b"00000000000000ff"),
            "cannot find device 0 (AMD Instinct MI300X) in the HSA runtime: 2 agents have its PCI \
             address 0000:05:00.0, expected one that also has its UUID GPU-00000000000000ff; the \
             GPUs of the HSA runtime are 0000:c1:00.0 (GPU-00000000000000c1), 0000:05:00.0 \
             (GPU-0000000000000005), 0000:05:00.0 (GPU-000000000000000a)"
        );
        // The device is hidden from the HSA runtime, or the address is that of the host's processors.
        assert!(text("0000:00:00.0", &[0; 16]).contains(": 0 agents have"));
    }
}
