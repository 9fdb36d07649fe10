//! Physical memory and addresses apart: HIP's virtual memory management.
//!
//! Releases differ in what they do, and an attribute of the device does not tell: up to 5.7 memory with a
//! handle that leaves the process was refused, so a context makes, exports and gives back a piece once
//! before it says that it can.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Mutex;

use peerlane_toolkit::device::{DeviceContext as _, DevicePtr, MemoryHandle, VirtualCalls};

use crate::device::{Context, Version};
use crate::error::Error;
use crate::sys::hip::{
    hipError_t, hipMemAccessDesc, hipMemAccessFlags, hipMemAllocationGranularity_flags,
    hipMemAllocationHandleType, hipMemAllocationProp, hipMemAllocationType,
    hipMemGenericAllocationHandle_t, hipMemLocation, hipMemLocationType,
};

/// What leaves the process as a descriptor.
const DESCRIPTOR: hipMemAllocationHandleType =
    hipMemAllocationHandleType::hipMemHandleTypePosixFileDescriptor;

/// The first release whose `hipMemRetainAllocationHandle` may be called. Those before follow a null
/// pointer for memory that was not mapped, and give out a reference that they do not count, so that
/// giving it up takes the memory from its owner (the release notes of HIP 7.14; hip_vm.cpp of clr).
const RETAINS_SINCE: Version = Version { major: 7, minor: 15, patch: 0 };

/// What the trial has shown, by the number of the device.
static TRIED: Mutex<Vec<(i32, bool)>> = Mutex::new(Vec::new());

impl VirtualCalls for Context {
    fn has_virtual_memory(&self) -> bool {
        if !self.found.virtual_memory {
            return false;
        }
        let mut tried = TRIED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let number = self.device();
        if let Some((_, works)) = tried.iter().find(|(device, _)| *device == number) {
            return *works;
        }
        let works = self.try_descriptor().is_ok();
        tried.push((number, works));
        works
    }

    fn granularity(&self) -> Result<u64, Error> {
        let ask = self.hip.calls.mem_get_allocation_granularity;
        let properties = properties(self, DESCRIPTOR);
        let option = hipMemAllocationGranularity_flags::hipMemAllocationGranularityMinimum;
        let mut least = 0;
        // SAFETY: both point to locals; the properties are filled as the header wants.
        let code = unsafe { ask(&raw mut least, &raw const properties, option) };
        self.check("hipMemGetAllocationGranularity", code)?;
        Ok(least as u64)
    }

    fn create_memory(&self, bytes: u64) -> Result<MemoryHandle, Error> {
        let properties = properties(self, DESCRIPTOR);
        let mut made = std::ptr::null_mut();
        let create = self.hip.calls.mem_create;
        // SAFETY: both point to locals; the properties are filled as the header wants.
        let code = unsafe { create(&raw mut made, bytes as usize, &raw const properties, 0) };
        self.check("hipMemCreate", code)?;
        Ok(handle(made))
    }

    fn retain_memory(&self, address: DevicePtr) -> Result<Option<MemoryHandle>, Error> {
        if self.hip.version < RETAINS_SINCE {
            return Ok(None);
        }
        let mut found = std::ptr::null_mut();
        let retain = self.hip.calls.mem_retain_allocation_handle;
        // SAFETY: HIP looks the address up and does not follow it.
        let code = unsafe { retain(&raw mut found, address as *mut c_void) };
        // Releases may differ in how they say that memory has no handle.
        if code != hipError_t::hipSuccess && !Error::loses_device(code) {
            self.forget_error();
            return Ok(None);
        }
        self.check("hipMemRetainAllocationHandle", code)?;
        Ok(Some(handle(found)))
    }

    unsafe fn release_memory(&self, memory: MemoryHandle) {
        // SAFETY: the caller's.
        let _ = unsafe { (self.hip.calls.mem_release)(raw(memory)) };
    }

    unsafe fn is_exportable(&self, memory: MemoryHandle) -> Result<bool, Error> {
        let mut properties = hipMemAllocationProp::default();
        let ask = self.hip.calls.mem_get_allocation_properties_from_handle;
        // SAFETY: the caller's; the result is stored in a local.
        let code = unsafe { ask(&raw mut properties, raw(memory)) };
        self.check("hipMemGetAllocationPropertiesFromHandle", code)?;
        // SAFETY: both names of the union are of one type.
        let kinds = unsafe { properties.__bindgen_anon_1.requestedHandleTypes };
        Ok(kinds.0 & DESCRIPTOR.0 != 0)
    }

    unsafe fn export_memory(&self, memory: MemoryHandle) -> Result<OwnedFd, Error> {
        let mut fd: c_int = -1;
        let (out, export) = ((&raw mut fd).cast(), self.hip.calls.mem_export_to_shareable_handle);
        // SAFETY: the caller's; a descriptor is the number that is stored.
        let code = unsafe { export(out, raw(memory), DESCRIPTOR, 0) };
        self.check("hipMemExportToShareableHandle", code)?;
        // SAFETY: HIP has just opened it for this call.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn import_memory(&self, fd: BorrowedFd<'_>) -> Result<MemoryHandle, Error> {
        let import = self.hip.calls.mem_import_from_shareable_handle;
        let mut found = std::ptr::null_mut();
        let mut number: c_int = fd.as_raw_fd();
        let shared: *mut c_void = match self.hip.imports_by_pointer {
            true => (&raw mut number).cast(),
            false => number as usize as *mut c_void,
        };
        // SAFETY: the descriptor is open for the length of the call, and its number in the form that
        // this release takes; the result is a local.
        let code = unsafe { import(&raw mut found, shared, DESCRIPTOR) };
        self.check("hipMemImportFromShareableHandle", code)?;
        Ok(handle(found))
    }

    fn reserve(&self, bytes: u64) -> Result<DevicePtr, Error> {
        let (mut address, anywhere) = (std::ptr::null_mut(), std::ptr::null_mut());
        let reserve = self.hip.calls.mem_address_reserve;
        // SAFETY: HIP chooses the range; the result is stored in a local.
        let code = unsafe { reserve(&raw mut address, bytes as usize, 0, anywhere, 0) };
        self.check("hipMemAddressReserve", code)?;
        Ok(address as DevicePtr)
    }

    unsafe fn unreserve(&self, address: DevicePtr, bytes: u64) {
        let free = self.hip.calls.mem_address_free;
        // SAFETY: the caller's.
        let _ = unsafe { free(address as *mut c_void, bytes as usize) };
    }

    unsafe fn map(
        &self,
        address: DevicePtr,
        bytes: u64,
        memory: MemoryHandle,
    ) -> Result<(), Error> {
        let (map, at) = (self.hip.calls.mem_map, address as *mut c_void);
        // SAFETY: the caller's.
        let code = unsafe { map(at, bytes as usize, 0, raw(memory), 0) };
        self.check("hipMemMap", code)
    }

    unsafe fn unmap(&self, address: DevicePtr, bytes: u64) {
        let unmap = self.hip.calls.mem_unmap;
        // SAFETY: the caller's.
        let _ = unsafe { unmap(address as *mut c_void, bytes as usize) };
    }

    unsafe fn allow(&self, address: DevicePtr, bytes: u64) -> Result<(), Error> {
        let flags = hipMemAccessFlags::hipMemAccessFlagsProtReadWrite;
        let access = hipMemAccessDesc { location: own_location(self), flags };
        let (set, at) = (self.hip.calls.mem_set_access, address as *mut c_void);
        // SAFETY: the caller's; the description is a local.
        let code = unsafe { set(at, bytes as usize, &raw const access, 1) };
        self.check("hipMemSetAccess", code)
    }
}

impl Context {
    /// Makes the least piece of memory with a descriptor, and exports it.
    fn try_descriptor(&self) -> Result<(), Error> {
        let memory = self.create_memory(self.granularity()?.max(1))?;
        // SAFETY: the reference is held.
        let exported = unsafe { self.export_memory(memory) };
        // SAFETY: made above, and given up once.
        unsafe { self.release_memory(memory) };
        exported.map(drop)
    }
}

fn handle(raw: hipMemGenericAllocationHandle_t) -> MemoryHandle {
    MemoryHandle(raw as u64)
}

fn raw(handle: MemoryHandle) -> hipMemGenericAllocationHandle_t {
    handle.0 as hipMemGenericAllocationHandle_t
}

fn own_location(context: &Context) -> hipMemLocation {
    hipMemLocation { type_: hipMemLocationType::hipMemLocationTypeDevice, id: context.device() }
}

fn properties(context: &Context, kind: hipMemAllocationHandleType) -> hipMemAllocationProp {
    let mut properties = hipMemAllocationProp {
        type_: hipMemAllocationType::hipMemAllocationTypePinned,
        location: own_location(context),
        ..hipMemAllocationProp::default()
    };
    properties.__bindgen_anon_1.requestedHandleTypes = kind;
    // So that a NIC's fabric can register the same buffer; releases that do not look at it ignore it.
    properties.allocFlags.gpuDirectRDMACapable = 1;
    properties
}
