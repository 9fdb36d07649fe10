//! The caller's stream, on which it computes and which a fork puts the engine's work onto.

use std::any::Any;
use std::sync::Arc;

use crate::device::{CaptureState, StreamCalls, StreamHandle};

/// A stream of the caller; each backend has a type of its own around it, so that nobody gives one
/// vendor's stream to another.
#[derive(Clone)]
pub struct Stream {
    raw: StreamHandle,
    /// Whoever owns the stream, where that is known.
    _keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Stream").field(&self.raw.0).finish()
    }
}

impl Stream {
    /// The stream behind a handle, and what keeps it alive, where that is known.
    ///
    /// # Safety
    /// The stream lives until every engine that was forked from it has been forked from another
    /// stream or dropped; or the handle is the number of a default stream.
    pub unsafe fn new(raw: StreamHandle, keep: Option<Arc<dyn Any + Send + Sync>>) -> Self {
        Self { raw, _keep: keep }
    }

    pub(super) fn raw(&self) -> StreamHandle {
        self.raw
    }

    /// Whether work may be put on it: no default stream, and one of this device.
    pub(super) fn check<D: StreamCalls>(&self, context: &D) -> Result<(), D::Error> {
        // SAFETY: the stream lives or is a default one, says `new`.
        unsafe { context.check_stream(self.raw) }
    }

    /// Whether what it gets is recorded.
    pub(super) fn is_capturing<D: StreamCalls>(&self, context: &D) -> Result<bool, D::Error> {
        // SAFETY: as for `check`, and it was checked.
        unsafe { context.is_capturing(self.raw) }
    }

    /// Which capture it is part of.
    pub(super) fn capture<D: StreamCalls>(&self, context: &D) -> Result<CaptureState, D::Error> {
        // SAFETY: as for `is_capturing`.
        unsafe { context.capture_state(self.raw) }
    }
}
