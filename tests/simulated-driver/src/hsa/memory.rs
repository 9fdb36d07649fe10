//! Exports the calls on memory of pools, on access to it, and on locked memory of the caller.

use std::ffi::{c_int, c_void};

use super::agent::Agent;
use super::call::enter;
use super::pool::Pool;
use super::status::{
    INVALID_AGENT, INVALID_ALLOCATION, INVALID_ARGUMENT, INVALID_MEMORY_POOL, OUT_OF_RESOURCES,
    Outcome, store,
};
use super::types::{hsa_agent_t, hsa_amd_memory_pool_t, hsa_status_t};
use crate::device::machine::memory;
use crate::device::memory::{Kind, Range};
use crate::device::settings::DEVICES_MAX;
use crate::runtime::out::Out;
use crate::runtime::primary;
use crate::runtime::rocm::FINE_GRAINED;

/// What belongs to no session, because no session goes with it.
pub(super) const NOBODY: u64 = 0;

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_memory_pool_allocate(
    pool: hsa_amd_memory_pool_t,
    bytes: usize,
    _flags: u32,
    out: Out<'_, u64>,
) -> hsa_status_t {
    enter("hsa_amd_memory_pool_allocate", || {
        let pool = Pool::find(pool)?;
        if bytes == 0 || out.is_none() {
            return Err(INVALID_ARGUMENT);
        }
        let address = match pool.agent {
            Agent::Cpu(_) => memory().allocate(0, bytes as u64, Kind::Host { session: NOBODY })?,
            Agent::Gpu(device) => {
                let session = primary::open(device)?;
                memory().allocate(device, bytes as u64, Kind::Plain { session: session.id() })?
            }
        };
        find(address)?.set_note(pool.flags);
        store(out, address)
    })
}

/// Does not wait for anything.
#[unsafe(no_mangle)]
extern "C" fn hsa_amd_memory_pool_free(address: u64) -> hsa_status_t {
    enter("hsa_amd_memory_pool_free", || {
        if address == 0 {
            return Ok(());
        }
        let own = |kind: &Kind| matches!(kind, Kind::Plain { .. } | Kind::Host { .. });
        Ok(memory().remove(address, |range| own(&range.kind))?)
    })
}

pub(super) fn find(address: u64) -> Outcome<std::sync::Arc<Range>> {
    memory().find(address).ok_or(INVALID_ALLOCATION)
}

/// A list of the caller's.
pub(super) fn agents(list: *const hsa_agent_t, count: u32) -> Outcome<Vec<Agent>> {
    if count == 0 || list.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller gives an array of this length.
    let list = unsafe { std::slice::from_raw_parts(list, count as usize) };
    list.iter().map(|agent| Agent::find(*agent)).collect()
}

/// Lets these agents in, and no others but the owner.
#[unsafe(no_mangle)]
extern "C" fn hsa_amd_agents_allow_access(
    count: u32,
    list: *const hsa_agent_t,
    flags: *const u32,
    address: u64,
) -> hsa_status_t {
    enter("hsa_amd_agents_allow_access", || {
        let allowed = agents(list, count)?;
        if !flags.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let range = find(address)?;
        let owner = owner(&range);
        let pool = Pool { agent: owner, flags: FINE_GRAINED };
        if allowed.iter().any(|agent| pool.access(*agent) == 0) {
            return Err(INVALID_ARGUMENT);
        }
        let devices: Vec<u32> = allowed.iter().filter_map(|agent| agent.device()).collect();
        for device in 0..DEVICES_MAX as u32 {
            range.allow(device, devices.contains(&device));
        }
        Ok(())
    })
}

pub(super) fn owner(range: &Range) -> Agent {
    if range.is_host() { Agent::Cpu(0) } else { Agent::Gpu(range.device()) }
}

/// Pins memory of the caller; every agent then reaches it at its own address.
fn lock(address: *mut c_void, bytes: usize, list: *mut hsa_agent_t, count: c_int) -> Outcome {
    if address.is_null() || bytes == 0 || list.is_null() != (count == 0) {
        return Err(INVALID_ARGUMENT);
    }
    if count != 0 {
        agents(list, u32::try_from(count).map_err(|_| INVALID_AGENT)?)?;
    }
    memory().adopt(address as u64, bytes as u64, NOBODY).ok_or(OUT_OF_RESOURCES)
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_memory_lock(
    address: *mut c_void,
    bytes: usize,
    list: *mut hsa_agent_t,
    count: c_int,
    out: Out<'_, *mut c_void>,
) -> hsa_status_t {
    enter("hsa_amd_memory_lock", || {
        lock(address, bytes, list, count)?;
        store(out, address)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_memory_lock_to_pool(
    address: *mut c_void,
    bytes: usize,
    list: *mut hsa_agent_t,
    count: c_int,
    pool: hsa_amd_memory_pool_t,
    flags: u32,
    out: Out<'_, *mut c_void>,
) -> hsa_status_t {
    enter("hsa_amd_memory_lock_to_pool", || {
        if flags != 0 {
            return Err(INVALID_ARGUMENT);
        }
        let pool = Pool::find(pool)?;
        if pool.agent.device().is_some() {
            return Err(INVALID_MEMORY_POOL);
        }
        lock(address, bytes, list, count)?;
        find(address as u64)?.set_note(pool.flags);
        store(out, address)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_memory_unlock(address: *mut c_void) -> hsa_status_t {
    enter("hsa_amd_memory_unlock", || {
        let locked = |range: &Range| matches!(range.kind, Kind::Registered { .. });
        Ok(memory().remove(address as u64, locked)?)
    })
}
