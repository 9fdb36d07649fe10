//! The runtime's types that this face understands, laid out as hip_runtime_api.h has them.
//!
//! Handles are integers here: they are looked up and never followed.

use std::ffi::{c_int, c_uint};

pub(super) type hipError_t = crate::runtime::code::Status;
pub(super) type hipDevice_t = c_int;
pub(super) type hipDeviceptr_t = u64;
pub(super) type hipStream_t = usize;
pub(super) type hipEvent_t = usize;
pub(super) type hipGraph_t = usize;
pub(super) type hipGraphExec_t = usize;
pub(super) type hipMemGenericAllocationHandle_t = u64;
pub(super) type hipIpcMemHandle_t = crate::runtime::share::Handle;
pub(super) type hipMemAllocationProp = crate::runtime::vmm::Properties;
pub(super) type hipMemAccessDesc = crate::runtime::vmm::Access;
pub(super) type hipStreamBatchMemOpParams = crate::runtime::words::BatchedWord;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct hipUUID(pub(super) [u8; 16]);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct hipPointerAttribute_t {
    pub(super) kind: c_uint,
    pub(super) device: c_int,
    pub(super) device_pointer: u64,
    pub(super) host_pointer: u64,
    pub(super) is_managed: c_int,
    pub(super) allocation_flags: c_uint,
}

const _: () = assert!(size_of::<hipPointerAttribute_t>() == 32);
