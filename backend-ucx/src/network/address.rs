//! Encodes the address of a rank: its host, its version of UCX, and the address of its worker.

use peerlane_hal::Rank;
use peerlane_hal::wire::{Reader, Truncated, Writer, checksum};
use peerlane_toolkit::Fault;
use peerlane_toolkit::handover::Host;

const MAGIC: [u8; 4] = *b"PLUA";
const VERSION: u16 = 1;

/// The address that a rank publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) rank: Rank,
    pub(crate) ranks: u32,
    /// The number that messages to the rank begin with.
    pub(crate) token: u64,
    /// The version of UCX, such as `1.13.1`.
    pub(crate) version: String,
    pub(crate) host: Host,
    /// The network devices with their IP addresses, for error texts.
    pub(crate) interfaces: String,
    /// The address of the worker of the rank.
    pub(crate) worker: Vec<u8>,
}

impl Address {
    /// Returns where the rank is, for error texts.
    pub(crate) fn location(&self) -> String {
        if self.interfaces.is_empty() {
            return self.host.name().to_owned();
        }
        format!("{} ({})", self.host.name(), self.interfaces)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let writer = Writer::new().bytes(&MAGIC).u16(VERSION).u32(self.rank.0).u32(self.ranks);
        let writer = self.host.write(writer.u64(self.token));
        let texts = [&self.version, &self.interfaces].map(String::as_bytes);
        let fields = texts.into_iter().chain([&*self.worker]);
        let field = |writer: Writer, bytes: &[u8]| writer.u32(bytes.len() as u32).bytes(bytes);
        let bytes = fields.fold(writer, field).finish();
        let sum = checksum(&bytes);
        Writer::new().bytes(&bytes).u64(sum).finish()
    }

    /// Decodes the address of `peer`.
    ///
    /// UCX believes what an address of a worker says, so a checksum finds bytes that were changed.
    pub(crate) fn decode(peer: Rank, bytes: &[u8]) -> Result<Self, Fault> {
        let malformed = |what: String| Fault::Address { peer, what };
        let short = |truncated: Truncated| Fault::Address { peer, what: truncated.to_string() };
        let mut reader = Reader::new(bytes);
        let magic: [u8; 4] = reader.array("magic").map_err(short)?;
        if magic != MAGIC {
            let text = format!("it starts with the bytes {magic:02x?}, expected {MAGIC:02x?}");
            return Err(malformed(text));
        }
        let version = reader.u16("version").map_err(short)?;
        if version != VERSION {
            return Err(malformed(format!(
                "it has version {version}, expected {VERSION}; run the same Peerlane on all ranks"
            )));
        }
        let rank = Rank(reader.u32("rank").map_err(short)?);
        if rank != peer {
            return Err(malformed(format!("it belongs to rank {rank}, expected rank {peer}")));
        }

        let ranks = reader.u32("number of ranks").map_err(short)?;
        let token = reader.u64("token").map_err(short)?;
        let host = Host::read(&mut reader).map_err(short)?;
        let mut field = |name| {
            let length = reader.u32(name).map_err(short)? as usize;
            reader.bytes(name, length).map_err(short)
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let version = text(field("version of UCX")?);
        let interfaces = text(field("interfaces")?);
        let worker = field("worker")?.to_vec();
        let sum = reader.u64("checksum").map_err(short)?;
        if !reader.rest().is_empty() {
            let text = format!("{} bytes follow its last field", reader.rest().len());
            return Err(malformed(format!("{text}, expected none")));
        }
        if sum != checksum(&bytes[..bytes.len() - size_of_val(&sum)]) {
            return Err(malformed("its checksum is of other bytes".to_owned()));
        }
        Ok(Self { rank, ranks, token, version, host, interfaces, worker })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> Address {
        Address {
            rank: Rank(2),
            ranks: 4,
            token: 77,
            version: "1.13.1".into(),
            host: Host::own().clone(),
            interfaces: "eth0 10.0.0.2".into(),
            worker: vec![1, 2, 3],
        }
    }

    #[test]
    fn an_address_survives_encoding() {
        assert_eq!(Address::decode(Rank(2), &address().encode()), Ok(address()));
        let host = Host::own().name();
        assert_eq!(address().location(), format!("{host} (eth0 10.0.0.2)"));
    }

    #[test]
    fn every_malformed_address_is_refused() {
        let whole = address().encode();
        for length in 0..whole.len() {
            Address::decode(Rank(2), &whole[..length]).unwrap_err();
        }
        for index in 0..whole.len() {
            let mut changed = whole.clone();
            changed[index] ^= 0xff;
            Address::decode(Rank(2), &changed).unwrap_err();
        }
        Address::decode(Rank(2), &[&whole[..], &[0]].concat()).unwrap_err();
        let error = Address::decode(Rank(1), &whole).unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid address of rank 1: it belongs to rank 2, expected rank 1"
        );
    }
}
