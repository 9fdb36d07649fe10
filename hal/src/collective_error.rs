//! Defines the error type of plans, bootstraps and groups, with a kind, a text and the rank that it
//! is about.
//!
//! The crates that depend on this one re-export the module as `error`.

use std::fmt;
use std::sync::Arc;

use crate::{DynError, Error as _, ErrorKind, Rank};

/// Describes the failure of a plan, a bootstrap or a group, with a kind for programs and a text for
/// users.
///
/// The text states what happened, to which rank, device or field, and what was found and expected.
/// The error of a backend is the [`source`](std::error::Error::source). Its `Debug` form is the
/// text with the kind, because a `main` that returns the error prints that.
#[derive(Clone)]
pub struct Error(Box<Body>);

#[derive(Clone, Debug)]
struct Body {
    kind: ErrorKind,
    text: String,
    peer: Option<Rank>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// Creates an error with a kind for programs and a text for users.
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self(Box::new(Body { kind, text: text.into(), peer: None, source: None }))
    }

    /// Sets the rank that the error is about.
    #[must_use]
    pub fn with_peer(mut self, peer: Rank) -> Self {
        self.0.peer = Some(peer);
        self
    }

    /// Replaces the text of the error by the result of `map`.
    pub fn map_text(mut self, map: impl FnOnce(&str) -> String) -> Self {
        self.0.text = map(&self.0.text);
        self
    }

    /// Sets the error that caused this error.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Creates an error from an error of a backend, such as CUDA or RDMA, with the same kind.
    ///
    /// The backend returned its error during the call `what`.
    pub fn of_backend(what: impl fmt::Display, error: impl crate::Error) -> Self {
        Self::of_fabric(what, DynError::new(error))
    }

    pub fn of_fabric(what: impl fmt::Display, error: DynError) -> Self {
        let text = format!("cannot {what}: {error}");
        Self::caused_by(error, text)
    }

    /// Sets the rank at the other end of a failed call, unless the error already has a rank.
    ///
    /// The rank is not set if memory or a limit of this process has run out.
    #[must_use]
    pub fn with_other_side(self, peer: Rank) -> Self {
        let is_own = self.kind() == ErrorKind::OutOfMemory;
        if is_own || self.peer().is_some() { self } else { self.with_peer(peer) }
    }

    fn caused_by(error: DynError, text: String) -> Self {
        let (kind, peer) = (error.kind(), error.peer());
        let source: Box<dyn std::error::Error + Send + Sync> = error.into_inner();
        Self(Box::new(Body { kind, text, peer, source: Some(source.into()) }))
    }

    /// Returns the kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the rank that the error is about, such as a lost rank, if there is one.
    pub fn peer(&self) -> Option<Rank> {
        self.0.peer
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} ({})", self.0.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

// This error is no `crate::Error` itself, which leaves room for this conversion: a
// program opens a fabric and a group with the same `?`.
impl<E: crate::Error> From<E> for Error {
    fn from(error: E) -> Self {
        let text = error.to_string();
        Self::caused_by(DynError::new(error), text)
    }
}

/// Returns `text` in quotes, with escapes for characters that are not printable.
///
/// Only the beginning of a long text is shown, so that an error stays readable.
pub fn quoted(text: &str) -> String {
    const SHOWN_MAX: usize = 80;
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// Returns `text`, in [quotes](quoted) if it is long or has characters that are not printable.
pub fn shown(text: &str) -> String {
    let quoted = quoted(text);
    match quoted.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
        Some(same) if same == text => text.to_owned(),
        _ => quoted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_this_process_is_no_fault_of_the_other_side() {
        let peer = |kind| Error::new(kind, "cannot connect").with_other_side(Rank(1)).peer();
        assert_eq!(peer(ErrorKind::OutOfMemory), None);
        assert_eq!(peer(ErrorKind::Timeout), Some(Rank(1)));
        let named = Error::new(ErrorKind::OutOfMemory, "rank 2 failed").with_peer(Rank(2));
        assert_eq!(named.with_other_side(Rank(1)).peer(), Some(Rank(2)));
    }
}
