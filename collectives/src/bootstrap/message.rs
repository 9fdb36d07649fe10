//! What ranks and the exchange point say to each other, in one process and over TCP alike.

use std::fmt;
use std::time::Duration;

use peerlane_hal::{ErrorKind, Rank};
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Notice;
use crate::error::Error;

/// The most bytes that one rank can give in one exchange, or put into one abort record.
pub(super) const BLOB_BYTES_MAX: usize = (64 << 20) - 4096;

/// The most bytes of a label.
pub(super) const LABEL_BYTES_MAX: usize = 1024;

/// From a rank to the exchange point, which knows by itself who speaks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// This rank's part of exchange number `sequence`.
    Give { sequence: u64, label: String, blob: Blob },
    /// The group did not come together within `timeout`.
    GiveUp { timeout: Duration },
    /// The group is over.
    Abort { record: Blob },
    /// The group is over because an exchange timed out; `missing` is the first rank it lacked.
    Late { text: String, missing: Option<u32> },
    /// This rank has been handed the verdict.
    Acknowledge,
    /// Goodbye.
    Leave,
}

/// From the exchange point to every live rank, in the same order to all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// All ranks that have come so far.
    Here { ranks: Vec<u32> },
    /// The part of rank `from` of exchange number `sequence`.
    Gave { from: u32, sequence: u64, label: String, blob: Blob },
    /// The group is over.
    Over(Verdict),
    /// Every live rank has been handed the verdict.
    Told,
    /// A rank said goodbye.
    Left { rank: u32 },
}

/// Why a group is over; there is one verdict a group, the first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Verdict {
    Abort { from: u32, record: Blob },
    Late { from: u32, text: String, missing: Option<u32> },
    Lost { rank: u32, how: String },
    NotStarted { missing: Vec<u32>, timeout: Duration },
}

impl Verdict {
    /// What listeners hear of it; a group that never started has none.
    pub(super) fn notice(&self) -> Option<Notice> {
        match self {
            Self::Abort { from, record } => {
                Some(Notice::Abort { from: Rank(*from), record: record.0.clone() })
            }
            Self::Late { from, text, .. } => {
                Some(Notice::Abort { from: Rank(*from), record: text.clone().into_bytes() })
            }
            Self::Lost { rank, how } => Some(Notice::Lost { rank: Rank(*rank), how: how.clone() }),
            Self::NotStarted { .. } => None,
        }
    }

    /// The error of what was under way, `what`, when it came.
    pub(super) fn error(&self, what: &str) -> Error {
        let (kind, peer) = match self {
            Self::Abort { from, .. } => (ErrorKind::Aborted, Some(*from)),
            Self::Late { missing, .. } => (ErrorKind::Timeout, *missing),
            Self::Lost { rank, .. } => (ErrorKind::PeerLost, Some(*rank)),
            Self::NotStarted { missing, .. } => (ErrorKind::Timeout, missing.first().copied()),
        };
        with_peer(Error::new(kind, format!("{what}: {self}")), peer.map(Rank))
    }

    /// The error of what is begun after it.
    pub(super) fn error_after(&self, what: &str) -> Error {
        match self {
            Self::Late { .. } => Error::new(ErrorKind::Aborted, format!("{what}: {self}")),
            _ => self.error(what),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Abort { from, .. } => write!(f, "rank {from} has aborted the group"),
            Self::Late { from, text, .. } => write!(f, "rank {from} gave up: {text}"),
            Self::Lost { rank, how } => write!(f, "rank {rank} is lost: {how}"),
            Self::NotStarted { missing, timeout } => {
                let missing: Vec<_> = missing.iter().copied().map(Rank).collect();
                let (missing, timeout) = (Names(&missing), Seconds(*timeout));
                write!(
                    f,
                    "{missing} did not come within {timeout}: check that every rank was started, \
                     with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
                )
            }
        }
    }
}

/// `error`, naming `peer` if there is one.
pub(super) fn with_peer(error: Error, peer: Option<Rank>) -> Error {
    match peer {
        Some(peer) => error.with_peer(peer),
        None => error,
    }
}

/// Bytes that travel as bytes; serde alone would take them one by one.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Blob(pub(super) Vec<u8>);

impl fmt::Debug for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_byte_buf(BlobVisitor)
    }
}

struct BlobVisitor;

impl Visitor<'_> for BlobVisitor {
    type Value = Blob;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes")
    }

    fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Blob, E> {
        Ok(Blob(bytes.to_vec()))
    }
}

/// `rank 2`, `ranks 1 and 2`, `ranks 1, 2 and 3`.
pub(super) struct Names<'a>(pub(super) &'a [Rank]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((last, others)) = self.0.split_last() else { return f.write_str("no rank") };
        if others.is_empty() {
            return write!(f, "rank {last}");
        }
        let others: Vec<_> = others.iter().map(Rank::to_string).collect();
        write!(f, "ranks {} and {last}", others.join(", "))
    }
}

/// `5 s`, `0.25 s`.
pub(super) struct Seconds(pub(super) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} s", self.0.as_secs_f64())
    }
}
