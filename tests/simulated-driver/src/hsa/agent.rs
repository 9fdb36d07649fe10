//! Exports the calls on agents: the CPU agents first, then the GPUs that this process sees.

use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicU32;

use super::call::enter;
use super::info::Value;
use super::status::{INVALID_AGENT, INVALID_ARGUMENT, Outcome};
use super::types::{AgentCallback, hsa_agent_t, hsa_status_t};
use crate::device::settings::Setting;
use crate::device::topology;
use crate::runtime::{pci, rocm};

const FIRST_CPU: u64 = 0x61_0000_0000;
const FIRST_GPU: u64 = 0x61_0001_0000;
const STEP: u64 = 0x40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Agent {
    Cpu(u32),
    /// Numbered as the machine does.
    Gpu(u32),
}

impl Agent {
    /// All that this process sees.
    pub(super) fn all() -> Vec<Self> {
        let nodes = Setting::NumaNodes.value() as u32;
        let gpus = rocm::visible_agents().into_iter().map(Self::Gpu);
        (0..nodes).map(Self::Cpu).chain(gpus).collect()
    }

    pub(super) fn find(handle: hsa_agent_t) -> Outcome<Self> {
        Self::all().into_iter().find(|agent| agent.handle() == handle).ok_or(INVALID_AGENT)
    }

    pub(super) fn handle(self) -> hsa_agent_t {
        hsa_agent_t(match self {
            Self::Cpu(node) => FIRST_CPU + u64::from(node) * STEP,
            Self::Gpu(device) => FIRST_GPU + u64::from(device) * STEP,
        })
    }

    /// The device; `None` for processors.
    pub(super) fn device(self) -> Option<u32> {
        match self {
            Self::Cpu(_) => None,
            Self::Gpu(device) => Some(device),
        }
    }

    /// As the kernel numbers processors and GPUs.
    fn node(self) -> u32 {
        match self {
            Self::Cpu(node) => node,
            Self::Gpu(device) => Setting::NumaNodes.value() as u32 + device,
        }
    }

    fn nearest_cpu(self) -> Self {
        match self {
            Self::Cpu(_) => self,
            Self::Gpu(device) => Self::Cpu(topology::numa_node(device)),
        }
    }

    /// By the numbers of hsa.h and hsa_ext_amd.h.
    fn info(self, attribute: c_int) -> Outcome<Value> {
        let gpu = self.device();
        let of_gpu = |value: u64| Value::Word(if gpu.is_some() { value as u32 } else { 0 });
        Ok(match attribute {
            0 => Value::Field(if gpu.is_some() { "gfx942" } else { "Simulated CPU" }.into(), 64),
            1 => Value::Field(if gpu.is_some() { "AMD" } else { "CPU" }.into(), 64),
            // Features: kernels.
            2 => of_gpu(1),
            6 => of_gpu(64),
            16 | 0xa004 => Value::Word(self.node()),
            17 => of_gpu(1),
            21 | 22 => Value::Half(1),
            0xa000 => of_gpu(0x74a1),
            0xa002 => of_gpu(304),
            // Bus, device and function.
            0xa006 => Value::Word(gpu.map_or(0, |device| pci::bus(device) << 8)),
            0xa009 => Value::Field(
                if gpu.is_some() { rocm::NAME } else { "Simulated CPU" }.to_owned(),
                64,
            ),
            0xa00e => Value::Pair(host_data_path()?),
            // The PCI domain.
            0xa00f => Value::Word(0),
            0xa011 => {
                let id = gpu.map_or("XX".to_owned(), pci::unique_id);
                let kind = if gpu.is_some() { "GPU" } else { "CPU" };
                Value::Field(format!("{kind}-{id}"), 21)
            }
            0xa10a => of_gpu(Setting::SdmaEngines.value()),
            0xa10b => of_gpu(Setting::XgmiEngines.value()),
            0xa113 => Value::Long(self.nearest_cpu().handle().0),
            _ => return Err(INVALID_ARGUMENT),
        })
    }
}

/// The registers that flush what network cards have written: of memory, and of registers.
fn host_data_path() -> Outcome<[u64; 2]> {
    static REGISTERS: [AtomicU32; 2] = [AtomicU32::new(0), AtomicU32::new(0)];
    if Setting::NicWrites.is("lost") {
        return Err(INVALID_ARGUMENT);
    }
    let needed = Setting::NicWrites.is("flush");
    Ok(REGISTERS.each_ref().map(|it| if needed { it.as_ptr() as u64 } else { 0 }))
}

#[unsafe(no_mangle)]
extern "C" fn hsa_iterate_agents(
    callback: Option<AgentCallback>,
    data: *mut c_void,
) -> hsa_status_t {
    enter("hsa_iterate_agents", || {
        let callback = callback.ok_or(INVALID_ARGUMENT)?;
        for agent in Agent::all() {
            // SAFETY: the caller gives a function that may be called with its data.
            match unsafe { callback(agent.handle(), data) } {
                0 => {}
                status => return Err(super::status::Status(status)),
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_agent_get_info(
    agent: hsa_agent_t,
    attribute: c_int,
    out: *mut c_void,
) -> hsa_status_t {
    enter("hsa_agent_get_info", || Agent::find(agent)?.info(attribute)?.store(out))
}
