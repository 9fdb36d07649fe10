//! Defines the abort record, which tells every rank why a group has ended.

use std::fmt;

use peerlane_hal::{ErrorKind, Rank};
use serde::{Deserialize, Serialize};

use super::message::with_peer;
use crate::error::Error;

/// Classifies the failure that aborted a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Cause {
    /// The group lost one of its ranks.
    PeerLost,
    /// The deadline of a call passed.
    Timeout,
    /// An engine or another part of a rank failed.
    EngineFailed,
    /// The device of a rank stopped working.
    DeviceLost,
    /// Two ranks started an operation with different lengths or places.
    Mismatch,
}

/// Stores the reason why a group has ended, on which all ranks agree.
///
/// If several ranks abort the group at once, the first record wins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortRecord {
    /// The class of the failure that ended the group.
    pub cause: Cause,
    /// The rank that detected the failure; `None` if the bootstrap detected it.
    #[serde(with = "rank")]
    pub by: Option<Rank>,
    /// The rank that caused the failure, if it is known.
    #[serde(with = "rank")]
    pub peer: Option<Rank>,
    /// The operation that failed, such as `all-gather 1`; empty if the failure was outside of an
    /// operation.
    pub operation: String,
    /// The step of the plan that the failed operation waited for, such as a flag of a peer.
    pub phase: String,
    /// The number of the failed run of the operation, counted from 1; 0 for a graph replay.
    pub epoch: u64,
    /// A sentence that describes the failure.
    pub text: String,
    /// Whether the rank `peer` did not answer when the other ranks asked why a deadline had passed.
    pub unanswered: bool,
}

mod rank {
    use peerlane_hal::Rank;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(rank: &Option<Rank>, to: S) -> Result<S::Ok, S::Error> {
        rank.map(|rank| rank.0).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Rank>, D::Error> {
        Ok(Option::<u32>::deserialize(from)?.map(Rank))
    }
}

impl AbortRecord {
    /// Creates the abort record for a deadline that passed outside of an operation.
    pub fn timeout(peer: Option<Rank>, text: impl Into<String>) -> Self {
        Self {
            cause: Cause::Timeout,
            by: None,
            peer,
            operation: String::new(),
            phase: String::new(),
            epoch: 0,
            text: text.into(),
            unanswered: false,
        }
    }

    /// Creates the abort record for a lost rank; `how` says how the loss was detected.
    #[doc(hidden)]
    pub fn lost(rank: Rank, how: &str) -> Self {
        let text = format!("rank {rank} is lost: {how}");
        Self { cause: Cause::PeerLost, ..Self::timeout(Some(rank), text) }
    }

    /// Creates the abort record for a rank that failed outside of an operation, for example at a
    /// system limit.
    pub fn failed(rank: Rank, kind: ErrorKind, error: impl fmt::Display) -> Self {
        let text = format!("rank {rank} failed ({kind}): {error}");
        let by = Some(rank);
        Self { cause: Cause::EngineFailed, by, ..Self::timeout(Some(rank), text) }
    }

    /// Encodes the record as the bytes that [`Bootstrap::abort`](super::Bootstrap::abort) takes.
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("plain data always encodes")
    }

    /// Decodes a record, or returns an error if `bytes` are not an encoded record.
    ///
    /// A program can pass any bytes to `abort`.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, postcard::Error> {
        postcard::from_bytes(bytes)
    }

    /// Decodes a record that `from` sent, or creates a record that blames `from` if decoding fails.
    #[doc(hidden)]
    pub fn decode(bytes: &[u8], from: Rank) -> Self {
        let error = match Self::parse(bytes) {
            Ok(record) => return record,
            Err(error) => error,
        };

        let text = format!(
            "rank {from} aborted the group, but the record of the cause cannot be decoded: {error}"
        );
        let by = Some(from);
        Self { cause: Cause::EngineFailed, by, ..Self::timeout(Some(from), text) }
    }

    /// Converts the record into the error that calls return on the rank `own`.
    #[doc(hidden)]
    pub fn to_error(&self, own: Rank) -> Error {
        let kind = match self.cause {
            Cause::PeerLost => ErrorKind::PeerLost,
            Cause::Timeout => ErrorKind::Timeout,
            Cause::EngineFailed => ErrorKind::Aborted,
            // For the other ranks, this rank is gone, whatever has happened to its device.
            Cause::DeviceLost if self.by == Some(own) => ErrorKind::DeviceLost,
            Cause::DeviceLost => ErrorKind::PeerLost,
            Cause::Mismatch => ErrorKind::Mismatch,
        };

        with_peer(Error::new(kind, self.to_string()), self.peer)
    }
}

impl fmt::Display for AbortRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
