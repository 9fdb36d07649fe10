//! A result of the driver: its name, what it means to a program, what a person can do about it.

use peerlane_hal::ErrorKind;

use crate::sys::{self, CUresult, Driver};

/// A result of the driver, as it names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaResult {
    /// The number.
    pub code: i32,
    /// Its name, such as `CUDA_ERROR_OUT_OF_MEMORY`; empty where the driver knows none.
    pub name: String,
    /// The driver's explanation; empty where it has none.
    pub text: String,
}

impl CudaResult {
    pub(super) fn of(driver: &Driver, code: CUresult) -> Self {
        let (name, text) = driver.name_of(code);
        Self { code, name, text }
    }
}

impl std::fmt::Display for CudaResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { code, name, text } = self;
        match (name.as_str(), text.as_str()) {
            ("", _) => write!(f, "result {code}, which this driver has no name for"),
            (name, "") => write!(f, "{name} ({code})"),
            (name, text) => write!(f, "{name} ({code}), {text}"),
        }
    }
}

impl std::error::Error for CudaResult {}

/// What a person can do about a result; where there is something.
pub(super) fn advice(code: CUresult) -> Option<&'static str> {
    Some(match code {
        sys::CUDA_ERROR_STUB_LIBRARY => {
            "the loader found the stub library of the CUDA toolkit: take its folder out of \
             LD_LIBRARY_PATH, so that the driver's own is found"
        }
        sys::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            "another process holds the device in exclusive compute mode, or it is prohibited; see \
             nvidia-smi -q -d COMPUTE"
        }
        sys::CUDA_ERROR_SYSTEM_NOT_READY => {
            "the NVSwitch fabric is not up: is nvidia-fabricmanager running?"
        }
        sys::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "the driver's library and the kernel module are of different versions: load the new \
             module or restart the machine"
        }
        _ => return None,
    })
}

/// What a program can make of a result. Errors that the driver calls sticky leave the context
/// unusable, so the device is lost to this process.
pub(super) fn kind_of(code: CUresult) -> ErrorKind {
    match code {
        sys::CUDA_ERROR_NOT_INITIALIZED
        | sys::CUDA_ERROR_DEINITIALIZED
        | sys::CUDA_ERROR_STUB_LIBRARY
        | sys::CUDA_ERROR_DEVICE_UNAVAILABLE
        | sys::CUDA_ERROR_NO_DEVICE
        | sys::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
        | sys::CUDA_ERROR_NOT_PERMITTED
        | sys::CUDA_ERROR_NOT_SUPPORTED
        | sys::CUDA_ERROR_SYSTEM_NOT_READY
        | sys::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => ErrorKind::Unavailable,
        sys::CUDA_ERROR_OUT_OF_MEMORY | sys::CUDA_ERROR_TOO_MANY_PEERS => ErrorKind::OutOfMemory,
        sys::CUDA_ERROR_INVALID_DEVICE => ErrorKind::InvalidArgument,
        sys::CUDA_ERROR_INVALID_CONTEXT
        | sys::CUDA_ERROR_ECC_UNCORRECTABLE
        | sys::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | sys::CUDA_ERROR_ILLEGAL_ADDRESS
        | sys::CUDA_ERROR_LAUNCH_TIMEOUT
        | sys::CUDA_ERROR_CONTEXT_IS_DESTROYED
        // A failed assertion, a broken stack, and five ways of a kernel to go wrong.
        | 710
        | 714..=718
        | sys::CUDA_ERROR_LAUNCH_FAILED => ErrorKind::DeviceLost,
        _ => ErrorKind::Other,
    }
}
