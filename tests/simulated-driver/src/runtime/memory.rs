//! Implements the calls on memory of a device, memory ordered by a stream, and pinned host memory.

use std::ffi::{c_uint, c_void};

use super::Api;
use super::call::refuse_during_capture;
use super::code::{
    HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE, OUT_OF_MEMORY,
    Outcome, STREAM_CAPTURE_UNSUPPORTED,
};
use super::handles::stream;
use super::out::{Out, store, store_if};
use crate::device::command::Command;
use crate::device::machine::memory;
use crate::device::memory::{Kind, capacity};

pub(crate) fn allocate<A: Api>(address: Out<'_, u64>, bytes: usize) -> Outcome {
    let session = A::current()?;
    refuse_during_capture()?;
    let place = address.filter(|_| bytes > 0).ok_or(INVALID_VALUE)?;
    let kind = Kind::Plain { session: session.id() };
    place.write(memory().allocate(session.device(), bytes as u64, kind)?);
    Ok(())
}

/// Frees device memory. Waits for commands that access it now; later ones fail.
pub(crate) fn free<A: Api>(address: u64) -> Outcome {
    A::ready()?;
    refuse_during_capture()?;
    if address == 0 {
        return Ok(());
    }
    let own = |kind: &Kind| {
        matches!(kind, Kind::Plain { .. } | Kind::Pooled { .. } | Kind::Signal { .. })
    };
    Ok(memory().remove(address, |range| own(&range.kind))?)
}

pub(crate) fn allocate_async<A: Api>(
    address: Out<'_, u64>,
    bytes: usize,
    handle: usize,
) -> Outcome {
    let queue = stream::<A>(handle)?;
    if queue.is_capturing() {
        // Allocation nodes of graphs are not simulated.
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    let session = queue.session();
    let place = address.filter(|_| bytes > 0).ok_or(INVALID_VALUE)?;
    let kind = Kind::Pooled { session: session.id() };
    place.write(memory().allocate(session.device(), bytes as u64, kind)?);
    Ok(())
}

pub(crate) fn free_async<A: Api>(address: u64, handle: usize) -> Outcome {
    let queue = stream::<A>(handle)?;
    let range = memory().find(address).ok_or(INVALID_VALUE)?;
    let own = matches!(range.kind, Kind::Plain { .. } | Kind::Pooled { .. });
    if range.base != address || !own {
        return Err(INVALID_VALUE);
    }
    Ok(queue.submit(Command::Release(address))?)
}

pub(crate) fn info<A: Api>(free: Out<'_, usize>, total: Out<'_, usize>) -> Outcome {
    let (all, left) = capacity(A::current()?.device());
    store(free, left as usize)?;
    store(total, all as usize)
}

/// Allocates pinned host memory; `known` are the flags that the API accepts.
pub(crate) fn allocate_host<A: Api>(
    address: Out<'_, *mut c_void>,
    bytes: usize,
    flags: c_uint,
    known: c_uint,
) -> Outcome {
    let session = A::current()?;
    refuse_during_capture()?;
    let place = address.filter(|_| bytes > 0 && flags & !known == 0).ok_or(INVALID_VALUE)?;
    let kind = Kind::Host { session: session.id() };
    place.write(memory().allocate(session.device(), bytes as u64, kind)? as *mut c_void);
    Ok(())
}

pub(crate) fn free_host<A: Api>(address: *mut c_void) -> Outcome {
    A::ready()?;
    refuse_during_capture()?;
    if address.is_null() {
        return Ok(());
    }
    Ok(memory().remove(address as u64, |range| matches!(range.kind, Kind::Host { .. }))?)
}

/// Pins memory of the caller, so that devices access it at its own address.
pub(crate) fn register<A: Api>(
    address: *mut c_void,
    bytes: usize,
    flags: c_uint,
    known: c_uint,
) -> Outcome {
    let session = A::current()?;
    if address.is_null() || bytes == 0 || flags & !known != 0 {
        return Err(INVALID_VALUE);
    }
    let end = (address as u64).checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
    let taken = memory().select(|range| range.base < end && range.end() > address as u64);
    if !taken.is_empty() {
        return Err(HOST_MEMORY_ALREADY_REGISTERED);
    }
    let adopted = memory().adopt(address as u64, bytes as u64, session.id());
    adopted.ok_or(OUT_OF_MEMORY)
}

/// Waits for every stream of the context, as on an H200, where a stream that releases another one gets no
/// further meanwhile.
pub(crate) fn unregister<A: Api>(address: *mut c_void) -> Outcome {
    A::current()?.drain_alone()?;
    let removed =
        memory().remove(address as u64, |range| matches!(range.kind, Kind::Registered { .. }));
    removed.map_err(|_| HOST_MEMORY_NOT_REGISTERED)
}

/// Stores the address of host memory on devices, which is the same here.
pub(crate) fn device_pointer<A: Api>(
    out: Out<'_, u64>,
    address: *mut c_void,
    flags: c_uint,
) -> Outcome {
    A::ready()?;
    let range = memory().find(address as u64).filter(|range| range.is_host() && flags == 0);
    range.ok_or(INVALID_VALUE)?;
    store(out, address as u64)
}

pub(crate) fn range<A: Api>(base: Out<'_, u64>, bytes: Out<'_, usize>, address: u64) -> Outcome {
    A::ready()?;
    let range = memory().find(address).ok_or(INVALID_VALUE)?;
    store_if(base, range.base)?;
    store_if(bytes, range.bytes as usize)
}

/// Returns the handle of a device's only pool.
pub(crate) fn pool_of(physical: u32) -> usize {
    0x55_0000_0000 + physical as usize * 16
}
