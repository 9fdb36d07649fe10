//! Exports the calls on allocations, pinned memory, copies, and IPC.

use std::ffi::{c_int, c_uint, c_void};

use hip_sys::{
    hipDeviceptr_t, hipIpcMemHandle_t, hipMemcpyKind, hipMemoryType, hipPointer_attribute,
    hipPointerAttribute_t, hipStream_t,
};

use crate::calls::hip;
use crate::cuda::{CUdeviceptr, CUresult, Cuda};
use crate::result::{INVALID_VALUE, SUCCESS};

/// The bits of HIP's flags of host memory that CUDA has too: portable, mapped, write-combined.
const HOST_FLAGS: c_uint = 7;

// Attributes of a pointer, which both vendors number alike.
const MEMORY_TYPE: c_int = 2;
const DEVICE_POINTER: c_int = 3;
const HOST_POINTER: c_int = 4;
const IS_MANAGED: c_int = 8;
const DEVICE_ORDINAL: c_int = 9;
/// `CU_MEMORYTYPE_HOST`.
const HOST: c_int = 1;

fn address(pointer: *const c_void) -> CUdeviceptr {
    pointer as CUdeviceptr
}

/// An allocation; of no bytes it is null, as with HIP.
///
/// # Safety
/// `out` is null or may be written.
unsafe fn allocate(cuda: &Cuda, out: *mut *mut c_void, bytes: usize) -> CUresult {
    if bytes > 0 || out.is_null() {
        // SAFETY: the caller's; the driver refuses null.
        return unsafe { (cuda.cuMemAlloc)(out.cast(), bytes) };
    }
    // SAFETY: the caller's.
    unsafe { out.write(std::ptr::null_mut()) };
    SUCCESS
}

/// Stores what is known of an address; HIP refuses one that it does not know.
///
/// # Safety
/// `out` is null or may be written.
unsafe fn describe(cuda: &Cuda, out: *mut hipPointerAttribute_t, address: CUdeviceptr) -> CUresult {
    if out.is_null() {
        return INVALID_VALUE;
    }
    let number = |attribute| {
        // Pointers are asked for by the same call, and are as wide.
        let mut value = 0_u64;
        // SAFETY: the local is as wide as the widest attribute that is asked for.
        let result =
            unsafe { (cuda.cuPointerGetAttribute)((&raw mut value).cast(), attribute, address) };
        if result == SUCCESS { Ok(value) } else { Err(result) }
    };
    let found = || {
        let is_host = number(MEMORY_TYPE)? == HOST as u64;
        let own = number(DEVICE_POINTER).unwrap_or(address);
        Ok::<_, CUresult>(hipPointerAttribute_t {
            type_: if is_host {
                hipMemoryType::hipMemoryTypeHost
            } else {
                hipMemoryType::hipMemoryTypeDevice
            },
            device: number(DEVICE_ORDINAL)? as c_int,
            devicePointer: own as *mut c_void,
            hostPointer: number(HOST_POINTER).unwrap_or(0) as *mut c_void,
            isManaged: number(IS_MANAGED).unwrap_or(0) as c_int,
            allocationFlags: 0,
        })
    };
    match found() {
        Ok(found) => {
            // SAFETY: the caller's.
            unsafe { out.write(found) };
            SUCCESS
        }
        Err(refusal) => refusal,
    }
}

/// A copy behind what the default stream holds, complete at the return.
///
/// # Safety
/// Both spans may be used.
unsafe fn copy(cuda: &Cuda, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> CUresult {
    let default = std::ptr::null_mut();
    // SAFETY: the caller's.
    let result = unsafe { (cuda.cuMemcpyAsync)(to, from, bytes, default) };
    if result != SUCCESS {
        return result;
    }
    // SAFETY: the default stream lives.
    unsafe { (cuda.cuStreamSynchronize)(default) }
}

hip! {
    fn hipMalloc(out: *mut *mut c_void, bytes: usize) = |cuda| allocate(cuda, out, bytes);
    fn hipExtMallocWithFlags(out: *mut *mut c_void, bytes: usize, _flags: c_uint) =
        |cuda| allocate(cuda, out, bytes);
    fn hipFree(memory: *mut c_void) = |cuda| (cuda.cuMemFree)(address(memory));
    fn hipHostMalloc(out: *mut *mut c_void, bytes: usize, flags: c_uint) =
        |cuda| (cuda.cuMemHostAlloc)(out, bytes, flags & HOST_FLAGS);
    fn hipHostFree(memory: *mut c_void) = |cuda| (cuda.cuMemFreeHost)(memory);
    fn hipHostRegister(memory: *mut c_void, bytes: usize, flags: c_uint) =
        |cuda| (cuda.cuMemHostRegister)(memory, bytes, flags & HOST_FLAGS);
    fn hipHostUnregister(memory: *mut c_void) = |cuda| (cuda.cuMemHostUnregister)(memory);
    fn hipHostGetDevicePointer(out: *mut *mut c_void, memory: *mut c_void, flags: c_uint) =
        |cuda| (cuda.cuMemHostGetDevicePointer)(out.cast(), memory, flags);
    fn hipMemGetInfo(free: *mut usize, total: *mut usize) = |cuda| (cuda.cuMemGetInfo)(free, total);
    fn hipMemGetAddressRange(base: *mut hipDeviceptr_t, bytes: *mut usize, memory: hipDeviceptr_t) =
        |cuda| (cuda.cuMemGetAddressRange)(base.cast(), bytes, address(memory));
    fn hipPointerGetAttribute(
        out: *mut c_void,
        attribute: hipPointer_attribute,
        memory: hipDeviceptr_t,
    ) = |cuda| (cuda.cuPointerGetAttribute)(out, attribute.0.cast_signed(), address(memory));
    fn hipPointerGetAttributes(out: *mut hipPointerAttribute_t, memory: *const c_void) =
        |cuda| describe(cuda, out, address(memory));

    fn hipMemsetAsync(memory: *mut c_void, value: c_int, bytes: usize, stream: hipStream_t) =
        |cuda| (cuda.cuMemsetD8Async)(address(memory), value as u8, bytes, stream.cast());
    fn hipMemsetD8Async(memory: hipDeviceptr_t, value: u8, bytes: usize, stream: hipStream_t) =
        |cuda| (cuda.cuMemsetD8Async)(address(memory), value, bytes, stream.cast());
    fn hipMemcpy(to: *mut c_void, from: *const c_void, bytes: usize, _kind: hipMemcpyKind) =
        |cuda| copy(cuda, address(to), address(from), bytes);
    fn hipMemcpyAsync(
        to: *mut c_void,
        from: *const c_void,
        bytes: usize,
        _kind: hipMemcpyKind,
        stream: hipStream_t,
    ) = |cuda| (cuda.cuMemcpyAsync)(address(to), address(from), bytes, stream.cast());
    fn hipMemcpyDtoDAsync(
        to: hipDeviceptr_t,
        from: hipDeviceptr_t,
        bytes: usize,
        stream: hipStream_t,
    ) = |cuda| (cuda.cuMemcpyAsync)(address(to), address(from), bytes, stream.cast());
    // One address space: the driver knows whose memory it is.
    fn hipMemcpyPeerAsync(
        to: *mut c_void,
        _to_device: c_int,
        from: *const c_void,
        _from_device: c_int,
        bytes: usize,
        stream: hipStream_t,
    ) = |cuda| (cuda.cuMemcpyAsync)(address(to), address(from), bytes, stream.cast());

    fn hipIpcGetMemHandle(out: *mut hipIpcMemHandle_t, memory: *mut c_void) =
        |cuda| (cuda.cuIpcGetMemHandle)(out.cast(), address(memory));
    fn hipIpcOpenMemHandle(out: *mut *mut c_void, handle: hipIpcMemHandle_t, flags: c_uint) =
        |cuda| (cuda.cuIpcOpenMemHandle)(out.cast(), handle.reserved, flags);
    fn hipIpcCloseMemHandle(memory: *mut c_void) =
        |cuda| (cuda.cuIpcCloseMemHandle)(address(memory));
}
