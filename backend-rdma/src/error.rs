//! What went wrong, and the vendor's code.
//!
//! What goes here: an errno, or the status of a completion with the peer that it belongs to. A
//! retry limit that was exceeded is `PeerLost`; a null device list with errno 38 is `Unavailable`.

use std::fmt;

use peerlane_hal::ErrorKind;

/// Why the RDMA backend could not do something.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// This build of Peerlane cannot use RDMA network cards.
    NotBuilt,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBuilt => f.write_str(
                "this version of Peerlane has no RDMA backend yet and did not look for \
                 RDMA network cards; use the backend host",
            ),
        }
    }
}

impl std::error::Error for Error {}

impl peerlane_hal::Error for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::NotBuilt => ErrorKind::Unavailable,
        }
    }
}
