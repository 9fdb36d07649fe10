//! Defines type-erased errors, for programs that choose a backend at run time.

use std::fmt;

use crate::error::{Error, ErrorKind};
use crate::key::BackendId;
use crate::rank::Rank;

/// A type-erased error of any backend.
///
/// The text and the [source](std::error::Error::source) are those of the backend's error.
#[derive(Debug)]
pub struct DynError(Box<dyn Error>);

impl DynError {
    /// Wraps the error of a backend.
    pub fn new(error: impl Error) -> Self {
        Self(Box::new(error))
    }

    /// Returns the wrapped error of the backend.
    pub fn into_inner(self) -> Box<dyn Error> {
        self.0
    }
}

impl fmt::Display for DynError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for DynError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl Error for DynError {
    fn kind(&self) -> ErrorKind {
        self.0.kind()
    }

    fn peer(&self) -> Option<Rank> {
        self.0.peer()
    }
}

/// The error of an operation on a region, key or stream that belongs to another backend.
#[derive(Debug)]
pub(crate) struct WrongType {
    pub(crate) kind: ErrorKind,
    pub(crate) text: String,
}

impl fmt::Display for WrongType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for WrongType {}

impl Error for WrongType {
    fn kind(&self) -> ErrorKind {
        self.kind
    }
}

pub(crate) fn wrong_type<T>(
    kind: ErrorKind,
    what: &str,
    expected: BackendId,
) -> Result<T, DynError> {
    let text =
        format!("the {what} belongs to another backend, expected one of the backend {expected}");
    Err(DynError::new(WrongType { kind, text }))
}
