//! Events.

use std::ffi::c_uint;

use super::Hip;
use super::call::enter;
use super::types::{hipError_t, hipEvent_t, hipStream_t};
use crate::runtime::event;
use crate::runtime::out::Out;

/// Blocking, without timing, for other processes; without a fence of the system, with one of the
/// device, with one of the system.
const FLAGS: c_uint = 0xe000_0007;

#[unsafe(no_mangle)]
extern "C" fn hipEventCreateWithFlags(out: Out<'_, hipEvent_t>, flags: c_uint) -> hipError_t {
    enter("hipEventCreateWithFlags", || event::create::<Hip>(out, flags, FLAGS))
}

#[unsafe(no_mangle)]
extern "C" fn hipEventDestroy(event: hipEvent_t) -> hipError_t {
    enter("hipEventDestroy", || event::destroy::<Hip>(event))
}

#[unsafe(no_mangle)]
extern "C" fn hipEventRecord(event: hipEvent_t, handle: hipStream_t) -> hipError_t {
    enter("hipEventRecord", || event::record::<Hip>(event, handle))
}

#[unsafe(no_mangle)]
extern "C" fn hipEventQuery(event: hipEvent_t) -> hipError_t {
    enter("hipEventQuery", || event::query::<Hip>(event))
}

#[unsafe(no_mangle)]
extern "C" fn hipEventSynchronize(event: hipEvent_t) -> hipError_t {
    enter("hipEventSynchronize", || event::synchronize::<Hip>(event))
}

#[unsafe(no_mangle)]
extern "C" fn hipEventElapsedTime(
    out: Out<'_, f32>,
    start: hipEvent_t,
    end: hipEvent_t,
) -> hipError_t {
    enter("hipEventElapsedTime", || event::elapsed::<Hip>(out, start, end))
}
