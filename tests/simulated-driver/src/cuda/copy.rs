//! Copies and fills, on a stream or at once.

use std::ffi::{c_uchar, c_uint, c_void};
use std::sync::Arc;

use super::call::{enter, refuse_during_capture};
use super::code::{CUresult, INVALID_VALUE, Outcome, UNKNOWN};
use super::handles::stream;
use super::types::{CUcontext, CUdeviceptr, CUstream};
use crate::device::command::Command;
use crate::device::copy::{Copy, End, Fill};
use crate::device::fault::Fault;
use crate::device::machine::memory;
use crate::device::queue::Queue;

/// What a caller says an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    Device,
    Host,
    /// Whatever the table says.
    Either,
}

/// The address as one end of a copy.
fn end(address: u64, bytes: usize, said: Said) -> Outcome<End> {
    match memory().find(address) {
        Some(range) => {
            let right = said != Said::Host || range.is_host();
            if !right || !memory().holds(address, bytes as u64) {
                return Err(INVALID_VALUE);
            }
            Ok(End::Memory(address))
        }
        None if said == Said::Device || address == 0 => Err(INVALID_VALUE),
        None => Ok(End::Host(address)),
    }
}

fn is_host(end: &End) -> bool {
    match end {
        End::Memory(address) => memory().find(*address).is_some_and(|range| range.is_host()),
        End::Host(_) | End::Staged(_) => true,
    }
}

/// Takes a copy. From ordinary host memory the bytes are taken at once, and into such memory the
/// call returns when they are there, as it does from host memory to host memory of any kind; all as
/// the vendor says.
pub(super) fn copy(
    queue: &Queue,
    (dst, dst_said): (u64, Said),
    (src, src_said): (u64, Said),
    bytes: usize,
) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    let (dst, mut src) = (end(dst, bytes, dst_said)?, end(src, bytes, src_said)?);
    let captured = queue.is_capturing();
    if let (End::Host(address), false) = (&src, captured) {
        // SAFETY: the caller gives memory that may be read for this length.
        let staged = unsafe { std::slice::from_raw_parts(*address as *const u8, bytes) };
        src = End::Staged(Arc::from(staged));
    }
    let both_on_host = is_host(&dst) && is_host(&src);
    let waits = (matches!(dst, End::Host(_)) || both_on_host) && !captured;
    queue.submit(Command::Copy(Copy { dst, src, bytes: bytes as u64 }))?;
    if waits { finish(queue) } else { Ok(()) }
}

/// Waits until the queue is empty, and says how it went.
fn finish(queue: &Queue) -> Outcome {
    if let Err(refused) = queue.drain() {
        // The caller's memory is as good as gone, so what is queued must never run.
        queue.session().break_with(Fault::Asked(UNKNOWN.0));
        return Err(refused.into());
    }
    queue.session().fault().map_or(Ok(()), |fault| Err(fault.into()))
}

fn fill(queue: &Queue, address: u64, bytes: usize, pattern: [u8; 4]) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    let End::Memory(address) = end(address, bytes, Said::Device)? else {
        return Err(INVALID_VALUE);
    };
    Ok(queue.submit(Command::Fill(Fill { address, bytes: bytes as u64, pattern }))?)
}

/// For calls without a stream: the legacy default stream, and then a wait for it.
fn at_once(run: impl FnOnce(&Queue) -> Outcome) -> Outcome {
    super::context::current()?;
    refuse_during_capture()?;
    let queue = stream(0)?;
    run(&queue)?;
    finish(&queue)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyAsync(
    dst: CUdeviceptr,
    src: CUdeviceptr,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemcpyAsync", || {
        copy(&*stream(handle)?, (dst, Said::Either), (src, Said::Either), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(
    dst: CUdeviceptr,
    src: CUdeviceptr,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemcpyDtoDAsync_v2", || {
        copy(&*stream(handle)?, (dst, Said::Device), (src, Said::Device), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyPeerAsync(
    dst: CUdeviceptr,
    _dst_context: CUcontext,
    src: CUdeviceptr,
    _src_context: CUcontext,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemcpyPeerAsync", || {
        copy(&*stream(handle)?, (dst, Said::Device), (src, Said::Device), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(
    dst: CUdeviceptr,
    src: *const c_void,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemcpyHtoDAsync_v2", || {
        copy(&*stream(handle)?, (dst, Said::Device), (src as u64, Said::Host), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(
    dst: *mut c_void,
    src: CUdeviceptr,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemcpyDtoHAsync_v2", || {
        copy(&*stream(handle)?, (dst as u64, Said::Host), (src, Said::Device), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoD_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize) -> CUresult {
    enter("cuMemcpyHtoD_v2", || {
        at_once(|queue| copy(queue, (dst, Said::Device), (src as u64, Said::Host), bytes))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize) -> CUresult {
    enter("cuMemcpyDtoH_v2", || {
        at_once(|queue| copy(queue, (dst as u64, Said::Host), (src, Said::Device), bytes))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoD_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) -> CUresult {
    enter("cuMemcpyDtoD_v2", || {
        at_once(|queue| copy(queue, (dst, Said::Device), (src, Said::Device), bytes))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(
    address: CUdeviceptr,
    value: c_uchar,
    bytes: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemsetD8Async", || fill(&*stream(handle)?, address, bytes, [value; 4]))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8_v2(address: CUdeviceptr, value: c_uchar, bytes: usize) -> CUresult {
    enter("cuMemsetD8_v2", || at_once(|queue| fill(queue, address, bytes, [value; 4])))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32Async(
    address: CUdeviceptr,
    value: c_uint,
    count: usize,
    handle: CUstream,
) -> CUresult {
    enter("cuMemsetD32Async", || {
        let bytes = count.checked_mul(4).ok_or(INVALID_VALUE)?;
        fill(&*stream(handle)?, address, bytes, value.to_ne_bytes())
    })
}
