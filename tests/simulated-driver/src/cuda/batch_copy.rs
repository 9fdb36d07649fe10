//! Several copies in one call, in both forms of it.

use super::Cuda;
use super::types::{CUdeviceptr, CUresult, CUstream};
use crate::runtime::batch_copy::{Attributes, Call, run};
use crate::runtime::call::enter;

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyBatchAsync(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    bytes: *mut usize,
    count: usize,
    attributes: *mut Attributes,
    firsts: *mut usize,
    attributes_count: usize,
    failed: *mut usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemcpyBatchAsync", || {
        run::<Cuda>(&Call {
            to,
            from,
            bytes,
            count,
            attributes,
            firsts,
            attributes_count,
            failed,
            handle,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyBatchAsync_v2(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    bytes: *mut usize,
    count: usize,
    attributes: *mut Attributes,
    firsts: *mut usize,
    attributes_count: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemcpyBatchAsync_v2", || {
        let failed = std::ptr::null_mut();
        run::<Cuda>(&Call {
            to,
            from,
            bytes,
            count,
            attributes,
            firsts,
            attributes_count,
            failed,
            handle,
        })
    })
}
