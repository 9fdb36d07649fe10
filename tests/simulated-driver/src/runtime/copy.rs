//! Implements copies and fills, on a stream or synchronously.

use std::ffi::c_uint;
use std::sync::Arc;

use super::Api;
use super::call::refuse_during_capture;
use super::code::{INVALID_VALUE, Outcome, UNKNOWN};
use super::handles::stream;
use crate::device::command::Command;
use crate::device::copy::{Copy, End, Fill};
use crate::device::fault::Fault;
use crate::device::machine::memory;
use crate::device::queue::Queue;

/// What a caller says about an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    Device,
    Host,
    /// The caller says nothing; the table of addresses decides.
    Either,
}

/// Converts an address to one end of a copy.
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

/// Submits a copy.
///
/// As the vendors document: bytes of pageable host memory are read before the call returns. A copy
/// into such memory, or between any host memory, returns when it is complete.
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

/// The source or the destination of a two-dimensional copy, in CUDA's layout.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Side {
    x_bytes: usize,
    y: usize,
    memory_type: c_uint,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

/// The parameters of a two-dimensional copy. Only those between devices are simulated.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    src: Side,
    dst: Side,
    width_bytes: usize,
    height: usize,
}

/// The largest pitch (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const PITCH_MAX: usize = i32::MAX as usize;
const MEMORY_TYPE_DEVICE: c_uint = 2;

impl Rows {
    /// Submits the rows, of which the last is copied first, because the vendor promises no order of rows.
    pub(crate) fn copy<A: Api>(&self, handle: usize) -> Outcome {
        let queue = stream::<A>(handle)?;
        let takes = |side: &Side| {
            let pitches = self.width_bytes..=PITCH_MAX;
            side.memory_type == MEMORY_TYPE_DEVICE && pitches.contains(&side.pitch)
        };
        if !takes(&self.src) || !takes(&self.dst) {
            return Err(INVALID_VALUE);
        }
        let starts = |side: &Side, row: usize| {
            let offset = (side.y + row) * side.pitch + side.x_bytes;
            (side.device + offset as u64, Said::Device)
        };
        (0..self.height).rev().try_for_each(|row| {
            let (dst, src) = (starts(&self.dst, row), starts(&self.src, row));
            copy_on(&queue, dst, src, self.width_bytes, false)
        })
    }
}

/// Waits until the queue is empty, and returns its fault if it has one.
fn finish(queue: &Queue) -> Outcome {
    if let Err(refused) = queue.drain() {
        // The caller may free its memory now, so the queued commands must never run.
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

/// An address, and what the caller says about it.
pub(crate) type CopyEnd = (u64, Said);

pub(crate) fn copy<A: Api>(handle: usize, dst: CopyEnd, src: CopyEnd, bytes: usize) -> Outcome {
    copy_on(&*stream::<A>(handle)?, dst, src, bytes, false)
}

/// Copies by one engine, not by compute units.
pub(crate) fn copy_by_one_engine<A: Api>(
    handle: usize,
    dst: CopyEnd,
    src: CopyEnd,
    bytes: usize,
) -> Outcome {
    copy_on(&*stream::<A>(handle)?, dst, src, bytes, true)
}

pub(crate) fn fill<A: Api>(handle: usize, address: u64, value: u8, bytes: usize) -> Outcome {
    fill_on(&*stream::<A>(handle)?, address, bytes, [value; 4])
}

pub(crate) fn fill_words<A: Api>(handle: usize, address: u64, value: u32, count: usize) -> Outcome {
    let bytes = count.checked_mul(4).ok_or(INVALID_VALUE)?;
    fill_on(&*stream::<A>(handle)?, address, bytes, value.to_ne_bytes())
}

/// Runs a call without a stream: on the legacy default stream, which it then waits for.
fn at_once<A: Api>(run: impl FnOnce(&Queue) -> Outcome) -> Outcome {
    A::current()?;
    refuse_during_capture()?;
    let queue = stream::<A>(0)?;
    run(&queue)?;
    finish(&queue)
}

pub(crate) fn copy_at_once<A: Api>(dst: CopyEnd, src: CopyEnd, bytes: usize) -> Outcome {
    at_once::<A>(|queue| copy_on(queue, dst, src, bytes, false))
}

pub(crate) fn fill_at_once<A: Api>(address: u64, value: u8, bytes: usize) -> Outcome {
    at_once::<A>(|queue| fill_on(queue, address, bytes, [value; 4]))
}
