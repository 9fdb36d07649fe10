//! Encodes the remote key of a region.

use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{Envelope, Generation, KeyError, Rank, RemoteKey, Role};
use peerlane_toolkit::handover::{ProcessToken, role_number, role_of};
use peerlane_toolkit::mapping::LengthGuard;

use crate::BACKEND;

/// Takes the place of `head` in a key that is valid in its own process only.
const PRIVATE: u64 = u64::MAX;

/// Identifies a region to the peer that imports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    pub(crate) generation: Generation,
    pub(crate) process: ProcessToken,
    pub(crate) rank: Rank,
    pub(crate) role: Role,
    pub(crate) bytes: u64,
    /// Where the region begins in its file descriptor, in bytes; `None` if it has none.
    pub(crate) head: Option<u64>,
    /// Why the file keeps its length.
    pub(crate) guard: LengthGuard,
}

impl RemoteKey for Key {
    fn encode(&self) -> Vec<u8> {
        let Self { generation, process, rank, role, bytes, head, guard } = *self;
        let payload = Writer::new().bytes(&process.0).u32(rank.0).u32(role_number(role));
        let payload =
            payload.u64(bytes).u64(head.unwrap_or(PRIVATE)).u32(guard.to_number()).finish();
        Envelope { backend: BACKEND, generation, payload: &payload }.seal()
    }

    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let envelope = Envelope::open(bytes, BACKEND)?;
        let mut reader = Reader::new(envelope.payload);
        let process = ProcessToken(reader.array("process")?);
        let (rank, role) = (Rank(reader.u32("rank")?), role_of(reader.u32("role")?)?);
        let (bytes, head) = (reader.u64("region bytes")?, reader.u64("head")?);
        let guard = LengthGuard::from_number(reader.u32("length guard")?)?;

        if bytes > isize::MAX as u64 {
            let (field, expected) = ("region bytes", "at most 2^63 - 1");
            return Err(KeyError::Field { field, found: bytes, expected });
        }
        if !reader.rest().is_empty() {
            return Err(KeyError::Trailing { bytes: reader.rest().len() });
        }
        let head = (head != PRIVATE).then_some(head);
        Ok(Self { generation: envelope.generation, process, rank, role, bytes, head, guard })
    }

    fn region_bytes(&self) -> u64 {
        self.bytes
    }

    fn generation(&self) -> Generation {
        self.generation
    }
}
