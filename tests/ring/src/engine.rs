//! Runs puts and signals on a ring of the device.
//!
//! An op becomes one descriptor, or several if it is a long put. A put can need more descriptors than the ring has slots, so ops wait
//! in a backlog on the host, and each call moves what fits into the ring. Therefore the engine is `polled`: the rest of a long put
//! moves only while the caller calls.
//!
//! The device counts descriptors and the caller counts slices. `in_flight` connects the two: it has an entry for each descriptor in
//! the ring, with the ticket whose op is complete when the descriptor is.

use std::collections::VecDeque;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{Caps, CopyEngine, Op, Reducer, StreamOrdered, Ticket};
use peerlane_toolkit::{EngineState, Fault, TicketCounter, TimedParker};

use crate::Error;
use crate::memory::{Local, Remote};
use crate::model::{Address, COPY_BYTES_MAX, Descriptor, Device, Ring, SLOTS};

pub(crate) const CAPS: Caps =
    Caps { polled: true, slice_ops_max: 64, piece_bytes_max: COPY_BYTES_MAX, ..Caps::new("ring") };
const BACKLOG_OPS: usize = 256;

/// An in-order queue of puts and signals.
#[derive(Debug)]
pub struct Engine {
    device: Device,
    state: EngineState<Error>,
    tickets: TicketCounter,
    /// Ops that are not in the ring, as descriptors of any length. Of the first one, pieces may be in the ring already.
    backlog: VecDeque<(Ticket, Descriptor)>,
    /// The ticket for the last descriptor of an op, and `None` for the others.
    in_flight: VecDeque<Option<Ticket>>,
    ring: Ring,
    /// The completion counter when it was read last, which is the index of the oldest entry of `in_flight`.
    completed: u32,
    parker: TimedParker,
}

/// Returns the descriptor of an op, or `None` if it has nothing to do: the device refuses copies of length 0.
fn descriptor(op: &Op<'_, Local, Remote>) -> Result<Option<Descriptor>, Fault> {
    match *op {
        Op::Put { bytes: 0, .. } => Ok(None),
        Op::Put { dst, src, bytes } => Ok(Some(Descriptor::Copy {
            dst: dst.region.address_at(dst.offset),
            src: src.region.address_at(src.offset),
            bytes,
        })),
        Op::Signal { flag, value } => {
            Ok(Some(Descriptor::Write { dst: flag.region.address_at(8 * flag.word), value }))
        }
        Op::Get { .. }
        | Op::PutRows { .. }
        | Op::GetRows { .. }
        | Op::Wait { .. }
        | Op::Reduce { .. } => Err(Fault::refused_op(op)),
        #[cfg(not(peerlane_workspace))]
        _ => Err(Fault::refused_op(op)),
    }
}

/// Cuts the next piece off an op. Returns it, and whether it was the last.
fn next_piece(op: &mut Descriptor) -> (Descriptor, bool) {
    let whole = *op;
    let Descriptor::Copy { dst, src, bytes } = op else { return (whole, true) };
    if *bytes <= COPY_BYTES_MAX {
        return (whole, true);
    }
    let piece = Descriptor::Copy { dst: *dst, src: *src, bytes: COPY_BYTES_MAX };
    let after = |at: Address| Address { address: at.address + COPY_BYTES_MAX, ..at };
    (*dst, *src, *bytes) = (after(*dst), after(*src), *bytes - COPY_BYTES_MAX);
    (piece, false)
}

impl Engine {
    pub(crate) fn new(device: Device) -> Result<Self, Error> {
        let what = format!("cannot create a ring on device {}", device.number());
        let ring = device.ring().map_err(Error::io(what))?;
        Ok(Self {
            device,
            state: EngineState::new(CAPS),
            tickets: TicketCounter::with_capacity(BACKLOG_OPS),
            backlog: VecDeque::with_capacity(BACKLOG_OPS),
            in_flight: VecDeque::with_capacity(SLOTS as usize),
            completed: ring.completed(),
            ring,
            parker: TimedParker::new(Duration::from_micros(20), Duration::from_micros(200)),
        })
    }

    /// Returns the hardware, so that a test can break it.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Completes what the device has done and feeds the ring.
    fn advance(&mut self) -> Result<(), Error> {
        self.state.check()?;
        if let Some(error) = self.ring.error() {
            let what = format!("device {} stopped its ring", self.device.number());
            return self.state.keep(Err(Error::io(what)(error)));
        }
        // The difference is right also after the counter has wrapped around, because the ring holds less than 2^32 descriptors.
        let counter = self.ring.completed();
        for _ in 0..counter.wrapping_sub(self.completed) {
            if let Some(Some(ticket)) = self.in_flight.pop_front() {
                self.tickets.finish_op(ticket);
            }
            self.parker.busy();
        }
        self.completed = counter;
        if self.state.is_released() && self.in_flight.is_empty() {
            self.tickets.finish_all();
        }
        self.feed();
        Ok(())
    }

    /// Moves pieces from the backlog to the ring until it is full, and rings the doorbell once.
    fn feed(&mut self) {
        let end = |this: &Self| this.completed.wrapping_add(this.in_flight.len() as u32);
        let before = self.in_flight.len();
        while self.in_flight.len() < SLOTS as usize
            && let Some((ticket, op)) = self.backlog.front_mut()
        {
            let (ticket, (piece, is_last)) = (*ticket, next_piece(op));
            self.ring.write(end(self), piece);
            self.in_flight.push_back(is_last.then_some(ticket));
            if is_last {
                self.backlog.pop_front();
            }
        }
        if self.in_flight.len() > before {
            self.ring.doorbell(end(self));
        }
    }
}

// SAFETY: ops are checked against their regions, and tickets complete after their descriptors. A drop stops the ring.
unsafe impl CopyEngine for Engine {
    type Error = Error;
    type Local = Local;
    type Remote = Remote;

    fn caps(&self) -> &Caps {
        self.state.caps()
    }

    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, Error> {
        Ok(None)
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, Local, Remote>]) -> Result<Ticket, Error> {
        self.advance()?;
        self.state.check_slice(ops)?;
        self.tickets.check_room(self.backlog.len(), ops.len())?;
        let descriptors = ops.iter().filter_map(|op| descriptor(op).transpose());
        let descriptors: Vec<_> = descriptors.collect::<Result<_, _>>()?;

        // From here on nothing fails, so the slice is taken as a whole.
        let ticket = self.tickets.issue(descriptors.len() as u32);
        self.backlog.extend(descriptors.into_iter().map(|descriptor| (ticket, descriptor)));
        self.feed();
        self.parker.busy();
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        self.advance()?;
        Ok(self.tickets.completed())
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.state.check()?;
        // Flags change without an interrupt, so the parker sleeps for short times only.
        self.parker.park(limit, || self.ring.completed() != self.completed);
        Ok(())
    }

    fn is_busy(&self) -> bool {
        self.ring.completed() != self.completed
    }

    fn waker(&self) -> Waker {
        self.parker.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        self.state.check()?;
        self.state.release();
        // The device still accesses what is in the ring, so its tickets are complete only when the ring is empty.
        self.backlog.clear();
        self.advance()
    }

    fn compute_bytes(&mut self, _ops: &[Op<'_, Local, Remote>], _captured: bool) -> u64 {
        0
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Error>> {
        None
    }
}
