//! The first words on a connection.
//!
//! Both ends at once send the preamble: eight bytes that name the protocol, then its version, four
//! bytes little endian. This never changes, so that any two versions can tell that they differ.
//! Then the rank says [`Hello`], and the hub answers.

use std::fmt;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};

/// The version of everything after the preamble.
pub(super) const VERSION: u32 = 1;

/// The most bytes of a frame of the handshake.
pub(super) const HANDSHAKE_BYTES_MAX: u32 = 4096;

const MAGIC: [u8; 8] = *b"PEERLANE";
const PREAMBLE_BYTES: usize = 12;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) host: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Welcome,
    Refused(Refusal),
}

/// Why the hub does not take a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Refusal {
    Ranks { rank: u32, ranks: u32, hub_ranks: u32 },
    OutOfRange { rank: u32, ranks: u32 },
    Taken { rank: u32, origin: String, same_host: bool },
    Over { verdict: String },
    Closing,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ranks { rank, ranks, hub_ranks } => write!(
                f,
                "rank {rank} was started for a group of {ranks} ranks, the hub for one of \
                 {hub_ranks}: WORLD_SIZE must be the same everywhere"
            ),
            Self::OutOfRange { rank, ranks } => write!(
                f,
                "rank {rank} is out of range: the group has {ranks} ranks, numbered from 0"
            ),
            Self::Taken { rank, origin, same_host } => {
                let host = if *same_host { "this host" } else { "another host" };
                write!(
                    f,
                    "rank {rank} is taken already, by a process on {host} that came from {origin}: \
                     RANK must be different in every process, and the port another for every job"
                )
            }
            Self::Over { verdict } => write!(f, "the group is over already: {verdict}"),
            Self::Closing => f.write_str("the hub is closing"),
        }
    }
}

pub(super) fn preamble() -> [u8; PREAMBLE_BYTES] {
    let mut bytes = [0; PREAMBLE_BYTES];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    bytes[MAGIC.len()..].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

/// Why there is no peer of this protocol and version at the other end.
#[derive(Debug)]
pub(super) enum PreambleError {
    Io(io::Error),
    /// What came instead.
    Foreign(Vec<u8>),
    Version(u32),
}

/// Reads the preamble and gives up at the first byte that does not belong there.
pub(super) fn read_preamble(stream: &mut impl Read) -> Result<(), PreambleError> {
    let mut bytes = [0; PREAMBLE_BYTES];
    let mut filled = 0;
    while filled < PREAMBLE_BYTES {
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(PreambleError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(PreambleError::Io(error)),
        }
        let magic = &bytes[..filled.min(MAGIC.len())];
        if !MAGIC.starts_with(magic) {
            return Err(PreambleError::Foreign(bytes[..filled].to_vec()));
        }
    }
    let version = bytes[MAGIC.len()..].try_into().expect("four bytes are left");
    match u32::from_le_bytes(version) {
        VERSION => Ok(()),
        other => Err(PreambleError::Version(other)),
    }
}
