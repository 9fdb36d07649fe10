//! Streams.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use super::Hip;
use super::call::enter;
use super::types::{hipDevice_t, hipError_t, hipEvent_t, hipGraph_t, hipStream_t};
use crate::device::settings::Setting;
use crate::runtime::code::INVALID_DEVICE;
use crate::runtime::out::{Out, store, store_if};
use crate::runtime::{Face, handles, stream};

#[unsafe(no_mangle)]
extern "C" fn hipStreamCreateWithFlags(out: Out<'_, hipStream_t>, flags: c_uint) -> hipError_t {
    enter("hipStreamCreateWithFlags", || stream::create::<Hip>(out, flags))
}

/// Priorities change nothing here; engines ignore them as well.
#[unsafe(no_mangle)]
extern "C" fn hipStreamCreateWithPriority(
    out: Out<'_, hipStream_t>,
    flags: c_uint,
    _priority: c_int,
) -> hipError_t {
    enter("hipStreamCreateWithPriority", || stream::create::<Hip>(out, flags))
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceGetStreamPriorityRange(
    least: Out<'_, c_int>,
    greatest: Out<'_, c_int>,
) -> hipError_t {
    enter("hipDeviceGetStreamPriorityRange", || {
        Hip::ready()?;
        store_if(least, 1)?;
        store_if(greatest, -1)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamDestroy(handle: hipStream_t) -> hipError_t {
    enter("hipStreamDestroy", || match Setting::FreeWaits.is_on() {
        true => stream::drain_and_destroy::<Hip>(handle),
        false => stream::destroy::<Hip>(handle),
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamQuery(handle: hipStream_t) -> hipError_t {
    enter("hipStreamQuery", || stream::query::<Hip>(handle))
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamSynchronize(handle: hipStream_t) -> hipError_t {
    enter("hipStreamSynchronize", || stream::synchronize::<Hip>(handle))
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceSynchronize() -> hipError_t {
    enter("hipDeviceSynchronize", stream::synchronize_all::<Hip>)
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamWaitEvent(
    handle: hipStream_t,
    event: hipEvent_t,
    flags: c_uint,
) -> hipError_t {
    enter("hipStreamWaitEvent", || stream::wait_event::<Hip>(handle, event, flags))
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamGetDevice(handle: hipStream_t, out: Out<'_, hipDevice_t>) -> hipError_t {
    enter("hipStreamGetDevice", || {
        let physical = handles::stream::<Hip>(handle)?.session().device();
        store(out, Hip::ordinal(physical).ok_or(INVALID_DEVICE)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamGetFlags(handle: hipStream_t, out: Out<'_, c_uint>) -> hipError_t {
    enter("hipStreamGetFlags", || stream::flags::<Hip>(handle, out))
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamIsCapturing(handle: hipStream_t, out: Out<'_, c_int>) -> hipError_t {
    enter("hipStreamIsCapturing", || stream::is_capturing::<Hip>(handle, out))
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamGetCaptureInfo(
    handle: hipStream_t,
    status: Out<'_, c_int>,
    id: Out<'_, c_ulonglong>,
) -> hipError_t {
    enter("hipStreamGetCaptureInfo", || stream::capture_info::<Hip>(handle, status, id))
}

/// The graph that grows and its nodes have no handles here, and are answered with none.
#[unsafe(no_mangle)]
extern "C" fn hipStreamGetCaptureInfo_v2(
    handle: hipStream_t,
    status: Out<'_, c_int>,
    id: Out<'_, c_ulonglong>,
    graph: Out<'_, hipGraph_t>,
    dependencies: Out<'_, usize>,
    dependencies_count: Out<'_, usize>,
) -> hipError_t {
    enter("hipStreamGetCaptureInfo_v2", || {
        stream::capture_info::<Hip>(handle, status, id)?;
        [graph, dependencies, dependencies_count].into_iter().try_for_each(|out| store_if(out, 0))
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipThreadExchangeStreamCaptureMode(number: Option<&mut c_int>) -> hipError_t {
    enter("hipThreadExchangeStreamCaptureMode", || stream::exchange(number))
}

#[unsafe(no_mangle)]
extern "C" fn hipLaunchHostFunc(
    handle: hipStream_t,
    function: stream::HostFunction,
    data: *mut c_void,
) -> hipError_t {
    enter("hipLaunchHostFunc", || stream::call_host::<Hip>(handle, function, data))
}
