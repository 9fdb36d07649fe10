//! Copies and fills, on a stream or at once.

use std::ffi::{c_int, c_uchar};

use super::Hip;
use super::call::enter;
use super::types::{hipDeviceptr_t, hipError_t, hipStream_t};
use crate::device::counters::Counter;
use crate::device::settings::Setting;
use crate::runtime::batch_copy::batch_copy;
use crate::runtime::code::{INVALID_VALUE, NOT_SUPPORTED, Outcome};
use crate::runtime::copy::{self, Said};
use crate::runtime::{Face, handles};

/// `hipMemcpyDeviceToDeviceNoCU`: by engines, not by compute units.
const DEVICE_TO_DEVICE_NO_CU: c_int = 1024;

/// What the kind of a copy says of its destination and its source.
fn said(kind: c_int) -> Outcome<(Said, Said)> {
    match kind {
        // The runtime believes what it knows of the addresses before it believes the caller.
        0..=2 | 4 => Ok((Said::Either, Said::Either)),
        3 | DEVICE_TO_DEVICE_NO_CU => Ok((Said::Device, Said::Device)),
        _ => Err(INVALID_VALUE),
    }
}

fn copy(dst: u64, src: u64, bytes: usize, kind: c_int, handle: hipStream_t) -> Outcome {
    let (dst_said, src_said) = said(kind)?;
    if kind == DEVICE_TO_DEVICE_NO_CU {
        let queue = handles::stream::<Hip>(handle)?;
        Counter::NoCuCopies.add(queue.session().device(), 1);
        if Setting::NoCu.is("drop") {
            return Ok(());
        }
        if Setting::NoCu.is("refuse") {
            return Err(NOT_SUPPORTED);
        }
        return copy::copy_by_one_engine::<Hip>(handle, (dst, dst_said), (src, src_said), bytes);
    }
    copy::copy::<Hip>(handle, (dst, dst_said), (src, src_said), bytes)
}

#[unsafe(no_mangle)]
extern "C" fn hipMemcpyAsync(
    dst: hipDeviceptr_t,
    src: hipDeviceptr_t,
    bytes: usize,
    kind: c_int,
    handle: hipStream_t,
) -> hipError_t {
    enter("hipMemcpyAsync", || copy(dst, src, bytes, kind, handle))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemcpy(
    dst: hipDeviceptr_t,
    src: hipDeviceptr_t,
    bytes: usize,
    kind: c_int,
) -> hipError_t {
    enter("hipMemcpy", || {
        let (dst_said, src_said) = said(kind)?;
        copy::copy_at_once::<Hip>((dst, dst_said), (src, src_said), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipMemcpyDtoDAsync(
    dst: hipDeviceptr_t,
    src: hipDeviceptr_t,
    bytes: usize,
    handle: hipStream_t,
) -> hipError_t {
    enter("hipMemcpyDtoDAsync", || {
        copy::copy::<Hip>(handle, (dst, Said::Device), (src, Said::Device), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipMemcpyPeerAsync(
    dst: hipDeviceptr_t,
    dst_device: c_int,
    src: hipDeviceptr_t,
    src_device: c_int,
    bytes: usize,
    handle: hipStream_t,
) -> hipError_t {
    enter("hipMemcpyPeerAsync", || {
        Hip::physical(dst_device)?;
        Hip::physical(src_device)?;
        copy::copy::<Hip>(handle, (dst, Said::Device), (src, Said::Device), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipMemsetD8Async(
    address: hipDeviceptr_t,
    value: c_uchar,
    count: usize,
    handle: hipStream_t,
) -> hipError_t {
    enter("hipMemsetD8Async", || copy::fill::<Hip>(handle, address, value, count))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemsetAsync(
    address: hipDeviceptr_t,
    value: c_int,
    bytes: usize,
    handle: hipStream_t,
) -> hipError_t {
    enter("hipMemsetAsync", || copy::fill::<Hip>(handle, address, value as c_uchar, bytes))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemset(address: hipDeviceptr_t, value: c_int, bytes: usize) -> hipError_t {
    enter("hipMemset", || copy::fill_at_once::<Hip>(address, value as c_uchar, bytes))
}

batch_copy!(hipMemcpyBatchAsync, Hip, enter, failed);
