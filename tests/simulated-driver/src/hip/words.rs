//! Memory operations of a stream.

use std::ffi::c_uint;

use super::Hip;
use super::call::enter;
use super::types::{hipDeviceptr_t, hipError_t, hipStream_t, hipStreamBatchMemOpParams};
use crate::device::machine::memory;
use crate::device::memory::Kind;
use crate::device::settings::Setting;
use crate::device::words::{Width, Word};
use crate::runtime::code::{INVALID_VALUE, Outcome};
use crate::runtime::words::{self, submit, submit_batch, write};

/// A wait for the bits of a mask; where the machine is strict, on signal memory only.
fn wait(address: u64, value: u64, width: Width, flags: c_uint, mask: u64) -> Outcome<Word> {
    let signal = || {
        let range = memory().find(address);
        range.is_some_and(|range| matches!(range.kind, Kind::Signal { .. }))
    };
    if Setting::WaitMemory.is("signal") && !signal() {
        return Err(INVALID_VALUE);
    }
    Ok(Word { mask, ..words::wait(address, value, width, flags)? })
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamWriteValue64(
    handle: hipStream_t,
    address: hipDeviceptr_t,
    value: u64,
    flags: c_uint,
) -> hipError_t {
    enter("hipStreamWriteValue64", || {
        submit::<Hip>(handle, &[write(address, value, Width::Eight, flags)?])
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamWaitValue64(
    handle: hipStream_t,
    address: hipDeviceptr_t,
    value: u64,
    flags: c_uint,
    mask: u64,
) -> hipError_t {
    enter("hipStreamWaitValue64", || {
        submit::<Hip>(handle, &[wait(address, value, Width::Eight, flags, mask)?])
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamWriteValue32(
    handle: hipStream_t,
    address: hipDeviceptr_t,
    value: u32,
    flags: c_uint,
) -> hipError_t {
    enter("hipStreamWriteValue32", || {
        submit::<Hip>(handle, &[write(address, value.into(), Width::Four, flags)?])
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamWaitValue32(
    handle: hipStream_t,
    address: hipDeviceptr_t,
    value: u32,
    flags: c_uint,
    mask: u32,
) -> hipError_t {
    enter("hipStreamWaitValue32", || {
        submit::<Hip>(handle, &[wait(address, value.into(), Width::Four, flags, mask.into())?])
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamBatchMemOp(
    handle: hipStream_t,
    count: c_uint,
    operations: *const hipStreamBatchMemOpParams,
    flags: c_uint,
) -> hipError_t {
    enter("hipStreamBatchMemOp", || submit_batch::<Hip>(handle, count, operations, flags))
}
