//! Allocations of HIP, and host memory that its devices reach.

use std::ffi::c_void;
use std::ptr::NonNull;

use peerlane_toolkit::device::{
    DeviceContext as _, DevicePtr, Extent, Fault, FreeBytes, MemoryCalls,
};

use crate::device::Context;
use crate::error::Error;
use crate::sys::hip::{self, hipError_t, hipPointer_attribute};

impl MemoryCalls for Context {
    fn is_out_of_memory(error: &Error) -> bool {
        matches!(error, Error::Driver { result, .. }
            if result.code == hipError_t::hipErrorOutOfMemory.0)
    }

    fn free_bytes(&self) -> FreeBytes {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the results are stored in locals, which stay 0 if HIP refuses.
        let _ = unsafe { (self.hip.calls.mem_get_info)(&raw mut free, &raw mut total) };
        FreeBytes { free: free as u64, total: total as u64 }
    }

    fn allocate(&self, bytes: usize) -> Result<DevicePtr, Error> {
        let mut address = std::ptr::null_mut();
        // SAFETY: the device is current; the result is stored in a local.
        let code = unsafe { (self.hip.calls.malloc)(&raw mut address, bytes) };
        self.check("hipMalloc", code)?;
        Ok(address as DevicePtr)
    }

    fn allocate_flags(&self, bytes: usize) -> Result<DevicePtr, Error> {
        let mut address = std::ptr::null_mut();
        let (allocate, flags) =
            (self.hip.calls.ext_malloc_with_flags, hip::hipDeviceMallocFinegrained);
        // SAFETY: the device is current; the result is stored in a local.
        let code = unsafe { allocate(&raw mut address, bytes, flags) };
        self.check("hipExtMallocWithFlags", code)?;
        Ok(address as DevicePtr)
    }

    unsafe fn free(&self, address: DevicePtr) {
        // SAFETY: the caller's.
        let _ = unsafe { (self.hip.calls.free)(address as *mut c_void) };
    }

    /// `hipFree` and `hipHostFree` return when every stream of the device is done.
    fn frees_wait(&self) -> bool {
        true
    }

    fn allocation_number(&self, address: DevicePtr) -> Option<u64> {
        let mut number = 0_u64;
        let attribute = hipPointer_attribute::HIP_POINTER_ATTRIBUTE_BUFFER_ID;
        let (out, at) = ((&raw mut number).cast(), address as *mut c_void);
        // SAFETY: the attribute is a 64-bit number, stored in a local.
        let code = unsafe { (self.hip.calls.pointer_get_attribute)(out, attribute, at) };
        if code != hipError_t::hipSuccess {
            self.forget_error();
            return None;
        }
        Some(number)
    }

    fn extent(&self, address: DevicePtr) -> Result<Option<Extent>, Error> {
        let (mut base, mut bytes) = (std::ptr::null_mut(), 0);
        let (range, at) = (self.hip.calls.mem_get_address_range, address as *mut c_void);
        // SAFETY: HIP looks the address up; the results are stored in locals.
        let code = unsafe { range(&raw mut base, &raw mut bytes, at) };
        if matches!(code, hipError_t::hipErrorInvalidValue | hipError_t::hipErrorNotFound) {
            self.forget_error();
            return Ok(None);
        }
        self.check("hipMemGetAddressRange", code)?;
        Ok(Some(Extent { address: base as DevicePtr, bytes: bytes as u64 }))
    }

    fn allocate_host(&self, bytes: usize) -> Result<NonNull<c_void>, Error> {
        let mut host = std::ptr::null_mut();
        let flags = hip::hipHostMallocPortable;
        // SAFETY: the device is current; the result is stored in a local.
        let code = unsafe { (self.hip.calls.host_malloc)(&raw mut host, bytes, flags) };
        self.check("hipHostMalloc", code)?;
        NonNull::new(host).ok_or_else(|| {
            Error::Fault(Fault::Unavailable(format!("hipHostMalloc gave {} nothing", self.label())))
        })
    }

    unsafe fn free_host(&self, host: NonNull<c_void>) {
        // SAFETY: the caller's.
        let _ = unsafe { (self.hip.calls.host_free)(host.as_ptr()) };
    }

    unsafe fn register_host(&self, host: NonNull<c_void>, bytes: usize) -> Result<(), Error> {
        let flags = hip::hipHostRegisterPortable | hip::hipHostRegisterMapped;
        // SAFETY: the caller's.
        let code = unsafe { (self.hip.calls.host_register)(host.as_ptr(), bytes, flags) };
        self.check("hipHostRegister", code)
    }

    unsafe fn unregister_host(&self, host: NonNull<c_void>) {
        // SAFETY: the caller's.
        let _ = unsafe { (self.hip.calls.host_unregister)(host.as_ptr()) };
    }

    unsafe fn host_pointer(&self, host: NonNull<c_void>) -> Result<DevicePtr, Error> {
        let mut address = std::ptr::null_mut();
        let get = self.hip.calls.host_get_device_pointer;
        // SAFETY: the caller's; the result is stored in a local.
        let code = unsafe { get(&raw mut address, host.as_ptr(), 0) };
        self.check("hipHostGetDevicePointer", code)?;
        Ok(address as DevicePtr)
    }
}
