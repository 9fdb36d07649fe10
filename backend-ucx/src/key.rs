//! Encodes the remote key of a region: its owner, role and length.

use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{BackendId, Envelope, Generation, KeyError, Rank, RemoteKey, Role};
use peerlane_toolkit::handover::{role_number, role_of};

/// A remote key, by which a peer imports a region of this rank.
///
/// It holds no address: the owner finds a region by its number, and refuses messages for a region
/// that it has freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    pub(crate) generation: Generation,
    pub(crate) rank: Rank,
    pub(crate) role: Role,
    pub(crate) bytes: u64,
}

impl RemoteKey for Key {
    fn encode(&self) -> Vec<u8> {
        let Self { generation, rank, role, bytes } = *self;
        let payload = Writer::new().u32(rank.0).u32(role_number(role)).u64(bytes).finish();
        Envelope { backend: BackendId::UCX, generation, payload: &payload }.seal()
    }

    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let envelope = Envelope::open(bytes, BackendId::UCX)?;
        let mut reader = Reader::new(envelope.payload);
        let (rank, role) = (Rank(reader.u32("rank")?), role_of(reader.u32("role")?)?);
        let bytes = reader.u64("region bytes")?;
        if bytes > isize::MAX as u64 {
            let (field, expected) = ("region bytes", "at most 2^63 - 1");
            return Err(KeyError::Field { field, found: bytes, expected });
        }
        match reader.rest() {
            [] => Ok(Self { generation: envelope.generation, rank, role, bytes }),
            rest => Err(KeyError::Trailing { bytes: rest.len() }),
        }
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

    const KEY: Key =
        Key { generation: Generation(9), rank: Rank(3), role: Role::Flags, bytes: 4096 };

    #[test]
    fn a_key_survives_encoding() {
        assert_eq!(Key::decode(&KEY.encode()), Ok(KEY));
    }

    #[test]
    fn impossible_fields_are_refused() {
        let error = Key::decode(&Key { bytes: u64::MAX, ..KEY }.encode()).unwrap_err();
        assert!(matches!(error, KeyError::Field { .. }), "{error}");
        let whole = KEY.encode();
        for length in 0..whole.len() {
            Key::decode(&whole[..length]).unwrap_err();
        }
        Key::decode(&[&whole[..], &[0]].concat()).unwrap_err();
    }
}
