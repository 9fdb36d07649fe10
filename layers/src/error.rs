//! The error of a wrapped fabric: a backend's or a layer's.

use std::fmt;

use peerlane_hal::{self as hal, ErrorKind};

/// The error of a wrapped fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error<E> {
    /// An error of the inner fabric.
    Inner(E),
    /// An error of the layer.
    Layer {
        /// The class of the failure.
        kind: ErrorKind,
        /// The error text, with found and expected values.
        text: String,
    },
}

impl<E> Error<E> {
    /// Creates an error of a layer.
    pub fn layer(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self::Layer { kind, text: text.into() }
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
}
