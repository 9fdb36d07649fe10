//! Exports the calls on streams and captures.

use std::ffi::{c_int, c_uint, c_ulonglong};

use hip_sys::{
    hipDevice_t, hipEvent_t, hipGraph_t, hipGraphNode_t, hipStream_t, hipStreamCaptureMode,
    hipStreamCaptureStatus,
};

use crate::calls::hip;
use crate::cuda::{CUresult, Cuda};
use crate::device;
use crate::result::{INVALID_DEVICE, INVALID_VALUE, SUCCESS};

/// Stores the device of a stream.
///
/// # Safety
/// The stream lives; `out` is null or may be written.
unsafe fn device_of(cuda: &Cuda, stream: hipStream_t, out: *mut hipDevice_t) -> CUresult {
    if out.is_null() {
        return INVALID_VALUE;
    }
    let mut context = std::ptr::null_mut();
    // SAFETY: the caller's; the result is stored in a local.
    let result = unsafe { (cuda.cuStreamGetCtx)(stream.cast(), &raw mut context) };
    if result != SUCCESS {
        return result;
    }
    let Some(device) = device::device_of(context) else { return INVALID_DEVICE };
    // SAFETY: the caller's.
    unsafe { out.write(device) };
    SUCCESS
}

hip! {
    fn hipStreamCreateWithFlags(out: *mut hipStream_t, flags: c_uint) =
        |cuda| (cuda.cuStreamCreate)(out.cast(), flags);
    fn hipStreamCreateWithPriority(out: *mut hipStream_t, flags: c_uint, priority: c_int) =
        |cuda| (cuda.cuStreamCreateWithPriority)(out.cast(), flags, priority);
    fn hipStreamDestroy(stream: hipStream_t) = |cuda| (cuda.cuStreamDestroy)(stream.cast());
    fn hipStreamSynchronize(stream: hipStream_t) =
        |cuda| (cuda.cuStreamSynchronize)(stream.cast());
    fn hipStreamQuery(stream: hipStream_t) = |cuda| (cuda.cuStreamQuery)(stream.cast());
    fn hipStreamWaitEvent(stream: hipStream_t, event: hipEvent_t, flags: c_uint) =
        |cuda| (cuda.cuStreamWaitEvent)(stream.cast(), event.cast(), flags);
    fn hipStreamGetDevice(stream: hipStream_t, out: *mut hipDevice_t) =
        |cuda| device_of(cuda, stream, out);
    fn hipStreamIsCapturing(stream: hipStream_t, out: *mut hipStreamCaptureStatus) =
        |cuda| (cuda.cuStreamIsCapturing)(stream.cast(), out.cast());
    fn hipStreamGetCaptureInfo_v2(
        stream: hipStream_t,
        status: *mut hipStreamCaptureStatus,
        number: *mut c_ulonglong,
        graph: *mut hipGraph_t,
        nodes: *mut *const hipGraphNode_t,
        count: *mut usize,
    ) = |cuda| (cuda.cuStreamGetCaptureInfo)(
        stream.cast(), status.cast(), number, graph.cast(), nodes.cast(), count
    );
    fn hipStreamBeginCapture(stream: hipStream_t, mode: hipStreamCaptureMode) =
        |cuda| (cuda.cuStreamBeginCapture)(stream.cast(), mode.0);
    fn hipStreamEndCapture(stream: hipStream_t, out: *mut hipGraph_t) =
        |cuda| (cuda.cuStreamEndCapture)(stream.cast(), out.cast());
    fn hipThreadExchangeStreamCaptureMode(mode: *mut hipStreamCaptureMode) =
        |cuda| (cuda.cuThreadExchangeStreamCaptureMode)(mode.cast());
}
