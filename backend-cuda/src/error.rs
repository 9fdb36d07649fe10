//! Defines the errors of the CUDA backend, with the driver's result code.
//!
//! `CUresult` stays a plain integer, with the name that the driver itself reports, because a driver may
//! be newer than this crate. The error kind follows from the code. Codes 1 and 400, an invalid value or
//! handle, are the caller's fault only if the value came from the caller.

use std::sync::Arc;

use peerlane_hal::{ErrorKind, Rank};
use peerlane_toolkit::Fault;

use crate::sys::{self, CUresult, Driver};

const DRIVER_MIN: &str = "CUDA 12.0, NVIDIA driver 525, or newer";

/// An error of the CUDA backend, such as a failed driver call or a missing feature.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This machine has no NVIDIA driver, or this process sees no NVIDIA GPU.
    #[error("{text}")]
    Absent {
        /// The error text, which says what is missing and how to get it.
        text: String,
        /// The result code of the driver, or `None` if there is no driver.
        #[source]
        result: Option<CudaResult>,
    },
    /// A driver does not work or is too old, a device cannot be used, or a feature is missing.
    #[error("{text}")]
    Unavailable {
        /// The error text, which says what is missing and how to get it.
        text: String,
        /// The result code of the driver, or `None` if the driver was not called.
        #[source]
        result: Option<CudaResult>,
    },
    /// A call of the CUDA driver failed.
    #[error(
        "{call} failed{}: {result}{}",
        device_suffix(device.as_deref()),
        advice_suffix(result.code)
    )]
    Driver {
        /// The name of the driver's entry point that failed.
        call: &'static str,
        /// The name of the device, such as `device 2 (NVIDIA H200)`.
        device: Option<Arc<str>>,
        /// The result code that the failed driver call returned.
        #[source]
        result: CudaResult,
        /// The error kind to which the driver's result code corresponds.
        kind: ErrorKind,
    },
    /// The device has too little free memory for an allocation.
    #[error(
        "cannot allocate {requested} bytes on {device}: {free} of {total} bytes are free; use \
         smaller buffers, or run nvidia-smi to see which process uses the memory"
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
        /// The driver's result code for the failed allocation.
        #[source]
        result: CudaResult,
    },
    /// An error of the toolkit, which all GPU backends share.
    #[error(transparent)]
    Fault(#[from] Fault),
}

impl Error {
    pub(crate) fn unavailable(text: impl Into<String>) -> Self {
        Self::Unavailable { text: text.into(), result: None }
    }

    pub(crate) fn library_missing(library: &str, error: &libloading::Error) -> Self {
        // libloading's own text says only that `dlopen` failed; its source holds the loader's reason.
        let reason =
            std::error::Error::source(error).map_or_else(|| error.to_string(), |it| it.to_string());
        let text = format!(
            "cannot load {library}: {reason}; install the NVIDIA driver ({DRIVER_MIN}), start \
             containers with the NVIDIA container runtime, or use the backend host"
        );
        // With the name of another file, the loader found the library, but none that the library needs.
        let is_absent =
            reason.strip_prefix(library).is_some_and(|rest| rest.contains("No such file"));
        if is_absent { Self::Absent { text, result: None } } else { Self::unavailable(text) }
    }

    pub(crate) fn symbol_missing(library: &str, symbol: &str) -> Self {
        Self::unavailable(format!(
            "{library} has no function {symbol}: the driver is too old, expected {DRIVER_MIN}"
        ))
    }

    pub(crate) fn init_failed(driver: &Driver, code: CUresult) -> Self {
        let result = CudaResult::query(driver, code);
        let advice = match code {
            sys::CUDA_ERROR_NO_DEVICE => {
                let visible = match std::env::var("CUDA_VISIBLE_DEVICES") {
                    Ok(list) => format!("CUDA_VISIBLE_DEVICES is {list:?}"),
                    Err(_) => "CUDA_VISIBLE_DEVICES is not set".to_owned(),
                };
                format!("this process sees no NVIDIA GPU; {visible}")
            }
            _ => advice(code)
                .unwrap_or("run nvidia-smi to check whether the driver works")
                .to_owned(),
        };
        let text = format!("cannot start the CUDA driver: cuInit failed: {result}; {advice}");
        match code {
            sys::CUDA_ERROR_NO_DEVICE | sys::CUDA_ERROR_STUB_LIBRARY => {
                Self::Absent { text, result: Some(result) }
            }
            _ => Self::Unavailable { text, result: Some(result) },
        }
    }

    pub(crate) fn driver(
        driver: &Driver,
        call: &'static str,
        device: Option<&Arc<str>>,
        code: CUresult,
    ) -> Self {
        let result = CudaResult::query(driver, code);
        Self::Driver { call, device: device.cloned(), result, kind: kind_of(code) }
    }

    pub(crate) fn out_of_memory(
        driver: &Driver,
        device: &Arc<str>,
        requested: u64,
        free: u64,
        total: u64,
    ) -> Self {
        let result = CudaResult::query(driver, sys::CUDA_ERROR_OUT_OF_MEMORY);
        Self::OutOfMemory { requested, free, total, device: Arc::clone(device), result }
    }

    pub(crate) fn device_survives(code: CUresult) -> bool {
        !matches!(kind_of(code), ErrorKind::DeviceLost | ErrorKind::OutOfMemory)
    }

    pub(crate) fn is_one_of(&self, codes: &[CUresult]) -> bool {
        matches!(self, Self::Driver { result, .. } if codes.contains(&result.code))
    }
}

fn device_suffix(device: Option<&str>) -> String {
    device.map_or_else(String::new, |device| format!(" on {device}"))
}

fn advice_suffix(code: CUresult) -> String {
    advice(code).map_or_else(String::new, |advice| format!("; {advice}"))
}

impl peerlane_hal::Error for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Absent { .. } | Self::Unavailable { .. } => ErrorKind::Unavailable,
            Self::Driver { kind, .. } => *kind,
            Self::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Self::Fault(fault) => fault.kind(),
        }
    }

    fn peer(&self) -> Option<Rank> {
        if let Self::Fault(fault) = self { fault.peer() } else { None }
    }
}

/// A result code of the CUDA driver with its name and explanation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaResult {
    /// The numeric value of the driver's result code.
    pub code: i32,
    /// The name of the code, such as `CUDA_ERROR_OUT_OF_MEMORY`, or an empty text if the driver does not
    /// know it.
    pub name: String,
    /// The driver's explanation of the code, or an empty text if the driver has none.
    pub text: String,
}

impl CudaResult {
    pub(crate) fn query(driver: &Driver, code: CUresult) -> Self {
        let (name, text) = driver.name_of(code);
        Self { code, name, text }
    }
}

impl std::fmt::Display for CudaResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { code, name, text } = self;
        match (name.as_str(), text.as_str()) {
            ("", _) => write!(f, "unknown result code {code}"),
            (name, "") => write!(f, "{name} ({code})"),
            (name, text) => write!(f, "{name} ({code}), {text}"),
        }
    }
}

impl std::error::Error for CudaResult {}

fn advice(code: CUresult) -> Option<&'static str> {
    Some(match code {
        sys::CUDA_ERROR_STUB_LIBRARY => {
            "the loader found the stub library of the CUDA toolkit instead of the driver's \
             library; remove the folder of the stub from LD_LIBRARY_PATH"
        }
        sys::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            "another process uses the device in exclusive compute mode, or its compute mode is \
             prohibited; check with nvidia-smi -q -d COMPUTE"
        }
        sys::CUDA_ERROR_SYSTEM_NOT_READY => {
            "the NVSwitch fabric is not ready; check that nvidia-fabricmanager runs"
        }
        sys::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "the driver's library and the kernel module have different versions; load the new \
             module, or restart the machine"
        }
        _ => return None,
    })
}

/// Errors that the driver calls sticky leave the context unusable, so this process has lost the device.
fn kind_of(code: CUresult) -> ErrorKind {
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
        // 710: a failed device assertion; 714: a corrupt stack; 715 to 718: faults of a kernel.
        | 710
        | 714..=718
        | sys::CUDA_ERROR_LAUNCH_FAILED => ErrorKind::DeviceLost,
        _ => ErrorKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use peerlane_hal::Error as _;

    use super::*;

    fn driver_error(code: CUresult, name: &str, text: &str) -> Error {
        let result = CudaResult { code, name: name.into(), text: text.into() };
        let device = Some("device 2 (NVIDIA H200)".into());
        Error::Driver { call: "cuMemMap", device, result, kind: kind_of(code) }
    }

    #[test]
    fn a_driver_error_names_call_device_and_result() {
        let error = driver_error(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal access");
        assert_eq!(error.kind(), ErrorKind::DeviceLost);
        assert_eq!(
            error.to_string(),
            "cuMemMap failed on device 2 (NVIDIA H200): CUDA_ERROR_ILLEGAL_ADDRESS (700), an \
             illegal access"
        );
        assert!(std::error::Error::source(&error).is_some());
    }

    #[test]
    fn an_unknown_result_is_reported_by_number() {
        let error = driver_error(9999, "", "");
        assert_eq!(error.kind(), ErrorKind::Other);
        assert_eq!(
            error.to_string(),
            "cuMemMap failed on device 2 (NVIDIA H200): unknown result code 9999"
        );
    }

    #[test]
    fn a_library_that_does_not_exist_is_absent_and_one_that_cannot_be_loaded_is_not() {
        let load = |name: &str| {
            // SAFETY: there is no such library, so nothing is loaded.
            let error = unsafe { libloading::Library::new(name) }.unwrap_err();
            Error::library_missing(name, &error)
        };
        let error = load("libpeerlane-none.so.1");
        assert!(matches!(error, Error::Absent { .. }), "{error}");
        let error = load(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    }

    #[test]
    fn a_missing_symbol_names_the_required_driver() {
        let error = Error::symbol_missing("libcuda.so.1", "cuMemMap");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(
            error.to_string(),
            "libcuda.so.1 has no function cuMemMap: the driver is too old, expected CUDA 12.0, \
             NVIDIA driver 525, or newer"
        );
    }
}
