//! Defines the errors of the ROCm backend, with the result code of the runtime.
//!
//! `hipError_t` and `hsa_status_t` stay plain integers, with the names that the runtimes themselves report,
//! because a runtime may be newer than this crate. The error kind follows from the code. An invalid value
//! or handle is the caller's fault only if the value came from the caller.

use std::path::Path;
use std::sync::Arc;

use peerlane_hal::{ErrorKind, Rank};
use peerlane_toolkit::Fault;
use rocm_library::LoadError;

use crate::diagnose::{is_kernel_driver_refused, why_no_gpu};
use crate::sys::hip::{self, hipError_t};
use crate::sys::hsa::{self, hsa_status_t};
use crate::sys::{self, Hip, Hsa, RocmResult};

const ROCM_MIN: &str = "ROCm 5.7 or newer";
const TRY_ROCMINFO: &str = "run rocminfo to check whether the runtime works";

/// An error of the ROCm backend, such as a failed runtime call or a missing feature.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This machine has no HIP runtime, or this process sees no AMD GPU.
    #[error("{text}")]
    Absent {
        /// The error text, which says what is missing and how to get it.
        text: String,
        /// The result code of the runtime, or `None` if there is no runtime.
        #[source]
        result: Option<RocmResult>,
    },
    /// A runtime does not work or is too old, a device cannot be used, or a feature is missing.
    #[error("{text}")]
    Unavailable {
        /// The error text, which says what is missing and how to get it.
        text: String,
        /// The result code of the runtime, or `None` if the runtime was not called.
        #[source]
        result: Option<RocmResult>,
    },
    /// A call of HIP or of the HSA runtime failed.
    #[error("{call} failed{}: {result}{}", device_suffix(device.as_deref()), advice_suffix(advice))]
    Driver {
        /// The name of the runtime's entry point that failed.
        call: &'static str,
        /// The name of the device, such as `device 2 (AMD Instinct MI300X)`.
        device: Option<Arc<str>>,
        /// The result code that the failed runtime call returned.
        #[source]
        result: RocmResult,
        /// What the user can do about the error, or an empty text if there is no advice.
        advice: &'static str,
        /// The error kind to which the runtime's result code corresponds.
        kind: ErrorKind,
    },
    /// The device has too little free memory for an allocation.
    #[error(
        "cannot allocate {requested} bytes on {device}: {free} of {total} bytes are free; use \
         smaller buffers, or run rocm-smi --showpids to see which process uses the memory"
    )]
    OutOfMemory {
        /// The number of bytes of device memory that were requested.
        requested: u64,
        /// The number of bytes of device memory that were free.
        free: u64,
        /// The size of the device's memory in bytes.
        total: u64,
        /// The name of the device that has too little memory.
        device: Arc<str>,
        /// The runtime's result code for the failed allocation.
        #[source]
        result: RocmResult,
    },
    /// A copy failed after the runtime had accepted it.
    #[error("{what} failed on {device}: the completion signal has the value {value}, expected 0")]
    Copy {
        /// A description of the copy that failed.
        what: String,
        /// The name of the device whose SDMA engine made the copy.
        device: Arc<str>,
        /// The value of the copy's completion signal, which is negative.
        value: i64,
    },
    /// An error of the toolkit, which all GPU backends share.
    #[error(transparent)]
    Fault(#[from] Fault),
}

impl Error {
    pub(crate) fn unavailable(text: impl Into<String>) -> Self {
        Self::Unavailable { text: text.into(), result: None }
    }

    pub(crate) fn load_failed(error: &LoadError) -> Self {
        let install = format!(
            "{error}; install {ROCM_MIN}, set ROCM_PATH to its folder if it is installed, or"
        );
        Self::unavailable(match error {
            LoadError::NotFound { name, .. } if *name == hip::LIBRARY.name => {
                let text = format!("{install} use the backend host");
                return Self::Absent { text, result: None };
            }
            LoadError::NotFound { .. } => format!("{install} let engines use streams"),
            LoadError::LoadFailed { .. } => format!(
                "{error}; run ldd to see which libraries it needs, and check that LD_LIBRARY_PATH \
                 does not mix two ROCm releases"
            ),
            _ => error.to_string(),
        })
    }

    pub(crate) fn hip_init_failed(hip: &Hip, code: hipError_t) -> Self {
        let no_device =
            matches!(code, hipError_t::hipErrorNoDevice | hipError_t::hipErrorInvalidDevice);
        let advice = match no_device {
            true => why_no_gpu(),
            false => advice(code).unwrap_or(TRY_ROCMINFO).to_owned(),
        };
        let runtime = format!("HIP {}", hip.version);
        let result = hip.result_of(code);
        match Self::init_failed(&runtime, hip.calls.file(), "hipInit", result, &advice) {
            // A kernel driver that this process may not use is not a machine without GPUs.
            Self::Unavailable { text, result } if no_device && !is_kernel_driver_refused() => {
                Self::Absent { text, result }
            }
            error => error,
        }
    }

    pub(crate) fn hsa_init_failed(calls: &hsa::Library, status: hsa_status_t) -> Self {
        let advice = match status {
            // The runtime returns this if it cannot open the kernel driver's device.
            hsa_status_t::HSA_STATUS_ERROR_OUT_OF_RESOURCES => why_no_gpu(),
            _ => TRY_ROCMINFO.to_owned(),
        };
        let result = sys::status_of(calls, status);
        Self::init_failed("the HSA runtime", calls.file(), "hsa_init", result, &advice)
    }

    fn init_failed(
        runtime: &str,
        file: &Path,
        call: &str,
        mut result: RocmResult,
        advice: &str,
    ) -> Self {
        // The text below already names the runtime; an unknown result would name it again.
        if result.name.is_empty() {
            result.text.clear();
        }
        let file = file.display();
        let text = format!("cannot start {runtime} ({file}): {call} failed: {result}; {advice}");
        Self::Unavailable { text, result: Some(result) }
    }

    pub(crate) fn hip(
        hip: &Hip,
        call: &'static str,
        device: Option<&Arc<str>>,
        code: hipError_t,
    ) -> Self {
        Self::Driver {
            call,
            device: device.cloned(),
            result: hip.result_of(code),
            advice: advice(code).unwrap_or_default(),
            kind: kind_of_hip(code),
        }
    }

    pub(crate) fn is_one_of(&self, codes: &[hipError_t]) -> bool {
        matches!(self, Self::Driver { result, .. } if codes.iter().any(|code| code.0 == result.code))
    }

    pub(crate) fn loses_device(code: hipError_t) -> bool {
        kind_of_hip(code) == ErrorKind::DeviceLost
    }

    pub(crate) fn hsa(
        hsa: &Hsa,
        call: &'static str,
        device: Option<&Arc<str>>,
        status: hsa_status_t,
    ) -> Self {
        Self::Driver {
            call,
            device: device.cloned(),
            result: sys::status_of(hsa.calls, status),
            advice: "",
            kind: kind_of_hsa(status),
        }
    }
}

fn device_suffix(device: Option<&str>) -> String {
    device.map_or_else(String::new, |device| format!(" on {device}"))
}

fn advice_suffix(advice: &str) -> String {
    if advice.is_empty() { String::new() } else { format!("; {advice}") }
}

impl peerlane_hal::Error for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Absent { .. } | Self::Unavailable { .. } => ErrorKind::Unavailable,
            Self::Driver { kind, .. } => *kind,
            Self::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Self::Copy { .. } => ErrorKind::Other,
            Self::Fault(fault) => fault.kind(),
        }
    }

    fn peer(&self) -> Option<Rank> {
        if let Self::Fault(fault) = self { fault.peer() } else { None }
    }
}

fn advice(code: hipError_t) -> Option<&'static str> {
    Some(match code {
        hipError_t::hipErrorInsufficientDriver => {
            "the kernel module amdgpu is older than the runtime; load the module of the same \
             release, or restart the machine"
        }
        hipError_t::hipErrorNoBinaryForGpu => {
            "the runtime does not support the architecture of this GPU; run rocminfo to see the \
             architecture"
        }
        _ => return None,
    })
}

/// After a device fault all later HIP calls fail too, so this process has lost the device.
fn kind_of_hip(code: hipError_t) -> ErrorKind {
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

fn kind_of_hsa(status: hsa_status_t) -> ErrorKind {
    match status {
        hsa_status_t::HSA_STATUS_ERROR_NOT_INITIALIZED | hsa::HSA_STATUS_ERROR_NOT_SUPPORTED => {
            ErrorKind::Unavailable
        }
        hsa_status_t::HSA_STATUS_ERROR_OUT_OF_RESOURCES => ErrorKind::OutOfMemory,
        hsa::HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION
        | hsa::HSA_STATUS_ERROR_ILLEGAL_INSTRUCTION
        | hsa::HSA_STATUS_ERROR_MEMORY_FAULT
        | hsa_status_t::HSA_STATUS_ERROR_EXCEPTION
        | hsa_status_t::HSA_STATUS_ERROR_FATAL => ErrorKind::DeviceLost,
        _ => ErrorKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use peerlane_hal::Error as _;

    use super::*;

    fn driver_error(code: hipError_t, name: &str, text: &str) -> Error {
        let result = RocmResult { code: code.0, name: name.into(), text: text.into() };
        let device = Some("device 2 (AMD Instinct MI300X)".into());
        let advice = advice(code).unwrap_or_default();
        Error::Driver { call: "hipMemMap", device, result, advice, kind: kind_of_hip(code) }
    }

    #[test]
    fn a_driver_error_names_call_device_and_result() {
        let error = driver_error(
            hipError_t::hipErrorIllegalAddress,
            "hipErrorIllegalAddress",
            "an illegal memory access was encountered",
        );
        assert_eq!(error.kind(), ErrorKind::DeviceLost);
        assert_eq!(
            error.to_string(),
            "hipMemMap failed on device 2 (AMD Instinct MI300X): hipErrorIllegalAddress (700), an \
             illegal memory access was encountered"
        );
        assert!(std::error::Error::source(&error).is_some());
    }

    #[test]
    fn an_unknown_result_is_reported_by_number() {
        let error = driver_error(hipError_t(4242), "", "");
        assert_eq!(error.kind(), ErrorKind::Other);
        assert_eq!(
            error.to_string(),
            "hipMemMap failed on device 2 (AMD Instinct MI300X): unknown result code 4242"
        );
    }

    #[test]
    fn only_a_hip_that_does_not_exist_is_absent() {
        let tried = || "libamdhip64.so.7".to_owned();
        let hip =
            Error::load_failed(&LoadError::NotFound { name: hip::LIBRARY.name, tried: tried() });
        assert!(matches!(hip, Error::Absent { .. }), "{hip}");
        let hsa =
            Error::load_failed(&LoadError::NotFound { name: hsa::LIBRARY.name, tried: tried() });
        assert!(matches!(hsa, Error::Unavailable { .. }), "{hsa}");
        let (library, reason) = (tried(), "file too short".to_owned());
        let broken = Error::load_failed(&LoadError::LoadFailed { library, reason });
        assert!(matches!(broken, Error::Unavailable { .. }), "{broken}");
    }

    #[test]
    fn a_missing_symbol_names_the_file_and_the_release() {
        let error = Error::load_failed(&LoadError::Symbol {
            file: "/opt/rocm-5.2.3/lib/libamdhip64.so.5.2.21153".into(),
            symbol: "hipStreamGetDevice",
            since: "5.7",
        });
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(
            error.to_string(),
            "/opt/rocm-5.2.3/lib/libamdhip64.so.5.2.21153 has no function hipStreamGetDevice: the \
             library is too old, expected ROCm 5.7 or newer"
        );
    }

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
