//! What a rank tells its peers so that they connect: the network's address, and the keys of what they
//! write to it.

use peerlane_hal::wire::{Reader, Writer, checksum};
use peerlane_hal::{BackendId, Rank};

use super::error::Error;

const MAGIC: [u8; 4] = *b"PLRA";
const VERSION: u16 = 1;

/// An address, parsed as far as it is this fabric's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) rank: Rank,
    pub(super) slot_bytes: u64,
    /// Whether memory of that rank's device goes through its host.
    pub(super) staged: bool,
    pub(super) network: Vec<u8>,
    pub(super) inbox: Vec<u8>,
    pub(super) flags: Vec<u8>,
}

impl Address {
    pub(super) fn encode(&self) -> Vec<u8> {
        let head = Writer::new()
            .bytes(&MAGIC)
            .u16(VERSION)
            .u16(BackendId::STAGED.0)
            .u32(self.rank.0)
            .u32(self.staged.into())
            .u64(self.slot_bytes);
        let parts = [&self.network, &self.inbox, &self.flags];
        let bytes =
            parts.into_iter().fold(head, |it, part| it.u64(part.len() as u64).bytes(part)).finish();
        let sum = checksum(&bytes);
        Writer::new().bytes(&bytes).u64(sum).finish()
    }

    /// Parses what `peer` sent; never panics, whatever it is.
    pub(super) fn decode(peer: Rank, bytes: &[u8]) -> Result<Self, Error> {
        let malformed =
            |what: String| Error::of_peer(peer, format_args!("has an address that {what}"));
        let short = |error| malformed(format!("is too short: {error}"));
        let mut reader = Reader::new(bytes);
        let magic: [u8; 4] = reader.array("magic").map_err(short)?;
        if magic != MAGIC {
            return Err(malformed(format!("starts with {magic:02x?}, wanted {MAGIC:02x?}")));
        }
        let version = reader.u16("version").map_err(short)?;
        let backend = BackendId(reader.u16("backend").map_err(short)?);
        if (version, backend) != (VERSION, BackendId::STAGED) {
            return Err(malformed(format!(
                "has version {version} of backend {backend}, wanted {VERSION} of {}",
                BackendId::STAGED
            )));
        }
        let rank = Rank(reader.u32("rank").map_err(short)?);
        let staged = reader.u32("way").map_err(short)? != 0;
        let slot_bytes = reader.u64("slot bytes").map_err(short)?;
        let mut part = |field| -> Result<Vec<u8>, Error> {
            let length = reader.u64(field).map_err(short)?;
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            reader.bytes(field, length).map(<[u8]>::to_vec).map_err(short)
        };
        let (network, inbox) = (part("address of the network")?, part("key of the inbox")?);
        let flags = part("key of the flags")?;
        let summed = &bytes[..bytes.len() - reader.rest().len()];
        let sum = reader.u64("checksum").map_err(short)?;
        if sum != checksum(summed) || !reader.rest().is_empty() {
            return Err(malformed("has a wrong checksum or bytes too many".to_owned()));
        }
        if rank != peer {
            return Err(malformed(format!("is of rank {rank}")));
        }
        Ok(Self { rank, slot_bytes, staged, network, inbox, flags })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_encoding_and_nothing_else_does() {
        let address = Address {
            rank: Rank(3),
            slot_bytes: 4096,
            staged: true,
            network: b"network".to_vec(),
            inbox: Vec::new(),
            flags: b"flags".to_vec(),
        };
        let whole = address.encode();
        assert_eq!(Address::decode(Rank(3), &whole).unwrap(), address);
        for length in 0..whole.len() {
            Address::decode(Rank(3), &whole[..length]).unwrap_err();
        }
        for byte in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[byte] ^= 0x41;
            Address::decode(Rank(3), &flipped).unwrap_err();
        }
        Address::decode(Rank(3), &[&whole[..], &[0]].concat()).unwrap_err();
        let text = Address::decode(Rank(2), &whole).unwrap_err().to_string();
        assert_eq!(text, "rank 2 has an address that is of rank 3");
    }
}
