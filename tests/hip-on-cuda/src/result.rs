//! Converts results, whose numbers both vendors share, to their names.

use std::cell::Cell;
use std::ffi::{CStr, c_char};

use hip_sys::hipError_t;

use crate::cuda::{CUresult, cuda};

pub(crate) const SUCCESS: CUresult = 0;
pub(crate) const INVALID_VALUE: CUresult = 1;
pub(crate) const NO_DEVICE: CUresult = 100;
pub(crate) const INVALID_DEVICE: CUresult = 101;
const NOT_READY: CUresult = 600;
/// CUDA has a number for what it is not permitted to do, HIP has none.
const NOT_PERMITTED: CUresult = 800;
const NOT_SUPPORTED: CUresult = 801;

thread_local! {
    static LAST: Cell<hipError_t> = const { Cell::new(hipError_t::hipSuccess) };
}

/// The result as HIP has it; kept for `hipGetLastError`, unless it only says that work is under way.
pub(crate) fn remembered(result: CUresult) -> hipError_t {
    let result = if result == NOT_PERMITTED { NOT_SUPPORTED } else { result };
    let error = hipError_t(result.cast_unsigned());
    if result != SUCCESS && result != NOT_READY {
        LAST.set(error);
    }
    error
}

#[unsafe(no_mangle)]
extern "C" fn hipGetLastError() -> hipError_t {
    LAST.replace(hipError_t::hipSuccess)
}

macro_rules! names {
    ($($name:ident)*) => {
        fn name(error: hipError_t) -> &'static CStr {
            match error {
                $(hipError_t::$name => {
                    // Ended by a zero, which is all that is asked of it.
                    const NAME: &str = concat!(stringify!($name), "\0");
                    CStr::from_bytes_until_nul(NAME.as_bytes()).unwrap_or(c"hipErrorUnknown")
                })*
                _ => c"hipErrorUnknown",
            }
        }
    };
}

names! {
    hipSuccess hipErrorInvalidValue hipErrorOutOfMemory hipErrorNotInitialized hipErrorDeinitialized
    hipErrorNoDevice hipErrorInvalidDevice hipErrorInvalidContext hipErrorMapFailed
    hipErrorECCNotCorrectable hipErrorPeerAccessUnsupported hipErrorInvalidHandle hipErrorNotFound
    hipErrorNotReady hipErrorIllegalAddress hipErrorLaunchTimeOut hipErrorPeerAccessAlreadyEnabled
    hipErrorContextIsDestroyed hipErrorHostMemoryAlreadyRegistered hipErrorHostMemoryNotRegistered
    hipErrorLaunchFailure hipErrorNotSupported hipErrorStreamCaptureUnsupported
    hipErrorStreamCaptureInvalidated hipErrorStreamCaptureMerge hipErrorStreamCaptureUnmatched
    hipErrorStreamCaptureUnjoined hipErrorStreamCaptureIsolation hipErrorStreamCaptureImplicit
    hipErrorCapturedEvent hipErrorStreamCaptureWrongThread
}

#[unsafe(no_mangle)]
extern "C" fn hipGetErrorName(error: hipError_t) -> *const c_char {
    name(error).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn hipGetErrorString(error: hipError_t) -> *const c_char {
    let mut text = std::ptr::null();
    if let Some(cuda) = cuda() {
        // SAFETY: any number may be asked for; it stores a static string, or null.
        let _ = unsafe { (cuda.cuGetErrorString)(error.0.cast_signed(), &raw mut text) };
    }
    if text.is_null() { c"unknown error".as_ptr() } else { text }
}

const _: hip_sys::hipGetLastError = hipGetLastError;
const _: hip_sys::hipGetErrorName = hipGetErrorName;
const _: hip_sys::hipGetErrorString = hipGetErrorString;
