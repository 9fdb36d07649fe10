//! Several copies in one call, in both forms of it.
//!
//! The vendor promises no order inside such a call. Here the last copy is made first, so that whoever
//! counts on an order is found out.

use std::ffi::{c_int, c_uint};

use super::call::enter;
use super::code::{CUresult, INVALID_VALUE, Outcome, STREAM_CAPTURE_UNSUPPORTED};
use super::copy::{Said, copy};
use super::handles::stream;
use super::types::{CUdeviceptr, CUmemLocation, CUstream, STREAM_PER_THREAD};

/// The orders in which sources may be read.
const ACCESS_ORDERS: std::ops::RangeInclusive<c_int> = 1..=3;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Attributes {
    src_access_order: c_int,
    src_location_hint: CUmemLocation,
    dst_location_hint: CUmemLocation,
    flags: c_uint,
}

/// What both forms are given.
struct Call {
    to: *const CUdeviceptr,
    from: *const CUdeviceptr,
    bytes: *const usize,
    count: usize,
    attributes: *const Attributes,
    firsts: *const usize,
    attributes_count: usize,
    handle: CUstream,
}

/// # Safety
/// `array` is null or holds `count` values.
unsafe fn values<'a, T>(array: *const T, count: usize) -> Outcome<&'a [T]> {
    if array.is_null() || count == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's.
    Ok(unsafe { std::slice::from_raw_parts(array, count) })
}

fn run(call: &Call) -> Outcome {
    let &Call { count, attributes_count, handle, .. } = call;
    if handle <= STREAM_PER_THREAD {
        return Err(INVALID_VALUE);
    }
    let queue = stream(handle)?;
    // SAFETY: the caller gives arrays of these lengths.
    let to = unsafe { values(call.to, count) }?;
    // SAFETY: as above.
    let from = unsafe { values(call.from, count) }?;
    // SAFETY: as above.
    let bytes = unsafe { values(call.bytes, count) }?;
    // SAFETY: as above.
    let attributes = unsafe { values(call.attributes, attributes_count) }?;
    // SAFETY: as above.
    let firsts = unsafe { values(call.firsts, attributes_count) }?;
    let ordered = attributes.iter().all(|one| ACCESS_ORDERS.contains(&one.src_access_order));
    let rising = firsts.is_sorted_by(|one, next| one < next);
    if !ordered || !rising || firsts[0] != 0 || firsts[firsts.len() - 1] >= count {
        return Err(INVALID_VALUE);
    }
    if bytes.contains(&0) {
        return Err(INVALID_VALUE);
    }
    if queue.is_capturing() {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    (0..count).rev().try_for_each(|index| {
        copy(&queue, (to[index], Said::Either), (from[index], Said::Either), bytes[index])
    })
}

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
        let called =
            run(&Call { to, from, bytes, count, attributes, firsts, attributes_count, handle });
        if called.is_err() && !failed.is_null() {
            // SAFETY: the caller gives the place of a number.
            unsafe { failed.write(usize::MAX) };
        }
        called
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
        run(&Call { to, from, bytes, count, attributes, firsts, attributes_count, handle })
    })
}
