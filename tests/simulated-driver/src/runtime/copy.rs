//! Copies and fills, on a stream or at once.

use std::sync::Arc;

use super::Face;
use super::call::refuse_during_capture;
use super::code::{INVALID_VALUE, Outcome, UNKNOWN};
use super::handles::stream;
use crate::device::command::Command;
use crate::device::copy::{Copy, End, Fill};
use crate::device::fault::Fault;
use crate::device::machine::memory;
use crate::device::queue::Queue;

/// What a caller says an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
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
pub(crate) fn copy_on(
    queue: &Queue,
    (dst, dst_said): (u64, Said),
    (src, src_said): (u64, Said),
    bytes: usize,
    by_one_engine: bool,
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
    queue.submit(Command::Copy(Copy { dst, src, bytes: bytes as u64, by_one_engine }))?;
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

fn fill_on(queue: &Queue, address: u64, bytes: usize, pattern: [u8; 4]) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    let End::Memory(address) = end(address, bytes, Said::Device)? else {
        return Err(INVALID_VALUE);
    };
    Ok(queue.submit(Command::Fill(Fill { address, bytes: bytes as u64, pattern }))?)
}

/// An address, and what the caller says that it is.
pub(crate) type Place = (u64, Said);

pub(crate) fn copy<F: Face>(handle: usize, dst: Place, src: Place, bytes: usize) -> Outcome {
    copy_on(&*stream::<F>(handle)?, dst, src, bytes, false)
}

/// As [`copy`], by one engine and not by compute units.
pub(crate) fn copy_by_one_engine<F: Face>(
    handle: usize,
    dst: Place,
    src: Place,
    bytes: usize,
) -> Outcome {
    copy_on(&*stream::<F>(handle)?, dst, src, bytes, true)
}

pub(crate) fn fill<F: Face>(handle: usize, address: u64, value: u8, bytes: usize) -> Outcome {
    fill_on(&*stream::<F>(handle)?, address, bytes, [value; 4])
}

pub(crate) fn fill_words<F: Face>(
    handle: usize,
    address: u64,
    value: u32,
    count: usize,
) -> Outcome {
    let bytes = count.checked_mul(4).ok_or(INVALID_VALUE)?;
    fill_on(&*stream::<F>(handle)?, address, bytes, value.to_ne_bytes())
}

/// For calls without a stream: the legacy default stream, and then a wait for it.
fn at_once<F: Face>(run: impl FnOnce(&Queue) -> Outcome) -> Outcome {
    F::current()?;
    refuse_during_capture()?;
    let queue = stream::<F>(0)?;
    run(&queue)?;
    finish(&queue)
}

pub(crate) fn copy_at_once<F: Face>(dst: Place, src: Place, bytes: usize) -> Outcome {
    at_once::<F>(|queue| copy_on(queue, dst, src, bytes, false))
}

pub(crate) fn fill_at_once<F: Face>(address: u64, value: u8, bytes: usize) -> Outcome {
    at_once::<F>(|queue| fill_on(queue, address, bytes, [value; 4]))
}
