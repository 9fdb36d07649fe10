//! Virtual memory management.

use std::ffi::{c_int, c_ulonglong, c_void};

use super::Cuda;
use super::types::{CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemHandle, CUresult};
use crate::runtime::call::enter;
use crate::runtime::out::Out;
use crate::runtime::vmm;

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationGranularity(
    out: Out<'_, usize>,
    prop: Option<&CUmemAllocationProp>,
    option: c_int,
) -> CUresult {
    enter("cuMemGetAllocationGranularity", || vmm::granularity_of::<Cuda>(out, prop, option))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemCreate(
    handle: Out<'_, CUmemHandle>,
    bytes: usize,
    prop: Option<&CUmemAllocationProp>,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemCreate", || vmm::create::<Cuda>(handle, bytes, prop, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: CUmemHandle) -> CUresult {
    enter("cuMemRelease", || vmm::release::<Cuda>(handle))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressReserve(
    address: Out<'_, CUdeviceptr>,
    bytes: usize,
    alignment: usize,
    _hint: CUdeviceptr,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemAddressReserve", || vmm::reserve::<Cuda>(address, bytes, alignment, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: CUdeviceptr, bytes: usize) -> CUresult {
    enter("cuMemAddressFree", || vmm::free::<Cuda>(address, bytes))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(
    address: CUdeviceptr,
    bytes: usize,
    offset: usize,
    handle: CUmemHandle,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemMap", || vmm::map::<Cuda>(address, bytes, offset, handle, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: CUdeviceptr, bytes: usize) -> CUresult {
    enter("cuMemUnmap", || vmm::unmap::<Cuda>(address, bytes))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemSetAccess(
    address: CUdeviceptr,
    bytes: usize,
    descriptions: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    enter("cuMemSetAccess", || vmm::set_access::<Cuda>(address, bytes, descriptions, count))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemExportToShareableHandle(
    out: *mut c_void,
    handle: CUmemHandle,
    kind: c_int,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemExportToShareableHandle", || vmm::export::<Cuda>(out, handle, kind, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemImportFromShareableHandle(
    out: Out<'_, CUmemHandle>,
    shared: *mut c_void,
    kind: c_int,
) -> CUresult {
    enter("cuMemImportFromShareableHandle", || vmm::import::<Cuda>(out, shared, kind))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRetainAllocationHandle(
    out: Out<'_, CUmemHandle>,
    address: *mut c_void,
) -> CUresult {
    enter("cuMemRetainAllocationHandle", || vmm::retain::<Cuda>(out, address))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationPropertiesFromHandle(
    out: Out<'_, CUmemAllocationProp>,
    handle: CUmemHandle,
) -> CUresult {
    enter("cuMemGetAllocationPropertiesFromHandle", || vmm::properties::<Cuda>(out, handle))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetHandleForAddressRange(
    out: *mut c_void,
    address: CUdeviceptr,
    bytes: usize,
    kind: c_int,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemGetHandleForAddressRange", || {
        vmm::export_range::<Cuda>(out, address, bytes, kind, flags)
    })
}
