//! Streams.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use super::Cuda;
use super::types::{CUcontext, CUevent, CUgraph, CUresult, CUstream};
use crate::runtime::call::enter;
use crate::runtime::out::{Out, store, store_if};
use crate::runtime::{handles, primary, stream};

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(out: Out<'_, CUstream>, flags: c_uint) -> CUresult {
    enter("cuStreamCreate", || stream::create::<Cuda>(out, flags))
}

/// Priorities change nothing here; copy engines ignore them as well.
#[unsafe(no_mangle)]
extern "C" fn cuStreamCreateWithPriority(
    out: Out<'_, CUstream>,
    flags: c_uint,
    _priority: c_int,
) -> CUresult {
    enter("cuStreamCreateWithPriority", || stream::create::<Cuda>(out, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(handle: CUstream) -> CUresult {
    enter("cuStreamDestroy_v2", || stream::destroy::<Cuda>(handle))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(handle: CUstream) -> CUresult {
    enter("cuStreamQuery", || stream::query::<Cuda>(handle))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(handle: CUstream) -> CUresult {
    enter("cuStreamSynchronize", || stream::synchronize::<Cuda>(handle))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(handle: CUstream, event: CUevent, flags: c_uint) -> CUresult {
    enter("cuStreamWaitEvent", || stream::wait_event::<Cuda>(handle, event, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetCtx(handle: CUstream, out: Out<'_, CUcontext>) -> CUresult {
    enter("cuStreamGetCtx", || {
        let queue = handles::stream::<Cuda>(handle)?;
        store(out, primary::handle_of(queue.session().device()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetFlags(handle: CUstream, out: Out<'_, c_uint>) -> CUresult {
    enter("cuStreamGetFlags", || stream::flags::<Cuda>(handle, out))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamIsCapturing(handle: CUstream, out: Out<'_, c_int>) -> CUresult {
    enter("cuStreamIsCapturing", || stream::is_capturing::<Cuda>(handle, out))
}

/// The graph that grows and its nodes have no handles here, and are answered with none.
#[unsafe(no_mangle)]
extern "C" fn cuStreamGetCaptureInfo_v2(
    handle: CUstream,
    status: Out<'_, c_int>,
    id: Out<'_, c_ulonglong>,
    graph: Out<'_, CUgraph>,
    dependencies: Out<'_, usize>,
    dependencies_count: Out<'_, usize>,
) -> CUresult {
    enter("cuStreamGetCaptureInfo_v2", || {
        stream::capture_info::<Cuda>(handle, status, id)?;
        [graph, dependencies, dependencies_count].into_iter().try_for_each(|out| store_if(out, 0))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuThreadExchangeStreamCaptureMode(number: Option<&mut c_int>) -> CUresult {
    enter("cuThreadExchangeStreamCaptureMode", || stream::exchange(number))
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchHostFunc(
    handle: CUstream,
    function: stream::HostFunction,
    data: *mut c_void,
) -> CUresult {
    enter("cuLaunchHostFunc", || stream::call_host::<Cuda>(handle, function, data))
}
