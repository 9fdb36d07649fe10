//! Encodes the remote key of a region, which says who owns the region and how its memory is opened.
//!
//! Descriptors are not part of the key; the importer requests them from the owner's process. It
//! also does so where the key has everything that the driver needs, to check that the memory is
//! still alive.
//!
//! | payload | bytes |
//! | --- | --- |
//! | process token | 16 |
//! | rank, role | 4, 4 |
//! | UUID of the device | 16 |
//! | region bytes | 8 |
//! | access | 4 |
//! | 0, no bytes | |
//! | 1, only in its process: reason | 4 |
//! | 2, segments: bytes before the region, count, length of each | 8, 4, 8 each |
//! | 3, IPC: bytes before the region, handle | 8, 64 |
//! | 4, host memory: bytes before the region in its one descriptor | 8 |
//! | 5, the same, in a file of the caller that is sealed against shrinking | 8 |
//! | 6, the same, in a file of the caller, who has promised not to shorten it | 8 |

use std::marker::PhantomData;

use crate::device::{IpcHandle, Vendor};
use crate::handover::{DESCRIPTORS_MAX, ProcessToken, role_number, role_of};
use crate::mapping::LengthGuard;
use peerlane_hal::Rank;
use peerlane_hal::Role;
use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{Envelope, Generation, KeyError, RemoteKey};

/// A length in bytes that no region reaches, because it is larger than the address space of any
/// device.
const BYTES_MAX: u64 = 1 << 56;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrivateReason {
    /// Mapped device memory whose allocator requested no exportable handle.
    NoHandle,
    /// Memory of a stream-ordered pool, which has no handle for other processes.
    Pool,
    /// Host memory that the caller allocated, which has no file descriptor.
    Host,
}

impl PrivateReason {
    pub(super) fn text<V: Vendor>(self) -> &'static str {
        match self {
            Self::NoHandle => V::NO_HANDLE,
            Self::Pool => V::POOL,
            Self::Host => "the owner registered host memory of its own; use memory from `allocate`",
        }
    }

    const fn to_number(self) -> u32 {
        match self {
            Self::NoHandle => 0,
            Self::Pool => 1,
            Self::Host => 2,
        }
    }

    fn from_number(number: u32) -> Result<Self, KeyError> {
        match number {
            0 => Ok(Self::NoHandle),
            1 => Ok(Self::Pool),
            2 => Ok(Self::Host),
            seen => Err(field("reason of private memory", seen.into(), "0 to 2")),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Nothing,
    Private(PrivateReason),
    Segments {
        /// The offset of the region in the first segment in bytes.
        head: u64,
        segments: Vec<u64>,
    },
    Ipc {
        /// The offset of the region in the allocation in bytes.
        head: u64,
        handle: IpcHandle,
    },
    Host {
        /// The offset of the region in the file in bytes.
        head: u64,
        guard: LengthGuard,
    },
}

/// The remote key that a peer needs to import a region of device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key<V> {
    pub(crate) process: ProcessToken,
    pub(crate) generation: Generation,
    pub(crate) rank: Rank,
    pub(crate) role: Role,
    pub(crate) device: [u8; 16],
    pub(crate) bytes: u64,
    pub(super) access: Access,
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
        let payload = match &self.access {
            Access::Nothing => start.u32(0),
            Access::Private(why) => start.u32(1).u32(why.to_number()),
            Access::Segments { head, segments } => {
                // `export` makes no more segments than an answer of the server has room for.
                let start = start.u32(2).u64(*head).u32(segments.len() as u32);
                segments.iter().fold(start, |start, bytes| start.u64(*bytes))
            }
            Access::Ipc { head, handle } => start.u32(3).u64(*head).bytes(&handle.0),
            Access::Host { head, guard } => start.u32(guard_number(*guard)).u64(*head),
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
        let access = read_access(&mut reader, role, bytes)?;

        if !reader.rest().is_empty() {
            return Err(KeyError::Trailing { bytes: reader.rest().len() });
        }
        let (generation, vendor) = (envelope.generation, PhantomData);
        Ok(Self { process, generation, rank, role, device, bytes, access, vendor })
    }

    fn region_bytes(&self) -> u64 {
        self.bytes
    }

    fn generation(&self) -> Generation {
        self.generation
    }
}

/// Returns the number of the access to host memory in a key.
const fn guard_number(guard: LengthGuard) -> u32 {
    match guard {
        LengthGuard::Allocated => 4,
        LengthGuard::Sealed => 5,
        LengthGuard::Promised => 6,
    }
}

fn field(field: &'static str, found: u64, expected: &'static str) -> KeyError {
    KeyError::Field { field, found, expected }
}

fn read_access(reader: &mut Reader<'_>, role: Role, bytes: u64) -> Result<Access, KeyError> {
    match reader.u32("access")? {
        0 if bytes == 0 => Ok(Access::Nothing),
        0 => Err(field("region bytes", bytes, "0, because the key has no memory")),
        1 => Ok(Access::Private(PrivateReason::from_number(
            reader.u32("reason of private memory")?,
        )?)),
        2 => read_segments(reader, bytes),
        3 => {
            let head = read_head(reader)?;
            Ok(Access::Ipc { head, handle: IpcHandle(reader.array("IPC handle")?) })
        }

        // Host memory: the number says why its file keeps its length.
        4 => read_host(reader, role, LengthGuard::Allocated),
        5 => read_host(reader, role, LengthGuard::Sealed),
        6 => read_host(reader, role, LengthGuard::Promised),
        seen => Err(field("access", seen.into(), "0 to 6")),
    }
}

fn read_host(reader: &mut Reader<'_>, role: Role, guard: LengthGuard) -> Result<Access, KeyError> {
    let head = read_head(reader)?;
    if role == Role::Flags && !head.is_multiple_of(size_of::<u64>() as u64) {
        return Err(field(
            "bytes before the region",
            head,
            "a multiple of 8, because the region holds flags",
        ));
    }
    Ok(Access::Host { head, guard })
}

fn read_head(reader: &mut Reader<'_>) -> Result<u64, KeyError> {
    let head = reader.u64("bytes before the region")?;
    if head > BYTES_MAX {
        return Err(field("bytes before the region", head, "at most 2^56"));
    }
    Ok(head)
}

fn read_segments(reader: &mut Reader<'_>, bytes: u64) -> Result<Access, KeyError> {
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
            return Err(field(
                "length of a segment",
                length,
                "at least 1, and at most 2^56 for all segments",
            ));
        }
        segments.push(length);
    }
    // The sum does not overflow: each is at most 2^56.
    if head + bytes > sum {
        return Err(field(
            "length of all segments",
            sum,
            "at least the sum of `region bytes` and `bytes before the region`",
        ));
    }
    if head >= segments[0] {
        return Err(field(
            "bytes before the region",
            head,
            "less than the length of the first segment",
        ));
    }
    Ok(Access::Segments { head, segments })
}

#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TestVendor;

#[cfg(test)]
impl Vendor for TestVendor {
    const BACKEND: peerlane_hal::BackendId = peerlane_hal::BackendId(0x8001);
    const ALLOCATOR: &'static str = "malloc";
    const NO_HANDLE: &'static str = "it has no handle";
    const POOL: &'static str = "it is of a pool";
}

#[cfg(test)]
impl Key<TestVendor> {
    pub(crate) fn test_key(rank: Rank, device: [u8; 16]) -> Self {
        let (process, generation) = (ProcessToken([9; 16]), Generation(1));
        let access = Access::Segments { head: 0, segments: vec![1 << 21] };
        let (role, bytes, vendor) = (Role::Flags, 32, PhantomData);
        Self { process, generation, rank, role, device, bytes, access, vendor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Key = super::Key<TestVendor>;

    fn key(bytes: u64, access: Access) -> Key {
        Key {
            process: ProcessToken([1; 16]),
            generation: Generation(2),
            rank: Rank(3),
            role: Role::Flags,
            device: [4; 16],
            bytes,
            access,
            vendor: PhantomData,
        }
    }

    fn keys() -> [Key; 7] {
        [
            key(0, Access::Nothing),
            key(5, Access::Private(PrivateReason::Pool)),
            key(30, Access::Segments { head: 9, segments: vec![10, 10, 19] }),
            key(7, Access::Ipc { head: 9, handle: IpcHandle([6; 64]) }),
            key(5, Access::Host { head: 8, guard: LengthGuard::Allocated }),
            key(6, Access::Host { head: 16, guard: LengthGuard::Sealed }),
            key(7, Access::Host { head: 24, guard: LengthGuard::Promised }),
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
        let segments = |head, segments| Access::Segments { head, segments };
        let host = |head, guard| Access::Host { head, guard };
        for (bytes, access, text) in [
            (1, Access::Nothing, "region bytes"),
            (1 << 57, Access::Private(PrivateReason::Pool), "region bytes"),
            (1, segments(0, vec![]), "count of segments"),
            (1, segments(0, vec![0]), "length of a segment"),
            (1, segments(0, vec![u64::MAX, u64::MAX]), "length of a segment"),
            (11, segments(0, vec![10]), "length of all segments"),
            (2, segments(9, vec![10]), "length of all segments"),
            (1, segments(10, vec![10, 10]), "bytes before the region"),
            (1, segments(u64::MAX, vec![10]), "bytes before the region"),
            (
                1,
                Access::Ipc { head: u64::MAX, handle: IpcHandle([0; 64]) },
                "bytes before the region",
            ),
            (8, host(1 << 57, LengthGuard::Allocated), "bytes before the region"),
            (8, host(1 << 57, LengthGuard::Promised), "bytes before the region"),
            (8, host(4, LengthGuard::Allocated), "a multiple of 8, because the region holds flags"),
            (8, host(4, LengthGuard::Sealed), "a multiple of 8, because the region holds flags"),
        ] {
            let error = Key::decode(&key(bytes, access).encode()).unwrap_err().to_string();
            assert!(error.contains(text), "{error}, expected {text}");
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
