//! What went wrong, and the driver's code.
//!
//! `CUresult` stays a plain integer, with the name that the driver itself gives it, because a driver
//! may be newer than this crate. The kind follows from the code; 1 and 400, an invalid value or
//! handle, are the caller's fault only where the value came from the caller.

use std::sync::Arc;

use peerlane_hal::ErrorKind;
use peerlane_toolkit::device::Fault;

use crate::sys::{self, CUresult, Driver};

mod result;

pub use result::CudaResult;
use result::{advice, kind_of};

/// The oldest driver that has every entry point this crate needs.
const DRIVER_WANTED: &str = "CUDA 12.0, NVIDIA driver 525, or newer";

/// Why the CUDA backend could not do something.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A driver, a device or an ability is not there; the text says what to do.
    #[error("{text}")]
    Unavailable {
        /// What is missing, and how to get it.
        text: String,
        /// The driver's answer, where it was asked.
        #[source]
        result: Option<CudaResult>,
    },
    /// The driver refused a call.
    #[error("{call}{}: {result}{}", on(device.as_deref()), hint(result.code))]
    Driver {
        /// The entry point.
        call: &'static str,
        /// Where, such as `device 2 (NVIDIA H200)`.
        device: Option<Arc<str>>,
        /// Its answer.
        #[source]
        result: CudaResult,
        /// What a program can make of it.
        kind: ErrorKind,
    },
    /// The device has no room for an allocation.
    #[error(
        "cannot allocate {wanted} bytes on {device}: {free} of {total} bytes are free; use smaller \
         buffers, or see with nvidia-smi who holds the memory"
    )]
    OutOfMemory {
        /// Bytes wanted.
        wanted: u64,
        /// Bytes that were free.
        free: u64,
        /// Bytes that the device has.
        total: u64,
        /// Which device.
        device: Arc<str>,
        /// The driver's answer.
        #[source]
        result: CudaResult,
    },
    /// What the toolkit refuses for all GPUs.
    #[error(transparent)]
    Fault(#[from] Fault),
}

impl Error {
    /// Something is not there, in words that say what to do.
    pub(crate) fn unavailable(text: impl Into<String>) -> Self {
        Self::Unavailable { text: text.into(), result: None }
    }

    /// The library is not there, or cannot be loaded.
    pub(crate) fn no_library(library: &str, error: &libloading::Error) -> Self {
        // libloading's own text says only that `dlopen` failed; the loader's reason is behind it.
        let reason =
            std::error::Error::source(error).map_or_else(|| error.to_string(), |it| it.to_string());
        Self::unavailable(format!(
            "cannot load {library}: {reason}; it comes with the NVIDIA driver ({DRIVER_WANTED}), in a \
             container with the NVIDIA container runtime; without it use the backend host"
        ))
    }

    /// The library lacks an entry point.
    pub(crate) fn no_symbol(library: &str, symbol: &str) -> Self {
        Self::unavailable(format!(
            "{library} has no {symbol}: the driver is too old, wanted {DRIVER_WANTED}"
        ))
    }

    /// The driver is there and does not start.
    pub(crate) fn no_start(driver: &Driver, code: CUresult) -> Self {
        let result = CudaResult::of(driver, code);
        let advice = match code {
            sys::CUDA_ERROR_NO_DEVICE => {
                let visible = match std::env::var("CUDA_VISIBLE_DEVICES") {
                    Ok(list) => format!("CUDA_VISIBLE_DEVICES is \"{list}\""),
                    Err(_) => "CUDA_VISIBLE_DEVICES is not set".to_owned(),
                };
                format!("there is no NVIDIA GPU that this process may use; {visible}")
            }
            _ => advice(code).unwrap_or("see with nvidia-smi whether the driver works").to_owned(),
        };
        let text = format!("the CUDA driver does not start: cuInit: {result}; {advice}");
        Self::Unavailable { text, result: Some(result) }
    }

    /// The driver refused `call`.
    pub(crate) fn driver(
        driver: &Driver,
        call: &'static str,
        device: Option<&Arc<str>>,
        code: CUresult,
    ) -> Self {
        let result = CudaResult::of(driver, code);
        Self::Driver { call, device: device.cloned(), result, kind: kind_of(code) }
    }

    /// The device has no room for an allocation.
    pub(crate) fn out_of_memory(
        driver: &Driver,
        device: &Arc<str>,
        wanted: u64,
        free: u64,
        total: u64,
    ) -> Self {
        let result = CudaResult::of(driver, sys::CUDA_ERROR_OUT_OF_MEMORY);
        Self::OutOfMemory { wanted, free, total, device: Arc::clone(device), result }
    }

    /// Whether the device and its context still work, as far as this result tells.
    pub(crate) fn leaves_device(code: CUresult) -> bool {
        !matches!(kind_of(code), ErrorKind::DeviceLost | ErrorKind::OutOfMemory)
    }

    /// Whether the driver has answered with one of these codes.
    pub(crate) fn is_one_of(&self, codes: &[CUresult]) -> bool {
        matches!(self, Self::Driver { result, .. } if codes.contains(&result.code))
    }
}

fn on(device: Option<&str>) -> String {
    device.map_or_else(String::new, |device| format!(" on {device}"))
}

fn hint(code: CUresult) -> String {
    advice(code).map_or_else(String::new, |advice| format!("; {advice}"))
}

impl peerlane_hal::Error for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Unavailable { .. } => ErrorKind::Unavailable,
            Self::Driver { kind, .. } => *kind,
            Self::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Self::Fault(fault) => fault.kind(),
        }
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
            "cuMemMap on device 2 (NVIDIA H200): CUDA_ERROR_ILLEGAL_ADDRESS (700), an illegal access"
        );
        assert!(std::error::Error::source(&error).is_some());
    }

    #[test]
    fn an_unknown_result_is_an_error_like_others() {
        let error = driver_error(9999, "", "");
        assert_eq!(error.kind(), ErrorKind::Other);
        assert_eq!(
            error.to_string(),
            "cuMemMap on device 2 (NVIDIA H200): result 9999, which this driver has no name for"
        );
    }

    #[test]
    fn a_missing_symbol_says_which_driver_is_wanted() {
        let error = Error::no_symbol("libcuda.so.1", "cuMemMap");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(
            error.to_string(),
            "libcuda.so.1 has no cuMemMap: the driver is too old, wanted CUDA 12.0, NVIDIA driver \
             525, or newer"
        );
    }
}
