//! Defines results.
//!
//! HIP adopted the numbers of the CUDA driver. Each API has its own names, and lacks names for some
//! numbers.

use std::ffi::{CStr, c_int};

use crate::device::capture::CaptureError;
use crate::device::fault::Fault;
use crate::device::memory::NoMemory;
use crate::device::memory::share::CannotOpen;
use crate::device::queue::Refused;

/// What a call returns: 0, or a code.
pub(crate) type Status = c_int;

/// A code other than 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) Status);

pub(crate) type Outcome<T = ()> = Result<T, Code>;

/// What the vendors call a code.
#[derive(Clone, Copy, Debug)]
struct Words {
    code: Status,
    cuda: &'static CStr,
    /// `None` where HIP has no such code.
    hip: Option<&'static CStr>,
    text: &'static CStr,
}

const fn both(code: Status, cuda: &'static CStr, hip: &'static CStr, text: &'static CStr) -> Words {
    Words { code, cuda, hip: Some(hip), text }
}

const fn cuda(code: Status, cuda: &'static CStr, text: &'static CStr) -> Words {
    Words { code, cuda, hip: None, text }
}

pub(crate) const INVALID_VALUE: Code = Code(1);
pub(crate) const OUT_OF_MEMORY: Code = Code(2);
pub(crate) const NOT_INITIALIZED: Code = Code(3);
pub(crate) const DEVICE_UNAVAILABLE: Code = Code(46);
/// HIP alone has it.
pub(crate) const INVALID_DEVICE_POINTER: Code = Code(17);
pub(crate) const NO_DEVICE: Code = Code(100);
pub(crate) const INVALID_DEVICE: Code = Code(101);
pub(crate) const INVALID_CONTEXT: Code = Code(201);
pub(crate) const PEER_ACCESS_UNSUPPORTED: Code = Code(217);
pub(crate) const INVALID_PTX: Code = Code(218);
pub(crate) const INVALID_HANDLE: Code = Code(400);
pub(crate) const ILLEGAL_STATE: Code = Code(401);
pub(crate) const NOT_FOUND: Code = Code(500);
pub(crate) const NOT_READY: Code = Code(600);
pub(crate) const ILLEGAL_ADDRESS: Code = Code(700);
pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Code = Code(704);
pub(crate) const PEER_ACCESS_NOT_ENABLED: Code = Code(705);
pub(crate) const CONTEXT_IS_DESTROYED: Code = Code(709);
pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: Code = Code(712);
pub(crate) const HOST_MEMORY_NOT_REGISTERED: Code = Code(713);
pub(crate) const NOT_PERMITTED: Code = Code(800);
pub(crate) const NOT_SUPPORTED: Code = Code(801);
pub(crate) const STREAM_CAPTURE_UNSUPPORTED: Code = Code(900);
pub(crate) const STREAM_CAPTURE_INVALIDATED: Code = Code(901);
pub(crate) const STREAM_CAPTURE_MERGE: Code = Code(902);
pub(crate) const STREAM_CAPTURE_UNMATCHED: Code = Code(903);
pub(crate) const STREAM_CAPTURE_UNJOINED: Code = Code(904);
pub(crate) const STREAM_CAPTURE_ISOLATION: Code = Code(905);
pub(crate) const STREAM_CAPTURE_IMPLICIT: Code = Code(906);
pub(crate) const CAPTURED_EVENT: Code = Code(907);
pub(crate) const STREAM_CAPTURE_WRONG_THREAD: Code = Code(908);
pub(crate) const UNKNOWN: Code = Code(999);

const WORDS: &[Words] = &[
    both(0, c"CUDA_SUCCESS", c"hipSuccess", c"no error"),
    both(
        INVALID_VALUE.0,
        c"CUDA_ERROR_INVALID_VALUE",
        c"hipErrorInvalidValue",
        c"invalid argument",
    ),
    both(OUT_OF_MEMORY.0, c"CUDA_ERROR_OUT_OF_MEMORY", c"hipErrorOutOfMemory", c"out of memory"),
    both(
        NOT_INITIALIZED.0,
        c"CUDA_ERROR_NOT_INITIALIZED",
        c"hipErrorNotInitialized",
        c"initialization error",
    ),
    both(INVALID_DEVICE_POINTER.0, c"", c"hipErrorInvalidDevicePointer", c"invalid device pointer"),
    cuda(
        DEVICE_UNAVAILABLE.0,
        c"CUDA_ERROR_DEVICE_UNAVAILABLE",
        c"devices are busy or unavailable",
    ),
    both(NO_DEVICE.0, c"CUDA_ERROR_NO_DEVICE", c"hipErrorNoDevice", c"no device is detected"),
    both(
        INVALID_DEVICE.0,
        c"CUDA_ERROR_INVALID_DEVICE",
        c"hipErrorInvalidDevice",
        c"invalid device ordinal",
    ),
    both(
        INVALID_CONTEXT.0,
        c"CUDA_ERROR_INVALID_CONTEXT",
        c"hipErrorInvalidContext",
        c"invalid device context",
    ),
    both(
        PEER_ACCESS_UNSUPPORTED.0,
        c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        c"hipErrorPeerAccessUnsupported",
        c"no peer access between these devices",
    ),
    both(
        INVALID_PTX.0,
        c"CUDA_ERROR_INVALID_PTX",
        c"hipErrorInvalidKernelFile",
        c"a PTX JIT compilation failed",
    ),
    both(NOT_FOUND.0, c"CUDA_ERROR_NOT_FOUND", c"hipErrorNotFound", c"named symbol not found"),
    both(
        INVALID_HANDLE.0,
        c"CUDA_ERROR_INVALID_HANDLE",
        c"hipErrorInvalidHandle",
        c"invalid resource handle",
    ),
    both(
        ILLEGAL_STATE.0,
        c"CUDA_ERROR_ILLEGAL_STATE",
        c"hipErrorIllegalState",
        c"the operation cannot be done in this state",
    ),
    both(NOT_READY.0, c"CUDA_ERROR_NOT_READY", c"hipErrorNotReady", c"not finished yet"),
    both(
        ILLEGAL_ADDRESS.0,
        c"CUDA_ERROR_ILLEGAL_ADDRESS",
        c"hipErrorIllegalAddress",
        c"access to an illegal address",
    ),
    both(
        PEER_ACCESS_ALREADY_ENABLED.0,
        c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
        c"hipErrorPeerAccessAlreadyEnabled",
        c"peer access is enabled already",
    ),
    both(
        PEER_ACCESS_NOT_ENABLED.0,
        c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED",
        c"hipErrorPeerAccessNotEnabled",
        c"peer access is not enabled",
    ),
    both(
        CONTEXT_IS_DESTROYED.0,
        c"CUDA_ERROR_CONTEXT_IS_DESTROYED",
        c"hipErrorContextIsDestroyed",
        c"the context is destroyed",
    ),
    both(
        HOST_MEMORY_ALREADY_REGISTERED.0,
        c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"hipErrorHostMemoryAlreadyRegistered",
        c"the memory is registered already",
    ),
    both(
        HOST_MEMORY_NOT_REGISTERED.0,
        c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"hipErrorHostMemoryNotRegistered",
        c"the memory is not registered",
    ),
    cuda(NOT_PERMITTED.0, c"CUDA_ERROR_NOT_PERMITTED", c"not permitted"),
    both(NOT_SUPPORTED.0, c"CUDA_ERROR_NOT_SUPPORTED", c"hipErrorNotSupported", c"not supported"),
    both(
        STREAM_CAPTURE_UNSUPPORTED.0,
        c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"hipErrorStreamCaptureUnsupported",
        c"not permitted while a stream captures",
    ),
    both(
        STREAM_CAPTURE_INVALIDATED.0,
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"hipErrorStreamCaptureInvalidated",
        c"the capture failed because of an earlier error",
    ),
    both(
        STREAM_CAPTURE_MERGE.0,
        c"CUDA_ERROR_STREAM_CAPTURE_MERGE",
        c"hipErrorStreamCaptureMerge",
        c"two captures cannot become one",
    ),
    both(
        STREAM_CAPTURE_UNMATCHED.0,
        c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
        c"hipErrorStreamCaptureUnmatched",
        c"the capture did not begin on this stream",
    ),
    both(
        STREAM_CAPTURE_UNJOINED.0,
        c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        c"hipErrorStreamCaptureUnjoined",
        c"the capture has work that is not joined to its origin",
    ),
    both(
        STREAM_CAPTURE_ISOLATION.0,
        c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        c"hipErrorStreamCaptureIsolation",
        c"a dependency on work outside of the capture",
    ),
    both(
        STREAM_CAPTURE_IMPLICIT.0,
        c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"hipErrorStreamCaptureImplicit",
        c"an implicit dependency on a capture from the legacy stream",
    ),
    both(
        CAPTURED_EVENT.0,
        c"CUDA_ERROR_CAPTURED_EVENT",
        c"hipErrorCapturedEvent",
        c"the event was last recorded in a capture",
    ),
    both(
        STREAM_CAPTURE_WRONG_THREAD.0,
        c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        c"hipErrorStreamCaptureWrongThread",
        c"the capture began on another thread",
    ),
    both(UNKNOWN.0, c"CUDA_ERROR_UNKNOWN", c"hipErrorUnknown", c"unknown error"),
    // Only when a test asks for them.
    both(205, c"CUDA_ERROR_MAP_FAILED", c"hipErrorMapFailed", c"mapping of buffer object failed"),
    both(
        214,
        c"CUDA_ERROR_ECC_UNCORRECTABLE",
        c"hipErrorECCNotCorrectable",
        c"uncorrectable ECC error",
    ),
    cuda(220, c"CUDA_ERROR_NVLINK_UNCORRECTABLE", c"uncorrectable NVLink error"),
    both(719, c"CUDA_ERROR_LAUNCH_FAILED", c"hipErrorLaunchFailure", c"unspecified launch failure"),
    cuda(802, c"CUDA_ERROR_SYSTEM_NOT_READY", c"system not yet initialized"),
    cuda(803, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"driver and library do not match"),
];

fn words(code: Status) -> Option<&'static Words> {
    WORDS.iter().find(|words| words.code == code)
}

/// What CUDA calls the code, and what that means; `None` for one that is not known.
pub(crate) fn cuda_words(code: Status) -> Option<(&'static CStr, &'static CStr)> {
    words(code).filter(|words| !words.cuda.is_empty()).map(|words| (words.cuda, words.text))
}

/// As [`cuda_words`], by HIP.
pub(crate) fn hip_words(code: Status) -> Option<(&'static CStr, &'static CStr)> {
    words(code).and_then(|words| Some((words.hip?, words.text)))
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
            CannotOpen::Refused => INVALID_DEVICE_POINTER,
        }
    }
}
