//! The remote key: that of the network, and whether it names the bytes themselves or stands for memory
//! of a device that the network does not reach.

use peerlane_hal::wire::{Reader, Writer, checksum};
use peerlane_hal::{BackendId, Envelope, Generation, KeyError, Rank, RemoteKey, Role};

const DIRECT: u32 = 0;
const STAGED: u32 = 1;

/// The bytes that let a peer import a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key<K> {
    pub(super) rank: Rank,
    pub(super) role: Role,
    pub(super) bytes: u64,
    /// The network's key is that of a witness, which lives as long as the memory that it stands for.
    pub(super) staged: bool,
    pub(super) network: K,
}

impl<K: RemoteKey> Key<K> {
    fn sum(generation: Generation, fields: &[u8]) -> u64 {
        checksum(&Writer::new().u64(generation.0).bytes(fields).finish())
    }
}

impl<K: RemoteKey> RemoteKey for Key<K> {
    fn encode(&self) -> Vec<u8> {
        let fields = Writer::new()
            .u32(if self.staged { STAGED } else { DIRECT })
            .u32(self.rank.0)
            .u32(match self.role {
                Role::Data => 0,
                Role::Flags => 1,
            })
            .u64(self.bytes)
            .bytes(&self.network.encode())
            .finish();
        let generation = self.generation();
        let sum = Self::sum(generation, &fields);
        let payload = Writer::new().u64(sum).bytes(&fields).finish();
        Envelope { backend: BackendId::STAGED, generation, payload: &payload }.seal()
    }

    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let envelope = Envelope::open(bytes, BackendId::STAGED)?;
        let mut reader = Reader::new(envelope.payload);
        let sum = reader.u64("checksum")?;
        let wanted = Self::sum(envelope.generation, reader.rest());
        let field = |field, seen, wanted| Err(KeyError::Field { field, seen, wanted });
        if sum != wanted {
            // The owner is asked about the network's key only.
            return field("checksum", sum, "that of the other fields");
        }
        let staged = match reader.u32("way")? {
            DIRECT => false,
            STAGED => true,
            other => return field("way", other.into(), "0 or 1"),
        };
        let rank = Rank(reader.u32("rank")?);
        let role = match reader.u32("role")? {
            0 => Role::Data,
            1 if !staged => Role::Flags,
            other => return field("role", other.into(), "0 for data or 1 for flags of the host"),
        };
        let bytes = reader.u64("region bytes")?;
        let network = K::decode(reader.rest())?;
        if !staged && network.region_bytes() != bytes {
            return field("region bytes", bytes, "those of the network's key");
        }
        Ok(Self { rank, role, bytes, staged, network })
    }

    fn region_bytes(&self) -> u64 {
        self.bytes
    }

    fn generation(&self) -> Generation {
        self.network.generation()
    }
}
