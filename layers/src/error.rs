//! Defines the error of a wrapped fabric, which comes from the backend or from a layer.

use std::fmt;

use peerlane_hal::{self as hal, ErrorKind, Rank};

/// An error of a wrapped fabric, from the backend or from a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error<E> {
    /// An error of the inner fabric, passed on unchanged.
    Inner(E),
    /// An error that the layer itself reports.
    Layer {
        /// The kind of the layer's error.
        kind: ErrorKind,
        /// The rank that the error is about, if there is one.
        peer: Option<Rank>,
        /// The text of the layer's error, with found and expected values.
        text: String,
    },
}

impl<E> Error<E> {
    /// Creates an error that comes from a layer and not from the backend.
    pub fn layer(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self::Layer { kind, peer: None, text: text.into() }
    }
}

impl<E: fmt::Display> fmt::Display for Error<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inner(error) => error.fmt(f),
            Self::Layer { text, .. } => f.write_str(text),
        }
    }
}

impl<E: std::error::Error> std::error::Error for Error<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Inner(error) => error.source(),
            Self::Layer { .. } => None,
        }
    }
}

impl<E: hal::Error> hal::Error for Error<E> {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Inner(error) => error.kind(),
            Self::Layer { kind, .. } => *kind,
        }
    }

    fn peer(&self) -> Option<Rank> {
        match self {
            Self::Inner(error) => error.peer(),
            Self::Layer { peer, .. } => *peer,
        }
    }
}
