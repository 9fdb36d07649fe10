//! Exports virtual memory management.

use std::ffi::{c_ulonglong, c_void};

use hip_sys::{
    hipMemAccessDesc, hipMemAllocationGranularity_flags, hipMemAllocationHandleType,
    hipMemAllocationProp, hipMemGenericAllocationHandle_t,
};

use crate::calls::hip;
use crate::cuda::{CUresult, Cuda};
use crate::result::INVALID_VALUE;

/// cuda.h's properties of an allocation: HIP's, with four reserved bytes, which must be zero, where HIP
/// has padding.
#[repr(C)]
struct Properties {
    common: [u8; COMMON],
    reserved: [u8; 4],
}

const COMMON: usize = 28;
const _: () = assert!(size_of::<Properties>() == size_of::<hipMemAllocationProp>());
const _: () = assert!(std::mem::offset_of!(hipMemAllocationProp, allocFlags) + 4 == COMMON);

/// Calls the driver with HIP's properties as it wants them.
///
/// # Safety
/// `properties` is null or may be read.
unsafe fn with(
    properties: *const hipMemAllocationProp,
    call: impl FnOnce(*const c_void) -> CUresult,
) -> CUresult {
    if properties.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's; the fields fill the first bytes without gaps.
    let common = unsafe { properties.cast::<[u8; COMMON]>().read() };
    let own = Properties { common, reserved: [0; 4] };
    call((&raw const own).cast())
}

/// # Safety
/// As HIP's.
unsafe fn create(
    cuda: &Cuda,
    out: *mut hipMemGenericAllocationHandle_t,
    bytes: usize,
    properties: *const hipMemAllocationProp,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's.
    let create = |own| unsafe { (cuda.cuMemCreate)(out.cast(), bytes, own, flags) };
    // SAFETY: the caller's.
    unsafe { with(properties, create) }
}

/// # Safety
/// As HIP's.
unsafe fn granularity(
    cuda: &Cuda,
    out: *mut usize,
    properties: *const hipMemAllocationProp,
    option: hipMemAllocationGranularity_flags,
) -> CUresult {
    // SAFETY: the caller's.
    let ask = |own| unsafe { (cuda.cuMemGetAllocationGranularity)(out, own, option.0) };
    // SAFETY: the caller's.
    unsafe { with(properties, ask) }
}

hip! {
    fn hipMemCreate(
        out: *mut hipMemGenericAllocationHandle_t,
        bytes: usize,
        properties: *const hipMemAllocationProp,
        flags: c_ulonglong,
    ) = |cuda| create(cuda, out, bytes, properties, flags);
    fn hipMemGetAllocationGranularity(
        out: *mut usize,
        properties: *const hipMemAllocationProp,
        option: hipMemAllocationGranularity_flags,
    ) = |cuda| granularity(cuda, out, properties, option);
    fn hipMemRelease(handle: hipMemGenericAllocationHandle_t) =
        |cuda| (cuda.cuMemRelease)(handle as u64);
    fn hipMemAddressReserve(
        out: *mut *mut c_void,
        bytes: usize,
        alignment: usize,
        near: *mut c_void,
        flags: c_ulonglong,
    ) = |cuda| (cuda.cuMemAddressReserve)(out.cast(), bytes, alignment, near as u64, flags);
    fn hipMemAddressFree(memory: *mut c_void, bytes: usize) =
        |cuda| (cuda.cuMemAddressFree)(memory as u64, bytes);
    fn hipMemMap(
        memory: *mut c_void,
        bytes: usize,
        offset: usize,
        handle: hipMemGenericAllocationHandle_t,
        flags: c_ulonglong,
    ) = |cuda| (cuda.cuMemMap)(memory as u64, bytes, offset, handle as u64, flags);
    fn hipMemUnmap(memory: *mut c_void, bytes: usize) =
        |cuda| (cuda.cuMemUnmap)(memory as u64, bytes);
    fn hipMemSetAccess(
        memory: *mut c_void,
        bytes: usize,
        access: *const hipMemAccessDesc,
        count: usize,
    ) = |cuda| (cuda.cuMemSetAccess)(memory as u64, bytes, access.cast(), count);
    fn hipMemExportToShareableHandle(
        out: *mut c_void,
        handle: hipMemGenericAllocationHandle_t,
        kind: hipMemAllocationHandleType,
        flags: c_ulonglong,
    ) = |cuda| (cuda.cuMemExportToShareableHandle)(out, handle as u64, kind.0, flags);
    // By number, as HIP from 7.1 on.
    fn hipMemImportFromShareableHandle(
        out: *mut hipMemGenericAllocationHandle_t,
        shared: *mut c_void,
        kind: hipMemAllocationHandleType,
    ) = |cuda| (cuda.cuMemImportFromShareableHandle)(out.cast(), shared, kind.0);
    fn hipMemRetainAllocationHandle(
        out: *mut hipMemGenericAllocationHandle_t,
        memory: *mut c_void,
    ) = |cuda| (cuda.cuMemRetainAllocationHandle)(out.cast(), memory);
    fn hipMemGetAllocationPropertiesFromHandle(
        out: *mut hipMemAllocationProp,
        handle: hipMemGenericAllocationHandle_t,
    ) = |cuda| (cuda.cuMemGetAllocationPropertiesFromHandle)(out.cast(), handle as u64);
}
