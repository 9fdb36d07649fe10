//! Memory that the driver allocates: on a device, ordered by a stream, and pinned on the host.

use std::ffi::{c_uint, c_void};

use super::Face;
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

pub(crate) fn allocate<F: Face>(address: Out<'_, u64>, bytes: usize) -> Outcome {
    let session = F::current()?;
    refuse_during_capture()?;
    let place = address.filter(|_| bytes > 0).ok_or(INVALID_VALUE)?;
    let kind = Kind::Plain { session: session.id() };
    place.write(memory().allocate(session.device(), bytes as u64, kind)?);
    Ok(())
}

/// Commands that touch the memory right now are waited for; those to come find nothing.
pub(crate) fn free<F: Face>(address: u64) -> Outcome {
    F::ready()?;
    refuse_during_capture()?;
    if address == 0 {
        return Ok(());
    }
    let own = |kind: &Kind| {
        matches!(kind, Kind::Plain { .. } | Kind::Pooled { .. } | Kind::Signal { .. })
    };
    Ok(memory().remove(address, |range| own(&range.kind))?)
}

pub(crate) fn allocate_async<F: Face>(
    address: Out<'_, u64>,
    bytes: usize,
    handle: usize,
) -> Outcome {
    let queue = stream::<F>(handle)?;
    if queue.is_capturing() {
        // Nodes that allocate are not simulated.
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    let session = queue.session();
    let place = address.filter(|_| bytes > 0).ok_or(INVALID_VALUE)?;
    let kind = Kind::Pooled { session: session.id() };
    place.write(memory().allocate(session.device(), bytes as u64, kind)?);
    Ok(())
}

pub(crate) fn free_async<F: Face>(address: u64, handle: usize) -> Outcome {
    let queue = stream::<F>(handle)?;
    let range = memory().find(address).ok_or(INVALID_VALUE)?;
    let own = matches!(range.kind, Kind::Plain { .. } | Kind::Pooled { .. });
    if range.base != address || !own {
        return Err(INVALID_VALUE);
    }
    Ok(queue.submit(Command::Release(address))?)
}

pub(crate) fn info<F: Face>(free: Out<'_, usize>, total: Out<'_, usize>) -> Outcome {
    let (all, left) = capacity(F::current()?.device());
    store(free, left as usize)?;
    store(total, all as usize)
}

/// `known` are the flags that the face has.
pub(crate) fn allocate_host<F: Face>(
    address: Out<'_, *mut c_void>,
    bytes: usize,
    flags: c_uint,
    known: c_uint,
) -> Outcome {
    let session = F::current()?;
    refuse_during_capture()?;
    let place = address.filter(|_| bytes > 0 && flags & !known == 0).ok_or(INVALID_VALUE)?;
    let kind = Kind::Host { session: session.id() };
    place.write(memory().allocate(session.device(), bytes as u64, kind)? as *mut c_void);
    Ok(())
}

pub(crate) fn free_host<F: Face>(address: *mut c_void) -> Outcome {
    F::ready()?;
    refuse_during_capture()?;
    if address.is_null() {
        return Ok(());
    }
    Ok(memory().remove(address as u64, |range| matches!(range.kind, Kind::Host { .. }))?)
}

/// Pins memory of the caller, so that devices reach it at its own address.
pub(crate) fn register<F: Face>(
    address: *mut c_void,
    bytes: usize,
    flags: c_uint,
    known: c_uint,
) -> Outcome {
    let session = F::current()?;
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

pub(crate) fn unregister<F: Face>(address: *mut c_void) -> Outcome {
    F::ready()?;
    let removed =
        memory().remove(address as u64, |range| matches!(range.kind, Kind::Registered { .. }));
    removed.map_err(|_| HOST_MEMORY_NOT_REGISTERED)
}

/// The address of host memory on devices, which is the same here.
pub(crate) fn device_pointer<F: Face>(
    out: Out<'_, u64>,
    address: *mut c_void,
    flags: c_uint,
) -> Outcome {
    F::ready()?;
    let range = memory().find(address as u64).filter(|range| range.is_host() && flags == 0);
    range.ok_or(INVALID_VALUE)?;
    store(out, address as u64)
}

pub(crate) fn range<F: Face>(base: Out<'_, u64>, bytes: Out<'_, usize>, address: u64) -> Outcome {
    F::ready()?;
    let range = memory().find(address).ok_or(INVALID_VALUE)?;
    store_if(base, range.base)?;
    store_if(bytes, range.bytes as usize)
}

/// The handle of a device's only pool.
pub(crate) fn pool_of(physical: u32) -> usize {
    0x55_0000_0000 + physical as usize * 16
}
