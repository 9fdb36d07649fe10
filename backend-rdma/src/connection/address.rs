//! Encodes and decodes the address of a rank, which holds the TCP address and the tokens of its service.

use std::fmt;
use std::hint::black_box;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use peerlane_hal::wire::{Reader, Truncated, Writer, checksum};
use peerlane_hal::{BackendId, Rank};
use peerlane_toolkit::Fault;
use rustix::io::retry_on_intr;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::Error;
use crate::options::NICS_MAX;

const MAGIC: [u8; 4] = *b"PLRA";
const VERSION: u16 = 3;
/// The maximum number of bytes of a host or device name in a rank's address; longer names are cut.
const NAME_BYTES_MAX: usize = 255;

/// A random number that only processes know which have the address of a rank.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token([u8; Self::BYTES]);

/// The tokens with which a rank and its peers show each other that they know the address of the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tokens {
    /// The token that a peer sends first.
    pub(crate) peer: Token,
    /// The token that the service answers. A process that has taken the port of a rank that has ended does
    /// not know it.
    pub(crate) service: Token,
}

impl Token {
    pub(super) const BYTES: usize = 16;

    fn random() -> Result<Self, Error> {
        let mut bytes = [0; Self::BYTES];
        retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))
            .map_err(Error::system("ask for random bytes"))?;
        Ok(Self(bytes))
    }

    /// Compares tokens in a time that does not depend on where they differ, unlike a comparison of slices.
    pub(super) fn equals(&self, other: &Self) -> bool {
        let difference = u128::from_ne_bytes(self.0) ^ u128::from_ne_bytes(other.0);
        black_box(difference) == 0
    }

    pub(super) fn write(&self, writer: Writer) -> Writer {
        writer.bytes(&self.0)
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, Truncated> {
        Ok(Self(reader.array("token")?))
    }
}

/// A token is not printed, because an error or a log must not give it away.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Tokens {
    pub(super) fn random() -> Result<Self, Error> {
        Ok(Self { peer: Token::random()?, service: Token::random()? })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) rank: Rank,
    pub(crate) ranks: u32,
    pub(crate) tokens: Tokens,
    pub(crate) service: SocketAddr,
    pub(crate) nics: u16,
    /// The host name of the rank, which is used only in error texts.
    pub(crate) host: String,
    pub(crate) device: String,
}

impl Address {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let ip = match self.service.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let start = Writer::new()
            .bytes(&MAGIC)
            .u16(VERSION)
            .u16(BackendId::RDMA.0)
            .u32(self.rank.0)
            .u32(self.ranks);
        let start = self.tokens.service.write(self.tokens.peer.write(start));
        let start = start.bytes(&ip.octets()).u16(self.service.port()).u16(self.nics);
        let bytes = write_name(write_name(start, &self.host), &self.device).finish();
        let sum = checksum(&bytes);
        Writer::new().bytes(&bytes).u64(sum).finish()
    }

    pub(crate) fn decode(peer: Rank, bytes: &[u8]) -> Result<Self, Error> {
        let malformed = |what: String| Err(Fault::Address { peer, what }.into());
        let short = Error::address(peer);
        let mut reader = Reader::new(bytes);
        let magic: [u8; 4] = reader.array("magic").map_err(&short)?;
        if magic != MAGIC {
            return malformed(format!("it starts with {magic:02x?}, expected {MAGIC:02x?}"));
        }
        let version = reader.u16("version").map_err(&short)?;
        if version != VERSION {
            return malformed(format!("it has version {version}, expected {VERSION}"));
        }
        let backend = BackendId(reader.u16("backend").map_err(&short)?);
        if backend != BackendId::RDMA {
            return malformed(format!(
                "it belongs to the backend {backend}, expected {}",
                BackendId::RDMA
            ));
        }
        let rank = Rank(reader.u32("rank").map_err(&short)?);
        let ranks = reader.u32("number of ranks").map_err(&short)?;
        let peer_token = Token::read(&mut reader).map_err(&short)?;
        let service_token = Token::read(&mut reader).map_err(&short)?;
        let tokens = Tokens { peer: peer_token, service: service_token };
        let ip = Ipv6Addr::from(reader.array::<16>("address of the service").map_err(&short)?);
        let port = reader.u16("port of the service").map_err(&short)?;
        let nics = reader.u16("number of NICs").map_err(&short)?;
        let host = read_name(&mut reader, "name of the host").map_err(&short)?;
        let device = read_name(&mut reader, "name of the device").map_err(&short)?;
        let summed = &bytes[..bytes.len() - reader.rest().len()];
        let sum = reader.u64("checksum").map_err(&short)?;
        // A connection to a wrong address would fail only at its deadline.
        if sum != checksum(summed) {
            return malformed("its checksum is wrong".to_owned());
        }
        if !reader.rest().is_empty() {
            return malformed(format!("it has {} bytes too many", reader.rest().len()));
        }
        if !(1..=NICS_MAX).contains(&usize::from(nics)) {
            return malformed(format!("it names {nics} NICs, expected 1 to {NICS_MAX}"));
        }
        if rank != peer {
            return malformed(format!("it belongs to rank {rank}, expected rank {peer}"));
        }
        let service = SocketAddr::new(ip.to_canonical(), port);
        Ok(Self { rank, ranks, tokens, service, nics, host, device })
    }

    pub(crate) fn location(&self) -> String {
        format!("{} ({}, {})", self.service.ip(), self.host, self.device)
    }
}

fn write_name(writer: Writer, name: &str) -> Writer {
    let bytes = &name.as_bytes()[..name.len().min(NAME_BYTES_MAX)];
    writer.u16(bytes.len() as u16).bytes(bytes)
}

fn read_name(reader: &mut Reader<'_>, field: &'static str) -> Result<String, Truncated> {
    let length = usize::from(reader.u16(field)?);
    Ok(String::from_utf8_lossy(reader.bytes(field, length)?).into_owned())
}

#[cfg(test)]
mod tests {
    use peerlane_hal::{Error as _, ErrorKind};

    use super::*;

    fn address() -> Address {
        Address {
            rank: Rank(2),
            ranks: 4,
            tokens: Tokens { peer: Token([9; 16]), service: Token([8; 16]) },
            service: "10.0.0.7:4711".parse().unwrap(),
            nics: 2,
            host: "node-3".into(),
            device: "rxe0".into(),
        }
    }

    #[test]
    fn an_address_survives_encoding() {
        let address = address();
        assert_eq!(Address::decode(Rank(2), &address.encode()).unwrap(), address);
        assert_eq!(address.location(), "10.0.0.7 (node-3, rxe0)");
    }

    #[test]
    fn tokens_are_random_compared_in_full_and_not_printed() {
        let Tokens { peer, service } = Tokens::random().unwrap();
        assert!(peer.equals(&peer) && !peer.equals(&service));
        for byte in 0..Token::BYTES {
            let mut other = peer;
            other.0[byte] ^= 1;
            assert!(!peer.equals(&other), "byte {byte}");
        }
        assert_eq!(format!("{peer:?}"), "Token(..)");
    }

    #[test]
    fn every_malformed_address_is_refused() {
        let whole = address().encode();
        let kind = |bytes: &[u8]| Address::decode(Rank(2), bytes).map_err(|error| error.kind());
        for length in 0..whole.len() {
            assert_eq!(kind(&whole[..length]), Err(ErrorKind::Mismatch));
        }
        for index in 0..whole.len() {
            for bit in 0..8 {
                let mut changed = whole.clone();
                changed[index] ^= 1 << bit;
                assert_eq!(kind(&changed), Err(ErrorKind::Mismatch), "byte {index}");
            }
        }
        assert_eq!(kind(&[&whole[..], &[0]].concat()), Err(ErrorKind::Mismatch));
        let error = Address::decode(Rank(1), &whole).unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid address of rank 1: it belongs to rank 2, expected rank 1"
        );
    }
}
