//! Defines the runtime's types in the layout of hsa.h and hsa_ext_amd.h.
//!
//! Handles are numbers: they are looked up, never followed.

use std::ffi::{c_int, c_void};

pub(super) type hsa_status_t = u32;
pub(super) type hsa_signal_value_t = i64;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct hsa_agent_t(pub(super) u64);

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct hsa_amd_memory_pool_t(pub(super) u64);

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct hsa_signal_t(pub(super) u64);

/// The names of memory and of signals for other processes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct hsa_amd_ipc_memory_t(pub(super) [u8; 32]);

pub(super) type AgentCallback =
    unsafe extern "C" fn(agent: hsa_agent_t, data: *mut c_void) -> hsa_status_t;
pub(super) type PoolCallback =
    unsafe extern "C" fn(pool: hsa_amd_memory_pool_t, data: *mut c_void) -> hsa_status_t;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct hsa_amd_memory_pool_link_info_t {
    pub(super) min_latency: u32,
    pub(super) max_latency: u32,
    pub(super) min_bandwidth: u32,
    pub(super) max_bandwidth: u32,
    pub(super) atomic_support_32bit: bool,
    pub(super) atomic_support_64bit: bool,
    pub(super) coherent_support: bool,
    pub(super) link_type: u32,
    pub(super) numa_distance: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct hsa_amd_pointer_info_t {
    pub(super) size: u32,
    pub(super) kind: c_int,
    pub(super) agent_base_address: u64,
    pub(super) host_base_address: u64,
    pub(super) size_in_bytes: usize,
    pub(super) user_data: u64,
    pub(super) agent_owner: hsa_agent_t,
    pub(super) global_flags: u32,
    pub(super) registered: bool,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct hsa_amd_profiling_async_copy_time_t {
    pub(super) start: u64,
    pub(super) end: u64,
}

const _: () = {
    assert!(size_of::<hsa_amd_memory_pool_link_info_t>() == 28);
    assert!(size_of::<hsa_amd_pointer_info_t>() == 56);
};
