//! Encodes the remote key of a region.
//!
//! The generation is a random number that no other registration has, so the key of freed memory finds nothing. The other fields are
//! compared with the registration, so a damaged key is refused.

use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{Envelope, Generation, KeyError, Rank, RemoteKey, Role};
use peerlane_toolkit::handover::{role_number, role_of};

use crate::BACKEND;

/// The remote key with which a peer imports a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    pub(crate) generation: Generation,
    pub(crate) rank: Rank,
    pub(crate) role: Role,
    pub(crate) bytes: u64,
}

impl RemoteKey for Key {
    fn encode(&self) -> Vec<u8> {
        let (rank, role) = (self.rank.0, role_number(self.role));
        let payload = Writer::new().u32(rank).u32(role).u64(self.bytes).finish();
        Envelope { backend: BACKEND, generation: self.generation, payload: &payload }.seal()
    }

    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let envelope = Envelope::open(bytes, BACKEND)?;
        let mut reader = Reader::new(envelope.payload);
        let (rank, role) = (Rank(reader.u32("rank")?), role_of(reader.u32("role")?)?);
        let bytes = reader.u64("region bytes")?;
        if !reader.rest().is_empty() {
            return Err(KeyError::Trailing { bytes: reader.rest().len() });
        }
        Ok(Self { generation: envelope.generation, rank, role, bytes })
    }

    fn region_bytes(&self) -> u64 {
        self.bytes
    }

    fn generation(&self) -> Generation {
        self.generation
    }
}
