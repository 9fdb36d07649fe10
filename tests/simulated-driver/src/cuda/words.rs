//! Memory operations of a stream.

use std::ffi::c_uint;

use super::Cuda;
use super::types::{CUdeviceptr, CUresult, CUstream, CUstreamBatchMemOpParams};
use crate::device::words::Width;
use crate::runtime::call::enter;
use crate::runtime::words::{WAIT_FLUSH, submit, submit_batch, wait, write};

#[unsafe(no_mangle)]
extern "C" fn cuStreamBatchMemOp_v2(
    handle: CUstream,
    count: c_uint,
    operations: *const CUstreamBatchMemOpParams,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamBatchMemOp_v2", || submit_batch::<Cuda>(handle, count, operations, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWriteValue64_v2(
    handle: CUstream,
    address: CUdeviceptr,
    value: u64,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamWriteValue64_v2", || {
        submit::<Cuda>(handle, &[write(address, value, Width::Eight, flags)?])
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitValue64_v2(
    handle: CUstream,
    address: CUdeviceptr,
    value: u64,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamWaitValue64_v2", || {
        submit::<Cuda>(handle, &[wait(address, value, Width::Eight, flags & !WAIT_FLUSH)?])
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWriteValue32_v2(
    handle: CUstream,
    address: CUdeviceptr,
    value: u32,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamWriteValue32_v2", || {
        submit::<Cuda>(handle, &[write(address, value.into(), Width::Four, flags)?])
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitValue32_v2(
    handle: CUstream,
    address: CUdeviceptr,
    value: u32,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamWaitValue32_v2", || {
        submit::<Cuda>(handle, &[wait(address, value.into(), Width::Four, flags & !WAIT_FLUSH)?])
    })
}
