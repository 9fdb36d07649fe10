//! Encodes the remote key with which a peer imports a memory region. A key holds the region's owner,
//! registration, address and length, and a remote key for each NIC.

use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{BackendId, Envelope, Generation, KeyError, Rank, RemoteKey, Role};
use peerlane_toolkit::handover::{role_number, role_of};

use crate::options::NICS_MAX;

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// The memory keys of one region, one per NIC; 0 for NICs that do not exist.
pub(crate) type NicKeys = [u32; NICS_MAX];

/// A remote key, with which a peer imports a region of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    pub(crate) generation: Generation,
    pub(crate) rank: Rank,
    pub(crate) role: Role,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) nics: u16,
    pub(crate) remote_keys: NicKeys,
}

impl Key {
    pub(crate) fn write(&self, writer: Writer) -> Writer {
        let start = writer
            .u32(self.rank.0)
            .u32(role_number(self.role))
            .u64(self.address)
            .u64(self.bytes)
            .u16(self.nics);
        let keys = self.remote_keys.iter().take(self.nics.into());
        keys.fold(start, |writer, key| writer.u32(*key))
    }

    pub(crate) fn read(reader: &mut Reader<'_>, generation: Generation) -> Result<Self, KeyError> {
        let rank = Rank(reader.u32("rank")?);
        let role = role_of(reader.u32("role")?)?;
        let address = reader.u64("address")?;
        let bytes = reader.u64("region bytes")?;
        let nics = reader.u16("number of NICs")?;
        if !(1..=NICS_MAX).contains(&usize::from(nics)) {
            let (field, expected) = ("number of NICs", "1 to 4");
            return Err(KeyError::Field { field, found: nics.into(), expected });
        }
        let mut remote_keys = NicKeys::default();
        for key in remote_keys.iter_mut().take(nics.into()) {
            *key = reader.u32("remote key")?;
        }
        if bytes > isize::MAX as u64 {
            let (field, expected) = ("region bytes", "at most 2^63 - 1");
            return Err(KeyError::Field { field, found: bytes, expected });
        }
        let aligned = role == Role::Data || address.is_multiple_of(WORD_BYTES);
        if address.checked_add(bytes).is_none() || !aligned {
            let (field, expected) = ("address", "an end below 2^64, aligned for flags");
            return Err(KeyError::Field { field, found: address, expected });
        }
        Ok(Self { generation, rank, role, address, bytes, nics, remote_keys })
    }
}

impl RemoteKey for Key {
    fn encode(&self) -> Vec<u8> {
        let payload = self.write(Writer::new()).finish();
        Envelope { backend: BackendId::RDMA, generation: self.generation, payload: &payload }.seal()
    }

    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let envelope = Envelope::open(bytes, BackendId::RDMA)?;
        let mut reader = Reader::new(envelope.payload);
        let key = Self::read(&mut reader, envelope.generation)?;
        match reader.rest() {
            [] => Ok(key),
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

    fn key() -> Key {
        Key {
            generation: Generation(9),
            rank: Rank(3),
            role: Role::Flags,
            address: 0x7f00_0000_1000,
            bytes: 4096,
            nics: 2,
            remote_keys: [0xabcd, 0xef, 0, 0],
        }
    }

    #[test]
    fn a_key_survives_encoding() {
        assert_eq!(Key::decode(&key().encode()), Ok(key()));
    }

    #[test]
    fn impossible_fields_are_refused() {
        let wrong = [
            Key { bytes: u64::MAX, ..key() },
            Key { address: u64::MAX - 7, ..key() },
            Key { address: 0x1001, ..key() },
            Key { nics: 0, ..key() },
        ];
        for key in wrong {
            let error = Key::decode(&key.encode()).unwrap_err();
            assert!(matches!(error, KeyError::Field { .. }), "{error}");
        }
        let whole = key().encode();
        for length in 0..whole.len() {
            Key::decode(&whole[..length]).unwrap_err();
        }
        Key::decode(&[&whole[..], &[0]].concat()).unwrap_err();
    }
}
