//! Physical memory apart from its addresses: what leaves the process as a descriptor.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::out_of_memory;
use crate::device::Context;
use crate::error::Error;
use crate::sys::{
    self, CUdevice, CUdeviceptr, CUmemAllocationProp, CUmemFabricHandle, CUmemHandle, CUmemLocation,
};

/// A reference to physical memory, which lives as long as there is one, or a mapping.
#[derive(Debug)]
pub(crate) struct Handle {
    context: Arc<Context>,
    raw: CUmemHandle,
    bytes: u64,
}

impl Handle {
    /// Allocates at least `bytes`, exportable as `kind`.
    pub(crate) fn create(context: &Arc<Context>, bytes: u64, kind: c_int) -> Result<Self, Error> {
        let driver = context.driver;
        let create = context.need("cuMemCreate", driver.mem_create)?;
        let granularity =
            context.need("cuMemGetAllocationGranularity", driver.mem_get_allocation_granularity)?;
        let properties = properties(context, kind);
        let mut least = 0;
        // SAFETY: both point to locals; the properties are filled as cuda.h wants.
        let code = unsafe {
            granularity(&raw mut least, &raw const properties, sys::MEM_ALLOC_GRANULARITY_MINIMUM)
        };
        context.check("cuMemGetAllocationGranularity", code)?;
        let rounded = bytes.max(1).checked_next_multiple_of(least.max(1) as u64);
        // More than the address space holds is refused here, before a size wraps around.
        let Some(rounded) = rounded.filter(|rounded| i64::try_from(*rounded).is_ok()) else {
            return Err(out_of_memory(context, bytes));
        };
        let mut raw = 0;
        // SAFETY: as above.
        let code = unsafe { create(&raw mut raw, rounded as usize, &raw const properties, 0) };
        if code == sys::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(out_of_memory(context, bytes));
        }
        context.check("cuMemCreate", code)?;
        Ok(Self { context: Arc::clone(context), raw, bytes: rounded })
    }

    /// Another reference to the memory that is mapped at `address` with that length; `None` where
    /// the memory there has no handle.
    pub(super) fn retain(
        context: &Arc<Context>,
        address: CUdeviceptr,
        bytes: u64,
    ) -> Result<Option<Self>, Error> {
        let Some(retain) = context.driver.mem_retain_allocation_handle else { return Ok(None) };
        let mut raw = 0;
        // SAFETY: the driver looks the address up and does not follow it.
        let code = unsafe { retain(&raw mut raw, address as *mut c_void) };
        // Drivers differ in how they say that memory has no handle.
        if code != sys::CUDA_SUCCESS && Error::leaves_device(code) {
            return Ok(None);
        }
        context.check("cuMemRetainAllocationHandle", code)?;
        Ok(Some(Self { context: Arc::clone(context), raw, bytes }))
    }

    /// The memory behind a peer's descriptor, which must hold exactly `bytes`.
    pub(super) fn import(
        context: &Arc<Context>,
        fd: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<Self, Error> {
        let symbol = "cuMemImportFromShareableHandle";
        let import = context.need(symbol, context.driver.mem_import_from_shareable_handle)?;
        let kind = sys::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let mut raw = 0;
        // cuda.h passes the descriptor's number as the pointer itself.
        let number = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the descriptor is open for the length of the call; the result is a local.
        let code = unsafe { import(&raw mut raw, number, kind) };
        context.check(symbol, code)?;
        Ok(Self { context: Arc::clone(context), raw, bytes })
    }

    pub(super) fn raw(&self) -> CUmemHandle {
        self.raw
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the memory was made so that it can leave the process as a descriptor.
    pub(super) fn is_exportable(&self) -> Result<bool, Error> {
        let symbol = "cuMemGetAllocationPropertiesFromHandle";
        let ask = self.context.need(symbol, self.context.driver.mem_get_allocation_properties)?;
        let mut properties = properties(&self.context, sys::MEM_HANDLE_TYPE_NONE);
        // SAFETY: the handle is held by `self`; the result is stored in a local.
        let code = unsafe { ask(&raw mut properties, self.raw) };
        self.context.check(symbol, code)?;
        let kinds = properties.requested_handle_types;
        Ok(kinds & sys::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0)
    }

    /// A new descriptor of the memory.
    pub(crate) fn export_fd(&self) -> Result<OwnedFd, Error> {
        let mut fd: c_int = -1;
        let kind = sys::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        self.export((&raw mut fd).cast(), kind)?;
        // SAFETY: the driver has just opened it for this call.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The handle for other hosts of an NVLink domain.
    pub(crate) fn export_fabric(&self) -> Result<CUmemFabricHandle, Error> {
        let mut handle = CUmemFabricHandle { data: [0; 64] };
        self.export((&raw mut handle).cast(), sys::MEM_HANDLE_TYPE_FABRIC)?;
        Ok(handle)
    }

    fn export(&self, result: *mut c_void, kind: c_int) -> Result<(), Error> {
        let symbol = "cuMemExportToShareableHandle";
        let export =
            self.context.need(symbol, self.context.driver.mem_export_to_shareable_handle)?;
        // SAFETY: the handle is held by `self`; both callers pass a place of the size that the kind
        // of handle has.
        let code = unsafe { export(result, self.raw, kind, 0) };
        self.context.check(symbol, code)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(release) = self.context.driver.mem_release {
            // SAFETY: this reference is given up once. A failure means that the device is gone.
            let _ = unsafe { release(self.raw) };
        }
    }
}

pub(super) fn on_device(device: CUdevice) -> CUmemLocation {
    CUmemLocation { kind: sys::MEM_LOCATION_TYPE_DEVICE, id: device }
}

fn properties(context: &Context, kind: c_int) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: sys::MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: kind,
        location: on_device(context.device),
        win32_handle_meta_data: std::ptr::null_mut(),
        compression_type: 0,
        // So that a NIC's fabric can register the same buffer.
        gpu_direct_rdma_capable: context.found.abilities.rdma_virtual_memory.into(),
        usage: 0,
        reserved: [0; 4],
    }
}
