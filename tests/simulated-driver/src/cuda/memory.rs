//! Memory that the driver allocates: on a device, ordered by a stream, and pinned on the host.

use std::ffi::{c_int, c_uint, c_void};

use super::call::{enter, refuse_during_capture};
use super::code::{
    CUresult, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE,
    OUT_OF_MEMORY, Outcome, STREAM_CAPTURE_UNSUPPORTED,
};
use super::context;
use super::handles::stream;
use super::types::{CUdeviceptr, CUstream, Out, store};
use crate::device::command::Command;
use crate::device::machine::memory;
use crate::device::memory::{Kind, capacity};

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(address: Out<'_, CUdeviceptr>, bytes: usize) -> CUresult {
    enter("cuMemAlloc_v2", || {
        let session = context::current()?;
        refuse_during_capture()?;
        let place = address.filter(|_| bytes > 0).ok_or(INVALID_VALUE)?;
        let kind = Kind::Plain { session: session.id() };
        place.write(memory().allocate(session.device(), bytes as u64, kind)?);
        Ok(())
    })
}

/// Commands that touch the memory right now are waited for; those to come find nothing.
#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: CUdeviceptr) -> CUresult {
    enter("cuMemFree_v2", || {
        context::current()?;
        refuse_during_capture()?;
        if address == 0 {
            return Ok(());
        }
        let own = |kind: &Kind| matches!(kind, Kind::Plain { .. } | Kind::Pooled { .. });
        Ok(memory().remove(address, |range| own(&range.kind))?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocAsync(
    address: Out<'_, CUdeviceptr>,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemAllocAsync", || {
        let queue = stream(handle)?;
        if queue.is_capturing() {
            // Nodes that allocate are not simulated.
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        let session = queue.session();
        let place = address.filter(|_| bytes > 0).ok_or(INVALID_VALUE)?;
        let kind = Kind::Pooled { session: session.id() };
        place.write(memory().allocate(session.device(), bytes as u64, kind)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: CUdeviceptr, handle: CUstream) -> CUresult {
    enter("cuMemFreeAsync", || {
        let queue = stream(handle)?;
        let range = memory().find(address).ok_or(INVALID_VALUE)?;
        let own = matches!(range.kind, Kind::Plain { .. } | Kind::Pooled { .. });
        if range.base != address || !own {
            return Err(INVALID_VALUE);
        }
        Ok(queue.submit(Command::Release(address))?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) -> CUresult {
    enter("cuMemGetInfo_v2", || {
        let (all, left) = capacity(context::current()?.device());
        store(free, left as usize)?;
        store(total, all as usize)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostAlloc(
    address: Out<'_, *mut c_void>,
    bytes: usize,
    flags: c_uint,
) -> CUresult {
    enter("cuMemHostAlloc", || {
        let session = context::current()?;
        refuse_during_capture()?;
        // Portable, device-mapped, write-combined.
        let place = address.filter(|_| bytes > 0 && flags & !7 == 0).ok_or(INVALID_VALUE)?;
        let kind = Kind::Host { session: session.id() };
        place.write(memory().allocate(session.device(), bytes as u64, kind)? as *mut c_void);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(address: *mut c_void) -> CUresult {
    enter("cuMemFreeHost", || {
        context::current()?;
        refuse_during_capture()?;
        if address.is_null() {
            return Ok(());
        }
        Ok(memory().remove(address as u64, |range| matches!(range.kind, Kind::Host { .. }))?)
    })
}

/// Pins memory of the caller, so that devices reach it at its own address.
#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint) -> CUresult {
    enter("cuMemHostRegister_v2", || {
        let session = context::current()?;
        if address.is_null() || bytes == 0 || flags & !15 != 0 {
            return Err(INVALID_VALUE);
        }
        let end = (address as u64).checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
        let taken = memory().select(|range| range.base < end && range.end() > address as u64);
        if !taken.is_empty() {
            return Err(HOST_MEMORY_ALREADY_REGISTERED);
        }
        let adopted = memory().adopt(address as u64, bytes as u64, session.id());
        adopted.ok_or(OUT_OF_MEMORY)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(address: *mut c_void) -> CUresult {
    enter("cuMemHostUnregister", || {
        context::current()?;
        let removed =
            memory().remove(address as u64, |range| matches!(range.kind, Kind::Registered { .. }));
        removed.map_err(|_| HOST_MEMORY_NOT_REGISTERED)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostGetDevicePointer_v2(
    out: Out<'_, CUdeviceptr>,
    address: *mut c_void,
    flags: c_uint,
) -> CUresult {
    enter("cuMemHostGetDevicePointer_v2", || {
        context::current()?;
        let range = memory().find(address as u64).filter(|range| range.is_host() && flags == 0);
        range.ok_or(INVALID_VALUE)?;
        store(out, address as CUdeviceptr)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAddressRange_v2(
    base: Out<'_, CUdeviceptr>,
    bytes: Out<'_, usize>,
    address: CUdeviceptr,
) -> CUresult {
    enter("cuMemGetAddressRange_v2", || {
        context::current()?;
        let range = memory().find(address).ok_or(INVALID_VALUE)?;
        store_if(base, range.base)?;
        store_if(bytes, range.bytes as usize)
    })
}

/// Stores a result that the caller may not want.
fn store_if<T>(out: Out<'_, T>, value: T) -> Outcome {
    if out.is_some() { store(out, value) } else { Ok(()) }
}

/// The handle of a device's only pool.
pub(super) fn pool_of(physical: u32) -> usize {
    0x55_0000_0000 + physical as usize * 16
}

/// Pools are not simulated beyond [`cuMemAllocAsync`]; there is one for each device.
#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetDefaultMemPool(pool: Out<'_, usize>, device: c_int) -> CUresult {
    enter("cuDeviceGetDefaultMemPool", || store(pool, pool_of(super::device::physical(device)?)))
}
