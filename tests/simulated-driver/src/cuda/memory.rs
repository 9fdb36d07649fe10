//! Memory that the driver allocates: on a device, ordered by a stream, and pinned on the host.

use std::ffi::{c_int, c_uint, c_void};

use super::Cuda;
use super::types::{CUdeviceptr, CUresult, CUstream};
use crate::device::settings::Setting;
use crate::runtime::call::enter;
use crate::runtime::code::INVALID_VALUE;
use crate::runtime::out::{Out, store};
use crate::runtime::{Face, memory};

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(address: Out<'_, CUdeviceptr>, bytes: usize) -> CUresult {
    enter("cuMemAlloc_v2", || memory::allocate::<Cuda>(address, bytes))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: CUdeviceptr) -> CUresult {
    enter("cuMemFree_v2", || memory::free::<Cuda>(address))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocAsync(
    address: Out<'_, CUdeviceptr>,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemAllocAsync", || memory::allocate_async::<Cuda>(address, bytes, handle))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: CUdeviceptr, handle: CUstream) -> CUresult {
    enter("cuMemFreeAsync", || memory::free_async::<Cuda>(address, handle))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) -> CUresult {
    enter("cuMemGetInfo_v2", || memory::info::<Cuda>(free, total))
}

/// Portable, device-mapped, write-combined.
const HOST_FLAGS: c_uint = 7;
/// The same, of memory of devices, and to read only.
const REGISTER_FLAGS: c_uint = 15;

#[unsafe(no_mangle)]
extern "C" fn cuMemHostAlloc(
    address: Out<'_, *mut c_void>,
    bytes: usize,
    flags: c_uint,
) -> CUresult {
    enter("cuMemHostAlloc", || memory::allocate_host::<Cuda>(address, bytes, flags, HOST_FLAGS))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(address: *mut c_void) -> CUresult {
    enter("cuMemFreeHost", || memory::free_host::<Cuda>(address))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint) -> CUresult {
    enter("cuMemHostRegister_v2", || {
        memory::register::<Cuda>(address, bytes, flags, REGISTER_FLAGS)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(address: *mut c_void) -> CUresult {
    enter("cuMemHostUnregister", || memory::unregister::<Cuda>(address))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostGetDevicePointer_v2(
    out: Out<'_, CUdeviceptr>,
    address: *mut c_void,
    flags: c_uint,
) -> CUresult {
    enter("cuMemHostGetDevicePointer_v2", || memory::device_pointer::<Cuda>(out, address, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAddressRange_v2(
    base: Out<'_, CUdeviceptr>,
    bytes: Out<'_, usize>,
    address: CUdeviceptr,
) -> CUresult {
    enter("cuMemGetAddressRange_v2", || memory::range::<Cuda>(base, bytes, address))
}

/// Pools are not simulated beyond [`cuMemAllocAsync`]; there is one for each device.
#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetDefaultMemPool(pool: Out<'_, usize>, device: c_int) -> CUresult {
    enter("cuDeviceGetDefaultMemPool", || store(pool, memory::pool_of(Cuda::physical(device)?)))
}

/// Network cards are not simulated; what counts is that the call was made.
#[unsafe(no_mangle)]
extern "C" fn cuFlushGPUDirectRDMAWrites(target: c_int, scope: c_int) -> CUresult {
    enter("cuFlushGPUDirectRDMAWrites", || {
        Cuda::current()?;
        let known = target == 0 && matches!(scope, 100 | 200);
        if known && Setting::CardWrites.is("flush") { Ok(()) } else { Err(INVALID_VALUE) }
    })
}
