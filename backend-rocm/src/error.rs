//! What went wrong, and the runtime's code.
//!
//! `hipError_t` and `hsa_status_t` stay plain integers, with the names that the runtimes themselves give
//! them, because a runtime may be newer than this crate. The kind follows from the code; an invalid value
//! or handle is the caller's fault only where the value came from the caller.

use std::sync::Arc;

use peerlane_hal::ErrorKind;
use peerlane_toolkit::device::Fault;
use rocm_library::LoadError;

use crate::device::absence;
use crate::sys::hip::{self, hipError_t};
use crate::sys::hsa::{self, hsa_status_t};
use crate::sys::{self, Hip, Hsa};

mod result;

pub use result::RocmResult;
use result::{advice, kind_of_hip, kind_of_hsa};

/// The oldest ROCm that has every entry point this crate needs.
const ROCM_WANTED: &str = "ROCm 5.7 or newer";

/// Why the ROCm backend could not do something.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A runtime, a device or an ability is not there; the text says what to do.
    #[error("{text}")]
    Unavailable {
        /// What is missing, and how to get it.
        text: String,
        /// The runtime's answer, where it was asked.
        #[source]
        result: Option<RocmResult>,
    },
    /// A runtime refused a call.
    #[error("{call}{}: {result}{}", on(device.as_deref()), hint(advice))]
    Driver {
        /// The entry point.
        call: &'static str,
        /// Where, such as `device 2 (AMD Instinct MI300X)`.
        device: Option<Arc<str>>,
        /// Its answer.
        #[source]
        result: RocmResult,
        /// What a person can do; empty where there is nothing.
        advice: &'static str,
        /// What a program can make of it.
        kind: ErrorKind,
    },
    /// The device has no room for an allocation.
    #[error(
        "cannot allocate {wanted} bytes on {device}: {free} of {total} bytes are free; use smaller \
         buffers, or see with rocm-smi --showpids who holds the memory"
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
        /// The runtime's answer.
        #[source]
        result: RocmResult,
    },
    /// A copy failed that the runtime had taken.
    #[error("{what} on {device}: the runtime left {value} in its signal, wanted 0")]
    Copy {
        /// Which copy.
        what: String,
        /// Whose engine.
        device: Arc<str>,
        /// What the runtime stored; below 0.
        value: i64,
    },
    /// What goes wrong in the same way with every vendor.
    #[error(transparent)]
    Fault(#[from] Fault),
}

impl Error {
    /// Something is not there, in words that say what to do.
    pub(crate) fn unavailable(text: impl Into<String>) -> Self {
        Self::Unavailable { text: text.into(), result: None }
    }

    /// A library is not there, cannot be loaded or lacks a function.
    pub(crate) fn no_library(error: &LoadError) -> Self {
        Self::unavailable(match error {
            LoadError::Absent { name, .. } => {
                let without = if *name == hip::LIBRARY.name {
                    "use the backend host"
                } else {
                    "engines are streams"
                };
                format!(
                    "{error}; it comes with {ROCM_WANTED}, whose place ROCM_PATH says if the loader \
                     does not know it; without it {without}"
                )
            }
            LoadError::Refused { .. } => format!(
                "{error}; the libraries of one ROCm release belong together: see with ldd what it \
                 needs, and whether LD_LIBRARY_PATH mixes two"
            ),
            _ => error.to_string(),
        })
    }

    /// HIP is there and does not start.
    pub(crate) fn no_start(hip: &Hip, code: hipError_t) -> Self {
        let result = hip.result_of(code);
        let why = match code {
            hipError_t::hipErrorNoDevice | hipError_t::hipErrorInvalidDevice => absence::why(),
            _ => advice_or(code, "see with rocminfo whether the runtime works"),
        };
        Self::not_started(
            "HIP",
            hip.calls.file(),
            &hip.version.to_string(),
            "hipInit",
            result,
            &why,
        )
    }

    /// The HSA runtime is there and does not start.
    pub(crate) fn no_hsa_start(calls: &hsa::Library, status: hsa_status_t) -> Self {
        let result = sys::status_of(calls, status);
        let why = match status {
            // What it says where there is no device: it could not open the kernel's.
            hsa_status_t::HSA_STATUS_ERROR_OUT_OF_RESOURCES => absence::why(),
            _ => "see with rocminfo whether the runtime works".to_owned(),
        };
        Self::not_started("the HSA runtime", calls.file(), "", "hsa_init", result, &why)
    }

    fn not_started(
        what: &str,
        file: &std::path::Path,
        version: &str,
        call: &str,
        result: RocmResult,
        why: &str,
    ) -> Self {
        // The runtime is named before it.
        let mut result = result;
        if result.name.is_empty() {
            result.text.clear();
        }
        let space = if version.is_empty() { "" } else { " " };
        let file = file.display();
        let text =
            format!("{what}{space}{version} ({file}) does not start: {call}: {result}; {why}");
        Self::Unavailable { text, result: Some(result) }
    }

    /// HIP refused `call`.
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

    /// Whether HIP has answered with one of these codes.
    pub(crate) fn is_one_of(&self, codes: &[hipError_t]) -> bool {
        matches!(self, Self::Driver { result, .. } if codes.iter().any(|code| code.0 == result.code))
    }

    /// Whether a result of HIP means that the device no longer works for this process.
    pub(crate) fn loses_device(code: hipError_t) -> bool {
        kind_of_hip(code) == ErrorKind::DeviceLost
    }

    /// The HSA runtime refused `call`.
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

fn on(device: Option<&str>) -> String {
    device.map_or_else(String::new, |device| format!(" on {device}"))
}

fn hint(advice: &str) -> String {
    if advice.is_empty() { String::new() } else { format!("; {advice}") }
}

fn advice_or(code: hipError_t, other: &str) -> String {
    advice(code).unwrap_or(other).to_owned()
}

impl peerlane_hal::Error for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Unavailable { .. } => ErrorKind::Unavailable,
            Self::Driver { kind, .. } => *kind,
            Self::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Self::Copy { .. } => ErrorKind::Other,
            Self::Fault(fault) => fault.kind(),
        }
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
            "hipMemMap on device 2 (AMD Instinct MI300X): hipErrorIllegalAddress (700), an illegal \
             memory access was encountered"
        );
        assert!(std::error::Error::source(&error).is_some());
    }

    #[test]
    fn an_unknown_result_is_an_error_like_others() {
        let error = driver_error(hipError_t(4242), "", "");
        assert_eq!(error.kind(), ErrorKind::Other);
        assert_eq!(
            error.to_string(),
            "hipMemMap on device 2 (AMD Instinct MI300X): result 4242, which this runtime has no name \
             for"
        );
    }

    #[test]
    fn a_missing_symbol_names_the_file_and_the_release() {
        let error = Error::no_library(&LoadError::Symbol {
            file: "/opt/rocm-5.2.3/lib/libamdhip64.so.5.2.21153".into(),
            symbol: "hipStreamGetDevice",
            since: "5.7",
        });
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(
            error.to_string(),
            "/opt/rocm-5.2.3/lib/libamdhip64.so.5.2.21153 has no hipStreamGetDevice: it is too old, \
             wanted ROCm 5.7 or newer"
        );
    }
}
