//! Streams and events of the engine's own.
//!
//! All streams are non-blocking, so that nothing orders itself by the legacy default stream. Events
//! carry no time, which makes them cheap.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::device::{CaptureState, EventHandle, Fault, StreamCalls, StreamHandle};

/// A nap between two looks at a stream.
const NAP: Duration = Duration::from_micros(50);

/// A stream; whoever drops it has made the context current.
#[derive(Debug)]
pub(super) struct OwnStream<D: StreamCalls> {
    library: D::Library,
    raw: StreamHandle,
    /// It was given up on, and may hold a wait for ever.
    stuck: Cell<bool>,
}

impl<D: StreamCalls> OwnStream<D> {
    pub(super) fn create(context: &D) -> Result<Self, D::Error> {
        Self::of(context, false)
    }

    /// A stream of the highest priority. Streams of one priority may share a channel of the
    /// hardware, and what stands there behind a blocked wait waits too; this one passes.
    pub(super) fn urgent(context: &D) -> Result<Self, D::Error> {
        Self::of(context, true)
    }

    fn of(context: &D, urgent: bool) -> Result<Self, D::Error> {
        let (library, raw) = (context.library(), context.create_stream(urgent)?);
        Ok(Self { library, raw, stuck: Cell::new(false) })
    }

    pub(super) fn raw(&self) -> StreamHandle {
        self.raw
    }

    /// Whether everything is complete; an error is usually that of earlier work.
    ///
    /// Not for a stream that captures. `enter_relaxed` keeps the look out of captures of other
    /// threads.
    pub(super) fn is_idle(&self, context: &D) -> Result<bool, D::Error> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { context.is_idle(self.raw) }
    }

    /// Looks until everything is complete. A stream that is not by then is left to the driver.
    pub(super) fn finish(
        &self,
        context: &D,
        timeout: Duration,
        what: &str,
    ) -> Result<(), D::Error> {
        let start = Instant::now();
        self.stuck.set(true);
        while !self.is_idle(context)? {
            if start.elapsed() >= timeout {
                let what = format!("{what} on {} was not over", context.label());
                return Err(Fault::Timeout { what, timeout }.into());
            }
            std::thread::sleep(NAP);
        }
        self.stuck.set(false);
        Ok(())
    }

    /// Which capture the stream is part of.
    pub(super) fn capture(&self, context: &D) -> Result<CaptureState, D::Error> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { context.capture_state(self.raw) }
    }
}

impl<D: StreamCalls> Drop for OwnStream<D> {
    fn drop(&mut self) {
        // Not every driver destroys a stream without waiting for what it holds.
        if !self.stuck.get() {
            // SAFETY: made by `of`, and owned.
            unsafe { D::destroy_stream(self.library, self.raw) };
        }
    }
}

/// An event; whoever drops it has made the context current.
#[derive(Debug)]
pub(super) struct Event<D: StreamCalls> {
    library: D::Library,
    raw: EventHandle,
}

impl<D: StreamCalls> Event<D> {
    pub(super) fn create(context: &D) -> Result<Self, D::Error> {
        Ok(Self { library: context.library(), raw: context.create_event()? })
    }

    /// Takes the place behind what the stream holds now.
    pub(super) fn record(&self, context: &D, stream: StreamHandle) -> Result<(), D::Error> {
        // SAFETY: both live, the stream by the caller's word or the engine's.
        unsafe { context.record_event(self.raw, stream) }
    }

    /// What the stream gets next comes after the place where the event is now; it can be recorded
    /// anew at once.
    pub(super) fn hold(&self, context: &D, stream: StreamHandle) -> Result<(), D::Error> {
        // SAFETY: as for `record`.
        unsafe { context.wait_for_event(stream, self.raw) }
    }

    /// What `behind` gets next comes after what `ahead` holds now.
    pub(super) fn order(
        &self,
        context: &D,
        ahead: StreamHandle,
        behind: StreamHandle,
    ) -> Result<(), D::Error> {
        self.record(context, ahead)?;
        self.hold(context, behind)
    }

    /// Whether the stream has come past it. Under `enter_relaxed`, so that captures of other threads
    /// do not mind.
    pub(super) fn has_passed(&self, context: &D) -> Result<bool, D::Error> {
        // SAFETY: the event lives.
        unsafe { context.has_passed(self.raw) }
    }
}

impl<D: StreamCalls> Drop for Event<D> {
    fn drop(&mut self) {
        // SAFETY: made by `create` and owned.
        unsafe { D::destroy_event(self.library, self.raw) };
    }
}
