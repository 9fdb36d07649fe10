//! The memory pools of an agent: what it has of memory, and how it shares it.

use std::ffi::c_void;

use super::Agent;
use crate::error::Error;
use crate::sys::Hsa;
use crate::sys::hsa::{
    hsa_amd_memory_pool_global_flag_s, hsa_amd_memory_pool_info_t, hsa_amd_memory_pool_t,
    hsa_amd_segment_t, hsa_status_t,
};

/// A pool of memory that every agent may be given access to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pool {
    pub(crate) handle: hsa_amd_memory_pool_t,
    /// What one agent stores there another sees at once, without the end of a kernel.
    pub(crate) fine_grained: bool,
}

/// The agent's pools of global memory, in the order of the runtime.
///
/// # Errors
/// The runtime's refusal.
pub(crate) fn pools(hsa: &Hsa, agent: &Agent) -> Result<Vec<Pool>, Error> {
    extern "C" fn add(pool: hsa_amd_memory_pool_t, list: *mut c_void) -> hsa_status_t {
        // SAFETY: the vector below, which nobody else uses while the runtime calls this.
        let list = unsafe { &mut *list.cast::<Vec<hsa_amd_memory_pool_t>>() };
        list.push(pool);
        hsa_status_t::HSA_STATUS_SUCCESS
    }
    let mut handles: Vec<hsa_amd_memory_pool_t> = Vec::new();
    let list: *mut c_void = (&raw mut handles).cast();
    // SAFETY: the agent is of this runtime; the function takes the vector that is given with it.
    let status =
        unsafe { (hsa.calls.amd_agent_iterate_memory_pools)(agent.handle, Some(add), list) };
    if status != hsa_status_t::HSA_STATUS_SUCCESS {
        return Err(Error::hsa(hsa, "hsa_amd_agent_iterate_memory_pools", None, status));
    }
    let mut pools = Vec::new();
    for handle in handles {
        let segment = hsa_amd_memory_pool_info_t::HSA_AMD_MEMORY_POOL_INFO_SEGMENT;
        if ask(hsa, handle, segment, hsa_amd_segment_t(u32::MAX))?
            != hsa_amd_segment_t::HSA_AMD_SEGMENT_GLOBAL
        {
            continue;
        }
        let flags = hsa_amd_memory_pool_info_t::HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS;
        let flags = ask(hsa, handle, flags, 0_u32)?;
        let fine =
            hsa_amd_memory_pool_global_flag_s::HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_FINE_GRAINED.0;
        pools.push(Pool { handle, fine_grained: flags & fine != 0 });
    }
    Ok(pools)
}

/// An attribute of a pool, written over `value`.
fn ask<T>(
    hsa: &Hsa,
    pool: hsa_amd_memory_pool_t,
    attribute: hsa_amd_memory_pool_info_t,
    mut value: T,
) -> Result<T, Error> {
    let place: *mut c_void = (&raw mut value).cast();
    // SAFETY: the pool is of this runtime; the callers above give values of the attribute's type.
    let status = unsafe { (hsa.calls.amd_memory_pool_get_info)(pool, attribute, place) };
    if status == hsa_status_t::HSA_STATUS_SUCCESS {
        Ok(value)
    } else {
        Err(Error::hsa(hsa, "hsa_amd_memory_pool_get_info", None, status))
    }
}
