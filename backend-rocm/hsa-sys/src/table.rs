//! Declares the table of HSA functions that this crate looks up in the runtime library.

use rocm_library::RocmLibrary;

use crate::header::*;

/// The name of the HSA runtime's library and the soname that is tried to load it. Its soname has
/// not changed since HSA 1.0.
pub const LIBRARY: RocmLibrary =
    RocmLibrary { name: "libhsa-runtime64.so", sonames: &["1"], oldest: "5.7" };

rocm_library::table! {
    /// The functions of the loaded HSA runtime. A function that only newer releases have is an
    /// `Option`.
    pub struct Library(LIBRARY);
    required {
        init = hsa_init;
        shut_down = hsa_shut_down;
        status_string = hsa_status_string;
        system_get_info = hsa_system_get_info;
        iterate_agents = hsa_iterate_agents;
        agent_get_info = hsa_agent_get_info;
        amd_agent_iterate_memory_pools = hsa_amd_agent_iterate_memory_pools;
        amd_memory_pool_get_info = hsa_amd_memory_pool_get_info;
        amd_agent_memory_pool_get_info = hsa_amd_agent_memory_pool_get_info;
        amd_memory_pool_allocate = hsa_amd_memory_pool_allocate;
        amd_memory_pool_free = hsa_amd_memory_pool_free;
        amd_agents_allow_access = hsa_amd_agents_allow_access;
        amd_pointer_info = hsa_amd_pointer_info;
        signal_create = hsa_signal_create;
        signal_destroy = hsa_signal_destroy;
        amd_signal_create = hsa_amd_signal_create;
        signal_load_relaxed = hsa_signal_load_relaxed;
        signal_load_scacquire = hsa_signal_load_scacquire;
        signal_store_relaxed = hsa_signal_store_relaxed;
        signal_store_screlease = hsa_signal_store_screlease;
        signal_subtract_relaxed = hsa_signal_subtract_relaxed;
        signal_subtract_screlease = hsa_signal_subtract_screlease;
        signal_wait_relaxed = hsa_signal_wait_relaxed;
        signal_wait_scacquire = hsa_signal_wait_scacquire;
        amd_signal_value_pointer = hsa_amd_signal_value_pointer;
        amd_ipc_signal_create = hsa_amd_ipc_signal_create;
        amd_ipc_signal_attach = hsa_amd_ipc_signal_attach;
        amd_ipc_memory_create = hsa_amd_ipc_memory_create;
        amd_ipc_memory_attach = hsa_amd_ipc_memory_attach;
        amd_ipc_memory_detach = hsa_amd_ipc_memory_detach;
        amd_memory_async_copy = hsa_amd_memory_async_copy;
        amd_interop_map_buffer = hsa_amd_interop_map_buffer;
        amd_interop_unmap_buffer = hsa_amd_interop_unmap_buffer;
        amd_memory_lock = hsa_amd_memory_lock;
        amd_memory_lock_to_pool = hsa_amd_memory_lock_to_pool;
        amd_memory_unlock = hsa_amd_memory_unlock;
        amd_profiling_async_copy_enable = hsa_amd_profiling_async_copy_enable;
        amd_profiling_get_async_copy_time = hsa_amd_profiling_get_async_copy_time;
    }
    optional {
        amd_memory_async_copy_on_engine = hsa_amd_memory_async_copy_on_engine since "6.1";
        amd_memory_copy_engine_status = hsa_amd_memory_copy_engine_status since "6.1";
        amd_memory_get_preferred_copy_engine = hsa_amd_memory_get_preferred_copy_engine since "7.2";
        amd_portable_export_dmabuf = hsa_amd_portable_export_dmabuf since "6.1";
        amd_portable_export_dmabuf_v2 = hsa_amd_portable_export_dmabuf_v2 since "7.2";
        amd_portable_close_dmabuf = hsa_amd_portable_close_dmabuf since "6.1";
    }
}
