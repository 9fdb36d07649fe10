//! Virtual memory management.

use std::ffi::{c_int, c_ulonglong, c_void};

use super::Hip;
use super::call::enter;
use super::types::{
    hipDeviceptr_t, hipError_t, hipMemAccessDesc, hipMemAllocationProp,
    hipMemGenericAllocationHandle_t,
};
use crate::device::settings::Setting;
use crate::runtime::code::NOT_SUPPORTED;
use crate::runtime::out::Out;
use crate::runtime::vmm;

/// Releases before make no memory that leaves its process as a descriptor.
const DESCRIPTORS_SINCE: u64 = 60_000;
/// The release from which on a descriptor is taken in place of a pointer.
const BY_NUMBER: u64 = 70_100;

/// What the caller gives as it is taken since 7.1; before, it points to a descriptor.
fn descriptor(shared: *mut c_void, kind: c_int) -> *mut c_void {
    let old = Setting::RocmVersion.value() < BY_NUMBER;
    if !old || kind != vmm::HANDLE_POSIX_FD || (shared as usize) < 4096 {
        return shared;
    }
    // SAFETY: for this kind the caller gives the place of an int.
    let number = unsafe { shared.cast::<c_int>().read() };
    number as usize as *mut c_void
}

#[unsafe(no_mangle)]
extern "C" fn hipMemGetAllocationGranularity(
    out: Out<'_, usize>,
    prop: Option<&hipMemAllocationProp>,
    option: c_int,
) -> hipError_t {
    enter("hipMemGetAllocationGranularity", || vmm::granularity_of::<Hip>(out, prop, option))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemCreate(
    handle: Out<'_, hipMemGenericAllocationHandle_t>,
    bytes: usize,
    prop: Option<&hipMemAllocationProp>,
    flags: c_ulonglong,
) -> hipError_t {
    enter("hipMemCreate", || {
        let leaves = prop.is_some_and(|prop| prop.requested_handle_types != 0);
        if leaves && Setting::RocmVersion.value() < DESCRIPTORS_SINCE {
            return Err(NOT_SUPPORTED);
        }
        vmm::create::<Hip>(handle, bytes, prop, flags)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipMemRelease(handle: hipMemGenericAllocationHandle_t) -> hipError_t {
    enter("hipMemRelease", || vmm::release::<Hip>(handle))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemAddressReserve(
    address: Out<'_, hipDeviceptr_t>,
    bytes: usize,
    alignment: usize,
    _hint: hipDeviceptr_t,
    flags: c_ulonglong,
) -> hipError_t {
    enter("hipMemAddressReserve", || vmm::reserve::<Hip>(address, bytes, alignment, flags))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemAddressFree(address: hipDeviceptr_t, bytes: usize) -> hipError_t {
    enter("hipMemAddressFree", || vmm::free::<Hip>(address, bytes))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemMap(
    address: hipDeviceptr_t,
    bytes: usize,
    offset: usize,
    handle: hipMemGenericAllocationHandle_t,
    flags: c_ulonglong,
) -> hipError_t {
    enter("hipMemMap", || vmm::map::<Hip>(address, bytes, offset, handle, flags))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemUnmap(address: hipDeviceptr_t, bytes: usize) -> hipError_t {
    enter("hipMemUnmap", || vmm::unmap::<Hip>(address, bytes))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemSetAccess(
    address: hipDeviceptr_t,
    bytes: usize,
    descriptions: *const hipMemAccessDesc,
    count: usize,
) -> hipError_t {
    enter("hipMemSetAccess", || vmm::set_access::<Hip>(address, bytes, descriptions, count))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemExportToShareableHandle(
    out: *mut c_void,
    handle: hipMemGenericAllocationHandle_t,
    kind: c_int,
    flags: c_ulonglong,
) -> hipError_t {
    enter("hipMemExportToShareableHandle", || vmm::export::<Hip>(out, handle, kind, flags))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemImportFromShareableHandle(
    out: Out<'_, hipMemGenericAllocationHandle_t>,
    shared: *mut c_void,
    kind: c_int,
) -> hipError_t {
    enter("hipMemImportFromShareableHandle", || {
        vmm::import::<Hip>(out, descriptor(shared, kind), kind)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipMemRetainAllocationHandle(
    out: Out<'_, hipMemGenericAllocationHandle_t>,
    address: *mut c_void,
) -> hipError_t {
    enter("hipMemRetainAllocationHandle", || vmm::retain::<Hip>(out, address))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemGetAllocationPropertiesFromHandle(
    out: Out<'_, hipMemAllocationProp>,
    handle: hipMemGenericAllocationHandle_t,
) -> hipError_t {
    enter("hipMemGetAllocationPropertiesFromHandle", || vmm::properties::<Hip>(out, handle))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemGetHandleForAddressRange(
    out: *mut c_void,
    address: hipDeviceptr_t,
    bytes: usize,
    kind: c_int,
    flags: c_ulonglong,
) -> hipError_t {
    enter("hipMemGetHandleForAddressRange", || {
        vmm::export_range::<Hip>(out, address, bytes, kind, flags)
    })
}
