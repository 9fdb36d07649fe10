//! Exports memory pools: the pools of each agent, their distance to others, and allocations.

use std::ffi::{c_int, c_void};

use super::agent::Agent;
use super::call::enter;
use super::info::Value;
use super::status::{INVALID_ARGUMENT, INVALID_MEMORY_POOL, Outcome, Status};
use super::types::{
    PoolCallback, hsa_agent_t, hsa_amd_memory_pool_link_info_t, hsa_amd_memory_pool_t, hsa_status_t,
};
use crate::device::memory::capacity;
use crate::device::settings::{Setting, reaches};
use crate::device::topology::{self, Link, LinkKind};
use crate::runtime::rocm::{COARSE_GRAINED, FINE_GRAINED};

const FIRST: u64 = 0x62_0000_0000;
const STEP: u64 = 0x10;
/// What the host is said to have.
const HOST_BYTES: usize = 64 << 30;

/// A flag of pools, beside their grain.
const KERNARG: u32 = 1;

const NEVER: u32 = 0;
const BY_DEFAULT: u32 = 1;
const WHEN_ALLOWED: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pool {
    pub(super) agent: Agent,
    pub(super) flags: u32,
}

impl Pool {
    fn of(agent: Agent) -> Vec<Self> {
        let flags: &[u32] = match agent {
            Agent::Cpu(_) => &[FINE_GRAINED, FINE_GRAINED | KERNARG, COARSE_GRAINED],
            Agent::Gpu(_) => &[COARSE_GRAINED, FINE_GRAINED],
        };
        flags.iter().map(|flags| Self { agent, flags: *flags }).collect()
    }

    fn handle(self) -> hsa_amd_memory_pool_t {
        hsa_amd_memory_pool_t(
            FIRST + (self.agent.handle().0 & 0xff_ffff) * STEP + u64::from(self.flags),
        )
    }

    pub(super) fn find(handle: hsa_amd_memory_pool_t) -> Outcome<Self> {
        let pools = Agent::all().into_iter().flat_map(Self::of);
        let mut found = pools.filter(|pool| pool.handle() == handle);
        found.next().ok_or(INVALID_MEMORY_POOL)
    }

    /// By the numbers of hsa_ext_amd.h.
    fn info(self, attribute: c_int) -> Outcome<Value> {
        let bytes = self.agent.device().map_or(HOST_BYTES, |device| capacity(device).0 as usize);
        Ok(match attribute {
            0 => Value::Word(0),
            1 => Value::Word(self.flags),
            2 | 16 => Value::Long(bytes as u64),
            5 => Value::Flag(true),
            6 | 7 => Value::Long(4096),
            15 => Value::Flag(self.agent.device().is_none()),
            17 => Value::Word(u32::from(self.agent.device().is_some())),
            18 => Value::Long(2 << 20),
            _ => return Err(INVALID_ARGUMENT),
        })
    }

    /// What an agent may do here: by default, when it is allowed, or never.
    pub(super) fn access(self, agent: Agent) -> u32 {
        match (agent, self.agent) {
            (agent, own) if agent == own => BY_DEFAULT,
            (Agent::Cpu(_), Agent::Cpu(_)) => BY_DEFAULT,
            (Agent::Gpu(device), Agent::Gpu(other)) if !reaches(device, other) => NEVER,
            _ => WHEN_ALLOWED,
        }
    }

    /// The way of an agent to it; `None` if there is none to go.
    fn link(self, agent: Agent) -> Option<Link> {
        match (agent, self.agent) {
            (agent, own) if agent == own => None,
            (Agent::Gpu(device), Agent::Gpu(other)) => Some(topology::between(device, other)),
            (Agent::Cpu(_), Agent::Cpu(_)) => {
                Some(Link { kind: LinkKind::Pcie, hops: 1, weight: 32, bandwidth: 32_000 })
            }
            (Agent::Gpu(device), Agent::Cpu(node)) | (Agent::Cpu(node), Agent::Gpu(device)) => {
                let hops = if topology::numa_node(device) == node { 1 } else { 2 };
                Some(Link { kind: LinkKind::Pcie, hops, weight: 20 * hops, bandwidth: 32_000 })
            }
        }
    }

    fn info_for(self, agent: Agent, attribute: c_int) -> Outcome<Value> {
        let link = self.link(agent);
        let hops = link.map_or(0, |link| link.hops);
        Ok(match attribute {
            0 => Value::Word(self.access(agent)),
            1 => Value::Word(hops),
            2 => Value::Links(link.map_or(Vec::new(), |link| vec![links(link); hops as usize])),
            _ => return Err(INVALID_ARGUMENT),
        })
    }
}

fn links(link: Link) -> hsa_amd_memory_pool_link_info_t {
    hsa_amd_memory_pool_link_info_t {
        min_latency: 0,
        max_latency: 0,
        min_bandwidth: link.bandwidth,
        max_bandwidth: link.bandwidth * Setting::EnginesPerLink.value() as u32,
        atomic_support_32bit: true,
        atomic_support_64bit: true,
        coherent_support: link.kind == LinkKind::Xgmi,
        link_type: link.kind.number(),
        numa_distance: link.weight,
    }
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_agent_iterate_memory_pools(
    agent: hsa_agent_t,
    callback: Option<PoolCallback>,
    data: *mut c_void,
) -> hsa_status_t {
    enter("hsa_amd_agent_iterate_memory_pools", || {
        let callback = callback.ok_or(INVALID_ARGUMENT)?;
        for pool in Pool::of(Agent::find(agent)?) {
            // SAFETY: the caller gives a function that may be called with its data.
            match unsafe { callback(pool.handle(), data) } {
                0 => {}
                status => return Err(Status(status)),
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_memory_pool_get_info(
    pool: hsa_amd_memory_pool_t,
    attribute: c_int,
    out: *mut c_void,
) -> hsa_status_t {
    enter("hsa_amd_memory_pool_get_info", || Pool::find(pool)?.info(attribute)?.store(out))
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_agent_memory_pool_get_info(
    agent: hsa_agent_t,
    pool: hsa_amd_memory_pool_t,
    attribute: c_int,
    out: *mut c_void,
) -> hsa_status_t {
    enter("hsa_amd_agent_memory_pool_get_info", || {
        Pool::find(pool)?.info_for(Agent::find(agent)?, attribute)?.store(out)
    })
}
