//! Lists the devices of this machine, and allocates, shares and accesses their memory. It is the
//! only file that touches raw memory.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::Rank;
use peerlane_toolkit::mapping::{self, LengthGuard, MappedSpan, Mapping};

use crate::Error;

/// A device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The name of the device, for people.
    pub name: String,
}

/// Lists the devices of this machine.
///
/// # Errors
/// None yet. Return [`Error::Unavailable`] with what to install if the vendor's library is missing.
pub fn discover() -> Result<Vec<Device>, Error> {
    Ok(vec![Device { name: "a queue in this process".to_owned() }])
}

/// Memory of the device that other processes can map.
#[derive(Debug)]
pub(crate) enum Allocation {
    Own(Mapping),
    /// A part of an allocation of another fabric.
    Part(MappedSpan),
}

impl Allocation {
    /// Allocates zeroed memory, and returns its address.
    pub(crate) fn zeroed(owner: Rank, bytes: u64) -> Result<(u64, Self), Error> {
        let mapping = Mapping::create(bytes).map_err(Error::of_mapping(owner))?;
        Ok((address(mapping.base()), Self::Own(mapping)))
    }

    /// Returns the shared allocation that contains memory of the caller, or `None` if other
    /// processes cannot map that memory.
    pub(crate) fn holding(base: NonNull<u8>, bytes: u64) -> Option<Self> {
        mapping::find(base, bytes).map(Self::Part)
    }

    /// Maps memory of another process, and returns its address here.
    pub(crate) fn import(
        peer: Rank,
        descriptor: OwnedFd,
        (head, bytes): (u64, u64),
        guard: LengthGuard,
    ) -> Result<(u64, Self), Error> {
        let mapped = Mapping::import(descriptor, head, bytes, guard);
        let mapped = mapped.map_err(Error::of_mapping(peer));
        let (mapping, offset) = mapped?;
        Ok((address(mapping.base()) + offset as u64, Self::Own(mapping)))
    }

    /// Returns the offset of the memory from the beginning of its file descriptor, in bytes.
    pub(crate) fn head(&self) -> u64 {
        match self {
            Self::Own(_) => 0,
            Self::Part(part) => part.head,
        }
    }

    /// Returns why the file of the memory keeps its length.
    pub(crate) fn guard(&self) -> LengthGuard {
        match self {
            Self::Own(mapping) => mapping.guard(),
            Self::Part(part) => part.guard(),
        }
    }

    pub(crate) fn descriptor(&self) -> std::io::Result<OwnedFd> {
        match self {
            Self::Own(mapping) => mapping.fd().try_clone_to_owned(),
            Self::Part(part) => part.fd().try_clone_to_owned(),
        }
    }
}

pub(crate) fn address(base: NonNull<u8>) -> u64 {
    base.as_ptr().expose_provenance() as u64
}

pub(crate) fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Copies bytes between two addresses of the device.
///
/// # Safety
/// Both ranges are in registered regions that live, and do not overlap.
pub(crate) unsafe fn copy(dst: u64, src: u64, bytes: u64) {
    // SAFETY: the caller's.
    unsafe { pointer(src).copy_to_nonoverlapping(pointer(dst), bytes as usize) }
}

/// Stores a flag, after everything that this thread has copied.
///
/// # Safety
/// The address is that of a flag in a registered region that lives.
pub(crate) unsafe fn store(flag: u64, value: u64) {
    // SAFETY: the caller's; flags are aligned words that engines access as atomics only.
    unsafe { AtomicU64::from_ptr(pointer(flag).cast()) }.store(value, Ordering::Release);
}

/// Loads a flag, before everything that this thread copies next.
///
/// # Safety
/// As [`store`].
pub(crate) unsafe fn load(flag: u64) -> u64 {
    // SAFETY: the caller's.
    unsafe { AtomicU64::from_ptr(pointer(flag).cast()) }.load(Ordering::Acquire)
}
