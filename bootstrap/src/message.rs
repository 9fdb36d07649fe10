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

/// Limits the bytes of a contribution to an exchange, of a message, and of the record of an abort.
pub const BLOB_BYTES_MAX: usize = REQUEST_BYTES_MAX - 4096;

/// Limits the bytes of a message to the hub.
pub(crate) const REQUEST_BYTES_MAX: usize = 4 << 20;

/// Limits the bytes of a message of the hub.
///
/// It has room for the addresses of all ranks, and for what two requests contain.
pub(crate) const REPLY_BYTES_MAX: usize = 16 << 20;

pub(crate) const LABEL_BYTES_MAX: usize = 1024;

/// Tells the hub what a rank wants. The hub knows the sender from the connection.
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
    /// Opens the subgroup that the message is addressed to, with these ranks of the first group.
    Open {
        #[serde(deserialize_with = "numbers_of_ranks")]
        ranks: Vec<u32>,
    },
    /// Tells the hub that this rank has dropped the subgroup that the message is addressed to.
    GiveUp {
        how: String,
    },
    /// Asks which ranks have contributed to each exchange that is not complete, now and from now
    /// on.
    Watch,
}

/// Tells ranks what has happened in their group. All ranks receive the replies in the same order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Tells a rank that all ranks have joined; `addresses` are those at which the ranks listen if
    /// the group shrinks.
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
        /// How many consecutive ranks have contributed equal data, and the data.
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
    /// Ends the messages of a subgroup to a rank that has left it.
    Gone,
    /// Tells which ranks have contributed to an exchange that is not complete.
    Present {
        sequence: u64,
        ranks: Vec<u32>,
    },
    /// Tells that two ranks have contributed to an exchange with different labels.
    Differs {
        sequence: u64,
        labels: [(u32, String); 2],
    },
}

impl Reply {
    /// Returns how many bytes of the data of one rank the reply passes on.
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

/// Describes why a group has ended. Only the first reason counts.
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
    /// The connection to the hub has closed, and no rank of the group runs the hub.
    HubLost {
        how: String,
    },
}

impl EndCause {
    /// Returns the notice for the listener of a rank.
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

    /// Returns how many bytes of data the cause has.
    pub(super) fn data_bytes(&self) -> usize {
        match self {
            Self::Abort { record, .. } => record.0.len(),
            Self::TimedOut { text, .. } | Self::Lost { how: text, .. } => text.len(),
            Self::NotStarted { .. } | Self::HubLost { .. } => 0,
        }
    }

    /// Returns the rank that has sent the cause, or that is lost.
    pub(super) fn from(&self) -> Option<Rank> {
        match self {
            Self::Abort { from: rank, .. }
            | Self::TimedOut { from: rank, .. }
            | Self::Lost { rank, .. } => Some(Rank(*rank)),
            Self::NotStarted { .. } | Self::HubLost { .. } => None,
        }
    }

    /// Returns the rank that has not answered when the others asked why a deadline had passed.
    pub(crate) fn unanswered(&self) -> Option<Rank> {
        let Self::Abort { from, record } = self else { return None };

        let record = AbortRecord::decode(&record.0, Rank(*from));
        record.peer.filter(|_| record.unanswered)
    }

    /// Returns the error of a call that this cause has ended.
    pub(crate) fn error(&self, what: &str) -> Error {
        let kind = match self {
            Self::Abort { .. } => ErrorKind::Aborted,
            Self::TimedOut { .. } | Self::NotStarted { .. } => ErrorKind::Timeout,
            Self::Lost { .. } | Self::HubLost { .. } => ErrorKind::PeerLost,
        };

        with_peer(Error::new(kind, format!("{what}: {self}")), self.peer().map(Rank))
    }

    /// Returns the rank that is to blame.
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

    /// Returns the error of a call that began after the end of the group.
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

/// Decodes numbers of ranks, and refuses more than a group can have before they take memory.
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

/// Formats a duration as `5 s` or `0.25 s`.
pub(crate) struct Seconds(pub(crate) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} s", self.0.as_secs_f64())
    }
}
