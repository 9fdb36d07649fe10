//! Errors: kinds for programs, sources for people.

/// Why a call failed, as far as a program can act on it.
///
/// The vendor's own code is the error's [`source`](std::error::Error::source); its text says what
/// was done, where, what was wanted and what was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The local device stopped working; everything on it is lost.
    DeviceLost,
    /// A peer is gone, or can no longer be reached.
    PeerLost,
    /// A deadline passed.
    Timeout,
    /// A remote key is malformed, of another backend or version, or names memory that is gone.
    InvalidKey,
    /// Two sides that must agree do not: sizes, types, topologies, a stream of another vendor.
    Mismatch,
    /// An argument can never be right: a zero timeout, a misaligned slice, an offset out of range.
    InvalidArgument,
    /// Host or device memory, handles or file descriptors ran out.
    OutOfMemory,
    /// The queue has no room for the slice now; it will, once something completes.
    QueueFull,
    /// The group or the engine was aborted; the abort record says by whom and why.
    Aborted,
    /// A device, driver, library or permission is not there; the text says what to install or allow.
    Unavailable,
    /// Anything else.
    Other,
}

impl ErrorKind {
    /// A short name for logs and tables, such as `peer lost`.
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

/// What every backend's error can say of itself.
pub trait Error: std::error::Error + Send + Sync + 'static {
    /// The class of the failure.
    fn kind(&self) -> ErrorKind;
}
