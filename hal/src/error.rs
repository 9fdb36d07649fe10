//! Defines the kinds of errors and the trait of all backend errors.

use crate::rank::Rank;

/// The class of an error, by which a program decides how to react.
///
/// The text of the error says what was done, where, what was expected and what was found. The vendor's error is its
/// [`source`](std::error::Error::source).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The local device stopped working, and everything on it is lost.
    DeviceLost,
    /// A peer has ended or can no longer be reached.
    PeerLost,
    /// A call did not complete before its deadline.
    Timeout,
    /// A remote key is malformed, belongs to another backend or version, or names freed memory.
    InvalidKey,
    /// Values that must be equal differ, for example the sizes or topologies of two ranks, or a stream belongs to
    /// another vendor.
    Mismatch,
    /// An argument is invalid, for example a zero timeout, a misaligned slice or an offset out of range.
    InvalidArgument,
    /// Host memory, device memory, handles, threads, file descriptors or another limit of the process are exhausted.
    OutOfMemory,
    /// The queue of an engine has no room for a slice until earlier slices complete.
    QueueFull,
    /// The group or the engine was aborted. The abort record says by which rank and why.
    Aborted,
    /// A device, driver, library or permission is missing. The text says what to install or allow.
    Unavailable,
    /// A failure that no other kind describes.
    Other,
}

impl ErrorKind {
    /// Returns a short name for logs and tables, such as `peer lost`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DeviceLost => "device lost",
            Self::PeerLost => "peer lost",
            Self::Timeout => "timeout",
            Self::InvalidKey => "invalid key",
            Self::Mismatch => "mismatch",
            Self::InvalidArgument => "invalid argument",
            Self::OutOfMemory => "out of memory",
            Self::QueueFull => "queue full",
            Self::Aborted => "aborted",
            Self::Unavailable => "unavailable",
            Self::Other => "other",
        }
    }
}

impl std::fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// An error of a backend, which reports its class as an [`ErrorKind`].
pub trait Error: std::error::Error + Send + Sync + 'static {
    /// Returns the class of the error, by which a program decides how to react.
    fn kind(&self) -> ErrorKind;

    /// Returns the rank that the error is about, such as a lost peer, if there is one.
    fn peer(&self) -> Option<Rank> {
        None
    }
}
