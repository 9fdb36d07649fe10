//! The caller's stream, on which it computes and which a fork puts the engine's work onto.

use std::ffi::c_void;

use peerlane_toolkit::device::StreamHandle;
use peerlane_toolkit::streams;

/// A HIP stream of the caller: a `hipStream_t`.
#[derive(Clone, Debug)]
pub struct Stream(pub(super) streams::Stream);

impl Stream {
    /// The stream behind a handle of HIP.
    ///
    /// Default streams are refused when they are used: the legacy one would make the caller's
    /// blocking streams wait for peers, and that of a thread is another one on the next thread.
    ///
    /// # Safety
    /// The stream lives until every engine that was forked from it has been forked from another
    /// stream or dropped.
    pub unsafe fn from_raw(raw: *mut c_void) -> Self {
        // SAFETY: the caller's.
        Self(unsafe { streams::Stream::new(StreamHandle(raw), None) })
    }
}
