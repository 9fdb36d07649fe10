//! Exports the calls on events.

use std::ffi::c_uint;

use hip_sys::{hipEvent_t, hipStream_t};

use crate::calls::hip;

/// The flags that CUDA has too: blocking, without a time, for other processes.
const FLAGS: c_uint = 7;

hip! {
    fn hipEventCreateWithFlags(out: *mut hipEvent_t, flags: c_uint) =
        |cuda| (cuda.cuEventCreate)(out.cast(), flags & FLAGS);
    fn hipEventDestroy(event: hipEvent_t) = |cuda| (cuda.cuEventDestroy)(event.cast());
    fn hipEventRecord(event: hipEvent_t, stream: hipStream_t) =
        |cuda| (cuda.cuEventRecord)(event.cast(), stream.cast());
    fn hipEventQuery(event: hipEvent_t) = |cuda| (cuda.cuEventQuery)(event.cast());
    fn hipEventElapsedTime(out: *mut f32, begin: hipEvent_t, end: hipEvent_t) =
        |cuda| (cuda.cuEventElapsedTime)(out, begin.cast(), end.cast());
    fn hipEventSynchronize(event: hipEvent_t) = |cuda| (cuda.cuEventSynchronize)(event.cast());
}
