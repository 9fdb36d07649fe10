//! Runs the ops of an engine on the memory of its own rank, by the processor.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::Ticket;

/// The maximum number of bytes that one call copies, so that the call does not block for long.
const CALL_BYTES_MAX: usize = 4 << 20;

/// An op on memory of this process, which the contract of `submit` keeps allocated.
#[derive(Clone, Copy, Debug)]
pub enum LoopbackOp {
    /// Copies bytes between two addresses.
    Copy {
        /// The address of the destination.
        dst: *mut u8,
        /// The address of the source.
        src: *const u8,
        /// The number of bytes to copy.
        bytes: usize,
    },
    /// Stores a flag when everything before it is complete.
    Store {
        /// The address of the flag.
        flag: *const AtomicU64,
        /// The value to store.
        value: u64,
    },
}

// SAFETY: the pointers name memory that `push`'s caller makes accessible until the op is complete,
// from any thread that drives the engine.
unsafe impl Send for LoopbackOp {}

/// The ops of an engine on the memory of its own rank, which the processor runs in their order.
///
/// NICs do not need to copy from a rank to itself, and a flag of this rank waits for the completion
/// of the ops to all peers.
#[derive(Debug, Default)]
pub struct Loopback(VecDeque<Queued>);

#[derive(Clone, Copy, Debug)]
struct Queued {
    ticket: Ticket,
    order: u64,
    op: LoopbackOp,
}

impl Loopback {
    /// Adds an op with its ticket, and with its number among all ops of the engine.
    ///
    /// # Safety
    /// The memory of the op stays accessible, as `submit` demands, until the op is complete or
    /// [cleared](Self::clear). A flag is aligned.
    pub unsafe fn push(&mut self, ticket: Ticket, order: u64, op: LoopbackOp) {
        self.0.push_back(Queued { ticket, order, op });
    }

    /// Returns the number of ops that are not complete.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether all ops are complete.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Drops all ops that are not complete.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns whether the next call of [`run`](Self::run) copies.
    pub fn is_copying(&self) -> bool {
        matches!(self.0.front(), Some(Queued { op: LoopbackOp::Copy { .. }, .. }))
    }

    /// Runs ops, and calls `finish` with the ticket of each that is complete. Returns whether it
    /// has stored a flag, so that sleeping threads must be woken.
    ///
    /// A flag is stored only if `is_complete` returns true for its number, because all earlier ops
    /// of the engine are complete.
    pub fn run(
        &mut self,
        is_complete: impl Fn(u64) -> bool,
        mut finish: impl FnMut(Ticket),
    ) -> bool {
        let (mut budget, mut stored) = (CALL_BYTES_MAX, false);

        while let Some(head) = self.0.front_mut() {
            match &mut head.op {
                LoopbackOp::Copy { dst, src, bytes } => {
                    let now = (*bytes).min(budget);
                    // SAFETY: the caller of `push` keeps the ranges accessible and free of races.
                    // Source and destination may be one region, and `copy` allows overlap.
                    unsafe { std::ptr::copy(*src, *dst, now) };
                    (*dst, *src) = (dst.wrapping_add(now), src.wrapping_add(now));
                    *bytes -= now;
                    budget -= now;

                    if *bytes > 0 {
                        return stored;
                    }
                }
                LoopbackOp::Store { flag, value } => {
                    if !is_complete(head.order) {
                        return stored;
                    }
                    // SAFETY: the caller of `push` keeps the flag, which is aligned.
                    unsafe { &**flag }.store(*value, Ordering::Release);
                    stored = true;
                }
            }

            finish(head.ticket);
            self.0.pop_front();
        }
        stored
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_waits_for_earlier_ops_and_holds_later_ones() {
        let (flag, source) = (AtomicU64::new(0), [7_u8; 4]);
        let mut target = [0_u8; 4];
        let mut loopback = Loopback::default();
        // SAFETY: the flag outlives its op.
        unsafe { loopback.push(Ticket(1), 1, LoopbackOp::Store { flag: &flag, value: 5 }) };
        let (dst, src) = (target.as_mut_ptr(), source.as_ptr());
        let copy = LoopbackOp::Copy { dst, src, bytes: source.len() };
        // SAFETY: both arrays outlive the op.
        unsafe { loopback.push(Ticket(2), 2, copy) };

        let mut finished = Vec::new();
        assert!(!loopback.run(|_| false, |ticket| finished.push(ticket)));
        assert_eq!((finished.len(), flag.load(Ordering::Relaxed)), (0, 0));
        assert!(loopback.run(|order| order <= 1, |ticket| finished.push(ticket)));
        assert_eq!(finished, [Ticket(1), Ticket(2)]);
        assert_eq!((flag.load(Ordering::Relaxed), target), (5, source));
    }
}
