//! Implements virtual memory management: physical blocks, address ranges, and access to mappings.
//!
//! These calls need no current context.

use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};

use super::code::{
    INVALID_DEVICE, INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED, OUT_OF_MEMORY, Outcome,
};
use super::out::{Out, store};
use super::{Api, blocks};
use crate::device::machine::memory;
use crate::device::memory::share::{self, NAME_BYTES};
use crate::device::memory::{Backing, Kind, granularity, new_backing};
use crate::device::settings::{Setting, reaches};

/// A location, in the layout of both vendors.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// Properties of a block, in the layout of both vendors.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Properties {
    pub(crate) kind: c_int,
    pub(crate) requested_handle_types: c_int,
    pub(crate) location: Location,
    pub(crate) win32_handle_meta_data: usize,
    /// Compression, RDMA, usage and what is reserved: not simulated.
    pub(crate) flags: [u8; 8],
}

/// Access to a mapping, in the layout of both vendors.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) location: Location,
    pub(crate) flags: c_int,
}

const _: () = {
    assert!(size_of::<Properties>() == 32);
    assert!(size_of::<Access>() == 12);
};

const ALLOCATION_PINNED: c_int = 1;
const LOCATION_DEVICE: c_int = 1;
pub(crate) const HANDLE_POSIX_FD: c_int = 1;
const HANDLE_FABRIC: c_int = 8;
const RANGE_DMA_BUF: c_int = 1;
const ACCESS_READ_WRITE: c_int = 3;

fn supported<A: Api>() -> Outcome {
    A::visible()?;
    if Setting::VirtualMemory.is_on() { Ok(()) } else { Err(NOT_SUPPORTED) }
}

/// Checks properties. Returns their device, and the kinds of handles that can be exported.
fn checked<A: Api>(prop: Option<&Properties>) -> Outcome<(u32, c_int)> {
    let prop = prop.ok_or(INVALID_VALUE)?;
    let sound = prop.kind == ALLOCATION_PINNED
        && prop.location.kind == LOCATION_DEVICE
        && prop.win32_handle_meta_data == 0;
    let known = HANDLE_POSIX_FD | HANDLE_FABRIC;
    if !sound || prop.requested_handle_types & !known != 0 {
        return Err(INVALID_VALUE);
    }
    let posix = prop.requested_handle_types & HANDLE_POSIX_FD != 0;
    let fabric = prop.requested_handle_types & HANDLE_FABRIC != 0;
    if posix && !Setting::Descriptors.is_on() || fabric && Setting::FabricHandles.is("none") {
        return Err(NOT_SUPPORTED);
    }
    Ok((A::physical(prop.location.id)?, prop.requested_handle_types))
}

/// Fails unless all values are multiples of the granularity.
fn whole(values: &[u64]) -> Outcome {
    let unit = granularity();
    if values.iter().all(|value| value.is_multiple_of(unit)) { Ok(()) } else { Err(INVALID_VALUE) }
}

pub(crate) fn granularity_of<A: Api>(
    out: Out<'_, usize>,
    prop: Option<&Properties>,
    option: c_int,
) -> Outcome {
    supported::<A>()?;
    checked::<A>(prop)?;
    if !matches!(option, 0 | 1) {
        return Err(INVALID_VALUE);
    }
    store(out, granularity() as usize)
}

pub(crate) fn create<A: Api>(
    handle: Out<'_, u64>,
    bytes: usize,
    prop: Option<&Properties>,
    flags: c_ulonglong,
) -> Outcome {
    supported::<A>()?;
    let (device, kinds) = checked::<A>(prop)?;
    whole(&[bytes as u64])?;
    if bytes == 0 || flags != 0 || handle.is_none() {
        return Err(INVALID_VALUE);
    }
    if kinds & HANDLE_FABRIC != 0 && Setting::FabricHandles.is("refused") {
        // As on a node where no IMEX channel was created for this user.
        return Err(NOT_PERMITTED);
    }
    let backing = new_backing(device, bytes as u64, kinds.cast_unsigned())?;
    store(handle, blocks::insert(backing))
}

pub(crate) fn release<A: Api>(handle: u64) -> Outcome {
    supported::<A>().and_then(|()| blocks::release(handle))
}

pub(crate) fn reserve<A: Api>(
    address: Out<'_, u64>,
    bytes: usize,
    alignment: usize,
    flags: c_ulonglong,
) -> Outcome {
    supported::<A>()?;
    whole(&[bytes as u64])?;
    let aligned = alignment == 0 || alignment.is_power_of_two();
    if bytes == 0 || flags != 0 || !aligned || address.is_none() {
        return Err(INVALID_VALUE);
    }
    store(address, memory().reserve(bytes as u64, alignment as u64)?)
}

pub(crate) fn free<A: Api>(address: u64, bytes: usize) -> Outcome {
    supported::<A>()?;
    Ok(memory().unreserve(address, bytes as u64)?)
}

pub(crate) fn map<A: Api>(
    address: u64,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: c_ulonglong,
) -> Outcome {
    supported::<A>()?;
    let backing = blocks::find(handle)?;
    whole(&[address, bytes as u64, offset as u64])?;
    let end = (offset as u64).checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
    // The vendor maps only from the start of a block.
    if bytes == 0 || offset != 0 || flags != 0 || end > backing.bytes() {
        return Err(INVALID_VALUE);
    }
    Ok(memory().map(address, bytes as u64, offset as u64, handle, backing)?)
}

pub(crate) fn unmap<A: Api>(address: u64, bytes: usize) -> Outcome {
    supported::<A>()?;
    Ok(memory().unmap(address, bytes as u64)?)
}

pub(crate) fn set_access<A: Api>(
    address: u64,
    bytes: usize,
    descriptions: *const Access,
    count: usize,
) -> Outcome {
    supported::<A>()?;
    if descriptions.is_null() || count == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller gives an array of this length.
    let descriptions = unsafe { std::slice::from_raw_parts(descriptions, count) };
    let pieces = memory().pieces(address, bytes as u64);
    let filled: u64 = pieces.iter().map(|piece| piece.bytes).sum();
    if pieces.is_empty() || filled != bytes as u64 {
        return Err(INVALID_VALUE);
    }
    for description in descriptions {
        if description.location.kind != LOCATION_DEVICE {
            return Err(INVALID_VALUE);
        }
        let device = A::physical(description.location.id)?;
        if !pieces.iter().all(|piece| reaches(device, piece.device())) {
            return Err(INVALID_DEVICE);
        }
        let access = match description.flags {
            0 => false,
            ACCESS_READ_WRITE => true,
            // To read only is not supported by the vendor either.
            _ => return Err(INVALID_VALUE),
        };
        pieces.iter().for_each(|piece| piece.allow(device, access));
    }
    Ok(())
}

/// What travels is a descriptor of the block's memory, or the name of it.
pub(crate) fn export<A: Api>(
    out: *mut c_void,
    handle: u64,
    kind: c_int,
    flags: c_ulonglong,
) -> Outcome {
    supported::<A>()?;
    let backing = blocks::find(handle)?;
    let asked = backing.identity().handle_kinds & kind.cast_unsigned() != 0;
    if out.is_null() || flags != 0 || !asked {
        return Err(INVALID_VALUE);
    }
    match kind {
        HANDLE_POSIX_FD => {
            let fd = backing.duplicate().ok_or(OUT_OF_MEMORY)?;
            // SAFETY: for this kind the caller gives the place of an int.
            unsafe { out.cast::<c_int>().write(fd.into_raw_fd()) };
        }
        HANDLE_FABRIC => {
            // SAFETY: for this kind the caller gives the place of 64 bytes.
            unsafe { out.cast::<[u8; NAME_BYTES]>().write(share::name(&backing)) };
        }
        _ => return Err(INVALID_VALUE),
    }
    Ok(())
}

pub(crate) fn import<A: Api>(out: Out<'_, u64>, shared: *mut c_void, kind: c_int) -> Outcome {
    supported::<A>()?;
    if out.is_none() {
        return Err(INVALID_VALUE);
    }
    let backing = match kind {
        // The descriptor itself, in place of a pointer; it stays the caller's.
        HANDLE_POSIX_FD => import_fd(shared as usize)?,
        HANDLE_FABRIC if !shared.is_null() => {
            // SAFETY: for this kind the caller gives 64 bytes.
            let name = unsafe { shared.cast::<[u8; NAME_BYTES]>().read() };
            share::open(&name).map_err(|_| INVALID_VALUE)?
        }
        _ => return Err(INVALID_VALUE),
    };
    store(out, blocks::insert(backing))
}

fn import_fd(number: usize) -> Outcome<Backing> {
    let number = RawFd::try_from(number).ok().filter(|fd| *fd >= 0).ok_or(INVALID_VALUE)?;
    // SAFETY: borrowed for one call, and a number that is not open only makes that call fail.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let duplicate = fd.try_clone_to_owned().map_err(|_| INVALID_VALUE)?;
    Backing::open(duplicate).ok_or(INVALID_VALUE)
}

pub(crate) fn retain<A: Api>(out: Out<'_, u64>, address: *mut c_void) -> Outcome {
    supported::<A>()?;
    let range = memory().find(address as u64).ok_or(INVALID_VALUE)?;
    let Kind::Mapped { block } = range.kind else { return Err(INVALID_VALUE) };
    blocks::retain(block)?;
    store(out, block)
}

pub(crate) fn properties<A: Api>(out: Out<'_, Properties>, handle: u64) -> Outcome {
    supported::<A>()?;
    let identity = blocks::find(handle)?.identity();
    store(
        out,
        Properties {
            kind: ALLOCATION_PINNED,
            requested_handle_types: identity.handle_kinds.cast_signed(),
            location: Location {
                kind: LOCATION_DEVICE,
                // Of a device that this process does not see there is no number.
                id: A::ordinal(identity.device).unwrap_or(-1),
            },
            win32_handle_meta_data: 0,
            flags: [0; 8],
        },
    )
}

/// Exports memory for a NIC as a dma-buf.
///
/// The descriptor covers the whole allocation, so only an address range that starts at its base can
/// be exported.
pub(crate) fn export_range<A: Api>(
    out: *mut c_void,
    address: u64,
    bytes: usize,
    kind: c_int,
    flags: c_ulonglong,
) -> Outcome {
    A::ready()?;
    if !Setting::DmaBuf.is_on() {
        return Err(NOT_SUPPORTED);
    }
    let range = memory().find(address).ok_or(INVALID_VALUE)?;
    let fits = range.base == address && bytes > 0 && bytes as u64 <= range.backing.bytes();
    if out.is_null() || kind != RANGE_DMA_BUF || flags > 1 || range.is_host() || !fits {
        return Err(INVALID_VALUE);
    }
    let fd = range.backing.duplicate().ok_or(OUT_OF_MEMORY)?;
    // SAFETY: for this kind the caller gives the place of an int.
    unsafe { out.cast::<c_int>().write(fd.into_raw_fd()) };
    Ok(())
}
