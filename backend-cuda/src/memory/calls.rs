//! Allocations of CUDA, and host memory that its devices reach.

use std::ffi::c_void;
use std::ptr::NonNull;

use peerlane_toolkit::device::{DevicePtr, Extent, FreeBytes, MemoryCalls};

use crate::device::Context;
use crate::error::Error;
use crate::sys;

impl MemoryCalls for Context {
    fn is_out_of_memory(error: &Error) -> bool {
        matches!(error, Error::Driver { result, .. }
            if result.code == sys::CUDA_ERROR_OUT_OF_MEMORY)
    }

    fn free_bytes(&self) -> FreeBytes {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the results are stored in locals, which stay 0 if the driver refuses.
        let _ = unsafe { (self.driver.mem_get_info)(&raw mut free, &raw mut total) };
        FreeBytes { free: free as u64, total: total as u64 }
    }

    fn allocate(&self, bytes: usize) -> Result<DevicePtr, Error> {
        let mut address = 0;
        // SAFETY: the context is current; the result is stored in a local.
        let code = unsafe { (self.driver.mem_alloc)(&raw mut address, bytes) };
        self.check("cuMemAlloc_v2", code)?;
        Ok(address)
    }

    unsafe fn free(&self, address: DevicePtr) {
        // SAFETY: the caller's.
        let _ = unsafe { (self.driver.mem_free)(address) };
    }

    fn allocation_number(&self, address: DevicePtr) -> Option<u64> {
        let mut number = 0_u64;
        let attribute = sys::POINTER_ATTRIBUTE_BUFFER_ID;
        let out: *mut c_void = (&raw mut number).cast();
        // SAFETY: the attribute is a 64-bit number, stored in a local.
        let code = unsafe { (self.driver.pointer_get_attribute)(out, attribute, address) };
        (code == sys::CUDA_SUCCESS).then_some(number)
    }

    fn extent(&self, address: DevicePtr) -> Result<Option<Extent>, Error> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the driver looks the address up; the results are stored in locals.
        let code =
            unsafe { (self.driver.mem_get_address_range)(&raw mut base, &raw mut bytes, address) };
        if matches!(code, sys::CUDA_ERROR_INVALID_VALUE | sys::CUDA_ERROR_NOT_FOUND) {
            return Ok(None);
        }
        self.check("cuMemGetAddressRange_v2", code)?;
        Ok(Some(Extent { address: base, bytes: bytes as u64 }))
    }

    fn allocate_host(&self, bytes: usize) -> Result<NonNull<c_void>, Error> {
        let mut host = std::ptr::null_mut();
        let flags = sys::MEMHOSTALLOC_PORTABLE;
        // SAFETY: the context is current; the result is stored in a local.
        let code = unsafe { (self.driver.mem_host_alloc)(&raw mut host, bytes, flags) };
        self.check("cuMemHostAlloc", code)?;
        NonNull::new(host).ok_or_else(|| Error::unavailable("cuMemHostAlloc gave no memory"))
    }

    unsafe fn free_host(&self, host: NonNull<c_void>) {
        // SAFETY: the caller's.
        let _ = unsafe { (self.driver.mem_free_host)(host.as_ptr()) };
    }

    unsafe fn register_host(&self, host: NonNull<c_void>, bytes: usize) -> Result<(), Error> {
        let flags = sys::MEMHOSTREGISTER_PORTABLE | sys::MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's.
        let code = unsafe { (self.driver.mem_host_register)(host.as_ptr(), bytes, flags) };
        self.check("cuMemHostRegister_v2", code)
    }

    unsafe fn unregister_host(&self, host: NonNull<c_void>) {
        // SAFETY: the caller's.
        let _ = unsafe { (self.driver.mem_host_unregister)(host.as_ptr()) };
    }

    unsafe fn host_pointer(&self, host: NonNull<c_void>) -> Result<DevicePtr, Error> {
        let mut address = 0;
        let get = self.driver.mem_host_get_device_pointer;
        // SAFETY: the caller's; the result is stored in a local.
        let code = unsafe { get(&raw mut address, host.as_ptr(), 0) };
        self.check("cuMemHostGetDevicePointer_v2", code)?;
        Ok(address)
    }
}
