//! The caller's stream, on which it computes and which a fork puts the engine's work onto.

use std::ffi::c_void;

use peerlane_toolkit::device::StreamHandle;
use peerlane_toolkit::streams;

/// A CUDA stream of the caller: a `CUstream`, which is the same as a `cudaStream_t`.
#[derive(Clone, Debug)]
pub struct Stream(pub(super) streams::Stream);

impl Stream {
    /// The stream behind a handle of the driver or of the runtime.
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

#[cfg(feature = "cudarc")]
impl From<&std::sync::Arc<cudarc::driver::CudaStream>> for Stream {
    /// Keeps cudarc's stream alive as long as it is used.
    fn from(stream: &std::sync::Arc<cudarc::driver::CudaStream>) -> Self {
        let raw = StreamHandle(stream.cu_stream().cast());
        // SAFETY: the stream is kept alive beside its handle.
        Self(unsafe { streams::Stream::new(raw, Some(stream.clone())) })
    }
}
