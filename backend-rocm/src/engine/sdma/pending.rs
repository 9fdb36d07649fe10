//! Tracks the ops of each peer that are not complete, and the completion signals of copies in flight.
//!
//! Ops of one peer are kept in the order of submission. Copies to and from a peer may run concurrently
//! unless they conflict; then the later one depends on the earlier. A flag in device memory is a copy that
//! depends on all ops before it. A flag that the host maps is stored by the host when all ops before it are
//! complete.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::Ticket;

use super::runtime::{CopyCommand, Direction, Span};
use super::set::SdmaId;

pub(super) const FLAG_BYTES: u64 = size_of::<u64>() as u64;

#[derive(Clone, Copy, Debug)]
pub(crate) enum FlagAddress {
    Host(NonNull<AtomicU64>),
    Device(u64),
}

// SAFETY: the pointer names a flag that the contract of `submit` keeps alive until the op is complete,
// for any thread that drives the engine.
unsafe impl Send for FlagAddress {}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Command {
    Copy { direction: Direction, span: Span },
    Signal { flag: FlagAddress, value: u64 },
}

/// A copy of 0 bytes, which replaces a flag signal that is dropped after an abort.
const NO_OP: Command =
    Command::Copy { direction: Direction::Put, span: Span { dst: 0, src: 0, bytes: 0 } };

#[derive(Debug)]
pub(super) struct PendingOp {
    ticket: Ticket,
    pub(super) order: u64,
    pub(super) command: Command,
    /// The length of the copy's pieces in bytes, or 0 until the first piece is submitted.
    pub(super) piece_bytes: u64,
    pub(super) submitted: u64,
    pub(super) held: [u8; SdmaId::COUNT],
    in_flight: u32,
}

impl PendingOp {
    fn bytes(&self) -> u64 {
        match self.command {
            Command::Copy { span, .. } => span.bytes,
            Command::Signal { flag: FlagAddress::Device(_), .. } => FLAG_BYTES,
            Command::Signal { flag: FlagAddress::Host(_), .. } => 0,
        }
    }

    pub(super) fn remaining(&self) -> u64 {
        self.bytes() - self.submitted
    }

    fn is_host_signal(&self) -> bool {
        matches!(self.command, Command::Signal { flag: FlagAddress::Host(_), .. })
    }

    fn is_complete(&self) -> bool {
        self.remaining() == 0 && self.in_flight == 0
    }
}

#[derive(Debug, Default)]
pub(super) struct PeerQueue {
    ops: VecDeque<PendingOp>,
    first_number: u64,
    submitted: usize,
    host_signals: usize,
    pub(super) in_flight: Vec<usize>,
}

impl PeerQueue {
    pub(super) fn push(&mut self, ticket: Ticket, order: u64, command: Command) {
        let held = [0; SdmaId::COUNT];
        let (piece_bytes, submitted, in_flight) = (0, 0, 0);
        self.ops.push_back(PendingOp {
            ticket,
            order,
            command,
            piece_bytes,
            submitted,
            held,
            in_flight,
        });
    }

    pub(super) fn len(&self) -> usize {
        self.ops.len()
    }

    pub(super) fn first_order(&self) -> Option<u64> {
        self.ops.front().map(|op| op.order)
    }

    pub(super) fn next(&mut self) -> Option<(u64, &mut PendingOp)> {
        while let Some(op) = self.ops.get(self.submitted) {
            if op.remaining() > 0 {
                break;
            }
            self.host_signals += usize::from(op.is_host_signal());
            self.submitted += 1;
        }
        let number = self.first_number + self.submitted as u64;
        Some((number, self.ops.get_mut(self.submitted)?))
    }

    pub(super) fn has_host_signals(&self) -> bool {
        self.host_signals > 0
    }

    pub(super) fn piece_submitted(
        &mut self,
        number: u64,
        engine: usize,
        bytes: u64,
        signal: usize,
    ) {
        let op = self.op(number);
        op.submitted += bytes;
        op.held[engine] += 1;
        op.in_flight += 1;
        self.in_flight.push(signal);
    }

    pub(super) fn piece_completed(&mut self, number: u64, engine: usize) {
        let op = self.op(number);
        op.held[engine] -= 1;
        op.in_flight -= 1;
    }

    fn op(&mut self, number: u64) -> &mut PendingOp {
        let index = number.checked_sub(self.first_number);
        let index = index.and_then(|index| usize::try_from(index).ok());
        let op = index.and_then(|index| self.ops.get_mut(index));
        op.expect("an op stays in the queue until its pieces are complete")
    }

    pub(super) fn retire(
        &mut self,
        order_limit: u64,
        mut on_complete: impl FnMut(Ticket),
    ) -> usize {
        let mut retired = 0;
        while let Some(op) = self.ops.front().filter(|op| op.is_complete()) {
            if let Command::Signal { flag: FlagAddress::Host(flag), value } = op.command {
                if op.order >= order_limit {
                    break;
                }
                // SAFETY: the contract of `submit` keeps the region alive until the ticket completes. Flags
                // of a region are aligned and are only accessed atomically.
                unsafe { flag.as_ref() }.store(value, Ordering::Release);
            }
            // `next` may not have counted this op yet.
            if self.submitted > 0 {
                self.submitted -= 1;
                self.host_signals -= usize::from(op.is_host_signal());
            }
            on_complete(op.ticket);
            self.ops.pop_front();
            self.first_number += 1;
            retired += 1;
        }
        retired
    }

    pub(super) fn drop_unsubmitted(&mut self) {
        while self.ops.back().is_some_and(|op| op.in_flight == 0) {
            self.ops.pop_back();
        }
        // No flag is stored any more, and copies are not continued.
        for op in &mut self.ops {
            op.submitted = op.bytes();
            if op.is_host_signal() {
                op.command = NO_OP;
            }
        }
        self.submitted = self.ops.len();
        self.host_signals = 0;
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub(super) copy: CopyCommand,
    pub(super) op: u64,
    pub(super) load: usize,
}

#[derive(Debug, Default)]
struct Signal {
    copy: Option<InFlight>,
    dependencies: Vec<usize>,
    dependents: usize,
}

/// The completion signals of one engine, each of which serves one copy at a time.
///
/// Each copy has its own signal, which it takes from 1 to 0. Two copies must not share one: on a GPU without
/// atomic operations over PCI Express, the runtime reads the signal when it accepts the copy and lets the
/// engine store that value minus 1, so the signal would never become 0. A copy reads the signals that it
/// depends on when its engine gets to it. A signal is therefore not armed again before every copy that
/// depends on it has run.
#[derive(Debug)]
pub(super) struct Signals {
    signals: Vec<Signal>,
    free: Vec<usize>,
}

impl Signals {
    pub(super) fn new(count: usize) -> Self {
        let signals = (0..count).map(|_| Signal::default()).collect();
        Self { signals, free: (0..count).rev().collect() }
    }

    pub(super) fn next_free(&self) -> Option<usize> {
        self.free.last().copied()
    }

    pub(super) fn start(&mut self, signal: usize, copy: InFlight, dependencies: &[usize]) {
        debug_assert_eq!(self.free.last(), Some(&signal));
        self.free.pop();
        for dependency in dependencies {
            self.signals[*dependency].dependents += 1;
        }
        self.signals[signal].copy = Some(copy);
        self.signals[signal].dependencies.extend_from_slice(dependencies);
    }

    pub(super) fn copy(&self, signal: usize) -> &InFlight {
        self.signals[signal].copy.as_ref().expect("a signal in flight has a copy")
    }

    pub(super) fn finish(&mut self, signal: usize) -> InFlight {
        while let Some(dependency) = self.signals[signal].dependencies.pop() {
            self.signals[dependency].dependents -= 1;
            self.free_if_unused(dependency);
        }
        let copy = self.signals[signal].copy.take().expect("a signal in flight has a copy");
        self.free_if_unused(signal);
        copy
    }

    fn free_if_unused(&mut self, index: usize) {
        let signal = &self.signals[index];
        if signal.copy.is_none() && signal.dependents == 0 {
            self.free.push(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy() -> InFlight {
        let span = Span { dst: 0, src: 8, bytes: 8 };
        let copy = CopyCommand { peer: 0, direction: Direction::Put, engine: None, span };
        InFlight { copy, op: 0, load: 0 }
    }

    #[test]
    fn a_signal_is_not_used_again_while_a_copy_depends_on_it() {
        let mut signals = Signals::new(3);
        let first = signals.next_free().unwrap();
        signals.start(first, copy(), &[]);
        let second = signals.next_free().unwrap();
        signals.start(second, copy(), &[first]);
        signals.finish(first);
        let third = signals.next_free().unwrap();
        assert_ne!(third, first, "the second copy may not have read it yet");
        signals.start(third, copy(), &[]);
        assert_eq!(signals.next_free(), None);
        signals.finish(second);
        assert_eq!(signals.free.len(), 2);
        signals.finish(third);
        assert_eq!(signals.free.len(), 3);
    }
}
