//! Converts the streams of vendors from the pointers by which C and Python name them.

use std::ffi::c_void;

use peerlane::hal::BackendId;
use peerlane::{Error, ErrorKind, cuda, rocm};

/// A stream of the backend of a group.
#[derive(Debug)]
pub enum Stream {
    /// A stream of CUDA.
    Cuda(cuda::Stream),
    /// A stream of ROCm.
    Rocm(rocm::Stream),
}

impl Stream {
    /// Converts a `CUstream` or `cudaStream_t` of CUDA, or a `hipStream_t` of ROCm.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the backend has no streams; `stream` is not used then.
    ///
    /// # Safety
    /// `stream` is a stream of the device of this rank. It lives until each operation that was
    /// started on it was started on another one or was dropped.
    pub unsafe fn from_raw(backend: BackendId, stream: *mut c_void) -> Result<Self, Error> {
        match backend {
            BackendId::CUDA => {
                // SAFETY: the contract of this function says that the stream is one of this rank's
                // device, and lives long enough.
                Ok(Self::Cuda(unsafe { cuda::Stream::from_raw(stream) }))
            }
            BackendId::ROCM => {
                // SAFETY: the contract of this function says that the stream is one of this rank's
                // device, and lives long enough.
                Ok(Self::Rocm(unsafe { rocm::Stream::from_raw(stream) }))
            }
            _ => {
                let text = format!(
                    "the group is on the backend {backend}, which has no streams; start the operation on the host"
                );
                Err(Error::new(ErrorKind::InvalidArgument, text))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_without_streams_is_refused() {
        // SAFETY: the host has no streams, so the pointer is not used.
        let refused = unsafe { Stream::from_raw(BackendId::HOST, std::ptr::null_mut()) };
        let expected = "the group is on the backend host, which has no streams; start the operation on the host";
        assert_eq!(refused.unwrap_err().to_string(), expected);
    }
}
