//! Defines the error type of the fabric that stages device memory through the host.

use std::fmt;
use std::sync::Arc;

use peerlane_hal::{Error as _, ErrorKind, Rank};
use peerlane_toolkit::Fault;

/// An error of the device fabric, of the network, or of the staged fabric itself.
#[derive(Clone, Debug)]
pub struct Error(Box<Body>);

#[derive(Clone, Debug)]
struct Body {
    kind: ErrorKind,
    text: String,
    peer: Option<Rank>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self(Box::new(Body { kind, text: text.into(), peer: None, source: None }))
    }

    /// Wraps an error of the device fabric or the network that occurred while doing `what`, and keeps its
    /// kind.
    pub fn of_backend(what: impl fmt::Display, error: impl peerlane_hal::Error) -> Self {
        let (kind, text, peer) = (error.kind(), format!("cannot {what}: {error}"), error.peer());
        Self(Box::new(Body { kind, text, peer, source: Some(Arc::new(error)) }))
    }

    /// Returns a function that wraps the error of a fabric, for `map_err`.
    pub(crate) fn backend<E: peerlane_hal::Error>(
        what: impl fmt::Display,
    ) -> impl FnOnce(E) -> Self {
        move |error| Self::of_backend(what, error)
    }

    pub(crate) fn argument(text: String) -> Self {
        Self::new(ErrorKind::InvalidArgument, text)
    }

    pub(crate) fn of_peer(peer: Rank, what: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Mismatch, format!("rank {peer} {what}"))
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        let (kind, text, peer) = (fault.kind(), fault.to_string(), fault.peer());
        Self(Box::new(Body { kind, text, peer, source: None }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

impl peerlane_hal::Error for Error {
    fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    fn peer(&self) -> Option<Rank> {
        self.0.peer
    }
}
