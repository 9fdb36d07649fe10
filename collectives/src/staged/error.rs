//! What goes wrong on the way through the host.

use std::fmt;

use peerlane_hal::{ErrorKind, Rank};

/// The error of a staged fabric: that of the device's fabric, of the network's, or its own.
#[derive(Clone, Debug)]
pub struct Error(crate::error::Error);

impl Error {
    pub(super) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self(crate::error::Error::new(kind, text))
    }

    /// A fabric's error, met while doing `what`; the kind stays.
    pub fn of_backend(what: impl fmt::Display, error: impl peerlane_hal::Error) -> Self {
        Self(crate::error::Error::of_backend(what, error))
    }

    pub(super) fn backend<E: peerlane_hal::Error>(
        what: impl fmt::Display,
    ) -> impl FnOnce(E) -> Self {
        move |error| Self::of_backend(what, error)
    }

    pub(super) fn argument(text: String) -> Self {
        Self::new(ErrorKind::InvalidArgument, text)
    }

    /// What a peer sent is nonsense.
    pub(super) fn of_peer(peer: Rank, what: impl fmt::Display) -> Self {
        Self(
            crate::error::Error::new(ErrorKind::Mismatch, format!("rank {peer} {what}"))
                .with_peer(peer),
        )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.0)
    }
}

impl peerlane_hal::Error for Error {
    fn kind(&self) -> ErrorKind {
        self.0.kind()
    }
}
