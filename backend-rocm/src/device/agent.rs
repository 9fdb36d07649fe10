//! The HSA runtime's devices, and which of them is a device of HIP.

use std::ffi::{CStr, c_void};

use peerlane_toolkit::device::Fault;

use super::{Device, PciAddress, uuid_text};
use crate::error::Error;
use crate::sys::Hsa;
use crate::sys::hsa::{
    hsa_agent_info_t, hsa_agent_t, hsa_amd_agent_info_s, hsa_device_type_t, hsa_status_t,
};

/// The longest text of an attribute: names are 64 bytes long, UUIDs at most 21.
const TEXT_BYTES: usize = 64;

/// A device of the HSA runtime: a GPU, or the processors of a NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Agent {
    /// Valid as long as the process.
    pub(crate) handle: hsa_agent_t,
    /// Its kind.
    pub kind: AgentKind,
    /// The name of the architecture, such as `gfx942`; of processors the product.
    pub name: String,
    /// The kernel driver's number of it.
    pub node: u32,
    /// Where it sits; meaningless for processors.
    pub pci: PciAddress,
    /// `GPU-` and 16 digits, or a text that says that there is none.
    pub uuid: String,
}

/// What an agent is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AgentKind {
    /// The processors of a NUMA node, and its memory.
    Processor,
    /// A GPU.
    Gpu,
    /// Something else that the runtime knows.
    Other,
}

impl Agent {
    /// How many SDMA engines it has: those for whatever, and those made for XGMI.
    ///
    /// # Errors
    /// The runtime's refusal.
    pub(crate) fn sdma_engines(&self, hsa: &Hsa) -> Result<(u32, u32), Error> {
        let number = |attribute: hsa_amd_agent_info_s| {
            ask(hsa, self.handle, hsa_agent_info_t(attribute.0), 0_u32)
        };
        Ok((
            number(hsa_amd_agent_info_s::HSA_AMD_AGENT_INFO_NUM_SDMA_ENG)?,
            number(hsa_amd_agent_info_s::HSA_AMD_AGENT_INFO_NUM_SDMA_XGMI_ENG)?,
        ))
    }
}

/// What the HSA runtime knows of this device.
///
/// # Errors
/// Of kind [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): there is no HSA runtime, or it does not
/// start. Of kind [`Mismatch`](peerlane_hal::ErrorKind::Mismatch): it has no such device, or several.
pub fn agent(device: &Device) -> Result<Agent, Error> {
    find(&agents(Hsa::load()?)?, device)
}

/// All agents, in the order of the runtime.
///
/// # Errors
/// The runtime's refusal.
pub(crate) fn agents(hsa: &Hsa) -> Result<Vec<Agent>, Error> {
    extern "C" fn add(agent: hsa_agent_t, list: *mut c_void) -> hsa_status_t {
        // SAFETY: the vector below, which nobody else uses while the runtime calls this.
        let list = unsafe { &mut *list.cast::<Vec<hsa_agent_t>>() };
        list.push(agent);
        hsa_status_t::HSA_STATUS_SUCCESS
    }
    let mut handles: Vec<hsa_agent_t> = Vec::new();
    // SAFETY: the function takes what is given with it, a vector that lives until the call returns.
    let status = unsafe { (hsa.calls.iterate_agents)(Some(add), (&raw mut handles).cast()) };
    if status != hsa_status_t::HSA_STATUS_SUCCESS {
        return Err(Error::hsa(hsa, "hsa_iterate_agents", None, status));
    }
    handles.into_iter().map(|handle| describe(hsa, handle)).collect()
}

/// The agent that is this device: at its PCI address, and of its UUID where several parts of a GPU have
/// one address.
///
/// # Errors
/// Of kind [`Mismatch`](peerlane_hal::ErrorKind::Mismatch) if none is, or if several might be.
pub(crate) fn find(agents: &[Agent], device: &Device) -> Result<Agent, Error> {
    let gpus = || agents.iter().filter(|agent| agent.kind == AgentKind::Gpu);
    let mut found: Vec<&Agent> = gpus().filter(|agent| agent.pci == device.pci).collect();
    let here = found.len();
    if here > 1 {
        let uuid = uuid_text(&device.uuid);
        found.retain(|agent| agent.uuid.eq_ignore_ascii_case(&uuid));
    }
    if let [agent] = found.as_slice() {
        return Ok((*agent).clone());
    }
    let label = device.label();
    let seen: Vec<String> = gpus().map(|agent| format!("{} ({})", agent.pci, agent.uuid)).collect();
    Err(Error::Fault(Fault::Mismatch(format!(
        "{label} is at {} and of UUID {}, where the HSA runtime has {here} agents, wanted one of both; \
         its GPUs are {}",
        device.pci,
        device.uuid_text(),
        if seen.is_empty() { "none".to_owned() } else { seen.join(", ") }
    ))))
}

fn describe(hsa: &Hsa, handle: hsa_agent_t) -> Result<Agent, Error> {
    let kind = ask(hsa, handle, hsa_agent_info_t::HSA_AGENT_INFO_DEVICE, hsa_device_type_t(0))?;
    let amd = |attribute: hsa_amd_agent_info_s| hsa_agent_info_t(attribute.0);
    let number = |attribute| ask(hsa, handle, amd(attribute), 0_u32);
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
        name: text(hsa, handle, hsa_agent_info_t::HSA_AGENT_INFO_NAME)?,
        node: number(hsa_amd_agent_info_s::HSA_AMD_AGENT_INFO_DRIVER_NODE_ID)?,
        pci: PciAddress::of_agent(domain, bdf),
        uuid: text(hsa, handle, uuid)?,
    })
}

fn text(hsa: &Hsa, agent: hsa_agent_t, attribute: hsa_agent_info_t) -> Result<String, Error> {
    // A byte more than the runtime may write, so that there is an end.
    let bytes = ask(hsa, agent, attribute, [0_u8; TEXT_BYTES + 1])?;
    let ended = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok(ended.to_string_lossy().into_owned())
}

/// An attribute of an agent, written over `value`, which is at least as large as the runtime says that
/// it is.
fn ask<T>(
    hsa: &Hsa,
    agent: hsa_agent_t,
    attribute: hsa_agent_info_t,
    mut value: T,
) -> Result<T, Error> {
    // SAFETY: the agent is of this runtime; the callers above give values of the attribute's type.
    let status = unsafe { (hsa.calls.agent_get_info)(agent, attribute, (&raw mut value).cast()) };
    if status == hsa_status_t::HSA_STATUS_SUCCESS {
        Ok(value)
    } else {
        Err(Error::hsa(hsa, "hsa_agent_get_info", None, status))
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
    fn the_address_finds_the_agent_whatever_the_order() {
        let found = find(&agents(), &device("0000:c1:00.0", &[0; 16])).unwrap();
        assert_eq!(found.handle.handle, 2);
    }

    #[test]
    fn parts_of_one_gpu_are_told_apart_by_uuid() {
        let found = find(&agents(), &device("0000:05:00.0", b"000000000000000A")).unwrap();
        assert_eq!(found.handle.handle, 4);
    }

    #[test]
    fn an_agent_that_cannot_be_told_is_an_error() {
        let text = |address, uuid| find(&agents(), &device(address, uuid)).unwrap_err().to_string();
        assert_eq!(
            text("0000:05:00.0", b"00000000000000ff"),
            "device 0 (AMD Instinct MI300X) is at 0000:05:00.0 and of UUID GPU-00000000000000ff, where \
             the HSA runtime has 2 agents, wanted one of both; its GPUs are 0000:c1:00.0 \
             (GPU-00000000000000c1), 0000:05:00.0 (GPU-0000000000000005), 0000:05:00.0 \
             (GPU-000000000000000a)"
        );
        // Hidden from the HSA runtime, or an address of the host's processors.
        assert!(text("0000:00:00.0", &[0; 16]).contains("has 0 agents"));
    }
}
