//! Copies and fills, on a stream or at once.

use std::ffi::{c_uchar, c_uint, c_void};

use super::Cuda;
use super::types::{CUcontext, CUdeviceptr, CUresult, CUstream};
use crate::runtime::call::enter;
use crate::runtime::copy::{self, Said};

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyAsync(
    dst: CUdeviceptr,
    src: CUdeviceptr,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemcpyAsync", || {
        copy::copy::<Cuda>(handle, (dst, Said::Either), (src, Said::Either), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(
    dst: CUdeviceptr,
    src: CUdeviceptr,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemcpyDtoDAsync_v2", || {
        copy::copy::<Cuda>(handle, (dst, Said::Device), (src, Said::Device), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyPeerAsync(
    dst: CUdeviceptr,
    _dst_context: CUcontext,
    src: CUdeviceptr,
    _src_context: CUcontext,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemcpyPeerAsync", || {
        copy::copy::<Cuda>(handle, (dst, Said::Device), (src, Said::Device), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(
    dst: CUdeviceptr,
    src: *const c_void,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemcpyHtoDAsync_v2", || {
        copy::copy::<Cuda>(handle, (dst, Said::Device), (src as u64, Said::Host), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(
    dst: *mut c_void,
    src: CUdeviceptr,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemcpyDtoHAsync_v2", || {
        copy::copy::<Cuda>(handle, (dst as u64, Said::Host), (src, Said::Device), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoD_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize) -> CUresult {
    enter("cuMemcpyHtoD_v2", || {
        copy::copy_at_once::<Cuda>((dst, Said::Device), (src as u64, Said::Host), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize) -> CUresult {
    enter("cuMemcpyDtoH_v2", || {
        copy::copy_at_once::<Cuda>((dst as u64, Said::Host), (src, Said::Device), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoD_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) -> CUresult {
    enter("cuMemcpyDtoD_v2", || {
        copy::copy_at_once::<Cuda>((dst, Said::Device), (src, Said::Device), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(
    address: CUdeviceptr,
    value: c_uchar,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemsetD8Async", || copy::fill::<Cuda>(handle, address, value, bytes))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8_v2(address: CUdeviceptr, value: c_uchar, bytes: usize) -> CUresult {
    enter("cuMemsetD8_v2", || copy::fill_at_once::<Cuda>(address, value, bytes))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32Async(
    address: CUdeviceptr,
    value: c_uint,
    count: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemsetD32Async", || copy::fill_words::<Cuda>(handle, address, value, count))
}
