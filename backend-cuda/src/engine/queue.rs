//! Streams and events of CUDA.

use peerlane_toolkit::device::{CaptureState, EventHandle, Fault, StreamCalls, StreamHandle};

use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUresult, Driver};

/// Of a look: whether it is over, or what went wrong.
fn is_over(context: &Context, call: &'static str, code: CUresult) -> Result<bool, Error> {
    if code == sys::CUDA_ERROR_NOT_READY {
        return Ok(false);
    }
    context.check(call, code).map(|()| true)
}

impl StreamCalls for Context {
    fn create_stream(&self, urgent: bool) -> Result<StreamHandle, Error> {
        let driver = self.driver;
        let mut raw = std::ptr::null_mut();
        if urgent
            && let (Some(range), Some(create)) =
                (driver.ctx_get_stream_priority_range, driver.stream_create_with_priority)
        {
            let (mut least, mut greatest) = (0, 0);
            // SAFETY: the context is current; the results are stored in locals.
            let code = unsafe { range(&raw mut least, &raw mut greatest) };
            self.check("cuCtxGetStreamPriorityRange", code)?;
            // SAFETY: as above.
            let code = unsafe { create(&raw mut raw, sys::STREAM_NON_BLOCKING, greatest) };
            self.check("cuStreamCreateWithPriority", code)?;
            return Ok(StreamHandle(raw));
        }
        // SAFETY: as above.
        let code = unsafe { (driver.stream_create)(&raw mut raw, sys::STREAM_NON_BLOCKING) };
        self.check("cuStreamCreate", code)?;
        Ok(StreamHandle(raw))
    }

    unsafe fn destroy_stream(driver: &'static Driver, stream: StreamHandle) {
        // SAFETY: the caller's; what the stream still holds runs on.
        let _ = unsafe { (driver.stream_destroy)(stream.0) };
    }

    unsafe fn is_idle(&self, stream: StreamHandle) -> Result<bool, Error> {
        // SAFETY: the caller's.
        let code = unsafe { (self.driver.stream_query)(stream.0) };
        is_over(self, "cuStreamQuery", code)
    }

    unsafe fn check_stream(&self, stream: StreamHandle) -> Result<(), Error> {
        if let Some(name) = stream.default_stream() {
            return Err(Fault::Argument(format!(
                "the stream is {name}; wanted one that was made with CU_STREAM_NON_BLOCKING or \
                 cudaStreamNonBlocking"
            ))
            .into());
        }
        let mut seen = std::ptr::null_mut();
        // SAFETY: the caller's; the result is stored in a local.
        let code = unsafe { (self.driver.stream_get_ctx)(stream.0, &raw mut seen) };
        self.check("cuStreamGetCtx", code)?;
        if seen == self.raw() {
            return Ok(());
        }
        Err(Fault::Mismatch(format!(
            "the stream {:?} belongs to context {seen:?}, the engine to context {:?} of {}",
            stream.0,
            self.raw(),
            self.label()
        ))
        .into())
    }

    unsafe fn is_capturing(&self, stream: StreamHandle) -> Result<bool, Error> {
        let mut status = sys::STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the caller's; the result is stored in a local.
        let code = unsafe { (self.driver.stream_is_capturing)(stream.0, &raw mut status) };
        self.check("cuStreamIsCapturing", code)?;
        Ok(status != sys::STREAM_CAPTURE_STATUS_NONE)
    }

    unsafe fn capture_state(&self, stream: StreamHandle) -> Result<CaptureState, Error> {
        let Some(info) = self.driver.stream_get_capture_info else {
            // SAFETY: the caller's.
            let capturing = unsafe { self.is_capturing(stream) }?;
            return Ok(if capturing { CaptureState::Unknown } else { CaptureState::None });
        };
        let (mut status, mut id) = (sys::STREAM_CAPTURE_STATUS_NONE, 0);
        let (graph, nodes) = (std::ptr::null_mut(), std::ptr::null_mut());
        let count = std::ptr::null_mut();
        // SAFETY: the caller's; what is not wanted is null, the rest is stored in locals.
        let code = unsafe { info(stream.0, &raw mut status, &raw mut id, graph, nodes, count) };
        self.check("cuStreamGetCaptureInfo", code)?;
        Ok(match status {
            sys::STREAM_CAPTURE_STATUS_NONE => CaptureState::None,
            sys::STREAM_CAPTURE_STATUS_ACTIVE => CaptureState::Active(id),
            _ => CaptureState::Unknown,
        })
    }

    fn create_event(&self) -> Result<EventHandle, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current; the result is stored in a local.
        let code = unsafe { (self.driver.event_create)(&raw mut raw, sys::EVENT_DISABLE_TIMING) };
        self.check("cuEventCreate", code)?;
        Ok(EventHandle(raw))
    }

    unsafe fn destroy_event(driver: &'static Driver, event: EventHandle) {
        // SAFETY: the caller's.
        let _ = unsafe { (driver.event_destroy)(event.0) };
    }

    unsafe fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), Error> {
        // SAFETY: the caller's.
        let code = unsafe { (self.driver.event_record)(event.0, stream.0) };
        self.check("cuEventRecord", code)
    }

    unsafe fn wait_for_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), Error> {
        // SAFETY: the caller's.
        let code = unsafe { (self.driver.stream_wait_event)(stream.0, event.0, 0) };
        self.check("cuStreamWaitEvent", code)
    }

    unsafe fn has_passed(&self, event: EventHandle) -> Result<bool, Error> {
        // SAFETY: the caller's.
        let code = unsafe { (self.driver.event_query)(event.0) };
        is_over(self, "cuEventQuery", code)
    }
}
