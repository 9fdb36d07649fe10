//! Names allocations, so that other processes can open them while their owner lives.
//!
//! The name holds the owner's process and descriptor, and the token of the memory. Opening uses the
//! kernel's list of the owner's descriptors, so the owner need not answer. The token shows whether
//! the descriptor's number has been reused.

use std::fs::OpenOptions;
use std::os::fd::OwnedFd;

use super::backing::{Backing, Identity};
use crate::device::settings::Setting;

/// The bytes of a name.
pub(crate) const NAME_BYTES: usize = 64;
/// Behind magic, process, descriptor and token.
const OFFSET_AT: usize = 32;
const MAGIC: [u8; 8] = *b"simshar1";

/// Why memory cannot be opened by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CannotOpen {
    /// These bytes name nothing.
    Malformed,
    /// It was named by this very process.
    OwnProcess,
    /// The owner is gone, or has freed it.
    Stale,
    /// The kernel does not let this process.
    Refused,
}

/// The name of memory of this process.
pub(crate) fn name(backing: &Backing) -> [u8; NAME_BYTES] {
    let mut name = [0; NAME_BYTES];
    let fields: [&[u8]; 4] = [
        &MAGIC,
        &std::process::id().to_le_bytes(),
        &backing.raw_fd().to_le_bytes(),
        &backing.identity().token.to_le_bytes(),
    ];
    let mut at = 0;
    for field in fields {
        name[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    }
    name
}

/// The name with how far behind the base it points.
pub(crate) fn with_offset(mut name: [u8; NAME_BYTES], offset: u64) -> [u8; NAME_BYTES] {
    name[OFFSET_AT..OFFSET_AT + 8].copy_from_slice(&offset.to_le_bytes());
    name
}

/// How far behind the base a name points.
pub(crate) fn offset(name: &[u8; NAME_BYTES]) -> u64 {
    u64::from_le_bytes(field(name, OFFSET_AT))
}

/// The token in a name: one allocation, one token.
pub(crate) fn token(name: &[u8; NAME_BYTES]) -> u128 {
    u128::from_le_bytes(field(name, 16))
}

/// Opens what another process named.
pub(crate) fn open(name: &[u8; NAME_BYTES]) -> Result<Backing, CannotOpen> {
    if field(name, 0) == MAGIC && u32::from_le_bytes(field(name, 8)) == std::process::id() {
        return Err(CannotOpen::OwnProcess);
    }
    open_any(name)
}

/// Opens what any process named, this one as well.
pub(crate) fn open_any(name: &[u8; NAME_BYTES]) -> Result<Backing, CannotOpen> {
    if field(name, 0) != MAGIC {
        return Err(CannotOpen::Malformed);
    }
    if Setting::LegacyShare.is("refused") {
        return Err(CannotOpen::Refused);
    }
    let (process, number) =
        (u32::from_le_bytes(field(name, 8)), i32::from_le_bytes(field(name, 12)));
    let path = format!("/proc/{process}/fd/{number}");
    let opened = OpenOptions::new().read(true).write(true).open(path);
    let fd = OwnedFd::from(opened.map_err(|_| CannotOpen::Stale)?);
    match Identity::of(&fd) {
        Some(identity) if identity.token == token(name) => {
            Backing::open(fd).ok_or(CannotOpen::Stale)
        }
        _ => Err(CannotOpen::Stale),
    }
}

fn field<const N: usize>(name: &[u8; NAME_BYTES], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&name[at..at + N]);
    field
}
