//! The host backend's remote key: which process, which registration, how large.

use peerlane_hal::Rank;
use peerlane_hal::Role;
use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{BackendId, Envelope, Generation, KeyError, RemoteKey};
use peerlane_toolkit::handover::{ProcessToken, role_number, role_of};

/// How a region can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// A memfd that the owner hands to any process; the region begins so many bytes into it.
    Shared { head: u64 },
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
        let (reach, head) = match self.reach {
            Reach::Shared { head } => (0, head),
            Reach::Private => (1, 0),
        };
        let payload = Writer::new()
            .bytes(&self.process.0)
            .u32(self.rank.0)
            .u32(role_number(self.role))
            .u32(reach)
            .u64(self.bytes)
            .u64(head)
            .finish();
        Envelope { backend: BackendId::HOST, generation: self.generation, payload: &payload }.seal()
    }

    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let envelope = Envelope::open(bytes, BackendId::HOST)?;
        let mut reader = Reader::new(envelope.payload);
        let process = ProcessToken(reader.array("process token")?);
        let rank = Rank(reader.u32("rank")?);
        let role = role_of(reader.u32("role")?)?;
        let reach = reader.u32("reach")?;
        let bytes = reader.u64("region bytes")?;
        let head = reader.u64("bytes before the region")?;
        let reach = match reach {
            0 => Reach::Shared { head },
            1 => Reach::Private,
            seen => {
                let (field, wanted) = ("reach", "0 or 1");
                return Err(KeyError::Field { field, seen: seen.into(), wanted });
            }
        };
        if bytes > isize::MAX as u64 {
            let (field, wanted) = ("region bytes", "at most 2^63 - 1");
            return Err(KeyError::Field { field, seen: bytes, wanted });
        }
        let aligned = role == Role::Data || head.is_multiple_of(size_of::<u64>() as u64);
        if head > isize::MAX as u64 || !aligned {
            let (field, wanted) =
                ("bytes before the region", "at most 2^63 - 1, aligned for flags");
            return Err(KeyError::Field { field, seen: head, wanted });
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
