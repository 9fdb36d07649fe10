//! Declares the table of HIP functions that this crate looks up in the runtime library.

use rocm_library::RocmLibrary;

use crate::header::*;

/// The name of the HIP library and the sonames that are tried to load it.
pub const LIBRARY: RocmLibrary =
    RocmLibrary { name: "libamdhip64.so", sonames: &["7", "6", "5"], oldest: "5.7" };

rocm_library::table! {
    /// The functions of the loaded HIP library. A function that only newer releases have is an
    /// `Option`.
    pub struct Library(LIBRARY);
    required {
        init = hipInit;
        driver_get_version = hipDriverGetVersion;
        runtime_get_version = hipRuntimeGetVersion;
        get_device_count = hipGetDeviceCount;
        set_device = hipSetDevice;
        get_device = hipGetDevice;
        device_get_name = hipDeviceGetName;
        device_get_attribute = hipDeviceGetAttribute;
        device_get_pci_bus_id = hipDeviceGetPCIBusId;
        device_get_uuid = hipDeviceGetUuid;
        device_total_mem = hipDeviceTotalMem;
        device_can_access_peer = hipDeviceCanAccessPeer;
        device_enable_peer_access = hipDeviceEnablePeerAccess;
        ext_get_link_type_and_hop_count = hipExtGetLinkTypeAndHopCount;
        malloc = hipMalloc;
        free = hipFree;
        ext_malloc_with_flags = hipExtMallocWithFlags;
        host_malloc = hipHostMalloc;
        host_free = hipHostFree;
        host_register = hipHostRegister;
        host_unregister = hipHostUnregister;
        host_get_device_pointer = hipHostGetDevicePointer;
        mem_get_info = hipMemGetInfo;
        mem_get_address_range = hipMemGetAddressRange;
        pointer_get_attribute = hipPointerGetAttribute;
        pointer_get_attributes = hipPointerGetAttributes;
        memset_async = hipMemsetAsync;
        memset_d8_async = hipMemsetD8Async;
        memcpy = hipMemcpy;
        memcpy_async = hipMemcpyAsync;
        memcpy_dtod_async = hipMemcpyDtoDAsync;
        memcpy_peer_async = hipMemcpyPeerAsync;
        ipc_get_mem_handle = hipIpcGetMemHandle;
        ipc_open_mem_handle = hipIpcOpenMemHandle;
        ipc_close_mem_handle = hipIpcCloseMemHandle;
        mem_create = hipMemCreate;
        mem_address_reserve = hipMemAddressReserve;
        mem_map = hipMemMap;
        mem_set_access = hipMemSetAccess;
        mem_unmap = hipMemUnmap;
        mem_release = hipMemRelease;
        mem_address_free = hipMemAddressFree;
        mem_export_to_shareable_handle = hipMemExportToShareableHandle;
        mem_import_from_shareable_handle = hipMemImportFromShareableHandle;
        mem_get_allocation_granularity = hipMemGetAllocationGranularity;
        mem_retain_allocation_handle = hipMemRetainAllocationHandle;
        mem_get_allocation_properties_from_handle = hipMemGetAllocationPropertiesFromHandle;
        stream_create_with_flags = hipStreamCreateWithFlags;
        stream_create_with_priority = hipStreamCreateWithPriority;
        device_get_stream_priority_range = hipDeviceGetStreamPriorityRange;
        stream_destroy = hipStreamDestroy;
        stream_synchronize = hipStreamSynchronize;
        stream_query = hipStreamQuery;
        stream_wait_event = hipStreamWaitEvent;
        stream_get_device = hipStreamGetDevice;
        stream_is_capturing = hipStreamIsCapturing;
        stream_get_capture_info_v2 = hipStreamGetCaptureInfo_v2;
        stream_begin_capture = hipStreamBeginCapture;
        stream_end_capture = hipStreamEndCapture;
        thread_exchange_stream_capture_mode = hipThreadExchangeStreamCaptureMode;
        event_create_with_flags = hipEventCreateWithFlags;
        event_destroy = hipEventDestroy;
        event_record = hipEventRecord;
        event_query = hipEventQuery;
        event_synchronize = hipEventSynchronize;
        event_elapsed_time = hipEventElapsedTime;
        stream_write_value_32 = hipStreamWriteValue32;
        stream_wait_value_32 = hipStreamWaitValue32;
        stream_write_value_64 = hipStreamWriteValue64;
        stream_wait_value_64 = hipStreamWaitValue64;
        graph_instantiate = hipGraphInstantiate;
        graph_instantiate_with_flags = hipGraphInstantiateWithFlags;
        graph_launch = hipGraphLaunch;
        graph_exec_destroy = hipGraphExecDestroy;
        graph_destroy = hipGraphDestroy;
        get_error_name = hipGetErrorName;
        get_error_string = hipGetErrorString;
        get_last_error = hipGetLastError;
    }
    optional {
        memcpy_batch_async = hipMemcpyBatchAsync since "7.2";
        mem_get_handle_for_address_range = hipMemGetHandleForAddressRange since "7.2";
        stream_batch_mem_op = hipStreamBatchMemOp since "6.4";
    }
}
