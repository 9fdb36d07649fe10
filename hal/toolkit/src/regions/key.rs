//! What a peer needs to import a region: whose it is, how large, and how its memory is opened.
//!
//! Descriptors do not travel in the key; the importer asks the owner's process for them. It asks also
//! where the key has all that the driver wants, to learn whether the memory still lives.
//!
//! | payload | bytes |
//! | --- | --- |
//! | process token | 16 |
//! | rank, role | 4, 4 |
//! | UUID of the device | 16 |
//! | region bytes | 8 |
//! | how it is reached | 4 |
//! | 0, no bytes | |
//! | 1, only in its process: why | 4 |
//! | 2, segments: bytes before the region, count, length of each | 8, 4, 8 each |
//! | 3, IPC: bytes before the region, handle | 8, 64 |
//! | 4, memory of the host, as one descriptor | |

use std::marker::PhantomData;

use super::device::Vendor;
use crate::device::IpcHandle;
use crate::handover::{DESCRIPTORS_MAX, ProcessToken, role_number, role_of};
use peerlane_hal::Rank;
use peerlane_hal::Role;
use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{Envelope, Generation, KeyError, RemoteKey};

/// Larger than any address space of a device.
const BYTES_MAX: u64 = 1 << 56;

/// Why memory stays in its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// Mapped memory whose allocator asked for no handle that leaves the process.
    NoHandle,
    /// Memory of a stream-ordered pool.
    Pool,
    /// The caller's own memory of the host.
    Host,
}

impl Why {
    /// What stands against it, and what to do.
    pub(super) fn text<V: Vendor>(self) -> &'static str {
        match self {
            Self::NoHandle => V::NO_HANDLE,
            Self::Pool => V::POOL,
            Self::Host => {
                "it is host memory of its own process; use memory that a fabric allocates"
            }
        }
    }

    const fn number(self) -> u32 {
        match self {
            Self::NoHandle => 0,
            Self::Pool => 1,
            Self::Host => 2,
        }
    }

    fn of(number: u32) -> Result<Self, KeyError> {
        match number {
            0 => Ok(Self::NoHandle),
            1 => Ok(Self::Pool),
            2 => Ok(Self::Host),
            seen => Err(field("reason of private memory", seen.into(), "0 to 2")),
        }
    }
}

/// How a region is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// It has no bytes.
    Nothing,
    /// Only in the process of its owner.
    Private(Why),
    /// Physical memory, handed over as descriptors and mapped one behind the other.
    Segments {
        /// Bytes of the first segment that lie before the region.
        head: u64,
        /// The length of each.
        segments: Vec<u64>,
    },
    /// A whole allocation, by its IPC handle.
    Ipc {
        /// Bytes of the allocation that lie before the region.
        head: u64,
        /// The driver's handle.
        handle: IpcHandle,
    },
    /// Memory of the host, handed over as a descriptor.
    Host {
        /// Bytes of the descriptor that lie before the region.
        head: u64,
    },
}

/// The bytes that let a peer import a region of device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key<V> {
    pub(crate) process: ProcessToken,
    pub(crate) generation: Generation,
    pub(crate) rank: Rank,
    pub(crate) role: Role,
    /// UUID of the device.
    pub(crate) device: [u8; 16],
    pub(crate) bytes: u64,
    pub(super) reach: Reach,
    pub(super) vendor: PhantomData<V>,
}

impl<V: Vendor> RemoteKey for Key<V> {
    fn encode(&self) -> Vec<u8> {
        let start = Writer::new()
            .bytes(&self.process.0)
            .u32(self.rank.0)
            .u32(role_number(self.role))
            .bytes(&self.device)
            .u64(self.bytes);
        let payload = match &self.reach {
            Reach::Nothing => start.u32(0),
            Reach::Private(why) => start.u32(1).u32(why.number()),
            Reach::Segments { head, segments } => {
                // `export` makes no more segments than an answer of the server has room for.
                let start = start.u32(2).u64(*head).u32(segments.len() as u32);
                segments.iter().fold(start, |start, bytes| start.u64(*bytes))
            }
            Reach::Ipc { head, handle } => start.u32(3).u64(*head).bytes(&handle.0),
            Reach::Host { head } => start.u32(4).u64(*head),
        };
        let payload = payload.finish();
        Envelope { backend: V::BACKEND, generation: self.generation, payload: &payload }.seal()
    }

    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let envelope = Envelope::open(bytes, V::BACKEND)?;
        let mut reader = Reader::new(envelope.payload);
        let process = ProcessToken(reader.array("process token")?);
        let rank = Rank(reader.u32("rank")?);
        let role = role_of(reader.u32("role")?)?;
        let device = reader.array("device")?;
        let bytes = reader.u64("region bytes")?;
        if bytes > BYTES_MAX {
            return Err(field("region bytes", bytes, "at most 2^56"));
        }
        let reach = read_reach(&mut reader, role, bytes)?;
        if !reader.rest().is_empty() {
            return Err(KeyError::Trailing { bytes: reader.rest().len() });
        }
        let (generation, vendor) = (envelope.generation, PhantomData);
        Ok(Self { process, generation, rank, role, device, bytes, reach, vendor })
    }

    fn region_bytes(&self) -> u64 {
        self.bytes
    }

    fn generation(&self) -> Generation {
        self.generation
    }
}

fn field(field: &'static str, seen: u64, wanted: &'static str) -> KeyError {
    KeyError::Field { field, seen, wanted }
}

fn read_reach(reader: &mut Reader<'_>, role: Role, bytes: u64) -> Result<Reach, KeyError> {
    match reader.u32("reach")? {
        0 if bytes == 0 => Ok(Reach::Nothing),
        0 => Err(field("region bytes", bytes, "0, as there is no memory")),
        1 => Ok(Reach::Private(Why::of(reader.u32("reason of private memory")?)?)),
        2 => read_segments(reader, bytes),
        3 => {
            let head = read_head(reader)?;
            Ok(Reach::Ipc { head, handle: IpcHandle(reader.array("IPC handle")?) })
        }
        4 => {
            let head = read_head(reader)?;
            if role == Role::Flags && !head.is_multiple_of(size_of::<u64>() as u64) {
                return Err(field("bytes before the region", head, "aligned, as there are flags"));
            }
            Ok(Reach::Host { head })
        }
        seen => Err(field("reach", seen.into(), "0 to 4")),
    }
}

fn read_head(reader: &mut Reader<'_>) -> Result<u64, KeyError> {
    let head = reader.u64("bytes before the region")?;
    if head > BYTES_MAX {
        return Err(field("bytes before the region", head, "at most 2^56"));
    }
    Ok(head)
}

fn read_segments(reader: &mut Reader<'_>, bytes: u64) -> Result<Reach, KeyError> {
    let head = read_head(reader)?;
    let count = reader.u32("count of segments")?;
    if count == 0 || count > DESCRIPTORS_MAX {
        return Err(field("count of segments", count.into(), "1 to 65536"));
    }
    let mut segments = Vec::new();
    let mut sum = 0_u64;
    for _ in 0..count {
        let length = reader.u64("length of a segment")?;
        sum = sum.saturating_add(length);
        if length == 0 || sum > BYTES_MAX {
            return Err(field("length of a segment", length, "at least 1, and 2^56 for all"));
        }
        segments.push(length);
    }
    // No sum of the two overflows: each is at most 2^56.
    if head + bytes > sum {
        return Err(field(
            "length of all segments",
            sum,
            "at least the region and what is before it",
        ));
    }
    if head >= segments[0] {
        return Err(field("bytes before the region", head, "less than the first segment"));
    }
    Ok(Reach::Segments { head, segments })
}

/// A vendor for tests.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Trial;

#[cfg(test)]
impl Vendor for Trial {
    const BACKEND: peerlane_hal::BackendId = peerlane_hal::BackendId(0x8001);
    const ALLOCATOR: &'static str = "malloc";
    const NO_HANDLE: &'static str = "it has no handle";
    const POOL: &'static str = "it is of a pool";
}

#[cfg(test)]
impl Key<Trial> {
    /// Of 4 flags.
    pub(crate) fn trial(rank: Rank, device: [u8; 16]) -> Self {
        let (process, generation) = (ProcessToken([9; 16]), Generation(1));
        let reach = Reach::Segments { head: 0, segments: vec![1 << 21] };
        let (role, bytes, vendor) = (Role::Flags, 32, PhantomData);
        Self { process, generation, rank, role, device, bytes, reach, vendor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Key = super::Key<Trial>;

    fn key(bytes: u64, reach: Reach) -> Key {
        Key {
            process: ProcessToken([1; 16]),
            generation: Generation(2),
            rank: Rank(3),
            role: Role::Flags,
            device: [4; 16],
            bytes,
            reach,
            vendor: PhantomData,
        }
    }

    fn keys() -> [Key; 5] {
        [
            key(0, Reach::Nothing),
            key(5, Reach::Private(Why::Pool)),
            key(30, Reach::Segments { head: 9, segments: vec![10, 10, 19] }),
            key(7, Reach::Ipc { head: 9, handle: IpcHandle([6; 64]) }),
            key(5, Reach::Host { head: 8 }),
        ]
    }

    #[test]
    fn a_key_survives_encoding() {
        for key in keys() {
            assert_eq!(Key::decode(&key.encode()), Ok(key));
        }
    }

    #[test]
    fn every_truncation_and_every_longer_one_is_an_error() {
        for key in keys() {
            let whole = key.encode();
            for length in 0..whole.len() {
                Key::decode(&whole[..length]).expect_err("truncated");
            }
            Key::decode(&[&whole[..], &[0]].concat()).expect_err("too long");
        }
    }

    #[test]
    fn impossible_fields_are_named() {
        let segments = |head, segments| Reach::Segments { head, segments };
        for (bytes, reach, text) in [
            (1, Reach::Nothing, "region bytes"),
            (1 << 57, Reach::Private(Why::Pool), "region bytes"),
            (1, segments(0, vec![]), "count of segments"),
            (1, segments(0, vec![0]), "length of a segment"),
            (1, segments(0, vec![u64::MAX, u64::MAX]), "length of a segment"),
            (11, segments(0, vec![10]), "length of all segments"),
            (2, segments(9, vec![10]), "length of all segments"),
            (1, segments(10, vec![10, 10]), "bytes before the region"),
            (1, segments(u64::MAX, vec![10]), "bytes before the region"),
            (
                1,
                Reach::Ipc { head: u64::MAX, handle: IpcHandle([0; 64]) },
                "bytes before the region",
            ),
            (8, Reach::Host { head: 1 << 57 }, "bytes before the region"),
            (8, Reach::Host { head: 4 }, "aligned, as there are flags"),
        ] {
            let error = Key::decode(&key(bytes, reach).encode()).unwrap_err().to_string();
            assert!(error.contains(text), "{error}, wanted {text}");
        }
    }

    #[test]
    fn no_change_of_a_byte_panics() {
        for key in keys() {
            let whole = key.encode();
            for index in 0..whole.len() {
                for value in [0, 1, 0x7f, 0x80, 0xff] {
                    let mut changed = whole.clone();
                    changed[index] = value;
                    let _ = Key::decode(&changed);
                }
            }
        }
    }
}
