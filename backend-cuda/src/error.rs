//! What went wrong, and the driver's code.
//!
//! `CUresult` stays a plain integer, with the name that the driver itself gives it, because a driver
//! may be newer than this crate. The kind follows from the code; 1 and 400, an invalid value or
//! handle, are the caller's fault only where the value came from the caller.

use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::mechanics::handover::{self, Errno};
use peerlane_hal::mechanics::mapping::MappingError;
use peerlane_hal::{ErrorKind, KeyError, Rank};

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
    /// The host has no room for memory through which peers reach each other.
    #[error(
        "cannot allocate {wanted} bytes of host memory: {available} bytes are available on this \
         machine; use smaller buffers or fewer ranks"
    )]
    HostOutOfMemory {
        /// Bytes wanted.
        wanted: u64,
        /// Bytes available.
        available: u64,
    },
    /// The operating system refused.
    #[error("{what}: {errno}")]
    System {
        /// What was asked of it.
        what: String,
        /// Its answer.
        #[source]
        errno: Errno,
    },
    /// The bytes of a key are wrong.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The key names memory that its owner has freed.
    #[error("remote key of rank {peer}, generation {generation}: the memory has been freed")]
    Freed {
        /// The owner.
        peer: Rank,
        /// Which registration.
        generation: u64,
    },
    /// The key was exported by another rank than the caller says, or by an earlier process of it.
    #[error("remote key is of {seen}, wanted one of {wanted}")]
    ForeignKey {
        /// Whom the caller named.
        wanted: String,
        /// Whom the key names.
        seen: String,
    },
    /// The caller's memory cannot be reached from where it is wanted.
    #[error("memory of rank {peer} cannot be imported here: {why}")]
    PrivateMemory {
        /// The owner.
        peer: Rank,
        /// What stands against it, and what to do.
        why: String,
    },
    /// The owner has the memory and cannot hand it over.
    #[error("rank {peer} cannot hand over its memory: {why}")]
    NotHandedOver {
        /// The owner.
        peer: Rank,
        /// In its own words.
        why: String,
    },
    /// The bytes of an address are wrong.
    #[error("address of rank {peer} is malformed: {what}")]
    Address {
        /// Whose address.
        peer: Rank,
        /// What is wrong.
        what: String,
    },
    /// Two sides that must agree do not.
    #[error("{0}")]
    Mismatch(String),
    /// The peer is not connected.
    #[error("rank {peer} is not connected: call `connect` before `import`")]
    NotConnected {
        /// The peer.
        peer: Rank,
    },
    /// The peer's process is gone.
    #[error("rank {peer} is gone: {how}")]
    PeerLost {
        /// The peer.
        peer: Rank,
        /// How it was noticed.
        how: String,
    },
    /// Something did not happen in time.
    #[error("{what} within {timeout:?}")]
    Timeout {
        /// Who did not do what.
        what: String,
        /// The timeout.
        timeout: Duration,
    },
    /// An argument can never be right.
    #[error("{0}")]
    Argument(String),
    /// The queue has no room for the slice.
    #[error("the queue holds {queued} of {room} commands, {wanted} more do not fit now")]
    QueueFull {
        /// Commands in the queue.
        queued: usize,
        /// Commands that fit.
        room: usize,
        /// Commands of the slice.
        wanted: usize,
    },
    /// The engine was released.
    #[error("the engine was released after an abort and takes no more ops")]
    Released,
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

    /// Whether the driver is able but not willing, or the other way round: another way may work.
    pub(crate) fn is_refusal(&self) -> bool {
        let refusals = [sys::CUDA_ERROR_NOT_PERMITTED, sys::CUDA_ERROR_NOT_SUPPORTED];
        matches!(self, Self::Driver { result, .. } if refusals.contains(&result.code))
    }

    /// Whether the driver says that a device does not reach what it was to map.
    pub(crate) fn is_no_access(&self) -> bool {
        let refusals = [
            sys::CUDA_ERROR_INVALID_DEVICE,
            sys::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
            sys::CUDA_ERROR_NOT_SUPPORTED,
        ];
        matches!(self, Self::Driver { result, .. } if refusals.contains(&result.code))
    }

    /// Memory of `owner` on the host that is not mapped.
    pub(crate) fn of_mapping(owner: Rank) -> impl FnOnce(MappingError) -> Self {
        move |error| match error {
            MappingError::System { what, errno } => Self::System { what, errno },
            MappingError::Full { wanted, available } => Self::HostOutOfMemory { wanted, available },
            MappingError::Unsound { how } => Self::PeerLost { peer: owner, how },
        }
    }

    /// What asking `peer`'s process for its memory came to.
    pub(crate) fn of_handover(
        peer: Rank,
        generation: u64,
    ) -> impl FnOnce(handover::Refusal) -> Self {
        use handover::Refusal;
        move |refusal| match refusal {
            Refusal::Freed => Self::Freed { peer, generation },
            Refusal::Gone { how } => Self::PeerLost { peer, how },
            Refusal::Late { timeout } => {
                let what = format!("rank {peer} did not hand over its memory");
                Self::Timeout { what, timeout }
            }
            Refusal::Failed { why } => Self::NotHandedOver { peer, why },
            Refusal::System { what, errno } => Self::System { what, errno },
        }
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
            Self::OutOfMemory { .. } | Self::HostOutOfMemory { .. } => ErrorKind::OutOfMemory,
            Self::System { errno, .. } => match *errno {
                Errno::NOMEM | Errno::NOSPC | Errno::MFILE | Errno::NFILE => ErrorKind::OutOfMemory,
                Errno::PERM | Errno::ACCESS | Errno::NOSYS => ErrorKind::Unavailable,
                _ => ErrorKind::Other,
            },
            Self::Key(error) => error.kind(),
            Self::Freed { .. } | Self::ForeignKey { .. } => ErrorKind::InvalidKey,
            Self::PrivateMemory { .. } | Self::Argument(_) => ErrorKind::InvalidArgument,
            Self::Address { .. } | Self::Mismatch(_) => ErrorKind::Mismatch,
            Self::NotConnected { .. } | Self::PeerLost { .. } => ErrorKind::PeerLost,
            Self::NotHandedOver { .. } => ErrorKind::Other,
            Self::Timeout { .. } => ErrorKind::Timeout,
            Self::QueueFull { .. } => ErrorKind::QueueFull,
            Self::Released => ErrorKind::Aborted,
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
