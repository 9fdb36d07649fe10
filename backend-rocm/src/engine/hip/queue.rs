//! Streams and events of HIP.

use peerlane_toolkit::device::{
    CaptureState, DeviceContext as _, EventHandle, Fault, StreamCalls, StreamHandle,
};

use crate::device::Context;
use crate::error::Error;
use crate::sys::hip::{
    self, hipError_t, hipEvent_t, hipStream_t, hipStreamCaptureStatus as Status,
};

pub(super) fn raw(stream: StreamHandle) -> hipStream_t {
    stream.0.cast()
}

fn event(event: EventHandle) -> hipEvent_t {
    event.0.cast()
}

/// Of a look: whether it is over, or what went wrong.
fn is_over(context: &Context, call: &'static str, code: hipError_t) -> Result<bool, Error> {
    if code == hipError_t::hipErrorNotReady {
        return Ok(false);
    }
    context.check(call, code).map(|()| true)
}

impl StreamCalls for Context {
    fn create_stream(&self, urgent: bool) -> Result<StreamHandle, Error> {
        let calls = self.hip.calls;
        let (mut stream, flags) = (std::ptr::null_mut(), hip::hipStreamNonBlocking);
        if urgent {
            let (mut least, mut greatest) = (0, 0);
            let range = calls.device_get_stream_priority_range;
            // SAFETY: the device is current; the results are stored in locals.
            let code = unsafe { range(&raw mut least, &raw mut greatest) };
            self.check("hipDeviceGetStreamPriorityRange", code)?;
            let create = calls.stream_create_with_priority;
            // SAFETY: as above.
            let code = unsafe { create(&raw mut stream, flags, greatest) };
            self.check("hipStreamCreateWithPriority", code)?;
        } else {
            // SAFETY: as above.
            let code = unsafe { (calls.stream_create_with_flags)(&raw mut stream, flags) };
            self.check("hipStreamCreateWithFlags", code)?;
        }
        Ok(StreamHandle(stream.cast()))
    }

    unsafe fn destroy_stream(calls: &'static hip::Library, stream: StreamHandle) {
        // SAFETY: the caller's; what the stream still holds runs on, and HIP may wait for it here.
        let _ = unsafe { (calls.stream_destroy)(raw(stream)) };
    }

    unsafe fn is_idle(&self, stream: StreamHandle) -> Result<bool, Error> {
        // SAFETY: the caller's.
        let code = unsafe { (self.hip.calls.stream_query)(raw(stream)) };
        is_over(self, "hipStreamQuery", code)
    }

    unsafe fn check_stream(&self, stream: StreamHandle) -> Result<(), Error> {
        if let Some(name) = stream.default_stream() {
            return Err(Error::Fault(Fault::Argument(format!(
                "the stream is {name}; wanted one that was made with hipStreamNonBlocking"
            ))));
        }
        let mut seen = -1;
        // SAFETY: the caller's; the result is stored in a local.
        let code = unsafe { (self.hip.calls.stream_get_device)(raw(stream), &raw mut seen) };
        self.check("hipStreamGetDevice", code)?;
        let wanted = self.device();
        if seen == wanted {
            return Ok(());
        }
        Err(Error::Fault(Fault::Mismatch(format!(
            "the stream {:?} is of device {seen}, the engine of {}",
            stream.0,
            self.label()
        ))))
    }

    unsafe fn is_capturing(&self, stream: StreamHandle) -> Result<bool, Error> {
        let mut status = Status::hipStreamCaptureStatusNone;
        // SAFETY: the caller's; the result is stored in a local.
        let code = unsafe { (self.hip.calls.stream_is_capturing)(raw(stream), &raw mut status) };
        self.check("hipStreamIsCapturing", code)?;
        Ok(status != Status::hipStreamCaptureStatusNone)
    }

    unsafe fn capture_state(&self, stream: StreamHandle) -> Result<CaptureState, Error> {
        let (mut status, mut id) = (Status::hipStreamCaptureStatusNone, 0);
        let (graph, nodes) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (info, count) = (self.hip.calls.stream_get_capture_info_v2, std::ptr::null_mut());
        // SAFETY: the caller's; what is not wanted is null, the rest is stored in locals.
        let code = unsafe { info(raw(stream), &raw mut status, &raw mut id, graph, nodes, count) };
        self.check("hipStreamGetCaptureInfo_v2", code)?;
        Ok(match status {
            Status::hipStreamCaptureStatusNone => CaptureState::None,
            Status::hipStreamCaptureStatusActive => CaptureState::Active(id),
            _ => CaptureState::Unknown,
        })
    }

    fn create_event(&self) -> Result<EventHandle, Error> {
        let mut made = std::ptr::null_mut();
        let create = self.hip.calls.event_create_with_flags;
        // SAFETY: the device is current; the result is stored in a local.
        let code = unsafe { create(&raw mut made, hip::hipEventDisableTiming) };
        self.check("hipEventCreateWithFlags", code)?;
        Ok(EventHandle(made.cast()))
    }

    unsafe fn destroy_event(calls: &'static hip::Library, it: EventHandle) {
        // SAFETY: the caller's.
        let _ = unsafe { (calls.event_destroy)(event(it)) };
    }

    unsafe fn record_event(&self, it: EventHandle, stream: StreamHandle) -> Result<(), Error> {
        // SAFETY: the caller's.
        let code = unsafe { (self.hip.calls.event_record)(event(it), raw(stream)) };
        self.check("hipEventRecord", code)
    }

    unsafe fn wait_for_event(&self, stream: StreamHandle, it: EventHandle) -> Result<(), Error> {
        // SAFETY: the caller's.
        let code = unsafe { (self.hip.calls.stream_wait_event)(raw(stream), event(it), 0) };
        self.check("hipStreamWaitEvent", code)
    }

    unsafe fn has_passed(&self, it: EventHandle) -> Result<bool, Error> {
        // SAFETY: the caller's.
        let code = unsafe { (self.hip.calls.event_query)(event(it)) };
        is_over(self, "hipEventQuery", code)
    }
}
