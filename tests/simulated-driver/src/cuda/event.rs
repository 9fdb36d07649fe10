//! Events.

use std::ffi::c_uint;

use super::Cuda;
use super::types::{CUevent, CUresult, CUstream};
use crate::runtime::call::enter;
use crate::runtime::event;
use crate::runtime::out::Out;

/// Blocking, without timing, for other processes.
const FLAGS: c_uint = 7;

#[unsafe(no_mangle)]
extern "C" fn cuEventCreate(out: Out<'_, CUevent>, flags: c_uint) -> CUresult {
    enter("cuEventCreate", || event::create::<Cuda>(out, flags, FLAGS))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    enter("cuEventDestroy_v2", || event::destroy::<Cuda>(event))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: CUevent, handle: CUstream) -> CUresult {
    enter("cuEventRecord", || event::record::<Cuda>(event, handle))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: CUevent) -> CUresult {
    enter("cuEventQuery", || event::query::<Cuda>(event))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: CUevent) -> CUresult {
    enter("cuEventSynchronize", || event::synchronize::<Cuda>(event))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime(out: Out<'_, f32>, start: CUevent, end: CUevent) -> CUresult {
    enter("cuEventElapsedTime", || event::elapsed::<Cuda>(out, start, end))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime_v2(out: Out<'_, f32>, start: CUevent, end: CUevent) -> CUresult {
    enter("cuEventElapsedTime_v2", || event::elapsed::<Cuda>(out, start, end))
}
