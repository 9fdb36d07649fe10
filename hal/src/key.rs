//! Defines remote keys, the bytes that a peer needs to import a region.
//!
//! Every backend's key is in the same envelope: magic, version, backend, generation, length and
//! payload, little-endian. A receiver can identify a key before a backend reads the payload.

use std::fmt;

use crate::error::{Error, ErrorKind};
use crate::wire::{Reader, Truncated, Writer};

/// The first four bytes of every encoded remote key.
pub const KEY_MAGIC: [u8; 4] = *b"PLRK";
/// The version of the remote key header that this build writes and reads.
pub const KEY_VERSION: u16 = 1;

/// The number that identifies a backend in remote keys and addresses.
///
/// This crate assigns the numbers below 0x8000. A backend outside of this repository uses a larger
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackendId(pub u16);

impl BackendId {
    /// The reference backend, which copies between ranks in host memory.
    pub const HOST: Self = Self(1);
    /// The CUDA backend, which copies over NVLink with copy engines.
    pub const CUDA: Self = Self(2);
    /// The ROCm backend, which copies over XGMI with SDMA engines.
    pub const ROCM: Self = Self(3);
    /// The RDMA backend, which uses libibverbs.
    pub const RDMA: Self = Self(4);
    /// The backend that stages device memory through host memory to use another backend's network.
    pub const STAGED: Self = Self(5);
    /// The UCX backend, which uses libucp.
    pub const UCX: Self = Self(6);

    /// Returns the name of the backend, as the option `--backend` of the program accepts it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::HOST => "host",
            Self::CUDA => "cuda",
            Self::ROCM => "rocm",
            Self::RDMA => "rdma",
            Self::STAGED => "staged",
            Self::UCX => "ucx",
            _ => "foreign",
        }
    }
}

impl fmt::Display for BackendId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            "foreign" => write!(f, "{:#06x}", self.0),
            name => f.write_str(name),
        }
    }
}

/// A number that identifies one registration of a region. A process never reuses a number, even for
/// the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u64);

/// The remote key of a region, which a peer needs to import the region.
pub trait RemoteKey: Sized + Send + 'static {
    /// Encodes the remote key into bytes to send to a peer.
    fn encode(&self) -> Vec<u8>;

    /// Decodes a remote key from the bytes that a peer sent. It never panics.
    ///
    /// # Errors
    /// Returns what is wrong with them.
    fn decode(bytes: &[u8]) -> Result<Self, KeyError>;

    /// Returns the length in bytes of the region that a peer imports with this key.
    fn region_bytes(&self) -> u64;

    /// Returns the number that identifies the registered memory behind the key.
    fn generation(&self) -> Generation;
}

/// The header that every encoded remote key has, around the fields of its backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope<'a> {
    /// The number of the backend that wrote the payload.
    pub backend: BackendId,
    /// The number that identifies the registered memory behind the key.
    pub generation: Generation,
    /// The encoded fields of the key that only its backend reads.
    pub payload: &'a [u8],
}

impl<'a> Envelope<'a> {
    /// Encodes the header and the payload of a remote key into bytes.
    ///
    /// # Panics
    /// If the payload is longer than 4 GiB.
    pub fn seal(self) -> Vec<u8> {
        let length = u32::try_from(self.payload.len()).expect("a key is shorter than 4 GiB");
        Writer::new()
            .bytes(&KEY_MAGIC)
            .u16(KEY_VERSION)
            .u16(self.backend.0)
            .u64(self.generation.0)
            .u32(length)
            .bytes(self.payload)
            .finish()
    }

    /// Decodes the header of a remote key, which must belong to `backend`.
    ///
    /// # Errors
    /// Returns what is wrong with the bytes.
    pub fn open(bytes: &'a [u8], backend: BackendId) -> Result<Self, KeyError> {
        let envelope = Self::parse(bytes)?;
        if envelope.backend != backend {
            return Err(KeyError::Backend { expected: backend, found: envelope.backend });
        }
        Ok(envelope)
    }

    /// Decodes the header of a remote key of any backend.
    ///
    /// # Errors
    /// Returns what is wrong with them.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, KeyError> {
        let mut reader = Reader::new(bytes);
        let magic = reader.array("magic")?;
        if magic != KEY_MAGIC {
            return Err(KeyError::Foreign { magic });
        }

        let version = reader.u16("version")?;
        if version != KEY_VERSION {
            return Err(KeyError::Version { found: version });
        }

        let backend = BackendId(reader.u16("backend")?);
        let generation = Generation(reader.u64("generation")?);
        let length = reader.u32("payload length")? as usize;
        let payload = reader.bytes("payload", length)?;
        if !reader.rest().is_empty() {
            return Err(KeyError::Trailing { bytes: reader.rest().len() });
        }
        Ok(Self { backend, generation, payload })
    }
}

/// The reason why bytes from a peer are not a usable remote key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The bytes of the key end before a field is complete.
    #[error("remote key is truncated: {0}")]
    Truncated(#[from] Truncated),
    /// The bytes do not begin with the magic number of a remote key.
    #[error(
        "not a remote key: it starts with the bytes {magic:02x?}, expected {KEY_MAGIC:02x?} \
         (\"PLRK\")"
    )]
    Foreign {
        /// The four bytes that were found instead of the magic number.
        magic: [u8; 4],
    },
    /// The remote key was written by a version of Peerlane with another key header.
    #[error(
        "remote key has version {found}, expected {KEY_VERSION}; run the same Peerlane on all ranks"
    )]
    Version {
        /// The version in the header of the remote key.
        found: u16,
    },
    /// The remote key belongs to another backend than the one that reads it.
    #[error(
        "remote key belongs to the backend {found}, expected {expected}; open the same backend on \
         both ranks"
    )]
    Backend {
        /// The backend that reads the key.
        expected: BackendId,
        /// The backend that wrote the key.
        found: BackendId,
    },
    /// Bytes follow the last field of the key.
    #[error("remote key has {bytes} bytes after its last field, expected none")]
    Trailing {
        /// The number of bytes after the last field.
        bytes: usize,
    },
    /// A field of the remote key has an invalid value.
    #[error("invalid remote key: field `{field}` is {found}, expected {expected}")]
    Field {
        /// The name of the field with the invalid value.
        field: &'static str,
        /// The invalid value that was found.
        found: u64,
        /// The values that are valid for the field, in words.
        expected: &'static str,
    },
}

impl Error for KeyError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::InvalidKey
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed() -> Vec<u8> {
        Envelope { backend: BackendId::HOST, generation: Generation(7), payload: b"body" }.seal()
    }

    #[test]
    fn a_sealed_key_opens() {
        let bytes = sealed();
        let envelope = Envelope::open(&bytes, BackendId::HOST).unwrap();
        assert_eq!((envelope.generation, envelope.payload), (Generation(7), &b"body"[..]));
    }

    #[test]
    fn every_truncation_is_an_error() {
        let bytes = sealed();
        for end in 0..bytes.len() {
            let error = Envelope::open(&bytes[..end], BackendId::HOST).unwrap_err();
            assert!(matches!(error, KeyError::Truncated(_)), "{end} bytes: {error}");
        }
    }

    #[test]
    fn foreign_bytes_are_named() {
        let text = |bytes: &[u8]| Envelope::open(bytes, BackendId::CUDA).unwrap_err().to_string();
        assert_eq!(
            text(b"ELF\x7f and more bytes"),
            "not a remote key: it starts with the bytes [45, 4c, 46, 7f], expected [50, 4c, 52, \
             4b] (\"PLRK\")"
        );
        assert_eq!(
            text(&sealed()),
            "remote key belongs to the backend host, expected cuda; open the same backend on both \
             ranks"
        );
        let mut newer = sealed();
        newer[4] = 9;
        assert_eq!(
            text(&newer),
            "remote key has version 9, expected 1; run the same Peerlane on all ranks"
        );
        let mut longer = sealed();
        longer.push(0);
        let error = Envelope::open(&longer, BackendId::HOST).unwrap_err();
        assert_eq!(error.to_string(), "remote key has 1 bytes after its last field, expected none");
    }
}
