//! Defines the errors of the toolkit, which are the same for every backend.

use std::time::Duration;

use crate::handover::Refusal;
use crate::limits::{AvailableMemory, SystemError};
use crate::mapping::MappingError;
use peerlane_hal::KeyError;
use peerlane_hal::{Error, ErrorKind, Op, Rank};

/// An error that the toolkit or a backend detects, or that a call of a vendor's library returns. A
/// backend uses it as its error type, or as one variant of its own.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// A required feature or device is not available.
    #[error("{0}")]
    Unavailable(String),
    /// The host has too little memory for a region that peers access.
    #[error(
        "cannot allocate {requested} bytes of host memory: {available}; use smaller buffers or fewer ranks"
    )]
    HostOutOfMemory {
        /// The number of bytes of host memory that were requested.
        requested: u64,
        /// The host memory that is available, and where.
        available: AvailableMemory,
    },
    /// A system call returned an error.
    #[error(transparent)]
    System(#[from] SystemError),
    /// A call of the vendor's library returned an error.
    #[error("{call}: {text} (error {code})")]
    Vendor {
        /// The name of the call.
        call: &'static str,
        /// The number that the call returned.
        code: i64,
        /// What the number means, and what to do.
        text: String,
        /// The kind of the error, which programs match on.
        kind: ErrorKind,
    },
    /// The bytes of a remote key are malformed.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A remote key names memory that its owner has freed.
    #[error(
        "remote key of rank {peer} is stale: rank {peer} has freed the memory (generation \
         {generation})"
    )]
    Freed {
        /// The rank that owns the freed memory.
        peer: Rank,
        /// The number that identified the freed memory.
        generation: u64,
    },
    /// A remote key belongs to another rank than the caller says, or to an earlier process of that
    /// rank.
    #[error("remote key belongs to {found}, expected {expected}")]
    ForeignKey {
        /// The owner that the caller expects.
        expected: String,
        /// The owner that the remote key names.
        found: String,
    },
    /// A peer's memory cannot be imported by this process or device.
    #[error("memory of rank {peer} cannot be imported: {why}")]
    PrivateMemory {
        /// The rank that owns the memory that cannot be imported.
        peer: Rank,
        /// The reason why it cannot be imported, and what to do.
        why: String,
    },
    /// A peer has the requested memory but failed to export it.
    #[error("rank {peer} failed to share its memory: {why}")]
    NotHandedOver {
        /// The rank that failed to export its memory.
        peer: Rank,
        /// The kind of the error on that rank.
        kind: ErrorKind,
        /// The reason that the peer reported.
        why: String,
    },
    /// The address of a rank is malformed.
    #[error("invalid address of rank {peer}: {what}")]
    Address {
        /// The rank that sent the malformed address.
        peer: Rank,
        /// The field of the address that is malformed.
        what: String,
    },
    /// Values that must be equal on two ranks or in two objects differ.
    #[error("{0}")]
    Mismatch(String),
    /// A peer's memory was to be imported before the peer was connected.
    #[error("rank {peer} is not connected: call `connect` before `import`")]
    NotConnected {
        /// The rank that is not connected.
        peer: Rank,
    },
    /// The process of a peer has ended.
    #[error("connection to rank {peer} lost: {how}")]
    PeerLost {
        /// The rank whose process has ended.
        peer: Rank,
        /// How the end of the process was detected.
        how: String,
    },
    /// An action did not finish before its timeout.
    #[error("{what} within {timeout:?}")]
    Timeout {
        /// The action that did not finish in time.
        what: String,
        /// The time limit of the action.
        timeout: Duration,
    },
    /// An argument of a call is invalid.
    #[error("{0}")]
    Argument(String),
    /// The queue of an engine has no room for a slice now.
    #[error(
        "the queue of the engine is full: it holds {queued} of at most {room} commands, no room \
         for {requested} more; submit again after a ticket completes"
    )]
    QueueFull {
        /// The number of commands that the queue holds.
        queued: usize,
        /// The number of commands that fit into the queue.
        room: usize,
        /// The number of commands that the slice needs.
        requested: usize,
    },
    /// The engine accepts no more slices, because it was released.
    #[error("the engine accepts no more ops, because it was released after an abort")]
    Released,
}

impl Fault {
    /// Creates the error of an engine for an op that it does not run.
    pub fn refused_op<L, R>(op: &Op<'_, L, R>) -> Self {
        Self::Argument(format!("a {0} was submitted to an engine that runs no {0}", op.name()))
    }

    /// Returns a closure that converts an I/O error, where `what` says what failed.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |error| SystemError::of_io(what, &error).into()
    }

    /// Returns a closure that converts an error of mapping host memory that `owner` allocated.
    pub fn of_mapping(owner: Rank) -> impl FnOnce(MappingError) -> Self {
        move |error| match error {
            MappingError::System(error) => Self::System(error),
            MappingError::Full { requested, available } => {
                Self::HostOutOfMemory { requested, available }
            }
            MappingError::Unsound { how } => Self::PeerLost { peer: owner, how },
            MappingError::Refused { why } => Self::Argument(why),
        }
    }

    /// Returns a closure that converts an error of requesting memory from `peer`.
    pub fn of_handover(peer: Rank, generation: u64) -> impl FnOnce(Refusal) -> Self {
        move |refusal| match refusal {
            Refusal::Freed => Self::Freed { peer, generation },
            Refusal::Gone { how } => Self::PeerLost { peer, how },
            Refusal::Late { timeout } => {
                let what = format!("rank {peer} did not send its memory");
                Self::Timeout { what, timeout }
            }
            Refusal::Failed { kind, why } => Self::NotHandedOver { peer, kind, why },
            Refusal::System(error) => Self::System(error),
        }
    }
}

impl Error for Fault {
    fn kind(&self) -> ErrorKind {
        match *self {
            Self::Unavailable(_) => ErrorKind::Unavailable,
            Self::HostOutOfMemory { .. } => ErrorKind::OutOfMemory,
            Self::System(ref error) => error.kind(),
            Self::Vendor { kind, .. } | Self::NotHandedOver { kind, .. } => kind,
            Self::Key(ref error) => error.kind(),
            Self::Freed { .. } | Self::ForeignKey { .. } => ErrorKind::InvalidKey,
            Self::PrivateMemory { .. } | Self::Argument(_) => ErrorKind::InvalidArgument,
            Self::Address { .. } | Self::Mismatch(_) => ErrorKind::Mismatch,
            Self::NotConnected { .. } | Self::PeerLost { .. } => ErrorKind::PeerLost,
            Self::Timeout { .. } => ErrorKind::Timeout,
            Self::QueueFull { .. } => ErrorKind::QueueFull,
            Self::Released => ErrorKind::Aborted,
        }
    }

    fn peer(&self) -> Option<Rank> {
        match *self {
            Self::NotConnected { peer }
            | Self::PeerLost { peer, .. }
            | Self::NotHandedOver { peer, .. } => Some(peer),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn errors_name_the_peer_and_the_reason() {
        let peer = Rank(3);
        let how = || "the socket failed".to_owned();
        let refused = |refusal| Fault::of_handover(peer, 9)(refusal);
        let timeout = Duration::from_secs(2);
        let mapped = |error| Fault::of_mapping(peer)(error);
        let what = || "cannot map 4096 bytes".to_owned();
        let freed = "remote key of rank 3 is stale: rank 3 has freed the memory (generation 9)";
        let full = "cannot allocate 8 bytes of host memory: 1 bytes are available on this machine; use \
                    smaller buffers or fewer ranks";
        for (fault, kind, text) in [
            (refused(Refusal::Freed), ErrorKind::InvalidKey, freed),
            (
                refused(Refusal::Gone { how: how() }),
                ErrorKind::PeerLost,
                "connection to rank 3 lost: the socket failed",
            ),
            (
                refused(Refusal::Late { timeout }),
                ErrorKind::Timeout,
                "rank 3 did not send its memory within 2s",
            ),
            (
                refused(Refusal::Failed {
                    kind: ErrorKind::OutOfMemory,
                    why: "the device is full".to_owned(),
                }),
                ErrorKind::OutOfMemory,
                "rank 3 failed to share its memory: the device is full",
            ),
            (
                refused(Refusal::System(SystemError::new(what(), Errno::NOSPC))),
                ErrorKind::OutOfMemory,
                "cannot map 4096 bytes: No space left on device (os error 28)",
            ),
            (
                mapped(MappingError::Full {
                    requested: 8,
                    available: AvailableMemory::of_machine(1),
                }),
                ErrorKind::OutOfMemory,
                full,
            ),
            (
                mapped(MappingError::System(SystemError::new(what(), Errno::PERM))),
                ErrorKind::Unavailable,
                "cannot map 4096 bytes: Operation not permitted (os error 1)",
            ),
            (
                mapped(MappingError::Unsound { how: how() }),
                ErrorKind::PeerLost,
                "connection to rank 3 lost: the socket failed",
            ),
            (
                mapped(MappingError::Refused { why: "offset is 100 bytes".to_owned() }),
                ErrorKind::InvalidArgument,
                "offset is 100 bytes",
            ),
            (
                Fault::QueueFull { queued: 9, room: 10, requested: 2 },
                ErrorKind::QueueFull,
                "the queue of the engine is full: it holds 9 of at most 10 commands, no room for 2 \
                 more; submit again after a ticket completes",
            ),
            (
                Fault::Vendor {
                    call: "tpu_copy",
                    code: 700,
                    text: "the stream has stopped".to_owned(),
                    kind: ErrorKind::DeviceLost,
                },
                ErrorKind::DeviceLost,
                "tpu_copy: the stream has stopped (error 700)",
            ),
            (
                Fault::NotConnected { peer },
                ErrorKind::PeerLost,
                "rank 3 is not connected: call `connect` before `import`",
            ),
        ] {
            assert_eq!((fault.kind(), fault.to_string().as_str()), (kind, text), "{fault:?}");
        }
        let system = refused(Refusal::System(SystemError::new(what(), Errno::MFILE)));
        assert!(system.source().is_some(), "the system's own answer");
    }
}
