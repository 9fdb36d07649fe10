//! Results, by the numbers and names that cuda.h gives them.

use std::ffi::{CStr, c_int};

use crate::device::capture::CaptureError;
use crate::device::fault::Fault;
use crate::device::memory::NoMemory;
use crate::device::memory::share::CannotOpen;
use crate::device::queue::Refused;

/// What a call returns: 0, or a code.
pub(crate) type CUresult = c_int;

/// A code other than 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) CUresult);

pub(crate) type Outcome<T = ()> = Result<T, Code>;

macro_rules! codes {
    (
        returned { $($constant:ident = $code:literal, $name:literal, $text:literal;)* }
        known { $($other:literal, $other_name:literal, $other_text:literal;)* }
    ) => {
        $(pub(crate) const $constant: Code = Code($code);)*

        /// The name and the explanation of a code; `None` for one that is not known.
        pub(crate) fn words(code: CUresult) -> Option<(&'static CStr, &'static CStr)> {
            match code {
                0 => Some((c"CUDA_SUCCESS", c"no error")),
                $($code => Some(($name, $text)),)*
                $($other => Some(($other_name, $other_text)),)*
                _ => None,
            }
        }
    };
}

codes! {
    returned {
        INVALID_VALUE = 1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument";
        OUT_OF_MEMORY = 2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory";
        NOT_INITIALIZED = 3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error";
        DEVICE_UNAVAILABLE = 46, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"devices are busy or unavailable";
        NO_DEVICE = 100, c"CUDA_ERROR_NO_DEVICE", c"no device is detected";
        INVALID_DEVICE = 101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal";
        INVALID_CONTEXT = 201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context";
        PEER_ACCESS_UNSUPPORTED = 217, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", c"no peer access between these devices";
        INVALID_HANDLE = 400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle";
        ILLEGAL_STATE = 401, c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be done in this state";
        NOT_READY = 600, c"CUDA_ERROR_NOT_READY", c"not finished yet";
        ILLEGAL_ADDRESS = 700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"access to an illegal address";
        PEER_ACCESS_ALREADY_ENABLED = 704, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access is enabled already";
        PEER_ACCESS_NOT_ENABLED = 705, c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", c"peer access is not enabled";
        CONTEXT_IS_DESTROYED = 709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"the context is destroyed";
        HOST_MEMORY_ALREADY_REGISTERED = 712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"the memory is registered already";
        HOST_MEMORY_NOT_REGISTERED = 713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"the memory is not registered";
        NOT_PERMITTED = 800, c"CUDA_ERROR_NOT_PERMITTED", c"not permitted";
        NOT_SUPPORTED = 801, c"CUDA_ERROR_NOT_SUPPORTED", c"not supported";
        STREAM_CAPTURE_UNSUPPORTED = 900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"not permitted while a stream captures";
        STREAM_CAPTURE_INVALIDATED = 901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"the capture failed because of an earlier error";
        STREAM_CAPTURE_MERGE = 902, c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"two captures cannot become one";
        STREAM_CAPTURE_UNMATCHED = 903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"the capture did not begin on this stream";
        STREAM_CAPTURE_UNJOINED = 904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"the capture has work that is not joined to its origin";
        STREAM_CAPTURE_ISOLATION = 905, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"a dependency on work outside of the capture";
        STREAM_CAPTURE_IMPLICIT = 906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"an implicit dependency on a capture from the legacy stream";
        CAPTURED_EVENT = 907, c"CUDA_ERROR_CAPTURED_EVENT", c"the event was last recorded in a capture";
        STREAM_CAPTURE_WRONG_THREAD = 908, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"the capture began on another thread";
        UNKNOWN = 999, c"CUDA_ERROR_UNKNOWN", c"unknown error";
    }
    // Only when a test asks for them.
    known {
        205, c"CUDA_ERROR_MAP_FAILED", c"mapping of buffer object failed";
        214, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"uncorrectable ECC error";
        220, c"CUDA_ERROR_NVLINK_UNCORRECTABLE", c"uncorrectable NVLink error";
        719, c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure";
        802, c"CUDA_ERROR_SYSTEM_NOT_READY", c"system not yet initialized";
        803, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"driver and library do not match";
    }
}

impl From<Fault> for Code {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::IllegalAddress => ILLEGAL_ADDRESS,
            Fault::Asked(code) => Self(code),
            Fault::Gone => CONTEXT_IS_DESTROYED,
        }
    }
}

impl From<CaptureError> for Code {
    fn from(error: CaptureError) -> Self {
        match error {
            CaptureError::Unsupported => STREAM_CAPTURE_UNSUPPORTED,
            CaptureError::Invalidated => STREAM_CAPTURE_INVALIDATED,
            CaptureError::Merge => STREAM_CAPTURE_MERGE,
            CaptureError::Unmatched => STREAM_CAPTURE_UNMATCHED,
            CaptureError::Unjoined => STREAM_CAPTURE_UNJOINED,
            CaptureError::Isolation => STREAM_CAPTURE_ISOLATION,
            CaptureError::Implicit => STREAM_CAPTURE_IMPLICIT,
            CaptureError::CapturedEvent => CAPTURED_EVENT,
            CaptureError::WrongThread => STREAM_CAPTURE_WRONG_THREAD,
            CaptureError::State => ILLEGAL_STATE,
        }
    }
}

impl From<Refused> for Code {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::TooLong => UNKNOWN,
            Refused::Capture(error) => error.into(),
        }
    }
}

impl From<NoMemory> for Code {
    fn from(reason: NoMemory) -> Self {
        match reason {
            NoMemory::Exhausted => OUT_OF_MEMORY,
            NoMemory::BadRange => INVALID_VALUE,
        }
    }
}

impl From<CannotOpen> for Code {
    fn from(reason: CannotOpen) -> Self {
        match reason {
            CannotOpen::Malformed => INVALID_VALUE,
            CannotOpen::OwnProcess => INVALID_CONTEXT,
            CannotOpen::Stale => INVALID_HANDLE,
        }
    }
}
