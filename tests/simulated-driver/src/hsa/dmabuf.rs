//! Exports memory as descriptors, for NICs and other drivers.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use super::agent::Agent;
use super::call::enter;
use super::memory::{NOBODY, agents, find};
use super::status::{INVALID_ALLOCATION, INVALID_ARGUMENT, OUT_OF_RESOURCES, Outcome, store};
use super::types::{hsa_agent_t, hsa_status_t};
use crate::device::machine::memory;
use crate::device::memory::{Backing, Kind, Range};
use crate::device::settings::Setting;
use crate::runtime::out::Out;

/// The descriptor is of the whole allocation, so the address travels as an offset.
fn export(address: u64, bytes: usize, fd: Out<'_, c_int>, offset: Out<'_, u64>) -> Outcome {
    if fd.is_none() || offset.is_none() || bytes == 0 {
        return Err(INVALID_ARGUMENT);
    }
    if !Setting::DmaBuf.is_on() {
        return Err(OUT_OF_RESOURCES);
    }
    let range = find(address)?;
    if range.is_host() || address + bytes as u64 > range.end() {
        return Err(INVALID_ALLOCATION);
    }
    store(fd, range.backing.duplicate().ok_or(OUT_OF_RESOURCES)?.into_raw_fd())?;
    store(offset, address - range.base)
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_portable_export_dmabuf(
    address: u64,
    bytes: usize,
    fd: Out<'_, c_int>,
    offset: Out<'_, u64>,
) -> hsa_status_t {
    enter("hsa_amd_portable_export_dmabuf", || export(address, bytes, fd, offset))
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_portable_export_dmabuf_v2(
    address: u64,
    bytes: usize,
    fd: Out<'_, c_int>,
    offset: Out<'_, u64>,
    flags: u64,
) -> hsa_status_t {
    enter("hsa_amd_portable_export_dmabuf_v2", || {
        // By PCIe, or as the runtime likes.
        if flags > 1 { Err(INVALID_ARGUMENT) } else { export(address, bytes, fd, offset) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_portable_close_dmabuf(fd: c_int) -> hsa_status_t {
    enter("hsa_amd_portable_close_dmabuf", || {
        if fd < 0 {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the caller gives up a descriptor that it got from an export.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_interop_map_buffer(
    count: u32,
    list: *mut hsa_agent_t,
    fd: c_int,
    flags: u32,
    bytes: Out<'_, usize>,
    address: Out<'_, u64>,
    metadata_bytes: Out<'_, usize>,
    metadata: Out<'_, *const c_void>,
) -> hsa_status_t {
    enter("hsa_amd_interop_map_buffer", || {
        let agents = agents(list, count)?;
        if flags != 0 || fd < 0 || bytes.is_none() || address.is_none() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: borrowed for one call, and a number that is not open only makes that call fail.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let duplicate = borrowed.try_clone_to_owned().map_err(|_| INVALID_ARGUMENT)?;
        let backing = Backing::open(duplicate).ok_or(INVALID_ARGUMENT)?;
        let by = agents.iter().find_map(|agent| agent.device()).unwrap_or(u32::MAX);
        let base = memory().import(backing, Kind::Imported { session: NOBODY, by })?;
        let range = find(base)?;
        agents
            .iter()
            .filter_map(|agent| Agent::device(*agent))
            .for_each(|it| range.allow(it, true));
        store(bytes, range.bytes as usize)?;
        if metadata_bytes.is_some() {
            store(metadata_bytes, 0)?;
        }
        if metadata.is_some() {
            store(metadata, std::ptr::null())?;
        }
        store(address, base)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_interop_unmap_buffer(address: u64) -> hsa_status_t {
    enter("hsa_amd_interop_unmap_buffer", || {
        let imported = |range: &Range| matches!(range.kind, Kind::Imported { .. });
        Ok(memory().remove(address, imported)?)
    })
}
