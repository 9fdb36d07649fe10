//! The caller's stream, on which it computes and which a fork puts the engine's work onto.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUstream};

/// A CUDA stream of the caller: a `CUstream`, which is the same as a `cudaStream_t`.
#[derive(Clone)]
pub struct Stream {
    raw: CUstream,
    /// Whoever owns the stream, where that is known.
    _keep: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: a stream may be used from any thread; the handle is never dereferenced here.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Stream").field(&self.raw).finish()
    }
}

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`: default streams that have a number for a handle.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

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
        Self { raw, _keep: None }
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Whether work may be put on it: no default stream, and one of this device.
    pub(super) fn check(&self, context: &Context) -> Result<(), Error> {
        let default = match self.raw as usize {
            0 => Some("the default stream (a null handle)"),
            LEGACY => Some("the legacy default stream"),
            PER_THREAD => Some("the thread's default stream"),
            _ => None,
        };
        if let Some(name) = default {
            return Err(Error::Argument(format!(
                "the stream is {name}; wanted one that was made with CU_STREAM_NON_BLOCKING or \
                 cudaStreamNonBlocking"
            )));
        }
        let mut seen = std::ptr::null_mut();
        // SAFETY: the stream lives, says `from_raw`; the result is stored in a local.
        let code = unsafe { (context.driver.stream_get_ctx)(self.raw, &raw mut seen) };
        context.check("cuStreamGetCtx", code)?;
        if seen == context.raw() {
            return Ok(());
        }
        Err(Error::Mismatch(format!(
            "the stream {:?} belongs to context {seen:?}, the engine to context {:?} of {}",
            self.raw,
            context.raw(),
            context.label()
        )))
    }

    /// Whether what it gets is recorded.
    pub(super) fn is_capturing(&self, context: &Context) -> Result<bool, Error> {
        let mut status = sys::STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream lives, says `from_raw`; the result is stored in a local.
        let code = unsafe { (context.driver.stream_is_capturing)(self.raw, &raw mut status) };
        context.check("cuStreamIsCapturing", code)?;
        // A capture that was spoilt goes on until it is ended, and then fails.
        Ok(status != sys::STREAM_CAPTURE_STATUS_NONE)
    }
}

#[cfg(feature = "cudarc")]
impl From<&Arc<cudarc::driver::CudaStream>> for Stream {
    /// Keeps cudarc's stream alive as long as it is used.
    fn from(stream: &Arc<cudarc::driver::CudaStream>) -> Self {
        Self { raw: stream.cu_stream().cast(), _keep: Some(stream.clone()) }
    }
}
