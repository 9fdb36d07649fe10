//! One lane on its way through the starts of a prepared plan.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{ErrorKind, Ticket};

use crate::error::Error;
use crate::run::port::{Bound, Port};
use crate::run::program::Program;
use crate::run::turns::Start;
use crate::window::FlagSpot;

/// Starts whose tickets are remembered without allocating.
const OPEN_STARTS: usize = 64;

/// A lane: its program, its port, and how far it has come.
pub(crate) struct Lane {
    program: Program,
    port: Box<dyn Port>,
    takes_stream: bool,
    /// The start that is being submitted, and the next step of it.
    epoch: u64,
    next: usize,
    /// Starts that are submitted whole, each with its last ticket.
    open: VecDeque<(u64, Ticket)>,
    last: Ticket,
    done: u64,
}

impl Lane {
    /// `takes_stream` says that the lane begins and ends with the caller's stream, where there is
    /// one; every other lane does by flags.
    pub(crate) fn new(program: Program, port: Box<dyn Port>, takes_stream: bool) -> Self {
        let open = VecDeque::with_capacity(OPEN_STARTS);
        let (epoch, next, last, done) = (1, 0, Ticket::NONE, 0);
        Self { program, port, takes_stream, epoch, next, open, last, done }
    }

    pub(crate) fn queues_waits(&self) -> bool {
        self.port.caps().queued_wait
    }

    pub(crate) fn is_polled(&self) -> bool {
        self.port.caps().polled
    }

    /// Whether engines of another fabric signal to this lane, which do not wake its engine's park.
    pub(crate) fn hears_other_fabrics(&self) -> bool {
        let mut steps = self.program.steps.iter();
        steps.any(|step| matches!(step, Bound::Wait { flag } if flag.crossing))
    }

    pub(crate) fn takes_stream(&self) -> bool {
        self.takes_stream
    }

    pub(crate) fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, Error> {
        self.port.is_capturing(stream)
    }

    pub(crate) fn fork(&mut self, from: &dyn Any) -> Result<(), Error> {
        self.port.fork(from)
    }

    pub(crate) fn join(&mut self, into: &dyn Any) -> Result<(), Error> {
        self.port.join(into)
    }

    /// Whether all of the starts up to `started` has been handed to the engine.
    pub(crate) fn is_submitted(&self, started: u64) -> bool {
        self.epoch > started
    }

    /// The last start that this lane has completed.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    pub(crate) fn waker(&self) -> Waker {
        self.port.waker()
    }

    pub(crate) fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.port.park(limit)
    }

    /// Submits the entry of the next start, up to `started`, where that is next.
    ///
    /// # Safety
    /// As [`Port::submit`], for every step of the program.
    pub(crate) unsafe fn enter(&mut self, started: u64) -> Result<(), Error> {
        if self.epoch > started || self.next >= self.program.entry {
            return Ok(());
        }
        let entry = &self.program.steps[self.next..self.program.entry];
        let slice = &entry[..entry.len().min(self.port.caps().slice_ops_max)];
        // SAFETY: the caller's.
        match unsafe { self.port.submit(slice, Start::Eager(self.epoch)) } {
            Ok(ticket) => (self.next, self.last) = (self.next + slice.len(), ticket),
            Err(error) if error.kind() == ErrorKind::QueueFull => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Submits what can be submitted of the starts up to `started`, and looks what is complete;
    /// whether either came further.
    ///
    /// # Safety
    /// As [`Port::submit`], for every step of the program.
    pub(crate) unsafe fn drive(&mut self, started: u64) -> Result<bool, Error> {
        let before = (self.epoch, self.next, self.done);
        // SAFETY: the caller's.
        unsafe { self.submit(started) }?;
        self.look()?;
        Ok(before != (self.epoch, self.next, self.done))
    }

    /// Submits the entry of a start into the graph that is being captured. A captured start has
    /// neither epoch nor ticket.
    ///
    /// # Safety
    /// As [`Port::submit`], for every step of the program, as long as the graph lives.
    pub(crate) unsafe fn capture_entry(&mut self) -> Result<(), Error> {
        let entry = &self.program.steps[..self.program.entry];
        // SAFETY: the caller's.
        unsafe { capture(&mut *self.port, entry) }
    }

    /// Submits what follows the entry.
    ///
    /// # Safety
    /// As [`capture_entry`](Self::capture_entry).
    pub(crate) unsafe fn capture_rest(&mut self) -> Result<(), Error> {
        let rest = &self.program.steps[self.program.entry..];
        // SAFETY: the caller's.
        unsafe { capture(&mut *self.port, rest) }
    }

    fn look(&mut self) -> Result<(), Error> {
        let completed = self.port.completed()?;
        while let Some(&(epoch, ticket)) = self.open.front()
            && ticket <= completed
        {
            self.open.pop_front();
            self.done = epoch;
        }
        Ok(())
    }

    /// # Safety
    /// As [`Port::submit`].
    unsafe fn submit(&mut self, started: u64) -> Result<(), Error> {
        while self.epoch <= started {
            if self.next == self.program.steps.len() {
                if self.next == 0 {
                    // A lane without steps still gets a ticket a start.
                    // SAFETY: no op.
                    self.last = unsafe { self.port.submit(&[], Start::Eager(self.epoch)) }?;
                }
                self.open.push_back((self.epoch, self.last));
                (self.epoch, self.next) = (self.epoch + 1, 0);
                continue;
            }
            let rest = &self.program.steps[self.next..];
            if let (false, Bound::Wait { flag }) = (self.queues_waits(), rest[0]) {
                if !reached(&*self.port, flag, self.epoch)? {
                    return Ok(());
                }
                self.next += 1;
                continue;
            }
            let slice = &rest[..self.slice(rest)];
            // SAFETY: the caller's.
            match unsafe { self.port.submit(slice, Start::Eager(self.epoch)) } {
                Ok(ticket) => (self.next, self.last) = (self.next + slice.len(), ticket),
                Err(error) if error.kind() == ErrorKind::QueueFull => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// How many steps of `rest` go into the next slice: up to the limit, and where waits cannot be
    /// queued, up to the next wait.
    fn slice(&self, rest: &[Bound]) -> usize {
        let caps = self.port.caps();
        let most = rest.len().min(caps.slice_ops_max);
        if caps.queued_wait {
            return most;
        }
        let wait = rest[..most].iter().position(|step| matches!(step, Bound::Wait { .. }));
        wait.unwrap_or(most)
    }

    /// Lets blocked waits pass and forgets what was not submitted; whether the engine is drained.
    pub(crate) fn release(&mut self) -> Result<bool, Error> {
        self.port.release()?;
        Ok(self.port.completed()? >= self.last)
    }
}

/// # Safety
/// As [`Port::submit`], as long as the graph lives.
unsafe fn capture(port: &mut dyn Port, steps: &[Bound]) -> Result<(), Error> {
    for slice in steps.chunks(port.caps().slice_ops_max) {
        // SAFETY: the caller's.
        unsafe { port.submit(slice, Start::Captured) }?;
    }
    Ok(())
}

fn reached(port: &dyn Port, flag: FlagSpot, epoch: u64) -> Result<bool, Error> {
    let flag = port.flag(flag, Start::Eager(epoch)).ok_or_else(|| {
        let text = "an engine without queued waits needs flags that the host can read";
        Error::new(ErrorKind::Mismatch, text)
    })?;
    // Acquire: what the writer published is readable by what is submitted next.
    Ok(flag.load(Ordering::Acquire) >= epoch)
}
