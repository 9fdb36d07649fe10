//! Physical memory and addresses apart: CUDA's virtual memory management.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use peerlane_toolkit::device::{DevicePtr, MemoryHandle, VirtualCalls};

use crate::device::Context;
use crate::error::Error;
use crate::sys::{
    self, CUmemAccessDesc, CUmemAllocationProp, CUmemFabricHandle, CUmemHandle, CUmemLocation,
};

/// What leaves the process as a descriptor.
const DESCRIPTOR: c_int = sys::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

impl VirtualCalls for Context {
    fn has_virtual_memory(&self) -> bool {
        let abilities = self.found.abilities;
        abilities.virtual_memory && abilities.posix_handles && self.driver.mem_create.is_some()
    }

    fn granularity(&self) -> Result<u64, Error> {
        granularity(self, DESCRIPTOR)
    }

    fn create_memory(&self, bytes: u64) -> Result<MemoryHandle, Error> {
        create(self, bytes, DESCRIPTOR)
    }

    fn retain_memory(&self, address: DevicePtr) -> Result<Option<MemoryHandle>, Error> {
        let Some(retain) = self.driver.mem_retain_allocation_handle else { return Ok(None) };
        let mut raw = 0;
        // SAFETY: the driver looks the address up and does not follow it.
        let code = unsafe { retain(&raw mut raw, address as *mut c_void) };
        // Drivers differ in how they say that memory has no handle.
        if code != sys::CUDA_SUCCESS && Error::leaves_device(code) {
            return Ok(None);
        }
        self.check("cuMemRetainAllocationHandle", code)?;
        Ok(Some(MemoryHandle(raw)))
    }

    unsafe fn release_memory(&self, handle: MemoryHandle) {
        if let Some(release) = self.driver.mem_release {
            // SAFETY: the caller's.
            let _ = unsafe { release(handle.0) };
        }
    }

    unsafe fn is_exportable(&self, handle: MemoryHandle) -> Result<bool, Error> {
        let symbol = "cuMemGetAllocationPropertiesFromHandle";
        let ask = self.need(symbol, self.driver.mem_get_allocation_properties)?;
        let mut properties = properties(self, sys::MEM_HANDLE_TYPE_NONE);
        // SAFETY: the caller's; the result is stored in a local.
        let code = unsafe { ask(&raw mut properties, handle.0) };
        self.check(symbol, code)?;
        Ok(properties.requested_handle_types & DESCRIPTOR != 0)
    }

    unsafe fn export_memory(&self, handle: MemoryHandle) -> Result<OwnedFd, Error> {
        let mut fd: c_int = -1;
        // SAFETY: the caller's; a descriptor is the number that is stored.
        unsafe { export(self, handle.0, DESCRIPTOR, (&raw mut fd).cast()) }?;
        // SAFETY: the driver has just opened it for this call.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn import_memory(&self, fd: BorrowedFd<'_>) -> Result<MemoryHandle, Error> {
        let symbol = "cuMemImportFromShareableHandle";
        let import = self.need(symbol, self.driver.mem_import_from_shareable_handle)?;
        let mut raw = 0;
        // cuda.h passes the descriptor's number as the pointer itself.
        let number = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the descriptor is open for the length of the call; the result is a local.
        let code = unsafe { import(&raw mut raw, number, DESCRIPTOR) };
        self.check(symbol, code)?;
        Ok(MemoryHandle(raw))
    }

    fn reserve(&self, bytes: u64) -> Result<DevicePtr, Error> {
        let reserve = self.need("cuMemAddressReserve", self.driver.mem_address_reserve)?;
        let mut address = 0;
        // SAFETY: the driver chooses the range; the result is stored in a local.
        let code = unsafe { reserve(&raw mut address, bytes as usize, 0, 0, 0) };
        self.check("cuMemAddressReserve", code)?;
        Ok(address)
    }

    unsafe fn unreserve(&self, address: DevicePtr, bytes: u64) {
        if let Some(free) = self.driver.mem_address_free {
            // SAFETY: the caller's.
            let _ = unsafe { free(address, bytes as usize) };
        }
    }

    unsafe fn map(
        &self,
        address: DevicePtr,
        bytes: u64,
        handle: MemoryHandle,
    ) -> Result<(), Error> {
        let map = self.need("cuMemMap", self.driver.mem_map)?;
        // SAFETY: the caller's.
        let code = unsafe { map(address, bytes as usize, 0, handle.0, 0) };
        self.check("cuMemMap", code)
    }

    unsafe fn unmap(&self, address: DevicePtr, bytes: u64) {
        if let Some(unmap) = self.driver.mem_unmap {
            // SAFETY: the caller's.
            let _ = unsafe { unmap(address, bytes as usize) };
        }
    }

    unsafe fn allow(&self, address: DevicePtr, bytes: u64) -> Result<(), Error> {
        let set_access = self.need("cuMemSetAccess", self.driver.mem_set_access)?;
        let flags = sys::MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location: own_location(self), flags };
        // SAFETY: the caller's; the description is a local.
        let code = unsafe { set_access(address, bytes as usize, &raw const access, 1) };
        self.check("cuMemSetAccess", code)
    }
}

/// Allocates physical memory that is exportable as `kind`; whole multiples of the granularity.
fn create(context: &Context, bytes: u64, kind: c_int) -> Result<MemoryHandle, Error> {
    let create = context.need("cuMemCreate", context.driver.mem_create)?;
    let properties = properties(context, kind);
    let mut raw = 0;
    // SAFETY: both point to locals; the properties are filled as cuda.h wants.
    let code = unsafe { create(&raw mut raw, bytes as usize, &raw const properties, 0) };
    context.check("cuMemCreate", code)?;
    Ok(MemoryHandle(raw))
}

/// Whether memory is to be had that other hosts of an NVLink domain import.
pub(crate) fn try_fabric(context: &Context) -> Result<(), Error> {
    let kind = sys::MEM_HANDLE_TYPE_FABRIC;
    let handle = create(context, granularity(context, kind)?, kind)?;
    let mut exported = CUmemFabricHandle { data: [0; 64] };
    // SAFETY: the reference is held; a handle of this kind is what is stored.
    let result = unsafe { export(context, handle.0, kind, (&raw mut exported).cast()) };
    // SAFETY: made above.
    unsafe { context.release_memory(handle) };
    result
}

fn granularity(context: &Context, kind: c_int) -> Result<u64, Error> {
    let ask = context
        .need("cuMemGetAllocationGranularity", context.driver.mem_get_allocation_granularity)?;
    let properties = properties(context, kind);
    let mut least = 0;
    // SAFETY: both point to locals; the properties are filled as cuda.h wants.
    let code =
        unsafe { ask(&raw mut least, &raw const properties, sys::MEM_ALLOC_GRANULARITY_MINIMUM) };
    context.check("cuMemGetAllocationGranularity", code)?;
    Ok(least as u64)
}

/// # Safety
/// The reference is held, and `result` has room for what a handle of that kind is.
unsafe fn export(
    context: &Context,
    handle: CUmemHandle,
    kind: c_int,
    result: *mut c_void,
) -> Result<(), Error> {
    let symbol = "cuMemExportToShareableHandle";
    let export = context.need(symbol, context.driver.mem_export_to_shareable_handle)?;
    // SAFETY: the caller's.
    let code = unsafe { export(result, handle, kind, 0) };
    context.check(symbol, code)
}

fn own_location(context: &Context) -> CUmemLocation {
    CUmemLocation { kind: sys::MEM_LOCATION_TYPE_DEVICE, id: context.device }
}

fn properties(context: &Context, kind: c_int) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: sys::MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: kind,
        location: own_location(context),
        win32_handle_meta_data: std::ptr::null_mut(),
        compression_type: 0,
        // So that a NIC's fabric can register the same buffer.
        gpu_direct_rdma_capable: context.found.abilities.rdma_virtual_memory.into(),
        usage: 0,
        reserved: [0; 4],
    }
}
