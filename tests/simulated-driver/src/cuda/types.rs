//! The driver's types that this face understands, laid out as cuda.h has them.
//!
//! Handles are integers here: they are looked up and never followed.

use std::ffi::c_int;

pub(crate) type CUdevice = c_int;
pub(crate) type CUdeviceptr = u64;
pub(crate) type CUcontext = usize;
pub(crate) type CUstream = usize;
pub(crate) type CUevent = usize;
pub(crate) type CUgraph = usize;
pub(crate) type CUgraphExec = usize;
pub(crate) type CUmemHandle = u64;

/// As [`Status`](crate::runtime::code::Status).
pub(crate) type CUresult = crate::runtime::code::Status;
pub(crate) type CUipcMemHandle = crate::runtime::share::Handle;
pub(crate) type CUmemAllocationProp = crate::runtime::vmm::Properties;
pub(crate) type CUmemAccessDesc = crate::runtime::vmm::Access;
pub(crate) type CUstreamBatchMemOpParams = crate::runtime::words::BatchedWord;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUuuid(pub(crate) [u8; 16]);
