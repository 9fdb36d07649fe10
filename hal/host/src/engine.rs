//! The engine of the host backend: a queue that its caller drives.
//!
//! Nothing moves behind the caller's back. `submit` and `completed` run what stands at the head of
//! the queue, a bounded number of bytes at a time; a wait that is not reached stops them.

mod bell;
mod copy;

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

pub(super) use bell::{Bell, Crowd};
use bell::{Parker, Rings};

use super::error::Error;
use super::fabric::Options;
use super::memory::{Local, Remote};
use peerlane_hal::{Caps, CopyEngine, Op, StreamOrdered, Ticket};
use peerlane_hal::{Region, Role};
use peerlane_toolkit::{Ledger, pieces};

/// Bytes that one call of `completed` copies at most before it returns, so that it never blocks for
/// long; about a millisecond.
const COMPLETED_BYTES_MAX: usize = 8 << 20;
/// Bytes that `submit` copies at most: small messages go out at once, large ones when driven.
const SUBMIT_BYTES_MAX: usize = 64 << 10;
/// A larger copy does not stand between a signal and its ring; a smaller one takes less time than to
/// wake somebody.
const RING_DELAY_BYTES_MAX: usize = 16 << 10;
const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// An in-order queue, driven by its caller.
#[derive(Debug)]
pub struct Engine {
    options: Options,
    streaming_bytes_min: u64,
    queue: VecDeque<Queued>,
    ledger: Ledger,
    rings: Rings,
    parker: Parker,
    released: bool,
}

#[derive(Debug)]
struct Queued {
    ticket: Ticket,
    work: Work,
}

/// An op with its places resolved; `submit`'s contract keeps them alive.
#[derive(Debug)]
enum Work {
    Copy { dst: *mut u8, src: *const u8, bytes: usize, streaming: bool },
    Store { flag: *const AtomicU64, value: u64, bell: *const Bell },
    Hold { flag: *const AtomicU64, value: u64, reset: bool },
}

// SAFETY: the pointers name memory that `submit`'s contract makes reachable until the op is
// complete, from whatever thread drives the engine.
unsafe impl Send for Work {}

impl Engine {
    pub(super) fn new(options: Options, bell: Arc<Bell>, crowd: Crowd) -> Self {
        Self {
            streaming_bytes_min: options.streaming_bytes_min.unwrap_or(copy::STREAMING_BYTES_MIN),
            queue: VecDeque::with_capacity(options.queue_ops),
            ledger: Ledger::with_capacity(options.queue_ops),
            rings: Rings::with_capacity(options.queue_ops),
            parker: Parker::new(bell, options.spin, crowd),
            released: false,
            options,
        }
    }

    /// Checks an op against limits and regions and resolves its places.
    fn resolve(&self, op: &Op<'_, Local, Remote>) -> Result<Work, Error> {
        match *op {
            Op::Put { dst, src, bytes } => {
                self.check_alignment("put", [dst.offset, src.offset, bytes])?;
                let to = within("put destination", dst.offset, bytes, dst.region.bytes())?;
                let from = within("put source", src.offset, bytes, src.region.bytes())?;
                Ok(self.copy((dst.region.base(), to), (src.region.base(), from), bytes))
            }
            Op::Get { dst, src, bytes } => {
                self.check_alignment("get", [dst.offset, src.offset, bytes])?;
                let to = within("get destination", dst.offset, bytes, dst.region.bytes())?;
                let from = within("get source", src.offset, bytes, src.region.bytes())?;
                Ok(self.copy((dst.region.base(), to), (src.region.base(), from), bytes))
            }
            Op::Signal { flag, value } => {
                let region = flag.region;
                check_role("signalled flag", region.role())?;
                let at = word_within("signalled flag", flag.word, region.bytes())?;
                let word = region.base().as_ptr().wrapping_add(at).cast();
                Ok(Work::Store { flag: word, value, bell: Arc::as_ptr(region.bell()) })
            }
            Op::Wait { .. } if !self.options.caps.queued_wait => Err(Error::Argument(
                "a wait was submitted to an engine without queued_wait; poll the flag instead"
                    .to_owned(),
            )),
            Op::Wait { flag, value, reset } => {
                check_role("awaited flag", flag.region.role())?;
                let at = word_within("awaited flag", flag.word, flag.region.bytes())?;
                let word = flag.region.base().as_ptr().wrapping_add(at).cast();
                Ok(Work::Hold { flag: word, value, reset })
            }
        }
    }

    /// A copy whose spans were checked.
    fn copy(&self, dst: (NonNull<u8>, usize), src: (NonNull<u8>, usize), bytes: u64) -> Work {
        Work::Copy {
            dst: dst.0.as_ptr().wrapping_add(dst.1),
            src: src.0.as_ptr().wrapping_add(src.1),
            bytes: usize::try_from(bytes).expect("a span lies inside a mapped region"),
            streaming: bytes >= self.streaming_bytes_min,
        }
    }

    fn check_alignment(&self, what: &str, numbers: [u64; 3]) -> Result<(), Error> {
        let align = self.options.caps.put_align_bytes;
        match numbers.into_iter().find(|number| !number.is_multiple_of(align)) {
            None => Ok(()),
            Some(odd) => Err(Error::Argument(format!(
                "a {what} has an offset or length of {odd}, wanted a multiple of {align} bytes"
            ))),
        }
    }

    /// Runs the head of the queue until a wait is not reached or `bytes_max` are copied.
    fn run(&mut self, mut bytes_max: usize) {
        let mut moved = false;
        while let Some(head) = self.queue.front_mut() {
            let piece_bytes_max = self.options.caps.piece_bytes_max;
            let (done, copied) = head.work.advance(bytes_max, piece_bytes_max, &mut self.rings);
            bytes_max -= copied;
            moved |= done || copied > 0;
            if !done {
                break;
            }
            self.ledger.finish_part(head.ticket);
            self.queue.pop_front();
        }
        self.rings.flush();
        if moved {
            self.parker.busy();
        }
    }
}

impl Work {
    /// Does as much as it may; whether it is done, and the bytes copied.
    fn advance(
        &mut self,
        bytes_max: usize,
        piece_bytes_max: u64,
        rings: &mut Rings,
    ) -> (bool, usize) {
        match self {
            Self::Copy { dst, src, bytes, streaming } => {
                let now = (*bytes).min(bytes_max);
                if now > RING_DELAY_BYTES_MAX {
                    rings.flush();
                }
                for piece in pieces(now as u64, piece_bytes_max) {
                    // Both fit: the pieces tile `now`, which is a `usize`.
                    let (at, length) = (piece.offset as usize, piece.bytes as usize);
                    let (dst, src) = (dst.wrapping_add(at), src.wrapping_add(at));
                    // SAFETY: `resolve` bounded the span; `submit`'s contract says that both
                    // regions live and nobody races.
                    unsafe { copy_piece(dst, src, length, *streaming) };
                }
                *dst = dst.wrapping_add(now);
                *src = src.wrapping_add(now);
                *bytes -= now;
                (*bytes == 0, now)
            }
            Self::Store { flag, value, bell } => {
                // SAFETY: `resolve` bounded it, words of a region are aligned, and `submit`'s
                // contract keeps the region alive.
                unsafe { &**flag }.store(*value, Ordering::Release);
                rings.push(*bell);
                (true, 0)
            }
            Self::Hold { flag, value, reset } => {
                // SAFETY: as for `Store`.
                let flag = unsafe { &**flag };
                let reached = flag.load(Ordering::Acquire) >= *value;
                if reached && *reset {
                    // Release: whoever sees the zero may signal again.
                    flag.store(0, Ordering::Release);
                }
                (reached, 0)
            }
        }
    }
}

/// # Safety
/// As [`copy::stream`].
unsafe fn copy_piece(dst: *mut u8, src: *const u8, bytes: usize, streaming: bool) {
    if streaming {
        // SAFETY: the caller's.
        unsafe { copy::stream(dst, src, bytes) }
    } else {
        // SAFETY: the caller's.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) }
    }
}

/// The offset as an index, if `bytes` from it lie inside a region of `region_bytes`.
fn within(what: &str, offset: u64, bytes: u64, region_bytes: u64) -> Result<usize, Error> {
    match offset.checked_add(bytes) {
        Some(end) if end <= region_bytes => {
            Ok(usize::try_from(offset).expect("a region fits the address space"))
        }
        _ => Err(Error::Argument(format!(
            "{what} spans {bytes} bytes from offset {offset}, the region has {region_bytes}"
        ))),
    }
}

/// Only regions of flags are known to be aligned.
fn check_role(what: &str, role: Role) -> Result<(), Error> {
    match role {
        Role::Flags => Ok(()),
        Role::Data => Err(Error::Argument(format!(
            "the {what} lies in a region registered as Data, wanted Flags"
        ))),
    }
}

fn word_within(what: &str, word: u64, region_bytes: u64) -> Result<usize, Error> {
    // Saturated, the end overflows and is refused.
    within(what, word.saturating_mul(WORD_BYTES), WORD_BYTES, region_bytes)
}

impl CopyEngine for Engine {
    type Error = Error;
    type Local = Local;
    type Remote = Remote;

    fn caps(&self) -> &Caps {
        &self.options.caps
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, Local, Remote>]) -> Result<Ticket, Error> {
        if self.released {
            return Err(Error::Released);
        }
        let slice_ops_max = self.options.caps.slice_ops_max;
        if ops.len() > slice_ops_max {
            return Err(Error::Argument(format!(
                "a slice has {} ops, wanted at most slice_ops_max = {slice_ops_max}",
                ops.len()
            )));
        }
        let (queued, room) = (self.queue.len(), self.options.queue_ops);
        // Slices without ops take tickets, which have no more room than ops.
        if queued + ops.len() > room || self.ledger.open() >= room {
            return Err(Error::QueueFull { queued, room, wanted: ops.len() });
        }
        let parts = u32::try_from(ops.len()).expect("a queue holds fewer than 2^32 ops");
        let ticket = Ticket(self.ledger.last().0 + 1);
        for op in ops {
            match self.resolve(op) {
                Ok(work) => self.queue.push_back(Queued { ticket, work }),
                Err(error) => {
                    self.queue.truncate(queued);
                    return Err(error);
                }
            }
        }
        let issued = self.ledger.issue(parts);
        debug_assert_eq!(issued, ticket);
        self.parker.busy();
        self.run(SUBMIT_BYTES_MAX);
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        self.run(COMPLETED_BYTES_MAX);
        Ok(self.ledger.completed())
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        if !self.is_busy() {
            self.parker.park(limit);
        }
        Ok(())
    }

    fn is_busy(&self) -> bool {
        matches!(self.queue.front(), Some(Queued { work: Work::Copy { .. }, .. }))
    }

    fn waker(&self) -> Waker {
        self.parker.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        self.released = true;
        self.queue.clear();
        self.ledger.finish_all();
        Ok(())
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>> {
        None
    }
}
