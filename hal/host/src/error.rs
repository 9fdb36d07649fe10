//! The error of the host backend.

use rustix::io::Errno;

use peerlane_hal::ErrorKind;
use peerlane_hal::Rank;
use peerlane_hal::wire::Truncated;
use peerlane_hal::{Generation, KeyError};
use peerlane_toolkit::handover::Refusal;
use peerlane_toolkit::mapping::MappingError;

/// The host backend's error.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system returned an error.
    #[error("{what}: {errno}")]
    System {
        /// The action that failed.
        what: String,
        /// The error of the system.
        #[source]
        errno: Errno,
    },
    /// Not enough memory is free for an allocation.
    #[error(
        "cannot allocate {requested} bytes of shared memory: {available} bytes are available on this \
         machine; use smaller buffers or fewer ranks"
    )]
    OutOfMemory {
        /// Requested bytes.
        requested: u64,
        /// Available bytes.
        available: u64,
    },
    /// A key is malformed.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A key names memory that its owner has freed.
    #[error(
        "remote key of rank {peer} is stale: rank {peer} has freed the memory (generation \
         {generation})"
    )]
    Freed {
        /// The owner.
        peer: Rank,
        /// The generation of the registration.
        generation: u64,
    },
    /// A key was exported by another rank than the caller says.
    #[error("remote key belongs to rank {found}, expected a key of rank {expected}")]
    ForeignKey {
        /// The rank that the caller named.
        expected: Rank,
        /// The rank that the key names.
        found: Rank,
    },
    /// Memory that the peer registered itself cannot be imported by another process.
    #[error(
        "memory of rank {peer} cannot be imported by another process: rank {peer} registered its \
         own memory instead of calling `allocate`; let rank {peer} allocate this memory with \
         `allocate`"
    )]
    PrivateMemory {
        /// The owner.
        peer: Rank,
    },
    /// An address is malformed.
    #[error("invalid address of rank {peer}: {what}")]
    Address {
        /// The rank of the address.
        peer: Rank,
        /// The malformed field.
        what: String,
    },
    /// The peer is not connected.
    #[error("rank {peer} is not connected: call `connect` before `import`")]
    NotConnected {
        /// The peer.
        peer: Rank,
    },
    /// The peer's process has ended.
    #[error("connection to rank {peer} lost: {how}")]
    PeerLost {
        /// The peer.
        peer: Rank,
        /// The sign by which it was detected.
        how: String,
    },
    /// The peer did not answer in time.
    #[error("rank {peer} did not {what} within {timeout:?}")]
    Timeout {
        /// The peer.
        peer: Rank,
        /// The action that did not finish.
        what: &'static str,
        /// The timeout.
        timeout: std::time::Duration,
    },
    /// An invalid argument.
    #[error("{0}")]
    Argument(String),
    /// The queue has no room for the slice now.
    #[error(
        "the queue of the engine is full: it holds {queued} of at most {room} ops, no room for \
         {requested} more; submit again after a ticket completes"
    )]
    QueueFull {
        /// Number of ops in the queue.
        queued: usize,
        /// Number of ops that fit.
        room: usize,
        /// Number of ops in the slice.
        requested: usize,
    },
    /// The engine was released.
    #[error("the engine accepts no more ops, because it was released after an abort")]
    Released,
}

impl Error {
    pub(super) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            Self::System { what: what.into(), errno }
        }
    }

    /// Returns a conversion of the error of requesting memory of `peer`.
    pub(super) fn of_handover(peer: Rank, generation: Generation) -> impl FnOnce(Refusal) -> Self {
        move |refusal| match refusal {
            Refusal::Freed => Self::Freed { peer, generation: generation.0 },
            Refusal::Gone { how } => Self::PeerLost { peer, how },
            Refusal::Late { timeout } => Self::Timeout { peer, what: "send its memory", timeout },
            Refusal::Failed { why } => Self::PeerLost { peer, how: why },
            Refusal::System { what, errno } => Self::System { what, errno },
        }
    }

    /// Returns a conversion of the error of mapping memory of `owner`.
    pub(super) fn of_mapping(owner: Rank) -> impl FnOnce(MappingError) -> Self {
        move |error| match error {
            MappingError::System { what, errno } => Self::System { what, errno },
            MappingError::Full { requested, available } => {
                Self::OutOfMemory { requested, available }
            }
            MappingError::Unsound { how } => Self::PeerLost { peer: owner, how },
        }
    }

    pub(super) fn address(peer: Rank) -> impl FnOnce(Truncated) -> Self {
        move |truncated| Self::Address { peer, what: truncated.to_string() }
    }
}

impl peerlane_hal::Error for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::System { errno, .. } => match *errno {
                Errno::NOMEM | Errno::NOSPC | Errno::MFILE | Errno::NFILE => ErrorKind::OutOfMemory,
                Errno::PERM | Errno::ACCESS | Errno::NOSYS => ErrorKind::Unavailable,
                _ => ErrorKind::Other,
            },
            Self::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Self::Key(error) => error.kind(),
            Self::Freed { .. } | Self::ForeignKey { .. } => ErrorKind::InvalidKey,
            Self::PrivateMemory { .. } | Self::Argument(_) => ErrorKind::InvalidArgument,
            Self::Address { .. } => ErrorKind::Mismatch,
            Self::NotConnected { .. } | Self::PeerLost { .. } => ErrorKind::PeerLost,
            Self::Timeout { .. } => ErrorKind::Timeout,
            Self::QueueFull { .. } => ErrorKind::QueueFull,
            Self::Released => ErrorKind::Aborted,
        }
    }
}
