//! Encodes the remote key of a region in host memory.

use peerlane_hal::Rank;
use peerlane_hal::Role;
use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{BackendId, Envelope, Generation, KeyError, RemoteKey};
use peerlane_toolkit::handover::{ProcessToken, role_number, role_of};
use peerlane_toolkit::mapping::LengthGuard;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Memory in a file that the owner can hand to any process; the region begins at byte `head`.
    Shared { head: u64, guard: LengthGuard },
    /// Memory that only the owner's process can import, because it has no file descriptor.
    Private,
}

impl Access {
    /// Returns the number of the access in a key, and the bytes before the region.
    const fn to_numbers(self) -> (u32, u64) {
        match self {
            Self::Shared { head, guard: LengthGuard::Allocated } => (0, head),
            Self::Private => (1, 0),
            Self::Shared { head, guard: LengthGuard::Sealed } => (2, head),
            Self::Shared { head, guard: LengthGuard::Promised } => (3, head),
        }
    }

    fn from_numbers(access: u32, head: u64) -> Result<Self, KeyError> {
        let guard = match access {
            0 => LengthGuard::Allocated,
            1 => return Ok(Self::Private),
            2 => LengthGuard::Sealed,
            3 => LengthGuard::Promised,
            seen => {
                let (field, expected) = ("access", "0 to 3");
                return Err(KeyError::Field { field, found: seen.into(), expected });
            }
        };
        Ok(Self::Shared { head, guard })
    }
}

/// The remote key that a peer needs to import a region of host memory.
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
        let (access, head) = self.access.to_numbers();
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
        let access = Access::from_numbers(access, head)?;

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

#[cfg(test)]
mod tests {
    use super::*;

    fn key(access: Access) -> Key {
        Key {
            process: ProcessToken([7; 16]),
            generation: Generation(3),
            rank: Rank(2),
            role: Role::Data,
            access,
            bytes: 100,
        }
    }

    const GUARDS: [LengthGuard; 3] =
        [LengthGuard::Allocated, LengthGuard::Sealed, LengthGuard::Promised];

    #[test]
    fn a_key_says_why_the_file_of_its_memory_keeps_its_length() {
        let shared = GUARDS.map(|guard| Access::Shared { head: 4096, guard });
        for access in shared.into_iter().chain([Access::Private]) {
            assert_eq!(Key::decode(&key(access).encode()), Ok(key(access)));
        }
    }

    #[test]
    fn an_unknown_access_is_refused() {
        // The access follows the token of the process, the rank and the role.
        const ACCESS_PLACE: usize = 16 + 4 + 4;
        let whole = key(Access::Private).encode();
        let envelope = Envelope::open(&whole, BackendId::HOST).unwrap();
        for (number, is_known) in [(2, true), (3, true), (4, false), (u32::MAX, false)] {
            let mut payload = envelope.payload.to_vec();
            let access = &mut payload[ACCESS_PLACE..ACCESS_PLACE + 4];
            assert_eq!(access, 1_u32.to_le_bytes());
            access.copy_from_slice(&number.to_le_bytes());
            let changed = Envelope { payload: &payload, ..envelope }.seal();
            let expected =
                KeyError::Field { field: "access", found: number.into(), expected: "0 to 3" };
            match Key::decode(&changed) {
                Ok(_) => assert!(is_known, "{number}"),
                Err(error) => assert!(!is_known && error == expected, "{number}: {error}"),
            }
        }
    }
}
