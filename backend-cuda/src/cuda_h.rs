//! Declares the types and constants of cuda.h, under the names of cuda.h.
//!
//! Constants are integers instead of enums, for the reason given in `sys.rs`. The layouts are checked
//! against the sizes in cuda.h at the end of this file.

#![allow(non_camel_case_types, reason = "names of cuda.h")]
#![allow(dead_code, reason = "unused constants document the range of values")]

use std::ffi::{c_int, c_uchar, c_uint, c_ushort, c_void};

pub(crate) type CUresult = c_int;
pub(crate) type CUdevice = c_int;
pub(crate) type CUdeviceptr = u64;
pub(crate) type CUcontext = *mut c_void;
pub(crate) type CUstream = *mut c_void;
pub(crate) type CUevent = *mut c_void;
pub(crate) type CUgraph = *mut c_void;
pub(crate) type CUmodule = *mut c_void;
pub(crate) type CUfunction = *mut c_void;
pub(crate) type CUgraphExec = *mut c_void;
pub(crate) type CUmemHandle = u64;

pub(crate) const CUDA_SUCCESS: CUresult = 0;
pub(crate) const CUDA_ERROR_INVALID_VALUE: CUresult = 1;
pub(crate) const CUDA_ERROR_OUT_OF_MEMORY: CUresult = 2;
pub(crate) const CUDA_ERROR_NOT_INITIALIZED: CUresult = 3;
pub(crate) const CUDA_ERROR_DEINITIALIZED: CUresult = 4;
pub(crate) const CUDA_ERROR_STUB_LIBRARY: CUresult = 34;
pub(crate) const CUDA_ERROR_DEVICE_UNAVAILABLE: CUresult = 46;
pub(crate) const CUDA_ERROR_NO_DEVICE: CUresult = 100;
pub(crate) const CUDA_ERROR_INVALID_DEVICE: CUresult = 101;
pub(crate) const CUDA_ERROR_INVALID_CONTEXT: CUresult = 201;
pub(crate) const CUDA_ERROR_ECC_UNCORRECTABLE: CUresult = 214;
pub(crate) const CUDA_ERROR_PEER_ACCESS_UNSUPPORTED: CUresult = 217;
pub(crate) const CUDA_ERROR_NVLINK_UNCORRECTABLE: CUresult = 220;
pub(crate) const CUDA_ERROR_INVALID_HANDLE: CUresult = 400;
pub(crate) const CUDA_ERROR_NOT_FOUND: CUresult = 500;
pub(crate) const CUDA_ERROR_NOT_READY: CUresult = 600;
pub(crate) const CUDA_ERROR_ILLEGAL_ADDRESS: CUresult = 700;
pub(crate) const CUDA_ERROR_LAUNCH_TIMEOUT: CUresult = 702;
pub(crate) const CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: CUresult = 704;
pub(crate) const CUDA_ERROR_CONTEXT_IS_DESTROYED: CUresult = 709;
pub(crate) const CUDA_ERROR_TOO_MANY_PEERS: CUresult = 711;
pub(crate) const CUDA_ERROR_LAUNCH_FAILED: CUresult = 719;
pub(crate) const CUDA_ERROR_NOT_PERMITTED: CUresult = 800;
pub(crate) const CUDA_ERROR_NOT_SUPPORTED: CUresult = 801;
pub(crate) const CUDA_ERROR_SYSTEM_NOT_READY: CUresult = 802;
pub(crate) const CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: CUresult = 803;

pub(crate) const JIT_ERROR_LOG_BUFFER: c_int = 5;
pub(crate) const JIT_ERROR_LOG_BUFFER_SIZE_BYTES: c_int = 6;

// Device attributes.
pub(crate) const ATTRIBUTE_ASYNC_ENGINE_COUNT: c_int = 40;
pub(crate) const ATTRIBUTE_COMPUTE_MODE: c_int = 20;
pub(crate) const ATTRIBUTE_UNIFIED_ADDRESSING: c_int = 41;
pub(crate) const ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: c_int = 75;
pub(crate) const ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: c_int = 76;
pub(crate) const ATTRIBUTE_MULTIPROCESSOR_COUNT: c_int = 16;
/// The second version of the device attribute, because the CUDA driver has removed the first one (number 92).
pub(crate) const ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: c_int = 122;
pub(crate) const ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_int = 102;
pub(crate) const ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: c_int = 103;
pub(crate) const ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: c_int = 110;
pub(crate) const ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: c_int = 116;
pub(crate) const ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: c_int = 117;
pub(crate) const ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: c_int = 118;
pub(crate) const ATTRIBUTE_DMA_BUF_SUPPORTED: c_int = 124;
pub(crate) const ATTRIBUTE_IPC_EVENT_SUPPORTED: c_int = 125;
pub(crate) const ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: c_int = 128;

pub(crate) const COMPUTE_MODE_DEFAULT: c_int = 0;
pub(crate) const COMPUTE_MODE_PROHIBITED: c_int = 2;
pub(crate) const COMPUTE_MODE_EXCLUSIVE_PROCESS: c_int = 3;

// Attributes of a pair of devices.
pub(crate) const P2P_ATTRIBUTE_PERFORMANCE_RANK: c_int = 1;
pub(crate) const P2P_ATTRIBUTE_ACCESS_SUPPORTED: c_int = 2;
pub(crate) const P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: c_int = 3;

// Attributes of a pointer.
pub(crate) const POINTER_ATTRIBUTE_CONTEXT: c_int = 1;
pub(crate) const POINTER_ATTRIBUTE_MEMORY_TYPE: c_int = 2;
pub(crate) const POINTER_ATTRIBUTE_BUFFER_ID: c_int = 7;
pub(crate) const POINTER_ATTRIBUTE_IS_MANAGED: c_int = 8;
pub(crate) const POINTER_ATTRIBUTE_DEVICE_ORDINAL: c_int = 9;
pub(crate) const POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: c_int = 10;
pub(crate) const POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: c_int = 14;
pub(crate) const MEMORYTYPE_HOST: c_uint = 1;
pub(crate) const MEMORYTYPE_DEVICE: c_uint = 2;

pub(crate) const MEMHOSTALLOC_PORTABLE: c_uint = 1;
pub(crate) const MEMHOSTALLOC_DEVICEMAP: c_uint = 2;
pub(crate) const MEMHOSTREGISTER_PORTABLE: c_uint = 1;
pub(crate) const MEMHOSTREGISTER_DEVICEMAP: c_uint = 2;
pub(crate) const IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const STREAM_CAPTURE_MODE_THREAD_LOCAL: c_int = 1;
pub(crate) const STREAM_CAPTURE_MODE_RELAXED: c_int = 2;
pub(crate) const STREAM_CAPTURE_STATUS_NONE: c_int = 0;
pub(crate) const STREAM_CAPTURE_STATUS_ACTIVE: c_int = 1;
pub(crate) const EVENT_DEFAULT: c_uint = 0;
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;

pub(crate) const STREAM_MEM_OP_WRITE_VALUE_32: c_uint = 2;
pub(crate) const STREAM_MEM_OP_WAIT_VALUE_64: c_uint = 4;
pub(crate) const STREAM_MEM_OP_WRITE_VALUE_64: c_uint = 5;
/// Lets a stream wait pass if `(int64_t)(*address - value) >= 0`, which is a cyclic comparison.
pub(crate) const STREAM_WAIT_VALUE_GEQ: c_uint = 0;
pub(crate) const STREAM_WAIT_VALUE_AND: c_uint = 2;
pub(crate) const STREAM_WRITE_VALUE_DEFAULT: c_uint = 0;
/// The largest number of stream memory operations in one batch, because cuda.h requires "less than 256".
pub(crate) const STREAM_BATCH_OPS_MAX: usize = 255;

pub(crate) const MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD: c_int = 1;
/// The write ordering of a GPU that sees the writes of a NIC in order without a flush.
pub(crate) const GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: c_int = 100;
pub(crate) const FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST: c_int = 1;
pub(crate) const FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX: c_int = 0;
pub(crate) const FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER: c_int = 100;

pub(crate) const MEM_ALLOCATION_TYPE_PINNED: c_int = 1;
pub(crate) const MEM_HANDLE_TYPE_NONE: c_int = 0;
pub(crate) const MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;
pub(crate) const MEM_HANDLE_TYPE_FABRIC: c_int = 8;
pub(crate) const MEM_LOCATION_TYPE_DEVICE: c_int = 1;
pub(crate) const MEM_ACCESS_FLAGS_PROT_READWRITE: c_int = 3;
pub(crate) const MEM_ALLOC_GRANULARITY_MINIMUM: c_int = 0;
pub(crate) const MEM_ALLOC_GRANULARITY_RECOMMENDED: c_int = 1;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CUuuid {
    pub(crate) bytes: [u8; 16],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CUipcMemHandle {
    pub(crate) reserved: [u8; 64],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CUmemFabricHandle {
    pub(crate) data: [u8; 64],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CUmemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemAllocationProp {
    pub(crate) kind: c_int,
    pub(crate) requested_handle_types: c_int,
    pub(crate) location: CUmemLocation,
    pub(crate) win32_handle_meta_data: *mut c_void,
    pub(crate) compression_type: c_uchar,
    pub(crate) gpu_direct_rdma_capable: c_uchar,
    pub(crate) usage: c_ushort,
    pub(crate) reserved: [c_uchar; 4],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CUmemAccessDesc {
    pub(crate) location: CUmemLocation,
    pub(crate) flags: c_int,
}

/// One stream memory operation of a batch, a write or a wait.
///
/// In cuda.h this is a union of different structs. Only the 64-bit write and wait are used here, and these
/// have the same members at the same offsets.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUstreamBatchMemOpParams {
    pub(crate) operation: c_uint,
    pub(crate) address: CUdeviceptr,
    pub(crate) value: u64,
    pub(crate) flags: c_uint,
    /// A field reserved for the driver, which must be 0.
    pub(crate) alias: CUdeviceptr,
    /// Pads the operation to the size of the union, which is six 64-bit words.
    pub(crate) rest: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CUmemcpyAttributes {
    pub(crate) src_access_order: c_int,
    pub(crate) src_location_hint: CUmemLocation,
    pub(crate) dst_location_hint: CUmemLocation,
    pub(crate) flags: c_uint,
}

/// The source or the destination of a two-dimensional copy.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CUmemcpy2DSide {
    pub(crate) x_bytes: usize,
    pub(crate) y: usize,
    pub(crate) memory_type: c_uint,
    pub(crate) host: *const c_void,
    pub(crate) device: CUdeviceptr,
    pub(crate) array: *mut c_void,
    pub(crate) pitch: usize,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CUmemcpy2D {
    pub(crate) src: CUmemcpy2DSide,
    pub(crate) dst: CUmemcpy2DSide,
    pub(crate) width_bytes: usize,
    pub(crate) height: usize,
}

pub(crate) const MEMCPY_SRC_ACCESS_ORDER_STREAM: c_int = 1;

const _: () = {
    assert!(size_of::<CUmemcpyAttributes>() == 24);
    assert!(size_of::<CUmemcpy2D>() == 128);
    assert!(std::mem::offset_of!(CUmemcpy2D, dst) == 56);
    assert!(size_of::<CUstreamBatchMemOpParams>() == 48);
    assert!(std::mem::offset_of!(CUstreamBatchMemOpParams, address) == 8);
    assert!(std::mem::offset_of!(CUstreamBatchMemOpParams, value) == 16);
    assert!(std::mem::offset_of!(CUstreamBatchMemOpParams, flags) == 24);
    assert!(std::mem::offset_of!(CUstreamBatchMemOpParams, alias) == 32);
    assert!(size_of::<CUmemAllocationProp>() == 32);
    assert!(size_of::<CUmemAccessDesc>() == 12);
    assert!(size_of::<CUipcMemHandle>() == 64);
};
