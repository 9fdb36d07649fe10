//! Defines the error type of the UCX backend.

use peerlane_hal::{ErrorKind, Rank};
use peerlane_toolkit::Fault;

/// The status of a call or a request of UCX that has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text} (status {code})")]
pub struct Status {
    /// The status as a number of `ucs_status_t`.
    pub code: i8,
    /// The text of the status in UCX.
    pub text: String,
}

/// An error of the UCX backend.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// UCX has no transport with what the options or the environment ask for.
    #[error(
        "UCX {version} has no transport for {wanted}: {status}; see `ucx_info -d` and `ip link` for \
         what this machine has"
    )]
    NoTransport {
        /// The version of UCX.
        version: String,
        /// The devices and transports that were asked for.
        wanted: String,
        /// The status that UCX returned.
        #[source]
        status: Status,
    },
    /// A call of UCX failed.
    #[error("{call} of UCX failed: {status}")]
    Call {
        /// The name of the function.
        call: &'static str,
        /// The status that the function returned.
        #[source]
        status: Status,
    },
    /// A message to a peer could not be sent.
    #[error("{what} rank {peer} at {location} failed: UCX: {status}{}", advice(status))]
    Send {
        /// The kind of the op that failed, such as `a put or signal to`.
        what: &'static str,
        /// The rank of the peer.
        peer: Rank,
        /// The host of the peer, with its addresses.
        location: String,
        /// The status of the request.
        #[source]
        status: Status,
    },
    /// An error of a kind that all backends share, such as a lost peer.
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// The numbers of `ucs_status_t` that have a kind of their own.
const NO_MEMORY: i8 = -4;
const UNREACHABLE: i8 = -6;
const REJECTED: i8 = -23;
const CONNECTION_RESET: i8 = -25;
const ENDPOINT_TIMEOUT: i8 = -80;

fn advice(status: &Status) -> &'static str {
    match status.code {
        CONNECTION_RESET | ENDPOINT_TIMEOUT => {
            "; it does not answer: its process or host is gone, or the link between them"
        }
        UNREACHABLE | REJECTED => {
            "; name the network devices that reach it (UCX_NET_DEVICES), and open the firewall between the hosts"
        }
        _ => "",
    }
}

impl Error {
    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Fault::Argument(text.into()).into()
    }

    pub(crate) fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Fault::io(what)(error).into()
    }

    pub(crate) fn mismatch(text: impl Into<String>) -> Self {
        Fault::Mismatch(text.into()).into()
    }
}

impl peerlane_hal::Error for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::NoTransport { .. } => ErrorKind::Unavailable,
            Self::Call { status, .. } if status.code == NO_MEMORY => ErrorKind::OutOfMemory,
            Self::Call { .. } => ErrorKind::Other,
            Self::Send { .. } => ErrorKind::PeerLost,
            Self::Fault(fault) => fault.kind(),
        }
    }

    fn peer(&self) -> Option<Rank> {
        match self {
            Self::Send { peer, .. } => Some(*peer),
            Self::Fault(fault) => fault.peer(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use peerlane_hal::Error as _;

    use super::*;

    #[test]
    fn a_failed_send_names_peer_and_host() {
        let error = Error::Send {
            what: "a put or signal to",
            peer: Rank(3),
            location: "nodeb (eth0 10.0.0.2)".into(),
            status: Status {
                code: CONNECTION_RESET,
                text: "Connection reset by remote peer".into(),
            },
        };
        assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(3))));
        assert_eq!(
            error.to_string(),
            "a put or signal to rank 3 at nodeb (eth0 10.0.0.2) failed: UCX: Connection reset by remote peer (status -25); it does not answer: its process or host is gone, or the link between them"
        );
        assert!(std::error::Error::source(&error).is_some());
    }
}
