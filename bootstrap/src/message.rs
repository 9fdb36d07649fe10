//! Defines the messages between the ranks and the hub, both inside a process and over TCP.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use peerlane_hal::{ErrorKind, Rank};
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Notice;
use super::abort::{AbortRecord, Cause};
use super::hub::RANKS_MAX;
use super::process::ProcessId;
use crate::error::Error;

/// The maximum length, in bytes, of a contribution to an exchange, a message, or an abort record.
pub const BLOB_BYTES_MAX: usize = REQUEST_BYTES_MAX - 4096;

/// The maximum length of an encoded request to the hub, in bytes.
pub(crate) const REQUEST_BYTES_MAX: usize = 4 << 20;

/// The maximum length of an encoded reply of the hub, in bytes.
///
/// It has room for the addresses of all ranks, and for what two requests contain.
pub(crate) const REPLY_BYTES_MAX: usize = 16 << 20;

pub(crate) const LABEL_BYTES_MAX: usize = 1024;

/// Represents a request that a rank sends to the hub.
///
/// The hub knows the sender from the connection.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    Contribute {
        label: String,
        blob: Blob,
    },
    StartTimedOut {
        timeout: Duration,
    },
    Abort {
        record: Blob,
    },
    Broadcast {
        message: Blob,
    },
    TimedOut {
        text: String,
        missing: Option<u32>,
    },
    Acknowledge,
    Leave,
    /// Opens the subgroup that the request is addressed to.
    ///
    /// Its members are `ranks`, by their numbers in the first group.
    Open {
        #[serde(deserialize_with = "numbers_of_ranks")]
        ranks: Vec<u32>,
    },
    /// Reports that the rank has dropped the subgroup that the request is addressed to, without
    /// leaving it.
    GiveUp {
        how: String,
    },
    /// Asks the hub to report which ranks have contributed to each incomplete exchange, now and
    /// from now on.
    Watch,
}

/// Reports to the ranks of a group what has happened in the group.
///
/// All ranks receive the replies in the same order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Reports that all ranks have joined the group.
    ///
    /// `addresses` are those at which the ranks listen if the group shrinks.
    Joined {
        runs_hub: Option<u32>,
        addresses: Vec<Option<SocketAddr>>,
        processes: Vec<Option<ProcessId>>,
    },
    /// Carries the contributions of consecutive ranks to an exchange that is complete.
    Contributions {
        sequence: u64,
        /// The rank of the first contribution.
        first: u32,
        /// The contributions in rank order, as pairs of a number of consecutive ranks and their
        /// equal data.
        blobs: Vec<(u32, Blob)>,
    },
    Ended(EndCause),
    Message {
        from: u32,
        message: Blob,
    },
    Acknowledged,
    Left {
        rank: u32,
    },
    /// Tells a rank that has left a subgroup that no message of the subgroup follows.
    Gone,
    /// Reports which ranks have contributed to an exchange that is not complete.
    Present {
        sequence: u64,
        ranks: Vec<u32>,
    },
    /// Reports that two ranks have contributed to an exchange with different labels.
    Differs {
        sequence: u64,
        labels: [(u32, String); 2],
    },
}

impl Reply {
    /// Returns the number of bytes of data that the reply carries from one rank to the others.
    ///
    /// It returns `None` if the reply has no data, or the contributions of all ranks.
    pub(super) fn data_bytes(&self) -> Option<usize> {
        match self {
            Self::Message { message, .. } => Some(message.0.len()),
            Self::Ended(cause) => Some(cause.data_bytes()),
            Self::Differs { labels, .. } => Some(labels.iter().map(|(_, label)| label.len()).sum()),
            _ => None,
        }
    }
}

/// Describes why a group has ended.
///
/// Only the first reason counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndCause {
    Abort {
        from: u32,
        record: Blob,
    },
    TimedOut {
        from: u32,
        text: String,
        missing: Option<u32>,
    },
    Lost {
        rank: u32,
        how: String,
    },
    NotStarted {
        missing: Vec<u32>,
        timeout: Duration,
        hints: Vec<String>,
    },
    /// The hub is lost, and no rank of the group is known to run the hub.
    HubLost {
        how: String,
    },
}

impl EndCause {
    /// Returns the notice that tells listeners why the group has ended, or `None` if its start has
    /// timed out.
    pub(crate) fn notice(&self) -> Option<Notice> {
        match self {
            Self::Abort { from, record } => {
                Some(Notice::Abort { from: Rank(*from), record: record.0.clone() })
            }

            Self::TimedOut { from, text, missing } => {
                let by = Some(Rank(*from));
                let record =
                    AbortRecord { by, ..AbortRecord::timeout(missing.map(Rank), text.as_str()) };
                Some(Notice::Abort { from: Rank(*from), record: record.encode() })
            }

            Self::Lost { rank, how } => Some(Notice::Lost { rank: Rank(*rank), how: how.clone() }),

            Self::HubLost { how } => {
                let text = format!("the hub is lost: {how}");
                let cause = Cause::PeerLost;
                let record = AbortRecord { cause, ..AbortRecord::timeout(None, text) };

                // No rank has aborted the group, but the notice needs a number. The record has no
                // `by`.
                Some(Notice::Abort { from: Rank(0), record: record.encode() })
            }

            // The caller of the start receives the error, and has no listener yet.
            Self::NotStarted { .. } => None,
        }
    }

    /// Returns the length, in bytes, of the abort record or text in the cause.
    ///
    /// It is 0 for a cause that no single rank has sent.
    pub(super) fn data_bytes(&self) -> usize {
        match self {
            Self::Abort { record, .. } => record.0.len(),
            Self::TimedOut { text, .. } | Self::Lost { how: text, .. } => text.len(),
            Self::NotStarted { .. } | Self::HubLost { .. } => 0,
        }
    }

    /// Returns the rank that sent the cause or is lost, or `None` if there is no such rank.
    pub(super) fn from(&self) -> Option<Rank> {
        match self {
            Self::Abort { from: rank, .. }
            | Self::TimedOut { from: rank, .. }
            | Self::Lost { rank, .. } => Some(Rank(*rank)),
            Self::NotStarted { .. } | Self::HubLost { .. } => None,
        }
    }

    /// Returns the rank that, according to the abort record, did not answer the others after a
    /// deadline.
    pub(crate) fn unanswered(&self) -> Option<Rank> {
        let Self::Abort { from, record } = self else { return None };

        let record = AbortRecord::decode(&record.0, Rank(*from));
        record.peer.filter(|_| record.unanswered)
    }

    /// Returns the error for the call `what`, which failed because the group ended for this cause.
    pub(crate) fn error(&self, what: &str) -> Error {
        let kind = match self {
            Self::Abort { .. } => ErrorKind::Aborted,
            Self::TimedOut { .. } | Self::NotStarted { .. } => ErrorKind::Timeout,
            Self::Lost { .. } | Self::HubLost { .. } => ErrorKind::PeerLost,
        };

        with_peer(Error::new(kind, format!("{what}: {self}")), self.peer().map(Rank))
    }

    /// Returns the rank that is to blame for the end of the group, if there is such a rank.
    pub(crate) fn peer(&self) -> Option<u32> {
        match self {
            Self::Abort { from, record } => {
                // Without a record that blames another rank, the rank that aborted is to blame.
                let peer = AbortRecord::parse(&record.0).ok().and_then(|record| record.peer);
                Some(peer.map_or(*from, |peer| peer.0))
            }
            Self::TimedOut { missing, .. } => *missing,
            Self::Lost { rank, .. } => Some(*rank),
            Self::HubLost { .. } => None,
            Self::NotStarted { missing, .. } => missing.first().copied(),
        }
    }

    /// Returns the error for the call `what`, which began after the group had ended.
    pub(crate) fn error_after(&self, what: &str) -> Error {
        match self {
            // The call itself has not timed out.
            Self::TimedOut { .. } => Error::new(ErrorKind::Aborted, format!("{what}: {self}")),
            _ => self.error(what),
        }
    }
}

impl fmt::Display for EndCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Abort { from, record } => {
                write!(f, "rank {from} has aborted the group")?;
                // The bytes of a record can be anything, and the error is useful without them.
                match AbortRecord::parse(&record.0) {
                    Ok(record) => write!(f, ": {record}"),
                    Err(_) => Ok(()),
                }
            }
            Self::TimedOut { from, text, .. } => write!(f, "rank {from} timed out: {text}"),
            Self::Lost { rank, how } => write!(f, "rank {rank} is lost: {how}"),
            Self::HubLost { how } => write!(f, "the hub is lost: {how}"),

            Self::NotStarted { missing, timeout, hints } => {
                let missing: Vec<_> = missing.iter().copied().map(Rank).collect();
                write!(f, "{} did not connect within {}", RankList(&missing), Seconds(*timeout))?;

                for hint in hints {
                    write!(f, "; {hint}")?;
                }

                f.write_str(
                    "; check that every rank was started with the same WORLD_SIZE, MASTER_ADDR and \
                     MASTER_PORT",
                )
            }
        }
    }
}

pub(crate) fn with_peer(error: Error, peer: Option<Rank>) -> Error {
    match peer {
        Some(peer) => error.with_peer(peer),
        None => error,
    }
}

/// Holds a byte string that serde encodes as a whole instead of byte by byte.
#[derive(Clone, PartialEq, Eq)]
pub struct Blob(pub Vec<u8>);

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

/// Decodes a list of rank numbers, and rejects a list with more numbers than a group has ranks.
///
/// A longer list is rejected before it takes memory.
fn numbers_of_ranks<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
    deserializer.deserialize_seq(RanksVisitor)
}

struct RanksVisitor;

impl<'de> Visitor<'de> for RanksVisitor {
    type Value = Vec<u32>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {RANKS_MAX} numbers of ranks")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Vec<u32>, A::Error> {
        let mut ranks = Vec::new();
        while let Some(rank) = sequence.next_element()? {
            // Checked for each number, because the length that the sender states is not trusted.
            if ranks.len() == RANKS_MAX {
                return Err(A::Error::invalid_length(ranks.len() + 1, &self));
            }
            ranks.push(rank);
        }

        Ok(ranks)
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

/// Formats ranks as `rank 2`, `ranks 1 and 2`, or `ranks 1, 2 and 3`.
#[derive(Debug)]
pub struct RankList<'a>(pub &'a [Rank]);

impl fmt::Display for RankList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((last, others)) = self.0.split_last() else { return f.write_str("no rank") };
        if others.is_empty() {
            return write!(f, "rank {last}");
        }

        let others: Vec<_> = others.iter().map(Rank::to_string).collect();
        write!(f, "ranks {} and {last}", others.join(", "))
    }
}

/// Formats a duration in seconds, such as `5 s` or `0.25 s`.
pub(crate) struct Seconds(pub(crate) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} s", self.0.as_secs_f64())
    }
}
