//! Encodes the remote key of a region in host memory.

use peerlane_hal::Rank;
use peerlane_hal::Role;
use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{BackendId, Envelope, Generation, KeyError, RemoteKey};
use peerlane_toolkit::handover::{ProcessToken, role_number, role_of};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Memory in a memfd that the owner can hand to any process; the region begins at byte `head`.
    Shared { head: u64 },
    /// Memory that only the owner's process can import, because it has no file descriptor.
    Private,
}

/// The remote key with which a peer imports a region of host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    pub(super) process: ProcessToken,
    pub(super) generation: Generation,
    pub(super) rank: Rank,
    pub(super) role: Role,
    pub(super) access: Access,
    pub(super) bytes: u64,
}

impl RemoteKey for Key {
    fn encode(&self) -> Vec<u8> {
        let (access, head) = match self.access {
            Access::Shared { head } => (0, head),
            Access::Private => (1, 0),
        };
        let payload = Writer::new()
            .bytes(&self.process.0)
            .u32(self.rank.0)
            .u32(role_number(self.role))
            .u32(access)
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
        let access = reader.u32("access")?;
        let bytes = reader.u64("region bytes")?;
        let head = reader.u64("bytes before the region")?;
        let access = match access {
            0 => Access::Shared { head },
            1 => Access::Private,
            seen => {
                let (field, expected) = ("access", "0 or 1");
                return Err(KeyError::Field { field, found: seen.into(), expected });
            }
        };
        if bytes > isize::MAX as u64 {
            let (field, expected) = ("region bytes", "at most 2^63 - 1");
            return Err(KeyError::Field { field, found: bytes, expected });
        }
        let aligned = role == Role::Data || head.is_multiple_of(size_of::<u64>() as u64);
        if head > isize::MAX as u64 || !aligned {
            let (field, expected) =
                ("bytes before the region", "at most 2^63 - 1, and a multiple of 8 for flags");
            return Err(KeyError::Field { field, found: head, expected });
        }
        if !reader.rest().is_empty() {
            return Err(KeyError::Trailing { bytes: reader.rest().len() });
        }
        Ok(Self { process, generation: envelope.generation, rank, role, access, bytes })
    }

    fn region_bytes(&self) -> u64 {
        self.bytes
    }

    fn generation(&self) -> Generation {
        self.generation
    }
}
