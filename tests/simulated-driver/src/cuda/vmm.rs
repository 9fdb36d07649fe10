//! Virtual memory management: blocks of memory, ranges of addresses, and who may touch what is
//! mapped. None of it needs a context.

use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};

use super::blocks;
use super::call::enter;
use super::code::{
    CUresult, INVALID_DEVICE, INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED, OUT_OF_MEMORY, Outcome,
};
use super::device::{ordinal, physical};
use super::init::visible;
use super::types::{
    CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemHandle, CUmemLocation,
    MEM_ACCESS_FLAGS_PROT_READWRITE, MEM_ALLOCATION_TYPE_PINNED, MEM_HANDLE_TYPE_FABRIC,
    MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, MEM_LOCATION_TYPE_DEVICE, Out, store,
};
use crate::device::machine::memory;
use crate::device::memory::share::{self, NAME_BYTES};
use crate::device::memory::{Backing, Kind, granularity, new_backing};
use crate::device::settings::{Setting, reaches};

fn supported() -> Outcome {
    visible()?;
    if Setting::VirtualMemory.is_on() { Ok(()) } else { Err(NOT_SUPPORTED) }
}

/// The device of a property that is sound, and whether its handles can be had.
fn checked(prop: Option<&CUmemAllocationProp>) -> Outcome<(u32, c_int)> {
    let prop = prop.ok_or(INVALID_VALUE)?;
    let sound = prop.kind == MEM_ALLOCATION_TYPE_PINNED
        && prop.location.kind == MEM_LOCATION_TYPE_DEVICE
        && prop.win32_handle_meta_data == 0;
    let known = MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | MEM_HANDLE_TYPE_FABRIC;
    if !sound || prop.requested_handle_types & !known != 0 {
        return Err(INVALID_VALUE);
    }
    let posix = prop.requested_handle_types & MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0;
    let fabric = prop.requested_handle_types & MEM_HANDLE_TYPE_FABRIC != 0;
    if posix && !Setting::Descriptors.is_on() || fabric && Setting::FabricHandles.is("none") {
        return Err(NOT_SUPPORTED);
    }
    Ok((physical(prop.location.id)?, prop.requested_handle_types))
}

/// The offset or length must be a multiple of the unit.
fn whole(values: &[u64]) -> Outcome {
    let unit = granularity();
    if values.iter().all(|value| value.is_multiple_of(unit)) { Ok(()) } else { Err(INVALID_VALUE) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationGranularity(
    out: Out<'_, usize>,
    prop: Option<&CUmemAllocationProp>,
    option: c_int,
) -> CUresult {
    enter("cuMemGetAllocationGranularity", || {
        supported()?;
        checked(prop)?;
        if !matches!(option, 0 | 1) {
            return Err(INVALID_VALUE);
        }
        store(out, granularity() as usize)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemCreate(
    handle: Out<'_, CUmemHandle>,
    bytes: usize,
    prop: Option<&CUmemAllocationProp>,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemCreate", || {
        supported()?;
        let (device, kinds) = checked(prop)?;
        whole(&[bytes as u64])?;
        if bytes == 0 || flags != 0 || handle.is_none() {
            return Err(INVALID_VALUE);
        }
        if kinds & MEM_HANDLE_TYPE_FABRIC != 0 && Setting::FabricHandles.is("refused") {
            // As where no channel of the fabric was made for this user.
            return Err(NOT_PERMITTED);
        }
        let backing = new_backing(device, bytes as u64, kinds.cast_unsigned())?;
        store(handle, blocks::insert(backing))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: CUmemHandle) -> CUresult {
    enter("cuMemRelease", || supported().and_then(|()| blocks::release(handle)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressReserve(
    address: Out<'_, CUdeviceptr>,
    bytes: usize,
    alignment: usize,
    _hint: CUdeviceptr,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemAddressReserve", || {
        supported()?;
        whole(&[bytes as u64])?;
        let aligned = alignment == 0 || alignment.is_power_of_two();
        if bytes == 0 || flags != 0 || !aligned || address.is_none() {
            return Err(INVALID_VALUE);
        }
        store(address, memory().reserve(bytes as u64, alignment as u64)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: CUdeviceptr, bytes: usize) -> CUresult {
    enter("cuMemAddressFree", || {
        supported()?;
        Ok(memory().unreserve(address, bytes as u64)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(
    address: CUdeviceptr,
    bytes: usize,
    offset: usize,
    handle: CUmemHandle,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemMap", || {
        supported()?;
        let backing = blocks::find(handle)?;
        whole(&[address, bytes as u64, offset as u64])?;
        let end = (offset as u64).checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
        // The vendor maps only whole blocks.
        if bytes == 0 || offset != 0 || flags != 0 || end > backing.bytes() {
            return Err(INVALID_VALUE);
        }
        Ok(memory().map(address, bytes as u64, offset as u64, handle, backing)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: CUdeviceptr, bytes: usize) -> CUresult {
    enter("cuMemUnmap", || {
        supported()?;
        Ok(memory().unmap(address, bytes as u64)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemSetAccess(
    address: CUdeviceptr,
    bytes: usize,
    descriptions: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    enter("cuMemSetAccess", || {
        supported()?;
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
            if description.location.kind != MEM_LOCATION_TYPE_DEVICE {
                return Err(INVALID_VALUE);
            }
            let device = physical(description.location.id)?;
            if !pieces.iter().all(|piece| reaches(device, piece.device())) {
                return Err(INVALID_DEVICE);
            }
            let access = match description.flags {
                0 => false,
                MEM_ACCESS_FLAGS_PROT_READWRITE => true,
                // To read only is not supported by the vendor either.
                _ => return Err(INVALID_VALUE),
            };
            pieces.iter().for_each(|piece| piece.allow(device, access));
        }
        Ok(())
    })
}

/// What travels is a descriptor of the block's memory, or the name of it.
#[unsafe(no_mangle)]
extern "C" fn cuMemExportToShareableHandle(
    out: *mut c_void,
    handle: CUmemHandle,
    kind: c_int,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemExportToShareableHandle", || {
        supported()?;
        let backing = blocks::find(handle)?;
        let asked = backing.identity().handle_kinds & kind.cast_unsigned() != 0;
        if out.is_null() || flags != 0 || !asked {
            return Err(INVALID_VALUE);
        }
        match kind {
            MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR => {
                let fd = backing.duplicate().ok_or(OUT_OF_MEMORY)?;
                // SAFETY: for this kind the caller gives the place of an int.
                unsafe { out.cast::<c_int>().write(fd.into_raw_fd()) };
            }
            MEM_HANDLE_TYPE_FABRIC => {
                // SAFETY: for this kind the caller gives the place of 64 bytes.
                unsafe { out.cast::<[u8; NAME_BYTES]>().write(share::name(&backing)) };
            }
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemImportFromShareableHandle(
    out: Out<'_, CUmemHandle>,
    shared: *mut c_void,
    kind: c_int,
) -> CUresult {
    enter("cuMemImportFromShareableHandle", || {
        supported()?;
        if out.is_none() {
            return Err(INVALID_VALUE);
        }
        let backing = match kind {
            // The descriptor itself, in place of a pointer; it stays the caller's.
            MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR => import_fd(shared as usize)?,
            MEM_HANDLE_TYPE_FABRIC if !shared.is_null() => {
                // SAFETY: for this kind the caller gives 64 bytes.
                let name = unsafe { shared.cast::<[u8; NAME_BYTES]>().read() };
                share::open(&name).map_err(|_| INVALID_VALUE)?
            }
            _ => return Err(INVALID_VALUE),
        };
        store(out, blocks::insert(backing))
    })
}

fn import_fd(number: usize) -> Outcome<Backing> {
    let number = RawFd::try_from(number).ok().filter(|fd| *fd >= 0).ok_or(INVALID_VALUE)?;
    // SAFETY: borrowed for one call, and a number that is not open only makes that call fail.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let duplicate = fd.try_clone_to_owned().map_err(|_| INVALID_VALUE)?;
    Backing::open(duplicate).ok_or(INVALID_VALUE)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRetainAllocationHandle(
    out: Out<'_, CUmemHandle>,
    address: *mut c_void,
) -> CUresult {
    enter("cuMemRetainAllocationHandle", || {
        supported()?;
        let range = memory().find(address as u64).ok_or(INVALID_VALUE)?;
        let Kind::Mapped { block } = range.kind else { return Err(INVALID_VALUE) };
        blocks::retain(block)?;
        store(out, block)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationPropertiesFromHandle(
    out: Out<'_, CUmemAllocationProp>,
    handle: CUmemHandle,
) -> CUresult {
    enter("cuMemGetAllocationPropertiesFromHandle", || {
        supported()?;
        let identity = blocks::find(handle)?.identity();
        store(
            out,
            CUmemAllocationProp {
                kind: MEM_ALLOCATION_TYPE_PINNED,
                requested_handle_types: identity.handle_kinds.cast_signed(),
                location: CUmemLocation {
                    kind: MEM_LOCATION_TYPE_DEVICE,
                    // Of a device that this process does not see there is no number.
                    id: ordinal(identity.device).unwrap_or(-1),
                },
                win32_handle_meta_data: 0,
                flags: [0; 8],
            },
        )
    })
}
