//! Defines the error type of the RDMA backend.

use std::sync::Arc;

use ibverbs_sys::{LoadError, ibv_wc_status};
use peerlane_hal::wire::Truncated;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_toolkit::Fault;
use peerlane_toolkit::limits::SystemError;
use peerlane_toolkit::mapping::MappingError;
use rustix::io::Errno;

/// The status of a failed work completion.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text} (status {code})")]
pub struct VerbsStatus {
    /// The status as a number of `enum ibv_wc_status`.
    pub code: u32,
    /// The text of the status in libibverbs.
    pub text: String,
    /// The vendor-specific error code; 0 if there is none.
    pub vendor: u32,
}

/// An error of the RDMA backend.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call of libibverbs or of the operating system failed.
    #[error("{call} on {device}: {errno}{}", hint(*.errno))]
    Verbs {
        /// The name of the function that failed.
        call: &'static str,
        /// The name of the RDMA device, such as `rxe0`.
        device: Arc<str>,
        /// The error number of the failed call.
        #[source]
        errno: Errno,
    },
    /// A posted work request completed with an error.
    #[error(
        "{what} rank {peer} at {address} failed on {device}: {status}{}{port_warning}",
        advice(status)
    )]
    Completion {
        /// The kind of the request that failed, such as `a put to`.
        what: &'static str,
        /// The rank of the peer that the failed request was for.
        peer: Rank,
        /// The IP address, host name and device name of the peer.
        address: String,
        /// The name of the device that posted the failed request.
        device: Arc<str>,
        /// The status of the failed request's completion.
        #[source]
        status: VerbsStatus,
        /// A warning that a port of the device is down; empty if the port is up.
        port_warning: String,
    },
    /// An RDMA device stopped working.
    #[error("{device} stopped working: {event}; everything on it is lost")]
    DeviceLost {
        /// The name of the device that was lost.
        device: Arc<str>,
        /// The asynchronous event that reported the failure of the device.
        event: String,
    },
    /// Memory cannot be registered, because it cannot be locked for the NIC.
    #[error(
        "cannot register {bytes} bytes with {device}: {errno}; registered memory is locked: see \
         `ulimit -l` (memlock), expected unlimited, and the free memory of this machine"
    )]
    NotLocked {
        /// The size of the memory region in bytes.
        bytes: u64,
        /// The name of the device that refused the registration.
        device: Arc<str>,
        /// The error number of the failed registration.
        #[source]
        errno: Errno,
    },
    /// The NIC cannot access the device memory that it was asked to register.
    #[error("cannot register {bytes} bytes of device memory with the NIC {device}: {reasons}")]
    DeviceMemory {
        /// The size of the device memory region in bytes.
        bytes: u64,
        /// The name of the NIC that cannot access the memory.
        device: Arc<str>,
        /// The reason why each method of registration failed.
        reasons: String,
    },
    /// Received data cannot be made visible to the device.
    #[error("received data is not visible to the device: {0}")]
    Flush(String),
    /// An error of a kind that all backends share, such as a lost peer.
    #[error(transparent)]
    Fault(#[from] Fault),
}

fn hint(errno: Errno) -> &'static str {
    match errno {
        Errno::PERM | Errno::ACCESS => {
            "; the user needs to read and write /dev/infiniband/uverbs*, in a container too"
        }
        Errno::NOMEM => "; see the limits of the device, and `ulimit -l` (memlock)",
        _ => "",
    }
}

fn advice(status: &VerbsStatus) -> &'static str {
    match ibv_wc_status(status.code) {
        ibv_wc_status::RETRY_EXC_ERR | ibv_wc_status::RESP_TIMEOUT_ERR => {
            "; it does not answer: its process or host is gone, or the link between them"
        }
        ibv_wc_status::REM_ACCESS_ERR => "; the remote key does not allow it: its memory was freed",
        _ => "",
    }
}

fn kind_of(status: &VerbsStatus) -> ErrorKind {
    match ibv_wc_status(status.code) {
        ibv_wc_status::REM_ACCESS_ERR | ibv_wc_status::REM_INV_RD_REQ_ERR => ErrorKind::InvalidKey,
        ibv_wc_status::RETRY_EXC_ERR
        | ibv_wc_status::RNR_RETRY_EXC_ERR
        | ibv_wc_status::RESP_TIMEOUT_ERR
        | ibv_wc_status::REM_ABORT_ERR
        | ibv_wc_status::REM_INV_REQ_ERR
        | ibv_wc_status::REM_OP_ERR
        | ibv_wc_status::WR_FLUSH_ERR => ErrorKind::PeerLost,
        ibv_wc_status::FATAL_ERR => ErrorKind::DeviceLost,
        ibv_wc_status::LOC_PROT_ERR | ibv_wc_status::LOC_ACCESS_ERR => ErrorKind::InvalidArgument,
        _ => ErrorKind::Other,
    }
}

impl Error {
    pub(crate) fn unavailable(text: impl Into<String>) -> Self {
        Fault::Unavailable(text.into()).into()
    }

    pub(crate) fn mismatch(text: impl Into<String>) -> Self {
        Fault::Mismatch(text.into()).into()
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Fault::Argument(text.into()).into()
    }

    pub(crate) fn foreign_key(expected: Rank, found: Rank) -> Self {
        Fault::ForeignKey { expected: format!("rank {expected}"), found: format!("rank {found}") }
            .into()
    }

    pub(crate) fn no_library(error: &LoadError) -> Self {
        Self::unavailable(format!(
            "{error}; it comes with the package libibverbs1 or rdma-core; without it use the backend \
             host"
        ))
    }

    pub(crate) fn last(call: &'static str, device: &Arc<str>) -> Self {
        let errno = Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO);
        Self::Verbs { call, device: Arc::clone(device), errno }
    }

    /// Converts the return value of libibverbs, which is an `errno` with either sign, or -1 if the
    /// call set `errno`.
    pub(crate) fn from_code(call: &'static str, device: &Arc<str>, code: i32) -> Self {
        match code {
            -1 => Self::last(call, device),
            code => {
                let errno = Errno::from_raw_os_error(code.abs());
                Self::Verbs { call, device: Arc::clone(device), errno }
            }
        }
    }

    pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(Errno) -> Self {
        move |errno| Fault::System(SystemError::new(what, errno)).into()
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Fault::io(what)(error).into()
    }

    pub(crate) fn mapping(error: MappingError) -> Self {
        let fault = match error {
            MappingError::System(error) => Fault::System(error),
            MappingError::Full { requested, available } => {
                Fault::HostOutOfMemory { requested, available }
            }
            MappingError::Unsound { how } => Fault::Mismatch(how),
            MappingError::Refused { why } => Fault::Argument(why),
        };
        fault.into()
    }

    pub(crate) fn address(peer: Rank) -> impl Fn(Truncated) -> Self {
        move |truncated| Fault::Address { peer, what: truncated.to_string() }.into()
    }
}

impl peerlane_hal::Error for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::DeviceMemory { .. } => ErrorKind::Unavailable,
            Self::Verbs { errno, .. } => match *errno {
                Errno::NOMEM | Errno::NOSPC | Errno::MFILE | Errno::NFILE => ErrorKind::OutOfMemory,
                Errno::PERM | Errno::ACCESS | Errno::NOSYS => ErrorKind::Unavailable,
                Errno::NODEV | Errno::IO => ErrorKind::DeviceLost,
                _ => ErrorKind::Other,
            },

            Self::Completion { status, .. } => kind_of(status),
            Self::DeviceLost { .. } | Self::Flush(_) => ErrorKind::DeviceLost,

            // Memory is locked when it is registered, so the address is the caller's.
            Self::NotLocked { errno, .. } => match *errno {
                Errno::NOMEM | Errno::AGAIN => ErrorKind::OutOfMemory,
                Errno::FAULT | Errno::INVAL => ErrorKind::InvalidArgument,
                _ => ErrorKind::Other,
            },
            Self::Fault(fault) => fault.kind(),
        }
    }

    fn peer(&self) -> Option<Rank> {
        match self {
            Self::Completion { peer, .. } if self.kind() == ErrorKind::PeerLost => Some(*peer),
            Self::Fault(fault) => fault.peer(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use peerlane_hal::Error as _;

    use super::*;

    fn completion(status: ibv_wc_status, text: &str) -> Error {
        Error::Completion {
            what: "a put to",
            peer: Rank(3),
            address: "10.0.0.2".into(),
            device: "rxe0".into(),
            status: VerbsStatus { code: status.0, text: text.into(), vendor: 0 },
            port_warning: String::new(),
        }
    }

    #[test]
    fn a_failed_completion_names_peer_address_and_device() {
        let error = completion(ibv_wc_status::RETRY_EXC_ERR, "transport retry counter exceeded");
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert_eq!(
            error.to_string(),
            "a put to rank 3 at 10.0.0.2 failed on rxe0: transport retry counter exceeded (status \
             12); it does not answer: its process or host is gone, or the link between them"
        );
        assert!(std::error::Error::source(&error).is_some());
    }

    #[test]
    fn statuses_have_kinds_also_those_of_newer_libraries() {
        let kind = |status| completion(status, "").kind();
        assert_eq!(kind(ibv_wc_status::REM_ACCESS_ERR), ErrorKind::InvalidKey);
        assert_eq!(kind(ibv_wc_status::FATAL_ERR), ErrorKind::DeviceLost);
        assert_eq!(kind(ibv_wc_status(4711)), ErrorKind::Other);
    }
}
