//! Wraps blocks of virtual memory management.

use std::os::fd::{FromRawFd, OwnedFd};

use super::{Answer, cuda};

pub(crate) const POSIX_FD: i32 = 1;
pub(crate) const FABRIC: i32 = 8;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Properties {
    kind: i32,
    handle_types: i32,
    location: [i32; 2],
    rest: [u64; 2],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct Access {
    location: [i32; 2],
    flags: i32,
}

/// A block, released when dropped.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) handle: u64,
    bytes: usize,
}

impl Block {
    pub(crate) fn new(device: i32, bytes: usize, handle_types: i32) -> Answer<Self> {
        let properties =
            Properties { kind: 1, handle_types, location: [1, device], ..Properties::default() };
        let mut handle = 0;
        cuda!(cuMemCreate(
            &mut handle => &mut u64, bytes => usize, &properties => &Properties, 0 => u64,
        ))?;
        Ok(Self { handle, bytes })
    }

    pub(crate) fn import_fd(fd: i32) -> Answer<Self> {
        let mut handle = 0;
        cuda!(cuMemImportFromShareableHandle(
            &mut handle => &mut u64, fd as usize => usize, POSIX_FD => i32,
        ))?;
        Ok(Self { handle, bytes: 0 })
    }

    pub(crate) fn export_fd(&self) -> Answer<OwnedFd> {
        let mut fd = -1;
        cuda!(cuMemExportToShareableHandle(
            &mut fd => &mut i32, self.handle => u64, POSIX_FD => i32, 0 => u64,
        ))?;
        // SAFETY: a new descriptor that belongs to the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The device and the handle types.
    pub(crate) fn properties(&self) -> Answer<(i32, i32)> {
        let mut found = Properties::default();
        cuda!(cuMemGetAllocationPropertiesFromHandle(
            &mut found => &mut Properties, self.handle => u64,
        ))?;
        Ok((found.location[1], found.handle_types))
    }

    /// Maps it somewhere, for a device.
    pub(crate) fn map(&self, device: i32) -> u64 {
        self.map_bytes(device, self.bytes)
    }

    pub(crate) fn map_bytes(&self, device: i32, bytes: usize) -> u64 {
        let address = reserve(bytes);
        map(address, bytes, self.handle).unwrap();
        set_access(address, bytes, device, 3).unwrap();
        address
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        cuda!(cuMemRelease(self.handle => u64)).unwrap();
    }
}

pub(crate) fn reserve(bytes: usize) -> u64 {
    let mut address = 0;
    cuda!(cuMemAddressReserve(
        &mut address => &mut u64, bytes => usize, 0 => usize, 0 => u64, 0 => u64,
    ))
    .unwrap();
    address
}

pub(crate) fn map(address: u64, bytes: usize, handle: u64) -> Answer {
    cuda!(cuMemMap(address => u64, bytes => usize, 0 => usize, handle => u64, 0 => u64))
}

pub(crate) fn unmap(address: u64, bytes: usize) -> Answer {
    cuda!(cuMemUnmap(address => u64, bytes => usize))
}

pub(crate) fn unreserve(address: u64, bytes: usize) -> Answer {
    cuda!(cuMemAddressFree(address => u64, bytes => usize))
}

pub(crate) fn set_access(address: u64, bytes: usize, device: i32, flags: i32) -> Answer {
    let access = Access { location: [1, device], flags };
    cuda!(cuMemSetAccess(address => u64, bytes => usize, &access => &Access, 1 => usize))
}
