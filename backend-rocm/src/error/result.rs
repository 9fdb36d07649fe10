//! A result of a runtime: its name, what it means to a program, what a person can do about it.

use peerlane_hal::ErrorKind;

use crate::sys::hip::hipError_t;
use crate::sys::hsa::hsa_status_t;

/// A result of HIP or of the HSA runtime, as it names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RocmResult {
    /// The number.
    pub code: u32,
    /// Its name, such as `hipErrorOutOfMemory`; empty where the runtime knows none.
    pub name: String,
    /// The runtime's explanation, empty where it has none; without a name, which runtime knows none.
    pub text: String,
}

impl RocmResult {
    /// A number that this runtime does not know.
    pub(crate) fn nameless(code: u32, runtime: String) -> Self {
        Self { code, name: String::new(), text: runtime }
    }
}

impl std::fmt::Display for RocmResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { code, name, text } = self;
        match (name.as_str(), text.as_str()) {
            ("", "") => write!(f, "result {code}, which this runtime has no name for"),
            ("", runtime) => write!(f, "result {code}, which {runtime} has no name for"),
            (name, "") => write!(f, "{name} ({code})"),
            (name, text) => write!(f, "{name} ({code}), {text}"),
        }
    }
}

impl std::error::Error for RocmResult {}

/// What a person can do about a result of HIP; where there is something.
pub(super) fn advice(code: hipError_t) -> Option<&'static str> {
    Some(match code {
        hipError_t::hipErrorInsufficientDriver => {
            "the kernel module amdgpu is older than the runtime: load the one that came with it, or \
             restart the machine"
        }
        hipError_t::hipErrorNoBinaryForGpu => {
            "the runtime was built without this GPU's architecture: see with rocminfo which it is"
        }
        _ => return None,
    })
}

/// What a program can make of a result of HIP. What follows a fault of the device stays, so the device
/// is lost to this process.
pub(super) fn kind_of_hip(code: hipError_t) -> ErrorKind {
    match code {
        hipError_t::hipErrorNotInitialized
        | hipError_t::hipErrorDeinitialized
        | hipError_t::hipErrorInsufficientDriver
        | hipError_t::hipErrorNoDevice
        | hipError_t::hipErrorInvalidDevice
        | hipError_t::hipErrorNoBinaryForGpu
        | hipError_t::hipErrorPeerAccessUnsupported
        | hipError_t::hipErrorNotSupported => ErrorKind::Unavailable,
        hipError_t::hipErrorOutOfMemory => ErrorKind::OutOfMemory,
        hipError_t::hipErrorInvalidContext
        | hipError_t::hipErrorECCNotCorrectable
        | hipError_t::hipErrorIllegalAddress
        | hipError_t::hipErrorLaunchTimeOut
        | hipError_t::hipErrorContextIsDestroyed
        | hipError_t::hipErrorAssert
        | hipError_t::hipErrorLaunchFailure => ErrorKind::DeviceLost,
        _ => ErrorKind::Other,
    }
}

/// What a program can make of a status of the HSA runtime.
pub(super) fn kind_of_hsa(status: hsa_status_t) -> ErrorKind {
    match status {
        hsa_status_t::HSA_STATUS_ERROR_NOT_INITIALIZED
        | crate::sys::hsa::HSA_STATUS_ERROR_NOT_SUPPORTED => ErrorKind::Unavailable,
        hsa_status_t::HSA_STATUS_ERROR_OUT_OF_RESOURCES => ErrorKind::OutOfMemory,
        crate::sys::hsa::HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION
        | crate::sys::hsa::HSA_STATUS_ERROR_ILLEGAL_INSTRUCTION
        | crate::sys::hsa::HSA_STATUS_ERROR_MEMORY_FAULT
        | hsa_status_t::HSA_STATUS_ERROR_EXCEPTION
        | hsa_status_t::HSA_STATUS_ERROR_FATAL => ErrorKind::DeviceLost,
        _ => ErrorKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_device_is_unavailable_and_a_fault_loses_the_device() {
        assert_eq!(kind_of_hip(hipError_t(100)), ErrorKind::Unavailable);
        assert_eq!(kind_of_hip(hipError_t(101)), ErrorKind::Unavailable);
        assert_eq!(kind_of_hip(hipError_t(2)), ErrorKind::OutOfMemory);
        assert_eq!(kind_of_hip(hipError_t(719)), ErrorKind::DeviceLost);
        assert_eq!(kind_of_hip(hipError_t(4242)), ErrorKind::Other);
        assert_eq!(kind_of_hsa(hsa_status_t(43)), ErrorKind::DeviceLost);
        assert_eq!(kind_of_hsa(hsa_status_t(0x7777)), ErrorKind::Other);
    }
}
