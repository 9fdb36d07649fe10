//! The host backend's remote key: which process, which registration, how large.

use crate::key::{BackendId, Envelope, Generation, KeyError, RemoteKey};
use crate::mechanics::handover::{ProcessToken, role_number, role_of};
use crate::memory::Role;
use crate::rank::Rank;
use crate::wire::{Reader, Writer};

/// How a region can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// A memfd that the owner hands to any process.
    Shared,
    /// Memory of the owner's process alone.
    Private,
}

/// The bytes that let a peer import a region of host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    pub(super) process: ProcessToken,
    pub(super) generation: Generation,
    pub(super) rank: Rank,
    pub(super) role: Role,
    pub(super) reach: Reach,
    pub(super) bytes: u64,
}

impl RemoteKey for Key {
    fn encode(&self) -> Vec<u8> {
        let reach = match self.reach {
            Reach::Shared => 0,
            Reach::Private => 1,
        };
        let payload = Writer::new()
            .bytes(&self.process.0)
            .u32(self.rank.0)
            .u32(role_number(self.role))
            .u32(reach)
            .u64(self.bytes)
            .finish();
        Envelope { backend: BackendId::HOST, generation: self.generation, payload: &payload }.seal()
    }

    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let envelope = Envelope::open(bytes, BackendId::HOST)?;
        let mut reader = Reader::new(envelope.payload);
        let process = ProcessToken(reader.array("process token")?);
        let rank = Rank(reader.u32("rank")?);
        let role = role_of(reader.u32("role")?)?;
        let reach = match reader.u32("reach")? {
            0 => Reach::Shared,
            1 => Reach::Private,
            seen => {
                let (field, wanted) = ("reach", "0 or 1");
                return Err(KeyError::Field { field, seen: seen.into(), wanted });
            }
        };
        let bytes = reader.u64("region bytes")?;
        if bytes > isize::MAX as u64 {
            let (field, wanted) = ("region bytes", "at most 2^63 - 1");
            return Err(KeyError::Field { field, seen: bytes, wanted });
        }
        if !reader.rest().is_empty() {
            return Err(KeyError::Trailing { bytes: reader.rest().len() });
        }
        Ok(Self { process, generation: envelope.generation, rank, role, reach, bytes })
    }

    fn region_bytes(&self) -> u64 {
        self.bytes
    }

    fn generation(&self) -> Generation {
        self.generation
    }
}
