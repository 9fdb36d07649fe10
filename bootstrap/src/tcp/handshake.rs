//! Encodes the handshake of a TCP connection, in which rank and hub prove that they know the secret
//! of the job.
//!
//! | sender | message | content |
//! | --- | --- | --- |
//! | both | preamble | eight bytes that name the protocol, then four bytes with its version, little endian |
//! | hub | challenge | a random [`Nonce`] |
//! | rank | [`Sealed`] [`Hello`] | the rank, a random nonce of its own, and the proof of this message and of the frames before it |
//! | hub | [`Sealed`] [`HelloReply`] | a welcome or a refusal, and the proof of this message and of the frames before it |
//!
//! The form of the preamble never changes, so that any two versions can tell that they differ. All
//! other messages are frames. A proof is the HMAC-SHA-256 of a label and of the contents of these
//! frames, without their proofs, with the secret as key. It contains the nonces of both sides, so a
//! message of another connection does not pass, and neither side accepts the other without the
//! secret. Without a secret there are no proofs.

use std::fmt;
use std::io::{self, Read};
use std::net::SocketAddr;

use peerlane_hal::Rank;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::super::message::{Blob, RankList};
use super::super::process::ProcessId;
use super::super::secret::Secret;

/// The version of the protocol, which changes with every change of a message.
pub(super) const VERSION: u32 = 8;

/// The maximum length of a frame in the handshake, in bytes, without its length field.
pub(super) const HANDSHAKE_BYTES_MAX: u32 = 4096;

const MAGIC: [u8; 8] = *b"PEERLANE";
const PREAMBLE_BYTES: usize = 12;

/// A random number that is new for each connection, so that a recorded proof is not accepted again.
pub(super) type Nonce = [u8; 32];

/// A random number that identifies a group.
pub(super) type GroupId = [u8; 32];

/// Asks the hub to let a rank join the group.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) nonce: Nonce,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) host: String,
    pub(super) job: Option<String>,
    pub(super) runs_hub: bool,
    /// The address at which other ranks connect to this rank if the group shrinks.
    pub(super) address: Option<SocketAddr>,
    pub(super) process: Option<ProcessId>,
    /// The id of the group that shrinks, if the rank joins the smaller group of a shrink.
    pub(super) shrinks: Option<GroupId>,
}

/// Tells a rank that it has joined, or why the hub has refused it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum HelloReply {
    Welcome { group: GroupId, rank: u32, ranks: u32, process: Option<ProcessId> },
    Refused(Refusal),
}

/// Tells a rank why it cannot join.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Refusal {
    /// The rank's request is malformed or does not prove that the rank knows the secret.
    ///
    /// The rank sees from the proof of the hub what is wrong.
    Unproven,
    Job {
        job: Option<String>,
        hub_job: Option<String>,
    },
    Ranks {
        rank: u32,
        ranks: u32,
        hub_ranks: u32,
    },
    OutOfRange {
        rank: u32,
        ranks: u32,
    },
    Taken {
        rank: u32,
        origin: String,
        same_host: bool,
    },
    Ended {
        cause: String,
        peer: Option<u32>,
    },
    Closing,
    OtherGroup,
    ShrunkWithout {
        rank: u32,
    },
    /// An earlier group of this hub is still ending, so the hub of the next group opens soon.
    Earlier {
        live: Vec<u32>,
    },
    /// The process of the hub has reached a system limit, such as its number of descriptors.
    Exhausted {
        how: String,
        runs_hub: Option<u32>,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unproven => {
                f.write_str("the rank sent no hello that proves that it knows the secret")
            }
            Self::Job { job, hub_job } => write!(
                f,
                "this process belongs to {}, the hub to {}; set MASTER_PORT or PEERLANE_PORT to a different port for \
                 every job, or PEERLANE_JOB_ID to the same id on all ranks",
                job_name(job.as_deref()),
                job_name(hub_job.as_deref())
            ),
            Self::Ranks { rank, ranks, hub_ranks } => write!(
                f,
                "rank {rank} expects {ranks} ranks, the hub expects {hub_ranks}; set the same \
                 WORLD_SIZE on all ranks"
            ),
            Self::OutOfRange { rank, ranks } => write!(
                f,
                "rank {rank} is out of range, expected a rank below {ranks}, the number of ranks"
            ),
            Self::Taken { rank, origin, same_host } => {
                let host = if *same_host { "this host" } else { "another host" };
                write!(
                    f,
                    "another process on {host}, connected from {origin}, is already rank {rank}; \
                     set a different RANK in every process, and a different port for every job"
                )
            }
            // The text of the cause names ranks itself, so `peer` is left out.
            Self::Ended { cause, .. } => write!(f, "the group has already ended: {cause}"),
            Self::Exhausted { how, runs_hub } => match runs_hub {
                Some(rank) => write!(f, "rank {rank} runs the hub, which failed: {how}"),
                None => write!(f, "the hub failed: {how}"),
            },
            Self::Closing => f.write_str("the hub is shutting down"),
            Self::OtherGroup => f.write_str("the hub serves another group"),
            Self::Earlier { live } => {
                let live: Vec<_> = live.iter().copied().map(Rank).collect();
                write!(f, "an earlier group has not ended yet on {}", RankList(&live))
            }
            Self::ShrunkWithout { rank } => write!(
                f,
                "the group has shrunk without rank {rank}, which did not call `shrink` in time"
            ),
        }
    }
}

fn job_name(job: Option<&str>) -> String {
    match job {
        Some(job) => format!("job {job:?}"),
        None => "no job".to_owned(),
    }
}

/// Identifies the sender of a proof, which is a rank or the hub.
///
/// It is a part of the proof, so that a proof of the rank cannot be returned as a proof of the hub,
/// or the reverse.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Rank,
    Hub,
}

/// Carries an encoded message and the proof that its sender knows the secret.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Sealed {
    proof: Option<[u8; 32]>,
    pub(super) message: Blob,
}

/// Tells why a [`Sealed`] message is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpenError {
    NoProof,
    NoSecret,
    /// The process at the other end has another secret, or repeats a message of another connection.
    WrongProof,
    Malformed,
}

impl Sealed {
    /// Encodes `message` and, if there is a secret, adds a proof that also covers the `earlier`
    /// messages.
    pub(super) fn new(
        secret: Option<&Secret>,
        side: Side,
        earlier: &[&[u8]],
        message: &impl Serialize,
    ) -> Self {
        let message = postcard::to_stdvec(message).expect("messages consist of plain data");
        let proof = secret.map(|secret| secret.mac(&parts(side, earlier, &message)).finalize());

        Self { proof, message: Blob(message) }
    }

    /// Verifies the proof in constant time, and then decodes the message.
    pub(super) fn open<T: DeserializeOwned>(
        &self,
        secret: Option<&Secret>,
        side: Side,
        earlier: &[&[u8]],
    ) -> Result<T, OpenError> {
        match (secret, &self.proof) {
            (None, None) => {}
            (None, Some(_)) => return Err(OpenError::NoSecret),
            (Some(_), None) => return Err(OpenError::NoProof),
            (Some(secret), Some(proof)) => {
                let mac = secret.mac(&parts(side, earlier, &self.message.0));
                if !mac.finalize_verify(proof) {
                    return Err(OpenError::WrongProof);
                }
            }
        }

        match postcard::take_from_bytes(&self.message.0) {
            Ok((message, [])) => Ok(message),
            _ => Err(OpenError::Malformed),
        }
    }
}

/// Returns the byte strings that a proof covers, which are a label of the sender and all messages.
fn parts<'a>(side: Side, earlier: &[&'a [u8]], message: &'a [u8]) -> Vec<&'a [u8]> {
    let label: &[u8] = match side {
        Side::Rank => b"peerlane: rank to hub",
        Side::Hub => b"peerlane: hub to rank",
    };

    [&[label], earlier, &[message]].concat()
}

pub(super) fn preamble() -> [u8; PREAMBLE_BYTES] {
    let mut bytes = [0; PREAMBLE_BYTES];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    bytes[MAGIC.len()..].copy_from_slice(&VERSION.to_le_bytes());

    bytes
}

/// Tells why the other end is not a rank or hub of this version.
#[derive(Debug)]
pub(super) enum PreambleError {
    Io(io::Error),
    Foreign(Vec<u8>),
    Version(u32),
}

/// Reads the preamble of the other end, and checks that it has the same protocol and version.
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

        // The first wrong byte ends the read, because another protocol may wait for an answer
        // before it sends twelve bytes.
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
