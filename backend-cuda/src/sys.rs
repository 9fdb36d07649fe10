//! Loads the CUDA driver from `libcuda.so.1` on first use and looks up its entry points.
//!
//! This is the only file of the crate that declares foreign functions.
//!
//! Results are plain integers: a driver may be newer than this crate, and an `enum` with an unknown value
//! is undefined behaviour. A driver that lacks a required symbol is too old, and loading it fails. An
//! optional symbol is an `Option`, and the features that need it are reported as missing.
//!
//! Symbols are looked up by the exact name that cuda.h maps a function to (`cuMemAlloc_v2`), so that the
//! signature here equals the one there.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use libloading::Library;

pub(crate) use crate::cuda_h::*;

/// The soname of the driver's library, which is the same for all versions of the driver API.
pub(crate) const LIBRARY: &str = "libcuda.so.1";

macro_rules! table {
    (
        required { $($need:ident = $need_symbol:literal ($($need_arg:ty),*);)* }
        optional { $($may:ident = $may_symbol:literal ($($may_arg:ty),*);)* }
    ) => {
        /// The entry points of the loaded CUDA driver.
        pub struct Driver {
            $(pub(crate) $need: unsafe extern "C" fn($($need_arg),*) -> CUresult,)*
            $(pub(crate) $may: Option<unsafe extern "C" fn($($may_arg),*) -> CUresult>,)*
            /// Keeps the driver library loaded, which is never closed, because the driver runs threads of its own.
            _library: Library,
        }

        impl Driver {
            pub(crate) fn look_up(library: Library) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the type is the declaration of this symbol in cuda.h.
                    $($need: unsafe { symbol(&library, $need_symbol) }?,)*
                    // SAFETY: as above.
                    $($may: unsafe { symbol(&library, $may_symbol) }.ok(),)*
                    _library: library,
                })
            }
        }
    };
}

table! {
    required {
        init = "cuInit" (c_uint);
        driver_get_version = "cuDriverGetVersion" (*mut c_int);
        get_error_name = "cuGetErrorName" (CUresult, *mut *const c_char);
        get_error_string = "cuGetErrorString" (CUresult, *mut *const c_char);

        device_get_count = "cuDeviceGetCount" (*mut c_int);
        device_get = "cuDeviceGet" (*mut CUdevice, c_int);
        device_get_name = "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
        device_get_uuid = "cuDeviceGetUuid_v2" (*mut CUuuid, CUdevice);
        device_total_mem = "cuDeviceTotalMem_v2" (*mut usize, CUdevice);
        device_get_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, CUdevice);
        device_get_pci_bus_id = "cuDeviceGetPCIBusId" (*mut c_char, c_int, CUdevice);
        device_can_access_peer = "cuDeviceCanAccessPeer" (*mut c_int, CUdevice, CUdevice);
        device_get_p2p_attribute = "cuDeviceGetP2PAttribute" (*mut c_int, c_int, CUdevice, CUdevice);

        primary_ctx_retain = "cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
        primary_ctx_release = "cuDevicePrimaryCtxRelease_v2" (CUdevice);
        ctx_get_current = "cuCtxGetCurrent" (*mut CUcontext);
        ctx_set_current = "cuCtxSetCurrent" (CUcontext);
        ctx_enable_peer_access = "cuCtxEnablePeerAccess" (CUcontext, c_uint);

        mem_alloc = "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
        mem_free = "cuMemFree_v2" (CUdeviceptr);
        mem_get_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
        mem_get_address_range = "cuMemGetAddressRange_v2" (*mut CUdeviceptr, *mut usize, CUdeviceptr);
        mem_host_alloc = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        mem_host_register = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
        mem_host_unregister = "cuMemHostUnregister" (*mut c_void);
        mem_free_host = "cuMemFreeHost" (*mut c_void);
        mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2" (*mut CUdeviceptr, *mut c_void, c_uint);
        pointer_get_attribute = "cuPointerGetAttribute" (*mut c_void, c_int, CUdeviceptr);
        memset_d8_async = "cuMemsetD8Async" (CUdeviceptr, u8, usize, CUstream);
        memcpy_async = "cuMemcpyAsync" (CUdeviceptr, CUdeviceptr, usize, CUstream);

        ipc_get_mem_handle = "cuIpcGetMemHandle" (*mut CUipcMemHandle, CUdeviceptr);
        ipc_open_mem_handle = "cuIpcOpenMemHandle_v2" (*mut CUdeviceptr, CUipcMemHandle, c_uint);
        ipc_close_mem_handle = "cuIpcCloseMemHandle" (CUdeviceptr);

        stream_create = "cuStreamCreate" (*mut CUstream, c_uint);
        stream_destroy = "cuStreamDestroy_v2" (CUstream);
        stream_query = "cuStreamQuery" (CUstream);
        stream_wait_event = "cuStreamWaitEvent" (CUstream, CUevent, c_uint);
        stream_is_capturing = "cuStreamIsCapturing" (CUstream, *mut c_int);
        stream_get_ctx = "cuStreamGetCtx" (CUstream, *mut CUcontext);
        stream_begin_capture = "cuStreamBeginCapture_v2" (CUstream, c_int);
        stream_end_capture = "cuStreamEndCapture" (CUstream, *mut CUgraph);
        graph_instantiate = "cuGraphInstantiateWithFlags" (*mut CUgraphExec, CUgraph, u64);
        graph_launch = "cuGraphLaunch" (CUgraphExec, CUstream);
        graph_exec_destroy = "cuGraphExecDestroy" (CUgraphExec);
        graph_destroy = "cuGraphDestroy" (CUgraph);

        event_create = "cuEventCreate" (*mut CUevent, c_uint);
        event_destroy = "cuEventDestroy_v2" (CUevent);
        event_record = "cuEventRecord" (CUevent, CUstream);
        event_query = "cuEventQuery" (CUevent);
        event_elapsed_time = "cuEventElapsedTime" (*mut f32, CUevent, CUevent);
    }
    optional {
        // In this form, with 64-bit values, since CUDA 11.7.
        stream_batch_mem_op = "cuStreamBatchMemOp_v2" (CUstream, c_uint, *mut CUstreamBatchMemOpParams, c_uint);
        stream_write_value_32 = "cuStreamWriteValue32_v2" (CUstream, CUdeviceptr, u32, c_uint);
        stream_write_value_64 = "cuStreamWriteValue64_v2" (CUstream, CUdeviceptr, u64, c_uint);
        stream_wait_value_64 = "cuStreamWaitValue64_v2" (CUstream, CUdeviceptr, u64, c_uint);

        // Several copies in one call: since CUDA 12.8; in another form since 13.0.
        memcpy_batch_async = "cuMemcpyBatchAsync" (*mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut CUmemcpyAttributes, *mut usize, usize, *mut usize, CUstream);
        memcpy_batch_async_v2 = "cuMemcpyBatchAsync_v2" (*mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut CUmemcpyAttributes, *mut usize, usize, CUstream);

        // Rows of a copy in one call.
        memcpy_2d_async = "cuMemcpy2DAsync_v2" (*const CUmemcpy2D, CUstream);

        // A stream with a priority does not share its hardware queue with streams that wait.
        ctx_get_stream_priority_range = "cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
        stream_create_with_priority = "cuStreamCreateWithPriority" (*mut CUstream, c_uint, c_int);
        // A second context, whose streams have hardware queues of their own.
        ctx_create = "cuCtxCreate_v2" (*mut CUcontext, c_uint, CUdevice);
        ctx_destroy = "cuCtxDestroy_v2" (CUcontext);
        ctx_pop_current = "cuCtxPopCurrent_v2" (*mut CUcontext);
        // Reports which capture a stream is part of.
        stream_get_capture_info = "cuStreamGetCaptureInfo_v2" (CUstream, *mut c_int, *mut u64, *mut CUgraph, *mut *const c_void, *mut usize);

        // Prevents captures of other threads from failing calls of this thread.
        thread_exchange_stream_capture_mode = "cuThreadExchangeStreamCaptureMode" (*mut c_int);

        // Virtual memory management.
        mem_create = "cuMemCreate" (*mut CUmemHandle, usize, *const CUmemAllocationProp, u64);
        mem_release = "cuMemRelease" (CUmemHandle);
        mem_address_reserve = "cuMemAddressReserve" (*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
        mem_address_free = "cuMemAddressFree" (CUdeviceptr, usize);
        mem_map = "cuMemMap" (CUdeviceptr, usize, usize, CUmemHandle, u64);
        mem_unmap = "cuMemUnmap" (CUdeviceptr, usize);
        mem_set_access = "cuMemSetAccess" (CUdeviceptr, usize, *const CUmemAccessDesc, usize);
        mem_get_allocation_granularity = "cuMemGetAllocationGranularity" (*mut usize, *const CUmemAllocationProp, c_int);
        mem_export_to_shareable_handle = "cuMemExportToShareableHandle" (*mut c_void, CUmemHandle, c_int, u64);
        mem_import_from_shareable_handle = "cuMemImportFromShareableHandle" (*mut CUmemHandle, *mut c_void, c_int);
        mem_retain_allocation_handle = "cuMemRetainAllocationHandle" (*mut CUmemHandle, *mut c_void);
        mem_get_allocation_properties = "cuMemGetAllocationPropertiesFromHandle" (*mut CUmemAllocationProp, CUmemHandle);

        // Kernels.
        module_load_data_ex = "cuModuleLoadDataEx" (*mut CUmodule, *const c_void, c_uint, *mut c_int, *mut *mut c_void);
        module_get_function = "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
        launch_kernel = "cuLaunchKernel" (CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void);

        // Memory for NICs: since CUDA 11.7 and 11.3.
        mem_get_handle_for_address_range = "cuMemGetHandleForAddressRange" (*mut c_void, CUdeviceptr, usize, c_int, u64);
        flush_gpu_direct_rdma_writes = "cuFlushGPUDirectRDMAWrites" (c_int, c_int);
    }
}

impl Driver {
    /// Returns whether the driver loads and launches kernels.
    pub(crate) fn has_kernels(&self) -> bool {
        self.module_load_data_ex.is_some()
            && self.module_get_function.is_some()
            && self.launch_kernel.is_some()
    }

    /// Returns the driver's name and explanation of a result code, both empty for a code that the driver does
    /// not know.
    pub(crate) fn name_of(&self, code: CUresult) -> (String, String) {
        let query = |call: unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult| {
            let mut text = std::ptr::null();
            // SAFETY: the call stores a pointer to a static string, or null.
            let result = unsafe { call(code, &raw mut text) };
            if result != CUDA_SUCCESS || text.is_null() {
                return String::new();
            }
            // SAFETY: the pointer is a static string of the driver, terminated by a zero.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        (query(self.get_error_name), query(self.get_error_string))
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Driver")
    }
}

/// Looks up a symbol of the driver's library, or returns its name if it is missing.
///
/// # Safety
/// `F` must be the type of the function that the library exports under this name.
unsafe fn symbol<F: Copy>(library: &Library, name: &'static str) -> Result<F, &'static str> {
    // SAFETY: the caller vouches for the type; the library is never closed, so the pointer stays valid.
    let found = unsafe { library.get::<F>(name) };
    found.map(|symbol| *symbol).map_err(|_| name)
}
