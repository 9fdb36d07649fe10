//! Streams and events of the engine's own.
//!
//! All streams are non-blocking, so that nothing orders itself by the legacy default stream. Events
//! carry no time, which makes them cheap.

use std::time::{Duration, Instant};

use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUevent, CUstream, Driver};

/// A nap between two looks at a stream.
const NAP: Duration = Duration::from_micros(50);

/// A stream; whoever drops it has made the context current.
#[derive(Debug)]
pub(super) struct OwnStream {
    driver: &'static Driver,
    raw: CUstream,
}

// SAFETY: a stream may be used from any thread; the handle is never dereferenced here.
unsafe impl Send for OwnStream {}

impl OwnStream {
    pub(super) fn create(context: &Context) -> Result<Self, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current; the result is stored in a local.
        let code =
            unsafe { (context.driver.stream_create)(&raw mut raw, sys::STREAM_NON_BLOCKING) };
        context.check("cuStreamCreate", code)?;
        Ok(Self { driver: context.driver, raw })
    }

    /// A stream of the highest priority. Streams of one priority may share a channel of the
    /// hardware, and what stands there behind a blocked wait waits too; this one passes.
    pub(super) fn urgent(context: &Context) -> Result<Self, Error> {
        let driver = context.driver;
        let (Some(range), Some(create)) =
            (driver.ctx_get_stream_priority_range, driver.stream_create_with_priority)
        else {
            return Self::create(context);
        };
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the context is current; the results are stored in locals.
        let code = unsafe { range(&raw mut least, &raw mut greatest) };
        context.check("cuCtxGetStreamPriorityRange", code)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: as above.
        let code = unsafe { create(&raw mut raw, sys::STREAM_NON_BLOCKING, greatest) };
        context.check("cuStreamCreateWithPriority", code)?;
        Ok(Self { driver, raw })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Whether everything is complete; an error is usually that of earlier work.
    ///
    /// Not for a stream that captures. [`Context::enter_relaxed`] keeps the look out of captures of
    /// other threads.
    pub(super) fn is_idle(&self, context: &Context) -> Result<bool, Error> {
        // SAFETY: the stream lives as long as `self`.
        let code = unsafe { (self.driver.stream_query)(self.raw) };
        if code == sys::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        context.check("cuStreamQuery", code).map(|()| true)
    }

    /// Looks until everything is complete.
    pub(super) fn finish(
        &self,
        context: &Context,
        timeout: Duration,
        what: &str,
    ) -> Result<(), Error> {
        let start = Instant::now();
        while !self.is_idle(context)? {
            if start.elapsed() >= timeout {
                let what = format!("{what} on {} was not over", context.label());
                return Err(Error::Timeout { what, timeout });
            }
            std::thread::sleep(NAP);
        }
        Ok(())
    }

    /// Which capture the stream is part of; `None` if of none, or if the driver does not tell.
    pub(super) fn capture(&self, context: &Context) -> Result<CaptureState, Error> {
        capture(context, self.raw)
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // SAFETY: made by `create` and owned; what it still holds runs on.
        let _ = unsafe { (self.driver.stream_destroy)(self.raw) };
    }
}

/// Whether a stream captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CaptureState {
    /// It does not.
    None,
    /// It does, and the capture has this number.
    Active(u64),
    /// It does, or did and was spoilt, and the driver does not say in which one.
    Unknown,
}

/// Asks about any stream that lives.
pub(super) fn capture(context: &Context, raw: CUstream) -> Result<CaptureState, Error> {
    let mut status = sys::STREAM_CAPTURE_STATUS_NONE;
    let mut id = 0;
    if let Some(info) = context.driver.stream_get_capture_info {
        let (graph, nodes) = (std::ptr::null_mut(), std::ptr::null_mut());
        let count = std::ptr::null_mut();
        // SAFETY: the stream lives; what is not wanted is null, the rest is stored in locals.
        let code = unsafe { info(raw, &raw mut status, &raw mut id, graph, nodes, count) };
        context.check("cuStreamGetCaptureInfo", code)?;
        if status == sys::STREAM_CAPTURE_STATUS_ACTIVE {
            return Ok(CaptureState::Active(id));
        }
    } else {
        // SAFETY: the stream lives; the result is stored in a local.
        let code = unsafe { (context.driver.stream_is_capturing)(raw, &raw mut status) };
        context.check("cuStreamIsCapturing", code)?;
    }
    let none = status == sys::STREAM_CAPTURE_STATUS_NONE;
    Ok(if none { CaptureState::None } else { CaptureState::Unknown })
}

/// An event; whoever drops it has made the context current.
#[derive(Debug)]
pub(super) struct Event {
    driver: &'static Driver,
    raw: CUevent,
}

// SAFETY: as for `OwnStream`.
unsafe impl Send for Event {}

impl Event {
    pub(super) fn create(context: &Context) -> Result<Self, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current; the result is stored in a local.
        let code =
            unsafe { (context.driver.event_create)(&raw mut raw, sys::EVENT_DISABLE_TIMING) };
        context.check("cuEventCreate", code)?;
        Ok(Self { driver: context.driver, raw })
    }

    /// Takes the place behind what the stream holds now.
    pub(super) fn record(&self, context: &Context, stream: CUstream) -> Result<(), Error> {
        // SAFETY: both live, the stream by the caller's word or the engine's.
        let code = unsafe { (self.driver.event_record)(self.raw, stream) };
        context.check("cuEventRecord", code)
    }

    /// What the stream gets next comes after the place where the event is now; it can be recorded
    /// anew at once.
    pub(super) fn hold(&self, context: &Context, stream: CUstream) -> Result<(), Error> {
        // SAFETY: as for `record`.
        let code = unsafe { (self.driver.stream_wait_event)(stream, self.raw, 0) };
        context.check("cuStreamWaitEvent", code)
    }

    /// What `behind` gets next comes after what `ahead` holds now.
    pub(super) fn order(
        &self,
        context: &Context,
        ahead: CUstream,
        behind: CUstream,
    ) -> Result<(), Error> {
        self.record(context, ahead)?;
        self.hold(context, behind)
    }

    /// Whether the stream has come past it. Under [`Context::enter_relaxed`], so that captures of
    /// other threads do not mind.
    pub(super) fn has_passed(&self, context: &Context) -> Result<bool, Error> {
        // SAFETY: the event lives.
        let code = unsafe { (self.driver.event_query)(self.raw) };
        if code == sys::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        context.check("cuEventQuery", code).map(|()| true)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `create` and owned; waits for it are not affected.
        let _ = unsafe { (self.driver.event_destroy)(self.raw) };
    }
}
