//! Runs the ops of an engine for its own rank: copies by the processor, and flags that wait for all earlier
//! ops.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::Ticket;

/// Maximum number of bytes that one call copies, so that it does not block for long.
const CALL_BYTES_MAX: usize = 4 << 20;

/// An op on memory of this process; `submit`'s contract keeps the memory alive.
#[derive(Clone, Copy, Debug)]
pub(super) enum OwnWork {
    Copy { dst: *mut u8, src: *const u8, bytes: usize },
    Store { flag: *const AtomicU64, value: u64 },
}

// SAFETY: the pointers name memory that `submit`'s contract makes accessible until the op is complete, from
// any thread that drives the engine.
unsafe impl Send for OwnWork {}

#[derive(Clone, Copy, Debug)]
struct Queued {
    ticket: Ticket,
    /// The number of the op, in the order of submission to the engine.
    order: u64,
    work: OwnWork,
}

/// A queue of loopback ops, in the order of submission.
#[derive(Debug, Default)]
pub(super) struct Own(VecDeque<Queued>);

/// The effects of one [`run`](Loopback::run).
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) tickets: Vec<Ticket>,
    pub(super) stored: bool,
}

impl Own {
    pub(super) fn push(&mut self, ticket: Ticket, order: u64, work: OwnWork) {
        self.0.push_back(Queued { ticket, order, work });
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns whether the first op is a copy, so that a call progresses without waiting.
    pub(super) fn is_copying(&self) -> bool {
        matches!(self.0.front(), Some(Queued { work: OwnWork::Copy { .. }, .. }))
    }

    /// Runs ops in order; a flag is stored once `is_complete` returns true for its order.
    pub(super) fn run(&mut self, done: &mut Done, is_over: impl Fn(u64) -> bool) {
        let mut left = CALL_BYTES_MAX;
        while let Some(head) = self.0.front_mut() {
            match &mut head.work {
                OwnWork::Copy { dst, src, bytes } => {
                    let now = (*bytes).min(left);
                    // SAFETY: the op was checked against its regions, which `submit`'s contract keeps alive and free of
                    // races; source and destination may be one region, so `copy` allows overlap.
                    unsafe { std::ptr::copy(*src, *dst, now) };
                    (*dst, *src) = (dst.wrapping_add(now), src.wrapping_add(now));
                    *bytes -= now;
                    left -= now;
                    if *bytes > 0 {
                        return;
                    }
                }
                OwnWork::Store { flag, value } => {
                    if !is_over(head.order) {
                        return;
                    }
                    // SAFETY: as above; words of a region of flags are aligned.
                    unsafe { &**flag }.store(*value, Ordering::Release);
                    done.stored = true;
                }
            }
            done.tickets.push(head.ticket);
            self.0.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_waits_for_what_is_before_it_and_holds_what_is_behind() {
        let (flag, source) = (AtomicU64::new(0), [7_u8; 4]);
        let mut target = [0_u8; 4];
        let mut own = Own::default();
        own.push(Ticket(1), 1, OwnWork::Store { flag: &flag, value: 5 });
        let copy =
            OwnWork::Copy { dst: target.as_mut_ptr(), src: source.as_ptr(), bytes: source.len() };
        own.push(Ticket(2), 2, copy);
        let mut done = Done::default();
        own.run(&mut done, |_| false);
        assert_eq!((done.tickets.len(), flag.load(Ordering::Relaxed)), (0, 0));
        own.run(&mut done, |order| order <= 1);
        assert_eq!(done.tickets, [Ticket(1), Ticket(2)]);
        assert!(done.stored && flag.load(Ordering::Relaxed) == 5);
        assert_eq!(target, source);
    }
}
